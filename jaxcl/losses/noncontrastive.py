"""Non-contrastive losses over a batch of embeddings: no example is a negative.

Rows are examples, and a batch is the global batch: its moments are taken over all
devices. Every loss works in float32 at least (bfloat16 is cast first) and returns one
scalar. `barlow_twins`, `vicreg` and `mse` take rows as they are; `byol` and
`mean_cosine` L2-normalise them.
"""

import chex
import jax
import jax.numpy as jnp

from jaxcl import core


def mse(a: jax.Array, b: jax.Array) -> jax.Array:
    """Mean of (a - b)^2 over all B * D elements.

    Args:
      a, b: f32[B, D].

    Returns:
      f32[].
    """
    chex.assert_rank(a, 2)
    chex.assert_equal_shape([a, b])
    return jnp.mean(jnp.square(_at_least_float32(a) - _at_least_float32(b)))


def mean_cosine(a: jax.Array, b: jax.Array) -> jax.Array:
    """Mean over the batch of the cosine of row i of `a` and row i of `b`.

    Args:
      a, b: f32[B, D]. A row of zeros counts 0 and receives no gradient.

    Returns:
      f32[] in [-1, 1].
    """
    chex.assert_rank(a, 2)
    chex.assert_equal_shape([a, b])
    a, b = core.l2_normalize(a), core.l2_normalize(b)
    return jnp.mean(jnp.sum(a * b, axis=-1))


def barlow_twins(
    z1: jax.Array, z2: jax.Array, *, scale: float = 0.1, off_diagonal: float = 5e-3
) -> jax.Array:
    """Barlow Twins (Zbontar et al., ICML 2021, Eq. 1).

    Each feature d is standardised over the batch, (z - mean) / sqrt(var + 1e-5)
    with the biased variance, C = z1^T z2 / B, and the loss is
      scale * (sum_d (C_dd - 1)^2 + off_diagonal * sum_{d != e} C_de^2).
    The paper has scale 1; 0.1 is what CaSSLe and PNR train with.

    Args:
      z1: f32[B, D], embeddings of view 1; row i belongs with row i of `z2`.
      z2: f32[B, D], embeddings of view 2.
      scale: multiplies the whole loss.
      off_diagonal: weight of the redundancy term, the paper's lambda.

    Returns:
      f32[].

    Example:
      >>> import jax.numpy as jnp
      >>> from jaxcl.losses import noncontrastive
      >>> z = jnp.array([[1.0, 1.0], [-1.0, -1.0]])  # features that are redundant
      >>> loss = noncontrastive.barlow_twins(z, z, scale=1.0, off_diagonal=0.5)
      >>> round(float(loss), 3)
      1.0
    """
    chex.assert_rank(z1, 2)
    chex.assert_equal_shape([z1, z2])
    rows, features = z1.shape
    a, b = _standardize(z1), _standardize(z2)
    correlation = core.dot(a.T, b.T) / rows
    own = jnp.eye(features, dtype=bool)
    # One weighted sum: the sum of all minus that of the diagonal would lose digits.
    weight = jnp.where(own, 1.0, off_diagonal)
    return scale * jnp.sum(weight * jnp.square(correlation - own))


def byol(predictions: jax.Array, targets: jax.Array) -> jax.Array:
    """BYOL's regression of one view on the other (Grill et al., NeurIPS 2020, Eq. 2).

    The mean over rows of 2 - 2 cos, the squared distance of unit rows. In BYOL the
    caller adds this loss for both orders of the views.

    Args:
      predictions: f32[B, D], the predictor's output for one view.
      targets: f32[B, D], the slow network's projection of the other; no gradient.

    Returns:
      f32[] in [0, 4].

    Example:
      >>> import jax.numpy as jnp
      >>> from jaxcl.losses import noncontrastive
      >>> predictions, targets = jnp.array([[2.0, 0.0]]), jnp.array([[0.0, 3.0]])
      >>> round(float(noncontrastive.byol(predictions, targets)), 3)
      2.0
    """
    return 2 - 2 * mean_cosine(predictions, jax.lax.stop_gradient(targets))


def vicreg(
    z1: jax.Array,
    z2: jax.Array,
    *,
    invariance: float = 25.0,
    variance: float = 25.0,
    covariance: float = 1.0,
) -> jax.Array:
    """VICReg (Bardes et al., ICLR 2022, Eq. 6), weights as in the paper.

    With Cov(z) = sum_i (z_i - mean)(z_i - mean)^T / (B - 1), a D x D matrix:
      invariance * mean over all B * D elements of (z1 - z2)^2
      + variance * sum over views of mean_d max(0, 1 - sqrt(Cov_dd + 1e-4))
      + covariance * sum over views of sum_{d != e} Cov_de^2 / D.
    The paper's invariance term is a sum over D; its code and this function use a mean.

    Args:
      z1: f32[B, D], embeddings of view 1; row i belongs with row i of `z2`.
      z2: f32[B, D], embeddings of view 2.
      invariance, variance, covariance: weights of the three terms.

    Returns:
      f32[].

    Raises:
      ValueError: B is 1, and one row has no variance.

    Example:
      >>> import jax.numpy as jnp
      >>> from jaxcl.losses import noncontrastive
      >>> collapsed = jnp.ones((4, 2))  # the variance terms alone are left
      >>> round(float(noncontrastive.vicreg(collapsed, collapsed)), 3)
      49.5
    """
    chex.assert_rank(z1, 2)
    chex.assert_equal_shape([z1, z2])
    if z1.shape[0] < 2:
        raise ValueError(f"z1 has B={z1.shape[0]} rows: allowed are 2 and more")
    (hinge1, redundancy1), (hinge2, redundancy2) = map(_moment_terms, (z1, z2))
    return (
        invariance * mse(z1, z2)
        + variance * (hinge1 + hinge2)
        + covariance * (redundancy1 + redundancy2)
    )


def _moment_terms(z):
    """VICReg's variance and covariance terms of one view, v(Z) and c(Z)."""
    z = _centre(z)
    rows, features = z.shape
    spread = jnp.sqrt(jnp.sum(z * z, axis=0) / (rows - 1) + 1e-4)
    product = core.dot(z.T, z.T) / (rows - 1)
    others = jnp.where(jnp.eye(features, dtype=bool), 0.0, product)
    hinge = jnp.mean(jax.nn.relu(1 - spread))
    return hinge, jnp.sum(jnp.square(others)) / features


def _standardize(z):
    """Batch norm without affine part: biased variance, eps 1e-5."""
    z = _centre(z)
    return z * jax.lax.rsqrt(jnp.mean(z * z, axis=0) + 1e-5)


def _centre(z):
    z = _at_least_float32(z)
    return z - jnp.mean(z, axis=0)


def _at_least_float32(x):
    return x.astype(jnp.promote_types(x.dtype, jnp.float32))
