"""Decoded images on disk: the first run decodes the files, later runs map the pixels.

DIRECTORY/KEY/ holds the images of one reader, such as `files.Reader`:
    pixels.bin   u8, image after image, each [h,w,C] in C order
    offsets.npy  i64[N], where each begins
    shapes.npy   i32[N,3], h, w, C; zeros where an image could not be decoded
    meta.json    what KEY is a digest of, the bytes of pixels.bin, and a first file
KEY is a digest of the files (whole paths, sizes, times of change), of how they are
decoded, and of the cache size, so a cache is never used for other images. The folder
gets this name only when it is complete.
"""

import contextlib
import functools
import glob
import hashlib
import json
import os
import shutil
import sys
import uuid
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np

from jaxcl.data import files as files_lib
from jaxcl.data import identity, parallel, prefetch, storage

FORMAT = 1  # of the files above; part of KEY
SAMPLE = 500  # images that the size of a cache is estimated from


class Fresh(NamedTuple):
    """Decodes images from their files, to the size that a cache keeps."""

    read: Any  # a files.Reader
    size: int | None

    def __call__(self, row: int) -> np.ndarray:
        """Return u8[h,w,C], the shorter side at most `size`."""
        image = self.read(row)
        short = min(image.shape[:2])
        if self.size is None or short <= self.size:
            return image
        shape = (int(self.size * side / short) for side in image.shape[:2])
        decoder = self.read.decoding.decoder
        return prefetch.resize(image, *shape, interpolation="bicubic", decoder=decoder)

    def attempt(self, row: int) -> np.ndarray | files_lib.Unreadable:
        """Return the image of a row, or why there is none."""
        try:
            return self(row)
        except files_lib.Unreadable as error:
            return error


class Cached(NamedTuple):
    """Reads rows of a cache. Holds only its path, since workers get a copy."""

    folder: str
    fresh: Fresh  # for rows that the cache lacks

    def __call__(self, row: int) -> np.ndarray:
        """Return u8[h,w,C], read-only; a row that is not there may be `Unreadable`."""
        pixels, offsets, shapes = _map(self.folder)
        shape = shapes[row]
        if not shape[0]:
            return self.fresh(row)
        start = offsets[row]
        return pixels[start : start + shape.prod(dtype=np.int64)].reshape(shape)


