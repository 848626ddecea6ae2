"""The start of layers: PyTorch's default, uniform within 1 / sqrt(fan in); Glorot's."""

from collections.abc import Callable
from typing import Literal

import flax.linen as nn
import jax
import jax.numpy as jnp

Start = Literal["torch", "glorot"]
# For kernels of flax layers: flax reads the fan in off the shape. The variance of a
# uniform number within 1 / sqrt(fan in) is 1 / (3 fan in). It differs from
# `torch_uniform` in the last bit; both stay, since earlier results were made with them.
torch_kernel = nn.initializers.variance_scaling(1 / 3, "fan_in", "uniform")


def torch_uniform(fan_in: float) -> Callable:
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


def linear(start: Start, fan_in: int, fan_out: int) -> tuple[Callable, Callable]:
    """The start of a linear layer's weights, whatever their order, and of its biases.

    Args:
      start: "torch" is PyTorch's default for both; "glorot" draws weights uniformly
        within sqrt(6 / (fan in + fan out)) and sets biases to 0 (Glorot and Bengio,
        AISTATS 2010).
      fan_in, fan_out: inputs and outputs of the layer.

    Returns:
      Two functions (key, shape, dtype=f32) -> array.
    """
    if start == "torch":
        return torch_uniform(fan_in), torch_uniform(fan_in)
    # 6 / (in + out) is one over this number.
    return torch_uniform((fan_in + fan_out) / 6), nn.initializers.zeros
