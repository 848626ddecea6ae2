"""Losses of CCLIS and Co2L against float64 twins that loop over classes and rows."""

import functools
from typing import get_args

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from helpers import interpreted, twins
from helpers import loss_twins as f64
from jaxcl import core
from jaxcl.losses import prototype

partial = functools.partial
EVERY = range(9)
CLASSES = 5
# Classes 0 and 1 are old and here, 3 is old and absent; 2 and 4 are current.
OLD = {0, 1, 3}
LABELS = [0, 2, 1, 0, 2, 1, 4, 1, 0]
KEPT = [0, 1, 2, 4, 5, 7]  # rows that exist; of class 0 one is left, of class 4 none
SIMILARITY = (CLASSES, len(LABELS))


def of(chosen, size):
    return jnp.array([i in chosen for i in range(size)])


nce_twin = partial(f64.sample_nce, labels=LABELS, old=OLD)


# With unit vectors as prototypes a row's products are its own entries.


def nce(labels=LABELS, old=OLD, **options):
    def loss(similarity, weights):
        classes = len(similarity)
        return prototype.sample_nce(
            similarity.T,
            jnp.array(labels),
            jnp.eye(classes),
            weights,
            of(old, classes),
            **{"temperature": 1.0, **options},
        )

    return loss


def prd(classes, **options):
    def loss(similarity, teacher):
        eyes = [jnp.eye(CLASSES)] * 2
        chosen = of(classes, CLASSES)
        return prototype.prd(similarity.T, teacher.T, *eyes, chosen, **options)

    return loss


ird = prototype.ird
NCE = [SIMILARITY, (len(LABELS),)]
ROWS = [(6, 4)] * 2

# name: loss, twin and shapes; only the first array receives a gradient
CASES = {
    "nce_default": (nce(), nce_twin, NCE),
    "nce_masked": (nce(example_mask=of(KEPT, 9)), partial(nce_twin, rows=KEPT), NCE),
    "nce_first_task": (nce(old=()), partial(nce_twin, old=()), NCE),
    "nce_none": (nce(scope="none"), partial(nce_twin, scope="none"), NCE),
    "nce_all_negatives": (
        nce(scope="all_negatives"),
        partial(nce_twin, scope="all_negatives"),
        NCE,
    ),
    "nce_all_negatives_masked": (
        nce(scope="all_negatives", example_mask=of(KEPT, 9).astype(jnp.float32)),
        partial(nce_twin, scope="all_negatives", rows=KEPT),
        NCE,
    ),
    "nce_all_masked": (
        nce(scope="all", example_mask=of(KEPT, 9)),
        partial(nce_twin, scope="all", rows=KEPT),
        NCE,
    ),
    "prd_default": (
        prd({0, 1, 3}),
        partial(f64.prd, classes=[0, 1, 3]),
        [SIMILARITY] * 2,
    ),
    "prd_masked": (
        prd({1, 4}, teacher_temperature=0.5, temperature=0.3, example_mask=of(KEPT, 9)),
        partial(f64.prd, classes=[1, 4], rows=KEPT, past=0.5, now=0.3),
        [SIMILARITY] * 2,
    ),
    "ird_default": (ird, f64.ird, ROWS),
    "ird_masked": (
        partial(
            ird,
            teacher_temperature=0.3,
            temperature=0.5,
            example_mask=of({0, 2, 3, 5}, 6),
        ),
        partial(f64.ird, rows=[0, 2, 3, 5], past=0.3, now=0.5),
        ROWS,
    ),
}


def draw(shapes, seed=0):
    """Vectors are weights, above 0; the others are of the size of cosines."""
    rng = np.random.default_rng(seed)
    return [
        rng.uniform(0.02, 0.9, shape) if len(shape) == 1 else rng.uniform(-1, 1, shape)
        for shape in shapes
    ]


@pytest.mark.parametrize("name", CASES)
def test_values_and_gradients_equal_the_equation(name):
    loss, twin, shapes = CASES[name]
    twins.check(loss, twin, draw(shapes), (0,))


