"""Sets of images in arrays: .npz files, and directories that `convert` writes."""

import os
from collections.abc import Sequence
from typing import Literal, NamedTuple

import numpy as np

from jaxcl import schema, storage
from jaxcl.data import stream
from jaxcl.data.images import array_files, readers
from jaxcl.data.sources import shared
from jaxcl.data.stream import splits
from jaxcl.errors import Refused

MAPPED_BYTES = 4 << 30  # larger image files are mapped, not read
# What keys of an .npz file begin with -> the split.
_PARTS = {"train": "train", "val": "validation", "test": "test"}


@shared.source
def npz(*, path: str) -> stream.Dataset:
    """Read an .npz file, plain or packed (see `array_files.read_npz`).

    The file holds either train_x, train_y and train_domain, and likewise val_ and
    test_, or x, y, is_test and domain; also class_names and domain_names. Images are
    u8[N,H,W] or u8[N,H,W,C]. Only train_x, or x, is required.

    path: the file.
    """
    split_keys = [f"{s}_{k}" for s in _PARTS for k in ("x", "y", "domain")]
    keys = ("x", "y", "domain", "is_test", "class_names", "domain_names")
    data = array_files.read_npz(path, (*split_keys, *keys))
    by_split = {}
    if "train_x" in data:
        prefixes = [prefix for prefix in _PARTS if f"{prefix}_x" in data]
        for prefix in prefixes:
            values = [data.get(f"{prefix}_{key}") for key in ("x", "y", "domain")]
            by_split[_PARTS[prefix]] = examples(f"{path}: {prefix}", *values)
        _check_domains(
            path, {prefix: data.get(f"{prefix}_domain") for prefix in prefixes}
        )
    elif "x" in data:
        values = [data.get(key) for key in ("x", "y", "domain")]
        all_rows = examples(path, *values)
        mask = data.get("is_test", np.zeros(len(all_rows.label), bool))
        if mask.dtype != bool or mask.shape != (len(data["x"]),):
            raise Refused(f"{path}: is_test must be bool[{len(data['x'])}]")
        train, test = splits.cut_out(all_rows, mask)
        by_split = {"train": train} | ({} if test is None else {"test": test})
    else:
        has = sorted(array_files.read_npz(path))[:10]
        raise Refused(f"{path}: has neither train_x nor x, but {has}")
    names = {}
    for key in {"class_names", "domain_names"} & {*data}:
        entries = data[key]
        if entries.ndim != 1:
            raise Refused(f"{path}: {key} has shape {list(entries.shape)}, not [C]")
        if entries.dtype.kind == "S":
            entries = [name.decode(errors="replace") for name in entries]
        names[key] = tuple(map(str, entries))
    name = os.path.splitext(os.path.basename(path))[0]
    return dataset(name, by_split, **names)


def dataset(
    name: str,
    by_split: dict[str, stream.Examples],
    class_names: Sequence[str] | None = None,
    domain_names: Sequence[str] | None = None,
) -> stream.Dataset:
    """Make a dataset of some splits.

    Args:
      name: name of the set.
      by_split: split -> its examples.
      class_names, domain_names: names in order; None: the numbers, see `number_names`.
    """
    if class_names is None:
        class_names = number_names(by_split, "label")
    if domain_names is None:
        domain_names = number_names(by_split, "domain")
    splits = dict.fromkeys(stream.SPLITS) | by_split
    return stream.Dataset(name, tuple(class_names), tuple(domain_names), **splits)


@shared.source
def arrays(*, path: str, resident: bool | None = None) -> stream.Dataset:
    """Read a directory of .npy files with a meta.json, see `sources.convert`.

    path: the directory. resident: whether all images are read into memory and their
      sha256 is checked; False maps the file and reads row by row; None maps files of 4
      GiB and more.
    """
    array_files.mapped.cache_clear()  # the files may have changed since
    meta = _read_meta(path)
    entries = meta["splits"]
    _check_domains(path, {split: x.get("domain") for split, x in entries.items()})
    by_split = {split: _array_split(path, x, resident) for split, x in entries.items()}
    name = meta.get("name", os.path.basename(os.path.normpath(path)))
    domain_names = meta.get("domain_names")
    if not domain_names and len(number_names(by_split, "domain")) == 1:
        domain_names = ("all",)
    data = dataset(
        name, by_split, meta.get("class_names") or None, domain_names or None
    )
    return data._replace(decoder=meta.get("decoder", ""))


def number_names(by_split, field) -> tuple[str, ...]:
    """Name labels or domains without names: "0", "1", up to the largest."""
    count = 1 + max(int(getattr(x, field).max(initial=-1)) for x in by_split.values())
    return tuple(map(str, range(count)))


