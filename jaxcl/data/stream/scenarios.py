"""Scenarios: how a dataset is cut into the tasks of a stream.

`make` takes a name of `SCENARIOS` and the options that all scenarios have. Each
scenario is a function with the options that it alone has.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Literal, NamedTuple

import numpy as np

from jaxcl import core, schema
from jaxcl.data import stream
from jaxcl.data.stream import imbalance, looks, one_pass, splits
from jaxcl.errors import Refused

# The released PNR and CaSSLe experiments draw the slices of "data" with this seed.
DATA_SEED = 42

ClassOrder = str | Sequence[schema.Natural | str]


class ScenarioData(NamedTuple):
    """The input of a scenario: the set to cut into tasks."""

    dataset: stream.Dataset
    eval_split: stream.Examples | None  # the split that tasks are evaluated on
    num_tasks: int | None  # None: the user gives none
    seed: int


def find_functions(name: str | None) -> tuple[Callable, ...]:
    """Find the functions whose options a scenario's config has."""
    if name is None:
        return (make,)
    core.check_choice("config.scenario.name", name, tuple(SCENARIOS))
    return (make, *SCENARIOS[name].functions)


def list_functions() -> dict[str, Callable]:
    """List the functions whose keyword arguments are options of scenarios, by name."""
    functions = {f"scenario {name!r}": x.functions[0] for name, x in SCENARIOS.items()}
    functions["all scenarios but 'after' and 'blurry'"] = imbalance.make_uneven
    functions["all scenarios but 'after'"] = repeat_rows
    return functions


@schema.checked("config.scenario")
def make(
    dataset: stream.Dataset,
    *,
    name: str,
    num_tasks: schema.Count | None = None,
    seed: schema.Natural = 0,
    evaluation: Literal["test", "validation", "none"] = "test",
    classes: Sequence[schema.Natural | str] | None = None,
    per_class: schema.Count | None = None,
    **options,
) -> stream.Stream:
    """Cut a dataset into the tasks of a scenario.

    Args:
      dataset: dataset to cut; it is checked first.
      name: name of the scenario, see `SCENARIOS`.
      num_tasks: number of tasks; None is allowed for "joint", "domain", "blurry" and
        "growth".
      seed: seed of the draws of "released", "shuffled", "recurring", "blurry",
        "permuted", "rotated", "growth" and `per_class`; without it a config uses the
        run's seed, except for "shuffled".
      evaluation: split, "test", "validation" or "none". A task is evaluated on the rows
        of its classes ("class"), of its domain ("domain"), or on all rows.
      classes, per_class: classes to keep, and number of train rows of each, drawn by
        `seed`; see `splits.of_classes`. None keeps all.
      options: options of the scenario.

    Returns:
      The dataset, reduced or in its looks, with its tasks and the evaluation split.

    Raises:
      Refused: an unknown option, more tasks than there are classes, rows or
        domains, an order that repeats or lacks an entry, unlabelled rows under "class",
        "recurring" and "blurry", and a task without train or evaluation rows.
    """
    functions = find_functions(name)
    options = schema.options(
        functions, {"name": name, **options}, "config.scenario", others=list_functions()
    )
    _check_copies(options.get("copies", 1), options.get("imbalance"))
    stream.validate(dataset)
    if classes is not None or per_class is not None:
        dataset = splits.of_classes(dataset, classes, per_class, seed)
    if name in looks.LOOKS:
        dataset = looks.as_domains(dataset, name, num_tasks, seed)
    eval_split = _evaluation_split(dataset, evaluation)
    _, cut, *changes = functions
    data = ScenarioData(dataset, eval_split, num_tasks, seed)
    tasks = cut(data, **_pick(cut, options))
    for change in changes:
        tasks = change(dataset, tasks, **_pick(change, options))
    if name != "after":  # whose rows of before are none of these tasks
        tasks = _with_earlier_rows(tasks)
    return stream.Stream(dataset, tuple(tasks), eval_split)


def _pick(function: Callable, options: dict) -> dict:
    """Pick the options that a function takes."""
    return {n: options[n] for n in schema.option_of(function) if n in options}


def _check_copies(copies, section) -> None:
    """Refuse an epoch of a number of steps where each row comes several times."""
    steps = (section or {}).get("epoch_steps")
    if copies > 1 and steps is not None:
        raise Refused(
            f"config.scenario.imbalance.epoch_steps={steps!r}: must be None where "
            f"copies={copies!r}"
        )


