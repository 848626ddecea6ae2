"""Projectors of the self-supervised losses, and the predictors on top of them.

Shapes as in CaSSLe (Fini et al., CVPR 2022) and PNR (Cha et al., ICML 2024).
"""

import difflib
from typing import Any, NamedTuple

import jax.numpy as jnp

from jaxcl.nets import mlp


class _Shape(NamedTuple):
    hidden_layers: int
    batch_norm: bool
    hidden_dim: int  # default
    output_dim: int  # default


_CONTRASTIVE = _Shape(1, False, 2048, 128)
_DECORRELATING = _Shape(2, True, 2048, 2048)
_PROJECTORS = {
    "simclr": _CONTRASTIVE,
    "supcon": _CONTRASTIVE,
    "mocov2plus": _CONTRASTIVE,
    "byol": _Shape(1, True, 4096, 256),
    "barlow_twins": _DECORRELATING,
    "vicreg": _DECORRELATING,
}


def projector(
    base: str,
    *,
    hidden_dim: int | None = None,
    output_dim: int | None = None,
    hidden_layers: int | None = None,
    dtype: Any = jnp.float32,
) -> mlp.MLP:
    """Projector of a base loss: [B, D] -> f32[B, output_dim].

    Linear-ReLU-Linear for simclr, supcon and mocov2plus; with batch norm for byol; two
    hidden layers with batch norm for barlow_twins and vicreg.

    Args:
      base: name of the base loss.
      hidden_dim: None: the paper's, 2048 (byol 4096).
      output_dim: None: the paper's, 128 for simclr, supcon and mocov2plus, 256 for
        byol, 2048 for barlow_twins and vicreg.
      hidden_layers: None: as above; 0: a single Linear.

    Raises:
      ValueError: `base` is not one of the six.
    """
    if base not in _PROJECTORS:
        near = difflib.get_close_matches(str(base), _PROJECTORS, n=1, cutoff=0.0)
        raise ValueError(
            f"base={base!r}: nearest is {near[0]!r}, allowed are {list(_PROJECTORS)}"
        )
    shape = _PROJECTORS[base]
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
