import functools
import hashlib
import itertools
import json
import re
import shutil
import sys
import warnings

import numpy as np
import pytest
import tensorflow_datasets as tfds
from array_record.python import array_record_module
from PIL import Image
from sklearn import datasets

from helpers import tfds_sets
from helpers.tfds_sets import NAMES, encoded, random_images
from jaxcl import cli
from jaxcl.data import stream
from jaxcl.data.images import decode, readers
from jaxcl.data.sources import by_name, convert, toys
from jaxcl.data.sources import tfds as tfds_source
from jaxcl.data.stream import splits as cuts


def same(one, two):
    for a, b in zip(one, two, strict=True):
        assert (a is None) == (b is None)
        if a is not None:
            np.testing.assert_array_equal(a.label, b.label)
            np.testing.assert_array_equal(a.domain, b.domain)
            np.testing.assert_array_equal(pixels(a), pixels(b))


def splits(data):
    return data.train, data.validation, data.test


def pixels(examples):
    return np.stack([examples.read(i) for i in range(len(examples.label))])


# --- splits


def test_validation_is_stratified_seeded_and_apart_from_test():
    label = np.repeat(np.arange(3), [20, 10, 3]).astype(np.int32)
    domain = (np.arange(33) % 2).astype(np.int32)
    ids = np.arange(33, dtype=np.uint8)[:, None, None, None]
    train, held = cuts.split_validation(
        stream.Examples(label, domain, ids), 0.2, seed=3
    )
    counts = [
        ((held.label == c) & (held.domain == d)).sum() for c in range(3) for d in (0, 1)
    ]
    # Rows of each class and domain: 10 10 5 5 2 1; one of two, none of one.
    assert counts == [2, 2, 1, 1, 1, 0]
    together = np.concatenate([train.images, held.images]).ravel()
    assert sorted(together) == list(range(33))
    for part in (train, held):
        np.testing.assert_array_equal(part.label, label[part.images.ravel()])
        np.testing.assert_array_equal(part.domain, domain[part.images.ravel()])

    # A class of a domain is drawn from alone; rows without a label judge nothing.
    alone = cuts.take_rows(stream.Examples(label, domain, ids), np.flatnonzero(domain))
    there = cuts.split_validation(alone, 0.2, seed=3)[1].images.ravel()
    assert there.tolist() == held.images[held.domain == 1].ravel().tolist()
    even = cuts.take_rows(stream.Examples(0 * label, domain, ids), np.arange(32))
    mask = cuts.draw_mask(even, 0.5, [3])
    assert (mask[::2] != mask[1::2]).any()  # draws of their own
    few = stream.Examples(np.where(label > 0, -1, label), 0 * domain, ids)
    drawn = cuts.draw_test("x", ("a",), few, 0.5, 0)
    assert len(drawn.test.label) == 10 and (drawn.test.label == 0).all()

    def draw(seed):
        return cuts.split_validation(stream.Examples(label, domain, ids), 0.2, seed)[
            1
        ].images.tobytes()

    assert draw(3) == held.images.tobytes() != draw(4)
    base = by_name.load("digits")
    cut = by_name.load("digits", validation=0.1, seed=5)
    np.testing.assert_array_equal(base.test.images, cut.test.images)
    assert len(cut.train.label) + len(cut.validation.label) == len(base.train.label)
    with pytest.raises(ValueError, match=r"config\.data\.validation=1\.5"):
        by_name.load("digits", validation=1.5)


def test_digits():
    data = by_name.load("digits")
    raw = datasets.load_digits()
    both = np.concatenate([data.train.images, data.test.images])
    assert both.shape == (1797, 8, 8, 1) and both.dtype == np.uint8
    assert (both.min(), both.max()) == (0, 255)
    labels = np.concatenate([data.train.label, data.test.label])
    scaled = np.rint(raw.images / 16 * 255).astype(np.uint8)

    def pairs(images, labels):
        return sorted((x.tobytes(), y) for x, y in zip(images, labels, strict=True))

    assert pairs(both, labels) == pairs(scaled, raw.target)
    for digit in range(10):
        total = (raw.target == digit).sum()
        assert (data.test.label == digit).sum() == round(total / 5)
    big = by_name.load("digits", size=16, channels=3, interpolation="nearest")
    assert big.train.images.shape[1:] == (16, 16, 3)
    np.testing.assert_array_equal(big.train.images[:, ::2, ::2, :1], data.train.images)
    smooth = by_name.load("digits", size=16).train.images
    assert (smooth[:, ::2, ::2] != data.train.images).any()
    for options in ({"channels": 2}, {"interpolation": "cubic"}):
        with pytest.raises(ValueError, match=next(iter(options))):
            by_name.load("digits", **options)


def test_looks_of_digits_are_domains_of_the_same_split():
    one = splits(by_name.load("digits", validation=0.2, seed=3))
    data = by_name.load("digits_in_looks", validation=0.2, seed=3)
    assert data.domain_names == ("plain", "inverted", "rotated")
    for part, alone in zip(splits(data), one, strict=True):
        x = alone.images
        turned = x.transpose(0, 2, 1, 3)[:, ::-1]  # to the left
        expected = np.concatenate([x, 255 - x, turned])
        np.testing.assert_array_equal(part.images, expected)
        np.testing.assert_array_equal(part.label, np.tile(alone.label, 3))
        np.testing.assert_array_equal(part.domain, np.arange(3).repeat(len(x)))
    options = {"looks": ("rotated",), "size": 16, "channels": 3}
    large = by_name.load("digits_in_looks", **options)
    assert large.domain_names == ("rotated",) and large.validation is None
    upright = by_name.load("digits", size=16, channels=3).test.images
    np.testing.assert_array_equal(large.test.images, np.rot90(upright, axes=(1, 2)))
    for wrong in ((), ("plain", "plain"), ("bent",)):
        with pytest.raises(ValueError, match=r"config\.data\.looks"):
            by_name.load("digits_in_looks", looks=wrong)


