"""Write a set as a directory of plain arrays, or as tar shards.

    jaxcl convert IN.npz OUT_DIR

writes what `arrays.arrays` reads: one .npy file per array, and a meta.json
{"name", "class_names", "domain_names", "mean", "std", "decoder",
 "splits": {"train": {"images": ENTRY, "label": ENTRY, "domain": ENTRY}, "test": ...}}
with ENTRY = {"file", "sha256" of the array's bytes}. Only the "file" of each split's
"images" is required, so such a directory is easily written by hand.

    jaxcl convert pacs64.npz art --domains art_painting

writes some domains of the set.

    jaxcl convert FOLDER SHARDS --shards

writes any set of images as tar files with an index, for `shards.shards`. Encoded
images stay as they are. FOLDER is all that `--config.data.path` of `own_images` takes,
SHARDS a folder on a disk or in a bucket.
"""

import argparse
import pathlib

import numpy as np

from jaxcl import storage
from jaxcl.data import stream
from jaxcl.data.images import array_files
from jaxcl.data.sources import arrays, by_name, shards
from jaxcl.data.stream import splits
from jaxcl.errors import Refused


def write_arrays(dataset: stream.Dataset, directory: str) -> None:
    """Write a dataset in memory as a directory for `arrays.arrays`.

    Raises Refused if the directory is not empty.
    """
    storage.check_blank(directory, directory)
    out = pathlib.Path(directory)
    out.mkdir(parents=True, exist_ok=True)
    try:
        _write_splits(dataset, out)
    except BaseException:  # so that the same command may be run again
        for path in out.iterdir():
            path.unlink()
        raise


def _write_splits(dataset, out) -> None:
    splits = {}
    for split, examples in stream.splits_of(dataset).items():
        if examples.images is None:
            raise Refused(f"{dataset.name}: {split} is not in memory; set resident")
        splits[split] = {}
        for key in ("images", "label", "domain"):
            array = getattr(examples, key)
            np.save(out / f"{split}_{key}.npy", array, allow_pickle=False)
            entry = {"file": f"{split}_{key}.npy", "sha256": array_files.sha256(array)}
            splits[split][key] = entry
    mean, std = mean_std(dataset.train.images)
    meta = {
        "name": dataset.name,
        "class_names": dataset.class_names,
        "domain_names": dataset.domain_names,
        "mean": mean,
        "std": std,
        "decoder": dataset.decoder,
        "splits": splits,
    }
    # Last, so that a killed run leaves nothing that looks complete.
    storage.write_json(out / "meta.json", meta)


def mean_std(images: np.ndarray) -> tuple[list[float], list[float]]:
    """Measure mean and deviation of each channel of u8[N,H,W,C], in [0, 1]."""
    planes = np.moveaxis(images, -1, 0)
    counts = np.stack([np.bincount(x.ravel(), minlength=256) for x in planes])
    levels = np.arange(256) / 255
    share = counts / counts.sum(1, keepdims=True)
    mean = share @ levels
    std = np.sqrt((share * (levels - mean[:, None]) ** 2).sum(1))
    return mean.tolist(), std.tolist()


def add_options(parser) -> None:
    """Add the options of `jaxcl convert`."""
    parser.description = __doc__
    add = parser.add_argument
    add("set", help="plain or packed .npz; with --shards any set of images")
    add("directory", help="new or empty directory to write")
    add("--shards", action="store_true", help="write tar shards with an index")
    add("--domains", nargs="+", help="names or numbers; else all")


def main(options: argparse.Namespace) -> int:
    """Run `jaxcl convert`."""
    if options.shards:
        dataset = by_name.load(**by_name.section_of(options.set))
    else:
        dataset = arrays.npz(path=options.set)
    if words := options.domains:
        domains = [int(word) if word.isdecimal() else word for word in words]
        dataset = splits.of_domains(dataset, domains)
    write = shards.write_shards if options.shards else write_arrays
    write(dataset, options.directory)
    return 0
