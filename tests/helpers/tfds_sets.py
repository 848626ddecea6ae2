"""Small sets as TFDS prepares them, and images to fill sets with."""

import io
import json
import pathlib
import shutil
import struct

import numpy as np
import tensorflow_datasets as tfds
from etils import epath
from PIL import Image


def encoded(image, kind="PNG", **options):
    buffer = io.BytesIO()
    picture = image if isinstance(image, Image.Image) else Image.fromarray(image)
    picture.save(buffer, kind, **options)
    return buffer.getvalue()


def random_images(n, height=8, width=6, channels=3, seed=0):
    rng = np.random.default_rng(seed)
    return rng.integers(0, 256, (n, height, width, channels), np.uint8)


NAMES = ["cat", "dog", "owl"]


class Toy(tfds.core.GeneratorBasedBuilder):
    """Thirty PNG images, made with the real library."""

    VERSION = tfds.core.Version("1.0.0")
    pkg_dir_path = epath.Path(".")
    code_path = epath.Path(__file__)  # found by a package that may be missing

    def _info(self):
        return tfds.core.DatasetInfo(
            builder=self,
            features=tfds.features.FeaturesDict(
                {
                    "image": tfds.features.Image(shape=(None, None, 3)),
                    "label": tfds.features.ClassLabel(names=NAMES),
                    "style": tfds.features.ClassLabel(names=["photo", "sketch"]),
                    "name": tfds.features.Text(),
                }
            ),
        )

    def _split_generators(self, manager):
        return {"train": self._generate_examples(0), "test": self._generate_examples(1)}

    def _generate_examples(self, seed=0):
        for i, image in enumerate(random_images(20 - 10 * seed, seed=seed)):
            yield (
                i,
                {
                    "image": encoded(image),
                    "label": i % 3,
                    "style": i % 2,
                    "name": f"{i}",
                },
            )


def array_record(root: pathlib.Path) -> str:
    """Prepare the set below a folder; its directory."""
    builder = Toy(data_dir=str(root), file_format="array_record")
    builder.download_and_prepare()
    return str(builder.data_dir)


def framed(data: bytes) -> bytes:
    """A record of a tfrecord file, with its checksums."""
    length = struct.pack("<Q", len(data))
    return length + checksum(length) + data + checksum(data)


def checksum(data: bytes) -> bytes:
    """The masked CRC-32C, bit by bit from its polynomial."""
    crc = 0xFFFFFFFF
    for byte in data:
        crc ^= byte
        for _ in range(8):
            crc = (crc >> 1) ^ (0x82F63B78 if crc & 1 else 0)
    crc ^= 0xFFFFFFFF
    turned = (crc >> 15 | crc << 17) & 0xFFFFFFFF
    return struct.pack("<I", (turned + 0xA282EAD8) & 0xFFFFFFFF)


def tfrecord(array_record: str, root: pathlib.Path) -> str:
    """The same set as tfrecord files, train in two shards; its directory."""
    out = root / "toy" / "1.0.0"
    out.mkdir(parents=True)
    builder = tfds.builder_from_directory(array_record)
    with open(f"{array_record}/dataset_info.json") as file:
        meta = json.load(file)
    meta["fileFormat"] = "tfrecord"
    for name in ("features.json", "label.labels.txt", "style.labels.txt"):
        shutil.copy(f"{array_record}/{name}", out / name)
    for part, lengths in zip(meta["splits"], ([12, 8], [10]), strict=True):
        part["shardLengths"] = [str(length) for length in lengths]
        rows = iter(builder.as_data_source(split=part["name"]))
        for number, length in enumerate(lengths):
            stem = f"toy-{part['name']}.tfrecord"
            file = out / f"{stem}-{number:05}-of-{len(lengths):05}"
            with open(file, "wb") as opened:
                for _ in range(length):
                    row = next(rows)
                    row["image"] = encoded(row["image"])
                    data = builder.info.features.serialize_example(row)
                    opened.write(framed(data))
    (out / "dataset_info.json").write_text(json.dumps(meta))
    return str(out)
