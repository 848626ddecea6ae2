"""Decoded images on disk: the same pixels, whole or not there, made once."""

import errno
import fcntl
import os
import pathlib
import pickle
import shutil
import signal
import subprocess
import sys
import threading
import time
import types
from typing import Any, NamedTuple

import numpy as np
import pytest
from PIL import Image

from jaxcl.data import cache, prefetch, sources, stream
from jaxcl.data import files as files_lib

HERE = pathlib.Path(__file__).parent
DECODED = []  # rows, by Made; append() is safe among threads


class Made(NamedTuple):
    """Images that are a function of the row; every fifth from 3 on is damaged."""

    n: int = 12
    decoder: str = "pillow"
    channels: int = 3
    damage: bool = True
    hook: Any = None
    key: str = ""

    def __call__(self, row):
        DECODED.append(row)
        if self.hook is not None:
            self.hook(row)
        if self.damage and row % 5 == 3:
            raise files_lib.Unreadable(f"{self.name(row)} cannot be decoded: made so")
        rng = np.random.default_rng(row)
        return rng.integers(0, 256, (6 + row % 4, 9 - row % 3, self.channels), np.uint8)

    def name(self, row):
        return f"made/{row}.jpg"

    @property
    def decoding(self):
        return files_lib.Decoding(self.decoder, self.channels)

    def holders(self):
        rows = np.arange(self.n)
        return [f"/made-{self.damage}"], np.zeros_like(rows), rows


@pytest.fixture(autouse=True)
def nothing_decoded():
    DECODED.clear()


def folders(directory):
    """The caches of a directory, with what lies about beside them."""
    names = sorted(os.listdir(directory)) if os.path.exists(directory) else []
    return [name for name in names if not name.endswith(".lock")]


def check(read, made):
    for row in range(read.n):
        if read.damage and row % 5 == 3:
            with pytest.raises(files_lib.Unreadable, match=f"made/{row}.jpg"):
                made(row)
        else:
            np.testing.assert_array_equal(made(row), read(row))


# --- Pixels


@pytest.fixture(scope="module")
def images(tmp_path_factory):
    """Train and test folders of JPEGs of many sizes."""
    root, rng = tmp_path_factory.mktemp("images"), np.random.default_rng(0)
    for split, count in (("train", 6), ("test", 2)):
        for label in "ab":
            folder = root / split / label
            folder.mkdir(parents=True)
            for i in range(count):
                pixels = rng.integers(0, 256, (30 + 7 * i, 50 - 5 * i, 3), np.uint8)
                Image.fromarray(pixels).save(folder / f"{i}.jpg", quality=90)
    return root


def load(path, **options):
    return sources.load("image_folder", path=str(path), **options)


def crops(data):
    for part in (data.train, data.validation, data.test):
        yield from prefetch.batches(
            stream.Source(part, np.arange(len(part.label))),
            seed=1,
            task=0,
            epochs=2,
            batch_size=2,
            crop=prefetch.Crop(16),
            views=2,
            resident=False,
        )


def no_decoding(monkeypatch):
    def refuse(*args, **options):
        raise AssertionError("decoded")

    monkeypatch.setattr(files_lib.Decoding, "__call__", refuse)


@pytest.mark.parametrize("decoder", ["pillow", "cv2"])
def test_crops_are_those_of_fresh_images(images, tmp_path, monkeypatch, decoder):
    if decoder == "cv2":
        pytest.importorskip("cv2")
    options = {"decoder": decoder, "validation": 0.4, "seed": 2}
    fresh, there = load(images, **options), {"cache": str(tmp_path / "new" / "cache")}
    want = list(crops(fresh))
    load(images, **options, **there)
    assert len(folders(there["cache"])) == 2  # train with validation, and test
    no_decoding(monkeypatch)
    data = load(images, **options, **there)
    got = list(crops(data))
    assert len(got) == len(want) == 2 * (8 + 4 + 4) // 2
    for ours, theirs in zip(got, want, strict=True):
        for key in theirs:
            np.testing.assert_array_equal(ours[key], theirs[key])
    for part, same in ((data.train, fresh.train), (data.test, fresh.test)):
        assert [*map(part.load.name, range(4))] == [*map(same.load.name, range(4))]
    # Another draw of the splits needs no other cache.
    again = load(images, decoder=decoder, validation=0.2, **there)
    assert len(again.train.label) == 10 and again.train.load(9).dtype == np.uint8


def test_shorter_sides_are_shrunk_never_enlarged(images, tmp_path):
    options = {"decoder": "pillow", "cache": str(tmp_path), "cache_size": 32}
    data, plain = load(images, **options), load(images, decoder="pillow")
    for row in range(6):
        image = Image.fromarray(plain.train.load(row))
        short = min(image.size)
        if short > 32:
            size = [int(32 * side / short) for side in image.size]
            image = image.resize(size, Image.Resampling.BICUBIC)
        np.testing.assert_array_equal(data.train.load(row), np.asarray(image))
    shapes = [data.train.load(row).shape[:2] for row in range(6)]
    assert shapes == [(30, 50), (32, 38), (35, 32), (46, 32), (58, 30), (65, 25)]
    whole = load(images, **options, size=20, resident=True)
    assert whole.train.images.shape == (12, 20, 20, 3)


