"""Vision Transformers: ViT, DeiT III, DINOv2 and DINOv3, by options.

Dosovitskiy et al., ICLR 2021 (ViT); Touvron et al., ECCV 2022 (DeiT III); Oquab et al.,
TMLR 2024 (DINOv2); Darcet et al., ICLR 2024 (registers); Siméoni et al., 2025 (DINOv3);
Chen, Xie, He, ICCV 2021 (MoCo v3: a patch projection that is not trained).

All are pre-norm: x + s1 * attention(norm(x)), then x + s2 * mlp(norm(x)).

Departures:
- DINOv3 trains with coordinates that are rescaled at random; here they never are.
- DINOv2 and DINOv3 compute a dropped branch on a part of the batch; here it is computed
  for all rows, and counts for those that keep it.
"""

import functools
from typing import Annotated, Any, Literal, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
from absl import logging

from jaxcl import core, schema, sharding
from jaxcl.errors import Refused
from jaxcl.nets import layers, positions


class Size(NamedTuple):
    """The width, layers and heads of a published size."""

    width: int  # D, of a token
    layers: int
    heads: int
    hidden: int  # units of the MLP


SIZES = {
    "tiny": Size(192, 12, 3, 768),
    "small": Size(384, 12, 6, 1536),
    "base": Size(768, 12, 12, 3072),
    "large": Size(1024, 24, 16, 4096),
}
_BIASED = {  # which of query, key and value have a bias
    "all": ("query", "key", "value"),
    "query_value": ("query", "value"),
    "none": (),
}
_tiny = nn.initializers.normal(1e-6)


def _attend(query, key, value, program):
    """Compute softmax attention over [B, T, H, Dh] by `program`, see `vit`."""
    size, lacking = query.shape[-1], None
    if not sharding.has_cudnn_attention():
        lacking = "the devices are no NVIDIA GPUs since Ampere"
    elif query.dtype != jnp.bfloat16:
        lacking = f"config.precision is {query.dtype}, not bfloat16"
    elif size % 8 or size > 128:
        lacking = f"heads have {size} numbers, not a multiple of 8 up to 128"
    if program == "cudnn" and lacking:
        _warn_of_xla(lacking)
        program = "xla"
    return jax.nn.dot_product_attention(query, key, value, implementation=program)


@functools.cache  # one line for all blocks and programs
def _warn_of_xla(lacking):
    logging.warning(
        "config.encoder.attention='cudnn': XLA computes attention instead, as %s",
        lacking,
    )


class Attention(nn.Module):
    """Self-attention with several heads.

    Attributes:
      heads: number of heads; they divide the width.
      biased: names among "query", "key" and "value" that have a bias.
      program: implementation, "xla" or "cudnn".
      dtype: type of the computation; the softmax is f32.
    """

    heads: int
    biased: tuple[str, ...]
    program: str
    dtype: Any

    @nn.compact
    def __call__(self, x: jax.Array, turns: jax.Array | None, skip: int) -> jax.Array:
        """Attend among tokens, [B, T, D] -> [B, T, D]."""
        width = x.shape[-1]

        def project_heads(name):
            rows = layers.small_dense(
                width, self.dtype, name, bias=name in self.biased
            )(x)
            return rows.reshape(*x.shape[:2], self.heads, -1)

        query, key, value = map(project_heads, ("query", "key", "value"))
        if turns is not None:
            query, key = (positions.rotate(rows, turns, skip) for rows in (query, key))
        rows = _attend(query, key, value, self.program)
        return layers.small_dense(width, self.dtype, "out")(rows.reshape(x.shape))


class FeedForward(nn.Module):
    """The MLP of a block: fc2(gelu(fc1(x))), or down(silu(gate(x)) * up(x)).

    Attributes:
      hidden: number of hidden units.
      kind: activation, "gelu" with the exact error function, or "swiglu".
      dtype: type of the computation.
    """

    hidden: int
    kind: str
    dtype: Any

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """Apply the MLP to each token, [..., D] -> [..., D]."""
        width = x.shape[-1]
        if self.kind == "gelu":
            x = nn.gelu(
                layers.small_dense(self.hidden, self.dtype, "fc1")(x),
                approximate=False,
            )
            return layers.small_dense(width, self.dtype, "fc2")(x)
        gate = nn.silu(layers.small_dense(self.hidden, self.dtype, "gate")(x))
        return layers.small_dense(width, self.dtype, "down")(
            gate * layers.small_dense(self.hidden, self.dtype, "up")(x)
        )


