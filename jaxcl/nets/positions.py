"""Where a patch lies in its image: tables for other grids, fixed ones, rotations.

Grids count patches, rows first: position (row, column) of a grid of R x C. All tables
are made on the host, since grids are known when a program is traced.
"""

import functools
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np

# How a learned table is resized, all of them bicubic. Libraries differ, and a file's
# features are those of the library that it came from:
#   "antialias" widens the kernel when it shrinks: timm, DINOv2 with registers
#   "plain" does not: transformers' ViT and DINOv2, MAE
#   "offset" is "plain" with the scale (n + 0.1) / g in place of n / g: DINOv2
Resize = Literal["antialias", "plain", "offset"]


def _cubic(x, a):
    """Keys' cubic convolution kernel with the slope a at 1."""
    x = np.abs(x)
    near = ((a + 2) * x - (a + 3)) * x * x + 1
    far = (((x - 5) * x + 8) * x - 4) * a
    return np.where(x <= 1, near, np.where(x < 2, far, 0.0))


@functools.lru_cache(maxsize=64)
def resize_matrix(size: int, new: int, rule: Resize) -> np.ndarray:
    """The matrix f32[new, size] that resizes one axis as PyTorch's `interpolate` does.

    Args:
      size: entries of the axis.
      new: entries that it shall have.
      rule: see `Resize`; "plain" and "offset" repeat the entries at the ends.
    """
    rows = np.arange(new)[:, None]
    if rule == "antialias":
        step = size / new
        reach = max(step, 1.0)
        centre = step * (rows + 0.5)
        columns = np.arange(size)[None]
        inside = (columns >= np.floor(centre - 2 * reach + 0.5)) & (
            columns < np.floor(centre + 2 * reach + 0.5)
        )
        weights = np.where(inside, _cubic((columns + 0.5 - centre) / reach, -0.5), 0.0)
        return (weights / weights.sum(axis=1, keepdims=True)).astype(np.float32)
    step = size / (new + 0.1) if rule == "offset" else size / new
    place = step * (rows + 0.5) - 0.5
    matrix = np.zeros((new, size))
    for shift in (-1, 0, 1, 2):
        column = np.floor(place) + shift
        weight = _cubic(place - column, -0.75)
        np.add.at(
            matrix, (rows, np.clip(column, 0, size - 1).astype(int)), weight
        )  # two columns past the end are the same one
    return matrix.astype(np.float32)


def resized(table: jax.Array, grid: tuple[int, int], rule: Resize) -> jax.Array:
    """A learned table f32[g, g, D] for a grid, f32[R, C, D]; as it is for its own."""
    if table.shape[:2] == grid:
        return table
    rows, columns = (
        resize_matrix(old, new, rule)
        for old, new in zip(table.shape[:2], grid, strict=True)
    )
    exact = jax.lax.Precision.HIGHEST
    return jnp.einsum("ri,cj,ijd->rcd", rows, columns, table, precision=exact)


def sin_cos(grid: tuple[int, int], width: int) -> np.ndarray:
    """The fixed table f32[R, C, D] of MAE (He et al., CVPR 2022).

    [sin(c w), cos(c w), sin(r w), cos(r w)] with w_j = 10000^(-j / n), n = D / 4.
    """
    count = width // 4
    rates = 10_000.0 ** (-np.arange(count) / count)
    row, column = (
        np.concatenate([np.sin(x), np.cos(x)], axis=-1)
        for x in (np.arange(n)[:, None] * rates for n in grid)
    )
    shape = (*grid, 2 * count)
    parts = np.broadcast_to(column[None], shape), np.broadcast_to(row[:, None], shape)
    return np.concatenate(parts, axis=-1).astype(np.float32)


def angles(grid: tuple[int, int], size: int) -> np.ndarray:
    """Angles of DINOv3's axial rotation, f32[R C, Dh] for heads of `size` Dh.

    With n = Dh / 4 periods p_j = 100^(j / n) and the middle of a patch at (y, x), each
    from -1 to 1 over the image: 2 pi [y / p, x / p], twice.
    """
    count = size // 4
    periods = 100.0 ** (np.arange(count) / count)
    y, x = (2 * (np.arange(n) + 0.5) / n - 1 for n in grid)
    places = np.stack(np.meshgrid(y, x, indexing="ij"), axis=-1).reshape(-1, 2, 1)
    half = (2 * np.pi * places / periods).reshape(len(places), -1)
    return np.concatenate([half, half], axis=1).astype(np.float32)


def rotate(x: jax.Array, turns: jax.Array, skip: int) -> jax.Array:
    """Queries or keys [B, T, H, Dh], turned by the angles of their patches.

    Args:
      x: of any floating type, which it keeps; turned in float32.
      turns: f32[T - skip, Dh], of `angles`.
      skip: tokens before the patches, which have no place.
    """
    first, rest = x[:, :skip], x[:, skip:].astype(jnp.float32)
    one, two = jnp.split(rest, 2, axis=-1)
    turned = jnp.concatenate([-two, one], axis=-1)
    cos, sin = jnp.cos(turns)[:, None], jnp.sin(turns)[:, None]
    rest = (rest * cos + turned * sin).astype(x.dtype)
    return jnp.concatenate([first, rest], axis=1)
