"""Sources of examples, by name: functions that return a `stream.Dataset`.

Every source takes `validation`, the share of each class (and domain) that `seed` draws
from the train split. The test split never depends on the run's seed.
"""

import dataclasses
from collections.abc import Sequence
from typing import Annotated, Any

import numpy as np

from jaxcl import core, lookup, schema, storage
from jaxcl.data import stream
from jaxcl.data.images import readers
from jaxcl.data.sources import (
    arrays,
    features,
    folders,
    graphs,
    huggingface,
    in_memory,
    lists,
    shapes,
    shards,
    shared,
    tfds,
    toys,
)
from jaxcl.data.stream import splits
from jaxcl.errors import Refused


@dataclasses.dataclass(frozen=True, eq=False)
class _JoinedRows(readers.Rows):
    """The rows of several sets, one after another."""

    parts: tuple[readers.Rows, ...]
    starts: np.ndarray  # i64[sets], first row of each

    def _locate_row(self, row):
        """Return the reader of a row, and the row's number there."""
        number = int(np.searchsorted(self.starts, row, "right")) - 1
        return self.parts[number], int(row - self.starts[number])

    def __len__(self) -> int:
        return sum(map(len, self.parts))

    def read(self, row: int) -> np.ndarray:
        reader, row = self._locate_row(row)
        return reader.read(row)

    def name(self, row: int) -> str:
        reader, row = self._locate_row(row)
        return reader.name(row)

    def raw(self, row: int) -> bytes:
        reader, row = self._locate_row(row)
        return reader.raw(row)

    def files_of_rows(self) -> tuple[list[str], np.ndarray] | None:
        files = [reader.files_of_rows() for reader in self.parts]
        if None in files:
            return None
        firsts = np.cumsum([0, *(len(names) for names, _ in files)])
        numbers = [x + first for (_, x), first in zip(files, firsts, strict=False)]
        return [name for names, _ in files for name in names], np.concatenate(numbers)

    @property
    def channels(self) -> int | None:
        return next((x.channels for x in self.parts if x.channels is not None), None)


@shared.source
def joined(*, sets: Annotated[Sequence[dict], schema.Entries()]) -> stream.Dataset:
    """Read several sources, one after another; each is a domain.

    Classes of the same name are one class. The joined set is in memory if all its parts
    are and their images have one shape; else it is read row by row.

    Args:
      sets: sections like config.data, each with the name of a source and its options.

    Raises:
      Refused: no sets, a set of graphs, or an option that a source refuses; the
        message has the number of the set.
    """
    datasets = [
        _read_source(f"config.data.sets[{i}]", section)
        for i, section in enumerate(sets)
    ]
    names = _class_names(datasets)
    by_split = {name: _join_splits(datasets, name, names) for name in stream.SPLITS}
    data = _merge_sets("sets", datasets, datasets[-1].name, by_split)
    domains = tuple(f"{i}: {data.name}" for i, data in enumerate(datasets))
    return data._replace(domain_names=domains)


@shared.source
def judged_by(*, train: dict, test: dict) -> stream.Dataset:
    """Join the train split of one source and, as test split, another source.

    Classes of the same name are one class. If the first has no labels, take `knn` with
    train_on="evaluation".

    Args:
      train: section like config.data.
      test: section like config.data; its images belong to every domain, so that each
        task is evaluated on all of them.

    Raises:
      Refused: a set of graphs, or an option that a source refuses.
    """
    sections = {"train": train, "test": test}
    datasets = [_read_source(f"config.data.{name}", x) for name, x in sections.items()]
    names = _class_names(datasets)
    trained, eval_set = (_join_splits([x], "train", names) for x in datasets)
    by_split = {
        "train": trained._replace(domain=datasets[0].train.domain),
        "validation": None,
        "test": eval_set._replace(domain=np.full_like(eval_set.domain, -1)),
    }
    return _merge_sets("test", datasets, datasets[0].name, by_split)


@shared.source
def few_rows(
    *,
    path: str | None = None,
    classes: str | None = None,
    folders: folders.Folders = "guess",
    most_classes: schema.Count = 4,
    per_class: schema.Count = 100,
    size: schema.Pixels = 16,
) -> stream.Dataset:
    """Read a few rows of the set at a path; without a path, digits in three channels.

    It serves the forms `:debug` of configs: a run of seconds reads real files.

    Args:
      path: folder or file, read by the source that `kind_of` guesses.
      classes: option of `image_folder`.
      folders: option of `image_folder`.
      most_classes: number of classes to keep, the first ones.
      per_class: rows to keep of each class in each split, the first ones.
      size: pixels of a side of the digits.
    """
    if path is None:
        return toys.digits(size=size, channels=3)
    section = section_of(path)
    if section["name"] == "image_folder":
        section |= {"classes": classes, "folders": folders}
    data = _read_source("config.data", section)
    if data.class_names:
        few = range(min(most_classes, len(data.class_names)))
        data = splits.of_classes(data, few, None, seed=0)

    def take_first(examples):
        groups = [np.flatnonzero(examples.label == x) for x in {*examples.label}]
        rows = np.concatenate([rows[:per_class] for rows in groups])
        return splits.take_rows(examples, np.sort(rows))

    return stream.map_splits(data, take_first)


