"""Scenarios: how a dataset is cut into the tasks of a stream."""

import functools
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal, get_args

import numpy as np

from jaxcl import schema
from jaxcl.data import imbalance as imbalance_lib
from jaxcl.data import looks, one_pass, splits, stream

Scenario = Literal[
    "joint",
    "class",
    "recurring",
    "blurry",
    "data",
    "domain",
    "permuted",
    "rotated",
    "growth",
    "after",
]
SCENARIOS = get_args(Scenario)
# The released PNR and CaSSLe experiments draw the slices of "data" with this seed.
DATA_SEED = 42
_FIXED = ("after", "blurry")  # what their tasks train on is settled
_UNEVEN = tuple(name for name in SCENARIOS if name not in _FIXED)
# Option -> the scenarios that read it; every scenario reads the options not here.
_READERS = {
    "class_order": ("class", "recurring", "blurry"),
    "domain_order": ("domain",),
    "growth": ("growth",),
    "blur": ("blurry",),
    "recurrence": ("recurring",),
    "copies": (*_UNEVEN, "blurry"),
    "imbalance": _UNEVEN,
    "long_tail": _UNEVEN,
}
# A config of classes in some order is run as these, too, by its name alone: there the
# order says nothing, as each task has all classes.
_PASSED_OVER = {"class_order": ("joint", "data")}


