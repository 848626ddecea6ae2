"""Tell how much sooner runs converge than a baseline, as Table 4 and Figure 4 of ICL.

  python benchmarks/speedup.py --baseline=retrain retrain=runs/retrain icl=runs/icl

A directory is a run, or holds the runs of several seeds. A name may be given several
times, for other growths or other seeds. Seeds are paired within a growth. There are two
measures. By patience a run converges at the epoch with its best mean training loss. By
a target it converges at the first epoch that comes as low as the baseline at its best
epoch, by a scalar that is the same for all runs. The first compares losses that differ
from method to method, and an encoder that learns nothing is soon at its best.
"""

import argparse
import itertools
import math
import sys
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np
from etils import epath

from jaxcl import plots, schema, storage
from jaxcl.data.stream import scenarios
from jaxcl.errors import Refused
from jaxcl.report import numbers as numbers_lib
from jaxcl.run import log_file, result_file, seeds

SCALARS = ("svm/all", "svm/old", "svm/new")
# Title of a column -> key of `paired`.
COLUMNS = {
    "best epoch": "epoch",
    "seconds": "seconds",
    "T": "time_ratio",
    "E": "epoch_ratio",
    "at best": "at_best",
    "target passes": "target_passes",
    "target seconds": "target_seconds",
    "target T": "target_time_ratio",
    "target P": "target_passes_ratio",
}
RATIOS = ("T", "E", "target T", "target P")


class Epoch(NamedTuple):
    """The end of an epoch."""

    number: int  # from 1
    seconds: float  # of training in this task
    passes: float  # of rows through the encoder in this task
    value: float  # the scalar, lower is better; infinite if it is not finite


class Run(NamedTuple):
    """One seed of one way to train, at one growth."""

    name: str
    growth: float | None  # None: the scenario has none
    seed: int
    folder: epath.Path
    best: dict  # the best epoch by patience, see `metrics_log.Epochs.end`
    cut: bool  # ended by config.epochs, before config.patience
    epochs: list[Epoch]
    scalars: dict[str, float | None]  # at the end of the task


def read(name: str, workdir: epath.PathLike, *, task: int, scalar: str) -> list[Run]:
    """Read the runs of a directory, one per seed.

    Args:
      name: of the runs in the table.
      workdir: a run directory, or that of several seeds.
      task: its number, from 0.
      scalar: as under "eval" in metrics.jsonl.

    Raises:
      Refused: it holds no run, or a run is not finished, did not count epochs, or
        did not measure the scalar after every epoch.
    """
    workdir, runs = epath.Path(workdir), []
    for number, folder in (seeds.folders(workdir) or {None: workdir}).items():
        where = f"{name}={folder}"
        path = folder / "config.json"
        path = path if path.exists() else workdir / "config.json"
        if not path.exists():
            raise Refused(f"{where}: must be a run directory: no config.json")
        config = storage.read_object(path)
        done = (folder / result_file.RESULTS).exists()
        results = (
            result_file.read_results(folder) if done else result_file.empty_results(0)
        )
        if result_file.count_finished(results) <= task:
            raise Refused(f"{where}: not finished: it has no results of task {task}")
        found = results.get("convergence", {}).get(str(task))
        patience = config.get("patience", 0)
        if not found or found["best"] is None:
            told = f"{where}: no convergence of task {task}"
            raise Refused(f"{told}: config.patience was {patience}")
        scenario = schema.defaults(scenarios.growth) | config.get("scenario", {})
        growth = scenario["growth"] if scenario.get("name") == "growth" else None
        late = found["last"]["number"] - found["best"]["number"]
        seed = config.get("seed", 0) if number is None else number
        rows = [row for row in log_file.read_rows(folder) if row["task"] == task]
        cut = patience == 0 or late < patience
        epochs, scalars = _epochs(where, rows, task, scalar), results["scalars"][task]
        found = found["best"], cut, epochs, scalars
        runs.append(Run(name, growth, seed, folder, *found))
    return runs


