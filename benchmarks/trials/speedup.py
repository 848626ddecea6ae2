r"""Tell how much sooner runs converge than a baseline, as Table 4 of ICL.

  python benchmarks/trials/speedup.py --baseline=retrain \
      retrain=runs/retrain icl=runs/icl

A directory is a run, or holds the runs of several seeds, which are paired with the
baseline's. There are two measures. By patience a run converges at the epoch with its
best mean training loss. By a target it converges at the first epoch that comes as low
as the baseline at its best epoch, by a scalar that is the same for all runs. The first
compares losses that differ from method to method, and an encoder that learns nothing is
soon at its best.
"""

import argparse
import math
import sys
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from etils import epath

from jaxcl import storage
from jaxcl.errors import Refused
from jaxcl.report import numbers, run_groups
from jaxcl.run import log_file, result_file

# Title of a column -> key of `paired`.
COLUMNS = {
    "best epoch": "epoch",
    "seconds": "seconds",
    "T": "time_ratio",
    "E": "epoch_ratio",
    "target passes": "target_passes",
    "target seconds": "target_seconds",
    "target T": "target_time_ratio",
    "target P": "target_passes_ratio",
}


class Epoch(NamedTuple):
    """The end of an epoch."""

    number: int  # from 1
    seconds: float  # of training in this task
    passes: float  # of rows through the encoder in this task
    value: float  # the scalar, lower is better; infinite if it is not finite


class Run(NamedTuple):
    """One seed of one way to train."""

    folder: epath.Path
    best: dict  # the best epoch by patience, see `metrics_log.Epochs.end`
    cut: bool  # ended by config.epochs, before config.patience
    epochs: list[Epoch]

    def at_best(self) -> float:
        """Return the scalar at the best epoch; raise Refused if it is not finite."""
        values = {epoch.number: epoch.value for epoch in self.epochs}
        value = values.get(self.best["number"], math.inf)
        if not math.isfinite(value):
            raise Refused(f"{self.folder}: the best epoch has no finite scalar")
        return value

    def reach(self, goal: float) -> Epoch | None:
        """Return the first epoch that ends with the scalar at most `goal`, or None."""
        return next((epoch for epoch in self.epochs if epoch.value <= goal), None)


def read(workdir: str, *, task: int, scalar: str) -> dict[int, Run]:
    """Read the runs of a directory: seed -> its run.

    Args:
      workdir: a run directory, or that of several seeds.
      task: its number, from 0.
      scalar: as under "eval" in metrics.jsonl.

    Raises:
      Refused: it holds no run, or a run is not finished, did not count epochs, or
        did not measure the scalar after every epoch.
    """
    group, runs = run_groups.read_run(workdir), {}
    for seed, results in group.results.items():
        folder = group.folders[seed]
        if group.finished_tasks <= task:
            raise Refused(f"{folder}: not finished: it has no results of task {task}")
        path = folder / "config.json"
        path = path if path.exists() else epath.Path(workdir) / "config.json"
        patience = storage.read_object(path).get("patience", 0)
        found = results["convergence"].get(str(task))
        if not found or found["best"] is None:
            told = f"{folder}: no convergence of task {task}"
            raise Refused(f"{told}: config.patience was {patience}")
        late = found["last"]["number"] - found["best"]["number"]
        cut = patience == 0 or late < patience
        runs[seed] = Run(folder, found["best"], cut, read_epochs(folder, task, scalar))
    return runs


def read_epochs(folder, task: int, scalar: str) -> list[Epoch]:
    """Read the epochs of a task, each with the scalar of its last step."""
    rows = [row for row in log_file.read_rows(folder) if row["task"] == task]
    evals = {row["step"]: row["eval"] for row in rows if scalar in row.get("eval", ())}
    epochs = []
    for row in (row for row in rows if "epoch" in row):
        number = row["epoch"]["number"]
        value = evals.get(row["step"], {scalar: []})[scalar]
        if isinstance(value, list):  # of a matrix, or missing
            told = f"{folder}: no scalar {scalar} at epoch {number} of task {task}"
            raise Refused(f"{told}: config.eval_epochs must be 1")
        value = math.inf if value is None else value
        epochs.append(
            Epoch(number, row["time"]["train"], row["epoch"]["passes"], value)
        )
    return epochs


def find_target(baseline: Run, within: float, frozen: Run | None = None) -> float:
    """Return the scalar to reach: the baseline's best, plus a tolerance.

    The tolerance is a share of the scalar's size, or of what the baseline gained over a
    frozen run. The second is safer: a share of the loss may exceed the whole gain.
    """
    value = baseline.at_best()
    if frozen is None:
        return value + within * abs(value)
    return value + within * max(frozen.at_best() - value, 0.0)


