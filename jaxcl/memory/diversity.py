"""Keep rows whose gradients differ: greedy sample selection, GSS.

Aljundi et al., "Gradient based Sample Selection for Online Continual Learning",
NeurIPS 2019 (algorithm 2). The score of a row is high if its gradient resembles those
of the memory; rows with low scores replace rows with high ones.
"""

import chex
import jax
import jax.numpy as jnp

FIRST = 1.1  # score of rows that come to an empty memory; the code's cosine is 0.1


def similarity_score(
    gradients: jax.Array, references: jax.Array, valid: jax.Array
) -> jax.Array:
    """Compare each gradient with the most similar one of the memory.

    c_i = max over k of cos(g_i, G_k), plus 1; the cosine with a gradient of zeros is 0.

    Args:
      gradients: f32[N, P].
      references: f32[K, P], gradients of rows of the memory.
      valid: bool[K], references that exist; if none does, all scores are `FIRST`.

    Returns:
      f32[N] in [0, 2].
    """
    chex.assert_rank([gradients, references, valid], [2, 2, 1])
    chex.assert_equal_shape_suffix([gradients, references], 1)

    def unit_rows(rows):
        squared = jnp.sum(jnp.square(rows), axis=1, keepdims=True)
        nonzero = squared > 0
        return jnp.where(nonzero, rows / jnp.sqrt(jnp.where(nonzero, squared, 1)), 0)

    cosines = jnp.einsum(
        "np,kp->nk",
        unit_rows(gradients),
        unit_rows(references),
        precision=jax.lax.Precision.HIGHEST,
    )
    # Rounding must not make a score negative: scores are weights of a draw.
    cosines = jnp.clip(cosines, -1, 1)
    largest = jnp.max(jnp.where(valid, cosines, -1), axis=1)
    return jnp.where(jnp.any(valid), largest + 1, FIRST)


def choose_in_turn(
    key: jax.Array,
    stored: jax.Array,
    filled: jax.Array,
    scores: jax.Array,
    mask: jax.Array | None = None,
) -> jax.Array:
    """Choose slots for rows one after another, by the paper's algorithm 2.

    A row takes the first free slot. Once there is none, a row with a score c < 1 (its
    cosine is negative) draws slot i in proportion to the score C_i and replaces that
    row with probability C_i / (C_i + c). The slot then has the new row's score.

    Args:
      key: threefry key.
      stored: f32[capacity], scores of the memory.
      filled: bool[capacity].
      scores: f32[B], the rows' scores, all against the memory before the batch.
      mask: bool or f32 [B], rows that exist; None: all.

    Returns:
      i32[B] for `buffer.write`; `capacity` means drop.
    """
    mask = jnp.ones(scores.shape, bool) if mask is None else jnp.asarray(mask, bool)
    chex.assert_rank([stored, scores], 1)
    chex.assert_equal_shape([stored, filled])
    chex.assert_equal_shape([scores, mask])
    capacity = len(stored)

    def offer_row(carry, row):
        stored, filled = carry
        key, value, exists = row
        k_slot, k_replace = jax.random.split(key)
        weights = jnp.where(stored > 0, jnp.log(stored), -jnp.inf)
        drawn = jax.random.categorical(k_slot, weights)
        enters = (value < 1) & _new_row_wins(k_replace, stored[drawn], value)
        full = jnp.all(filled)
        slot = jnp.where(full, jnp.where(enters, drawn, capacity), jnp.argmin(filled))
        slot = jnp.where(exists, slot, capacity).astype(jnp.int32)
        stored = stored.at[slot].set(value, mode="drop")
        return (stored, filled.at[slot].set(True, mode="drop")), slot

    rows = jax.random.split(key, len(scores)), scores, mask
    return jax.lax.scan(offer_row, (stored, filled), rows)[1]


def choose_at_once(
    key: jax.Array,
    stored: jax.Array,
    filled: jax.Array,
    scores: jax.Array,
    batch_score: jax.Array,
) -> jax.Array:
    """Choose slots for the rows of a batch, by the rule of the released code.

    While slots are free, rows take them, and rows that do not fit are dropped. Later,
    if the score of the whole batch is below 1, each row gets a candidate, drawn without
    replacement in proportion to (C - min C) / (max C - min C + 0.01), and replaces it
    with probability C_i / (C_i + c).

    Args:
      key, stored, filled, scores: arrays as for `choose_in_turn`; free slots come last.
      batch_score: f32[], score of the gradient of the batch's mean loss.

    Returns:
      i32[B] for `buffer.write`; `capacity` means drop.
    """
    chex.assert_rank([stored, scores], 1)
    chex.assert_equal_shape([stored, filled])
    k_slot, k_replace = jax.random.split(key)
    capacity, count = len(stored), len(scores)
    low, high = jnp.min(stored), jnp.max(stored)
    weights = (stored - low) / (high - low + 0.01)
    noise = jax.random.gumbel(k_slot, (capacity,), stored.dtype, mode="high")
    noise += jnp.where(weights > 0, jnp.log(weights), -jnp.inf)
    best, drawn = jax.lax.top_k(noise, min(count, capacity))
    missing = count - len(drawn)
    drawn = jnp.pad(drawn, (0, missing))
    exists = jnp.pad(best > -jnp.inf, (0, missing))
    enters = (
        exists & (batch_score < 1) & _new_row_wins(k_replace, stored[drawn], scores)
    )
    replaced = jnp.where(enters, drawn, capacity)
    free = jnp.minimum(jnp.sum(filled) + jnp.arange(count), capacity)
    return jnp.where(jnp.all(filled), replaced, free).astype(jnp.int32)


def _new_row_wins(key, old, new):
    """Tell whether rows of score `new` replace rows of score `old`; any shape."""
    total = old + new
    share = jnp.where(total > 0, old / jnp.where(total > 0, total, 1), 0)
    return jax.random.uniform(key, jnp.shape(new)) < share
