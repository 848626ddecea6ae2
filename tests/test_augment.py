"""Each operation against Pillow or a float64 twin, the pipelines by statistics."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from matplotlib import colors
from PIL import Image, ImageEnhance, ImageOps
from scipy import stats

from helpers import crops, key_uses
from jaxcl.data.augment import images as augment_images

PLAIN = dict(mean=(0.0,), std=(1.0,))
OFF = dict(jitter_probability=0.0, grayscale=0.0, flip=0.0, **PLAIN)
RESAMPLING = {"bilinear": Image.BILINEAR, "bicubic": Image.BICUBIC}


def pixels(*shape, seed=0):
    return np.random.default_rng(seed).integers(0, 256, shape).astype(np.uint8)


def unit(image):
    return jnp.asarray(image, jnp.float32) / 255


def keys(n, seed=0):
    return jax.random.split(jax.random.key(seed), n)


# Twins in float64.


def pillow_resize(image, box, size, interpolation):
    """Crop (left, top, right, bottom), then resize each channel in float."""
    planes = [
        Image.fromarray(plane).crop(box).resize(size, RESAMPLING[interpolation])
        for plane in np.moveaxis(np.asarray(image, np.float32), -1, 0)
    ]
    return np.clip(np.stack([np.asarray(p) for p in planes], -1), 0, 1)


def luma(image):
    return image @ np.array([0.299, 0.587, 0.114])


def adjust(image, operation, factor):
    if operation == 3:
        hsv = colors.rgb_to_hsv(image)
        hsv[..., 0] = (hsv[..., 0] + factor) % 1.0
        return colors.hsv_to_rgb(hsv)
    other = (0.0, luma(image).mean(), luma(image)[..., None])[operation]
    return np.clip(factor * image + (1 - factor) * other, 0, 1)


def blur(image, sigma, radius):
    taps = np.exp(-0.5 * (np.arange(-radius, radius + 1) / sigma) ** 2)
    taps /= taps.sum()
    for axis in (0, 1):
        pad = [(radius, radius) if a == axis else (0, 0) for a in range(3)]
        image = np.pad(image, pad, mode="edge")
        image = np.apply_along_axis(np.convolve, axis, image, taps, "valid")
    return image


# Operations.


@pytest.mark.parametrize("interpolation", ["bilinear", "bicubic"])
def test_random_resized_crop_is_pillows_crop_then_resize(interpolation):
    image, size = unit(pixels(20, 28, 3)), 9
    many = keys(12)

    @jax.jit
    @jax.vmap
    def crop(key):
        view = augment_images.random_resized_crop(
            key, image, size=size, interpolation=interpolation
        )
        shape = (0.08, 1.0), (3 / 4, 4 / 3)
        return view, augment_images._draw_box(key, 20, 28, *shape)

    out, box = crop(many)
    top, left, h, w = np.asarray(box, np.int64)
    # Both directions are met: some boxes shrink, some grow.
    assert h.min() < size < h.max()
    for i in range(len(out)):
        corners = (left[i], top[i], left[i] + w[i], top[i] + h[i])
        twin = pillow_resize(image, corners, (size, size), interpolation)
        np.testing.assert_allclose(out[i], twin, atol=2e-5)


@pytest.mark.parametrize(
    "height, width, scale, ratio",
    [
        (40, 40, (0.08, 1.0), (3 / 4, 4 / 3)),
        (24, 60, (0.2, 0.9), (1 / 2, 3.0)),
        (24, 60, (0.9, 1.0), (0.9, 2.0)),  # too wide: nearly all fall back
        (60, 24, (0.5, 1.0), (0.5, 1.0)),  # too tall: some fall back
    ],
)
def test_boxes_are_distributed_as_torchvisions(height, width, scale, ratio):
    draw = functools.partial(augment_images._draw_box, scale=scale, ratio=ratio)
    box = jax.jit(jax.vmap(lambda key: draw(key, height, width)))(keys(3000))
    ours = np.asarray(box, np.int64).T
    assert np.all(np.asarray(box) == ours.T)
    crops.check_boxes(ours, height, width, scale, ratio)


def test_resize_and_center_crop_match_pillow():
    for shape, size, out in (((21, 33), 12, (12, 18)), ((30, 14), 20, (42, 20))):
        image = unit(pixels(*shape, 3))
        for interpolation in RESAMPLING:
            ours = augment_images.resize_shorter_side(
                image, size=size, interpolation=interpolation
            )
            box = (0, 0, shape[1], shape[0])
            twin = pillow_resize(image, box, out[::-1], interpolation)
            np.testing.assert_allclose(ours, twin, atol=2e-5)


def test_the_centre_is_rounded_as_torchvision_does():
    image = np.arange(9 * 11.0).reshape(9, 11, 1)
    # Offsets 2.5 and 3.5 round half to even, as torchvision's int(round(x)) does.
    np.testing.assert_array_equal(
        augment_images.center_crop(image, size=4), image[2:6, 4:8]
    )
    with pytest.raises(ValueError, match="size=10"):
        augment_images.center_crop(image, size=10)


def shifts(image, pad):
    """(dy, dx) -> RandomCrop's window of the padded image that starts there."""
    height, width, channels = image.shape
    padded = np.zeros((height + 2 * pad, width + 2 * pad, channels), image.dtype)
    padded[pad : pad + height, pad : pad + width] = image
    each = range(2 * pad + 1)
    return {
        (y, x): padded[y : y + height, x : x + width]
        for y, x in itertools.product(each, each)
    }


