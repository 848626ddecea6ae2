"""Projectors of the self-supervised losses, and the predictors on top of them.

Shapes as in CaSSLe (Fini et al., CVPR 2022) and PNR (Cha et al., ICML 2024); those of
SimSiam, DINO, LeJEPA, SwAV and NNCLR as in their papers. Where a paper's Linear has no
bias since batch norm follows, here it has one, which batch norm takes away.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxcl.nets import initial, mlp


class Shape(NamedTuple):
    """A projector as a paper has it; what a config sets takes its place."""

    hidden_layers: int
    batch_norm: bool  # after each hidden layer
    hidden_dim: int
    output_dim: int
    last_norm: bool = False  # batch norm after the last layer, without factor, offset
    activation: mlp.Activation = "relu"
    zero_bias: bool = False  # biases start at 0


# Fields of `Shape` that a config may set.
SIZES = ("hidden_dim", "output_dim", "hidden_layers")
CONTRASTIVE = Shape(1, False, 2048, 128)
PREDICTED = Shape(1, True, 4096, 256)  # BYOL's
DECORRELATED = Shape(2, True, 2048, 2048)
SIAMESE = Shape(2, True, 2048, 2048, last_norm=True)  # SimSiam's
# DINO's, below its prototypes. With biases untrained outputs are nearly one vector.
# The paper's kernels have a deviation of 0.02; PyTorch's, 0.013 here, suit any width.
BOTTLENECK = Shape(2, False, 2048, 256, activation="gelu", zero_bias=True)
NORMAL = Shape(2, True, 2048, 64)  # LeJEPA's
ASSIGNED = Shape(1, True, 2048, 128)  # SwAV's, below its prototypes
NEIGHBOURED = Shape(2, True, 2048, 256, last_norm=True)  # NNCLR's


def projector(
    shape: Shape,
    *,
    hidden_dim: int | None = None,
    output_dim: int | None = None,
    hidden_layers: int | None = None,
    dtype: Any = jnp.float32,
) -> mlp.MLP:
    """Projector: [B, D] -> f32[B, output_dim], hidden layers and a Linear.

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
    return mlp.MLP(
        features,
        batch_norm=shape.batch_norm,
        last_norm=shape.last_norm,
        activation=shape.activation,
        zero_bias=shape.zero_bias,
        dtype=dtype,
    )


def prototypes(key: jax.Array, count: int, dim: int) -> jax.Array:
    """A layer of prototypes at its start, as a PyTorch Linear: f32[count, dim]."""
    return initial.torch_uniform(dim)(key, (count, dim))


def predictor(
    *, output_dim: int, hidden_dim: int = 2048, dtype: Any = jnp.float32
) -> mlp.MLP:
    """Linear-BN-ReLU-Linear: [B, D] -> f32[B, output_dim].

    The distillation predictor g of CaSSLe and PNR (hidden width 2048 for every loss)
    and the own predictors of BYOL (hidden width 4096 on CIFAR, 8192 on ImageNet) and of
    SimSiam (512).
    """
    return mlp.MLP((hidden_dim, output_dim), batch_norm=True, dtype=dtype)
