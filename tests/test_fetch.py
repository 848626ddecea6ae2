"""Fetching known sets, from a server on loopback and from files."""

import functools
import gzip
import hashlib
import http.server
import io
import shlex
import tarfile
import threading
import zipfile

import numpy as np
import pytest
from PIL import Image

from jaxcl import cli
from jaxcl.data.sources import by_name, fetch

RNG = np.random.default_rng(0)
ROWS = {"train": 7, "test": 4}
NAMES = {"cifar10": "batches.meta.txt", "cifar100": "fine_label_names.txt"}
LABELS = {split: np.arange(rows, dtype=np.uint8) % 3 for split, rows in ROWS.items()}
CIFAR = {
    split: RNG.integers(0, 256, (rows, 3, 32, 32), np.uint8)
    for split, rows in ROWS.items()
}
GREY = {
    split: RNG.integers(0, 256, (rows, 28, 28), np.uint8)
    for split, rows in ROWS.items()
}


def tar(files):
    """A .tar.gz of {name: bytes}."""
    data = io.BytesIO()
    with tarfile.open(fileobj=data, mode="w:gz") as archive:
        for name, content in files.items():
            info = tarfile.TarInfo(name)
            info.size = len(content)
            archive.addfile(info, io.BytesIO(content))
    return data.getvalue()


def zipped(files):
    data = io.BytesIO()
    with zipfile.ZipFile(data, "w") as archive:
        for name, content in files.items():
            archive.writestr(name, content)
    return data.getvalue()


def records(split, label_bytes):
    """CIFAR's bytes of a split; of two label bytes the first is the coarse label."""
    label = LABELS[split][:, None]
    labels = np.concatenate([np.full_like(label, 9), label], axis=1)[:, -label_bytes:]
    pixels = CIFAR[split].reshape(len(label), -1)
    return np.concatenate([labels, pixels], axis=1).tobytes()


def cifar(name, **changes):
    label_bytes = 1 if name == "cifar10" else 2
    files = {
        "top/train.bin": records("train", label_bytes),
        "top/test.bin": records("test", label_bytes),
        f"top/{NAMES[name]}": b"ant\nbee\ncat\n\n",
        "top/readme.html": b"not read",
    }
    return tar(files | changes)


def idx(array):
    header = bytes([0, 0, 8, array.ndim]) + np.array(array.shape, ">i4").tobytes()
    return gzip.compress(header + array.tobytes())


MNIST = [idx(x[split]) for split in ROWS for x in (GREY, LABELS)]


@pytest.fixture
def server(monkeypatch):
    """Bytes by path; `cuts` holds how many bytes of an answer go out before an end."""
    served = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    served.files, served.cuts, served.asked = {}, [], 0
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    thread = threading.Thread(target=served.serve_forever, args=(0.01,))
    thread.start()
    yield served
    served.shutdown()
    served.server_close()
    thread.join()


class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        server = self.server
        server.asked += 1
        data = server.files.get(self.path.lstrip("/"))
        if data is None:
            self.send_error(404)
            return
        self.send_response(200)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data[: server.cuts.pop(0) if server.cuts else None])

    def log_message(self, *_):
        pass


def known(monkeypatch, name, contents, server=None):
    """Put small archives in the place of a set's; returns their names and bytes."""
    old, archives = fetch.SETS[name], []
    start = f"http://127.0.0.1:{server.server_port if server else 1}/"
    files = dict(zip([x.name for x in old.archives], contents, strict=True))
    for file, content in files.items():
        digest = hashlib.sha256(content).hexdigest()
        archives.append(fetch.Archive((start + file,), len(content), digest))
    write = old.write
    if name.startswith("cifar"):
        write = functools.partial(write, train=["train.bin"], test=["test.bin"])
    small = old._replace(archives=tuple(archives), write=write)
    monkeypatch.setitem(fetch.SETS, name, small)
    if server:
        server.files.update(files)
    return files


def check_arrays(name, out):
    data = by_name.load("arrays", path=str(out))
    assert data.name == name
    for split, labels in LABELS.items():
        part = getattr(data, split)
        images = GREY[split][..., None]
        if name != "mnist":
            images = CIFAR[split].transpose(0, 2, 3, 1)
        np.testing.assert_array_equal(part.images, images)
        np.testing.assert_array_equal(part.label, labels)
    return data


