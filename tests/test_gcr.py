"""GCR: its selection against a general solver in float64, its step by hand."""

import functools
import itertools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from scipy import optimize

from helpers import online_toy as toy
from jaxcl import core
from jaxcl.memory import buffer, coreset, quadratic
from jaxcl.methods import gcr, online

FIRST, SECOND = toy.FIRST, toy.SECOND
NET = online.build_network(toy.parts(), "linear")
active_set = jax.jit(quadratic.active_set)
pursuit = jax.jit(coreset.match_gradients, static_argnames=("size", "ridge", "tol"))


def squares_twin(atoms, target, ridge):
    """argmin over x >= 0 of |target - atoms' x|^2 + ridge |x|^2, without a Gram."""
    matrix = np.concatenate([atoms.T, np.sqrt(ridge) * np.eye(len(atoms))])
    wanted = np.concatenate([target, np.zeros(len(atoms))])
    return optimize.nnls(matrix, wanted, maxiter=1000)[0]


def test_nonnegative_least_squares():
    rng, zeros = np.random.default_rng(0), 0
    for trial in range(40):
        atoms, target = rng.normal(size=(7, 5)), rng.normal(size=5) * 3
        if trial % 4 == 1:
            atoms[3:] = atoms[:4] * rng.uniform(0.5, 2, (4, 1))  # collinear
        if trial % 4 == 2:
            atoms = np.abs(atoms)
        ridge = 10.0 ** rng.uniform(-3, 1)
        start = np.maximum(rng.normal(size=7), 0) * (trial % 2)
        with jax.enable_x64(True):
            gram = atoms @ atoms.T + ridge * np.eye(7)
            free = np.ones(7, bool)
            found, more = active_set(gram, -atoms @ target, start, free, tol=1e-12)
        found, more = np.asarray(found), np.asarray(more)  # as 64 bits still
        expected = squares_twin(atoms, target, ridge)
        np.testing.assert_allclose(found, expected, rtol=1e-7, atol=1e-9)
        assert (more == (expected > 0)).all()
        assert ((found > 0) == more).all()
        zeros += (expected == 0).sum()
    assert 40 < zeros < 240


def pursuit_twin(atoms, target, budget, ridge):
    """Rows in the order that they joined, and all weights; nothing leaves for good."""
    x, left = np.zeros(len(atoms)), 0
    while (x > 0).sum() < budget:
        slopes = np.where(x > 0, -np.inf, atoms @ (target - atoms.T @ x))
        if slopes.max() <= 1e-9:
            break
        rows = np.flatnonzero((x > 0) | (np.arange(len(x)) == slopes.argmax()))
        x = np.zeros(len(atoms))
        x[rows] = squares_twin(atoms[rows], target, ridge)
        left += (x[rows] == 0).sum()
    return x, left


def test_pursuit_is_greedy_least_squares():
    rng, left, early = np.random.default_rng(1), 0, 0
    for trial in range(40):
        atoms = rng.normal(size=(10, 6)) + 0.5 * (trial % 3)
        target = atoms.sum(0) if trial % 2 else rng.normal(size=6) * 4
        budget, ridge = int(rng.integers(1, 9)), [0.5, 1e-6][trial % 2]
        member = np.ones(12, bool)
        member[10:] = False  # whose products are the largest of all
        padded = np.concatenate([atoms, 9 * target[None].repeat(2, 0)])
        with jax.enable_x64(True):
            found = pursuit(
                padded @ padded.T,
                padded @ target,
                member,
                np.int32(budget),
                size=8,
                ridge=ridge,
                tol=1e-10,
            )
        expected, leaves = pursuit_twin(atoms, target, budget, ridge)
        np.testing.assert_allclose(found[:10], expected, rtol=1e-6, atol=1e-8)
        assert not np.any(found[10:]) and (np.asarray(found) > 0).sum() <= budget
        left, early = left + leaves, early + ((expected > 0).sum() < budget)
    assert left and early


