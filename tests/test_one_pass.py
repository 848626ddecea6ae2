"""Streams that are met once: blurry ones, ones that recur, copies in a row."""

import numpy as np
import pytest

from jaxcl.data import stream
from jaxcl.data.sources import toys
from jaxcl.data.stream import one_pass, scenarios

LABEL = np.arange(600, dtype=np.int32) % 6


def test_weights_are_those_of_the_schedule():
    """By hand, for C = 10 classes in 1,000 steps and s = 50."""
    centres = np.arange(50, 1000, 100)
    got = one_pass.weights(100, centres, 50)
    np.testing.assert_allclose(got[:3], [0.495461134, 0.495461134, 0.009074687], 1e-7)
    got = one_pass.weights(50, centres, 50)
    np.testing.assert_allclose(got[:2], [0.880536890, 0.119167709], 1e-7)
    every = np.sum([one_pass.weights(t, centres, 50) for t in range(1000)], axis=0)
    assert every.sum() == pytest.approx(1000)
    assert 98.5 < every.min() and every.max() < 101.01


@pytest.mark.parametrize("blur", [1e-3, 0.5, 1e3])
def test_a_blurry_stream_has_each_row_once(blur):
    order, rng = np.array([3, 0, 5, 1, 4, 2]), np.random.default_rng(0)
    rows = one_pass.blurry(LABEL, order, blur=blur, rng=rng)
    np.testing.assert_array_equal(np.sort(rows), np.arange(600))
    label = LABEL[rows]
    if blur == 1e-3:  # one class after another, shuffled within
        np.testing.assert_array_equal(label, np.repeat(order, 100))
        assert np.any(np.diff(rows[:100]) < 0)
        uneven = np.repeat([0, 1, 2], [300, 100, 200])
        rows = one_pass.blurry(uneven, np.arange(3), blur=blur, rng=rng)
        np.testing.assert_array_equal(uneven[rows], uneven)
    # Mean places of the classes, in the order of the stream.
    places = [np.flatnonzero(label == c).mean() for c in order]
    if blur < 1:
        np.testing.assert_allclose(places, np.arange(50, 600, 100), atol=25)
    else:
        np.testing.assert_allclose(places, 300, atol=60)
    if blur == 0.5:  # at the edge of two classes each is as likely
        edges = np.concatenate([label[k - 20 : k + 20] for k in range(100, 600, 100)])
        inside = np.mean([np.sum(edges == c) for c in order[1:-1]])
        assert 50 * 0.5 < inside < 50 * 1.5


def test_recurring_tasks_share_out_each_class():
    tasks = np.array_split(np.array([4, 2, 0, 1, 5, 3]), 3)
    parts = one_pass.recurring(
        LABEL, tasks, recurrence=0.5, rng=np.random.default_rng(1)
    )
    np.testing.assert_array_equal(np.sort(np.concatenate(parts)), np.arange(600))
    for c in range(6):
        counts = np.array([np.sum(LABEL[rows] == c) for rows in parts])
        first = next(i for i, new in enumerate(tasks) if c in new)
        visits = counts[counts > 0]
        assert counts[first] > 0 and not counts[:first].any()
        assert visits.max() - visits.min() <= 1
    came_back = sum(len(np.unique(LABEL[rows])) for rows in parts) - 6
    assert 0 < came_back < 2 + 4


@pytest.mark.parametrize("recurrence, classes", [(0.0, [2, 2, 2]), (1.0, [2, 4, 6])])
def test_recurrence_at_its_ends(recurrence, classes):
    tasks = np.array_split(np.arange(6), 3)
    rng = np.random.default_rng(0)
    parts = one_pass.recurring(LABEL, tasks, recurrence=recurrence, rng=rng)
    assert [len(np.unique(LABEL[rows])) for rows in parts] == classes


def made(name, **options):
    return scenarios.make(toys.digits(), name=name, **options)


def test_a_blurry_scenario_is_one_sequence_in_slices():
    options = {"class_order": "shuffled", "seed": 3}
    (whole,) = made("blurry", **options).tasks
    slices = made("blurry", num_tasks=4, **options).tasks
    np.testing.assert_array_equal(
        np.concatenate([task.train.rows for task in slices]), whole.train.rows
    )
    assert sorted(whole.train.rows) == list(range(1438))
    assert all(len(task.test) == 359 for task in slices)  # judged on all
    plan = stream.schedule(slices[1].train, seed=5, task=1, epochs=1, batch_size=10)
    met = np.concatenate([plan[step] for step in range(len(plan))])
    np.testing.assert_array_equal(met, slices[1].train.rows[: len(met)])
    (other,) = made("blurry", **(options | {"seed": 4})).tasks
    assert not np.array_equal(other.train.rows, whole.train.rows)


def test_a_recurring_scenario_without_recurrence_is_that_of_classes():
    options = {"num_tasks": 5, "class_order": "shuffled", "seed": 2}
    plain = made("class", **options).tasks
    for one, other in zip(
        plain, made("recurring", recurrence=0.0, **options).tasks, strict=True
    ):
        np.testing.assert_array_equal(one.train.rows, other.train.rows)
        np.testing.assert_array_equal(one.test, other.test)
    last = made("recurring", recurrence=1.0, **options).tasks[-1]
    np.testing.assert_array_equal(last.classes, np.arange(10))
    np.testing.assert_array_equal(last.test, plain[-1].test)  # of its new classes


@pytest.mark.parametrize("name", ["class", "blurry", "recurring"])
def test_copies_follow_one_another(name):
    task = made(name, num_tasks=2, copies=3).tasks[1]
    plan = stream.schedule(task.train, seed=0, task=1, epochs=1, batch_size=10)
    met = np.concatenate([plan[step] for step in range(len(plan))])
    assert len(met) == 3 * len(task.train.rows) // 10 * 10
    full = met[: len(met) // 3 * 3].reshape(-1, 3)
    assert np.all(full == full[:, :1])
    assert len(np.unique(full[:, 0])) == len(full)
