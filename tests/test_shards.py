"""Tar shards: what is written comes back, foreign ones are read, damage is named."""

import io
import json
import shutil
import tarfile

import numpy as np
import pytest
from PIL import Image

from jaxcl import cli
from jaxcl.data import stream
from jaxcl.data.images import decode
from jaxcl.data.sources import by_name
from jaxcl.data.sources import shards as shard_files


def pixels(number):
    rng = np.random.default_rng(number)
    return rng.integers(0, 256, (9 + number % 3, 8, 3), np.uint8)


def encoded(number, kind="png"):
    file = io.BytesIO()
    Image.fromarray(pixels(number)).save(file, kind)
    return file.getvalue()


def rows_of(examples):
    return [examples.read(row) for row in range(len(examples.label))]


def check_equal(one, two):
    np.testing.assert_array_equal(one.label, two.label)
    np.testing.assert_array_equal(one.domain, two.domain)
    for a, b in zip(rows_of(one), rows_of(two), strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    root = tmp_path_factory.mktemp("set") / "pets"
    for number in range(18):
        split = ("train", "test", "val")[number % 9 - 6 if number % 9 > 6 else 0]
        path = root / split / ("cat", "dog")[number % 2] / f"{number}.x"
        kind = ("png", "jpeg")[number // 2 % 2]
        path.parent.mkdir(parents=True, exist_ok=True)
        path.with_suffix(f".{kind}").write_bytes(encoded(number, kind))
    return root


@pytest.fixture(scope="module")
def shards(folder, tmp_path_factory):
    out = tmp_path_factory.mktemp("shards") / "pets"
    assert cli.main(["convert", str(folder), str(out), "--shards"]) == 0
    return out


def test_a_folder_comes_back_with_its_bytes_splits_and_names(folder, shards):
    here = by_name.load("image_folder", path=str(folder))
    there = by_name.load(**by_name.section_of(str(shards)))
    assert there.name == "pets" and there.class_names == ("cat", "dog")
    assert {*stream.splits_of(there)} == {"train", "validation", "test"}
    for split, examples in stream.splits_of(here).items():
        other = stream.splits_of(there)[split]
        check_equal(examples, other)
        for row in range(len(examples.label)):
            assert examples.reader.raw(row) == other.reader.raw(row)


def test_shards_are_full_and_equal_sets_have_equal_bytes(folder, tmp_path):
    data = by_name.load("image_folder", path=str(folder))
    for name in ("a", "b"):
        shard_files.write_shards(data, str(tmp_path / name), shard_bytes=600)
    files = sorted(path.name for path in (tmp_path / "a").iterdir())
    assert len(files) > 5
    for file in files:
        one, two = ((tmp_path / name / file).read_bytes() for name in "ab")
        assert one == two or file == shard_files.INDEX  # a .npz has the time
    check_equal(by_name.load("shards", path=str(tmp_path / "b")).train, data.train)
    # A scan of the shards finds what the index says, in another order.
    index = shard_files.scan_shards(str(tmp_path / "a"))
    kept = shard_files._read_index(str(tmp_path / "a" / shard_files.INDEX))

    def told(index):
        others = [getattr(index, x) for x in shard_files._COLUMNS if x != "shard"]
        files = index.shards[index.shard], index.sizes[index.shard]
        return sorted(zip(*(x.tolist() for x in (*files, *others)), strict=True))

    assert told(index) == told(kept)
    sizes = np.bincount(kept.shard, kept.length)
    last = [kept.length[kept.shard == n][-1] for n in range(len(sizes))]
    assert (sizes - last < 600).all()
    with tarfile.open(tmp_path / "a" / files[-1]) as tar:
        members = [name.partition(".")[2] for name in tar.getnames()]
    assert members[1::2] == ["cls"] * (len(members) // 2)


def test_pixels_and_domains_come_back(tmp_path):
    images = np.stack([pixels(3 * number) for number in range(8)])
    np.savez(
        tmp_path / "set.npz",
        x=images,
        y=np.arange(8) % 2,
        is_test=np.arange(8) > 5,
        domain=np.arange(8) // 4,
        domain_names=np.array(["day", "night"]),
    )
    out = str(tmp_path / "out")
    cli.main(["convert", str(tmp_path / "set.npz"), out, "--shards"])
    here = by_name.load("npz", path=str(tmp_path / "set.npz"))
    there = by_name.load("shards", path=out)
    assert there.domain_names == ("day", "night")
    check_equal(here.train, there.train)
    check_equal(here.test, there.test)


def write_tar(path, members):
    path.parent.mkdir(exist_ok=True)
    with tarfile.open(path, "w") as tar:
        for name, data in members.items():
            member = tarfile.TarInfo(name)
            member.size = len(data)
            tar.addfile(member, io.BytesIO(data))


def web_members(numbers, labels=True):
    members = {}
    for number in numbers:
        key = f"{'ab'[number % 2]}/{number // 2}"  # two folders with the same names
        if labels:
            members[f"{key}.cls"] = f"{number % 3}\n".encode()
        members[f"{key}.seg.json"] = json.dumps({"number": number}).encode()
        members[f"{key}.jpg"] = encoded(number)
    return members


def test_shards_of_others_are_read_and_indexed_once(tmp_path, monkeypatch):
    write_tar(tmp_path / "web" / "train-0.tar", web_members(range(4)))
    write_tar(tmp_path / "web" / "train-1.tar", web_members(range(4, 7)))
    write_tar(tmp_path / "web" / "val-0.tar", web_members(range(7, 9)))
    names = tmp_path / "names.txt"
    names.write_text("a\nb\nc\n")
    options = {"path": str(tmp_path / "web"), "class_names": str(names)}
    for _ in range(2):
        data = by_name.load("shards", **options)
        assert data.class_names == ("a", "b", "c") and data.validation is None
        assert data.train.label.tolist() == [0, 1, 2, 0, 1, 2, 0]
        assert data.test.label.tolist() == [1, 2]
        for row in range(7):
            np.testing.assert_array_equal(data.train.read(row), pixels(row))
        assert "9 members .seg.json" in data.notes[0]
        monkeypatch.setattr(shard_files, "scan_shards", None)  # not a second time


def test_without_labels_there_is_no_test_split(tmp_path):
    write_tar(tmp_path / "web" / "0.tar", web_members(range(4), labels=False))
    data = by_name.load(**by_name.section_of(str(tmp_path / "web")))
    assert data.train.label.tolist() == [-1] * 4
    assert data.class_names == () and data.test is None


def test_a_changed_byte_is_named_or_another_image_takes_its_place(shards, tmp_path):
    here = tmp_path / "pets"
    shutil.copytree(shards, here)
    path = here / "train-000000.tar"
    data = by_name.load("shards", path=str(here), size=8)
    offset = shard_files._read_index(str(here / shard_files.INDEX)).offset[2]
    whole = bytearray(path.read_bytes())
    whole[offset + 40] ^= 1
    path.write_bytes(whole)
    with pytest.raises(decode.Unreadable, match=r"train-000000\.tar \(image 2\)"):
        by_name.load("shards", path=str(here), size=8).train.read(2)
    kept = by_name.load("shards", path=str(here), size=8, on_corrupt="skip")
    with pytest.warns(UserWarning, match="image 2"):
        image = kept.train.read(2)
    alike = np.flatnonzero(data.train.label == data.train.label[2])
    other = alike[list(alike).index(2) + 1]
    np.testing.assert_array_equal(image, kept.train.read(int(other)))


def wrong(folder, what):
    """Write a wrong set; return what the message names."""
    members = web_members(range(3))
    if what == "compressed":
        write_tar(folder / "train.tar.gz", members)
        return "train.tar.gz"
    if what == "empty":
        folder.mkdir()
        return "no .tar"
    if what == "no images":
        write_tar(folder / "train.tar", {"0.cls": b"1"})
        return "train.tar"
    if what == "two images":
        write_tar(folder / "train.tar", members | {"a/1.png": encoded(1)})
        return "a/1"
    if what == "label":
        write_tar(folder / "train.tar", members | {"a/1.cls": b"cat"})
        return "a/1.cls"
    if what == "split":
        write_tar(folder / "train.tar", members)
        write_tar(folder / "more.tar", members)
        return "more.tar"
    if what == "only a test split":
        write_tar(folder / "test.tar", members)
        return "test.tar"
    write_tar(folder / "train.tar", members)
    if what == "damaged":
        path = folder / "train.tar"
        path.write_bytes(path.read_bytes()[:2000])
        return "train.tar"
    by_name.load("shards", path=str(folder))
    if what == "longer":
        with open(folder / "train.tar", "ab") as file:
            file.write(b"0" * 512)
        return "train.tar"
    index = shard_files._read_index(str(folder / shard_files.INDEX))
    changes = {
        "outside": {"shards": np.array([b"../train.tar"])},
        "columns": {"label": index.label[:1]},
        "shard": {"shard": index.shard + 1},
    }
    shard_files.write_index(folder, index._replace(**changes[what]))
    return "../train.tar" if what == "outside" else shard_files.INDEX


@pytest.mark.parametrize(
    "what",
    [
        *("compressed", "empty", "no images", "two images", "label", "split"),
        *("only a test split", "damaged", "longer", "outside", "columns", "shard"),
    ],
)
def test_wrong_shards_are_refused_by_name(what, tmp_path):
    named = wrong(tmp_path / "web", what)
    with pytest.raises(ValueError, match="web") as error:
        by_name.load("shards", path=str(tmp_path / "web"))
    assert named in str(error.value)


def test_channels_that_no_image_file_keeps_are_refused(tmp_path):
    images = np.zeros((6, 8, 8, 4), np.uint8)
    np.savez(tmp_path / "set.npz", x=images, y=np.arange(6) % 2)
    data = by_name.load("npz", path=str(tmp_path / "set.npz"))
    with pytest.raises(ValueError, match="set.*4 channels"):
        shard_files.write_shards(data, str(tmp_path / "out"))
    assert not (tmp_path / "out").exists()


def test_a_folder_with_files_is_not_written_over(folder, shards):
    data = by_name.load("image_folder", path=str(folder))
    with pytest.raises(ValueError, match="pets"):
        shard_files.write_shards(data, str(shards))
