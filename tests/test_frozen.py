"""Rules on frozen features against float64, and what their theory promises."""

import functools
import types

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from helpers import dense_net, frozen_twins, toy
from jaxcl import core
from jaxcl.data import stream
from jaxcl.memory import buffer
from jaxcl.methods import (
    acil,
    fecam,
    frozen,
    linear_head,
    ncm,
    ranpac,
    slda,
    stored_knn,
)
from jaxcl.run import train

DIM, CLASSES, COUNT = 6, 4, 90
KEY = jax.random.key(3)
RULES = {
    "ncm": ncm.make_rule("cosine"),
    "ncm-euclidean": ncm.make_rule("euclidean"),
    "slda": slda.make_rule(1e-2),
    "ranpac": ranpac.make_rule(24),
    "acil": acil.make_rule(24, 0.1),
    "fecam": fecam.make_rule(0.5, 2.0, 0.5, False),
    "fecam-shared": fecam.make_rule(0.5, 1.0, 1.0, True),
    "fecam-code": fecam.make_rule(0.5, 1.0, 1.0, False, "code"),
    "stored_knn": stored_knn.make_rule(CLASSES, 200, 5, 0.07),
    "linear_head": linear_head.make_rule(0, 2.0, 3),
}


TWINS = {
    "ncm": frozen_twins.ncm,
    "ncm-euclidean": frozen_twins.ncm_euclidean,
    "slda": frozen_twins.slda,
    "ranpac": frozen_twins.ranpac_scores,
    "acil": frozen_twins.acil,
    "fecam": functools.partial(frozen_twins.fecam, factors=(2.0, 0.5)),
    "fecam-shared": functools.partial(frozen_twins.fecam, shared=True),
    "fecam-code": functools.partial(frozen_twins.fecam, form="code"),
    "stored_knn": frozen_twins.stored_knn,
    "linear_head": frozen_twins.linear_head,
}


@pytest.fixture(scope="module")
def data():
    """Features and labels of three classes; of the fourth there is no row."""
    rng = np.random.default_rng(0)
    label = rng.integers(0, CLASSES - 1, COUNT)
    centres = rng.normal(size=(CLASSES, DIM))
    features = np.maximum(centres[label] + 0.4 * rng.normal(size=(COUNT, DIM)), 0)
    return features.astype(np.float32), label.astype(np.int32)


def learn(rule, features, label, order=None, batch=16):
    """What a rule knows after all rows, in batches of which the last is filled up."""
    order = np.arange(len(label)) if order is None else order
    state = rule.start(KEY, DIM, CLASSES)
    add = jax.jit(rule.add)
    for start in range(0, len(order), batch):
        index = np.full(batch, -1, np.int32)
        part = order[start : start + batch]
        index[: len(part)] = part
        mask = index >= 0
        rows = np.where(mask[:, None], features[index], 0)
        state = add(state, frozen.Rows(rows, label[index], index, mask))
    return state


def scores(rule, state, queries):
    return np.asarray(rule.scores(rule.fit(state), queries))


@pytest.mark.parametrize("name", RULES)
def test_scores_are_those_of_float64(name, data):
    features, label = data
    rule, queries = RULES[name], features[::7]
    state = learn(rule, features, label)
    found = scores(rule, state, queries)
    arrays = features.astype(float), label, queries.astype(float)
    want = TWINS[name](*arrays, state, CLASSES)
    assert (found[:, -1] == -np.inf).all()  # no row of the class was met
    np.testing.assert_allclose(found, want, rtol=2e-3, atol=2e-3)
    assert (found.argmax(1) == want.argmax(1)).all()


@pytest.mark.parametrize(("dim", "count"), [(12, 192), (768, 10_000)])
def test_ranpac_chooses_its_projections_by_the_width_of_the_features(dim, count):
    start = functools.partial(ranpac.make_rule(None).start, dim=dim, classes=CLASSES)
    assert jax.eval_shape(start, KEY).projection.shape == (dim, count)


