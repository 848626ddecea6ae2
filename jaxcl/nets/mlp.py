"""Multi-layer perceptron with PyTorch's default initialisation."""

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from jaxcl.nets import initial, norm


class MLP(nn.Module):
    """Linear-(BN)-ReLU layers, then a single Linear; every Linear has a bias.

    Attributes:
      features: width of each layer; the last is that of the output.
      batch_norm: batch norm between each hidden Linear and its ReLU.
      dtype: of the computation; parameters stay f32.
    """

    features: tuple[int, ...]
    batch_norm: bool = False
    dtype: Any = jnp.float32

    def __post_init__(self):
        if not self.features or min(self.features) < 1:
            raise ValueError(
                f"features={self.features}: must name at least one layer, each at "
                f"least 1 wide"
            )
        super().__post_init__()

    @nn.compact
    def __call__(
        self, x: jax.Array, *, train: bool = False, groups: int = 1
    ) -> jax.Array:
        """x [B, D] -> f32[B, features[-1]]; `groups` as in `norm.BatchNorm`."""
        x = x.astype(self.dtype)
        for i, width in enumerate(self.features, start=1):
            x = nn.Dense(
                width,
                dtype=self.dtype,
                kernel_init=initial.torch_kernel,
                bias_init=initial.torch_uniform(x.shape[-1]),
                name=f"linear{i}",
            )(x)
            if i == len(self.features):
                break
            if self.batch_norm:
                bn = norm.BatchNorm(dtype=self.dtype, name=f"bn{i}")
                x = bn(x, train=train, groups=groups)
            x = nn.relu(x)
        return x.astype(jnp.float32)
