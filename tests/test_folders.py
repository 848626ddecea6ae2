"""What folders of images mean: splits below classes, domains, masks; lists of names."""

import numpy as np
import pytest
from PIL import Image

from jaxcl.config import own_images
from jaxcl.data.sources import by_name

MARK = b"\xef\xbb\xbf"


def write(root, names):
    """An image for each name, of a grey that is its number."""
    for number, name in enumerate(names):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(np.full((4, 4), number, np.uint8)).save(root / name)


def numbered(*folders, count=3):
    return [f"{folder}/{i}.png" for folder in folders for i in range(count)]


def load(root, **options):
    return by_name.load("image_folder", path=str(root), **options)


def refused(root, *words):
    with pytest.raises(ValueError) as told:
        load(root)
    assert all(word in str(told.value) for word in words), told.value


@pytest.mark.parametrize(
    "folders, words",
    [
        (["images", "masks"], ["masks", "images'"]),
        (["imgs", "mask"], ["mask", "imgs'"]),
        (["images", "annotations/trimaps"], ["annotations", "images'"]),
        (["JPEGImages", "SegmentationClass"], ["SegmentationClass", "JPEGImages'"]),
        (["cat/images", "cat/masks", "dog/images", "dog/masks"], ["cat/masks"]),
        (["train/a", "train/ground_truth"], ["train/ground_truth"]),
        (["bottle/train/good", "bottle/ground_truth/hole"], ["bottle/ground_truth"]),
    ],
)
def test_masks_beside_images_are_no_class(tmp_path, folders, words):
    write(tmp_path, numbered(*folders))
    refused(tmp_path, 'folders="classes"', *words)
    assert len(load(tmp_path, folders="classes", test=0.0).train.label)


@pytest.mark.parametrize(
    "folders", [["mask", "no_mask"], ["label", "barcode"], ["face", "target"]]
)
def test_classes_with_such_a_name_are_read(tmp_path, folders):
    write(tmp_path, numbered(*folders))
    assert {*load(tmp_path).class_names} == {*folders}


@pytest.mark.parametrize("held_out", [["test"], ["val"], ["val", "test"]])
def test_splits_below_classes(tmp_path, held_out):
    splits = ["train", *held_out]
    write(tmp_path, numbered(*(f"{c}/{s}" for c in ("a", "b") for s in splits)))
    data = load(tmp_path)
    assert data.class_names == ("a", "b")
    parts = {"train": data.train, held_out[-1]: data.test}
    parts |= {"val": data.validation} if len(held_out) == 2 else {}
    assert data.validation is None or len(held_out) == 2
    for split, part in parts.items():
        names = [part.reader.name(row) for row in range(len(part.label))]
        assert len(names) == 6 and all(f"/{split}/" in name for name in names)
        for name, label in zip(names, part.label, strict=True):
            assert f"/{'ab'[label]}/" in name


def test_train_alone_below_classes_has_a_part_drawn(tmp_path):
    write(tmp_path, numbered("a/train", "b/train", count=5))
    data = load(tmp_path)
    assert len(data.train.label) == 8 and len(data.test.label) == 2


@pytest.mark.parametrize(
    "folders",
    [
        ["a/train", "a/test", "b"],
        ["a/train", "a/test", "b/test"],
        ["a/train", "a/test", "b/train", "b/more"],
        ["a/training", "a/testing", "b/training", "b/testing"],
    ],
)
def test_splits_below_some_classes_are_refused(tmp_path, folders):
    write(tmp_path, numbered(*folders))
    refused(tmp_path, "a/t", 'folders="classes"')
    assert load(tmp_path, folders="classes").class_names == ("a", "b")


PACS = [f"{d}/{c}" for d in ("photo", "sketch") for c in ("dog", "elephant", "house")]


