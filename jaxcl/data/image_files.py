"""Formats of files: encoded images, packed .npz files, arrays with a digest."""

import contextlib
import functools
import hashlib
import io
import math
import os
import struct
import tarfile
import tokenize
import warnings
import zipfile
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import numpy as np
from PIL import Image, UnidentifiedImageError

from jaxcl.data import storage, stream
from jaxcl.errors import Refused


class Unreadable(Refused):
    """An image that cannot be read or decoded; the message names it."""


Channels = Literal[1, 3]  # grey, or RGB
PIXELS = 89_478_485  # Pillow's own limit: 256 MiB of RGB
_JPEG, _PNG = b"\xff\xd8", b"\x89PNG\r\n\x1a\n"


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
    tarfile.TarError,
    zlib.error,
    tokenize.TokenError,
    zipfile.BadZipFile,
)


@contextlib.contextmanager
def reading(path: str) -> Iterator[None]:
    """Turn a library's errors about a file's bytes into Refused in this context."""
    try:
        yield
    except MemoryError as error:
        raise Refused(f"{path} cannot be read: too large for the memory") from error
    except _DAMAGED as error:
        raise Refused(f"{path} cannot be read: {error}") from error


def lift_pillow_limit() -> None:
    """Lift Pillow's limit of pixels, since config.data.max_pixels has one.

    For commands alone: Pillow's limit holds for the whole process.
    """
    Image.MAX_IMAGE_PIXELS = None


