"""Losses of ICL against float64 twins, and what its Theorem 3 says and does not say."""

import functools
import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from helpers import interpreted, twins
from jaxcl.losses import incremental

partial = functools.partial
one = interpreted.jit(incremental.nce_one, static_argnames="with_positive")
two = interpreted.jit(incremental.nce_two)
ratio = interpreted.jit(incremental.change_ratio, static_argnames="log")


def f(a, b, tau):
    return math.exp(a @ b / math.sqrt((a @ a) * (b @ b)) / tau)


def mean_f(a, i, rows, chosen, tau):
    """Mean of f over the negatives of anchor i, None if there is none."""
    rows = rows if rows.ndim == 2 else rows[i]
    chosen = range(len(rows)) if chosen is None else chosen[i]
    terms = [f(a[i], rows[j], tau) for j in chosen]
    return sum(terms) / len(terms) if terms else None


def one_twin(
    a,
    p,
    n,
    more=None,
    *,
    temperature=0.1,
    num_negatives=31,
    growth=None,
    anchors=None,
    chosen=None,
    chosen_more=None,
    with_positive=True,
):
    """Eq. 1, or with more Eq. 2, anchor by anchor."""
    anchors, total = range(len(a)) if anchors is None else anchors, 0.0
    for i in anchors:
        e, positive = mean_f(a, i, n, chosen, temperature), f(a[i], p[i], temperature)
        if more is not None:
            e_more = mean_f(a, i, more, chosen_more, temperature)
            share = growth
            if growth is None:
                sizes = [
                    len(rows) if c is None else len(c[i])
                    for rows, c in ((n, chosen), (more, chosen_more))
                ]
                share = sizes[1] / sum(sizes)
            if e is None:
                e = e_more
            elif e_more is not None:
                e = (1 - share) * e + share * e_more
        if e is not None:
            total -= math.log(positive / (with_positive * positive + num_negatives * e))
    return total / len(anchors)


def ratios(
    a, p, old, new, *, temperature=0.1, num_negatives=31, chosen=None, chosen_new=None
):
    """Eq. 6."""
    found = []
    for i in range(len(a)):
        positive = f(a[i], p[i], temperature)
        was, now = (
            mean_f(a, i, rows, c, temperature)
            for rows, c in ((old, chosen), (new, chosen_new))
        )
        lonely = was is None or now is None
        r = (
            1.0
            if lonely
            else (positive + num_negatives * now) / (positive + num_negatives * was)
        )
        found.append(r)
    return found


def two_twin(a, p, old, new, *, growth, anchors=None, **options):
    """Eq. 7."""
    rows = [
        math.log(growth * r + 1 - growth) for r in ratios(a, p, old, new, **options)
    ]
    anchors = range(len(a)) if anchors is None else anchors
    return sum(rows[i] for i in anchors) / len(anchors)


WEIGHTS = [0.3, -1.0, 2.0]


def ratio_sum(*arrays, **options):
    return jnp.dot(jnp.array(WEIGHTS), ratio(*arrays, **options))


def ratio_sum_twin(*arrays, **options):
    return np.dot(WEIGHTS, ratios(*arrays, **options))


def table(chosen, columns):
    """Lists of columns as bool[B, columns]."""
    return jnp.array([[j in row for j in range(columns)] for row in chosen])


A, SHARED, MORE, OWN = (3, 4), (5, 4), (2, 4), (3, 5, 4)
KEPT = [1, 3, 4]  # of SHARED
ALL_KEPT = [KEPT] * 3
SOME = [[0, 2], [1, 2, 3, 4], [3]]
NONE_OF_ONE = [[0, 1], [], [1]]  # of MORE
OTHERS = [[1, 2], [0, 2], [0, 1]]
FLOATS = table([KEPT], 5)[0].astype(jnp.float32)
TWO_OF_THREE = jnp.array([True, False, True])
ONES = jnp.ones(5)