# --- decoding


def test_decoding_of_every_kind_of_image(decoder):
    def read(data, channels=3, **how):
        how |= {"decoder": decoder, "channels": channels}
        return decode.Decoding(**how)(data, "x.img")

    smooth = np.linspace(0, 255, 16 * 12 * 3).reshape(16, 12, 3).astype(np.uint8)
    grey = smooth[..., 0]
    np.testing.assert_array_equal(read(encoded(smooth)), smooth)
    three = np.repeat(grey[..., None], 3, -1)
    np.testing.assert_array_equal(read(encoded(grey)), three)
    np.testing.assert_array_equal(read(encoded(grey), 1), grey[..., None])
    alpha = np.full((16, 12, 1), 99, np.uint8)
    rgba = np.concatenate([smooth, alpha], -1)
    for ground in (255, 0):  # composed on it, whatever colour is behind
        mixed = (smooth * (99 / 255) + ground * (1 - 99 / 255)).round()
        composed = read(encoded(rgba), background=ground).astype(int)
        assert np.abs(composed - mixed).max() <= 1
    clear = encoded(Image.fromarray(three).quantize(8), "GIF", transparency=0)
    assert (read(clear, background=7) == 7).any()
    deep = encoded(Image.fromarray(grey.astype(np.uint16) * 257))
    np.testing.assert_array_equal(read(deep, bits=16), three)
    few = encoded(Image.fromarray(grey.astype(np.uint16) * 16 + 15))
    np.testing.assert_array_equal(read(few, bits=12), three)
    for bits in (None, 11):
        with pytest.raises(decode.Unreadable, match="x.img.*config.data.bits"):
            read(few, bits=bits)
    palette = Image.fromarray(three).quantize(256)
    assert np.abs(read(encoded(palette)).astype(int) - three).max() <= 8
    jpeg = encoded(smooth, "JPEG", quality=98, subsampling=0)
    assert np.abs(read(jpeg).astype(int) - smooth).max() <= 8
    cmyk = encoded(Image.fromarray(smooth).convert("CMYK"), "JPEG", quality=98)
    assert np.abs(read(cmyk).astype(int) - smooth).max() <= 16
    exif = Image.Exif()
    exif[0x112] = 6  # turn by 90 degrees: not applied
    turned = encoded(Image.fromarray(smooth), "JPEG", exif=exif)
    assert read(turned).shape == (16, 12, 3)
    noise = np.random.default_rng(0).integers(0, 256, (64, 64, 3), np.uint8)
    cut = [x[: len(x) * 3 // 4] for x in (encoded(noise, "JPEG"), encoded(noise))]
    for bad in (b"", b"no image", jpeg[: len(jpeg) // 2], *cut):
        with pytest.raises(ValueError, match="x.img"):
            read(bad)


def test_pixels_of_an_unknown_range_are_refused_and_not_cut_off(decoder):
    grey = np.arange(12, dtype=np.uint8).reshape(3, 4) * 20
    for pixels, words in (
        (grey.astype(np.int32) * 2570, "has pixels from 0 to 565400"),
        (grey.astype(np.int32) - 9, "has pixels from -9 to 211"),
        (np.float32(grey) / 255, "has floating pixels from 0.0 to 0.8"),
    ):
        with pytest.raises(decode.Unreadable, match=f"x.tif: {words}"):
            decode.Decoding(decoder)(encoded(pixels, "TIFF"), "x.tif")
    data = encoded(grey.astype(np.int32), "TIFF")
    read = decode.Decoding(decoder, channels=1)(data, "x.tif")
    np.testing.assert_array_equal(read[..., 0], grey)


# --- npz, arrays, convert


def pack(images, kind, strip=3, **options):
    """One packed image array, as the entries of an .npz file."""
    n, h, w, c = images.shape
    coded = []
    for start in range(0, n, strip):
        part = images[start : start + strip].reshape(-1, w, c)
        coded.append(encoded(part[..., 0] if c == 1 else part, kind, **options))
    return {
        "strips": np.frombuffer(b"".join(coded), np.uint8),
        "ptr": np.cumsum([0] + [len(x) for x in coded]),
        "shape": np.array([n, h, w, c]),
        "sha256": np.array(hashlib.sha256(images.tobytes()).hexdigest()),
    }


@pytest.mark.parametrize("decoder", ["cv2", "pillow"])
@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize(
    "side, factor", [(None, 1), (1, 8), (16, 4), (17, 2), (33, 2), (34, 1), (900, 1)]
)
def test_a_jpeg_is_decoded_smaller_while_its_side_is_long_enough(
    side, factor, channels, decoder
):
    pytest.importorskip(decoder.replace("pillow", "PIL"))
    height, width = 67, 133  # 67 is 2 x 33 + 1 and 4 x 16 + 3
    down, right = np.mgrid[:height, :width]
    pixels = np.stack([down * 3, right, 255 - right], axis=-1).astype(np.uint8)
    how = {"decoder": decoder, "channels": channels}
    small = decode.Decoding(**how, jpeg_side=side)
    image = small(encoded(pixels, "JPEG", quality=98), "x.jpg")
    whole = decode.Decoding(**how)(encoded(pixels, "JPEG", quality=98), "x.jpg")
    assert image.shape == (-(-height // factor), -(-width // factor), channels)
    rows, columns = height // factor, width // factor
    blocks = whole[: rows * factor, : columns * factor].reshape(
        rows, factor, columns, factor, channels
    )
    difference = image[:rows, :columns] - blocks.mean(axis=(1, 3))
    assert np.abs(difference).mean() < 3
    png = encoded(pixels, "PNG")
    np.testing.assert_array_equal(
        small(png, "x.png"), decode.Decoding(**how)(png, "x.png")
    )


def test_npz_plain_and_packed(tmp_path):
    train, test = random_images(7), random_images(5, seed=1)
    train_y, test_y = np.arange(7) % 3, np.arange(5, dtype=np.uint8) % 3
    common = {"train_y": train_y, "test_y": test_y, "class_names": ["a", "b", "c"]}
    plain, packed = tmp_path / "plain.npz", tmp_path / "packed.npz"
    np.savez(plain, train_x=train, test_x=test, **common)
    entries = {f"train_x__{k}": v for k, v in pack(train, "PNG").items()}
    entries |= {f"test_x__{k}": v for k, v in pack(test, "WEBP", lossless=True).items()}
    np.savez(packed, **entries, **common)
    data = by_name.load("npz", path=str(plain))
    np.testing.assert_array_equal(data.train.images, train)
    np.testing.assert_array_equal(data.test.label, test_y)
    assert data.class_names == ("a", "b", "c") and data.name == "plain"
    same(splits(by_name.load("npz", path=str(packed))), splits(data))
    # Lossless strips are compared with their digest; lossy ones cannot be.
    changed = entries | {"train_x__sha256": np.array("0" * 64)}
    np.savez(packed, **changed, **common)
    with pytest.raises(ValueError, match="packed.npz.*train_x__sha256"):
        by_name.load("npz", path=str(packed))
    grey = random_images(4, channels=1) // 8 + 100
    entries = {f"train_x__{k}": v for k, v in pack(grey, "JPEG", quality=98).items()}
    np.savez(packed, **entries)
    images = by_name.load("npz", path=str(packed)).train.images
    assert images.shape == grey.shape
    assert np.abs(images.astype(int) - grey).max() < 12
    entries["train_x__shape"][0] = 5
    np.savez(packed, **entries)
    with pytest.raises(ValueError, match="strips.* 4 .* 5"):
        by_name.load("npz", path=str(packed))


def test_npz_with_a_validation_split_of_its_own(tmp_path):
    path = str(tmp_path / "x.npz")
    parts = {name: random_images(4 + i) for i, name in enumerate(("train", "val"))}
    images = {f"{name}_x": x for name, x in parts.items()}
    labels = {f"{name}_y": np.arange(len(x)) for name, x in parts.items()}
    np.savez(path, **images, **labels)
    data = by_name.load("npz", path=path)
    np.testing.assert_array_equal(data.validation.images, parts["val"])
    assert data.class_names == tuple("01234") and data.test is None
    with pytest.raises(ValueError, match="validation"):
        by_name.load("npz", path=path, validation=0.5)
    np.savez(path, **images, train_domain=np.zeros(4, int))
    with pytest.raises(ValueError, match="val.*domain"):
        by_name.load("npz", path=path)


def test_npz_with_domains_and_a_test_mask(tmp_path):
    x, y, domain = random_images(12)[..., :1], np.arange(12) % 2, np.arange(12) // 6
    is_test = np.arange(12) % 3 == 0
    path = str(tmp_path / "x.npz")
    names = {"domain_names": ["photo", "sketch"]}
    np.savez(path, x=x[..., 0], y=y, domain=domain, is_test=is_test, **names)
    data = by_name.load("npz", path=path)
    np.testing.assert_array_equal(data.train.images, x[~is_test])
    np.testing.assert_array_equal(data.test.domain, domain[is_test])
    np.testing.assert_array_equal(data.test.label, y[is_test])
    assert data.class_names == ("0", "1")
    assert data.domain_names == ("photo", "sketch")
    np.savez(path, x=x, y=y, class_names=np.array([b"cat", b"dog"]))
    assert by_name.load("npz", path=path).class_names == ("cat", "dog")
    np.savez(path, x=x)
    data = by_name.load("npz", path=path)
    assert data.test is None and data.class_names == ()
    assert (data.train.label == -1).all()


@pytest.mark.parametrize(
    ("entries", "words"),
    [
        ({"images": np.zeros(3)}, r"train_x.*\['images'\]"),
        ({"x": np.zeros((2, 4, 4, 3))}, "float64.*uint8"),
        ({"x": np.zeros((8, 8, 3), np.uint8)}, "3 pixels"),
        ({"x": random_images(2), "y": np.zeros(2)}, "labels.*float64"),
        ({"x": random_images(2), "y": np.zeros(3, int)}, r"shape \[3\] for 2 images"),
        ({"x": random_images(2), "y": np.array([0, -2])}, "labels.*-2"),
        ({"x": random_images(2), "y": [0, 2], "class_names": ["a", "b"]}, "0 to 2"),
        ({"x": random_images(2), "is_test": np.zeros(2)}, r"is_test.*bool\[2\]"),
        ({"x": np.array([{}, {}], object)}, "x.npz.*allow_pickle"),
        (
            {
                "train_x": random_images(2),
                "train_domain": [0, 1],
                "test_x": random_images(2),
            },
            "x.npz",
        ),
    ],
)
def test_npz_errors(tmp_path, entries, words):
    path = str(tmp_path / "x.npz")
    np.savez(path, **entries)
    with pytest.raises(ValueError, match=words):
        by_name.load("npz", path=path)


def test_npz_files_that_are_none(tmp_path):
    (tmp_path / "x.npz").write_bytes(b"not a zip")
    np.save(tmp_path / "y.npy", np.zeros(3))
    for name in ("x.npz", "y.npy", "missing.npz"):
        with pytest.raises(ValueError, match=name):
            by_name.load("npz", path=str(tmp_path / name))


def test_mean_and_deviation_are_of_train_images_alone(tmp_path):
    image = np.zeros((2, 1, 1, 3), np.uint8)
    data = toys.digits()
    data = data._replace(
        train=stream.Examples(np.zeros(2, "i4"), np.zeros(2, "i4"), image),
        test=stream.Examples(np.zeros(2, "i4"), np.zeros(2, "i4"), image + 255),
    )
    convert.write_arrays(data, tmp_path / "out")
    meta = json.loads((tmp_path / "out" / "meta.json").read_text())
    assert meta["mean"] == meta["std"] == [0, 0, 0]
    many = random_images(12)
    moments = many.mean(axis=(0, 1, 2)) / 255, many.std(axis=(0, 1, 2)) / 255
    np.testing.assert_allclose(convert.mean_std(many), moments)


def test_convert_then_arrays(tmp_path):
    x, y, domain = random_images(12), np.arange(12) % 3, np.arange(12) // 6
    path, out = str(tmp_path / "toy.npz"), str(tmp_path / "out")
    np.savez(path, x=x, y=y, domain=domain, is_test=np.arange(12) % 4 == 0)
    assert cli.main(["convert", path, out]) == 0
    want = by_name.load("npz", path=path)
    whole = by_name.load("arrays", path=out)
    same(splits(whole), splits(want))
    assert whole.name == "toy" and whole.class_names == want.class_names
    meta = json.loads((tmp_path / "out" / "meta.json").read_text())
    scaled = want.train.images.reshape(-1, 3) / 255
    np.testing.assert_allclose(meta["mean"], scaled.mean(0), atol=1e-12)
    np.testing.assert_allclose(meta["std"], scaled.std(0), atol=1e-12)

    mapped = by_name.load("arrays", path=out, resident=False, validation=0.4, seed=2)
    assert mapped.train.images is None
    same(splits(mapped), splits(by_name.load("npz", path=path, validation=0.4, seed=2)))

    assert cli.main(["convert", path, out]) == 2
    images = np.load(tmp_path / "out" / "train_images.npy")
    np.save(tmp_path / "out" / "train_images.npy", images ^ 1)
    with pytest.raises(ValueError, match="train_images.npy.*sha256"):
        by_name.load("arrays", path=out)
    (tmp_path / "out" / "train_images.npy").unlink()
    with pytest.raises(ValueError, match="train_images.npy"):
        by_name.load("arrays", path=out)


def test_domains_of_a_set_are_converted(tmp_path, monkeypatch, capsys):
    """In arrays by hand: which rows are left, in which numbers."""
    x, y, domain = random_images(24), np.arange(24) % 4, np.arange(24) // 8
    path = str(tmp_path / "toy.npz")
    names = {"class_names": ["a", "b", "c", "d"], "domain_names": ["ink", "oil", "3"]}
    test = np.arange(24) % 8 >= 4
    np.savez(path, x=x, y=y, domain=domain, is_test=test, **names)

    def part(*options, code=0):
        out = str(tmp_path / str(len([*tmp_path.iterdir()])))
        assert cli.main(["convert", path, out, *options]) == code
        return None if code else by_name.load("arrays", path=out)

    drawn = part("--domains", "2", "ink")
    assert drawn.domain_names == ("3", "ink")
    assert drawn.class_names == ("a", "b", "c", "d")
    kept = np.isin(domain, (0, 2))
    for split, rows in (("train", kept & ~test), ("test", kept & test)):
        examples = getattr(drawn, split)
        np.testing.assert_array_equal(examples.images, x[rows])
        assert examples.label.tolist() == y[rows].tolist()
        assert examples.domain.tolist() == [{2: 0, 0: 1}[n] for n in domain[rows]]
    for wrong, said in {
        ("--domains", "4"): "domains: 4 is neither a number below 3",
        ("--domains", "ink", "0"): r"domains: \['ink'\] more than once",
    }.items():
        part(*wrong, code=2)
        assert re.search(said, capsys.readouterr().err)


def test_arrays_written_by_hand(tmp_path):
    np.save(tmp_path / "a.npy", random_images(3))
    with pytest.raises(ValueError, match="meta.json"):
        by_name.load("arrays", path=str(tmp_path))
    meta = {"splits": {"train": {"images": {"file": "a.npy"}}}}
    (tmp_path / "meta.json").write_text(json.dumps(meta))
    for resident in (None, False):
        data = by_name.load("arrays", path=str(tmp_path), resident=resident)
        np.testing.assert_array_equal(pixels(data.train), random_images(3))
        assert data.train.label.tolist() == [-1, -1, -1]
    np.save(tmp_path / "d.npy", [0, 1, 1])
    np.save(tmp_path / "y.npy", [2, -1, 0])
    rows = {"images": {"file": "a.npy"}, "label": {"file": "y.npy"}}
    rows |= {"domain": {"file": "d.npy"}}
    (tmp_path / "meta.json").write_text(json.dumps({"splits": {"train": rows}}))
    data = by_name.load("arrays", path=str(tmp_path))
    assert data.class_names == ("0", "1", "2") and data.domain_names == ("0", "1")
    splits = {"train": {"images": {"file": "a.npy"}, "domain": {"file": "d.npy"}}}
    splits |= {"test": {"images": {"file": "a.npy"}}}
    partly = {"splits": splits, "domain_names": ["photo", "sketch"]}
    (tmp_path / "meta.json").write_text(json.dumps(partly))
    with pytest.raises(ValueError, match="test.*domain"):
        by_name.load("arrays", path=str(tmp_path))
    (tmp_path / "meta.json").write_text(json.dumps(meta))
    (tmp_path / "a.npy").unlink()  # and written anew in the same process
    np.save(tmp_path / "a.npy", random_images(3, seed=1))
    for resident in (None, False):
        data = by_name.load("arrays", path=str(tmp_path), resident=resident)
        np.testing.assert_array_equal(pixels(data.train), random_images(3, seed=1))


# --- image folders


def folder(root, counts, shape=(8, 6), seed=0):
    """Class folders of PNG files; pixel values tell class and file."""
    rng = np.random.default_rng(seed)
    for name, count in counts.items():
        (root / name).mkdir(parents=True, exist_ok=True)
        for i in range(count):
            image = rng.integers(0, 256, (*shape, 3), np.uint8)
            (root / name / f"{i:03}.png").write_bytes(encoded(image))
    return root


def read(path):
    return np.asarray(Image.open(path))


def test_folder_with_train_and_test(tmp_path):
    folder(tmp_path / "train", {"b": 3, "a": 2, "c": 1})
    folder(tmp_path / "val", {"a": 1, "b": 1, "c": 2}, seed=1)
    (tmp_path / "train" / "a" / "notes.txt").write_text("no image")
    (tmp_path / "train" / "a" / "deep").mkdir()
    shutil.copy(tmp_path / "val/a/000.png", tmp_path / "train/a/deep/z.PNG")
    data = by_name.load("image_folder", path=str(tmp_path))
    assert data.class_names == ("a", "b", "c")
    assert data.train.label.tolist() == [0, 0, 0, 1, 1, 1, 2]
    assert data.test.label.tolist() == [0, 1, 2, 2]
    assert data.validation is None and data.decoder in ("cv2", "pillow")
    np.testing.assert_array_equal(
        data.train.read(4), read(tmp_path / "train/b/001.png")
    )
    np.testing.assert_array_equal(data.test.read(3), read(tmp_path / "val/c/001.png"))
    # A class list keeps its order, and leaves the rest out of every split.
    (tmp_path / "keep.txt").write_text("c\n\nb\n")
    options = {"path": str(tmp_path), "classes": str(tmp_path / "keep.txt")}
    data = by_name.load("image_folder", **options)
    assert data.class_names == ("c", "b")
    assert data.train.label.tolist() == [0, 1, 1, 1]
    assert data.test.label.tolist() == [0, 0, 1]
    np.testing.assert_array_equal(data.test.read(2), read(tmp_path / "val/b/000.png"))
    # Both val and test: val is validation; an unlabelled test folder is no test.
    (tmp_path / "test").mkdir()
    (tmp_path / "test/x.png").write_bytes(encoded(random_images(1)[0]))
    assert len(by_name.load("image_folder", **options).test.label) == 3
    folder(tmp_path / "test", {"b": 1, "c": 1})
    data = by_name.load("image_folder", **options)
    assert (len(data.test.label), len(data.validation.label)) == (2, 3)
    with pytest.raises(ValueError, match="validation"):
        by_name.load("image_folder", **options, validation=0.5)


def test_folder_of_classes_and_of_plain_images(tmp_path):
    folder(tmp_path / "set", {"a": 10, "b": 5})
    path = str(tmp_path / "set")
    data = by_name.load("image_folder", path=path)
    assert np.bincount(data.test.label).tolist() == [2, 1]
    assert np.bincount(data.train.label).tolist() == [8, 4]
    other = by_name.load("image_folder", path=path, seed=9, validation=0.25)
    np.testing.assert_array_equal(pixels(other.test), pixels(data.test))
    assert np.bincount(other.validation.label).tolist() == [2, 1]
    names = [x.reader.name(i) for x in splits(other) for i in range(len(x.label))]
    assert len(set(names)) == 15
    redrawn = by_name.load("image_folder", path=path, test_seed=1)
    assert (pixels(redrawn.test) != pixels(data.test)).any()
    assert by_name.load("image_folder", path=path, test=0.0).test is None

    flat = by_name.load("image_folder", path=str(tmp_path / "set" / "a"))
    assert flat.train.label.tolist() == [-1] * 10
    assert flat.test is None and flat.class_names == ()


@pytest.mark.parametrize(
    ("folders", "words"),
    [
        (("bus", "train"), r"\['bus'\]"),
        (("train/a", "valid/a"), r"\['valid'\]"),
        (("Train/a", "Test/a"), r"\['Test', 'Train'\]"),
        (("val/a",), r"\['val'\]"),
    ],
)
def test_classes_and_splits_are_not_taken_for_each_other(folders, words, tmp_path):
    folder(tmp_path, dict.fromkeys(folders, 2))
    with pytest.raises(ValueError, match=words):
        by_name.load("image_folder", path=str(tmp_path))


def test_formats_of_a_folder_are_options_of_its_source(tmp_path):
    """One scale for all greys of 16 bits, and what shows through."""
    grey = np.arange(16, dtype=np.uint16).reshape(4, 4) * 256
    drawing = np.zeros((4, 4, 4), np.uint8)  # black, and black behind nothing
    drawing[2, 2, 3] = 255
    for name, image in {"a": grey, "b": drawing}.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "0.png").write_bytes(encoded(Image.fromarray(image)))
    options = {"path": str(tmp_path), "test": 0.0, "channels": 1}

    def load(**more):
        return pixels(by_name.load("image_folder", **options, **more).train)[..., 0]

    for bits, ground in ((12, 255), (16, 0)):
        deep, drawn = load(bits=bits, background=ground)
        np.testing.assert_array_equal(deep, grey >> (bits - 8))
        assert drawn[2, 2] == 0 and drawn[0, 0] == ground
    for more in ({}, {"bits": 10}):
        with pytest.raises(ValueError, match="png.*config.data.bits"):
            load(**more)


def test_folder_resident_and_sized(tmp_path):
    folder(tmp_path, {"a": 3, "b": 2}, shape=(8, 6))
    path = str(tmp_path)
    lazy = by_name.load("image_folder", path=path)
    whole = by_name.load("image_folder", path=path, resident=True)
    assert whole.train.images.dtype == np.uint8
    same(splits(whole), splits(lazy))
    (tmp_path / "b" / "odd.png").write_bytes(encoded(random_images(1, 20, 40)[0]))
    options = {"path": path, "resident": True, "test": 0.0}
    with pytest.raises(ValueError, match=r"odd.png.*\(20, 40, 3\).*size"):
        by_name.load("image_folder", **options)
    for decoder in ("pillow", "auto"):
        options |= {"decoder": decoder}
        data = by_name.load("image_folder", **options, size=6)
        assert data.train.images.shape == (6, 6, 6, 3)
        # Width 6 is kept, so that the crop is rows 1..6 of 8 as they are.
        kept = read(tmp_path / "a" / "000.png")[1:7]
        np.testing.assert_array_equal(data.train.images[0], kept)
    image = Image.open(tmp_path / "b" / "odd.png").resize((12, 6), Image.BICUBIC)
    data = by_name.load("image_folder", **options | {"decoder": "pillow"}, size=6)
    np.testing.assert_array_equal(data.train.images[-1], np.asarray(image)[:, 3:9])
    lazy = by_name.load("image_folder", path=path, size=6, decoder="pillow", test=0.0)
    np.testing.assert_array_equal(pixels(lazy.train), data.train.images)


def test_folder_corrupt_image(tmp_path):
    folder(tmp_path / "train", {"a": 4, "b": 2})
    folder(tmp_path / "test", {"a": 1, "b": 1})
    for name in ("a/001.png", "a/003.png"):
        data = (tmp_path / "train" / name).read_bytes()
        (tmp_path / "train" / name).write_bytes(data[:60])
    options = {"path": str(tmp_path)}
    data = by_name.load("image_folder", **options)
    with pytest.raises(ValueError, match="train/a/001.png"):
        data.train.read(1)
    data = by_name.load("image_folder", **options, on_corrupt="skip")
    with pytest.warns(UserWarning, match="001.png.*used .*a/002.png"):
        image = data.train.read(1)
    np.testing.assert_array_equal(image, read(tmp_path / "train/a/002.png"))
    with pytest.warns(UserWarning, match="003.png.*used .*a/000.png"):
        image = data.train.read(3)  # its class begins again, b does not stand in
    np.testing.assert_array_equal(image, read(tmp_path / "train/a/000.png"))
    (tmp_path / "train/b/001.png").write_bytes(b"")
    with pytest.warns(UserWarning, match="b/001.png.*used .*b/000.png"):
        data.train.read(5)
    (tmp_path / "test/a/000.png").write_bytes(b"")
    with pytest.raises(ValueError, match="class"):
        data.test.read(0)
    data = by_name.load("image_folder", **options)
    (tmp_path / "train/b/000.png").unlink()
    with pytest.raises(ValueError, match="b/000.png"):
        data.train.read(4)


def test_the_next_image_of_its_class_and_domain_stands_in():
    """Of all rows, for each set of rows that cannot be read; a loop is the twin."""
    label, domain = np.int32([0, 0, 1, 0, 0, 1, 0]), np.int32([0, 1, 0, 0, 1, 0, 1])

    def read_unless(gone, row):
        row -= 2
        if row in gone:
            raise decode.Unreadable(f"{row} is gone")
        return np.full((1, 1, 1), row, np.uint8)

    for gone in itertools.combinations(range(7), 3):
        fetch = functools.partial(read_unless, gone)
        reader = readers.FunctionRows(fetch, 9, "row")
        two = {"label": np.append(label[:2], label)}  # which another part has
        two["domain"] = np.append(domain[:2], domain)
        whole = readers.SplitRows(reader, np.arange(9), **two)
        split = whole.take(np.arange(2, 9))
        for row in range(7):
            turn = [(row + i) % 7 for i in range(7)]
            alike = [
                x for x in turn if (label[x], domain[x]) == (label[row], domain[row])
            ]
            want = next((x for x in alike if x not in gone), None)
            with warnings.catch_warnings(record=True):
                warnings.simplefilter("always")
                if want is None:
                    with pytest.raises(decode.Unreadable, match="class"):
                        split.read(row)
                else:
                    assert split.read(row).item() == want
            if row not in gone:
                assert split.raw(row) == reader.raw(row + 2)


def test_folder_errors(tmp_path):
    def load(**options):
        return by_name.load("image_folder", **{"path": str(tmp_path), **options})

    with pytest.raises(ValueError, match="gone"):
        load(path=str(tmp_path / "gone"))
    with pytest.raises(ValueError, match="no images"):
        load()
    folder(tmp_path / "train", {"a": 1, "b": 0})
    with pytest.raises(ValueError, match="train/b.*'b'"):
        load()
    folder(tmp_path / "train", {"b": 1})
    folder(tmp_path / "val", {"a": 1, "z": 1})
    with pytest.raises(ValueError, match=r"missing: \['b'\], unknown: \['z'\]"):
        load()
    (tmp_path / "list").write_text("a\nq\n")
    with pytest.raises(ValueError, match=r"1 of the 2 .*config.data.classes.* q\."):
        load(classes=str(tmp_path / "list"))
    (tmp_path / "list").write_text("a\na\n")
    with pytest.raises(ValueError, match="classes=.*list'"):
        load(classes=str(tmp_path / "list"))
    with pytest.raises(ValueError, match="nolist"):
        load(classes=str(tmp_path / "nolist"))


# --- TFDS


@pytest.fixture(scope="module")
def array_record(tmp_path_factory):
    return tfds_sets.array_record(tmp_path_factory.mktemp("tfds"))


@pytest.fixture(scope="module")
def tfrecord(array_record, tmp_path_factory):
    return tfds_sets.tfrecord(array_record, tmp_path_factory.mktemp("tfds"))


def test_tfds_array_record(array_record):
    data = by_name.load("tfds", path=array_record, domain_key="style")
    assert data.class_names == tuple(NAMES)
    assert data.domain_names == ("photo", "sketch")
    for examples, seed, n in ((data.train, 0, 20), (data.test, 1, 10)):
        made = random_images(n, seed=seed)
        want = {x.tobytes(): (i % 3, i % 2) for i, x in enumerate(made)}
        got = {
            image.tobytes(): (int(label), int(domain))
            for image, label, domain in zip(
                pixels(examples), examples.label, examples.domain, strict=True
            )
        }
        assert got == want
    with_library = tfds.builder_from_directory(array_record).as_data_source("train")
    np.testing.assert_array_equal(
        pixels(data.train), np.stack([row["image"] for row in with_library])
    )
    assert "tensorflow" not in sys.modules


def test_tfds_tfrecord_is_the_same(array_record, tfrecord):
    options = {"domain_key": "style", "validation": 0.3}
    want = by_name.load("tfds", path=array_record, **options)
    got = by_name.load("tfds", path=tfrecord, **options)
    same(splits(got), splits(want))
    whole = by_name.load("tfds", path=tfrecord, **options, resident=True)
    assert not whole.train.streams
    same(splits(whole), splits(want))


@pytest.mark.parametrize("kind", ["array_record", "tfrecord"])
def test_tfds_parts_classes_and_missing_labels(kind, request, tmp_path):
    path = request.getfixturevalue(kind)
    full = by_name.load("tfds", path=path).train
    part = by_name.load(
        "tfds", path=path, train_split="train[25%:75%]", test_split=None
    )
    assert part.test is None
    np.testing.assert_array_equal(pixels(part.train), pixels(full)[5:15])
    np.testing.assert_array_equal(part.train.label, full.label[5:15])
    (tmp_path / "keep").write_text("owl\ncat\n")
    kept = by_name.load("tfds", path=path, classes=str(tmp_path / "keep"))
    assert kept.class_names == ("owl", "cat")
    rows = np.flatnonzero(full.label != 1)
    np.testing.assert_array_equal(pixels(kept.train), pixels(full)[rows])
    new = np.array([1, -1, 0])
    np.testing.assert_array_equal(kept.train.label, new[full.label[rows]])
    blind = by_name.load("tfds", path=path, label_key=None)
    assert (blind.train.label == -1).all()
    np.testing.assert_array_equal(pixels(blind.train), pixels(full))


def test_tfds_directories_as_domains(array_record, tfrecord):
    sets = [{"name": "tfds", "path": path} for path in (array_record, tfrecord)]
    data = by_name.load("joined", sets=sets)
    assert data.train.domain.tolist() == [0] * 20 + [1] * 20
    np.testing.assert_array_equal(*np.split(pixels(data.train), 2))


@pytest.mark.parametrize("kind", ["array_record", "tfrecord"])
def test_tfds_index_spares_the_scan(kind, request, tmp_path, monkeypatch):
    path, index = request.getfixturevalue(kind), str(tmp_path / "index.npz")
    first = by_name.load("tfds", path=path, index=index)
    scan = tfds_source._scan_file
    monkeypatch.setattr(tfds_source, "_scan_file", None)
    same(splits(by_name.load("tfds", path=path, index=index)), splits(first))
    monkeypatch.setattr(tfds_source, "_scan_file", scan)
    # Other labels or another part are scanned again, not taken from the file.
    blind = by_name.load("tfds", path=path, index=index, label_key=None)
    assert (blind.train.label == -1).all()


def prepared_anew(path):
    """Turn the order of the train records round, in files of the same sizes."""
    (file,) = path.glob("toy-train*")
    reader = array_record_module.ArrayRecordReader(str(file))
    records = reader.read_all()
    file.unlink()
    writer = array_record_module.ArrayRecordWriter(str(file), "group_size:1")
    for record in records[::-1]:
        writer.write(record)
    writer.close()
    return file


def test_tfds_that_is_prepared_anew_is_read_anew(array_record, tmp_path):
    path, index = tmp_path / "toy" / "1.0.0", str(tmp_path / "index.npz")
    shutil.copytree(array_record, path)
    before = by_name.load("tfds", path=str(path), index=index).train
    images, labels = pixels(before), before.label
    assert not np.array_equal(labels, labels[::-1])
    file = prepared_anew(path)
    after = by_name.load("tfds", path=str(path), index=index).train
    np.testing.assert_array_equal(after.label, labels[::-1])
    np.testing.assert_array_equal(pixels(after), images[::-1])
    file.unlink()
    with pytest.raises(ValueError, match=file.name):
        by_name.load("tfds", path=str(path), index=index)


def test_tfds_errors(array_record, tfrecord, tmp_path):
    def load(path=array_record, **options):
        return by_name.load("tfds", path=path, **options)

    with pytest.raises(ValueError, match="gone"):
        load(str(tmp_path / "gone"))
    for options, words in (
        ({"test_split": "validation"}, "'validation'.*test.*train"),
        ({"train_split": "train[0:0]"}, r"'train\[0:0\]': .* toy has .*'train': 20"),
        ({"train_split": "train[5:3]"}, r"split 'train\[5:3\]': has no examples"),
        ({"image_key": "picture"}, "image_key='picture'.*image"),
        ({"label_key": "name"}, "label_key='name'.*label.*style"),
        ({"domain_key": "site"}, "domain_key='site'"),
    ):
        with pytest.raises(ValueError, match=words):
            load(**options)
    (tmp_path / "keep").write_text("cat\neel\n")
    with pytest.raises(ValueError, match="'eel'"):
        load(classes=str(tmp_path / "keep"))
    cut = tmp_path / "cut"
    shutil.copytree(tfrecord, cut)
    shard = cut / "toy-train.tfrecord-00001-of-00002"
    whole = shard.read_bytes()
    shard.write_bytes(whole[:-100])
    with pytest.raises(ValueError, match="00001-of-00002.*record 7 "):
        load(str(cut))
    shard.write_bytes(whole)
    data = load(str(cut))
    shard.write_bytes(whole.replace(b"IDAT", b"JDAT"))
    with pytest.raises(ValueError, match=r"00001-of-00002 \(place \d+\)"):
        data.train.read(15)
    shard.unlink()
    with pytest.raises(ValueError, match="00001-of-00002"):
        data.train.read(15)
    with pytest.raises(ValueError, match="00001-of-00002"):
        load(str(cut))
    meta = json.loads((cut / "dataset_info.json").read_text())
    meta["fileFormat"] = "riegeli"
    (cut / "dataset_info.json").write_text(json.dumps(meta))
    with pytest.raises(ValueError, match="riegeli"):
        load(str(cut))


def tfrecords(path):
    """Place and bytes of each record of a tfrecord file, without its frame."""
    data, place, found = path.read_bytes(), 0, []
    while place < len(data):
        length = int.from_bytes(data[place : place + 8], "little")
        found.append((place, data[place + 12 : place + 12 + length]))
        place += length + 16
    return found


@pytest.mark.parametrize("part", ["train", "train[:2]"])
@pytest.mark.parametrize(
    "damage, words",
    [
        ("label", "record 1 "),
        ("pixels", "record 1 "),
        ("length", "record 1 "),
        ("one more", "13 records.* 12"),
        ("one less", "11 records.* 12"),
        ("rubbish", "record 12 "),
    ],
)
def test_damaged_tfrecord_shards_are_refused(tfrecord, tmp_path, damage, words, part):
    """A flipped bit, and records that dataset_info.json does not count."""
    shutil.copytree(tfrecord, path := tmp_path / "set")
    shard = path / "toy-train.tfrecord-00000-of-00002"
    good, records = bytearray(shard.read_bytes()), tfrecords(shard)
    (place, record), (last, _) = records[1], records[-1]
    frame = 12 + place
    if damage == "label":
        at = frame + record.index(b"label") + 11  # label { int64_list { 1 } }
        assert good[at] == 1
        good[at] ^= 2
    elif damage == "pixels":
        good[frame + record.index(b"IDAT") + 6] ^= 1
    elif damage == "length":
        good[place + 6] ^= 1
    elif damage == "one more":
        good += good[last:]
    elif damage == "one less":
        del good[last:]
    else:
        good += b"rubbish"
    shard.write_bytes(good)
    with pytest.raises(ValueError, match=f"{shard.name}.*{words}"):
        by_name.load("tfds", path=str(path), train_split=part)


def test_a_tfrecord_that_is_damaged_after_the_scan_is_refused(tfrecord, tmp_path):
    """Its place is known by then; another image may stand in for it."""
    shutil.copytree(tfrecord, path := tmp_path / "set")
    data = by_name.load("tfds", path=str(path))
    skipping = by_name.load("tfds", path=str(path), on_corrupt="skip")
    shard = path / "toy-train.tfrecord-00000-of-00002"
    good, records = bytearray(shard.read_bytes()), tfrecords(shard)
    good[records[2][0] + 12 + records[2][1].index(b"IDAT") + 6] ^= 1
    shard.write_bytes(good)
    with pytest.raises(ValueError, match=shard.name):
        data.train.read(2)
    with pytest.warns(UserWarning, match=shard.name):
        assert skipping.train.read(2).shape == data.train.read(1).shape


@pytest.mark.parametrize("inner", ["", "train"])
def test_images_beside_the_folders_of_classes_are_counted(inner, tmp_path, caplog):
    folder(tmp_path / inner, {"a": 3, "b": 2})
    data = by_name.load("image_folder", path=str(tmp_path), test=0.0)
    assert not caplog.records
    folder(tmp_path / inner, {".": 4})
    with caplog.at_level("WARNING"):
        again = by_name.load("image_folder", path=str(tmp_path), test=0.0)
    assert len(again.train.label) == len(data.train.label) == 5
    (said,) = caplog.messages
    assert said.startswith(f"path={str(tmp_path / inner)!r}: 4 images ")
