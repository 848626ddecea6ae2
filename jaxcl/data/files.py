"""Formats of files: encoded images, packed .npz files, arrays with a digest."""

import concurrent.futures
import contextlib
import functools
import hashlib
import io
import math
import os
import struct
import tokenize
import warnings
import zipfile
import zlib
from collections.abc import Iterable
from typing import Any, BinaryIO, Literal, NamedTuple

import numpy as np
from etils import epath
from PIL import Image, UnidentifiedImageError

from jaxcl.data import storage

EXTENSIONS = (".jpg", ".jpeg", ".png", ".webp", ".bmp", ".gif", ".ppm", ".tif", ".tiff")


class Unreadable(ValueError):
    """An image that cannot be read or decoded; the message names it."""


Channels = Literal[1, 3]  # grey, or RGB
PIXELS = 89_478_485  # Pillow's own limit: 256 MiB of RGB
_JPEG, _PNG = b"\xff\xd8", b"\x89PNG\r\n\x1a\n"
# Markers of a JPEG that begin a frame, with its size; and those without a length.
_FRAMES = {*range(0xC0, 0xD0)} - {0xC4, 0xC8, 0xCC}
_BARE = {0x01, *range(0xD0, 0xD9)}


def decode(
    data: bytes,
    name: str,
    *,
    decoder: str,
    channels: int = 3,
    max_pixels: int = PIXELS,
) -> np.ndarray:
    """Decode an image to u8[h,w,C], C = `channels`: 3 is RGB, 1 is grey.

    Grey and CMYK images become RGB, and alpha is dropped. The orientation in EXIF is
    NOT applied, as in torchvision's loader and TFDS. Raises `Unreadable`, a ValueError
    with `name` in its message, for bytes that are no image, are truncated, or say that
    they are an image of more than `max_pixels`, whatever the decoder.
    """
    size = _size(data)
    if size is not None:
        _check_size(name, *size, max_pixels)
    if decoder == "cv2" and size is not None and _complete(data):
        image = _by_cv2(data, channels)
        if image is not None:
            return image.reshape(*image.shape[:2], channels)
    # OpenCV silently fills the missing part of a truncated image with grey; Pillow
    # raises, so Pillow decodes every image that may be truncated.
    if Image.MAX_IMAGE_PIXELS is not None:  # beyond which Pillow refuses by itself
        Image.MAX_IMAGE_PIXELS = max(Image.MAX_IMAGE_PIXELS, max_pixels)
    try:
        with Image.open(io.BytesIO(data)) as opened:
            _check_size(name, *opened.size[::-1], max_pixels)
            return from_pillow(opened, name, channels=channels)
    except UnidentifiedImageError as error:
        raise Unreadable(
            f"{name} cannot be decoded: not a known format; "
            'config.data.on_corrupt="skip" takes another image in its place'
        ) from error
    except Unreadable:
        raise
    except (Image.DecompressionBombError, Image.DecompressionBombWarning) as error:
        raise Unreadable(
            f"{name}: {error}; allowed are config.data.max_pixels={max_pixels}"
        ) from error
    except Exception as error:  # of damaged bytes Pillow's plugins raise anything
        raise Unreadable(
            f"{name} cannot be decoded: {error!r}; "
            'config.data.on_corrupt="skip" takes another image in its place'
        ) from error


def from_pillow(image: Image.Image, name: str, *, channels: int = 3) -> np.ndarray:
    """The pixels of a PIL image, u8[h,w,C]; as in `decode`.

    Of 16 bits the upper eight are kept. Raises `Unreadable` for pixels that go beyond
    0 to 255 otherwise, and for floating ones, whose range is not known.
    """
    if image.mode.startswith("I;16"):  # convert() would clip, not scale
        image = Image.fromarray((np.asarray(image) >> 8).astype(np.uint8))
    elif image.mode in ("I", "F"):
        low, high = image.getextrema()
        if image.mode == "F" or low < 0 or high > 255:
            kind = "floating" if image.mode == "F" else "32-bit"
            raise Unreadable(
                f"{name}: has {kind} pixels from {low} to {high}; must be of 8 or 16 "
                "bits"
            )
    pixels = np.asarray(image.convert("RGB" if channels == 3 else "L"))
    return pixels.reshape(*pixels.shape[:2], channels)


