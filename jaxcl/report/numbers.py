"""The numbers of a page about runs: intervals, differences, cost, curves, configs.

Intervals are Student's t at 95 %, over seeds. In curves seeds are aligned by the task
and the step within it, and the end of a task is one point, so that there is a mean even
if patience ends the tasks of different seeds at different steps.
"""

import itertools
import math
from collections.abc import Iterable
from typing import NamedTuple

import numpy as np

from jaxcl.report import comparability, compare
from jaxcl.report import runs as runs_lib
from jaxcl.report.runs import Run
from jaxcl.run import results as results_lib
from jaxcl.run import seeds

MEASURES = ("average_accuracy", "anytime", "forgetting", "stability", "plasticity")
POINTS = 150  # of a curve; more make the page large and nothing clearer
_END = math.inf  # of a task, as a place in it


class Estimate(NamedTuple):
    """A mean over seeds, with its 95 % interval if there are two seeds or more."""

    mean: float | None
    low: float | None
    high: float | None
    seeds: int


UNKNOWN = Estimate(None, None, None, 0)


class Curve(NamedTuple):
    """A mean over seeds against steps; without a band low and high are nan."""

    x: np.ndarray  # f64[n], steps
    mean: np.ndarray  # f64[n], nan where it was not finite
    low: np.ndarray  # f64[n]
    high: np.ndarray  # f64[n]
    task: np.ndarray  # i64[n]
    seeds: int
    every: int  # one point stands for so many


def half_width(error, count: int):
    """Half the width of the interval, from the standard error of the mean."""
    from scipy import special  # a sixth of a second, for several seeds alone

    return special.stdtrit(count - 1, 0.975) * error


def estimate(values: Iterable[float | None]) -> Estimate:
    """Estimate the mean of one value per seed; None, not measured, is left out."""
    mean, error, count = seeds.spread(values).values()
    if error is None:
        return Estimate(mean, None, None, count)
    half = float(half_width(error, count))
    return Estimate(mean, mean - half, mean + half, count)


def names_of(collections: Iterable[Iterable]) -> list[str]:
    """List all keys of several dicts or lists, each once, in order."""
    return list(dict.fromkeys(key for keys in collections for key in keys))


def matrices(run: Run) -> list[str]:
    """Name the matrices that at least one seed of the run has."""
    return names_of(results["matrices"] for results in run.results.values())


def measures(run: Run) -> dict[str, dict[str, Estimate]]:
    """Matrix name -> measure -> its mean over the seeds that have it."""
    estimates = {}
    for name in names_of(run.measures.values()):
        values = {key: runs_lib.measured(run, name, key).values() for key in MEASURES}
        shown = [key for key in MEASURES if key != "plasticity" or any(values[key])]
        estimates[name] = {key: estimate(values[key]) for key in shown}
    return estimates


def difference(run: Run, first: Run, name: str, measure: str) -> Estimate:
    """Estimate `run` less `first`, over the seeds that both have."""
    pair = (runs_lib.measured(r, name, measure) for r in (run, first))
    return _difference(run, first, *pair)


def _difference(run, first, mine, theirs) -> Estimate:
    paired = runs_lib.comparable(run, first)
    return estimate(runs_lib.paired(mine, theirs)) if paired else UNKNOWN


def scalars(run: Run, first: Run) -> dict[str, tuple[Estimate, Estimate]]:
    """Scalars after the last finished task: mean, and difference to the first run."""
    mine, theirs = (
        {
            seed: own["scalars"][r.done - 1] if r.done else {}
            for seed, own in r.results.items()
        }
        for r in (run, first)
    )
    estimates = {}
    for name in names_of(mine.values()):
        pair = [
            {seed: x.get(name) for seed, x in own.items()} for own in (mine, theirs)
        ]
        delta = _difference(run, first, *pair)
        estimates[name] = estimate(pair[0].values()), delta
    return estimates