def offsets(images, twins):
    """Which shift each image is; it must be one, bit for bit."""
    known = {twin.tobytes(): offset for offset, twin in twins.items()}
    assert len(known) == len(twins)
    return [known[np.asarray(image).tobytes()] for image in images]


@pytest.mark.parametrize("pad", [1, 3])
def test_shifts_are_uniform_over_all_offsets(pad):
    image, n = np.asarray(unit(pixels(5, 8, 3))) + 0.01, 4000  # nothing is black
    shift = functools.partial(augment_images.shift_image, image=image, pad=pad)
    out = jax.jit(jax.vmap(shift))(keys(n))
    assert out.dtype == jnp.float32 and out.shape == (n, 5, 8, 3)
    found = offsets(out, shifts(image, pad))
    cells = [(y, x) for y in range(2 * pad + 1) for x in range(2 * pad + 1)]
    counts = [found.count(cell) for cell in cells]
    assert sum(counts) == n and stats.chisquare(counts).pvalue > 1e-3
    np.testing.assert_array_equal(
        augment_images.shift_image(keys(1)[0], image, pad=0), image
    )


@pytest.mark.parametrize("factor", [0.3, 1.0, 1.7])
def test_the_twin_of_blends_is_pillows(factor):
    image = pixels(11, 7, 3)
    enhancers = (ImageEnhance.Brightness, ImageEnhance.Contrast, ImageEnhance.Color)
    for operation, enhancer in enumerate(enhancers):
        theirs = enhancer(Image.fromarray(image)).enhance(factor)
        difference = 255 * adjust(image / 255, operation, factor) - np.asarray(theirs)
        assert np.abs(difference).max() < 2.0  # Pillow rounds twice


