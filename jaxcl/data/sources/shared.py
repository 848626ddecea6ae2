"""Options and checks that all sources share."""

import concurrent.futures
import dataclasses
import functools
import inspect
import os
import typing
from collections.abc import Callable
from typing import Annotated, Any, Literal, NamedTuple

import numpy as np

from jaxcl import schema, storage
from jaxcl.data import stream
from jaxcl.data.images import crops, decode, readers
from jaxcl.data.stream import splits
from jaxcl.errors import Refused

KEPT_BYTES = 2 << 30  # most bytes of decoded images that stay in memory

# A file that cannot be decoded ends the run, or another of its class takes its place.
OnCorrupt = Literal["error", "skip"]
Level = Annotated[int, schema.Range(0, 255)]
# A set may come from anywhere: it names files of its own folder alone.
Inside = Annotated[
    str,
    schema.Text(
        r"(?![/\\])(?!(.*[/\\])?\.\.([/\\]|$))[^\0]+",
        "the name of a file in the folder",
    ),
]


class ImageOptions(NamedTuple):
    """Options of every source that reads images from files."""

    # The shorter side is resized to it, then the centre is cropped; None: as stored.
    size: schema.Pixels | None = None
    resident: bool = False  # decode all images once, into memory
    channels: decode.Channels = 3  # or 1: grey
    decoder: decode.Decoder = "auto"  # cv2 where it is installed, else pillow
    on_corrupt: OnCorrupt = "error"  # "skip" takes another image of the same class
    max_pixels: schema.Count = decode.PIXELS  # an image of more counts as corrupt
    background: Level = 255  # grey level behind transparent pixels
    # How many bits 16-bit greys use: the upper eight of these are kept.
    bits: Annotated[int, schema.Range(8, 16)] = 8
    # JPEGs are decoded to a half, a quarter or an eighth of their height and width, as
    # long as the shorter side keeps so many pixels; None: whole.
    jpeg_side: schema.Pixels | None = None
    validation: schema.Fraction = 0.0  # share of each class that is held out of train
    seed: schema.Natural = 0  # number that fixes that draw

    @property
    def decoding(self) -> decode.Decoding:
        """Settings to turn encoded images into pixels."""
        fields = decode.Decoding._fields
        return decode.Decoding(*(getattr(self, field) for field in fields))


class DrawOptions(NamedTuple):
    """Options of every other source of images."""

    validation: schema.Fraction = 0.0  # share of each class that is held out of train
    seed: schema.Natural = 0  # number that fixes that draw


def source(read: Callable[..., stream.Dataset]) -> Callable[..., stream.Dataset]:
    """Decorate a source of images in memory, and add `DrawOptions` to its options."""

    def load_dataset(options, draw):
        return finish(read(**options), **draw._asdict())

    return _with_options(read, DrawOptions(), load_dataset)


def image_source(read: Callable[..., stream.Dataset]) -> Callable[..., stream.Dataset]:
    """Decorate a source that reads images from files.

    Its keyword `images` becomes the options of `ImageOptions`: keywords of the
    decorated function, so that a config and the tables in the docs have them. They then
    decide how the source's dataset is finished.
    """

    def load_dataset(options, images):
        images = images._replace(decoder=decode.choose_decoder(images.decoder))
        data = read(**options, images=images)._replace(decoder=images.decoder)
        validation, seed = images.validation, images.seed
        return finish(data, validation=validation, seed=seed, images=images)

    return _with_options(read, ImageOptions(), load_dataset)


def _with_options(read, shared, finished) -> Callable[..., stream.Dataset]:
    """Give a source the options of a record in addition to its own.

    Args:
      shared: record of options with defaults.
      finished: function (options of `read`, the record) -> a dataset.
    """
    defaults = shared._asdict()
    types = typing.get_type_hints(type(shared), include_extras=True)

    def call(**options):
        values = {name: options.pop(name, x) for name, x in defaults.items()}
        return finished(options, type(shared)(**values))

    keyword = inspect.Parameter.KEYWORD_ONLY
    more = [
        inspect.Parameter(name, keyword, default=x, annotation=types[name])
        for name, x in defaults.items()
    ]
    signature = inspect.signature(read)
    parameters = [x for name, x in signature.parameters.items() if name != "images"]
    wrapped: Any = functools.wraps(read)(call)
    wrapped.__signature__ = signature.replace(parameters=parameters + more)
    return schema.checked("config.data")(wrapped)


_USUAL = ImageOptions()