def cost(run: Run) -> dict[str, float | None]:
    """Average what a run took over seeds; None where it is not known.

    Returns:
      "train", "compile", "evaluation" and "rest", seconds; "steps", "images", "flops"
      of all finished tasks, "milliseconds" of a step, "peak_bytes".
    """
    costs = []
    for results in run.results.values():
        total = results["cost"]["total"]
        if not total:
            continue
        timed = ("train", "compile", "evaluation")
        own = {key: total[f"{key}_seconds"] for key in timed}
        spent = sum(seconds or 0.0 for seconds in results["seconds"])
        own["rest"] = max(0.0, spent - sum(own.values()))
        own |= {k: total[k] for k in ("steps", "images", "flops", "peak_bytes")}
        costs.append(own)
    names = ("train", "compile", "evaluation", "rest", "steps", "images", "flops")
    means = {
        name: estimate([own[name] for own in costs]).mean
        for name in (*names, "peak_bytes")
    }
    return {**means, "milliseconds": compare.cost(run)["milliseconds"]}


def mean_matrix(run: Run, name: str) -> tuple[np.ndarray, np.ndarray]:
    """Average the accuracy matrix up to the last finished task over seeds.

    Returns:
      Means f64[done, T], nan where no seed has the cell, and i64[done, T], how many
      seeds have it.
    """
    results = [own for own in run.results.values() if name in own["matrices"]]
    return _mean(
        np.array([results_lib.matrix(own, name)[: run.done] for own in results])
    )


def mean_row(run: Run, key: str, name: str) -> np.ndarray | None:
    """Average the row of a matrix in "untrained" or "finetune" over seeds, or None."""
    rows = [(r.get(key) or {}).get(name) for r in run.results.values()]
    rows = [row for row in rows if row is not None]
    return _mean(np.array(rows, float))[0] if rows else None


def _mean(values):
    """Average the values that are not nan over axis 0, and count them."""
    known = np.ma.masked_invalid(values)
    return known.mean(axis=0).filled(np.nan), known.count(axis=0)


def untrained(run: Run, name: str) -> Estimate:
    """Estimate the accuracy before any training, a mean over the tasks measured."""
    rows = [own.get("untrained", {}).get(name) for own in run.results.values()]
    values = [[x for x in row or () if x is not None] for row in rows]
    return estimate([float(np.mean(x)) if x else None for x in values])


def convergence(run: Run) -> dict[int, dict[str, Estimate]]:
    """Estimate "best_number", "best_seconds", ..., "last_number", ... of each task."""
    of_seeds = [results.get("convergence", {}) for results in run.results.values()]
    estimates = {}
    for task in sorted(names_of(of_seeds), key=int):
        epochs = [
            {
                f"{which}_{key}": value
                for which in ("best", "last")
                for key, value in (by_task.get(task, {}).get(which) or {}).items()
            }
            for by_task in of_seeds
        ]
        estimates[int(task)] = {
            key: estimate([own.get(key) for own in epochs]) for key in names_of(epochs)
        }
    return estimates


# Curves


def _steps(results) -> list[int]:
    """Steps of each finished task."""
    entries = results["cost"]["per_task"]
    done = next((i for i, x in enumerate(entries) if x is None), len(entries))
    return [entry["steps"] for entry in entries[:done]]


def common_ends(runs: Iterable[Run]) -> list[int] | None:
    """List the step at which each task ends; None where runs or seeds differ."""
    all_ends = [
        np.cumsum(_steps(results)).tolist()
        for run in runs
        for results in run.results.values()
    ]
    same = all_ends and all_ends[0] and all(ends == all_ends[0] for ends in all_ends)
    return all_ends[0] if same else None


def _values(row: dict) -> dict[tuple[str, str], float]:
    """(kind, name) -> number, of a row; for a matrix the mean over the tasks met."""
    evaluated = {}
    for name, value in row.get("eval", {}).items():
        if isinstance(value, list):
            met = np.array(value[: row["task"] + 1], float)
            evaluated["accuracy", name] = float(np.mean(met)) if len(met) else math.nan
        else:
            evaluated["scalar", name] = math.nan if value is None else float(value)
    logged = {k: v for k, v in row.items() if k not in ("step", "task", "eval", "time")}
    epoch = logged.pop("epoch", None)
    if isinstance(epoch, dict):
        logged |= {f"epoch/{k}": v for k, v in epoch.items() if k != "number"}
    logged["images_per_second"] = row.get("time", {}).get("images_per_second")
    numbers = {k: v for k, v in logged.items() if isinstance(v, int | float)}
    return evaluated | {("training", name): float(v) for name, v in numbers.items()}


