"""Quadratic programs over variables of at least 0, small and on the device.

Lawson and Hanson, "Solving Least Squares Problems", 1974, chapter 23.
"""

import functools

import jax
import jax.numpy as jnp
import jax.scipy.linalg

_ROUNDS = 4  # in which the solver's own ridge is taken out again


def minimum(matrix: jax.Array, linear: jax.Array) -> jax.Array:
    """argmin over u >= 0 of 1/2 u^T matrix u + linear^T u, f32[K].

    For a positive semidefinite matrix: it is scaled to a diagonal of 1 and given a
    ridge of the size of its rounding, so that it can be factored whatever the rank. A
    proximal term in place of the ridge, over a few rounds, takes out what that changes.

    Args:
      matrix: f32[K,K]. linear: f32[K].
    """
    count, info = len(linear), jnp.finfo(linear.dtype)
    own = jnp.diagonal(matrix)
    scale = jnp.where(own > 0, jnp.sqrt(own), 1)
    linear = linear / scale
    size = jnp.max(jnp.abs(linear))
    size = jnp.where(size > 0, size, 1)
    ridge = 3 * count * info.eps
    matrix = matrix / (scale[:, None] * scale)
    stiff = matrix + ridge * jnp.eye(count, dtype=matrix.dtype)

    def closer(_, found):
        u, free = found
        aim = linear / size - ridge * u
        return active_set(stiff, aim, u, free, tol=10 * info.eps)

    start = jnp.zeros_like(linear), jnp.zeros(count, bool)
    u, _ = jax.lax.fori_loop(0, _ROUNDS, closer, start)
    return u * size / scale


def active_set(
    matrix: jax.Array,
    linear: jax.Array,
    u: jax.Array,
    free: jax.Array,
    *,
    tol: float = 0.0,
) -> tuple[jax.Array, jax.Array]:
    """The same of a positive definite matrix, from a feasible start.

    Each step solves the problem of the free variables without their bounds. If they
    are all positive the steepest bound is given up, else the step ends at the first
    bound that it meets. Where rounding keeps it from ending, the last u is returned.

    Args:
      matrix: f32[K,K]. linear: f32[K].
      u: f32[K], at least 0, where to start; the closer, the sooner it ends.
      free: bool[K], True where u > 0, and wherever a variable may well be.
      tol: a bound is kept where the objective falls by no more than this per unit.

    Returns:
      u f32[K] and bool[K], where it is above 0.
    """
    count, info = len(linear), jnp.finfo(linear.dtype)
    dot = functools.partial(jnp.matmul, precision="highest")
    apart = jnp.eye(count, dtype=matrix.dtype)

    def step(carry):
        u, free, left = carry
        inner = jnp.where(free[:, None] & free, matrix, apart)
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

    # In practice 2 K steps; the bound is for a variable that enters and leaves for ever
    # by rounding, after which all others are at rest.
    start = u, free, jnp.int32(5 * count + 5)
    u, free, _ = jax.lax.while_loop(lambda carry: carry[2] > 0, step, start)
    return u, free & (u > 0)
