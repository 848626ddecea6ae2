"""When runs converged, and how much sooner than a baseline; seeds are paired.

There are two measures. By patience, a run converged at the epoch with the best mean
training loss. By a target, it converged at the first epoch that comes as low as the
baseline at its best epoch, by a scalar that is measured in the same way for all runs.
The first compares losses that differ from method to method, and an encoder that learns
nothing is soon at its best; the second has neither fault.
"""

import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np
from etils import epath
from scipy import special

from jaxcl.data import scenarios, storage
from jaxcl.run import record
from jaxcl.run import results as results_lib

SCALARS = ("svm/all", "svm/old", "svm/new")
RATIOS = ("time_ratio", "epoch_ratio", "target_time_ratio", "target_passes_ratio")


class Epoch(NamedTuple):
    """The end of an epoch: what the task had taken, and the scalar it had reached."""

    number: int  # from 1
    seconds: float  # of training
    passes: float  # of rows through the encoder
    value: float  # the scalar, lower is better; infinite where it is not finite


class Run(NamedTuple):
    """One seed of one way to train, at one growth."""

    name: str
    growth: float | None  # None: the scenario has none
    seed: int
    folder: epath.Path
    best: dict  # by patience, see `metrics_log.Epochs.end`
    last: dict
    cut: bool  # ended by config.epochs, before config.patience
    epochs: list[Epoch]
    scalars: dict[str, float | None]  # at the end of the task


def read(name: str, workdir: epath.PathLike, *, task: int, scalar: str) -> list[Run]:
    """The runs of a directory, one per seed.

    Args:
      name: of the runs in the table.
      workdir: a run directory, or that of several seeds.
      task: its number, from 0.
      scalar: as under "eval" in metrics.jsonl.

    Raises:
      ValueError: it holds no run, or a run is not finished, did not count epochs, or
        did not measure the scalar after every epoch.
    """
    workdir = epath.Path(workdir)
    marks = {path.name.removeprefix("seed_"): path for path in workdir.glob("seed_*")}
    folders = {int(mark): path for mark, path in marks.items() if mark.isdigit()}
    runs = []
    for path in [folders[seed] for seed in sorted(folders)] or [workdir]:
        own = path if (path / "config.json").exists() else workdir
        if not (own / "config.json").exists():
            raise ValueError(
                f"{name}={path}: holds no config.json; name the directory of a run, or "
                "that of its seeds"
            )
        config = storage.read_json(own / "config.json")
        seed = next((s for s in folders if folders[s] == path), config.get("seed", 0))
        runs.append(_run(name, path, seed, config, task, scalar))
    return runs


def _run(name, folder, seed, config, task, scalar) -> Run:
    where = f"{name}={folder}"
    done = (folder / results_lib.RESULTS).exists()
    results = results_lib.read_results(folder) if done else results_lib.empty(0)
    if results_lib.finished(results) <= task:
        raise ValueError(f"{where}: not finished: it has no results of task {task}")
    epochs = results.get("convergence", {}).get(str(task))
    if not epochs or epochs["best"] is None:
        raise ValueError(
            f"{where}: no convergence of task {task}: config.patience was "
            f"{config.get('patience', 0)}"
        )
    patience = config.get("patience", 0)
    late = epochs["last"]["number"] - epochs["best"]["number"]
    scenario = config.get("scenario", {})
    growth = scenario.get("growth", scenarios.make.__kwdefaults__["growth"])
    return Run(
        name=name,
        growth=growth if scenario.get("name") == "growth" else None,
        seed=seed,
        folder=folder,
        best=epochs["best"],
        last=epochs["last"],
        cut=patience == 0 or late < patience,
        epochs=_epochs(where, record.read_rows(folder), task, scalar),
        scalars=results["scalars"][task],
    )


def _epochs(where, rows, task, scalar) -> list[Epoch]:
    """The epochs of a task, each with the scalar of its last step.

    Scalars of other steps are not used. That leaves out the evaluation before the
    task's first step, which judged the state on the rows of fewer tasks.
    """
    rows = [row for row in rows if row["task"] == task]
    measured, names = {}, set()
    for row in rows:
        here = {k: x for k, x in row.get("eval", {}).items() if not isinstance(x, list)}
        names |= {*here}
        if scalar in here:
            value = here[scalar]
            measured[row["step"]] = math.inf if value is None else value
    if not measured:
        raise ValueError(
            f"{where}: no scalar {scalar} in task {task}: measured are "
            f"{', '.join(sorted(names)) or 'none'}"
        )
    epochs = []
    for row in rows:
        if "epoch" in row:
            number, passes = row["epoch"]["number"], row["epoch"]["passes"]
            if row["step"] not in measured:
                raise ValueError(
                    f"{where}: epoch {number} of task {task} has no {scalar}: "
                    "config.eval_epochs must be 1"
                )
            value = measured[row["step"]]
            epochs.append(Epoch(number, row["time"]["train"], passes, value))
    return epochs


def target(baseline: Run, within: float) -> float:
    """The scalar to reach: that of the baseline's best epoch, plus a tolerance.

    Args:
      baseline: the run to compare with.
      within: the tolerance, as a share of the scalar's size.

    Raises:
      ValueError: the scalar is not finite at the best epoch.
    """
    value = {epoch.number: epoch.value for epoch in baseline.epochs}.get(
        baseline.best["number"], math.inf
    )
    if not math.isfinite(value):
        raise ValueError(
            f"{baseline.name}={baseline.folder}: the scalar is not finite at the best "
            f"epoch, {baseline.best['number']}"
        )
    return value + within * abs(value)


