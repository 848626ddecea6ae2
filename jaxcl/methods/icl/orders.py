"""What ICL reads: rows of a task, batches of old and of new ones side by side."""

import functools
import math
from typing import NamedTuple

import jax
import numpy as np

from jaxcl.data import stream

_NEW_ALONE = ("finetune", "distill")  # read no rows of the tasks before


class Plan(NamedTuple):
    """What decides which rows a step reads; for the options see `icl.make`."""

    strategy: str
    meta: bool
    inner_steps: int | None
    replay_share: float


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


def _inner(plan, task):
    return plan.inner_steps or inner_steps(growth(task))


def sides(plan: Plan, task: stream.Task) -> int:
    """How many batches a step takes, see `core.Method.parts`.

    Raises:
      ValueError: if the task has no rows before it and the strategy reads some.
    """
    if task.index == 0 or plan.strategy in _NEW_ALONE:
        return 1
    if len(task.earlier) == 0:
        raise ValueError(
            f"config.method.strategy={plan.strategy!r}: learns from rows of the tasks "
            f"before, too, of which {task.name} has none; join their data to it "
            "(source 'joined', of an update --join), or take 'finetune' or 'distill'"
        )
    if plan.strategy != "icl":
        return 1
    return 2 * _inner(plan, task) + 2 if plan.meta else 2


def epoch(plan: Plan, task: stream.Task, batch_size: int) -> tuple[int, int]:
    """Steps of an epoch of `turns`: those on old rows, and all; 0, 1 of any other."""
    if task.index == 0 or plan.strategy != "icl":
        return 0, 1
    old, new = (
        len(batches(task, rows, batch_size, 1))
        for rows in (task.earlier, task.train.rows)
    )
    return old, old + new


def source(plan: Plan, state, task: stream.Task):
    """The task's training set: its own rows and, by the strategy, earlier ones."""
    if task.index == 0 or plan.strategy in _NEW_ALONE:
        return task.train
    earlier = task.earlier
    if plan.strategy == "replay":
        rng = np.random.default_rng(np.asarray(jax.random.key_data(state.key)))
        stored = round(plan.replay_share * len(earlier))
        earlier = rng.permutation(earlier)[:stored]
    both = task.train._replace(rows=np.concatenate([earlier, task.train.rows]))
    if plan.strategy != "icl":
        return both
    if plan.meta:
        order = functools.partial(meta, task=task, steps=_inner(plan, task))
    else:
        order = functools.partial(turns, task=task)
    return both._replace(order=order)
