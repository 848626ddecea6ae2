"""Sets in the format of Hugging Face `datasets`: Arrow or Parquet files in a folder.

Both are read by pyarrow, so `datasets` itself is not needed. `save_to_disk` writes a
folder of Arrow files with a state.json, or one such folder for each split and a
dataset_dict.json. The sets of the hub are folders of Parquet files, whose names begin
with the split.
"""

import contextlib
import functools
import json
import os
import re
import threading
from collections.abc import Sequence
from typing import Any

import numpy as np

from jaxcl import schema, storage
from jaxcl.data import stream
from jaxcl.data.images import decode, listing, readers
from jaxcl.data.sources import shared
from jaxcl.data.stream import splits
from jaxcl.errors import Refused

STATE, SPLITS, PARQUET = "state.json", "dataset_dict.json", ".parquet"


def _import_arrow():
    # Takes 0.2 s, so only runs that read such a set import it.
    import pyarrow
    import pyarrow.parquet

    return pyarrow


def _fetch_image(key: str, file: str, row: int) -> bytes:
    """Return the encoded bytes of an image in a column."""
    value = read_column(file, key)[row].as_py()
    if isinstance(value, dict):
        value = value["bytes"]
    if value is None:
        raise decode.Unreadable("holds no image")
    return value


_COLUMN = threading.Lock()  # or threads that want a column would each read it


def read_column(file: str, key: str) -> Any:
    """Read and check a column of a file; an Arrow file is mapped.

    Raises Refused for a damaged file.
    """
    with _COLUMN:
        return _column(file, key)


@functools.lru_cache(maxsize=4096)
def _column(file, key):
    with _open_ordinary(file) as source:
        if file.endswith(PARQUET):
            table = _import_arrow().parquet.ParquetFile(source).read(columns=[key])
        else:
            table = _map_table(source)
        table = table.column(key)
        # Offsets that lead out of the file would end the process when they are read.
        table.validate(full=True)
        return table


def _map_table(path):
    """Map the table of an Arrow file without reading its rows."""
    with _import_arrow().ipc.open_stream(_import_arrow().memory_map(path)) as reader:
        return reader.read_all()


@contextlib.contextmanager
def _open_ordinary(file):
    """Give the path of an ordinary file; errors of pyarrow become Refused."""
    with storage.reading(file):
        try:
            yield storage.check_ordinary(file)
        except _import_arrow().ArrowException as error:
            raise Refused(str(error)) from error


def _header(file) -> tuple[Any, int]:
    """Return the schema and number of rows of a file."""
    with _open_ordinary(file) as source:
        if file.endswith(PARQUET):
            opened = _import_arrow().parquet.ParquetFile(source)
            return opened.schema_arrow, opened.metadata.num_rows
        table = _map_table(source)
        return table.schema, table.num_rows


@shared.image_source
def huggingface(
    *,
    path: str,
    train_split: str = "train",
    validation_split: str | None = None,
    test_split: str | None = "test",
    image_key: str = "image",
    label_key: str | None = "label",
    classes: str | None = None,
    test: schema.Fraction = 0.0,
    test_seed: schema.Natural = splits.TEST_SEED,
    images: shared.ImageOptions,
) -> stream.Dataset:
    """Read a set of Hugging Face `datasets` on a disk: Arrow or Parquet files.

    path: folder that `save_to_disk` wrote, or one with Parquet files. A Parquet file's
      split is its name up to the first "-", or its folder, if the name is a number.
    train_split, validation_split, test_split: name of a split; None: no such split.
    image_key, label_key: names of columns. Images are encoded bytes, or structs with
      such. Labels are integers (-1 or missing: no label), or text, whose classes
      are sorted. label_key None: no labels.
    classes: path of a text file that names the classes to keep, in that order.
    test: share of each class's labelled train images that becomes the test split if
      test_split is None.
    test_seed: seed of that draw.

    Raises Refused for a missing folder, split or column, a damaged file, a file
    outside of the folder, columns of other types, and files that differ in the names of
    their classes.
    """
    _column.cache_clear()  # the files may have changed since
    asked = {"train": train_split, "validation": validation_split, "test": test_split}
    present, chosen, labels = split_files(path), {}, {}
    for split, name in asked.items():
        if name is None:
            continue
        if name not in present:
            raise Refused(f"{split}_split", name, f"{path} has {sorted(present)}")
        chosen[split] = present[name]
        labels[split] = [
            _check_columns(file, image_key, label_key) for file in present[name]
        ]
    names, numbers = _number_labels(labels, chosen, label_key)
    fetch, by_split = functools.partial(_fetch_image, image_key), {}
    for split, label in numbers.items():
        sizes = [len(x) for x in labels[split]]
        file_numbers = np.repeat(np.arange(len(sizes)), sizes)
        place = np.concatenate([np.arange(size) for size in sizes])
        files = (*chosen[split],)
        reader = readers.FileRows(
            files, file_numbers, place, fetch, images.decoding, unit="row"
        )
        by_split[split] = shared.read_by_row(reader, label)
    name = os.path.basename(os.path.abspath(path))
    by_split = dict.fromkeys(stream.SPLITS) | by_split
    data = stream.Dataset(name, names, ("all",), **by_split)
    data = shared.keep_listed_classes(data, classes)
    if test_split is None:
        drawn = splits.draw_test(name, data.class_names, data.train, test, test_seed)
        data = data._replace(train=drawn.train, test=drawn.test)
    return data


