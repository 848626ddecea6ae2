import numpy as np
import pytest

from helpers import small_sets
from jaxcl.config import sections
from jaxcl.data import stream
from jaxcl.data.images import readers
from jaxcl.data.stream import scenarios, splits

# The class order of the released PNR and CaSSLe experiments for 100 classes, seed 5.
RELEASED = """
11 22 39 23 42 30 78 81 64 20 29 79 15 69 86 63 55 53 73 68 89 67 58 97 96 92 37 14 75
51 54 7 3 6 50 40 45 4 83 98 27 12 8 99 60 87 28 5 84 34 82 16 72 49 59 31 71 35 66 76
61 17 36 62 13 2 38 94 80 19 25 18 0 1 46 74 85 91 52 77 21 33 32 88 93 70 44 47 26 57
90 95 48 65 43 10 9 56 24 41
"""
# What torch.manual_seed(seed); torch.randperm(10) gave in PyTorch 2.13.
DRAWN_IN_TORCH = {
    0: [4, 1, 7, 5, 3, 9, 0, 8, 6, 2],
    1: [5, 6, 1, 2, 0, 8, 9, 3, 7, 4],
    5: [1, 4, 9, 6, 3, 5, 0, 2, 8, 7],
    6: [0, 7, 5, 1, 8, 3, 9, 2, 4, 6],
    7: [5, 0, 3, 4, 1, 7, 9, 6, 8, 2],
}


def toy():
    rng = np.random.default_rng(0)
    label, domain = np.arange(40) % 5, np.arange(40) // 5 % 3
    order = rng.permutation(40)
    train = small_sets.examples(label[order], domain[order])
    return small_sets.dataset(
        train, small_sets.examples(label[:20], domain[:20]), domains=3
    )


def test_released_permutation_is_the_published_one():
    want = np.array(RELEASED.split(), int)
    np.testing.assert_array_equal(stream.released_permutation(100, seed=5), want)
    assert sorted(stream.released_permutation(7, seed=42)) == list(range(7))
    assert stream.released_permutation(1, seed=5).tolist() == [0]
    assert stream.released_permutation(0, seed=5).tolist() == []


@pytest.mark.parametrize("seed", DRAWN_IN_TORCH)
def test_released_permutation_of_other_seeds(seed):
    found = stream.released_permutation(10, seed=seed)
    assert found.tolist() == DRAWN_IN_TORCH[seed]


@pytest.mark.parametrize(
    ("order", "want"),
    [
        ("sorted", [0, 1, 2, 3, 4]),
        ("shuffled", np.random.default_rng(1).permutation(5).tolist()),
        ("released", stream.released_permutation(5, seed=1).tolist()),
        ("cassle", stream.released_permutation(5, seed=5).tolist()),
        ([4, "c0", 3, 1, 2], [4, 0, 3, 1, 2]),
    ],
)
def test_class_scenario_partitions_by_label(order, want):
    data = toy()
    tasks = scenarios.make(
        data, name="class", num_tasks=3, class_order=order, seed=1
    ).tasks
    assert [len(t.classes) for t in tasks] == [2, 2, 1]  # the first take one more
    assert np.concatenate([t.classes for t in tasks]).tolist() == want
    for task in tasks:
        expected = [i for i, y in enumerate(data.train.label) if y in task.classes]
        assert task.train.rows.tolist() == expected
        expected = [i for i, y in enumerate(data.test.label) if y in task.classes]
        assert task.test.tolist() == expected
        assert task.train.rows.dtype == task.test.dtype == np.int32


def test_data_scenario_slices_the_released_permutation():
    data = toy()
    tasks = scenarios.make(data, name="data", num_tasks=3, seed=7).tasks
    # Label-sorted, ties in dataset order.
    ranked = sorted(range(40), key=lambda i: (data.train.label[i], i))
    shuffled = [ranked[i] for i in stream.released_permutation(40, seed=42)]
    got = [t.train.rows.tolist() for t in tasks]
    assert got == [shuffled[:14], shuffled[14:27], shuffled[27:]]
    assert all(t.test.tolist() == list(range(20)) for t in tasks)
    other = scenarios.make(data, name="data", num_tasks=3, seed=8).tasks
    np.testing.assert_array_equal(other[0].train.rows, tasks[0].train.rows)


