"""Tell whether a data set is still the one that a run or an update read.

A row is identified by its name (file, record or number), its label and its bytes. In
sets with many files the size and time of change of the file stand for the bytes.
"""

import concurrent.futures
import hashlib
import io
import os
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np
from etils import epath

from jaxcl import storage
from jaxcl.data import stream
from jaxcl.data.images import array_files, listing
from jaxcl.errors import Refused

FILE = "data.npz"  # in a run directory
SAMPLED = 256  # rows of a split of which other processes compare the bytes
ROWS = 20_000  # of so many files all bytes are read, in some two seconds


class Identity(NamedTuple):
    """The names, digests and labels of all rows of a set, one split after another."""

    names: np.ndarray  # S[N], where each row is read from
    marks: np.ndarray  # u64[N], digests; 0: the row could not be read
    split: np.ndarray  # u8[N], number in `stream.SPLITS`
    label: np.ndarray  # i32[N]
    domain: np.ndarray  # i32[N]
    class_names: np.ndarray  # S[C]
    by_bytes: np.ndarray  # bool[], marks digest the bytes, not sizes and times

    def digest(self) -> str:
        """Return the sha256 of the identity."""
        digest = hashlib.sha256()
        for array in self:
            kind = array.dtype.kind
            digest.update(f"{kind}{array.shape}".encode())
            is_text = kind == "S"
            digest.update(b"\0".join(array.tolist()) if is_text else array.tobytes())
        return digest.hexdigest()

    def splits(self) -> list[str]:
        """List the splits that have rows, train first."""
        return [stream.SPLITS[number] for number in np.unique(self.split).tolist()]

    def rows(self, split: str) -> np.ndarray:
        """List the rows of a split."""
        return np.flatnonzero(self.split == stream.SPLITS.index(split))


class Changed(Refused):
    """Raised if the data are not those that a run directory began with."""


def identify(dataset: stream.Dataset, by_bytes: bool | None = None) -> Identity:
    """Return the identity of a set: name, digest, label and domain of every row.

    Args:
      dataset: set from a source.
      by_bytes: whether to read all bytes, even of many files; None: of up to `ROWS`
        files. Pixels in memory are always read.
    """
    splits = stream.splits_of(dataset)
    if by_bytes is None:
        read = [x for x in splits.values() if x.reader is not None]
        by_bytes = sum(len(x.label) for x in read) <= ROWS
    columns = [_identify_split(name, x, by_bytes) for name, x in splits.items()]
    names, marks, label, domain = map(np.concatenate, zip(*columns, strict=True))
    numbers = np.array([stream.SPLITS.index(name) for name in splits], np.uint8)
    split = np.repeat(numbers, [len(x) for x, *_ in columns])
    class_names = np.array([os.fsencode(name) for name in dataset.class_names], bytes)
    return Identity(names, marks, split, label, domain, class_names, np.array(by_bytes))


def _identify_split(split, examples, by_bytes) -> tuple[np.ndarray, ...]:
    """Return names, marks, labels and domains of a split; graphs are one row."""
    if examples.graphs is not None:
        arrays = [np.asarray(x) for x in examples.graphs if x is not None]
        arrays += [examples.label, examples.domain]
        digest = _digest("".join(map(array_files.sha256, arrays)).encode())
        zero = np.zeros(1, np.int32)
        return np.array([split.encode()]), np.array([digest], np.uint64), zero, zero
    reader, rows = examples.reader, range(len(examples.label))
    files = None if by_bytes or reader is None else reader.files_of_rows()
    if reader is None:
        names = [f"row {row} of {split}".encode() for row in rows]
        digests: Iterable = (_digest(np.ascontiguousarray(x)) for x in examples.images)
    else:
        names = [os.fsencode(reader.name(row)) for row in rows]
        digests = _read_marks(reader, rows) if files is None else _file_marks(*files)
    marks = np.fromiter(digests, np.uint64, len(rows))
    return np.array(names, bytes), marks, examples.label, examples.domain


def _digest(data) -> int:
    return int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "little")


def _read_marks(reader, rows) -> list[int]:
    """Digest the bytes of images, 0 where they cannot be read."""

    def read_mark(row):
        try:
            return _digest(reader.raw(row))
        except (OSError, ValueError):
            return 0

    # In threads, since on a network drive every file is a wait.
    with concurrent.futures.ThreadPoolExecutor() as pool:
        return list(pool.map(read_mark, rows))


def _file_marks(files, file_numbers) -> np.ndarray:
    """Digest the size and time of each row's file, u64[N]."""
    pairs = zip(files, sizes_and_times(files).tolist(), strict=True)
    marks = [_digest(repr(pair).encode()) for pair in pairs]
    return np.array(marks, np.uint64)[file_numbers]


def sizes_and_times(files: Sequence[str]) -> np.ndarray:
    """Return bytes and time of change of files, i64[N, 2]; see `size_and_time`."""
    chunks = [files[i : i + 1024] for i in range(0, len(files), 1024)]
    with concurrent.futures.ThreadPoolExecutor() as pool:
        pairs = pool.map(lambda part: [size_and_time(file) for file in part], chunks)
    return np.array([x for part in pairs for x in part], np.int64).reshape(-1, 2)


