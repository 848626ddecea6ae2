"""Queues of embeddings: the oldest rows are overwritten first."""

import jax
import jax.numpy as jnp


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
      aligned: every call on this queue has B rows, so that the pointer is a multiple
        of B; False: other calls have fewer or more.

    Returns:
      The new queue and pointer.

    Raises:
      ValueError: B > K.
    """
    size, count = queue.shape[1], rows.shape[1]
    if count > size:
        raise ValueError(
            f"config.method.queue_size={size}: must hold a batch, {count} rows"
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