def test_budgets():
    def of(*counts, total):
        return coreset.share_budget(counts, total).tolist()

    assert of(30, 20, 10, total=12) == [6, 4, 2]
    assert of(98, 1, 1, total=10) == [8, 1, 1]  # each class has one
    assert of(50, 30, 20, total=7) == [4, 2, 1]  # 3.5, 2.1, 1.4
    assert of(5, 9, 7, 8, total=2) == [0, 1, 0, 1]
    assert of(2, 3, total=9) == [2, 3]
    assert of(2, 3, total=0) == [0, 0]
    for counts in itertools.product(range(1, 6), repeat=3):
        for total in range(1, 16):
            found = coreset.share_budget(counts, total)
            assert found.sum() == min(total, sum(counts))
            assert (found <= counts).all() and (found >= 0).all()
            if total >= 3:
                assert (found >= 1).all()
                exact = min(total, sum(counts)) * np.array(counts) / sum(counts)
                assert (found <= np.maximum(np.ceil(exact), 1)).all()


def test_each_class_is_chosen_from_by_a_key_of_its_own(monkeypatch):
    """The last task also gets what is left; a class that fits keeps its weights."""
    task, label = np.repeat([3, 5], [6, 8]), np.repeat([0, 1, 2, 3], [4, 2, 5, 3])
    weight, asked = np.arange(1, 15, dtype=np.float32), []

    def choose(key, atoms, member, budget, *, size, ridge):
        asked.append((jax.random.key_data(key).tolist(), int(budget), size, ridge))
        assert member.sum() == len({*atoms.tolist()} - {0}) + (0 in atoms[member])
        return np.where(np.arange(len(member)) < budget, 2.0, 0.0)

    monkeypatch.setattr(coreset, "choose_coreset", choose)
    options = dict(weight=weight, task=task, label=label, filled=np.ones(14, bool))
    found = coreset.reselect(
        jax.random.key(0), lambda rows: rows, **options, capacity=11, ridge=0.25
    )
    # Parts of 5 and 6: of four and two rows 3 and 2, of five and three 4 and 2.
    want = [2, 2, 2, 0, 1, 1, 2, 2, 2, 2, 0, 2, 2, 0]
    np.testing.assert_array_equal(found, weight * want)
    assert [x[1:] for x in asked] == [(3, 4, 0.25), (4, 4, 0.25), (2, 2, 0.25)]
    assert len({str(key) for key, *_ in asked}) == 3


def test_random_rows_join_up_to_the_budget():
    weights, member = jnp.array([0.5, 0, 0, 0, 3.0, 0]), np.arange(6) != 1
    for budget, total in ((2, 2), (4, 4), (9, 5)):
        found = coreset.fill_randomly(jax.random.key(0), weights, member, budget)
        assert int((found > 0).sum()) == total and found[1] == 0
        assert (
            found[0] == 0.5 and found[4] == 3 and set(found.tolist()) <= {0, 1, 0.5, 3}
        )


def held(count, seen, capacity=8, first=0):
    """A buffer of numbers, its first `count` slots filled."""
    numbers = jnp.arange(first, first + capacity)
    return buffer.Buffer(numbers, jnp.arange(capacity) < count, jnp.int32(seen))


def test_mixture_stands_for_the_rows_met():
    memory, candidates = held(8, 70, first=100), held(8, 30)
    keys = jax.random.split(jax.random.key(0), 3000)
    mix = jax.jit(
        jax.vmap(
            lambda key, span: coreset.draw_mixture(
                key, memory, candidates, 4, span=span
            ),
            (0, None),
        )
    )
    items, mask, _ = mix(keys, 5)
    assert np.asarray(mask).all()
    new = np.asarray(items) < 100
    assert (np.sort(new, axis=1)[:, ::-1] == new).all()  # candidates first
    counts = new.sum(axis=1)
    assert set(counts) == {1, 2}  # 1.2 is rounded up or down
    np.testing.assert_allclose(counts.mean(), 1.2, atol=4 * 0.4 / np.sqrt(3000))
    found, times = np.unique(np.asarray(items), return_counts=True)
    assert set(found) == {*range(5), *range(100, 108)}  # candidates below the span
    np.testing.assert_allclose(times[:5], 1.2 * 3000 / 5, rtol=0.15)
    np.testing.assert_allclose(times[5:], 2.8 * 3000 / 8, rtol=0.15)
    assert all(len(set(row)) == 4 for row in np.asarray(items)[:200].tolist())


