"""Reading TFDS directories, array_record or tfrecord, without TensorFlow.

TFDS gives the metadata and parses the features; this module reads the records, in any
order. A tfrecord file is a sequence of records: length u64, checksum u32, bytes,
checksum u32, little endian. A checksum is a masked CRC-32C, and is compared whenever a
record is read.
"""

import functools
import os
import struct
from typing import Any, NamedTuple

import google_crc32c
import numpy as np
from array_record.python import array_record_module
from etils import epath
from google.protobuf import message

from jaxcl import storage
from jaxcl.data import stream
from jaxcl.data.images import array_files, decode, readers
from jaxcl.data.sources import shared
from jaxcl.data.stream import identity
from jaxcl.errors import Refused

FORMATS = ("array_record", "tfrecord")
_FRAME = 16  # bytes of a record besides its own: length and checksums
CHUNK = 256  # array_record entries read at once when scanning


def _library():
    # Takes half a second, so only runs that read a TFDS directory import it.
    import tensorflow_datasets

    return tensorflow_datasets


class RecordTable(NamedTuple):
    """The places and labels of one split's records, one entry per record."""

    file: np.ndarray  # i32[N], number of the record's file
    place: np.ndarray  # i64[N], its byte (tfrecord) or number (array_record) there
    label: np.ndarray  # i32[N], -1 where there is none
    domain: np.ndarray  # i32[N]


def _fetch_image(features: Any, key: str, file: str, place: int) -> bytes:
    """Return the encoded image of a record."""
    if ".tfrecord" in os.path.basename(file):
        with epath.Path(file).open("rb") as opened:
            opened.seek(place)
            raw = _next_record(opened, storage.file_size(file) - place, "the record")
    else:
        raw = _reader(file).read([place])[0]
    skip = {key: _library().decode.SkipDecoding()}
    return _parse_record(features, raw, decoders=skip)[key]


def _features(info, *keys):
    """Parse the features of these names alone, and no others."""
    return _library().features.FeaturesDict({key: info.features[key] for key in keys})


@functools.lru_cache(maxsize=64)
def _reader(file: str):
    # Without read-ahead a record costs no more than its own bytes.
    return array_record_module.ArrayRecordReader(file, "readahead_buffer_size:0")


def _parse_record(features, raw: bytes | None, **options) -> dict:
    """Return the features of a record."""
    try:
        return features.deserialize_example_np(raw, **options)
    except (message.DecodeError, KeyError, ValueError, TypeError) as error:
        raise decode.Unreadable(f"is no such example: {error!r}") from error


@shared.image_source
def tfds(
    *,
    path: str,
    train_split: str = "train",
    validation_split: str | None = None,
    test_split: str | None = "test",
    image_key: str = "image",
    label_key: str | None = "label",
    domain_key: str | None = None,
    classes: str | None = None,
    index: str | None = None,
    images: shared.ImageOptions,
) -> stream.Dataset:
    """Read a prepared TFDS directory (.../NAME/CONFIG/VERSION).

    path: the directory.
    train_split, validation_split, test_split: any TFDS split, such as "train[:90%]";
      None: no such split.
    image_key, label_key, domain_key: names of features; label_key None: no labels;
      domain_key None: one domain.
    classes: path of a text file that names the classes to keep, in that order.
    index: path of a file that keeps the result of the first scan. Labels are stored in
      the records, so without it every start reads the whole set once.
    Images must be u8 Image features.

    Raises Refused for a missing directory, split or feature, another file format,
    and damaged records.
    """
    _reader.cache_clear()  # the files may have changed since
    info = _read_info(path)
    _feature(info, image_key, _library().features.Image, "image_key")
    names = _class_names(info, label_key, "label_key")
    domains = _class_names(info, domain_key, "domain_key") or ("all",)
    fetch = functools.partial(_fetch_image, _features(info, image_key), image_key)

    def part(split):
        if split is None:
            return None
        files, table = _find_records(info, split, label_key, domain_key, index)
        reader = readers.FileRows(
            files, table.file, table.place, fetch, images.decoding, unit="place"
        )
        return shared.read_by_row(reader, table.label, table.domain)

    by_split = [part(split) for split in (train_split, validation_split, test_split)]
    data = stream.Dataset(info.name, names, domains, *by_split)
    return shared.keep_listed_classes(data, classes)


