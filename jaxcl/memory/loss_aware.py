"""Keep rows of high loss that were drawn seldom.

Each stored row has a running loss, which moves when the row is drawn and trained on.
Rows of the lowest score make room for others, see `policies.replace_lowest`.
"""

import jax
import jax.numpy as jnp

_OLD_LOSS = 0.5  # share of the running loss after a draw of its row
_DRAWS = 0.5  # weight of the draws, the released gamma
_EPS = 1e-6  # smallest range of losses that is divided by


def move_losses(old: jax.Array, new: jax.Array) -> jax.Array:
    """Average the old and new losses of drawn rows, f32[R], as their running losses.

    The average is OURS; the released code (see `score_losses`) keeps the new loss
    alone.
    """
    return _OLD_LOSS * old + (1 - _OLD_LOSS) * new


def score_losses(loss: jax.Array, draws: jax.Array, filled: jax.Array) -> jax.Array:
    """Score the worth of each stored row, f32[K]; infinity for an empty slot.

    The loss, scaled to 0 to 1 over the stored rows, minus half of the row's draws
    divided by the largest number of draws. Rows of low loss that were drawn often have
    been learnt.

    Source: released code of CLA (giacomo-cgn/ocl-self-supervised,
    src/buffers/loss_aware_buffer.py). SOLAR (arXiv 2604.10586), whose memory prefers
    rows of high loss, may have the same rule; its text does not say so.

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
    frequency = draws / jnp.maximum(jnp.max(jnp.where(filled, draws, 0)), 1)
    return jnp.where(filled, height - _DRAWS * frequency, jnp.inf)