@pytest.mark.parametrize("name", ["ncm", "ranpac", "acil", "fecam", "fecam-code"])
def test_the_order_of_the_rows_changes_nothing(name, data):
    features, label = data
    rule, by_class = RULES[name], np.argsort(label, kind="stable")
    states = [learn(rule, features, label, order) for order in (None, by_class)]
    states.append(learn(rule, features, label, by_class[::-1], batch=1))
    first, *others = (scores(rule, state, features) for state in states)
    for other in others:
        np.testing.assert_allclose(other, first, rtol=2e-3, atol=2e-3)


def test_a_step_of_the_linear_head_has_the_stored_rows_in_its_mean(data):
    """The memory is smaller than a batch, so that all of it is drawn, if it is full."""
    features, label = data
    rule, new = linear_head.make_rule(8, 2.0, 1), np.arange(32, 48)
    for count in (32, 3):
        old = np.arange(count)
        order = np.pad(old, (0, -count % 16), constant_values=-1)
        before = learn(rule, features, label, order)
        after = learn(rule, features, label, np.append(order, new))
        memory = before.memory
        kept = {name: x[memory.filled] for name, x in memory.items.items()}
        assert len(kept["label"]) == min(count, 8)
        assert int(after.memory.seen) == count + 16
        x = np.concatenate([features[new], kept["features"]]).astype(float)
        x = frozen_twins.standard(features[np.append(old, new)].astype(float), x)
        y = np.concatenate([label[new], kept["label"]])
        layer = [np.asarray(z, float) for z in before.layer]
        seen = np.asarray(after.counts) > 0
        want = frozen_twins.descend(layer, x, y, seen, 2.0, CLASSES)
        for found, value in zip(after.layer, want, strict=True):
            np.testing.assert_allclose(found, value, rtol=1e-4, atol=1e-6)


def test_empty_slots_do_not_vote():
    """Three rows of class 2 are stored, and the query is far from all of them."""
    rule = stored_knn.make_rule(CLASSES, 8, 5, 0.07)
    filled = np.arange(8) < 3
    items = {
        "features": np.float32(filled[:, None] * np.eye(DIM)[0]),
        "label": 2 * filled,
    }
    memory = buffer.Buffer(jax.tree.map(jnp.asarray, items), filled, 3)
    query = np.float32([[-0.5, 3**0.5 / 2, 0, 0, 0, 0]])
    found = np.asarray(jax.jit(rule.scores)(stored_knn.Stored(memory, None), query))[0]
    np.testing.assert_allclose(found[2], np.log(3) - 0.5 / 0.07, rtol=1e-5)
    assert (np.delete(found, 2) == -np.inf).all()


def test_every_row_of_a_task_counts_once():
    """The last batch has 2 of 50 rows; what fills it up, or has no label, is none."""
    images = np.random.default_rng(0).integers(0, 256, (50, 2, 2, 1)).astype(np.uint8)
    label = (np.arange(50) % CLASSES).astype(np.int32)
    label[7] = -1
    plain, blank = lambda x: x / 255.0, optax.identity()
    components = core.Parts(
        dense_net.Flat(3), plain, blank, plain, CLASSES, eval_transform=plain
    )
    rule = frozen.Rule(
        start=lambda key, dim, classes: (jnp.zeros(classes), 0.0, jnp.zeros(dim)),
        add=lambda state, rows: (
            state[0] + frozen.one_hot(rows, CLASSES).sum(0),
            state[1] + rows.mask.sum(),
            state[2] + rows.features.sum(0),
        ),
        scores=None,
    )
    method = frozen.make_method(components, rule)
    task = types.SimpleNamespace(train=stream.Source(None, np.arange(50)))
    order = stream.schedule(
        method.source(None, task), seed=0, task=0, epochs=1, batch_size=48
    )
    state, step = jax.jit(method.init)(KEY, {"image": images}), jax.jit(method.step)
    for number in range(len(order)):
        rows = order[number]
        batch = {"image": images[rows], "label": label[rows], "index": rows}
        state, _ = step(state, batch)
    counts, rows, total = state.extra.rule
    labelled = label >= 0
    np.testing.assert_array_equal(
        counts, np.bincount(label[labelled], minlength=CLASSES)
    )
    assert rows == 49
    features = np.asarray(method.embed(state, plain(images)))
    np.testing.assert_allclose(total, features[labelled].sum(0), rtol=1e-4)


