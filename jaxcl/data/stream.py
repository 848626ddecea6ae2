"""Datasets, tasks, and the order of a task's rows; `scenarios` makes the tasks."""

import collections
import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from jaxcl.errors import Refused

# The released CaSSLe experiments draw class orders with this seed, whatever the run's.
CASSLE_SEED = 5
# Labels of every source are below it: a larger one is a mistake, and would make as many
# classes.
LABELS = 10**6
CHANNELS = 16  # of an image, at most


class Examples(NamedTuple):
    """One split of a dataset, addressed by row.

    One of `images`, `load` and `graphs` is set: images that fit in memory are
    one array, others are decoded row by row.
    """

    label: np.ndarray  # i32[N], -1 where unknown
    # i32[N], 0 where the set has one domain; -1: of every domain, which no train row is
    domain: np.ndarray
    images: np.ndarray | None = None  # u8[N,H,W,C]; features f32[N,1,1,D]
    load: Any = None  # row -> u8[h,w,C], called by several threads; None: in `images`
    graphs: Any = None  # graphs.GraphSet
    origin: Any = None  # the `load` that read `images`, if they were in files


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


def epoch_order(
    rng: np.random.Generator, rows: np.ndarray, batch_size: int
) -> np.ndarray:
    """Shuffle rows into full batches, i32[steps, batch]; the remainder is left out."""
    steps = len(rows) // batch_size
    return rng.permutation(rows)[: steps * batch_size].reshape(steps, batch_size)


