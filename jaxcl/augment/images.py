"""Image operations on the device, with torchvision's semantics.

Operations take ONE image f32[H,W,C] in 0..1 (key first where random, options
keyword-only); batch them with vmap. `make` and `make_eval` build the batched
pipelines that training and evaluation use.

Crops and resampling are in `crops`. Sources: torchvision.transforms (ColorJitter,
solarize), Pillow. Departures: pixels stay float between operations (Pillow rounds to
u8 after each), and the blur is a true Gaussian (Pillow approximates it by box
filters).
"""

import functools
import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxcl.augment import crops

_ORDERS = np.array(list(itertools.permutations(range(4))))  # i32[24, 4]
_JITTER = (0.4, 0.4, 0.2, 0.1)  # BYOL: brightness, contrast, saturation, hue


# Colour operations on planes: a list of C arrays f32[H,W]. One array f32[C,H,W]
# instead makes XLA compute all channels again for each (8x slower on a CPU).


def _gray(planes):
    if len(planes) == 1:
        return planes[0]
    r, g, b = planes
    return 0.299 * r + 0.587 * g + 0.114 * b  # ITU-R 601-2, Pillow's "L"


def _blend(planes, other, factor):
    mix = (1.0 - factor) * other
    return [jnp.clip(factor * p + mix, 0.0, 1.0) for p in planes]


def _hue(planes, turn):
    """Turn the hue by a fraction of the circle, without going through HSV."""
    if len(planes) == 1:
        return planes
    r, g, b = planes
    top = jnp.maximum(jnp.maximum(r, g), b)
    chroma = top - jnp.minimum(jnp.minimum(r, g), b)
    is_r, is_g = top == r, top == g
    ramp = jnp.where(is_r, g - b, jnp.where(is_g, b - r, r - g))
    start = jnp.where(is_r, 0.0, jnp.where(is_g, 2.0, 4.0))
    # In sixths of a turn; a gray pixel (chroma 0) may have any hue.
    hue = ramp / jnp.where(chroma == 0.0, 1.0, chroma) + start + 6.0 * turn
    hue = hue - 6.0 * jnp.floor(hue / 6.0)
    far_r, far_g, far_b = [jnp.abs(hue - c) for c in (3.0, 2.0, 4.0)]
    shares = (far_r - 1.0, 2.0 - far_g, 2.0 - far_b)
    return [top - chroma * (1.0 - jnp.clip(s, 0.0, 1.0)) for s in shares]


def _jitter(key, planes, strength, applied=True):
    """Brightness, contrast, saturation and hue in random order.

    Each of four slots runs one formula that holds all four: a blend with 0
    (brightness), the mean gray (contrast) or the gray (saturation), then a turn of
    the hue; what is not due has factor 1 or turn 0. So there are no branches, of
    which vmap would run all. The slots are a scan: unrolled, XLA fuses them to
    kernels that compute shared terms again and again (600x slower on a CPU).
    """
    u = jax.random.uniform(key, (5,))
    neutral = np.float32([1, 1, 1, 0])
    low = np.maximum(neutral - np.float32(strength), np.float32([0, 0, 0, -0.5]))
    high = neutral + np.float32(strength)
    value = jnp.where(applied, low + (high - low) * u[:4], neutral)
    order = jnp.asarray(_ORDERS)[jnp.floor(24 * u[4]).astype(jnp.int32)]
    due = order[:, None] == jnp.arange(4)  # bool[slot, operation]
    factor = jnp.where(due[:, 3], 1.0, jnp.sum(due * value, axis=1))
    turn = jnp.where(due[:, 3], value[3], 0.0)

    def slot(planes, now):
        factor, contrast, saturation, turn = now
        gray = _gray(planes)
        other = jnp.where(contrast, gray.mean(), jnp.where(saturation, gray, 0.0))
        planes = _blend(planes, other, factor)
        return _hue(planes, turn) if strength[3] else planes, None

    return jax.lax.scan(slot, list(planes), (factor, due[:, 1], due[:, 2], turn))[0]


def _blurring(sigma, *, extent, radius):
    """Matrix f32[extent, extent] of a Gaussian with replicated edges."""
    pixel = jnp.arange(extent)
    distance = jnp.abs(pixel[:, None] - pixel)
    taps = jnp.exp(-0.5 * (jnp.arange(radius + 1) / sigma) ** 2)
    taps = taps / (2.0 * taps.sum() - 1.0)
    band = jnp.exp(-0.5 * (distance / sigma) ** 2) * taps[0]
    band = jnp.where(distance <= radius, band, 0.0)
    # What reaches beyond an edge falls on the edge's pixel.
    beyond = jnp.arange(radius + 1) > pixel[:, None]
    beyond = jnp.sum(jnp.where(beyond, taps, 0.0), axis=1, keepdims=True)
    return band + (pixel == 0) * beyond + (pixel == extent - 1) * beyond[::-1]


