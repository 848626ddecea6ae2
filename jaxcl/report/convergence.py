"""When runs converged, and how much sooner than a baseline; seeds are paired.

There are two measures. By patience, a run converged at the epoch with the best mean
training loss. By a target, it converged at the first epoch that comes as low as the
baseline at its best epoch, by a scalar that is measured in the same way for all runs.
The first compares losses that differ from method to method, and an encoder that learns
nothing is soon at its best; the second has neither fault.

The target lies above the baseline's scalar by a share of that scalar, or of what the
baseline gained: the scalar of a frozen encoder less its own. A share of a loss of which
little was gained may be as large as the gain.
"""

import itertools
import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np
from etils import epath

from jaxcl import schema
from jaxcl.data import scenarios, storage
from jaxcl.evals import objective
from jaxcl.report import numbers as numbers_lib
from jaxcl.run import record, seeds
from jaxcl.run import results as results_lib

SCALARS = ("svm/all", "svm/old", "svm/new")
RATIOS = ("time_ratio", "epoch_ratio", "target_time_ratio", "target_passes_ratio")
# Of the scalar: at the best epoch, at any, the mean of the last TAIL, at the last.
LEVELS = ("at_best", "lowest", "tail", "at_end")
TAIL = 5  # one epoch's scalar wavers
# Metrics of steps: the learning rates taken, and how far inner steps move the weights.
RATES = ("lr", "inner_lr", "inner_moved")


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
    steps: int | None  # of the task, None in runs that did not count them
    rates: dict[str, list[float]]  # those of RATES in the rows of metrics.jsonl
    constant: float | None  # the scalar of an encoder whose rows are all alike


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
    folders = seeds.folders(workdir)
    runs = []
    for path in [*folders.values()] or [workdir]:
        own = path if (path / "config.json").exists() else workdir
        if not (own / "config.json").exists():
            raise ValueError(
                f"{name}={path}: holds no config.json; name the directory of a run, or "
                "that of its seeds"
            )
        config = storage.read_object(own / "config.json")
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
    growth = scenario.get("growth", schema.defaults(scenarios.make)["growth"])
    rows = [row for row in record.read_rows(folder) if row["task"] == task]
    ends = _epochs(where, rows, task, scalar)
    return Run(
        name=name,
        growth=growth if scenario.get("name") == "growth" else None,
        seed=seed,
        folder=folder,
        best=epochs["best"],
        last=epochs["last"],
        cut=patience == 0 or late < patience,
        epochs=ends,
        scalars=results["scalars"][task],
        steps=_steps(results, task),
        rates={name: [row[name] for row in rows if name in row] for name in RATES},
        constant=_constant(config, scalar),
    )


def _steps(results, task) -> int | None:
    """Steps that a finished task took."""
    spent = results["cost"]["per_task"][task]
    return None if spent is None else spent["steps"]


def _constant(config, scalar) -> float | None:
    """The scalar of an encoder that gives every item the same row; None: unknown."""
    judge = config.get("evaluators", {}).get("objective")
    if scalar != "objective/loss" or config.get("method", {}).get("name") != "icl":
        return None
    if judge is None or not config["method"].get("with_positive", True):
        return None
    # NCE-I of B rows that are alike: -log(1 / (1 + (B - 1))).
    default = schema.defaults(objective.make)["batch_size"]
    return math.log(judge.get("batch_size", default))


def _epochs(where, rows, task, scalar) -> list[Epoch]:
    """The epochs of a task, by its rows, each with the scalar of its last step.

    Scalars of other steps are not used. That leaves out the evaluation before the
    task's first step, which judged the state on the rows of fewer tasks.
    """
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


def level(run: Run) -> float:
    """The scalar at the run's best epoch.

    Raises:
      ValueError: it is not finite.
    """
    value = _at(run, run.best["number"])
    if not math.isfinite(value):
        raise ValueError(
            f"{run.name}={run.folder}: the scalar is not finite at the best "
            f"epoch, {run.best['number']}"
        )
    return value


def _at(run, number) -> float:
    """The scalar at the end of an epoch; infinite where there is none."""
    return {epoch.number: epoch.value for epoch in run.epochs}.get(number, math.inf)


def target(baseline: Run, within: float, frozen: Run | None = None) -> float:
    """The scalar to reach: that of the baseline's best epoch, plus a tolerance.

    Args:
      baseline: the run to compare with.
      within: the tolerance, as a share of the scalar's size, or of `gain`.
      frozen: a run whose weights stayed; None: the share is of the scalar's size.

    Raises:
      ValueError: the scalar is not finite at a best epoch.
    """
    value = level(baseline)
    whole = abs(value) if frozen is None else max(gain(baseline, frozen), 0.0)
    return value + within * whole