class Block(nn.Module):
    """A layer: attention, then the MLP, each added to its input.

    Attributes:
      heads, hidden, kind, biased, program: attributes of `Attention`, `FeedForward`.
      epsilon: epsilon of the norms.
      layer_scale: initial value of both branches' factors; None: they have none.
      drop: chance that a row skips a branch, if a key is given.
      dtype: type of the computation.
    """

    heads: int
    hidden: int
    kind: str
    biased: tuple[str, ...]
    program: str
    epsilon: float
    layer_scale: float | None
    drop: float
    dtype: Any

    @nn.compact
    def __call__(
        self,
        x: jax.Array,
        turns: jax.Array | None,
        skip: int,
        key: jax.Array | None,
    ) -> jax.Array:
        """Apply the block, [B, T, D] -> [B, T, D]; rows drop branches only with a
        key."""
        rows = layers.layer_norm(self.epsilon, self.dtype, "norm1")(x)
        attention = Attention(
            self.heads, self.biased, self.program, self.dtype, name="attention"
        )
        x = self._add_branch(x, attention(rows, turns, skip), 1, key)
        rows = layers.layer_norm(self.epsilon, self.dtype, "norm2")(x)
        mlp = FeedForward(self.hidden, self.kind, self.dtype, name="mlp")
        return self._add_branch(x, mlp(rows), 2, key)

    def _add_branch(self, x, branch, number, key):
        branch_key = None if key is None else jax.random.fold_in(key, number)
        return layers.add_branch(self, x, branch, branch_key, scale=f"scale{number}")