def _evaluation_split(dataset, evaluation) -> stream.Examples | None:
    """Return the split that tasks are evaluated on, None for "none"."""
    split = stream.splits_of(dataset).get(evaluation)
    if split is None and evaluation != "none":
        raise Refused(
            f"evaluation={evaluation!r}: {dataset.name} has no such split; give the "
            "source a validation fraction, or use evaluation = 'none'"
        )
    return split


def _with_earlier_rows(tasks) -> list[stream.Task]:
    """Give each task the train rows of all tasks before it as `earlier`."""
    before = [task.train.rows for task in tasks]
    return [
        task._replace(earlier=np.concatenate([task.earlier, *before[:index]]))
        for index, task in enumerate(tasks)
    ]


def _every_row(data) -> np.ndarray:
    """Return all rows of the evaluation split, none without one."""
    split = data.eval_split
    return np.arange(0 if split is None else stream.count_rows(split))


def _evaluation_rows(data, column, values) -> np.ndarray:
    """Return the rows of the evaluation split whose label or domain is wanted."""
    split = data.eval_split
    mask = [] if split is None else np.isin(getattr(split, column), values)
    return np.flatnonzero(mask)


def _make_task(
    data, index, name, rows, test, *, classes=None, domain=-1
) -> stream.Task:
    """Make a task of train `rows`; `classes` default to those in them."""
    rows, train = np.asarray(rows, np.int32), data.dataset.train
    if classes is None:
        classes = np.unique(train.label[rows])
        classes = classes[classes >= 0]
    for kind, numbers in (("train", rows), ("evaluation", test)):
        if len(numbers) == 0 and (kind == "train" or data.eval_split is not None):
            raise Refused(f"task {index} ({name}) has no {kind} rows")
    order = stream.epoch_order if train.graphs is None else stream.filled_order
    return stream.Task(
        index=index,
        name=name,
        classes=np.asarray(classes, np.int32),
        domain=domain,
        train=stream.Source(train, rows, order),
        test=np.asarray(test, np.int32),
    )


def _labelled_order(data, scenario, class_order) -> np.ndarray:
    """Order all classes; refuse a set without labels, or without rows of one."""
    names, label = data.dataset.class_names, data.dataset.train.label
    if (label < 0).any():
        raise Refused(
            f"scenario {scenario!r} needs labels: {(label < 0).sum()} of {len(label)} "
            f"train rows of {data.dataset.name} have none"
        )
    order = stream.order_of_classes(names, class_order, data.seed)
    counts = np.bincount(label, minlength=len(names))
    if (counts == 0).any():
        raise Refused(f"class {names[int(np.argmin(counts))]!r} has no train rows")
    return order


def joint(
    data: ScenarioData, *, class_order: ClassOrder = "sorted"
) -> list[stream.Task]:
    """Make one task that holds everything.

    class_order: order without effect here, so that a config of classes runs as this,
      too.
    """
    if data.num_tasks not in (None, 1):
        raise Refused("num_tasks", data.num_tasks, "scenario 'joint' has 1")
    rows = np.arange(stream.count_rows(data.dataset.train))
    return [_make_task(data, 0, "joint", rows, _every_row(data))]


def by_class(
    data: ScenarioData, *, class_order: ClassOrder = "sorted"
) -> list[stream.Task]:
    """Cut `class_order` into `num_tasks` consecutive chunks of classes.

    If they do not divide evenly, the first tasks have one class more.

    class_order: order of the classes: "sorted", "released" (the order of the PNR
      experiments with this `seed`, see `stream.released_permutation`), "cassle" (the
      order of the CaSSLe experiments, the same with seed 5 for any `seed`), "shuffled"
      (by `seed`) or a list of class numbers or names that holds every class once.
    """
    return _class_tasks(data, "class", class_order, 0.0)


def recurring(
    data: ScenarioData,
    *,
    class_order: ClassOrder = "sorted",
    recurrence: schema.Share = 0.5,
) -> list[stream.Task]:
    """Make tasks as "class" does, with classes of earlier tasks that come back.

    A task is evaluated on its new classes, see `one_pass.recurring`.

    class_order: order, as of "class".
    recurrence: chance that an earlier class is in a task.
    """
    return _class_tasks(data, "recurring", class_order, recurrence)


