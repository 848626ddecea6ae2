"""Compute the numbers of a page about runs: means, intervals, differences, cost.

Intervals are Student's t at 95 %, over seeds.
"""

from collections.abc import Iterable
from typing import NamedTuple

import numpy as np

from jaxcl.report import compare, run_groups
from jaxcl.report.run_groups import RunGroup
from jaxcl.run import result_file, seeds

MEASURES = ("average_accuracy", "anytime", "forgetting", "stability", "plasticity")


class Estimate(NamedTuple):
    """A mean over seeds, with a 95 % interval from two seeds on."""

    mean: float | None
    low: float | None
    high: float | None
    seeds: int


UNKNOWN = Estimate(None, None, None, 0)


def estimate_mean(values: Iterable[float | None]) -> Estimate:
    """Estimate the mean of one value per seed; leave out None."""
    mean, error, count = seeds.mean_and_error(values).values()
    if error is None:
        return Estimate(mean, None, None, count)
    from scipy import special  # a sixth of a second, for several seeds alone

    half = float(special.stdtrit(count - 1, 0.975) * error)
    return Estimate(mean, mean - half, mean + half, count)


def list_names(collections: Iterable[Iterable]) -> list[str]:
    """List the keys of several collections, each once, in order."""
    return list(dict.fromkeys(key for keys in collections for key in keys))


def list_matrices(run: RunGroup) -> list[str]:
    """Name the matrices that at least one seed of the run has."""
    return list_names(results["matrices"] for results in run.results.values())


def mean_measures(run: RunGroup) -> dict[str, dict[str, Estimate]]:
    """Average each measure of each matrix over seeds, as shares from 0 to 1."""
    estimates = {}
    for name in list_names(run.measures.values()):
        estimates[name] = {}
        for key in MEASURES:
            values = run_groups.measure_by_seed(run, name, key).values()
            if key != "plasticity" or any(values):
                estimates[name][key] = estimate_mean(values)
    return estimates


def mean_difference(
    run: RunGroup, first: RunGroup, name: str, measure: str
) -> Estimate:
    """Estimate `run` minus `first` over the seeds that both have."""
    pair = (run_groups.measure_by_seed(r, name, measure) for r in (run, first))
    return _paired_difference(run, first, *pair)


def _paired_difference(run, first, values, others) -> Estimate:
    if not run_groups.are_comparable(run, first):
        return UNKNOWN
    return estimate_mean(run_groups.paired_differences(values, others))


def mean_scalars(
    run: RunGroup, first: RunGroup
) -> dict[str, tuple[Estimate, Estimate]]:
    """Average the last task's scalars, and their differences to the first run."""
    estimates = {}
    for name in list_names(_last_scalars(run).values()):
        values, others = (
            {seed: scalars.get(name) for seed, scalars in _last_scalars(r).items()}
            for r in (run, first)
        )
        delta = _paired_difference(run, first, values, others)
        estimates[name] = estimate_mean(values.values()), delta
    return estimates


def _last_scalars(run) -> dict[int, dict]:
    """Map seed -> the scalars after the last finished task; {} before it."""
    if not run.finished_tasks:
        return dict.fromkeys(run.results, {})
    last = run.finished_tasks - 1
    return {seed: results["scalars"][last] for seed, results in run.results.items()}


def mean_run_cost(run: RunGroup) -> dict[str, float | None]:
    """Average the cost of a run over seeds; None where it is unknown.

    Returns:
      "train", "compile", "evaluation" and "rest", seconds; "steps", "images", "flops"
      of all finished tasks, "milliseconds" of a step, "peak_bytes".
    """
    costs, timed = [], ("train", "compile", "evaluation")
    summed = ("steps", "images", "flops", "peak_bytes")
    for results in run.results.values():
        total = results["cost"]["total"]
        if not total:
            continue
        cost = {key: total[f"{key}_seconds"] for key in timed}
        spent = sum(seconds or 0.0 for seconds in results["seconds"])
        cost["rest"] = max(0.0, spent - sum(cost.values()))
        costs.append(cost | {key: total[key] for key in summed})
    names = (*timed, "rest", *summed)
    means = {name: estimate_mean([cost[name] for cost in costs]).mean for name in names}
    return {**means, "milliseconds": compare.mean_step_cost(run)["milliseconds"]}


def mean_matrix(run: RunGroup, name: str) -> np.ndarray:
    """Average the accuracy matrix up to the last finished task over seeds.

    Returns:
      f64[done, T], nan where no seed has the cell.
    """
    having = [x for x in run.results.values() if name in x["matrices"]]
    done = run.finished_tasks
    return _mean_of_measured([result_file.matrix(x, name)[:done] for x in having])


def mean_row(run: RunGroup, key: str, name: str) -> np.ndarray | None:
    """Average a row of results.json over seeds, f64[T]; None if no run has it.

    Args:
      key: name of the row, "untrained" or "finetune".
      name: name of the matrix.
    """
    rows = [(r.get(key) or {}).get(name) for r in run.results.values()]
    rows = [row for row in rows if row is not None]
    return _mean_of_measured(rows) if rows else None


def _mean_of_measured(values) -> np.ndarray:
    """Average the values that are not nan over axis 0."""
    measured = np.ma.masked_invalid(np.array(values, float))
    return measured.mean(axis=0).filled(np.nan)


def untrained_accuracy(run: RunGroup, name: str) -> Estimate:
    """Estimate the accuracy before training, averaged over the measured tasks."""
    rows = [results.get("untrained", {}).get(name) for results in run.results.values()]
    values = [[x for x in row or () if x is not None] for row in rows]
    return estimate_mean([float(np.mean(x)) if x else None for x in values])