class ViT(nn.Module):
    """A Vision Transformer without its classifier; for the options see `vit`."""

    width: int
    layers: int
    heads: int
    hidden: int
    patch: int = 16
    image_size: int = 224
    registers: int = 0
    positions: str = "learned"
    class_position: bool = True
    resize: str = "antialias"
    layer_scale: float | None = None
    mlp: str = "gelu"
    qkv_bias: str = "all"
    epsilon: float = 1e-6
    features: str = "class"
    drop_path: float = 0.0
    frozen_patch: bool = False
    remat: bool = False
    attention: str = "xla"
    dtype: Any = jnp.float32

    def __post_init__(self):
        divisor = self.heads if self.positions == "learned" else 4 * self.heads
        if self.width % divisor:
            raise Refused(
                f"config.encoder.width={self.width}: must be a multiple of {divisor}, "
                f"for heads={self.heads} and positions={self.positions!r}"
            )
        if self.positions == "learned" and self.image_size % self.patch:
            raise Refused(
                f"config.encoder.image_size={self.image_size}: must be a multiple of "
                f"patch={self.patch}, since positions are learned for its grid"
            )
        super().__post_init__()

    @property
    def num_features(self) -> int:
        """The length of a feature vector."""
        return self.width * (2 if self.features == "both" else 1)

    @property
    def frozen(self) -> tuple[str, ...]:
        """The entries of the parameters that are not trained."""
        return ("patch",) if self.frozen_patch else ()

    @nn.compact
    def __call__(
        self,
        images: jax.Array,
        *,
        train: bool = False,
        groups: int = 1,
        key: jax.Array | None = None,
        hidden: jax.Array | None = None,
    ) -> jax.Array | tuple[jax.Array, jax.Array]:
        """Embed normalised images [B, H, W, C] as f32[B, num_features].

        Args:
          images: images whose sides are multiples of `patch`.
          train, groups: arguments without effect, since there is no batch norm.
          key: threefry key for `drop_path`; None: no branch is dropped.
          hidden: bool[B, N], patches whose pixels are hidden, not their position; if
            given, the features of all patches f32[B, N, D] are returned, too.

        Raises:
          Refused: a side is not a multiple of `patch`.
        """
        grid = self._patch_grid(images)
        patches = layers.Patches(
            self.patch, self.width, self.dtype, self.frozen_patch, name="patch"
        )
        x = patches(images.astype(self.dtype))
        x = x.reshape(x.shape[0], -1, self.width)
        if hidden is not None:
            x = jnp.where(hidden[..., None], 0, x)
        x, skip = self._join_tokens(x, grid)
        turns = None
        if self.positions == "rotary":
            turns = jnp.asarray(positions.rotary_angles(grid, self.width // self.heads))
        # Arguments count from the module itself: `skip` is the third.
        block = nn.remat(Block, static_argnums=(3,)) if self.remat else Block
        for number in range(self.layers):
            layer = block(
                heads=self.heads,
                hidden=self.hidden,
                kind=self.mlp,
                biased=_BIASED[self.qkv_bias],
                program=self.attention,
                epsilon=self.epsilon,
                layer_scale=self.layer_scale,
                drop=self.drop_path * number / max(self.layers - 1, 1),
                dtype=self.dtype,
                name=f"block_{number}",
            )
            block_key = None if key is None else jax.random.fold_in(key, number)
            x = layer(x, turns, skip, block_key)
        x = layers.layer_norm(self.epsilon, jnp.float32, "norm")(x)
        features = self._pool_tokens(x, skip)
        return features if hidden is None else (features, x[:, skip:])

    def _patch_grid(self, images) -> tuple[int, int]:
        """Count the patches of each side."""
        core.check_images(images)
        height, width = images.shape[1:3]
        if min(height, width) < self.patch or height % self.patch or width % self.patch:
            raise Refused(
                f"images of {height} x {width} pixels (config.augment.size): sides "
                f"must be multiples of config.encoder.patch={self.patch}"
            )
        return height // self.patch, width // self.patch

    def _join_tokens(self, x, grid):
        """Join class token, registers and patches; count the tokens before the
        patches."""
        batch, width = x.shape[0], self.width
        first = self.param("class", _tiny, (width,), jnp.float32)
        if self.positions == "learned":
            side = self.image_size // self.patch
            table = self.param(
                "positions", layers.SMALL_WEIGHTS, (side, side, width), jnp.float32
            )
            x += self._flatten_table(positions.resize_table(table, grid, self.resize))
            if self.class_position:
                position = self.param(
                    "class_position", layers.SMALL_WEIGHTS, (width,), jnp.float32
                )
                first = first + position  # not in place: it may be an array of NumPy
        elif self.positions == "sin_cos":
            x += self._flatten_table(jnp.asarray(positions.sin_cos_table(grid, width)))
        first = first[None]
        if self.registers:
            shape = (self.registers, width)
            registers = self.param("registers", _tiny, shape, jnp.float32)
            first = jnp.concatenate([first, registers])
        skip = len(first)
        first = jnp.broadcast_to(first.astype(x.dtype), (batch, skip, width))
        return jnp.concatenate([first, x], axis=1), skip

    def _flatten_table(self, table):
        return table.reshape(-1, self.width).astype(self.dtype)

    def _pool_tokens(self, x, skip):
        """Pool tokens f32[B, T, D] into features f32[B, num_features]."""
        pooled = {"class": x[:, 0], "mean": jnp.mean(x[:, skip:], axis=1)}
        wanted = ("class", "mean") if self.features == "both" else (self.features,)
        return jnp.concatenate([pooled[name] for name in wanted], axis=-1)


@schema.checked("config.encoder")
@schema.debug(width=16, layers=2, heads=2, hidden=32, patch=4, image_size=16)
def vit(
    *,
    size: Literal["tiny", "small", "base", "large"] = "small",
    width: schema.Width | None = None,
    layers: Annotated[int, schema.Range(1, 1000)] | None = None,
    heads: schema.Width | None = None,
    hidden: schema.Width | None = None,
    patch: schema.Pixels = 16,
    image_size: schema.Pixels = 224,
    registers: Annotated[int, schema.Range(0, 1024)] = 0,
    positions: Literal["learned", "sin_cos", "rotary"] = "learned",
    class_position: bool = True,
    resize: positions.Resize = "antialias",
    layer_scale: schema.Weight | None = None,
    mlp: Literal["gelu", "swiglu"] = "gelu",
    qkv_bias: Literal["all", "query_value", "none"] = "all",
    epsilon: schema.Positive = 1e-6,
    features: Literal["class", "mean", "both"] = "class",
    drop_path: schema.Fraction = 0.0,
    frozen_patch: bool = False,
    remat: bool = False,
    attention: Literal["xla", "cudnn"] = "xla",
    dtype: Any = jnp.float32,
) -> ViT:
    """Build a Vision Transformer of a published size.

    Args:
      size: a published size, which sets the next four options where they are None.
      width: D, length of a token.
      layers: number of blocks.
      heads: attention heads; the width must be a multiple of them.
      hidden: units of the MLP.
      patch: side of a patch in pixels.
      image_size: side in pixels of the images for which positions are learned; they are
        resized for other sides.
      registers: further tokens, which are dropped at the end.
      positions: "learned", the fixed "sin_cos", or "rotary" as in DINOv3.
      class_position: whether the class token has a learned position; DeiT III's has
        none.
      resize: rule by which learned positions are resized, see `positions.Resize`.
      layer_scale: initial value of LayerScale's factors; None: there are none.
      mlp: kind of the MLP, "gelu" or "swiglu".
      qkv_bias: biases of queries, keys and values: "all", "query_value" (DINOv3),
        "none".
      epsilon: epsilon of the norms; DINOv3 has 1e-5, transformers' ViT 1e-12.
      features: the "class" token, the "mean" of the patches, or "both" side by side,
        after the last norm.
      drop_path: chance that the last block drops a branch of a row in training; it
        rises evenly from 0 in the first (stochastic depth).
      frozen_patch: whether the patch projection stays untrained, as in MoCo v3.
      remat: whether the backward pass computes each block's activations again: less
        memory for a third more time.
      attention: implementation: "xla", or "cudnn" on NVIDIA's GPUs since Ampere in
        bfloat16; elsewhere XLA computes it, with a log line.
      dtype: type of the computation; parameters, norms and softmax stay f32.

    Raises:
      Refused: an option is out of its range, or does not fit another.
    """
    preset = SIZES[size]
    return ViT(
        width=preset.width if width is None else width,
        layers=preset.layers if layers is None else layers,
        heads=preset.heads if heads is None else heads,
        hidden=preset.hidden if hidden is None else hidden,
        patch=patch,
        image_size=image_size,
        registers=registers,
        positions=positions,
        class_position=class_position,
        resize=resize,
        layer_scale=layer_scale,
        mlp=mlp,
        qkv_bias=qkv_bias,
        epsilon=epsilon,
        features=features,
        drop_path=drop_path,
        frozen_patch=frozen_patch,
        remat=remat,
        attention=attention,
        dtype=dtype,
    )
