"""Make streams for one pass, whose classes fade into one another or recur.

The streams are made from labels, which the learner does not see. Each image occurs
once, except for the last incomplete batch of a task, which no stream keeps.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np


class Repeated(NamedTuple):
    """An order in which each row comes several times in succession.

    It stands for correlated frames, and is of no paper: the copies differ by their
    augmentation.
    """

    order: Callable  # order of the rows alone, see `stream.Source`
    copies: int

    def __call__(
        self, rng: np.random.Generator, rows: np.ndarray, batch_size: int
    ) -> np.ndarray:
        """Return one epoch without its incomplete last batch, i32[steps, batch]."""
        sequence = np.repeat(self.order(rng, rows, 1).ravel(), self.copies)
        return in_order(rng, sequence, batch_size)


def in_order(rng: np.random.Generator, rows: np.ndarray, batch_size: int) -> np.ndarray:
    """Batch rows in their order, without an incomplete last batch."""
    steps = len(rows) // batch_size
    return rows[: steps * batch_size].reshape(steps, batch_size)


def weights(position: float, centres: np.ndarray, width: float) -> np.ndarray:
    """Return the probability of each class at a place of a blurry stream, f64[C].

    p_j is proportional to exp(-(t - mu_j)^2 / (2 s^2)). Source: the schedule of
    Shanahan, Kaplanis and Mitrovic, "Encoders and Ensembles for Task-Free Continual
    Learning", 2021, who include each class by a coin of this probability.

    Args:
      position: t, the place.
      centres: f64[C], mu_j; a class at infinity is never drawn.
      width: s, the width of a class.
    """
    exponents = -((position - centres) ** 2) / (2 * width**2)
    powers = np.exp(exponents - exponents.max())  # far from all classes, too
    return powers / powers.sum()


def blurry(
    label: np.ndarray, order: np.ndarray, *, blur: float, rng: np.random.Generator
) -> np.ndarray:
    """Order all rows so that classes fade into one another.

    For each place of the stream a class with rows left is drawn by `weights`, then one
    of its remaining rows. A place is measured in classes: with C equal classes in n
    rows, row t is at place t C / n. The centre of class j is j + 1/2, the width is
    `blur`. So a small `blur` leaves the classes in order, and a large one mixes them
    all. The paper's setting is 1/2. Drawing without replacement, and classes of several
    sizes, are OURS.

    Args:
      label: i32[N].
      order: i64[C], classes in the order of the stream.
      blur: width of a class, in classes.
      rng: NumPy generator of the draws.

    Returns:
      i64[N], a permutation of the rows.
    """
    pools = [rng.permutation(np.flatnonzero(label == c)) for c in order]
    left = np.array([len(pool) for pool in pools])
    centres = np.arange(len(order)) + 0.5
    edges = np.concatenate([[0], np.cumsum(left)])
    places = np.interp(np.arange(len(label)), edges, np.arange(len(order) + 1))
    rows = np.empty(len(label), np.int64)
    for position, drawn in enumerate(rng.random(len(label))):
        shares = weights(places[position], centres, blur)
        source = np.searchsorted(np.cumsum(shares), drawn, side="right")
        source = min(source, np.flatnonzero(shares)[-1])  # the sum may round to below 1
        left[source] -= 1
        rows[position] = pools[source][left[source]]
        if left[source] == 0:
            centres[source] = np.inf
    return rows


def recurring(
    label: np.ndarray,
    tasks: Sequence[np.ndarray],
    *,
    recurrence: float,
    rng: np.random.Generator,
) -> list[np.ndarray]:
    """Draw the rows of each task; classes of earlier tasks may come back.

    A task has its new classes, and each class of earlier tasks with probability
    `recurrence`, independently. The rows of a class are shared out evenly over its
    visits, at random. Hemati et al., "Class-Incremental Learning with Repetition",
    2023, have streams of this kind; the rule is OURS.

    Args:
      label: i32[N].
      tasks: the new classes of each task.
      recurrence: chance that an earlier class is in a task.
      rng: NumPy generator of the draws.

    Returns:
      For each task i64[n], sorted; every row is in one of them.
    """
    visits: dict[int, list[int]] = {}
    for index, classes in enumerate(tasks):
        for c in visits:
            if rng.random() < recurrence:
                visits[c].append(index)
        visits |= {int(c): [index] for c in classes}
    shares_of_tasks: list[list[np.ndarray]] = [[] for _ in tasks]
    for c, indices in visits.items():
        rows = rng.permutation(np.flatnonzero(label == c))
        for index, share in zip(
            indices, np.array_split(rows, len(indices)), strict=True
        ):
            shares_of_tasks[index].append(share)
    return [np.sort(np.concatenate(shares)) for shares in shares_of_tasks]
