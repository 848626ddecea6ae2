"""iCaRL: its steps against the equation, its teacher, the nearest class mean."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from helpers import interpreted, twins
from helpers import loss_twins as f64
from helpers import online_toy as toy
from jaxcl import core, sharding
from jaxcl.memory import sharded
from jaxcl.methods import icarl, online
from jaxcl.methods.online import means as means_lib

FIRST, SECOND, LATER = toy.FIRST, toy.SECOND, toy.batch(2, [3, 2, 3, 3, 2, 3])
NET, PLAIN = online.build_network(toy.parts(), "linear"), toy.parts().eval_transform
FEATURES = interpreted.jit(
    lambda params, stats, rows: NET(params, stats, PLAIN(rows), train=False)[0].features
)


bce = functools.partial(f64.icarl, summed=True)


def taught(state, images):
    teacher = state.extra.teacher
    return toy.answers(NET, teacher.params, teacher.stats, images)


def test_paper_has_the_teacher_for_old_classes_of_every_row():
    method = icarl.make(toy.parts())
    state = toy.second_task(method)
    told = [taught(state, rows["image"]) for rows in (LATER, FIRST)]

    def twin(*logits):
        triples = zip(logits, told, (LATER, FIRST), strict=True)
        seen = {"old": (0, 1), "classes": range(4)}
        return sum(bce(z, said, rows["label"], **seen) for z, said, rows in triples)

    images = LATER["image"], FIRST["image"]
    toy.check_step(method, NET, state, LATER, images, twin)


def test_code_has_labels_of_incoming_and_the_teacher_for_replayed_rows():
    method = icarl.make(toy.parts(), form="code", distill_weight=0.3)
    state = toy.second_task(method)
    told = taught(state, FIRST["image"])

    def twin(new, old):
        held = bce(old, told, FIRST["label"], old=range(5))
        return bce(new, new, LATER["label"]) + 0.3 * held

    images = LATER["image"], FIRST["image"]
    toy.check_step(method, NET, state, LATER, images, twin)


@pytest.mark.parametrize("form", ["paper", "code"])
def test_the_first_task_has_labels_alone_and_replays_nothing(form):
    method = icarl.make(toy.parts(), form=form)
    state, _ = toy.step(method, toy.begin(method, toy.fresh(method), 0), FIRST)
    assert int(state.extra.memory.filled.sum()) == 6
    classes = range(4 if form == "paper" else 5)

    def twin(new):
        return bce(new, new, SECOND["label"], classes=classes)

    toy.check_step(method, NET, state, SECOND, [SECOND["image"]], twin)


def test_the_teacher_is_the_network_at_the_begin_of_the_task_and_stays():
    method = icarl.make(toy.parts())
    state = toy.begin(method, toy.fresh(method), 0)
    assert not state.extra.teacher.exists
    state, _ = toy.step(method, state, FIRST)
    assert not state.extra.teacher.exists
    params, stats = jax.tree.map(np.array, (state.params, state.stats))
    state = toy.begin(method, state, 1)
    step = toy.compiled(method)[1]
    for rows in (SECOND, LATER):  # donated: a buffer held twice would be refused
        state, _ = step(state, rows)
    teacher = state.extra.teacher
    assert bool(teacher.exists)
    jax.tree.map(np.testing.assert_array_equal, teacher[:2], (params, stats))
    np.testing.assert_array_equal(state.extra.task_of, [0, 0, 1, 1, -1])
    np.testing.assert_array_equal(state.extra.seen, [True] * 4 + [False])
    for now, then in ((state.params, params), (state.stats, stats)):
        same = jax.tree.map(lambda a, b: bool((a == b).all()), now, then)
        assert not any(jax.tree.leaves(same))
    later = toy.begin(method, state, 2)
    jax.tree.map(np.testing.assert_array_equal, later.extra.teacher[0], later.params)


def nearest(state, images, form, mirror=False):
    """Minus the squared distances, item by item."""

    def features(rows):
        out = np.asarray(FEATURES(state.params, state.stats, rows), np.float64)
        return twins.unit(out) if form == "paper" else out

    memory, means = state.extra.memory, {}
    for c in range(toy.CLASSES):
        slots = np.flatnonzero(memory.filled & (memory.items["label"] == c))
        if len(slots):
            rows = features(memory.items["image"][slots])
            if mirror:
                turned = memory.items["image"][slots][:, :, ::-1]
                rows = np.concatenate([rows, features(turned)])
            means[c] = (
                twins.unit(rows.mean(axis=0)) if form == "paper" else rows.mean(axis=0)
            )
    queries = features(images)
    found = np.full((len(queries), toy.CLASSES), -np.inf)
    for c, mean in means.items():
        found[:, c] = -((queries - mean) ** 2).sum(axis=1)
    return found


def filled_state(method):
    """Classes 0 to 2 are stored, 1 in one slot; the last slot is free, with a label."""
    state = toy.shaken(toy.fresh(method))
    rows = toy.batch(5, [0, 2, 2, 0, 1, 2, 0, 0, 2, 2, 0, 4])
    items = {**state.extra.memory.items, **rows}
    filled = jnp.arange(12) < 11
    memory = state.extra.memory._replace(items=items, filled=filled)
    return state.replace(extra=state.extra._replace(memory=memory))


@pytest.mark.parametrize(
    ("form", "mirror", "chunk"),
    [("paper", False, 256), ("paper", True, 5), ("code", True, 5)],
)
def test_the_nearest_mean_wins(form, mirror, chunk, monkeypatch):
    monkeypatch.setattr(means_lib, "_CHUNK", chunk)
    method = icarl.make(toy.parts(), form=form, mirror=mirror)
    state = filled_state(method)
    images = LATER["image"]
    expected = nearest(state, images, form, mirror)
    assert np.isneginf(expected).all(axis=0).tolist() == [False] * 3 + [True] * 2
    ready = method.eval_state(state)
    queries = toy.parts().eval_transform(images)
    for judged in (ready, state):
        found = interpreted.jit(method.predict)(judged, queries)
        np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)
    # What is evaluated holds its means, what is trained holds none.
    assert state.extra.means is None
    order = jnp.array([1, 0, 2, 3, 4])
    moved = ready.extra.means._replace(rows=ready.extra.means.rows[order])
    moved = ready.replace(extra=ready.extra._replace(means=moved))
    swapped = interpreted.jit(method.predict)(moved, queries)
    np.testing.assert_allclose(swapped[:, :2], expected[:, 1::-1], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("where", ["whole", "split"])
def test_means_of_a_memory_on_four_devices_are_the_same(where):
    mesh, made = sharding.mesh(4), toy.parts()
    method = icarl.make(made)
    state = filled_state(method)
    expected = method.eval_state(state).extra.means
    state = sharding.replicate(core.copy(state).replace(key=None), mesh)
    if where == "split":
        made = made._replace(replay=made.replay._replace(sharded=True))
        place = NamedSharding(mesh, PartitionSpec(sharding.AXIS))
        memory = jax.device_put(state.extra.memory[:2], place)
        memory = sharded.Shards(*memory, jnp.zeros(4, jnp.int32))
        state = state.replace(extra=state.extra._replace(memory=memory))
    with sharding.use_mesh(mesh):
        found = icarl.make(made).eval_state(state).extra.means
    np.testing.assert_allclose(found.rows, expected.rows, rtol=1e-5, atol=1e-6)
    np.testing.assert_array_equal(found.exist, expected.exist)
