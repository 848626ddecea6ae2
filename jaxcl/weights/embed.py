"""Embed a data set once: `jaxcl features --encoder=FOLDER --data=DATA --out=FILE`.

FILE, .npz or .safetensors, then holds features, labels and domains of every split, the
names of classes and domains, and the card of the encoder. The source `features` reads
it: `jaxcl train frozen_heads:features --config.data.path=FILE`.

A stopped command resumes when it is given again; its rows are in FILE.part.
"""

import argparse
import json
import os
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from jaxcl import numerics, schema
from jaxcl.config import build, command, jobs, own_images, transfer_config
from jaxcl.data import stream
from jaxcl.data.sources import by_name, features
from jaxcl.data.stream import identity
from jaxcl.errors import Refused
from jaxcl.evals import embedding
from jaxcl.run import encoder_folder, progress_bar, train


def prepare_work(encoder: str, data: str | dict) -> jobs.Frozen:
    """Read the data and the encoder of a command.

    Args:
      encoder: a folder that `jaxcl export` or `jaxcl import` wrote.
      data: a path, the name of a source that needs no files, or a section config.data,
        also as JSON.

    Raises:
      Refused, OSError: as for `build.restore_frozen`.
    """
    encoder_config = encoder_folder.as_config(encoder)
    if isinstance(data, str) and data.startswith("{"):
        data = json.loads(data)
    elif isinstance(data, str) and by_name.needs_nothing(data):
        data = {"name": data}
    section = own_images.make_section(
        data, parent_config=encoder_config, field="--data"
    )
    config = transfer_config.make_config(section, "none", encoder_config)
    return build.restore_frozen(transfer_config.add_checkpoint(config, encoder))


@numerics.pinned()
def write_features(
    work: jobs.Frozen,
    out: str,
    *,
    batch_size: int = 256,
    stop: Callable[[], bool] = lambda: False,
) -> dict[str, Any]:
    """Write the features of every split to a file; resume from FILE.part.

    Args:
      work: data and encoder from `prepare_work`.
      out: the file, which may hold the same features already.
      batch_size: images at a time, rounded up to a multiple of the devices.
      stop: function called after each batch; True ends the call.

    Returns:
      The description of the features in the file.

    Raises:
      Refused: the file, or FILE.part, holds something else.
      OSError: a file cannot be read or written.
      train.Interrupted: `stop` returned True.
    """
    features.check_suffix(out)
    schema.check_value(batch_size, schema.Count, "batch_size")
    dataset = work.parts.stream.dataset
    batch_size = embedding.padded_size(work.parts, batch_size)
    metadata = {
        "card": encoder_folder.read_card(work.source["path"]),
        "images": identity.identify(dataset).digest(),
        "class_names": list(dataset.class_names),
        "domain_names": list(dataset.domain_names),
        "batch_size": batch_size,
    }
    if os.path.exists(out):
        if features.read(out)[1] != metadata:
            raise Refused("--out", out, "is no file of features; give another path")
        return metadata
    splits, width = stream.splits_of(dataset), metadata["card"]["num_features"]
    draft, sizes = f"{out}.part", [stream.count_rows(x) for x in splits.values()]
    offset = _begin_draft(draft, metadata)
    with open(draft, "r+b") as file:
        written = (file.seek(0, os.SEEK_END) - offset) // (4 * width)
        rows_done = _count_whole_batches(written, sizes, batch_size)
        file.truncate(file.seek(offset + 4 * width * rows_done))
        with progress_bar.count_images(sum(sizes), rows_done) as bar:
            for rows in _embed_rows(work, splits.values(), rows_done, batch_size):
                file.write(rows.astype("<f4").tobytes())
                file.flush()
                bar.update(len(rows))
                if stop():
                    raise train.Interrupted(f"stopped; the rows so far are in {draft}")
    vectors = np.memmap(draft, "<f4", "r", offset=offset, shape=(sum(sizes), width))
    arrays, by_split = {}, np.split(vectors, np.cumsum(sizes)[:-1])
    for (name, x), rows in zip(splits.items(), by_split, strict=True):
        values = {"x": rows, "y": x.label, "domain": x.domain}
        arrays |= {f"{name}_{key}": value for key, value in values.items()}
    features.write(out, arrays, metadata)
    os.unlink(draft)
    return metadata


def _begin_draft(draft, metadata) -> int:
    """Begin a draft with a line about its features; return where rows begin."""
    line = json.dumps(metadata, sort_keys=True).encode() + b"\n"
    if not os.path.exists(draft) or os.path.getsize(draft) < len(line):
        with open(draft, "wb") as file:
            file.write(line)
    with open(draft, "rb") as file:
        if file.read(len(line)) != line:
            raise Refused(
                f"{draft}: has features of another encoder, data set or batch size; "
                "repeat the command that started the file, or remove it"
            )
    return len(line)


def _count_whole_batches(rows, sizes, batch_size) -> int:
    """Count the first rows that fill whole batches; each split begins a batch."""
    rows_done = 0
    for size in sizes:
        if rows - rows_done < size:
            return rows_done + (rows - rows_done) // batch_size * batch_size
        rows_done += size
    return rows_done


def _embed_rows(work, splits, rows_done, batch_size) -> Iterator[np.ndarray]:
    """Yield the features of all splits but the first `rows_done`, batch by batch."""
    for examples in splits:
        if rows_done < stream.count_rows(examples):
            yield from embedding.embed_batches(
                work.parts, examples, work.state, first=rows_done, batch_size=batch_size
            )
        rows_done = max(rows_done - stream.count_rows(examples), 0)


def add_options(parser) -> None:
    """Add the options of `jaxcl features`."""
    add = parser.add_argument
    add("--encoder", required=True, help="the folder of an encoder")
    add("--data", required=True, help="a path, or a section config.data as JSON")
    add("--out", required=True, help="FILE.npz or FILE.safetensors")
    add("--batch-size", type=int, default=256, help="images at a time")


def main(options: argparse.Namespace) -> int:
    """Run `jaxcl features`; return 2 if an input is wrong, 75 if stopped."""

    def make():
        features.check_suffix(options.out)
        return prepare_work(options.encoder, options.data)

    def work(frozen, stop):
        write_features(frozen, options.out, batch_size=options.batch_size, stop=stop)
        print(f"features are in {options.out}", flush=True)

    return command.run_until_signal(make, work)
