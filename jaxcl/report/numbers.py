"""The numbers of a page about runs: intervals, differences, cost, curves, configs.

Intervals are Student's t at 95 %, over seeds. In curves seeds are aligned by the task
and the step within it, the end of a task being one point, so that runs whose tasks end
by patience have a mean, too.
"""

import itertools
import json
import math
from typing import NamedTuple

import numpy as np
from scipy import special

from jaxcl.report import compare
from jaxcl.run import results as results_lib
from jaxcl.run import seeds

MEASURES = ("average_accuracy", "anytime", "forgetting", "stability", "plasticity")
POINTS = 150  # of a curve; more make the page large and nothing clearer
_END = math.inf  # of a task, as a place in it


class Run(NamedTuple):
    """One directory of the page, of the seeds that have come furthest."""

    name: str  # its own on the page
    workdir: str  # as the command had it
    run: compare.Run
    rows: dict[int, list]  # seed -> rows of metrics.jsonl; those without are not there
    config: dict | None
    behind: dict[int, int]  # seed -> tasks finished, of the seeds that are left out
    together: bool  # the seeds ran in one program

    @property
    def results(self) -> dict[int, dict]:
        """Results of each seed, see `results.empty`."""
        return self.run.results

    @property
    def first(self) -> dict:
        """Those of one seed, for what all have in common."""
        return next(iter(self.results.values()))

    @property
    def done(self) -> int:
        """Tasks finished."""
        return results_lib.finished(self.first)


class Estimate(NamedTuple):
    """A mean over seeds, with its 95 % interval where there are two or more."""

    mean: float | None
    low: float | None
    high: float | None
    seeds: int


class Curve(NamedTuple):
    """A mean over seeds against steps; low and high are nan where there is no band."""

    x: np.ndarray  # f64[n], steps
    mean: np.ndarray  # f64[n], nan where it was not finite
    low: np.ndarray  # f64[n]
    high: np.ndarray  # f64[n]
    task: np.ndarray  # i64[n]
    seeds: int
    every: int  # 1, or of how many points one is kept or a mean is taken


def _half(error, count: int):
    """Half of the interval of a mean with that standard error."""
    return special.stdtrit(count - 1, 0.975) * error


def estimate(found: dict) -> Estimate:
    """What `seeds.spread` gives, with an interval in place of the standard error."""
    mean, error, count = found["mean"], found["error"], found["seeds"]
    if mean is None or error is None:
        return Estimate(mean, None, None, count)
    half = float(_half(error, count))
    return Estimate(mean, mean - half, mean + half, count)


def names_of(dicts) -> list[str]:
    """All keys of several dicts, in the order in which they come."""
    return list(dict.fromkeys(key for each in dicts for key in each))


def matrices(run: Run) -> list[str]:
    """Names of the matrices that a seed of the run has."""
    return names_of(results["matrices"] for results in run.results.values())


def measures(run: Run) -> dict[str, dict[str, Estimate]]:
    """Matrix name -> measure -> its mean over the seeds that have it."""
    each = [seeds.measures(results) for results in run.results.values()]
    found = {}
    for name in names_of(each):
        mine = [one.get(name, {}) for one in each]
        found[name] = {
            measure: estimate(seeds.spread([one.get(measure) for one in mine]))
            for measure in MEASURES
            if any(measure in one for one in mine)
        }
    return found


def comparable(run: Run, first: Run) -> bool:
    """Whether both are over, or stand after the same number of tasks."""
    sizes = [len(one.first["task_names"]) for one in (run, first)]
    whole = [run.done == sizes[0], first.done == sizes[1]]
    return all(whole) or (not any(whole) and run.done == first.done)


def difference(run: Run, first: Run, name: str, measure: str) -> Estimate:
    """Mean of `run` less `first`, over the seeds that both have."""
    if not comparable(run, first):
        return Estimate(None, None, None, 0)

    def having(one):
        results = {
            seed: each
            for seed, each in one.results.items()
            if measure in seeds.measures(each).get(name, {})
        }
        return one.run._replace(results=results)

    pair = (having(run), having(first))
    return estimate(compare.difference(*pair, name, measure))


def _last_scalars(run: Run) -> dict[int, dict]:
    return {
        seed: results["scalars"][run.done - 1] if run.done else {}
        for seed, results in run.results.items()
    }


def scalars(run: Run, first: Run) -> dict[str, tuple[Estimate, Estimate]]:
    """Scalars after the last finished task: mean, and difference to the first run."""
    mine, theirs = _last_scalars(run), _last_scalars(first)
    found, paired = {}, comparable(run, first)
    for name in names_of(mine.values()):
        values = {seed: each.get(name) for seed, each in mine.items()}
        pairs = [
            values[seed] - theirs[seed][name]
            for seed in values
            if paired and None not in (values[seed], theirs.get(seed, {}).get(name))
        ]
        whole = seeds.spread(values.values()), seeds.spread(pairs)
        found[name] = estimate(whole[0]), estimate(whole[1])
    return found


