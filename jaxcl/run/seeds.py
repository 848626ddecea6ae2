"""Run many seeds of one config, one after another, and summarise their results."""

import math
from collections.abc import Callable, Iterable
from typing import NamedTuple

import numpy as np
from etils import epath

from jaxcl.run import result_file

SUMMARY = "seeds.json"
_PREFIX = "seed_"


class SeedRuns(NamedTuple):
    """The runs of a config with `seeds` above 1."""

    seeds: tuple[int, ...]
    make: Callable  # seed -> job.Job, built when its turn comes


def folder(seed: int) -> str:
    """Return a seed's run directory, inside the directory of all seeds."""
    return f"{_PREFIX}{seed}"


def folders(workdir: epath.PathLike) -> dict[int, epath.Path]:
    """Find the run directories of the seeds in `workdir`, in order."""
    paths = epath.Path(workdir).glob(f"{_PREFIX}*")
    marks = {path.name.removeprefix(_PREFIX): path for path in paths}
    return dict(sorted((int(x), path) for x, path in marks.items() if x.isdigit()))


def mean_and_error(values: Iterable[float | None]) -> dict:
    """Compute mean, standard error of the mean and number of values, as JSON.

    Args:
      values: one number per seed; None (not measured) is left out.
    """
    values = np.array([x for x in values if x is not None], float)
    count = len(values)
    error = values.std(ddof=1) / math.sqrt(count) if count > 1 else None
    mean = values.mean() if count else None
    return result_file.jsonable({"mean": mean, "error": error, "seeds": count})


def measures(results: dict) -> dict:
    """Compute `result_file.summary`, with one number in place of the curve over tasks.

    Returns:
      matrix name -> measure -> number or None; "anytime" is the mean over tasks of
      the average accuracy after each.
    """
    by_matrix = result_file.summary(results)
    for values in by_matrix.values():
        curve = values.pop("average_accuracy_per_task")
        complete = curve and None not in curve
        values["anytime"] = sum(curve) / len(curve) if complete else None
    return by_matrix


def summary(results: dict[int, dict]) -> dict:
    """Compute mean and standard error over seeds of every measure of `measures`.

    Args:
      results: seed -> results, see `result_file.empty_results`.

    Returns:
      matrix name -> measure -> {"mean", "error", "seeds"}.
    """
    of_seeds = [measures(seed_results) for seed_results in results.values()]
    return {
        name: {
            measure: mean_and_error(
                [values.get(name, {}).get(measure) for values in of_seeds]
            )
            for measure in of_seeds[0][name]
        }
        for name in of_seeds[0]
    }


def format_summary(summary: dict) -> str:
    """Write the `summary` as text: one line per matrix, in percent."""
    titles = ("average_accuracy", "anytime", "forgetting")
    rows = {"mean +- standard error (%)": ("average", *titles[1:])}
    for name, spreads in summary.items():
        rows[name] = tuple(percent(spreads[measure]) for measure in titles)
    return "\n".join(
        f"{name:32}" + "".join(f"{cell:>16}" for cell in cells)
        for name, cells in rows.items()
    )


def percent(spread: dict) -> str:
    """Write a `mean_and_error` in percent: mean and standard error."""
    if spread["mean"] is None:
        return "-"
    error = "" if spread["error"] is None else f" +- {100 * spread['error']:.1f}"
    return f"{100 * spread['mean']:.1f}{error}"


def write_summary(workdir: epath.PathLike, summary: dict) -> None:
    """Write the summary into the directory of all seeds."""
    result_file.write_json(epath.Path(workdir) / SUMMARY, summary)
