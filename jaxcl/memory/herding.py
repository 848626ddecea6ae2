"""Herding: order rows so that the first m represent all, for any m.

The mean of the first m rows chosen is near the mean of all rows, so that a list that is
cut short still represents them.

Rebuffi et al., "iCaRL: Incremental Classifier and Representation Learning", CVPR 2017,
algorithm 4, after Welling, "Herding Dynamical Weights to Learn", ICML 2009.
"""

import chex
import jax
import jax.numpy as jnp

from jaxcl.errors import Refused


def herding(features: jax.Array, k: int, mask: jax.Array | None = None) -> jax.Array:
    """Pick k rows by herding, in the order of the choice.

    With mu the mean of the rows, the j-th choice is

        p_j = argmin_x || mu - (phi(x) + sum_{i<j} phi(p_i)) / j ||

    among the rows that are not chosen yet; the first of equal rows is chosen. Features
    are used as they are: normalise them before if the method does. mu is not
    normalised.

    Args:
      features: [N,D], rows phi(x); cast to f32.
      k: number of rows to choose, 1 or more.
      mask: bool or f32 [N], rows that exist; None: all.

    Returns:
      i32[k], indices of rows; N once all rows that exist are chosen.

    Raises:
      Refused: k < 1.
    """
    if k < 1:
        raise Refused("k", k, "must be 1 or more")
    chex.assert_rank(features, 2)
    count = len(features)
    mask = jnp.ones((count,), bool) if mask is None else jnp.asarray(mask, bool)
    chex.assert_shape(mask, (count,))
    features = features.astype(jnp.float32)
    # Sums of j rows far from 0 would round, and so does their mean at first.
    for _ in range(2):
        features = jnp.where(mask[:, None], features, 0.0)
        mean = jnp.sum(features, axis=0) / jnp.maximum(jnp.sum(mask), 1)
        features = features - mean

    def choose(j, carry):
        chosen, total, left = carry
        # j times the distance of the equation; expanding the square would round.
        distance = jnp.sum(jnp.square(total + features), axis=1)
        row = jnp.argmin(jnp.where(left, distance, jnp.inf)).astype(jnp.int32)
        any_left = jnp.any(left)
        chosen = chosen.at[j].set(jnp.where(any_left, row, count))
        total = total + jnp.where(any_left, features[row], 0.0)
        return chosen, total, left.at[row].set(False)

    start = jnp.zeros((k,), jnp.int32), jnp.zeros_like(mean), mask
    return jax.lax.fori_loop(0, k, choose, start)[0]