def _class_tasks(data, scenario, class_order, recurrence) -> list[stream.Task]:
    names, label = data.dataset.class_names, data.dataset.train.label
    _check_num_tasks(data.num_tasks, len(names), "classes")
    order = _labelled_order(data, scenario, class_order)
    chunks = np.array_split(order, data.num_tasks)
    rng = np.random.default_rng(data.seed)
    rows_of_tasks = one_pass.recurring(label, chunks, recurrence=recurrence, rng=rng)
    tasks = []
    for index, (classes, rows) in enumerate(zip(chunks, rows_of_tasks, strict=True)):
        name = ", ".join(names[c] for c in classes[:3])
        name += f" +{len(classes) - 3}" if len(classes) > 3 else ""
        test = _evaluation_rows(data, "label", classes)
        present = np.unique(label[rows]) if recurrence else classes
        tasks.append(_make_task(data, index, name, rows, test, classes=present))
    return tasks


def blurry(
    data: ScenarioData,
    *,
    class_order: ClassOrder = "sorted",
    blur: Annotated[float, schema.Range(least=1e-3, most=1e3)] = 0.5,
) -> list[stream.Task]:
    """Make tasks whose classes fade into one another, see `one_pass.blurry`.

    The sequence is cut into `num_tasks` equal slices (1 if left out). The slices only
    set the times of evaluation, which is on all rows.

    class_order: order, as of "class".
    blur: width of a class in the sequence, in classes.
    """
    if data.dataset.train.graphs is not None:
        raise Refused("scenario 'blurry' is of images; use 'class' or 'joint'")
    order, count = _labelled_order(data, "blurry", class_order), data.num_tasks or 1
    label, test = data.dataset.train.label, _every_row(data)
    _check_num_tasks(count, len(label), "train rows")
    rng = np.random.default_rng(data.seed)
    rows = one_pass.blurry(label, order, blur=blur, rng=rng)
    tasks = []
    for index, part in enumerate(np.array_split(rows, count)):
        task = _make_task(data, index, f"part {index}", part, test)
        train = task.train._replace(order=one_pass.in_order)
        tasks.append(task._replace(train=train))
    return tasks


def by_slice(
    data: ScenarioData, *, class_order: ClassOrder = "sorted"
) -> list[stream.Task]:
    """Cut the train rows at random into equal slices.

    Rows sorted by label are permuted with seed 42, whatever the run's seed, and cut.
    Task 0 also takes the remainder.

    class_order: order without effect here, so that a config of classes runs as this,
      too.
    """
    train, test = data.dataset.train, _every_row(data)
    count, num_tasks = stream.count_rows(train), data.num_tasks
    _check_num_tasks(num_tasks, count, "train rows")
    by_label = np.argsort(train.label, kind="stable")
    shuffled = by_label[stream.released_permutation(count, seed=DATA_SEED)]
    length, remainder = divmod(count, num_tasks)
    cuts = [remainder + length * (index + 1) for index in range(num_tasks - 1)]
    slices = enumerate(np.split(shuffled, cuts))
    return [_make_task(data, i, f"slice {i}", part, test) for i, part in slices]


def by_domain(
    data: ScenarioData, *, domain_order: Sequence[schema.Natural | str] | None = None
) -> list[stream.Task]:
    """Make one task for each domain.

    domain_order: names or numbers of domains; it may leave some out. None: the order of
      the dataset.
    """
    names, num_tasks = data.dataset.domain_names, data.num_tasks
    order = range(len(names)) if domain_order is None else domain_order
    order = stream.numbers(order, names, "domain_order")
    if num_tasks not in (None, len(order)):
        raise Refused(
            f"num_tasks={num_tasks}: scenario 'domain' has one task for each of "
            f"{[names[d] for d in order]}; name the wanted ones in domain_order"
        )
    tasks = []
    for index, domain in enumerate(order):
        rows = np.flatnonzero(data.dataset.train.domain == domain)
        test = _evaluation_rows(data, "domain", (domain, -1))
        tasks.append(_make_task(data, index, names[domain], rows, test, domain=domain))
    return tasks


def by_look(data: ScenarioData) -> list[stream.Task]:
    """Make `num_tasks` tasks of all images, each changed in its own way.

    Their pixels are in another order ("permuted"), or turned by another angle
    ("rotated"), see `looks.as_domains`. Their labels stay the same.
    """
    return by_domain(data)