def paired(run: Run, baseline: Run, goal: float) -> dict:
    """Compare one seed; a ratio is baseline / run, None if one of them is 0."""

    def ratio(theirs, mine):
        return theirs / mine if theirs > 0 and mine > 0 else None

    mine, theirs = run.reach(goal), baseline.reach(goal)
    found = {
        "cut_off": run.cut,
        "epoch": run.best["number"],
        "seconds": run.best["seconds"],
        "time_ratio": ratio(baseline.best["seconds"], run.best["seconds"]),
        "epoch_ratio": ratio(baseline.best["number"], run.best["number"]),
        "target": goal,
        "reached": mine is not None,
    }
    if mine is not None and theirs is not None:  # the baseline reaches it
        found |= {
            "target_passes": mine.passes,
            "target_seconds": mine.seconds,
            "target_passes_ratio": ratio(theirs.passes, mine.passes),
            "target_time_ratio": ratio(theirs.seconds, mine.seconds),
        }
    return found


def geometric_mean(ratios: Iterable[float | None]) -> numbers.Estimate:
    """Return the geometric mean of ratios with its 95 % interval; None is left out.

    exp(m +- t s / sqrt(n)) with m and s of the logarithms and Student's t with n - 1
    degrees of freedom. A single ratio has no interval.
    """
    logs = [None if ratio is None else math.log(ratio) for ratio in ratios]
    *found, count = numbers.estimate_mean(logs)
    ratios = (None if x is None else math.exp(x) for x in found)
    return numbers.Estimate(*ratios, count)


def summarize(pairs: list[dict]) -> dict:
    """Summarise `paired` over seeds: means, 95 % intervals, counts."""
    totals = {"seeds": len(pairs), "each": pairs}
    totals |= {x: sum(pair[x] for pair in pairs) for x in ("reached", "cut_off")}
    for key in COLUMNS.values():
        mean = geometric_mean if key.endswith("ratio") else numbers.estimate_mean
        totals[key] = mean([pair.get(key) for pair in pairs])._asdict()
    return totals


def table(summaries: dict[str, dict]) -> str:
    """Write the Markdown table.

    T and E are speed-ups in seconds and epochs up to the best epoch; those of the
    target in seconds and passes up to it. Brackets hold 95 % intervals over seeds.
    """

    def show(found):
        if found["mean"] is None:
            return "-"
        ends = [x if x is None else f"{x:.4g}" for x in (found["low"], found["high"])]
        return f"{found['mean']:.4g} [{'-' if None in ends else ', '.join(ends)}]"

    titles = ["run", "seeds", "cut off", "reached", *COLUMNS]
    lines = [f"| {' | '.join(titles)} |", "|" + "---|" * len(titles)]
    for name, totals in summaries.items():
        cells = [str(totals[key]) for key in ("seeds", "cut_off", "reached")]
        cells += [show(totals[key]) for key in COLUMNS.values()]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines)


def parser() -> argparse.ArgumentParser:
    """Make the command line."""
    made = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = made.add_argument
    add("runs", nargs="+", metavar="NAME=DIR", help="run directories")
    add("--baseline", required=True, help="a NAME")
    add("--task", type=int, default=1, help="its number, from 0")
    add("--scalar", default="objective/loss", help="lower is better")
    add("--within", type=float, default=0.01, help="of the baseline's, or of the gain")
    add("--frozen", help="a NAME; the gain is its scalar - baseline's")
    add("--json", help="a file for all numbers")
    return made


def main(argv: Sequence[str] | None = None) -> int:
    """Print the table; return 2 if an argument is wrong or a run lacks something."""
    try:
        compare(parser().parse_args(argv))
    except (Refused, OSError) as error:
        print(f"jaxcl: {error}", file=sys.stderr)
        return 2
    return 0


def compare(options) -> None:
    """Read the runs, compare them, and print and write the numbers."""
    runs: dict[str, dict[int, Run]] = {}
    for word in options.runs:
        name, _, workdir = word.partition("=")
        if not (name and workdir) or name in runs:
            raise Refused(f"{word}: must be NAME=DIR, each NAME once")
        runs[name] = read(workdir, task=options.task, scalar=options.scalar)
    references = {"baseline": options.baseline}
    references |= {"frozen": options.frozen} if options.frozen else {}
    for option, reference in references.items():
        for name, by_seed in runs.items():
            if missing := by_seed.keys() - runs.get(reference, {}).keys():
                told = f"must have all seeds of {name}, also {min(missing)}"
                raise Refused(f"--{option}", reference, told)
    goals = {
        seed: find_target(
            run, options.within, options.frozen and runs[options.frozen].get(seed)
        )
        for seed, run in runs[options.baseline].items()
    }
    summaries = {
        name: summarize(
            [
                {"seed": seed} | paired(run, runs[options.baseline][seed], goals[seed])
                for seed, run in by_seed.items()
            ]
        )
        for name, by_seed in runs.items()
    }
    print(table(summaries))
    if options.json:
        setting = {k: v for k, v in vars(options).items() if k not in ("runs", "json")}
        storage.write_json(
            options.json, result_file.jsonable(setting | {"runs": summaries})
        )


if __name__ == "__main__":
    sys.exit(main())
