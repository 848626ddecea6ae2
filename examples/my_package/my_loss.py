"""A loss: alignment and uniformity (Wang and Isola, ICML 2020, Sec. 4.1).

A loss is a pure function of arrays. It needs nothing of jaxcl.
"""

import jax
import jax.numpy as jnp

from jaxcl import core


def align_uniform(z1, z2, *, scale=2.0, weight=1.0):
    """Pull the two views of an image together and spread all images over the sphere.

    For unit rows, alignment + weight * uniformity with
      alignment: the mean of |z1_i - z2_i|^2,
      uniformity: log of the mean over i != j of exp(-scale |z_i - z_j|^2), the mean
        over both views.

    Args:
      z1, z2: f32[B, D], projections of two views, B >= 2; row i is image i.
      scale: the paper's t.
      weight: factor of the uniformity.

    Returns:
      f32[].
    """
    z1, z2 = core.l2_normalize(z1), core.l2_normalize(z2)
    alignment = jnp.mean(jnp.sum((z1 - z2) ** 2, axis=1))
    uniformity = (_log_mean_kernel(z1, scale) + _log_mean_kernel(z2, scale)) / 2
    return alignment + weight * uniformity


def _log_mean_kernel(z, scale):
    squared = 2 - 2 * core.dot(z, z)  # distances of unit rows
    others = ~jnp.eye(len(z), dtype=bool)
    total = jax.nn.logsumexp(-scale * squared, where=others)
    return total - jnp.log(len(z) * (len(z) - 1))