def growth(
    data: ScenarioData,
    *,
    growth: Annotated[float, schema.Range(above=0, below=1)] = 0.5,
) -> list[stream.Task]:
    """Make two tasks: an old set and its growth (ICL).

    `seed` permutes the n train rows. The old set has the first round((1 - growth) n).

    growth: share of the rows that are new, ICL's alpha.
    """
    if data.num_tasks not in (None, 2):
        raise Refused("num_tasks", data.num_tasks, "scenario 'growth' has 2")
    count = stream.count_rows(data.dataset.train)
    rows = np.random.default_rng(data.seed).permutation(count)
    old, test = round((1 - growth) * count), _every_row(data)
    if not 0 < old < count:
        raise Refused("growth", growth, f"must leave old and new of {count} rows")
    return [
        _make_task(data, 0, "old", rows[:old], test),
        _make_task(data, 1, "new", rows[old:], test),
    ]


def after(data: ScenarioData) -> list[stream.Task]:
    """Make the next task of a run that trained `num_tasks` - 1 tasks on other data.

    The task has all rows of the set. If the set has several domains, the task has the
    last one, and the others are its earlier rows. See config.start.
    """
    num_tasks, dataset = data.num_tasks, data.dataset
    if num_tasks is None or num_tasks < 2:
        raise Refused(
            "num_tasks",
            num_tasks,
            "must be 2 or more, one more than the run before has",
        )
    domain, last = dataset.train.domain, len(dataset.domain_names) - 1
    rows, earlier = np.flatnonzero(domain == last), np.flatnonzero(domain < last)
    test = _every_row(data)
    names = [f"earlier {i + 1}" for i in range(num_tasks - 1)] + [dataset.name]
    # Only the last task is trained; the others stand for those of the earlier run.
    tasks = [_make_task(data, i, name, rows, test) for i, name in enumerate(names)]
    return [task._replace(earlier=earlier.astype(np.int32)) for task in tasks]


def _check_num_tasks(num_tasks, most, unit):
    if num_tasks is None or num_tasks > most:
        raise Refused("num_tasks", num_tasks, f"must be from 1 to the {most} {unit}")


def repeat_rows(
    dataset: stream.Dataset, tasks: list[stream.Task], *, copies: schema.Count = 1
) -> list[stream.Task]:
    """Repeat each train row of the tasks.

    copies: number of times that each row comes in succession, see `one_pass.Repeated`.
    """
    if copies == 1:
        return tasks
    repeated = []
    for task in tasks:
        order = one_pass.Repeated(task.train.order, copies)
        repeated.append(task._replace(train=task.train._replace(order=order)))
    return repeated


# name -> how it cuts, and what may change its tasks
class Scenario(NamedTuple):
    """The functions and traits of a scenario that a config can name."""

    # Functions that have its options, the one that cuts the tasks first
    functions: tuple[Callable, ...]
    # The seed draws it: always, or for this value of `class_order`
    drawn: bool | str = False


_UNEVEN = (imbalance.make_uneven, repeat_rows)
SCENARIOS: dict[str, Scenario] = {
    "joint": Scenario((joint, *_UNEVEN)),
    "class": Scenario((by_class, *_UNEVEN), drawn="released"),
    "recurring": Scenario((recurring, *_UNEVEN), drawn=True),
    "blurry": Scenario((blurry, repeat_rows), drawn=True),
    "data": Scenario((by_slice, *_UNEVEN)),
    "domain": Scenario((by_domain, *_UNEVEN)),
    "permuted": Scenario((by_look, *_UNEVEN), drawn=True),
    "rotated": Scenario((by_look, *_UNEVEN), drawn=True),
    "growth": Scenario((growth, *_UNEVEN), drawn=True),
    "after": Scenario((after,)),
}


def run_seed(scenario: Mapping, seed: int) -> dict:
    """Return {"seed": seed} for a scenario that the run's seed draws, else {}.

    Args:
      scenario: section of a config; its own `seed` has priority.
      seed: seed of the run.
    """
    entry = SCENARIOS.get(scenario.get("name", ""))
    drawn = entry is not None and entry.drawn
    if isinstance(drawn, str):
        drawn = scenario.get("class_order") == drawn
    return {"seed": seed} if drawn and "seed" not in scenario else {}
