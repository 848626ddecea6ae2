"""An encoder: one dense layer over the pixels.

Use it with --config.encoder.name=my_package.my_encoder.flat.
"""

from typing import Any

import flax.linen as nn
import jax.numpy as jnp

from jaxcl import schema


class Flat(nn.Module):
    """Images f32[B, H, W, C] -> features f32[B, width]."""

    width: int
    dtype: Any

    @nn.compact
    def __call__(self, images, *, train=False, groups=1):
        """Embed images; `train` and `groups` are for layers of batch norm."""
        pixels = images.reshape(len(images), -1).astype(self.dtype)
        return nn.Dense(self.width, dtype=self.dtype)(pixels).astype(jnp.float32)


@schema.checked("config.encoder")
def flat(*, width: schema.Width = 32, dtype: Any = jnp.float32) -> nn.Module:
    """Make the encoder.

    Args:
      width: length of a feature vector.
      dtype: type of the computation; follows config.precision.
    """
    return Flat(width, dtype)
