"""Positions of patches: learned tables for other grids, fixed tables, rotations.

Grids count patches, rows first: position (row, column) of a grid of R x C. All tables
are computed on the host, since grids are known when a program is traced.
"""

from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np

# Bicubic ways to resize a learned table. Libraries differ, and a file needs that of the
# library that wrote the file:
#   "antialias" widens the kernel when it shrinks: timm, DINOv2 with registers
#   "plain" does not: transformers' ViT and DINOv2, MAE
#   "offset" is "plain" with the scale (n + 0.1) / g in place of n / g: DINOv2
Resize = Literal["antialias", "plain", "offset"]


def resize_table(table: jax.Array, grid: tuple[int, int], rule: Resize) -> jax.Array:
    """Resize a learned table f32[g, g, D] to a grid, f32[R, C, D]."""
    if table.shape[:2] == grid:
        return table
    # PyTorch's `interpolate` has another slope for each kernel, as these methods do.
    method = "cubic" if rule == "antialias" else "cubic-pytorch"
    more = 0.1 if rule == "offset" else 0.0
    pairs = zip(grid, table.shape[:2], strict=True)
    return jax.image.scale_and_translate(
        table,
        (*grid, table.shape[2]),
        (0, 1),
        scale=jnp.array([(new + more) / old for new, old in pairs]),
        translation=jnp.zeros(2),
        method=method,
        antialias=rule == "antialias",
    )


def sin_cos_table(grid: tuple[int, int], width: int) -> np.ndarray:
    """Compute MAE's fixed table f32[R, C, D] for a grid (He et al., CVPR 2022).

    [sin(c w), cos(c w), sin(r w), cos(r w)] with w_j = 10000^(-j / n), n = D / 4.
    """
    count = width // 4
    rates = 10_000.0 ** (-np.arange(count) / count)
    row, column = (
        np.concatenate([np.sin(x), np.cos(x)], axis=-1)
        for x in (np.arange(n)[:, None] * rates for n in grid)
    )
    shape = (*grid, 2 * count)
    halves = np.broadcast_to(column[None], shape), np.broadcast_to(row[:, None], shape)
    return np.concatenate(halves, axis=-1).astype(np.float32)


def rotary_angles(grid: tuple[int, int], size: int) -> np.ndarray:
    """Compute the angles of DINOv3's rotation, f32[R C, Dh] for heads of `size` Dh.

    The angles of a patch are 2 pi [y / p, x / p], twice. Its middle is at (y, x), each
    from -1 to 1 over the image; the n = Dh / 4 periods are p_j = 100^(j / n).
    """
    count = size // 4
    periods = 100.0 ** (np.arange(count) / count)
    y, x = (2 * (np.arange(n) + 0.5) / n - 1 for n in grid)
    places = np.stack(np.meshgrid(y, x, indexing="ij"), axis=-1).reshape(-1, 2, 1)
    half = (2 * np.pi * places / periods).reshape(len(places), -1)
    return np.concatenate([half, half], axis=1).astype(np.float32)


def rotate(x: jax.Array, turns: jax.Array, skip: int) -> jax.Array:
    """Rotate queries or keys [B, T, H, Dh] by the angles of their patches.

    Args:
      x: array of any floating type, which it keeps; it is rotated in float32.
      turns: f32[T - skip, Dh], angles from `rotary_angles`.
      skip: number of tokens before the patches, which have no position.
    """
    first, rest = x[:, :skip], x[:, skip:].astype(jnp.float32)
    left, right = jnp.split(rest, 2, axis=-1)
    rotated = jnp.concatenate([-right, left], axis=-1)
    cos, sin = jnp.cos(turns)[:, None], jnp.sin(turns)[:, None]
    rest = (rest * cos + rotated * sin).astype(x.dtype)
    return jnp.concatenate([first, rest], axis=1)
