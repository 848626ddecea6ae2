"""Policies say into which slot of a buffer each incoming row goes.

A policy returns slots, i32[B], for `buffer.write`; `capacity` means drop. It numbers
the unmasked rows of a stream from 0 by `buffer.seen`, so each batch goes through one
policy and then through `write`, with the same mask.
"""

from collections.abc import Callable
from typing import NamedTuple

import chex
import jax
import jax.numpy as jnp

_MOST = 2**31 - 1  # the largest number that a row gets


def reservoir(buffer, key, mask):
    """Every row of the stream is in the buffer with the same probability.

    Vitter's Algorithm R, one row after another: row n goes to slot n while
    n < capacity; then r is drawn uniformly from 0 to n, and the row goes to slot r if
    r < capacity, or else is dropped. The draw depends on the key and on n, so cutting
    the stream into other batches changes nothing, and one key serves for all of it.

    A draw takes 64 bits: no value's probability is off by more than 2^-64. After
    2^31 rows n stays about there: later rows enter with probability capacity / 2^31.

    Source: Vitter, "Random Sampling with a Reservoir", ACM TOMS 11(1), 1985.

    Args:
      buffer: Buffer.
      key: threefry key.
      mask: bool or f32 [B], rows that exist.

    Returns:
      i32[B], slots.
    """
    mask = jnp.asarray(mask, bool)
    chex.assert_rank(mask, 1)
    number = jnp.minimum(_numbers(buffer, mask), _MOST)
    draw = jax.vmap(_uniform, in_axes=(None, 0))(key, number)
    slots = jnp.where(number < buffer.capacity, number, draw).astype(jnp.int32)
    return jnp.where(mask & (slots < buffer.capacity), slots, buffer.capacity)


def fifo(buffer, mask):
    """Overwrite the oldest row first.

    Of a batch with more than `capacity` rows the last ones stay. The buffer must
    have been filled by `fifo` from the start.

    Args:
      buffer: Buffer.
      mask: bool or f32 [B], rows that exist.

    Returns:
      i32[B], slots, without duplicates but `capacity`.
    """
    mask = jnp.asarray(mask, bool)
    chex.assert_rank(mask, 1)
    slots = (_numbers(buffer, mask) % buffer.capacity).astype(jnp.int32)
    newer = jnp.sum(mask, dtype=jnp.int32) - jnp.cumsum(mask, dtype=jnp.int32)
    return jnp.where(mask & (newer < buffer.capacity), slots, buffer.capacity)


def _numbers(buffer, mask):
    """Number in the stream of each unmasked row, u32[B]; others are arbitrary."""
    before = jnp.cumsum(mask, dtype=jnp.uint32) - mask
    return buffer.seen.astype(jnp.uint32) + before


def _uniform(key, number):
    """A whole number from 0 to `number`, u32[] below 2^31, uniformly, u32[].

    (bits * (number + 1)) >> 64 with 64 random bits. Neither f32, with 24 bits, nor
    a remainder, which favours small values (by 1/8 at 1.6e9), would do.
    """
    high, low = jax.random.bits(jax.random.fold_in(key, number), (2,), jnp.uint32)
    span = number + 1
    partial = high * span  # modulo 2^32
    carry = partial + _upper(low, span) < partial
    return _upper(high, span) + carry


def _upper(a, b):
    """Upper 32 bits of the product of two u32, without 64-bit integers."""
    a1, a0, b1, b0 = a >> 16, a & 0xFFFF, b >> 16, b & 0xFFFF
    first = a1 * b0 + (a0 * b0 >> 16)  # no sum here reaches 2^32
    second = a0 * b1 + (first & 0xFFFF)
    return a1 * b1 + (first >> 16) + (second >> 16)


class Policy(NamedTuple):
    """A policy as methods use it, whatever it must know."""

    # (buffer, kept, key, items, mask) -> (slots i32[B], kept); items has "label" and
    # "task", i32[B] each, as the buffer's items do.
    choose: Callable
    start: Callable = lambda num_classes: {}  # -> kept, what it counts beside


POLICIES = {
    "reservoir": Policy(
        lambda buffer, kept, key, items, mask: (reservoir(buffer, key, mask), kept)
    ),
    "fifo": Policy(lambda buffer, kept, key, items, mask: (fifo(buffer, mask), kept)),
}
