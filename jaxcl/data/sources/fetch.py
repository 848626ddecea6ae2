"""Download a well-known data set, and write it in the format that its source reads.

    jaxcl data cifar10 --out=data/cifar10
    jaxcl data cifar10 --out=data/cifar10 --from=FILE_OR_FOLDER

The sets are cifar10, cifar100, mnist, stl10 (stl10_unlabelled: with its 100,000 images
without labels) and tiny_imagenet; `shapes` is drawn, not downloaded, and written as PNG
files with a folder for each domain. The archives are downloaded, or taken from
`--from`, compared with the published SHA-256, and become directories for the source
"arrays". CIFAR is read from its version of flat bytes, since its Python version is
pickled.

Sums and sizes: TFDS's tables of checksums; for tiny-imagenet-200, which they lack, from
several public repositories that agree.
"""

import argparse
import concurrent.futures
import contextlib
import functools
import gzip
import hashlib
import http.client
import os
import pathlib
import shutil
import tempfile
import urllib.request
import uuid
import zipfile
from collections.abc import Callable, Iterator
from typing import NamedTuple

import numpy as np

from jaxcl import storage
from jaxcl.data import stream
from jaxcl.data.images import decode
from jaxcl.data.sources import arrays, convert, shapes
from jaxcl.errors import Refused

SECONDS = 30.0  # without a byte, after which a server counts as gone


class Unreachable(OSError):
    """No server gave an archive; the message says how to do without one."""


class Archive(NamedTuple):
    """The name, size and SHA-256 of a published file."""

    urls: tuple[str, ...]  # tried one after another; the last part is its name
    size: int  # bytes
    sha256: str

    @property
    def name(self) -> str:
        """The file's name on a disk."""
        return self.urls[0].rpartition("/")[2]


class KnownSet(NamedTuple):
    """A data set that `jaxcl data` can download."""

    archives: tuple[Archive, ...]
    write: Callable[[list[str], str], None]  # paths of the archives, a new folder


def fetch_set(name: str, out: str, *, source: str | None = None) -> None:
    """Write a set to a folder, which must be missing or empty.

    Downloads go to the folder OUT.download, where the next call finds whole archives;
    it is removed once the set is written.

    Args:
      name: a key of `SETS`.
      out: the folder.
      source: the archive, or a folder with the archives; None: download them.

    Raises:
      Refused: an unknown name, a folder with something in it, an archive that is
        missing in `source` or is not the published one.
      Unreachable: no server gave an archive.
      OSError: a file cannot be read or written.
    """
    if name not in SETS:
        raise Refused(f"set {name!r} is unknown; allowed are {(*SETS,)}")
    published, out = SETS[name], os.path.normpath(out)
    storage.check_blank(out, f"--out={out}")
    downloads = f"{out}.download"
    try:
        if source is None:
            paths = [_download(archive, downloads) for archive in published.archives]
        else:
            paths = [_find_archive(x, source, published) for x in published.archives]
    except Unreachable as error:
        lines = [f"  {x.urls[0]}  ({x.size:,} bytes)" for x in published.archives]
        files = "\n".join(lines)
        raise Unreachable(
            f"{error}\nDownload by hand, on a machine with a network:\n{files}\n"
            "and then give the file, or the folder of several:\n"
            f"  jaxcl data {name} --out={out} --from=PATH"
        ) from error
    for archive, path in zip(published.archives, paths, strict=True):
        _check_archive(archive, path, remove=source is None)
    with _replace_folder(out) as draft:
        published.write(paths, draft)
    if source is None:
        shutil.rmtree(downloads)


def _find_archive(archive, source, published) -> str:
    """Find an archive in the file or folder of the user; return its path."""
    inside = os.path.join(source, archive.name)
    path = inside if os.path.isdir(source) or len(published.archives) > 1 else source
    if not os.path.isfile(path):
        raise Refused(f"--from={source}: lacks {archive.name}")
    return path


