"""From rows to batches on the host: cropping, worker processes, reading ahead."""

import ctypes
import functools
import importlib.util
import math
import os
import queue
import sys
import threading
import tokenize
from collections.abc import Callable, Iterator
from typing import Any, Literal, NamedTuple

import numpy as np
from PIL import Image

from jaxcl.data import stream

INTERPOLATIONS = {
    "bilinear": Image.Resampling.BILINEAR,
    "bicubic": Image.Resampling.BICUBIC,
}

Decoder = Literal["auto", "cv2", "pillow"]
_TRIM_THRESHOLD, _MMAP_MAX = -1, -4  # of glibc's mallopt
_RESIZED = 2**28  # pixels; a line of one pixel by millions grows by the square


def choose_decoder(decoder: Decoder = "auto") -> str:
    """The image library of a run, "cv2" or "pillow"; "auto" prefers cv2.

    The two differ by a level or two in JPEG pixels and more in resizing, so a run
    chooses one, once, and records it (`Dataset.decoder`).
    """
    installed = importlib.util.find_spec("cv2") is not None
    if decoder == "auto":
        return "cv2" if installed else "pillow"
    if decoder not in ("cv2", "pillow"):
        raise ValueError(f"decoder = {decoder!r}: must be 'auto', 'cv2' or 'pillow'")
    if decoder == "cv2" and not installed:
        raise ValueError("decoder = 'cv2' is not installed; pip install 'jaxcl[fast]'")
    return decoder


def resize(
    image: np.ndarray, height: int, width: int, *, interpolation: str, decoder: str
) -> np.ndarray:
    """u8[h,w,C] to u8[height,width,C], antialiased.

    Pillow widens its filter when shrinking; cv2 shrinks by area averaging and
    enlarges by `interpolation`.
    """
    have = image.shape[:2]
    if have == (height, width):
        return image
    if decoder == "pillow":
        flat = image[..., 0] if image.shape[2] == 1 else image
        resized = Image.fromarray(np.ascontiguousarray(flat)).resize(
            (width, height), INTERPOLATIONS[interpolation]
        )
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
        """u8[h,w,C] to u8[size,size,C]; nothing is drawn."""
        h, w = image.shape[:2]
        short = min(h, w)
        # int() as in torchvision's Resize: the longer side is rounded down.
        h, w = int(self.resize * h / short), int(self.resize * w / short)
        if h * w > _RESIZED:
            raise ValueError(
                f"an image of {image.shape[0]} x {image.shape[1]} pixels would be "
                f"resized to {h} x {w}: too long for its shorter side"
            )
        image = resize(
            image, h, w, interpolation=self.interpolation, decoder=self.decoder
        )
        top, left = round((h - self.size) / 2), round((w - self.size) / 2)
        return image[top : top + self.size, left : left + self.size]


class Crop(NamedTuple):
    """Random resized crop, with torchvision's distribution of boxes."""

    size: int
    scale: tuple[float, float] = (0.08, 1.0)  # share of the image's area
    ratio: tuple[float, float] = (3 / 4, 4 / 3)  # width / height, drawn on a log scale
    interpolation: str = "bicubic"
    decoder: str = "auto"

    def __call__(self, image: np.ndarray, rng: np.random.Generator) -> np.ndarray:
        """u8[h,w,C] to u8[size,size,C]."""
        top, left, h, w = self.box(image.shape[0], image.shape[1], rng)
        return resize(
            image[top : top + h, left : left + w],
            self.size,
            self.size,
            interpolation=self.interpolation,
            decoder=self.decoder,
        )

    def box(
        self, height: int, width: int, rng: np.random.Generator
    ) -> tuple[int, int, int, int]:
        """Top, left, height and width of a drawn box in a height x width image."""
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


def _check_crop(crop):
    """The crop, checked, with a decoder that is the same for all workers."""
    if crop is None:
        return None
    if crop.interpolation not in INTERPOLATIONS:
        raise ValueError(
            f"crop.interpolation = {crop.interpolation!r}: must be one of "
            f"{(*INTERPOLATIONS,)}"
        )
    if crop.size < 1:
        raise ValueError(f"crop.size = {crop.size}: must be at least 1")
    if isinstance(crop, CenterCrop):
        if crop.resize < crop.size:
            raise ValueError(
                f"crop.resize = {crop.resize}: must be at least crop.size = {crop.size}"
            )
    elif not (0 < crop.scale[0] <= crop.scale[1] <= 1):
        raise ValueError(f"crop.scale = {crop.scale}: must be 0 < low <= high <= 1")
    elif not (0 < crop.ratio[0] <= crop.ratio[1]):
        raise ValueError(f"crop.ratio = {crop.ratio}: must be 0 < low <= high")
    return crop._replace(decoder=choose_decoder(crop.decoder))


class _Share(NamedTuple):
    """Which rows of every global batch this process reads."""

    offset: int
    batch: int


def _share(batch_size: int, index: int, count: int) -> _Share:
    """The share of process `index` of `count`."""
    if batch_size % count or not 0 <= index < count:
        raise ValueError(
            f"batch_size = {batch_size}: process {index} of {count} cannot take an "
            "equal share; it must be a multiple of the number of processes"
        )
    size = batch_size // count
    return _Share(index * size, size)