def test_one_cache_for_every_kind_of_pixels(images, tmp_path):
    root, seen = tmp_path / "images", set()
    shutil.copytree(images / "train", root)  # keeps times, as it should be
    file = root / "a" / "2.jpg"

    def fresh(**options):
        options |= {"decoder": "pillow", "cache": str(tmp_path / "c")}
        read = load(root, test=0.0, **options)
        now = set(folders(tmp_path / "c"))
        new = len(now - seen)
        seen.update(now)
        return new, read.train.load(2)

    assert fresh()[0] == 1 and fresh()[0] == 0
    assert fresh(cache_size=20)[0] == 1 and fresh(cache_size=21)[0] == 1
    new, grey = fresh(channels=1)
    assert new == 1 and grey.shape[2] == 1
    was = os.stat(file)
    Image.new("RGB", (8, 8)).save(file)
    new, image = fresh()
    assert new == 1 and image.shape == (8, 8, 3)
    # The same length, a nanosecond later.
    os.utime(file, ns=(was.st_atime_ns, was.st_mtime_ns))
    assert fresh()[0] == 1
    os.utime(file, ns=(was.st_atime_ns, was.st_mtime_ns + 1))
    assert fresh()[0] == 1
    file.rename(root / "a" / "2b.jpg")
    assert fresh()[0] == 1
    root.rename(tmp_path / "moved")
    root = tmp_path / "moved"
    assert fresh()[0] == 1  # it might be another set that looks like it
    (root / "b" / "5.jpg").unlink()
    assert fresh()[0] == 1
    assert {len(name) for name in seen} == {20}


# --- Images that cannot be decoded


def test_corrupt_images_behave_as_without_a_cache(images, tmp_path):
    root = tmp_path / "images"
    shutil.copytree(images, root)
    whole = (root / "train/a/2.jpg").read_bytes()
    (root / "train/a/2.jpg").write_bytes(whole[:90])
    (root / "train/a/5.jpg").write_bytes(b"")
    options = {"decoder": "pillow", "cache": str(tmp_path / "cache")}
    plain, data = load(root, decoder="pillow"), load(root, **options)
    for row in (2, 5):
        with pytest.raises(files_lib.Unreadable) as theirs:
            plain.train.load(row)
        with pytest.raises(files_lib.Unreadable) as ours:
            data.train.load(row)
        assert str(ours.value) == str(theirs.value)
    skip = load(root, **options, on_corrupt="skip")
    assert len(folders(tmp_path / "cache")) == 2
    with pytest.warns(UserWarning, match=r"a/2.jpg cannot.*used .*a/3.jpg in its"):
        np.testing.assert_array_equal(skip.train.load(2), plain.train.load(3))
    with pytest.warns(UserWarning, match=r"a/5.jpg cannot.*used .*a/0.jpg in its"):
        np.testing.assert_array_equal(skip.train.load(5), plain.train.load(0))
    # A file that is repaired is another file.
    (root / "train/a/2.jpg").write_bytes(whole)
    assert load(root, **options).train.load(2).shape == (44, 40, 3)
    assert len(folders(tmp_path / "cache")) == 3


def test_what_failed_once_is_tried_again(tmp_path, capsys):
    """A network drive that was away must not leave its mark."""
    away = [True]

    def hook(row):
        if row == 4 and away[0]:
            raise files_lib.Unreadable("made/4.jpg cannot be read: away")

    made = cache.cached(Made(hook=hook), str(tmp_path))
    assert "3 images" in capsys.readouterr().err
    with pytest.raises(files_lib.Unreadable, match="4.jpg"):
        made(4)
    away[0] = False
    np.testing.assert_array_equal(made(4), Made()(4))
    # What comes from the file is shrunk as what comes from the cache.
    want = cache.cached(Made(), str(tmp_path), size=4)
    away[0] = True
    late = cache.cached(Made(n=13, hook=hook), str(tmp_path), size=4)
    away[0] = False
    np.testing.assert_array_equal(late(4), want(4))
    assert want(4).shape == (4, 5, 3)


# --- Whole or not there


def slow_build(directory):
    """Run in another process: builds until 5 rows are written, then stands still."""
    read = Made()

    def hook(row):
        # The estimate reads each row once.
        if DECODED.count(row) == 2 and row == 5:
            print("halfway", flush=True)
            time.sleep(60)

    cache.cached(read._replace(hook=hook), directory)