def cost(run: Run) -> dict[str, float | None]:
    """What a run took, a mean over seeds; None where it is not known.

    Returns:
      "train", "compile", "evaluation" and "rest", seconds; "steps", "images", "flops"
      of all finished tasks, "milliseconds" of a step, "peak_bytes".
    """
    each = []
    for results in run.results.values():
        total = results["cost"]["total"]
        if not total:
            continue
        one = {key: total[f"{key}_seconds"] for key in ("train", "compile")}
        one["evaluation"] = total["evaluation_seconds"]
        spent = sum(seconds or 0.0 for seconds in results["seconds"])
        one["rest"] = max(0.0, spent - sum(one.values()))
        one |= {k: total[k] for k in ("steps", "images", "flops", "peak_bytes")}
        each.append(one)
    names = ("train", "compile", "evaluation", "rest", "steps", "images", "flops")
    found = {
        name: seeds.spread([one[name] for one in each])["mean"]
        for name in (*names, "peak_bytes")
    }
    return {**found, "milliseconds": compare.cost(run.run)["milliseconds"]}


def mean_matrix(run: Run, name: str) -> tuple[np.ndarray, np.ndarray]:
    """Accuracies after each finished task, a mean over the seeds that have a cell.

    Returns:
      (f64[done, T], nan where no seed has it; i64[done, T], how many have it).
    """
    each = [r for r in run.results.values() if name in r["matrices"]]
    found = np.array([results_lib.matrix(r, name)[: run.done] for r in each])
    return _mean(found)


def mean_row(run: Run, key: str, name: str) -> np.ndarray | None:
    """A row of "untrained" or "finetune", a mean over seeds; None: there is none."""
    rows = [(r.get(key) or {}).get(name) for r in run.results.values()]
    rows = [row for row in rows if row is not None]
    return _mean(np.array(rows, float))[0] if rows else None


def _mean(values):
    """Mean over axis 0 of what is not nan, and how many that are."""
    there = ~np.isnan(values)
    count = there.sum(axis=0)
    total = np.where(there, values, 0.0).sum(axis=0)
    return np.where(count > 0, total / np.maximum(count, 1), np.nan), count


def untrained(run: Run, name: str) -> Estimate:
    """What the network before any training has: a mean over the tasks measured."""
    rows = [r.get("untrained", {}).get(name) for r in run.results.values()]
    each = [[x for x in row or () if x is not None] for row in rows]
    return estimate(seeds.spread([float(np.mean(x)) if x else None for x in each]))


def convergence(run: Run) -> dict[int, dict[str, Estimate]]:
    """Task -> "best_number", "best_seconds", ..., "last_number", ... over seeds."""
    each = [results.get("convergence", {}) for results in run.results.values()]
    found = {}
    for task in sorted(names_of(each), key=int):
        flat = [
            {
                f"{which}_{key}": value
                for which in ("best", "last")
                for key, value in (one.get(task, {}).get(which) or {}).items()
            }
            for one in each
        ]
        found[int(task)] = {
            key: estimate(seeds.spread([one.get(key) for one in flat]))
            for key in names_of(flat)
        }
    return found


# Curves


def _steps(results) -> list[int]:
    """Steps of each finished task."""
    entries = results["cost"]["per_task"]
    done = next((i for i, x in enumerate(entries) if x is None), len(entries))
    return [entry["steps"] for entry in entries[:done]]


def common_ends(runs) -> list[int] | None:
    """Step after which each finished task ends; None where runs or seeds differ."""
    each = [
        np.cumsum(_steps(results)).tolist()
        for run in runs
        for results in run.results.values()
    ]
    same = each and each[0] and all(one == each[0] for one in each)
    return each[0] if same else None


def _values(row: dict) -> dict[tuple[str, str], float]:
    """(kind, name) -> number of a row; of a matrix the mean over the tasks met."""
    found = {}
    for name, value in row.get("eval", {}).items():
        if isinstance(value, list):
            met = np.array(value[: row["task"] + 1], float)
            found["accuracy", name] = float(np.mean(met)) if len(met) else math.nan
        else:
            found["scalar", name] = math.nan if value is None else float(value)
    logged = {k: v for k, v in row.items() if k not in ("step", "task", "eval", "time")}
    epoch = logged.pop("epoch", None)
    if isinstance(epoch, dict):
        logged |= {f"epoch/{k}": v for k, v in epoch.items() if k != "number"}
    logged["images_per_second"] = row.get("time", {}).get("images_per_second")
    numbers = {k: v for k, v in logged.items() if isinstance(v, int | float)}
    return found | {("training", name): float(v) for name, v in numbers.items()}


