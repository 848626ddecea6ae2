"""Multi-layer perceptrons: projectors and predictors, and an encoder of small images.

Projectors and predictors are shaped as in CaSSLe (Fini et al., CVPR 2022) and PNR (Cha
et al., ICML 2024); for SimSiam, DINO, LeJEPA, SwAV and NNCLR as in their papers. Every
Linear has a bias, also before a batch norm, which removes the bias.
"""

import functools
from typing import Annotated, Any, Literal, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp

from jaxcl import core, numerics, schema
from jaxcl.errors import Refused
from jaxcl.nets import layers

Activation = Literal["relu", "gelu"]
_ACTIVATIONS = {"relu": nn.relu, "gelu": functools.partial(nn.gelu, approximate=False)}


class MLP(nn.Module):
    """Linear-(BN)-ReLU layers, then a single Linear; every Linear has a bias.

    Attributes:
      features: width of each layer, the output last.
      batch_norm: whether there is batch norm between each hidden Linear and its ReLU.
      last_norm: whether batch norm follows the last Linear, without factor and offset.
      activation: function after hidden layers; "gelu" is exact, not its approximation.
      zero_bias: whether biases start at 0, not as PyTorch's.
      dtype: type of the computation; parameters stay f32.
    """

    features: tuple[int, ...]
    batch_norm: bool = False
    last_norm: bool = False
    activation: Activation = "relu"
    zero_bias: bool = False
    dtype: Any = jnp.float32

    @nn.compact
    def __call__(
        self, x: jax.Array, *, train: bool = False, groups: int = 1
    ) -> jax.Array:
        """Apply the layers, [B, D] -> f32[B, features[-1]]."""
        if not self.features or min(self.features) < 1:
            raise Refused(
                f"features={self.features}: must name at least one layer, each at "
                f"least 1 wide"
            )
        x = x.astype(self.dtype)
        for i, width in enumerate(self.features, start=1):
            bias = nn.initializers.zeros
            if not self.zero_bias:
                bias = layers.torch_uniform(x.shape[-1])
            x = nn.Dense(
                width,
                dtype=self.dtype,
                kernel_init=layers.torch_kernel,
                bias_init=bias,
                name=f"linear{i}",
            )(x)
            last = i == len(self.features)
            if self.last_norm if last else self.batch_norm:
                x = layers.BatchNorm(
                    dtype=self.dtype,
                    use_scale=not last,
                    use_bias=not last,
                    name=f"bn{i}",
                )(x, train=train, groups=groups)
            if not last:
                x = _ACTIVATIONS[self.activation](x)
        return x.astype(jnp.float32)


class ProjectorShape(NamedTuple):
    """The layers of a paper's projector; options of a config replace them."""

    hidden_layers: int  # 0: a single Linear
    batch_norm: bool  # after each hidden layer
    hidden_dim: int
    output_dim: int
    last_norm: bool = False  # batch norm after the last layer, without factor, offset
    activation: Activation = "relu"
    zero_bias: bool = False  # biases start at 0


CONTRASTIVE = ProjectorShape(1, False, 2048, 128)
PREDICTED = ProjectorShape(1, True, 4096, 256)  # BYOL's
DECORRELATED = ProjectorShape(2, True, 2048, 2048)
SIAMESE = ProjectorShape(2, True, 2048, 2048, last_norm=True)  # SimSiam's
# DINO's, below its prototypes. With biases untrained outputs are nearly one vector.
# The paper's kernels have a deviation of 0.02; PyTorch's, 0.013 here, suit any width.
BOTTLENECK = ProjectorShape(2, False, 2048, 256, activation="gelu", zero_bias=True)
NORMAL = ProjectorShape(2, True, 2048, 64)  # LeJEPA's
ASSIGNED = ProjectorShape(1, True, 2048, 128)  # SwAV's, below its prototypes
NEIGHBOURED = ProjectorShape(2, True, 2048, 256, last_norm=True)  # NNCLR's


