"""Oddities of data from public trackers: read right, or refused by name."""

import io
import os

import numpy as np
import pytest
from PIL import Image

from jaxcl.api import inputs
from jaxcl.data.images import decode
from jaxcl.data.sources import by_name, in_memory

RNG = np.random.default_rng(0)
PIXELS = RNG.integers(0, 256, (9, 8, 8), np.uint8)


def load(path, **options):
    return by_name.load("image_folder", path=str(path), **{"test": 0.0} | options)


def save(path, pixels):
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(pixels).save(path)


@pytest.mark.parametrize("options", [{}, {"resident": True, "size": 8}])
def test_folders_with_equal_names_sizes_and_times_have_their_own_pixels(
    tmp_path, options
):
    """As from a reproducible archive (huggingface/datasets#4381)."""
    for root, level in (("a", 10), ("b", 200)):
        for name in ("x/0.bmp", "y/0.bmp"):
            save(tmp_path / root / name, np.full((8, 8), level, np.uint8))
            os.utime(tmp_path / root / name, (1_700_000_000,) * 2)
    for root, level in (("a", 10), ("b", 200)):
        train = load(tmp_path / root, **options).train
        image = train.read(0)
        assert (image == level).all()


@pytest.mark.parametrize("bits", [8, 12, 16])
def test_sixteen_bit_greys_keep_256_levels_or_are_refused(tmp_path, bits):
    """Of few counts they would be black (nyukat/breast_cancer_classifier#20)."""
    ramp = np.linspace(0, 2**bits - 1, 256).round().astype(np.uint16).reshape(16, 16)
    for name in "ab":
        save(tmp_path / name / "0.png", ramp)
    if bits > 8:  # one image does not tell how many bits the others use
        with pytest.raises(decode.Unreadable, match=r"0\.png.*config\.data\.bits"):
            load(tmp_path).train.read(0)
    told = {"bits": bits} if bits > 8 else {}
    image = load(tmp_path, channels=1, **told).train.read(0)
    np.testing.assert_array_equal(np.unique(image), np.arange(256))


def test_tasks_by_image_are_in_natural_order():
    """Week 2 comes before week 10 (pytorch/vision#714)."""
    weeks = [f"week {n}" for n in range(1, 13)]
    stored = in_memory.store_set(
        "x", np.resize(PIXELS, (12, 8, 8)), domains=weeks[::-1]
    )
    assert list(stored.domain_names) == weeks
    assert stored.examples.domain.tolist() == [*range(12)][::-1]


@pytest.mark.parametrize(
    "arrays, word",
    [
        ({"x": PIXELS.reshape(9, 1, 8, 8)}, "[9, 1, 8, 8], as if"),
        ({"x": PIXELS / 255}, "float64"),
        ({"x": PIXELS > 99}, "bool"),
        ({"x": PIXELS.astype(int)}, "int64"),
        ({"x": np.array([1, None], object)}, "Object"),
        ({"x": PIXELS, "y": np.zeros((9, 1), int)}, "[9, 1]"),
        ({"x": PIXELS, "y": np.zeros((9, 14), int)}, "[9, 14]"),
        ({"x": PIXELS, "y": np.zeros(9)}, "float64"),
    ],
    ids=["channels first", "floats", "bool", "int64", "object", "column", "many"]
    + ["float labels"],
)
def test_arrays_of_other_kinds_are_refused(tmp_path, arrays, word):
    np.savez(path := tmp_path / "set.npz", **arrays)
    with pytest.raises(ValueError) as told:
        by_name.load("npz", path=str(path))
    assert word in str(told.value)


def test_labels_that_are_missing_in_numpys_way_are_refused():
    label = np.array(["a", np.nan, "b"], object)
    with pytest.raises(ValueError, match="labels"):
        inputs.make_input(PIXELS[:3], name="x", labels=label)
    with pytest.raises(ValueError, match="float64"):
        inputs.make_input([np.full((8, 8), np.nan)] * 4, name="x")


def test_endings_in_capitals_and_of_other_kinds_are_read(tmp_path):
    """AVIF, JFIF, PGM (lstein/PhotoMapAI#364); hidden files are not."""
    kinds = {"JPG": "JPEG", "Png": "PNG", "TIFF": "TIFF", "jfif": "JPEG", "pgm": "PPM"}
    for name in "ab":
        (tmp_path / name).mkdir()
        for ending, kind in kinds.items():
            Image.fromarray(PIXELS[0]).save(tmp_path / name / f"0.{ending}", kind)
        (tmp_path / name / "._0.png").write_bytes(b"x")
        (tmp_path / name / "Thumbs.db").write_bytes(b"x")
    data = load(tmp_path)
    assert len(data.train.label) == 2 * len(kinds)
    assert any("Thumbs" in note or ".db" in note for note in data.notes)


def test_files_that_are_no_image_are_named(tmp_path):
    good = io.BytesIO()
    Image.fromarray(PIXELS[0]).save(good, "JPEG")
    for data in (good.getvalue()[:-100], b"<html>404</html>", b""):
        save(tmp_path / "b" / "1.jpg", PIXELS[1])
        (tmp_path / "a").mkdir(exist_ok=True)
        (tmp_path / "a" / "0.jpg").write_bytes(data)
        with pytest.raises(decode.Unreadable, match=r"0\.jpg"):
            load(tmp_path).train.read(0)


def test_one_image_of_a_class_stays_a_train_row(tmp_path):
    for name in ("a/0.png", "a/1.png", "b/0.png", "b/1.png", "c/0.png"):
        save(tmp_path / name, PIXELS[0])
    data = load(tmp_path, test=0.2)
    assert 2 in data.train.label and 2 not in data.test.label