def test_a_killed_build_leaves_nothing_that_looks_whole(tmp_path):
    code = f"import test_cache; test_cache.slow_build({str(tmp_path)!r})"
    paths = os.pathsep.join([str(HERE.parent), str(HERE)])
    child = subprocess.Popen(
        [sys.executable, "-c", code],
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONPATH": paths},
    )
    try:
        assert child.stdout.readline() == "halfway\n"
        (left,) = folders(tmp_path)
        assert left.endswith(".part")
        # Another process waits for it; being killed opens the lock.
        threading.Timer(0.5, child.send_signal, [signal.SIGKILL]).start()
        start = time.monotonic()
        made = cache.cached(Made(), str(tmp_path))
        assert time.monotonic() - start > 0.4
    finally:
        child.kill()
        child.wait()
        child.stdout.close()
    check(Made(), made)
    assert folders(tmp_path) == [os.path.basename(made.folder)]


@pytest.mark.parametrize("locks", [True, False, None])
def test_of_several_processes_one_counts(tmp_path, monkeypatch, locks):
    if locks is None:
        monkeypatch.setitem(sys.modules, "fcntl", None)
    elif not locks:

        def none(*args):
            raise OSError(errno.ENOLCK, "no locks available")

        monkeypatch.setattr(fcntl, "flock", none)
    meet = threading.Barrier(3)
    found = []

    def hook(row):
        if row == 0 and not locks and DECODED.count(0) <= 6:
            meet.wait(20)  # all three have found nothing, and are building

    def one():
        if locks:
            meet.wait(20)
        found.append(cache.cached(Made(hook=hook), str(tmp_path)))

    threads = [threading.Thread(target=one) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert len(found) == 3 and len({made.folder for made in found}) == 1
    assert DECODED.count(1) == (2 if locks else 6)  # estimated once, decoded once
    assert folders(tmp_path) == [os.path.basename(found[0].folder)]
    check(Made(), found[2])


def test_space_is_looked_at_before(tmp_path, monkeypatch, capsys):
    read = Made(damage=False, n=8)
    need = sum(read(row).nbytes for row in range(8))

    def usage(free):
        looked = types.SimpleNamespace(free=free)
        monkeypatch.setattr(shutil, "disk_usage", lambda path: looked)

    usage(need - 1)
    with pytest.raises(ValueError, match=r"8 images.*cache_size"):
        cache.cached(read, str(tmp_path))
    assert folders(tmp_path) == []
    usage(need)
    check(read, cache.cached(read, str(tmp_path)))
    assert cache._size(12_345_678_901) == "12.3 GB"
    # A large set is judged by a sample, spread over all of it.
    monkeypatch.setattr(cache, "SAMPLE", 4)
    DECODED.clear()
    assert cache._estimate(cache.Fresh(read, None), 80) == sum(
        20 * read(row).nbytes for row in (0, 26, 52, 79)
    )
    assert set(DECODED) == {0, 26, 52, 79}


def test_a_full_disk_or_one_that_cannot_be_written(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match=r"cache = .*file"):
        cache.cached(Made(), str(tmp_path / "file" / "x"))

    def full(file):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(ValueError, match="No space left"):
        cache.cached(Made(), str(tmp_path / "c"))
    assert folders(tmp_path / "c") == []


def test_damage_is_seen(tmp_path):
    made = cache.cached(Made(), str(tmp_path))
    folder = pathlib.Path(made.folder)
    pixels = (folder / "pixels.bin").read_bytes()
    (folder / "pixels.bin").write_bytes(pixels[:-1])
    with pytest.raises(ValueError, match=f"{folder.name}"):
        cache.cached(Made(), str(tmp_path))
    (folder / "pixels.bin").write_bytes(pixels)
    cache.cached(Made(), str(tmp_path))
    for text in ("{", "[]", '{"images": 12}'):
        (folder / "meta.json").write_text(text)
        with pytest.raises(ValueError, match="is damaged"):
            cache.cached(Made(), str(tmp_path))


def test_every_file_is_on_the_disk_before_the_folder_has_its_name(
    tmp_path, monkeypatch
):
    synced, fsync = [], os.fsync

    def noted(number):
        synced.append(os.path.basename(os.readlink(f"/proc/self/fd/{number}")))
        fsync(number)

    monkeypatch.setattr(os, "fsync", noted)
    made = cache.cached(Made(), str(tmp_path))
    first = {name.split(".")[0] for name in synced}
    assert first == {path.stem for path in pathlib.Path(made.folder).iterdir()}


# --- Use


def test_workers_get_a_path_not_pixels(images, tmp_path):
    data = load(images, decoder="pillow", cache=str(tmp_path / "cache"))
    data.train.load(0)
    copied = pickle.dumps(data.train.load)
    assert len(copied) < 3000 < data.train.load(0).nbytes
    (tmp_path / "load").write_bytes(copied)
    code = (
        "import pickle, sys\n"
        "image = pickle.load(open(sys.argv[1], 'rb'))(3)\n"
        "assert 'jax' not in sys.modules\n"
        "print(image.shape, image.sum())"
    )
    out = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path / "load")],
        check=True,
        text=True,
        stdout=subprocess.PIPE,
        timeout=60,
        cwd=HERE.parent,
    )
    image = load(images, decoder="pillow").train.load(3)
    assert out.stdout == f"{image.shape} {image.sum()}\n"
    with pytest.raises(ValueError, match="read-only"):
        data.train.load(0)[0] = 0
