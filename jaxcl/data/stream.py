"""Datasets, the tasks cut from them, and the order in which a task is read."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

SCENARIOS = ("joint", "class", "data", "domain")
# Seeds of the released PNR and CaSSLe experiments: class orders are drawn with 5,
# the slices of the data-incremental scenario with 42.
CLASS_SEED = 5
DATA_SEED = 42


class Examples(NamedTuple):
    """One split of a dataset, addressed by row.

    Exactly one of `images` and `load` is there: sets that fit in memory are
    one array, others are decoded row by row.
    """

    label: np.ndarray  # i32[N], -1 where unknown
    domain: np.ndarray  # i32[N], 0 where the set has one domain
    images: np.ndarray | None = None  # u8[N,H,W,C]
    load: Callable | None = None  # row -> u8[h,w,C]; picklable, no jax inside


class Dataset(NamedTuple):
    """All splits of a source."""

    name: str
    class_names: tuple[str, ...]
    domain_names: tuple[str, ...]
    train: Examples
    validation: Examples | None  # cut out of train by a seeded draw
    test: Examples | None
    decoder: str = ""  # "cv2" or "pillow", "" where nothing is decoded
    mean: tuple[float, ...] | None = None  # per channel of train in [0, 1], if known
    std: tuple[float, ...] | None = None


def epoch_order(rng: np.random.Generator, rows: np.ndarray, batch_size: int):
    """One shuffled epoch without its incomplete last batch, i32[steps, batch]."""
    steps = len(rows) // batch_size
    return rng.permutation(rows)[: steps * batch_size].reshape(steps, batch_size)


class Source(NamedTuple):
    """What a task trains on: rows of some examples and how to order an epoch."""

    examples: Examples
    rows: np.ndarray  # i32[n]
    order: Callable = epoch_order  # (rng, rows, batch_size) -> i32[steps, batch]


class Task(NamedTuple):
    """One step of a scenario."""

    index: int  # from 0
    name: str
    classes: np.ndarray  # i32[k], classes that occur in it
    domain: int  # -1 where the task is not one domain
    train: Source
    test: np.ndarray  # i32[m], rows of the stream's evaluation examples


class Stream(NamedTuple):
    """A scenario: the dataset, its tasks, and the split that judges them."""

    dataset: Dataset
    tasks: tuple[Task, ...]
    evaluation: Examples | None  # dataset.test, dataset.validation or nothing


@dataclasses.dataclass
class Schedule:
    """Rows of every step of a task: `schedule[step]` is i32[batch].

    A pure function of (seed, task, epoch), so there is no position to save;
    `cache` only spares recomputing the epochs in use. Make one by `schedule`.
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
        """Steps of the whole task."""
        return self.epochs * self.steps_per_epoch

    def __getitem__(self, step: int) -> np.ndarray:
        """Rows of one step, i32[batch]."""
        if not 0 <= step < len(self):
            raise IndexError(f"step {step} of a schedule of {len(self)} steps")
        epoch, within = divmod(int(step), self.steps_per_epoch)
        rows = self.cache.get(epoch)
        if rows is None:
            rows = _epoch_rows(self, epoch)
            # Two epochs stay: reading threads cross an epoch's end side by side.
            if len(self.cache) > 1:
                self.cache.clear()
            self.cache[epoch] = rows
        return rows[within]


def _epoch_rows(plan: Schedule, epoch: int) -> np.ndarray:
    rng = np.random.default_rng([plan.seed, plan.task, epoch])
    rows = np.asarray(plan.order(rng, plan.rows, plan.batch_size), np.int32)
    want = (plan.steps_per_epoch or len(rows), plan.batch_size)
    if rows.shape != want:
        raise ValueError(
            f"task {plan.task}: order gave rows of shape {rows.shape} for epoch "
            f"{epoch}, expected [steps, batch] = {want}"
        )
    return rows


