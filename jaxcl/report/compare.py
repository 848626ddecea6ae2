"""Compare runs in a table and a plot: `jaxcl compare runs/er runs/er_ace`.

Each directory is a run, or holds the runs of several seeds (config.seeds). Prints mean
and standard error over seeds, the cost of a step and of an incoming image, and the
paired difference to the first directory over the seeds that both have; draws accuracy
over time into one figure.
With `--scalar` it compares a scalar of an evaluator in place of accuracies.
"""

import argparse
import re

import numpy as np

from jaxcl import plots
from jaxcl.errors import Refused
from jaxcl.report import comparability, run_groups
from jaxcl.report.run_groups import RunGroup
from jaxcl.run import cost, seeds

# Column of the table -> its meaning, below the table
_MEANINGS = {
    "average": "mean accuracy on all tasks after the last one, +- standard error",
    "anytime": "mean over tasks of the average accuracy right after each task",
    "along": "mean over all evaluations, also within tasks (config.eval_every)",
    "forgetting": "mean fall of a task's accuracy from its best value",
    "ms/step": "time of a training step",
    "FLOPs": "arithmetic of a step, relative to the first run",
    "FLOP/image": "arithmetic for each incoming image, all passes",
    "- first": "average minus the first run's, over the seeds that both have",
}
MEASURES = ("average_accuracy", "anytime", "forgetting")


def paired_difference(run: RunGroup, other: RunGroup, name: str, measure: str) -> dict:
    """Compute mean and error of `run` minus `other` over the seeds that both have."""
    pair = (run_groups.measure_by_seed(r, name, measure) for r in (run, other))
    return seeds.mean_and_error(run_groups.paired_differences(*pair))


def mean_step_cost(run: RunGroup) -> dict[str, float | None]:
    """Average the cost of a training step over seeds; None where it is unknown.

    The keys are "milliseconds" and "flops" of a step, and "per_image": FLOPs for each
    image of the stream, including all its passes.
    """
    totals = [results["cost"]["total"] for results in run.results.values()]
    totals = [total for total in totals if total and total["steps"]]
    costs = [x for x in totals if x["flops"] is not None]
    values = {
        "milliseconds": [1000 * x["train_seconds"] / x["steps"] for x in totals],
        "flops": [x["flops"] / x["steps"] for x in costs],
        "per_image": [x["flops"] / x["images"] for x in costs if x["images"]],
    }
    return {key: float(np.mean(x)) if x else None for key, x in values.items()}