def _read_info(path):
    """Return the metadata of a directory."""
    origin = f"path = {str(path)!r}"
    try:
        for name in ("dataset_info.json", "features.json"):
            storage.read_json(epath.Path(path) / name)
        info = _library().builder_from_directory(path).info
    except Exception as error:  # of damaged files the library raises anything
        raise Refused(
            f"{origin}: must be a prepared TFDS directory, with dataset_info.json, "
            f"features.json and record files: {type(error).__name__}: {error}"
        ) from error
    kind = info.file_format.value if info.file_format else None
    if kind not in FORMATS:
        raise Refused(f"{origin}: its files are {kind}, readable are {FORMATS}")
    return info


def _feature(info, key, kind, option):
    """Return the feature of a name, which must be of this kind."""
    feature = info.features[key] if key in info.features else None
    if not isinstance(feature, kind):
        fit = sorted(k for k, f in info.features.items() if isinstance(f, kind))
        raise Refused(
            option,
            key,
            f"{info.name} has no such {kind.__name__} feature; it has {fit}",
        )
    if kind is _library().features.Image and feature.np_dtype != np.uint8:
        raise Refused(option, key, f"{feature.np_dtype}, must be uint8")
    return feature


def _class_names(info, key, option) -> tuple[str, ...]:
    """Return names of a ClassLabel feature, () where `key` is None."""
    if key is None:
        return ()
    feature = _feature(info, key, _library().features.ClassLabel, option)
    count = feature.num_classes or 0
    if not 0 < count <= stream.LABELS:
        raise Refused(option, key, f"{count} classes")
    # Some editors put a mark before the first name of a file.
    return tuple(name.removeprefix("\ufeff") for name in feature.names)


def _find_records(
    info, split, label_key, domain_key, index
) -> tuple[tuple, RecordTable]:
    """Find the records of a split, from `index` if possible."""
    try:
        instructions = info.splits[split].file_instructions
    except (KeyError, ValueError, AssertionError) as error:
        raise Refused(
            f"split {split!r}: {info.name} has {sorted(info.splits)}; {info.data_dir}: "
            f"{error}"
        ) from error
    instructions = [part for part in instructions if part.take > 0]
    if not instructions:
        counts = {name: part.num_examples for name, part in info.splits.items()}
        raise Refused(f"split {split!r}: has no examples; {info.name} has {counts}")
    files = tuple(str(part.filename) for part in instructions)
    # A set may be prepared again in the same directory, with other labels alone.
    prepared = os.path.join(info.data_dir, "dataset_info.json")
    status = identity.sizes_and_times([prepared, *files]).tolist()
    sizes = [size for size, _ in status[1:]]
    lost = [file for file, size in zip(files, sizes, strict=True) if size < 0]
    if lost:
        raise Refused(
            f"split {split!r}: lacks {len(lost)} of its {len(files)} files: {lost[:3]}"
        )
    ranges = [f"{x.filename}:{x.skip}:{x.take}" for x in instructions]
    stamp = np.array([str(label_key), str(domain_key), *map(str, status), *ranges])
    saved = {} if index is None else _read_index(index)
    if np.array_equal(saved.get(f"{split}/stamp"), stamp):
        fields = RecordTable._fields
        columns = [saved.get(f"{split}/{field}", stamp) for field in fields]
        if any(x.dtype.kind != "i" or x.shape != columns[0].shape for x in columns):
            raise Refused("index", index, "it is damaged; delete it")
        return files, RecordTable(*columns)
    tables = [
        _scan_file(info, number, part, label_key, domain_key)
        for number, part in enumerate(instructions)
    ]
    table = RecordTable(*map(np.concatenate, zip(*tables, strict=True)))
    most = table.label.max(initial=-1)
    names = _class_names(info, label_key, "label_key")
    if label_key is not None and most >= len(names):
        raise Refused(f"split {split!r}: label {most} has no name")
    if index is not None:
        fresh = {f"{split}/{key}": value for key, value in table._asdict().items()}
        with storage.replacing(index) as file:  # other processes may be reading it
            np.savez(file, **(saved | fresh | {f"{split}/stamp": stamp}))
    return files, table


