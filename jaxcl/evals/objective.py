"""The loss of a method on fixed batches, seen the same by every network.

What a method trains on differs from method to method, and so do its losses; this is one
number for all of them: the method's plain loss on all rows of the tasks so far, the new
one too, in batches, with random views and dropout that never change. Several ways to
train can then be asked when each comes as low as another.
"""

import time
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from jaxcl import core, sharding
from jaxcl.data import graph_batches
from jaxcl.evals import features as features_lib


def make(parts, *, batch_size=32, max_rows: int | None = None) -> Callable:
    """The method's own loss on rows of the tasks so far.

    Args:
      parts: core.EvalParts.
      batch_size: rows that are compared with one another.
      max_rows: at most so many rows of each task, drawn once; None: all.

    Returns:
      evaluate(state, task) -> core.Result, without rows. Scalars: "loss", the mean over
      full batches (over all rows where there is none) of the rows of all tasks up to
      `task`, shuffled; "seconds".

    Raises:
      ValueError: an option is out of its range; the method has no such loss; images
        that do not fit in memory.
    """
    examples, tasks = parts.stream.dataset.train, parts.stream.tasks
    least = isinstance(batch_size, int) and batch_size >= 2
    features_lib.require("objective.batch_size", batch_size, least, "at least 2")
    some = max_rows is None or max_rows >= batch_size
    features_lib.require("objective.max_rows", max_rows, some, "None or a batch's rows")
    if parts.objective is None:
        raise ValueError(
            "config.evaluators.objective: needs a method with a loss of its own, as "
            "icl has; take the evaluator out"
        )
    if examples.images is None and examples.graphs is None:
        raise ValueError(
            "config.evaluators.objective: needs images in memory; give config.data "
            "resident=True and size, or take the evaluator out"
        )

    def chosen(task):
        rng = np.random.default_rng([parts.seed, task])
        each = [rng.permutation(one.train.rows)[:max_rows] for one in tasks[: task + 1]]
        rows = rng.permutation(np.concatenate(each))
        return rows[: max(len(rows) // batch_size, 1) * batch_size].astype(np.int32)

    given = [
        _batches(parts, examples, chosen(t), batch_size) for t in range(len(tasks))
    ]
    images = features_lib.place(parts, examples) if examples.graphs is None else None
    key = sharding.replicate(np.asarray([parts.seed, 0], np.uint32), parts.mesh)

    # The seed is an argument, or each seed had a program of its own.
    def loss(state, images, seed, i, batch):
        if images is not None:
            batch = {**batch, "image": images[batch["index"]]}
        key = jax.random.fold_in(jax.random.wrap_key_data(seed), i)
        return parts.objective(state, key, batch)

    program = jax.jit(loss, out_shardings=sharding.replicated(parts.mesh))

    def evaluate(state, task: int) -> core.Result:
        began = time.monotonic()
        found = [
            program(state, images, key, np.int32(i), batch)
            for i, batch in enumerate(given[task])
        ]
        mean = float(jnp.mean(jnp.stack(found)))
        return core.Result({}, {"loss": mean, "seconds": time.monotonic() - began})

    return evaluate


def _batches(parts, examples, rows, batch_size):
    """Batches of rows in order, on the devices."""
    if examples.graphs is not None:
        batches = graph_batches.evaluation_batches(examples, rows, batch_size)
    else:
        batches = (
            {"index": one}
            for one in np.split(rows, range(batch_size, len(rows), batch_size))
        )
    return [sharding.replicate(batch, parts.mesh) for batch in batches]
