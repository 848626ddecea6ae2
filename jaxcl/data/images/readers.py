"""Read images row by row: of files, of arrays, of one split."""

import contextlib
import dataclasses
import math
import os
import warnings
from collections.abc import Callable, Sequence
from typing import Any, Protocol, runtime_checkable

import numpy as np

from jaxcl import storage
from jaxcl.data.images import array_files, decode


@runtime_checkable
class Rows(Protocol):
    """Images that are read row by row, by several threads at once."""

    @property
    def channels(self) -> int | None:
        """Number of channels C; None if only reading an image would tell."""
        return None

    def __len__(self) -> int: ...

    def read(self, row: int) -> np.ndarray:
        """Read an image, u8[h, w, C]."""

    def name(self, row: int) -> str:
        """Return where a row comes from; no two rows have one name."""

    def raw(self, row: int) -> bytes:
        """Return bytes that identify an image: encoded, or shape and pixels."""
        image = np.ascontiguousarray(self.read(row))
        return repr(image.shape).encode() + image.tobytes()

    def files_of_rows(self) -> tuple[Sequence[str], np.ndarray] | None:
        """Return all files, and the number of each row's file; None: no files."""
        return None

    def take(self, rows: np.ndarray) -> "SplitRows":
        """Return the images at `rows`, renumbered from 0."""
        return SplitRows(self, rows)


@dataclasses.dataclass(frozen=True, eq=False)
class FunctionRows(Rows):
    """Images that a function makes."""

    function: Callable[[int], np.ndarray]  # row -> u8[h, w, C]
    count: int
    origin: str  # what has the rows, for their names

    def __len__(self) -> int:
        return self.count

    def read(self, row: int) -> np.ndarray:
        """Make an image."""
        return self.function(row)

    def name(self, row: int) -> str:
        """Return the origin and the number of a row."""
        return f"{self.origin} (row {row})"


@dataclasses.dataclass(frozen=True, eq=False)
class FileRows(Rows):
    """Images in files."""

    files: Sequence[str | bytes] | np.ndarray  # paths, relative to root
    which: np.ndarray  # i[N], number of each row's file
    place: np.ndarray  # i64[N], place of the row in its file
    # (path, place) -> an encoded image, or u8[h,w,C]
    fetch: Callable[[str, int], Any]
    decoding: decode.Decoding
    unit: str = ""  # of a place, for messages; "": a file is one image
    root: str = ""

    def __len__(self) -> int:
        return len(self.which)

    def read(self, row: int) -> np.ndarray:
        """Read and decode an image."""
        image = self._fetched(row)
        if isinstance(image, np.ndarray):
            return image
        return self.decoding(image, self.name(row))

    def raw(self, row: int) -> bytes:
        """Return an image's encoded bytes, or its pixels."""
        data = self._fetched(row)
        return data if isinstance(data, bytes) else data.tobytes()

    def _fetched(self, row):
        try:
            return self.fetch(self.path(self.which[row]), int(self.place[row]))
        except decode.Unreadable as error:
            raise decode.Unreadable(f"{self.name(row)}: {error}") from error
        except storage.DAMAGED as error:  # a ValueError: a name with a zero byte
            raise decode.Unreadable(
                f"{self.name(row)} cannot be read: {error}"
            ) from error

    def path(self, number: int) -> str:
        """Return the path of a file."""
        return os.path.join(self.root, os.fsdecode(self.files[number]))

    def name(self, row: int) -> str:
        """Return where a row comes from."""
        path = self.path(self.which[row])
        return f"{path} ({self.unit} {self.place[row]})" if self.unit else path

    def files_of_rows(self) -> tuple[list[str], np.ndarray]:
        """Return all files, and the number of each row's file."""
        return [self.path(x) for x in range(len(self.files))], self.which

    @property
    def channels(self) -> int:
        """The number of channels C."""
        return self.decoding.channels


def of_files(root: str, paths: Sequence[bytes], decoding: decode.Decoding) -> FileRows:
    """Read image files, whose paths are relative to `root`."""
    rows = np.arange(len(paths))
    # Bytes, since text would take four times the memory.
    files = np.array(paths, bytes)
    place = np.zeros_like(rows)

    def fetch(path, place):
        return storage.read_bytes(path)

    return FileRows(files, rows, place, fetch, decoding, root=root)