def test_domain_scenario():
    data = toy()
    tasks = scenarios.make(data, name="domain", domain_order=["d2", 0]).tasks
    assert [(t.name, t.domain) for t in tasks] == [("d2", 2), ("d0", 0)]
    for task in tasks:
        assert (data.train.domain[task.train.rows] == task.domain).all()
        assert (data.test.domain[task.test] == task.domain).all()
        assert len(task.train.rows) == (data.train.domain == task.domain).sum()
        assert len(task.test) == (data.test.domain == task.domain).sum()
    assert len(scenarios.make(data, name="domain", num_tasks=3).tasks) == 3
    # Test rows without a domain are of every task.
    domain = np.where(np.arange(20) < 4, -1, data.test.domain).astype(np.int32)
    data = data._replace(test=data.test._replace(domain=domain))
    for task in scenarios.make(data, name="domain").tasks:
        want = np.isin(domain, (-1, task.domain))
        np.testing.assert_array_equal(task.test, np.flatnonzero(want))


# Option -> a value that is not its default, and the scenarios that it changes.
ALL_BUT_AFTER = {*scenarios.SCENARIOS} - {"after"}
CHANGES = {
    "class_order": ((4, 3, 1, 2, 0), {"class", "recurring", "blurry"}),
    "domain_order": (("d2", "d0"), {"domain"}),
    "growth": (0.25, {"growth"}),
    "blur": (3.0, {"blurry"}),
    "recurrence": (1.0, {"recurring"}),
    "copies": (2, ALL_BUT_AFTER),
    "imbalance": ({"rho_max": 0.5}, ALL_BUT_AFTER - {"blurry"}),
    "long_tail": ({"factor": 4}, ALL_BUT_AFTER - {"blurry"}),
}


@pytest.mark.parametrize("scenario", scenarios.SCENARIOS)
def test_an_option_changes_the_tasks_or_is_refused(scenario):
    data = toy()
    if scenario in ("permuted", "rotated"):  # of one domain
        data = small_sets.dataset(small_sets.examples(data.train.label))
    free = scenario in ("joint", "domain", "growth")
    plain = {} if free else {"num_tasks": 2}

    def met(**options):
        cut = scenarios.make(data, name=scenario, evaluation="none", **options)
        plans = (
            stream.schedule(task.train, seed=0, task=0, epochs=1, batch_size=2)
            for task in cut.tasks
        )
        return [[plan[step].tolist() for step in range(len(plan))] for plan in plans]

    usual = met(**plain)
    for option, (value, scenarios_of_option) in CHANGES.items():
        options = plain | {option: value}
        if scenario in scenarios_of_option:
            assert met(**options) != usual, option
        elif option == "class_order" and scenario in ("joint", "data"):
            assert met(**options) == usual  # presets of classes are run as these
        else:
            said = rf"^config\.scenario\.{option}=.*: an option of"
            with pytest.raises(ValueError, match=said):
                met(**options)
            with pytest.raises(ValueError, match=said):
                sections.read_tasks({"name": "digits"}, options | {"name": scenario})


def test_earlier_rows_are_those_of_the_tasks_before():
    """Of all of them, and none of the task's own; in the order of the tasks."""
    data = toy()
    skewed = {"long_tail": {"factor": 4}}
    for options in (
        {"name": "joint"},
        {"name": "class", "num_tasks": 5, "class_order": [3, 1, 4, 0, 2]},
        {"name": "data", "num_tasks": 4},
        {"name": "domain", "domain_order": ["d2", "d0", "d1"]},
        {"name": "growth", "growth": 0.3},
        {"name": "class", "num_tasks": 3, **skewed},
    ):
        met = []
        for task in scenarios.make(data, **options).tasks:
            assert task.earlier.tolist() == met and task.earlier.dtype == np.int32
            met += task.train.rows.tolist()
        assert len(set(met)) == len(met) <= 40
        assert (len(met) < 40) == ("long_tail" in options)
    # Of another run's data: rows of all domains but the last, in each of the tasks.
    domain = data.train.domain
    for task in scenarios.make(data, name="after", num_tasks=3).tasks:
        assert task.earlier.tolist() == np.flatnonzero(domain < 2).tolist()
        assert task.train.rows.tolist() == np.flatnonzero(domain == 2).tolist()
        assert task.earlier.dtype == np.int32


