"""Batches of images on the host, read ahead by threads."""

import collections
import concurrent.futures
import contextlib
import os
from collections.abc import Callable, Generator, Iterable, Iterator

import numpy as np

from jaxcl import numerics, storage
from jaxcl.data import stream
from jaxcl.data.images import crops, decode
from jaxcl.errors import Refused


def _with_decoder(crop):
    """Choose a decoder that is the same for all workers."""
    return crop and crop._replace(decoder=decode.choose_decoder(crop.decoder))


def _local_places(batch_size: int, index: int, count: int) -> np.ndarray:
    """Return the positions in a global batch that process `index` of `count` reads."""
    if batch_size < 1 or batch_size % count or not 0 <= index < count:
        raise Refused(
            f"batch_size={batch_size}: process {index} of {count} cannot take an "
            "equal share; it must be at least 1 and a multiple of the processes"
        )
    size = batch_size // count
    return index * size + np.arange(size)


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
    examples: stream.Examples,
    rows_of: Callable[[int], np.ndarray],
    read_image: Callable[[int, int, int], np.ndarray],
    steps: Iterable[int],
    workers: int,
) -> Generator[dict[str, np.ndarray], None, None]:
    """Yield the batches of the steps, in order.

    All threads work at the images of one batch, then of the next, at most one batch and
    `workers` images ahead. Decoders of images release the GIL, so threads use all
    cores, and nothing is copied from another process.

    Args:
      rows_of: function of a step, which returns this process's rows of its batch.
      read_image: function of a step, a number in these rows, and the row there.
    """
    count = workers or _count_threads(examples)
    pool = concurrent.futures.ThreadPoolExecutor(count)
    futures: collections.deque = collections.deque()

    def stack(rows, images):
        return _stack_batch(examples, rows, [image.result() for image in images])

    try:
        for step in steps:
            # Threads take tasks in turn: that of the whole batch waits for images that
            # others have begun.
            rows = rows_of(step)
            images = [
                pool.submit(read_image, step, number, int(row))
                for number, row in enumerate(rows)
            ]
            futures.append(pool.submit(stack, rows, images))
            if len(futures) == 2 + count // len(rows):
                yield futures.popleft().result()
        while futures:
            yield futures.popleft().result()
    finally:
        pool.shutdown(cancel_futures=True)


def _count_threads(examples: stream.Examples) -> int:
    """Choose how many threads read images: one a core, more from a bucket."""
    if examples.streams and storage.in_bucket(examples.reader.name(0)):
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
    crop: crops.RandomCrop | crops.CenterCrop | None = None,
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
    places = _local_places(batch_size, process_index, process_count)
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
    examples, crop = source.examples, _with_decoder(crop)

    def read_image(step, number, row):
        image = examples.read(row)
        if crop is None:
            return image
        epoch, within = divmod(step, plan.steps_per_epoch)
        # From 1, since NumPy pads seeds with zeros: with a last 0 the seed would be
        # that of the epoch's order.
        place = within * batch_size + int(places[number]) + 1
        rng = np.random.default_rng([seed, task, epoch, place])
        return np.stack([crop(image, rng) for _ in range(views)])

    def rows_of(step):
        return plan[step][places]

    return _read_in_threads(examples, rows_of, read_image, steps, workers)


def evaluation_batches(
    examples: stream.Examples,
    rows: np.ndarray,
    batch_size: int,
    *,
    crop: crops.CenterCrop | None = None,
    workers: int = 0,
    process_index: int = 0,
    process_count: int = 1,
) -> Generator[dict[str, np.ndarray], None, None]:
    """Yield all `rows` in order, in batches of one size; the last one is padded.

    A batch is {"image": u8[b,H,W,C], "label": i32[b], "index": i32[b], "mask": f32[b]};
    padding repeats the last row, with mask 0. `b` and `workers` are as in `batches`.
    """
    rows = np.asarray(rows, np.int32)
    places = _local_places(batch_size, process_index, process_count)
    steps, crop = range(-(-len(rows) // batch_size)), _with_decoder(crop)

    def read_image(step, number, row):
        image = examples.read(row)
        return image if crop is None else crop(image)

    def rows_of(step):
        return rows[np.minimum(step * batch_size + places, len(rows) - 1)]

    def add_masks(batches):
        with contextlib.closing(batches):
            for step, batch in enumerate(batches):
                mask = step * batch_size + places < len(rows)
                yield batch | {"mask": mask.astype(np.float32)}

    return add_masks(_read_in_threads(examples, rows_of, read_image, steps, workers))


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
        futures = collections.deque(pool.submit(prepare_next) for _ in range(depth + 1))
        while (batch := futures.popleft().result()) is not end:
            futures.append(pool.submit(prepare_next))
            yield batch
    finally:
        pool.shutdown(cancel_futures=True)
        if hasattr(iterator, "close"):
            iterator.close()