def finish(
    dataset: stream.Dataset,
    *,
    validation: float,
    seed: int,
    images: ImageOptions = _USUAL,
) -> stream.Dataset:
    """Check a dataset, cut out its validation split, wrap its loaders.

    Every source ends with this. `dataset.validation` exists already only if the set
    comes with one.
    """
    stream.validate(dataset)
    _check_channels(dataset)
    if validation and dataset.validation is not None:
        raise Refused(
            "validation",
            validation,
            f"{dataset.name} has a validation split; must be 0",
        )
    if validation:
        train, held_out = splits.split_validation(dataset.train, validation, seed)
        dataset = dataset._replace(train=train, validation=held_out)

    def finish_split(examples):
        if not examples.streams:
            return examples
        reader = examples.reader
        if images.size is not None:
            size = (images.size, images.size)
            crop = crops.CenterCrop(*size, decoder=dataset.decoder)
            reader = dataclasses.replace(reader, crop=crop)
        # After the splits: a substitute must not come from another one.
        if images.on_corrupt == "skip":
            labels = {"label": examples.label, "domain": examples.domain}
            reader = dataclasses.replace(reader, **labels)
        examples = examples._replace(reader=reader)
        return _resident(examples) if images.resident else examples

    return _with_memory(stream.map_splits(dataset, finish_split))


def _with_memory(dataset) -> stream.Dataset:
    """Return a set that keeps its decoded images in memory, if all of them fit."""

    def is_kept(examples):
        return examples.streams and isinstance(examples.reader, readers.SplitRows)

    cached = [x.reader for x in stream.splits_of(dataset).values() if is_kept(x)]
    if sum(len(x) * x.image_bytes() for x in cached) > _cache_bytes():
        return dataset

    def keep_pixels(examples):
        if not is_kept(examples):
            return examples
        reader = dataclasses.replace(examples.reader, cache={})
        return examples._replace(reader=reader)

    return stream.map_splits(dataset, keep_pixels)


def _cache_bytes() -> int:
    """Return how many bytes of decoded images stay: 2 GiB or a quarter of memory."""
    try:
        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError, OSError):  # not on Windows
        return KEPT_BYTES
    return min(KEPT_BYTES, memory // 4)


def _check_channels(dataset):
    """Refuse grey and colour images in one set, since one network reads all splits."""
    channels_of = {name: x.channels for name, x in stream.splits_of(dataset).items()}
    if len({*channels_of.values()} - {None}) > 1:
        counts = ", ".join(f"{count} in {name}" for name, count in channels_of.items())
        raise Refused(
            f"{dataset.name}: images must have one number of channels: {counts}"
        )


def _resident(examples: stream.Examples) -> stream.Examples:
    """Return the examples, all images read into one array."""
    reader, first = examples.reader, examples.read(0)
    images = np.empty((len(reader), *first.shape), np.uint8)

    def read_row(row):
        image = reader.read(row)
        if image.shape != first.shape:
            raise Refused(
                f"{reader.name(row)} is {image.shape}, but {reader.name(0)} is "
                f"{first.shape}: set `size` to bring all images to one size"
            )
        images[row] = image

    with concurrent.futures.ThreadPoolExecutor() as pool:
        list(pool.map(read_row, range(len(images))))  # raises what a thread raised
    return examples._replace(images=images)


def read_by_row(
    reader: readers.Rows,
    label: np.ndarray,
    domain: np.ndarray | None = None,
) -> stream.Examples:
    """Make examples that are read row by row.

    Args:
      reader: reader of all rows.
      label: i[N], -1 where unknown.
      domain: i[N]; None: one domain.
    """
    label = np.asarray(label, np.int32)
    domain = np.zeros_like(label) if domain is None else np.asarray(domain, np.int32)
    rows = np.arange(len(label))
    return stream.Examples(label, domain, reader=reader.take(rows))


def class_list(file: str, *, option: str = "classes") -> tuple[str, ...]:
    """Read class names from a text file, one a line."""
    with storage.reading(f"{option} = {file!r}"):
        lines = storage.read_bytes(file).decode("utf-8-sig").split("\n")
    names = tuple(line.strip() for line in lines if line.strip())
    if not names or len(set(names)) < len(names):
        raise Refused(option, file, "must hold at least one name, each once")
    return names


def keep_listed_classes(dataset: stream.Dataset, file: str | None) -> stream.Dataset:
    """Keep the classes that a text file names, one a line, in its order; None: all."""
    if file is None:
        return dataset
    return splits.of_classes(dataset, class_list(file), None, 0)
