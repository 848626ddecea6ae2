"""From rows to batches on the host: cropping, decoding, reading ahead."""

import collections
import concurrent.futures
import importlib.util
import math
import os
from collections.abc import Callable, Generator, Iterable, Iterator
from typing import Any, Literal, NamedTuple, get_args

import numpy as np
from PIL import Image

from jaxcl import numerics
from jaxcl.data import storage, stream
from jaxcl.errors import Refused

Decoder = Literal["auto", "cv2", "pillow"]
_RESIZED = 2**28  # pixels; a line of one pixel by millions grows by the square


def choose_decoder(decoder: Decoder = "auto") -> str:
    """Choose the image library of a run; "auto" prefers cv2.

    The two differ by a level or two in JPEG pixels and more in resizing, so a run
    chooses one, once, and records it (`Dataset.decoder`).
    """
    if decoder not in get_args(Decoder):
        raise Refused("decoder", decoder, f"must be one of {get_args(Decoder)}")
    installed = importlib.util.find_spec("cv2") is not None
    if decoder == "cv2" and not installed:
        raise Refused("decoder = 'cv2' is not installed; pip install 'jaxcl[fast]'")
    return "pillow" if decoder == "pillow" or not installed else "cv2"


def resize(
    image: np.ndarray, height: int, width: int, interpolation: str, decoder: str
) -> np.ndarray:
    """Resize u8[h,w,C] to u8[height,width,C], antialiased.

    Pillow widens its filter when shrinking; cv2 shrinks by area averaging and
    enlarges by `interpolation`.
    """
    have = image.shape[:2]
    if have == (height, width):
        return image
    if decoder == "pillow":
        flat = image[..., 0] if image.shape[2] == 1 else image
        picture = Image.fromarray(np.ascontiguousarray(flat))
        method = Image.Resampling[interpolation.upper()]
        resized = picture.resize((width, height), method)
        return np.asarray(resized).reshape(height, width, -1)
    import cv2

    small = min(height, have[0]), min(width, have[1])
    if small != have:
        image = cv2.resize(image, small[::-1], interpolation=cv2.INTER_AREA)
    if small != (height, width):
        filters = {"bilinear": cv2.INTER_LINEAR, "bicubic": cv2.INTER_CUBIC}
        image = cv2.resize(image, (width, height), interpolation=filters[interpolation])
    return image.reshape(height, width, -1)


class CenterCrop(NamedTuple):
    """Resizes the shorter side to `resize`, then cuts the middle `size` x `size`."""

    size: int
    resize: int
    interpolation: str = "bicubic"
    decoder: str = "auto"

    def __call__(self, image: np.ndarray, rng: Any = None) -> np.ndarray:
        """Crop u8[h,w,C] to u8[size,size,C]; nothing is drawn."""
        h, w = image.shape[:2]
        short = min(h, w)
        # int() as in torchvision's Resize: the longer side is rounded down.
        h, w = int(self.resize * h / short), int(self.resize * w / short)
        if h * w > _RESIZED:
            raise Refused(
                f"an image of {image.shape[0]} x {image.shape[1]} pixels would be "
                f"resized to {h} x {w}: too long for its shorter side"
            )
        image = resize(image, h, w, self.interpolation, self.decoder)
        top, left = round((h - self.size) / 2), round((w - self.size) / 2)
        return image[top : top + self.size, left : left + self.size]


class RandomCrop(NamedTuple):
    """Random resized crop, with torchvision's distribution of boxes."""

    size: int
    scale: tuple[float, float] = (0.08, 1.0)  # share of the image's area
    ratio: tuple[float, float] = (3 / 4, 4 / 3)  # width / height, drawn on a log scale
    interpolation: str = "bicubic"
    decoder: str = "auto"

    def __call__(self, image: np.ndarray, rng: np.random.Generator) -> np.ndarray:
        """Crop u8[h,w,C] to u8[size,size,C]."""
        top, left, h, w = self.box(image.shape[0], image.shape[1], rng)
        cut = image[top : top + h, left : left + w]
        return resize(cut, self.size, self.size, self.interpolation, self.decoder)

    def box(
        self, height: int, width: int, rng: np.random.Generator
    ) -> tuple[int, int, int, int]:
        """Draw a box: its top, left, height and width."""
        low, high = math.log(self.ratio[0]), math.log(self.ratio[1])
        for _ in range(10):
            area = height * width * rng.uniform(*self.scale)
            ratio = math.exp(rng.uniform(low, high))
            w, h = round(math.sqrt(area * ratio)), round(math.sqrt(area / ratio))
            if 0 < w <= width and 0 < h <= height:
                top = rng.integers(0, height - h, endpoint=True)
                left = rng.integers(0, width - w, endpoint=True)
                return int(top), int(left), h, w
        # No draw fitted; take the largest middle box whose ratio is allowed.
        ratio = min(max(width / height, self.ratio[0]), self.ratio[1])
        w, h = min(width, round(height * ratio)), min(height, round(width / ratio))
        return (height - h) // 2, (width - w) // 2, h, w


