"""Residual networks as in torchvision, and a small one for tiny images."""

import functools
from typing import Annotated, Any, Literal

import flax.linen as nn
import jax
import jax.numpy as jnp

from jaxcl import core, schema
from jaxcl.errors import Refused
from jaxcl.nets import cpu, layers

# depth -> blocks per stage, kind of block; 10 is for tests and small machines.
DEPTHS = {
    10: ((1, 1, 1, 1), "basic"),
    18: ((2, 2, 2, 2), "basic"),
    34: ((3, 4, 6, 3), "basic"),
    50: ((3, 4, 6, 3), "bottleneck"),
    101: ((3, 4, 23, 3), "bottleneck"),
}
_EXPANSION = {"basic": 1, "bottleneck": 4}
# name -> initialiser of convolutions: torchvision's ResNet has Kaiming normal over fan
# out, PyTorch's layers by default uniform within 1 / sqrt(fan in).
_INITS = {
    "kaiming": layers.draw_matrix(
        nn.initializers.variance_scaling(2.0, "fan_out", "normal"), "out"
    ),
    "torch": layers.torch_kernel,
}


def _conv_norm(
    init, dtype, train, groups, x, name, filters, kernel, stride, pad, zero=False
):
    """Convolve and normalise, in layers of the module that calls.

    Args:
      init: initialisation of the convolution, a key of `_INITS`.
      dtype, train, groups: arguments of `layers.BatchNorm`.
      name: template in which "conv" or "bn" is filled in.
      pad: pixels on each side; "torch": the map keeps its size; "same": XLA's SAME.
        SAME puts the odd pixel of a strided window at the end, while PyTorch pads both
        sides equally, so they read different pixels on maps with an even side.
    """
    side = kernel // 2 if pad == "torch" else pad
    x = nn.Conv(
        filters,
        (kernel, kernel),
        strides=stride,
        padding="SAME" if pad == "same" else ((side, side),) * 2,
        use_bias=False,
        dtype=dtype,
        kernel_init=_INITS[init],
        conv_general_dilated=cpu.conv,
        name=name.format("conv"),
    )(x)
    scale = nn.initializers.zeros if zero else nn.initializers.ones
    bn = layers.BatchNorm(dtype=dtype, scale_init=scale, name=name.format("bn"))
    return bn(x, train=train, groups=groups)


class Residual(nn.Module):
    """One residual block: convolutions with batch norm, added to a shortcut.

    Attributes:
      convs: (filters, kernel, stride) of each convolution.
      padding: "torch" or "same", see `ResNet`.
      zero_init: whether the last batch norm's scale starts at 0.
      conv_init: initialisation of the convolutions, see `ResNet`.
      dtype: type of the computation.
    """

    convs: tuple[tuple[int, int, int], ...]
    padding: str
    zero_init: bool
    conv_init: str
    dtype: Any

    @nn.compact
    def __call__(self, x: jax.Array, *, train: bool, groups: int) -> jax.Array:
        """Apply the block, [B, H, W, C] -> [B, H / stride, W / stride, D]."""
        conv_norm = functools.partial(
            _conv_norm, self.conv_init, self.dtype, train, groups
        )
        y, total_stride, size = x, 1, len(self.convs)
        for i, (filters, kernel, stride) in enumerate(self.convs, start=1):
            zero = self.zero_init and i == size
            y = conv_norm(y, f"{{}}{i}", filters, kernel, stride, self.padding, zero)
            y = y if i == size else nn.relu(y)
            total_stride *= stride
        if total_stride != 1 or x.shape[-1] != filters:
            x = conv_norm(x, "downsample_{}", filters, 1, total_stride, 0)
        return nn.relu(y + x)