def gain(baseline: Run, frozen: Run) -> float:
    """By how much the baseline is below a run whose weights stayed."""
    return level(frozen) - level(baseline)


def reached(run: Run, goal: float) -> Epoch | None:
    """The first epoch that ends with the scalar at most `goal`, or None."""
    return next((epoch for epoch in run.epochs if epoch.value <= goal), None)


def _ratio(theirs, mine) -> float | None:
    return theirs / mine if theirs > 0 and mine > 0 else None


def levels(run: Run) -> dict[str, float | None]:
    """`LEVELS` -> the scalar there; None where it is not finite or not measured."""
    values = [epoch.value for epoch in run.epochs]
    found = (
        _at(run, run.best["number"]),
        min(values, default=math.inf),
        float(np.mean(values[-TAIL:])) if values else math.inf,
        _at(run, run.last["number"]),
    )
    return dict(zip(LEVELS, map(_finite, found), strict=True))


def paired(run: Run, baseline: Run, within: float, frozen: Run | None = None) -> dict:
    """All numbers of one seed; a ratio is baseline / run, None if one of them is 0."""
    goal = target(baseline, within, frozen)
    mine, theirs = reached(run, goal), reached(baseline, goal)
    numbers = {
        "seed": run.seed,
        "folder": str(run.folder),
        "cut_off": run.cut,
        "epoch": run.best["number"],
        "seconds": run.best["seconds"],
        "last_epoch": run.last["number"],
        "steps": run.steps,
        **levels(run),
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


def _finite(value) -> float | None:
    return value if math.isfinite(value) else None


def taken(values: Sequence[float]) -> dict | None:
    """Median, smallest and largest of what was logged; None if nothing was."""
    if not values:
        return None
    numbers = np.median(values), np.min(values), np.max(values)
    return dict(zip(("median", "low", "high"), map(float, numbers), strict=True))


def deviation(values: Iterable[float | None]) -> dict:
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
        half = numbers_lib.half_width(logs.std(ddof=1) / math.sqrt(count), count)
    interval = {"mean": mean, "low": mean - half, "high": mean + half}
    ratio = {name: math.exp(value) for name, value in interval.items()}
    return results_lib.plain({**ratio, "seeds": count})


def difference(
    one: dict[int, Run], other: dict[int, Run], scalars: Sequence[str]
) -> dict:
    """By how much the runs of one name are above those of another, seed by seed.

    Args:
      one, other: seed -> run.
      scalars: names of scalars at the end of the task.

    Returns:
      Each of `LEVELS` and of the scalars -> {"mean", "low", "high", "seeds"} of (one's
      - the other's) over the seeds that both have: the 95 % confidence interval is
      Student's, and None of one seed.
    """

    def measured(run):
        return {**{name: run.scalars.get(name) for name in scalars}, **levels(run)}

    pairs = [
        (measured(one[seed]), measured(other[seed])) for seed in one if seed in other
    ]
    found = {}
    for name in (*LEVELS, *scalars):
        values = [(mine[name], theirs[name]) for mine, theirs in pairs]
        less = [None if None in both else both[0] - both[1] for both in values]
        found[name] = numbers_lib.estimate(seeds.spread(less))._asdict()
    return found


def summary(
    runs: list[Run],
    baseline: dict[int, Run],
    *,
    within: float,
    scalars: Sequence[str],
    frozen: dict[int, Run] | None = None,
) -> dict:
    """What the runs of one name and growth come to, over seeds.

    Args:
      runs: one per seed.
      baseline: seed -> the run to compare with.
      within: as in `target`.
      scalars: names of scalars at the end of the task.
      frozen: as `baseline`, see `target`.

    Returns:
      "each", a list of `paired`; a `deviation` of each of their numbers and a
      `geometric` of each ratio, those of the target over the seeds that reached it;
      "scalars", name -> `deviation`; "rates", name -> what was `taken` in all seeds.
    """
    still = frozen or {}
    pairs = [
        paired(run, baseline[run.seed], within, still.get(run.seed)) for run in runs
    ]
    totals = {
        "seeds": len(pairs),
        "reached": sum(pair["reached"] for pair in pairs),
        "cut_off": sum(pair["cut_off"] for pair in pairs),
    }
    names = "target_epoch", "target_passes", "target_seconds", "steps", *LEVELS
    for name in ("epoch", "seconds", *names):
        totals[name] = deviation([pair.get(name) for pair in pairs])
    for name in RATIOS:
        totals[name] = geometric([pair.get(name) for pair in pairs])
    ends = {
        name: deviation([run.scalars.get(name) for run in runs]) for name in scalars
    }
    rates = {
        name: taken([rate for run in runs for rate in run.rates[name]])
        for name in RATES
    }
    return {**totals, "scalars": ends, "rates": rates, "each": pairs}


def compared(
    runs: list[Run],
    baseline: str,
    *,
    within: float = 0.01,
    scalars: Sequence[str] = SCALARS,
    frozen: str | None = None,
    pairs: Sequence[tuple[str, str]] = (),
) -> list[dict]:
    """Every name against the baseline, one entry per growth.

    Args:
      runs: in the order of the table.
      baseline: one of their names.
      within: as in `target`.
      scalars: names of scalars at the end of the task.
      frozen: the name of runs whose weights stayed, see `target`; None: without them.
      pairs: two names each, to be set against each other.

    Returns:
      By growth, {"growth": number or None, "runs": name -> `summary`, "gain": seed ->
      `gain` ({} without `frozen`), "constant": see `Run` (of the baseline), "agree":
      `agreeing`, "pairs": [{"names": two, "difference": `difference`}], of those pairs
      of which the growth has both names}.

    Raises:
      ValueError: no run has a name that is asked for; the baseline or `frozen` lacks a
        growth or a seed of another name; or two runs of a name have the same growth
        and seed.
    """
    groups = _grouped(runs, {"baseline": baseline, "frozen": frozen})
    names = list(dict.fromkeys(run.name for run in runs))
    for pair in pairs:
        if not {*pair} <= {*names}:
            told = ":".join(pair)
            raise ValueError(f"--pair={told}: names are {', '.join(names)}")
    entries = []
    for growth in sorted(groups, key=lambda x: (x is not None, x)):
        group = groups[growth]
        summaries = {
            name: summary(
                list(group[name].values()),
                group[baseline],
                within=within,
                scalars=scalars,
                frozen=group.get(frozen),
            )
            for name in names
            if name in group
        }
        bases = group[baseline]
        entry = {"growth": growth, "runs": summaries}
        entry["gain"] = {
            seed: gain(bases[seed], run) for seed, run in group.get(frozen, {}).items()
        }
        entry["constant"] = next(iter(bases.values())).constant
        entry["agree"] = agreeing(group)
        entry["pairs"] = [
            {"names": [*pair], "difference": difference(*both, scalars)}
            for pair in pairs
            if len(both := [group[name] for name in pair if name in group]) == 2
        ]
        entries.append(entry)
    return entries


def agreeing(group: dict[str, dict[int, Run]]) -> list[dict]:
    """Which rows have their best epoch in common, seed by seed.

    Rows that read the same batches in the same order may be at their best in the same
    epoch whatever they learn.

    Args:
      group: name -> seed -> run.

    Returns:
      [{"seed", "epoch", "names": two or more}], by seed and epoch.
    """
    shared = {}
    for name, by_seed in group.items():
        for seed, run in by_seed.items():
            shared.setdefault((seed, run.best["number"]), []).append(name)
    return [
        {"seed": seed, "epoch": epoch, "names": names}
        for (seed, epoch), names in sorted(shared.items())
        if len(names) > 1
    ]


def _grouped(runs, references) -> dict:
    """Growth -> name -> seed -> run, where each run has all references.

    Args:
      references: option -> name, or None if the option was not given.
    """
    names = list(dict.fromkeys(run.name for run in runs))
    references = {o: name for o, name in references.items() if name is not None}
    for option, name in references.items():
        if name not in names:
            raise ValueError(f"--{option}={name}: allowed are {', '.join(names)}")
    groups = {}
    for run in runs:
        mine = groups.setdefault(run.growth, {}).setdefault(run.name, {})
        if run.seed in mine:
            raise ValueError(
                f"{run.name}={run.folder}: seed {run.seed}{_of_growth(run.growth)} is "
                f"that of {mine[run.seed].folder} too"
            )
        mine[run.seed] = run
    for run, (option, name) in itertools.product(runs, references.items()):
        if run.seed not in groups[run.growth].get(name, {}):
            raise ValueError(
                f"{run.name}={run.folder}: --{option}={name} has no seed "
                f"{run.seed}{_of_growth(run.growth)}"
            )
    return groups


def _of_growth(growth) -> str:
    return "" if growth is None else f" at growth {growth:g}"
