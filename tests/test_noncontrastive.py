"""Losses without negatives, and distillation by them, against float64 twins.

The twins spell out the equations element by element and share no code with the
losses; gradients are checked by central differences of the twins.
"""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from helpers import twins
from jaxcl.losses import distill, noncontrastive


def mean_cos(a, b):
    return sum(twins.cosine(x, y) for x, y in zip(a, b, strict=True)) / len(a)


def squared(a, b):
    """Sum over rows and features of (a - b)^2."""
    return sum((a[i][d] - b[i][d]) ** 2 for i, d in np.ndindex(a.shape))


def deviations(z, d):
    mean = sum(row[d] for row in z) / len(z)
    return [row[d] - mean for row in z]


def barlow_twin(z1, z2, scale=0.1, weight=5e-3):
    n, features = z1.shape

    def standard(z, d):
        parts = deviations(z, d)
        variance = sum(x * x for x in parts) / n
        return [x / math.sqrt(variance + 1e-5) for x in parts]

    total = 0.0
    for d in range(features):
        for e in range(features):
            pairs = zip(standard(z1, d), standard(z2, e), strict=True)
            c = sum(x * y for x, y in pairs) / n
            total += (c - 1) ** 2 if d == e else weight * c**2
    return scale * total


def byol_twin(p, t):
    return 2 - 2 * mean_cos(p, t)


def mse_twin(a, b):
    return squared(a, b) / a.size


def vicreg_twin(z1, z2, invariance=25.0, variance=25.0, covariance=1.0):
    n, features = z1.shape
    total = invariance * mse_twin(z1, z2)
    for z in (z1, z2):
        for d in range(features):
            for e in range(features):
                pairs = zip(deviations(z, d), deviations(z, e), strict=True)
                c = sum(x * y for x, y in pairs) / (n - 1)
                if d == e:
                    hinge = max(0.0, 1 - math.sqrt(c + 1e-4))
                    total += variance * hinge / features
                else:
                    total += covariance * c**2 / features
    return total


def same_view_twin(between):
    return lambda p1, p2, f1, f2: (between(p1, f1) + between(p2, f2)) / 2


def other_view_twin(between):
    return lambda p1, p2, f1, f2: (between(p1, f2) + between(p2, f1)) / 2


DISTANCES = {
    "cosine": lambda p, f: -mean_cos(p, f),
    "byol": byol_twin,
    "mse": mse_twin,
    "squared": squared,
    "squared_mean": lambda p, f: squared(p, f) / len(p),
}


def pnr_supcon_twin(*arrays, labels, tau=0.1, tau_d=0.2, pn1=True, pn2=True):
    z1, z2, p1, p2, f1, f2 = arrays
    z, p, f, label = [*z1, *z2], [*p1, *p2], [*f1, *f2], [*labels, *labels]
    n = len(z)
    total = 0.0
    for i in range(n):
        current = [z[j] for j in range(n) if j != i]
        frozen = [f[j] for j in range(n) if j != i]
        same = [z[j] for j in range(n) if j != i and label[j] == label[i]]
        columns = current + (frozen if pn1 else [])
        total += sum(twins.nce(z[i], row, columns, tau) for row in same) / len(same)
        columns = frozen + (current if pn2 else [])
        total += twins.nce(p[i], f[i], columns, tau_d)
    return total / n


def draw(*shapes, seed=0):
    """Columns of other spreads and means: VICReg's hinge is on in some, off in some."""
    rng = np.random.default_rng(seed)
    arrays = []
    for shape in shapes:
        spread = np.resize([0.3, 2.5, 0.8, 1.7], shape[-1])
        arrays.append(rng.normal(size=shape) * spread + rng.normal(size=shape[-1]))
    return arrays


TALL, WIDE = (6, 3), (3, 4)
LABELS = (0, 1, 0, 2)
SUPCON = [(4, 3)] * 6


def supcon(options, names):
    twin = {names[key]: value for key, value in options.items()}
    return (
        lambda *a: distill.pnr_supcon(*a, jnp.array(LABELS), **options),
        functools.partial(pnr_supcon_twin, labels=LABELS, **twin),
        SUPCON,
        (0, 1, 2, 3),
    )


NAMES = {"temperature": "tau", "distill_temperature": "tau_d"}
BARLOW = {"scale": 0.7, "off_diagonal": 0.3}
BARLOW_TWIN = functools.partial(barlow_twin, scale=0.7, weight=0.3)
WEIGHTS = {"invariance": 3.0, "variance": 5.0, "covariance": 7.0}

