"""What CCLIS and Co2L share: batches, the memory's life, the teacher, the network."""

import functools
import itertools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from helpers import eval_toy
from helpers import loss_twins as f64
from helpers import rehearsal_toy as toy
from jaxcl.data import stream
from jaxcl.methods import cclis, co2l, rehearsal

LABEL = toy.EXAMPLES.label
MADE = {
    "cclis": functools.partial(cclis.make, toy.parts()),
    "uniform": functools.partial(cclis.make, toy.parts(), keep="uniform"),
    "co2l": functools.partial(co2l.make, toy.parts(2)),
}


@functools.cache
def make(name, memory_size=12, **options):
    return MADE[name](memory_size=memory_size, **toy.WIDTHS, **options)


def mixed(fresh, stored, share=None):
    """A source whose stored rows are those from 100,000 on."""
    train = stream.Source(toy.EXAMPLES, np.arange(fresh, dtype=np.int32))
    stored = np.arange(100_000, 100_000 + stored, dtype=np.int32)
    return rehearsal.stratified(train, stored, share=share)


def split(epoch):
    """The stored rows of each batch, and the others, in the order of the epoch."""
    return [x[x >= 100_000] for x in epoch], [x[x < 100_000] for x in epoch]


@pytest.mark.parametrize(
    ("fresh", "stored", "batch_size", "share", "old", "steps"),
    [
        (10_000, 200, 512, None, 10, 19),
        (10_000, 500, 512, None, 24, 20),
        (10_000, 200, 512, 0.5, 256, 39),
        (60, 7, 10, 0.25, 2, 7),
        (60, 7, 10, 0.5, 5, 12),
        (60, 3, 10, 0.7, 7, 20),
        (60, 1, 6, 0.5, 3, 20),
        # Rounded to none, and to all, of a batch.
        (60, 7, 10, 0.01, 1, 6),
        (60, 7, 10, 0.99, 9, 60),
        (900, 2, 10, None, 1, 100),
        (3, 200, 10, None, 9, 3),
        (20, 8, 20, None, 6, 1),
        (4, 2, 2, None, 1, 4),
        (6, 2, 1, None, 0, 6),
    ],
)
def test_every_batch_has_its_share_of_stored_rows(
    fresh, stored, batch_size, share, old, steps
):
    source = mixed(fresh, stored, share)
    epoch = source.order(np.random.default_rng(0), source.rows, batch_size)
    assert epoch.shape == (steps, batch_size)
    again, new = split(epoch)
    assert {len(x) for x in again} == {old}
    new, again = np.concatenate(new), np.concatenate(again)
    # Rows of the task at most once, and none left that would fill a batch.
    assert len(np.unique(new)) == len(new) and fresh - len(new) < batch_size - old
    # Pass after pass, each with every row once, and in another order.
    whole = [again[i : i + stored] for i in range(0, len(again), stored)]
    assert all(len(np.unique(x)) == len(x) for x in whole)
    assert again.size == 0 or again.max() < 100_000 + stored
    if stored > 3 and len(whole) > 2:
        assert any((a != b).any() for a, b in itertools.pairwise(whole[:-1]))


def test_together_is_one_shuffle_of_all():
    train = stream.Source(toy.EXAMPLES, np.arange(41, dtype=np.int32))
    stored = np.arange(100_000, 100_009, dtype=np.int32)
    source = rehearsal.mix_rows(train, stored)
    assert source.examples is toy.EXAMPLES and source.order is stream.epoch_order
    assert sorted(source.rows) == [*range(41), *stored]
    plan = stream.schedule(source, seed=3, task=1, epochs=2, batch_size=10)
    assert len(plan) == 10
    epoch = np.stack([plan[i] for i in range(5)])
    assert sorted(epoch.ravel()) == [*range(41), *stored]
    assert len({len(x) for x in split(epoch)[0]}) > 1


def test_weights_of_stored_rows_and_of_others():
    state = toy.fresh(make("cclis"))
    memory = rehearsal.Memory(
        jnp.array([5, 40, 11, -1, -1]),
        jnp.array([0, 1, 1, -1, -1]),
        jnp.array([0.25, 0.0, 0.5, 0.75, 0.125]),
    )
    count = jnp.array([0, 4, 0, 10, 0, 0, 0])
    extra = state.extra._replace(memory=memory, count=count)
    batch = {
        "index": jnp.array([11, 3, 5, 7, 40, 5, 9, 0]),
        "label": jnp.array([1, 1, 0, 3, 1, 0, 6, 3]),
    }
    found = jax.jit(rehearsal.weights)(extra, batch)
    # Of a class that the task lacks, a row outside of the memory counts 1.
    np.testing.assert_allclose(found, [0.5, 1 / 4, 0.25, 0.1, 0, 0.25, 1, 0.1])