class ResNet(nn.Module):
    """Residual network without its classifier (He et al., CVPR 2016).

    The stride of a bottleneck is on its 3x3 convolution, as in torchvision.
    Convolutions have no bias.

    Attributes:
      stage_sizes: blocks per stage; stage s has width * 2**s filters.
      block: "basic" (two 3x3) or "bottleneck" (1x1, 3x3, 1x1 with 4 times as many).
      width: filters of the stem and of the first stage.
      stem: "cifar" (3x3, stride 1) or "imagenet" (7x7, stride 2, 3x3 max pool).
      stem_padding: pixels on each side, for the cifar stem. PNR's released code has 2,
        so a 32x32 image becomes a 34x34 map.
      padding: rule: "torch" pads windows on both sides alike, "same" is XLA's SAME.
      zero_init_residual: whether every block starts as its shortcut.
      conv_init: initialisation of convolutions, "kaiming" (normal over fan out) or
        "torch" (uniform within 1 / sqrt(fan in), PyTorch's default).
      pool: side and stride of the windows that are averaged at the end and flattened;
        None averages the whole map. The reduced ResNet-18 of online continual learning
        has pool 4 and width 20: 160 features for 32 pixels, 640 for 84.
      dtype: type of the computation; parameters and statistics stay f32.
    """

    stage_sizes: tuple[int, ...]
    block: str = "basic"
    width: int = 64
    stem: str = "cifar"
    stem_padding: int = 1
    padding: str = "torch"
    zero_init_residual: bool = False
    conv_init: str = "kaiming"
    pool: int | None = None
    dtype: Any = jnp.float32

    @property
    def num_features(self) -> int:
        """The length D of a feature vector; with `pool`, of one window's part."""
        last_width = self.width * 2 ** (len(self.stage_sizes) - 1)
        return last_width * _EXPANSION[self.block]

    @nn.compact
    def __call__(
        self, images: jax.Array, *, train: bool = False, groups: int = 1
    ) -> jax.Array:
        """Embed normalised images [B, H, W, C] as f32[B, D], averaged over the map.

        `train` and `groups` as in `layers.BatchNorm`.
        """
        core.check_images(images)
        conv_norm = functools.partial(
            _conv_norm, self.conv_init, self.dtype, train, groups
        )
        x = images.astype(self.dtype)
        if self.stem == "cifar":
            x = conv_norm(x, "{}1", self.width, 3, 1, self.stem_padding)
        else:
            x = conv_norm(x, "{}1", self.width, 7, 2, self.padding)
        x = nn.relu(x)
        if self.stem == "imagenet":
            pad = "SAME" if self.padding == "same" else ((1, 1), (1, 1))
            x = nn.max_pool(x, (3, 3), (2, 2), pad)
        for stage, size in enumerate(self.stage_sizes):
            filters = self.width * 2**stage
            for i in range(size):
                stride = 2 if stage > 0 and i == 0 else 1
                convs = {
                    "basic": ((filters, 3, stride), (filters, 3, 1)),
                    "bottleneck": (
                        (filters, 1, 1),
                        (filters, 3, stride),
                        (filters * 4, 1, 1),
                    ),
                }
                x = Residual(
                    convs[self.block],
                    self.padding,
                    self.zero_init_residual,
                    self.conv_init,
                    self.dtype,
                    name=f"layer{stage + 1}_{i}",
                )(x, train=train, groups=groups)
        x = x.astype(jnp.float32)
        if self.pool is None:
            return jnp.mean(x, axis=(1, 2))
        if min(x.shape[1:3]) < self.pool:
            raise Refused(
                "pool", self.pool, f"the last map is {x.shape[1]} x {x.shape[2]}"
            )
        window = (self.pool, self.pool)
        return nn.avg_pool(x, window, window).reshape(x.shape[0], -1)


class ConvNet(nn.Module):
    """Three blocks of 3x3 conv, BN, ReLU, strides 1, 2, 2, for images of about 8x8.

    Attributes:
      width: filters of the first block; each further block doubles them.
      dtype: type of the computation; parameters and statistics stay f32.
    """

    width: int = 32
    dtype: Any = jnp.float32

    @property
    def num_features(self) -> int:
        """The length D of a feature vector."""
        return self.width * 4

    @nn.compact
    def __call__(
        self, images: jax.Array, *, train: bool = False, groups: int = 1
    ) -> jax.Array:
        """Embed normalised images [B, H, W, C] as f32[B, D], averaged over the map."""
        core.check_images(images)
        conv_norm = functools.partial(_conv_norm, "kaiming", self.dtype, train, groups)
        x = images.astype(self.dtype)
        for i, stride in enumerate((1, 2, 2), start=1):
            filters = self.width * 2 ** (i - 1)
            x = nn.relu(conv_norm(x, f"{{}}{i}", filters, 3, stride, "torch"))
        return jnp.mean(x.astype(jnp.float32), axis=(1, 2))


@schema.checked("config.encoder")
@schema.debug(depth=10, width=4, stem="cifar")
def resnet(
    *,
    depth: Literal[10, 18, 34, 50, 101] = 18,
    width: schema.Width = 64,
    stem: Literal["cifar", "imagenet"] = "cifar",
    stem_padding: Annotated[int, schema.Range(0, 64)] = 1,
    padding: Literal["torch", "same"] = "torch",
    zero_init_residual: bool = False,
    conv_init: Literal["kaiming", "torch"] = "kaiming",
    pool: schema.Pixels | None = None,
    dtype: Any = jnp.float32,
) -> ResNet:
    """Build a ResNet of a published depth; options as in `ResNet`.

    Args:
      depth: number of layers, including the paper's classifier.

    Raises:
      Refused: `depth` is not 10, 18, 34, 50 or 101, or another option is unknown.
    """
    if stem == "imagenet":
        field = "config.encoder.stem_padding with stem='imagenet'"
        core.check_choice(field, stem_padding, (1,))
    stem_shape = width, stem, stem_padding
    return ResNet(
        *DEPTHS[depth], *stem_shape, padding, zero_init_residual, conv_init, pool, dtype
    )


@schema.checked("config.encoder")
def conv_net(*, width: schema.Width = 32, dtype: Any = jnp.float32) -> ConvNet:
    """Build a small network for tiny images such as 8x8 digits; D = 4 * width.

    Args:
      width: filters of the first of its three convolutions.
    """
    return ConvNet(width=width, dtype=dtype)
