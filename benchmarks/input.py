"""What it takes to feed a chip: images a second, by decoder, threads and place.

  python benchmarks/input.py --decoders cv2 --images=200
  python benchmarks/input.py --bucket --batch=64 --threads 1 4 16 64

writes JPEGs of ImageNet's size and reads them as a run does, two random crops of each.
It counts the CPU time of an image, decoded and cropped on one core, then images a
second by the clock with 1, 2, 4 ... threads; other programs on the machine slow this
down. With `--bucket` the images are read from a bucket on loopback, a process of its
own that answers after 30 ms: once a file each, once as shards.
"""

import argparse
import contextlib
import io
import json
import os
import pathlib
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator

import numpy as np
from etils import epath
from PIL import Image

from jaxcl.data import stream
from jaxcl.data.feed import prefetch
from jaxcl.data.images import crops, decode
from jaxcl.data.sources import by_name, shards

ROOT = pathlib.Path(__file__).resolve().parents[1]
HEIGHT, WIDTH = 375, 500  # the commonest size in ImageNet, of about 110 kB
SIZE, VIEWS = 224, 2
BUCKET = {"image_folder": "gs://bucket/files", "shards": "gs://bucket/shards"}


def parser() -> argparse.ArgumentParser:
    """Make the command line."""
    made = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    made.add_argument("--decoders", nargs="+", default=["cv2", "pillow"])
    made.add_argument("--images", type=int, default=256, help="files that are made")
    made.add_argument("--batch", type=int, default=32)
    made.add_argument("--repeats", type=int, default=5, help="the least is taken")
    threads = "default: 1, 2, 4 ... up to the cores"
    made.add_argument("--threads", nargs="+", type=int, help=threads)
    made.add_argument("--bucket", action="store_true", help="read from a slow bucket")
    made.add_argument("--latency", type=float, default=0.03, help="its seconds")
    made.add_argument("--json", help="file to write all numbers to")
    return made


def picture(rng: np.random.Generator) -> bytes:
    """Make a JPEG of a photo's size and bytes: noise that falls with frequency."""
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


def read_set(source: str, path: str, decoder: str):
    """Return the images of a source, decoded again in each epoch, and the crop."""
    examples = by_name.load(source, path=path, decoder=decoder, test=0.0).train
    # A set as small as this would stay in memory after the first epoch.
    examples = examples._replace(reader=examples.reader.uncached())
    return examples, crops.RandomCrop(SIZE, decoder=decoder)


def cpu_seconds(args, folder: pathlib.Path, decoder: str) -> dict[str, float]:
    """Measure CPU seconds of an image, the least of some runs, on one thread."""
    examples, crop = read_set("image_folder", str(folder / "images"), decoder)
    count, rng = len(examples.label), np.random.default_rng(0)
    encoded = [examples.reader.raw(row) for row in range(count)]
    images = [examples.read(row) for row in range(count)]
    decoding = decode.Decoding(decoder)

    def least(function) -> float:
        spent = []
        for _ in range(args.repeats):
            start = time.process_time()
            for row in range(count):
                function(row)
            spent.append(time.process_time() - start)
        return min(spent) / count

    return {
        "decode": least(lambda row: decoding(encoded[row], str(row))),
        "two crops": least(lambda row: [crop(images[row], rng) for _ in range(VIEWS)]),
    }


def by_threads(args, place, decoder: str, source="image_folder") -> Iterator[dict]:
    """Measure images a second by the number of threads, the best of some runs.

    Args:
      args: the command line.
      place: the folder whose "images" are read, or the address of a bucket's images.
      decoder: "cv2" or "pillow".
      source: name of the source.
    """
    path = place if isinstance(place, str) else str(place / "images")
    examples, crop = read_set(source, path, decoder)
    rows = stream.Source(examples, np.arange(len(examples.label)))
    images = len(examples.label) // args.batch * args.batch
    cores = os.cpu_count() or 1
    upto = sorted(x for x in {1, 2, 4, 8, 16, 32, cores} if x <= cores)
    plan = {"seed": 0, "task": 0, "epochs": 1, "batch_size": args.batch}
    for threads in args.threads or upto:
        seconds, first = [], []
        for _ in range(args.repeats):
            start = time.perf_counter()
            batches = prefetch.batches(
                rows, **plan, workers=threads, resident=False, crop=crop, views=VIEWS
            )
            with contextlib.closing(batches):
                next(batches)
                first.append(time.perf_counter() - start)
                for _ in batches:
                    pass
            seconds.append(time.perf_counter() - start)
        rate = images / min(seconds)
        yield {"threads": threads, "images": rate, "first_batch": min(first)}


@contextlib.contextmanager
def serve_bucket(args, folder: pathlib.Path) -> Iterator[None]:
    """Serve a bucket that holds the images, as files and as shards."""
    sys.path.insert(0, str(ROOT / "tests"))
    from helpers import fake_gcs

    # Asked when gcsfs is imported: no look for zonal buckets, of which there are none.
    os.environ["GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT"] = "false"
    command = [sys.executable, fake_gcs.__file__, "bucket", str(args.latency)]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, **pipes) as server:
        os.environ.update(fake_gcs.variables(server.stdout.readline().strip()))
        for file in (folder / "images").rglob("*.jpg"):
            place = epath.Path(BUCKET["image_folder"]) / file.relative_to(
                folder / "images"
            )
            place.write_bytes(file.read_bytes())
        data = by_name.load("image_folder", path=str(folder / "images"), test=0.0)
        shards.write_shards(data, BUCKET["shards"])
        yield
        server.stdin.close()


def main(argv=None) -> dict:
    """Print CPU time and images a second; return them by decoder and place."""
    args, found = parser().parse_args(argv), {}
    with tempfile.TemporaryDirectory() as name, contextlib.ExitStack() as stack:
        folder = pathlib.Path(name)
        size = write(folder / "images", args.images)
        print(f"{args.images} JPEGs of {WIDTH} x {HEIGHT}, {size / 1e3:.0f} kB each")
        places = {"image_folder": folder}
        if args.bucket:
            stack.enter_context(serve_bucket(args, folder))
            places = BUCKET
        for decoder in args.decoders:
            if decoder == "cv2":
                import cv2

                cv2.setNumThreads(1)  # the threads here are those of jaxcl
            if not args.bucket:
                found[decoder] = cpu_seconds(args, folder, decoder)
                for step, seconds in found[decoder].items():
                    print(f"{decoder}, {step}: {1e3 * seconds:.2f} CPU ms", flush=True)
            for source, place in places.items():
                rows = found[f"{decoder}, {source}"] = []
                for row in by_threads(args, place, decoder, source):
                    rows.append(row)
                    print(
                        f"{decoder}, {source}, {row['threads']} threads: "
                        f"{row['images']:.0f} images/s, the first batch after "
                        f"{row['first_batch']:.2f} s",
                        flush=True,
                    )
    if args.json:
        pathlib.Path(args.json).write_text(json.dumps(found, indent=1) + "\n")
    return found


if __name__ == "__main__":
    main()
