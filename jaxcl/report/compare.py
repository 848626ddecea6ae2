"""Compare runs: `jaxcl compare runs/er runs/er_ace --out=compare.png`.

Each directory is a run, or holds the runs of several seeds (config.seeds). Prints mean
and standard error over seeds, the cost of a step and of an incoming image, and the
paired difference to the first directory over the seeds that both have; draws accuracy
over time into one figure.
With `--scalar` it compares a scalar of an evaluator in place of accuracies.
"""

import argparse
import collections
import sys
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from etils import epath

from jaxcl.data import storage
from jaxcl.evals import plots, spread
from jaxcl.report import comparability
from jaxcl.run import cost as cost_lib
from jaxcl.run import results as results_lib
from jaxcl.run import rows as rows_lib
from jaxcl.run import seeds

MEASURES = ("average_accuracy", "anytime", "forgetting")


class Run(NamedTuple):
    """The runs of one directory, one for each seed."""

    name: str
    results: dict[int, dict]  # seed -> results, see `results.empty`
    folders: dict[int, epath.Path]  # seed -> where its metrics.jsonl is
    configs: comparability.Configs = comparability.Configs()
    together: epath.Path | None = None  # where metrics.jsonl is of seeds side by side
    # Seed -> tasks finished, of seeds that were left out, see `level`.
    behind: dict[int, int] = {}


def read(workdir: epath.PathLike) -> Run:
    """Read a run directory, or that of several seeds.

    Raises:
      ValueError: there are no results.
    """
    workdir = epath.Path(workdir)
    folders = {
        seed: path
        for seed, path in seeds.folders(workdir).items()
        if (path / results_lib.RESULTS).exists()
    }
    if not folders and (workdir / results_lib.RESULTS).exists():
        folders = {_seed(workdir): workdir}
    if not folders:
        raise ValueError(
            f"{workdir}: no run in it has finished a task"
            if workdir.is_dir()
            else f"{workdir}: no such run folder"
        )
    results = {seed: results_lib.read_results(path) for seed, path in folders.items()}
    configs = comparability.read([workdir, *folders.values()])
    together = workdir / "together"
    together = together if together.exists() else None
    return Run(workdir.name, results, folders, configs, together)


def done(run: Run) -> int:
    """How many tasks the seeds of a run have finished, see `level`."""
    return results_lib.finished(next(iter(run.results.values())))


def level(run: Run) -> Run:
    """The run with those of its seeds alone that have finished the most tasks."""
    finished = {seed: results_lib.finished(own) for seed, own in run.results.items()}
    most = max(finished.values())
    kept = [seed for seed, count in finished.items() if count == most]
    return run._replace(
        results={seed: run.results[seed] for seed in kept},
        folders={seed: run.folders[seed] for seed in kept},
        behind={seed: count for seed, count in finished.items() if count < most},
    )


def comparable(run: Run, first: Run) -> bool:
    """Whether both runs are finished, or both stand after the same task."""
    over = [done(r) == _size(r) for r in (run, first)]
    return all(over) or (not any(over) and done(run) == done(first))


def _size(run) -> int:
    """How many tasks a run has."""
    return len(next(iter(run.results.values()))["task_names"])


def rows(run: Run) -> dict[int, list]:
    """Seed -> rows of metrics.jsonl, for seeds that have one.

    Seeds that ran side by side have a common one; its metrics of steps are means over
    all seeds, and are given to the first alone.
    """
    by_seed = {
        seed: rows_lib.read(folder)
        for seed, folder in run.folders.items()
        if (folder / rows_lib.FILE).exists()
    }
    if by_seed or run.together is None or not (run.together / rows_lib.FILE).exists():
        return by_seed
    common = rows_lib.read(run.together)
    for number, seed in enumerate(run.folders):
        by_seed[seed] = []
        for row in common:
            if "eval" in row:
                own = seeds.take_values(row["eval"], number)
                by_seed[seed].append({**row, "eval": own})
            elif number == 0:
                by_seed[seed].append(row)
    return by_seed


def names_of(workdirs: Sequence[epath.PathLike]) -> list[str]:
    """A name for each directory: as few of its last parts as make it unique.

    Raises:
      ValueError: a directory is given twice.
    """
    paths = [epath.Path(workdir) for workdir in workdirs]
    for path, count in collections.Counter(paths).items():
        if count > 1:
            raise ValueError(f"{path}: given {count} times; name each run once")
    names, parts = [path.name or path.resolve().name for path in paths], 1
    while len(set(names)) < len(names):
        parts += 1
        names = [
            "/".join(path.parts[-parts:]) if names.count(name) > 1 else name
            for path, name in zip(paths, names, strict=True)
        ]
    return names