@pytest.mark.parametrize("name", ["cifar10", "cifar100"])
def test_cifar_from_a_server(name, server, tmp_path, monkeypatch, capsys):
    known(monkeypatch, name, [cifar(name)], server)
    out = tmp_path / "made"
    out.mkdir()
    assert cli.main(["data", name, f"--out={out}"]) == 0
    assert check_arrays(name, out).class_names == ("ant", "bee", "cat")
    assert server.asked == 1 and list(tmp_path.iterdir()) == [out]
    assert f"name=arrays --config.data.path={out}" in capsys.readouterr().out
    assert cli.main(["data", name, f"--out={out}"]) == 2
    assert str(out) in capsys.readouterr().err


def test_mnist_from_a_folder(tmp_path, monkeypatch):
    files = known(monkeypatch, "mnist", MNIST)
    for file, content in files.items():
        (tmp_path / file).write_bytes(content)
    out = tmp_path / "mnist"
    fetch.fetch_set("mnist", str(out), source=str(tmp_path))
    assert check_arrays("mnist", out).class_names == tuple("0123456789")
    assert {*tmp_path.iterdir()} == {out, *(tmp_path / file for file in files)}
    with pytest.raises(ValueError, match="train-images-idx3"):
        fetch.fetch_set("mnist", str(tmp_path / "x"), source=str(tmp_path / file))
    (tmp_path / file).unlink()
    with pytest.raises(ValueError, match="t10k-labels-idx1-ubyte.gz"):
        fetch.fetch_set("mnist", str(tmp_path / "x"), source=str(tmp_path))
    with pytest.raises(ValueError, match="--from=nowhere"):
        fetch.fetch_set("mnist", str(tmp_path / "x"), source="nowhere")


def test_stl10_with_and_without_its_unlabelled_images(tmp_path, monkeypatch):
    files, want = {}, {}
    for split, count in (("train", 4), ("test", 3), ("unlabeled", 2)):
        images = RNG.integers(0, 256, (count, 96, 96, 3), np.uint8)
        label = RNG.integers(1, 11, count).astype(np.uint8)
        # Byte by byte: planes of red, green, blue, each column after column.
        raw = bytearray()
        for image in images:
            for channel in range(3):
                for column in range(96):
                    raw += image[:, column, channel].tobytes()
        files[f"stl10_binary/{split}_X.bin"] = bytes(raw)
        if split != "unlabeled":
            files[f"stl10_binary/{split}_y.bin"] = label.tobytes()
        want[split] = images, label.astype(int) - 1
    for name in ("stl10", "stl10_unlabelled"):
        packed = tar(files)
        known(monkeypatch, name, [packed])
        (tmp_path / "archive").write_bytes(packed)
        out = tmp_path / "new" / name
        fetch.fetch_set(name, str(out), source=str(tmp_path / "archive"))
        data = by_name.load("arrays", path=str(out))
        assert data.class_names[0] == "airplane" and data.class_names[9] == "truck"
        images, label = want["train"]
        if name != "stl10":
            images = np.concatenate([images, want["unlabeled"][0]])
            label = np.append(label, [-1, -1])
        for part, (pixels, labels) in (
            (data.train, (images, label)),
            (data.test, want["test"]),
        ):
            np.testing.assert_array_equal(part.images, pixels)
            np.testing.assert_array_equal(part.label, labels)


