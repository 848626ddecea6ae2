"""Images that a set holds more than once, within a split and in two of them.

A test image that is also trained on flatters every method, and a link or a copied
folder puts thousands of them there unseen. Images are the same where their bytes are:
pixels in memory, otherwise those of the file or record. What was saved twice in other
bytes, or cut a little differently, is not found.
"""

import concurrent.futures
import functools
import hashlib
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from jaxcl.data import stream

# What is looked through unasked: some two seconds.
BYTES = 2**31  # of images in memory
ROWS = 20_000  # of images that are read one by one
_SPLITS = ("train", "validation", "test")


class Found(NamedTuple):
    """How many rows of a set are not there for the first time."""

    within: dict[str, int]  # split -> rows whose image is in an earlier row of it
    trained: dict[str, int]  # validation, test -> rows whose image is in train
    example: str  # names two rows with one image

    def words(self, name: str) -> str:
        """One line that tells it, "" where there are none."""
        said = [
            f"{count} rows of {split} repeat an image of {split}"
            for split, count in self.within.items()
            if count
        ]
        said += [
            f"{count} rows of {split} are in train, too"
            for split, count in self.trained.items()
            if count
        ]
        return f"{name}: {'; '.join(said)} (such as {self.example})" if said else ""


def is_quick(dataset: stream.Dataset) -> bool:
    """Whether all images are looked through in about two seconds."""
    parts = _parts(dataset).values()
    rows = sum(stream.size(x) for x in parts if x.images is None)
    size = sum(x.images.nbytes for x in parts if x.images is not None)
    return rows <= ROWS and size <= BYTES


def find(dataset: stream.Dataset) -> Found:
    """Compare all images of a set, by a digest of their bytes.

    A row that cannot be read is no duplicate. Sets of graphs have no images.
    """
    first: dict[bytes, tuple[str, int]] = {}  # digest -> where it is met first
    within, trained, example = {}, {}, ""
    parts = _parts(dataset)
    for split, examples in parts.items():
        seen, again, known = set(), 0, 0
        for row, digest in enumerate(_digests(examples)):
            if digest is None:
                continue
            where = first.setdefault(digest, (split, row))
            again += digest in seen
            known += digest not in seen and where[0] == "train" != split
            if where != (split, row) and not example:
                example = f"{_name(parts, split, row)} and {_name(parts, *where)}"
            seen.add(digest)
        within[split] = again
        if split != "train":
            trained[split] = known
    return Found(within, trained, example)


def _parts(dataset) -> dict[str, stream.Examples]:
    """The splits that have images, train first."""
    splits = {name: getattr(dataset, name) for name in _SPLITS}
    return {
        name: part
        for name, part in splits.items()
        if part is not None and part.graphs is None
    }


def _digests(examples) -> Iterator[bytes | None]:
    """Hash every row; in threads, since on a network drive every file is a wait."""
    digest, rows = functools.partial(_digest, examples), range(stream.size(examples))
    if examples.images is not None:
        yield from map(digest, rows)
        return
    with concurrent.futures.ThreadPoolExecutor() as pool:
        yield from pool.map(digest, rows)


def _digest(examples, row) -> bytes | None:
    """Digest the bytes of an image, and its shape where that is not among them."""
    try:
        data = _bytes(examples, row)
    except (OSError, ValueError):
        return None
    return hashlib.blake2b(data, digest_size=16).digest()


def _bytes(examples, row) -> bytes:
    if examples.images is not None:
        return np.ascontiguousarray(examples.images[row]).tobytes()
    raw = getattr(examples.load, "raw", None)
    if raw is not None:
        return raw(row)
    image = examples.load(row)
    return repr(image.shape).encode() + np.ascontiguousarray(image).tobytes()


def _name(parts, split, row) -> str:
    load = parts[split].load
    if load is None or not hasattr(load, "name"):
        return f"row {row} of {split}"
    return load.name(row)