def adjust_brightness(image, factor):
    """`factor` times the image, clipped to 0..1."""
    return jnp.clip(factor * image, 0.0, 1.0)


def adjust_contrast(image, factor):
    """Blend with the mean of the gray image; factor 1 keeps the image."""
    planes = jnp.unstack(image, axis=-1)
    return jnp.stack(_blend(planes, _gray(planes).mean(), factor), axis=-1)


def adjust_saturation(image, factor):
    """Blend with the gray image; factor 0 is gray, 1 keeps the image."""
    planes = jnp.unstack(image, axis=-1)
    return jnp.stack(_blend(planes, _gray(planes), factor), axis=-1)


def adjust_hue(image, factor):
    """Turn the hue (HSV) by `factor` of the circle, in -0.5..0.5."""
    return jnp.stack(_hue(jnp.unstack(image, axis=-1), factor), axis=-1)


def color_jitter(key, image, *, brightness, contrast, saturation, hue):
    """The four adjustments in random order (ColorJitter).

    Factors are uniform in max(0, 1 - x)..1 + x, for the hue in -hue..hue.
    """
    strength = (brightness, contrast, saturation, hue)
    _check(jitter=strength)
    return jnp.stack(_jitter(key, jnp.unstack(image, axis=-1), strength), axis=-1)


def grayscale(image):
    """ITU-R 601-2 luma in every channel, shape kept."""
    return adjust_saturation(image, 0.0)


def gaussian_blur(image, sigma, *, radius=11):
    """Gaussian of `sigma` pixels over 2 * radius + 1 taps, edges replicated."""
    height, width, _ = image.shape
    rows = _blurring(sigma, extent=height, radius=radius)
    columns = _blurring(sigma, extent=width, radius=radius)
    return crops.dot("ih,jch->ijc", rows, crops.dot("jw,hwc->jch", columns, image))


def solarize(image, *, threshold=128 / 255):
    """Invert the pixels at or above the threshold."""
    return jnp.where(image >= threshold, 1.0 - image, image)


def horizontal_flip(image):
    """Mirror left and right."""
    return image[:, ::-1]


def normalize(image, mean, std):
    """(image - mean) / std; `mean` and `std` have C entries or one."""
    return (image - np.float32(mean)) / np.float32(std)


def _one_view(key, image, *, view, box, pad, jitter, gray, blur, sigma, sun, flip):
    """u8[H,W,C] -> f32[h,w,C]; what has probability 0 leaves no trace."""
    k_crop, k_jitter, k_rest = jax.random.split(key, 3)
    u_jitter, u_gray, u_blur, u_sigma, u_sun, u_flip = jax.random.uniform(k_rest, (6,))
    image = image.astype(jnp.float32) / 255.0
    if box:
        image = crops.random_resized_crop(k_crop, image, **box)
    elif pad:
        image = crops.shift(k_crop, image, pad=pad)
    planes = jnp.unstack(image, axis=-1)
    strength, probability = jitter
    if probability and any(strength):
        planes = _jitter(k_jitter, planes, strength, u_jitter < probability)
    if gray and len(planes) == 3:
        luma = _gray(planes)
        planes = [jnp.where(u_gray < gray, luma, p) for p in planes]
    image = jnp.stack(planes, axis=-1)
    if blur[view]:
        width = sigma[0] + (sigma[1] - sigma[0]) * u_sigma
        blurred = gaussian_blur(image, width, radius=math.ceil(5.5 * sigma[1]))
        image = jnp.where(u_blur < blur[view], blurred, image)
    if sun[view]:
        image = jnp.where(u_sun < sun[view], solarize(image), image)
    if flip:
        image = jnp.where(u_flip < flip, horizontal_flip(image), image)
    return image


