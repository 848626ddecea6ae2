"""Measure the loss of a method on fixed batches with fixed views.

Training losses of different methods cannot be compared: each trains on other rows, with
another loss. This evaluator gives one number that can: the method's plain loss on all
rows of the tasks so far, the present one included, in batches whose rows, random views
and dropout never change. It shows when one method reaches the loss of another.
"""

from collections.abc import Callable
from typing import Annotated

import jax
import jax.numpy as jnp
import numpy as np

from jaxcl import core, numerics, schema, sharding
from jaxcl.data.feed import graph_batches
from jaxcl.evals import embedding


@schema.checked("config.evaluators.objective")
@schema.debug(batch_size=16, max_rows=32)
def make(
    parts: core.EvalParts,
    *,
    batch_size: Annotated[int, schema.Range(least=2)] = 32,
    max_rows: schema.Count | None = None,
) -> Callable:
    """Build the evaluator of the method's own loss on rows of the tasks so far.

    Args:
      parts: core.EvalParts.
      batch_size: rows of a batch, which the loss compares with one another.
      max_rows: most rows of each task, drawn once; None: all.

    Returns:
      evaluate(state, task) -> core.Result, without rows. Scalars: "loss", the mean over
      full batches of the shuffled rows of all tasks up to `task`; over all rows if they
      are fewer than a batch.

    Raises:
      Refused: an option is out of its range; the method has no such loss; images
        that do not fit in memory.
    """
    _check_rows(parts, batch_size, max_rows)
    batches = []
    for task in range(len(parts.stream.tasks)):
        rows = _choose_rows(parts, task, batch_size, max_rows)
        batches.append(_make_batches(parts, rows, batch_size))
    images = embedding.place_images(parts, parts.stream.dataset.train)
    # An argument of the program: as a constant, each seed would compile its own.
    key = sharding.replicate(np.asarray([parts.seed, 0], np.uint32), parts.mesh)

    def batch_loss(state, images, seed, i, batch):
        if images is not None:
            batch = {**batch, "image": images[batch["index"]]}
        key = jax.random.fold_in(
            jax.random.wrap_key_data(seed, impl=numerics.GENERATOR), i
        )
        return parts.objective(state, key, batch)

    program = jax.jit(batch_loss, out_shardings=sharding.replicated(parts.mesh))

    def evaluate(state, task: int) -> core.Result:
        losses = [
            program(state, images, key, np.int32(i), batch)
            for i, batch in enumerate(batches[task])
        ]
        return core.Result({}, {"loss": float(jnp.mean(jnp.stack(losses)))})

    return evaluate


def _check_rows(parts, batch_size, max_rows):
    """Refuse fewer rows than a batch, and methods without a loss to measure."""
    valid = max_rows is None or max_rows >= batch_size
    embedding.require("objective.max_rows", max_rows, valid, "None or a batch's rows")
    need = "a method with a loss of its own, as icl has"
    embedding.refuse_unless(parts.objective, "objective", need)
    is_resident = not parts.stream.dataset.train.streams
    advice = "give config.data resident=True and size, or take the evaluator out"
    embedding.refuse_unless(is_resident, "objective", "images in memory", advice)


def _choose_rows(parts, task, batch_size, max_rows) -> np.ndarray:
    """Shuffle the rows of the tasks up to `task` and cut them to full batches."""
    rng = np.random.default_rng([parts.seed, task])
    tasks = parts.stream.tasks[: task + 1]
    per_task = [rng.permutation(x.train.rows)[:max_rows] for x in tasks]
    rows = rng.permutation(np.concatenate(per_task))
    return rows[: max(len(rows) // batch_size, 1) * batch_size].astype(np.int32)


def _make_batches(parts, rows, batch_size):
    """Make batches of rows in order, on the devices."""
    examples = parts.stream.dataset.train
    if examples.graphs is not None:
        batches = graph_batches.evaluation_batches(examples, rows, batch_size)
    else:
        cuts = range(batch_size, len(rows), batch_size)
        batches = ({"index": part} for part in np.split(rows, cuts))
    return [sharding.replicate(batch, parts.mesh) for batch in batches]
