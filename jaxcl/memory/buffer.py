"""Store examples in a fixed capacity: a policy chooses slots, `write` fills them.

The shapes never change, so a train step that holds a buffer compiles once. Slots that
hold nothing yet are masked.
"""

from typing import NamedTuple

import chex
import jax
import jax.numpy as jnp

from jaxcl import core
from jaxcl.errors import Refused

_MOST = 2**31 - 1  # the largest i32


class Buffer(NamedTuple):
    """Stored examples, and what policies need to know about them.

    A leaf of `items` holds an example's label, score or logit for the policy.
    """

    items: (
        core.PyTree
    )  # pytree of [capacity, ...], each leaf in the example's own dtype
    filled: jax.Array  # bool[capacity], the slot holds an example
    seen: jax.Array  # i32[], examples offered so far, stored or not; see `write`

    @property
    def capacity(self) -> int:
        """The number of slots, a Python int also under jit."""
        return self.filled.shape[0]


def create(example: core.PyTree, capacity: int) -> Buffer:
    """Make an empty buffer.

    Args:
      example: one item without a batch axis, a pytree of arrays or
        ShapeDtypeStructs. Only its shapes and dtypes are read; u8 pixels stay u8.
      capacity: number of slots.

    Returns:
      A buffer of zeros.

    Raises:
      Refused: capacity < 1.
    """
    if capacity < 1:
        raise Refused("capacity", capacity, "must be 1 or more")

    def empty_slots(leaf):
        # A numpy array may have 64 bits, which the device does not store.
        dtype = jax.dtypes.canonicalize_dtype(leaf.dtype)
        return jnp.zeros((capacity, *leaf.shape), dtype)

    return Buffer(
        items=jax.tree.map(empty_slots, example),
        filled=jnp.zeros((capacity,), bool),
        seen=jnp.zeros((), jnp.int32),
    )


def write(
    buffer: Buffer,
    slots: jax.Array,
    items: core.PyTree,
    mask: jax.Array | None = None,
    *,
    after: core.PyTree = (),
) -> Buffer:
    """Put row i of `items` into slot `slots[i]`.

    The result is as if rows were written one after another: if several name the same
    slot, the last unmasked one stays. `seen` grows by the number of unmasked rows,
    dropped ones included. Near 2^31 it stops growing: multiples of the capacity are
    subtracted, so that it stays within one capacity of 2^31 and `fifo`, which counts
    modulo the capacity, keeps its order.

    If the old buffer is donated, the write is in place and costs B rows and one i32 per
    slot. A step that reads the buffer first must name what it read in `after`, or XLA
    copies the buffer.

    Args:
      buffer: the buffer before.
      slots: i32[B]; a slot outside [0, capacity) drops its row, usually `capacity`.
      items: pytree of [B, ...], structure, shapes and dtypes as in `create`.
      mask: bool or f32 [B], rows that exist; None: all.
      after: pytree of arrays that are computed before the write; their values do not
        matter. Rows that the step read of the buffer, or what it made of them.

    Returns:
      The new buffer.

    Raises:
      Refused: `items` does not match the example of `create`.
    """
    slots = jnp.asarray(slots, jnp.int32)
    chex.assert_rank(slots, 1)
    mask = jnp.ones(slots.shape, bool) if mask is None else jnp.asarray(mask, bool)
    chex.assert_equal_shape([slots, mask])
    items = jax.tree.map(jnp.asarray, items)
    _check_items(buffer.items, items, len(slots))

    slots = order_after(slots, after)
    target = _last_writers(slots, mask, buffer.capacity)
    # Without duplicates XLA uses plain stores; atomic stores of u8 are slow and have
    # no order.
    put = {"mode": "drop", "unique_indices": True}
    items = jax.tree.map(
        lambda old, new: old.at[target].set(new, **put), buffer.items, items
    )
    filled = buffer.filled.at[target].set(True, **put)
    added = jnp.sum(mask, dtype=jnp.uint32)
    seen = buffer.seen.astype(jnp.uint32) + added
    overflow = jnp.maximum(seen, _MOST) - _MOST
    times = (overflow + (buffer.capacity - 1)) // buffer.capacity
    seen = (seen - times * buffer.capacity).astype(jnp.int32)
    return Buffer(items, filled, seen)