def of_array(path: str) -> FileRows:
    """Read rows of an .npy file that is never read as a whole."""

    def fetch(path, row):
        return np.array(array_files.mapped(path)[row])

    return _of_pixels(path, array_files.mapped(path).shape, fetch)


def in_memory(images: np.ndarray, name: str) -> FileRows:
    """Make a reader of images in memory.

    Args:
      name: name of the set; the images' digest is part of the file's name.
    """
    file = f"{name} {array_files.sha256(images)[:16]}"
    return _of_pixels(file, images.shape, lambda file, row: images[row])


def _of_pixels(file, shape, fetch) -> FileRows:
    rows, decoding = np.arange(shape[0]), decode.Decoding("", shape[-1])
    return FileRows((file,), np.zeros_like(rows), rows, fetch, decoding, "row")


_SAMPLED = 8  # images from which the size of all is estimated


@dataclasses.dataclass(frozen=True, eq=False)
class SplitRows(Rows):
    """Some rows of a set, cropped, and kept in memory once they are read."""

    reader: Rows  # of the set
    rows: np.ndarray  # i64[N], rows of `reader`
    crop: Callable | None = None  # a crops.CenterCrop for every image
    # Classes and domains, if unreadable images are to be replaced; else None.
    label: np.ndarray | None = None
    domain: np.ndarray | None = None
    cache: dict[int, np.ndarray] | None = None  # decoded images; None: too many

    def __len__(self) -> int:
        return len(self.rows)

    def read(self, row: int) -> np.ndarray:
        """Read an image; if it is unreadable, warn and read another.

        The substitute is the next readable row of the same class and domain,
        cyclically, so the label stays true.
        """
        try:
            return self._decode_image(row)
        except ValueError as error:
            if self.label is None:
                raise
            problem = error
        peers = (self.label == self.label[row]) & (self.domain == self.domain[row])
        peers = np.flatnonzero(peers)
        for other in np.roll(peers, -np.searchsorted(peers, row, "right"))[:-1]:
            try:
                image = self._decode_image(other)
            except ValueError:
                continue
            # Python shows a warning of the same text once per process.
            text = f"{problem}; used {self.name(other)} in its place"
            warnings.warn(text, stacklevel=2)
            return image
        raise decode.Unreadable(f"{problem}; no other image of its class can be read")

    def _decode_image(self, row):
        source_row = int(self.rows[row])
        if self.cache is not None and source_row in self.cache:
            return self.cache[source_row]
        image = self.reader.read(source_row)
        if self.crop is not None:
            try:
                image = self.crop(image)
            except ValueError as error:
                raise decode.Unreadable(f"{self.name(row)}: {error}") from error
        if self.cache is not None:
            self.cache[source_row] = image
        return image

    def image_bytes(self) -> float:
        """Estimate the bytes of a decoded image; infinite if none can be read."""
        sizes = []
        for row in np.linspace(0, len(self.rows) - 1, _SAMPLED).astype(int):
            with contextlib.suppress(ValueError):
                sizes.append(self._decode_image(row).nbytes)
        return float(np.mean(sizes)) if sizes else math.inf

    def take(self, rows: np.ndarray) -> "SplitRows":
        """Return the images at `rows`, renumbered from 0."""
        return dataclasses.replace(
            self,
            rows=self.rows[rows],
            label=None if self.label is None else self.label[rows],
            domain=None if self.domain is None else self.domain[rows],
        )

    def uncached(self) -> "SplitRows":
        """Return the same rows, which every reading decodes."""
        return dataclasses.replace(self, cache=None)

    def name(self, row: int) -> str:
        """Return where a row comes from."""
        return self.reader.name(int(self.rows[row]))

    def raw(self, row: int) -> bytes:
        """Return bytes that identify an image."""
        return self.reader.raw(int(self.rows[row]))

    def files_of_rows(self) -> tuple[Sequence[str], np.ndarray] | None:
        """Return all files, and the number of each row's file."""
        files = self.reader.files_of_rows()
        return files and (files[0], files[1][self.rows])

    @property
    def channels(self) -> int | None:
        """The number of channels C."""
        return self.reader.channels