# name: loss, twin, shapes, and the arguments that receive a gradient
CASES = {
    "barlow_default": (noncontrastive.barlow_twins, barlow_twin, [TALL] * 2, (0, 1)),
    "barlow": (
        functools.partial(noncontrastive.barlow_twins, **BARLOW),
        BARLOW_TWIN,
        [WIDE] * 2,
        (0, 1),
    ),
    "byol": (noncontrastive.byol, byol_twin, [WIDE] * 2, (0,)),
    "mse": (noncontrastive.mse, mse_twin, [WIDE] * 2, (0, 1)),
    "mean_cosine": (noncontrastive.mean_cosine, mean_cos, [WIDE] * 2, (0, 1)),
    "vicreg_default": (noncontrastive.vicreg, vicreg_twin, [TALL] * 2, (0, 1)),
    "vicreg": (
        functools.partial(noncontrastive.vicreg, **WEIGHTS),
        functools.partial(vicreg_twin, **WEIGHTS),
        [WIDE] * 2,
        (0, 1),
    ),
    "cassle_barlow_default": (
        distill.cassle_barlow,
        same_view_twin(barlow_twin),
        [TALL] * 4,
        (0, 1),
    ),
    "cassle_barlow": (
        functools.partial(distill.cassle_barlow, **BARLOW),
        same_view_twin(BARLOW_TWIN),
        [WIDE] * 4,
        (0, 1),
    ),
    "cassle_byol": (
        distill.cassle_byol,
        same_view_twin(byol_twin),
        [WIDE] * 4,
        (0, 1),
    ),
    "cassle_mse": (distill.cassle_mse, same_view_twin(mse_twin), [WIDE] * 4, (0, 1)),
    "less_forget": (
        distill.less_forget,
        same_view_twin(lambda z, f: 1 - mean_cos(z, f)),
        [WIDE] * 4,
        (0, 1),
    ),
    "pnr_supcon_default": supcon({}, {}),
    "pnr_supcon_pn1": supcon({"pn2": False}, {"pn2": "pn2"}),
    "pnr_supcon_pn2": supcon({"pn1": False}, {"pn1": "pn1"}),
    "pnr_supcon": supcon({"temperature": 0.5, "distill_temperature": 0.3}, NAMES),
}
for name, between in DISTANCES.items():
    CASES[f"pseudo_negative_{name}"] = (
        functools.partial(distill.pseudo_negative, distance=name),
        other_view_twin(between),
        [WIDE] * 4,
        (0, 1),
    )


@pytest.mark.parametrize("name", CASES)
def test_values_and_gradients_equal_the_equation(name):
    loss, twin, shapes, moving = CASES[name]
    twins.check(loss, twin, draw(*shapes), moving)


def test_the_drawn_columns_lie_on_both_sides_of_the_hinge():
    for shape in (TALL, WIDE):
        spread = draw(shape)[0].std(axis=0, ddof=1)
        assert spread.min() < 0.9 and spread.max() > 1.1


@pytest.mark.parametrize("name", CASES)
def test_bfloat16_is_computed_in_float32(name):
    loss, twin, shapes, _ = CASES[name]
    # Computed in bfloat16 it would be off by 1e-2.
    arrays = draw(*shapes, seed=3)
    twins.check_bfloat16(loss, twin, arrays, rtol=2e-5, atol=1e-6)


@pytest.mark.parametrize("name", CASES)
def test_constant_columns_and_empty_rows_stay_finite(name):
    loss, _, shapes, _ = CASES[name]
    arrays = [jnp.asarray(a, jnp.float32) for a in draw(*shapes, seed=4)]
    step = jax.jit(jax.value_and_grad(loss, argnums=tuple(range(len(arrays)))))
    for inputs in (
        [a.at[:, 0].set(5.0) for a in arrays],
        [a.at[0].set(0.0) for a in arrays],
        [jnp.zeros_like(a) for a in arrays],
        [1e-20 * a for a in arrays],
        [jnp.ones_like(a) for a in arrays],
    ):
        leaves = jax.tree.leaves(step(*inputs))
        assert all(np.all(np.isfinite(leaf)) for leaf in leaves)


@pytest.mark.parametrize(
    "loss, twin",
    [
        (noncontrastive.barlow_twins, barlow_twin),
        (noncontrastive.vicreg, vicreg_twin),
    ],
)
def test_a_large_mean_does_not_spoil_the_variance(loss, twin):
    # 4096 and steps of 1/16 are exact in float32; their squares are not.
    arrays = [np.round(16 * a) / 16 + 4096.0 for a in draw(TALL, TALL, seed=5)]
    value = jax.jit(loss)(*map(jnp.float32, arrays))
    np.testing.assert_allclose(value, twin(*arrays), rtol=1e-4)


def test_losses_at_points_known_by_hand():
    same = jnp.array([[1.0, 1.0], [-1.0, -1.0]])
    # C is all ones, or all minus ones: 0 + 2 * 0.005, or 2 * 4 + 2 * 0.005.
    barlow = jax.jit(noncontrastive.barlow_twins)
    np.testing.assert_allclose(barlow(same, same), 0.001, rtol=1e-3)
    np.testing.assert_allclose(barlow(same, -same), 0.801, rtol=1e-4)
    # One row is its own mean, so C is zero.
    np.testing.assert_allclose(barlow(same[:1], same[:1]), 0.2, rtol=1e-6)
    # Variance 2 and covariance 2 in one view, all zero in the other:
    # 25 * 1 + 25 * (0 + 0.99) + (2^2 + 2^2) / 2 + 0.
    value = jax.jit(noncontrastive.vicreg)(same, jnp.zeros((2, 2)))
    np.testing.assert_allclose(value, 53.75, rtol=1e-5)
    # Cosines 0.6, -1 and 1 over three rows.
    p = jnp.array([[3.0, 4.0], [0.0, 2.0], [5.0, 0.0]])
    t = jnp.array([[2.0, 0.0], [0.0, -9.0], [0.1, 0.0]])
    value = jax.jit(noncontrastive.byol)(p, t)
    np.testing.assert_allclose(value, 2 - 2 * 0.6 / 3, rtol=1e-5)


