"""What a memory holds and how classes lie: by hand, in pictures, over a killed run."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from helpers import eval_toy
from jaxcl import sharding
from jaxcl.data import stream
from jaxcl.evals import memory, spread
from jaxcl.memory import buffer

CLASSES, DIM = eval_toy.CLASSES, eval_toy.DIM
# Of ten slots two are empty; of the eight rows two have no label that counts.
LABEL = np.array([2, 0, 0, -1, 5, 2, 0, 7, 0, 1], np.int32)
FILLED = np.array([1, 1, 1, 1, 1, 1, 0, 1, 1, 0], bool)


class State(NamedTuple):
    memory: buffer.Buffer


def state_of(label=LABEL, filled=FILLED):
    """Rows written one by one, as a method does, some slots left out."""
    example = {"index": np.zeros((), np.int32), "label": np.zeros((), np.int32)}
    made = buffer.create(example, len(label))
    # What an empty slot holds must not count.
    items = {"index": jnp.arange(len(label)), "label": jnp.asarray(label)}
    made = made._replace(items=jax.tree.map(jnp.int32, items))
    slots = jnp.asarray(np.flatnonzero(filled), jnp.int32)
    rows = jax.tree.map(lambda x: x[slots], made.items)
    return State(buffer.write(made, slots, rows))


def parts_of(scenario="joint", data=None, **more):
    more = {"memory": lambda state: state.memory} | more
    return eval_toy.parts_of(scenario, data, **more)


def of_stream(parts, task, order=stream.epoch_order):
    """Entropy of a task's first epoch in batches of 16, as a run of seed 3 draws it."""
    rows = parts.stream.tasks[task].train.rows
    drawn = order(np.random.default_rng([3, task, 0]), rows, min(16, len(rows)))
    label = eval_toy.dataset().train.label[drawn.reshape(-1)]
    return eval_toy.entropy(np.bincount(label, minlength=CLASSES))


@pytest.mark.parametrize("devices", [1, 2])
def test_shares_and_entropy_of_a_memory(devices):
    parts = parts_of(devices=devices)
    state = sharding.replicate(state_of(), parts.mesh)
    found = memory.make(parts)(state, 0)
    scalars = dict(found.scalars)
    assert found.rows == {}
    counts = [3, 0, 2, 0, 0, 1]
    want = {"rows": 8, "unlabelled": 2, "entropy": eval_toy.entropy(counts)}
    want |= {f"class_{c}": n / 6 for c, n in enumerate(counts)}
    want["stream_entropy"] = of_stream(parts, 0)
    assert scalars == {name: pytest.approx(x, rel=1e-5) for name, x in want.items()}


def dominated(rng, rows, batch_size):
    """Seven rows of ten are of class 3, as an endless stream may draw them."""
    label = eval_toy.dataset().train.label
    mine, others = rows[label[rows] == 3], rows[label[rows] != 3]
    steps = 40
    where = rng.random((steps, batch_size)) < 0.7
    drawn = rng.choice(others, (steps, batch_size))
    return np.where(where, rng.choice(mine, (steps, batch_size)), drawn)


def imbalanced(parts):
    tasks = [
        t._replace(train=t.train._replace(order=dominated)) for t in parts.stream.tasks
    ]
    return parts._replace(stream=parts.stream._replace(tasks=tuple(tasks)))


def test_the_stream_is_what_its_order_draws():
    parts = imbalanced(parts_of())
    found = memory.make(parts)(state_of(), 0).scalars["stream_entropy"]
    assert found == pytest.approx(of_stream(parts, 0, dominated), rel=1e-5)
    # Close to what 0.7 in one class has.
    assert found == pytest.approx(eval_toy.entropy([14] + 5 * [1.2]), abs=0.15)
    # A task may have fewer rows than such a batch.
    found = memory.make(parts_of("data", tasks=6))(state_of(), 1).scalars
    assert found["stream_entropy"] == pytest.approx(
        of_stream(parts_of("data", tasks=6), 1)
    )
    # Each task has its own, which is drawn once.
    parts, asked = parts_of("class"), []

    def order(rng, rows, batch_size):
        asked.append((len(rows), batch_size))
        return stream.epoch_order(rng, rows, batch_size)

    train = parts.stream.dataset.train
    label = np.where(train.label == 5, -1, train.label)
    label = np.where(label == 4, -1, label).astype(np.int32)
    blind = train._replace(label=label)
    tasks = [
        t._replace(train=t.train._replace(order=order, examples=blind))
        for t in parts.stream.tasks
    ]
    evaluate = memory.make(parts._replace(stream=parts.stream._replace(tasks=tasks)))
    for task in (0, 1, 1, 2, 0):
        scalars = evaluate(state_of(), task).scalars
        # The classes of the last task have no labels.
        want = None if task == 2 else of_stream(parts, task)
        assert scalars.get("stream_entropy") == (want and pytest.approx(want, rel=1e-6))
    assert asked == [(18, 16), (16, 16), (16, 16)]


@pytest.mark.parametrize("split, devices", [("evaluation", 2), ("train", 1)])
def test_spread_is_the_equations(split, devices):
    data = eval_toy.dataset()
    train, test = (
        s._replace(label=np.where(s.label == 4, 3, s.label).astype(np.int32))
        for s in (data.train, data.test)
    )  # no row of class 4
    parts = eval_toy.parts_of(
        "joint", data._replace(train=train, test=test), devices=devices
    )
    examples = {"train": train, "evaluation": test}[split]
    if split == "train":
        parts = parts._replace(stream=parts.stream._replace(evaluation=None))
    state = eval_toy.state_of(0)
    evaluate = spread.make(parts, split=split)
    result = evaluate(sharding.replicate(state, parts.mesh), 0)
    twins = eval_toy.spread_twins(
        eval_toy.embedded(state, examples.images), examples.label
    )
    assert set(twins) == {0, 1, 2, 3, 5}
    want = {}
    for c, (variance, similarity) in twins.items():
        want |= {f"intra_{c}": variance, f"inter_{c}": similarity}
    values = np.array([*twins.values()])
    want["intra_class_variance"], want["inter_class_similarity"] = values.mean(axis=0)
    scalars = dict(result.scalars)
    assert result.rows == {}
    assert scalars == {n: pytest.approx(x, rel=1e-4) for n, x in want.items()}