def epochs_of_tasks(epochs: int | Sequence[int]) -> tuple[int, ...]:
    """Epochs of the first tasks; the last number is for all others, too."""
    return (epochs,) if np.ndim(epochs) == 0 else tuple(epochs)


def schedule(
    source: Source, *, seed: int, task: int, epochs, batch_size: int
) -> Schedule:
    """All steps of a task in order, see `Schedule`; `epochs` as `epochs_of_tasks`.

    Raises ValueError where a number is below 1 (seed and task: below 0), where
    the task has fewer rows than a batch, or where `source.order` gives no step.
    """
    each = epochs_of_tasks(epochs)
    epochs = each[min(task, len(each) - 1)] if each else 0
    for name, value, least in (
        ("seed", seed, 0),
        ("task", task, 0),
        ("epochs", epochs, 1),
        ("batch_size", batch_size, 1),
    ):
        if not isinstance(value, int | np.integer) or value < least:
            raise ValueError(f"{name} = {value!r}: must be an integer >= {least}")
    if batch_size > len(source.rows):
        raise ValueError(
            f"batch_size = {batch_size}: task {task} has only {len(source.rows)} "
            "train rows; use a smaller batch or fewer tasks"
        )
    rows = np.asarray(source.rows, np.int32)
    plan = Schedule(rows, source.order, seed, task, epochs, batch_size, 0)
    first = _epoch_rows(plan, 0)
    if len(first) == 0:
        raise ValueError(f"task {task}: order gave no step for {len(rows)} rows")
    plan.steps_per_epoch = len(first)
    return plan


def size(examples: Examples) -> int:
    """Number of rows."""
    return len(examples.label)


def released_permutation(n: int, *, seed: int) -> np.ndarray:
    """The permutation i64[n] that torch.randperm(n) draws right after seeding.

    The same Mersenne Twister as NumPy's RandomState; position i swaps with
    position i + (draw mod (n - i)). Holds for n < 2^32 / 20.
    """
    draws = np.random.RandomState(seed).randint(0, 2**32, size=n, dtype=np.uint32)
    order = list(range(n))
    for i, draw in enumerate(draws[: max(n - 1, 0)].tolist()):
        j = i + draw % (n - i)
        order[i], order[j] = order[j], order[i]
    return np.asarray(order, np.int64)


def make(
    dataset: Dataset,
    *,
    scenario: str,
    num_tasks: int | None = None,
    class_order: str | Sequence[int | str] = "sorted",
    domain_order: Sequence[int | str] | None = None,
    seed: int = 0,
    evaluation: str = "test",
    imbalance: dict | None = None,
    long_tail: dict | None = None,
) -> Stream:
    """Cut a dataset into the tasks of a scenario.

    scenario:
      "joint"   one task that holds everything.
      "class"   disjoint classes: `class_order` in `num_tasks` consecutive chunks;
                where they do not divide evenly the first tasks take one class more.
      "data"    a random partition of the train rows: label-sorted rows, permuted
                with seed 42 whatever the run's seed, in consecutive equal slices;
                task 0 also takes the remainder (the first slice is that longer).
      "domain"  one task per domain, in `domain_order` (names or numbers, default
                the dataset's order; a part of the domains is allowed).
    class_order: "sorted", "released" (the order of the PNR and CaSSLe experiments,
      `released_permutation` with seed 5), "shuffled" (by `seed`) or a list of
      class numbers or names that holds every class once.
    num_tasks: may be left out for "joint" and "domain".
    evaluation: "test", "validation" or "none". A task is judged on the rows of its
      classes ("class"), of its domain ("domain"), or on all rows.
    imbalance, long_tail: options of `imbalance.dominated` and `imbalance.long_tail`,
      by which tasks train on uneven classes; None: on all rows, evenly.

    Raises ValueError for an unknown option, more tasks than there are classes,
    rows or domains, an order that repeats or lacks an entry, unlabelled rows under
    "class", and a task without train or evaluation rows.
    """
    from jaxcl.data import imbalance as imbalance_lib  # which imports this module

    validate(dataset)
    if scenario not in SCENARIOS:
        raise ValueError(f"scenario = {scenario!r}: must be one of {SCENARIOS}")
    judges = {"test": dataset.test, "validation": dataset.validation, "none": None}
    if evaluation not in judges:
        raise ValueError(f"evaluation = {evaluation!r}: must be one of {(*judges,)}")
    judge = judges[evaluation]
    if judge is None and evaluation != "none":
        raise ValueError(
            f"evaluation = {evaluation!r}: {dataset.name} has no {evaluation} split; "
            "give the source a validation fraction, or use evaluation = 'none'"
        )
    if domain_order is not None and scenario != "domain":
        raise ValueError(f"domain_order is for scenario 'domain', not {scenario!r}")
    if scenario == "class":
        tasks = _class_tasks(dataset, judge, num_tasks, class_order, seed)
    elif scenario == "domain":
        tasks = _domain_tasks(dataset, judge, num_tasks, domain_order)
    else:
        tasks = _data_tasks(dataset, judge, num_tasks, scenario)
    tasks = imbalance_lib.applied(dataset, tasks, imbalance, long_tail)
    return Stream(dataset, tuple(tasks), judge)