def _seed(workdir) -> int:
    return storage.read_object(workdir / "config.json").get("seed", 0)


def difference(run: Run, other: Run, name: str, measure: str) -> dict:
    """Mean and standard error of `run` less `other`, over seeds that both have."""
    mine, theirs = (
        {seed: seeds.measures(own)[name][measure] for seed, own in r.results.items()}
        for r in (run, other)
    )
    pairs = [(mine[seed], theirs[seed]) for seed in sorted({*mine} & {*theirs})]
    return seeds.spread([a - b for a, b in pairs if None not in (a, b)])


def cost(run: Run) -> dict[str, float | None]:
    """What training costs, a mean over seeds; None where it is not known.

    "milliseconds" and "flops" of a step; "per_image", FLOPs for each image of the
    stream, however often a method passes it.
    """
    totals = [results["cost"]["total"] for results in run.results.values()]
    totals = [total for total in totals if total and total["steps"]]
    counted = [x for x in totals if x["flops"] is not None]
    found = {
        "milliseconds": [1000 * x["train_seconds"] / x["steps"] for x in totals],
        "flops": [x["flops"] / x["steps"] for x in counted],
        "per_image": [x["flops"] / x["images"] for x in counted if x["images"]],
    }
    return {key: float(np.mean(x)) if x else None for key, x in found.items()}


