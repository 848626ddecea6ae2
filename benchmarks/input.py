"""What it takes to feed a chip: images a second of a core, for each way to read them.

  python benchmarks/input.py
  python benchmarks/input.py --decoders cv2 --images=200 --json=input.json

writes JPEGs of ImageNet's size, reads them as a run does (two random crops of each),
and counts the CPU time of an image in every link of the chain: what threads do, one on
each core, and what the one thread that trains does with each image. Then it reads an
epoch with 1, 2, 4 ... threads and counts images a second by the clock; other programs
on the machine slow this down. Beside that stand the images a second that chips take at
0.3 of their peak.
"""

import argparse
import contextlib
import datetime
import io
import itertools
import json
import os
import pathlib
import tempfile
import time
from collections.abc import Iterator
from typing import NamedTuple

import jax
import numpy as np
from PIL import Image

from jaxcl import estimate
from jaxcl.data import stream
from jaxcl.data.feed import prefetch
from jaxcl.data.images import crops, decode
from jaxcl.data.sources import by_name
from jaxcl.run import job

HEIGHT, WIDTH = 375, 500  # the commonest size in ImageNet, of about 110 kB
SIZE, VIEWS = 224, 2
FLOPS = 8723e9 / 256  # of an image, by configs/pnr_imagenet100.py
UTILISATION = 0.3  # of a chip's peak, assumed
TARGETS = ("h200:1", "h200:8", "v5e:2x4")
RESIDENT = "numbers of resident images"


def parser() -> argparse.ArgumentParser:
    """The command line."""
    made = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    made.add_argument("--decoders", nargs="+", default=["cv2", "pillow"])
    made.add_argument("--images", type=int, default=128, help="files that are made")
    made.add_argument("--batch", type=int, default=32)
    made.add_argument("--repeats", type=int, default=5, help="the least is taken")
    made.add_argument("--steps-per-call", type=int, default=8)
    made.add_argument("--json", help="file to write all numbers to")
    return made


class Link(NamedTuple):
    """A link of the chain."""

    name: str
    shared: bool  # by a thread on every core; else one thread does it
    seconds: float  # of CPU time, for an image with both its crops

    @property
    def rate(self) -> float:
        """Images a second of a core."""
        return 1 / self.seconds


def picture(rng: np.random.Generator) -> bytes:
    """A JPEG of the size and the bytes of a photo: noise that falls with frequency."""
    image = np.full((HEIGHT, WIDTH, 3), 128.0)
    for side in (2, 4, 8, 16, 32, 64, 128, 256):
        noise = rng.uniform(0, 255, (side, side, 3)).astype(np.uint8)
        scaled = Image.fromarray(noise).resize(
            (WIDTH, HEIGHT), Image.Resampling.BICUBIC
        )
        image += (np.asarray(scaled, float) - 128) * 0.7 / side**0.2
    file = io.BytesIO()
    pixels = Image.fromarray(image.clip(0, 255).astype(np.uint8))
    pixels.save(file, "jpeg", quality=92)
    return file.getvalue()


def write(folder: pathlib.Path, count: int) -> float:
    """Write so many images of two classes below a folder; return a file's mean bytes.

    At most 128 of them differ.
    """
    rng = np.random.default_rng(0)
    pictures = [picture(rng) for _ in range(min(count, 128))]
    for i in range(count):
        path = folder / "train" / f"class{i % 2}" / f"{i}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(pictures[i % len(pictures)])
    return float(np.mean([len(data) for data in pictures]))


def least(function, count: int, repeats: int) -> float:
    """CPU seconds of this process for one of `count` images, the least of some runs.

    Threads count; other programs of the machine do not, but for what they leave of
    its caches.
    """
    spent = []
    for _ in range(repeats):
        start = time.process_time()
        function()
        spent.append(time.process_time() - start)
    return min(spent) / count


def _batches(examples, args, *, workers=0, crop=None):
    """The batches of an epoch, as a run reads them."""
    source = stream.Source(examples, np.arange(len(examples.label)))
    options = {} if crop is None else {"crop": crop, "views": VIEWS}
    return prefetch.batches(
        source,
        seed=0,
        task=0,
        epochs=1,
        batch_size=args.batch,
        workers=workers,
        resident=crop is None,
        **options,
    )


def _whole(examples, args, crop=None):
    """A function that reads an epoch."""

    def read():
        with contextlib.closing(_batches(examples, args, crop=crop)) as batches:
            for _ in batches:
                pass

    return read


def read_set(args, folder: pathlib.Path, decoder: str):
    """Return the images, decoded again in each epoch, and the crop."""
    where = {"path": str(folder / "images"), "decoder": decoder, "test": 0.0}
    examples = by_name.load("image_folder", **where).train
    # A set as small as this would stay in memory after the first epoch.
    examples = examples._replace(reader=examples.reader.uncached())
    return examples, crops.RandomCrop(SIZE, decoder=decoder)


