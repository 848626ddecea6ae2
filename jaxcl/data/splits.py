"""Split a dataset, choose its classes, and complete it as every source does."""

import concurrent.futures
import functools
import inspect
import os
import typing
from collections.abc import Callable, Iterator, Sequence
from typing import Annotated, Any, Literal, NamedTuple

import numpy as np

from jaxcl import schema
from jaxcl.data import graph_arrays, image_files, listing, prefetch, stream
from jaxcl.errors import Refused

KEPT_BYTES = 2 << 30  # most bytes of decoded images that stay in memory
TEST_SEED = 0  # draws the test split of sets that come without one

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


def take_rows(examples: stream.Examples, rows: np.ndarray) -> stream.Examples:
    """Return the examples at `rows`, renumbered from 0."""
    images, load, graph_set = examples.images, examples.load, examples.graphs
    return stream.Examples(
        examples.label[rows],
        examples.domain[rows],
        None if images is None else images[rows],
        None if load is None else load.take(rows),
        None if graph_set is None else graph_arrays.take_graphs(graph_set, rows),
        None if examples.origin is None else examples.origin.take(rows),
    )


def of_classes(
    dataset: stream.Dataset,
    classes: Sequence[int | str] | None,
    per_class: int | None,
    seed: int,
) -> stream.Dataset:
    """Return the dataset with some of its classes, renumbered from 0, in every split.

    Args:
      classes: numbers or names, in their new order; None: all.
      per_class: train rows to keep of each class, drawn by `seed`; None: all.

    Raises:
      Refused: an unknown class, a class given twice, no class, or too few rows.
    """
    subset = _keep_named(dataset, "label", "classes", classes)
    if per_class is None:
        return subset
    label, count = subset.train.label, len(subset.class_names)
    by_class = [np.flatnonzero(label == number) for number in range(count)]
    fewest = min(map(len, by_class))
    if not 1 <= per_class <= fewest:
        raise Refused(
            f"per_class={per_class}: must be from 1 to the {fewest} train rows of "
            "the smallest class"
        )
    rng = np.random.default_rng([seed, count])
    rows = np.concatenate([rng.permutation(x)[:per_class] for x in by_class])
    return subset._replace(train=take_rows(subset.train, np.sort(rows)))


def keep_listed_classes(dataset: stream.Dataset, file: str | None) -> stream.Dataset:
    """Keep the classes that a text file names, one a line, in its order; None: all."""
    if file is None:
        return dataset
    return of_classes(dataset, image_files.class_list(file), None, 0)


def of_domains(dataset: stream.Dataset, domains: Sequence[int | str]) -> stream.Dataset:
    """Return the dataset with some of its domains, renumbered from 0, in every split.

    Args:
      domains: numbers or names, in their new order.

    Raises:
      Refused: an unknown domain, a domain given twice, or no domain.
    """
    return _keep_named(dataset, "domain", "domains", domains)


def _keep_named(dataset, kind, option, wanted) -> stream.Dataset:
    """Keep the rows whose label or domain is wanted, renumbered from 0 in that order.

    Args:
      kind: array to compare, "label" or "domain".
      option: name of the option, for messages.
      wanted: numbers or names to keep; None: all.
    """
    field = "class_names" if kind == "label" else "domain_names"
    names = getattr(dataset, field)
    chosen = stream.numbers(names if wanted is None else wanted, names, option)
    if not chosen:
        raise Refused(option, wanted, "must name at least one")
    renumbered = np.full(len(names) + 1, -1, np.int32)  # the last: of number -1
    renumbered[chosen] = np.arange(len(chosen))

    def keep_rows(examples):
        numbers = renumbered[getattr(examples, kind)]
        part = take_rows(examples, np.flatnonzero(numbers >= 0))
        return part._replace(**{kind: numbers[numbers >= 0]})

    restricted = stream.map_splits(dataset, keep_rows)
    return restricted._replace(**{field: tuple(names[number] for number in chosen)})


