"""Convolutions in the form that XLA's CPU backend is quick at."""

import functools

import jax
import jax.numpy as jnp
from jax import lax

from jaxcl import sharding

_CHANNELS = 4  # that an input has at least
_ROWS = 8  # of the pieces of a weight gradient; more leave the cache
_PIECES = 8  # at most about so many, since each is compiled by itself
_SMALL = 2**16  # numbers in an output whose gradient is quick in one piece


def conv(x, kernel, strides, padding, **options):
    """`lax.conv_general_dilated`, which `flax.linen.Conv` takes this in place of.

    The result is the same but for rounding. On a CPU two things differ:
    - Images of fewer than 4 channels get channels of zeros: with three, XLA's
      convolution takes nine times as long.
    - The weight gradient is the sum over pieces of a few rows, where maps are large:
      over ten rows at once it takes two to four times as long, over 256 six times.
      There it has no forward-mode derivative.

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
    made = jax.eval_shape(apply, x, kernel)
    places = made.size // made.shape[-1] // len(x)
    # Each piece makes a whole kernel's gradient, which must be little beside its work.
    if made.size <= _SMALL or _ROWS * places < kernel[..., 0].size:
        return apply(x, kernel)
    return _in_pieces(apply, x, kernel)


def _in_pieces(apply, x, kernel):
    """`apply(x, kernel)`, whose weight gradient is made of pieces."""

    def backward(kept, given):
        x, kernel = kept
        to_x = jax.linear_transpose(lambda x: apply(x, kernel), x)
        parts = []
        for rows in pieces(len(x)):
            to_kernel = jax.linear_transpose(lambda k, x=x[rows]: apply(x, k), kernel)
            parts += [part.astype(jnp.float32) for part in to_kernel(given[rows])]
        return *to_x(given), sum(parts).astype(kernel.dtype)

    made = jax.custom_vjp(apply)
    made.defvjp(lambda x, kernel: (apply(x, kernel), (x, kernel)), backward)
    return made(x, kernel)


def pieces(count: int) -> list[slice]:
    """Slices that share out `count` rows, each of 1, 2, 4 or some eights of them.

    Over other numbers, three or ten say, XLA's weight gradient is slow by itself.
    """
    rows, found, start = _ROWS * -(-count // (_ROWS * _PIECES)), [], 0
    while start < count:
        while rows > count - start:
            rows = rows - _ROWS if rows > _ROWS else rows // 2
        found.append(slice(start, start + rows))
        start += rows
    return found
