"""Uneven classes: streams that one class dominates, and long-tailed sets.

Both change which rows a task trains on and leave the train split whole, so probes
still train on all of it.
"""

from collections.abc import Sequence
from typing import Annotated, NamedTuple

import numpy as np

from jaxcl import schema
from jaxcl.data import stream
from jaxcl.errors import Refused

_Share = Annotated[float, schema.Range(above=0, below=1)]


class Dominated(NamedTuple):
    """Draws an epoch in which one class dominates; see `dominated`."""

    label: np.ndarray  # i32[N], of all train rows
    dominant: int
    rho_max: float
    steps: int | None  # steps of an epoch; None: as many as a pass over the rows has

    def __call__(
        self, rng: np.random.Generator, rows: np.ndarray, batch_size: int
    ) -> np.ndarray:
        """Return rows of an epoch, i32[steps, batch], drawn with replacement."""
        steps = len(rows) // batch_size if self.steps is None else self.steps
        rows = rows[np.argsort(self.label[rows], kind="stable")]
        classes, first, count = np.unique(
            self.label[rows], return_index=True, return_counts=True
        )
        rho = probabilities(classes, dominant=self.dominant, rho_max=self.rho_max)
        drawn = rng.choice(len(classes), (steps, batch_size), p=rho)
        return rows[first[drawn] + rng.integers(count[drawn])]


def probabilities(classes: np.ndarray, *, dominant: int, rho_max: float) -> np.ndarray:
    """Return, for each class, the probability that a drawn row has it, f64[C].

    rho_c = rho_max for the dominant class, (1 - rho_max) / (C - 1) for all others.

    Source: DUEL (Choi et al., AAAI 2024), "Class-imbalanced environment".
    """
    others = (1 - rho_max) / (len(classes) - 1)
    return np.where(classes == dominant, rho_max, others)


@schema.checked("imbalance")
@schema.debug(dominant=0, epoch_steps=5)
def dominated(
    tasks: Sequence[stream.Task],
    names: Sequence[str],
    *,
    rho_max: _Share | Sequence[_Share],
    dominant: schema.Natural | str | Sequence[schema.Natural | str] | None = None,
    epoch_steps: schema.Count | None = None,
) -> list[stream.Task]:
    """Make tasks in whose batches one class dominates.

    Rows of a batch are drawn independently. First a class c of the task is drawn with
    probability rho_c, see `probabilities`; then one of the task's rows of class c,
    uniformly and with replacement. So an epoch is a number of steps and not a pass.

    Args:
      tasks: tasks whose train rows all have labels.
      names: names of the classes.
      rho_max: probability of the dominant class, from 1 / C (even classes) to below 1;
        or one for each task, so that a stream may begin evenly.
      dominant: class that every task has, or one for each task, by number or name;
        None: the first class of each task, in the task's own order.
      epoch_steps: steps of an epoch; None: as many as one pass over the rows has.

    Returns:
      The tasks, each with a new order of its train rows.

    Raises:
      Refused: an option out of its range; a task with fewer than two classes, without
        the dominant class, or in which another class would be more probable.

    Source: DUEL (Choi et al., AAAI 2024), "Class-imbalanced environment". The paper
    does not say which class dominates.
    """
    uneven = []
    shares = _list_by_task(rho_max, tasks, "rho_max", "probability")
    numbers = _dominants(tasks, names, dominant)
    for task, number, share in zip(tasks, numbers, shares, strict=True):
        title, count = f"task {task.index} ({task.name})", len(task.classes)
        if count < 2:
            raise Refused(f"imbalance: {title} needs 2 classes, it has {count}")
        if share * count < 1 - 1e-6:  # a config may say 0.333333 for 1 / 3
            raise Refused(
                f"imbalance.rho_max={rho_max!r}: {title} has {count} classes, of which "
                f"{names[number]!r} would be the rarest; must be at least 1 / {count}"
            )
        order = Dominated(task.train.examples.label, number, share, epoch_steps)
        uneven.append(task._replace(train=task.train._replace(order=order)))
    return uneven


def _dominants(tasks, names, dominant) -> list[int]:
    """Return the number of the dominant class of every task."""
    if dominant is None:
        return [int(task.classes[0]) if len(task.classes) else -1 for task in tasks]
    classes = _list_by_task(dominant, tasks, "dominant", "class")
    numbers = [stream.numbers([x], names, "imbalance.dominant")[0] for x in classes]
    for task, number in zip(tasks, numbers, strict=True):
        if number not in task.classes:
            raise Refused(
                f"imbalance.dominant={dominant!r}: task {task.index} ({task.name}) has "
                f"no {names[number]!r}; "
                f"must be of {[names[c] for c in task.classes[:10]]}, or None"
            )
    return numbers