def _epochs(where, rows, task, scalar) -> list[Epoch]:
    """Read the epochs of a task, each with the scalar of its last step."""
    evals = {row["step"]: row["eval"] for row in rows if scalar in row.get("eval", ())}
    epochs = []
    for row in (row for row in rows if "epoch" in row):
        number = row["epoch"]["number"]
        value = evals.get(row["step"], {scalar: []})[scalar]
        if isinstance(value, list):  # of a matrix, or missing
            told = f"{where}: no scalar {scalar} at epoch {number} of task {task}"
            raise Refused(f"{told}: config.eval_epochs must be 1")
        value = math.inf if value is None else value
        epochs.append(
            Epoch(number, row["time"]["train"], row["epoch"]["passes"], value)
        )
    return epochs


def at_best(run: Run) -> float:
    """Return the scalar at the best epoch; infinite if it is not finite."""
    values = {epoch.number: epoch.value for epoch in run.epochs}
    return values.get(run.best["number"], math.inf)


def target(baseline: Run, within: float, frozen: Run | None = None) -> float:
    """Return the scalar to reach: the baseline's best, plus a tolerance.

    The tolerance is a share of the scalar's size, or of what the baseline gained over a
    frozen run. The second is safer: a share of the loss may exceed the whole gain.
    """
    value, still = at_best(baseline), at_best(frozen) if frozen else 0.0
    for run in (baseline, frozen):
        if run and not math.isfinite(at_best(run)):
            raise Refused(f"{run.folder}: the best epoch has no finite scalar")
    return value + within * (max(still - value, 0.0) if frozen else abs(value))


def reached(run: Run, goal: float) -> Epoch | None:
    """Return the first epoch that ends with the scalar at most `goal`, or None."""
    return next((epoch for epoch in run.epochs if epoch.value <= goal), None)


def _ratio(theirs, mine) -> float | None:
    return theirs / mine if theirs > 0 and mine > 0 else None


def paired(run: Run, baseline: Run, within: float, frozen: Run | None = None) -> dict:
    """Compare one seed; a ratio is baseline / run, None if one of them is 0."""
    goal = target(baseline, within, frozen)
    mine, theirs = reached(run, goal), reached(baseline, goal)
    numbers = {
        "seed": run.seed,
        "cut_off": run.cut,
        "epoch": run.best["number"],
        "seconds": run.best["seconds"],
        "at_best": at_best(run),
        "time_ratio": _ratio(baseline.best["seconds"], run.best["seconds"]),
        "epoch_ratio": _ratio(baseline.best["number"], run.best["number"]),
        "target": goal,
        "reached": mine is not None,
    }
    if mine is not None and theirs is not None:  # the baseline reaches it
        numbers |= {
            "target_passes": mine.passes,
            "target_seconds": mine.seconds,
            "target_passes_ratio": _ratio(theirs.passes, mine.passes),
            "target_time_ratio": _ratio(theirs.seconds, mine.seconds),
        }
    return result_file.jsonable(numbers)


def geometric(ratios: Iterable[float | None]) -> numbers_lib.Estimate:
    """Return the geometric mean of ratios with its 95 % interval; None is left out.

    exp(m +- t s / sqrt(n)) with m and s of the logarithms and Student's t with n - 1
    degrees of freedom. A single ratio has no interval.
    """
    logs = [None if ratio is None else math.log(ratio) for ratio in ratios]
    *found, count = numbers_lib.estimate_mean(logs)
    ratios = (None if x is None else math.exp(x) for x in found)
    return numbers_lib.Estimate(*ratios, count)


