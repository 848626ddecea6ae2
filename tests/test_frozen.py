"""Rules on frozen features against float64, and what their theory promises."""

import types

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from helpers import dense_net, toy, twins
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
    "fecam": fecam.make_rule(0.5, 1.0, 1.0, False),
    "fecam-shared": fecam.make_rule(0.5, 1.0, 1.0, True),
    "stored_knn": stored_knn.make_rule(CLASSES, 200, 5, 0.07),
    "linear_head": linear_head.make_rule(0, 2.0, 3),
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


def class_means(x, y):
    return np.stack([x[y == c].mean(0) for c in range(CLASSES - 1)])


def twin_ncm(x, y, q, state):
    return twins.unit(q) @ twins.unit(class_means(x, y)).T


def twin_ncm_euclidean(x, y, q, state):
    return -((q[:, None] - class_means(x, y)) ** 2).sum(-1)


def twin_slda(x, y, q, state):
    """Row by row, as Equations 1 to 5 have it."""
    means, counts = np.zeros((CLASSES, DIM)), np.zeros(CLASSES)
    covariance = np.zeros((DIM, DIM))
    for t, (row, c) in enumerate(zip(x, y, strict=True)):
        gap = row - means[c]
        delta = t / (t + 1) * np.outer(gap, gap)
        covariance = (t * covariance + delta) / (t + 1)
        means[c] += gap / (counts[c] + 1)
        counts[c] += 1
    inverse = np.linalg.inv(0.99 * covariance + 0.01 * np.eye(DIM))
    weights = means[: CLASSES - 1] @ inverse
    return q @ weights.T - (weights * means[: CLASSES - 1]).sum(1) / 2


def ridge_regression(hidden, y, ridge):
    target = np.eye(CLASSES)[y]
    inputs = hidden.T @ hidden + ridge * np.eye(hidden.shape[1])
    return np.linalg.solve(inputs, hidden.T @ target)


def twin_ranpac(x, y, q, state):
    """Ridge by the squared error on a fifth of the rows, then all rows."""
    projection = np.asarray(state.projection, np.float64)
    hidden, asked = (np.maximum(rows @ projection, 0) for rows in (x, q))
    held = (np.arange(len(y), dtype=np.uint32) * np.uint32(2654435761) >> 16) % 5 == 4
    errors = []
    for ridge in ranpac.RIDGES:
        weights = ridge_regression(hidden[~held], y[~held], ridge)
        errors.append(((hidden[held] @ weights - np.eye(CLASSES)[y[held]]) ** 2).sum())
    best = ranpac.RIDGES[int(np.argmin(errors))]
    assert 1e-3 < best < 1e3, "float32 can tell this ridge from its neighbours"
    return (asked @ ridge_regression(hidden, y, best))[:, : CLASSES - 1]


def twin_acil(x, y, q, state):
    projection = np.asarray(state.projection, np.float64)
    hidden, asked = (np.maximum(rows @ projection, 0) for rows in (x, q))
    return (asked @ ridge_regression(hidden, y, 0.1))[:, : CLASSES - 1]


def twin_fecam(x, y, q, state, shared=False):
    x, q = (twins.unit(np.sqrt(rows)) for rows in (x, q))
    means = class_means(x, y)
    found = []
    for c, mean in enumerate(means):
        gaps = x - means[y] if shared else x[y == c] - mean
        covariance = gaps.T @ gaps / (len(gaps) - 1)
        off = covariance[~np.eye(DIM, dtype=bool)].mean()
        shrunk = covariance + np.trace(covariance) / DIM * np.eye(DIM)
        shrunk += off * (1 - np.eye(DIM))
        deviation = np.sqrt(np.diag(shrunk))
        inverse = np.linalg.inv(shrunk / np.outer(deviation, deviation))
        found.append(-np.einsum("bi,ij,bj->b", q - mean, inverse, q - mean))
    return np.stack(found, axis=1)


def twin_fecam_shared(x, y, q, state):
    return twin_fecam(x, y, q, state, shared=True)


def twin_stored_knn(x, y, q, state):
    """The memory holds all rows."""
    cosines = twins.unit(q) @ twins.unit(x).T
    votes = np.zeros((len(q), CLASSES - 1))
    for row, near in enumerate(np.argsort(-cosines, axis=1)[:, :5]):
        for i in near:
            votes[row, y[i]] += np.exp(cosines[row, i] / 0.07)
    with np.errstate(divide="ignore"):
        return np.log(votes)