def _list_by_task(value, tasks, field, kind) -> list:
    """Return one value for each task, from one for all or from a sequence."""
    is_single = isinstance(value, str | int | float | np.number)
    values = [value] * len(tasks) if is_single else list(value)
    if len(values) != len(tasks):
        raise Refused(
            f"imbalance.{field}={value!r}: must be one {kind}, or one for each of "
            f"the {len(tasks)} tasks"
        )
    return values


def tail_sizes(largest: int, num_classes: int, *, factor: float) -> np.ndarray:
    """Return rows of each class of a long-tailed set, i64[C], the largest class first.

    n_c = max(1, floor(largest * factor^(-c / (C - 1)))), c = 0 ... C - 1.

    Source: Cui et al. (CVPR 2019). Rounding and order of operations follow the code in
    common use, whose argument is 1 / factor.
    """
    place = np.arange(num_classes) / max(num_classes - 1, 1)
    return np.maximum((largest * (1 / factor) ** place).astype(np.int64), 1)


@schema.checked("long_tail")
def long_tail(
    label: np.ndarray,
    names: Sequence[str],
    *,
    factor: Annotated[float, schema.Range(least=1)],
    class_order: str | Sequence[schema.Natural | str] = "sorted",
    seed: schema.Natural = 0,
) -> np.ndarray:
    """Choose the rows that an exponentially long-tailed set keeps, bool[N].

    The class at place c of the order keeps `tail_sizes`[c] rows, or all if it has
    fewer. They are drawn by (seed, class) alone, so a smaller factor keeps every row
    that a larger one keeps.

    Args:
      label: i32[N], from 0.
      names: names of the classes.
      factor: rows of the first class over rows of the last, at least 1.
      class_order: order from the largest class to the smallest: "sorted", "released" or
        "shuffled" (both by `seed`), "cassle" or a list of all classes, see
        `scenarios.make`.
      seed: seed of the draw, not the run's seed.

    Raises:
      Refused: an option out of its range.
    """
    order = stream.order_of_classes(names, class_order, seed, "long_tail.class_order")
    count = np.bincount(label, minlength=len(names))
    mask = np.zeros(len(label), bool)
    sizes = tail_sizes(int(count.max()), len(names), factor=factor)
    for number, size in zip(order, sizes, strict=True):
        # Tag 3 keeps this draw apart from those of `splits`, which have 1 and 2.
        rng = np.random.default_rng([seed, 3, int(number) + 1, 1])
        mask[rng.permutation(np.flatnonzero(label == number))[:size]] = True
    return mask


def _cut_tail(dataset, tasks, section) -> list[stream.Task]:
    """Return the tasks without the train rows that `long_tail` leaves out."""
    restricted, label = [], dataset.train.label
    mask = long_tail(label, dataset.class_names, **section)
    for task in tasks:
        rows = task.train.rows[mask[task.train.rows]]
        if len(rows) == 0:
            raise Refused(
                f"long_tail: keeps no train row of task {task.index} ({task.name}); "
                "take a smaller factor or fewer tasks"
            )
        classes = task.classes[np.isin(task.classes, label[rows])]
        train = task.train._replace(rows=rows)
        restricted.append(task._replace(train=train, classes=classes))
    return restricted


def make_uneven(
    dataset: stream.Dataset,
    tasks: Sequence[stream.Task],
    *,
    imbalance: dict | None = None,
    long_tail: dict | None = None,
) -> Sequence[stream.Task]:
    """Make the classes of tasks uneven.

    The tail is cut first; the dominated stream draws from the rows it keeps.

    Args:
      dataset: dataset of the tasks.
      tasks: tasks of a scenario.
      imbalance, long_tail: options of `dominated` and of `long_tail`; None leaves the
        classes as they are.

    Raises Refused as `dominated` and `long_tail`, and for rows without a label.
    """
    imbalance, tail = check_options(imbalance, long_tail)
    label = dataset.train.label
    for name, section in (("imbalance", imbalance), ("long_tail", tail)):
        if section is not None and (label < 0).any():
            raise Refused(
                f"{name} needs labels: {(label < 0).sum()} of {len(label)} train rows "
                f"of {dataset.name} have none"
            )
    if tail is not None:
        tasks = _cut_tail(dataset, tasks, tail)
    if imbalance is not None:
        tasks = dominated(tasks, dataset.class_names, **imbalance)
    return tasks


def check_options(
    imbalance: dict | None, tail: dict | None, field: str = ""
) -> tuple[dict | None, dict | None]:
    """Check the sections of `dominated` and `long_tail`; None: absent.

    Args:
      imbalance, tail: sections of a config, or None.
      field: prefix of the sections' names in messages.

    Raises:
      Refused: an option is unknown, missing, or out of its range.
    """
    if imbalance is not None:
        imbalance = schema.options(dominated, imbalance, f"{field}imbalance")
    if tail is not None:
        tail = schema.options(long_tail, tail, f"{field}long_tail")
    return imbalance, tail