def rows_of(memory):
    return np.asarray(memory.row)[np.asarray(memory.row) >= 0]


def check_memory(memory, pool, size, uniform):
    """Rows of the pool, those that exist first, with their labels."""
    row, label, weight = map(np.asarray, memory)
    assert (row.dtype, label.dtype, weight.dtype) == (np.int32, np.int32, np.float32)
    assert row.shape == label.shape == weight.shape == (size,)
    there = min(size, len(pool))
    assert set(row[:there]) <= set(pool) and len(set(row[:there])) == there
    np.testing.assert_array_equal(label[:there], LABEL[row[:there]])
    assert (row[there:] == -1).all() and (label[there:] == -1).all()
    assert not weight[there:].any()
    assert (weight[:there] > 0).all()
    for c in range(6):
        assert weight[label == c].sum() < 1 + 1e-5
        if uniform:  # one over the rows of the class that it was drawn from
            chance = 1 / max(np.sum(LABEL[pool] == c), 1)
            np.testing.assert_allclose(weight[label == c], chance, rtol=1e-6)


# Rows of each class after each task, of memories of 12 and of 60 rows.
KEPT = {12: ([6, 6], [3] * 4, [2] * 6), 60: [toy.COUNTS[:n] for n in (2, 4, 6)]}


@pytest.mark.parametrize(
    ("name", "size"), [("cclis", 12), ("uniform", 12), ("co2l", 12), ("cclis", 60)]
)
def test_three_tasks(name, size):
    """What a task replays, what it keeps, and what it tells its teacher."""
    method = make(name, size)
    state, before = toy.fresh(method), np.zeros(0, np.int32)
    for task, kept in zip(toy.TASKS, KEPT[size], strict=True):
        source = method.source(state, task)
        assert source.examples is toy.EXAMPLES
        assert sorted(source.rows) == sorted([*before, *task.train.rows])
        if task.index == 0:
            assert source is task.train
        end = state
        state = toy.begin(method, state, task)
        extra, met = state.extra, task.classes[-1] + 1
        np.testing.assert_array_equal(extra.seen, np.arange(7) < met)
        np.testing.assert_array_equal(extra.current, np.isin(range(7), task.classes))
        count = np.bincount(LABEL[task.train.rows], minlength=7)
        np.testing.assert_array_equal(extra.count, count)
        old = np.arange(7) < task.classes[0]
        np.testing.assert_array_equal(extra.old, old)
        np.testing.assert_array_equal(extra.taught, old)
        chex.assert_trees_all_equal(extra.replayed, extra.memory, end.extra.memory)
        chex.assert_trees_all_equal(extra.teacher, end.params)
        chex.assert_trees_all_equal(extra.teacher_stats, end.stats)
        # A buffer held twice could not be donated.
        plan = stream.schedule(source, seed=0, task=task.index, epochs=1, batch_size=8)
        state, metrics = toy.compiled(method)[1](state, toy.batch(plan[0]))
        assert all(np.isfinite(x) for x in metrics.values())
        state = toy.shaken(state, seed=task.index)
        resumed = method.source(state, task)
        np.testing.assert_array_equal(resumed.rows, source.rows)
        again = stream.schedule(
            resumed, seed=0, task=task.index, epochs=1, batch_size=8
        )
        np.testing.assert_array_equal(again[1], plan[1])
        ended = method.end_task(state, task)
        memory = ended.extra.memory
        pool = np.concatenate([before, task.train.rows])
        check_memory(memory, pool, size, name != "cclis")
        np.testing.assert_array_equal(np.bincount(LABEL[rows_of(memory)]), kept)
        # Nothing else has moved; what was replayed is still told.
        replayed = np.asarray(method.replayed(ended))
        assert sorted(replayed[replayed >= 0]) == sorted(before)
        chex.assert_trees_all_equal(
            ended.replace(extra=ended.extra._replace(memory=state.extra.memory)), state
        )
        state, before = ended, rows_of(memory)
    if size == 60 and name == "cclis":  # all rows are there, and so are all weights
        sums = np.bincount(LABEL[before], np.asarray(memory.weight)[: len(before)])
        np.testing.assert_allclose(sums, 1, rtol=1e-5)


