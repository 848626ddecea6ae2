"""Convolutions in the forms that are fast on XLA's CPU backend.

On other devices each is one convolution of XLA's.
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxcl import sharding

_CHANNELS = 4  # inputs with fewer channels are padded to as many
# Limits of a piece of the weight gradient:
_NUMBERS = 2**18  # of the inputs or outputs; more do not fit the cache
_PLACES = 1024  # at least, as each piece writes the gradient of the whole kernel
_PIECES = 32  # about the most, since each is compiled on its own
_SMALL_OUTPUT = 2**16  # outputs of no more numbers are fast in one piece
_TILE = 8  # places of a side; of 4 and of 16 depthwise convolutions are slower


def conv(
    x: jax.Array,
    kernel: jax.Array,
    strides: Sequence[int],
    padding: str | Sequence[tuple[int, int]],
    **options: Any,
) -> jax.Array:
    """Convolve as `lax.conv_general_dilated`, faster on CPUs; for `flax.linen.Conv`.

    Results agree up to rounding. On a CPU two things differ:
    - Images of fewer than 4 channels are padded with zero channels: with three, XLA's
      convolution takes nine times as long.
    - For large maps the weight gradient is a sum over pieces of a few rows: where these
      do not fit the cache it takes two to six times as long. It then has no
      forward-mode derivative.

    Args:
      x: [B, H, W, I].
      kernel: [h, w, I, O].
      strides, padding: values, one per spatial axis.
      options: further arguments of `lax.conv_general_dilated`.
    """

    def convolve(x, kernel):
        return lax.conv_general_dilated(x, kernel, strides, padding, **options)

    if not sharding.on_cpu() or not isinstance(x.shape[0], int):  # any batch size
        return convolve(x, kernel)
    missing = max(_CHANNELS - x.shape[-1], 0)
    if missing:
        x = jnp.pad(x, ((0, 0),) * 3 + ((0, missing),))
        kernel = jnp.pad(kernel, ((0, 0),) * 2 + ((0, missing), (0, 0)))
    out = jax.eval_shape(convolve, x, kernel)
    count, places = x.shape[0], out.size // out.shape[-1] // x.shape[0]
    # One piece is fast, too, if the kernel is larger than its map.
    if out.size <= _SMALL_OUTPUT or count * places < kernel[..., 0].size:
        return convolve(x, kernel)
    rows = max(
        _NUMBERS * count // max(x.size, out.size),
        _PLACES // places,
        -(-count // _PIECES),
    )
    return _with_sliced_gradient(convolve, row_slices(count, rows))(x, kernel)


def _with_sliced_gradient(convolve, slices):
    """Make a convolution that sums its weight gradient over slices of rows."""

    def backward(inputs, gradient):
        x, kernel = inputs
        to_x = jax.linear_transpose(lambda x: convolve(x, kernel), x)
        grads = []
        for rows in slices:
            to_kernel = jax.linear_transpose(
                lambda k, x=x[rows]: convolve(x, k), kernel
            )
            grads += [part.astype(jnp.float32) for part in to_kernel(gradient[rows])]
        return *to_x(gradient), sum(grads).astype(kernel.dtype)

    convolved = jax.custom_vjp(convolve)
    convolved.defvjp(lambda x, kernel: (convolve(x, kernel), (x, kernel)), backward)
    return convolved


def row_slices(count: int, most: int) -> list[slice]:
    """Divide `count` rows into slices of 1, 2, 4 or a multiple of 8 rows.

    For other numbers of rows, such as three or ten, XLA's weight gradient is slow.

    Args:
      count: number of rows.
      most: most rows of a slice, at least 1.
    """
    slices, start = [], 0
    while start < count:
        rows = min(most, count - start)
        rows = rows // 8 * 8 if rows >= 8 else 1 << (rows.bit_length() - 1)
        slices.append(slice(start, start + rows))
        start += rows
    return slices


def depthwise(x: jax.Array, kernel: jax.Array) -> jax.Array:
    """Convolve each channel by itself, with padding that keeps the size of the map.

    On a CPU it is a matrix product for each channel, over tiles of the map: with its
    gradients XLA's convolution takes three times as long for maps of 28 x 28, ten times
    for 8 x 8 and fifty for 4 x 4.

    Args:
      x: [B, H, W, C].
      kernel: [k, k, 1, C], k odd.
    """
    reach = len(kernel) // 2
    if sharding.on_cpu():
        return _convolve_tiles(x, kernel[:, :, 0], reach)
    return conv(
        x,
        kernel,
        (1, 1),
        [(reach, reach)] * 2,
        feature_group_count=x.shape[-1],
        dimension_numbers=("NHWC", "HWIO", "NHWC"),
    )


def _convolve_tiles(x, kernel, reach):
    """Convolve each channel with a kernel [k, k, C]: a matrix product for each tile."""
    height, width, channels = x.shape[1:]
    if max(height, width) <= _TILE:  # one tile, and nothing around it
        rows, columns = (
            _band_matrix(n, n, reach, len(kernel)) for n in (height, width)
        )
        places = jnp.einsum("oir,pjs,rsc->copij", rows, columns, kernel)
        return jnp.einsum("copij,bijc->bopc", places, x)
    down, across = -(-height // _TILE), -(-width // _TILE)
    # Pad with zeros around the map, and to whole tiles at its end.
    rest = [
        (reach, n * _TILE - size + reach)
        for n, size in ((down, height), (across, width))
    ]
    x = jnp.pad(x, ((0, 0), *rest, (0, 0)))
    around = _TILE + 2 * reach
    x = _cut_overlapping(
        _cut_overlapping(x, 1, down, around), 3, across, around
    )  # [B, down, i, across, j, C]
    band = _band_matrix(_TILE, around, 0, len(kernel))
    places = jnp.einsum("oir,pjs,rsc->copij", band, band, kernel)
    x = jnp.einsum("copij,bnimjc->bnompc", places, x)
    x = x.reshape(-1, down * _TILE, across * _TILE, channels)
    return x[:, :height, :width]


def _cut_overlapping(x, axis, count, around):
    """Cut `count` overlapping pieces of an axis, along a new axis before it."""
    starts = range(0, count * _TILE, _TILE)
    pieces_of = (lax.slice_in_dim(x, s, s + around, axis=axis) for s in starts)
    return jnp.stack([*pieces_of], axis=axis)


def _band_matrix(outputs, inputs, before, size):
    """Return f32[outputs, inputs, size], 1 where i - o + before is the third index."""
    number = np.arange(inputs) - np.arange(outputs)[:, None] + before
    return (number[..., None] == np.arange(size)).astype(np.float32)