def reached(run: Run, goal: float) -> Epoch | None:
    """The first epoch that ends with the scalar at most `goal`, or None."""
    return next((epoch for epoch in run.epochs if epoch.value <= goal), None)


def _ratio(theirs, mine) -> float | None:
    return theirs / mine if theirs > 0 and mine > 0 else None


def paired(run: Run, baseline: Run, within: float) -> dict:
    """All numbers of one seed; a ratio is baseline / run, None if one of them is 0."""
    goal = target(baseline, within)
    mine, theirs = reached(run, goal), reached(baseline, goal)
    numbers = {
        "seed": run.seed,
        "folder": str(run.folder),
        "cut_off": run.cut,
        "epoch": run.best["number"],
        "seconds": run.best["seconds"],
        "last_epoch": run.last["number"],
        "time_ratio": _ratio(baseline.best["seconds"], run.best["seconds"]),
        "epoch_ratio": _ratio(baseline.best["number"], run.best["number"]),
        "target": goal,
        "reached": mine is not None,
    }
    if mine is not None:
        numbers |= {
            "target_epoch": mine.number,
            "target_passes": mine.passes,
            "target_seconds": mine.seconds,
            "target_passes_ratio": _ratio(theirs.passes, mine.passes),
            "target_time_ratio": _ratio(theirs.seconds, mine.seconds),
        }
    return numbers


def spread(values: Iterable[float | None]) -> dict:
    """Mean and standard deviation (n - 1) of the values that are not None."""
    values = np.array([x for x in values if x is not None], float)
    mean = values.mean() if len(values) else None
    std = values.std(ddof=1) if len(values) > 1 else None
    return results_lib.plain({"mean": mean, "std": std, "seeds": len(values)})


def geometric(ratios: Iterable[float | None]) -> dict:
    """Geometric mean of ratios, with its 95 % confidence interval.

    exp(m +- t s / sqrt(n)) with m and s of the logarithms and Student's t with n - 1
    degrees of freedom. A single ratio has no interval.

    Args:
      ratios: above 0; None is left out.
    """
    logs = np.log([x for x in ratios if x is not None])
    count = len(logs)
    mean = logs.mean() if count else math.nan
    half = math.nan
    if count > 1:
        quantile = special.stdtrit(count - 1, 0.975)
        half = quantile * logs.std(ddof=1) / math.sqrt(count)
    interval = {"mean": mean, "low": mean - half, "high": mean + half}
    ratio = {name: math.exp(value) for name, value in interval.items()}
    return results_lib.plain({**ratio, "seeds": count})


def summary(
    runs: list[Run],
    baseline: dict[int, Run],
    *,
    within: float,
    scalars: Sequence[str],
) -> dict:
    """What the runs of one name and growth come to, over seeds.

    Args:
      runs: one per seed.
      baseline: seed -> the run to compare with.
      within: as in `target`.
      scalars: names of scalars at the end of the task.

    Returns:
      "each", a list of `paired`; a `spread` of each of their numbers and a `geometric`
      of each ratio, those of the target over the seeds that reached it; "scalars",
      name -> `spread`.
    """
    pairs = [paired(run, baseline[run.seed], within) for run in runs]
    totals = {
        "seeds": len(pairs),
        "reached": sum(pair["reached"] for pair in pairs),
        "cut_off": sum(pair["cut_off"] for pair in pairs),
    }
    for name in ("epoch", "seconds", "target_epoch", "target_passes", "target_seconds"):
        totals[name] = spread([pair.get(name) for pair in pairs])
    for name in RATIOS:
        totals[name] = geometric([pair.get(name) for pair in pairs])
    ends = {name: spread([run.scalars.get(name) for run in runs]) for name in scalars}
    return {**totals, "scalars": ends, "each": pairs}


def compared(
    runs: list[Run],
    baseline: str,
    *,
    within: float = 0.01,
    scalars: Sequence[str] = SCALARS,
) -> list[dict]:
    """Every name against the baseline, one entry per growth.

    Args:
      runs: in the order of the table.
      baseline: one of their names.
      within: as in `target`.
      scalars: names of scalars at the end of the task.

    Returns:
      [{"growth": number or None, "runs": name -> `summary`}], by growth.

    Raises:
      ValueError: no run has the name; the baseline lacks a growth or a seed of another
        name; or two runs of a name have the same growth and seed.
    """
    groups = _grouped(runs, baseline)
    names = list(dict.fromkeys(run.name for run in runs))
    entries = []
    for growth in sorted(groups, key=lambda x: (x is not None, x)):
        group = groups[growth]
        summaries = {
            name: summary(
                list(group[name].values()),
                group[baseline],
                within=within,
                scalars=scalars,
            )
            for name in names
            if name in group
        }
        entries.append({"growth": growth, "runs": summaries})
    return entries


def _grouped(runs, baseline) -> dict:
    """Growth -> name -> seed -> run, where each run has a baseline to compare with."""
    names = list(dict.fromkeys(run.name for run in runs))
    if baseline not in names:
        raise ValueError(f"--baseline={baseline}: allowed are {', '.join(names)}")
    groups = {}
    for run in runs:
        mine = groups.setdefault(run.growth, {}).setdefault(run.name, {})
        if run.seed in mine:
            raise ValueError(
                f"{run.name}={run.folder}: seed {run.seed}{_at(run.growth)} is that of "
                f"{mine[run.seed].folder} too"
            )
        mine[run.seed] = run
    for run in runs:
        if run.seed not in groups[run.growth].get(baseline, {}):
            raise ValueError(
                f"{run.name}={run.folder}: the baseline {baseline} has no seed "
                f"{run.seed}{_at(run.growth)}"
            )
    return groups


def _at(growth) -> str:
    return "" if growth is None else f" at growth {growth:g}"
