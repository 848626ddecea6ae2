"""Sources of examples, by name: functions that return a `stream.Dataset`.

Every source takes `validation`, the share of each class (and domain) that `seed` draws
from the train split. The test split never depends on the run's seed.
"""

import difflib
from collections.abc import Sequence
from typing import Annotated, Any, NamedTuple

import numpy as np

from jaxcl import schema
from jaxcl.data import (
    files,
    from_arrays,
    from_folders,
    from_graphs,
    from_huggingface,
    from_lists,
    from_tfds,
    in_memory,
    shapes,
    splits,
    stl10,
    storage,
    stream,
    tiny_imagenet,
    toys,
)


class _Readers(NamedTuple):
    """Reads rows of several parts; picklable if each of them is."""

    loads: tuple[Any, ...]  # a files.Loader or files.Reader of each
    starts: np.ndarray  # i64[parts], first row of each
    channels: int | None  # C of all images

    def _find(self, row):
        """The part of a row, and the row's number there."""
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

    def raw(self, row: int) -> bytes:
        """Bytes of a row in its part."""
        load, row = self._find(row)
        return load.raw(row)

    def holders(self) -> tuple[list[str], np.ndarray, np.ndarray]:
        """The files of all parts; which of them holds each row, and at which place."""
        files: list[str] = []
        which, places = [], []
        for load in self.loads:
            own, number, place = load.holders()
            which.append(len(files) + number)
            places.append(place)
            files += own
        return files, np.concatenate(which), np.concatenate(places)


@schema.checked("config.data")
def joined(
    *,
    sets: Annotated[Sequence[dict], schema.Entries()],
    validation: schema.Fraction = 0.0,
    seed: schema.Natural = 0,
) -> stream.Dataset:
    """Several sources, one after another; each is a domain.

    Classes of the same name are one class. The joined set is in memory if all its parts
    are and their images have one shape; else it is read row by row.

    Args:
      sets: sections like config.data, each with the name of a source and its options.

    Raises:
      ValueError: no sets, a set of graphs, or an option that a source refuses; the
        message has the number of the set.
    """
    datasets = [
        _read(f"config.data.sets[{i}]", dict(section)) for i, section in enumerate(sets)
    ]
    names = tuple(dict.fromkeys(name for data in datasets for name in data.class_names))
    decoders = {data.decoder for data in datasets} - {""}
    if len(decoders) > 1:
        raise ValueError(f"sets: read by {sorted(decoders)}; must be one decoder")
    data = stream.Dataset(
        name=datasets[-1].name,
        class_names=names,
        domain_names=tuple(f"{i}: {data.name}" for i, data in enumerate(datasets)),
        train=_joined_split(datasets, "train", names),
        validation=_joined_split(datasets, "validation", names),
        test=_joined_split(datasets, "test", names),
        decoder="".join(decoders),
        bits=_bits("sets", datasets),
        notes=tuple(note for data in datasets for note in data.notes),
    )
    return splits.finish(data, validation=validation, seed=seed)


@schema.checked("config.data")
def judged_by(
    *,
    train: dict,
    test: dict,
    validation: schema.Fraction = 0.0,
    seed: schema.Natural = 0,
) -> stream.Dataset:
    """The train split of one source, judged on that of another.

    Classes of the same name are one class. Where the first has no labels, neighbours
    can be told among the test images alone (`knn` with train_on="evaluation").

    Args:
      train: a section like config.data.
      test: the same; its images are of every domain, so that each task is judged on
        all of them.

    Raises:
      ValueError: a set of graphs, or an option that a source refuses.
    """
    datasets = [
        _read(f"config.data.{name}", dict(section))
        for name, section in (("train", train), ("test", test))
    ]
    names = tuple(dict.fromkeys(name for data in datasets for name in data.class_names))
    data, judge = (_joined_split([x], "train", names) for x in datasets)
    decoders = {x.decoder for x in datasets} - {""}
    if len(decoders) > 1:
        raise ValueError(f"test: read by {sorted(decoders)}; must be one decoder")
    whole = stream.Dataset(
        name=datasets[0].name,
        class_names=names,
        domain_names=datasets[0].domain_names,
        train=data._replace(domain=datasets[0].train.domain),
        validation=None,
        test=judge._replace(domain=np.full_like(judge.domain, -1)),
        decoder="".join(decoders),
        bits=_bits("test", datasets),
        notes=tuple(note for data in datasets for note in data.notes),
    )
    return splits.finish(whole, validation=validation, seed=seed)


def _bits(field, datasets) -> int | None:
    """How many bits the 16-bit greys of several sets use; they must agree."""
    found = {data.bits for data in datasets} - {None}
    if len(found) > 1:
        raise ValueError(
            f"{field}: 16-bit greys of {sorted(found)} bits; give all sets the same "
            f"option bits, {max(found)} for instance"
        )
    return next(iter(found), None)