def test_domains_above_classes(tmp_path):
    write(tmp_path, numbered(*PACS))
    refused(tmp_path, "photo", "dog", 'folders="domains"', 'folders="classes"')
    assert load(tmp_path, folders="classes").class_names == ("photo", "sketch")
    data = load(tmp_path, folders="domains", test=0.34)
    assert data.class_names == ("dog", "elephant", "house")
    assert data.domain_names == ("photo", "sketch")
    for part, count in ((data.train, 12), (data.test, 6)):
        assert len(part.label) == count
        for row, (label, domain) in enumerate(
            zip(part.label, part.domain, strict=True)
        ):
            place = f"{data.domain_names[domain]}/{data.class_names[label]}/"
            assert place in part.reader.name(row)
    (tmp_path / "keep").write_text("house\ndog\n")
    kept = load(tmp_path, folders="domains", classes=str(tmp_path / "keep"))
    assert kept.class_names == ("house", "dog") and set(kept.train.label) == {0, 1}


def test_domains_below_train_are_told_of(tmp_path, caplog):
    write(tmp_path, numbered(*(f"train/{x}" for x in PACS)))
    assert load(tmp_path).class_names == ("photo", "sketch")
    assert 'folders="domains"' in caplog.text and "elephant" in caplog.text


@pytest.mark.parametrize(
    "folders",
    [
        ["a/images", "b/images"],  # Tiny ImageNet's
        ["a/x", "a/y", "b/z"],
        ["a/x", "a/y", "b/x", "b/y", "c"],
    ],
)
def test_folders_inside_classes_that_mean_nothing(tmp_path, folders):
    write(tmp_path, numbered(*folders))
    assert load(tmp_path).class_names[:2] == ("a", "b")


def test_a_domain_without_classes_is_refused(tmp_path):
    write(tmp_path, numbered("photo/dog", "sketch"))
    with pytest.raises(ValueError, match="sketch"):
        load(tmp_path, folders="domains")


def test_defects_that_train_has_not_are_refused(tmp_path):
    """MVTec's, one category."""
    write(tmp_path, numbered("train/good", "test/good", "test/hole"))
    refused(tmp_path, "hole", "train'")
    assert load(tmp_path / "train").class_names == ("good",)


def test_new_images_need_no_meaning_of_folders(tmp_path):
    """Those of an update: every one is read."""
    write(tmp_path, numbered("cam 1/mon", "cam 1/tue", "cam 2/mon", "cam 2/tue"))
    theirs = {"augment": {"mean": (0.5,)}, "data": {}}
    section = own_images.make_section(
        str(tmp_path), parent_config=theirs, all_rows=True
    )
    data = own_images.read_images(section)
    assert len(data.train.label) == 12 and data.test is None


def test_a_mark_before_the_first_name_is_no_part_of_it(tmp_path):
    """In lists of classes and of class names, alone and in joined sets."""
    write(tmp_path / "a", numbered("cat", "dog", "owl"))
    (tmp_path / "keep").write_bytes(MARK + b"cat\r\nowl\r\n")
    (tmp_path / "names").write_bytes(MARK + b"cat\ndog\n")
    (tmp_path / "a" / "l.txt").write_bytes(MARK + b"cat/0.png 0\ndog/0.png 1\n")
    folder = {"name": "image_folder", "path": str(tmp_path / "a")}
    folder |= {"classes": str(tmp_path / "keep"), "test": 0.0}
    lists = {"name": "image_lists", "path": str(tmp_path / "a"), "train": "l.txt"}
    lists |= {"test": None, "class_names": str(tmp_path / "names")}
    assert by_name.load(**folder).class_names == ("cat", "owl")
    assert by_name.load(**lists).class_names == ("cat", "dog")
    both = by_name.load("joined", sets=[folder, lists])
    assert both.class_names == ("cat", "owl", "dog")
    names = [both.class_names[x] for x in both.train.label]
    assert names == ["cat"] * 3 + ["owl"] * 3 + ["cat", "dog"]