@pytest.mark.parametrize(
    ("stored", "waiting", "span", "expected"),
    [
        ((0, 0), (0, 0), 8, (0, 0)),
        ((0, 0), (3, 3), 8, (3, 0)),
        ((0, 0), (8, 90), 8, (4, 0)),
        ((8, 90), (0, 0), 8, (0, 4)),
        ((1, 50), (8, 50), 8, (3, 1)),  # the memory has too few for its half
        ((8, 10), (8, 90), 1, (1, 3)),  # the candidates have
        ((2, 10), (1, 10), 8, (1, 2)),
    ],
)
def test_mixture_makes_up_for_what_is_missing(stored, waiting, span, expected):
    memory, candidates = held(*stored, first=100), held(*waiting)
    for seed in range(8):
        key = jax.random.key(seed)
        items, mask, _ = coreset.draw_mixture(key, memory, candidates, 4, span=span)
        rows = np.asarray(items)[np.asarray(mask)]
        assert ((rows < 100).sum(), (rows >= 100).sum()) == expected
        assert len(set(rows.tolist())) == len(rows)
        # Rows that exist come first, as `online.augment_drawn` wants them.
        assert np.asarray(mask).tolist() == sorted(np.asarray(mask), reverse=True)


def gradients_twin(logits, features, stored, label, weight, alpha, beta):
    """(p - y) and 2 (z - z') / C by the features and 1, in float64."""
    p = np.exp(logits) / np.exp(logits).sum(1, keepdims=True)
    errors = beta * (p - np.eye(toy.CLASSES)[np.asarray(label)])
    errors += alpha * 2 * (logits - stored) / toy.CLASSES
    errors *= np.asarray(weight)[:, None]
    outer = errors[:, :, None] * features[:, None]
    return np.concatenate([errors, outer.reshape(len(label), -1)], axis=1)


def judged(state, images):
    """Features and logits in evaluation mode, float64."""
    out, _ = NET(
        state.params, state.stats, toy.parts().eval_transform(images), train=False
    )
    return (np.asarray(x, np.float64) for x in (out.features, out.logits))


@functools.cache
def method(capacity=12, **options):
    return gcr.make(toy.parts(capacity=capacity), **options)


def weighted(held, weight):
    return held._replace(items={**held.items, "weight": jnp.float32(weight)})


@pytest.mark.parametrize(
    ("place", "scale"),
    [("candidates", 1), ("memory", 1), ("memory", 0.01)],  # sums of 8.1 and 0.081
)
def test_a_step_is_the_equation(place, scale):
    made = method(alpha=0.7, beta=0.4)
    state, _ = toy.step(made, toy.begin(made, toy.fresh(made), 0), FIRST)
    if place == "memory":  # it has room for all candidates
        state = toy.begin(made, made.end_task(state, None), 1)
    state = toy.shaken(state, seed=4)  # no logit is near 0
    weight = scale * np.array([0.5, 3.0, 1.0, 2.0, 0.1, 1.5, *[9.0] * 6])
    extra = state.extra._replace(
        **{place: weighted(getattr(state.extra, place), weight)}
    )
    state = state.replace(extra=extra)
    stored = np.asarray(getattr(extra, place).items["logits"][:6], np.float64)
    shares = weight[:6] / weight[:6].sum()

    def twin(new, old, again):
        value = toy.cross_entropy(new, SECOND["label"])
        value += 0.7 * shares @ ((old - stored) ** 2).mean(axis=1)
        pairs = zip(again, LABELS, strict=True)
        rows = [toy.cross_entropy(z[None], y[None]) for z, y in pairs]
        return value + 0.4 * shares @ rows

    images = [SECOND["image"], FIRST["image"], FIRST["image"]]
    new, logits = toy.check_step(made, NET, state, SECOND, images, twin)
    found = new.extra.candidates
    at = slice(6, 12) if place == "candidates" else slice(6)
    np.testing.assert_allclose(found.items["logits"][at], logits[0], rtol=1e-4)
    np.testing.assert_array_equal(found.items["image"][at], SECOND["image"])
    np.testing.assert_array_equal(found.items["label"][at], SECOND["label"])
    np.testing.assert_array_equal(found.items["task"][at], int(state.task))
    np.testing.assert_array_equal(found.items["weight"][at], 1)
    chex.assert_trees_all_equal(new.extra.memory, extra.memory)
    logits = made.predict(new, toy.parts().eval_transform(FIRST["image"]))
    assert np.isfinite(logits).all()  # of classes that never came, too