def test_evaluation_split():
    held = small_sets.examples([0, 1, 2, 3, 4])
    data = toy()._replace(validation=held)
    options = {"name": "class", "num_tasks": 5}
    cut = scenarios.make(data, **options, evaluation="validation")
    assert cut.evaluation is held
    assert [t.test.tolist() for t in cut.tasks] == [[0], [1], [2], [3], [4]]
    cut = scenarios.make(toy()._replace(test=None), **options, evaluation="none")
    assert cut.evaluation is None and len(cut.tasks[0].test) == 0


def test_chosen_classes_are_cut_out_of_every_split():
    """Their rows stay in order, under new numbers; a few are drawn of train alone."""
    rng = np.random.default_rng(1)

    def numbered(count):
        label = rng.permutation(np.arange(count) % 5)
        rows = small_sets.examples(label, rng.integers(0, 3, count))
        images = np.arange(4 * count, dtype=np.uint8).reshape(count, 2, 2, 1)
        return rows._replace(images=images)

    whole = [numbered(count) for count in (40, 25, 35)]
    data = small_sets.dataset(whole[0], whole[2], domains=3, validation=whole[1])
    for few in (None, 3):
        cut = splits.of_classes(data, ("c3", 1), few, seed=2)
        assert cut.class_names == ("c3", "c1") and cut.domain_names == data.domain_names
        for mine, theirs in zip(
            (cut.train, cut.validation, cut.test), whole, strict=True
        ):
            rows = mine.images[:, 0, 0, 0].astype(int) // 4
            wanted = np.flatnonzero(np.isin(theirs.label, (1, 3)))
            if few and theirs is whole[0]:
                assert np.bincount(mine.label).tolist() == [3, 3]
                assert set(rows) < set(wanted)
            else:
                assert rows.tolist() == wanted.tolist()
            assert (np.diff(rows) > 0).all()
            assert mine.label.tolist() == [{3: 0, 1: 1}[n] for n in theirs.label[rows]]
            np.testing.assert_array_equal(mine.images, theirs.images[rows])
            np.testing.assert_array_equal(mine.domain, theirs.domain[rows])
    other = splits.of_classes(data, ("c3", 1), 3, seed=3)
    assert not np.array_equal(other.train.images, cut.train.images)


def test_validate():
    good = small_sets.examples([0, 1])
    cases = [
        (good._replace(label=np.array([0, 5], np.int32)), "0 to 5, allowed -1 to 4"),
        (good._replace(label=np.array([0, -2], np.int32)), "-2 to 0"),
        (good._replace(domain=np.array([0, 1], np.int32)), "domain runs from 0 to 1"),
        (good._replace(label=np.array([0, 1])), "label is int64"),
        (good._replace(images=good.images * 1.0), "float64.*uint8"),
        (good._replace(images=good.images[..., 0]), r"uint8\[2, 2, 2\]"),
        (good._replace(images=good.images.repeat(17, -1)), r"2, 17\].* 1 to 16"),
        (good._replace(images=good.images[:1]), "1 images and 2 labels"),
        (good._replace(images=good.images.repeat(2, 0)), "4 images and 2 labels"),
        (good._replace(images=None), "images.*graphs"),
        (good._replace(graphs=abs), "images.*graphs"),
        (good._replace(reader=abs), "reader.*abs.*Rows"),
        (good._replace(reader=readers.FunctionRows(abs, 3, "")), "3 rows.*2 labels"),
        (small_sets.examples([]), "has no examples"),
    ]
    every = good._replace(domain=np.array([0, -1], np.int32))  # no train row is
    stream.validate(small_sets.dataset(good, every))
    with pytest.raises(ValueError, match="train domain runs from -1"):
        stream.validate(small_sets.dataset(every))
    for bad, words in cases:
        with pytest.raises(ValueError, match=words):
            stream.validate(small_sets.dataset(bad))
        with pytest.raises(ValueError, match="toy: test"):
            stream.validate(small_sets.dataset(good, bad))


