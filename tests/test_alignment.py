"""Alignment of a memory with held-out rows, against loops over all pairs."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from helpers import eval_toy, toy
from jaxcl import sharding
from jaxcl.evals import alignment
from jaxcl.memory import buffer
from jaxcl.run import train

CAPACITY = 13


class State(NamedTuple):
    params: dict
    memory: buffer.Buffer


def state_of(seed=0):
    """A memory of rows of tasks 0 and 2; its last slots are empty."""
    rng = np.random.default_rng(seed)
    images = rng.integers(0, 256, (CAPACITY, 4, 4, 3)).astype(np.uint8)
    label = np.array([0, 1, 4, 5, 0, 0, 1, 4, 5, 1, 0, 2, 3], np.int32)
    items = {"image": images, "label": label, "task": label // 2}
    filled = np.arange(CAPACITY) < 11
    memory = jax.tree.map(jnp.asarray, buffer.Buffer(items, filled, 11))
    return State(eval_toy.state_of(seed).params, memory)


def parts_of(data=None, **more):
    return eval_toy.parts_of(data=data, memory=lambda state: state.memory, **more)


def twin(state, held):
    """task -> the largest cosines of its stored rows, in float64."""
    found = {}
    items = jax.tree.map(np.asarray, state.memory.items)
    stored = eval_toy.embedded(state, items["image"])
    others = eval_toy.embedded(state, held.images)
    for i in range(11):
        cosines = [
            stored[i] @ other / np.linalg.norm(stored[i]) / np.linalg.norm(other)
            for other, label in zip(others, held.label, strict=True)
            if label == items["label"][i]
        ]
        if cosines:
            found.setdefault(int(items["task"][i]), []).append(max(cosines))
    return found


def check(scalars, twins):
    want = {f"task_{t + 1}": np.mean(values) for t, values in twins.items()}
    want["mean"] = np.mean(sum(twins.values(), []))
    assert set(scalars) == set(want)
    for name, value in want.items():
        np.testing.assert_allclose(scalars[name], value, atol=1e-5)


@pytest.mark.parametrize(
    "devices, options",
    [(1, {}), (1, {"batch_size": 5}), (8, {"batch_size": 1}), (3, {"batch_size": 6})],
)
def test_alignment_is_the_nearest_row_of_the_class(devices, options):
    parts, state = parts_of(devices=devices), state_of()
    placed = sharding.replicate(state, parts.mesh)
    result = alignment.make(parts, **options)(placed, 1)
    twins = twin(state, parts.stream.evaluation)
    assert result.rows == {} and set(twins) == {0, 2}
    assert [len(v) for v in twins.values()] == [7, 4]
    check(dict(result.scalars), twins)


def test_validation_rows_come_first_and_a_class_may_have_none():
    data, state = eval_toy.dataset(), state_of()
    few = eval_toy.split_of(7, 40)
    keep = np.flatnonzero(~np.isin(few.label, [1, 4, 5]))
    few = few._replace(
        label=few.label[keep], domain=few.domain[keep], images=few.images[keep]
    )
    parts = parts_of(data._replace(validation=few))
    twins = twin(state, few)
    assert set(twins) == {0} and len(twins[0]) == 4
    check(dict(alignment.make(parts)(state, 0).scalars), twins)
    # Without an evaluation split the validation rows will do.
    none = parts._replace(stream=parts.stream._replace(evaluation=None))
    evaluate = alignment.make(none)
    check(dict(evaluate(state, 0).scalars), twins)
    wild = state._replace(params=jax.tree.map(lambda x: x * np.nan, state.params))
    assert np.isnan(evaluate(wild, 0).scalars["mean"])  # and not left out


def test_a_run_aligns_the_memory_of_its_method(tmp_path):
    """Two tasks of ER, judged before and after each."""
    changes = {"evaluators": {"alignment": {}}, "evaluate_untrained": True}
    changes |= {"method": {"name": "er"}, "epochs": 1}
    work = toy.job(tmp_path, tasks=2, **toy.ONLINE | changes)
    results = train.run_tasks(work, tmp_path)
    first, second = results["scalars"][:2]
    assert set(first) == {"alignment/task_1", "alignment/mean"}
    assert set(second) == {f"alignment/{x}" for x in ("task_1", "task_2", "mean")}
    assert results["matrices"] == {}
    state = toy.saved(work, tmp_path).state
    memory = jax.device_get(state.extra.memory)
    held = work.stream.evaluation

    def embed(images):
        pixels = (images.astype(np.float32) / 255 - 0.3) / 0.4
        x = np.asarray(work.method.embed(state, pixels), np.float64)
        return x / np.linalg.norm(x, axis=1, keepdims=True)

    cosines = embed(memory.items["image"]) @ embed(held.images).T
    cosines[memory.items["label"][:, None] != held.label] = -2
    best, task = cosines.max(axis=1), memory.items["task"]
    assert memory.filled.all() and {*task} == {0, 1}
    for t in range(2):
        value = second[f"alignment/task_{t + 1}"]
        np.testing.assert_allclose(value, best[task == t].mean(), atol=1e-5)