def make(
    *,
    size: int,
    views: int = 2,
    scale: tuple[float, float] = crops.SCALE,
    ratio: tuple[float, float] = crops.RATIO,
    interpolation: str = "bicubic",
    jitter: Sequence[float] = _JITTER,
    jitter_probability: float = 0.8,
    grayscale: float = 0.2,
    blur: float | Sequence[float] = 0.0,
    sigma: tuple[float, float] = (0.1, 2.0),
    solarize: float | Sequence[float] = 0.0,
    flip: float = 0.5,
    mean: Sequence[float],
    std: Sequence[float],
    crop: bool = True,
    pad: int = 0,
    dtype: Any = jnp.float32,
) -> Callable:
    """Build `augment(key, images) -> [B,views,size,size,C]`, normalised.

    Images are u8[B,H,W,C], from which each view cuts its crop (`crop=False`: a
    view is the whole image, size x size), or crops already cut,
    u8[B,views,size,size,C]. With C = 1, hue, saturation, grayscale do nothing.
    `pad` moves what is not cropped, see `crops.shift`.

    Order: crop or shift, jitter (brightness, contrast, saturation, hue), grayscale,
    blur, solarise, flip, normalise. `blur` and `solarize` are one probability, or one
    for each view (BYOL's asymmetric views); `sigma` is in pixels. What has probability
    0 is not in the program. A view's key is fold_in(fold_in(key, position in the
    batch), view): no result depends on the devices or the batch size.

    Raises ValueError for values out of range, here or when first called.
    """
    box = dict(size=size, scale=scale, ratio=ratio, interpolation=interpolation)
    _check(**box, views=views, jitter=jitter, sigma=sigma, moments=(mean, std))
    good = isinstance(pad, int) and 0 <= pad < size
    crops.need(good, "pad", pad, f"a whole number from 0 to {size - 1}")
    crops.need(not (pad and crop), "pad", pad, "0 where crop=True")
    one_view = functools.partial(
        _one_view,
        pad=pad,
        jitter=(jitter, *_probabilities("jitter_probability", jitter_probability)),
        gray=_probabilities("grayscale", grayscale)[0],
        blur=_probabilities("blur", blur, views),
        sigma=sigma,
        sun=_probabilities("solarize", solarize, views),
        flip=_probabilities("flip", flip)[0],
    )

    def augment(key, images):
        cut = images.ndim == 4 and crop
        _check_images(images, None if cut else size, mean, views)
        keys = jax.vmap(jax.random.fold_in, (None, 0))(key, jnp.arange(len(images)))
        out = []
        for view in range(views):
            view_keys = jax.vmap(jax.random.fold_in, (0, None))(keys, view)
            one = functools.partial(one_view, view=view, box=box if cut else None)
            image = images if images.ndim == 4 else images[:, view]
            out.append(jax.vmap(one)(view_keys, image))
        return normalize(jnp.stack(out, axis=1), mean, std).astype(dtype)

    return augment


def make_eval(
    *, size, resize=None, interpolation="bicubic", mean, std, dtype=jnp.float32
) -> Callable:
    """Build `prepare(images)`, u8[B,H,W,C] -> [B,size,size,C], normalised.

    The shorter side is resized to `resize`, then the centre is cut; without
    `resize`, images must be size x size. Raises ValueError otherwise.
    """
    _check(size=size, interpolation=interpolation, moments=(mean, std))
    crops.need(resize is None or resize >= size, "resize", resize, f"None or >= {size}")
    shrink = functools.partial(crops.resize, size=resize, interpolation=interpolation)

    def prepare(images):
        _check_images(images, None if resize else size, mean)
        images = images.astype(jnp.float32) / 255.0
        if resize:
            images = jax.vmap(lambda x: crops.center_crop(shrink(x), size=size))(images)
        return normalize(images, mean, std).astype(dtype)

    return prepare


def _check(views=1, jitter=_JITTER, moments=((), ()), **box):
    crops.check(**box)
    crops.need(views >= 1, "views", views, "at least 1")
    good = len(jitter) == 4 and min(jitter) >= 0 and jitter[3] <= 0.5
    crops.need(good, "jitter", jitter, "4 numbers >= 0, the last (hue) <= 0.5")
    mean, std = moments
    good = len(std) == len(mean) and all(s > 0 for s in std)
    crops.need(good, "std", std, f"positive and as long as mean {mean!r}")


def _probabilities(name, value, views=1):
    each = (value,) * views if np.ndim(value) == 0 else tuple(value)
    good = len(each) == views and all(0 <= p <= 1 for p in each)
    crops.need(
        good, name, value, f"a number in [0, 1], or one for each of {views} views"
    )
    return each


def _check_images(images, size, mean, views=None):
    shape, got = images.shape, f"{images.dtype}{list(images.shape)}"
    axes = {4: (), 5: (views,)}.get(len(shape))
    good = images.dtype == jnp.uint8 and shape[1:-3] == axes and shape[-1] in (1, 3)
    crops.need(good, "images", got, f"uint8[B,H,W,C] or [B,{views},H,W,C], C 1 or 3")
    good = size is None or shape[-3:-1] == (size, size)
    crops.need(good, "images", got, f"{size} x {size} pixels")
    crops.need(len(mean) in (1, shape[-1]), "mean", mean, f"of length 1 or {shape[-1]}")