def plan(**options):
    source = stream.Source(small_sets.examples(np.zeros(10)), np.arange(3, 13))
    defaults = {"seed": 4, "task": 2, "epochs": 3, "batch_size": 4}
    return stream.schedule(source, **defaults | options)


def test_schedule_is_random_access_over_seeded_epochs():
    made = plan()
    assert (len(made), made.steps_per_epoch) == (6, 2)
    want = []
    for epoch in range(3):
        rng = np.random.default_rng([4, 2, epoch])
        want += rng.permutation(np.arange(3, 13))[:8].reshape(2, 4).tolist()
    assert [made[step].tolist() for step in range(6)] == want
    again, jumps = plan(), (5, 0, 3, 1, 4, 2)
    assert [again[step].tolist() for step in jumps] == [want[step] for step in jumps]
    assert made[0].dtype == np.int32
    for step in (-1, 6):
        with pytest.raises(IndexError):
            made[step]


def test_first_tasks_may_have_epochs_of_their_own():
    lengths = [len(plan(epochs=(5, 1, 2), task=task)) for task in range(4)]
    assert lengths == [10, 2, 4, 4]
    assert (plan(epochs=(5, 3), task=1)[4] == plan(epochs=3, task=1)[4]).all()


def test_schedule_with_an_order_of_its_own():
    def pairs(rng, rows, batch_size):
        first = rng.permutation(rows)[: batch_size // 2]
        return np.stack([first, first + 100], 1).reshape(1, batch_size)

    source = stream.Source(small_sets.examples(np.zeros(10)), np.arange(10), pairs)
    made = stream.schedule(source, seed=0, task=0, epochs=2, batch_size=4)
    assert (made.steps_per_epoch, len(made)) == (1, 2)
    assert (made[1][1::2] - made[1][::2]).tolist() == [100, 100]

    def uneven(rng, rows, batch_size):
        return np.zeros((rng.integers(1, 100), batch_size))

    made = stream.schedule(
        source._replace(order=uneven), seed=0, task=0, epochs=9, batch_size=4
    )
    with pytest.raises(ValueError, match="order.*shape"):
        [made[step] for step in range(len(made))]


def test_growth_takes_its_share_and_rows_without_a_label_have_no_class():
    data = small_sets.dataset(small_sets.examples([0, -1, 1, 1] * 5))
    cut = scenarios.make(data, name="growth", growth=0.2, evaluation="none")
    old, new = cut.tasks
    assert (len(old.train.rows), len(new.train.rows)) == (16, 4)
    assert old.classes.tolist() == [0, 1]
    with pytest.raises(ValueError, match="growth=0.99"):  # of no old row
        scenarios.make(data, name="growth", growth=0.99, evaluation="none")


def test_options_that_cut_a_set_are_read():
    train = small_sets.examples(np.arange(60) % 5)
    train.images[:, 0, 0, 0] = np.arange(60)
    data, more = small_sets.dataset(train), {"evaluation": "none", "name": "joint"}
    few = [scenarios.make(data, per_class=3, seed=seed, **more) for seed in (1, 2)]
    one, two = (x.dataset.train.images[:, 0, 0, 0].tolist() for x in few)
    assert len(one) == len(two) == 15 and one != two
    train.label[:9] = -1  # which is no class, and not the last one
    kept = scenarios.make(data, classes=["c4", "c1"], **more).dataset.train
    want = [row for row in range(9, 60) if row % 5 in (1, 4)]
    assert kept.images[:, 0, 0, 0].tolist() == want
    uneven = {"rho_max": 0.5, "epoch_steps": 2}
    with pytest.raises(ValueError, match="epoch_steps=2.*copies=2"):
        scenarios.make(data, copies=2, imbalance=uneven, **more)
