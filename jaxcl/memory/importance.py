"""Estimate each parameter's importance for earlier tasks: EWC.

Kirkpatrick et al., PNAS 2017: after each task the loss gains a quadratic penalty
around the parameters of that task, weighted by the diagonal of the Fisher
information. The penalties of all tasks add up to one quadratic, which two trees of
the size of the parameters describe exactly, for any number of tasks.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxcl import core


class Importance(NamedTuple):
    """The penalty of all tasks so far, and the estimate for the present task."""

    precision: core.PyTree  # f32, sum over tasks k of F_k
    anchor: core.PyTree  # f32, sum over tasks k of F_k * parameters after task k
    squares: core.PyTree  # f32, sum of squared gradients since the task began


def create(params: core.PyTree) -> Importance:
    """Return the importance before the first task ends: the penalty is 0."""
    return Importance(*(jax.tree.map(jnp.zeros_like, params) for _ in range(3)))


def _normalise(squares):
    """Divide by the mean over all parameters; zeros stay zeros."""
    leaves = jax.tree.leaves(squares)
    mean = sum(jnp.sum(x) for x in leaves) / sum(x.size for x in leaves)
    return jax.tree.map(lambda x: x / jnp.where(mean > 0, mean, 1.0), squares)


def observe(
    importance: Importance, grads: core.PyTree, active: jax.Array
) -> Importance:
    """Add the square of a batch's gradient to the present task's estimate.

    Args:
      importance: importance before the batch.
      grads: f32 tree, gradients of the task's own loss, without the penalty.
      active: bool[]; False leaves the estimate as it is.
    """
    squares = jax.tree.map(
        lambda s, g: s + jnp.where(active, jnp.square(g), 0.0),
        importance.squares,
        grads,
    )
    return importance._replace(squares=squares)


def consolidate(importance: Importance, params: core.PyTree) -> Importance:
    """Add the penalty of the task just finished; the next estimate starts at 0.

    F_k is the sum of squares divided by its mean over the parameters. Gradients of a
    mean over a batch do not show the size of single examples' gradients, and they
    shrink with the width of the network; with the raw sum every loss, batch size and
    width would need its own weight.
    """
    fisher = _normalise(importance.squares)
    return Importance(
        jax.tree.map(jnp.add, importance.precision, fisher),
        jax.tree.map(lambda a, f, p: a + f * p, importance.anchor, fisher, params),
        jax.tree.map(jnp.zeros_like, importance.squares),
    )


def gradient(
    importance: Importance,
    params: core.PyTree,
    *,
    weight: float = 1.0,
    lr: float | jax.Array = 0.0,
) -> core.PyTree:
    """Compute the gradient of weight / 2 sum_k F_k (params - params_k)^2 (Eq. 3).

    If weight * sum_k F_k is above 1 / lr, plain gradient descent would jump over
    the minimum and soon diverge. There the gradient is scaled down, so that a step
    with rate lr ends at the minimum.

    Args:
      importance: importance of the tasks so far.
      params: f32 tree.
      weight: the paper's lambda.
      lr: learning rate of the step; 0 scales nothing.

    Returns:
      f32 tree.
    """
    return jax.tree.map(
        lambda f, a, p: weight * (f * p - a) / jnp.maximum(weight * lr * f, 1.0),
        importance.precision,
        importance.anchor,
        params,
    )
