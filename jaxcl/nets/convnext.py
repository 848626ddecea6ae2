"""ConvNeXt encoders: the first version, DINOv3's, and V2, by options.

Liu et al., CVPR 2022 (ConvNeXt); Woo et al., CVPR 2023 (V2: `grn` in place of
LayerScale); Siméoni et al., 2025 (DINOv3). The size "atto" is V2's.

A block is x + s * fc2(gelu(fc1(norm(depthwise(x))))), with a depthwise convolution of
7 x 7. There is no batch norm: no row depends on another.
"""

import functools
from typing import Annotated, Any, Literal, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp

from jaxcl import core, schema
from jaxcl.errors import Refused
from jaxcl.nets import cpu, layers

KERNEL = 7  # pixels of a side of the depthwise convolutions


class Size(NamedTuple):
    """The depths and the width of a published size."""

    depths: tuple[int, ...]  # blocks of each stage
    width: int  # channels of the first stage, doubled by each further one


SIZES = {
    "atto": Size((2, 2, 6, 2), 40),
    "tiny": Size((3, 3, 9, 3), 96),
    "small": Size((3, 3, 27, 3), 96),
    "base": Size((3, 3, 27, 3), 128),
    "large": Size((3, 3, 27, 3), 192),
}
_zeros = nn.initializers.zeros
_EPSILON = 1e-6  # of the norms
_layer_norm = functools.partial(layers.layer_norm, _EPSILON)


class Depthwise(nn.Module):
    """A 7 x 7 depthwise convolution that keeps the size of the map.

    Attributes:
      dtype: type of the computation.
    """

    dtype: Any

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """Convolve each channel by itself, [B, H, W, C] -> [B, H, W, C]."""
        width = x.shape[-1]
        shape = (KERNEL, KERNEL, 1, width)
        kernel = self.param("kernel", layers.SMALL_WEIGHTS, shape, jnp.float32)
        bias = self.param("bias", _zeros, (width,), jnp.float32)
        rows = cpu.depthwise(x, kernel.astype(self.dtype))
        return rows + bias.astype(self.dtype)


class ResponseNorm(nn.Module):
    """The global response normalisation of V2: a channel's strength against the mean.

    x + scale * x * g / mean of g + bias, where g is the L2 norm of a channel over the
    map, f32 (Woo et al. 2023, Alg. 1).
    """

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """Normalise the response of each channel, [B, H, W, C] -> [B, H, W, C]."""
        scale, bias = (
            self.param(name, _zeros, x.shape[-1:], jnp.float32)
            for name in ("scale", "bias")
        )
        rows = x.astype(jnp.float32)
        square = jnp.sum(rows * rows, axis=(1, 2), keepdims=True)
        # The square root has no gradient at 0, for a channel that is zero everywhere.
        strength = jnp.where(square > 0, jnp.sqrt(jnp.where(square > 0, square, 1)), 0)
        share = strength / (jnp.mean(strength, axis=-1, keepdims=True) + _EPSILON)
        return (rows + scale * rows * share + bias).astype(x.dtype)


class Block(nn.Module):
    """A depthwise convolution and an MLP at each place, added to the block's input.

    Attributes:
      grn: whether the MLP has `ResponseNorm` before its last layer.
      layer_scale: initial value of the branch's factors; None: it has none.
      drop: chance that a row skips the branch, if a key is given.
      dtype: type of the computation.
    """

    grn: bool
    layer_scale: float | None
    drop: float
    dtype: Any

    @nn.compact
    def __call__(self, x: jax.Array, key: jax.Array | None) -> jax.Array:
        """Apply the block, [B, H, W, C] -> [B, H, W, C]; rows drop it only with a
        key."""
        width = x.shape[-1]
        branch = Depthwise(self.dtype, name="depthwise")(x)
        branch = _layer_norm(self.dtype, "norm")(branch)
        branch = layers.small_dense(4 * width, self.dtype, "fc1")(branch)
        branch = nn.gelu(branch, approximate=False)
        if self.grn:
            branch = ResponseNorm(name="grn")(branch)
        branch = layers.small_dense(width, self.dtype, "fc2")(branch)
        return layers.add_branch(self, x, branch, key, scale="scale")


