"""Arrays as a source: held by name and bytes, split as other sets are."""

import gc

import numpy as np
import pytest

from jaxcl.data.sources import by_name, in_memory
from jaxcl.data.stream import scenarios

IMAGES = np.random.default_rng(0).integers(0, 256, (20, 4, 4, 3)).astype(np.uint8)
LABELS = np.arange(20) % 4


def read(held, **options):
    section = held.section | options
    return by_name.load(section.pop("name"), **section)


def test_the_source_gives_what_was_handed_over():
    stored = in_memory.store_set("mine", IMAGES, labels=LABELS, domains=["b", "a"] * 10)
    data = read(stored)
    assert data.name == "mine" and data.test is data.validation is None
    assert data.train.images is stored.examples.images
    assert np.shares_memory(data.train.images, IMAGES)  # not copied
    np.testing.assert_array_equal(data.train.label, LABELS)
    assert data.domain_names == ("a", "b") and data.train.domain.tolist()[:2] == [1, 0]
    split = read(stored, test=0.25)
    assert len(split.test.label) == 4 and sorted(split.test.label) == [0, 1, 2, 3]
    assert len(split.train.label) == 16


def test_labels_are_numbered_in_sorted_order_and_may_be_unknown():
    values = ["dog", None, "cat", "dog"]
    stored = in_memory.store_set("mine", IMAGES[:4], labels=values)
    assert stored.class_names == ("cat", "dog")
    assert stored.examples.label.tolist() == [1, -1, 0, 1]
    stored = in_memory.store_set("mine", IMAGES[:4], labels=[7, -1, 3, 7])
    assert stored.class_names == ("3", "7")
    assert stored.examples.label.tolist() == [1, -1, 0, 1]
    for labels in ([7, -2, 3, 7], [7, None, 3, -2]):
        stored = in_memory.store_set("mine", IMAGES[:4], labels=labels)
        assert stored.class_names == ("3", "7")
    names = ["a", "b", "c", "d"]  # by number, though some of them do not occur
    stored = in_memory.store_set(
        "some", IMAGES[:3], labels=[3, 1, 3], class_names=names
    )
    assert stored.class_names == ("b", "d")
    assert stored.examples.label.tolist() == [1, 0, 1]
    # Only labelled rows are held out to judge.
    many = np.where(np.arange(20) < 10, LABELS, -1)
    data = read(in_memory.store_set("mine", IMAGES, labels=many), test=0.5)
    assert (data.test.label >= 0).all()
    assert (data.train.label < 0).sum() == 10
    plain = read(in_memory.store_set("mine", IMAGES), test=0.5)
    assert plain.test is None and len(plain.train.label) == 20


def test_a_set_is_found_by_its_bytes_and_other_ones_are_refused_by_name():
    stored = in_memory.store_set("mine", IMAGES, labels=LABELS)
    section = in_memory.store_set("mine", IMAGES.copy(), labels=LABELS).section
    assert section == stored.section
    changed = IMAGES.copy()
    changed[3, 2, 1, 0] ^= 1
    for other in (
        in_memory.store_set("mine", changed, labels=LABELS),
        in_memory.store_set("mine", IMAGES, labels=(LABELS + 1) % 4),
        in_memory.store_set("mine", IMAGES),
        in_memory.store_set("mine", IMAGES, labels=LABELS, domains=LABELS),
    ):
        assert other.sha256 != stored.sha256
        assert len(read(other).train.label) == 20
    wanted = stored.section
    del stored, other
    gc.collect()
    still = in_memory.store_set("mine", changed, labels=LABELS)
    with pytest.raises(ValueError) as error:
        by_name.load(**wanted)
    told = str(error.value)
    assert "config.data.set='mine'" in told and wanted["sha256"] in told
    assert still.sha256 in told
    del still
    gc.collect()
    with pytest.raises(ValueError, match=r"config\.data\.set='mine'"):
        by_name.load(**wanted)


@pytest.mark.parametrize(
    "images, more, words",
    [
        (IMAGES / 255, {}, "float64.*uint8"),
        (IMAGES.astype(np.int64), {}, r"int64\[20, 4, 4, 3\]"),
        (IMAGES[0, 0], {}, r"uint8\[4, 3\]"),
        (IMAGES.astype(np.uint16) * 16, {}, r"uint16 .* 12 bits .*\(images >> 4\)"),
        (IMAGES, {"labels": LABELS[:5]}, r"labels.*\[5\].* 20"),
        (IMAGES, {"labels": LABELS / 2}, "labels.*float64"),
        (IMAGES, {"labels": LABELS[:, None]}, r"labels.*\[20, 1\]"),
        (IMAGES, {"labels": ["a", 1, None, 2] * 5}, "texts and numbers"),
        (IMAGES, {"domains": [-1] * 20}, "domains"),
    ],
)
def test_what_is_no_set_of_images_is_refused(images, more, words):
    with pytest.raises(ValueError, match=f"^mine: .*{words}"):
        in_memory.store_set("mine", images, **more)


def test_images_of_one_set_are_judged_by_all_of_another():
    train = in_memory.store_set("train", IMAGES, domains=[0, 1] * 10)
    test = in_memory.store_set("test", IMAGES[:8], labels=["x", "y"] * 4)
    data = by_name.load("judged_by", train=train.section, test=test.section)
    assert data.class_names == ("x", "y") and data.domain_names == ("0", "1")
    assert (data.train.label == -1).all() and len(data.train.label) == 20
    np.testing.assert_array_equal(data.test.label, [0, 1] * 4)
    tasks = scenarios.make(data, name="domain").tasks
    assert [len(task.train.rows) for task in tasks] == [10, 10]
    assert [len(task.test) for task in tasks] == [8, 8]  # each on all of them
    with pytest.raises(ValueError, match=r"config\.data\.test"):
        graphs = {"name": "rings_and_trees"}
        by_name.load("judged_by", train=train.section, test=graphs)