def _with_decoder(crop):
    """Choose a decoder that is the same for all workers."""
    return crop and crop._replace(decoder=choose_decoder(crop.decoder))


def _own_places(batch_size: int, index: int, count: int) -> np.ndarray:
    """Return the positions in a global batch that process `index` of `count` reads."""
    if batch_size < 1 or batch_size % count or not 0 <= index < count:
        raise Refused(
            f"batch_size={batch_size}: process {index} of {count} cannot take an "
            "equal share; it must be at least 1 and a multiple of the processes"
        )
    size = batch_size // count
    return index * size + np.arange(size)


class _TrainBatch(NamedTuple):
    """Reads this process's share of a step of the schedule."""

    examples: stream.Examples
    plan: stream.Schedule
    places: np.ndarray  # of each batch that this process reads
    crop: RandomCrop | CenterCrop | None
    views: int

    def rows(self, step: int) -> np.ndarray:
        """List the rows of a step, i32[b]."""
        return self.plan[step][self.places]

    def read_image(self, step: int, number: int, row: int) -> np.ndarray:
        """Return the views of image `number` of a step; without a crop, the image."""
        image = _load_image(self.examples, row)
        if self.crop is None:
            return image
        epoch, within = divmod(step, self.plan.steps_per_epoch)
        # From 1, since NumPy pads seeds with zeros: with a last 0 the seed would be
        # that of the epoch's order.
        place = within * self.plan.batch_size + int(self.places[number]) + 1
        rng = np.random.default_rng([self.plan.seed, self.plan.task, epoch, place])
        return np.stack([self.crop(image, rng) for _ in range(self.views)])

    def stack(self, step: int, rows: np.ndarray, images: list) -> dict[str, np.ndarray]:
        """Make the batch of a step from its images."""
        return _stack_batch(self.examples, rows, images)


class _EvalBatch(NamedTuple):
    """Reads this process's share of a batch of the padded rows."""

    examples: stream.Examples
    rows_in_order: np.ndarray
    places: np.ndarray  # of each batch that this process reads
    batch_size: int
    crop: CenterCrop | None

    def rows(self, step: int) -> np.ndarray:
        """List the rows of a batch, i32[b]; those beyond the last repeat it."""
        return self.rows_in_order[np.minimum(self._numbers(step), self._last)]

    def read_image(self, step: int, number: int, row: int) -> np.ndarray:
        """Return an image of a batch, cropped if it is to be."""
        image = _load_image(self.examples, row)
        return image if self.crop is None else self.crop(image)

    def stack(self, step: int, rows: np.ndarray, images: list) -> dict[str, np.ndarray]:
        """Make a batch from its images."""
        mask = (self._numbers(step) <= self._last).astype(np.float32)
        return _stack_batch(self.examples, rows, images) | {"mask": mask}

    def _numbers(self, step):
        return step * self.batch_size + self.places

    @property
    def _last(self):
        return len(self.rows_in_order) - 1


def _load_image(examples, row) -> np.ndarray:
    return examples.load(int(row)) if examples.images is None else examples.images[row]


def _stack_batch(examples, rows, images) -> dict[str, np.ndarray]:
    """Stack a batch of images, which must be of one size."""
    for row, image in zip(rows, images, strict=True):
        if image.shape != images[0].shape:
            raise Refused(
                f"images of differing size in a batch: row {rows[0]} is "
                f"{images[0].shape}, row {row} is {image.shape}; set a crop, or `size` "
                "in the data source"
            )
    label = examples.label[rows]
    return {"image": np.stack(images), "label": label, "index": rows.astype(np.int32)}


_READERS = 32  # threads, at most
_WAITING = 64  # threads that read from a bucket, where an image is mostly a wait


def _read_in_threads(
    reader: _TrainBatch | _EvalBatch, steps: Iterable[int], workers: int
) -> Generator[dict[str, np.ndarray], None, None]:
    """Yield the batches of the steps, in order.

    All threads work at the images of one batch, then of the next, at most one batch and
    `workers` images ahead. Decoders of images release the GIL, so threads use all
    cores, and nothing is copied from another process.
    """
    count = workers or _count_threads(reader.examples)
    ahead = 2 + count // len(reader.places)
    pool = concurrent.futures.ThreadPoolExecutor(count)
    waiting: collections.deque = collections.deque()

    def stack(step, rows, images):
        return reader.stack(step, rows, [image.result() for image in images])

    try:
        for step in steps:
            # Threads take tasks in turn: that of the whole batch waits for images that
            # others have begun.
            rows = reader.rows(step)
            images = [
                pool.submit(reader.read_image, step, number, int(row))
                for number, row in enumerate(rows)
            ]
            waiting.append(pool.submit(stack, step, rows, images))
            if len(waiting) == ahead:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()
    finally:
        pool.shutdown(cancel_futures=True)