def test_a_class_of_both_the_memory_and_the_task_is_one_pool():
    method = make("cclis", 60)
    stored = np.concatenate([toy.rows_of(c)[:3] for c in range(4)])
    train = stream.Source(toy.EXAMPLES, np.setdiff1d(toy.rows_of(1, 4, 5), stored))
    task = toy.TASKS[2]._replace(train=train)
    state = toy.in_task(method, stored, task=task)
    np.testing.assert_array_equal(state.extra.current, [0, 1, 0, 0, 1, 1, 0])
    np.testing.assert_array_equal(state.extra.old, [1, 0, 1, 1, 0, 0, 0])
    memory = method.end_task(state, task).extra.memory
    there = rows_of(memory)
    np.testing.assert_array_equal(np.bincount(LABEL[there]), [3, 9, 3, 3, 8, 7])
    sums = np.bincount(LABEL[there], np.asarray(memory.weight)[: len(there)])
    np.testing.assert_allclose(sums, 1, rtol=1e-5)


def proposal(state, rows, temperature, leftover=False, passes=5):
    """Eq. 11-12 of all rows, each divided by its class's sum; row -> g."""
    net = rehearsal.build_network(toy.parts(), prototypes=True, **toy.WIDTHS)
    images = toy.parts().eval_transform(toy.EXAMPLES.images[rows])[:, :, ::-1]
    z, _ = net(state.params, state.stats, images, train=False)
    z, c = (np.asarray(x, np.float64) for x in (z, state.params["prototypes"]))
    every, seen = range(len(rows)), np.flatnonzero(state.extra.seen)
    g, left = f64.proposal(c @ z.T / temperature, LABEL[rows], seen, every)
    g = f64.shares_by_class(g + left / passes * leftover, LABEL[rows], every)
    return dict(zip(rows.tolist(), g, strict=True))


@pytest.mark.parametrize(
    ("size", "options"), [(60, {}), (13, {"leftover": True, "temperature": 0.2})]
)
def test_weights_are_those_of_the_proposal(size, options):
    """Of the memory and the task, at the end of the first and of the third."""
    method = make("cclis", size, **options)
    options = {"temperature": 0.5} | options
    stored = np.concatenate([toy.rows_of(c)[1:4] for c in range(4)])
    first = toy.begin(method, toy.shaken(toy.fresh(method)), toy.TASKS[0])
    later = toy.in_task(method, stored, np.full(12, 0.3))
    for state, task, held in (
        (first, toy.TASKS[0], stored[:0]),
        (later, toy.TASKS[2], stored),
    ):
        rows = np.concatenate([held, task.train.rows])
        expected = proposal(state, rows, **options)
        memory = method.end_task(state, task).extra.memory
        there = rows_of(memory)
        assert len(there) == min(size, len(rows))
        weight = np.asarray(memory.weight)[: len(there)]
        np.testing.assert_allclose(weight, [expected[r] for r in there], rtol=1e-4)
        uniform = 1 / np.bincount(LABEL[rows])[LABEL[there]]
        assert np.abs(weight / uniform - 1).max() > 0.1


def test_only_scores_need_all_images():
    without = eval_toy.streamed(toy.EXAMPLES)
    task = toy.TASKS[0]
    task = task._replace(train=task.train._replace(examples=without))
    method = make("cclis")
    with pytest.raises(ValueError, match=r"config\.data"):  # before it is trained
        method.begin_task(toy.fresh(method), task)
    for name in ("uniform", "co2l"):
        method = make(name)
        state = toy.begin(method, toy.fresh(method), task)
        assert len(rows_of(method.end_task(state, task).extra.memory)) == 12


def test_the_network():
    """Unit rows; features of the encoder; prototypes as PyTorch's linear layer."""
    net = rehearsal.build_network(
        toy.parts(), hidden_dim=8, output_dim=400, prototypes=True
    )
    images = toy.parts().eval_transform(toy.EXAMPLES.images[:5])
    params, stats = net.init(jax.random.key(0), images)
    assert set(params) == {"encoder", "projector", "prototypes"}
    assert params["prototypes"].shape == (7, 400)
    spread = np.abs(params["prototypes"])
    assert spread.max() <= 0.05 and spread.max() > 0.0495
    np.testing.assert_allclose(spread.mean(), 0.025, rtol=0.05)
    other, _ = net.init(jax.random.key(1), images)
    assert (other["prototypes"] != params["prototypes"]).all()
    z, _ = net(params, stats, images, train=False)
    state = toy.fresh(make("cclis")).replace(params=params, stats=stats)
    features = net.nets.embed(state, images)
    assert features.shape == (5, 4)
    first, last = params["projector"]["linear1"], params["projector"]["linear2"]
    hidden = np.maximum(features @ first["kernel"] + first["bias"], 0)
    expected = hidden @ last["kernel"] + last["bias"]
    expected /= np.sqrt((expected**2).sum(axis=1, keepdims=True))
    np.testing.assert_allclose(z, expected, rtol=1e-3, atol=1e-5)
    plain = net._replace(prototypes=False).init(jax.random.key(0), images)[0]
    assert set(plain) == {"encoder", "projector"}
