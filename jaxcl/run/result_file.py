"""Fill, read, write and show results.json: accuracy matrices, scalars and cost."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from etils import epath

from jaxcl import metrics, storage
from jaxcl.errors import Refused
from jaxcl.run import cost

RESULTS = "results.json"


def jsonable(value: Any) -> Any:
    """Convert to Python types that JSON knows; nan and infinity become None.

    Args:
      value: a scalar or an array of any numeric dtype, a string, None, or lists, tuples
        and dicts of these. Integers and bools keep their type.
    """
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else None
    if isinstance(value, dict):
        return {str(k): jsonable(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [jsonable(v) for v in value]
    array = np.asarray(value)
    # Widening to float64 is exact for every float dtype, so float32 round-trips.
    exact = array if array.dtype.kind in "biu" else array.astype(np.float64)
    return jsonable(exact.tolist())


def latest_table(
    matrices: Mapping[str, np.ndarray],
    task: int,
    *,
    title: str = "",
    columns: int = 12,
) -> str:
    """Write the accuracies after a task as a text table, a line for each matrix.

    Args:
      matrices: name -> f[T, T] in [0, 1], nan where not measured.
      task: number of the task, from 0; the columns are the tasks so far, in percent,
        and their average.
      title: name of the network that was evaluated; "": it is that after the task.
      columns: most tasks to show; with more, the middle ones are left out.
    """
    head, size, half = f"after task {task + 1}", task + 1, columns // 2
    head = f"{title or head} (%)"
    cut = size > columns
    shown = [*range(half), *range(size - half, size)] if cut else [*range(size)]
    width = max(len(head), 14, *(len(name) + 2 for name in matrices))

    def format_row(title, cells):
        cells = [*cells[:half], "...", *cells[half:]] if cut else cells
        return title.ljust(width) + "".join(f"{c:>9}" for c in cells)

    lines = [format_row(head, [*(f"task {j + 1}" for j in shown), "average"])]
    for name, matrix in matrices.items():
        row = 100 * matrix[task]
        values = [*row[shown], row[:size].mean()]
        cells = ["-" if np.isnan(v) else f"{v:.1f}" for v in values]
        lines.append(format_row(f"  {name}", cells))
    return "\n".join(lines)


def empty_results(
    num_tasks: int,
    *,
    task_names: Sequence[str] | None = None,
    embeds: str = "encoder",
) -> dict:
    """Make the results before the first task, as JSON.

    Args:
      num_tasks: T.
      task_names: T strings; by default "task 1", "task 2", ...
      embeds: input of the method's `embed`, see `core.Method`; an export says it.

    Returns:
      A dict. Its "finetune" will map a matrix name to f[T], the accuracy on each task
      of a model trained on that task alone; plasticity needs it. A finished run adds
      "data": the rows of each split, and a digest of names, bytes and labels.
    """
    names = task_names or [f"task {i + 1}" for i in range(num_tasks)]
    _check_length("task_names", names, num_tasks)
    return ({} if embeds == "encoder" else {"embeds": embeds}) | {
        "task_names": [*map(str, names)],
        "matrices": {},
        "finetune": None,
        "scalars": [None] * num_tasks,
        "seconds": [None] * num_tasks,
        "cost": cost.empty_cost(num_tasks),
    }


def _check_length(field, values, length):
    if len(values) != length:
        raise Refused(f"{field} has {len(values)} entries: must be {length}")


def add_task(
    results: dict, task: int, rows: dict, scalars: dict, seconds: float
) -> dict:
    """Return new results with the measurements after a task.

    Args:
      results: results from `empty_results` or `add_task`; not changed.
      task: number of the task, from 0; earlier measurements after it are replaced.
      rows: matrix name -> f[T], accuracy on each task, nan if not measured.
      scalars: name -> number.
      seconds: time spent on the task.

    Raises:
      Refused: `task` is not in [0, T) or a row has not T entries.
    """
    size = len(results["task_names"])
    if not 0 <= task < size:
        raise Refused(f"task={task}: must be in [0, {size})")
    for name, row in rows.items():
        _check_length(f"rows[{name!r}]", row, size)

    def replace(items, item):
        return [*items[:task], jsonable(item), *items[task + 1 :]]

    matrices, old = {}, results["matrices"]
    for name in old | rows:
        blank = np.full(size, np.nan)
        matrix = old.get(name) or jsonable([blank] * size)
        matrices[name] = replace(matrix, rows.get(name, blank))
    return results | {
        "matrices": matrices,
        "scalars": replace(results["scalars"], scalars),
        "seconds": replace(results["seconds"], seconds),
    }


def add_convergence(results: dict, task: int, convergence: dict) -> dict:
    """Add the summary of a task's epochs, see `metrics_log`; returns new results."""
    before = results.get("convergence", {})
    return {**results, "convergence": {**before, str(task): jsonable(convergence)}}