def sample(
    buffer: Buffer, key: jax.Array, k: int, *, log_weights: jax.Array | None = None
):
    """Draw k stored rows without replacement, by Gumbel top-k.

    The rows with the k largest log w_i + G_i, with G_i standard Gumbel, have the
    distribution of k successive draws, each in proportion to w_i among the rows that
    are left. The cost depends on the capacity, not on the number of rows seen.

    Source: Kool, van Hoof, Welling, "Stochastic Beams and Where to Find Them",
    ICML 2019, section 2.3.

    Args:
      buffer: the pool of the draw.
      key: threefry key.
      k: number of rows, 1 to the capacity.
      log_weights: f32[capacity], log w_i up to a constant; a row of -inf or nan is
        never drawn. None: uniform.

    Returns:
      items: pytree of [k, ...] in the order of the draw; zeros where masked.
      mask: bool[k], False at the end where fewer than k rows can be drawn.
      slots: i32[k], where the rows are stored; `capacity` where masked.

    Raises:
      Refused: k is not in 1 to the capacity.
    """
    capacity = buffer.capacity
    if not 1 <= k <= capacity:
        raise Refused(f"k={k}: allowed are 1 to the buffer's capacity, {capacity}")
    # "high": with 23 random bits, ties at the top would favour the lower slots.
    score = jax.random.gumbel(key, (capacity,), jnp.float32, mode="high")
    drawable = buffer.filled
    if log_weights is not None:
        chex.assert_shape(log_weights, (capacity,))
        drawable = drawable & (log_weights > -jnp.inf)
        score = score + log_weights
    _, slots = jax.lax.top_k(jnp.where(drawable, score, -jnp.inf), k)
    mask = drawable[slots]
    slots = jnp.where(mask, slots, capacity)
    items = jax.tree.map(
        lambda leaf: leaf.at[slots].get(mode="fill", fill_value=0), buffer.items
    )
    return items, mask, slots


def free_slots(free: jax.Array, mask: jax.Array) -> jax.Array:
    """Give the n-th row that exists the n-th free slot.

    Args:
      free: bool[capacity].
      mask: bool[B], rows that exist.

    Returns:
      i32[B]; capacity where the row does not exist or no free slot is left.
    """
    capacity = len(free)
    order = jnp.argsort(~free, stable=True)  # free slots first, in order
    rank = jnp.cumsum(mask, dtype=jnp.int32) - 1
    fits = mask & (rank < jnp.sum(free))
    slots = order[jnp.clip(rank, 0, capacity - 1)]
    return jnp.where(fits, slots, capacity).astype(jnp.int32)


def find_lowest(values: jax.Array, count: jax.Array) -> jax.Array:
    """Mark the `count` rows with the lowest values, bool[K]; of equal ones the first.

    Args:
      values: f32[K] or i32[K].
      count: i32[], number of rows.
    """
    order = jnp.argsort(values, stable=True)
    rank = jnp.zeros_like(order).at[order].set(jnp.arange(len(order)))
    return rank < count


def log_weights(allowed: jax.Array) -> jax.Array:
    """Return the log weights of a uniform draw from allowed slots, f32[capacity]."""
    return jnp.where(allowed, 0.0, -jnp.inf)


def order_after(slots: jax.Array, arrays: core.PyTree) -> jax.Array:
    """Return the slots so that a write to them waits until some arrays are computed.

    Without it XLA knows no order between a draw and a write, and copies the whole
    buffer to keep them apart. It removes an optimization barrier before it places
    copies, but keeps a comparison that is always true: it cannot tell that it is.
    """
    if not jax.tree.leaves(arrays):
        return slots
    nonzero = [jnp.any(x != 0).astype(jnp.int32) for x in jax.tree.leaves(arrays)]
    return jnp.where(sum(nonzero) <= len(nonzero), slots, -1)


def _last_writers(slots, mask, capacity):
    """Return the slots, i32[B], out of range for rows whose slot a later row takes.

    A scatter of duplicates has no order on a GPU, but a maximum needs none.
    """
    rows = jnp.arange(len(slots), dtype=jnp.int32)
    valid = mask & (slots >= 0) & (slots < capacity)
    slots = jnp.where(valid, slots, capacity)
    last = jnp.full((capacity,), -1, jnp.int32).at[slots].max(rows, mode="drop")
    stays = valid & (last.at[slots].get(mode="clip") == rows)
    return jnp.where(stays, slots, capacity + rows)


def _check_items(stored, items, count):
    """Refuse rows that the buffer would have to reshape or cast."""
    structure, expected = jax.tree.structure(items), jax.tree.structure(stored)
    if structure != expected:
        raise Refused(f"items={structure}: the buffer holds {expected}")
    for (path, old), new in zip(
        jax.tree_util.tree_leaves_with_path(stored), jax.tree.leaves(items), strict=True
    ):
        shape = (count, *old.shape[1:])
        if new.shape != shape or new.dtype != old.dtype:
            raise Refused(
                f"items{jax.tree_util.keystr(path)}={new.dtype}{list(new.shape)}: "
                f"must be {old.dtype}{list(shape)}, one row per slot"
            )
