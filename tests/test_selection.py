"""What a memory keeps, against loops, enumeration and the laws of the draws."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from helpers import chance
from helpers import loss_twins as f64
from jaxcl.memory import selection

PROPOSAL, OWN = jax.jit(selection.proposal), jax.jit(selection.own_class_term)
WITHIN = jax.jit(selection.within_class, static_argnums=3)
TRIALS = 4000


def check_counts(counts, probability):
    chance.check_frequencies(counts, probability, TRIALS)


def near(samples, mean, sigmas=4.5):
    """The mean over axis 0 within `sigmas` of the expected one."""
    samples = np.asarray(samples)
    bound = sigmas * samples.std(axis=0) / np.sqrt(len(samples)) + 1e-9
    np.testing.assert_array_less(np.abs(samples.mean(axis=0) - mean), bound)


def keys(seed, trials=TRIALS):
    return jax.random.split(jax.random.key(seed), trials)


def scene(seed, classes=5, rows=23, scale=3.0):
    """Padded rows, rows of no class, an unseen class: nan where nobody may look.

    Beside what `proposal` takes: the rows that count.
    """
    rng = np.random.default_rng(seed)
    seen = np.array([True, True, False, True, True])
    labels = rng.choice(np.flatnonzero(seen), rows)
    mask = rng.random(rows) < 0.7
    labels[~mask] = rng.choice([-1, 0, classes], (~mask).sum())
    counts = mask.copy()
    labels[[3, 8]], mask[[3, 8]], counts[[3, 8]] = [-1, classes], True, False
    similarity = scale * rng.normal(size=(classes, rows))
    similarity[:, ~counts] = similarity[~seen] = np.nan
    return (similarity.astype(np.float32), labels.astype(np.int32), seen, mask), counts


@pytest.mark.parametrize("scale", [0.5, 3.0, 300.0])
@pytest.mark.parametrize("dtype", [bool, np.float32])
def test_proposal_against_loops(scale, dtype):
    for seed in range(3):
        (similarity, labels, seen, mask), counts = scene(seed, scale=scale)
        chosen = (np.flatnonzero(x) for x in (seen, counts))
        g, left = f64.proposal(similarity.astype(np.float64), labels, *chosen)
        arrays = similarity, labels, seen, mask.astype(dtype)
        found, also = PROPOSAL(*arrays), OWN(*arrays)
        assert found.dtype == also.dtype == jnp.float32
        np.testing.assert_allclose(
            found, g, rtol=2e-4 if scale > 9 else 2e-5, atol=1e-30
        )
        np.testing.assert_allclose(
            also, left, rtol=2e-4 if scale > 9 else 2e-5, atol=1e-30
        )
        assert not np.any(found[~counts]) and not np.any(also[~counts])
        # Every anchor's softmax is spent: n + 1 of them, over n.
        n = seen.sum() - 1
        np.testing.assert_allclose(np.sum(found + also), (n + 1) / n, rtol=1e-5)


def test_of_no_rows_all_is_0():
    (similarity, labels, seen, mask), _ = scene(5)
    similarity, none = np.nan_to_num(similarity), mask & False
    with jax.debug_nans(True):
        for met in (seen, seen & False):
            assert not np.any(selection.proposal(similarity, labels, met, none))
            assert not np.any(selection.own_class_term(similarity, labels, met, none))
        assert not np.any(selection.within_class(similarity[0], labels, none, 5))
        drawn = selection.choose(
            jax.random.key(0), labels, none, jnp.full(5, 3), jnp.ones(len(labels))
        )
        assert not np.any(drawn)


def test_weights_within_a_class():
    weights = np.float32([2, 1, 0, 6, 0, np.nan, 5, 0, np.nan])
    labels = np.array([0, 3, 1, 0, 1, 0, -1, 1, 1])
    mask = np.array([1, 1, 1, 1, 1, 0, 1, 1, 0])
    expected = [2 / 8, 1, 1 / 3, 6 / 8, 1 / 3, 0, 0, 1 / 3, 0]
    for dtype in (bool, np.float32):
        found = WITHIN(weights, labels, mask.astype(dtype), 4)
        np.testing.assert_allclose(found, expected, rtol=1e-6)


PAIRS = list(itertools.combinations(range(5), 2))


@functools.partial(jax.jit, static_argnums=4)
def quotas(many, counts, old, new, capacity, tasks):
    def one(key):
        return selection.quotas(key, counts, old, new, capacity, tasks)

    return jax.vmap(one)(many)


def classes(old, new, total=12):
    """Masks of the first `old` and the next `new` of 12 classes."""
    index = np.arange(total)
    return index < old, (index >= old) & (index < old + new)


@pytest.mark.parametrize(
    ("old", "new", "capacity", "tasks"),
    [
        (0, 2, 200, 1),
        (4, 2, 200, 3),
        (8, 2, 200, 5),
        (160, 20, 200, 9),
        (0, 3, 13, 1),
        (3, 4, 13, 2),
        (6, 3, 13, 3),
        (5, 2, 3, 4),
        (3, 2, 3, 2),
    ],
)
def test_every_quota_has_its_share_as_its_mean(old, new, capacity, tasks):
    total, trials = (182, 400) if old > 100 else (12, TRIALS)
    was, is_ = classes(old, new, total)
    counts = np.full(total, 1000, np.int32)
    found = quotas(keys(0, trials), counts, was, is_, capacity, tasks)
    assert found.dtype == jnp.int32
    found = np.asarray(found)
    assert (found.sum(axis=1) == capacity).all()
    share = (tasks - 1) / tasks if old else 0.0
    mean = np.where(was, share * capacity / max(old, 1), 0.0)
    mean = np.where(is_, (1 - share) * capacity / new, mean)
    near(found, mean)
    # Only the two whole numbers next to it; of the old total too.
    assert (np.abs(found - mean)[:, was] < 1).all()
    assert (np.abs(found[:, was].sum(axis=1) - share * capacity) < 1).all()
    assert (np.ptp(found[:, is_], axis=1) <= 1).all()


def test_who_is_rounded_up_is_uniform_among_classes():
    """3 of 5 new classes, so that each pair comes 3 times in 10."""
    old, new = classes(0, 5)
    counts = np.full(12, 99, np.int32)
    up = np.asarray(quotas(keys(2), counts, old, new, 13, 1)) == 3
    check_counts([np.sum(up[:, i] & up[:, j]) for i, j in PAIRS], 0.3)
    # 5 old and 5 new classes, 26/3 rows for the old: 9 in 2 cases of 3.
    old, new = classes(5, 5)
    found = np.asarray(quotas(keys(2), counts, old, new, 13, 3))
    nine = found[:, old].sum(axis=1) == 9
    up_old, up_new = found[:, :5] == 2, found[:, 5:10] == 1
    for case, p_old, p_new, share in [(nine, 0.8, 0.8, 2 / 3), (~nine, 0.6, 1, 1 / 3)]:
        both = up_old[:, :, None] & up_new[:, None, :] & case[:, None, None]
        check_counts(both.sum(axis=0), share * p_old * p_new)


def level_twin(amount, room):
    """What all take when one row is given in turn to whoever has least, with room."""
    given = np.zeros(len(room), int)
    while amount and (given < room).any():
        poorest = min(g for g, r in zip(given, room, strict=True) if g < r)
        able = (given < room) & (given == poorest)
        if able.sum() > amount:
            return given, able, amount  # so many of these get one more
        given, amount = given + able, amount - able.sum()
    return given, given < 0, 0


def test_what_new_classes_lack_goes_back_to_old_ones():
    """Two tasks of a memory of 13: the new class has 2 rows, the two old ones 20."""
    old, new = classes(2, 1)
    counts = np.array([20, 20, 2] + 9 * [5], np.int32)
    found = np.asarray(quotas(keys(0), counts, old, new, 13, 2))
    assert (found[:, 2] == 2).all() and (found.sum(axis=1) == 13).all()
    assert (np.ptp(found[:, :2], axis=1) == 1).all()


def test_small_pools_against_one_row_at_a_time():
    """Old ones' lack goes to new ones, and only what new ones lack back to old ones."""
    rng, given_back = np.random.default_rng(3), 0
    for case in range(60):
        role = rng.integers(0, 3, 12)
        old, new = role == 1, role == 2
        counts = rng.integers(0, 5, 12).astype(np.int32)
        capacity, tasks = int(rng.choice([3, 13])), int(rng.integers(1, 5))
        pool = np.where(old | new, counts, 0)
        found = np.asarray(quotas(keys(case, 8), counts, old, new, capacity, tasks))
        assert (found >= 0).all() and (found <= pool).all()
        assert (found.sum(axis=1) == min(capacity, pool.sum())).all()
        share = (tasks - 1) / tasks * capacity / max(old.sum(), 1)
        low, high = np.floor(share + 1e-9), np.ceil(share - 1e-9)
        for quota in found:
            given, able, more = level_twin(quota[new].sum(), pool[new])
            extra = quota[new] - given
            assert extra.sum() == more and set(extra) <= {0, 1}
            assert not extra[~able].any()
            assert (quota[old] >= np.minimum(low, pool[old])).all()
            if (quota[old] > high).any():
                assert (quota[new] == pool[new]).all()
                given_back += 1
    assert given_back > 40