def filled_order(
    rng: np.random.Generator, rows: np.ndarray, batch_size: int
) -> np.ndarray:
    """Shuffle all rows into batches, i32[steps, batch].

    The last batch is filled with -1, which is no row.
    """
    steps = -(-len(rows) // batch_size)
    order = np.full(steps * batch_size, -1, np.int32)
    order[: len(rows)] = rng.permutation(rows)
    return order.reshape(steps, batch_size)


class Source(NamedTuple):
    """A task's training set: rows of some examples, and the order of an epoch."""

    examples: Examples
    rows: np.ndarray  # i32[n]
    order: Callable = epoch_order  # (rng, rows, batch_size) -> i32[steps, batch]


class Task(NamedTuple):
    """One step of a scenario."""

    index: int  # from 0
    name: str
    classes: np.ndarray  # i32[k], classes that occur in the task
    domain: int  # -1 unless the task is one domain
    train: Source
    test: np.ndarray  # i32[m], rows of the stream's evaluation examples
    earlier: np.ndarray = np.zeros(0, np.int32)  # train rows of all tasks before it


class Stream(NamedTuple):
    """A scenario: the dataset, its tasks, and the evaluation split."""

    dataset: Dataset
    tasks: tuple[Task, ...]
    evaluation: Examples | None  # dataset.test, dataset.validation or None


@dataclasses.dataclass
class Schedule:
    """Rows of every step of a task: `schedule[step]` is i32[batch].

    A pure function of (seed, task, epoch), so there is no position to save. `cache`
    keeps the epochs in use. Made by `schedule`.
    """

    rows: np.ndarray  # i32[n]
    order: Callable
    seed: int
    task: int
    epochs: int
    batch_size: int
    steps_per_epoch: int
    cache: dict = dataclasses.field(default_factory=dict, repr=False)

    def __len__(self) -> int:
        """Return steps of the whole task."""
        return self.epochs * self.steps_per_epoch

    def __getitem__(self, step: int) -> np.ndarray:
        """Return rows of one step, i32[batch]."""
        if not 0 <= step < len(self):
            raise IndexError(f"step {step} of a schedule of {len(self)} steps")
        epoch, within = divmod(int(step), self.steps_per_epoch)
        rows = self.cache.get(epoch)
        if rows is None:
            rows = _epoch_rows(self, epoch)
            # Two epochs are kept: near an epoch's end threads read from both.
            if len(self.cache) > 1:
                self.cache.clear()
            self.cache[epoch] = rows
        return rows[within]


def _epoch_rows(plan: Schedule, epoch: int) -> np.ndarray:
    """Return rows of one epoch, i32[steps, batch]."""
    rng = np.random.default_rng([plan.seed, plan.task, epoch])
    rows = np.asarray(plan.order(rng, plan.rows, plan.batch_size), np.int32)
    want = (plan.steps_per_epoch or len(rows), plan.batch_size)
    if rows.shape != want:
        raise Refused(
            f"task {plan.task}: order gave rows of shape {rows.shape} for epoch "
            f"{epoch}, expected [steps, batch] = {want}"
        )
    return rows


def epochs_of_tasks(epochs: int | Sequence[int]) -> tuple[int, ...]:
    """Return the number of epochs by task; the last number also serves later tasks."""
    return (epochs,) if isinstance(epochs, int | np.integer) else tuple(epochs)


def schedule(
    source: Source,
    *,
    seed: int,
    task: int,
    epochs: int | Sequence[int],
    batch_size: int,
) -> Schedule:
    """Order all steps of a task; `epochs` as in `epochs_of_tasks`.

    Raises Refused if a number is below 1 (seed and task: below 0), if the task has
    fewer rows than a batch, or if `source.order` gives no step.
    """
    by_task = epochs_of_tasks(epochs)
    epochs = by_task[min(task, len(by_task) - 1)] if by_task else 0
    for name, value, least in (
        ("seed", seed, 0),
        ("task", task, 0),
        ("epochs", epochs, 1),
        ("batch_size", batch_size, 1),
    ):
        if not isinstance(value, int | np.integer) or value < least:
            raise Refused(name, value, f"must be an integer >= {least}")
    if batch_size > len(source.rows) and source.order is epoch_order:
        raise Refused(
            f"batch_size={batch_size}: task {task} has only {len(source.rows)} "
            "train rows; use a smaller batch or fewer tasks"
        )
    rows = np.asarray(source.rows, np.int32)
    plan = Schedule(rows, source.order, seed, task, epochs, batch_size, 0)
    first = _epoch_rows(plan, 0)
    if len(first) == 0:
        raise Refused(f"task {task}: the order of its {len(rows)} rows has no batch")
    plan.steps_per_epoch = len(first)
    return plan


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


def stays_in_memory(load: Any) -> bool:
    """Tell whether a reader keeps decoded images, see `image_files.SplitRows`."""
    return getattr(load, "cache", None) is not None


def count_rows(examples: Examples) -> int:
    """Return the number of rows."""
    return len(examples.label)


def released_permutation(n: int, *, seed: int) -> np.ndarray:
    """Return the permutation i64[n] that torch.randperm(n) draws right after seeding.

    PyTorch has the same Mersenne Twister as NumPy's RandomState, and swaps position i
    with position i + (draw mod (n - i)). Holds for n < 2^32 / 20.
    """
    draws = np.random.RandomState(seed).randint(0, 2**32, size=n, dtype=np.uint32)
    order = list(range(n))
    for i, draw in enumerate(draws[: max(n - 1, 0)].tolist()):
        j = i + draw % (n - i)
        order[i], order[j] = order[j], order[i]
    return np.asarray(order, np.int64)


def order_of_classes(
    names: Sequence[str],
    class_order: str | Sequence[int | str],
    seed: int,
    field: str = "class_order",
) -> np.ndarray:
    """Return all class numbers i64[C] in the order of an option, see `scenarios.make`.

    Args:
      names: names of all classes.
      seed: seed of the orders "released" and "shuffled".
      field: name of the option in messages.
    """
    n = len(names)
    if not isinstance(class_order, str):
        order = numbers(class_order, names, field)
        missing = [names[c] for c in range(n) if c not in set(order)]
        if missing:
            raise Refused(f"{field}: lacks {missing[:5]}; must hold all {n} classes")
        return np.asarray(order)
    if class_order == "sorted":
        return np.arange(n)
    if class_order == "released":
        return released_permutation(n, seed=seed)
    if class_order == "cassle":
        return released_permutation(n, seed=CASSLE_SEED)
    if class_order == "shuffled":
        return np.random.default_rng(seed).permutation(n)
    raise Refused(
        field,
        class_order,
        "must be 'sorted', 'released', 'cassle', 'shuffled' or a list",
    )


def numbers(
    entries: Sequence[int | str], names: Sequence[str], field: str
) -> list[int]:
    """Convert names or numbers of classes or domains to numbers; refuse duplicates."""
    chosen = []
    for entry in entries:
        if isinstance(entry, str) and entry in names:
            entry = names.index(entry)
        is_number = isinstance(entry, int | np.integer) and 0 <= entry < len(names)
        if not is_number:
            raise Refused(
                f"{field}: {entry!r} is neither a number below {len(names)} nor one of "
                f"{names[:10]}{'...' if len(names) > 10 else ''}"
            )
        chosen.append(int(entry))
    twice = {names[n] for n in chosen if chosen.count(n) > 1}
    if twice:
        raise Refused(f"{field}: {sorted(twice)} more than once")
    return chosen


def as_numbers(where: str, field: str, values: np.ndarray, least: int) -> np.ndarray:
    """Return labels or domains as i32[N]; refuse numbers that would overflow.

    Raises:
      Refused: values are no integers, or are outside `least` to `LABELS` - 1.
    """
    if not np.issubdtype(values.dtype, np.integer):
        raise Refused(f"{where}: {field} are {values.dtype}, expected integers")
    if len(values) and not least <= values.min() <= values.max() < LABELS:
        raise Refused(
            f"{where}: {field} run from {values.min()} to {values.max()}, must be from "
            f"{least} to {LABELS - 1}"
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


def _validate_split(where, examples, dataset, trained) -> None:
    n, images = count_rows(examples), examples.images
    if n == 0:
        raise Refused(f"{where} has no examples")
    contents = [images, examples.load, examples.graphs]
    if sum(content is not None for content in contents) != 1:
        raise Refused(f"{where} must have one of images, load and graphs")
    if images is not None:
        is_u8 = images.dtype == np.uint8 and images.ndim == 4 and min(images.shape) > 0
        features = images.dtype == np.float32 and images.shape[1:-1] == (1, 1)
        if not features and (not is_u8 or images.shape[-1] > CHANNELS):
            raise Refused(
                f"{where} images are {images.dtype}{list(images.shape)}, expected "
                f"uint8[N, H, W, C] with C from 1 to {CHANNELS}"
            )
        if is_u8 and _has_channels_first(images.shape):
            raise Refused(
                f"{where} images are uint8{list(images.shape)}, as if channels came "
                "first; must be [N, H, W, C]: np.moveaxis(images, 1, -1)"
            )
        if len(images) != n:
            raise Refused(f"{where} has {len(images)} images and {n} labels")
    for field, low, names in (
        ("label", -1, dataset.class_names),
        ("domain", 0 if trained else -1, dataset.domain_names),
    ):
        values = getattr(examples, field)
        if values.dtype != np.int32 or values.shape != (n,):
            raise Refused(
                f"{where} {field} is {values.dtype}{list(values.shape)}, expected "
                f"int32[{n}]"
            )
        if values.min() < low or values.max() >= len(names):
            raise Refused(
                f"{where} {field} runs from {values.min()} to {values.max()}, allowed "
                f"{low} to {len(names) - 1} ({len(names)} names)"
            )