def test_color_jitter_applies_its_draws_in_the_drawn_order():
    image = pixels(6, 5, 3) / 255
    image[0] = image[0, :, :1]  # gray pixels have no hue
    image[1, 0], image[1, 1], image[1, 2] = (1, 1, 0), (0, 1, 1), (1, 0, 1)  # ties
    strength = (0.8, 0.6, 1.2, 0.3)
    many = keys(60)
    planes = list(jnp.moveaxis(jnp.asarray(image, jnp.float32), -1, 0))
    jitter = jax.vmap(lambda key: augment_images._jitter(key, planes, strength))
    out = jax.jit(jitter)(many)
    out = jnp.stack(out, axis=-1)
    draws = np.asarray(jax.vmap(lambda k: jax.random.uniform(k, (5,)))(many), float)
    orders = list(itertools.permutations(range(4)))
    met = set()
    for got, u in zip(out, draws, strict=True):
        factors = [
            max(0, 1 - s) + (1 + s - max(0, 1 - s)) * d
            for s, d in zip(strength[:3], u[:3], strict=True)
        ]
        factors.append(strength[3] * (2 * u[3] - 1))
        met.add(orders[int(24 * u[4])])
        twin = image
        for operation in orders[int(24 * u[4])]:
            twin = adjust(twin, operation, factors[operation])
        np.testing.assert_allclose(got, twin, atol=2e-5)
    assert len(met) > 18


def test_jitter_is_uniform_either_way():
    """A factor of brightness is 1 + 0.4 u, a turn of the hue 0.1 u, u from -1 to 1."""
    planes = [jnp.full((1, 1), value) for value in (0.5, 0.3, 0.3)]
    jitter = functools.partial(augment_images._jitter, strength=(0.4, 0, 0, 0.1))
    out = jax.jit(jax.vmap(lambda key: jitter(key, planes)))(keys(400))
    red, green, blue = np.asarray(out)[..., 0, 0]
    top, low = np.maximum(red, np.maximum(green, blue)), np.minimum(green, blue)
    factor, turn = top / 0.5 - 1, (green - blue) / (top - low) / 6
    for drawn in (factor / 0.4, turn / 0.1):
        assert stats.kstest(drawn, "uniform", (-1, 2)).pvalue > 1e-3


@pytest.mark.parametrize("sigma, radius", [(0.1, 11), (0.8, 2), (2.0, 11)])
def test_blur_is_a_convolution_with_replicated_edges(sigma, radius):
    image = pixels(7, 16, 3) / 255  # narrower than the kernel
    ours = augment_images.gaussian_blur(
        jnp.asarray(image, jnp.float32), sigma, radius=radius
    )
    np.testing.assert_allclose(ours, blur(image, sigma, radius), atol=2e-6)


def test_gray_solarize_flip_normalize():
    image = pixels(9, 8, 3)
    gray = np.asarray(Image.fromarray(image).convert("L"))
    difference = 255 * augment_images.grayscale(unit(image)) - gray[..., None]
    assert np.abs(difference).max() < 1.0
    levels = np.arange(256, dtype=np.uint8).reshape(16, 16)
    theirs = np.asarray(ImageOps.solarize(Image.fromarray(levels), 128))
    result = jax.jit(lambda x: augment_images.solarize(x / 255.0))(
        levels.astype(np.float32)
    )
    np.testing.assert_allclose(255 * result, theirs, atol=1e-3)
    flipped = np.asarray(ImageOps.mirror(Image.fromarray(image)))
    np.testing.assert_array_equal(augment_images.horizontal_flip(image), flipped)
    mean, std = (0.1, 0.2, 0.3), (0.5, 2.0, 4.0)
    got = augment_images.normalize(unit(image), mean, std)
    np.testing.assert_allclose(got, (image / 255 - mean) / std, atol=1e-6)


# Pipelines.


