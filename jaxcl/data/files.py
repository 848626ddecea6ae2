"""Formats of files: encoded images, packed .npz files, arrays with a digest."""

import concurrent.futures
import functools
import hashlib
import io
import os
import warnings
import zipfile
from typing import Any, NamedTuple

import numpy as np
from etils import epath
from PIL import Image, UnidentifiedImageError

from jaxcl.data import storage

EXTENSIONS = (".jpg", ".jpeg", ".png", ".webp", ".bmp", ".gif", ".ppm", ".tif", ".tiff")


class Unreadable(ValueError):
    """An image that cannot be read or decoded; the message names it."""


def decode(data: bytes, name: str, *, decoder: str, channels: int = 3) -> np.ndarray:
    """An encoded image as u8[h,w,C], C = `channels`: 3 is RGB, 1 is grey.

    Grey and CMYK images turn into RGB, alpha is dropped, the orientation noted in
    EXIF is NOT applied (as torchvision's loader and TFDS do). Raises ValueError
    naming `name` where the bytes are no image or are cut short.
    """
    if decoder == "cv2" and _complete(data):
        import cv2  # an extra; without it Pillow decodes

        mode = cv2.IMREAD_COLOR_RGB if channels == 3 else cv2.IMREAD_GRAYSCALE
        buffer = np.frombuffer(data, np.uint8)
        image = cv2.imdecode(buffer, mode | cv2.IMREAD_IGNORE_ORIENTATION)
        if image is not None:
            return image.reshape(*image.shape[:2], channels)
    # OpenCV fills the missing part of a truncated image with grey and says nothing;
    # Pillow raises, so it gets all doubtful ones.
    try:
        with Image.open(io.BytesIO(data)) as opened:
            if opened.mode.startswith("I;16"):  # convert() would clip, not scale
                opened = Image.fromarray((np.asarray(opened) >> 8).astype(np.uint8))
            image = np.asarray(opened.convert("RGB" if channels == 3 else "L"))
    except UnidentifiedImageError as error:
        raise Unreadable(f"{name} cannot be decoded: not a known format") from error
    except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:
        raise Unreadable(f"{name} cannot be decoded: {error}") from error
    return image.reshape(*image.shape[:2], channels)


def _complete(data: bytes) -> bool:
    """Whether the end marker is where it belongs; only for cv2's common formats."""
    if data[:2] == b"\xff\xd8":
        return b"\xff\xd9" in data[-64:]
    return data[:4] == b"\x89PNG" and b"IEND" in data[-64:]


def image_files(folder: str) -> list[str]:
    """Paths of all images below a folder, sorted."""
    return storage.files(folder, EXTENSIONS)


class Files(NamedTuple):
    """Images in files: row -> u8[h,w,C]."""

    root: str
    paths: np.ndarray  # S[N], utf-8, relative to root: a quarter of str's memory
    decoder: str
    channels: int

    def __call__(self, row: int) -> np.ndarray:
        """Read and decode one file."""
        name = self.name(row)
        try:
            data = storage.read(name)
        except OSError as error:
            raise Unreadable(f"{name} cannot be read: {error}") from error
        return decode(data, name, decoder=self.decoder, channels=self.channels)

    def name(self, row: int) -> str:
        """Path of a row's file."""
        return os.path.join(self.root, self.paths[row].decode())

    def stamp(self) -> tuple[int, str]:
        """Number of files; digest of their paths, sizes and times of change."""

        def look(paths):
            found = (os.path.join(self.root, path.decode()) for path in paths)
            return [_size_and_time(path) for path in found]

        paths = self.paths.tolist()
        parts = [paths[i : i + 1024] for i in range(0, len(paths), 1024)]
        # Threads: on a network drive each look is a wait.
        with concurrent.futures.ThreadPoolExecutor() as pool:
            found = np.array([x for part in pool.map(look, parts) for x in part])
        digest = hashlib.sha256(b"\0".join(paths))
        digest.update(found.astype("<i8").tobytes())
        return len(paths), digest.hexdigest()


def _size_and_time(path: str) -> tuple[int, int]:
    try:
        if storage.in_bucket(path):
            found = epath.Path(path).stat()
            return found.length, int(found.mtime)
        found = os.stat(path)
    except OSError:  # a missing file is an error when it is read
        return -1, -1
    return found.st_size, found.st_mtime_ns


class Mapped(NamedTuple):
    """Rows of an .npy file that is never read as a whole.

    Holds the path, since a pickled memmap would carry its pixels to the workers.
    """

    path: str

    def __call__(self, row: int) -> np.ndarray:
        """Copy one image out of the file."""
        return np.array(mapped(self.path)[row])

    def name(self, row: int) -> str:
        """File and row."""
        return f"{self.path}[{row}]"


