"""Get a well-known set and write it as its source reads it.

    python -m jaxcl.data.fetch cifar10 --out=data/cifar10
    python -m jaxcl.data.fetch cifar10 --out=data/cifar10 --from=FILE_OR_FOLDER

The sets are cifar10, cifar100, mnist, stl10 and tiny_imagenet; `shapes` is drawn, not
downloaded, and written as PNG files with a folder for each domain. The archives are
downloaded, or taken from `--from`, compared with the published SHA-256 and unpacked.
CIFAR and MNIST become directories for the source "arrays"; the others are read as they
are unpacked. CIFAR comes as flat bytes: its Python version is made of pickles.

Sums and sizes: TFDS's tables of checksums; of tiny-imagenet-200, which is not in them,
several public repositories agree.
"""

import argparse
import contextlib
import functools
import gzip
import hashlib
import http.client
import os
import pathlib
import shutil
import sys
import tarfile
import urllib.request
import uuid
import zipfile
import zlib
from collections.abc import Callable, Iterator
from typing import IO, NamedTuple

import numpy as np

from jaxcl.data import convert, shapes, stream

SECONDS = 30.0  # without a byte, after which a server counts as gone
TRIES = 5  # of one address, each going on where the one before was cut
UNPACKED = 4 << 30  # bytes; the largest known set has 3.1 GB
_BLOCK = 1 << 20
# What tarfile, zipfile and gzip raise for damaged bytes.
_DAMAGED = (
    tarfile.TarError,
    zipfile.BadZipFile,
    gzip.BadGzipFile,
    zlib.error,
    EOFError,
    NotImplementedError,
    RuntimeError,
)


class Unreachable(OSError):
    """No server gave an archive; the message says how to do without one."""


class Archive(NamedTuple):
    """A published file."""

    urls: tuple[str, ...]  # tried one after another; the last part is its name
    size: int  # bytes
    sha256: str

    @property
    def name(self) -> str:
        """Its name on a disk."""
        return self.urls[0].rpartition("/")[2]


class Known(NamedTuple):
    """A set that can be fetched."""

    source: str  # config.data.name of what is written
    archives: tuple[Archive, ...]
    write: Callable[[list[str], str], None]  # paths of the archives, a new folder


def fetch(name: str, out: str, *, source: str | None = None) -> Known:
    """Write a set to a folder, which must be missing or empty.

    Downloads go to the folder OUT.download, where the next call goes on with a part of
    a file; it is removed once the set is written.

    Args:
      name: a key of `SETS`.
      out: the folder.
      source: the archive, or a folder with the archives; None: download them.

    Returns:
      What is known of the set.

    Raises:
      ValueError: an unknown name, a folder with something in it, an archive that is
        missing in `source`, is not the published one, or holds something unexpected.
      Unreachable: no server gave an archive.
      OSError: a file cannot be read or written.
    """
    if name not in SETS:
        raise ValueError(f"set {name!r} is unknown; allowed are {(*SETS,)}")
    known, out = SETS[name], os.path.normpath(out)
    if os.path.exists(out) and (not os.path.isdir(out) or os.listdir(out)):
        raise ValueError(f"--out={out} is there already and not an empty folder")
    downloads = f"{out}.download"
    if source is None:
        os.makedirs(downloads, exist_ok=True)
        try:
            paths = [_download(archive, downloads) for archive in known.archives]
        except Unreachable as error:
            raise Unreachable(f"{error}\n{_by_hand(name, out)}") from error
    else:
        paths = [_given(archive, source, known) for archive in known.archives]
    for archive, path in zip(known.archives, paths, strict=True):
        _check(archive, path, remove=source is None)
    with _whole(out) as draft:
        known.write(paths, draft)
    if source is None:
        shutil.rmtree(downloads)
    return known


def _by_hand(name, out) -> str:
    """Say how to fetch the files by hand where there is no network."""
    files = SETS[name].archives
    lines = [f"  {x.urls[0]}  ({x.size:,} bytes)" for x in files]
    what = "the file" if len(files) == 1 else "the folder with these files"
    return "\n".join(
        [
            "Download by hand, on a machine with a network:",
            *lines,
            f"and then give {what}:",
            f"  python -m jaxcl.data.fetch {name} --out={out} --from=PATH",
        ]
    )


def _given(archive, source, known) -> str:
    """The path of an archive in what the user gave."""
    if os.path.isdir(source):
        path = os.path.join(source, archive.name)
        if not os.path.isfile(path):
            raise ValueError(f"--from={source}: lacks {archive.name}")
        return path
    if not os.path.isfile(source):
        raise ValueError(f"--from={source}: no such file or folder")
    if len(known.archives) > 1:
        names = ", ".join(x.name for x in known.archives)
        raise ValueError(f"--from={source}: must be the folder with {names}")
    return source