@schema.checked("config.scenario")
def make(
    dataset: stream.Dataset,
    *,
    scenario: Scenario,
    num_tasks: schema.Count | None = None,
    class_order: str | Sequence[schema.Natural | str] = "sorted",
    domain_order: Sequence[schema.Natural | str] | None = None,
    seed: schema.Natural = 0,
    evaluation: Literal["test", "validation", "none"] = "test",
    growth: Annotated[float, schema.Range(above=0, below=1)] = 0.5,
    blur: Annotated[float, schema.Range(least=1e-3, most=1e3)] = 0.5,
    recurrence: schema.Share = 0.5,
    copies: schema.Count = 1,
    classes: Sequence[schema.Natural | str] | None = None,
    per_class: schema.Count | None = None,
    imbalance: dict | None = None,
    long_tail: dict | None = None,
) -> stream.Stream:
    """Cut a dataset into the tasks of a scenario.

    scenario:
      "joint"   one task that holds everything.
      "class"   disjoint classes: `class_order` in `num_tasks` consecutive chunks;
                where they do not divide evenly the first tasks take one class more.
      "recurring" as "class", but each task also holds every class of an earlier one
                with probability `recurrence`, see `one_pass.recurring`. A task is
                judged on its new classes.
      "blurry"  classes fade into one another in `class_order`, see `one_pass.blurry`:
                one sequence in `num_tasks` equal slices (1 if left out), which tell
                when to evaluate, on all rows, and nothing else.
      "data"    a random partition of the train rows: label-sorted rows, permuted
                with seed 42 whatever the run's seed, in consecutive equal slices;
                task 0 also takes the remainder (the first slice is that longer).
      "domain"  one task per domain, in `domain_order` (names or numbers, default
                the dataset's order; it may leave domains out).
      "permuted" and "rotated": the images once in each of `num_tasks` looks, of which
                each is a domain and a task: their pixels in another order, or turned
                by another angle, see `looks.made`. What is learnt of a digit is the
                same in all: its label.
      "growth"  an old set and its growth: of the n train rows, permuted by `seed`,
                the first round((1 - growth) n), then the others (ICL).
      "after"   the next task of a run that has done `num_tasks` - 1 on other data, see
                config.start: all rows, or those of the last domain where there are
                several; rows of the others count as earlier ones.

    Args:
      dataset: what is cut; it is checked first.
      scenario: one of these. It refuses an option that it does not read, see
        `check_readers`.
      num_tasks: may be left out for "joint", "domain", "blurry" and "growth".
      class_order: "sorted", "released" (that of the PNR experiments with this `seed`,
        see `stream.released_permutation`), "cassle" (that of the CaSSLe experiments,
        the same with seed 5 whatever `seed` is), "shuffled" (by `seed`) or a list of
        class numbers or names that holds every class once. "joint" and "data" pass it
        over.
      domain_order: names or numbers of domains, see "domain" above.
      seed: draws "released", "shuffled", "recurring", "blurry", "permuted", "rotated",
        "growth" and the rows of `per_class`; a config of these without one uses the
        run's seed, but for "shuffled".
      evaluation: "test", "validation" or "none". A task is judged on the rows of its
        classes ("class"), of its domain ("domain"), or on all rows.
      growth: the share of the rows that is new under "growth", ICL's alpha.
      blur: how far a class reaches under "blurry", its width in classes.
      recurrence: chance that an earlier class is in a task under "recurring".
      copies: how often each row comes, one after another, see `one_pass.Repeated`.
      classes, per_class: reduce the dataset to these classes, and to so many train
        rows of each, drawn by `seed`; see `splits.of_classes`. None keeps all.
      imbalance, long_tail: options of `imbalance.dominated` and `imbalance.long_tail`,
        which make the classes of the tasks uneven. None leaves them as they are.

    Returns:
      The dataset, reduced or in its looks, with its tasks and the split that judges.

    Raises:
      ValueError: an unknown option or one that the scenario does not read, more tasks
        than there are classes, rows or domains, an order that repeats or lacks an
        entry, unlabelled rows under "class", "recurring" and "blurry", and a task
        without train or evaluation rows.
    """
    given = {
        "class_order": class_order,
        "domain_order": domain_order,
        "growth": growth,
        "blur": blur,
        "recurrence": recurrence,
        "copies": copies,
        "imbalance": imbalance,
        "long_tail": long_tail,
    }
    check_readers(scenario, given)
    _check_copies(copies, imbalance)
    stream.validate(dataset)
    if classes is not None or per_class is not None:
        dataset = splits.of_classes(dataset, classes, per_class, seed)
    if scenario in ("permuted", "rotated"):
        dataset = looks.made(dataset, scenario, num_tasks, seed)
    judge = _judge(dataset, evaluation)
    if scenario == "after":
        return stream.Stream(dataset, _after_tasks(dataset, judge, num_tasks), judge)
    cut = {
        "joint": _joint_tasks,
        "class": functools.partial(
            _class_tasks, class_order=class_order, seed=seed, recurrence=0.0
        ),
        "recurring": functools.partial(
            _class_tasks, class_order=class_order, seed=seed, recurrence=recurrence
        ),
        "blurry": functools.partial(
            _blurry_tasks, class_order=class_order, seed=seed, blur=blur
        ),
        "data": _data_tasks,
        "domain": functools.partial(_domain_tasks, domain_order=domain_order),
        "permuted": functools.partial(_domain_tasks, domain_order=None),
        "rotated": functools.partial(_domain_tasks, domain_order=None),
        "growth": functools.partial(_growth_tasks, growth=growth, seed=seed),
    }
    tasks = cut[scenario](dataset, judge, num_tasks)
    tasks = imbalance_lib.applied(dataset, tasks, imbalance, long_tail)
    tasks = _with_earlier_rows([_repeated(task, copies) for task in tasks])
    return stream.Stream(dataset, tasks, judge)


def check_readers(scenario: Scenario, options: Mapping[str, Any]) -> None:
    """Refuse an option that a scenario does not read and that is not its default.

    Args:
      scenario: its name.
      options: those of `make` that are given, by name.

    Raises:
      ValueError: naming the field, the value and the scenarios that read it.
    """
    defaults = schema.defaults(make)
    for option, readers in _READERS.items():
        value = options.get(option, defaults[option])
        takes = scenario in (*readers, *_PASSED_OVER.get(option, ()))
        if not takes and value != defaults[option]:
            raise ValueError(
                f"config.scenario.{option}={value!r}: scenario {scenario!r} does not "
                f"read it; must be {defaults[option]!r}, or the scenario "
                f"{' or '.join(map(repr, readers))}"
            )