# Three pools, of 5, 4 and 3 rows, among rows that do not exist and have large weights.
LABELS = np.array([0, 1, 0, 2, 0, 1, -1, 1, 2, 0, 1, 2, 0, 0, 9, 2])
EXISTS = np.array([1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 0, 1, 0], bool)
WEIGHTS = np.float32([1, 9, 2, 5, 4, 3, 99, 1, 1, 8, 2, 2, 0.5, 99, 99, 99])
QUOTA = [2, 3, 1, 4]  # of class 3 there is nothing


def successive(weights, count):
    """Probability of each set of rows, over all orders in which it can be drawn."""
    law = {}
    for order in itertools.permutations(range(len(weights)), count):
        left, share = float(sum(weights)), 1.0
        for row in order:
            share *= weights[row] / left
            left -= weights[row]
        law[frozenset(order)] = law.get(frozenset(order), 0.0) + share
    return law


@functools.partial(jax.jit, static_argnums=0)
def draws(weighted, seed_keys, weights):
    def one(key):
        given = weights if weighted else None
        return selection.choose(key, LABELS, EXISTS, QUOTA, given)

    return jax.vmap(one)(seed_keys)


@pytest.mark.parametrize("weighted", [True, False])
def test_rows_are_drawn_by_successive_sampling(weighted):
    """Of each class every set of rows; and no two classes know of each other."""
    found = np.asarray(draws(weighted, keys(6), WEIGHTS))
    assert found.dtype == bool and not found[:, ~EXISTS].any()
    sets = {}
    for label in range(3):
        rows = np.flatnonzero(EXISTS & (LABELS == label))
        assert (found[:, rows].sum(axis=1) == QUOTA[label]).all()
        weights = WEIGHTS[rows] if weighted else np.ones(len(rows))
        law = successive(weights, QUOTA[label])
        drawn = [frozenset(np.flatnonzero(row)) for row in found[:, rows]]
        check_counts([drawn.count(s) for s in law], list(law.values()))
        inclusion = [sum(p for s, p in law.items() if r in s) for r in range(len(rows))]
        check_counts(found[:, rows].sum(axis=0), inclusion)
        sets[label] = found[:, rows[0]], inclusion[0]
        if not weighted:
            check_counts(found[:, rows].sum(axis=0), QUOTA[label] / len(rows))
            continue
        # The tests above can tell this law from others: with replacement, in
        # proportion to the weight, by the inverse weight.
        share = weights / weights.sum()
        others = [1 - (1 - share) ** QUOTA[label], np.minimum(QUOTA[label] * share, 1)]
        inverse = successive(1 / weights, QUOTA[label])
        others = others * (QUOTA[label] > 1)  # equal for one draw
        others.append(
            [sum(p for s, p in inverse.items() if r in s) for r in range(len(rows))]
        )
        for other in others:
            with pytest.raises(AssertionError):
                check_counts(found[:, rows].sum(axis=0), other)
    both = sets[0][0] & sets[1][0]
    check_counts(both.sum(), sets[0][1] * sets[1][1])
    assert not np.any(found[:, (LABELS < 0) | (LABELS > 2)])


def test_rows_of_weight_0_come_last():
    """After all others of their class, nan as 0, and in uniform order."""
    weights = WEIGHTS.copy()
    weights[[0, 2, 4]] = 0.0, np.nan, 0.0  # of class 0 rows 9 and 12 are left
    weights[[3, 8, 11]] = 0.0  # of class 2 nothing
    weights[12] = 1e-30  # little is more than nothing
    quota = np.array([3, 1, 1, 0])
    found = np.asarray(
        jax.jit(
            jax.vmap(lambda k: selection.choose(k, LABELS, EXISTS, quota, weights))
        )(keys(7))
    )
    assert found[:, [9, 12]].all()
    check_counts(found[:, [0, 2, 4]].sum(axis=0), 1 / 3)
    check_counts(found[:, [3, 8, 11]].sum(axis=0), 1 / 3)
    p = weights[[1, 5, 7, 10]]
    check_counts(found[:, [1, 5, 7, 10]].sum(axis=0), p / p.sum())