def _check(archive, path, *, remove) -> None:
    """Refuse a file that is not the published one."""
    size = os.path.getsize(path)
    with open(path, "rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if (size, found) == (archive.size, archive.sha256):
        return
    if remove:
        os.unlink(path)
    raise ValueError(
        f"{path}: {size:,} bytes with sha256 {found}; published are {archive.size:,} "
        f"with {archive.sha256}. It is damaged or another file"
        + ("; it is removed, the next call starts anew" if remove else "")
    )


def _download(archive, folder) -> str:
    """The path of an archive, downloaded; what is there of it already is kept."""
    path = os.path.join(folder, archive.name)
    part, reasons = f"{path}.part", []
    if os.path.exists(path):
        return path
    for url in archive.urls:
        for _ in range(TRIES):
            before = _length(part)
            try:
                if before < archive.size:
                    _append(url, part, archive.size)
            except (OSError, http.client.HTTPException) as error:
                reasons.append(f"{url}: {getattr(error, 'reason', None) or error!r}")
            if _length(part) == archive.size:
                os.replace(part, path)
                return path
            if _length(part) <= before:  # nothing came: another try is in vain
                break
    lines = dict.fromkeys(reasons or [f"{archive.urls[-1]}: it ended too early"])
    raise Unreachable(f"{archive.name} could not be downloaded: {'; '.join(lines)}")


def _length(path) -> int:
    """Bytes of a file, 0 if it is missing."""
    return os.path.getsize(path) if os.path.exists(path) else 0


def _append(url, part, size) -> None:
    """Add what a server has beyond the bytes of `part`; no byte more than `size`."""
    have = _length(part)
    request = urllib.request.Request(url, headers={"User-Agent": "jaxcl"})
    if have:
        request.add_header("Range", f"bytes={have}-")
    with urllib.request.urlopen(request, timeout=SECONDS) as answer:
        given = answer.headers.get("Content-Range", "")
        # A server that knows no ranges sends the file from its beginning.
        goes_on = answer.status == 206 and given.startswith(f"bytes {have}-")
        with open(part, "ab" if goes_on else "wb") as file, _bar(part, size) as bar:
            bar.update(file.tell())
            while left := size - file.tell():
                block = answer.read(min(_BLOCK, left))
                if not block:
                    return
                file.write(block)
                bar.update(len(block))


def _bar(part, size):
    """A progress bar on a terminal, else nothing."""
    import tqdm  # only downloads pay for it

    name = os.path.basename(part).removesuffix(".part")
    return tqdm.tqdm(total=size, desc=name, unit="B", unit_scale=True, disable=None)


@contextlib.contextmanager
def _whole(out) -> Iterator[str]:
    """Give a new folder, which takes the place of `out` when all is written."""
    draft = f"{out}.{uuid.uuid4().hex}.part"
    try:
        yield draft
        if os.path.isdir(out):
            os.rmdir(out)
        os.rename(draft, out)
    except BaseException:
        shutil.rmtree(draft, ignore_errors=True)
        raise


def members(path: str) -> Iterator[tuple[str, int, IO[bytes]]]:
    """Go through a tar or zip archive once.

    Yields:
      Of every file its name below the archive's one folder, its bytes, and the file,
      to be read before the next one.

    Raises:
      ValueError: a name that leaves the folder, a link or a device, or a damaged file.
    """
    try:
        if zipfile.is_zipfile(path):
            with zipfile.ZipFile(path) as archive:
                for info in archive.infolist():
                    name = _inside(path, info.filename)
                    if not info.is_dir():
                        with archive.open(info) as file:
                            yield name, info.file_size, file
            return
        with tarfile.open(path, "r|*") as archive:
            for member in archive:
                name = _inside(path, member.name)
                if not (member.isdir() or member.isreg()):
                    raise ValueError(f"{path}: {member.name!r} is a link or a device")
                if member.isreg():
                    yield name, member.size, archive.extractfile(member)
    except _DAMAGED as error:
        raise ValueError(f"{path} cannot be unpacked: {error}") from error


def _inside(path, name) -> str:
    """The name of a member below the archive's folder, checked."""
    parts = pathlib.PurePosixPath(name).parts
    odd = any(mark in name for mark in ("\\", ":", "\0"))
    if odd or ".." in parts or name.startswith("/") or not parts:
        raise ValueError(f"{path}: member {name!r} leaves the archive's folder")
    return "/".join(parts[1:])


def _read(path, sizes) -> dict[str, bytes]:
    """Members of an archive by name, of as many bytes as `sizes` says (None: few)."""
    found = {}
    for name, size, file in members(path):
        if name in sizes:
            _check_size(path, name, size, sizes[name])
            found[name] = file.read(size)
    _check_all(path, sizes, found)
    return found


def _check_size(path, name, size, expected) -> None:
    if size != expected and (expected is not None or size > _BLOCK):
        allowed = f"at most {_BLOCK:,}" if expected is None else f"{expected:,}"
        raise ValueError(f"{path}: {name} has {size:,} bytes, must be {allowed}")


def _check_all(path, wanted, found) -> None:
    missing = sorted({*wanted} - {*found})
    if missing:
        raise ValueError(f"{path}: lacks {missing[:5]}")


def _cifar(paths, folder, *, name, train, test, label_bytes, names) -> None:
    """Write CIFAR's records: label bytes, then the planes of 32 x 32 pixels.

    Args:
      train, test: rows of each file.
      label_bytes: of a record; the last one counts, in CIFAR-100 the fine label.
      names: the file with the classes.
    """
    record = label_bytes + 3 * 32 * 32
    rows = {file: count * record for file, count in (train | test).items()}
    data = _read(paths[0], rows | {names: None})
    classes = tuple(data[names].decode().split())

    def examples(files):
        raw = np.frombuffer(b"".join(data[x] for x in files), np.uint8)
        raw = raw.reshape(-1, record)
        images = raw[:, label_bytes:].reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1)
        return _examples(images, raw[:, label_bytes - 1], len(classes), paths[0])

    _write(name, classes, examples(train), examples(test), folder)


