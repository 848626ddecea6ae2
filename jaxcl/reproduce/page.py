"""Measured numbers beside published ones: a JSON file, and a page made of it."""

import datetime
import os
import pathlib
import platform
import subprocess
from collections.abc import Mapping, Sequence

import jax
from etils import epath

from jaxcl.data import storage
from jaxcl.reproduce import table, verdict
from jaxcl.run import results as results_lib

_HEAD = """# Reproductions

Numbers that others published, measured again with this library. `python -m
jaxcl.reproduce NAME` runs a row, prints both numbers and writes this page;
`python -m jaxcl.reproduce --list` names all rows. The page is made of
`docs/reproductions.json`, in which each row has the accuracy of every seed.

A row **agrees** where the two means differ by at most two standard errors of their
difference; of a source that tests itself, where our mean passes its test. It
**differs** where it does not. Other rows are not judged: one of the two numbers has no
spread, or the published one was taken from memory, since the table it stands in could
not be opened. Where a source prints a second number of the same runs, as a probe of
the encoder, it is measured and judged with the first. All numbers are percent; +- is
the sample standard deviation over seeds. What a config does otherwise than its source
stands at its head, under "Departures". Minutes are as the clock had them, whatever else
the machine did.
"""

_ELSEWHERE = (
    "Most methods on Split CIFAR-10 were run by their configs, on fewer images:",
    "[Results](results.md#split-cifar-10-online).",
)
_WORDS = {True: "agrees", False: "differs", None: "not judged"}


def add(
    path: epath.PathLike,
    row: table.Row,
    runs: Mapping[int, dict],
    costs: Sequence[Mapping],
    commit: str,
) -> dict:
    """Add the results of a row to the JSON file, in place of earlier ones.

    Args:
      path: of the file; made if missing.
      row: which was run.
      runs: seed -> results, see `run.results`.
      costs: "total" of the cost of each program that ran, see `run.cost`.
      commit: of the code.

    Returns:
      Row name -> what is stored of it.
    """
    path = epath.Path(path)
    found = storage.read_object(path) if path.exists() else {}
    parts = ("train_seconds", "compile_seconds", "evaluation_seconds")
    seconds = sum(cost[part] or 0.0 for cost in costs for part in parts)
    any_cost = next(iter(runs.values()))["cost"]

    def values(measure):
        return {
            str(seed): round(100 * measured(results, measure), 4)
            for seed, results in runs.items()
        }

    found[row.name] = {
        "values": values(row.measure),
        "minutes": round(seconds / 60, 1),
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "commit": commit,
        "hardware": f"{any_cost['num_devices']} x {any_cost['device']}, "
        f"{platform.machine()}, {os.cpu_count()} cores",
        "jax": jax.__version__,
    }
    if row.beside:
        own = {other.measure: values(other.measure) for other in row.beside}
        found[row.name]["beside"] = own
    results_lib.write(path, dict(sorted(found.items())))
    return found


def measured(results: dict, measure: str) -> float:
    """What a row measures of the results of a run, between 0 and 1.

    Args:
      results: of a run that has done its last task.
      measure: a matrix, of which the mean over tasks at the end counts; or a scalar of
        the last evaluation.

    Raises:
      ValueError: the run is not over, or has no such number.
    """
    if results["scalars"][-1] is None:
        raise ValueError(f"{measure}: the run has not done its last task")
    if measure in results["matrices"]:
        value = results_lib.summary(results)[measure]["average_accuracy"]
    else:
        value = results["scalars"][-1].get(measure)
    if value is None:
        raise ValueError(f"{measure}: the run has not measured it")
    return value


def commit(folder: pathlib.Path = pathlib.Path(__file__).parents[1]) -> str:
    """The commit of the code, with "+" where files differ from it; "" without git.

    Args:
      folder: of the code, in a repository; what lies outside it does not count.
    """

    def git(*words):
        done = subprocess.run(
            ["git", "-C", str(folder), *words], capture_output=True, text=True
        )
        return done.stdout.strip() if done.returncode == 0 else ""

    short = git("rev-parse", "--short", "HEAD")
    return short + ("+" if short and git("status", "--porcelain", ".") else "")


