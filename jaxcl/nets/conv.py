"""Convolutions in a form that is fast on XLA's CPU backend."""

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jaxcl import sharding

_CHANNELS = 4  # inputs with fewer channels are padded to as many
_ROWS = 8  # rows of a piece of the weight gradient; more do not fit the cache
_PIECES = 8  # about the most pieces, since each is compiled on its own
_SMALL = 2**16  # outputs of no more numbers are fast in one piece


def conv(
    x: jax.Array,
    kernel: jax.Array,
    strides: Sequence[int],
    padding: str | Sequence[tuple[int, int]],
    **options: Any,
) -> jax.Array:
    """`lax.conv_general_dilated`, to be given to `flax.linen.Conv` in its place.

    The result is the same up to rounding. On a CPU two things differ:
    - Images of fewer than 4 channels are padded with zero channels: with three, XLA's
      convolution takes nine times as long.
    - For large maps the weight gradient is a sum over pieces of a few rows: over ten
      rows at once it takes two to four times as long, over 256 six times. It then has
      no forward-mode derivative.

    Args:
      x: [B, H, W, I].
      kernel: [h, w, I, O].
      strides, padding: one per spatial axis.
      options: of `lax.conv_general_dilated`.
    """
    apply = functools.partial(
        lax.conv_general_dilated, window_strides=strides, padding=padding, **options
    )
    if not sharding.on_cpu():
        return apply(x, kernel)
    missing = max(_CHANNELS - x.shape[-1], 0)
    if missing:
        x = jnp.pad(x, ((0, 0),) * 3 + ((0, missing),))
        kernel = jnp.pad(kernel, ((0, 0),) * 2 + ((0, missing), (0, 0)))
    out = jax.eval_shape(apply, x, kernel)
    places = out.size // out.shape[-1] // len(x)
    # Every piece writes the gradient of the whole kernel, which must be cheap against
    # computing it.
    if out.size <= _SMALL or _ROWS * places < kernel[..., 0].size:
        return apply(x, kernel)
    return _in_pieces(apply, x, kernel)


def _in_pieces(apply, x, kernel):
    """`apply(x, kernel)`, whose weight gradient is a sum over pieces of the rows."""

    def backward(inputs, gradient):
        x, kernel = inputs
        to_x = jax.linear_transpose(lambda x: apply(x, kernel), x)
        parts = []
        for rows in pieces(len(x)):
            to_kernel = jax.linear_transpose(lambda k, x=x[rows]: apply(x, k), kernel)
            parts += [part.astype(jnp.float32) for part in to_kernel(gradient[rows])]
        return *to_x(gradient), sum(parts).astype(kernel.dtype)

    convolve = jax.custom_vjp(apply)
    convolve.defvjp(lambda x, kernel: (apply(x, kernel), (x, kernel)), backward)
    return convolve(x, kernel)


def pieces(count: int) -> list[slice]:
    """Slices that divide `count` rows, each of 1, 2, 4 or a multiple of 8 rows.

    For other numbers of rows, such as three or ten, XLA's weight gradient is slow.
    """
    rows, slices, start = _ROWS * -(-count // (_ROWS * _PIECES)), [], 0
    while start < count:
        while rows > count - start:
            rows = rows - _ROWS if rows > _ROWS else rows // 2
        slices.append(slice(start, start + rows))
        start += rows
    return slices


def depthwise(x: jax.Array, kernel: jax.Array) -> jax.Array:
    """Convolve each channel by itself, with padding that keeps the size of the map.

    Args:
      x: [B, H, W, C].
      kernel: [h, w, 1, C], of odd sides.
    """
    sides = [(side // 2, side // 2) for side in kernel.shape[:2]]
    return lax.conv_general_dilated(
        x,
        kernel,
        (1, 1),
        sides,
        feature_group_count=x.shape[-1],
        dimension_numbers=("NHWC", "HWIO", "NHWC"),
    )
