"""Images a second from a bucket that answers in 30 ms, by files and readers.

  python benchmarks/bucket.py --readers 1 4 16 64

The bucket is on loopback, in a process of its own. It holds JPEGs of ImageNet's size,
once as files and once as shards (`jaxcl convert --shards`). An epoch of batches with
two random crops of each image is read, as a run reads it.
"""

import argparse
import os
import pathlib
import subprocess
import sys
import tempfile
import time

import input as input_lib
import numpy as np

from jaxcl.data import stream
from jaxcl.data.feed import prefetch
from jaxcl.data.images import crops
from jaxcl.data.sources import by_name, shards

ROOT = pathlib.Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests"))
# Asked when gcsfs is imported: no look for zonal buckets, of which there are none.
os.environ["GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT"] = "false"


def parser() -> argparse.ArgumentParser:
    """The command line."""
    made = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    made.add_argument("--readers", nargs="+", type=int, default=[1, 4, 16, 64])
    made.add_argument("--images", type=int, default=256)
    made.add_argument("--batch", type=int, default=64)
    made.add_argument("--latency", type=float, default=0.03, help="seconds")
    return made


def rate(name, path, args, readers) -> float:
    """Images a second of an epoch."""
    examples = by_name.load(name, path=path, test=0.0).train
    examples = examples._replace(reader=examples.reader.uncached())
    source = stream.Source(examples, np.arange(len(examples.label)))
    plan = {"seed": 0, "task": 0, "epochs": 1, "batch_size": args.batch}
    crop = crops.RandomCrop(input_lib.SIZE)
    start = time.perf_counter()
    made = prefetch.batches(
        source, **plan, workers=readers, crop=crop, views=2, resident=False
    )
    images = sum(len(batch["label"]) for batch in made)
    return images / (time.perf_counter() - start)


def main(argv=None) -> dict:
    """Print a line for each layout and number of readers; return the rates."""
    from helpers import fake_gcs

    args = parser().parse_args(argv)
    server = subprocess.Popen(
        [sys.executable, fake_gcs.__file__, "bucket", str(args.latency)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    rates = {}
    with tempfile.TemporaryDirectory() as name, server:
        os.environ.update(fake_gcs.variables(server.stdout.readline().strip()))
        input_lib.write(pathlib.Path(name), args.images)
        from etils import epath

        for file in pathlib.Path(name).rglob("*.jpg"):
            there = epath.Path("gs://bucket/files") / file.relative_to(name)
            there.write_bytes(file.read_bytes())
        data = by_name.load("image_folder", path=name, test=0.0)
        shards.write_shards(data, "gs://bucket/shards")
        for source, path in (
            ("image_folder", "gs://bucket/files"),
            ("shards", "gs://bucket/shards"),
        ):
            for readers in args.readers:
                row = f"{source}, {readers} readers"
                rates[row] = rate(source, path, args, readers)
                print(f"{row}: {rates[row]:.0f} images/s", flush=True)
        server.stdin.close()
    return rates


if __name__ == "__main__":
    main()