def test_tiny_imagenet(tmp_path, monkeypatch):
    """Classes in the order of wnids.txt, files as text: val_10 before val_2."""
    top, wnids = "tiny-imagenet-200", ("n03", "n01")
    files = {f"{top}/wnids.txt": b"n03\nn01\n", f"{top}/words.txt": b"n01\tfish\n"}
    want, lines = {"train": [], "test": []}, []

    def image(path, mode):
        pixels = RNG.integers(0, 256, (8, 8, 3), np.uint8)
        data = io.BytesIO()
        Image.fromarray(pixels).convert(mode).save(data, "JPEG")
        files[f"{top}/{path}"] = data.getvalue()
        return np.asarray(Image.open(data).convert("RGB"))

    for label, wnid in enumerate(wnids):
        for i in range(3):  # one of them grey
            path = f"train/{wnid}/images/{wnid}_{i}.JPEG"
            want["train"].append((label, path, image(path, "RGB" if i else "L")))
    for i in range(12):
        path, label = f"val/images/val_{i}.JPEG", i % 2
        want["test"].append((label, path, image(path, "RGB")))
        lines.append(f"val_{i}.JPEG\t{wnids[label]}\t0\t32\t44\t62\n")
    files[f"{top}/val/val_annotations.txt"] = "".join(lines).encode()
    packed = zipped(files)
    known(monkeypatch, "tiny_imagenet", [packed])
    (tmp_path / "archive").write_bytes(packed)
    fetch.fetch_set(
        "tiny_imagenet", str(tmp_path / "x"), source=str(tmp_path / "archive")
    )
    data = by_name.load("arrays", path=str(tmp_path / "x"))
    assert data.class_names == wnids and data.decoder == "pillow"
    for split, rows in want.items():
        part, rows = getattr(data, split), sorted(rows, key=lambda row: row[:2])
        assert part.label.tolist() == [label for label, *_ in rows]
        np.testing.assert_array_equal(part.images, [x for *_, x in rows])


def test_a_cut_download_is_no_archive(server, tmp_path, monkeypatch):
    known(monkeypatch, "cifar10", [cifar("cifar10")], server)
    server.cuts, out = [100], tmp_path / "a"
    with pytest.raises(fetch.Unreachable, match="100"):
        fetch.fetch_set("cifar10", str(out))
    assert not out.exists()
    fetch.fetch_set("cifar10", str(out))
    check_arrays("cifar10", out)
    assert [*tmp_path.iterdir()] == [out]


def test_a_file_that_is_not_the_published_one(server, tmp_path, monkeypatch):
    (name,) = known(monkeypatch, "cifar10", [cifar("cifar10")], server)
    wrong = bytearray(server.files[name])
    wrong[-1] ^= 1
    server.files[name] = bytes(wrong)
    with pytest.raises(ValueError, match=r"published"):
        fetch.fetch_set("cifar10", str(tmp_path / "a"))
    assert not (tmp_path / "a").exists()
    assert not (tmp_path / "a.download" / name).exists()
    server.files[name] = bytes(wrong) * 2
    with pytest.raises(fetch.Unreachable, match=f"{len(wrong):,}"):
        fetch.fetch_set("cifar10", str(tmp_path / "a"))
    (tmp_path / "mine").write_bytes(wrong)
    with pytest.raises(ValueError, match="damaged"):
        fetch.fetch_set("cifar10", str(tmp_path / "a"), source=str(tmp_path / "mine"))
    assert (tmp_path / "mine").exists()


def test_no_network_says_what_to_do_by_hand(tmp_path, monkeypatch, capsys):
    content = cifar("cifar10")
    known(monkeypatch, "cifar10", [content])  # nobody listens at that address
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    out = tmp_path / "cifar10"
    assert cli.main(["data", "cifar10", f"--out={out}"]) == 2
    said = capsys.readouterr().err
    assert f"({len(content):,} bytes)" in said
    assert "http://127.0.0.1:1/cifar-10-binary.tar.gz" in said
    (command,) = [line for line in said.splitlines() if "--from=" in line]
    (tmp_path / "by_hand").write_bytes(content)
    command = command.replace("PATH", str(tmp_path / "by_hand"))
    assert cli.main(["data", *shlex.split(command)[2:]]) == 0
    check_arrays("cifar10", out)


def test_a_set_that_cannot_be_written_leaves_nothing(tmp_path, monkeypatch):
    content = tar({"top/train.bin": b"1"})  # other files are missing
    known(monkeypatch, "cifar10", [content])
    (tmp_path / "archive").write_bytes(content)
    out = tmp_path / "sub" / "out"
    out.mkdir(parents=True)
    with pytest.raises(OSError, match=NAMES["cifar10"]):
        fetch.fetch_set("cifar10", str(out), source=str(tmp_path / "archive"))
    assert [*out.parent.iterdir()] == [out] and not [*out.iterdir()]