def _read(field, section) -> stream.Dataset:
    """The dataset of a section below config.data."""
    source, options = schema.named(SOURCES, section, field)
    data = source(**schema.options(source, options, field))
    if data.train.graphs is not None:
        raise ValueError(f"{field}: graphs cannot be joined; must be images")
    return data


def _joined_split(datasets, split, names) -> stream.Examples | None:
    """A split, joined from all datasets that have it; None if none has."""
    parts = [
        (number, data, getattr(data, split))
        for number, data in enumerate(datasets)
        if getattr(data, split) is not None
    ]
    if not parts:
        return None
    label, domain = [], []
    for number, data, part in parts:
        renumbered = [names.index(name) for name in data.class_names]
        label.append(np.array([*renumbered, -1], np.int32)[part.label])
        domain.append(np.full(len(part.label), number, np.int32))
    label, domain = np.concatenate(label), np.concatenate(domain)
    images = [part.images for _, _, part in parts]
    loads = tuple(
        part.origin or part.load or files.in_memory(part.images, data.name)
        for _, data, part in parts
    )
    starts = np.cumsum([0] + [len(part.label) for _, _, part in parts[:-1]])
    if all(x is not None for x in images) and len({x.shape[1:] for x in images}) == 1:
        origin = files.Loader(_Readers(loads, starts, None), np.arange(len(label)))
        return stream.Examples(label, domain, np.concatenate(images), origin=origin)
    loads = tuple(
        part.load or files.in_memory(part.images, data.name) for _, data, part in parts
    )
    # The joined set has a memory of its own, or none if it does not fit.
    loads = tuple(
        x._replace(memory=None) if stream.stays_in_memory(x) else x for x in loads
    )
    channels = {splits.channels(part) for _, _, part in parts} - {None}
    if len(channels) > 1:
        raise ValueError(
            f"sets: images of {' and of '.join(map(str, sorted(channels)))} channels; "
            "must be of one number, see `channels` of their sources"
        )
    reader = _Readers(loads, starts, channels.pop() if channels else None)
    load = files.Loader(reader, np.arange(len(label)))
    return stream.Examples(label, domain, load=load)


SOURCES = {
    source.__name__: source
    for source in (
        toys.digits,
        from_arrays.npz,
        from_arrays.arrays,
        from_graphs.graphs,
        toys.rings_and_trees,
        toys.digits_in_looks,
        shapes.shapes,
        from_folders.image_folder,
        from_lists.image_lists,
        tiny_imagenet.tiny_imagenet,
        stl10.stl10,
        from_tfds.tfds,
        from_huggingface.huggingface,
        joined,
        judged_by,
        in_memory.in_memory,
    )
}
# These need no files, nor anything else.
MADE = ("digits", "rings_and_trees", "digits_in_looks", "shapes")
# Classes, train rows and pixels of a side, where the source tells them.
SIZES = {"stl10": stl10.SIZE, "tiny_imagenet": tiny_imagenet.SIZE}
IN_MEMORY = ("npz", "arrays", *SIZES)  # unless config.data.resident is False


def load(name: str, **options: Any) -> stream.Dataset:
    """The dataset of a source; raises ValueError with all names for an unknown one."""
    if name not in SOURCES:
        near = difflib.get_close_matches(name, SOURCES, n=1, cutoff=0.0)[0]
        raise ValueError(
            f"source {name!r} is unknown, did you mean {near!r}? All: {(*SOURCES,)}"
        )
    return SOURCES[name](**options)


def whole(section: dict) -> dict:
    """The options with which a source holds no train rows out for its test split."""
    make, options = schema.named(SOURCES, section, "config.data")
    known = schema.option_of(make, options)
    return {"test": 0.0} if {"test", "test_seed"} <= {*known} else {}


def kind_of(path: str) -> str:
    """The source that reads what lies at a path, told by its files.

    "npz" for an .npz file, "arrays", "huggingface" or "tfds" for a directory that
    jaxcl.data.convert, `datasets` or TFDS wrote, else "image_folder".
    """
    path = str(path)
    if path.endswith(".npz"):
        return "npz"
    if storage.exists(f"{path}/meta.json"):
        return "arrays"
    if from_huggingface.is_one(path):
        return "huggingface"
    # `save_to_disk` writes a file of this name, too.
    return "tfds" if storage.exists(f"{path}/dataset_info.json") else "image_folder"


def section_of(path: str) -> dict:
    """The section config.data that reads what lies at a path, see `kind_of`."""
    kind = kind_of(path)
    more = from_huggingface.guessed(str(path)) if kind == "huggingface" else {}
    return {"name": kind, "path": str(path), **more}