def _check_archive(archive, path, *, remove) -> None:
    """Refuse a file that is not the published one."""
    size = os.path.getsize(path)
    with open(path, "rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    if (size, digest) == (archive.size, archive.sha256):
        return
    if remove:  # the next call starts anew
        os.unlink(path)
    raise Refused(
        f"{path}: {size:,} bytes with sha256 {digest}; published are {archive.size:,} "
        f"with {archive.sha256}. It is damaged or another file"
    )


def _download(archive, folder) -> str:
    """Download an archive, unless an earlier call did; return its path."""
    os.makedirs(folder, exist_ok=True)
    path, reasons = os.path.join(folder, archive.name), []
    for url in archive.urls if not os.path.exists(path) else ():
        try:
            _save(url, f"{path}.part", archive.size)
            os.replace(f"{path}.part", path)
            break
        except (OSError, http.client.HTTPException) as error:
            reasons.append(f"{url}: {getattr(error, 'reason', error)}")
    if not os.path.exists(path):
        details = "; ".join(reasons)
        raise Unreachable(f"{archive.name} could not be downloaded: {details}")
    return path


def _save(url, path, size) -> None:
    """Save a download, and show its progress."""
    import tqdm  # only downloads pay for it

    request = urllib.request.Request(url, headers={"User-Agent": "jaxcl"})
    answer = urllib.request.urlopen(request, timeout=SECONDS)
    with answer, open(path, "wb") as file:
        with tqdm.tqdm.wrapattr(file, "write", total=size, disable=None) as output:
            shutil.copyfileobj(answer, output)
        if file.tell() != size:
            raise OSError(f"{file.tell():,} bytes came, not {size:,}")


@contextlib.contextmanager
def _replace_folder(out) -> Iterator[str]:
    """Give a new folder, which replaces `out` when all is written."""
    draft = f"{out}.{uuid.uuid4().hex}.part"
    try:
        yield draft
        if os.path.isdir(out):
            os.rmdir(out)
        os.rename(draft, out)
    except BaseException:
        shutil.rmtree(draft, ignore_errors=True)
        raise


@contextlib.contextmanager
def _unpack(path, target) -> Iterator[str]:
    """Unpack an archive next to a path, temporarily, and give its one folder.

    `_check_archive` has compared its bytes, so its content needs no check.
    """
    parent = os.path.dirname(os.path.abspath(target))
    os.makedirs(parent, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=parent, suffix=".part") as draft:
        if zipfile.is_zipfile(path):
            shutil.unpack_archive(path, draft, "zip")
        else:
            shutil.unpack_archive(path, draft, "gztar", filter="data")
        (inner,) = os.listdir(draft)
        yield os.path.join(draft, inner)


_STL10 = (*"airplane bird car cat deer dog horse monkey ship truck".split(),)


def _stl10(paths, folder, *, more=None) -> None:
    """Write STL-10; the images of the file `more` follow in train, without labels."""

    def read(inner, split):
        files = [f"{split}_X.bin"] + [more] * (more is not None and split == "train")
        raw = [np.fromfile(os.path.join(inner, file), np.uint8) for file in files]
        images = np.concatenate(raw).reshape(-1, 3, 96, 96).transpose(0, 3, 2, 1)
        classes = np.fromfile(os.path.join(inner, f"{split}_y.bin"), np.uint8)
        labels = np.full(len(images), -1)
        labels[: len(classes)] = classes.astype(int) - 1
        return images, labels

    (archive,) = paths
    with _unpack(archive, folder) as inner:
        splits = [read(inner, split) for split in ("train", "test")]
    _write_splits("stl10", _STL10, splits, folder)


def _tiny_imagenet(paths, folder) -> None:
    """Write tiny-imagenet-200; its annotated val split is the test split.

    Rows are sorted by class, then by file. Classes are in the order of wnids.txt, as
    in mammoth's arrays, which Co2L and CCLIS use. Grey images become RGB.
    """
    decoding = decode.Decoding("pillow")

    def read(rows):
        labels, paths = zip(*rows, strict=True)
        with concurrent.futures.ThreadPoolExecutor() as pool:
            images = pool.map(lambda x: decoding(x.read_bytes(), str(x)), paths)
            return np.stack([*images]), np.array(labels)

    (archive,) = paths
    with _unpack(archive, folder) as inner:
        root = pathlib.Path(inner)
        names = tuple((root / "wnids.txt").read_text().split())
        train = [
            (label, path)
            for label, name in enumerate(names)
            for path in sorted((root / "train" / name / "images").iterdir())
        ]
        val = root / "val"
        lines = (val / "val_annotations.txt").read_text().splitlines()
        annotations = [line.split("\t")[:2] for line in lines]
        test = sorted((names.index(c), val / "images" / x) for x, c in annotations)
        splits = [read(train), read(test)]
    _write_splits("tiny_imagenet", names, splits, folder, decoder="pillow")


def _write_cifar(paths, folder, *, name, train, test, label_bytes, names) -> None:
    """Write CIFAR's records: label bytes, then the planes of 32 x 32 pixels.

    Args:
      train, test: paths of the files of each split.
      label_bytes: number of label bytes of a record; the last counts, in CIFAR-100 the
        fine label.
      names: path of the file with the classes.
    """

    def read_records(inner, files):
        raw = [np.fromfile(os.path.join(inner, file), np.uint8) for file in files]
        records = np.concatenate(raw).reshape(-1, label_bytes + 3 * 32 * 32)
        images = records[:, label_bytes:].reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1)
        return images, records[:, label_bytes - 1]

    (archive,) = paths
    with _unpack(archive, folder) as inner:
        with open(os.path.join(inner, names)) as file:
            classes = tuple(file.read().split())
        splits = [read_records(inner, files) for files in (train, test)]
    _write_splits(name, classes, splits, folder)