def projector(shape: ProjectorShape, *, dtype: Any = jnp.float32) -> MLP:
    """Build a projector [B, D] -> f32[B, output_dim]: hidden layers and a Linear."""
    features = (shape.hidden_dim,) * shape.hidden_layers + (shape.output_dim,)
    return MLP(
        features,
        batch_norm=shape.batch_norm,
        last_norm=shape.last_norm,
        activation=shape.activation,
        zero_bias=shape.zero_bias,
        dtype=dtype,
    )


def predictor(
    *, output_dim: int, hidden_dim: int = 2048, dtype: Any = jnp.float32
) -> MLP:
    """Build a predictor Linear-BN-ReLU-Linear, [B, D] -> f32[B, output_dim].

    The distillation predictor g of CaSSLe and PNR (hidden width 2048 for every loss)
    and the own predictors of BYOL (hidden width 4096 on CIFAR, 8192 on ImageNet) and of
    SimSiam (512).
    """
    return MLP((hidden_dim, output_dim), batch_norm=True, dtype=dtype)


class Perceptron(nn.Module):
    """An encoder of small images: flattened pixels, then Linear-(BN)-ReLU layers.

    Dropout keeps its random key among the running statistics and updates it in every
    training pass. So methods need not pass a key, and a resumed run draws the same
    numbers.

    Attributes:
      widths: width of each layer; the last is the length of a feature vector. With ()
        the pixels are the features.
      dropout: chance that an output of a layer is 0 in training.
      batch_norm: whether there is batch norm between each Linear and its ReLU.
      start: initialisation of its layers and of a linear head after it, see
        `layers.linear_initializers`.
      dtype: type of the computation; parameters stay f32.
    """

    widths: tuple[int, ...] = (100, 100)
    dropout: float = 0.0
    batch_norm: bool = False
    start: layers.Start = "torch"
    dtype: Any = jnp.float32

    @property
    def num_features(self) -> int | None:
        """The length D of a feature vector; None without layers."""
        return self.widths[-1] if self.widths else None

    @nn.compact
    def __call__(
        self, images: jax.Array, *, train: bool = False, groups: int = 1
    ) -> jax.Array:
        """Embed normalised images [B, H, W, C] as f32[B, D].

        `train` and `groups` as in `layers.BatchNorm`.
        """
        core.check_images(images)
        x = images.reshape(images.shape[0], -1).astype(self.dtype)
        keys = self._dropout_keys(train)
        for i, width in enumerate(self.widths, start=1):
            weights, biases = layers.linear_initializers(self.start, x.shape[-1], width)
            x = nn.Dense(
                width,
                dtype=self.dtype,
                kernel_init=weights,
                bias_init=biases,
                name=f"linear{i}",
            )(x)
            if self.batch_norm:
                bn = layers.BatchNorm(dtype=self.dtype, name=f"bn{i}")
                x = bn(x, train=train, groups=groups)
            x = nn.relu(x)
            if keys is not None:
                keep = jax.random.bernoulli(keys[i], 1 - self.dropout, x.shape)
                x = jnp.where(keep, x / (1 - self.dropout), 0)
        return x.astype(jnp.float32)

    def _dropout_keys(self, train):
        """Return dropout's keys of this pass, or None if nothing drops."""
        if not self.dropout:
            return None
        stored_key = self.variable(
            "batch_stats", "key", lambda: jax.random.key_data(self.make_rng("params"))
        )
        if not train:
            return None
        keys = jax.random.split(
            jax.random.wrap_key_data(stored_key.value, impl=numerics.GENERATOR),
            1 + len(self.widths),
        )
        if not self.is_initializing():
            stored_key.value = jax.random.key_data(keys[0])
        return keys


@schema.checked("config.encoder")
def perceptron(
    *,
    widths: Annotated[tuple[schema.Width, ...], schema.Entries(0)] = (100, 100),
    dropout: schema.Fraction = 0.0,
    batch_norm: bool = False,
    start: layers.Start = "torch",
    dtype: Any = jnp.float32,
) -> Perceptron:
    """Build a multi-layer perceptron without a classifier, see `Perceptron`.

    Raises:
      Refused: an option is out of its range.
    """
    return Perceptron(tuple(widths), dropout, batch_norm, start, dtype)