@pytest.mark.parametrize(
    "name", ["nce_default", "nce_none", "prd_default", "ird_default"]
)
def test_bfloat16_is_computed_in_float32(name):
    loss, _, shapes = CASES[name]
    twins.check_bfloat16(loss, shapes)


# name: the loss of a mask and two arrays, and their shapes
MASKED = {
    "nce": (lambda m, *x: nce(example_mask=m)(*x), NCE),
    "nce_all": (lambda m, *x: nce(example_mask=m, scope="all_negatives")(*x), NCE),
    "prd": (lambda m, *x: prd({0, 1}, example_mask=m)(*x), [SIMILARITY] * 2),
    "ird": (lambda m, *x: ird(*x, example_mask=m), [(9, 4)] * 2),
}


@pytest.mark.parametrize("name", MASKED)
def test_masked_rows_change_nothing_whatever_they_hold(name):
    loss, shapes = MASKED[name]
    arrays = [jnp.float32(a) for a in draw(shapes, seed=4)]
    mask = of(KEPT, 9).astype(jnp.float32)
    out = jnp.array([i for i in EVERY if i not in KEPT])
    # Rows are the last axis, but for those of IRD.
    where = (out,) if name == "ird" else (..., out)
    value, gradients = twins.check_masked(loss, mask, arrays, [where] * 2)
    assert value == 0 and not np.any(np.asarray(gradients[0]))
    np.testing.assert_allclose(
        loss(None, *arrays), loss(jnp.ones(9), *arrays), rtol=1e-6
    )


def test_labels_and_weights_that_are_not_used_do_not_matter():
    similarity, weights = map(jnp.float32, draw(NCE, seed=5))
    mask = of(KEPT, 9)
    step = interpreted.jit(jax.value_and_grad(nce(example_mask=mask)))
    value, gradient = step(similarity, weights)
    other = [label if i in KEPT else -1 for i, label in enumerate(LABELS)]
    again = interpreted.jit(nce(labels=other, example_mask=mask))(similarity, weights)
    assert again == value
    # Incoming rows have no weight under "old".
    incoming = jnp.array([i for i in EVERY if LABELS[i] not in OLD])
    for bad in (0.0, np.nan, np.inf):
        again, spoilt = step(similarity, weights.at[incoming].set(bad))
        assert again == value
        np.testing.assert_array_equal(gradient, spoilt)


def test_extreme_similarities_and_weights_stay_finite():
    similarity, weights = map(jnp.float32, draw(NCE, seed=6))
    for scope in get_args(prototype.Scope):
        step = interpreted.jit(jax.value_and_grad(nce(scope=scope)))
        for s in (similarity / 0.01, similarity / 1e-3, -1e4 * jnp.ones(SIMILARITY)):
            for g in (weights, 1e-30 * weights, 0 * weights):
                value, gradient = step(s, g)
                assert np.isfinite(value) and np.all(np.isfinite(gradient))
    exact = nce_twin(np.float64(similarity / 0.01), np.float64(1e-30 * weights))
    value = interpreted.jit(nce())(similarity / 0.01, 1e-30 * weights)
    np.testing.assert_allclose(value, exact, rtol=1e-5)
    loss = prd({0, 1}, teacher_temperature=1e-3, temperature=1e-3)
    first, second = jnp.float32(draw([SIMILARITY] * 2, seed=7))
    value, gradient = interpreted.jit(jax.value_and_grad(loss))(first, second)
    assert value > 1 and np.all(np.isfinite(gradient))
    step = interpreted.jit(jax.value_and_grad(partial(ird, temperature=1e-3)))
    first, second = jnp.float32(draw(ROWS, seed=8))
    for rows in (first, 1e6 * first, first.at[0].set(0.0), jnp.zeros((6, 4))):
        value, gradient = step(rows, second)
        assert np.isfinite(value) and np.all(np.isfinite(gradient))