def is_dataset(path: str) -> bool:
    """Tell whether a folder on a disk holds a set of Hugging Face, and not image files.

    In a folder without state.json and dataset_dict.json the first sub-folder with
    images or Parquet files decides.
    """
    if storage.in_bucket(path) or not os.path.isdir(path):
        return False
    if any(os.path.exists(os.path.join(path, name)) for name in (STATE, SPLITS)):
        return True
    for _, folders, names in os.walk(path):
        folders[:] = sorted(name for name in folders if name[0] != ".")
        suffixes = {
            os.path.splitext(name)[1].lower() for name in names if name[0] != "."
        }
        if PARQUET in suffixes or suffixes & listing.endings():
            return PARQUET in suffixes
    return False


def guess_options(path: str) -> dict:
    """Guess the options that read a set, from its path alone.

    The train split is "train", or else the first. The test split is "test" or else
    "validation", if it has labels; otherwise a fifth of the train images. Images and
    labels are in the columns that `choose_columns` chooses.

    Raises Refused as `huggingface`.
    """
    _column.cache_clear()  # the files may have changed since
    files = split_files(path)
    train = "train" if "train" in files else min(files)
    header, _ = _header(files[train][0])
    image_keys = [
        name for name in header.names if _holds_images(header.field(name).type)
    ]
    named = [name for name in header.names if _class_names(files[train][0], name)]
    image, label = choose_columns(path, header.names, image_keys, named)
    options = {"train_split": train, "image_key": image, "label_key": label}
    for split in ("test", "validation"):
        if split in files and split != train and label is not None:
            labels = _labels(files[split][0], label)
            if labels.dtype.kind == "U" or (labels >= 0).any():
                return options | {"test_split": split}
    return options | {"test_split": None, "test": 0.2}


_PICTURES = ("image", "img", "images", "picture", "photo", "jpg", "png", "pixel_values")


def choose_columns(
    origin: str, names: Sequence[str], image_keys: Sequence[str], named: Sequence[str]
) -> tuple[str, str | None]:
    """Choose the columns of images and of labels.

    Args:
      origin: source of the columns, for messages.
      names: names of all columns.
      image_keys: names of columns that may hold images. One with a usual name is
        chosen, or the only one.
      named: names of columns that name classes. "label" is chosen, or the only one.

    Raises:
      Refused: there are several of either kind.
    """
    preferred = [name for name in _PICTURES if name in (image_keys or names)]
    labels = ["label"] if "label" in names else [*named]
    for option, columns in (
        ("image_key", preferred[:1] or image_keys),
        ("label_key", labels),
    ):
        if len(columns) > 1:
            raise Refused(
                f"{origin}: config.data.{option} must name one of several columns, "
                f"{[*columns]}"
            )
    return (preferred or [*image_keys, "image"])[0], next(iter(labels), None)


def split_files(path: str) -> dict[str, list[str]]:
    """Return files of each split of a folder, in their order.

    Raises Refused for another kind of folder, a name that leads out of it, and
    for a split that lacks a part, or is in several folders.
    """
    if storage.in_bucket(path) or not os.path.isdir(path):
        raise Refused("path", path, "must be a folder on a disk")
    list_file = os.path.join(path, SPLITS)
    if os.path.exists(list_file):
        names = storage.read_object(list_file).get("splits")
        schema.check_value(names, list[shared.Inside], f"{list_file}: splits")
        return {name: _list_saved_files(os.path.join(path, name))[1] for name in names}
    if os.path.exists(os.path.join(path, STATE)):
        return dict([_list_saved_files(path)])
    files_of_split: dict[str, list[str]] = {}
    for file in listing.list_files(path, lambda name: name.lower().endswith(PARQUET)):
        split = os.path.basename(file).removesuffix(PARQUET).partition("-")[0]
        if split.isdigit():
            split = os.path.basename(os.path.dirname(file))
        files_of_split.setdefault(split, []).append(file)
    if not files_of_split:
        raise Refused(
            f"path={path!r}: must hold Parquet files, or what `save_to_disk` of "
            f"Hugging Face datasets writes ({STATE} or {SPLITS})"
        )
    for split, files in files_of_split.items():
        _check_complete(path, split, files)
    return files_of_split


def _check_complete(path, split, files) -> None:
    """Refuse files of several folders, or with missing parts (SPLIT-00000-of-00003).

    Such folders hold several sets, or are train/ and test/ with files of equal names.
    """
    folders = {os.path.dirname(file) for file in files}
    counts = {x[1] for file in files if (x := re.search(r"-of-(\d+)\b", file))}
    if len(folders) > 1 or any(int(count) != len(files) for count in counts):
        raise Refused(
            f"path={path!r}: split {split!r} has {len(files)} files in folders "
            f"{sorted(folders)[:5]}; must be one folder with all parts of one set"
        )


