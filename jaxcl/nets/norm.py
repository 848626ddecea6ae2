"""Batch normalisation that gives what separate PyTorch forward passes give."""

from typing import Any

import flax.linen as nn
import jax.numpy as jnp
from jax import lax


class BatchNorm(nn.Module):
    """Batch normalisation over all axes but the last (Ioffe and Szegedy, 2015).

    Differs from `flax.linen.BatchNorm` in two ways. As in PyTorch, rows are
    normalised with the biased variance while the running statistics keep the
    unbiased one. And with `groups=V` row i belongs to view i % V: every view is
    normalised by its own statistics, and the running ones move once per view in
    order, as V forward passes one after the other would do.

    Statistics are f32 whatever `dtype` is. With the batch split over a mesh under
    jit they are those of the whole batch.

    Attributes:
      momentum: weight of the OLD running value (PyTorch's momentum is 1 - this).
      epsilon: added to the variance.
      dtype: type of the output; parameters and statistics stay f32.
      unbiased: keep the unbiased variance in the running statistics.
      use_scale: learn a factor per channel.
      use_bias: learn an offset per channel.
      scale_init: initialiser of that factor.
    """

    momentum: float = 0.9
    epsilon: float = 1e-5
    dtype: Any = jnp.float32
    unbiased: bool = True
    use_scale: bool = True
    use_bias: bool = True
    scale_init: Any = nn.initializers.ones

    @nn.compact
    def __call__(self, x, *, train: bool, groups: int = 1):
        """Normalise [B, C] or [B, H, W, C]; the output has the shape of `x`.

        `train=True` reads the statistics of the batch and moves the running ones
        (collection "batch_stats" must be mutable); `train=False` uses the running
        ones and ignores `groups`.

        Raises:
          ValueError: B is no multiple of `groups`, or a channel of a group has a
            single value, so that its variance says nothing.
        """
        channels = x.shape[-1]
        mean = self.variable("batch_stats", "mean", jnp.zeros, (channels,))
        var = self.variable("batch_stats", "var", jnp.ones, (channels,))
        y = x.astype(jnp.float32)
        if train:
            y, batch_mean, batch_var = self._standardize(y, groups)
            if not self.is_initializing():
                self._update(mean, var, batch_mean, batch_var, x.size // channels)
        else:
            y = (y - mean.value) * lax.rsqrt(var.value + self.epsilon)
        if self.use_scale:
            y = y * self.param("scale", self.scale_init, (channels,), jnp.float32)
        if self.use_bias:
            y = y + self.param("bias", nn.initializers.zeros, (channels,), jnp.float32)
        return y.astype(self.dtype)

    def _standardize(self, x, groups):
        """Standardised x, and mean and biased variance per group, f32[V, C]."""
        if groups < 1 or x.shape[0] % groups:
            raise ValueError(
                f"groups={groups}: must be at least 1 and divide the batch of "
                f"{x.shape[0]} rows"
            )
        views = x.reshape(x.shape[0] // groups, groups, *x.shape[1:])
        axes = (0, *range(2, views.ndim - 1))
        mean = jnp.mean(views, axes, keepdims=True)
        # Two passes: E[x^2] - E[x]^2 cancels when the mean is large, and saves
        # nothing on CPU, where the gradient reads the centred values anyway.
        centred = views - mean
        var = jnp.mean(jnp.square(centred), axes, keepdims=True)
        y = (centred * lax.rsqrt(var + self.epsilon)).reshape(x.shape)
        flat = (groups, x.shape[-1])
        return y, mean.reshape(flat), var.reshape(flat)

    def _update(self, mean, var, batch_mean, batch_var, values):
        """Move the running statistics once per group; `values` per channel."""
        groups = batch_mean.shape[0]
        count = values // groups
        if count < 2:
            raise ValueError(
                f"batch norm in training needs at least 2 values per channel and "
                f"group, got {count}: use a larger batch or train=False"
            )
        if self.unbiased:
            batch_var = batch_var * (count / (count - 1))
        for view in range(groups):
            mean.value = self._blend(mean.value, batch_mean[view])
            var.value = self._blend(var.value, batch_var[view])

    def _blend(self, old, new):
        return self.momentum * old + (1.0 - self.momentum) * new