def comparison(row: table.Row, own: Mapping) -> str:
    """Each number beside the published one, the verdict and what differs, in lines.

    Args:
      row: which was run.
      own: what `add` stores of it.
    """
    lines = [f"{row.name}: {row.what}"]
    lines += _compared(own["values"], row.published, f"   ({row.source})")
    for other in row.beside:
        if values := own.get("beside", {}).get(other.measure):
            lines += [f"  and {other.what}:", *_compared(values, other.published)]
    if row.differs:
        lines.append(f"  differs    {row.differs}")
    return "\n".join(lines)


def _compared(values, published, source=""):
    """Three lines: ours, theirs, the verdict."""
    said = verdict.judge(list(values.values()), published)
    each = " ".join(f"{value:.2f}" for value in values.values())
    return [
        f"  ours       {_ours(said)}   ({len(values)} seeds: {each})",
        f"  published  {_theirs(published)}{source}",
        f"  verdict    {said.words}",
    ]


def _ours(said):
    spread = "" if said.deviation is None else f" +- {said.deviation:.2f}"
    return f"{said.mean:.2f}{spread}"


def _theirs(published):
    told = f"{published.value:.2f} {published.spread}".strip()
    return told if published.read else f"{told}, from memory"


def _all_of_theirs(row):
    """The published number, and those that stand beside it."""
    told = [f"{other.what}: {_theirs(other.published)}" for other in row.beside]
    return "; ".join([_theirs(row.published), *told])


def written(found: Mapping[str, Mapping]) -> str:
    """The page.

    Args:
      found: row name -> what `add` stores; a name that has no row is left out.
    """
    rows = [row for row in table.ROWS.values() if row.name in found]
    waiting = [row for row in table.ROWS.values() if row.name not in found]
    lines = [_HEAD, "## Measured", ""]
    lines += ["| row | ours | published | verdict |", "|---|---|---|---|"]
    for row in rows:
        values = list(found[row.name]["values"].values())
        said = verdict.judge(values, row.published)
        verdicts = [f"**{_WORDS[said.agrees]}**: {said.words}"]
        for other, values_beside in _beside(row, found[row.name]):
            also = verdict.judge(values_beside, other.published)
            verdicts.append(f"{other.what} **{_WORDS[also.agrees]}**: {also.words}")
        lines.append(
            f"| [{row.what}](#{row.name}) | {_ours(said)} ({len(values)}) "
            f"| {_theirs(row.published)} | {'; '.join(verdicts)} |"
        )
    lines += [
        "",
        "In brackets: how many seeds.",
        "",
        "## Not run by this command yet",
        "",
        *_ELSEWHERE,
        "",
    ]
    lines += ["| row | published | minutes a run, one core |", "|---|---|---|"]
    lines += [
        f"| `{row.name}`: {row.what} | {_all_of_theirs(row)} | {row.minutes:g} |"
        for row in waiting
    ]
    lines += ["", "## Each row", ""]
    for row in rows:
        lines += [_section(row, found[row.name]), ""]
    return "\n".join(lines).rstrip() + "\n"


def _beside(row, own):
    """The other numbers of a row that were measured, and their values."""
    for other in row.beside:
        if values := own.get("beside", {}).get(other.measure):
            yield other, list(values.values())


def _section(row, own):
    """What is known of a row that was run."""
    overrides = "".join(f" --config.{override}" for override in row.overrides)
    file, _, words = row.config.partition(":")
    config = f"configs/{file}.py" + (f":{words}" if words else "")
    each = ", ".join(f"{value:.2f}" for value in own["values"].values())
    lines = [
        f"### {row.name}",
        "",
        f"{row.what}. Source: {row.source}.",
        "",
        f"- Config: `{config}`{f', `{overrides.strip()}`' if overrides else ''}; "
        f"measured: `{row.measure}`.",
        f"- Seeds: {each}.",
        f"- {own['date']}, commit `{own['commit'] or 'unknown'}`, {own['hardware']}, "
        f"JAX {own['jax']}; {own['minutes']:g} minutes in all.",
    ]
    for other, values in _beside(row, own):
        said = verdict.judge(values, other.published)
        each = ", ".join(f"{value:.2f}" for value in values)
        lines.append(
            f"- And {other.what}, `{other.measure}`: {_ours(said)} ({len(values)}) "
            f"beside {_theirs(other.published)}: {said.words}. Seeds: {each}."
        )
    if row.differs:
        lines.append(f"- Differs: {row.differs}")
    if row.note:
        lines.append(f"- {row.note}")
    return "\n".join(lines)