def by_threads(args, folder: pathlib.Path, decoder: str) -> Iterator[dict]:
    """Images a second by the clock, by the number of threads, the best of some runs."""
    examples, crop = read_set(args, folder, decoder)
    images = len(examples.label) // args.batch * args.batch
    cores = os.cpu_count() or 1
    for workers in sorted({1, 2, 4, 8, 16, 32, cores}):
        if workers > cores:
            break
        seconds, first = [], []
        for _ in range(args.repeats):
            start = time.perf_counter()
            batches = _batches(examples, args, workers=workers, crop=crop)
            with contextlib.closing(batches):
                next(batches)
                first.append(time.perf_counter() - start)
                for _ in batches:
                    pass
            seconds.append(time.perf_counter() - start)
        rate = images / min(seconds)
        yield {"threads": workers, "images": rate, "first_batch": min(first)}


def chain(args, folder: pathlib.Path, decoder: str) -> Iterator[Link]:
    """The links from files to crops, by one decoder."""
    read, crop = read_set(args, folder, decoder)
    rows = range(len(read.label))
    encoded = [read.reader.raw(row) for row in rows]
    images = [read.read(row) for row in rows]
    rng, count = np.random.default_rng(0), len(rows)

    def timed(function):
        return least(function, count, args.repeats)

    def all_of(examples):
        return timed(_whole(examples, args, crop))

    def crop_all(pictures):
        for image in pictures:
            for _ in range(VIEWS):
                crop(image, rng)

    def decoded():
        for row, data in enumerate(encoded):
            decode.Decoding(decoder)(data, str(row))

    yield Link(f"{decoder}: decode", True, timed(decoded))
    yield Link(f"{decoder}: two crops", True, timed(lambda: crop_all(images)))
    yield Link(f"{decoder}: from JPEGs, all", True, all_of(read))


def training_thread(args) -> Iterator[Link]:
    """What the thread that trains does with each image that others have read."""
    steps = args.steps_per_call
    shape = (args.batch, VIEWS, SIZE, SIZE, 3)
    rng = np.random.default_rng(0)
    batches = [{"image": rng.integers(0, 256, shape, np.uint8)} for _ in range(steps)]
    images = steps * args.batch
    joined = least(lambda: job.stacked(batches), images, args.repeats)
    yield Link("join the batches of a call", False, joined)
    array = job.stacked(batches)
    device = jax.devices("cpu")[0]
    placed = least(
        lambda: jax.block_until_ready(jax.device_put(array, device, may_alias=False)),
        images,
        args.repeats,
    )
    yield Link("copy it, as to a device", False, placed)


def resident(args) -> Link:
    """Rows of a set that lives on the device: their numbers alone are sent."""
    label = np.zeros(50_000, np.int32)
    images = np.broadcast_to(np.uint8(0), (50_000, 1, 1, 3))
    examples = stream.Examples(label, label, images)
    read = _whole(examples, argparse.Namespace(batch=256))
    seconds = least(read, 50_000, args.repeats)
    return Link(RESIDENT, False, seconds)


def needs() -> list[dict]:
    """Images a second of each host, for chips at `UTILISATION` of their peak."""
    found = []
    for text in TARGETS:
        target = estimate.parse_target(text)
        hosts = max(1, target.chips // (4 if target.chip.slice else 8))
        rate = target.chips * UTILISATION * target.chip.bfloat16 / FLOPS / hosts
        found.append({"target": text, "hosts": hosts, "images": rate})
    return found


HEAD = "| link | CPU ms an image | images/s of a core | by |\n|---|---:|---:|---|"


def line(link: Link) -> str:
    """A link as a row of the table."""
    who = "every thread" if link.shared else "the thread that trains"
    return f"| {link.name} | {1e3 * link.seconds:.3g} | {link.rate:,.0f} | {who} |"


def main(argv=None) -> dict:
    """Measure all links; print them, and what chips ask for."""
    args = parser().parse_args(argv)
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        size = write(folder / "images", args.images)
        if "cv2" in args.decoders:
            import cv2

            cv2.setNumThreads(1)  # the threads here are those of jaxcl
        print(f"{args.images} JPEGs of {WIDTH} x {HEIGHT}, {size / 1e3:.0f} kB each")
        print(HEAD, flush=True)
        links = []
        for found in itertools.chain(
            *(chain(args, folder, decoder) for decoder in args.decoders),
            training_thread(args),
            [resident(args)],
        ):
            links.append(found)
            print(line(found), flush=True)
        read = {}
        for decoder in args.decoders:
            read[decoder] = list(by_threads(args, folder, decoder))
            for row in read[decoder]:
                print(
                    f"{decoder}, {row['threads']} threads: {row['images']:.0f} "
                    f"images/s, the first batch after {row['first_batch']:.2f} s",
                    flush=True,
                )
    fed = [link for link in links if link.name != RESIDENT]
    asked, one = needs(), 1 / sum(link.seconds for link in fed if not link.shared)
    print(f"the thread that trains takes {one:,.0f} images/s at most")
    ways = [link for link in fed if link.name.endswith(", all")]
    for need, way in itertools.product(asked, ways):
        print(
            f"{need['target']}, {need['images']:,.0f} images/s of a host: {way.name} "
            f"takes {need['images'] * way.seconds:.0f} cores"
        )
    found = {
        "date": datetime.date.today().isoformat(),
        "bytes": size,
        "links": [link._asdict() for link in links],
        "threads": read,
        "needs": asked,
    }
    if args.json:
        pathlib.Path(args.json).write_text(json.dumps(found, indent=1) + "\n")
    return found


if __name__ == "__main__":
    main()