def _mnist(paths, folder, *, train, test) -> None:
    """Write MNIST's idx files; `train` and `test` are the rows of its splits."""
    parts = []
    for rows, images, labels in ((train, *paths[:2]), (test, *paths[2:])):
        pixels = _idx(images, (rows, 28, 28))[..., None]
        parts.append(_examples(pixels, _idx(labels, (rows,)), 10, labels))
    _write("mnist", tuple("0123456789"), *parts, folder)


def _idx(path, shape) -> np.ndarray:
    """u8[shape], from a packed idx file: type, number of axes, their sizes, bytes."""
    header = bytes([0, 0, 8, len(shape)]) + np.array(shape, ">i4").tobytes()
    size = len(header) + int(np.prod(shape))
    try:
        with gzip.open(path, "rb") as file:
            data = file.read(size + 1)
    except (OSError, *_DAMAGED) as error:
        raise ValueError(f"{path} cannot be unpacked: {error}") from error
    if len(data) != size or not data.startswith(header):
        raise ValueError(f"{path}: is no idx file of uint8{list(shape)}")
    return np.frombuffer(data, np.uint8)[len(header) :].reshape(shape)


def _examples(images, labels, classes, where) -> stream.Examples:
    """Examples of one domain, in memory."""
    if labels.max(initial=0) >= classes:
        raise ValueError(f"{where}: label {labels.max()}, must be below {classes}")
    label = labels.astype(np.int32)
    return stream.Examples(label, np.zeros_like(label), np.ascontiguousarray(images))


def _write(name, classes, train, test, folder) -> None:
    """Write two splits as plain arrays."""
    data = stream.Dataset(name, classes, ("all",), train, None, test)
    convert.write(data, folder)


def _unpack(paths, folder, *, sizes=None, needed=()) -> None:
    """Write the members of an archive below a folder.

    Args:
      sizes: those to write, with their bytes; None: all.
      needed: those that must be there.
    """
    (path,), total, found = paths, 0, set()
    for name, size, file in members(path):
        if sizes is not None and name not in sizes:
            continue
        if sizes is not None:
            _check_size(path, name, size, sizes[name])
        total += size
        if total > UNPACKED:
            raise ValueError(f"{path}: unpacks to more than {UNPACKED:,} bytes")
        target = os.path.join(folder, name)
        os.makedirs(os.path.dirname(target), exist_ok=True)
        with open(target, "xb") as copy:
            shutil.copyfileobj(file, copy, _BLOCK)
        found.add(name)
    _check_all(path, sizes or needed, found)


_TORONTO = "https://www.cs.toronto.edu/~kriz/"
_MNIST = (
    "https://storage.googleapis.com/cvdf-datasets/mnist/",
    "https://ossci-datasets.s3.amazonaws.com/mnist/",
)


def _idx_archive(name, size, sha256) -> Archive:
    return Archive(tuple(f"{start}{name}-ubyte.gz" for start in _MNIST), size, sha256)