def _by_cv2(data, channels) -> np.ndarray | None:
    """The image, None where OpenCV cannot decode it."""
    import cv2  # an extra; without it Pillow decodes

    mode = cv2.IMREAD_COLOR_RGB if channels == 3 else cv2.IMREAD_GRAYSCALE
    buffer = np.frombuffer(data, np.uint8)
    try:
        return cv2.imdecode(buffer, mode | cv2.IMREAD_IGNORE_ORIENTATION)
    except cv2.error:
        return None


def _check_size(name, height, width, max_pixels) -> None:
    """Refuse an image by what its header says, before there is memory for it."""
    if not 0 < height * width <= max_pixels:
        raise Unreadable(
            f"{name} is {height} x {width} pixels: must be at least 1, and at most "
            f"config.data.max_pixels={max_pixels} in all"
        )


def _complete(data: bytes) -> bool:
    """Whether a JPEG or PNG ends in its end marker; False for other formats."""
    if data[:2] == _JPEG:
        return b"\xff\xd9" in data[-64:]
    return data[:8] == _PNG and b"IEND" in data[-64:]


def _size(data: bytes) -> tuple[int, int] | None:
    """Height and width in the header of a JPEG or PNG; None: it is none."""

    def number(place, count):
        return int.from_bytes(data[place : place + count], "big")

    if data[:8] == _PNG:
        return (number(20, 4), number(16, 4)) if data[12:16] == b"IHDR" else None
    place = 2
    while place + 9 <= len(data) and data[place] == 0xFF:
        kind = data[place + 1]
        if kind in _FRAMES:
            return number(place + 5, 2), number(place + 7, 2)
        # A byte of filling, a marker alone, or a marker and its length.
        place += 1 if kind == 0xFF else 2
        place += 0 if kind == 0xFF or kind in _BARE else number(place, 2)
    return None


def image_files(folder: str, apart: Iterable[tuple[int, int]] = ()) -> list[str]:
    """Paths of all images below a folder, sorted; `apart` as for `storage.files`."""
    return storage.files(folder, EXTENSIONS, apart)


class Files(NamedTuple):
    """Images in files: row -> u8[h,w,C]."""

    root: str
    paths: np.ndarray  # S[N], relative to root; str would take four times the memory
    decoder: str
    channels: int
    max_pixels: int = PIXELS

    def __call__(self, row: int) -> np.ndarray:
        """Read and decode one file."""
        options = {"channels": self.channels, "max_pixels": self.max_pixels}
        name, data = self.name(row), self.raw(row)
        return decode(data, name, decoder=self.decoder, **options)

    def raw(self, row: int) -> bytes:
        """All bytes of a row's file."""
        name = self.name(row)
        try:
            return storage.read(name)
        except (OSError, ValueError) as error:  # ValueError: a name with a zero byte
            raise Unreadable(f"{name} cannot be read: {error}") from error

    def name(self, row: int) -> str:
        """Path of a row's file."""
        return os.path.join(self.root, os.fsdecode(self.paths[row]))

    def stamp(self) -> tuple[int, str]:
        """Number of files; digest of their paths, sizes and times of change."""

        def sizes_and_times(paths):
            files = (os.path.join(self.root, os.fsdecode(path)) for path in paths)
            return [size_and_time(file) for file in files]

        paths = self.paths.tolist()
        parts = [paths[i : i + 1024] for i in range(0, len(paths), 1024)]
        # Threads, since on a network drive every file is a wait.
        with concurrent.futures.ThreadPoolExecutor() as pool:
            pairs = [x for part in pool.map(sizes_and_times, parts) for x in part]
        digest = hashlib.sha256(b"\0".join(paths))
        digest.update(np.array(pairs).astype("<i8").tobytes())
        return len(paths), digest.hexdigest()


def size_and_time(path: str) -> tuple[int, int]:
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

    @property
    def channels(self) -> int:
        """C of the images."""
        return mapped(self.path).shape[-1]


