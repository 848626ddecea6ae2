"""Projectors of the self-supervised losses, and the predictors on top of them.

Shapes as in CaSSLe (Fini et al., CVPR 2022) and PNR (Cha et al., ICML 2024).
"""

from typing import Any, NamedTuple

import jax.numpy as jnp

from jaxcl.nets import mlp


class Shape(NamedTuple):
    """A projector as a paper has it; what a config sets takes its place."""

    hidden_layers: int
    batch_norm: bool  # after each hidden layer
    hidden_dim: int
    output_dim: int


CONTRASTIVE = Shape(1, False, 2048, 128)
PREDICTED = Shape(1, True, 4096, 256)  # BYOL's
DECORRELATED = Shape(2, True, 2048, 2048)


def projector(
    shape: Shape,
    *,
    hidden_dim: int | None = None,
    output_dim: int | None = None,
    hidden_layers: int | None = None,
    dtype: Any = jnp.float32,
) -> mlp.MLP:
    """Projector: [B, D] -> f32[B, output_dim], hidden layers with ReLU and a Linear.

    Args:
      shape: what holds where an option is None.
      hidden_dim: width of the hidden layers.
      output_dim: of the projections.
      hidden_layers: how many; 0: a single Linear.
    """
    hidden = shape.hidden_dim if hidden_dim is None else hidden_dim
    output = shape.output_dim if output_dim is None else output_dim
    layers = shape.hidden_layers if hidden_layers is None else hidden_layers
    features = (hidden,) * layers + (output,)
    return mlp.MLP(features, batch_norm=shape.batch_norm, dtype=dtype)


def predictor(
    *, output_dim: int, hidden_dim: int = 2048, dtype: Any = jnp.float32
) -> mlp.MLP:
    """Linear-BN-ReLU-Linear: [B, D] -> f32[B, output_dim].

    The distillation predictor g of CaSSLe and PNR (hidden width 2048 for every loss)
    and BYOL's own predictor (hidden width 4096 on CIFAR, 8192 on ImageNet).
    """
    return mlp.MLP((hidden_dim, output_dim), batch_norm=True, dtype=dtype)