@functools.lru_cache(maxsize=8)
def mapped(path: str) -> np.ndarray:
    """An .npy file without reading it; each process opens it when it first asks."""
    return np.load(path, mmap_mode="r", allow_pickle=False)


class Loader(NamedTuple):
    """Row by row reading of a part of a set: row -> u8[h,w,C]."""

    read: Any  # row -> u8[h,w,C], with a method name(row)
    rows: np.ndarray  # i64[N], which rows of `read` these are
    crop: Any = None  # a prefetch.CenterCrop that all images go through
    # Classes and domains, where unreadable images are to be replaced.
    label: np.ndarray | None = None
    domain: np.ndarray | None = None

    def __call__(self, row: int) -> np.ndarray:
        """One image; a substitute for an unreadable one comes with a warning.

        It is the next readable row of the same class and domain (after the last
        the first), so that the label stays true.
        """
        try:
            return self._image(row)
        except ValueError as error:
            if self.label is None:
                raise
            problem = error
        alike = (self.label == self.label[row]) & (self.domain == self.domain[row])
        alike = np.flatnonzero(alike)
        for other in np.roll(alike, -np.searchsorted(alike, row, "right"))[:-1]:
            try:
                image = self._image(other)
            except ValueError:
                continue
            # Python shows the same text once per process.
            text = f"{problem}; used {self.name(other)} in its place"
            warnings.warn(text, stacklevel=2)
            return image
        raise Unreadable(f"{problem}; no other image of its class can be read")

    def _image(self, row):
        image = self.read(int(self.rows[row]))
        return image if self.crop is None else self.crop(image)

    def name(self, row: int) -> str:
        """Where a row comes from, for messages."""
        return self.read.name(int(self.rows[row]))


def class_list(file: str, *, option: str = "classes") -> tuple[str, ...]:
    """Class names from a text file, one a line."""
    try:
        with open(file, encoding="utf-8") as lines:
            names = tuple(line.strip() for line in lines if line.strip())
    except OSError as error:
        raise ValueError(f"{option} = {file!r} cannot be read: {error}") from error
    if not names or len(set(names)) < len(names):
        raise ValueError(f"{option} = {file!r}: must hold at least one name, each once")
    return names


def read_npz(path: str, keys: tuple[str, ...]) -> dict[str, np.ndarray]:
    """The arrays among `keys` that a file holds; packed image arrays are decoded.

    An array K that would be big raw may be four arrays: K__strips u8[B], encoded
    images one after the other; K__ptr i64[S+1], where each begins; K__shape (N, H,
    W, C) of K; K__sha256 of K's bytes. A strip is n images on top of each other.
    """
    try:
        held = storage.whole(path)
        if not zipfile.is_zipfile(held):
            raise ValueError("no such file, or not an .npz file")
        with np.load(held, allow_pickle=False) as file:
            found = {key: file[key] for key in keys if key in file}
            packed = [key for key in keys if key + "__strips" in file]
            return found | {key: _unpack(file, key) for key in packed}
    except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile) as error:
        raise ValueError(f"{path} cannot be read: {error}") from error


def _unpack(file, key: str) -> np.ndarray:
    n, h, w, c = (int(x) for x in file[key + "__shape"])
    raw, pointers = file[key + "__strips"], file[key + "__ptr"]
    images, row, exact = np.empty((n, h, w, c), np.uint8), 0, True
    for i, (start, end) in enumerate(zip(pointers[:-1], pointers[1:], strict=True)):
        data = raw[start:end].tobytes()
        strip = decode(data, f"{key} strip {i}", decoder="pillow", channels=c)
        strip = strip.reshape(-1, h, w, c)
        images[row : row + len(strip)] = strip
        row += len(strip)
        exact = exact and data[:2] != b"\xff\xd8"
    if row != n:
        raise ValueError(f"{key}: strips hold {row} images, {key}__shape says {n}")
    # JPEG decoders differ by a level or two; everything else must match.
    if exact and sha256(images) != str(file[key + "__sha256"]):
        raise ValueError(f"{key}: decoded pixels do not match {key}__sha256")
    return images


def sha256(array: np.ndarray) -> str:
    """Digest of an array's bytes in C order."""
    flat = np.ascontiguousarray(array).reshape(-1)
    return hashlib.sha256(flat.view(np.uint8)).hexdigest()


def read_entry(directory: str, entry: dict) -> np.ndarray:
    """An array of a directory, whole, compared with its digest where it has one."""
    path = os.path.join(directory, entry["file"])
    try:
        array = np.load(storage.whole(path), allow_pickle=False)
    except (OSError, ValueError, EOFError) as error:
        raise ValueError(f"{path} cannot be read: {error}") from error
    if "sha256" in entry and sha256(array) != entry["sha256"]:
        raise ValueError(f"{path}: its bytes do not match the sha256 in meta.json")
    return array