def test_distillation_at_points_known_by_hand():
    p1, p2 = jnp.array([[3.0, 4.0]]), jnp.array([[0.0, 2.0]])
    f1, f2 = jnp.array([[0.0, 1.0]]), jnp.array([[1.0, 0.0]])
    rows = (p1, p2, f1, f2)
    # Same view: cosines 0.8 and 0, |p - f|^2 = 9 + 9 and 1 + 4.
    np.testing.assert_allclose(distill.cassle_byol(*rows), 2 - 0.8, rtol=1e-5)
    np.testing.assert_allclose(distill.cassle_mse(*rows), 23 / 4, rtol=1e-5)
    np.testing.assert_allclose(distill.less_forget(*rows), 1 - 0.4, rtol=1e-5)
    # Other view: cosines 0.6 and 1, |p - f|^2 = 4 + 16 and 0 + 1.
    expected = {
        "cosine": -0.8,
        "byol": 2 - 1.6,
        "mse": 21 / 4,
        "squared": 21 / 2,
        "squared_mean": 21 / 2,
    }
    for name, value in expected.items():
        result = distill.pseudo_negative(*rows, distance=name)
        np.testing.assert_allclose(result, value, rtol=1e-5)
    # Twice the batch doubles the literal sum alone.
    rows = [jnp.repeat(row, 2, axis=0) for row in rows]
    expected["squared"] = 21.0
    for name, value in expected.items():
        result = distill.pseudo_negative(*rows, distance=name)
        np.testing.assert_allclose(result, value, rtol=1e-5)


@pytest.mark.parametrize("distance, least", [("mse", 1), ("squared_mean", 4)])
def test_a_pseudo_negative_is_bounded_below_its_positive_weight_only(distance, least):
    """w * cassle_mse - weight * d, at p far away: up for small weights, else down."""
    f1, f2 = draw(WIDE, WIDE, seed=6)
    far = np.full(WIDE, 1e4)

    def total(weight):
        negative = distill.pseudo_negative(far, far, f1, f2, distance=distance)
        return 25.0 * distill.cassle_mse(far, far, f1, f2) - weight * negative

    assert total(0.9 * 25.0 / least) > 1e6
    assert total(1.1 * 25.0 / least) < -1e6


@pytest.mark.parametrize("pn1", [True, False])
@pytest.mark.parametrize("pn2", [True, False])
def test_pnr_supcon_with_labels_all_different_is_pnr_simclr(pn1, pn2):
    arrays = [jnp.float32(a) for a in draw(*SUPCON, seed=7)]
    options = {"temperature": 0.2, "pn1": pn1, "pn2": pn2}
    value = distill.pnr_supcon(*arrays, jnp.array([3, 0, 7, 5]), **options)
    np.testing.assert_allclose(value, distill.pnr_simclr(*arrays, **options), rtol=1e-5)


def test_pnr_supcon_of_equal_rows_is_known_by_hand():
    rows = [jnp.ones((3, 2))] * 6
    # Every cosine is 1: five rows and five pseudo-negatives in both terms.
    value = distill.pnr_supcon(*rows, jnp.zeros(3, int))
    np.testing.assert_allclose(value, 2 * math.log(10.0), rtol=1e-5)


def test_an_unknown_distance_is_named():
    allowed = "cosine, byol, mse, squared, squared_mean"
    with pytest.raises(ValueError, match=f"distance='cos': allowed are {allowed}"):
        distill.pseudo_negative(*[jnp.ones(WIDE)] * 4, distance="cos")


def test_vicreg_of_one_row_is_refused():
    with pytest.raises(ValueError, match="B=1 rows: allowed are 2 and more"):
        noncontrastive.vicreg(jnp.ones((1, 3)), jnp.ones((1, 3)))


@pytest.mark.parametrize("name", CASES)
def test_mismatched_shapes_raise(name):
    loss, _, shapes, _ = CASES[name]
    for i in range(len(shapes)):
        arrays = [jnp.ones(s) for s in shapes]
        # It would broadcast.
        arrays[i] = arrays[i][:1]
        with pytest.raises(AssertionError):
            loss(*arrays)
    with pytest.raises(AssertionError):
        loss(*[jnp.ones(3)] * len(shapes))


def test_pnr_supcon_wants_one_label_per_example():
    for labels in (jnp.zeros(1, int), jnp.zeros((4, 1), int)):
        with pytest.raises(AssertionError):
            distill.pnr_supcon(*[jnp.ones(s) for s in SUPCON], labels)