def size_and_time(path: str) -> tuple[int, int]:
    """Return bytes and time of change of a file; -1: it is missing."""
    try:
        if storage.in_bucket(path):
            status = epath.Path(path).stat()
            return status.length, int(status.mtime)
        status = os.stat(path)
    except OSError:
        return -1, -1
    return status.st_size, status.st_mtime_ns


def check_data(workdir: epath.PathLike, identity: Identity) -> None:
    """Refuse data that differ from those that a run directory began with.

    Args:
      workdir: the run directory.
      identity: present identity of the data.

    Raises:
      Changed: the message says how many rows differ, and names some.
    """
    before = read_identity(workdir)
    if before is not None and (changed := describe_changes(before, identity)):
        raise Changed(
            f"{workdir}: its data have changed since it began: {changed}. Give another "
            f"--workdir, or restore the data; without {FILE} in it, it continues with "
            "what there is now"
        )


def write_identity(workdir: epath.PathLike, identity: Identity) -> None:
    """Write the identity of a run's data, unless it is there already.

    Raises:
      OSError: the directory cannot be written.
    """
    path = os.path.join(os.fspath(workdir), FILE)
    if not storage.exists(path):
        with storage.replacing(path) as file:
            np.savez_compressed(file, **identity._asdict())


def pack(identity: Identity) -> bytes:
    """Pack an identity into bytes, for another process."""
    np.savez_compressed(file := io.BytesIO(), **identity._asdict())
    return file.getvalue()


def unpack(data: bytes) -> Identity:
    """Unpack an identity from the bytes that `pack` returned."""
    return Identity(**np.load(io.BytesIO(data), allow_pickle=False))


def without_times(dataset: stream.Dataset, identity: Identity) -> Identity:
    """Replace file times, which differ between copies, by bytes of some files."""
    if identity.by_bytes:
        return identity
    marks = np.zeros_like(identity.marks)
    for split, examples in stream.splits_of(dataset).items():
        rows = identity.rows(split)
        if examples.reader is None:  # of pixels in memory, whose bytes were read
            marks[rows] = identity.marks[rows]
            continue
        chosen = np.unique(np.linspace(0, len(rows) - 1, SAMPLED).astype(int))
        marks[rows[chosen]] = _read_marks(examples.reader, chosen)
    return identity._replace(marks=marks)


def read_identity(workdir: epath.PathLike) -> Identity | None:
    """Read the identity of a run's data; None if there is none.

    Raises:
      Refused: the file is damaged.
    """
    path = os.path.join(os.fspath(workdir), FILE)
    if not storage.exists(path):
        return None
    try:
        return Identity(**array_files.read_npz(path))
    except (TypeError, ValueError) as error:
        raise Refused(f"{path} is damaged: {error}; remove it") from error


def describe_changes(before: Identity, after: Identity) -> str:
    """Describe how many rows of two sets differ, with the first names; "": none.

    A changed row has other bytes, another label or domain, or is in another split.
    """
    if before.digest() == after.digest():
        return ""
    alike = bool(before.by_bytes) == bool(after.by_bytes)
    old, new = (
        {x[0]: x[1 + (not alike) :] for x in _describe_rows(y)} for y in (before, after)
    )
    differ = {
        "added": [name for name in new if name not in old],
        "removed": [name for name in old if name not in new],
        "changed": [name for name in new if old.get(name, new[name]) != new[name]],
    }
    phrases = [
        f"{listing.say_names([os.fsdecode(x) for x in names])} {change}"
        for change, names in differ.items()
        if names
    ]
    return "; ".join(phrases) or "the order of the rows, or the names of classes"


def _describe_rows(identity) -> Iterable[tuple]:
    """Return name, mark, name of the class, domain and split of each row."""
    classes = np.append(identity.class_names, b"")[identity.label]
    columns = (identity.names, identity.marks, classes, identity.domain, identity.split)
    return zip(*(column.tolist() for column in columns), strict=True)


def common(test: Identity, train: Identity) -> list[str]:
    """List the test rows whose images are also in the train split."""
    if not (test.by_bytes and train.by_bytes):
        return []
    train_marks, rows = train.marks[train.rows("train")], test.rows("test")
    twice = np.isin(test.marks[rows], train_marks[train_marks > 0])
    return [os.fsdecode(name) for name in test.names[rows[twice]]]


def describe_duplicates(identity: Identity, name: str) -> str:
    """Describe in one line the images that occur more than once; "": none.

    Images are equal if their bytes are: bytes of the file or record, or pixels in
    memory. A row that cannot be read is no duplicate. Sets of graphs have no images.
    """
    train, phrases = identity.marks[identity.rows("train")], []
    for split in identity.splits():
        marks = identity.marks[identity.rows(split)]
        marks = marks[marks > 0]
        if repeats := len(marks) - len(np.unique(marks)):
            phrases.append(f"{repeats} rows of {split} repeat an image of {split}")
        if split != "train" and (count := np.isin(marks, train).sum()):
            phrases.append(f"{count} rows of {split} are in train, too")
    if not phrases:
        return ""
    order = np.argsort(identity.marks, kind="stable")
    marks = identity.marks[order]
    first = np.flatnonzero((marks[1:] == marks[:-1]) & (marks[1:] > 0))[0]
    pair = (os.fsdecode(identity.names[row]) for row in order[first : first + 2])
    return f"{name}: {'; '.join(phrases)} (such as {' and '.join(pair)})"