@functools.cache
def _map(folder: str) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return pixels, offsets and shapes of a cache; each process maps a folder once."""
    offsets, shapes = (
        np.asarray(np.load(os.path.join(folder, name), mmap_mode="r"))
        for name in ("offsets.npy", "shapes.npy")
    )
    if not shapes.any():  # an empty file cannot be mapped
        return np.empty(0, np.uint8), offsets, shapes
    pixels = np.memmap(os.path.join(folder, "pixels.bin"), np.uint8, "r")
    return np.asarray(pixels), offsets, shapes


def cached(read: Any, directory: str, *, size: int | None = None) -> Cached:
    """Read images from a cache in `directory`, which is made if needed.

    Args:
      read: a `files.Reader`.
      directory: may hold any number of caches.
      size: images with a longer shorter side are shrunk to it. None: as decoded.

    Processes that share `directory` may all call this: one builds, the others wait.
    Where the file system has no locks, each builds its own and the first to finish
    wins. A cache leaves out images that cannot be decoded; they are read from their
    files.

    Raises:
      ValueError: too little space, a directory that cannot be written, a damaged
        cache.
    """
    count, digest = identity.stamp(read)
    key = {"format": FORMAT, "images": count, "files": digest, "cache_size": size}
    key |= read.decoding._asdict()
    text = json.dumps(key, sort_keys=True)
    folder = os.path.join(directory, hashlib.sha256(text.encode()).hexdigest()[:20])
    fresh = Fresh(read, size)
    if not os.path.exists(folder):
        try:
            os.makedirs(directory, exist_ok=True)
            with _lock(folder + ".lock") as alone:
                if not os.path.exists(folder):
                    _build(fresh, folder, key, alone)
        except OSError as error:
            raise ValueError(
                f"cache = {directory!r}: cannot be written: {error}"
            ) from error
    _check(folder, key)
    return Cached(folder, fresh)


def _check(folder, key):
    """Refuse a cache of other images, or one whose files are damaged."""
    try:
        meta = storage.read_json(os.path.join(folder, "meta.json"))
        size = os.path.getsize(os.path.join(folder, "pixels.bin"))
        whole = key.items() <= meta.items() and size == meta["bytes"]
    except (OSError, ValueError, KeyError, AttributeError):
        whole = False
    if not whole:
        raise ValueError(f"cache: {folder} is damaged; delete it, to have it made anew")


@contextlib.contextmanager
def _lock(path: str) -> Iterator[bool]:
    """Hold the lock, waiting for it; yields False where there are no locks."""
    with open(path, "ab") as file:
        alone = True
        try:
            import fcntl  # not on Windows

            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            _say(f"{path.removesuffix('.lock')}: another process is at it")
            fcntl.flock(file, fcntl.LOCK_EX)
        except (ImportError, OSError):  # no locks here, or on this file system
            alone = False
        yield alone  # closing the file frees the lock, and so does being killed


def _build(fresh: Fresh, folder: str, key: dict, alone: bool) -> None:
    """Decode all images into a folder of another name, then rename it."""
    if alone:  # so other unfinished folders belong to processes that were killed
        for unfinished in glob.glob(glob.escape(folder) + ".*.part"):
            shutil.rmtree(unfinished, ignore_errors=True)
    count, directory = key["images"], os.path.dirname(folder)
    need, free = _estimate(fresh, count), shutil.disk_usage(directory).free
    if need > free:
        raise ValueError(
            f"cache = {directory!r}: {count:,} images need about {_size(need)}, and "
            f"{_size(free)} are free; set a smaller cache_size, or another folder"
        )
    _say(f"{folder}: decodes {count:,} images, about {_size(need)}")
    part = f"{folder}.{uuid.uuid4().hex[:8]}.part"
    os.mkdir(part)
    try:
        meta = key | _write(fresh, count, part, folder)
        storage.write_json(os.path.join(part, "meta.json"), meta)
        try:
            os.rename(part, folder)
        except OSError:
            if not os.path.exists(folder):  # or another process was faster
                raise
    finally:
        shutil.rmtree(part, ignore_errors=True)


def _write(fresh: Fresh, count: int, part: str, folder: str) -> dict:
    """Write pixels, offsets and shapes; return what meta.json holds beside the key."""
    import tqdm  # few runs make a cache

    shapes, problems = np.zeros((count, 3), np.int32), []
    images = parallel.in_threads(fresh.attempt, range(count))
    bar = tqdm.tqdm(images, "cache", count, unit=" images", mininterval=10, delay=10)
    with open(os.path.join(part, "pixels.bin"), "wb") as file:
        with contextlib.closing(images):
            for row, image in enumerate(bar):
                if isinstance(image, np.ndarray):
                    file.write(np.ascontiguousarray(image))
                    shapes[row] = image.shape
                else:
                    problems.append(str(image))
        file.flush()
        os.fsync(file.fileno())  # after a crash no renamed folder may lack bytes
    sizes = shapes.prod(1, dtype=np.int64)
    for name, array in (("offsets", np.cumsum(sizes) - sizes), ("shapes", shapes)):
        with storage.replacing(os.path.join(part, f"{name}.npy")) as rows:
            np.save(rows, array)
    total = int(sizes.sum())
    _say(f"{folder}: {count:,} images, {_size(total)}")
    if problems:
        _say(
            f"{folder}: {len(problems):,} images are left out, they are read from "
            f"their files; the first: {problems[0]}"
        )
    return {"bytes": total, "left_out": len(problems), "first": fresh.read.name(0)}


def _estimate(fresh: Fresh, count: int) -> int:
    """Estimate the bytes of all images from some, evenly spaced."""
    rows = np.unique(np.linspace(0, count - 1, min(count, SAMPLE)).astype(int))
    images = parallel.in_threads(fresh.attempt, rows)
    sizes = [x.nbytes if isinstance(x, np.ndarray) else 0 for x in images]
    return round(sum(sizes) * (count / len(rows)))


def _size(count: int) -> str:
    return f"{count / 1e9:,.1f} GB" if count >= 1e8 else f"{count / 1e6:,.1f} MB"


def _say(text: str) -> None:
    print(f"cache {text}", file=sys.stderr, flush=True)