def _check_copies(copies, imbalance) -> None:
    """Refuse an epoch of a number of steps where each row comes several times."""
    steps = (imbalance or {}).get("epoch_steps")
    if copies > 1 and steps is not None:
        raise ValueError(
            f"config.scenario.imbalance.epoch_steps={steps!r}: an epoch of copies="
            f"{copies!r} is as long as its rows are; must be None, or copies 1"
        )


def _judge(dataset, evaluation) -> stream.Examples | None:
    """The split that tasks are judged on, None for "none"."""
    judges = {"test": dataset.test, "validation": dataset.validation, "none": None}
    judge = judges[evaluation]
    if judge is None and evaluation != "none":
        raise ValueError(
            f"evaluation = {evaluation!r}: {dataset.name} has no {evaluation} split; "
            "give the source a validation fraction, or use evaluation = 'none'"
        )
    return judge


def _with_earlier_rows(tasks) -> tuple[stream.Task, ...]:
    """The tasks, each with the train rows of all tasks before it as `earlier`."""
    before = [task.train.rows for task in tasks]
    return tuple(
        task._replace(earlier=np.concatenate([task.earlier, *before[:index]]))
        for index, task in enumerate(tasks)
    )


def _every_row(judge) -> np.ndarray:
    """All rows of the split that judges, none without one."""
    return np.arange(0 if judge is None else stream.size(judge))


def _task(dataset, judge, index, name, rows, test, *, classes=None, domain=-1):
    """A task on train `rows`; `classes` default to those that occur in them."""
    rows = np.asarray(rows, np.int32)
    if classes is None:
        classes = np.unique(dataset.train.label[rows])
        classes = classes[classes >= 0]
    if judge is not None and len(test) == 0:
        raise ValueError(f"task {index} ({name}) has no evaluation rows")
    in_graphs = dataset.train.graphs is not None
    order = stream.filled_order if in_graphs else stream.epoch_order
    return stream.Task(
        index=index,
        name=name,
        classes=np.asarray(classes, np.int32),
        domain=domain,
        train=stream.Source(dataset.train, rows, order),
        test=np.asarray(test, np.int32),
    )


def _repeated(task, copies):
    """The task with each row `copies` times in a row."""
    if copies == 1:
        return task
    order = one_pass.Repeated(task.train.order, copies)
    return task._replace(train=task.train._replace(order=order))


def _labelled_order(dataset, scenario, class_order, seed) -> np.ndarray:
    """All classes in the order of the stream, of a set with labels and rows of each."""
    names, label = dataset.class_names, dataset.train.label
    if (label < 0).any():
        raise ValueError(
            f"scenario {scenario!r} needs labels: {(label < 0).sum()} of {len(label)} "
            f"train rows of {dataset.name} have none"
        )
    order = stream.order_of_classes(names, class_order, seed)
    counts = np.bincount(label, minlength=len(names))
    if (counts == 0).any():
        raise ValueError(f"class {names[int(np.argmin(counts))]!r} has no train rows")
    return order


def _class_tasks(dataset, judge, num_tasks, class_order, seed, recurrence):
    names, label = dataset.class_names, dataset.train.label
    _check_num_tasks(num_tasks, len(names), "classes")
    name = "recurring" if recurrence else "class"
    order = _labelled_order(dataset, name, class_order, seed)
    chunks, rng = np.array_split(order, num_tasks), np.random.default_rng(seed)
    parts = one_pass.recurring(label, chunks, recurrence=recurrence, rng=rng)
    tasks = []
    for index, (classes, rows) in enumerate(zip(chunks, parts, strict=True)):
        name = ", ".join(names[c] for c in classes[:3])
        name += f" +{len(classes) - 3}" if len(classes) > 3 else ""
        test = [] if judge is None else np.flatnonzero(np.isin(judge.label, classes))
        held = np.unique(label[rows]) if recurrence else classes
        tasks.append(_task(dataset, judge, index, name, rows, test, classes=held))
    return tasks