def points(results: dict, rows: list) -> dict[tuple, dict]:
    """What one seed logged, by where it stood.

    Returns:
      (kind, name) -> (task, step within it) -> number; kinds are "accuracy", "scalar"
      and "training". Of the first two the step at a task's end is infinite. Of step 0
      there is nothing.
    """
    lengths = _steps(results)
    starts, found = [0, *np.cumsum(lengths).tolist()], {}
    for row in rows:
        step, task = row["step"], row["task"]
        if not step or task >= len(starts):
            continue
        place = step - starts[task]
        last = task < len(lengths) and place == lengths[task]
        for key, value in _values(row).items():
            where = _END if last and key[0] != "training" else place
            found.setdefault(key, {})[task, where] = value
    return found


def curves(run: Run) -> dict[tuple[str, str], Curve]:
    """(kind, name) -> its mean over seeds, where all that have it have a point."""
    each = {seed: points(run.results[seed], rows) for seed, rows in run.rows.items()}
    found = {}
    for key in names_of(each.values()):
        having = {seed: each[seed][key] for seed in each if key in each[seed]}
        made = _binned if key[0] == "training" else _aligned
        curve = made(having, run.results)
        if curve is not None:
            found[key] = curve
    return found


def _aligned(having: dict[int, dict], results) -> Curve | None:
    """At the places that all seeds have."""
    places = sorted(set.intersection(*map(set, having.values())))
    xs = []
    for seed in having:
        lengths = _steps(results[seed])
        starts = [0, *np.cumsum(lengths).tolist()]
        ends = starts[1:]
        xs.append([ends[t] if at == _END else starts[t] + at for t, at in places])
    values = [[mine[place] for place in places] for mine in having.values()]
    return _curve(xs, values, [task for task, _ in places], 1) if places else None


def _binned(having: dict[int, dict], results) -> Curve | None:
    """Means of equal stretches of a task, so many that about `POINTS` are left.

    Rows come at round steps of the run, which are other steps of the task where
    seeds differ in how long the tasks before took.
    """
    gaps = [_gap(mine) for mine in having.values()]
    steps = max(at for mine in having.values() for _, at in mine)
    tasks = len({task for mine in having.values() for task, _ in mine})
    every = math.ceil(steps * tasks / max(gaps) / POINTS)
    width, each = every * max(gaps), []
    for seed, mine in having.items():
        starts, groups = [0, *np.cumsum(_steps(results[seed])).tolist()], {}
        for (task, at), value in mine.items():
            group = groups.setdefault((task, (at - 1) // width), [])
            group.append((starts[task] + at, value))
        each.append({key: np.mean(group, axis=0) for key, group in groups.items()})
    common = sorted(set.intersection(*map(set, each)))
    if not common:
        return None
    found = np.array([[mine[key] for key in common] for mine in each])
    made = _curve(found[..., 0], found[..., 1], [task for task, _ in common], every)
    # The spread of single batches would hide the curves.
    return made._replace(low=made.low * np.nan, high=made.high * np.nan)


def _gap(points) -> float:
    """Steps from one row to the next, as a rule."""
    gaps = [b - a for (s, a), (t, b) in itertools.pairwise(sorted(points)) if s == t]
    return max(1, int(np.median(gaps))) if gaps else 1


def _curve(xs, values, tasks, every) -> Curve:
    values = np.array(values)
    count, mean = len(values), values.mean(axis=0)
    half = np.full(len(mean), np.nan)
    if count > 1:
        half = _half(values.std(axis=0, ddof=1) / math.sqrt(count), count)
    ends = (mean - half, mean + half)
    return Curve(np.mean(xs, axis=0), mean, *ends, np.array(tasks), count, every)


def thin(curve: Curve, most: int = POINTS) -> Curve:
    """The curve with every n-th point, and with the last of each task."""
    every = math.ceil(len(curve.x) / most)
    keep = np.arange(len(curve.x)) % every == 0
    keep[np.append(np.diff(curve.task) != 0, True)] = True
    parts = (part[keep] for part in curve[:5])
    return Curve(*parts, curve.seeds, every)


# Configs


def flat(config: dict, path: str = "") -> dict[str, str]:
    """Path of each field -> its value as JSON; a dict without fields is a value."""
    found = {}
    for key, value in config.items():
        where = f"{path}.{key}" if path else str(key)
        if isinstance(value, dict) and value:
            found |= flat(value, where)
        else:
            found[where] = json.dumps(value, sort_keys=True)
    return found


def differing(configs: list[dict]) -> dict[str, list[str | None]]:
    """Path -> value in each config, None where it is not set, of all that differ."""
    each = [flat(config) for config in configs]
    found = {path: [one.get(path) for one in each] for path in sorted(names_of(each))}
    return {path: row for path, row in found.items() if len(set(row)) > 1}
