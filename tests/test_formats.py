"""Formats of images of a set: bits and transparency."""

import numpy as np
import pytest
from PIL import Image

from jaxcl.data import sources

RNG = np.random.default_rng(0)


def folder(root, images, ending="png"):
    for i, image in enumerate(images):
        where = root / "ab"[i % 2] / f"{i}.{ending}"
        where.parent.mkdir(parents=True, exist_ok=True)
        if isinstance(image, np.ndarray):
            image = Image.fromarray(image)
        image.save(where)
    return str(root)


def load(root, **options):
    data = sources.load("image_folder", path=root, test=0.0, **options)
    return np.stack([data.train.load(i) for i in range(len(data.train.label))])


def test_one_scale_for_all_greys_of_16_bits(tmp_path):
    """That of the option; other images keep their pixels."""
    deep = [RNG.integers(0, 4096, (16, 16)).astype(np.uint16) for _ in range(4)]
    plain = RNG.integers(0, 256, (16, 16), dtype=np.uint8)
    root = folder(tmp_path, [*deep, plain])
    order = [0, 2, 4, 1, 3]  # class by class
    for bits in (12, 16):
        pixels = load(root, channels=1, bits=bits)
        want = [*(x >> (bits - 8) for x in deep), plain]
        np.testing.assert_array_equal(pixels[..., 0], np.stack(want)[order])
    for options in ({}, {"bits": 10}):
        with pytest.raises(ValueError, match="png.*config.data.bits"):
            load(root, **options)


@pytest.mark.parametrize("ground", [255, 0])
def test_transparent_pixels_show_the_background(ground, tmp_path):
    drawing = np.zeros((8, 8, 4), np.uint8)  # black, and black behind nothing
    drawing[2:5, 2:5, 3] = 255
    pixels = load(folder(tmp_path, [drawing] * 2), background=ground)
    assert (pixels[:, 0] == ground).all() and (pixels[:, 3, 3] == 0).all()
