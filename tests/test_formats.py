"""Formats of images of a set: bits, transparency, frames."""

import struct
import warnings
import zlib

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
    pixels = [data.train.load(i) for i in range(len(data.train.label))]
    return data, np.stack(pixels)


def test_one_scale_for_all_greys_of_16_bits(tmp_path):
    """By the largest value of the set; other images keep their pixels."""
    deep = [RNG.integers(0, 4096, (16, 16)).astype(np.uint16) for _ in range(4)]
    plain = RNG.integers(0, 256, (16, 16), dtype=np.uint8)
    root = folder(tmp_path, [*deep, plain])
    with pytest.warns(UserWarning, match="16-bit .*config.data.bits"):
        data, pixels = load(root, channels=1)
    assert data.bits == 12 and "12 bits" in " ".join(data.notes)
    order = [0, 2, 4, 1, 3]  # class by class
    want = [*(x >> 4 for x in deep), plain]
    np.testing.assert_array_equal(pixels[..., 0], np.stack(want)[order])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        _, other = load(root, channels=1, bits=16)
    np.testing.assert_array_equal(other[0, ..., 0], deep[0] >> 8)
    with pytest.raises(ValueError, match="png.*config.data.bits"):
        load(root, bits=10)
    for i in range(40):  # and one bright pixel in none of these
        Image.fromarray(deep[0] >> 5).save(tmp_path / "b" / f"x{i}.png")
    bright = deep[0].copy()
    bright[0, 0] = 65535
    Image.fromarray(bright).save(tmp_path / "b" / "y.png")
    for image in (tmp_path / "a/0.png", tmp_path / "a/2.png", tmp_path / "b/1.png"):
        image.unlink()
    with pytest.raises(ValueError, match="config.data.bits"):
        load(root)


def deep_png(path, pixels):
    """A PNG of 16 bits a colour, u16[h,w,3], which Pillow does not write."""

    def chunk(kind, data):
        body = kind + data
        return struct.pack(">I", len(data)) + body + struct.pack(">I", zlib.crc32(body))

    header = struct.pack(">IIBBBBB", pixels.shape[1], pixels.shape[0], 16, 2, 0, 0, 0)
    rows = b"".join(b"\0" + row.astype(">u2").tobytes() for row in pixels)
    chunks = chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(rows))
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(b"\x89PNG\r\n\x1a\n" + chunks + chunk(b"IEND", b""))


def test_colours_of_16_bits_that_would_be_black_are_refused(tmp_path):
    for top in (4095, 65535):
        deep = RNG.integers(0, top, (8, 8, 3))
        for name in ("a/0.png", "b/1.png"):
            deep_png(tmp_path / name, deep)
        if top == 4095:
            with pytest.raises(ValueError, match="16-bit .* 15 of 255"):
                load(str(tmp_path))
        else:
            data, pixels = load(str(tmp_path))
            assert "16 bits a colour" in " ".join(data.notes)
            assert np.abs(pixels[0] - (deep >> 8)).max() <= 1


@pytest.mark.parametrize("ground", [255, 0])
def test_transparent_pixels_show_the_background(ground, tmp_path):
    drawing = np.zeros((8, 8, 4), np.uint8)  # black, and black behind nothing
    drawing[2:5, 2:5, 3] = 255
    data, pixels = load(folder(tmp_path, [drawing] * 2), background=ground)
    assert (pixels[:, 0] == ground).all() and (pixels[:, 3, 3] == 0).all()
    assert "transparent" in " ".join(data.notes)
    opaque = np.full((8, 8, 4), 255, np.uint8)
    data, _ = load(folder(tmp_path / "c", [opaque] * 2))
    assert data.notes == ()


def test_frames_that_are_not_read_are_said(tmp_path):
    (tmp_path / "a").mkdir()
    first, second = (Image.new("RGB", (8, 8), (v, 0, 0)) for v in (250, 5))
    first.save(tmp_path / "a/0.tif", save_all=True, append_images=[second])
    data, pixels = load(str(tmp_path))
    assert pixels[0, 0, 0, 0] == 250 and "several frames" in " ".join(data.notes)
