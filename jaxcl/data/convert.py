"""Write a set as a directory of plain arrays.

    python -m jaxcl.data.convert IN.npz OUT_DIR

writes what `from_arrays.arrays` reads: one .npy file per array, and a meta.json
{"name", "class_names", "domain_names", "mean", "std", "decoder",
 "splits": {"train": {"images": ENTRY, "label": ENTRY, "domain": ENTRY}, "test": ...}}
with ENTRY = {"file", "sha256" of the array's bytes}. Only the "file" of each split's
"images" is required, so such a directory is easily written by hand.

    python -m jaxcl.data.convert pacs64.npz art --domains art_painting
    python -m jaxcl.data.convert cifar100.npz first --classes 0:50 --per-class 200

write a part of the set: some domains, some classes, so many train images of a class.
"""

import argparse
import pathlib
import re
from collections.abc import Sequence

import numpy as np

from jaxcl.data import files, from_arrays, splits, storage, stream


def write_arrays(dataset: stream.Dataset, directory: str) -> None:
    """Write a dataset that lies in memory as a directory for `from_arrays.arrays`.

    Raises ValueError if the directory is not empty.
    """
    out = pathlib.Path(directory)
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ValueError(f"{out} is there already and not an empty directory")
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
            raise ValueError(f"{dataset.name}: {split} is not in memory; set resident")
        splits[split] = {}
        for key in ("images", "label", "domain"):
            array = getattr(examples, key)
            np.save(out / f"{split}_{key}.npy", array, allow_pickle=False)
            entry = {"file": f"{split}_{key}.npy", "sha256": files.sha256(array)}
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
    counts = np.stack(
        [
            np.bincount(images[..., c].ravel(), minlength=256)
            for c in range(images.shape[-1])
        ]
    )
    levels = np.arange(256) / 255
    share = counts / counts.sum(1, keepdims=True)
    mean = share @ levels
    std = np.sqrt((share * (levels - mean[:, None]) ** 2).sum(1))
    return mean.tolist(), std.tolist()


def cut_part(
    dataset: stream.Dataset,
    *,
    domains: Sequence[int | str] | None = None,
    classes: Sequence[int | str] | None = None,
    per_class: int | None = None,
    seed: int = 0,
) -> stream.Dataset:
    """Cut a part out of a dataset; None: all.

    Raises ValueError as `splits.of_domains` and `splits.of_classes` do, and where no
    train image is left.
    """
    if domains is not None:
        dataset = splits.of_domains(dataset, domains)
    if (classes, per_class) != (None, None):
        dataset = splits.of_classes(dataset, classes, per_class, seed)
    if not stream.count_rows(dataset.train):
        raise ValueError(f"{dataset.name}: no train image is of this part")
    return dataset


def main() -> None:
    """Run the command, see the module's docstring."""
    parser = argparse.ArgumentParser(
        description="An .npz file, or a part of it, as plain arrays.",
        allow_abbrev=False,
    )
    parser.add_argument("npz", help="plain or packed .npz, see from_arrays.npz")
    parser.add_argument("directory", help="new or empty directory to write")
    entries = "names, numbers, or spans of numbers such as 0:50, without the last"
    parser.add_argument("--domains", nargs="+", metavar="DOMAIN", help=entries)
    parser.add_argument("--classes", nargs="+", metavar="CLASS", help=entries)
    parser.add_argument("--per-class", type=int, help="train images to draw of each")
    parser.add_argument("--seed", type=int, default=0, help="draws --per-class")
    arguments = parser.parse_args()
    try:
        dataset = cut_part(
            from_arrays.npz(path=arguments.npz),
            domains=_entries(arguments.domains),
            classes=_entries(arguments.classes),
            per_class=arguments.per_class,
            seed=arguments.seed,
        )
        write_arrays(dataset, arguments.directory)
    except (ValueError, OSError) as error:
        parser.error(str(error))


def _entries(words) -> list[int | str] | None:
    """Return names and numbers of words, in which a span stands for its numbers."""
    if words is None:
        return None
    entries: list[int | str] = []
    for word in words:
        if span := re.fullmatch(r"(\d+):(\d+)", word):
            entries += range(*map(int, span.groups()))
        else:
            entries.append(int(word) if word.isdecimal() else word)
    return entries


if __name__ == "__main__":
    main()
