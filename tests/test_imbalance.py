"""Uneven classes: the stream that one class dominates, and long-tailed sets."""

import numpy as np
import pytest

from helpers import small_sets, toy
from jaxcl.config import build
from jaxcl.data import stream
from jaxcl.data.stream import imbalance, scenarios
from jaxcl.run import train


def uneven(sizes=(30, 4, 50, 16), domains=1):
    """Classes of these sizes, their rows all mixed up."""
    label = np.repeat(np.arange(len(sizes)), sizes)
    label = np.random.default_rng(3).permutation(label)
    train = small_sets.examples(label, np.arange(len(label)) % domains)
    test = small_sets.examples(
        np.arange(len(sizes) * domains) % len(sizes),
        np.arange(len(sizes) * domains) // len(sizes),
    )
    return small_sets.dataset(train, test, classes=len(sizes), domains=domains)


def made(data, *, name="joint", **options):
    return scenarios.make(data, name=name, **options)


def planned(task, *, seed=0, epochs=1, batch_size=10):
    return stream.schedule(
        task.train, seed=seed, task=task.index, epochs=epochs, batch_size=batch_size
    )


def drawn(task, **options):
    """All rows of a task's schedule, [steps, batch]."""
    plan = planned(task, **options)
    return np.stack([plan[step] for step in range(len(plan))])


@pytest.mark.parametrize(
    ("rho_max", "rho_min"), [(0.1, 0.1), (0.25, 1 / 12), (0.5, 1 / 18), (0.75, 1 / 36)]
)
def test_probabilities_are_the_papers(rho_max, rho_min):
    for dominant in (0, 7):
        rho = imbalance.probabilities(np.arange(10), dominant=dominant, rho_max=rho_max)
        want = np.full(10, rho_min)
        want[dominant] = rho_max
        np.testing.assert_allclose(rho, want, rtol=1e-12)


@pytest.mark.parametrize("rho_max", [0.25, 0.5, 0.75])
def test_classes_come_by_rho_and_rows_evenly_within_each(rho_max):
    data = uneven()
    section = {"rho_max": rho_max, "dominant": 1, "epoch_steps": 3000}
    (task,) = made(data, imbalance=section).tasks
    rows = drawn(task, batch_size=20)
    label = data.train.label
    assert rows.shape == (3000, 20) and rows.dtype == np.int32
    share = np.bincount(label[rows].ravel(), minlength=4) / rows.size
    want = np.array([(1 - rho_max) / 3, rho_max, *[(1 - rho_max) / 3] * 2])
    # Five standard deviations of 60,000 draws.
    assert (abs(share - want) < 5 * np.sqrt(want * (1 - want) / rows.size)).all()
    # Row by row: the four of the dominant class are drawn often, each as the others.
    each = np.bincount(rows.ravel(), minlength=100) / rows.size
    want = want[label] / np.bincount(label)[label]
    assert (abs(each - want) < 5 * np.sqrt(want / rows.size)).all()
    # Rows are independent: the number of the class in a batch is binomial.
    count = (label[rows] == 1).sum(axis=1)
    spread = 20 * rho_max * (1 - rho_max)
    assert abs(count.var() / spread - 1) < 5 * np.sqrt(2 / 3000)
    assert (label[rows] == 1).mean(axis=0).std() < 5 * np.sqrt(spread / 20 / 3000)
    # Successive rows too, of which an order by class would leave no pair.
    one, two = label[rows][:, :-1] == 1, label[rows][:, 1:] == 1
    assert abs((one & two).mean() - rho_max**2) < 0.02


