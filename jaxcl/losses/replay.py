"""Losses on replayed examples."""

import chex
import jax
import jax.numpy as jnp


def der(logits, stored_logits, *, example_mask=None):
    """Dark experience replay (Buzzega et al., NeurIPS 2020), without its weight.

    The Euclidean form of its objective: the mean of (logits - stored_logits)^2 over
    the unmasked rows and all columns. (The paper's norm sums over columns; its
    released code takes their mean.)

    Args:
      logits: f32[R, C], of replayed examples now; projections where there are no
        classes.
      stored_logits: f32[R, C], as they were when the examples were stored; no
        gradient.
      example_mask: bool or f32[R], None for all rows.

    Returns:
      f32[], 0 if every row is masked.
    """
    chex.assert_rank(logits, 2)
    chex.assert_equal_shape([logits, stored_logits])
    squares = jnp.square(logits - jax.lax.stop_gradient(stored_logits))
    rows = jnp.mean(squares.astype(jnp.promote_types(squares.dtype, "float32")), -1)
    if example_mask is None:
        return jnp.mean(rows)
    chex.assert_equal_shape([example_mask, rows])
    mask = example_mask.astype(rows.dtype)
    return jnp.sum(rows * mask) / jnp.maximum(jnp.sum(mask), 1.0)
