"""Where examples come from: functions that return a `stream.Dataset`, by name.

Every source takes `validation`, the share of each class (and domain) that is cut
out of train by `seed`; the test split never changes with the run's seed.
"""

import difflib
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from jaxcl import schema
from jaxcl.data import (
    files,
    from_arrays,
    from_folders,
    from_graphs,
    from_lists,
    from_tfds,
    splits,
    stl10,
    stream,
    tiny_imagenet,
    toys,
)


class _Readers(NamedTuple):
    """Row-by-row reading of several parts; picklable as each of them is."""

    loads: tuple[Any, ...]  # of stream.Examples, or _Array
    starts: np.ndarray  # i64[parts], first row of each

    def _find(self, row):
        part = int(np.searchsorted(self.starts, row, "right")) - 1
        return self.loads[part], int(row - self.starts[part])

    def __call__(self, row: int) -> np.ndarray:
        """One image."""
        load, row = self._find(row)
        return load(row)

    def name(self, row: int) -> str:
        """Where a row comes from, for messages."""
        load, row = self._find(row)
        return load.name(row)


class _Array(NamedTuple):
    """Images in memory, read as files are."""

    images: np.ndarray  # u8[N,H,W,C]
    where: str

    def __call__(self, row: int) -> np.ndarray:
        return self.images[row]

    def name(self, row: int) -> str:
        return f"row {row} of {self.where}"


def joined(
    *, sets: Sequence[dict], validation: float = 0.0, seed: int = 0
) -> stream.Dataset:
    """Several sources one after another, for one encoder to learn from.

    Classes of the same name are one class. Sets in memory whose images have one shape
    stay there together; others are read row by row.

    Args:
      sets: sections as config.data, each with the name of a source and its options.

    Raises:
      ValueError: no sets, a set of graphs, or what a source refuses, by its number.
    """
    if not sets:
        raise ValueError("sets = (): must have at least one")
    found = [_read(i, dict(section)) for i, section in enumerate(sets)]
    names = tuple(dict.fromkeys(name for data in found for name in data.class_names))
    decoders = {data.decoder for data in found} - {""}
    if len(decoders) > 1:
        raise ValueError(f"sets: read by {sorted(decoders)}; must be one decoder")
    data = stream.Dataset(
        name=found[-1].name,
        class_names=names,
        domain_names=tuple(f"{i}: {data.name}" for i, data in enumerate(found)),
        train=_one(found, "train", names),
        validation=_one(found, "validation", names),
        test=_one(found, "test", names),
        decoder="".join(decoders),
    )
    return splits.finish(data, validation=validation, seed=seed)


def _read(number, section) -> stream.Dataset:
    field = f"config.data.sets[{number}]"
    source, options = schema.named(SOURCES, section, field)
    data = source(**schema.options(source, options, field))
    if data.train.graphs is not None:
        raise ValueError(f"{field}: graphs cannot be joined; must be images")
    return data


def _one(found, split, names) -> stream.Examples | None:
    """A split of all sets that have it."""
    parts = [
        (number, data, getattr(data, split))
        for number, data in enumerate(found)
        if getattr(data, split) is not None
    ]
    if not parts:
        return None
    label, domain = [], []
    for number, data, part in parts:
        new = [names.index(name) for name in data.class_names]
        label.append(np.array([*new, -1], np.int32)[part.label])
        domain.append(np.full(len(part.label), number, np.int32))
    label, domain = np.concatenate(label), np.concatenate(domain)
    images = [part.images for _, _, part in parts]
    if all(x is not None for x in images) and len({x.shape[1:] for x in images}) == 1:
        return stream.Examples(label, domain, np.concatenate(images))
    loads = tuple(
        part.load if part.images is None else _Array(part.images, data.name)
        for _, data, part in parts
    )
    starts = np.cumsum([0] + [len(part.label) for _, _, part in parts[:-1]])
    load = files.Loader(_Readers(loads, starts), np.arange(len(label)))
    return stream.Examples(label, domain, load=load)


SOURCES = {
    f.__name__: f
    for f in (
        toys.digits,
        from_arrays.npz,
        from_arrays.arrays,
        from_graphs.graphs,
        toys.rings_and_trees,
        from_folders.image_folder,
        from_lists.image_lists,
        tiny_imagenet.tiny_imagenet,
        stl10.stl10,
        from_tfds.tfds,
        joined,
    )
}
MADE = ("digits", "rings_and_trees")  # of nothing that would have to be there
# Of sources of one set each: classes, train rows, pixels of a side.
SIZES = {"stl10": stl10.SIZE, "tiny_imagenet": tiny_imagenet.SIZE}
IN_MEMORY = ("npz", "arrays", *SIZES)  # unless config.data.resident is False


def load(name: str, **options) -> stream.Dataset:
    """The source called `name`; raises ValueError naming all for an unknown one."""
    if name not in SOURCES:
        near = difflib.get_close_matches(name, SOURCES, n=1, cutoff=0.0)[0]
        raise ValueError(
            f"source {name!r} is unknown, did you mean {near!r}? All: {(*SOURCES,)}"
        )
    return SOURCES[name](**options)