def descend(layer, x, y, seen, lr):
    """One step down the mean cross-entropy over the classes met so far."""
    weights, biases = layer
    found = np.where(seen, x @ weights + biases, -np.inf)
    wrong = np.exp(found - found.max(1, keepdims=True))
    wrong = wrong / wrong.sum(1, keepdims=True) - np.eye(CLASSES)[y]
    return weights - lr * x.T @ wrong / len(x), biases - lr * wrong.mean(0)


def standard(met, rows):
    variance = met.var(0) + 1e-6 * met.var(0).mean()
    return (rows - met.mean(0)) / np.sqrt(DIM * variance)


def twin_linear_head(x, y, q, state):
    layer, seen = (np.zeros((DIM, CLASSES)), np.zeros(CLASSES)), np.zeros(CLASSES, bool)
    for start in range(0, len(y), 16):
        rows = slice(start, start + 16)
        seen[y[rows]] = True
        now = standard(x[: start + 16], x[rows])
        for _ in range(3):
            layer = descend(layer, now, y[rows], seen, 2.0)
    return (standard(x, q) @ layer[0] + layer[1])[:, : CLASSES - 1]


@pytest.mark.parametrize("name", RULES)
def test_scores_are_those_of_float64(name, data):
    features, label = data
    rule, queries = RULES[name], features[::7]
    state = learn(rule, features, label)
    found = scores(rule, state, queries)
    twin = globals()[f"twin_{name.replace('-', '_')}"]
    want = twin(features.astype(float), label, queries.astype(float), state)
    assert (found[:, -1] == -np.inf).all()  # no row of the class was met
    np.testing.assert_allclose(found[:, :-1], want, rtol=2e-3, atol=2e-3)
    assert (found.argmax(1) == want.argmax(1)).all()


@pytest.mark.parametrize("name", ["ncm", "ranpac", "acil", "fecam", "fecam-shared"])
def test_the_order_of_the_rows_changes_nothing(name, data):
    features, label = data
    rule, by_class = RULES[name], np.argsort(label, kind="stable")
    states = [learn(rule, features, label, order) for order in (None, by_class)]
    states.append(learn(rule, features, label, by_class[::-1], batch=1))
    first, *others = (scores(rule, state, features) for state in states)
    for other in others:
        np.testing.assert_allclose(other, first, rtol=2e-3, atol=2e-3)


def test_a_step_of_the_linear_head_has_the_stored_rows_in_its_mean(data):
    """The memory is smaller than a batch, so that all of it is drawn."""
    features, label = data
    rule = linear_head.make_rule(8, 2.0, 1)
    before = learn(rule, features[:32], label[:32])
    after = learn(rule, features[:48], label[:48])
    kept = before.memory.items
    assert before.memory.filled.all() and int(after.memory.seen) == 48
    x = np.concatenate([features[32:48], kept["features"]]).astype(float)
    x = standard(features[:48].astype(float), x)
    y = np.concatenate([label[32:48], kept["label"]])
    layer = [np.asarray(z, float) for z in before.layer]
    want = descend(layer, x, y, np.asarray(after.counts) > 0, 2.0)
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
        dense_net.Flat(3), plain, blank, plain, CLASSES, plain=plain
    )
    method = ncm.make(components, distance="euclidean")
    task = types.SimpleNamespace(train=stream.Source(None, np.arange(50)))
    order = stream.schedule(
        method.source(None, task), seed=0, task=0, epochs=1, batch_size=48
    )
    state, step = jax.jit(method.init)(KEY, {"image": images}), jax.jit(method.step)
    for number in range(len(order)):
        rows = order[number]
        batch = {"image": images[rows], "label": label[rows], "index": rows}
        state, _ = step(state, batch)
    counts = np.bincount(label[label >= 0], minlength=CLASSES)
    np.testing.assert_array_equal(state.extra.rule.counts, counts)
    features = np.asarray(method.embed(state, plain(images)))
    sums = [features[label == c].sum(0) for c in range(CLASSES)]
    np.testing.assert_allclose(state.extra.rule.total, sums, rtol=1e-5, atol=1e-5)


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


def test_a_ridge_that_float32_cannot_factor_is_not_chosen():
    """Two features alike: without a ridge there is no inverse."""
    hidden = np.ones((10, 2), np.float32)
    grams = ranpac.Grams(
        projection=jnp.eye(2),
        inputs=jnp.stack([hidden.T @ hidden] * 2),
        targets=jnp.ones((2, 2, 1)) * 10,
        counts=jnp.full((2, 1), 10.0),
    )
    weights = ranpac.solve_ridge(
        grams.inputs[0], grams.targets[0], ranpac.choose_ridge(grams)
    )
    assert np.isfinite(np.asarray(weights)).all()


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
