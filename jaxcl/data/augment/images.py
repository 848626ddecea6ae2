"""Image operations on the device, with torchvision's semantics.

Operations take ONE image f32[H,W,C] in 0..1 (key first where random, options
keyword-only); batch them with vmap. `make` and `make_eval` build the batched
pipelines of training and evaluation.

Sources: torchvision.transforms (RandomResizedCrop, RandomCrop, ColorJitter, solarize),
Pillow's resampling (antialiased, bicubic a = -0.5). Departures: pixels stay float
between operations (Pillow rounds to u8 after each), and the blur is a true Gaussian
(Pillow approximates it by box filters).
"""

import functools
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from jaxcl import schema
from jaxcl.data import stream
from jaxcl.errors import Refused

SCALE, RATIO = (0.08, 1.0), (3 / 4, 4 / 3)  # RandomResizedCrop's defaults
Interpolation = Literal["bicubic", "bilinear"]
_Part = Annotated[float, schema.Range(above=0, most=1)]
Scale = tuple[_Part, _Part]  # least and most share of the area
_TRIES = 10  # boxes that torchvision draws before it falls back
_ORDERS = np.array(list(itertools.permutations(range(4))))  # i32[24, 4]
_JITTER = (0.4, 0.4, 0.2, 0.1)  # BYOL: brightness, contrast, saturation, hue

_Hue = Annotated[float, schema.Range(0, 0.5)]  # half the circle, either way
Jitter = tuple[schema.Weight, schema.Weight, schema.Weight, _Hue]
# Of pixels in 0..1, of one channel or each.
Mean = Annotated[tuple[schema.Share, ...], schema.Entries()]
Std = Annotated[
    tuple[Annotated[float, schema.Range(least=1e-6, most=1)], ...], schema.Entries()
]
_Sigma = Annotated[float, schema.Range(above=0, most=100)]  # pixels
Probability = schema.Share | tuple[schema.Share, ...]  # one, or one for each view


def _require(condition: bool, name: str, value: Any, allowed: str) -> None:
    """Refuse an option unless the condition holds, naming it and its range."""
    if not condition:
        raise Refused(name, value, f"must be {allowed}")


def _check_ranges(**ranges: Sequence[float]) -> None:
    """Refuse an invalid range (low, high) of config.augment."""
    for name, value in ranges.items():
        top = 1.0 if name == "scale" else math.inf
        is_valid = len(value) == 2 and 0 < value[0] <= value[1] <= top
        field = f"config.augment.{name}"
        _require(is_valid, field, value, f"(low, high) with 0 < low <= high <= {top}")


# Full precision, since weights rounded to bf16 would no longer sum to one. The products
# are small next to a network's.
_dot = functools.partial(jnp.einsum, precision=jax.lax.Precision.HIGHEST)


# Colour operations work on planes, a list of C arrays f32[H,W]. With one array
# f32[C,H,W] XLA computes all channels again for each channel (8x slower on a CPU).


def _to_gray(planes):
    """Return luma f32[H,W]; the mean of channels that are no red, green and blue."""
    if len(planes) != 3:
        return sum(planes) / len(planes)
    r, g, b = planes
    return 0.299 * r + 0.587 * g + 0.114 * b  # ITU-R 601-2, Pillow's "L"


def _blend_planes(planes, other, factor):
    """Blend the planes with (1 - factor) of `other`, clipped to 0..1."""
    mix = (1.0 - factor) * other
    return [jnp.clip(factor * p + mix, 0.0, 1.0) for p in planes]


def _turn_hue(planes, turn):
    """Turn the hue by a fraction of the circle, without going through HSV."""
    r, g, b = planes
    top = jnp.maximum(jnp.maximum(r, g), b)
    chroma = top - jnp.minimum(jnp.minimum(r, g), b)
    scale = 1.0 / jnp.where(chroma == 0.0, 1.0, chroma)
    # The hue, in sixths of a turn; for a gray pixel (chroma 0) any value will do. XLA
    # may compute a channel twice and round it apart, so that none equals `top`. So each
    # pair of channels is compared, and once: near a tie both answers are right.
    green_or_blue = jnp.where(g >= b, (b - r) * scale + 2.0, (r - g) * scale + 4.0)
    hue = jnp.where((r >= g) & (r >= b), (g - b) * scale, green_or_blue) + 6.0 * turn
    hue = hue - 6.0 * jnp.floor(hue / 6.0)
    far_r, far_g, far_b = [jnp.abs(hue - c) for c in (3.0, 2.0, 4.0)]
    shares = (far_r - 1.0, 2.0 - far_g, 2.0 - far_b)
    return [top - chroma * (1.0 - jnp.clip(s, 0.0, 1.0)) for s in shares]


