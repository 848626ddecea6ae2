"""Solve small quadratic programs over non-negative variables on the device.

Lawson and Hanson, "Solving Least Squares Problems", 1974, chapter 23.
"""

import functools

import jax
import jax.numpy as jnp
import jax.scipy.linalg

_ROUNDS = 4  # proximal rounds, which remove the effect of the solver's own ridge


def find_minimum(matrix: jax.Array, linear: jax.Array) -> jax.Array:
    """Return argmin over u >= 0 of 1/2 u^T matrix u + linear^T u, f32[K].

    The matrix is scaled to a diagonal of 1 and gets a ridge of the size of its rounding
    error, so that it can be factored whatever its rank. A few rounds with a proximal
    term in place of the ridge remove its effect.

    Args:
      matrix: f32[K,K], positive semidefinite.
      linear: f32[K].
    """
    count, info = len(linear), jnp.finfo(linear.dtype)
    diagonal = jnp.diagonal(matrix)
    scale = jnp.where(diagonal > 0, jnp.sqrt(diagonal), 1)
    linear = linear / scale
    size = jnp.max(jnp.abs(linear))
    size = jnp.where(size > 0, size, 1)
    ridge = 3 * count * info.eps
    matrix = matrix / (scale[:, None] * scale)
    stiff = matrix + ridge * jnp.eye(count, dtype=matrix.dtype)

    def closer(_, carry):
        u, free = carry
        target = linear / size - ridge * u
        return active_set(stiff, target, u, free, tol=10 * info.eps)

    start = jnp.zeros_like(linear), jnp.zeros(count, bool)
    u, _ = jax.lax.fori_loop(0, _ROUNDS, closer, start)
    return u * size / scale


def active_set(
    matrix: jax.Array,
    linear: jax.Array,
    u: jax.Array,
    free: jax.Array,
    *,
    tol: float | jax.Array = 0.0,
) -> tuple[jax.Array, jax.Array]:
    """Return the minimum for a positive definite matrix, from a feasible start.

    Each step solves for the free variables without their bounds. If all come out
    positive, the variable with the steepest slope leaves its bound; otherwise the step
    ends at the first bound that it meets. If rounding prevents an end, the last u is
    returned.

    Args:
      matrix: f32[K,K], positive definite.
      linear: f32[K].
      u: f32[K], the start, at least 0; fewer steps are needed near the minimum.
      free: bool[K], True where u > 0 and where the minimum is likely to be above 0.
      tol: a variable stays at its bound if the objective would fall by no more than
        this per unit.

    Returns:
      u f32[K], and bool[K] where it is above 0.
    """
    count, info = len(linear), jnp.finfo(linear.dtype)
    dot = functools.partial(jnp.matmul, precision="highest")
    identity = jnp.eye(count, dtype=matrix.dtype)

    def step(carry):
        u, free, left = carry
        inner = jnp.where(free[:, None] & free, matrix, identity)
        factor = jax.scipy.linalg.cho_factor(inner)
        target = jax.scipy.linalg.cho_solve(factor, jnp.where(free, -linear, 0))
        blocks = free & ~(target > 0)
        ratio = jnp.where(blocks, u / jnp.maximum(u - target, info.tiny), jnp.inf)
        length = jnp.minimum(jnp.min(ratio), 1)
        u = jnp.maximum(jnp.where(free, u + length * (target - u), 0), 0)
        leaves = blocks & (ratio <= length)
        slope = dot(matrix, u) + linear
        wanted = ~free & (slope < -tol)
        enters = wanted & (jnp.arange(count) == jnp.argmin(jnp.where(wanted, slope, 0)))
        inside = ~jnp.any(blocks)
        free = jnp.where(inside, free | enters, free & ~leaves)
        left = jnp.where(inside & ~jnp.any(wanted), 0, left - 1)
        return u, free, left

    # In practice there are 2 K steps. The bound ends cycles of a variable that rounding
    # lets enter and leave for ever, when all others are at rest.
    start = u, free, jnp.int32(5 * count + 5)
    u, free, _ = jax.lax.while_loop(lambda carry: carry[2] > 0, step, start)
    return u, free & (u > 0)
