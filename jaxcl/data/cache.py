"""Decoded images on disk: files are decoded once, later runs map the pixels.

DIRECTORY/KEY/ holds what one reader (`files_lib.Files`, say) gives:
    pixels.bin   u8, image after image, each [h,w,C] in C order
    offsets.npy  i64[N], where each begins
    shapes.npy   i32[N,3], h, w, C; zeros where an image could not be decoded
    meta.json    what KEY is a digest of, the bytes of pixels.bin, and a first file
KEY changes with the files (paths, sizes, times of change), decoder, channels and
cache size, so a folder is never taken for another. It gets its name once it is whole.
"""

import collections
import concurrent.futures
import contextlib
import glob
import hashlib
import itertools
import json
import os
import shutil
import sys
import time
import uuid
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import numpy as np

from jaxcl.data import files as files_lib
from jaxcl.data import prefetch

FORMAT = 1  # of the files above; part of KEY
SAMPLE = 500  # images that the estimate of the size is made from
PAUSE = 10.0  # seconds between two lines of progress


class Fresh(NamedTuple):
    """Images as a cache keeps them, decoded anew."""

    read: Any  # row -> u8[h,w,C]
    size: int | None

    def __call__(self, row: int) -> np.ndarray:
        """u8[h,w,C], the shorter side at most `size`."""
        image = self.read(row)
        short = min(image.shape[:2])
        if self.size is None or short <= self.size:
            return image
        height, width = (int(self.size * side / short) for side in image.shape[:2])
        return prefetch.resize(
            image, height, width, interpolation="bicubic", decoder=self.read.decoder
        )


class Cached(NamedTuple):
    """Rows of a cache. Holds its path, since it is sent to workers whole."""

    folder: str
    fresh: Fresh  # for the rows that the cache lacks

    def __call__(self, row: int) -> np.ndarray:
        """u8[h,w,C], to be read only; raises what decoding it raises."""
        pixels, offsets, shapes = _arrays(self.folder)
        shape = shapes[row]
        if not shape[0]:
            return self.fresh(row)
        start = offsets[row]
        return pixels[start : start + shape.prod(dtype=np.int64)].reshape(shape)

    def name(self, row: int) -> str:
        """Path of a row's file."""
        return self.fresh.read.name(row)


_mapped = {}  # folder -> its arrays, in each process


def _arrays(folder: str) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    found = _mapped.get(folder)
    if found is None:
        offsets, shapes = (
            np.asarray(np.load(os.path.join(folder, name), mmap_mode="r"))
            for name in ("offsets.npy", "shapes.npy")
        )
        pixels = np.empty(0, np.uint8)  # an empty file cannot be mapped
        if shapes.any():
            pixels = np.memmap(os.path.join(folder, "pixels.bin"), np.uint8, "r")
        found = _mapped[folder] = np.asarray(pixels), offsets, shapes
    return found


def cached(read: Any, directory: str, *, size: int | None = None) -> Cached:
    """The images of `read`, from a cache in `directory` that is made if need be.

    Args:
      read: row -> u8[h,w,C] with `name(row)`, `stamp()` -> (rows, digest), `decoder`
        and `channels`, as `files_lib.Files`.
      directory: for any number of caches.
      size: shorter sides above it are shrunk to it. None: pixels as decoded.

    Processes that share `directory` may all call this: one builds, the others wait.
    Where the file system has no locks each builds its own, and the first to be done
    counts. An image that cannot be decoded is left out; it is read from its file.

    Raises:
      ValueError: too little space, a directory that cannot be written, a damaged
        cache.
    """
    count, digest = read.stamp()
    key = {
        "format": FORMAT,
        "images": count,
        "files": digest,
        "decoder": read.decoder,
        "channels": read.channels,
        "cache_size": size,
    }
    text = json.dumps(key, sort_keys=True)
    folder = os.path.join(directory, hashlib.sha256(text.encode()).hexdigest()[:20])
    fresh = Fresh(read, size)
    if not os.path.exists(folder):
        try:
            os.makedirs(directory, exist_ok=True)
            with _alone(folder + ".lock") as alone:
                if not os.path.exists(folder):
                    _build(fresh, folder, key, alone)
        except OSError as error:
            raise ValueError(
                f"cache = {directory!r}: cannot be written: {error}"
            ) from error
    _check(folder, key)
    return Cached(folder, fresh)


def _check(folder, key):
    try:
        with open(os.path.join(folder, "meta.json"), encoding="utf-8") as file:
            meta = json.load(file)
        found = os.path.getsize(os.path.join(folder, "pixels.bin"))
        right = key.items() <= meta.items() and found == meta["bytes"]
    except (OSError, ValueError, KeyError, AttributeError):
        right = False
    if not right:
        raise ValueError(f"cache: {folder} is damaged; delete it, to have it made anew")