def _jitter(key, planes, strength, applied=True):
    """Adjust brightness, contrast, saturation and hue, in random order.

    There are four slots, one for each operation in its turn. All slots run one formula,
    which can do any of the four: a blend with 0 (brightness), the mean gray (contrast)
    or the gray image (saturation), then a turn of the hue. An operation that is not due
    has factor 1 or turn 0. Branches would not help, since vmap runs them all. The slots
    are a scan: if unrolled, XLA fuses them into kernels that compute shared terms many
    times (600x slower on a CPU).
    """
    u = jax.random.uniform(key, (5,))
    neutral = np.float32([1, 1, 1, 0])
    low = np.maximum(neutral - np.float32(strength), np.float32([0, 0, 0, -0.5]))
    high = neutral + np.float32(strength)
    value = jnp.where(applied, low + (high - low) * u[:4], neutral)
    coloured = len(planes) == 3
    if len(planes) > 1 and not coloured:  # of one, saturation changes nothing
        value = jnp.where(np.arange(4) == 2, neutral, value)
    order = jnp.asarray(_ORDERS)[jnp.floor(24 * u[4]).astype(jnp.int32)]
    applies = order[:, None] == jnp.arange(4)  # bool[slot, operation]
    factor = jnp.where(applies[:, 3], 1.0, jnp.sum(applies * value, axis=1))
    turn = jnp.where(applies[:, 3], value[3], 0.0)

    def slot(planes, values):
        factor, contrast, saturation, turn = values
        gray = _to_gray(planes)
        other = jnp.where(contrast, gray.mean(), jnp.where(saturation, gray, 0.0))
        planes = _blend_planes(planes, other, factor)
        return _turn_hue(planes, turn) if strength[3] and coloured else planes, None

    slots = factor, applies[:, 1], applies[:, 2], turn
    return jax.lax.scan(slot, list(planes), slots)[0]


def _blur_matrix(sigma, *, extent, radius):
    """Return matrix f32[extent, extent] of a Gaussian with replicated edges."""
    pixel = jnp.arange(extent)
    distance = jnp.abs(pixel[:, None] - pixel)
    taps = jnp.exp(-0.5 * (jnp.arange(radius + 1) / sigma) ** 2)
    taps = taps / (2.0 * taps.sum() - 1.0)
    band = jnp.exp(-0.5 * (distance / sigma) ** 2) * taps[0]
    band = jnp.where(distance <= radius, band, 0.0)
    # Taps beyond an edge count for the pixel at the edge.
    outside = jnp.arange(radius + 1) > pixel[:, None]
    outside = jnp.sum(jnp.where(outside, taps, 0.0), axis=1, keepdims=True)
    return band + (pixel == 0) * outside + (pixel == extent - 1) * outside[::-1]


def grayscale(image: jax.Array) -> jax.Array:
    """Put the ITU-R 601-2 luma into every channel; the shape is kept."""
    luma = _to_gray(jnp.unstack(image, axis=-1))
    return jnp.broadcast_to(luma[..., None], image.shape)


def gaussian_blur(image: jax.Array, sigma: ArrayLike, *, radius: int = 11) -> jax.Array:
    """Blur by a Gaussian of `sigma` pixels, 2 radius + 1 taps; edges replicated."""
    height, width, _ = image.shape
    rows = _blur_matrix(sigma, extent=height, radius=radius)
    columns = _blur_matrix(sigma, extent=width, radius=radius)
    return _dot("ih,jch->ijc", rows, _dot("jw,hwc->jch", columns, image))


def solarize(image: jax.Array, *, threshold: float = 128 / 255) -> jax.Array:
    """Invert the pixels at or above the threshold."""
    return jnp.where(image >= threshold, 1.0 - image, image)


def horizontal_flip(image: jax.Array) -> jax.Array:
    """Mirror left and right."""
    return image[:, ::-1]


def normalize(
    image: jax.Array, mean: Sequence[float], std: Sequence[float]
) -> jax.Array:
    """Return (image - mean) / std; `mean` and `std` have C entries or one."""
    return (image - np.float32(mean)) / np.float32(std)


def _filter(x, interpolation):
    """Return weights at distances x, in pixels."""
    x = jnp.abs(x)
    if interpolation == "bilinear":
        return jnp.maximum(1.0 - x, 0.0)
    near = (1.5 * x - 2.5) * x * x + 1.0
    far = ((-0.5 * x + 2.5) * x - 4.0) * x + 2.0
    return jnp.where(x < 1.0, near, jnp.where(x < 2.0, far, 0.0))