def _blurry_tasks(dataset, judge, num_tasks, class_order, seed, blur):
    if dataset.train.graphs is not None:
        raise ValueError("scenario 'blurry' is of images; use 'class' or 'joint'")
    order, count = _labelled_order(dataset, "blurry", class_order, seed), num_tasks or 1
    label, test = dataset.train.label, _every_row(judge)
    _check_num_tasks(count, len(label), "train rows")
    rng = np.random.default_rng(seed)
    rows = one_pass.blurry(label, order, blur=blur, rng=rng)
    tasks = []
    for index, part in enumerate(np.array_split(rows, count)):
        task = _task(dataset, judge, index, f"part {index}", part, test)
        train = task.train._replace(order=one_pass.given)
        tasks.append(task._replace(train=train))
    return tasks


def _joint_tasks(dataset, judge, num_tasks):
    if num_tasks not in (None, 1):
        raise ValueError(f"num_tasks = {num_tasks}: scenario 'joint' has 1")
    rows = np.arange(stream.size(dataset.train))
    return [_task(dataset, judge, 0, "joint", rows, _every_row(judge))]


def _data_tasks(dataset, judge, num_tasks):
    count, test = stream.size(dataset.train), _every_row(judge)
    _check_num_tasks(num_tasks, count, "train rows")
    by_label = np.argsort(dataset.train.label, kind="stable")
    shuffled = by_label[stream.released_permutation(count, seed=DATA_SEED)]
    length, remainder = divmod(count, num_tasks)
    cuts = [remainder + length * (index + 1) for index in range(num_tasks - 1)]
    return [
        _task(dataset, judge, index, f"slice {index}", part, test)
        for index, part in enumerate(np.split(shuffled, cuts))
    ]


def _domain_tasks(dataset, judge, num_tasks, domain_order):
    names = dataset.domain_names
    order = range(len(names)) if domain_order is None else domain_order
    order = stream.numbers(order, names, "domain_order")
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
        of_it = [] if judge is None else np.isin(judge.domain, (domain, -1))
        test = np.flatnonzero(of_it)
        tasks.append(
            _task(dataset, judge, index, names[domain], rows, test, domain=domain)
        )
    return tasks


def _growth_tasks(dataset, judge, num_tasks, growth, seed):
    if num_tasks not in (None, 2):
        raise ValueError(f"num_tasks = {num_tasks}: scenario 'growth' has 2")
    rows = np.random.default_rng(seed).permutation(stream.size(dataset.train))
    old = round((1 - growth) * len(rows))
    if not 0 < old < len(rows):
        raise ValueError(
            f"growth = {growth}: must leave old and new rows, of {len(rows)} in all"
        )
    test, parts = _every_row(judge), {"old": rows[:old], "new": rows[old:]}
    return [
        _task(dataset, judge, index, name, part, test)
        for index, (name, part) in enumerate(parts.items())
    ]


def _after_tasks(dataset, judge, num_tasks):
    if num_tasks is None or num_tasks < 2:
        raise ValueError(
            f"num_tasks = {num_tasks!r}: scenario 'after' has as many as the run "
            "before it, and one more: an integer of at least 2"
        )
    domain, last = dataset.train.domain, len(dataset.domain_names) - 1
    rows, earlier = np.flatnonzero(domain == last), np.flatnonzero(domain < last)
    test = _every_row(judge)
    if len(rows) == 0:
        raise ValueError(f"domain {dataset.domain_names[last]!r} has no train rows")
    names = [f"earlier {i + 1}" for i in range(num_tasks - 1)] + [dataset.name]
    # Only the last task is trained; the others stand for those of the earlier run.
    return tuple(
        _task(dataset, judge, index, name, rows, test)._replace(
            earlier=earlier.astype(np.int32)
        )
        for index, name in enumerate(names)
    )


def _check_num_tasks(num_tasks, most, what):
    if num_tasks is None or num_tasks > most:
        raise ValueError(
            f"num_tasks = {num_tasks!r}: must be an integer from 1 to the {most} {what}"
        )