@functools.lru_cache(maxsize=8)
def mapped(path: str) -> np.ndarray:
    """An .npy file, mapped and not read; each process opens it once."""
    try:
        with open(storage.ordinary(path), "rb") as file:
            check_claim(file, storage.size(path), os.path.basename(path))
        return np.load(path, mmap_mode="r", allow_pickle=False)
    except (OSError, ValueError, EOFError, OverflowError) as error:
        raise ValueError(f"{path} cannot be read: {error}") from error


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
        if self.crop is None:
            return image
        try:
            return self.crop(image)
        except ValueError as error:
            raise Unreadable(f"{self.name(row)}: {error}") from error

    def take(self, rows: np.ndarray) -> "Loader":
        """The loader of the images at `rows`, renumbered from 0."""
        return self._replace(
            rows=self.rows[rows],
            label=None if self.label is None else self.label[rows],
            domain=None if self.domain is None else self.domain[rows],
        )

    def name(self, row: int) -> str:
        """Where a row comes from, for messages."""
        return self.read.name(int(self.rows[row]))

    def raw(self, row: int) -> bytes:
        """Bytes that tell the image of a row from others, without decoding it."""
        own = int(self.rows[row])
        return (
            self.read.raw(own)
            if hasattr(self.read, "raw")
            else self.read(own).tobytes()
        )

    @property
    def channels(self) -> int | None:
        """C of the images, where it is known without reading one."""
        return getattr(self.read, "channels", None)


def class_list(file: str, *, option: str = "classes") -> tuple[str, ...]:
    """Class names from a text file, one a line."""
    try:
        lines = storage.read(file).decode().split("\n")
        names = tuple(line.strip() for line in lines if line.strip())
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"{option} = {file!r} cannot be read: {error}") from error
    if not names or len(set(names)) < len(names):
        raise ValueError(f"{option} = {file!r}: must hold at least one name, each once")
    return names


def kept(wanted: tuple[str, ...], names: tuple[str, ...]) -> np.ndarray:
    """New number of every class, i32[C], -1 for classes that are left out."""
    missing = [name for name in wanted if name not in names]
    if missing:
        raise ValueError(f"classes: {missing[:5]} not among the {len(names)} classes")
    numbers = np.full(len(names), -1, np.int32)
    numbers[[names.index(name) for name in wanted]] = np.arange(len(wanted))
    return numbers


def read_npz(path: str, keys: tuple[str, ...] | None = None) -> dict[str, np.ndarray]:
    """The arrays among `keys` that a file holds; packed image arrays are decoded.

    Without keys all are read, as they are.

    A packed array K is four arrays: K__strips u8[B], encoded strips one after the
    other; K__ptr i64[S+1], where each strip begins; K__shape (N, H, W, C) of K;
    K__sha256 of K's bytes. A strip is n images on top of each other.
    """
    try:
        source = storage.whole(path)
        if not zipfile.is_zipfile(source):
            raise ValueError("no such file, or not an .npz file")
        with zipfile.ZipFile(source) as archive:
            known = _Npz(archive, storage.size(path))
            if keys is None:
                return {key: known.read(key) for key in known.keys()}
            plain = {key: known.read(key) for key in keys if known.holds(key)}
            packed = [key for key in keys if known.holds(key + "__strips")]
            return plain | {key: _unpack(known, key) for key in packed}
    except MemoryError as error:
        raise ValueError(f"{path} cannot be read: too large for the memory") from error
    except _DAMAGED as error:
        raise ValueError(f"{path} cannot be read: {error}") from error


# What zipfile, zlib and NumPy raise for damaged bytes.
_DAMAGED = (
    OSError,
    ValueError,
    TypeError,
    KeyError,
    EOFError,
    IndexError,
    OverflowError,
    NotImplementedError,
    RuntimeError,
    SyntaxError,
    struct.error,
    zlib.error,
    tokenize.TokenError,
    zipfile.BadZipFile,
)
_DEFLATED = 1032  # deflate makes no more bytes of one