def _count_threads(examples: stream.Examples) -> int:
    """Choose how many threads read images: one a core, more from a bucket."""
    name = getattr(examples.load, "name", None)  # a user's own reader may have none
    if name is not None and storage.in_bucket(name(0)):
        return _WAITING
    return min(_READERS, os.cpu_count() or 1)


def batches(
    source: stream.Source,
    *,
    seed: int,
    task: int,
    epochs: int,
    batch_size: int,
    start: int = 0,
    workers: int = 0,
    process_index: int = 0,
    process_count: int = 1,
    crop: RandomCrop | CenterCrop | None = None,
    views: int = 1,
    resident: bool = True,
) -> Generator[dict[str, np.ndarray], None, None]:
    """Yield host batches of a task's steps from `start` on.

    With `resident` a batch is {"index": i32[b]}, rows of `source.examples`, whose
    pixels are on the device already. Otherwise it is {"image", "label": i32[b],
    "index"}, with images u8[b,views,S,S,C] cut by `crop`, or u8[b,H,W,C] without one.

    b = batch_size / process_count: process p yields rows [p b, (p + 1) b) of every
    global batch. A batch depends on (seed, task, step) alone: it is the same for any
    number of `workers` (threads that read; 0: one a core, 32 at most,
    or 64 from a bucket) and after a
    restart at any `start`.

    Raises Refused here, before the first batch, for a bad number or crop, a batch
    larger than the task, or `resident` with a set that is read row by row.
    """
    plan = stream.schedule(
        source, seed=seed, task=task, epochs=epochs, batch_size=batch_size
    )
    places = _own_places(batch_size, process_index, process_count)
    steps = range(start, len(plan))
    if not 0 <= start <= len(plan):
        raise Refused(
            "start", start, f"must be from 0 to {len(plan)}, the task's steps"
        )
    if workers < 0 or views < 1:
        raise Refused(f"workers={workers}, views = {views}: at least 0 and 1")
    if views > 1 and crop is None:
        raise Refused("views", views, "needs a crop")
    if resident:
        if source.examples.images is None:
            raise Refused("resident = True: this set is read row by row; set False")
        return ({"index": plan[step][places]} for step in steps)
    reader = _TrainBatch(source.examples, plan, places, _with_decoder(crop), views)
    return _read_in_threads(reader, steps, workers)


def evaluation_batches(
    examples: stream.Examples,
    rows: np.ndarray,
    batch_size: int,
    *,
    crop: CenterCrop | None = None,
    workers: int = 0,
    process_index: int = 0,
    process_count: int = 1,
) -> Generator[dict[str, np.ndarray], None, None]:
    """Yield all `rows` in order, in batches of one size; the last one is padded.

    A batch is {"image": u8[b,H,W,C], "label": i32[b], "index": i32[b], "mask": f32[b]};
    padding repeats the last row, with mask 0. `b` and `workers` are as in `batches`.
    """
    rows = np.asarray(rows, np.int32)
    places = _own_places(batch_size, process_index, process_count)
    reader = _EvalBatch(examples, rows, places, batch_size, _with_decoder(crop))
    return _read_in_threads(reader, range(-(-len(rows) // batch_size)), workers)


def run_ahead(iterator: Iterator, place: Callable, *, depth: int = 2) -> Generator:
    """Yield `place(batch)` for each batch, computed up to `depth` batches ahead.

    One background thread reads and places batches. Its exceptions are raised here, in
    order. Closing this generator stops the thread and closes `iterator`.
    """
    if depth < 1:
        raise Refused("depth", depth, "must be at least 1")
    return _yield_ahead(iterator, place, depth)


def _yield_ahead(iterator, place, depth):
    end = object()

    def prepare_next():
        with numerics.pinned():  # flags are of a thread
            batch = next(iterator, end)
            return batch if batch is end else place(batch)

    pool = concurrent.futures.ThreadPoolExecutor(1)
    try:
        waiting = collections.deque(pool.submit(prepare_next) for _ in range(depth + 1))
        while (batch := waiting.popleft().result()) is not end:
            waiting.append(pool.submit(prepare_next))
            yield batch
    finally:
        pool.shutdown(cancel_futures=True)
        if hasattr(iterator, "close"):
            iterator.close()
