"""Order the rows that ICL reads: batches of old and of new items together."""

import functools
import math
from typing import NamedTuple

import jax
import numpy as np

from jaxcl import core
from jaxcl.data import stream
from jaxcl.errors import Refused

_NEW_ALONE = ("finetune", "distill")  # read no rows of earlier tasks


class OrderPlan(NamedTuple):
    """The options that decide which rows a step reads, see `icl.make`."""

    strategy: str
    meta: bool
    inner_steps: int | None
    replay_share: float


def inner_steps(growth: float) -> int:
    """Count the inner steps, max(ceil((1 - growth) / growth), 1)."""
    # (1 - 0.1) / 0.1 is 9, apart from rounding.
    return max(math.ceil((1 - growth) / growth - 1e-9), 1)


def growth(task: stream.Task) -> float:
    """Return new rows over all rows, the paper's alpha."""
    return len(task.train.rows) / (len(task.earlier) + len(task.train.rows))


def batches(
    task: stream.Task,
    rows: np.ndarray,
    batch_size: int,
    count: int,
    rng: np.random.Generator | None = None,
) -> np.ndarray:
    """Shuffle rows into at least `count` batches, in whole epochs, i32[n, B]."""
    rng = np.random.default_rng(0) if rng is None else rng
    epochs = [task.train.order(rng, rows, batch_size)]
    if len(epochs[0]) == 0:
        raise Refused(
            f"config.batch_size={batch_size}: task {task.index} has only {len(rows)} "
            "old or new rows; must be at most as many"
        )
    while sum(map(len, epochs)) < count:
        epochs.append(task.train.order(rng, rows, batch_size))
    return np.concatenate(epochs)


def _side_by_side(batches):
    """Join the rows of P batches, i32[n, B] each, to i32[n, B P]."""
    return np.stack(batches, axis=-1).reshape(len(batches[0]), -1)


def meta_epoch(
    rng: np.random.Generator,
    rows: np.ndarray,
    batch_size: int,
    *,
    task: stream.Task,
    steps: int,
) -> np.ndarray:
    """Order an epoch of meta-steps, i32[n, B], over the new batches.

    A meta-step reads `steps` old and `steps` new batches for its inner steps, then a
    new and an old batch for the outer step. All but the outer new batch come from
    shuffled epochs of their own, as many as are needed.
    """
    size = batch_size // (2 * steps + 2)
    new = batches(task, task.train.rows, size, 1, rng)
    count = len(new)
    old = batches(task, task.earlier, size, count * (steps + 1), rng)
    inner_new = batches(task, task.train.rows, size, count * steps, rng)
    old = old[: count * (steps + 1)].reshape(count, steps + 1, size)
    inner_new = inner_new[: count * steps].reshape(count, steps, size)
    inner = [old[:, i] for i in range(steps)] + [inner_new[:, i] for i in range(steps)]
    return _side_by_side([*inner, new, old[:, -1]])


def alternating_epoch(
    rng: np.random.Generator, rows: np.ndarray, batch_size: int, *, task: stream.Task
) -> np.ndarray:
    """Order an epoch of steps, i32[n, B]: old batches, then new ones.

    Each batch comes with one of the other set, for its negatives.
    """
    size = batch_size // 2
    old, new = (
        batches(task, items, size, 1, rng) for items in (task.earlier, task.train.rows)
    )
    beside_old = batches(task, task.train.rows, size, len(old), rng)[: len(old)]
    beside_new = batches(task, task.earlier, size, len(new), rng)[: len(new)]
    anchors = np.concatenate([old, new])
    return _side_by_side([anchors, np.concatenate([beside_old, beside_new])])


def _inner_order(plan, task):
    old, new = len(task.earlier), len(task.train.rows)
    # A set has whole rows: half a one by which a share was rounded makes no step more.
    return plan.inner_steps or inner_steps((new + 0.5) / (old + new))


def batches_per_step(plan: OrderPlan, task: stream.Task) -> int:
    """Count the batches that a step takes side by side.

    Raises:
      Refused: the strategy reads rows of earlier tasks, and there are none.
    """
    if task.index == 0 or plan.strategy in _NEW_ALONE:
        return 1
    if len(task.earlier) == 0:
        raise Refused(
            f"config.method.strategy={plan.strategy!r}: learns from rows of the tasks "
            f"before, too, of which {task.name} has none; join their data to it "
            "(source 'joined', of an update --join), or take 'finetune' or 'distill'"
        )
    if plan.strategy != "icl":
        return 1
    return 2 * _inner_order(plan, task) + 2 if plan.meta else 2


def count_epoch_steps(
    plan: OrderPlan, task: stream.Task, batch_size: int
) -> tuple[int, int]:
    """Count the steps of an `alternating_epoch`: those on old rows, and all of them."""
    if task.index == 0 or plan.strategy != "icl":
        return 0, 1
    old, new = (
        len(batches(task, rows, batch_size, 1))
        for rows in (task.earlier, task.train.rows)
    )
    return old, old + new


def source(plan: OrderPlan, state: core.TrainState, task: stream.Task) -> stream.Source:
    """Return a task's training set: its own rows and, by the strategy, earlier ones."""
    if task.index == 0 or plan.strategy in _NEW_ALONE:
        return task.train
    earlier = task.earlier
    if plan.strategy == "replay":
        rng = np.random.default_rng(np.asarray(jax.random.key_data(state.key)))
        stored = round(plan.replay_share * len(earlier))
        earlier = rng.permutation(earlier)[:stored]
    joined = task.train._replace(rows=np.concatenate([earlier, task.train.rows]))
    if plan.strategy != "icl":
        return joined
    if plan.meta:
        order = functools.partial(meta_epoch, task=task, steps=_inner_order(plan, task))
    else:
        order = functools.partial(alternating_epoch, task=task)
    return joined._replace(order=order)