def _task(dataset, judge, index, name, rows, test, *, classes=None, domain=-1):
    rows = np.asarray(rows, np.int32)
    if classes is None:
        classes = np.unique(dataset.train.label[rows])
        classes = classes[classes >= 0]
    if judge is not None and len(test) == 0:
        raise ValueError(f"task {index} ({name}) has no evaluation rows")
    return Task(
        index=index,
        name=name,
        classes=np.asarray(classes, np.int32),
        domain=domain,
        train=Source(dataset.train, rows),
        test=np.asarray(test, np.int32),
    )


def _class_tasks(dataset, judge, num_tasks, class_order, seed):
    names, label = dataset.class_names, dataset.train.label
    if (label < 0).any():
        raise ValueError(
            f"scenario 'class' needs labels: {(label < 0).sum()} of {len(label)} train "
            f"rows of {dataset.name} have none"
        )
    _check_num_tasks(num_tasks, len(names), "classes")
    order = order_of_classes(names, class_order, seed)
    counts = np.bincount(label, minlength=len(names))
    if (counts == 0).any():
        raise ValueError(f"class {names[int(np.argmin(counts))]!r} has no train rows")
    tasks = []
    for index, classes in enumerate(np.array_split(order, num_tasks)):
        name = ", ".join(names[c] for c in classes[:3])
        name += f" +{len(classes) - 3}" if len(classes) > 3 else ""
        rows = np.flatnonzero(np.isin(label, classes))
        test = [] if judge is None else np.flatnonzero(np.isin(judge.label, classes))
        tasks.append(_task(dataset, judge, index, name, rows, test, classes=classes))
    return tasks


def order_of_classes(names, class_order, seed, field="class_order") -> np.ndarray:
    """All class numbers in the order i64[C] that an option asks for, see `make`."""
    n = len(names)
    if not isinstance(class_order, str):
        order = numbers(class_order, names, field)
        missing = [names[c] for c in range(n) if c not in set(order)]
        if missing:
            raise ValueError(f"{field} lacks {missing[:5]}: must hold all {n} classes")
        return np.asarray(order)
    if class_order == "sorted":
        return np.arange(n)
    if class_order == "released":
        return released_permutation(n, seed=CLASS_SEED)
    if class_order == "shuffled":
        return np.random.default_rng(seed).permutation(n)
    raise ValueError(
        f"{field} = {class_order!r}: must be 'sorted', 'released', 'shuffled' or a "
        "list of classes"
    )