def mean_curve(
    run: RunGroup, name: str, *, band: str = "error"
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Average an accuracy over the tasks so far, or a scalar, at each step.

    Args:
      run: runs.RunGroup, from `runs.read_run`.
      name: name of a matrix or a scalar, as under "eval" in metrics.jsonl.
      band: name of the band: "error", the standard error of the mean, or "std".

    Returns:
      (steps i64[n], mean f64[n], band f64[n], 0 for one seed). The steps are those at
      which every seed was evaluated, except step 0.
    """
    of_seeds = [_mean_by_step(rows, name) for rows in run.logged_rows.values()] or [{}]
    steps = sorted(set.intersection(*(set(points) for points in of_seeds)))
    values = np.array([[points[s] for s in steps] for points in of_seeds])
    half, count = np.zeros(len(steps)), len(of_seeds)
    if count > 1:
        half = values.std(axis=0, ddof=1) / (1 if band == "std" else count**0.5)
    return np.array(steps), values.mean(axis=0), half


def mean_along_stream(run: RunGroup, name: str) -> dict:
    """Average all evaluations of each seed; return mean and standard error.

    With evaluations every so many steps (config.eval_every) this is i-Blurry's area
    under the curve (Koh et al., ICLR 2022), over the tasks so far, each from its first
    step on.

    Args:
      run: runs.RunGroup, from `runs.read_run`.
      name: name of a matrix.
    """
    points = [_mean_by_step(rows, name).values() for rows in run.logged_rows.values()]
    return seeds.mean_and_error([float(np.mean([*x])) for x in points if x])


def _mean_by_step(rows, name) -> dict[int, float]:
    """Map step -> a scalar, or the mean of a matrix's row over the tasks so far."""
    points = {}
    for row in rows:
        value = row.get("eval", {}).get(name)
        if value is not None and row["step"]:
            accuracies = value[: row["task"] + 1] if isinstance(value, list) else value
            points[row["step"]] = np.mean(np.array(accuracies, float))
    return points


def format_table(runs: list[RunGroup], name: str) -> str:
    """Write a table of one matrix, a line for each run."""
    head = ("seeds", "average", "anytime", "along", "forgetting")
    head += ("ms/step", "FLOPs", "FLOP/image", "- first")
    averages = [_mean_over_time(run, name) for run in runs]
    pairs = [[seeds.percent(x) for x in pair if x["mean"]] for pair in averages]
    has_along = any(len({*pair}) > 1 for pair in pairs)
    if not has_along:
        head = tuple(title for title in head if title != "along")
    table = [[f"{name} (%)", *head]]
    first = mean_step_cost(runs[0])
    for run, (anytime, along) in zip(runs, averages, strict=True):
        summary, costs = seeds.summary(run.results)[name], mean_step_cost(run)
        shares = [summary["average_accuracy"], anytime, *([along] if has_along else [])]
        shares.append(summary["forgetting"])
        time, flops, image = costs.values()
        cells = [str(len(run.results)), *map(seeds.percent, shares)]
        cells.append("-" if time is None else f"{time:.1f}")
        share = flops and first["flops"] and flops / first["flops"]
        cells.append(f"{share:.2f}x" if share else "-")
        cells.append("-" if image is None else cost.format_count(image))
        if run is runs[0]:
            cells.append("")
        elif run_groups.are_comparable(run, runs[0]):
            difference = paired_difference(run, runs[0], name, "average_accuracy")
            cells.append(seeds.percent(difference))
        else:
            cells.append("-")
        table.append([run.name, *cells])
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    lines = []
    for first_cell, *texts in table:
        aligned = map(str.rjust, texts, widths[1:])
        lines.append("  ".join([first_cell.ljust(widths[0]), *aligned]).rstrip())
    return "\n".join(lines)


def describe_columns(table: str) -> str:
    """Write what the columns of a table of `format_table` mean, a line each."""
    head = re.split(r"\s{2,}", table.splitlines()[0])
    return "\n".join(f"  {x:13}{_MEANINGS[x]}" for x in head if x in _MEANINGS)


def _mean_over_time(run, name) -> tuple[dict, dict]:
    """Return "anytime" and "along" of a run, each with mean and standard error."""
    return seeds.summary(run.results)[name]["anytime"], mean_along_stream(run, name)


def format_scalar(curves: dict[str, tuple], name: str, band: str) -> str:
    """Write the last value of a scalar with its band, one line for each run.

    Args:
      curves: name of a run -> its `mean_curve`.
      name: name of the scalar.
      band: name of the band, as in `mean_curve`.
    """
    kind = {"error": "standard error", "std": "std"}[band]
    lines = [f"{name}, mean +- {kind} at the last step"]
    for run, (steps, mean, half) in curves.items():
        lines.append(f"{run:24}{mean[-1]:>12.4f} +- {half[-1]:.4f}  step {steps[-1]}")
    return "\n".join(lines)


def add_options(parser) -> None:
    """Add the options of `jaxcl compare`."""
    add = parser.add_argument
    add("workdirs", nargs="+", metavar="RUN", help="run directories")
    add("--matrix", default=None, help="accuracy, as knn/all; default: the first one")
    add("--scalar", default=None, help="compare a scalar instead, as memory/entropy")
    band = "of the plot: standard error or deviation over seeds"
    add("--band", default="error", choices=["error", "std"], help=band)
    add("--out", default=None, help="plot over time to write: .png, .svg or .pdf")


def main(options: argparse.Namespace) -> int:
    """Print the table and draw the curves."""
    if options.out:
        plots.read_format(options.out)
    runs = run_groups.read_all(options.workdirs)
    table = ""
    if options.scalar:
        _compare_scalar(runs, options)
    else:
        table = _compare_matrix(runs, options)
    configs = {run.name: run.configs for run in runs}
    for field in comparability.list_differences(configs):
        print(f"not measured alike: {field}")
    for line in (line for run in runs for line in run_groups.list_remarks(run)):
        print(line)
    if table:
        print(f"\n{describe_columns(table)}")
    return 0


def _compare_matrix(runs, options) -> str:
    """Compare the accuracies of a matrix; return the table."""
    names = [set(r["matrices"]) for run in runs for r in run.results.values()]
    name = options.matrix or next(iter(runs[0].first_results["matrices"]), None)
    if name is None or not all(name in seed_names for seed_names in names):
        common = sorted(set.intersection(*names))
        raise Refused(
            "--matrix", name, f"all runs have {', '.join(common) or 'no matrix'}"
        )
    table = format_table(runs, name)
    print(table)
    if options.out:
        curves = {run.name: mean_curve(run, name, band=options.band) for run in runs}
        plots.anytime(curves, options.out, task_ends=list_task_ends(runs[0]))
    return table


def _compare_scalar(runs, options) -> None:
    """Compare a scalar."""
    name = options.scalar
    curves = {run.name: mean_curve(run, name, band=options.band) for run in runs}
    lacking = [run for run, (steps, *_) in curves.items() if not len(steps)]
    if lacking:
        raise Refused(f"--scalar={name}: not measured by {', '.join(lacking)}")
    print(format_scalar(curves, name, options.band))
    if options.out:
        ends = list_task_ends(runs[0])
        plots.anytime(curves, options.out, ends, ylabel=name, scale=1.0)


def list_task_ends(run: RunGroup) -> list[int]:
    """List the step after which each task ends."""
    steps = [spent["steps"] for spent in run.first_results["cost"]["per_task"] if spent]
    return np.cumsum(steps).tolist()
