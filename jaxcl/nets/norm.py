"""Batch normalisation that equals separate PyTorch forward passes of each view."""

from collections.abc import Sequence
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax import lax

from jaxcl import sharding
from jaxcl.nets import under_vmap

# The collection of the running statistics between the views, for whoever makes it
# mutable: of each a tuple, as each view but the last has moved them.
BETWEEN = "stats_between"


class BatchNorm(nn.Module):
    """Batch normalisation over all axes but the last (Ioffe and Szegedy, 2015).

    Differs from `flax.linen.BatchNorm` in two ways. As in PyTorch, rows are normalised
    with the biased variance while the running statistics keep the unbiased one. With
    `groups=V`, row i belongs to view i % V: each view is normalised by its own
    statistics, and the running statistics move once for each view, in order, as in V
    successive forward passes.

    Statistics are f32 whatever `dtype` is. Under jit with a batch that is split over a
    mesh, they are those of the whole batch.

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
    def __call__(self, x: jax.Array, *, train: bool, groups: int = 1) -> jax.Array:
        """Normalise [B, C] or [B, H, W, C]; the output has the shape of `x`.

        `train=True` uses the statistics of the batch and moves the running ones
        (collection "batch_stats" must be mutable); `train=False` uses the running
        ones and ignores `groups`.

        Raises:
          ValueError: B is not a multiple of `groups`, or a channel of a group has a
            single value, and so no variance.
        """
        channels = x.shape[-1]
        mean = self.variable("batch_stats", "mean", jnp.zeros, (channels,))
        var = self.variable("batch_stats", "var", jnp.ones, (channels,))
        views = self._split(x.astype(jnp.float32), groups if train else 1)
        center, spread = mean.value, var.value
        if train:
            # Moments do not depend on where they are taken from, nor do their slopes.
            near = lax.stop_gradient(mean.value)
            away, spread = moments_apart(views - near)
            if not self.is_initializing():
                self._update(mean, var, away, spread, x.size // channels)
            if _on_gpu():  # see below
                views, center = views - lax.optimization_barrier(near), away
            else:
                center = away + near
        factor = lax.rsqrt(spread + self.epsilon)
        if self.use_scale:
            factor *= self.param("scale", self.scale_init, (channels,), jnp.float32)
        # x * factor + offset, not (x - center) * factor: with it XLA's CPU backend
        # trains a ResNet-18 a fifth faster.
        offset = -center * factor
        if self.use_bias:
            offset += self.param(
                "bias", nn.initializers.zeros, (channels,), jnp.float32
            )
        affine = affine_apart if train and _on_gpu() else _affine
        y = affine(views, factor, offset)
        return y.reshape(x.shape).astype(self.dtype)

    def _split(self, x, groups):
        """[B, ..., C] -> [B / V, V, ..., C]."""
        if groups < 1 or x.shape[0] % groups:
            raise ValueError(
                f"groups={groups}: must be at least 1 and divide the batch of "
                f"{x.shape[0]} rows"
            )
        return x.reshape(x.shape[0] // groups, groups, *x.shape[1:])

    def _update(self, mean, var, away, batch_var, values):
        """Move the running statistics once per group; channels have `values` each."""
        near, groups = mean.value, away.shape[1]
        count = values // groups
        if count < 2:
            raise ValueError(
                f"batch norm in training needs at least 2 values per channel and "
                f"group, got {count}: use a larger config.batch_size, or train=False"
            )
        if self.unbiased:
            batch_var = batch_var * (count / (count - 1))
        means, variances = [mean.value], [var.value]
        for view in range(groups):
            batch_mean = away[0, view].reshape(near.shape) + near
            means.append(self._blend(means[-1], batch_mean))
            variances.append(self._blend(variances[-1], batch_var[0, view]))
        mean.value, var.value = means[-1], variances[-1]
        if self.is_mutable_collection(BETWEEN):
            self.put_variable(BETWEEN, "mean", (*means[1:-1],))
            self.put_variable(BETWEEN, "var", (*variances[1:-1],))

    def _blend(self, old, new):
        new = new.reshape(old.shape)
        return self.momentum * old + (1.0 - self.momentum) * new


# On a GPU each sum over the rows is two kernels, so two sums are taken as one: those of
# the moments, and backward those of factor and offset. On a TPU they would no longer be
# taken within the convolution before them: four times as long.
#
# A GPU's compiler also computes again what is cheap, wherever it is read. So
# - rows are normalised by their distances to the running mean: were it by their own
#   mean, the kernel that moves scale and running mean would make it from the running
#   one; what is read for two results cannot be written over, and a copy is left;
# - distances are made anew where rows are normalised, behind a barrier: one array of
#   them for all would be written out;
# - sums are kept, behind a barrier: else a few kernels each would make them again from
#   their parts.


def _on_gpu():
    return sharding.platform() == "gpu"


def _summed(views):
    """The axes of [B / V, V, .., C] that the moments of a view are sums over."""
    return (0, *range(2, views.ndim - 1))


def _at_once(reduce, *arrays):
    """`reduce` each over the rows of each view, f32[len(arrays), 1, V, 1, .., C]."""

    def of_all(count, *arrays):
        del count
        axes = [axis + 1 for axis in _summed(arrays[0])]
        return reduce(jnp.stack(arrays), axes, keepdims=True)

    if under_vmap.way() == "grouped":
        return under_vmap.in_channels(of_all)(*arrays)
    return of_all(1, *arrays)


def moments_apart(distance: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Mean and biased variance of each view, f32[1, V, 1, .., C].

    On a GPU it is an equation of its own in the trace, known by the name of this
    function: `lockstep` evaluates several at once, by `moments_together`.

    Args:
      distance: f32[B / V, V, .., C], of the rows of each view to the running mean, as
        the mean is, too.
    """
    if not _on_gpu():
        return _moments(distance)

    # A new function, for the trace depends on more than the shapes: `sharding`.
    def moments(distance):
        return moments_together((distance,))[0]

    moments.__name__ = moments_apart.__name__
    return jax.jit(moments)(distance)


