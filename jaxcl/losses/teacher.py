"""Match a student's rows p to a teacher's features t, which may be of another kind.

Each function takes p f32[N, D], t f32[N, E] and a mask bool[N] of the rows that count,
None for all; it returns f32[]. RKD's functions let D and E differ. No gradient reaches
t.
"""

import chex
import jax
import jax.numpy as jnp

from jaxcl import core


def cosine(p: jax.Array, t: jax.Array, *, mask: jax.Array | None = None) -> jax.Array:
    """Average 1 - cos(p_i, t_i) over rows.

    The loss of whole-image features of AM-RADIO (Ranzinger et al., CVPR 2024).

    Example:
      >>> import jax.numpy as jnp
      >>> from jaxcl.losses import teacher
      >>> p, t = jnp.eye(2), jnp.array([[3.0, 0.0], [1.0, 0.0]])
      >>> float(teacher.cosine(p, t))
      0.5
    """
    chex.assert_equal_shape([p, t])
    t = core.l2_normalize(jax.lax.stop_gradient(t))
    return core.masked_mean(1 - jnp.sum(core.l2_normalize(p) * t, axis=1), mask)


def smooth_l1(
    p: jax.Array, t: jax.Array, *, beta: float = 2.0, mask: jax.Array | None = None
) -> jax.Array:
    """Average the smooth L1 distance to standardised features over rows and elements.

    Feature distillation (Wei et al., arXiv 2205.14141). Each row of t is
    first standardised: mean 0 and variance 1 over its elements. With d = |p - t| an
    element counts d^2 / (2 beta) if d is at most beta, else d - beta / 2.

    Example:
      >>> import jax.numpy as jnp
      >>> from jaxcl.losses import teacher
      >>> p, t = jnp.array([[1.0, 0.0]]), jnp.array([[9.0, 5.0]])
      >>> round(float(teacher.smooth_l1(p, t)), 4)  # t is standardised to 1, -1
      0.125
    """
    chex.assert_equal_shape([p, t])
    t = core.at_least_float32(jax.lax.stop_gradient(t))
    t = t - jnp.mean(t, axis=1, keepdims=True)
    t = t * jax.lax.rsqrt(jnp.mean(t * t, axis=1, keepdims=True) + 1e-6)
    rows = jnp.mean(_huber(core.at_least_float32(p) - t, beta), axis=1)
    return core.masked_mean(rows / beta, mask)


def rkd_distance(
    p: jax.Array, t: jax.Array, *, mask: jax.Array | None = None
) -> jax.Array:
    """Compare the distances between rows: RKD-D (Park et al., CVPR 2019).

    The mean over pairs i != j of h(|p_i - p_j| / m_p - |t_i - t_j| / m_t). h is the
    Huber loss with delta 1. m_p and m_t are the mean distances of the pairs.

    Example:
      >>> import jax.numpy as jnp
      >>> from jaxcl.losses import teacher
      >>> p = jnp.array([[0.0], [1.0], [3.0]])
      >>> float(teacher.rkd_distance(p, 5 - 2 * p))  # moved, turned and scaled
      0.0
    """
    chex.assert_equal_shape_prefix([p, t], 1)
    pairs = _mark_pairs(len(p), mask)

    def compute_relative(x):
        # Differences first: a product of matrices rounds where rows are far from 0.
        squared = jnp.sum(jnp.square(x[:, None] - x[None]), axis=-1)
        nonzero = squared > 0  # the gradient of a distance of 0 is 0
        distances = jnp.where(nonzero, jnp.sqrt(jnp.where(nonzero, squared, 1.0)), 0.0)
        mean = core.masked_mean(distances.ravel(), pairs.ravel())
        return distances / jnp.where(mean > 0, mean, 1.0)

    t = core.at_least_float32(jax.lax.stop_gradient(t))
    gaps = compute_relative(core.at_least_float32(p)) - compute_relative(t)
    return core.masked_mean(_huber(gaps, 1.0).ravel(), pairs.ravel())


def rkd_angle(
    p: jax.Array, t: jax.Array, *, mask: jax.Array | None = None
) -> jax.Array:
    """Compare the angles of three rows: RKD-A (Park et al., CVPR 2019).

    The mean over triples of different rows i, j, k of h(a_ijk(p) - a_ijk(t)). a is the
    cosine of the angle at row j between rows i and k, h the Huber loss with delta 1.
    The memory grows with N^2 (N + D).

    Example:
      >>> import jax.numpy as jnp
      >>> from jaxcl.losses import teacher
      >>> line, corner = jnp.array([[0.0], [1.0], [2.0]]), jnp.eye(3)
      >>> round(float(teacher.rkd_angle(line, corner)), 4)  # cosines 1, -1, 1; all 0.5
      0.4167
    """
    chex.assert_equal_shape_prefix([p, t], 1)
    pairs = _mark_pairs(len(p), mask)
    triples = pairs[:, :, None] & pairs[:, None, :] & pairs[None]  # j, i, k

    def compute_cosines(x):
        directions = core.l2_normalize(x[None] - x[:, None])  # of row i from row j
        return core.dot(directions, directions)

    t = core.at_least_float32(jax.lax.stop_gradient(t))
    gaps = compute_cosines(core.at_least_float32(p)) - compute_cosines(t)
    return core.masked_mean(_huber(gaps, 1.0).ravel(), triples.ravel())


def _huber(x, delta):
    """Return x^2 / 2 where |x| is at most `delta`, else delta (|x| - delta / 2)."""
    size = jnp.abs(x)
    return jnp.where(size <= delta, 0.5 * x * x, delta * (size - 0.5 * delta))


def _mark_pairs(count, mask):
    """Mark the pairs of different rows that both count, bool[N, N]."""
    pairs = ~jnp.eye(count, dtype=bool)
    return pairs if mask is None else pairs & (mask[:, None] > 0) & (mask > 0)
