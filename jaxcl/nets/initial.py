"""PyTorch's default start of layers: uniform within 1 / sqrt(fan in)."""

from collections.abc import Callable

import flax.linen as nn
import jax
import jax.numpy as jnp

# Of a kernel of a flax layer, whose shape has the fan in; the variance of a uniform
# number within 1 / sqrt(fan in) is 1 / (3 fan in). Flax scales numbers from [-1, 1),
# `torch_uniform` draws them within the bound: that differs in the last bit, so that
# each use keeps the one with which the results of earlier runs were made.
torch_kernel = nn.initializers.variance_scaling(1 / 3, "fan_in", "uniform")


def torch_uniform(fan_in: int) -> Callable:
    """The start of arrays whose shape does not say the fan in, such as biases.

    Args:
      fan_in: inputs of the layer.

    Returns:
      (key, shape, dtype=f32) -> array, uniform in +-1/sqrt(fan_in).
    """
    bound = fan_in**-0.5

    def init(key, shape, dtype=jnp.float32):
        return jax.random.uniform(key, shape, dtype, -bound, bound)

    return init
