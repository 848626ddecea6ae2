"""Queues of embeddings: the oldest rows are overwritten first."""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxcl import core
from jaxcl.errors import Refused


class Queue(NamedTuple):
    """A queue of features of each view, the oldest overwritten first."""

    rows: jax.Array  # f32[V,K,D], unit rows; [v] from view v
    pointer: jax.Array  # i32[], where the next rows go


def start_queue(key: jax.Array, size: int, dim: int, views: int = 2) -> Queue:
    """Start a queue of `size` random unit rows of each view.

    Args:
      key: threefry key.
      size: K, rows of each view.
      dim: D, length of a row.
      views: number of banks of the queue, one for each view.
    """
    rows = core.l2_normalize(jax.random.normal(key, (views, size, dim)))
    return Queue(rows, jnp.zeros((), jnp.int32))


def push_features(
    queue: Queue, features: jax.Array, *, active=True, aligned=True
) -> Queue:
    """Write features f32[B,V,D] over the oldest rows, see `enqueue`."""
    rows = core.l2_normalize(features).swapaxes(0, 1)
    return Queue(*enqueue(*queue, rows, active=active, aligned=aligned))


def enqueue(
    queue: jax.Array,
    pointer: jax.Array,
    rows: jax.Array,
    *,
    active: bool | jax.Array = True,
    aligned: bool = True,
) -> tuple[jax.Array, jax.Array]:
    """Overwrite the oldest rows of every bank.

    Args:
      queue: f32[V, K, D], one bank per view.
      pointer: i32[], where the next rows go; it wraps at K.
      rows: f32[V, B, D], B <= K.
      active: bool[]; if False, queue and pointer stay as they are.
      aligned: whether every call on this queue has B rows, so that the pointer is a
        multiple of B.

    Returns:
      The new queue and pointer.

    Raises:
      Refused: B > K.
    """
    size, count = queue.shape[1], rows.shape[1]
    if count > size:
        raise Refused(
            "config.method.base.queue_size", size, f"must hold a batch, {count} rows"
        )
    # The rows are masked: masking the queue would copy all of it.
    if aligned and size % count == 0:  # never wraps: one contiguous write
        old = jax.lax.dynamic_slice_in_dim(queue, pointer, count, axis=1)
        rows = jnp.where(active, rows, old)
        queue = jax.lax.dynamic_update_slice_in_dim(queue, rows, pointer, axis=1)
    else:
        slots = (pointer + jnp.arange(count)) % size
        rows = jnp.where(active, rows, queue[:, slots])
        queue = queue.at[:, slots].set(rows, unique_indices=True)
    return queue, (pointer + jnp.where(active, count, 0)) % size
