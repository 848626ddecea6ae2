"""A linear layer on features, and a step down its cross-entropy.

Linear probes and the online head of a self-supervised method use it.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax

from jaxcl import core
from jaxcl.nets import layers

_EXACT = jax.lax.Precision.HIGHEST  # TF32 loses accuracy; the layer is cheap anyway


class LinearHead(NamedTuple):
    """The weights and biases of a linear layer."""

    weight: jax.Array  # f32[D, C]
    bias: jax.Array  # f32[C]


def score_features(head: LinearHead, features: jax.Array) -> jax.Array:
    """Compute the class scores f32[n, C] of features f32[n, D]."""
    return jnp.dot(features, head.weight, precision=_EXACT) + head.bias


def start_head(key: jax.Array, dim: int, num_classes: int) -> LinearHead:
    """Draw a new layer as PyTorch's nn.Linear(dim, num_classes) does."""
    k_weight, k_bias = jax.random.split(key)
    uniform = layers.torch_uniform(dim)
    return LinearHead(
        uniform(k_weight, (dim, num_classes)), uniform(k_bias, (num_classes,))
    )


def take_step(
    tx: optax.GradientTransformationExtraArgs,
    head: LinearHead,
    opt_state: core.PyTree,
    features: jax.Array,
    labels: jax.Array,
    mask: jax.Array,
    lr: jax.typing.ArrayLike,
) -> tuple[LinearHead, core.PyTree, jax.Array, jax.Array]:
    """Take one step down the mean cross-entropy of the unmasked rows.

    Args:
      tx: optimiser from `optim`.
      features: f32[B, D].
      labels: i32[B].
      mask: f32[B], 0 for rows that do not count.

    Returns:
      head and state after the step; loss f32[] and scores f32[B, C] before it.
    """

    def loss_of(head):
        scores = score_features(head, features)
        losses = optax.softmax_cross_entropy_with_integer_labels(scores, labels)
        return jnp.sum(losses * mask) / jnp.maximum(mask.sum(), 1.0), scores

    (loss, scores), gradient = jax.value_and_grad(loss_of, has_aux=True)(head)
    direction, opt_state = tx.update(gradient, opt_state, head, lr=lr)
    head = jax.tree.map(lambda p, d: p - lr * d, head, direction)
    return head, opt_state, loss, scores