def _data_tasks(dataset, judge, num_tasks, scenario):
    rows = np.arange(size(dataset.train))
    test = np.arange(0 if judge is None else size(judge))
    if scenario == "joint":
        if num_tasks not in (None, 1):
            raise ValueError(f"num_tasks = {num_tasks}: scenario 'joint' has 1")
        return [_task(dataset, judge, 0, "joint", rows, test)]
    _check_num_tasks(num_tasks, len(rows), "train rows")
    by_label = np.argsort(dataset.train.label, kind="stable")
    shuffled = by_label[released_permutation(len(rows), seed=DATA_SEED)]
    each, rest = divmod(len(rows), num_tasks)
    cuts = [rest + each * (index + 1) for index in range(num_tasks - 1)]
    return [
        _task(dataset, judge, index, f"slice {index}", part, test)
        for index, part in enumerate(np.split(shuffled, cuts))
    ]


def _domain_tasks(dataset, judge, num_tasks, domain_order):
    names = dataset.domain_names
    order = range(len(names)) if domain_order is None else domain_order
    order = numbers(order, names, "domain_order")
    if num_tasks is not None and num_tasks != len(order):
        raise ValueError(
            f"num_tasks = {num_tasks}: scenario 'domain' has one task for each of "
            f"{[names[d] for d in order]}; name the wanted ones in domain_order"
        )
    tasks = []
    for index, domain in enumerate(order):
        rows = np.flatnonzero(dataset.train.domain == domain)
        if len(rows) == 0:
            raise ValueError(f"domain {names[domain]!r} has no train rows")
        test = [] if judge is None else np.flatnonzero(judge.domain == domain)
        tasks.append(
            _task(dataset, judge, index, names[domain], rows, test, domain=domain)
        )
    return tasks


def _check_num_tasks(num_tasks, most, what):
    if not isinstance(num_tasks, int | np.integer) or not 1 <= num_tasks <= most:
        raise ValueError(
            f"num_tasks = {num_tasks!r}: must be an integer from 1 to the {most} {what}"
        )


def numbers(entries, names, field) -> list[int]:
    """The numbers of entries that are numbers or names, each at most once."""
    found = []
    for entry in entries:
        if isinstance(entry, str) and entry in names:
            entry = names.index(entry)
        known = isinstance(entry, int | np.integer) and 0 <= entry < len(names)
        if not known:
            raise ValueError(
                f"{field}: {entry!r} is neither a number below {len(names)} nor one of "
                f"{names[:10]}{'...' if len(names) > 10 else ''}"
            )
        found.append(int(entry))
    twice = {names[n] for n in found if found.count(n) > 1}
    if twice:
        raise ValueError(f"{field}: {sorted(twice)} more than once")
    return found


def validate(dataset: Dataset) -> None:
    """Raise ValueError where a split breaks the promises of its type."""
    for split in ("train", "validation", "test"):
        examples = getattr(dataset, split)
        if examples is None:
            continue
        where, n = f"{dataset.name}: {split}", size(examples)
        if n == 0:
            raise ValueError(f"{where} has no examples")
        if (examples.images is None) == (examples.load is None):
            raise ValueError(f"{where} must have exactly one of images and load")
        images = examples.images
        if images is not None and (images.dtype != np.uint8 or images.ndim != 4):
            raise ValueError(
                f"{where} images are {images.dtype}{list(images.shape)}, "
                "expected uint8[N, H, W, C]"
            )
        if images is not None and len(images) != n:
            raise ValueError(f"{where} has {len(images)} images and {n} labels")
        for field, low, names in (
            ("label", -1, dataset.class_names),
            ("domain", 0, dataset.domain_names),
        ):
            values = getattr(examples, field)
            if values.dtype != np.int32 or values.shape != (n,):
                raise ValueError(
                    f"{where} {field} is {values.dtype}{list(values.shape)}, "
                    f"expected int32[{n}]"
                )
            if values.min() < low or values.max() >= len(names):
                raise ValueError(
                    f"{where} {field} runs from {values.min()} to {values.max()}, "
                    f"allowed {low} to {len(names) - 1} ({len(names)} names)"
                )