def _write_mnist(paths, folder) -> None:
    """Write MNIST's idx files: images and labels of train, then of test."""
    splits = [
        (_read_idx(images, axes=3).reshape(-1, 28, 28, 1), _read_idx(labels, axes=1))
        for images, labels in (paths[:2], paths[2:])
    ]
    _write_splits("mnist", tuple("0123456789"), splits, folder)


def _read_idx(path, axes) -> np.ndarray:
    """Read the numbers of a packed idx file, u8[N]."""
    with gzip.open(path, "rb") as file:
        return np.frombuffer(file.read(), np.uint8, offset=4 + 4 * axes)


def _write_splits(name, classes, splits, folder, decoder="") -> None:
    """Write (images, labels) of train and of test as plain arrays."""
    train, test = (
        arrays.examples(name, np.ascontiguousarray(images), labels, None)
        for images, labels in splits
    )
    data = stream.Dataset(name, classes, ("all",), train, None, test, decoder)
    convert.write_arrays(data, folder)


def _archives(name) -> tuple[Archive, ...]:
    """Read the archives of a set: lines of name, sha256, bytes and addresses."""
    table = pathlib.Path(__file__).with_name("archives.tsv").read_text()
    rows = [line.split("\t") for line in table.splitlines()]
    fields = [row[1:] for row in rows if row[0] == name]
    return tuple(Archive((*urls,), int(size), sha256) for sha256, size, *urls in fields)


_CIFAR10 = functools.partial(
    _write_cifar,
    name="cifar10",
    train=[f"data_batch_{i}.bin" for i in range(1, 6)],
    test=["test_batch.bin"],
    label_bytes=1,
    names="batches.meta.txt",
)
_CIFAR100 = functools.partial(
    _write_cifar,
    name="cifar100",
    train=["train.bin"],
    test=["test.bin"],
    label_bytes=2,
    names="fine_label_names.txt",
)
# Sets that may be fetched.
SETS = {
    name: KnownSet(_archives(name.removesuffix("_unlabelled")), write)
    for name, write in (
        ("cifar10", _CIFAR10),
        ("cifar100", _CIFAR100),
        ("mnist", _write_mnist),
        ("stl10", _stl10),
        ("stl10_unlabelled", functools.partial(_stl10, more="unlabeled_X.bin")),
        ("tiny_imagenet", _tiny_imagenet),
    )
}


def add_options(parser) -> None:
    """Add the options of `jaxcl data`."""
    parser.epilog = """examples:
  jaxcl data shapes --out=shapes
  jaxcl data cifar10 --out=data/cifar10
  jaxcl data mnist --out=data/mnist --from=FOLDER"""
    add = parser.add_argument
    add("name", choices=[*SETS, "shapes"], help="which set")
    add("--out", required=True, help="new or empty folder to write")
    by_hand = "its archive, or a folder with its archives, downloaded by hand"
    add("--from", dest="source", metavar="FILE_OR_FOLDER", help=by_hand)


def main(options: argparse.Namespace) -> int:
    """Run `jaxcl data`."""
    if options.name == "shapes":
        return _draw_shapes(options.out, options.source)
    fetch_set(options.name, options.out, source=options.source)
    print(
        f"{options.out}: {options.name}, read with "
        f"--config.data.name=arrays --config.data.path={options.out}"
    )
    return 0


def _draw_shapes(out: str, source: str | None) -> int:
    """Write the set `shapes` as PNG files, and print how to read a domain."""
    if source is not None:
        raise Refused("--from", source, "shapes is drawn; leave --from out")
    shapes.write_folders(shapes.shapes(), out)
    first, *_, last = shapes.DOMAINS
    print(
        f"{out}: shapes, a folder of images for each of {', '.join(shapes.DOMAINS)}\n"
        f"train on one:  jaxcl train own_images:{out}/{first} --workdir=runs/{first}\n"
        f"then another:  jaxcl update --run=runs/{first} --data={out}/{last}/train "
        f"--test={out}/{first}/test"
    )
    return 0