def test_probabilities_and_order_for_each_view():
    n, size = 2000, 6
    image = pixels(size, size, 3, seed=3)
    chances = dict(grayscale=0.3, flip=0.6, blur=(0.7, 0.25), solarize=(0.0, 0.4))
    make = augment_images.make(
        size=size, crop=False, sigma=(0.9, 0.9), **{**OFF, **chances}
    )
    batch = jnp.broadcast_to(image, (n, *image.shape))
    out = np.asarray(jax.jit(make)(jax.random.key(1), batch))

    # sigma is fixed, so every output is one of sixteen known images.
    def known(gray, blurred, inverted, flipped):
        x = image / 255
        x = np.repeat(luma(x)[..., None], 3, -1) if gray else x
        x = blur(x, 0.9, 5) if blurred else x
        x = np.where(x >= 128 / 255, 1 - x, x) if inverted else x
        return x[:, ::-1] if flipped else x

    combinations = list(itertools.product((0, 1), repeat=4))
    atlas = np.stack([known(*c) for c in combinations]).reshape(16, -1)
    flat = out.reshape(n, 2, 1, -1)
    distance = np.abs(flat - atlas).max(-1)  # [n, 2, 16]
    assert distance.min(-1).max() < 1e-5
    found = np.asarray(combinations)[distance.argmin(-1)]  # [n, 2, 4]
    p = np.array([[0.3, 0.7, 0.0, 0.6], [0.3, 0.25, 0.4, 0.6]])
    error = np.abs(found.mean(0) - p)
    assert np.all(error <= 4 * np.sqrt(p * (1 - p) / n))
    # Draws are independent of each other, between operations and views.
    drawn = np.delete(found.reshape(n, 8), 2, axis=1)
    correlation = np.corrcoef(drawn.T) - np.eye(7)
    assert np.abs(correlation).max() < 4.5 / np.sqrt(n)


def test_each_view_has_probabilities_of_its_own():
    chances = dict(blur=(0.0, 1.0, 0.0), solarize=(1.0, 0.0, 0.0), sigma=(0.9, 0.9))
    make = augment_images.make(size=6, views=3, crop=False, **OFF, **chances)
    image = pixels(6, 6, 3, seed=3)
    views, x = make(jax.random.key(0), image[None])[0], image / 255
    wanted = np.where(x >= 128 / 255, 1 - x, x), blur(x, 0.9, 5), x
    np.testing.assert_allclose(views, np.stack(wanted), atol=1e-5)


def test_each_operation_is_decided_by_a_number_of_its_own(monkeypatch):
    """Of six numbers five decide, and the fourth is the blur's width."""
    chances = dict(grayscale=0.4, blur=0.4, solarize=0.4, flip=0.4)
    chances |= dict(jitter_probability=0.4, jitter=(0.5, 0, 0, 0), sigma=(0.5, 1.5))
    make = augment_images.make(
        size=5, views=1, crop=False, **OFF | chances | dict(mean=(0,), std=(1,))
    )
    image = pixels(5, 5, 3, seed=4)

    @jax.jit
    def run(numbers):
        def uniform(key, shape=()):
            return numbers if shape == (6,) else jnp.full(shape, 0.25)

        with monkeypatch.context() as patch:
            patch.setattr(jax.random, "uniform", uniform)
            return make(jax.random.key(0), image[None])[0, 0]

    def outcome(at, width=0.9):
        numbers = np.where(np.arange(6) == at, 0.3, 0.9)
        numbers[3] = width
        return run(numbers.astype(np.float32))

    x = image / 255
    close = functools.partial(np.testing.assert_allclose, atol=1e-5)
    close(outcome(3), x)  # the width decides nothing
    close(outcome(0), np.clip(0.75 * x, 0, 1))
    close(outcome(1), np.repeat(luma(x)[..., None], 3, -1))
    close(outcome(2, width=0.2), blur(x, 0.7, 9))
    close(outcome(2, width=0.8), blur(x, 1.3, 9))
    close(outcome(4), np.where(x >= 128 / 255, 1 - x, x))
    close(outcome(5), x[:, ::-1])


def test_no_two_draws_share_a_key():
    """So which operations a view has says nothing of their strength and order."""
    chances = dict(blur=0.5, solarize=0.2, jitter_probability=0.8, grayscale=0.2)
    change = augment_images.make(size=5, views=1, **OFF | chances | dict(flip=0.5))
    given = jax.random.key(0), pixels(1, 6, 6, 3)
    uses = key_uses.of(jax.make_jaxpr(change)(*given), jax.tree.leaves(given))
    assert len(uses) > 4 and not key_uses.shared(uses)


