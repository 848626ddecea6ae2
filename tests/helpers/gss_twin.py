"""Greedy sample selection without labels, row by row in float64."""

import jax
import jax.numpy as jnp
import numpy as np

from helpers import twins


def slope(query, target):
    """Gradient of an image's loss with respect to a shift of its queries, f64[D].

    Of -cos(q_v, t_w) with respect to q_v it is (cos q_v / |q_v| - t_w / |t_w|) / |q_v|.

    Args:
      query, target: f64[2,D], of both views.
    """
    total = 0
    for v in (0, 1):
        length = np.linalg.norm(query[v])
        cosine = twins.cosine(query[v], target[1 - v])
        toward = target[1 - v] / np.linalg.norm(target[1 - v])
        total = total + (cosine * query[v] / length - toward) / length / 2
    return total


def score(gradient, past):
    """1 plus the cosine of a gradient with that of stored rows; 1.1 without these."""
    return 1.1 if past is None else 1 + twins.cosine(gradient, past)


def slots(key, stored, filled, scores, mask=None):
    """Algorithm 2, row by row; one beyond all slots: the row does not enter.

    Args:
      key: of the batch; a row's draws are those of the library.
      stored: f64[K], scores of the memory.
      filled: bool[K].
      scores: of the rows.
      mask: of the rows that exist; None: all.
    """
    stored, filled = np.array(stored, np.float64), np.array(filled)
    chosen = []
    for row, (own_key, value) in enumerate(
        zip(jax.random.split(key, len(scores)), scores, strict=True)
    ):
        k_slot, k_replace = jax.random.split(own_key)
        slot = len(stored)
        if mask is not None and not mask[row]:
            pass
        elif not filled.all():
            slot = int(np.argmin(filled))
        elif value < 1:
            weights = jnp.log(jnp.asarray(stored, jnp.float32))
            drawn = int(jax.random.categorical(k_slot, weights))
            chance = stored[drawn] / (stored[drawn] + value)
            slot = drawn if jax.random.uniform(k_replace) < chance else slot
        chosen.append(slot)
        if slot < len(stored):
            stored[slot], filled[slot] = value, True
    return chosen