def summary(runs, pairs: list[dict], scalars: Sequence[str]) -> dict:
    """Summarise `paired` and scalars over seeds: means, 95 % intervals, counts."""
    totals = {
        "seeds": len(pairs),
        "reached": sum(pair["reached"] for pair in pairs),
        "cut_off": sum(pair["cut_off"] for pair in pairs),
        "each": pairs,
    }
    for key in COLUMNS.values():
        values = [pair.get(key) for pair in pairs]
        mean = geometric if key.endswith("ratio") else numbers_lib.estimate_mean
        totals[key] = mean(values)._asdict()
    for name in scalars:
        values = [run.scalars.get(name) for run in runs]
        totals[name] = numbers_lib.estimate_mean(values)._asdict()
    return totals


def compared(
    runs: list[Run], baseline: str, *, within=0.01, scalars=SCALARS, frozen=None
) -> list[dict]:
    """Compare every name with the baseline, one entry per growth.

    Args:
      runs: in the order of the table.
      baseline: one of their names.
      within: as in `target`.
      scalars: names of scalars at the end of the task.
      frozen: the name of runs whose weights stayed, see `target`.

    Returns:
      [{"growth": number or None, "runs": name -> `summary`}].

    Raises:
      Refused: a name is unknown; the baseline or `frozen` lacks a growth or a seed
        of another name; or two runs of a name have the same growth and seed.
    """
    groups: dict = {}
    for run in runs:
        mine = groups.setdefault(run.growth, {}).setdefault(run.name, {})
        if run.seed in mine:
            told = f"its growth and seed are those of {mine[run.seed].folder}"
            raise Refused(f"{run.name}={run.folder}: {told}")
        mine[run.seed] = run
    references = {"baseline": baseline, "frozen": frozen or baseline}
    for run, (option, name) in itertools.product(runs, references.items()):
        if run.seed not in groups[run.growth].get(name, {}):
            told = f"--{option}={name} has no seed {run.seed} at growth {run.growth}"
            raise Refused(f"{run.name}={run.folder}: {told}")
    entries = []
    for growth, group in sorted(groups.items(), key=lambda own: own[0] or 0.0):
        still, summaries = group.get(frozen, {}), {}
        for name, own in group.items():
            pairs = [
                paired(run, group[baseline][seed], within, still.get(seed))
                for seed, run in own.items()
            ]
            summaries[name] = summary(own.values(), pairs, scalars)
        entries.append({"growth": growth, "runs": summaries})
    return entries


def _cell(found) -> str:
    """Write a mean with its interval; "-" for nothing."""
    if found["mean"] is None:
        return "-"
    ends = "-" if found["low"] is None else f"{found['low']:.4g}, {found['high']:.4g}"
    return f"{found['mean']:.4g} [{ends}]"


def text(group: dict, scalars: Sequence[str] = SCALARS) -> str:
    """Return the markdown table of an entry of `compared`.

    T and E are speed-ups in seconds and epochs up to the best epoch; those of the
    target in seconds and passes up to it. Brackets hold 95 % intervals over seeds.
    """
    titles = ["run", "seeds", "cut off", "reached", *COLUMNS, *scalars]
    lines = [f"| {' | '.join(titles)} |", "|" + "---|" * len(titles)]
    for name, run in group["runs"].items():
        cells = [str(run[key]) for key in ("seeds", "cut_off", "reached")]
        cells += [_cell(run[key]) for key in (*COLUMNS.values(), *scalars)]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines)