LABELS = np.asarray(FIRST["label"])


def test_a_chosen_memory_stands_for_all_rows_met():
    """Rows that were chosen, with new weights; the candidates begin anew."""
    number = {"number": jnp.arange(8), "weight": jnp.ones(8)}
    memory, candidates = (
        buffer.Buffer(number, jnp.ones(8, bool), jnp.int32(n)) for n in (70, 30)
    )
    extra = gcr.Extra(memory, None, {}, candidates)
    state = core.new_state(jax.random.key(0), {}, {}, optax.identity(), extra)
    pool = jax.tree.map(lambda x: jnp.append(x, x + 8), number)
    rows, weight = jnp.array([3, 12, 0, 0]), jnp.array([0.5, 2.0, 0.0, 0.0])
    ended = gcr._rebuild_memory(state, pool, rows, weight, weight > 0).extra
    assert ended.memory.items["number"][:2].tolist() == [3, 12]
    assert ended.memory.items["weight"].tolist() == weight.tolist()
    assert ended.memory.filled.tolist() == [True, True, False, False]
    assert (int(ended.memory.seen), int(ended.candidates.seen)) == (100, 0)
    assert not ended.candidates.filled.any()


def selection_twin(state, rows, budgets):
    """Weights of stored rows, class by class, from closed forms in float64."""
    features, logits = judged(state, rows["image"])
    facts = (rows[name] for name in ("logits", "label", "weight"))
    vectors = gradients_twin(logits, features, *map(np.asarray, facts), 0.1, 0.5)
    found = np.zeros(len(vectors))
    for kind, budget in budgets.items():
        own = np.flatnonzero(np.asarray(rows["label"]) == kind)
        twin, _ = pursuit_twin(vectors[own], vectors[own].sum(0), budget, 0.01)
        assert (twin > 0).sum() == budget  # nothing is left to chance
        found[own] = twin * np.asarray(rows["weight"])[own]
    return found


def check_memory(memory, rows, weight):
    kept = np.flatnonzero(weight)
    np.testing.assert_array_equal(memory.filled, np.arange(4) < len(kept))
    np.testing.assert_allclose(memory.items["weight"], weight[kept], rtol=1e-3)
    for name in ("image", "label", "task", "logits"):
        np.testing.assert_array_equal(
            memory.items[name], np.asarray(rows[name])[kept], err_msg=name
        )


def test_a_task_s_end_chooses_by_gradients():
    made = method(capacity=4, candidates=6, ridge=0.01)
    state, _ = toy.step(made, toy.begin(made, toy.fresh(made), 0), FIRST)
    state = toy.shaken(state)
    rows = state.extra.candidates.items
    ended = made.end_task(state, None)
    check_memory(ended.extra.memory, rows, selection_twin(state, rows, {0: 2, 1: 2}))
    assert int(ended.extra.memory.seen) == 6 and int(ended.extra.candidates.seen) == 0
    assert not ended.extra.candidates.filled.any()
    chex.assert_trees_all_equal(ended.params, state.params)
    # Two tasks: two slots each, one a class; weights are carried.
    state, _ = toy.step(made, toy.begin(made, ended, 1), SECOND)
    state = toy.shaken(state, seed=5)
    old, new = state.extra.memory, state.extra.candidates
    rows = jax.tree.map(lambda *x: jnp.concatenate(x), old.items, new.items)
    assert np.std(old.items["weight"]) > 0.05
    ended = made.end_task(state, None)
    twin = selection_twin(state, rows, {0: 1, 1: 1, 2: 1, 3: 1})
    check_memory(ended.extra.memory, rows, twin)
    assert int(ended.extra.memory.seen) == 12