def _read_index(index) -> dict[str, np.ndarray]:
    """Read what earlier scans wrote to a file; {} where there is none yet."""
    if not storage.exists(index):
        return {}
    try:
        return array_files.read_npz(index)
    except ValueError as error:
        raise Refused("index", index, f"{error}; delete it") from error


def _scan_file(info, number, part, label_key, domain_key) -> RecordTable:
    """Return places and labels of the records of one file."""
    keys = [key for key in (label_key, domain_key) if key is not None]
    features = _features(info, *keys)
    name, wanted = str(part.filename), range(part.skip, part.skip + part.take)
    walk = _walk_tfrecord if ".tfrecord" in os.path.basename(name) else _walk_array
    rows, count = [], 0
    with storage.reading(name):
        for place, raw in walk(name, wanted):
            count += 1
            if raw is not None:
                example = _parse_record(features, raw) if keys else {}
                label, domain = example.get(label_key, -1), example.get(domain_key, 0)
                rows.append((number, place, label, domain))
    if count != part.examples_in_shard:
        raise Refused(
            f"{name}: {count} records, dataset_info.json says {part.examples_in_shard}"
        )
    table = np.array(rows, np.int64).reshape(-1, 4).T
    label = stream.as_numbers(name, "labels", table[2], -1)
    numbers = stream.as_numbers(name, "domains", table[3], 0)
    return RecordTable(table[0].astype(np.int32), table[1], label, numbers)


def _walk_tfrecord(name, wanted: range):
    """Yield (place, bytes) of each record; None for the bytes of unwanted ones."""
    size = storage.file_size(storage.check_ordinary(name))
    with epath.Path(name).open("rb") as file:
        place = record = 0
        while place < size:
            origin = f"record {record}"
            if record in wanted:
                raw = _next_record(file, size - place, origin)
                length = None if raw is None else len(raw)
            else:
                raw, length = None, _next_length(file, size - place, origin)
            if length is None:
                raise decode.Unreadable(f"{origin} is cut off")
            yield place, raw
            place, record = place + length + _FRAME, record + 1
            file.seek(place)


def _next_record(file, left, origin) -> bytes | None:
    """Return the next record of a tfrecord file with `left` bytes to read.

    None: the record is cut off. Raises Unreadable if a checksum does not match.
    """
    length = _next_length(file, left, origin)
    if length is None:
        return None
    data = file.read(length + 4)
    _compare_checksum(data[:length], data[length:], origin)
    return data[:length]


def _next_length(file, left, origin) -> int | None:
    """Return the length of the next record; None: the file is cut off."""
    header = file.read(12)
    if len(header) < 12:
        return None
    _compare_checksum(header[:8], header[8:], origin)
    (length,) = struct.unpack("<Q", header[:8])
    # Else memory for it would be taken first
    return length if length + _FRAME <= left else None


def _compare_checksum(data: bytes, stored: bytes, origin: str) -> None:
    """Raise Unreadable unless a masked CRC-32C fits the bytes."""
    crc = google_crc32c.value(data)
    masked = ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF
    if stored != struct.pack("<I", masked):
        raise decode.Unreadable(
            f"{origin} is damaged: its checksum (CRC-32C) does not match its bytes; "
            "copy the file again, or prepare the set again"
        )


def _walk_array(name, wanted: range):
    """Yield records of array_record as `_walk_tfrecord` does; places are numbers."""
    reader = array_record_module.ArrayRecordReader(str(storage.check_ordinary(name)))
    count = reader.num_records()
    for start in range(0, count, CHUNK):
        chunk = range(start, min(start + CHUNK, count))
        if chunk.stop <= wanted.start or chunk.start >= wanted.stop:
            yield from ((place, None) for place in chunk)
            continue
        read = reader.read(chunk.start, chunk.stop)
        for place, raw in zip(chunk, read, strict=True):
            yield place, raw if place in wanted else None
    reader.close()
