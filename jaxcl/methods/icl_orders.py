"""What a step of ICL reads: batches of old and of new rows side by side."""

import math

import numpy as np

from jaxcl.data import stream


def inner_steps(growth: float) -> int:
    """P's number of inner steps, max(ceil((1 - growth) / growth), 1)."""
    # (1 - 0.1) / 0.1 is 9 but for rounding.
    return max(math.ceil((1 - growth) / growth - 1e-9), 1)


def growth(task: stream.Task) -> float:
    """New rows over all rows, in the words of the paper alpha."""
    return len(task.train.rows) / (len(task.earlier) + len(task.train.rows))


def batches(task, rows, batch_size, count, rng=None):
    """Batches of whole epochs one after another, at least `count`, i32[n, B]."""
    rng = np.random.default_rng(0) if rng is None else rng
    made = [task.train.order(rng, rows, batch_size)]
    if len(made[0]) == 0:
        raise ValueError(
            f"config.batch_size={batch_size}: task {task.index} has only {len(rows)} "
            "old or new rows; must be at most as many"
        )
    while sum(map(len, made)) < count:
        made.append(task.train.order(rng, rows, batch_size))
    return np.concatenate(made)


def _side_by_side(parts):
    """Rows of steps: P parts i32[n, B] -> i32[n, B P], as `Method.parts` has them."""
    return np.stack(parts, axis=-1).reshape(len(parts[0]), -1)


def meta(rng, rows, batch_size, *, task, steps):
    """An epoch of steps: `steps` old batches, as many new ones, a new and an old one.

    New batches are the last but one; all others are drawn on, through shuffled epochs.
    """
    size = batch_size // (2 * steps + 2)
    new = batches(task, task.train.rows, size, 1, rng)
    count = len(new)
    old = batches(task, task.earlier, size, count * (steps + 1), rng)
    more = batches(task, task.train.rows, size, count * steps, rng)
    old = old[: count * (steps + 1)].reshape(count, steps + 1, size)
    more = more[: count * steps].reshape(count, steps, size)
    inner = [old[:, i] for i in range(steps)] + [more[:, i] for i in range(steps)]
    return _side_by_side([*inner, new, old[:, -1]])


def turns(rng, rows, batch_size, *, task):
    """An epoch of steps: a pass over old batches, then one over new ones.

    Beside each is a batch of the other set, for its negatives.
    """
    size = batch_size // 2
    old, new = (
        batches(task, each, size, 1, rng) for each in (task.earlier, task.train.rows)
    )
    beside_old = batches(task, task.train.rows, size, len(old), rng)[: len(old)]
    beside_new = batches(task, task.earlier, size, len(new), rng)[: len(new)]
    anchors = np.concatenate([old, new])
    return _side_by_side([anchors, np.concatenate([beside_old, beside_new])])
