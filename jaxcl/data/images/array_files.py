"""Arrays in files: .npz files, packed images, .npy files with a digest."""

import functools
import hashlib
import os
from collections.abc import Mapping

import numpy as np

from jaxcl import storage
from jaxcl.data.images import decode
from jaxcl.errors import Refused


@functools.lru_cache(maxsize=8)
def mapped(path: str) -> np.ndarray:
    """Map an .npy file without reading it; it is opened once."""
    with storage.reading(path):
        file = storage.check_ordinary(path)
        return np.load(file, mmap_mode="r", allow_pickle=False)


def read_npz(path: str, keys: tuple[str, ...] | None = None) -> dict[str, np.ndarray]:
    """Read the arrays of `keys` that a file holds; packed images are decoded.

    Without keys all arrays are read, as they are.

    A packed array K is stored as four arrays: K__strips u8[B], encoded strips one after
    the other; K__ptr i64[S+1], where each strip begins; K__shape (N, H, W, C) of K;
    K__sha256 of K's bytes. A strip is n images on top of each other.
    """
    with storage.reading(path), storage.open_seekable(path) as file:
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
    if c not in (1, 3) or n * h * w > decode.PIXELS * len(pointers):
        raise Refused(f"{key}__shape is {shape.tolist()}: more than its strips hold")
    images, row, lossless = np.empty((n, h, w, c), np.uint8), 0, True
    for i, (start, end) in enumerate(zip(pointers[:-1], pointers[1:], strict=True)):
        data = raw[start:end].tobytes()
        strip = decode.Decoding("pillow", c)(data, f"{key} strip {i}")
        if strip.size % (h * w * c) or row + strip.size // (h * w * c) > n:
            raise Refused(f"{key} strip {i} is {list(strip.shape)}, not {h} x {w}")
        strip = strip.reshape(-1, h, w, c)
        images[row : row + len(strip)] = strip
        row += len(strip)
        lossless = lossless and data[:2] != decode.JPEG
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
    with storage.reading(path), storage.open_seekable(path) as file:
        array = np.load(file, allow_pickle=False)
    if "sha256" in entry and sha256(array) != entry["sha256"]:
        raise Refused(f"{path}: its bytes do not match the sha256 in meta.json")
    return array