def points(results: dict, rows: list) -> dict[tuple, dict]:
    """Sort what one seed logged by task and step within the task.

    Returns:
      (kind, name) -> (task, step within it) -> number; kinds are "accuracy", "scalar"
      and "training". For the first two the last step of a task is given as infinite.
      Step 0 is left out.
    """
    lengths = _steps(results)
    starts, by_key = [0, *np.cumsum(lengths).tolist()], {}
    for row in rows:
        step, task = row["step"], row["task"]
        if not step or task >= len(starts):
            continue
        place = step - starts[task]
        last = task < len(lengths) and place == lengths[task]
        for key, value in _values(row).items():
            where = _END if last and key[0] != "training" else place
            by_key.setdefault(key, {})[task, where] = value
    return by_key


def curves(run: Run) -> dict[tuple[str, str], Curve]:
    """(kind, name) -> mean over the seeds that logged it, at their common points."""
    logged = {seed: points(run.results[seed], rows) for seed, rows in run.rows.items()}
    by_key = {}
    for key in names_of(logged.values()):
        of_seeds = {seed: logged[seed][key] for seed in logged if key in logged[seed]}
        make = _binned if key[0] == "training" else _aligned
        curve = make(of_seeds, run.results)
        if curve is not None:
            by_key[key] = curve
    return by_key


def _aligned(of_seeds: dict[int, dict], results) -> Curve | None:
    """Average at the places that all seeds have."""
    places = sorted(set.intersection(*map(set, of_seeds.values())))
    xs = []
    for seed in of_seeds:
        lengths = _steps(results[seed])
        starts = [0, *np.cumsum(lengths).tolist()]
        ends = starts[1:]
        xs.append([ends[t] if at == _END else starts[t] + at for t, at in places])
    values = [[own[place] for place in places] for own in of_seeds.values()]
    return _curve(xs, values, [task for task, _ in places], 1) if places else None


def _binned(of_seeds: dict[int, dict], results) -> Curve | None:
    """Means over bins of equal width within each task, about `POINTS` bins in all.

    Bins are needed to align seeds: rows come at round steps of the run, which are
    different steps of the task if the tasks before took seeds different times.
    """
    gaps = [_gap(own) for own in of_seeds.values()]
    steps = max(at for own in of_seeds.values() for _, at in own)
    tasks = len({task for own in of_seeds.values() for task, _ in own})
    every = math.ceil(steps * tasks / max(gaps) / POINTS)
    width, binned = every * max(gaps), []
    for seed, own in of_seeds.items():
        starts, bins = [0, *np.cumsum(_steps(results[seed])).tolist()], {}
        for (task, at), value in own.items():
            members = bins.setdefault((task, (at - 1) // width), [])
            members.append((starts[task] + at, value))
        binned.append({key: np.mean(pairs, axis=0) for key, pairs in bins.items()})
    common = sorted(set.intersection(*map(set, binned)))
    if not common:
        return None
    means = np.array([[own[key] for key in common] for own in binned])
    curve = _curve(means[..., 0], means[..., 1], [task for task, _ in common], every)
    # No band: the spread of single batches would hide the curves.
    return curve._replace(low=curve.low * np.nan, high=curve.high * np.nan)


def _gap(points) -> float:
    """Find the median number of steps from one row to the next."""
    gaps = [b - a for (s, a), (t, b) in itertools.pairwise(sorted(points)) if s == t]
    return max(1, int(np.median(gaps))) if gaps else 1


def _curve(xs, values, tasks, every) -> Curve:
    values = np.array(values)
    count, mean = len(values), values.mean(axis=0)
    half = np.full(len(mean), np.nan)
    if count > 1:
        half = half_width(values.std(axis=0, ddof=1) / math.sqrt(count), count)
    ends = (mean - half, mean + half)
    return Curve(np.mean(xs, axis=0), mean, *ends, np.array(tasks), count, every)


def thin(curve: Curve, most: int = POINTS) -> Curve:
    """Keep every n-th point of a curve, and the last of each task."""
    every = math.ceil(len(curve.x) / most)
    keep = np.arange(len(curve.x)) % every == 0
    keep[np.append(np.diff(curve.task) != 0, True)] = True
    parts = (part[keep] for part in curve[:5])
    return Curve(*parts, curve.seeds, every)


# Configs


def differing(configs: list[dict]) -> dict[str, list[str | None]]:
    """Find the fields that differ: path -> value in each config, None where not set."""
    flats = [comparability.flat(config) for config in configs]
    rows = {path: [own.get(path) for own in flats] for path in sorted(names_of(flats))}
    return {path: row for path, row in rows.items() if len(set(row)) > 1}