def _resampling_matrix(start, length, *, extent, size, interpolation):
    """Return the matrix f32[size, extent] that resizes a part of a line of pixels."""
    scale = length / size
    centre = start + (jnp.arange(size) + 0.5) * scale
    pixel = jnp.arange(extent) + 0.5
    # The filter is wider when shrinking (antialiasing), but not when enlarging.
    distance = (pixel - centre[:, None]) / jnp.maximum(scale, 1.0)
    inside = (pixel > start) & (pixel < start + length)
    weights = jnp.where(inside, _filter(distance, interpolation), 0.0)
    return weights / weights.sum(axis=1, keepdims=True)


def _resample(image, box, shape, interpolation):
    """Resize a box (top, left, h, w) of f32[H,W,C] to f32[*shape,C]."""
    top, left, h, w = box
    weights = functools.partial(_resampling_matrix, interpolation=interpolation)
    rows = weights(top, h, extent=image.shape[0], size=shape[0])
    columns = weights(left, w, extent=image.shape[1], size=shape[1])
    # With these orders of axes neither product needs a transpose.
    planes = _dot("wci,jw->cij", _dot("hwc,ih->wci", image, rows), columns)
    return jnp.moveaxis(jnp.clip(planes, 0.0, 1.0), 0, -1)  # bicubic overshoots


