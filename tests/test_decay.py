"""What a network loses, without labels: by loops, at known points, on a toy."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from helpers import eval_toy
from jaxcl.evals import decay
from jaxcl.evals import features as features_lib
from jaxcl.memory import buffer


def rows_of(seed, count=13, dim=4):
    return decay.unit(np.random.default_rng(seed).normal(size=(count, dim)))


def cosine(a, b):
    return sum(x * y for x, y in zip(a, b, strict=True))


def retrieved_twin(first, second):
    found = 0
    for i, row in enumerate(first):
        others = [cosine(row, other) for other in second]
        found += others.index(max(others)) == i
    return found / len(first)


def clusters_twin(first, second, centres):
    one, other = (
        [max(range(len(centres)), key=lambda c: cosine(row, centres[c])) for row in x]
        for x in (first, second)
    )
    count = len(first)
    together = sum(a == b for a, b in zip(one, other, strict=True)) / count
    chance = sum(a == b for a in one for b in other) / count**2
    return max((together - chance) / (1 - chance), 0)


def test_measures_are_those_of_loops():
    first = rows_of(0)
    second = decay.unit(first + 0.3 * rows_of(1))
    apart = [1 - cosine(a, b) for a, b in zip(first, second, strict=True)]
    assert decay.deviation(first, second) == pytest.approx(np.mean(apart))
    pairs = [max(0, cosine(a, b)) for i, a in enumerate(first) for b in first[i + 1 :]]
    assert decay.overlap(first) == pytest.approx(np.mean(pairs))
    pairs = [max(0, cosine(a, b)) for a in first for b in second[:5]]
    assert decay.overlap(first, second[:5]) == pytest.approx(np.mean(pairs))
    found = decay.retrieved(first, second)
    assert 0 < found < 1 and found == retrieved_twin(first, second)
    centres = decay.centres_of(first, 4, np.random.default_rng(2))
    got = decay.clusters(first, second, 4, np.random.default_rng(2))
    assert 0 < got < 1 and got == pytest.approx(clusters_twin(first, second, centres))


def test_measures_at_known_points():
    axes = np.eye(3)
    assert decay.deviation(axes, axes) == 0 and decay.deviation(axes, -axes) == 2
    assert decay.overlap(axes) == decay.overlap(axes, -axes) == 0
    assert decay.overlap(axes[[0, 0]]) == 1
    turned = axes[[1, 2, 0]]
    assert decay.retrieved(axes, axes) == 1 and decay.retrieved(axes, turned) == 0
    rng = functools.partial(np.random.default_rng, 0)
    assert decay.clusters(axes, axes, 3, rng()) == 1
    assert decay.clusters(axes, turned, 3, rng()) == 0  # below what chance would give
    # All features one: nothing is told apart, though all views fall together.
    one = np.tile(axes[:1], (8, 1))
    assert decay.clusters(one, one, 3, rng()) == 0
    assert decay.retrieved(one, one) == 1 / 8


def memory_of(images, filled):
    slots = jnp.asarray(np.flatnonzero(filled), jnp.int32)
    made = buffer.create({"image": images[0]}, len(filled))
    return buffer.write(made, slots, {"image": jnp.asarray(images[: len(slots)])})


@pytest.mark.parametrize("devices", [1, 2])
def test_the_evaluator_measures_tasks_apart_and_those_met(devices):
    data, state = eval_toy.dataset(), eval_toy.state_of(1)
    filled = np.array([1, 0, 1, 1, 1, 0, 1, 1], bool)
    memory = memory_of(data.train.images, filled)
    plain = eval_toy.parts_of(devices=devices)
    parts = plain._replace(memory=lambda state: memory)
    found = decay.make(parts, max_rows=12, count=2)(state, 1)
    chosen = [
        task.test[np.linspace(0, len(task.test) - 1, 4).astype(int)]
        for task in parts.stream.tasks
    ]
    embed = features_lib.two_views(plain)
    images = parts.stream.evaluation.images[np.concatenate(chosen)]
    views = [decay.unit(x).reshape(3, 4, -1) for x in embed(state, images)]
    for task, (first, second) in enumerate(zip(*views, strict=True)):
        assert found.rows["retrieved"][task] == retrieved_twin(first, second)
        centres = decay.centres_of(first, 2, np.random.default_rng(parts.seed))
        twin = clusters_twin(first, second, centres)
        assert found.rows["clusters"][task] == pytest.approx(twin)
    first, second = (view[:2].reshape(8, -1) for view in views)  # of the tasks met
    stored = embed(state, data.train.images[:6])
    one, other = (decay.unit(view) for view in stored)
    want = {
        "deviation": decay.deviation(first, second),
        "overlap": decay.overlap(first),
        "stored_deviation": decay.deviation(one, other),
        "stored_overlap": decay.overlap(first, one),
    }
    assert found.warnings == ()
    assert found.scalars == {
        name: pytest.approx(x, rel=1e-5) for name, x in want.items()
    }
    bare = decay.make(plain, max_rows=12, count=2)(state, 1).scalars
    assert {*bare} == {"deviation", "overlap"}


def test_labels_change_nothing_and_the_projection_may_be_read():
    data, state = eval_toy.dataset(), eval_toy.state_of(1)
    parts = eval_toy.parts_of("data", data, tasks=2)
    test = data.test._replace(label=np.full_like(data.test.label, -1))
    blind = parts._replace(stream=parts.stream._replace(evaluation=test))
    told, silent = (decay.make(x)(state, 1) for x in (parts, blind))
    jax.tree.map(np.testing.assert_array_equal, told.rows, silent.rows)
    assert told.scalars["overlap"] == silent.scalars["overlap"]
    flat = parts._replace(project=lambda state, x: eval_toy.embed(state, x)[:, :1])
    flat = decay.make(flat, features="projection")(state, 1)
    assert flat.rows["retrieved"].max() < 0.3  # on a line
    with pytest.raises(ValueError, match="features='projection'"):
        decay.make(parts, features="projection")
