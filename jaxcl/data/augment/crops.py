"""Crops and resampling of images on the device, with torchvision's semantics.

Operations take ONE image f32[H,W,C] in 0..1 (key first where random, options
keyword-only); batch them with vmap.

Sources: torchvision.transforms (RandomResizedCrop, RandomCrop), Pillow's resampling
(antialiased, bicubic a = -0.5).
"""

import functools
import math
from collections.abc import Sequence
from typing import Annotated, Any, Literal

import jax
import jax.numpy as jnp

from jaxcl import schema

SCALE, RATIO = (0.08, 1.0), (3 / 4, 4 / 3)  # RandomResizedCrop's defaults
Interpolation = Literal["bicubic", "bilinear"]
_Part = Annotated[float, schema.Range(above=0, most=1)]
Scale = tuple[_Part, _Part]  # least and most share of the area
_TRIES = 10  # boxes that torchvision draws before it falls back


def require(condition: bool, name: str, value: Any, allowed: str) -> None:
    """Refuse an option unless the condition holds, naming it and its range."""
    if not condition:
        raise ValueError(f"{name}={value!r}: must be {allowed}")


def check_ranges(**ranges: Sequence[float]) -> None:
    """Refuse an invalid range (low, high) of config.augment."""
    for name, value in ranges.items():
        top = 1.0 if name == "scale" else math.inf
        good = len(value) == 2 and 0 < value[0] <= value[1] <= top
        field = f"config.augment.{name}"
        require(good, field, value, f"(low, high) with 0 < low <= high <= {top}")


def _filter(x, interpolation):
    """Return weights at distances x, in pixels."""
    x = jnp.abs(x)
    if interpolation == "bilinear":
        return jnp.maximum(1.0 - x, 0.0)
    near = (1.5 * x - 2.5) * x * x + 1.0
    far = ((-0.5 * x + 2.5) * x - 4.0) * x + 2.0
    return jnp.where(x < 1.0, near, jnp.where(x < 2.0, far, 0.0))


def _resampling(start, length, *, extent, size, interpolation):
    """Return the matrix f32[size, extent] that resizes a part of a line of pixels."""
    scale = length / size
    centre = start + (jnp.arange(size) + 0.5) * scale
    pixel = jnp.arange(extent) + 0.5
    # The filter is wider when shrinking (antialiasing), but not when enlarging.
    distance = (pixel - centre[:, None]) / jnp.maximum(scale, 1.0)
    inside = (pixel > start) & (pixel < start + length)
    weights = jnp.where(inside, _filter(distance, interpolation), 0.0)
    return weights / weights.sum(axis=1, keepdims=True)


# Full precision, since weights rounded to bf16 would no longer sum to one. The products
# are small next to a network's.
dot = functools.partial(jnp.einsum, precision=jax.lax.Precision.HIGHEST)


def _resample(image, box, shape, interpolation):
    """Resize a box (top, left, h, w) of f32[H,W,C] to f32[*shape,C]."""
    top, left, h, w = box
    weights = functools.partial(_resampling, interpolation=interpolation)
    rows = weights(top, h, extent=image.shape[0], size=shape[0])
    columns = weights(left, w, extent=image.shape[1], size=shape[1])
    # With these orders of axes neither product needs a transpose.
    planes = dot("wci,jw->cij", dot("hwc,ih->wci", image, rows), columns)
    return jnp.moveaxis(jnp.clip(planes, 0.0, 1.0), 0, -1)  # bicubic overshoots


def _draw_box(key, height, width, scale, ratio):
    """Return torchvision's crop box (top, left, h, w), f32[] whole numbers."""
    u = jax.random.uniform(key, (2 * _TRIES + 2,))
    area = height * width * (scale[0] + (scale[1] - scale[0]) * u[:_TRIES])
    low, high = math.log(ratio[0]), math.log(ratio[1])
    aspect = jnp.exp(low + (high - low) * u[_TRIES:-2])
    w = jnp.round(jnp.sqrt(area * aspect))
    h = jnp.round(jnp.sqrt(area / aspect))
    fits = (w > 0) & (w <= width) & (h > 0) & (h <= height)
    first = fits & (jnp.cumsum(fits) == 1)
    # If no try fits, the largest central box within the allowed ratios.
    whole_w = min(width, round(height * ratio[1]))
    whole_h = min(height, round(width / ratio[0]))
    any_fits = fits.any()
    w = jnp.where(any_fits, jnp.sum(first * w), whole_w)
    h = jnp.where(any_fits, jnp.sum(first * h), whole_h)
    drawn_top = jnp.floor(u[-2] * (height - h + 1))
    drawn_left = jnp.floor(u[-1] * (width - w + 1))
    top = jnp.where(any_fits, drawn_top, (height - whole_h) // 2)
    left = jnp.where(any_fits, drawn_left, (width - whole_w) // 2)
    return top, left, h, w


def random_resized_crop(
    key: jax.Array,
    image: jax.Array,
    *,
    size: int,
    scale: tuple[float, float] = SCALE,
    ratio: tuple[float, float] = RATIO,
    interpolation: str = "bicubic",
) -> jax.Array:
    """Resize a random box: f32[H,W,C] -> f32[size,size,C] (RandomResizedCrop).

    `scale` bounds the box's share of the area, `ratio` its width / height.
    """
    box = _draw_box(key, *image.shape[:2], scale, ratio)
    return _resample(image, box, (size, size), interpolation)


def resize(image: jax.Array, *, size: int, interpolation: str = "bicubic") -> jax.Array:
    """Resize so that the shorter side is `size`: f32[H,W,C] -> f32[h,w,C]."""
    sides = image.shape[:2]
    shape = [size * side // min(sides) for side in sides]
    return _resample(image, (0, 0, *sides), shape, interpolation)


def center_crop(image: jax.Array, *, size: int) -> jax.Array:
    """Cut the central f32[size,size,C]. Raises ValueError if the image is smaller."""
    height, width, _ = image.shape
    require(size <= min(height, width), "size", size, f"at most {min(height, width)}")
    top, left = round((height - size) / 2), round((width - size) / 2)
    return image[top : top + size, left : left + size]


def shift_image(key: jax.Array, image: jax.Array, *, pad: int) -> jax.Array:
    """Move the image by up to `pad` pixels in each direction; the rest is black.

    Rows and columns move by whole numbers from -pad to pad, drawn uniformly and
    independently: RandomCrop with `padding=pad` and the image's own size.
    """
    require(pad >= 0, "pad", pad, "at least 0")
    start = jax.random.randint(key, (2,), 0, 2 * pad + 1)
    padded = jnp.pad(image, ((pad, pad), (pad, pad), (0, 0)))
    return jax.lax.dynamic_slice(padded, (*start, 0), image.shape)