def curve(
    run: Run, name: str, *, band: str = "error"
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The average accuracy over the tasks met, or a scalar, against steps.

    Args:
      run: from `read`.
      name: of a matrix or a scalar, as under "eval" in metrics.jsonl.
      band: "error", the standard error of the mean, or "std".

    Returns:
      (steps i64[n], mean f64[n], band f64[n], 0 for one seed), at the steps after the
      first that every seed has.
    """
    of_seeds = [_points(own, name) for own in rows(run).values()] or [{}]
    steps = sorted(set.intersection(*(set(points) for points in of_seeds)))
    values = np.array([[points[s] for s in steps] for points in of_seeds])
    half, count = np.zeros(len(steps)), len(of_seeds)
    if count > 1:
        half = values.std(axis=0, ddof=1) / (1 if band == "std" else count**0.5)
    return np.array(steps), values.mean(axis=0), half


def along(run: Run, name: str) -> dict:
    """Mean and standard error over seeds of the mean over all evaluations.

    With evaluations every so many steps (config.eval_every) it is the area under the
    curve of i-Blurry (Koh et al., ICLR 2022), of the tasks met, each from its first
    step on.

    Args:
      run: from `read`.
      name: of a matrix.
    """
    points = [_points(own, name).values() for own in rows(run).values()]
    return seeds.spread([float(np.mean([*own])) for own in points if own])


def _points(rows, name) -> dict[int, float]:
    """Step -> a scalar, or the mean of a matrix's row over the tasks met, of a run."""
    points = {}
    for row in rows:
        value = row.get("eval", {}).get(name)
        if value is not None and row["step"]:
            met = value[: row["task"] + 1] if isinstance(value, list) else value
            points[row["step"]] = np.mean(np.array(met, float))
    return points


def text(runs: list[Run], name: str) -> str:
    """A table of one matrix with a line for each run; differences are to the first."""
    head = ("seeds", "average", "anytime", "along", "forgetting")
    head += ("ms/step", "FLOPs", "FLOP/image", "- first")
    width = max(24, *(len(run.name) + 2 for run in runs))
    lines = [f"{name} (%)".ljust(width) + "".join(f"{h:>15}" for h in head)]
    first = cost(runs[0])
    for run in runs:
        summary, spent = seeds.summary(run.results)[name], cost(run)
        cells = [str(len(run.results))]
        cells += [seeds.percent(summary[measure]) for measure in MEASURES]
        cells.insert(3, seeds.percent(along(run, name)))
        time, flops = spent["milliseconds"], spent["flops"]
        cells.append("-" if time is None else f"{time:.1f}")
        share = flops and first["flops"] and flops / first["flops"]
        cells.append(f"{share:.2f}x" if share else "-")
        image = spent["per_image"]
        cells.append("-" if image is None else cost_lib.short(image))
        paired = difference(run, runs[0], name, "average_accuracy")
        paired = seeds.percent(paired) if comparable(run, runs[0]) else "-"
        cells.append(paired if run is not runs[0] else "")
        lines.append(run.name.ljust(width) + "".join(f"{c:>15}" for c in cells))
    return "\n".join(lines)


def told_behind(run: Run) -> str:
    """The seeds that were left out, and how far each had come; "" if there are none."""
    size = _size(run)
    return ", ".join(f"seed {s} ({n} of {size})" for s, n in run.behind.items())


def remarks(runs: list[Run]) -> list[str]:
    """What a reader of the numbers must know of the runs, in lines."""
    configs = {run.name: run.configs for run in runs}
    lines = [
        f"not measured alike: {field}" for field in comparability.differences(configs)
    ]
    for run in runs:
        size = _size(run)
        if done(run) < size:
            lines.append(f"{run.name}: {done(run)} of {size} tasks are finished")
        if told := told_behind(run):
            lines.append(f"{run.name}: left out, others have come further: {told}")
        if run.together is not None:
            words = "its seeds ran side by side; ms and FLOPs of a step are of all"
            lines.append(f"{run.name}: {words}")
    return lines


def scalar_text(curves: dict[str, tuple], name: str, band: str) -> str:
    """The last value of a scalar with its band over seeds, one line for each run.

    Args:
      curves: name of a run -> its `curve`.
      name: of the scalar.
      band: as in `curve`.
    """
    kind = {"error": "standard error", "std": "std"}[band]
    lines = [f"{name}, mean +- {kind} at the last step"]
    for run, (steps, mean, half) in curves.items():
        lines.append(f"{run:24}{mean[-1]:>12.4f} +- {half[-1]:.4f}  step {steps[-1]}")
    return "\n".join(lines)


def parser() -> argparse.ArgumentParser:
    """Return the options of the command."""
    arguments = argparse.ArgumentParser(
        prog="jaxcl compare", description=__doc__.splitlines()[0]
    )
    add = arguments.add_argument
    add("workdirs", nargs="+", help="run directories")
    add("--matrix", default=None, help="default: the first's first")
    add("--scalar", default=None, help="as memory/entropy")
    add("--classes", default=None, help="a spread entry, as spread")
    add("--band", default="error", choices=["error", "std"])
    add("--out", default=None, help="a .png, .svg or .pdf of it over time")
    return arguments


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; exit code 2 if a directory or a name is wrong."""
    try:
        _compare(parser().parse_args(argv))
    except (ValueError, OSError) as error:
        print(f"jaxcl: {error}", file=sys.stderr)
        return 2
    return 0


def _compare(options) -> None:
    """Print and draw what was asked for."""
    if options.out:
        plots.format_of(options.out)
    workdirs = options.workdirs
    runs = [
        level(read(workdir))._replace(name=name)
        for workdir, name in zip(workdirs, names_of(workdirs), strict=True)
    ]
    if options.scalar:
        _scalar(runs, options)
    elif options.classes:
        _classes(runs, options)
    else:
        _matrix(runs, options)
    for line in remarks(runs):
        print(line)


def _matrix(runs, options) -> None:
    """Compare the accuracies of a matrix."""
    names = [set(r["matrices"]) for run in runs for r in run.results.values()]
    first = next(iter(runs[0].results.values()))["matrices"]
    name = options.matrix or next(iter(first), None)
    if name is None or not all(name in seed_names for seed_names in names):
        common = sorted(set.intersection(*names))
        raise ValueError(
            f"--matrix={name}: allowed are what all runs have, "
            f"{', '.join(common) or 'nothing'}"
        )
    print(text(runs, name))
    if options.out:
        curves = {run.name: curve(run, name, band=options.band) for run in runs}
        ends = _task_ends(next(iter(runs[0].results.values())))
        plots.anytime(curves, options.out, task_ends=ends)


def _scalar(runs, options) -> None:
    """Compare a scalar."""
    name = options.scalar
    curves = {run.name: curve(run, name, band=options.band) for run in runs}
    lacking = [run for run, (steps, *_) in curves.items() if not len(steps)]
    if lacking:
        raise ValueError(f"--scalar={name}: not measured by {', '.join(lacking)}")
    print(scalar_text(curves, name, options.band))
    if options.out:
        ends = _task_ends(next(iter(runs[0].results.values())))
        plots.anytime(curves, options.out, task_ends=ends, ylabel=name, scale=1.0)


def _classes(runs, options) -> None:
    """Draw the spread of each class, a mean over seeds."""
    key, means = options.classes, {}
    for run in runs:
        of_seeds = [spread.by_class(own) for own in rows(run).values()]
        if not of_seeds or not all(key in spreads for spreads in of_seeds):
            raise ValueError(f"--classes={key}: not measured by {run.name}")
        means[run.name] = np.mean([spreads[key] for spreads in of_seeds], axis=0)
    if options.out is None:
        raise ValueError("--classes: wants --out, a .png")
    plots.class_spread(means, options.out, title=key)


def _task_ends(results: dict) -> list[int]:
    """Step after which each task ends."""
    steps = [spent["steps"] for spent in results["cost"]["per_task"] if spent]
    return np.cumsum(steps).tolist()
