"""Datasets and their splits: labels, domains, and images or graphs."""

import collections
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from jaxcl.data.images import readers
from jaxcl.errors import Refused

# Labels of every source are below it: a larger one is a mistake, and would make as many
# classes.
LABELS = 10**6
CHANNELS = 16  # of an image, at most


class Examples(NamedTuple):
    """One split of a dataset, addressed by row.

    A split has graphs or images. The images are in memory, or `reader` reads them row
    by row; both are set if a reader has read them all.
    """

    label: np.ndarray  # i32[N], -1 where unknown
    # i32[N], 0 where the set has one domain; -1: of every domain, which no train row is
    domain: np.ndarray
    images: np.ndarray | None = None  # u8[N,H,W,C]; features f32[N,1,1,D]
    reader: readers.Rows | None = None
    graphs: Any = None  # graph_arrays.GraphSet

    @property
    def streams(self) -> bool:
        """Whether images are read row by row."""
        return self.images is None and self.graphs is None

    @property
    def channels(self) -> int | None:
        """Number of channels; None if only reading an image would tell."""
        if self.images is not None:
            return self.images.shape[-1]
        return None if self.reader is None else self.reader.channels

    def read(self, row: int) -> np.ndarray:
        """Read an image, u8[h,w,C]; several threads may call it."""
        if self.images is not None:
            return self.images[row]
        return self.reader.read(int(row))


class Dataset(NamedTuple):
    """All splits of a source."""

    name: str
    class_names: tuple[str, ...]
    domain_names: tuple[str, ...]
    train: Examples
    validation: Examples | None  # the source's, or drawn from its train split
    test: Examples | None
    decoder: str = ""  # "cv2" or "pillow", "" if nothing is decoded
    notes: tuple[str, ...] = ()  # what was left out or converted, for one line


SPLITS = ("train", "validation", "test")


def splits_of(dataset: Dataset) -> dict[str, Examples]:
    """Return the splits that a dataset has, by name."""
    splits = {name: getattr(dataset, name) for name in SPLITS}
    return {name: examples for name, examples in splits.items() if examples is not None}


def map_splits(dataset: Dataset, change: Callable[[Examples], Examples]) -> Dataset:
    """Apply `change` to each split of a dataset."""
    return dataset._replace(**{k: change(x) for k, x in splits_of(dataset).items()})


def as_domains(examples: Examples, images: np.ndarray, count: int) -> Examples:
    """Repeat examples `count` times, each time as another domain.

    Args:
      images: u8[count * N,H,W,C], the domains' images one after another.
    """
    number = np.arange(count, dtype=np.int32)
    domain = np.repeat(number, len(examples.label))
    return Examples(np.tile(examples.label, count), domain, images)


def count_rows(examples: Examples) -> int:
    """Return the number of rows."""
    return len(examples.label)


def as_numbers(origin: str, field: str, values: np.ndarray, least: int) -> np.ndarray:
    """Return labels or domains as i32[N]; refuse numbers that would overflow.

    Raises:
      Refused: values are no integers, or are outside `least` to `LABELS` - 1.
    """
    if not np.issubdtype(values.dtype, np.integer):
        raise Refused(f"{origin}: {field} are {values.dtype}, expected integers")
    if len(values) and not least <= values.min() <= values.max() < LABELS:
        raise Refused(
            f"{origin}: {field} run from {values.min()} to {values.max()}, must be "
            f"from {least} to {LABELS - 1}"
        )
    return values.astype(np.int32)


def validate(dataset: Dataset) -> None:
    """Raise Refused if a split breaks the promises of its type."""
    for field in ("class_names", "domain_names"):
        counts = collections.Counter(getattr(dataset, field))
        if twice := [name for name, count in counts.items() if count > 1]:
            raise Refused(f"{dataset.name}: {field} has {twice[:5]} more than once")
    for split, examples in splits_of(dataset).items():
        _validate_split(f"{dataset.name}: {split}", examples, dataset, split == "train")


def _has_channels_first(shape) -> bool:
    """Tell whether u8 images of a shape are rather [N, C, H, W], of squares."""
    _, first, second, last = shape
    return last not in (1, 3) and first in (1, 3) and second == last > first


def _validate_split(origin, examples, dataset, trained) -> None:
    n, images = count_rows(examples), examples.images
    if n == 0:
        raise Refused(f"{origin} has no examples")
    reader = examples.reader
    if (images is None and reader is None) == (examples.graphs is None):
        raise Refused(f"{origin} must have images, a reader of images, or graphs")
    if reader is not None and not isinstance(reader, readers.Rows):
        raise Refused(
            f"{origin} reader is {reader!r}: must be readers.Rows, such as FunctionRows"
        )
    if reader is not None and len(reader) != n:
        raise Refused(f"{origin} has {len(reader)} rows to read and {n} labels")
    if images is not None:
        is_u8 = images.dtype == np.uint8 and images.ndim == 4 and min(images.shape) > 0
        features = images.dtype == np.float32 and images.shape[1:-1] == (1, 1)
        if not features and (not is_u8 or images.shape[-1] > CHANNELS):
            raise Refused(
                f"{origin} images are {images.dtype}{list(images.shape)}, expected "
                f"uint8[N, H, W, C] with C from 1 to {CHANNELS}"
            )
        if is_u8 and _has_channels_first(images.shape):
            raise Refused(
                f"{origin} images are uint8{list(images.shape)}, as if channels came "
                "first; must be [N, H, W, C]: np.moveaxis(images, 1, -1)"
            )
        if len(images) != n:
            raise Refused(f"{origin} has {len(images)} images and {n} labels")
    for field, low, names in (
        ("label", -1, dataset.class_names),
        ("domain", 0 if trained else -1, dataset.domain_names),
    ):
        values = getattr(examples, field)
        if values.dtype != np.int32 or values.shape != (n,):
            raise Refused(
                f"{origin} {field} is {values.dtype}{list(values.shape)}, expected "
                f"int32[{n}]"
            )
        if values.min() < low or values.max() >= len(names):
            raise Refused(
                f"{origin} {field} runs from {values.min()} to {values.max()}, allowed "
                f"{low} to {len(names) - 1} ({len(names)} names)"
            )