class Decoding(NamedTuple):
    """Decodes images."""

    decoder: str  # "cv2" or "pillow"
    channels: int = 3  # 3 is RGB, 1 is grey
    max_pixels: int = PIXELS
    background: int = 255  # level behind transparent pixels
    bits: int | None = None  # bits that 16-bit greys use; None: as an image shows
    jpeg_side: int | None = None  # see `shrinkage`; None: JPEGs are decoded whole

    def __call__(self, data: bytes, name: str) -> np.ndarray:
        """Decode an image to u8[h,w,C], see `convert`.

        The orientation in EXIF is NOT applied, as in torchvision's loader and TFDS.

        Raises:
          Unreadable: the bytes are no image, are truncated, or say that they are an
            image of more than `max_pixels`; the message has `name`.
        """
        try:
            with Image.open(io.BytesIO(data)) as opened:  # reads the header alone
                self.check_size(name, *opened.size[::-1])
                factor = self.shrinkage(opened)
                if self.decoder == "cv2" and _is_plain(data, opened):
                    image = _by_cv2(data, self.channels, factor)
                    if image is not None:
                        return image.reshape(*image.shape[:2], self.channels)
                if factor > 1:
                    width, height = opened.size
                    opened.draft(None, (width // factor, height // factor))
                return self.convert(opened, name)
        except Unreadable:
            raise
        except (Image.DecompressionBombError, Image.DecompressionBombWarning) as error:
            raise Unreadable(
                f"{name}: {error}; allowed are config.data.max_pixels={self.max_pixels}"
                f" and PIL.Image.MAX_IMAGE_PIXELS={Image.MAX_IMAGE_PIXELS}"
            ) from error
        except Exception as error:  # of damaged bytes Pillow's plugins raise anything
            unknown = isinstance(error, UnidentifiedImageError)
            raise Unreadable(
                f"{name} cannot be decoded: "
                f"{'not a known format' if unknown else repr(error)}; "
                'config.data.on_corrupt="skip" takes another image in its place'
            ) from error

    def convert(self, image: Image.Image, name: str) -> np.ndarray:
        """Return the pixels of a PIL image, u8[h,w,C].

        Grey, palette and CMYK images become RGB, or grey where `channels` is 1.
        Transparent pixels are composed on the grey level `background`. 16-bit greys
        keep the upper eight of `bits` bits; None: of as many as the image uses.

        Raises:
          Unreadable: floating pixels, whose range is not known; 16-bit ones that use
            more than `bits`.
        """
        if image.mode == "I" or image.mode.startswith("I;16"):
            pixels = _eight_bits(np.asarray(image), name, self.bits)
            image = Image.fromarray(pixels)
        elif image.mode == "F":
            low, high = image.getextrema()
            raise Unreadable(
                f"{name}: has floating pixels from {low} to {high}; must be of 8 or 16 "
                "bits"
            )
        elif image.has_transparency_data:
            image = image.convert("RGBA")
            ground = (self.background,) * 3 + (255,)
            ground = Image.new("RGBA", image.size, ground)
            image = Image.alpha_composite(ground, image)
        pixels = np.asarray(image.convert("RGB" if self.channels == 3 else "L"))
        return pixels.reshape(*pixels.shape[:2], self.channels)

    def shrinkage(self, opened: Image.Image) -> int:
        """Return 8, 4, 2 or 1: a JPEG is decoded to this part of its height and width.

        It is the largest with which the shorter side keeps `jpeg_side` pixels. A JPEG
        is stored by frequency, so that fewer of its coefficients are decoded.
        """
        if self.jpeg_side is None or opened.format != "JPEG":
            return 1
        shorter = min(opened.size)
        return next((n for n in (8, 4, 2) if shorter // n >= self.jpeg_side), 1)

    def check_size(self, name: str, height: int, width: int) -> None:
        """Refuse an image that its header shows to be too large."""
        if not 0 < height * width <= self.max_pixels:
            raise Unreadable(
                f"{name} is {height} x {width} pixels: must be at least 1, and at most "
                f"config.data.max_pixels={self.max_pixels} in all"
            )


def _eight_bits(pixels, name, bits) -> np.ndarray:
    """Return the upper eight bits of greys of `bits` bits."""
    low, high = int(pixels.min()), int(pixels.max())
    if low < 0 or high > 65535:
        raise Unreadable(
            f"{name}: has pixels from {low} to {high}; must be of 8 or 16 bits"
        )
    if bits is None:  # what one image alone can tell
        bits = 8 if high < 256 else 16 if high >> 15 else None
    if bits is None or high >> bits:
        raise Unreadable(
            f"{name}: has 16-bit pixels up to {high}; config.data.bits, from 8 to 16, "
            "says how many bits all images of a set use"
        )
    return (pixels >> (bits - 8)).astype(np.uint8)


def _by_cv2(data, channels, factor) -> np.ndarray | None:
    """Return the image, None where OpenCV cannot decode it."""
    import cv2  # an extra; without it Pillow decodes

    if factor > 1:
        kind = "COLOR" if channels == 3 else "GRAYSCALE"
        mode = getattr(cv2, f"IMREAD_REDUCED_{kind}_{factor}")
    else:
        mode = cv2.IMREAD_COLOR_RGB if channels == 3 else cv2.IMREAD_GRAYSCALE
    buffer = np.frombuffer(data, np.uint8)
    try:
        image = cv2.imdecode(buffer, mode | cv2.IMREAD_IGNORE_ORIENTATION)
    except cv2.error:
        return None
    # It has no name for a smaller RGB image.
    turned = factor > 1 and channels == 3
    return np.ascontiguousarray(image[..., ::-1]) if turned else image


def _is_plain(data: bytes, opened: Image.Image) -> bool:
    """Tell whether OpenCV decodes an image as Pillow does.

    That holds for a JPEG, or a PNG of 8 bits without transparency. The image must end
    in its end marker: OpenCV fills the missing part of a truncated image with grey,
    silently.
    """
    if data[:2] == _JPEG:
        return b"\xff\xd9" in data[-64:]
    opaque = not opened.has_transparency_data
    plain = data[:8] == _PNG and data[24] <= 8 and opaque
    return plain and opened.mode != "LA" and b"IEND" in data[-64:]


class FileRows(NamedTuple):
    """A reader of images in files; it is called with a row, and returns u8[h, w, C]."""

    files: Sequence[str | bytes] | np.ndarray  # paths, relative to root
    which: np.ndarray  # i[N], number of each row's file
    place: np.ndarray  # i64[N], place of the row in its file
    # (path, place) -> an encoded image, or u8[h,w,C]
    fetch: Callable[[str, int], Any]
    decoding: Decoding
    unit: str = ""  # of a place, for messages; "": a file is one image
    root: str = ""

    def __call__(self, row: int) -> np.ndarray:
        """Read and decode one image."""
        image = self._fetched(row)
        if isinstance(image, np.ndarray):
            return image
        return self.decoding(image, self.name(row))

    def raw(self, row: int) -> bytes:
        """Return bytes that identify an image: encoded, or its pixels."""
        data = self._fetched(row)
        return data if isinstance(data, bytes) else data.tobytes()

    def _fetched(self, row):
        try:
            return self.fetch(self.path(self.which[row]), int(self.place[row]))
        except Unreadable as error:
            raise Unreadable(f"{self.name(row)}: {error}") from error
        except _DAMAGED as error:  # a ValueError: a name with a zero byte
            raise Unreadable(f"{self.name(row)} cannot be read: {error}") from error

    def path(self, number: int) -> str:
        """Return the path of a file."""
        return os.path.join(self.root, os.fsdecode(self.files[number]))

    def name(self, row: int) -> str:
        """Return where a row comes from, for messages."""
        path = self.path(self.which[row])
        return f"{path} ({self.unit} {self.place[row]})" if self.unit else path

    def files_of_rows(self) -> tuple[list[str], np.ndarray]:
        """Return all files, and the number of the file of each row, i64[N]."""
        return [self.path(x) for x in range(len(self.files))], self.which

    @property
    def channels(self) -> int:
        """The number of channels C of the images."""
        return self.decoding.channels


def of_files(root: str, paths: Sequence[bytes], decoding: Decoding) -> FileRows:
    """Read image files, whose paths are relative to `root`."""
    rows = np.arange(len(paths))
    # Bytes, since text would take four times the memory.
    files = np.array(paths, bytes)
    return FileRows(files, rows, np.zeros_like(rows), _fetch_file, decoding, root=root)


def _fetch_file(path, place) -> bytes:
    return storage.read_bytes(path)


def of_array(path: str) -> FileRows:
    """Read rows of an .npy file that is never read as a whole."""
    rows, channels = np.arange(len(mapped(path))), mapped(path).shape[-1]
    which, pixels = np.zeros_like(rows), Decoding("", channels)
    return FileRows((path,), which, rows, _fetch_row, pixels, "row")


def _fetch_row(path, row) -> np.ndarray:
    return np.array(mapped(path)[row])


def in_memory(images: np.ndarray, name: str) -> FileRows:
    """Make a reader of images in memory.

    Args:
      name: name of the set; the images' digest is part of the file's name.
    """
    rows = np.arange(len(images))
    file, pixels = f"{name} {sha256(images)[:16]}", Decoding("", images.shape[-1])
    fetch = functools.partial(_fetch_held, images)
    return FileRows((file,), np.zeros_like(rows), rows, fetch, pixels, "row")


def _fetch_held(images, path, row) -> np.ndarray:
    return images[row]


@functools.lru_cache(maxsize=8)
def mapped(path: str) -> np.ndarray:
    """Map an .npy file without reading it; it is opened once."""
    with reading(path):
        file = storage.check_ordinary(path)
        return np.load(file, mmap_mode="r", allow_pickle=False)


_SAMPLED = 8  # images from which the size of all is estimated


class SplitRows(NamedTuple):
    """Reads a part of a set row by row: row -> u8[h,w,C]."""

    read: Any  # a FileRows, or another record with its methods
    rows: np.ndarray  # i64[N], rows of `read`
    crop: Callable | None = None  # a prefetch.CenterCrop for every image
    # Classes and domains, if unreadable images are to be replaced; else None.
    label: np.ndarray | None = None
    domain: np.ndarray | None = None
    cache: dict[int, np.ndarray] | None = None  # decoded images; None: too many

    def __call__(self, row: int) -> np.ndarray:
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
        alike = (self.label == self.label[row]) & (self.domain == self.domain[row])
        alike = np.flatnonzero(alike)
        for other in np.roll(alike, -np.searchsorted(alike, row, "right"))[:-1]:
            try:
                image = self._decode_image(other)
            except ValueError:
                continue
            # Python shows a warning of the same text once per process.
            text = f"{problem}; used {self.name(other)} in its place"
            warnings.warn(text, stacklevel=2)
            return image
        raise Unreadable(f"{problem}; no other image of its class can be read")

    def _decode_image(self, row):
        source_row = int(self.rows[row])
        if self.cache is not None and source_row in self.cache:
            return self.cache[source_row]
        image = self.read(source_row)
        if self.crop is not None:
            try:
                image = self.crop(image)
            except ValueError as error:
                raise Unreadable(f"{self.name(row)}: {error}") from error
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
        """Return the loader of the images at `rows`, renumbered from 0."""
        return self._replace(
            rows=self.rows[rows],
            label=None if self.label is None else self.label[rows],
            domain=None if self.domain is None else self.domain[rows],
        )

    def name(self, row: int) -> str:
        """Return where a row comes from, for messages."""
        return self.read.name(int(self.rows[row]))

    def raw(self, row: int) -> bytes:
        """Read bytes that identify an image, without decoding it."""
        return self.read.raw(int(self.rows[row]))

    def files_of_rows(self) -> tuple[Sequence[str], np.ndarray]:
        """Return all files, and the number of the file of each row, i64[N]."""
        names, which = self.read.files_of_rows()
        return names, which[self.rows]

    @property
    def channels(self) -> int | None:
        """The number of channels C; None if only reading an image would tell."""
        return self.read.channels


def examples(
    reader: Any,
    label: np.ndarray,
    domain: np.ndarray | None = None,
) -> stream.Examples:
    """Make examples that are read row by row.

    Args:
      reader: a `FileRows` of all rows, or another record with its methods.
      label: i[N], -1 where unknown.
      domain: i[N]; None: one domain.
    """
    label = np.asarray(label, np.int32)
    domain = np.zeros_like(label) if domain is None else np.asarray(domain, np.int32)

    return stream.Examples(label, domain, load=SplitRows(reader, np.arange(len(label))))


def class_list(file: str, *, option: str = "classes") -> tuple[str, ...]:
    """Read class names from a text file, one a line."""
    with reading(f"{option} = {file!r}"):
        lines = storage.read_bytes(file).decode("utf-8-sig").split("\n")
    names = tuple(line.strip() for line in lines if line.strip())
    if not names or len(set(names)) < len(names):
        raise Refused(option, file, "must hold at least one name, each once")
    return names


def read_npz(path: str, keys: tuple[str, ...] | None = None) -> dict[str, np.ndarray]:
    """Read the arrays of `keys` that a file holds; packed images are decoded.

    Without keys all arrays are read, as they are.

    A packed array K is stored as four arrays: K__strips u8[B], encoded strips one after
    the other; K__ptr i64[S+1], where each strip begins; K__shape (N, H, W, C) of K;
    K__sha256 of K's bytes. A strip is n images on top of each other.
    """
    with reading(path), storage.open_seekable(path) as file:
        arrays = np.load(file, allow_pickle=False)
        if not isinstance(arrays, np.lib.npyio.NpzFile):
            raise Refused("it is no .npz file")
        keys = arrays.files if keys is None else keys
        plain = {key: arrays[key] for key in keys if key in arrays}
        packed = [key for key in keys if f"{key}__strips" in arrays]
        return plain | {key: _unpack(arrays, key) for key in packed}


def _unpack(file: Mapping[str, np.ndarray], key: str) -> np.ndarray:
    shape = file[key + "__shape"]
    if shape.shape != (4,) or shape.min() < 1:
        raise Refused(f"{key}__shape is {shape.tolist()}, expected N, H, W and C")
    n, h, w, c = (int(x) for x in shape)
    raw, pointers = file[key + "__strips"], file[key + "__ptr"]
    if raw.ndim != 1 or raw.dtype != np.uint8 or pointers.ndim != 1:
        raise Refused(f"{key}__strips must be uint8[B], and {key}__ptr i64[S+1]")
    if c not in (1, 3) or n * h * w > PIXELS * len(pointers):
        raise Refused(f"{key}__shape is {shape.tolist()}: more than its strips hold")
    images, row, lossless = np.empty((n, h, w, c), np.uint8), 0, True
    for i, (start, end) in enumerate(zip(pointers[:-1], pointers[1:], strict=True)):
        data = raw[start:end].tobytes()
        strip = Decoding("pillow", c)(data, f"{key} strip {i}")
        if strip.size % (h * w * c) or row + strip.size // (h * w * c) > n:
            raise Refused(f"{key} strip {i} is {list(strip.shape)}, not {h} x {w}")
        strip = strip.reshape(-1, h, w, c)
        images[row : row + len(strip)] = strip
        row += len(strip)
        lossless = lossless and data[:2] != _JPEG
    if row != n:
        raise Refused(f"{key}: strips hold {row} images, {key}__shape says {n}")
    # JPEG decoders differ by a level or two; every other format must match.
    if lossless and sha256(images) != str(file[key + "__sha256"]):
        raise Refused(f"{key}: decoded pixels do not match {key}__sha256")
    return images


def sha256(array: np.ndarray) -> str:
    """Return the digest of an array's bytes in C order."""
    flat = np.ascontiguousarray(array).reshape(-1)
    return hashlib.sha256(flat.view(np.uint8)).hexdigest()


def read_entry(directory: str, entry: dict) -> np.ndarray:
    """Read an array of a directory and compare its digest, if the entry has one."""
    path = os.path.join(directory, entry["file"])
    with reading(path), storage.open_seekable(path) as file:
        array = np.load(file, allow_pickle=False)
    if "sha256" in entry and sha256(array) != entry["sha256"]:
        raise Refused(f"{path}: its bytes do not match the sha256 in meta.json")
    return array
