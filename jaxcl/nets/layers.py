"""Layers that match PyTorch's: initial weights, norms, patches and branches."""

import functools
import math
from collections.abc import Callable
from typing import Any, Literal

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax import lax

from jaxcl.errors import Refused

# Collection of tuples: the running statistics of batch norm after each view but the
# last.
BETWEEN = "stats_between"

Start = Literal["torch", "glorot"]


def draw_matrix(initializer: Callable, fan: Literal["in", "out"] = "in") -> Callable:
    """Make an initializer that draws a kernel as a matrix and reshapes it.

    Its values equal the wrapped initializer's. XLA's CPU backend compiles a draw with
    four axes in 1 to 2 s, and a matrix of as many numbers in 0.3 s.

    Args:
      initializer: (key, shape, dtype) -> array, for arrays of any shape.
      fan: side of the kernel, "in" or "out", whose fan the matrix keeps.

    Returns:
      (key, shape, dtype=f32) -> array.
    """

    def draw(key, shape, dtype=jnp.float32):
        size, outputs = math.prod(shape), shape[-1]
        # With all but the inputs as columns, the fan out is the number of columns.
        columns = outputs if fan == "in" else size // shape[-2]
        return initializer(key, (size // columns, columns), dtype).reshape(shape)

    return draw


# For kernels of flax layers: flax reads the fan in off the shape. The variance of a
# uniform number within 1 / sqrt(fan in) is 1 / (3 fan in). It differs from
# `torch_uniform` in the last bit; both stay, since earlier results were made with them.
torch_kernel = draw_matrix(nn.initializers.variance_scaling(1 / 3, "fan_in", "uniform"))


def torch_uniform(fan_in: float) -> Callable:
    """Make an initializer for arrays whose shape does not show the fan-in, as biases.

    Args:
      fan_in: inputs of the layer.

    Returns:
      (key, shape, dtype=f32) -> array, uniform in +-1/sqrt(fan_in).
    """
    bound = fan_in**-0.5
    return draw_matrix(
        functools.partial(jax.random.uniform, minval=-bound, maxval=bound)
    )


def linear_initializers(
    start: Start, fan_in: int, fan_out: int
) -> tuple[Callable, Callable]:
    """Make the initializers of a linear layer's weights and biases.

    Args:
      start: rule. "torch" is PyTorch's default for both; "glorot" draws weights
        uniformly within sqrt(6 / (fan in + fan out)) and sets biases to 0 (Glorot and
        Bengio, AISTATS 2010).
      fan_in, fan_out: inputs and outputs of the layer.

    Returns:
      Two functions (key, shape, dtype=f32) -> array.
    """
    if start == "torch":
        return torch_uniform(fan_in), torch_uniform(fan_in)
    # 6 / (in + out) is one over this number.
    return torch_uniform((fan_in + fan_out) / 6), nn.initializers.zeros


# How weights of Vision Transformers and ConvNeXt start.
SMALL_WEIGHTS = draw_matrix(nn.initializers.truncated_normal(0.02))


def small_dense(width: int, dtype: Any, name: str, *, bias: bool = True) -> nn.Dense:
    """Build a linear layer whose weights start as `SMALL_WEIGHTS`."""
    return nn.Dense(
        width, use_bias=bias, dtype=dtype, kernel_init=SMALL_WEIGHTS, name=name
    )


def layer_norm(epsilon: float, dtype: Any, name: str) -> nn.LayerNorm:
    """Build a layer norm that stays exact when means are large, as DINOv2's are."""
    return nn.LayerNorm(epsilon, dtype=dtype, use_fast_variance=False, name=name)


def add_branch(
    block: nn.Module,
    x: jax.Array,
    branch: jax.Array,
    key: jax.Array | None,
    *,
    scale: str,
) -> jax.Array:
    """Add a residual branch to its input, with LayerScale and stochastic depth.

    Args:
      block: module with `layer_scale`, the initial value of the branch's factors (None:
        it has none), and `drop`, the chance that a row skips the branch.
      x: [B, ..., D], the input of the block.
      branch: output of the branch, with the shape of x.
      key: threefry key; None: no row skips the branch.
      scale: name of the factors among the parameters of the block.
    """
    branch = branch.astype(jnp.float32)
    if block.layer_scale is not None:
        init = nn.initializers.constant(block.layer_scale)
        branch *= block.param(scale, init, (x.shape[-1],), jnp.float32)
    if key is not None and block.drop:
        keep = 1.0 - block.drop
        rows = (x.shape[0], *(1,) * (x.ndim - 1))
        branch *= jax.random.bernoulli(key, keep, rows) / keep
    return x + branch.astype(x.dtype)


class Patches(nn.Module):
    """A convolution whose windows touch and do not overlap: one matrix product.

    Attributes:
      side: pixels of a window; a rest of the image that is smaller is left out, as
        PyTorch does.
      width: number of output channels.
      dtype: type of the computation.
      frozen: whether the projection stays untrained; it then starts as MoCo v3's,
        uniform within sqrt(6 / (inputs + outputs)).
    """

    side: int
    width: int
    dtype: Any
    frozen: bool = False

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """Project each window, [B, H, W, C] -> [B, H // side, W // side, width]."""
        side, channels, init = self.side, x.shape[-1], SMALL_WEIGHTS
        if self.frozen:
            init = torch_uniform((side * side * channels + self.width) / 6)
        shape, zeros = (side, side, channels, self.width), nn.initializers.zeros
        kernel = self.param("kernel", init, shape, jnp.float32)
        bias = self.param("bias", zeros, (self.width,), jnp.float32)
        if self.frozen:
            kernel, bias = lax.stop_gradient((kernel, bias))
        rows, columns = x.shape[1] // side, x.shape[2] // side
        x = x[:, : rows * side, : columns * side]
        x = x.reshape(-1, rows, side, columns, side, channels).swapaxes(2, 3)
        x = x.reshape(-1, rows, columns, side * side * channels)
        kernel = kernel.reshape(-1, self.width).astype(self.dtype)
        return x @ kernel + bias.astype(self.dtype)


class BatchNorm(nn.Module):
    """Batch normalisation over all axes but the last (Ioffe and Szegedy, 2015).

    It differs from `flax.linen.BatchNorm` in two ways. Rows are normalised with the
    biased variance while the running statistics keep the unbiased one, as in PyTorch.
    With `groups=V`, row i belongs to view i % V: each view is normalised by its own
    statistics, and the running ones move once for each view, as in V forward passes.

    Statistics are f32, over the whole batch even if devices share it.

    Attributes:
      momentum: weight of the old running value (PyTorch's momentum is 1 - this).
      epsilon: number added to the variance.
      dtype: type of the output; parameters and statistics stay f32.
      unbiased: whether the running statistics keep the unbiased variance.
      use_scale, use_bias: whether to learn a factor, an offset per channel.
      scale_init: initialiser of the factor.
    """

    momentum: float = 0.9
    epsilon: float = 1e-5
    dtype: Any = jnp.float32
    unbiased: bool = True
    use_scale: bool = True
    use_bias: bool = True
    scale_init: Any = nn.initializers.ones

    @nn.compact
    def __call__(self, x: jax.Array, *, train: bool, groups: int = 1) -> jax.Array:
        """Normalise x, [B, C] or [B, H, W, C], over all axes but the last.

        `train=True` normalises by the batch and moves the running statistics
        ("batch_stats" must be mutable); `train=False` reads them and ignores `groups`.

        Raises:
          Refused: B is not a multiple of `groups`, or a channel of a group has a
            single value, and so no variance.
        """
        rows, channels, groups = x.shape[0], x.shape[-1], groups if train else 1
        if groups < 1 or rows % groups:
            raise Refused(
                f"groups={groups}: must be at least 1 and divide the batch of "
                f"{rows} rows"
            )
        mean = self.variable("batch_stats", "mean", jnp.zeros, (channels,))
        var = self.variable("batch_stats", "var", jnp.ones, (channels,))
        views = x.astype(jnp.float32).reshape(rows // groups, groups, *x.shape[1:])
        center, spread = mean.value, var.value
        if train:
            # One pass over the rows, and one message between devices, give mean and
            # biased variance of each view, [1, V, 1, .., C]. They are taken from the
            # distance to the running mean, on which neither moments nor slopes depend.
            # The variance loses as many digits as ((mean - running mean) / deviation)^2
            # has; usually that is few.
            shift, axes = lax.stop_gradient(mean.value), (0, *range(2, views.ndim - 1))
            distance = views - shift
            away = jnp.mean(distance, axes, keepdims=True)
            square = jnp.mean(jnp.square(distance), axes, keepdims=True)
            spread = jnp.maximum(square - jnp.square(away), 0.0)
            if not self.is_initializing():
                self._update(mean, var, away, spread, x.size // channels)
            center = away + shift
        factor = lax.rsqrt(spread + self.epsilon)
        if self.use_scale:
            factor *= self.param("scale", self.scale_init, (channels,), jnp.float32)
        # x * factor + offset, not (x - center) * factor: with it XLA's CPU backend
        # trains a ResNet-18 a fifth faster.
        offset = -center * factor
        if self.use_bias:
            zeros = nn.initializers.zeros
            offset += self.param("bias", zeros, (channels,), jnp.float32)
        return (views * factor + offset).reshape(x.shape).astype(self.dtype)

    def _update(self, mean, var, away, batch_var, values):
        """Move the running statistics once per group; channels have `values` each."""
        shift, groups = mean.value, away.shape[1]
        if (count := values // groups) < 2:
            raise Refused(
                f"batch norm in training needs at least 2 values per channel and "
                f"group, got {count}: use a larger config.batch_size, or train=False"
            )
        if self.unbiased:
            batch_var = batch_var * (count / (count - 1))
        stats: tuple[list, list] = [mean.value], [var.value]
        for view in range(groups):
            batch_mean = away[0, view].reshape(shift.shape) + shift
            for past, new in zip(stats, (batch_mean, batch_var[0, view]), strict=True):
                new = new.reshape(shift.shape)
                past.append(self.momentum * past[-1] + (1.0 - self.momentum) * new)
        mean.value, var.value = stats[0][-1], stats[1][-1]
        if self.is_mutable_collection(BETWEEN):
            self.put_variable(BETWEEN, "mean", (*stats[0][1:-1],))
            self.put_variable(BETWEEN, "var", (*stats[1][1:-1],))
