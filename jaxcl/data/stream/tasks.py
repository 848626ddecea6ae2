"""Tasks, and the rows of every step of a task; `scenarios` makes the tasks."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from jaxcl.data.stream import orders, sets
from jaxcl.errors import Refused


class Source(NamedTuple):
    """A task's training set: rows of some examples, and the order of an epoch."""

    examples: sets.Examples
    rows: np.ndarray  # i32[n]
    order: Callable = orders.epoch_order  # (rng, rows, batch_size) -> i32[steps, batch]


class Task(NamedTuple):
    """One step of a scenario."""

    index: int  # from 0
    name: str
    classes: np.ndarray  # i32[k], classes that occur in the task
    domain: int  # -1 unless the task is one domain
    train: Source
    test: np.ndarray  # i32[m], rows of the stream's evaluation examples
    earlier: np.ndarray = np.zeros(0, np.int32)  # train rows of all tasks before it


class Stream(NamedTuple):
    """A scenario: the dataset, its tasks, and the evaluation split."""

    dataset: sets.Dataset
    tasks: tuple[Task, ...]
    evaluation: sets.Examples | None  # dataset.test, dataset.validation or None


@dataclasses.dataclass
class Schedule:
    """Rows of every step of a task: `schedule[step]` is i32[batch].

    A pure function of (seed, task, epoch), so there is no position to save. `cache`
    keeps the epochs in use. Made by `schedule`.
    """

    rows: np.ndarray  # i32[n]
    order: Callable
    seed: int
    task: int
    epochs: int
    batch_size: int
    steps_per_epoch: int
    cache: dict = dataclasses.field(default_factory=dict, repr=False)

    def __len__(self) -> int:
        """Return all steps of the task."""
        return self.epochs * self.steps_per_epoch

    def __getitem__(self, step: int) -> np.ndarray:
        """Return rows of one step, i32[batch]."""
        if not 0 <= step < len(self):
            raise IndexError(f"step {step} of a schedule of {len(self)} steps")
        epoch, within = divmod(int(step), self.steps_per_epoch)
        rows = self.cache.get(epoch)
        if rows is None:
            rows = _epoch_rows(self, epoch)
            # Two epochs are kept: near an epoch's end threads read from both.
            if len(self.cache) > 1:
                self.cache.clear()
            self.cache[epoch] = rows
        return rows[within]


def _epoch_rows(plan: Schedule, epoch: int) -> np.ndarray:
    """Return rows of one epoch, i32[steps, batch]."""
    rng = np.random.default_rng([plan.seed, plan.task, epoch])
    rows = np.asarray(plan.order(rng, plan.rows, plan.batch_size), np.int32)
    expected = (plan.steps_per_epoch or len(rows), plan.batch_size)
    if rows.shape != expected:
        raise Refused(
            f"task {plan.task}: order gave rows of shape {rows.shape} for epoch "
            f"{epoch}, expected [steps, batch] = {expected}"
        )
    return rows


def epochs_of_tasks(epochs: int | Sequence[int]) -> tuple[int, ...]:
    """Return the number of epochs by task; the last number also serves later tasks."""
    return (epochs,) if isinstance(epochs, int | np.integer) else tuple(epochs)


def schedule(
    source: Source,
    *,
    seed: int,
    task: int,
    epochs: int | Sequence[int],
    batch_size: int,
) -> Schedule:
    """Order all steps of a task; `epochs` as in `epochs_of_tasks`.

    Raises Refused if a number is below 1 (seed and task: below 0), if the task has
    fewer rows than a batch, or if `source.order` gives no step.
    """
    by_task = epochs_of_tasks(epochs)
    epochs = by_task[min(task, len(by_task) - 1)] if by_task else 0
    for name, value, least in (
        ("seed", seed, 0),
        ("task", task, 0),
        ("epochs", epochs, 1),
        ("batch_size", batch_size, 1),
    ):
        if not isinstance(value, int | np.integer) or value < least:
            raise Refused(name, value, f"must be an integer >= {least}")
    if batch_size > len(source.rows) and source.order is orders.epoch_order:
        raise Refused(
            f"batch_size={batch_size}: task {task} has only {len(source.rows)} "
            "train rows; use a smaller batch or fewer tasks"
        )
    rows = np.asarray(source.rows, np.int32)
    plan = Schedule(rows, source.order, seed, task, epochs, batch_size, 0)
    first = _epoch_rows(plan, 0)
    if len(first) == 0:
        raise Refused(f"task {task}: the order of its {len(rows)} rows has no batch")
    plan.steps_per_epoch = len(first)
    return plan