def test_crops_that_came_are_the_views_in_their_order():
    """Each is shifted by its own draw, as views of a whole image are."""
    came, key = pixels(1, 2, 6, 6, 3), jax.random.key(7)
    mean, std = (0.1, 0.2, 0.3), (0.5, 0.4, 0.3)  # black is 0 before they are applied
    options = OFF | dict(size=6, crop=False, pad=1, mean=mean, std=std)
    make = jax.jit(augment_images.make(**options))
    shift = jax.jit(functools.partial(augment_images.shift_image, pad=1))
    for view, (crop, same) in enumerate(
        zip(make(key, came)[0], make(key, came[:, 0])[0], strict=True)
    ):
        folded = jax.random.fold_in(jax.random.fold_in(key, 0), view)
        k_cut = jax.random.split(folded, 3)[0]
        for shown, image in ((crop, came[0, view]), (same, came[0, 0])):
            twin = (shift(k_cut, unit(image)) - np.array(mean)) / np.array(std)
            np.testing.assert_allclose(shown, twin, atol=1e-5)
    half = augment_images.make(**options, dtype=jnp.bfloat16)
    assert jax.eval_shape(half, key, came).dtype == jnp.bfloat16


def test_results_depend_on_position_only():
    images = jnp.asarray(pixels(4, 10, 10, 3))
    images = images.at[1].set(images[0])
    key = jax.random.key(5)
    make = augment_images.make(size=8, blur=(1.0, 0.1), solarize=(0.0, 0.2), **PLAIN)
    step = jax.jit(make)
    out = step(key, images)
    assert out.shape == (4, 2, 8, 8, 3) and out.dtype == jnp.float32
    np.testing.assert_array_equal(out, step(key, images))
    np.testing.assert_allclose(step(key, images[:2]), out[:2], atol=1e-6)
    shifted = step(key, images.at[0].set(images[3]))
    np.testing.assert_allclose(shifted[1:], out[1:], atol=1e-6)
    # Other position, other view, other key: other draws of the same image.
    assert not np.allclose(out[0], out[1], atol=1e-2)
    assert not np.allclose(out[0, 0], out[0, 1], atol=1e-2)
    assert not np.allclose(out, step(jax.random.key(6), images), atol=1e-2)

    auto = (jax.sharding.AxisType.Auto,)
    mesh = jax.make_mesh((2,), ("data",), axis_types=auto)
    split = jax.NamedSharding(mesh, jax.P("data"))
    everywhere = jax.device_put(key, jax.NamedSharding(mesh, jax.P()))
    compiled = step.lower(everywhere, jax.device_put(images, split)).compile()
    two = compiled(everywhere, jax.device_put(images, split))
    assert len(two.sharding.device_set) == 2
    np.testing.assert_allclose(two, out, atol=1e-6)
    for collective in ("all-reduce", "all-gather", "all-to-all", "collective-permute"):
        assert collective not in compiled.as_text()


def test_keys_are_folded_from_position_then_view():
    images = jnp.asarray(pixels(3, 12, 12, 3))
    key = jax.random.key(7)
    way = dict(size=5, interpolation="bilinear")
    out = jax.jit(augment_images.make(**way, **OFF))(key, images)
    crop = jax.jit(functools.partial(augment_images.random_resized_crop, **way))
    for position, view in ((0, 0), (2, 0), (1, 1)):
        folded = jax.random.fold_in(jax.random.fold_in(key, position), view)
        twin = crop(jax.random.split(folded, 3)[0], unit(images[position]))
        np.testing.assert_allclose(out[position, view], twin, atol=1e-6)


