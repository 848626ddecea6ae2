"""A memory that drops what it has learnt: rows of low loss that were drawn often.

The rule is that of the released code of CLA (giacomo-cgn/ocl-self-supervised,
src/buffers/loss_aware_buffer.py). SOLAR (arXiv 2604.10586), whose memory prefers rows
of high loss, may have the same one; no text that we have gives it. Each row has a
running loss and a count of its draws, and of the stored rows the one with the lowest
score goes, see `scores`.

Departure: a batch that does not fit takes the free slots and goes on; the released code
drops what is left of that batch.
"""

import jax
import jax.numpy as jnp

_OLD = 0.5  # share of the running loss after a draw of its row; OURS, the code has 0
_WEIGHT = 0.5  # of the draws, the released gamma
_EPS = 1e-6  # smallest range of losses that is divided by


def moved(old: jax.Array, new: jax.Array) -> jax.Array:
    """Running losses after a draw of their rows, half the old ones and half the new.

    Args:
      old, new: f32[R].
    """
    return _OLD * old + (1 - _OLD) * new


def scores(loss: jax.Array, draws: jax.Array, filled: jax.Array) -> jax.Array:
    """How much each stored row is worth, f32[K]; infinity for a slot without a row.

    The loss, put between 0 and 1 by the least and the largest of the stored rows, less
    half of the row's draws as a share of the most that a stored row has.

    Args:
      loss: f32[K], running losses.
      draws: i32[K], how often each row was drawn since it came.
      filled: bool[K], slots that hold a row.
    """
    least = jnp.min(jnp.where(filled, loss, jnp.inf))
    most = jnp.max(jnp.where(filled, loss, -jnp.inf))
    height = (loss - least) / jnp.maximum(most - least, _EPS)
    often = draws / jnp.maximum(jnp.max(jnp.where(filled, draws, 0)), 1)
    return jnp.where(filled, height - _WEIGHT * often, jnp.inf)