@contextlib.contextmanager
def _alone(path: str) -> Iterator[bool]:
    """Whether this process is the only one that builds; others wait here."""
    with open(path, "ab") as file:
        alone = True
        try:
            import fcntl  # which Windows has not

            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            _say(f"cache {path.removesuffix('.lock')}: another process is at it")
            fcntl.flock(file, fcntl.LOCK_EX)
        except (ImportError, OSError):  # no locks here, or on this file system
            alone = False
        yield alone  # closing the file opens the lock, and so does being killed


def _build(fresh: Fresh, folder: str, key: dict, alone: bool) -> None:
    """Decode all into a folder of another name, then give it its name."""
    if alone:  # then what is there was left by a process that was killed
        for left in glob.glob(glob.escape(folder) + ".*.part"):
            shutil.rmtree(left, ignore_errors=True)
    count, directory = key["images"], os.path.dirname(folder)
    need, free = _estimate(fresh, count), shutil.disk_usage(directory).free
    if need > free:
        raise ValueError(
            f"cache = {directory!r}: {count:,} images need about {_size(need)}, and "
            f"{_size(free)} are free; set a smaller cache_size, or another folder"
        )
    _say(f"cache {folder}: decodes {count:,} images, about {_size(need)}")
    part = f"{folder}.{uuid.uuid4().hex[:8]}.part"
    os.mkdir(part)
    try:
        meta = key | _write(fresh, count, part, folder)
        with open(os.path.join(part, "meta.json"), "w", encoding="utf-8") as file:
            json.dump(meta, file, indent=1)
        try:
            os.rename(part, folder)
        except OSError:
            if not os.path.exists(folder):  # else another process was faster
                raise
    finally:
        shutil.rmtree(part, ignore_errors=True)


def _write(fresh: Fresh, count: int, part: str, folder: str) -> dict:
    """Write pixels, offsets and shapes; returns what meta.json adds to the key."""
    shapes, problems = np.zeros((count, 3), np.int32), []
    start = said = time.monotonic()
    with (
        open(os.path.join(part, "pixels.bin"), "wb") as file,
        contextlib.closing(_decoded(fresh, range(count))) as images,
    ):
        for row, (image, problem) in enumerate(images):
            if problem is None:
                file.write(np.ascontiguousarray(image))
                shapes[row] = image.shape
            else:
                problems.append(str(problem))
            now = time.monotonic()
            if now - said >= PAUSE:
                said, rate = now, (row + 1) / (now - start)
                left = (count - row - 1) / rate / 60
                _say(
                    f"cache {folder}: {row + 1:,} of {count:,} images, "
                    f"{rate:,.0f} a second, {left:.0f} minutes left"
                )
        file.flush()
        os.fsync(file.fileno())  # the name must not outlive the pixels
    sizes = shapes.prod(1, dtype=np.int64)
    np.save(os.path.join(part, "offsets.npy"), np.cumsum(sizes) - sizes)
    np.save(os.path.join(part, "shapes.npy"), shapes)
    total = int(sizes.sum())
    _say(f"cache {folder}: {count:,} images, {_size(total)}")
    if problems:
        _say(
            f"cache {folder}: {len(problems):,} images are left out, they are read "
            f"from their files; the first: {problems[0]}"
        )
    return {"bytes": total, "left_out": len(problems), "first": fresh.read.name(0)}


def _decoded(fresh: Fresh, rows: Iterable[int]) -> Iterator:
    """(image, None) or (None, problem) for each row, in order, by threads."""

    def one(row):
        try:
            return fresh(row), None
        except files_lib.Unreadable as error:
            return None, error

    threads = min(32, (os.cpu_count() or 1) + 2)
    rows, ahead = iter(rows), 2 * threads
    # Decoders let go of Python's lock. A map() would hold all images at once.
    with concurrent.futures.ThreadPoolExecutor(threads) as pool:
        waiting = collections.deque(
            pool.submit(one, row) for row in itertools.islice(rows, ahead)
        )
        while waiting:
            yield waiting.popleft().result()
            waiting.extend(pool.submit(one, row) for row in itertools.islice(rows, 1))


def _estimate(fresh: Fresh, count: int) -> int:
    """Bytes of all images, from a sample spread evenly over the rows."""
    rows = np.unique(np.linspace(0, count - 1, min(count, SAMPLE)).astype(int))
    sizes = [0 if image is None else image.nbytes for image, _ in _decoded(fresh, rows)]
    return round(sum(sizes) * (count / len(rows)))


def _size(count: int) -> str:
    return f"{count / 1e9:,.1f} GB" if count >= 1e8 else f"{count / 1e6:,.1f} MB"


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
