"""Sets in shards: tar files in WebDataset's layout, read image by image.

A shard is a tar file without compression. The members `KEY.jpg` (or .png, .webp, ...)
and `KEY.cls`, an integer, are an image and its label. `shards_index.npz` has the
place of each image, so that a row is one read of a range, on a disk or in a bucket.
"""

import io
import os
import tarfile
import zlib
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
from absl import logging
from PIL import Image

from jaxcl import schema, storage
from jaxcl.data import stream
from jaxcl.data.images import array_files, decode, listing, readers
from jaxcl.data.sources import shared
from jaxcl.data.stream import splits
from jaxcl.errors import Refused

INDEX = "shards_index.npz"
SHARD_BYTES = 256 << 20  # of images, after which another shard begins
# Beginning of a shard's name -> split, with a mark or the end of the name after it.
_SPLITS = {"train": "train", "val": "val", "validation": "val", "test": "test"}


class Index(NamedTuple):
    """The place of each image of a set, in the order of shards and their members."""

    shards: np.ndarray  # bytes[S], names
    sizes: np.ndarray  # i64[S], bytes of each shard
    split: np.ndarray  # bytes[N], "train", "val" or "test"
    shard: np.ndarray  # i32[N]
    offset: np.ndarray  # i64[N], of an image's first byte
    length: np.ndarray  # i64[N]
    crc: np.ndarray  # u32[N], CRC-32 of an image's bytes
    label: np.ndarray  # i32[N], -1 where there is none
    domain: np.ndarray  # i32[N]
    class_names: np.ndarray  # bytes[C]
    domain_names: np.ndarray  # bytes[D]
    left_out: np.ndarray  # bytes[], what was no image, in words


@shared.image_source
def shards(
    *,
    path: str,
    class_names: str | None = None,
    classes: str | None = None,
    test: schema.Fraction = 0.2,
    test_seed: schema.Natural = splits.TEST_SEED,
    images: shared.ImageOptions,
) -> stream.Dataset:
    """Read tar shards, as WebDataset or `jaxcl convert PATH FOLDER --shards` write.

    A shard's name begins with its split: "train", "val" or "validation", or "test"; of
    other names all are train rows. If there is no test split, "val" is, or a share of
    every class is drawn.

    Without an index all shards are read once, and an index is written to their folder.

    path: folder of the shards, on a disk or in a bucket.
    class_names: path of a text file, one name a line, label 0 first. None: those of the
      index, or else the labels.
    classes: path of a text file that names the classes to keep, in that order.
    test: share of each class that becomes the test split if no shard is one.
    test_seed: seed of that draw.

    Raises Refused for shards that the index does not describe, and for an image whose
    bytes are not those of the index.
    """
    index = _find_index(path)
    names = tuple(os.fsdecode(name) for name in index.class_names)
    if class_names is not None:
        names = shared.class_list(class_names, option="class_names")
    if (count := int(index.label.max(initial=-1)) + 1) > len(names):
        if class_names is not None or names:
            raise Refused(
                "class_names",
                class_names,
                f"has {len(names)} names; labels go up to {count - 1}",
            )
        names = tuple(map(str, range(count)))
    fetch = _Members(index.offset, index.length, index.crc)
    rows, options = np.arange(len(index.label)), {"unit": "image", "root": path}
    reader = readers.FileRows(
        index.shards, index.shard, rows, fetch, images.decoding, **options
    )
    all_rows = shared.read_by_row(reader, index.label, index.domain)
    by_split = {
        name: splits.take_rows(all_rows, np.flatnonzero(index.split == name.encode()))
        for name in ("train", "val", "test")
        if (index.split == name.encode()).any()
    }
    train, val = by_split["train"], by_split.get("val")
    evaluated = by_split.get("test")
    name = os.path.basename(os.fspath(path).rstrip("/"))
    if evaluated is None:
        evaluated, val = val, None
    if evaluated is None and names:
        drawn = splits.draw_test(name, names, train, test, test_seed)
        train, evaluated = drawn.train, drawn.test
    domains = tuple(os.fsdecode(name) for name in index.domain_names) or ("all",)
    data = stream.Dataset(name, names, domains, train, val, evaluated)
    if left_out := index.left_out.item().decode():
        data = data._replace(notes=(f"left out: {left_out}",))
    return shared.keep_listed_classes(data, classes)


def is_folder(path: storage.Path) -> bool:
    """Tell whether a folder has an index of shards, or tar files and nothing else."""
    if storage.exists(f"{os.fspath(path)}/{INDEX}"):
        return True
    if storage.in_bucket(path) or not os.path.isdir(path):
        return False
    names = [name for name in os.listdir(path) if name[0] != "."]
    return bool(names) and all(name.endswith(".tar") for name in names)


class _Members(NamedTuple):
    """Reads an image's bytes out of its shard; they must be those of the index."""

    offset: np.ndarray
    length: np.ndarray
    crc: np.ndarray

    def __call__(self, path: str, row: int) -> bytes:
        span = int(self.offset[row]), int(self.length[row])
        data = storage.read_range(path, *span)
        if zlib.crc32(data) != self.crc[row]:
            raise decode.Unreadable("its bytes are not those of the index")
        return data