def _list_saved_files(folder) -> tuple[str, list[str]]:
    """Return the split and files of a folder that `save_to_disk` wrote."""
    file = os.path.join(folder, STATE)
    state = storage.read_object(file)
    entries = state.get("_data_files")
    schema.check_value(entries, list[dict], f"{file}: _data_files")
    names = [entry.get("filename") for entry in entries]
    schema.check_value(names, list[shared.Inside], f"{file}: filename")
    split = str(state.get("_split") or "train")
    if not names:
        raise Refused(f"{file}: names no file, so that the split holds no rows")
    _check_complete(folder, split, names)
    if state.get("_indices_data_files") or state.get("_indices_files"):
        raise Refused(
            f"{file}: _indices_data_files says that rows were filtered out; load the "
            "set with `datasets`, call flatten_indices() and save it again"
        )
    return split, [os.path.join(folder, name) for name in names]


def _check_columns(file, image_key, label_key) -> np.ndarray:
    """Check the columns of a file; return its labels, see `_labels`."""
    header, rows = _header(file)
    for option, key in (("image_key", image_key), ("label_key", label_key)):
        if key is not None and header.names.count(key) != 1:
            raise Refused(option, key, f"{file} has {header.names}")
    if not _holds_images(header.field(image_key).type):
        raise Refused(
            f"image_key={image_key!r}: {file} has {header.field(image_key).type}, "
            "must be encoded images, as `dataset.cast_column(KEY, datasets.Image())` "
            "makes them"
        )
    return np.full(rows, -1) if label_key is None else _labels(file, label_key)


def _holds_images(kind) -> bool:
    """Tell whether a type is bytes, or a struct with bytes."""
    kind = getattr(kind, "storage_type", kind)
    if _import_arrow().types.is_struct(kind):
        place = kind.get_field_index("bytes")
        kind = kind.field(place).type if place >= 0 else None
    return kind in (_import_arrow().binary(), _import_arrow().large_binary())


def _labels(file, key) -> np.ndarray:
    """Return labels of a file: i64[N], -1 where there is none, or text."""
    types, column = _import_arrow().types, read_column(file, key)
    if types.is_dictionary(column.type):
        column = column.cast(column.type.value_type)
    if types.is_string(column.type) or types.is_large_string(column.type):
        if column.null_count:
            raise Refused("label_key", key, f"{file} lacks a label")
        return np.array(column.to_pylist(), str)
    if not (types.is_integer(column.type) or types.is_boolean(column.type)):
        raise Refused(
            "label_key", key, f"{file} has {column.type}, must be numbers or text"
        )
    label = column.cast(_import_arrow().int64()).fill_null(-1).to_numpy()
    return stream.as_numbers(file, "labels", label, -1)


def _class_names(file, key) -> tuple[str, ...] | None:
    """Return names that a ClassLabel column gives; None where there are none."""
    metadata = _header(file)[0].metadata or {}
    try:
        features = json.loads(metadata.get(b"huggingface", b"{}"))["info"]["features"]
        names = features[key]["names"]
    except (ValueError, LookupError, TypeError, RecursionError):
        return None
    schema.check_value(names, list[str], f"{file}: names of {key!r}")
    return (*names,)


def _number_labels(labels, files, key) -> tuple[tuple[str, ...], dict[str, np.ndarray]]:
    """Return class names, and the labels of each split as numbers.

    Args:
      labels: labels of every file of each split.
      files: files of each split, which may name the classes.
    """
    kinds = {label.dtype.kind for of_files in labels.values() for label in of_files}
    if len(kinds) > 1:
        raise Refused("label_key", key, "labels are text and numbers")
    labels_of_split = {split: np.concatenate(x) for split, x in labels.items()}
    if "U" in kinds:
        texts = {str(name) for x in labels_of_split.values() for name in np.unique(x)}
        names = tuple(sorted(texts, key=listing.natural_key))
        number = {name: i for i, name in enumerate(names)}
        return names, {
            split: np.array([number[name] for name in label.tolist()], int)
            for split, label in labels_of_split.items()
        }
    file_of_names = {}  # names -> a file that gives them
    for file in (file for of_split in files.values() for file in of_split):
        if key is not None and (names := _class_names(file, key)) is not None:
            file_of_names.setdefault(names, file)
    if len(file_of_names) > 1:  # each file numbers its own classes
        raise Refused(
            f"label_key={key!r}: {' and '.join(file_of_names.values())} differ in "
            "their classes; must be the same ones in one order, or text"
        )
    most = max(label.max(initial=-1) for label in labels_of_split.values())
    names = next(iter(file_of_names), tuple(map(str, range(most + 1))))
    if most >= len(names):
        raise Refused("label_key", key, f"label {most} of {len(names)} classes")
    return names, labels_of_split