def draw_mask(
    examples: stream.Examples, fraction: float, seed: list[int]
) -> np.ndarray:
    """Draw a share of the rows of every class in every domain, bool[N].

    From two rows or more at least one is drawn and one left; a fraction of 0 draws
    none.
    """
    if not 0 <= fraction < 1:
        raise Refused("fraction", fraction, "must be at least 0 and below 1")
    mask = np.zeros(len(examples.label), bool)
    if fraction == 0:
        return mask
    for label, domain, rows in group_rows(examples):
        # A generator for each class, so its draw does not depend on the other classes.
        rng = np.random.default_rng([*seed, label + 1, domain + 1])
        count = min(max(round(fraction * len(rows)), 1), len(rows) - 1)
        mask[rng.permutation(rows)[:count]] = True
    return mask


def group_rows(examples: stream.Examples) -> Iterator[tuple[int, int, np.ndarray]]:
    """Yield each class in each domain: label, domain, and its rows, increasing."""
    label, domain = examples.label, examples.domain
    order = np.lexsort((domain, label))
    edges = (np.diff(label[order]) != 0) | (np.diff(domain[order]) != 0)
    for rows in np.split(order, np.flatnonzero(edges) + 1):
        yield int(label[rows[0]]), int(domain[rows[0]]), rows


def draw_test(
    name: str,
    class_names: tuple[str, ...],
    examples: stream.Examples,
    fraction: float,
    seed: int,
) -> stream.Dataset:
    """Draw a fraction of each class as the test split of a new dataset.

    Rows without a label stay in the train split.
    """
    mask = draw_mask(examples, fraction, [seed, 2]) & (examples.label >= 0)
    train, test = cut_out(examples, mask)
    return stream.Dataset(name, class_names, ("all",), train, None, test)


def split_validation(
    train: stream.Examples, fraction: float, seed: int
) -> tuple[stream.Examples, stream.Examples | None]:
    """Draw a share of every class as the validation split; None: it is empty."""
    return cut_out(train, draw_mask(train, fraction, [seed, 1]))


def cut_out(examples, mask) -> tuple[stream.Examples, stream.Examples | None]:
    """Return the examples outside a mask, and those inside; None if none is inside."""
    if not mask.any():
        return examples, None
    outside, inside = np.flatnonzero(~mask), np.flatnonzero(mask)
    return take_rows(examples, outside), take_rows(examples, inside)


def unknown_classes(
    dataset: stream.Dataset, judged: stream.Examples | None
) -> tuple[int, str] | None:
    """Count evaluation rows of classes without train rows, and describe them."""
    train_classes = np.unique(dataset.train.label[dataset.train.label >= 0])
    if judged is None or judged.graphs is not None or not len(train_classes):
        return None
    labels = judged.label[(judged.label >= 0) & ~np.isin(judged.label, train_classes)]
    if not len(labels):
        return None
    names = [dataset.class_names[i] for i in np.unique(labels)]
    return len(labels), (
        f"{len(labels):,} of {len(judged.label):,} evaluation images are of classes "
        f"that no train image has: {listing.say_names(names)}"
    )