def _find_index(path) -> Index:
    """Read the index of a folder, or make and write it."""
    file = f"{path}/{INDEX}"
    if storage.exists(file):
        index = _read_index(file)
        _check_shards(path, index)
        return index
    index = scan_shards(path)
    try:
        write_index(path, index)
    except OSError as error:
        logging.warning(
            "%s: the index is not written, and is made again in each run: %s",
            file,
            error.strerror or error,
        )
    return index


def _read_index(file: str) -> Index:
    with storage.reading(file):
        arrays = array_files.read_npz(file)
        index = Index(**{name: arrays[name] for name in Index._fields})
    (rows, *more), number = {getattr(index, x).shape for x in _COLUMNS}, index.shard
    if more or rows == (0,) or number.min() < 0 or number.max() >= len(index.shards):
        raise Refused(f"{file}: it is damaged; remove it to have it made again")
    for name in map(os.fsdecode, index.shards.tolist()):
        if os.path.isabs(name) or os.path.normpath(name).split(os.sep)[0] == "..":
            raise Refused(f"{file}: shard {name!r} is outside the folder")
    return index


def write_index(path: storage.Path, index: Index) -> None:
    """Write the index of a folder of shards."""
    with storage.replacing(f"{os.fspath(path)}/{INDEX}") as file:
        np.savez(file, **index._asdict())


def _check_shards(path, index) -> None:
    """Refuse shards that are not those of the index."""
    for name, size in zip(index.shards.tolist(), index.sizes.tolist(), strict=True):
        file = f"{path}/{os.fsdecode(name)}"
        actual = storage.file_size(file) if storage.exists(file) else None
        if actual != size:
            raise Refused(
                f"{file}: has {actual} bytes, {INDEX} says {size}; bring the shards "
                f"back, or remove {path}/{INDEX} to have it made again"
            )


def scan_shards(path: storage.Path) -> Index:
    """Make the index of a folder of shards, which are read once.

    Raises:
      Refused: no shards, a damaged one, a compressed one, a wrong label, or a shard
        without images.
    """
    is_shard = tuple(".tar .tar.gz .tgz .tar.zst".split())
    files = listing.list_files(path, lambda file: file.endswith(is_shard))
    if packed := [file for file in files if not file.endswith(".tar")]:
        raise Refused(
            f"{packed[0]}: a compressed shard cannot be read image by image; unpack it "
            "to a .tar file"
        )
    if not files:
        raise Refused("path", path, "has no .tar files")
    start, left_out = len(os.fspath(path).rstrip("/")) + 1, listing.LeftOut()
    columns: dict[str, list] = {name: [] for name in _COLUMNS}
    for number, (file, split) in enumerate(zip(files, _splits_of(files), strict=True)):
        with storage.reading(file), storage.open_seekable(file) as opened:
            members = list(_scan_shard(opened, file, left_out))
        if not members:
            raise Refused(f"{file}: has no images")
        for offset, length, crc, label in members:
            row = (split, number, offset, length, crc, label, 0)
            for name, value in zip(_COLUMNS, row, strict=True):
                columns[name].append(value)
    sizes = [storage.file_size(file) for file in files]
    return make_index(
        [os.fspath(file)[start:] for file in files],
        sizes,
        columns,
        left_out=listing.describe(left_out),
    )


_COLUMNS = {
    "split": bytes,
    "shard": np.int32,
    "offset": np.int64,
    "length": np.int64,
    "crc": np.uint32,
    "label": np.int32,
    "domain": np.int32,
}


def make_index(shards, sizes, columns, *, classes=(), domains=(), left_out="") -> Index:
    """Make an index from lists: names and sizes of shards, a list for each column."""
    encoded = {
        name: np.array([os.fsencode(x) for x in names], bytes)
        for name, names in (
            ("shards", shards),
            ("class_names", classes),
            ("domain_names", domains),
            ("split", columns["split"]),
        )
    }
    numbers = {
        name: np.array(columns[name], kind)
        for name, kind in _COLUMNS.items()
        if name != "split"
    }
    return Index(
        sizes=np.array(sizes, np.int64),
        left_out=np.array(left_out.encode()),
        **encoded,
        **numbers,
    )


def _splits_of(files) -> list[str]:
    """Tell the split of each shard by its name; all are "train" if no name has one."""

    def begins(file):
        stem = os.path.basename(file).removesuffix(".tar").lower()
        for word, split in _SPLITS.items():
            rest = stem.removeprefix(word)
            if rest != stem and not rest[:1].isalpha():
                return split
        return None

    by_file = {file: begins(file) for file in files}
    if {*by_file.values()} == {None}:
        return ["train"] * len(files)
    for file, split in by_file.items():
        if split is None or "train" not in by_file.values():
            raise Refused(
                f"{file}: names of shards must all begin with train, val, validation "
                "or test, or none of them; one must begin with train"
            )
    return [*by_file.values()]


