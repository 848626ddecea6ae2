"""Draw splits of a dataset, and choose its classes, domains or rows."""

from collections.abc import Iterator, Sequence

import numpy as np

from jaxcl.data import stream
from jaxcl.data.images import listing
from jaxcl.data.stream import graph_arrays
from jaxcl.errors import Refused

TEST_SEED = 0  # draws the test split of sets that come without one


def take_rows(examples: stream.Examples, rows: np.ndarray) -> stream.Examples:
    """Return the examples at `rows`, renumbered from 0."""
    images, reader, graphs = examples.images, examples.reader, examples.graphs
    return stream.Examples(
        examples.label[rows],
        examples.domain[rows],
        None if images is None else images[rows],
        None if reader is None else reader.take(rows),
        None if graphs is None else graph_arrays.take_graphs(graphs, rows),
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
    dataset: stream.Dataset, evaluated: stream.Examples | None
) -> tuple[int, str] | None:
    """Count evaluation rows of classes without train rows, and describe them."""
    train_classes = np.unique(dataset.train.label[dataset.train.label >= 0])
    if evaluated is None or evaluated.graphs is not None or not len(train_classes):
        return None
    labels = evaluated.label[
        (evaluated.label >= 0) & ~np.isin(evaluated.label, train_classes)
    ]
    if not len(labels):
        return None
    names = [dataset.class_names[i] for i in np.unique(labels)]
    return len(labels), (
        f"{len(labels):,} of {len(evaluated.label):,} evaluation images are of classes "
        f"that no train image has: {listing.say_names(names)}"
    )