def make_room(results: dict, task_names: Sequence[str]) -> dict:
    """Extend the results of a run for another run that continues it with more tasks.

    Args:
      results: results of the earlier run.
      task_names: names of all tasks; tasks in `results` keep theirs.

    Returns:
      `results` if they have as many tasks. Otherwise new results without matrices,
      since the new tasks are evaluated on other data.
    """
    added = len(task_names) - len(results["task_names"])
    if added <= 0:
        return results
    names, blank, spent = map(str, task_names[-added:]), [None] * added, results["cost"]
    blank_results = empty_results(
        len(task_names), embeds=results.get("embeds", "encoder")
    )
    return blank_results | {
        "task_names": [*results["task_names"], *names],
        "scalars": [*results["scalars"], *blank],
        "seconds": [*results["seconds"], *blank],
        "cost": spent | {"per_task": [*spent["per_task"], *blank]},
    }


def count_finished(results: dict) -> int:
    """Count the tasks that have been evaluated."""
    return sum(scalars is not None for scalars in results["scalars"])


def has_results(folder: epath.PathLike) -> bool:
    """Tell whether a run directory has results."""
    return (epath.Path(folder) / RESULTS).exists()


def complete(folder: epath.PathLike) -> bool:
    """Tell whether a run directory has the results of all its tasks."""
    folder = epath.Path(folder)
    if not has_results(folder):
        return False
    results, config = read_results(folder), storage.read_object(folder / "config.json")
    wanted = config.get("first_tasks") or len(results["task_names"])
    return count_finished(results) >= wanted


def matrix(results: dict, name: str) -> np.ndarray:
    """Read the accuracies f64[T, T] of one evaluator, nan where not measured."""
    return np.array(results["matrices"][name], np.float64)


def untrained(results: dict, name: str) -> float | None:
    """Average the accuracies of one evaluator before training; None without any."""
    before = np.array(results.get("untrained", {}).get(name, []), float)
    return float(np.nanmean(before)) if np.isfinite(before).any() else None


def below_untrained(results: dict) -> list[str]:
    """List the evaluators whose average accuracy is below the untrained network's."""
    below = []
    for name, measures in summary(results).items():
        before, after = untrained(results, name), measures["average_accuracy"]
        if None not in (before, after) and after < before:
            below.append(name)
    return below


def summary(results: dict) -> dict:
    """Compute the measures of `jaxcl.metrics` over the tasks finished so far.

    Returns:
      Matrix name -> `average_accuracy`, `average_accuracy_per_task` (after each task),
      `forgetting`, `stability` and, for names in `finetune`, `plasticity`. A measure is
      None where it is not defined (one task, or accuracies that were not measured).
    """
    out, size = {}, count_finished(results)
    for name in results["matrices"]:
        block = matrix(results, name)[:size, :size]
        out[name] = {
            "average_accuracy": metrics.average_accuracy(block),
            "average_accuracy_per_task": metrics.average_accuracy_per_task(block),
            "forgetting": metrics.forgetting(block),
            "stability": metrics.stability(block),
        }
        single_task = (results["finetune"] or {}).get(name)
        if single_task is not None:
            out[name]["plasticity"] = metrics.plasticity(block, single_task[:size])
    return jsonable(out)


def write_results(workdir: epath.PathLike, results: dict) -> None:
    """Write `results.json`: the results and their `summary`."""
    write_json(epath.Path(workdir) / RESULTS, {**results, "summary": summary(results)})


def write_json(path: epath.PathLike, value: Any) -> None:
    """Write a value as JSON, see `jsonable` and `storage.write_json`."""
    storage.write_json(path, jsonable(value))


def read_results(workdir: epath.PathLike) -> dict:
    """Read the results of a run, without the summary that `write_results` adds."""
    written = storage.read_object(epath.Path(workdir) / RESULTS)
    return {key: value for key, value in written.items() if key != "summary"}