def draw(groups: list[dict], path, *, baseline: str) -> None:
    """Draw speed-ups with 95 % intervals against the growth, as Figure 4 of ICL.

    Args:
      groups: from `compared`, with growths.
      path: of the picture.
      baseline: as given to `compared`.
    """
    figure = plots.make_figure(4.5 * len(RATIOS), 4.2)
    panels = figure.subplots(1, len(RATIOS))
    growths = [group["growth"] for group in groups]
    names = dict.fromkeys(n for group in groups for n in group["runs"] if n != baseline)
    # Lines are shifted: the interval of one run would hide that of another.
    gaps = [b - a for a, b in itertools.pairwise(growths)]
    gap = min(gaps, default=0.1) / 2 / max(len(names), 1)
    for title, axes in zip(RATIOS, panels, strict=True):
        axes.axhline(
            1, color="0.5", linestyle=":", label=plots.escape_dollars(baseline)
        )
        shown = [1.0]
        styles = plots.number_styles([*names])
        for number, name in enumerate(names):
            own = [group for group in groups if name in group["runs"]]
            ratios = [[*group["runs"][name][COLUMNS[title]].values()] for group in own]
            mean, low, high, _ = np.array(ratios, float).T
            x = [group["growth"] for group in own]
            x = np.add(x, gap * (number - (len(names) - 1) / 2))
            ends = np.nan_to_num([mean - low, high - mean])
            style = plots.choose_style(styles[name])
            style |= {"label": plots.escape_dollars(name)}
            axes.errorbar(x, mean, ends, capsize=3, **style)
            shown += mean[np.isfinite(mean)].tolist()
        _make_logarithmic(axes)
        # Wide intervals of two seeds are cut off, or all ratios would look alike.
        low, high = axes.get_ylim()
        axes.set_ylim(max(low, min(shown) / 4), min(high, max(shown) * 4))
        axes.set_xticks(growths, [f"{growth:g}" for growth in growths])
        axes.set(xlabel="growth", ylabel="speed-up", title=title)
    plots.show_legend(panels[-1], title="95 % intervals")
    plots.save_figure(figure, path)


def _make_logarithmic(axes) -> None:
    """Make the y axis logarithmic, with a few ticks at each power of 10."""
    from matplotlib import ticker

    axes.set(yscale="log")
    axes.yaxis.set_major_locator(ticker.LogLocator(subs=(1, 1.5, 2, 3, 5)))
    axes.yaxis.set_major_formatter(ticker.FormatStrFormatter("%g"))
    axes.yaxis.set_minor_locator(ticker.NullLocator())


def parser() -> argparse.ArgumentParser:
    """Return the options of the command."""
    arguments = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    add = arguments.add_argument
    add("runs", nargs="+", metavar="NAME=DIR", help="run directories")
    add("--baseline", required=True, help="a NAME")
    add("--task", type=int, default=1, help="its number, from 0")
    add("--scalar", default="objective/loss", help="lower is better")
    add("--within", type=float, default=0.01, help="of the baseline's, or of the gain")
    add("--frozen", help="a NAME; the gain is its scalar - baseline's")
    add("--scalars", default=",".join(SCALARS), help="at the end of the task")
    add("--plot", help="a .png, .svg or .pdf, by growth")
    add("--json", help="a file for all numbers")
    return arguments


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; exit code 2 if an argument is wrong or a run lacks something."""
    try:
        _compare(parser().parse_args(argv))
    except (Refused, OSError) as error:
        print(f"jaxcl: {error}", file=sys.stderr)
        return 2
    return 0


def _compare(options) -> None:
    """Read the runs, compare them, and print, write and draw the numbers."""
    if options.plot:
        plots.read_format(options.plot)
    runs = []
    for argument in options.runs:
        name, _, workdir = argument.partition("=")
        if not (name and workdir):
            raise Refused(f"{argument}: must be NAME=DIR")
        runs += read(name, workdir, task=options.task, scalar=options.scalar)
    if options.plot and any(run.growth is None for run in runs):
        raise Refused(f"--plot={options.plot}: must be of runs with a growth")
    setting = {x: getattr(options, x) for x in ("baseline", "within", "frozen")}
    scalars = options.scalars.split(",")
    groups = compared(runs, scalars=scalars, **setting)
    for group in groups:
        print(f"Growth: {group['growth']}\n\n{text(group, scalars)}\n")
    if options.json:
        setting |= {"task": options.task, "scalar": options.scalar, "growths": groups}
        storage.write_json(options.json, result_file.jsonable(setting))
    if options.plot:
        draw(groups, options.plot, baseline=options.baseline)


if __name__ == "__main__":
    sys.exit(main())
