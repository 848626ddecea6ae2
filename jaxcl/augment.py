"""Image operations on the device, with torchvision's semantics.

Operations take ONE image f32[H,W,C] in 0..1 (key first where random, options
keyword-only); batch them with vmap. `make` and `make_eval` build the batched
pipelines that training and evaluation use.

Sources: torchvision.transforms (RandomResizedCrop, ColorJitter, solarize),
Pillow's resampling (antialiased, bicubic a = -0.5). Departures: pixels stay
float between operations (Pillow rounds to u8 after each), and the blur is a true
Gaussian (Pillow approximates it by box filters).
"""

import functools
import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

_ORDERS = np.array(list(itertools.permutations(range(4))))  # i32[24, 4]
_SCALE, _RATIO = (0.08, 1.0), (3 / 4, 4 / 3)  # RandomResizedCrop's defaults
_JITTER = (0.4, 0.4, 0.2, 0.1)  # BYOL: brightness, contrast, saturation, hue
_TRIES = 10  # boxes that torchvision draws before it falls back
_KINDS = ("bicubic", "bilinear")


def _filter(x, interpolation):
    x = jnp.abs(x)
    if interpolation == "bilinear":
        return jnp.maximum(1.0 - x, 0.0)
    near = (1.5 * x - 2.5) * x * x + 1.0
    far = ((-0.5 * x + 2.5) * x - 4.0) * x + 2.0
    return jnp.where(x < 1.0, near, jnp.where(x < 2.0, far, 0.0))


def _resampling(start, length, *, extent, size, interpolation):
    """Matrix f32[size, extent] that resizes the pixels of a box to `size`."""
    scale = length / size
    centre = start + (jnp.arange(size) + 0.5) * scale
    pixel = jnp.arange(extent) + 0.5
    # The filter widens when shrinking (antialiasing), never when enlarging.
    distance = (pixel - centre[:, None]) / jnp.maximum(scale, 1.0)
    inside = (pixel > start) & (pixel < start + length)
    weights = jnp.where(inside, _filter(distance, interpolation), 0.0)
    return weights / weights.sum(axis=1, keepdims=True)


# Full precision: the products are small next to a network's, and weights
# rounded to bf16 would no longer sum to one.
_dot = functools.partial(jnp.einsum, precision=jax.lax.Precision.HIGHEST)


def _resample(image, box, shape, interpolation):
    """Resize a box (top, left, h, w) of f32[H,W,C] to f32[*shape,C]."""
    top, left, h, w = box
    weights = functools.partial(_resampling, interpolation=interpolation)
    rows = weights(top, h, extent=image.shape[0], size=shape[0])
    columns = weights(left, w, extent=image.shape[1], size=shape[1])
    # In this order both products read and write memory without a transpose.
    planes = _dot("wci,jw->cij", _dot("hwc,ih->wci", image, rows), columns)
    return jnp.moveaxis(jnp.clip(planes, 0.0, 1.0), 0, -1)  # bicubic overshoots


