"""What somebody would try to give to `jaxcl.fit`: taken, or refused with what to do."""

import io
import sys

import numpy as np
import pytest
from PIL import Image

import jaxcl
from jaxcl.api import inputs
from jaxcl.config import own_images
from jaxcl.data.sources import by_name
from jaxcl.run import progress_bar

RNG = np.random.default_rng(0)
PIXELS = RNG.integers(0, 256, (12, 8, 8, 3), np.uint8)
LABELS = np.arange(12) % 3


class PairSet:
    """Like a Dataset of torchvision: no Sequence, and rows by their number."""

    def __len__(self):
        return len(PIXELS)

    def __getitem__(self, row):
        if row >= len(PIXELS):
            raise IndexError
        return Image.fromarray(PIXELS[row]), int(LABELS[row])


def tensors():
    torch = pytest.importorskip("torch")
    return torch.tensor(PIXELS), torch.tensor(LABELS)


def read(images, **more):
    (held,) = inputs.make_input(images, name="images", **more).stored_sets
    return held.examples, held.class_names


@pytest.mark.parametrize(
    "make",
    [
        lambda: [
            (image, int(label)) for image, label in zip(PIXELS, LABELS, strict=True)
        ],
        lambda: [[Image.fromarray(x), y] for x, y in zip(PIXELS, LABELS, strict=True)],
        lambda: [*zip(*tensors(), strict=True)],
        PairSet,
        lambda: (PIXELS, LABELS),
        lambda: ([*PIXELS], LABELS.tolist()),
        tensors,
        lambda: {"image": PIXELS, "label": LABELS},
        lambda: {"pixel_values": [*PIXELS], "labels": LABELS.tolist()},
        lambda: dict(zip(("x", "y"), tensors(), strict=True)),
    ],
    ids=["pairs", "lists of PIL", "tensors", "Dataset", "two arrays", "two lists"]
    + ["two tensors", "dict", "dict of lists", "dict of tensors"],
)
def test_images_with_their_labels(make):
    examples, names = read(make())
    np.testing.assert_array_equal(examples.images, PIXELS)
    np.testing.assert_array_equal(examples.label, LABELS)
    assert names == ("0", "1", "2")
    with pytest.raises(ValueError, match="labels"):
        read(make(), labels=LABELS)


def test_texts_and_unknown_labels_in_pairs():
    label = ["cat", "dog", None] * 4
    examples, names = read([*zip(PIXELS, label, strict=True)])
    assert names == ("cat", "dog") and examples.label.tolist() == [0, 1, -1] * 4


@pytest.mark.parametrize(
    "make",
    [
        lambda: {"image": PIXELS},
        lambda: tensors()[0],
        lambda: [*tensors()[0]],
        lambda: [PIXELS[0], *PIXELS[1:]],
    ],
    ids=["dict", "tensor", "list of tensors", "list"],
)
def test_images_alone(make):
    examples, names = read(make(), labels=LABELS)
    np.testing.assert_array_equal(examples.images, PIXELS)
    assert examples.label.tolist() == LABELS.tolist() and len(names) == 3


def test_two_images_are_no_pair():
    examples, _ = read((PIXELS[0], PIXELS[1]))
    assert examples.images.shape == (2, 8, 8, 3) and (examples.label < 0).all()


def test_paths_of_files(tmp_path):
    paths = [tmp_path / f"{row}.png" for row in range(len(PIXELS))]
    for path, image in zip(paths, PIXELS, strict=True):
        Image.fromarray(image).save(path)
    for given in (paths, [*map(str, paths)]):
        examples, _ = read(given, labels=LABELS)
        np.testing.assert_array_equal(examples.images, PIXELS)
    paths[3].unlink()
    with pytest.raises((ValueError, OSError), match="3.png"):
        read(paths)
    paths[3].write_bytes(b"<html>")
    with pytest.raises(ValueError, match="3.png"):
        read(paths)


def test_an_npy_file(tmp_path):
    np.save(path := str(tmp_path / "x.npy"), PIXELS)
    for give in (own_images.make_section, read):
        with pytest.raises(ValueError, match=r"x\.npy.*np\.load.*\.npz"):
            give(path)


def floats(kind):
    torch = pytest.importorskip("torch")
    x = torch.rand(6, 8, 8, 3)
    return x.requires_grad_() if kind == "grad" else x.to(torch.bfloat16)


@pytest.mark.parametrize(
    "make, words",
    [
        (lambda: floats("grad"), ["float32", "uint8"]),
        (lambda: [*floats("grad")], ["float32", "uint8"]),
        (lambda: floats("bfloat16"), ["uint8", "round()"]),
        (lambda: [(PIXELS[0], 1), PIXELS[1]], ["entry 1", "pair"]),
        (lambda: {"images": PIXELS, "weights": LABELS}, ["weights", "name"]),
        (lambda: {"path": "x"}, ["path", "name"]),
        (lambda: None, ["NoneType"]),
    ],
    ids=["grad", "list", "bfloat16", "some pairs", "other keys", "no name", "None"],
)
def test_others_are_refused_with_what_to_give(make, words, tmp_path):
    with pytest.raises(ValueError) as told:
        jaxcl.fit(make(), encoder="conv_net", out=tmp_path / "run")
    assert all(word in str(told.value) for word in words), told.value
    assert "did you mean" not in str(told.value)
    assert not (tmp_path / "run").exists()


def test_a_name_that_is_missing_is_near_nothing():
    with pytest.raises(ValueError, match="None") as told:
        by_name.load(None)
    assert "did you mean" not in str(told.value)


@pytest.mark.parametrize("terminal", [False, True])
def test_a_count_in_a_file_is_lines(monkeypatch, terminal):
    stream = io.StringIO()
    stream.isatty = lambda: terminal
    monkeypatch.setattr(sys, "stderr", stream)
    with progress_bar.count_images(30, 10, every=0.0) as bar:
        for _ in range(2):
            bar.update(10)
    text = stream.getvalue()
    assert ("\r" in text) == terminal and "30/30" in text
    assert terminal or text.splitlines() == ["20/30 images", "30/30 images"]
