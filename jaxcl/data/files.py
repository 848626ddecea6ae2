"""Formats of files: encoded images, packed .npz files, arrays with a digest."""

import concurrent.futures
import functools
import hashlib
import io
import os
import warnings
import zipfile
from typing import Any, Literal, NamedTuple

import numpy as np
from etils import epath
from PIL import Image, UnidentifiedImageError

from jaxcl.data import storage

EXTENSIONS = (".jpg", ".jpeg", ".png", ".webp", ".bmp", ".gif", ".ppm", ".tif", ".tiff")


class Unreadable(ValueError):
    """An image that cannot be read or decoded; the message names it."""


Channels = Literal[1, 3]  # grey, or RGB


def decode(data: bytes, name: str, *, decoder: str, channels: int = 3) -> np.ndarray:
    """Decode an image to u8[h,w,C], C = `channels`: 3 is RGB, 1 is grey.

    Grey and CMYK images become RGB, and alpha is dropped. The orientation in EXIF is
    NOT applied, as in torchvision's loader and TFDS. Raises `Unreadable`, a ValueError
    with `name` in its message, for bytes that are no image or are truncated.
    """
    if decoder == "cv2" and _complete(data):
        import cv2  # an extra; without it Pillow decodes

        mode = cv2.IMREAD_COLOR_RGB if channels == 3 else cv2.IMREAD_GRAYSCALE
        buffer = np.frombuffer(data, np.uint8)
        image = cv2.imdecode(buffer, mode | cv2.IMREAD_IGNORE_ORIENTATION)
        if image is not None:
            return image.reshape(*image.shape[:2], channels)
    # OpenCV silently fills the missing part of a truncated image with grey; Pillow
    # raises, so Pillow decodes every image that may be truncated.
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
    """Whether a JPEG or PNG ends in its end marker; False for other formats."""
    if data[:2] == b"\xff\xd8":
        return b"\xff\xd9" in data[-64:]
    return data[:4] == b"\x89PNG" and b"IEND" in data[-64:]


def image_files(folder: str) -> list[str]:
    """Paths of all images below a folder, sorted."""
    return storage.files(folder, EXTENSIONS)


class Files(NamedTuple):
    """Images in files: row -> u8[h,w,C]."""

    root: str
    paths: np.ndarray  # S[N], utf-8, relative to root; str takes four times the memory
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

        def sizes_and_times(paths):
            files = (os.path.join(self.root, path.decode()) for path in paths)
            return [_size_and_time(file) for file in files]

        paths = self.paths.tolist()
        parts = [paths[i : i + 1024] for i in range(0, len(paths), 1024)]
        # Threads, since on a network drive every file is a wait.
        with concurrent.futures.ThreadPoolExecutor() as pool:
            pairs = [x for part in pool.map(sizes_and_times, parts) for x in part]
        digest = hashlib.sha256(b"\0".join(paths))
        digest.update(np.array(pairs).astype("<i8").tobytes())
        return len(paths), digest.hexdigest()


def _size_and_time(path: str) -> tuple[int, int]:
    """Bytes and time of change of a file, -1 if it is missing: reading it will fail."""
    try:
        if storage.in_bucket(path):
            status = epath.Path(path).stat()
            return status.length, int(status.mtime)
        status = os.stat(path)
    except OSError:
        return -1, -1
    return status.st_size, status.st_mtime_ns


class Mapped(NamedTuple):
    """Rows of an .npy file that is never read as a whole.

    Holds the path, since a pickled memmap would send its pixels to the workers.
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
    """An .npy file, mapped and not read; each process opens it once."""
    return np.load(path, mmap_mode="r", allow_pickle=False)


class Loader(NamedTuple):
    """Reads a part of a set row by row: row -> u8[h,w,C]."""

    read: Any  # row -> u8[h,w,C], with a method name(row)
    rows: np.ndarray  # i64[N], which rows of `read` these are
    crop: Any = None  # a prefetch.CenterCrop for every image
    # Classes and domains, if unreadable images are to be replaced; else None.
    label: np.ndarray | None = None
    domain: np.ndarray | None = None

    def __call__(self, row: int) -> np.ndarray:
        """One image, or a substitute and a warning if it is unreadable.

        The substitute is the next readable row of the same class and domain, from the
        first again after the last, so the label stays true.
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
            # Python shows a warning of the same text once per process.
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

    A packed array K is four arrays: K__strips u8[B], encoded strips one after the
    other; K__ptr i64[S+1], where each strip begins; K__shape (N, H, W, C) of K;
    K__sha256 of K's bytes. A strip is n images on top of each other.
    """
    try:
        source = storage.whole(path)
        if not zipfile.is_zipfile(source):
            raise ValueError("no such file, or not an .npz file")
        with np.load(source, allow_pickle=False) as file:
            plain = {key: file[key] for key in keys if key in file}
            packed = [key for key in keys if key + "__strips" in file]
            return plain | {key: _unpack(file, key) for key in packed}
    except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile) as error:
        raise ValueError(f"{path} cannot be read: {error}") from error


def _unpack(file, key: str) -> np.ndarray:
    n, h, w, c = (int(x) for x in file[key + "__shape"])
    raw, pointers = file[key + "__strips"], file[key + "__ptr"]
    images, row, lossless = np.empty((n, h, w, c), np.uint8), 0, True
    for i, (start, end) in enumerate(zip(pointers[:-1], pointers[1:], strict=True)):
        data = raw[start:end].tobytes()
        strip = decode(data, f"{key} strip {i}", decoder="pillow", channels=c)
        strip = strip.reshape(-1, h, w, c)
        images[row : row + len(strip)] = strip
        row += len(strip)
        lossless = lossless and data[:2] != b"\xff\xd8"
    if row != n:
        raise ValueError(f"{key}: strips hold {row} images, {key}__shape says {n}")
    # JPEG decoders differ by a level or two; every other format must match.
    if lossless and sha256(images) != str(file[key + "__sha256"]):
        raise ValueError(f"{key}: decoded pixels do not match {key}__sha256")
    return images


def sha256(array: np.ndarray) -> str:
    """Digest of an array's bytes in C order."""
    flat = np.ascontiguousarray(array).reshape(-1)
    return hashlib.sha256(flat.view(np.uint8)).hexdigest()


def read_entry(directory: str, entry: dict) -> np.ndarray:
    """An array of a directory, checked against its digest if the entry has one."""
    path = os.path.join(directory, entry["file"])
    try:
        array = np.load(storage.whole(path), allow_pickle=False)
    except (OSError, ValueError, EOFError) as error:
        raise ValueError(f"{path} cannot be read: {error}") from error
    if "sha256" in entry and sha256(array) != entry["sha256"]:
        raise ValueError(f"{path}: its bytes do not match the sha256 in meta.json")
    return array
