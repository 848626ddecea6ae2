"""What a folder holds: random trees with a known truth, and the kinds one by one.

`JAXCL_TREES=500 pytest tests/test_listing.py -k random` tries more trees.
"""

import os
import re

import numpy as np
import pytest
from PIL import Image

from jaxcl.data.images import decode, listing
from jaxcl.data.sources import by_name
from jaxcl.data.stream import identity

RNG = np.random.default_rng(0)


def write(path, pixels=None, kind="PNG"):
    path.parent.mkdir(parents=True, exist_ok=True)
    pixels = RNG.integers(0, 256, (8, 8, 3), np.uint8) if pixels is None else pixels
    Image.fromarray(pixels).save(path, kind)


def load(root, **options):
    return by_name.load("image_folder", path=str(root), **{"test": 0.0} | options)


def read(data):
    return [data.train.reader.name(row) for row in range(len(data.train.label))]


def test_folders_of_systems_are_left_out(tmp_path):
    names = ["a/@eaDir/0.jpg/THUMB.jpg", "b/#recycle/old.png", "a/.thumbnails/1.png"]
    names += ["b/__MACOSX/b/._0.png", "@eaDir/x.png", "a/LOST+FOUND/1.png"]
    for name in (*names, *(f"{c}/{i}.png" for c in "ab" for i in range(3))):
        write(tmp_path / name)
    data = load(tmp_path)
    assert data.class_names == ("a", "b") and len(data.train.label) == 6


def test_numbers_in_names_are_numbers(tmp_path):
    want = ["1", "2", "10", "B", "a", "week 9", "week 10", "x" + "1" * 5000]
    assert sorted(want[::-1], key=listing.natural_key) == want
    want = ["a07", "a7", "a08", "a9"]
    assert sorted(want[::-1], key=listing.natural_key) == want
    for name in ("10", "9", "11"):
        write(tmp_path / name / "0.png")
    assert load(tmp_path).class_names == ("9", "10", "11")


@pytest.mark.parametrize(
    "names, odd",
    [
        (("cat/1.png", "dog/1.png", "test/1.png"), "test"),
        (("Training/1.png", "cat/1.png"), "Training"),
    ],
)
def test_folders_that_are_no_classes_are_refused_unless_they_are(names, odd, tmp_path):
    for name in names:
        write(tmp_path / name)
    with pytest.raises(ValueError, match=f"{odd}.*config.data.folders"):
        load(tmp_path)
    data = load(tmp_path, folders="classes")
    classes = {name.split("/")[0] for name in names if "/" in name}
    assert {*data.class_names} == classes


def test_without_a_meaning_of_folders_all_images_are_read(tmp_path):
    names = ["1.png", "2026-11-25/2.png", "2026-11-26/x/3.png", "train/4.png"]
    for name in names:
        write(tmp_path / name)
    data = load(tmp_path, folders="none")
    assert [os.path.relpath(x, tmp_path) for x in read(data)] == names
    assert data.train.label.tolist() == [-1] * 4 and data.class_names == ()


JUNK = ("Thumbs.db", ".hidden.png", "@eaDir/0.png", "notes.TXT", "un.known")


def tree(root, rng):
    """Write a tree of class folders; the truth is path -> class, level, whether whole.

    Names, nesting, endings, modes, sizes, links, damaged files, stems that occur twice
    and mixed case are drawn.
    """
    odd = ["Ä ö", "名前", "a b", "x" * 100, "-1", "%41", "[z]", "'q'", "w{1}", "~t"]
    classes = [f"k{n}" for n in rng.permutation(30)[: rng.integers(2, 5)]]
    classes[0] = str(rng.choice(odd))
    kinds = {".png": "PNG", ".jpg": "JPEG", ".bmp": "BMP", ".gif": "GIF"}
    kinds |= {".tiff": "TIFF", ".webp": "WEBP", ".pgm": "PPM"}
    truth, left_out = {}, set()
    for number, name in enumerate(classes):
        for i in range(rng.integers(1, 7)):
            deep = rng.choice(["p", "Q", "p q", "7"], rng.integers(3)).tolist()
            ending = str(rng.choice([*kinds]))
            kind, level = kinds[ending], int(rng.integers(20, 236))
            if rng.random() < 0.3:
                ending = ending.upper()
            stem = str(rng.choice(["same", "Same", f"{i}", f"n {i}", f"{i}.5"]))
            path = root.joinpath(name, *deep, stem + ending)
            if path.exists():
                continue
            path.parent.mkdir(parents=True, exist_ok=True)
            modes = ["L", "RGB"] + ["RGBA", "P", "1", "LA"] * (kind == "PNG")
            mode = "L" if kind == "PPM" else str(rng.choice(modes))
            level = 255 if mode == "1" else level
            size = tuple(int(x) for x in rng.integers(1, 20, 2))
            image = Image.new("RGB", size, (level,) * 3)
            image = image.convert(mode, palette=Image.Palette.ADAPTIVE)
            image.save(path, kind)
            state = "whole"
            if rng.random() < 0.1 and kind in ("PNG", "JPEG"):
                path.write_bytes(path.read_bytes()[:20])
                state = "damaged"
            truth[str(path)] = number, level, state
            if rng.random() < 0.1:
                link = path.with_name(f"link {i}.png")
                link.symlink_to(path.name)
                truth[str(link)] = number, level, state
        for junk in JUNK:
            if rng.random() < 0.3:
                path = root / name / junk
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(b"junk")
                left_out |= {os.path.splitext(junk)[1].lower()} - {".png"}
        if rng.random() < 0.3:
            (root / name / "back").symlink_to("..")  # leads round
    return classes, truth, left_out


@pytest.mark.parametrize("number", range(int(os.environ.get("JAXCL_TREES", 20))))
def test_a_random_tree_is_read_as_it_is_or_refused_by_name(number, tmp_path):
    rng = np.random.default_rng(number)
    classes, truth, left_out = tree(tmp_path / "set", rng)
    empty = {*range(len(classes))} - {number for number, _, _ in truth.values()}
    if empty:
        with pytest.raises(ValueError, match="no images"):
            load(tmp_path / "set")
        return
    data = load(tmp_path / "set", decoder="pillow")
    names = sorted(classes, key=listing.natural_key)
    assert data.class_names == (*names,)
    assert {*read(data)} == {*truth} and len(read(data)) == len(truth)
    for row, name in enumerate(read(data)):
        number, level, state = truth[name]
        assert names[data.train.label[row]] == classes[number]
        if state == "damaged":
            with pytest.raises(decode.Unreadable, match=re.escape(name)):
                data.train.read(row)
        else:
            image = data.train.read(row).astype(int)
            assert image.shape[2] == 3 and np.abs(image - level).max() <= 4, name
    said = " ".join(data.notes)
    assert all(ending in said for ending in left_out)
    known = identity.identify(data)
    assert known.digest() == identity.identify(load(tmp_path / "set")).digest()