def moments_together(
    *batches: Sequence[jax.Array],
) -> tuple[tuple[jax.Array, jax.Array], ...]:
    """`moments_apart` of several batches of one shape, on a GPU, by one sum.

    Each has a gradient of its own, so that none is taken where none is asked for.

    Args:
      batches: of each, the arguments of `moments_apart`.
    """
    distances = [distance for (distance,) in batches]
    known = _kept_moments(*map(lax.stop_gradient, distances))
    return tuple(map(_moments_of, distances, known))


def _moments(distance):
    """Mean and biased variance of each view, f32[1, V, 1, .., C].

    Both take one pass over the rows and one message between devices. Squares are of
    distances to the running mean: so the variance loses only as many digits as
    ((mean - running mean) / deviation)^2 has, few unless a batch differs from all
    before.
    """
    axes = _summed(distance)
    mean = jnp.mean(distance, axes, keepdims=True)
    square = jnp.mean(jnp.square(distance), axes, keepdims=True)
    return mean, jnp.maximum(square - jnp.square(mean), 0.0)


def _kept_moments(*distances):
    """`_moments` of each for a GPU: of one sum, and kept, see above."""
    parts = [part for rows in distances for part in (rows, jnp.square(rows))]
    sums = lax.optimization_barrier(_at_once(jnp.sum, *parts))
    means = sums / _values(distances[0])
    return tuple(
        (mean, jnp.maximum(square - jnp.square(mean), 0.0))
        for mean, square in zip(means[::2], means[1::2], strict=True)
    )


def _values(views):
    """How many values each channel of a view has."""
    return views.size // (views.shape[1] * views.shape[-1])


def _moments_slopes(saved, slopes):
    (distance, mean), (of_mean, of_var) = saved, slopes
    return (of_mean + 2.0 * (distance - mean) * of_var) / _values(distance), None


# The known moments as they are, with their slopes by the distances.
_moments_of = jax.custom_vjp(lambda distance, known: known)
_moments_of.defvjp(
    lambda distance, known: (known, (distance, known[0])), _moments_slopes
)


def _affine(views, factor, offset):
    return views * factor + offset


def affine_apart(views: jax.Array, factor: jax.Array, offset: jax.Array) -> jax.Array:
    """Rows [B / V, V, .., C] times a factor plus an offset, [1, V, 1, .., C], on a GPU.

    As `moments_apart` it is an equation of its own in the trace.
    """

    def affine(*layer):
        return affine_together(layer)[0]

    affine.__name__ = affine_apart.__name__
    return jax.jit(affine)(views, factor, offset)


def affine_together(*layers: Sequence[jax.Array]) -> tuple[jax.Array, ...]:
    """`affine_apart` of each of several layers of one shape, on a GPU.

    Backward, one sum gives the slopes of all factors and offsets.

    Args:
      layers: of each, the arguments of `affine_apart`.
    """
    return _affine_of_all(tuple(map(tuple, layers)))


def _all_affine(layers):
    return tuple(_affine(*layer) for layer in layers)


def _affine_slopes(saved, slopes):
    pairs = [(s * views, s) for (views, _), s in zip(saved, slopes, strict=True)]
    sums = _at_once(jnp.sum, *(part for pair in pairs for part in pair))
    own = [s * factor for (_, factor), s in zip(saved, slopes, strict=True)]
    return (tuple(zip(own, sums[::2], sums[1::2], strict=True)),)


_affine_of_all = jax.custom_vjp(_all_affine)
_affine_of_all.defvjp(
    lambda layers: (_all_affine(layers), [layer[:2] for layer in layers]),
    _affine_slopes,
)