def test_few_rows_of_large_features_give_finite_scores(data):
    """Fewer rows than features, and a covariance far above the shrinkage."""
    features, label = data
    large = np.tile(features[:8] * 300, 4)
    rule = slda.make_rule(1e-4)
    add = jax.jit(rule.add)
    state = rule.start(KEY, large.shape[1], CLASSES)
    rows = frozen.Rows(large, label[:8], np.arange(8), np.ones(8, bool))
    found = scores(rule, add(state, rows), large)
    known = np.unique(label[:8])
    assert np.isfinite(found[:, known]).all()
    assert (found.argmax(1) == label[:8]).mean() > 0.9


@pytest.mark.parametrize("length", [1.0, 1e8])
def test_a_ridge_that_float32_cannot_factor_is_not_chosen(length):
    """Two features alike: without a ridge there is no inverse."""
    hidden = np.full((10, 2), length, np.float32)
    grams = ranpac.Grams(
        projection=jnp.eye(2),
        inputs=jnp.stack([hidden.T @ hidden] * 2),
        targets=jnp.ones((2, 2, 1)) * 10 * length,
        counts=jnp.full((2, 1), 10),
    )
    ridge = ranpac.choose_ridge(grams)
    weights = ranpac.solve_ridge(grams.inputs[0], grams.targets[0], ridge)
    np.testing.assert_allclose(hidden @ np.asarray(weights), 1, rtol=1e-3)


@pytest.mark.parametrize("held_out", [True, False])
def test_without_rows_to_choose_by_the_ridge_is_the_middle_one(data, held_out):
    features, label = data
    rule = RULES["ranpac"]
    rows = np.flatnonzero(np.asarray(ranpac.held_out(np.arange(COUNT))) == held_out)
    grams = learn(rule, features, label, rows)
    least = np.finfo(np.float32).eps * np.trace(np.asarray(grams.inputs.sum(0)))
    want = np.sqrt(max(least, ranpac.RIDGES[0]) * ranpac.RIDGES[-1])
    np.testing.assert_allclose(ranpac.choose_ridge(grams), want, rtol=1e-5)


def test_a_stream_by_classes_ends_as_all_classes_at_once(tmp_path):
    """Every row is met, the last incomplete batch too, and nothing is forgotten."""
    changes = {key: x for key, x in toy.ONLINE.items() if key != "replay"} | {
        "method": {"name": "ranpac", "projections": 64},
        "epochs": 1,
        "evaluators": {"predict": {}},
    }
    found = {}
    for scenario in ({"name": "class", "num_tasks": 3}, {"name": "joint"}):
        workdir = tmp_path / scenario["name"]
        work = toy.job(workdir, **changes | {"scenario": scenario})
        results = train.run_tasks(work, workdir)
        matrix = results["matrices"]["predict/class_incremental"]
        found[scenario["name"]] = np.array(matrix, float)
    by_class, joint = found["class"][-1].mean(), found["joint"][-1].mean()
    assert abs(by_class - joint) < 0.02  # tasks have as many test images, to a few
    assert by_class > 0.5  # a random network's features, chance 0.1


def test_shrinkage_that_may_leave_no_covariance_is_refused():
    with pytest.raises(ValueError, match="config.method.off_diagonal=2"):
        fecam.make(None, diagonal=1.0, off_diagonal=2.0)