# What may be fetched.
SETS = {
    "cifar10": Known(
        "arrays",
        (
            Archive(
                (_TORONTO + "cifar-10-binary.tar.gz",),
                170_052_171,
                "c4a38c50a1bc5f3a1c5537f2155ab9d68f9f25eb1ed8d9ddda3db29a59bca1dd",
            ),
        ),
        functools.partial(
            _cifar,
            name="cifar10",
            train={f"data_batch_{i}.bin": 10_000 for i in range(1, 6)},
            test={"test_batch.bin": 10_000},
            label_bytes=1,
            names="batches.meta.txt",
        ),
    ),
    "cifar100": Known(
        "arrays",
        (
            Archive(
                (_TORONTO + "cifar-100-binary.tar.gz",),
                168_513_733,
                "58a81ae192c23a4be8b1804d68e518ed807d710a4eb253b1f2a199162a40d8ec",
            ),
        ),
        functools.partial(
            _cifar,
            name="cifar100",
            train={"train.bin": 50_000},
            test={"test.bin": 10_000},
            label_bytes=2,
            names="fine_label_names.txt",
        ),
    ),
    "mnist": Known(
        "arrays",
        (
            _idx_archive(
                "train-images-idx3",
                9_912_422,
                "440fcabf73cc546fa21475e81ea370265605f56be210a4024d2ca8f203523609",
            ),
            _idx_archive(
                "train-labels-idx1",
                28_881,
                "3552534a0a558bbed6aed32b30c495cca23d567ec52cac8be1a0730e8010255c",
            ),
            _idx_archive(
                "t10k-images-idx3",
                1_648_877,
                "8d422c7b0a1c1c79245a5bcf07fe86e33eeafee792b84584aec276f5a2dbc4e6",
            ),
            _idx_archive(
                "t10k-labels-idx1",
                4_542,
                "f7ae60f92e00ec6debd23a6088c31dbd2371eca3ffa0defaefb259924204aec6",
            ),
        ),
        functools.partial(_mnist, train=60_000, test=10_000),
    ),
    "stl10": Known(
        "stl10",
        (
            Archive(
                ("http://ai.stanford.edu/~acoates/stl10/stl10_binary.tar.gz",),
                2_640_397_119,
                "f31fd99273a1acb8609c8db427cebb1de3f71de77758cdc0e22956e1289b9866",
            ),
        ),
        functools.partial(
            _unpack,
            sizes={
                "train_X.bin": 5_000 * 3 * 96 * 96,
                "train_y.bin": 5_000,
                "test_X.bin": 8_000 * 3 * 96 * 96,
                "test_y.bin": 8_000,
                "unlabeled_X.bin": 100_000 * 3 * 96 * 96,
            },
        ),
    ),
    "tiny_imagenet": Known(
        "tiny_imagenet",
        (
            Archive(
                ("http://cs231n.stanford.edu/tiny-imagenet-200.zip",),
                248_100_043,
                "6198c8ae015e2b3e007c7841da39ec069199b9aa3bfa943a462022fe5e43c821",
            ),
        ),
        functools.partial(_unpack, needed=("wnids.txt", "val/val_annotations.txt")),
    ),
}


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command."""
    made = argparse.ArgumentParser(
        prog="jaxcl data",
        description="Download, check and unpack a well-known set, or draw `shapes`.",
        epilog="examples:\n"
        "  jaxcl data shapes --out=shapes\n"
        "  jaxcl data cifar10 --out=data/cifar10\n"
        "  jaxcl data mnist --out=data/mnist --from=FOLDER",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    made.add_argument("name", choices=[*SETS, "shapes"], help="which set")
    made.add_argument("--out", required=True, help="new or empty folder to write")
    made.add_argument(
        "--from",
        dest="source",
        metavar="FILE_OR_FOLDER",
        help="its archive, or a folder with its archives, downloaded by hand",
    )
    return made


def main(argv: list[str] | None = None) -> int:
    """Run the command; exit code 2 if there is no network or a file is wrong."""
    arguments = parser().parse_args(argv)
    try:
        if arguments.name == "shapes":
            return _draw_shapes(arguments.out, arguments.source)
        known = fetch(arguments.name, arguments.out, source=arguments.source)
    except (OSError, ValueError) as error:
        print(f"jaxcl: {error}", file=sys.stderr)
        return 2
    print(
        f"{arguments.out}: {arguments.name}, read with "
        f"--config.data.name={known.source} --config.data.path={arguments.out}"
    )
    return 0


def _draw_shapes(out: str, source: str | None) -> int:
    """Write the set `shapes` as PNG files, and print how to read a domain."""
    if source is not None:
        raise ValueError(f"--from={source}: shapes is drawn; leave --from out")
    shapes.write_folders(shapes.shapes(), out)
    first, *_, last = shapes.DOMAINS
    print(
        f"{out}: shapes, a folder of images for each of {', '.join(shapes.DOMAINS)}\n"
        f"train on one:  jaxcl train own_images:{out}/{first} --workdir=runs/{first}\n"
        f"then another:  jaxcl update --run=runs/{first} --data={out}/{last}/train "
        f"--test={out}/{first}/test"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