def _draw_box(key, height, width, scale, ratio):
    """Return torchvision's crop box (top, left, h, w), f32[] integers."""
    u = jax.random.uniform(key, (2 * _TRIES + 2,))
    area = height * width * (scale[0] + (scale[1] - scale[0]) * u[:_TRIES])
    low, high = math.log(ratio[0]), math.log(ratio[1])
    aspect = jnp.exp(low + (high - low) * u[_TRIES:-2])
    w = jnp.round(jnp.sqrt(area * aspect))
    h = jnp.round(jnp.sqrt(area / aspect))
    fits = (w > 0) & (w <= width) & (h > 0) & (h <= height)
    first = fits & (jnp.cumsum(fits) == 1)
    # If no try fits, the largest central box within the allowed ratios.
    central_w = min(width, round(height * ratio[1]))
    central_h = min(height, round(width / ratio[0]))
    any_fits = fits.any()
    w = jnp.where(any_fits, jnp.sum(first * w), central_w)
    h = jnp.where(any_fits, jnp.sum(first * h), central_h)
    drawn_top = jnp.floor(u[-2] * (height - h + 1))
    drawn_left = jnp.floor(u[-1] * (width - w + 1))
    top = jnp.where(any_fits, drawn_top, (height - central_h) // 2)
    left = jnp.where(any_fits, drawn_left, (width - central_w) // 2)
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
    height, width = image.shape[:2]
    box = _draw_box(key, height, width, scale, ratio)
    return _resample(image, box, (size, size), interpolation)


def resize_shorter_side(
    image: jax.Array, *, size: int, interpolation: str = "bicubic"
) -> jax.Array:
    """Resize so that the shorter side is `size`: f32[H,W,C] -> f32[h,w,C]."""
    sides = image.shape[:2]
    shape = [size * side // min(sides) for side in sides]
    return _resample(image, (0, 0, *sides), shape, interpolation)


def center_crop(image: jax.Array, *, size: int) -> jax.Array:
    """Cut the central f32[size,size,C]. Raises Refused if the image is smaller."""
    height, width, _ = image.shape
    _require(size <= min(height, width), "size", size, f"at most {min(height, width)}")
    top, left = round((height - size) / 2), round((width - size) / 2)
    return image[top : top + size, left : left + size]


def shift_image(key: jax.Array, image: jax.Array, *, pad: int) -> jax.Array:
    """Move the image by up to `pad` pixels in each direction; the rest is black.

    Rows and columns move by integers from -pad to pad, drawn uniformly and
    independently: RandomCrop with `padding=pad` and the image's own size.
    """
    _require(pad >= 0, "pad", pad, "at least 0")
    start = jax.random.randint(key, (2,), 0, 2 * pad + 1)
    padded = jnp.pad(image, ((pad, pad), (pad, pad), (0, 0)))
    return jax.lax.dynamic_slice(padded, (*start, 0), image.shape)


def _make_view(
    key, image, *, cut, strength, jitter, gray, blur, sigma, solarized, flip
):
    """Change one image, u8[H,W,C] -> f32[h,w,C], by `make`'s options of a view.

    `cut` crops or shifts it, (key, f32[H,W,C]) -> f32[h,w,C]; None: neither. Operations
    of probability 0 are not compiled.
    """
    k_cut, k_jitter, k_rest = jax.random.split(key, 3)
    drawn = jax.random.uniform(k_rest, (6,))
    image = image.astype(jnp.float32) / 255.0
    if cut is not None:
        image = cut(k_cut, image)
    planes = jnp.unstack(image, axis=-1)
    if jitter and any(strength):
        planes = _jitter(k_jitter, planes, strength, drawn[0] < jitter)
    if gray and len(planes) == 3:
        luma = _to_gray(planes)
        planes = [jnp.where(drawn[1] < gray, luma, p) for p in planes]
    image = jnp.stack(planes, axis=-1)
    if blur:
        width = sigma[0] + (sigma[1] - sigma[0]) * drawn[3]
        blurred = gaussian_blur(image, width, radius=math.ceil(5.5 * sigma[1]))
        image = jnp.where(drawn[2] < blur, blurred, image)
    if solarized:
        image = jnp.where(drawn[4] < solarized, solarize(image), image)
    return jnp.where(drawn[5] < flip, horizontal_flip(image), image) if flip else image


@schema.checked("config.augment")
def make(
    *,
    size: schema.Pixels,
    views: Annotated[int, schema.Range(1, 64)] = 2,
    scale: Scale = SCALE,
    ratio: tuple[schema.Positive, schema.Positive] = RATIO,
    interpolation: Interpolation = "bicubic",
    jitter: Jitter = _JITTER,
    jitter_probability: schema.Share = 0.8,
    grayscale: schema.Share = 0.2,
    blur: Probability = 0.0,
    sigma: tuple[_Sigma, _Sigma] = (0.1, 2.0),
    solarize: Probability = 0.0,
    flip: schema.Share = 0.5,
    mean: Mean,
    std: Std,
    crop: bool = True,
    pad: schema.Natural = 0,
    dtype: Any = jnp.float32,
) -> Callable:
    """Build `augment(key, images) -> [B,views,size,size,C]`, normalised.

    Images are u8[B,H,W,C], and each view is a random crop (`crop=False`: the whole
    image, which must be size x size); or they are crops already, u8[B,views,size,size,
    C]. Hue, saturation and grayscale change images of three channels alone. `pad`
    shifts images that are not cropped, see `shift_image`.

    Order: crop or shift, jitter (brightness, contrast, saturation, hue), grayscale,
    blur, solarise, flip, normalise. `blur` and `solarize` are one probability, or one
    for each view (BYOL's asymmetric views); `sigma` is in pixels. Operations of
    probability 0 are not compiled. A view's key is fold_in(fold_in(key, position in the
    batch), view), so results do not depend on the devices or the batch size.

    Args:
      size: pixels of a side of a view.
      views: number of views of each image.
      scale: share of the image's area that a crop has.
      ratio: least and most width over height of a crop.
      interpolation: interpolation of the crop's resizing.
      jitter: strength of brightness, contrast, saturation and hue.
      jitter_probability: probability that a view is jittered at all.
      grayscale: probability that a view becomes grey.
      blur: probability of a blur, or one for each view.
      sigma: least and most sigma of the blur, in pixels.
      solarize: probability of solarisation, or one for each view.
      flip: probability of a flip from left to right.
      mean, std: moments of each channel, for pixels from 0 to 1; they normalise the
        views.
      crop: whether a view is a random crop; False takes the whole image.
      pad: pixels by which an image that is not cropped is shifted.
      dtype: type of the views.

    Raises Refused for values out of range, here or when first called.
    """
    _check_ranges(scale=scale, ratio=ratio, sigma=sigma)
    _check_moments(mean, std)
    _require(pad < size, "config.augment.pad", pad, f"from 0 to {size - 1}")
    _require(not (pad and crop), "config.augment.pad", pad, "0 where crop=True")
    blurs = _probabilities("blur", blur, views)
    solarizations = _probabilities("solarize", solarize, views)
    crop_box = functools.partial(
        random_resized_crop,
        size=size,
        scale=scale,
        ratio=ratio,
        interpolation=interpolation,
    )
    shift = functools.partial(shift_image, pad=pad) if pad else None

    def augment(key, images):
        are_images = images.ndim == 4
        crops = are_images and crop
        mend = "; or config.augment.crop=True" if are_images else ""
        _check_images(images, None if crops else size, mean, views, mend=mend)
        keys = jax.vmap(jax.random.fold_in, (None, 0))(key, jnp.arange(len(images)))
        out = []
        for view in range(views):
            change = functools.partial(
                _make_view,
                cut=crop_box if crops else shift,
                strength=jitter,
                jitter=jitter_probability,
                gray=grayscale,
                blur=blurs[view],
                sigma=sigma,
                solarized=solarizations[view],
                flip=flip,
            )
            view_keys = jax.vmap(jax.random.fold_in, (0, None))(keys, view)
            image = images if are_images else images[:, view]
            out.append(jax.vmap(change)(view_keys, image))
        return normalize(jnp.stack(out, axis=1), mean, std).astype(dtype)

    return augment


@schema.checked("config.augment.local")
@schema.debug(views=2, size=8)
def make_local_crops(
    global_options: Mapping[str, Any],
    *,
    views: Annotated[int, schema.Range(1, 64)],
    size: schema.Pixels,
    scale: Scale = (0.05, 0.4),
    blur: Probability = 0.5,
    solarize: Probability = 0.0,
) -> Callable:
    """Build `crop(key, images)`, u8[B,H,W,C] -> [B,views,size,size,C]: multi-crop.

    They are small crops of small parts, in addition to the two views (SwAV, Caron et
    al., NeurIPS 2020; defaults are DINO's). Other options are as for the two views.

    Args:
      global_options: arguments of `make` for the two views.
      views, size, scale, blur, solarize: options, as in `make`.

    Raises Refused for values out of range, and for images that were cropped before
    they came to the device: a small part of a crop is not a small part of the image.
    """
    options = dict(views=views, size=size, scale=scale, blur=blur, solarize=solarize)
    augment = make(**{**global_options, **options, "crop": True, "pad": 0})

    def crop(key, images):
        if images.ndim != 4:
            raise Refused(
                "config.augment.local: needs whole images, and these stream as crops; "
                "leave the section out, or raise config.device_bytes so that the set "
                "lies on the device"
            )
        return augment(key, images)

    return crop


@schema.checked("config.augment")
def make_eval(
    *,
    size: schema.Pixels,
    resize: schema.Pixels | None = None,
    interpolation: Interpolation = "bicubic",
    mean: Mean,
    std: Std,
    dtype: Any = jnp.float32,
) -> Callable:
    """Build `prepare(images)`, u8[B,H,W,C] -> [B,size,size,C], normalised.

    The shorter side is resized to `resize`, then the centre is cropped. Without
    `resize`, images of other sizes than size x size are Refused. Features f32[B,1,1,D]
    in place of images stay as they are.
    """
    _check_moments(mean, std)
    enough = resize is None or resize >= size
    _require(enough, "config.augment.resize", resize, f"None or >= {size}")
    shrink = functools.partial(
        resize_shorter_side, size=resize, interpolation=interpolation
    )

    def prepare(images):
        if images.dtype == jnp.float32:  # of the source `features`
            return images.astype(dtype)
        mend = "; or config.augment.resize, to bring them to it"
        _check_images(images, None if resize else size, mean, mend=mend)
        images = images.astype(jnp.float32) / 255.0
        if resize:
            images = jax.vmap(lambda x: center_crop(shrink(x), size=size))(images)
        return normalize(images, mean, std).astype(dtype)

    return prepare


def _check_moments(mean, std):
    is_valid = len(std) == len(mean)
    _require(is_valid, "config.augment.std", std, f"as long as mean {mean!r}")


def _probabilities(name, value, views) -> tuple[float, ...]:
    """Return the probability of each view."""
    by_view = (value,) * views if np.ndim(value) == 0 else tuple(value)
    is_valid = len(by_view) == views
    allowed = f"one number, or one for each of {views} views"
    _require(is_valid, f"config.augment.{name}", value, allowed)
    return by_view


def _check_images(images, size, mean, views=None, mend=""):
    """Refuse images of another type or shape; `mend` is the message's advice."""
    shape = images.shape
    axes = {4: (), 5: (views,)}.get(len(shape))
    is_u8 = images.dtype == jnp.uint8 and shape[1:-3] == axes
    if not is_u8 or not 1 <= shape[-1] <= stream.CHANNELS:
        raise Refused(
            f"images='{images.dtype}{list(shape)}': must be uint8[B,H,W,C] or "
            f"[B,{views},H,W,C], C from 1 to {stream.CHANNELS}"
        )
    height, width, channels = shape[-3:]
    if size is not None and (height, width) != (size, size):
        raise Refused(
            f"config.augment.size={size!r}: must be the side of the images, which are "
            f"{height} x {width} pixels{mend}"
        )
    if len(mean) not in (1, channels):
        lengths = "1" if channels == 1 else f"1 or {channels}"
        raise Refused(
            "config.augment.mean",
            mean,
            f"must be of length {lengths}: images have {channels} channels",
        )