class ConvNeXt(nn.Module):
    """A ConvNeXt without its classifier; for the options see `convnext`."""

    depths: tuple[int, ...]
    width: int
    patch: int = 4
    layer_scale: float | None = 1e-6
    grn: bool = False
    drop_path: float = 0.0
    dtype: Any = jnp.float32

    @property
    def num_features(self) -> int:
        """The length of a feature vector."""
        return self.width * 2 ** (len(self.depths) - 1)

    @nn.compact
    def __call__(
        self,
        images: jax.Array,
        *,
        train: bool = False,
        groups: int = 1,
        key: jax.Array | None = None,
    ) -> jax.Array:
        """Embed normalised images [B, H, W, C] as f32[B, num_features].

        Features are averaged over the last map, then normalised.

        Args:
          images: images with sides of at least 8 `patch` for four stages.
          train, groups: arguments without effect, since there is no batch norm.
          key: threefry key for `drop_path`; None: no branch is dropped.

        Raises:
          Refused: a side is too short for all stages.
        """
        core.check_images(images)
        least = self.patch * 2 ** (len(self.depths) - 1)
        if min(images.shape[1:3]) < least:
            raise Refused(
                f"images of {images.shape[1]} x {images.shape[2]} pixels "
                f"(config.augment.size): sides must be at least {least}, for "
                f"{len(self.depths)} stages with config.encoder.patch={self.patch}"
            )
        x = layers.Patches(self.patch, self.width, self.dtype, name="stem")(
            images.astype(self.dtype)
        )
        x = _layer_norm(self.dtype, "stem_norm")(x)
        number = 0
        for stage, depth in enumerate(self.depths):
            if stage:
                x = _layer_norm(self.dtype, f"stage{stage + 1}_norm")(x)
                width, name = self.width * 2**stage, f"stage{stage + 1}_down"
                x = layers.Patches(2, width, self.dtype, name=name)(x)
            for i in range(depth):
                block = Block(
                    grn=self.grn,
                    layer_scale=self.layer_scale,
                    drop=self.drop_path * number / max(sum(self.depths) - 1, 1),
                    dtype=self.dtype,
                    name=f"stage{stage + 1}_{i}",
                )
                x = block(x, None if key is None else jax.random.fold_in(key, number))
                number += 1
        x = jnp.mean(x.astype(jnp.float32), axis=(1, 2))
        return _layer_norm(jnp.float32, "norm")(x)


@schema.checked("config.encoder")
@schema.debug(depths=(1, 1), width=8, patch=2)
def convnext(
    *,
    size: Literal["atto", "tiny", "small", "base", "large"] = "tiny",
    depths: Annotated[tuple[schema.Count, ...], schema.Entries()] | None = None,
    width: schema.Width | None = None,
    patch: schema.Pixels = 4,
    layer_scale: schema.Weight | None = 1e-6,
    grn: bool = False,
    drop_path: schema.Fraction = 0.0,
    dtype: Any = jnp.float32,
) -> ConvNeXt:
    """Build a ConvNeXt of a published size.

    Args:
      size: a published size, which sets the next two options where they are None.
      depths: blocks of each stage, usually of four stages.
      width: channels of the first stage, doubled by each further one.
      patch: side in pixels of the windows that the stem reads; each further stage
        halves the map. Images below 128 pixels need less than the papers' 4.
      layer_scale: initial value of LayerScale's factors; None: there are none, as in
        V2.
      grn: whether MLPs have V2's global response normalisation.
      drop_path: chance that the last block drops its branch of a row in training; it
        rises evenly from 0 in the first (stochastic depth).
      dtype: type of the computation; parameters, the last norm and the pooling stay
        f32.

    Raises:
      Refused: an option is out of its range.
    """
    preset = SIZES[size]
    return ConvNeXt(
        depths=preset.depths if depths is None else tuple(depths),
        width=preset.width if width is None else width,
        patch=patch,
        layer_scale=layer_scale,
        grn=grn,
        drop_path=drop_path,
        dtype=dtype,
    )