def _image(examples: stream.Examples, row: int) -> np.ndarray:
    return examples.load(row) if examples.images is None else examples.images[row]


class _TrainItem(NamedTuple):
    """Position in this process's share of the schedule -> one example."""

    examples: stream.Examples
    plan: stream.Schedule
    share: _Share
    crop: Crop | CenterCrop | None
    views: int

    def __call__(self, position: int) -> dict[str, np.ndarray]:
        step, within = divmod(position, self.share.batch)
        within += self.share.offset
        row = int(self.plan[step][within])
        image = _image(self.examples, row)
        if self.crop is not None:
            epoch, step = divmod(step, self.plan.steps_per_epoch)
            # From 1, since NumPy pads seeds with zeros: with a last 0 the seed would
            # be that of the epoch's order.
            place = step * self.plan.batch_size + within + 1
            seed = [self.plan.seed, self.plan.task, epoch, place]
            rng = np.random.default_rng(seed)
            image = np.stack([self.crop(image, rng) for _ in range(self.views)])
        label = self.examples.label[row]
        return {"image": image, "label": label, "index": np.int32(row)}


class _EvalItem(NamedTuple):
    """Position in this process's share of the padded rows -> one example."""

    examples: stream.Examples
    rows: np.ndarray
    share: _Share
    batch_size: int
    crop: CenterCrop | None

    def __call__(self, position: int) -> dict[str, np.ndarray]:
        step, within = divmod(position, self.share.batch)
        place = step * self.batch_size + self.share.offset + within
        row = int(self.rows[min(place, len(self.rows) - 1)])
        image = _image(self.examples, row)
        return {
            "image": image if self.crop is None else self.crop(image),
            "label": self.examples.label[row],
            "index": np.int32(row),
            "mask": np.float32(place < len(self.rows)),
        }


def _stack(items) -> dict[str, np.ndarray]:
    """A batch of examples, whose images must be of one size."""
    images = [item["image"] for item in items]
    odd = next((i for i, x in enumerate(images) if x.shape != images[0].shape), None)
    if odd is not None:
        raise ValueError(
            f"images of differing size in a batch: row {items[0]['index']} is "
            f"{images[0].shape}, row {items[odd]['index']} is {images[odd].shape}; "
            "set a crop, or `size` in the data source"
        )
    return {key: np.stack([item[key] for item in items]) for key in items[0]}


def _read(item: Callable, start: int, stop: int, batch: int, workers: int) -> Iterator:
    """Batches `start` to `stop` of the examples item(0), item(1), ..., in order.

    Args:
      item: position -> example.
      batch: examples of a batch.
      workers: processes that read; 0: threads of this one. Both give the same batches.
    """
    # Imported here since it takes a second, and sets in memory never need it.
    import grain
    from absl import flags

    workers = workers if _may_start_workers() else 0
    if workers and not flags.FLAGS.is_parsed():
        flags.FLAGS.mark_as_parsed()  # grain refuses to start workers otherwise
    # grain counts buffers in batches, since batching comes first.
    ahead = 1 if workers else min(4, os.cpu_count() or 1)
    data = grain.MapDataset.range(start * batch, stop * batch).map(item)
    data = data.batch(batch, drop_remainder=True, batch_fn=_stack)
    data = data.to_iter_dataset(
        grain.ReadOptions(num_threads=ahead, prefetch_buffer_size=ahead)
    )
    if workers:
        options = grain.MultiprocessingOptions(
            num_workers=workers, per_worker_buffer_size=2
        )
        data = data.mp_prefetch(options, worker_init_fn=_settle)
    iterator = iter(data)
    try:
        yield from iterator
    finally:
        iterator.close()


def _may_start_workers() -> bool:
    """Whether the main script lets other processes begin.

    Each of them runs that script once more. Where it has no
    `if __name__ == "__main__":`, that would start the whole run again, in every one.
    """
    main = sys.modules["__main__"]
    script = getattr(main, "__file__", None)
    if script is None or getattr(main, "__spec__", None) is not None:
        return True  # a notebook, or a module run by `python -m`
    try:
        with tokenize.open(script) as file:
            return "__name__" in file.read()
    except (OSError, SyntaxError, UnicodeDecodeError):  # a program that is no text
        return True


def _settle(worker: int, workers: int) -> None:
    """Set up a worker process before it reads."""
    # A terminal sends Ctrl-C to a whole process group. In a group of their own workers
    # live until the run has saved its state and closes them.
    if hasattr(os, "setpgrp"):
        os.setpgrp()
    _keep_memory()
    # Each worker has a core; OpenCV's own threads would compete for the same cores.
    if importlib.util.find_spec("cv2") is not None:
        import cv2

        cv2.setNumThreads(1)


def _keep_memory() -> None:
    """Have glibc keep freed memory: images come and go, and each page costs a fault."""
    if sys.platform != "linux":
        return
    adjust = getattr(ctypes.CDLL(None), "mallopt", None)
    if adjust is not None:  # not in musl
        adjust(_MMAP_MAX, 0)
        adjust(_TRIM_THRESHOLD, 2**30)


