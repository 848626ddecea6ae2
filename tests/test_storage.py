"""Files written whole or not at all, and JSON in them."""

import errno
import os
import resource
import signal

import pytest

from jaxcl import storage
from jaxcl.data.images import listing


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def test_json_comes_back_and_replaces_the_old(tmp_path):
    path = tmp_path / "x.json"
    for value in ({"a": [1, None, 0.1], "ä": "ö"}, [2]):
        storage.write_json(path, value)
        assert storage.read_json(str(path)) == value
    assert names(tmp_path) == ["x.json"]
    assert path.read_bytes() == storage.dump_json([2]) == b"[\n 2\n]\n"


@pytest.mark.parametrize("call", ["fsync", "replace"])
def test_a_crash_leaves_the_old_file_and_no_draft(tmp_path, monkeypatch, call):
    path = tmp_path / "x.json"
    storage.write_json(path, {"old": 1})

    def crash(*_):
        raise OSError("power cut")

    monkeypatch.setattr(os, call, crash)
    with pytest.raises(OSError, match=r"power cut: '.*/x\.json'"):
        storage.write_json(path, {"new": 2})
    assert storage.read_json(path) == {"old": 1} and names(tmp_path) == ["x.json"]


def test_what_json_does_not_know_leaves_the_old_file(tmp_path):
    path = tmp_path / "x.json"
    storage.write_json(path, 1)
    with pytest.raises(TypeError):
        storage.write_json(path, {"x": object()})
    assert storage.read_json(path) == 1 and names(tmp_path) == ["x.json"]


def test_a_full_disk_names_the_file(tmp_path):
    path = tmp_path / "x.json"
    storage.write_json(path, {})
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    old = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)  # a write fails, as on ENOSPC
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 10, limits[1]))
    try:
        with pytest.raises(OSError) as error:
            storage.write_json(path, "x" * (1 << 12))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, old)
    assert error.value.errno == errno.EFBIG and error.value.filename == str(path)
    assert str(path) in str(error.value)
    assert storage.read_json(path) == {} and names(tmp_path) == ["x.json"]


@pytest.mark.parametrize("content", [b"", b'{"x": ', b"\xff\xfe\xfd"])
def test_what_is_not_json_names_the_file(tmp_path, content):
    path = tmp_path / "x.json"
    path.write_bytes(content)
    with pytest.raises(storage.NotJson, match=r"/x\.json"):
        storage.read_json(path)
    with pytest.raises(FileNotFoundError):
        storage.read_json(tmp_path / "y.json")


def test_hidden_folders_hold_no_images(tmp_path, monkeypatch):
    root = tmp_path / ".mine"  # what is above does not count
    names = ["cat/1.png", "cat/.checkpoints/1.png", ".thumbs/x/2.png", "cat/.3.png"]
    for name in names:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).touch()
    (root / "cat" / ".link").symlink_to(tmp_path)
    assert listing.images(root) == [str(root / "cat" / "1.png")]

    class Bucket:
        def walk(self):
            for name in names:
                folder, _, file = f"bucket/.mine/{name}".rpartition("/")
                yield folder, [], [file]

    monkeypatch.setattr(listing.epath, "Path", lambda path: Bucket())
    found = listing.images("gs://bucket/.mine/")
    assert found == ["gs://bucket/.mine/cat/1.png"]