class _Npz(NamedTuple):
    """The arrays of an .npz file, none larger than its bytes can hold.

    np.load takes the memory that a header asks for, before there is a byte to fill it.
    """

    archive: zipfile.ZipFile
    size: int  # bytes of the file

    def keys(self) -> list[str]:
        """Names of all arrays."""
        return [name.removesuffix(".npy") for name in self.archive.namelist()]

    def holds(self, key: str) -> bool:
        """Whether there is an array of this name."""
        return f"{key}.npy" in self.archive.NameToInfo

    def read(self, key: str) -> np.ndarray:
        """An array."""
        info = self.archive.getinfo(f"{key}.npy")
        ratio = {zipfile.ZIP_STORED: 1, zipfile.ZIP_DEFLATED: _DEFLATED}
        if info.compress_type not in ratio:
            raise ValueError(
                f"{key} is compressed; must be as np.savez_compressed does"
            )
        most = ratio[info.compress_type] * min(info.compress_size, self.size)
        if info.file_size > most:
            raise ValueError(f"{key} cannot have {info.file_size} bytes of {most}")
        with self.archive.open(info) as file:
            check_claim(file, info.file_size, key)
        with self.archive.open(info) as file:
            return np.lib.format.read_array(file, allow_pickle=False)


def check_claim(file: BinaryIO, size: int, name: str) -> None:
    """Refuse an .npy file whose header says that it holds more than there is.

    Args:
      file: opened at its beginning.
      size: its bytes.
      name: for the message.
    """
    version = np.lib.format.read_magic(file)
    headers = {(1, 0): np.lib.format.read_array_header_1_0}
    read = headers.get(version, np.lib.format.read_array_header_2_0)
    shape, _, dtype = read(file)
    need = math.prod(shape) * dtype.itemsize
    if any(n < 0 for n in shape) or need > size:
        raise ValueError(
            f"{name} says {dtype}{list(shape)}, {need} bytes; it has {size}"
        )


def _unpack(file: _Npz, key: str) -> np.ndarray:
    shape = file.read(key + "__shape")
    if shape.shape != (4,) or shape.min() < 1:
        raise ValueError(f"{key}__shape is {shape.tolist()}, expected N, H, W and C")
    n, h, w, c = (int(x) for x in shape)
    raw, pointers = file.read(key + "__strips"), file.read(key + "__ptr")
    if raw.ndim != 1 or raw.dtype != np.uint8 or pointers.ndim != 1:
        raise ValueError(f"{key}__strips must be uint8[B], and {key}__ptr i64[S+1]")
    if c not in (1, 3) or n * h * w > PIXELS * len(pointers):
        raise ValueError(f"{key}__shape is {shape.tolist()}: more than its strips hold")
    images, row, lossless = np.empty((n, h, w, c), np.uint8), 0, True
    for i, (start, end) in enumerate(zip(pointers[:-1], pointers[1:], strict=True)):
        data = raw[start:end].tobytes()
        strip = decode(data, f"{key} strip {i}", decoder="pillow", channels=c)
        if strip.size % (h * w * c) or row + strip.size // (h * w * c) > n:
            raise ValueError(f"{key} strip {i} is {list(strip.shape)}, not {h} x {w}")
        strip = strip.reshape(-1, h, w, c)
        images[row : row + len(strip)] = strip
        row += len(strip)
        lossless = lossless and data[:2] != _JPEG
    if row != n:
        raise ValueError(f"{key}: strips hold {row} images, {key}__shape says {n}")
    # JPEG decoders differ by a level or two; every other format must match.
    if lossless and sha256(images) != str(file.read(key + "__sha256")):
        raise ValueError(f"{key}: decoded pixels do not match {key}__sha256")
    return images


def sha256(array: np.ndarray) -> str:
    """Digest of an array's bytes in C order."""
    flat = np.ascontiguousarray(array).reshape(-1)
    return hashlib.sha256(flat.view(np.uint8)).hexdigest()


def _read_npy(path) -> np.ndarray:
    source = storage.whole(path)
    with contextlib.ExitStack() as stack:
        file = source if isinstance(source, io.BytesIO) else open(source, "rb")
        stack.enter_context(file)
        check_claim(file, storage.size(path), os.path.basename(path))
        file.seek(0)
        return np.load(file, allow_pickle=False)


def read_entry(directory: str, entry: dict) -> np.ndarray:
    """An array of a directory, checked against its digest if the entry has one."""
    path = os.path.join(directory, entry["file"])
    try:
        array = _read_npy(path)
    except MemoryError as error:
        raise ValueError(f"{path} cannot be read: too large for the memory") from error
    except _DAMAGED as error:
        raise ValueError(f"{path} cannot be read: {error}") from error
    if "sha256" in entry and sha256(array) != entry["sha256"]:
        raise ValueError(f"{path}: its bytes do not match the sha256 in meta.json")
    return array