def test_the_stream_is_a_function_of_seed_task_and_epoch():
    data = uneven()
    options = {"name": "data", "num_tasks": 2, "imbalance": {"rho_max": 0.6}}
    one, two = made(data, **options).tasks
    plan = planned(one, seed=5, epochs=3)
    want = [plan[step].tolist() for step in range(len(plan))]
    again = planned(one, seed=5, epochs=3)
    steps = np.random.default_rng(0).permutation(len(plan))
    assert [again[step].tolist() for step in steps] == [want[step] for step in steps]
    assert len({str(rows) for rows in want}) == len(want)  # epochs differ
    assert drawn(one, seed=6).tolist() != want[: len(plan) // 3]
    assert drawn(two._replace(train=one.train), seed=5).tolist() != want[:5]
    # The first epoch is the same, however many there are.
    assert drawn(one, seed=5).tolist() == want[: len(plan) // 3]


@pytest.mark.parametrize(
    ("options", "want"),
    [
        ({"name": "joint"}, [0]),
        ({"name": "joint", "imbalance.dominant": 2}, [2]),
        ({"name": "joint", "imbalance.dominant": "c3"}, [3]),
        ({"name": "joint", "imbalance.dominant": ["c1"]}, [1]),
        ({"name": "data", "num_tasks": 2, "imbalance.dominant": 2}, [2, 2]),
        ({"name": "data", "num_tasks": 2, "imbalance.dominant": (2, "c0")}, [2, 0]),
        ({"name": "domain", "imbalance.dominant": "c2"}, [2, 2]),
        ({"name": "class", "num_tasks": 2}, [0, 2]),
        ({"name": "class", "num_tasks": 2, "imbalance.dominant": ("c1", 2)}, [1, 2]),
        ({"name": "class", "num_tasks": 2, "class_order": [2, 3, 1, 0]}, [2, 1]),
    ],
)
def test_which_class_dominates(options, want):
    data = uneven((40, 40, 40, 40), domains=2)
    section = {"rho_max": 0.8, "epoch_steps": 100}
    if "imbalance.dominant" in options:
        options = dict(options)
        section["dominant"] = options.pop("imbalance.dominant")
    found = [
        int(np.bincount(data.train.label[drawn(task)].ravel()).argmax())
        for task in made(data, **options, imbalance=section).tasks
    ]
    assert found == want


def test_a_stream_may_begin_evenly():
    """One share for each task; the even one has all classes alike."""
    data = uneven((40, 40, 40, 40))
    section = {"rho_max": (0.25, 0.7), "dominant": 1, "epoch_steps": 1000}
    tasks = made(data, name="data", num_tasks=2, imbalance=section).tasks
    for task, share in zip(tasks, section["rho_max"], strict=True):
        label = data.train.label[drawn(task)].ravel()
        error = np.sqrt(share * (1 - share) / label.size)
        assert abs(np.mean(label == 1) - share) < 5 * error
    with pytest.raises(ValueError, match="rho_max.*2 tasks"):
        section = {"rho_max": (0.25, 0.5, 0.7), "dominant": 1}
        made(data, name="data", num_tasks=2, imbalance=section)


def test_imbalance_errors_of_tasks():
    data, even = uneven(), {"rho_max": 0.5}
    for options, words in (
        (
            {"num_tasks": 2, "imbalance": even | {"dominant": 0}},
            r"imbalance\.dominant=0: task 1 \(c2, c3\) has no 'c0'.* \['c2', 'c3'\]",
        ),
        (
            {"num_tasks": 2, "imbalance": even | {"dominant": [0, 1]}},
            r"dominant=\[0, 1\]: task 1 .* has no 'c1'",
        ),
        ({"num_tasks": 2, "imbalance": even | {"dominant": [0]}}, r"dominant=\[0\]"),
        ({"num_tasks": 2, "imbalance": {"rho_max": 0.4}}, r"rho_max=0\.4: task 0"),
        ({"num_tasks": 3, "imbalance": even}, r"task 1 \(c2\) needs 2 classes, .* 1"),
    ):
        with pytest.raises(ValueError, match=words):
            made(data, name="class", **options)
    made(uneven((9, 9, 9)), imbalance={"rho_max": 0.3333333})
    blind = small_sets.dataset(
        small_sets.examples([0, 1, -1]), small_sets.examples([0])
    )
    for option in ({"imbalance": even}, {"long_tail": {"factor": 2}}):
        with pytest.raises(ValueError, match=" 1 of 3 .*toy"):
            made(blind, **option)


@pytest.mark.parametrize(
    ("largest", "classes", "factor", "total", "some"),
    [  # what papers on CIFAR-10-LT and CIFAR-100-LT print
        (5000, 10, 100, 12406, [5000, 2997, 1796, 1077, 645, 387, 232, 139, 83, 50]),
        (5000, 10, 10, 20431, [5000, 3871, 2997, 2320, 1796]),
        (5000, 10, 50, 13996, [5000]),
        (500, 100, 100, 10847, [500, 477]),
        (500, 100, 50, 12608, [500]),
        (500, 100, 10, 19573, [500]),
        (7, 3, 1, 21, [7, 7, 7]),
        (10, 3, 1000, 12, [10, 1, 1]),
        (9, 1, 10, 9, [9]),
    ],
)
def test_sizes_are_the_published_ones(largest, classes, factor, total, some):
    sizes = imbalance.tail_sizes(largest, classes, factor=factor)
    assert sizes.sum() == total and len(sizes) == classes
    assert sizes[: len(some)].tolist() == some


def balanced(classes=5, each=40):
    return uneven((each,) * classes)


def counts(data, tasks):
    rows = np.concatenate([task.train.rows for task in tasks])
    assert len({*rows.tolist()}) == len(rows)
    return np.bincount(data.train.label[rows], minlength=len(data.class_names)).tolist()


def test_a_long_tail_keeps_rows_of_each_class_and_the_split():
    data = balanced()
    plain = made(data)
    tailed = made(data, long_tail={"factor": 10})
    # 40 * 10^(-c / 4), cut.
    assert counts(data, tailed.tasks) == [40, 22, 12, 7, 4]
    rows = tailed.tasks[0].train.rows
    assert rows.dtype == np.int32 and (np.diff(rows) > 0).all()
    assert tailed.dataset is data and tailed.tasks[0].train.examples is data.train
    assert tailed.tasks[0].train.order is stream.epoch_order
    np.testing.assert_array_equal(tailed.tasks[0].test, plain.tasks[0].test)
    # Not the first ones of a class, and others by another seed.
    last, kept = np.flatnonzero(data.train.label == 4), set()
    for seed in range(6):
        (task,) = made(data, long_tail={"factor": 10, "seed": seed}).tasks
        kept.add(tuple(np.intersect1d(last, task.train.rows).tolist()))
    assert len(kept) == 6 and tuple(last[:4].tolist()) not in kept
    both = {"long_tail": {"factor": 10}, "imbalance": {"rho_max": 0.5}}
    (again,) = made(data, **both).tasks  # one class dominates the rows that are kept
    np.testing.assert_array_equal(again.train.rows, rows)
    assert again.train.order.rho_max == 0.5
    (more,) = made(data, long_tail={"factor": 5}).tasks
    assert {*rows} < {*more.train.rows}  # what a larger factor keeps, too


def test_classes_that_have_too_few_keep_all():
    data = uneven((30, 4, 50, 16))
    assert counts(data, made(data, long_tail={"factor": 8}).tasks) == [30, 4, 12, 6]
    assert counts(data, made(data, long_tail={"factor": 10**6}).tasks) == [30, 1, 1, 1]
    lacking = uneven((30, 0, 50))
    assert counts(lacking, made(lacking, long_tail={"factor": 5}).tasks) == [30, 0, 10]


def test_scenarios_cut_a_long_tailed_set():
    data, tail = balanced(4), {"factor": 8, "class_order": [3, 2, 1, 0]}
    whole = made(data, long_tail=tail).tasks[0].train.rows.tolist()
    sizes = [5, 10, 20, 40]
    for options in (
        {"name": "class", "num_tasks": 2, "class_order": [2, 0, 3, 1]},
        {"name": "data", "num_tasks": 3},
    ):
        plain, tailed = made(data, **options), made(data, **options, long_tail=tail)
        assert counts(data, tailed.tasks) == sizes
        rows = [task.train.rows for task in tailed.tasks]
        assert sorted(np.concatenate(rows).tolist()) == whole
        for one, two in zip(plain.tasks, tailed.tasks, strict=True):
            kept = [row for row in one.train.rows.tolist() if row in whole]
            assert two.train.rows.tolist() == kept
            left = {*data.train.label[kept].tolist()}
            assert two.classes.tolist() == [c for c in one.classes if c in left]
            assert two.test.tolist() == one.test.tolist()


def test_a_run_trains_on_the_stream_and_remembers_it(tmp_path):
    scenario = {
        "name": "class",
        "num_tasks": 2,
        "imbalance": {"dominant": ("3", 8), "rho_max": 0.75, "epoch_steps": 7},
        "long_tail": {"factor": 2},
    }
    job = toy.job(tmp_path, scenario=scenario)
    plans = [planned(task, batch_size=48) for task in job.stream.tasks]
    assert [plan.steps_per_epoch for plan in plans] == [7, 7]
    label = job.stream.dataset.train.label
    assert len(label) == 1438  # probes train on all
    assert sum(len(task.train.rows) for task in job.stream.tasks) < 1100
    for plan, number in zip(plans, (3, 8), strict=True):
        share = (label[np.stack([plan[step] for step in range(7)])] == number).mean()
        assert abs(share - 0.75) < 5 * np.sqrt(0.75 * 0.25 / (7 * 48))
    train.run_tasks(job, tmp_path)  # a run without a step would give way
    scenario["imbalance"]["rho_max"] = 0.5
    with pytest.raises(ValueError, match=r"scenario\.imbalance\.rho_max"):
        build.build(toy.config(scenario=scenario), tmp_path)