def _scan_shard(opened, file, left_out) -> Iterator[tuple[int, int, int, int]]:
    """Yield offset, length, CRC and label of each image of a shard, in its order."""
    labels: dict = {}
    images: dict = {}
    with tarfile.open(fileobj=opened, mode="r:") as tar:
        for member in tar:
            if not member.isfile():
                continue
            folder, name = os.path.split(member.name)
            stem, _, ending = name.partition(".")
            key, reads = (folder, stem), listing.is_image(name)
            if not reads and ending != "cls":
                left_out[f"members .{ending.lower()[:12]}"] += 1
                continue
            data = tar.extractfile(member).read()
            if reads and key in images:
                raise Refused(
                    f"{file}: {os.path.join(*key)} has two images, one of them "
                    f"{member.name}; a row is one image and its label"
                )
            if reads:
                images[key] = member.offset_data, member.size, zlib.crc32(data)
            else:
                labels[key] = _read_label(data, file, member.name)
    for key, span in images.items():
        yield *span, labels.get(key, -1)


def _read_label(data: bytes, file: str, name: str) -> int:
    text = data.strip()
    if not text.isdigit() or len(text) > 9 or int(text) >= stream.LABELS:
        raise Refused(
            f"{file}: {name} is {text[:40]!r}; must be a label from 0 to "
            f"{stream.LABELS - 1}"
        )
    return int(text)


def write_shards(
    dataset: stream.Dataset, folder: str, shard_bytes: int = SHARD_BYTES
) -> None:
    """Write a set as tar shards with an index, for `shards`.

    Encoded images stay as they are, byte for byte; pixels become PNG.

    Args:
      dataset: set of images, in memory or in files.
      folder: folder to write, new or empty, on a disk or in a bucket.
      shard_bytes: bytes of images after which another shard begins.

    Raises:
      Refused: the folder is not empty, or the set is no grey or RGB images.
    """
    for examples in stream.splits_of(dataset).values():
        if examples.graphs is not None:
            raise Refused(f"{dataset.name}: has graphs; shards hold images")
        if (channels := examples.channels) not in (None, 1, 3):
            raise Refused(
                f"{dataset.name}: has {channels} channels; images of shards are grey "
                "or RGB, and `jaxcl convert` without --shards keeps all channels"
            )
    if not storage.in_bucket(folder):
        storage.check_blank(folder, folder)
        os.makedirs(folder, exist_ok=True)
    elif storage.exists(f"{folder}/{INDEX}"):
        raise Refused(f"{folder}/{INDEX} is there already; choose another folder")
    columns: dict[str, list] = {name: [] for name in _COLUMNS}
    files, sizes = [], []
    for split, examples in stream.splits_of(dataset).items():
        name, row, count = _SPLITS[split], 0, stream.count_rows(examples)
        while row < count:
            file = f"{name}-{len(files):06}.tar"
            with storage.replacing(f"{folder}/{file}") as opened:
                row = _write_shard(
                    opened, examples, row, shard_bytes, columns, name, len(files)
                )
            files.append(file)
            sizes.append(storage.file_size(f"{folder}/{file}"))
    # Last, so that a killed command leaves nothing that looks complete.
    names = {"classes": dataset.class_names, "domains": dataset.domain_names}
    write_index(folder, make_index(files, sizes, columns, **names))


def _write_shard(opened, examples, row, most, columns, split, number) -> int:
    """Write rows from `row` on until a shard is full; return the next row."""
    written, count = 0, stream.count_rows(examples)
    with tarfile.open(fileobj=opened, mode="w", format=tarfile.USTAR_FORMAT) as tar:
        while row < count and (not written or written < most):
            data, ending = _encode(examples, row)
            label, domain = int(examples.label[row]), int(examples.domain[row])
            offset = _add_member(tar, f"{row:09}.{ending}", data)
            if label >= 0:
                _add_member(tar, f"{row:09}.cls", str(label).encode())
            values = (split, number, offset, len(data), zlib.crc32(data), label, domain)
            for name, value in zip(_COLUMNS, values, strict=True):
                columns[name].append(value)
            written, row = written + len(data), row + 1
    return row


def _add_member(tar, name, data) -> int:
    """Add a file to a shard; return the offset of its first byte."""
    member = tarfile.TarInfo(name)  # without time or owner: equal sets, equal bytes
    member.size = len(data)
    tar.addfile(member, io.BytesIO(data))
    return tar.offset - -(-len(data) // tarfile.BLOCKSIZE) * tarfile.BLOCKSIZE


def _encode(examples, row) -> tuple[bytes, str]:
    """Return an image's bytes and the ending of its format."""
    if examples.streams:
        data = examples.reader.raw(row)
        try:
            with Image.open(io.BytesIO(data)) as opened:
                return data, (opened.format or "").lower().replace("jpeg", "jpg")
        except OSError:  # pixels, of an array that is mapped
            pass
    pixels, file = examples.read(row), io.BytesIO()
    plain = pixels[..., 0] if pixels.shape[-1] == 1 else pixels
    Image.fromarray(plain).save(file, "png")
    return file.getvalue(), "png"
