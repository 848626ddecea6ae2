"""Keep rows of high loss that were drawn seldom.

Each stored row has a running loss, which moves when the row is drawn and trained on.
Rows of the lowest score make room for others.
"""

import chex
import jax
import jax.numpy as jnp

from jaxcl.memory import buffer as buffer_lib
from jaxcl.memory import policies

_OLD_LOSS = 0.5  # share of the running loss after a draw of its row
_DRAWS = 0.5  # weight of the draws, the released gamma
_EPS = 1e-6  # smallest range of losses that is divided by


def move_losses(old: jax.Array, new: jax.Array) -> jax.Array:
    """Move running losses f32[R] after a draw of their rows: half old, half new.

    The half is OURS; the released code of `score_losses` keeps nothing.
    """
    return _OLD_LOSS * old + (1 - _OLD_LOSS) * new


def score_losses(loss: jax.Array, draws: jax.Array, filled: jax.Array) -> jax.Array:
    """Score the worth of each stored row, f32[K]; infinity for an empty slot.

    The loss, scaled to 0 to 1 over the stored rows, minus half of the row's draws
    divided by the largest number of draws. Rows of low loss that were drawn often have
    been learnt.

    Source: released code of CLA (giacomo-cgn/ocl-self-supervised,
    src/buffers/loss_aware_buffer.py). SOLAR (arXiv 2604.10586), whose memory prefers
    rows of high loss, may have the same rule; its text does not say.

    Departure: a batch that does not fit takes the free slots, then replaces rows; the
    released code drops what is left of that batch.

    Args:
      loss: f32[K], running losses.
      draws: i32[K], how often each row was drawn since it came.
      filled: bool[K], slots that hold a row.
    """
    least = jnp.min(jnp.where(filled, loss, jnp.inf))
    most = jnp.max(jnp.where(filled, loss, -jnp.inf))
    height = (loss - least) / jnp.maximum(most - least, _EPS)
    often = draws / jnp.maximum(jnp.max(jnp.where(filled, draws, 0)), 1)
    return jnp.where(filled, height - _DRAWS * often, jnp.inf)


def replace_lowest(buffer: buffer_lib.Buffer, mask: jax.Array) -> jax.Array:
    """Store every row in place of the row with the lowest score.

    Scores are computed once, before the batch, so that none of its rows is replaced. If
    a batch has more than `capacity` rows, the first ones stay. Source: see
    `score_losses`, there the insertion "fifo".

    Args:
      buffer: Buffer, items with "loss" f32[capacity], the running loss, and "draws"
        i32[capacity], how often the row was drawn.
      mask: bool or f32 [B], rows that exist.

    Returns:
      i32[B], slots; none but `capacity` occurs twice.
    """
    mask = jnp.asarray(mask, bool)
    chex.assert_rank(mask, 1)
    held, stored = buffer.items, jnp.sum(buffer.filled, dtype=jnp.int32)
    excess = stored + jnp.sum(mask, dtype=jnp.int32) - buffer.capacity
    value = score_losses(held["loss"], held["draws"], buffer.filled)
    gone = buffer_lib.find_lowest(value, jnp.clip(excess, 0, stored))
    return buffer_lib.free_slots(~buffer.filled | gone, mask)


def replace_in_reservoir(
    buffer: buffer_lib.Buffer, key: jax.Array, loss: jax.Array, mask: jax.Array
) -> jax.Array:
    """Admit rows as a reservoir does; each replaces the row with the lowest score.

    Rows come one after another: row n of the stream takes slot n while there are free
    ones, and enters with probability capacity / (n + 1) later, exactly where it would
    in `reservoir` with this key. Scores count the rows of the batch that entered before
    it. Source: see `score_losses`, there the insertion "random".

    Args:
      buffer: as for `replace_lowest`.
      key: threefry key.
      loss: f32[B], of the rows, which were not drawn yet.
      mask: bool or f32 [B], rows that exist.

    Returns:
      i32[B], slots, for rows that are written one after another.
    """
    mask = jnp.asarray(mask, bool)
    chex.assert_equal_shape([loss, mask])
    capacity, held = buffer.capacity, buffer.items
    admitted = policies.reservoir(buffer, key, mask)

    def place_row(carry, row):
        losses, draws, filled = carry
        slot, loss = row
        worst = jnp.argmin(score_losses(losses, draws, filled))
        slot = jnp.where((slot < capacity) & jnp.all(filled), worst, slot)
        slot = slot.astype(jnp.int32)
        losses = losses.at[slot].set(loss, mode="drop")
        draws = draws.at[slot].set(0, mode="drop")
        filled = filled.at[slot].set(True, mode="drop")
        return (losses, draws, filled), slot

    carry = held["loss"], held["draws"], buffer.filled
    return jax.lax.scan(place_row, carry, (admitted, loss))[1]