class ImageOptions(NamedTuple):
    """Options of every source that reads images from files."""

    # The shorter side is resized to it, then the centre is cropped; None: as stored.
    size: schema.Pixels | None = None
    resident: bool = False  # decode all images once, into memory
    channels: image_files.Channels = 3  # or 1: grey
    decoder: prefetch.Decoder = "auto"  # cv2 where it is installed, else pillow
    on_corrupt: OnCorrupt = "error"  # "skip" takes another image of the same class
    max_pixels: schema.Count = image_files.PIXELS  # an image of more counts as corrupt
    background: Level = 255  # grey level behind transparent pixels
    # How many bits 16-bit greys use: the upper eight of these are kept.
    bits: Annotated[int, schema.Range(8, 16)] = 8
    # JPEGs are decoded to a half, a quarter or an eighth of their height and width, as
    # long as the shorter side keeps so many pixels; None: whole.
    jpeg_side: schema.Pixels | None = None
    validation: schema.Fraction = 0.0  # share of each class that is held out of train
    seed: schema.Natural = 0  # number that fixes that draw

    @property
    def decoding(self) -> image_files.Decoding:
        """Settings to turn encoded images into pixels."""
        fields = image_files.Decoding._fields
        return image_files.Decoding(*(getattr(self, field) for field in fields))


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
        images = images._replace(decoder=prefetch.choose_decoder(images.decoder))
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
    usual = shared._asdict()
    types = typing.get_type_hints(type(shared), include_extras=True)

    def call(**options):
        values = {name: options.pop(name, x) for name, x in usual.items()}
        return finished(options, type(shared)(**values))

    keyword = inspect.Parameter.KEYWORD_ONLY
    more = [
        inspect.Parameter(name, keyword, default=x, annotation=types[name])
        for name, x in usual.items()
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
        train, held_out = split_validation(dataset.train, validation, seed)
        dataset = dataset._replace(train=train, validation=held_out)

    def finish_split(examples):
        if examples.load is None:
            return examples
        load = examples.load
        if images.size is not None:
            size = (images.size, images.size)
            crop = prefetch.CenterCrop(*size, decoder=dataset.decoder)
            load = load._replace(crop=crop)
        # After the splits: a substitute must not come from another one.
        if images.on_corrupt == "skip":
            load = load._replace(label=examples.label, domain=examples.domain)
        examples = examples._replace(load=load)
        return _resident(examples) if images.resident else examples

    return _with_memory(stream.map_splits(dataset, finish_split))


def _with_memory(dataset) -> stream.Dataset:
    """Return a set that keeps its decoded images in memory, if all of them fit."""
    loads = [x.load for x in stream.splits_of(dataset).values()]
    loads = [x for x in loads if isinstance(x, image_files.SplitRows)]
    if sum(len(x.rows) * x.image_bytes() for x in loads) > _kept_bytes():
        return dataset

    def keep_pixels(examples):
        if not isinstance(examples.load, image_files.SplitRows):
            return examples
        load = examples.load._replace(cache={})
        return examples._replace(load=load)

    return stream.map_splits(dataset, keep_pixels)


def _kept_bytes() -> int:
    """Return how many bytes of decoded images stay: 2 GiB or a quarter of memory."""
    try:
        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError, OSError):  # not on Windows
        return KEPT_BYTES
    return min(KEPT_BYTES, memory // 4)


def channels(examples: stream.Examples) -> int | None:
    """Count the channels of a split's images; None if only an image would tell."""
    if examples.images is not None:
        return examples.images.shape[-1]
    return getattr(examples.load, "channels", None)


def _check_channels(dataset):
    """Refuse grey and colour images in one set, since one network reads all splits."""
    channels_of = {name: channels(x) for name, x in stream.splits_of(dataset).items()}
    if len({*channels_of.values()} - {None}) > 1:
        counts = ", ".join(f"{count} in {name}" for name, count in channels_of.items())
        raise Refused(
            f"{dataset.name}: images must have one number of channels: {counts}"
        )


def _resident(examples: stream.Examples) -> stream.Examples:
    """Return the examples, all images read into one array."""
    first = examples.load(0)
    images = np.empty((stream.count_rows(examples), *first.shape), np.uint8)

    def read_row(row):
        image = examples.load(row)
        if image.shape != first.shape:
            raise Refused(
                f"{examples.load.name(row)} is {image.shape}, but "
                f"{examples.load.name(0)} is {first.shape}: set `size` to bring all "
                "images to one size"
            )
        images[row] = image

    with concurrent.futures.ThreadPoolExecutor() as pool:
        list(pool.map(read_row, range(len(images))))  # raises what a thread raised
    return examples._replace(images=images, load=None, origin=examples.load)