def test_local_crops_are_views_of_their_own_size_and_scale():
    """And of whole images, each with the mean, jitter and flip of the two views."""
    whole = OFF | dict(size=6, blur=(1.0, 0.1), crop=False, pad=1)
    own = dict(views=3, size=4, scale=(0.1, 0.3))
    images, key = pixels(2, 8, 8, 3), jax.random.key(0)
    sharp = augment_images.make_local_crops(whole, **own, blur=0.0)
    found = jax.jit(sharp)(key, images)
    views = jax.jit(augment_images.make(**OFF, **own))(key, images)
    np.testing.assert_array_equal(found, views)
    assert found.shape == (2, 3, 4, 4, 3)
    blurred = jax.jit(augment_images.make_local_crops(whole, **own))(key, images)
    assert np.abs(blurred - found).max() > 0.01  # half of them
    with pytest.raises(ValueError, match="config.augment.local"):
        augment_images.make_local_crops(whole, **own)(key, pixels(2, 2, 6, 6, 3))


def test_one_channel_is_a_gray_image():
    images = jnp.asarray(pixels(6, 10, 10, 1))
    make = jax.jit(augment_images.make(size=8, blur=0.5, solarize=0.5, **PLAIN))
    one = make(jax.random.key(0), images)
    three = make(jax.random.key(0), images.repeat(3, -1))
    assert one.shape == (6, 2, 8, 8, 1)
    np.testing.assert_allclose(one, three[..., :1], atol=1e-5)


@pytest.mark.parametrize("channels", [2, 4, 13])
def test_channels_that_are_no_colours_are_brighter_or_of_more_contrast_alone(channels):
    images = pixels(6, 8, 8, channels, seed=4) // 2 + 64  # nothing is clipped
    options = dict(size=8, views=1, crop=False, flip=0.0, **PLAIN)

    def make(**own):
        return jax.jit(augment_images.make(**options, **own))

    plain = make(jitter_probability=0.0, grayscale=0.0)
    coloured = make(jitter=(0, 0, 0.9, 0.5), jitter_probability=1.0, grayscale=1.0)
    key = jax.random.key(0)
    np.testing.assert_allclose(coloured(key, images), plain(key, images), atol=1e-6)
    contrast = make(jitter=(0, 0.3, 0, 0), jitter_probability=1.0, grayscale=0.0)
    factors = []
    for image, view in zip(images / 255, contrast(key, images)[:, 0], strict=True):
        mean, away = image.mean(), (image - image.mean()).ravel()
        factors.append(float((view - mean).ravel() @ away / (away @ away)))
        np.testing.assert_allclose(view, mean + factors[-1] * (image - mean), atol=1e-5)
    assert np.std(factors) > 0.02 and 0.7 < min(factors) < max(factors) < 1.3


@pytest.mark.parametrize("interpolation", RESAMPLING)
def test_evaluation_is_resize_then_centre(interpolation):
    images = pixels(2, 20, 31, 3)
    mean, std = (0.1, 0.2, 0.3), (0.5, 0.4, 0.3)
    options = dict(size=10, mean=mean, std=std, interpolation=interpolation)
    out = jax.jit(augment_images.make_eval(resize=12, **options))(images)
    for ours, image in zip(out, images, strict=True):
        small = Image.fromarray(image).resize((18, 12), RESAMPLING[interpolation])
        centre = np.asarray(small.crop((4, 1, 14, 11))) / 255
        pixel_error = (ours - (centre - mean) / std) * np.array(std) * 255
        assert np.abs(pixel_error).max() < 2.0  # Pillow rounds to u8
    augment_images.make_eval(resize=10, **options)  # as small as may be
    with pytest.raises(ValueError, match=r"resize=9"):
        augment_images.make_eval(resize=9, **options)
    with pytest.raises(ValueError, match=r"size=10.* 20 x 31 "):
        augment_images.make_eval(**options)(images)
    made = np.float32(images[:1, :1, :1])  # features, which are no image
    np.testing.assert_array_equal(augment_images.make_eval(**options)(made), made)
    same = augment_images.make_eval(size=20, mean=mean, std=std)(images[:, :, :20])
    np.testing.assert_allclose(same, (images[:, :, :20] / 255 - mean) / std, atol=1e-6)