def _read_source(field, section) -> stream.Dataset:
    """Read the dataset of a section below config.data."""
    source, options = lookup.find_function(SOURCES, dict(section), field)
    data = source(**schema.options(source, options, field))
    if data.train.graphs is not None:
        raise Refused(f"{field}: graphs cannot be joined; must be images")
    return data


def _class_names(datasets) -> tuple[str, ...]:
    """Return the classes of all sets, each once."""
    return tuple(dict.fromkeys(name for data in datasets for name in data.class_names))


def _merge_sets(field, datasets, name, by_split) -> stream.Dataset:
    """Merge several sets, which must be read in the same way."""
    decoders = {data.decoder for data in datasets} - {""}
    if len(decoders) > 1:
        raise Refused(f"{field}: read by {sorted(decoders)}; must be one decoder")
    return datasets[0]._replace(
        name=name,
        class_names=_class_names(datasets),
        **by_split,
        decoder="".join(decoders),
        notes=tuple(note for data in datasets for note in data.notes),
    )


def _join_splits(datasets, split, class_names) -> stream.Examples | None:
    """Return a split of all datasets that have it; None if none has."""
    present = [(i, x, getattr(x, split)) for i, x in enumerate(datasets)]
    present = [(i, data, part) for i, data, part in present if part is not None]
    if not present:
        return None
    images = [part.images for *_, part in present]
    inside = all(x is not None for x in images)
    inside = inside and len({x.shape[1:] for x in images}) == 1
    label, domain, split_readers = [], [], []
    for number, data, part in present:
        renumbered = [class_names.index(name) for name in data.class_names]
        label.append(np.array([*renumbered, -1], np.int32)[part.label])
        domain.append(np.full(len(part.label), number, np.int32))
        reader = part.reader
        if reader is None or (part.images is not None and not inside):
            reader = readers.in_memory(part.images, data.name)
        elif isinstance(reader, readers.SplitRows):
            reader = reader.uncached()  # the joined set has a cache, if it fits
        split_readers.append(reader)
    channels = {part.channels for *_, part in present} - {None}
    if len(channels) > 1:
        raise Refused(
            f"sets: images of {' and of '.join(map(str, sorted(channels)))} channels; "
            "must be of one number, see `channels` of their sources"
        )
    starts = np.cumsum([0, *map(len, split_readers[:-1])])
    rows = _JoinedRows(tuple(split_readers), starts)
    examples = shared.read_by_row(rows, np.concatenate(label), np.concatenate(domain))
    return examples._replace(images=np.concatenate(images)) if inside else examples


SOURCES = {
    source.__name__: source
    for source in (
        toys.digits,
        arrays.npz,
        arrays.arrays,
        features.features,
        graphs.graphs,
        toys.rings_and_trees,
        toys.digits_in_looks,
        shapes.shapes,
        folders.image_folder,
        lists.image_lists,
        shards.shards,
        tfds.tfds,
        huggingface.huggingface,
        joined,
        judged_by,
        few_rows,
        in_memory.in_memory,
    )
}
# One array each, unless config.data.resident is False.
IN_MEMORY = (arrays.npz.__name__, arrays.arrays.__name__)


def needs_nothing(name: str) -> bool:
    """Tell whether a source reads no files: each of its options has a default."""
    if name not in SOURCES:
        return False
    options = schema.option_of(SOURCES[name]).values()
    return all(option.default is not schema.MISSING for option in options)


def load(name: str, **options: Any) -> stream.Dataset:
    """Read the dataset of a source by its name; Refused: it is unknown."""
    core.check_choice("source", name, tuple(SOURCES))
    return SOURCES[name](**options)


def without_test_split(section: dict) -> dict:
    """Return options with which a source holds out no train rows."""
    make, _ = lookup.find_function(SOURCES, section, "config.data")
    names = schema.option_of(make)
    return {"test": 0.0} if {"test", "test_seed"} <= {*names} else {}


def kind_of(path: str) -> str:
    """Guess the source that reads a path, by its files.

    "npz" for an .npz file, "arrays", "huggingface" or "tfds" for a directory that
    `jaxcl convert`, `datasets` or TFDS wrote, "shards" for one of tar files, else
    "image_folder".
    """
    path = str(path)
    if path.endswith(".npz"):
        return "npz"
    if path.endswith(".npy") and not storage.is_folder(path):
        raise Refused(
            f"path={path!r}: an .npy file has no labels: give jaxcl.fit its array, "
            f"np.load({path!r}), or write an .npz file: np.savez('set.npz', x=images, "
            "y=labels)"
        )
    if storage.exists(f"{path}/meta.json"):
        return "arrays"
    if huggingface.is_dataset(path):
        return "huggingface"
    if shards.is_folder(path):
        return "shards"
    # `save_to_disk` writes a file of this name, too.
    return "tfds" if storage.exists(f"{path}/dataset_info.json") else "image_folder"


def section_of(path: str) -> dict:
    """Return the section config.data that reads a path, see `kind_of`."""
    kind = kind_of(path)
    options = huggingface.guess_options(str(path)) if kind == "huggingface" else {}
    return {"name": kind, "path": str(path), **options}