def case(loss, twin, shapes, of_twin=None, of_loss=None, **both):
    """A loss, its twin and their shapes; options of one of them and of both."""
    loss, twin = partial(loss, **(of_loss or {})), partial(twin, **(of_twin or {}))
    return partial(loss, **both), partial(twin, **both), shapes


def grown(a, p, n, more, **options):
    return one(a, p, n, more_negatives=more, **options)


def one_in_batch(a, p, **options):
    return one(a, p, p, negative_mask=incremental.others(3), **options)


def one_in_batch_twin(a, p, **options):
    return one_twin(a, p, p, chosen=OTHERS, **options)


THREE, FOUR = [A, A, SHARED], [A, A, SHARED, MORE]
ANCHORS = {"anchors": [0, 2]}
CASES = {
    "one": case(one, one_twin, THREE),
    "one_options": case(one, one_twin, THREE, temperature=0.3, num_negatives=7),
    "one_own": case(one, one_twin, [A, A, OWN]),
    "one_masked": case(
        one,
        one_twin,
        THREE,
        ANCHORS | {"chosen": ALL_KEPT},
        {"mask": TWO_OF_THREE, "negative_mask": FLOATS},
    ),
    "one_some": case(
        one, one_twin, THREE, {"chosen": SOME}, {"negative_mask": table(SOME, 5)}
    ),
    "one_own_masked": case(
        one,
        one_twin,
        [A, A, OWN],
        ANCHORS | {"chosen": SOME},
        {"mask": ONES[:3].at[1].set(0), "negative_mask": table(SOME, 5)},
    ),
    "one_own_kept": case(
        one, one_twin, [A, A, OWN], {"chosen": ALL_KEPT}, {"negative_mask": FLOATS}
    ),
    "one_in_batch": case(one_in_batch, one_in_batch_twin, [A, A]),
    "one_lonely": case(
        one,
        one_twin,
        THREE,
        {"chosen": NONE_OF_ONE},
        {"negative_mask": table(NONE_OF_ONE, 5)},
    ),
    "one_without_positive": case(
        one,
        one_twin,
        THREE,
        {"chosen": NONE_OF_ONE},
        {"negative_mask": table(NONE_OF_ONE, 5)},
        with_positive=False,
    ),
    "one_in_batch_without_positive": case(
        one_in_batch,
        one_in_batch_twin,
        [A, A],
        ANCHORS,
        {"mask": TWO_OF_THREE},
        temperature=0.2,
        num_negatives=2,
        with_positive=False,
    ),
    "one_mixture": case(grown, one_twin, FOUR, growth=0.3),
    "one_pooled": case(grown, one_twin, FOUR),
    "one_mixture_masked": case(
        grown,
        one_twin,
        [A, A, SHARED, A],
        ANCHORS | {"chosen": ALL_KEPT, "chosen_more": OTHERS},
        {"mask": TWO_OF_THREE, "negative_mask": FLOATS, "more_mask": table(OTHERS, 3)},
        growth=0.7,
    ),
    "one_pooled_masked": case(
        grown,
        one_twin,
        [A, A, SHARED, OWN[:1] + A],
        {"chosen": SOME, "chosen_more": OTHERS},
        {"negative_mask": table(SOME, 5), "more_mask": table(OTHERS, 3)},
    ),
    "one_mixture_without_more": case(
        grown,
        one_twin,
        FOUR,
        {"chosen_more": NONE_OF_ONE},
        {"more_mask": table(NONE_OF_ONE, 2)},
        growth=0.4,
    ),
    "one_mixture_without_first": case(
        grown,
        one_twin,
        FOUR,
        {"chosen": NONE_OF_ONE},
        {"negative_mask": table(NONE_OF_ONE, 5)},
        growth=0.4,
    ),
    "ratio": case(ratio_sum, ratio_sum_twin, FOUR),
    "ratio_options": case(
        ratio_sum,
        ratio_sum_twin,
        FOUR,
        {"chosen": SOME, "chosen_new": NONE_OF_ONE},
        {"old_mask": table(SOME, 5), "new_mask": table(NONE_OF_ONE, 2)},
        temperature=0.4,
        num_negatives=3,
    ),
    "two": case(two, two_twin, FOUR, growth=0.3),
    "two_nearly_all_new": case(
        two,
        two_twin,
        [A, A, MORE, SHARED],
        growth=0.999,
        temperature=0.5,
        num_negatives=2,
    ),
    "two_own": case(two, two_twin, [A, A, OWN, MORE], growth=0.6),
    "two_masked": case(
        two,
        two_twin,
        FOUR,
        ANCHORS | {"chosen": SOME, "chosen_new": [[1]] * 3},
        {
            "mask": TWO_OF_THREE,
            "old_mask": table(SOME, 5),
            "new_mask": jnp.array([0.0, 1.0]),
        },
        growth=0.5,
        temperature=0.4,
    ),
    "two_in_batch": (
        lambda a, p, n: two(a, p, p, n, growth=0.2, old_mask=incremental.others(3)),
        lambda a, p, n: two_twin(a, p, p, n, growth=0.2, chosen=OTHERS),
        [A, A, MORE],
    ),
    "two_lonely": case(
        two,
        two_twin,
        FOUR,
        {"chosen": [[0], [1], []], "chosen_new": NONE_OF_ONE},
        {"old_mask": table([[0], [1], []], 5), "new_mask": table(NONE_OF_ONE, 2)},
        growth=0.5,
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_values_and_gradients_equal_the_equation(name):
    loss, twin, shapes = CASES[name]
    # No gradient is stopped: those of all arrays are compared.
    twins.check(loss, twin, twins.draw(shapes), range(len(shapes)))


@pytest.mark.parametrize("name", ["one", "one_mixture", "ratio", "two"])
def test_bfloat16_is_computed_in_float32(name):
    loss, _, shapes = CASES[name]
    twins.check_bfloat16(loss, shapes)


# Theorem 3


@pytest.mark.parametrize("exclude", [False, True], ids=["all", "but_own"])
def test_nce_one_of_old_plus_nce_two_is_nce_one_of_all(exclude):
    """Over whole sets; the share of the other reading of N is not exact."""
    old, new = 6, 4
    with jax.enable_x64(True):
        a, p, n = map(jnp.asarray, twins.draw([(old, 3), (old, 3), (new, 3)]))
        exists = incremental.others(old) if exclude else jnp.ones((old, old))
        everywhere = jnp.concatenate([exists, jnp.ones((old, new))], axis=1)
        after = float(one(a, p, jnp.concatenate([p, n]), negative_mask=everywhere))
        before = float(one(a, p, p, negative_mask=exists))
        shares = [new / (counted + new) for counted in (old, old - 1)]
        found = [float(two(a, p, p, n, growth=x, old_mask=exists)) for x in shares]
    np.testing.assert_allclose(after, before + found[exclude], rtol=1e-12)
    assert abs(after - before - found[not exclude]) > 1e-3


# Edges


def test_nothing_new_is_no_loss_and_no_gradient():
    arrays = [jnp.float32(a) for a in twins.draw([A, A, SHARED, MORE], seed=5)]
    grad = interpreted.jit(jax.value_and_grad(two, argnums=range(4)))
    value, gradients = grad(*arrays, growth=0.0)
    assert value == 0 and not any(np.any(np.asarray(g)) for g in gradients)
    assert two(*arrays, growth=0) == 0
    # As new negatives the old ones change nothing, but they would, were they moved.
    a, p, n, _ = arrays
    np.testing.assert_array_equal(ratio(a, p, n, n), [1, 1, 1])
    # log 0.4 and log 0.6 do not cancel in float32.
    value, gradients = grad(a, p, n, n, growth=0.4)
    assert value == 0 and np.abs(gradients[3]).max() > 1e-3
    np.testing.assert_allclose(gradients[3], -gradients[2], rtol=1e-5)
    # Two terms cancel, to the last bit where the compiler rounds both alike.
    np.testing.assert_allclose(gradients[1], 0, atol=1e-7)
    # And NCE-I of the grown set is that of the old one, and in the limit of the new.
    np.testing.assert_allclose(
        one(a, p, n, more_negatives=arrays[3], growth=0.0), one(a, p, n), rtol=1e-6
    )
    np.testing.assert_allclose(
        one(a, p, n, more_negatives=arrays[3], growth=jnp.float32(1.0)),
        one(a, p, arrays[3]),
        rtol=1e-6,
    )
    np.testing.assert_allclose(
        two(*arrays, growth=jnp.float32(1.0)),
        jnp.mean(ratio(*arrays, log=True)),
        rtol=1e-6,
    )


def test_extreme_cosines_and_temperatures_stay_finite():
    positives = jnp.array([[1.0, 0.0], [-1.0, 0.0], [0.6, 0.8]])
    anchors = jnp.array([[1.0, 0.0]] * 3)
    sets = [jnp.array([[1.0, 0.0]] * 3), jnp.array([[-1.0, 0.0]] * 2), positives]
    exact = np.float64

    def both(a, p, old, new, growth, tau):
        first = one(a, p, old, more_negatives=new, growth=growth, temperature=tau)
        pair = first, two(a, p, old, new, growth=growth, temperature=tau)
        return sum(pair), (*pair, ratio(a, p, old, new, temperature=tau, log=True))

    step = interpreted.jit(jax.value_and_grad(both, argnums=range(4), has_aux=True))
    for old, new in itertools.permutations(sets, 2):
        for tau, growth in itertools.product(
            (1e-3, 0.01, 0.1), (0, 1e-6, 0.5, 1 - 1e-6)
        ):
            arrays = anchors, positives, old, new
            growth = jnp.float32(growth)
            (_, found), gradients = step(*arrays, growth, tau)
            for x in (*found, *gradients):
                assert np.all(np.isfinite(x)), (tau, growth)
            if tau == 1e-3:
                continue
            options = {"temperature": tau, "growth": exact(growth)}
            wide = [exact(x) for x in arrays]
            expected = one_twin(*wide, **options), two_twin(*wide, **options)
            np.testing.assert_allclose(found[:2], expected, rtol=3e-5, atol=1e-6)
            expected = np.log(ratios(*wide, temperature=tau))
            np.testing.assert_allclose(found[2], expected, rtol=3e-5, atol=1e-6)
    # A loss next to nothing keeps its digits.
    value = one(anchors[:1], positives[:1], sets[1], temperature=0.05)
    np.testing.assert_allclose(value, 31 * math.exp(-40), rtol=1e-4)
    for rows in (jnp.zeros((3, 2)), 1e6 * positives, 1e-6 * positives):
        _, gradients = step(rows, positives, rows, sets[0], jnp.float32(0.3), 0.1)
        assert all(np.all(np.isfinite(x)) for x in gradients)
    # The ratio itself has no number in float32 there.
    arrays = anchors[1:2], positives[1:2], sets[1], sets[0]
    assert np.isinf(ratio(*arrays, temperature=0.02)[0])
    np.testing.assert_allclose(
        ratio(*arrays, temperature=0.02, log=True), 100 + math.log(31 / 32), rtol=1e-6
    )


# name: loss of a mask of three anchors, one of five negatives, and arrays
MASKED = {
    "one": lambda m, n, *x: one(*x[:3], mask=m, negative_mask=n),
    "one_mixture": lambda m, n, *x: one(
        *x[:2], x[3], more_negatives=x[2], more_mask=n, mask=m, growth=0.3
    ),
    "one_pooled": lambda m, n, *x: one(
        *x[:3], more_negatives=x[3], negative_mask=n, mask=m
    ),
    "two_old": lambda m, n, *x: two(*x, growth=0.3, mask=m, old_mask=n),
    "two_new": lambda m, n, *x: two(*x[:2], x[3], x[2], growth=0.3, mask=m, new_mask=n),
    "ratio": lambda m, n, *x: jnp.sum(
        jnp.log(ratio(*x, mask=m, old_mask=n)) * (1 if m is None else m)
    ),
}


@pytest.mark.parametrize(
    "name, shape",
    [*((name, SHARED) for name in MASKED), ("one", OWN), ("two_new", OWN)],
)
def test_masked_rows_change_nothing_whatever_they_hold(name, shape):
    loss = MASKED[name]
    arrays = [jnp.float32(a) for a in twins.draw([A, A, shape, MORE], seed=6)]
    mask = TWO_OF_THREE.astype(jnp.float32)
    hidden = np.zeros(shape[:-1], bool)
    hidden[..., [0, 2]] = True  # of the negatives
    if shape == OWN:
        hidden[1] = True
    value, gradients = twins.check_masked(
        lambda m, *x: loss(m, FLOATS, *x), mask, arrays, [1, 1, hidden, None]
    )
    assert value == 0 and not any(np.any(np.asarray(g)) for g in gradients)
    with jax.enable_x64(True):
        wide = [np.float64(a) for a in arrays]
        same = interpreted.jit(loss)(mask.astype(bool), table(ALL_KEPT, 5), *wide)
        every = interpreted.jit(loss)(jnp.ones(3), jnp.ones(5), *wide)
        np.testing.assert_allclose(
            interpreted.jit(loss)(None, None, *wide), every, rtol=1e-12
        )
        assert abs(every - same) > 0.01


def test_others_known_by_hand():
    for size in (1, 2, 5):
        np.testing.assert_array_equal(incremental.others(size), 1 - np.eye(size))
    chosen = [[1, 2], [0, 2], [0, 1], [0, 1], [0, 1]]
    np.testing.assert_array_equal(incremental.others(5, 2), table(chosen, 5))
    assert not np.any(incremental.others(3, 0))
    for count in range(8):
        found = np.asarray(incremental.others(8, count))
        assert np.all(found.sum(axis=1) == count) and not np.any(np.diag(found))
    for count in (-1, 3):
        with pytest.raises(ValueError, match=rf"count={count}"):
            incremental.others(3, count)


def test_the_released_codes_loss_of_new_anchors():
    """Plain sums over its draw: K is the number of rows, and so the mean's weight."""
    size, growth = 6, 0.4
    a, p, x = twins.draw([(size, 4), (size, 4), (size, 4)], seed=9)
    old = math.floor((1 - growth) * (size - 1))
    new = size - 1 - old
    assert (old, new) == (3, 2)
    total = 0.0
    for i in range(size):
        columns = [j for j in range(new + 1) if j != i] if i < new else range(new)
        noise = sum(f(a[i], p[j], 0.1) for j in columns)
        noise += sum(f(a[i], x[j], 0.1) for j in range(old))
        positive = f(a[i], p[i], 0.1)
        total -= math.log(positive / (positive + noise)) / size
    a, p, x = map(jnp.float32, (a, p, x))
    value = one(
        a,
        p,
        x[:old],
        more_negatives=p,
        more_mask=incremental.others(size, new),
        num_negatives=size - 1,
    )
    np.testing.assert_allclose(value, total, rtol=1e-5)


def test_second_derivatives_are_those_of_the_gradient():
    """MAML may differentiate through a step; masked rows hold nothing but nan."""
    arrays = twins.draw([A, A, SHARED, A], seed=11)
    direction = twins.draw([A], seed=12)[0]
    spoilt = [arrays[0], arrays[1], arrays[2].copy(), arrays[3]]
    spoilt[2][[0, 2]] = np.nan
    masks = {"old_mask": FLOATS, "new_mask": table(NONE_OF_ONE, 3)}
    with jax.enable_x64(True):
        gradient = interpreted.jit(jax.grad(partial(two, growth=0.4, **masks)))
        turned = interpreted.jit(
            jax.grad(lambda a, *x: jnp.vdot(gradient(a, *x), direction))
        )
        found = turned(*spoilt)
        after, before = (
            gradient(spoilt[0] + step * direction, *spoilt[1:])
            for step in (1e-6, -1e-6)
        )
        expected = (after - before) / 2e-6
    assert np.abs(found).max() > 1e-3
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-7)