def test_without_classes_there_is_no_relation_to_keep():
    arrays = jnp.float32(draw([SIMILARITY] * 2))
    value, gradient = interpreted.jit(jax.value_and_grad(prd(())))(*arrays)
    assert value == 0 and not np.any(np.asarray(gradient))
    # Nor is there to one's own self.
    for mask in (None, of({2}, 6)):
        rows = jnp.float32(draw(ROWS))[:, : 1 if mask is None else 6]
        loss = interpreted.jit(jax.value_and_grad(partial(ird, example_mask=mask)))
        value, gradient = loss(*rows)
        assert value == 0 and not np.any(np.asarray(gradient))


def test_prototypes_outside_the_classes_change_nothing_whatever_they_hold():
    z, told = jnp.float32(draw([(9, 4)] * 2))
    pair = jnp.float32(draw([(CLASSES, 4)] * 2, seed=1))
    step = interpreted.jit(jax.value_and_grad(prototype.prd))
    value, gradient = step(z, told, *pair, of({0, 3}, CLASSES))
    assert value > 0.1 and np.any(np.asarray(gradient))
    for bad in (1e6, -1e6, 0.0):
        moved = [c.at[2].set(bad) for c in pair]
        again, others = step(z, told, *moved, of({0, 3}, CLASSES))
        assert again == value
        np.testing.assert_array_equal(gradient, others)


def test_temperatures_divide_and_gradients_reach_rows_and_prototypes():
    z, told = jnp.float32(draw([(9, 4)] * 2, seed=11))
    c, before = jnp.float32(draw([(CLASSES, 4)] * 2))
    z, weights, old = core.l2_normalize(z), jnp.full(9, 0.2), of(OLD, CLASSES)

    def loss(z, c, told, before):
        first = prototype.sample_nce(z, jnp.array(LABELS), c, weights, old)
        return first + 0.6 * prototype.prd(z, told, c, before, old)

    value, gradients = interpreted.jit(jax.value_and_grad(loss, argnums=range(4)))(
        z, c, told, before
    )
    similarity = np.float64(c @ z.T)
    expected = nce_twin(similarity / 0.5, np.float64(weights))
    expected += 0.6 * f64.prd(similarity, np.float64(before @ told.T), sorted(OLD))
    np.testing.assert_allclose(value, expected, rtol=1e-5)
    for gradient in gradients[:2]:
        assert np.all(np.abs(gradient).max(axis=1) > 1e-3)
    for gradient in gradients[2:]:
        assert not np.any(np.asarray(gradient))


def proposal_twin(z, c, seen, temperature, leftover=False):
    """Eq. 11 and 12, view by view."""
    views = [f64.proposal(c @ view.T / temperature, LABELS, seen, KEPT) for view in z]
    g = np.mean([g for g, _ in views], axis=0)
    g += views[-1][1] / len(z) if leftover else 0
    return f64.shares_by_class(g, LABELS, KEPT)


@pytest.mark.parametrize("leftover", [False, True])
@pytest.mark.parametrize("views", [1, 3])
def test_proposal_is_the_mean_over_views_within_each_class(views, leftover):
    z = core.l2_normalize(jnp.float32(draw([(views, 9, 4)], seed=12)[0]))
    c = jnp.float32(draw([(CLASSES, 4)], seed=13)[0])
    mask, seen = of(KEPT, 9), of({0, 1, 2}, CLASSES)
    given = z[0] if views == 1 else z
    result = interpreted.jit(prototype.proposal, static_argnames=("leftover",))(
        given,
        jnp.array(LABELS),
        c,
        seen,
        example_mask=mask,
        temperature=0.3,
        leftover=leftover,
    )
    arrays = np.float64(z), np.float64(c)
    expected = proposal_twin(*arrays, [0, 1, 2], 0.3, leftover)
    np.testing.assert_allclose(result, expected, rtol=1e-5)
    spread = [expected[[j for j in KEPT if LABELS[j] == m]].std() for m in (1, 2)]
    assert min(spread) > 1e-3
