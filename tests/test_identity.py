"""Whether data are still those that a run, an update or a cache read."""

import os
import re

import numpy as np
import pytest
from PIL import Image

from helpers import small_sets
from jaxcl.data.sources import by_name
from jaxcl.data.stream import identity


def images(root, names, value=10, time=1_700_000_000):
    for name in names:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(np.full((8, 8, 3), value, np.uint8)).save(root / name)
        os.utime(root / name, (time, time))


def known(root, **options):
    return identity.identify(by_name.load("image_folder", path=str(root), **options))


NAMES = [f"{c}/{i}.bmp" for c in "ab" for i in range(4)]


@pytest.mark.parametrize("most", [10**6, 1])
@pytest.mark.parametrize("resident", [False, True])
def test_a_change_of_data_is_counted_and_named(tmp_path, monkeypatch, most, resident):
    """By all bytes, and where there are many files by their sizes and times."""
    monkeypatch.setattr(identity, "ROWS", most)
    images(tmp_path / "set", NAMES)
    options = {"test": 0.0, "size": 8, "resident": resident}
    before = known(tmp_path / "set", **options)
    (tmp_path / "run").mkdir()
    identity.check_data(tmp_path / "run", before)  # no run has begun
    identity.write_identity(tmp_path / "run", before)
    identity.check_data(tmp_path / "run", known(tmp_path / "set", **options))

    images(tmp_path / "set", ["a/9.bmp"])  # added
    (tmp_path / "set/a/0.bmp").unlink()
    images(tmp_path / "set", ["a/1.bmp"], 20, 1_800_000_000)  # other bytes
    os.rename(tmp_path / "set/b/3.bmp", tmp_path / "set/a/7.bmp")  # another class
    with pytest.raises(identity.Changed, match=str(tmp_path / "run")) as error:
        identity.check_data(tmp_path / "run", known(tmp_path / "set", **options))
    text = str(error.value).replace(str(tmp_path / "set"), "")
    identity.write_identity(tmp_path / "run", known(tmp_path / "set", **options))
    with pytest.raises(identity.Changed):  # the first record stays
        identity.check_data(tmp_path / "run", known(tmp_path / "set", **options))
    pairs = re.findall(r"([0-9]+ \([^)]*\)) ([a-z ]+)", text)
    assert {what: count for count, what in pairs} == {
        "added": "2 (/a/7.bmp, /a/9.bmp)",
        "removed": "2 (/a/0.bmp, /b/3.bmp)",
        "changed": "1 (/a/1.bmp)",
    }
    os.unlink(tmp_path / "run" / identity.FILE)  # as the message says
    identity.check_data(tmp_path / "run", known(tmp_path / "set", **options))


def test_times_matter_only_where_bytes_are_not_read(tmp_path, monkeypatch):
    images(tmp_path, NAMES)
    before = known(tmp_path)
    images(tmp_path, NAMES, time=1_800_000_000)
    assert known(tmp_path).digest() == before.digest()
    monkeypatch.setattr(identity, "ROWS", 1)
    many = known(tmp_path)
    assert many.digest() != before.digest()
    images(tmp_path, NAMES[:1], time=1_900_000_000)
    assert "1 (" in identity.describe_changes(many, known(tmp_path))
    data = by_name.load("image_folder", path=str(tmp_path))
    memory = small_sets.examples([0, 1])
    data = data._replace(train=memory, test=data.train)
    one = identity.without_times(data, identity.identify(data))
    images(tmp_path, NAMES, time=2_000_000_000)
    two = identity.without_times(data, identity.identify(data))
    assert one.digest() == two.digest() and one.marks.all()


def test_corrected_labels_are_a_change(tmp_path):
    train = small_sets.examples([0, 1, 0, 1])
    before = identity.identify(small_sets.dataset(train))
    train.label[2] = 1
    after = identity.identify(small_sets.dataset(train))
    assert "1 (row 2 of train) changed" in identity.describe_changes(before, after)
    (tmp_path / "list.txt").write_text("a.png 0\nb.png 1\n")
    images(tmp_path, ["a.png", "b.png"])
    options = {"path": str(tmp_path), "train": "list.txt", "test": None}
    before = identity.identify(by_name.load("image_lists", **options))
    (tmp_path / "list.txt").write_text("a.png 1\nb.png 1\n")
    after = identity.identify(by_name.load("image_lists", **options))
    assert "a.png" in identity.describe_changes(before, after)


def test_a_damaged_record_of_the_data_is_named(tmp_path):
    images(tmp_path / "set", NAMES)
    identity.write_identity(tmp_path, known(tmp_path / "set"))
    (tmp_path / identity.FILE).write_bytes(b"PK damaged")
    with pytest.raises(ValueError, match=identity.FILE):
        identity.check_data(tmp_path, known(tmp_path / "set"))


def test_rows_that_cannot_be_read_repeat_nothing():
    def known(train, test):
        marks = np.array([*train, *test], np.uint64)
        zeros = np.zeros(len(marks), np.int32)
        split = np.repeat(np.uint8([0, 2]), [len(train), len(test)])
        names = np.array([b"%d" % row for row in range(len(marks))])
        rows = (names, marks, split, zeros, zeros, np.array([b"a"]), np.array(True))
        return identity.Identity(*rows)

    assert identity.describe_duplicates(known([0, 0, 1], [0, 2]), "x") == ""
    told = identity.describe_duplicates(known([0, 0, 5, 1, 5, 5], [0, 5, 1, 1]), "x")
    assert "2 rows of train" in told and "1 rows of test repeat" in told
    assert "3 rows of test are" in told
    assert "such as 3 and 8" in told  # of mark 1, the first
    assert identity.common(known([], [0, 5, 6]), known([0, 6, 7], [])) == ["2"]
    other = np.array(False)
    assert not identity.common(known([], [6])._replace(by_bytes=other), known([6], []))
    assert not identity.common(known([], [6]), known([6], [])._replace(by_bytes=other))


def test_a_change_is_of_bytes_class_domain_or_split():
    label, classes = np.int32([0, 1]), np.array([b"a", b"b"])
    columns = np.array([b"x", b"y"]), np.uint64([5, 6]), np.uint8([0, 0]), label
    before = identity.Identity(*columns, label, classes, np.array(True))
    changes = {"marks": np.uint64([5, 7]), "label": np.int32([0, 0])}
    changes |= {"domain": np.int32([0, 0]), "split": np.uint8([0, 2])}
    for field, values in changes.items():
        told = identity.describe_changes(before, before._replace(**{field: values}))
        assert told == "1 (y) changed"
    other = before._replace(names=np.array([b"xy", b""]))
    assert other.digest() != before.digest()
    # Classes are told apart by their names; sizes and times are not compared to bytes.
    told = before._replace(label=label[::-1], class_names=classes[::-1])
    assert "changed" not in identity.describe_changes(before, told)
    told = before._replace(marks=np.uint64([7, 8]), by_bytes=np.array(False))
    assert "changed" not in identity.describe_changes(before, told)


@pytest.mark.parametrize("most", [5, 4])
def test_the_files_of_all_splits_are_counted_together(tmp_path, monkeypatch, most):
    monkeypatch.setattr(identity, "ROWS", most)
    images(tmp_path / "set", [f"train/a/{i}.bmp" for i in range(3)])
    images(tmp_path / "set", [f"test/a/{i}.bmp" for i in range(2)])
    assert bool(known(tmp_path / "set").by_bytes) == (most == 5)