def batches(
    source: stream.Source,
    *,
    seed: int,
    task: int,
    epochs: int,
    batch_size: int,
    start: int = 0,
    steps: int | None = None,
    workers: int = 0,
    process_index: int = 0,
    process_count: int = 1,
    crop: Crop | CenterCrop | None = None,
    views: int = 1,
    resident: bool = True,
) -> Iterator[dict[str, np.ndarray]]:
    """Host batches of a task's steps `start` to `steps` (default: its last).

    With `resident` a batch is {"index": i32[b]}, rows of `source.examples`, whose
    pixels are on the device already. Otherwise it is {"image", "label": i32[b],
    "index"}, with images u8[b,views,S,S,C] cut by `crop`, or u8[b,H,W,C] without one.

    b = batch_size / process_count: process p yields rows [p b, (p + 1) b) of every
    global batch. A batch depends on (seed, task, step) alone: it is the same for any
    number of `workers` (processes that decode; 0: threads here) and after a restart at
    any `start`. Every worker is sent a copy of `load` and `order`. A script without
    `if __name__ == "__main__":` has threads whatever `workers` is.

    Raises ValueError here, before the first batch, for a bad number or crop, a batch
    larger than the task, or `resident` with a set that is read row by row.
    """
    plan = stream.schedule(
        source, seed=seed, task=task, epochs=epochs, batch_size=batch_size
    )
    share = _share(batch_size, process_index, process_count)
    stop = len(plan) if steps is None else steps
    if not 0 <= start <= stop <= len(plan):
        raise ValueError(
            f"start = {start}, steps = {stop}: must be 0 <= start <= steps <= "
            f"{len(plan)}, the steps of task {task}"
        )
    if workers < 0 or views < 1:
        raise ValueError(f"workers = {workers}, views = {views}: at least 0 and 1")
    if views > 1 and crop is None:
        raise ValueError(f"views = {views}: needs a crop")
    if resident:
        if source.examples.images is None:
            raise ValueError("resident = True: this set is read row by row; set False")
        return _indices(plan, share, start, stop)
    examples = source.examples
    # An array in memory is indexed in this process: each worker would get a copy.
    workers = workers if examples.images is None else 0
    item = _TrainItem(examples, plan, share, _check_crop(crop), views)
    return _read(item, start, stop, share.batch, workers)


def _indices(plan, share, start, stop):
    """Batches of rows alone."""
    for step in range(start, stop):
        yield {"index": plan[step][share.offset : share.offset + share.batch]}


def evaluation_batches(
    examples: stream.Examples,
    rows: np.ndarray,
    batch_size: int,
    *,
    crop: CenterCrop | None = None,
    workers: int = 0,
    process_index: int = 0,
    process_count: int = 1,
) -> Iterator[dict[str, np.ndarray]]:
    """All `rows` in order, in batches of one size; the last one is padded.

    A batch is {"image": u8[b,H,W,C], "label": i32[b], "index": i32[b], "mask": f32[b]};
    padding repeats the last row, with mask 0. `b` and `workers` are as in `batches`.
    """
    if batch_size < 1:
        raise ValueError(f"batch_size = {batch_size}: must be at least 1")
    rows = np.asarray(rows, np.int32)
    share = _share(batch_size, process_index, process_count)
    workers = workers if examples.images is None else 0
    item = _EvalItem(examples, rows, share, batch_size, _check_crop(crop))
    return _read(item, 0, -(-len(rows) // batch_size), share.batch, workers)


def ahead(iterator: Iterator, place: Callable, *, depth: int = 2) -> Iterator:
    """Yield `place(batch)` for each batch, computed up to `depth` batches ahead.

    One background thread reads and places batches. Its exceptions are raised here, in
    order. Closing this generator stops the thread and closes `iterator`.
    """
    if depth < 1:
        raise ValueError(f"depth = {depth}: must be at least 1")
    return _ahead(iterator, place, queue.Queue(depth), threading.Event())


def _ahead(iterator, place, ready, stopped):
    """Yield what the thread has put in the queue `ready`."""
    fill = functools.partial(_fill, iterator, place, ready, stopped)
    thread = threading.Thread(target=fill, daemon=True)
    thread.start()
    try:
        while True:
            batch, error, more = ready.get()
            if error is not None:
                raise error
            if not more:
                return
            yield batch
    finally:
        stopped.set()
        thread.join()


def _fill(iterator, place, ready, stopped):
    """The thread: put (batch, error, whether more follow) in the queue `ready`."""

    def put(*item):
        while not stopped.is_set():
            try:
                return ready.put(item, timeout=0.1)
            except queue.Full:
                pass

    try:
        for batch in iterator:
            put(place(batch), None, True)
            if stopped.is_set():
                return
        put(None, None, False)
    except BaseException as error:  # `_ahead` raises it again
        put(None, error, False)
    finally:
        if hasattr(iterator, "close"):
            iterator.close()