def _check_domains(origin, domains) -> None:
    """Refuse a set in which only some splits have domains.

    Args:
      origin: source of the arrays, for messages.
      domains: array of domains of each split, or None.
    """
    without = [split for split, domain in domains.items() if domain is None]
    if 0 < len(without) < len(domains):
        raise Refused(
            f"{origin}: {' and '.join(without)} has no domain, but another split has; "
            "must be given for every split, or for none"
        )


class _MetaFile(NamedTuple):
    """The content of a meta.json; other keys are ignored."""

    # Of train, validation, test: images and perhaps label and domain, each with the
    # name of a file and perhaps its sha256
    splits: dict
    name: str = ""
    class_names: Sequence[str] = ()
    domain_names: Sequence[str] = ()
    decoder: Literal["", "cv2", "pillow"] = ""


def _read_meta(path) -> dict:
    """Read and check the meta.json of a directory."""
    file = os.path.join(path, "meta.json")
    try:
        meta = storage.read_object(file)
        schema.check_arguments(_MetaFile, meta, file)
        for split in ("train", *meta["splits"]):
            entries = {**meta["splits"][split]}
            for key in ("images", "label", "domain"):
                if key == "images" or entries.get(key) is not None:
                    field = f"{file}: splits.{split}.{key}.file"
                    schema.check_value(entries[key]["file"], shared.Inside, field)
    except (OSError, ValueError, LookupError, TypeError) as error:
        problem = f"{file}: {'no such file' if isinstance(error, OSError) else error!r}"
        raise Refused(
            f"{problem}; path must be a folder with a meta.json, as `jaxcl data NAME "
            f"--out={path}` or `jaxcl convert IN.npz {path}` writes it"
        ) from error
    return meta


def _array_split(path, entries, resident) -> stream.Examples:
    label, domain = (
        array_files.read_entry(path, entries[key]) if entries.get(key) else None
        for key in ("label", "domain")
    )
    file = os.path.join(path, entries["images"]["file"])
    if resident is None:
        with storage.reading(file):
            resident = storage.file_size(file) < MAPPED_BYTES
    if not resident and storage.in_bucket(file):
        raise Refused(
            f"{file}: rows of a file in a bucket cannot be read one by one; copy the "
            "directory to a disk, or give resident=True"
        )
    if resident:
        images = array_files.read_entry(path, entries["images"])
        return examples(file, images, label, domain)
    images = array_files.mapped(file)
    if images.dtype != np.uint8 or images.ndim != 4:
        raise Refused(
            f"{file} is {images.dtype}{list(images.shape)}, expected uint8[N, H, W, C]"
        )
    rows = examples(file, images, label, domain)
    return shared.read_by_row(readers.of_array(file), rows.label, rows.domain)


def examples(
    origin: str,
    images: np.ndarray,
    label: np.ndarray | None,
    domain: np.ndarray | None,
) -> stream.Examples:
    """Make examples from arrays of any integer type; a grey image may have two axes.

    Args:
      origin: source of the arrays, for messages.
      images: u8[N, H, W] or u8[N, H, W, C].
      label: i[N], -1 where unknown; None: unknown.
      domain: i[N]; None: one domain.

    Raises:
      Refused: an array is of another type or length, may be a single image, or a
        number is out of range.
    """
    if images.dtype != np.uint8 or images.ndim not in (3, 4):
        raise Refused(
            f"{origin}: images are {images.dtype}{list(images.shape)}, expected "
            "uint8[N, H, W] or [N, H, W, C]"
        )
    if images.ndim == 3 and images.shape[2] in (1, 3, 4) and min(images.shape[:2]) > 4:
        raise Refused(
            f"{origin}: images are uint8{list(images.shape)}: one image, or grey ones "
            f"{images.shape[2]} pixels wide? Expected uint8[N, H, W, C]"
        )
    if images.ndim == 3:
        images = images[..., None]
    return with_numbers(origin, images, label, domain)


def with_numbers(origin, images, label, domain, least: int = 0) -> stream.Examples:
    """Make examples of checked images, labels and domains.

    Args:
      origin, images, label, domain: arguments of `examples`.
      least: lowest domain that is allowed.
    """
    label = np.full(len(images), -1) if label is None else label
    domain = np.zeros(len(images), int) if domain is None else domain
    for field, values in (("labels", label), ("domains", domain)):
        if values.shape != images.shape[:1]:
            raise Refused(
                f"{origin}: {field} have shape {list(values.shape)} for "
                f"{len(images)} images"
            )
    return stream.Examples(
        stream.as_numbers(origin, "labels", label, -1),
        stream.as_numbers(origin, "domains", domain, least),
        images,
    )
