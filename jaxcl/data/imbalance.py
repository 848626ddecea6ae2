"""Uneven classes: a stream that one class dominates, and long-tailed sets.

Both change what a task trains on and leave the train split whole, so that probes
still train on all of it.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from jaxcl import schema
from jaxcl.data import stream


class Dominated(NamedTuple):
    """Order of an epoch in which one class dominates; see `dominated`."""

    label: np.ndarray  # i32[N], of all train rows
    dominant: int
    rho_max: float
    steps: int | None  # of an epoch; None: as many as one pass over the rows has

    def __call__(self, rng: np.random.Generator, rows: np.ndarray, batch_size: int):
        """Rows of an epoch, i32[steps, batch], drawn with replacement."""
        steps = len(rows) // batch_size if self.steps is None else self.steps
        rows = rows[np.argsort(self.label[rows], kind="stable")]
        classes, first, count = np.unique(
            self.label[rows], return_index=True, return_counts=True
        )
        rho = probabilities(classes, dominant=self.dominant, rho_max=self.rho_max)
        drawn = rng.choice(len(classes), (steps, batch_size), p=rho)
        return rows[first[drawn] + rng.integers(count[drawn])]


def probabilities(classes: np.ndarray, *, dominant: int, rho_max: float) -> np.ndarray:
    """How likely a row is of each class, f64[C].

    rho_c = rho_max for the dominant class, (1 - rho_max) / (C - 1) for all others.

    Source: DUEL (Choi et al., AAAI 2024), "Class-imbalanced environment".
    """
    others = (1 - rho_max) / (len(classes) - 1)
    return np.where(classes == dominant, rho_max, others)


def dominated(
    tasks: Sequence[stream.Task],
    names: Sequence[str],
    *,
    rho_max: float,
    dominant: int | str | Sequence | None = None,
    epoch_steps: int | None = None,
) -> list[stream.Task]:
    """Tasks whose batches one class dominates.

    Each row of a batch is drawn by itself: its class c with probability rho_c, see
    `probabilities`, where the classes are those of the task; then one of the task's
    rows of class c, all alike, with replacement. An epoch is thus a number of steps
    and not a pass.

    Args:
      tasks: whose train rows all have a label.
      names: of the classes.
      rho_max: probability of the dominant class, from 1 / C of each task (all classes
        alike) to below 1.
      dominant: a class that every task has, or one for each task, by number or name;
        None: the first class of each task, in the order that the task has them.
      epoch_steps: steps of an epoch; None: as many as one pass over the rows has.

    Returns:
      The tasks, with an order of their own.

    Raises:
      ValueError: an option out of its range; a task that has not two classes, or not
        the dominant one, or so few that `rho_max` is not the largest probability.

    Source: DUEL (Choi et al., AAAI 2024), "Class-imbalanced environment". The paper
    does not say which class dominates.
    """
    _check("imbalance", rho_max=rho_max, epoch_steps=epoch_steps)
    made = []
    for task, number in zip(tasks, _dominants(tasks, names, dominant), strict=True):
        where, count = f"task {task.index} ({task.name})", len(task.classes)
        if count < 2:
            raise ValueError(f"imbalance: {where} needs 2 classes, it has {count}")
        if rho_max * count < 1 - 1e-6:  # 1 / 3 may be written in six digits
            raise ValueError(
                f"imbalance.rho_max={rho_max!r}: {where} has {count} classes, of which "
                f"{names[number]!r} would be the rarest; must be at least 1 / {count}"
            )
        order = Dominated(task.train.examples.label, number, rho_max, epoch_steps)
        made.append(task._replace(train=task.train._replace(order=order)))
    return made


def _dominants(tasks, names, dominant) -> list[int]:
    """Number of the dominant class of every task."""
    if dominant is None:
        return [int(task.classes[0]) if len(task.classes) else -1 for task in tasks]
    one = isinstance(dominant, str | int | np.integer)
    each = [dominant] * len(tasks) if one else list(dominant)
    if len(each) != len(tasks):
        raise ValueError(
            f"imbalance.dominant={dominant!r}: must be one class, or one for each of "
            f"the {len(tasks)} tasks"
        )
    found = [stream.numbers([x], names, "imbalance.dominant")[0] for x in each]
    for task, number in zip(tasks, found, strict=True):
        if number not in task.classes:
            has = [names[c] for c in task.classes[:10]]
            more = "..." if len(task.classes) > 10 else ""
            raise ValueError(
                f"imbalance.dominant={dominant!r}: task {task.index} ({task.name}) has "
                f"no {names[number]!r}, but {has}{more}; name a class of each task, or "
                "None: the first of each"
            )
    return found


def tail_sizes(largest: int, num_classes: int, *, factor: float) -> np.ndarray:
    """Rows of each class of a long-tailed set, i64[C], the largest class first.

    n_c = max(1, floor(largest * factor^(-c / (C - 1)))), c = 0 ... C - 1.

    Source: Cui et al. (CVPR 2019), with the rounding and the order of
    operations of the code that the field shares (where 1 / factor is the argument).
    """
    place = np.arange(num_classes) / max(num_classes - 1, 1)
    return np.maximum((largest * (1 / factor) ** place).astype(np.int64), 1)


def long_tail(
    label: np.ndarray,
    names: Sequence[str],
    *,
    factor: float,
    class_order: str | Sequence[int | str] = "sorted",
    seed: int = 0,
) -> np.ndarray:
    """Rows that an exponentially long-tailed set keeps, bool[N].

    The class at place c of the order keeps `tail_sizes` rows, drawn by (seed, class)
    alone, so that a smaller factor keeps all that a larger one does. A class that has
    fewer keeps them all.

    Args:
      label: i32[N], from 0.
      names: of the classes.
      factor: rows of the first class over those of the last, at least 1.
      class_order: from the largest to the smallest: "sorted", "released", "shuffled"
        (by `seed`) or a list of all classes, see `scenarios.make`.
      seed: of the draw; not the run's.

    Raises:
      ValueError: an option out of its range.
    """
    _check("long_tail", factor=factor, seed=seed)
    order = stream.order_of_classes(names, class_order, seed, "long_tail.class_order")
    count = np.bincount(label, minlength=len(names))
    kept = np.zeros(len(label), bool)
    sizes = tail_sizes(int(count.max()), len(names), factor=factor)
    for number, size in zip(order, sizes, strict=True):
        # Apart from what else is drawn by a source's seed: splits has 1 and 2.
        rng = np.random.default_rng([seed, 3, int(number) + 1, 1])
        kept[rng.permutation(np.flatnonzero(label == number))[:size]] = True
    return kept


def _restricted(tasks, label, kept) -> list[stream.Task]:
    """Tasks that train on kept rows alone."""
    made = []
    for task in tasks:
        rows = task.train.rows[kept[task.train.rows]]
        if len(rows) == 0:
            raise ValueError(
                f"long_tail: keeps no train row of task {task.index} ({task.name}); "
                "take a smaller factor or fewer tasks"
            )
        classes = task.classes[np.isin(task.classes, label[rows])]
        train = task.train._replace(rows=rows)
        made.append(task._replace(train=train, classes=classes))
    return made


def applied(dataset: stream.Dataset, tasks, imbalance, tail) -> list[stream.Task]:
    """Tasks as the options of a scenario leave them, its `imbalance` and `long_tail`.

    With both, the tail is cut first: the dominated stream draws from what it keeps.

    Raises ValueError as `dominated` and `long_tail`, and for rows without a label.
    """
    imbalance, tail = options(imbalance, tail)
    label = dataset.train.label
    for name, given in (("imbalance", imbalance), ("long_tail", tail)):
        if given is not None and (label < 0).any():
            raise ValueError(
                f"{name} needs labels: {(label < 0).sum()} of {len(label)} train rows "
                f"of {dataset.name} have none"
            )
    if tail is not None:
        kept = long_tail(label, dataset.class_names, **tail)
        tasks = _restricted(tasks, label, kept)
    if imbalance is not None:
        tasks = dominated(tasks, dataset.class_names, **imbalance)
    return tasks


def options(imbalance, tail, field: str = "") -> tuple[dict | None, dict | None]:
    """Keyword arguments of `dominated` and `long_tail`, None where not asked for.

    Args:
      imbalance, tail: sections of a config, or None.
      field: what messages begin the names of the sections with.

    Raises:
      ValueError: an option that is not there, missing, or out of its range.
    """
    found = []
    for name, function, given in (
        ("imbalance", dominated, imbalance),
        ("long_tail", long_tail, tail),
    ):
        if given is not None:
            given = schema.options(function, given, field + name)
            _check(field + name, **given)
        found.append(given)
    return tuple(found)


_WHOLE = (int, np.integer)
# option -> its types, whether a value is allowed, and what to say
_RULES = {
    "rho_max": ((int, float), lambda x: 0 < x < 1, "a number above 0 and below 1"),
    "epoch_steps": (_WHOLE, lambda x: x >= 1, "an integer of at least 1, or None"),
    "factor": ((int, float), lambda x: 1 <= x < np.inf, "a number of at least 1"),
    "seed": (_WHOLE, lambda x: x >= 0, "an integer of at least 0"),
}


def _check(field, **options):
    """Refuse numbers that are out of range, naming the option."""
    for name, value in options.items():
        if name not in _RULES or (name == "epoch_steps" and value is None):
            continue
        kinds, good, allowed = _RULES[name]
        if isinstance(value, bool) or not isinstance(value, kinds) or not good(value):
            raise ValueError(f"{field}.{name}={value!r}: must be {allowed}")