def _box(key, height, width, scale, ratio):
    """Torchvision's crop box (top, left, h, w), f32[] whole numbers."""
    u = jax.random.uniform(key, (2 * _TRIES + 2,))
    area = height * width * (scale[0] + (scale[1] - scale[0]) * u[:_TRIES])
    low, high = math.log(ratio[0]), math.log(ratio[1])
    aspect = jnp.exp(low + (high - low) * u[_TRIES:-2])
    w = jnp.round(jnp.sqrt(area * aspect))
    h = jnp.round(jnp.sqrt(area / aspect))
    fits = (w > 0) & (w <= width) & (h > 0) & (h <= height)
    first = fits & (jnp.cumsum(fits) == 1)
    # If no try fits: the largest central box within the allowed ratios.
    whole_w = min(width, round(height * ratio[1]))
    whole_h = min(height, round(width / ratio[0]))
    found = fits.any()
    w = jnp.where(found, jnp.sum(first * w), whole_w)
    h = jnp.where(found, jnp.sum(first * h), whole_h)
    top = jnp.where(found, jnp.floor(u[-2] * (height - h + 1)), (height - whole_h) // 2)
    left = jnp.where(found, jnp.floor(u[-1] * (width - w + 1)), (width - whole_w) // 2)
    return top, left, h, w


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


def random_resized_crop(
    key, image, *, size, scale=_SCALE, ratio=_RATIO, interpolation="bicubic"
):
    """Random box, resized: f32[H,W,C] -> f32[size,size,C] (RandomResizedCrop).

    `scale` bounds the box's share of the area, `ratio` its width / height.
    """
    _check(size=size, scale=scale, ratio=ratio, interpolation=interpolation)
    box = _box(key, *image.shape[:2], scale, ratio)
    return _resample(image, box, (size, size), interpolation)


def resize(image, *, size, interpolation="bicubic"):
    """Resize so that the shorter side is `size`: f32[H,W,C] -> f32[h,w,C]."""
    _check(size=size, interpolation=interpolation)
    sides = image.shape[:2]
    shape = [size * side // min(sides) for side in sides]
    return _resample(image, (0, 0, *sides), shape, interpolation)


_resize = resize  # `make_eval` has an argument of that name


def center_crop(image, *, size):
    """Central f32[size,size,C]. Raises ValueError if the image is smaller."""
    height, width, _ = image.shape
    _need(size <= min(height, width), "size", size, f"at most {min(height, width)}")
    top, left = round((height - size) / 2), round((width - size) / 2)
    return image[top : top + size, left : left + size]


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
    return _dot("ih,jch->ijc", rows, _dot("jw,hwc->jch", columns, image))


def solarize(image, *, threshold=128 / 255):
    """Invert the pixels at or above the threshold."""
    return jnp.where(image >= threshold, 1.0 - image, image)


def horizontal_flip(image):
    """Mirror left and right."""
    return image[:, ::-1]


def normalize(image, mean, std):
    """(image - mean) / std; `mean` and `std` have C entries or one."""
    return (image - np.float32(mean)) / np.float32(std)


def _one_view(key, image, *, view, box, jitter, gray, blur, sigma, sun, flip):
    """u8[H,W,C] -> f32[h,w,C]; what has probability 0 leaves no trace."""
    k_crop, k_jitter, k_rest = jax.random.split(key, 3)
    u_jitter, u_gray, u_blur, u_sigma, u_sun, u_flip = jax.random.uniform(k_rest, (6,))
    image = image.astype(jnp.float32) / 255.0
    if box:
        image = random_resized_crop(k_crop, image, **box)
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
    scale: tuple[float, float] = _SCALE,
    ratio: tuple[float, float] = _RATIO,
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
    dtype: Any = jnp.float32,
) -> Callable:
    """Build `augment(key, images) -> [B,views,size,size,C]`, normalised.

    Images are u8[B,H,W,C], from which each view cuts its crop (`crop=False`: a
    view is the whole image, size x size), or crops already cut,
    u8[B,views,size,size,C]. With C = 1, hue, saturation, grayscale do nothing.

    Order: crop, jitter (brightness, contrast, saturation, hue), grayscale, blur,
    solarise, flip, normalise. `blur` and `solarize` are one probability, or one for
    each view (BYOL's asymmetric views); `sigma` is in pixels. What has probability 0
    is not in the program. A view's key is fold_in(fold_in(key, position in the
    batch), view): no result depends on the devices or the batch size.

    Raises ValueError for values out of range, here or when first called.
    """
    box = dict(size=size, scale=scale, ratio=ratio, interpolation=interpolation)
    _check(**box, views=views, jitter=jitter, sigma=sigma, moments=(mean, std))
    one_view = functools.partial(
        _one_view,
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
    _need(resize is None or resize >= size, "resize", resize, f"None or >= {size}")
    shrink = functools.partial(_resize, size=resize, interpolation=interpolation)

    def prepare(images):
        _check_images(images, None if resize else size, mean)
        images = images.astype(jnp.float32) / 255.0
        if resize:
            images = jax.vmap(lambda x: center_crop(shrink(x), size=size))(images)
        return normalize(images, mean, std).astype(dtype)

    return prepare


def _need(condition, name, value, allowed):
    if not condition:
        raise ValueError(f"{name} must be {allowed}, got {value!r}")


def _check(
    size=1, views=1, interpolation=_KINDS[0], jitter=_JITTER, moments=((), ()), **ranges
):
    _need(size >= 1, "size", size, "at least 1")
    _need(views >= 1, "views", views, "at least 1")
    _need(interpolation in _KINDS, "interpolation", interpolation, f"one of {_KINDS}")
    good = len(jitter) == 4 and min(jitter) >= 0 and jitter[3] <= 0.5
    _need(good, "jitter", jitter, "4 numbers >= 0, the last (hue) <= 0.5")
    mean, std = moments
    good = len(std) == len(mean) and all(s > 0 for s in std)
    _need(good, "std", std, f"positive and as long as mean {mean!r}")
    for name, value in ranges.items():
        top = 1.0 if name == "scale" else math.inf
        good = len(value) == 2 and 0 < value[0] <= value[1] <= top
        _need(good, name, value, f"(low, high) with 0 < low <= high <= {top}")


def _probabilities(name, value, views=1):
    each = (value,) * views if np.ndim(value) == 0 else tuple(value)
    good = len(each) == views and all(0 <= p <= 1 for p in each)
    _need(good, name, value, f"a number in [0, 1], or one for each of {views} views")
    return each


def _check_images(images, size, mean, views=None):
    shape, got = images.shape, f"{images.dtype}{list(images.shape)}"
    axes = {4: (), 5: (views,)}.get(len(shape))
    good = images.dtype == jnp.uint8 and shape[1:-3] == axes and shape[-1] in (1, 3)
    _need(good, "images", got, f"uint8[B,H,W,C] or [B,{views},H,W,C], C 1 or 3")
    good = size is None or shape[-3:-1] == (size, size)
    _need(good, "images", got, f"{size} x {size} pixels")
    _need(len(mean) in (1, shape[-1]), "mean", mean, f"of length 1 or {shape[-1]}")
