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


def simsiam_twin(p1, p2, z1, z2):
    return -mean_cos(p1, z2) / 2 - mean_cos(p2, z1) / 2


def epps_pulley_twin(x, form="code"):
    """One column: the trapezoids one by one, over the whole range of t."""
    end, steps = (3, 32) if form == "code" else (5, 16)
    n, total = len(x), 0.0

    def integrand(t):
        mean = sum(complex(math.cos(t * v), math.sin(t * v)) for v in x) / n
        gap = mean - math.exp(-t * t / 2)
        return abs(gap) ** 2 * math.exp(-t * t / 2)

    for i in range(steps):
        low, high = (-end + 2 * end * j / steps for j in (i, i + 1))
        total += (high - low) * (integrand(low) + integrand(high)) / 2
    return n * total


def lejepa_twin(z, slices, weight=0.05, form="code", centre=2):
    n, views, features = z.shape
    normal = apart = 0.0
    for v in range(views):
        for a in slices:
            column = [float(row @ a) for row in z[:, v]]
            normal += epps_pulley_twin(column, form) / len(slices) / views
        for i in range(n):
            mean = sum(z[i, w] for w in range(centre)) / centre
            apart += np.sum((mean - z[i, v]) ** 2) / n / views
    if form == "code":
        apart /= features
    return weight * normal + (1 - weight) * apart


def softmax_twin(logits):
    powers = [math.exp(x - max(logits)) for x in logits]
    return [x / sum(powers) for x in powers]


def cross_entropy_twin(q, p):
    return -sum(x * math.log(y) for x, y in zip(q, p, strict=True))


def dino_twin(logits, targets, temperature=0.1):
    n, views, _ = logits.shape
    terms = [
        cross_entropy_twin(targets[i, g], softmax_twin(logits[i, v] / temperature))
        for i in range(n)
        for g in range(targets.shape[1])
        for v in range(views)
        if v != g
    ]
    return sum(terms) / len(terms)


def ibot_twin(logits, targets, temperature=0.1):
    """Views 0 and 2 hide both of their patches."""
    p = np.exp(logits / temperature)
    p = p / p.sum(axis=-1, keepdims=True)
    terms = [-np.sum(targets[v, m] * np.log(p[v, m])) for v in (0, 2) for m in (0, 1)]
    return np.mean(terms)


def koleo_twin(h):
    unit = twins.unit(h)
    apart = [
        min(np.linalg.norm(a - b) for j, b in enumerate(unit) if j != i)
        for i, a in enumerate(unit)
    ]
    return -np.mean(np.log(apart))


def cassle_prototypes_twin(p1, p2, f1, f2, learnt, frozen, temperature=0.1):
    terms = []
    for p, f in [*zip(p1, f1, strict=True), *zip(p2, f2, strict=True)]:
        mine, theirs = (
            softmax_twin([twins.cosine(x, row) / temperature for row in prototypes])
            for x, prototypes in ((p, learnt), (f, frozen))
        )
        terms.append(cross_entropy_twin(theirs, mine))
    return sum(terms) / len(terms)


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


def pnr_supcon_twin(
    *arrays, labels, tau=0.1, tau_d=0.2, pn1=True, pn2=True, others=False
):
    z1, z2, p1, p2, f1, f2 = arrays
    z, p, f, label = [*z1, *z2], [*p1, *p2], [*f1, *f2], [*labels, *labels]
    n = len(z)
    total = 0.0
    for i in range(n):
        current = [z[j] for j in range(n) if j != i]
        frozen = [f[j] for j in range(n) if j != i]
        same = [z[j] for j in range(n) if j != i and label[j] == label[i]]
        apart = [
            j for j in range(n) if j != i and not (others and label[j] == label[i])
        ]
        columns = current + ([f[j] for j in apart] if pn1 else [])
        total += sum(twins.nce(z[i], row, columns, tau) for row in same) / len(same)
        columns = frozen + ([z[j] for j in apart] if pn2 else [])
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
SLICES = twins.unit(np.random.default_rng(9).normal(size=(5, 4)))
SLICED = (3, 3, 4)  # three views, of which two are global


def of_columns(form):
    """The statistics of all columns, added."""
    return (
        lambda x: jnp.sum(noncontrastive.epps_pulley(x, form=form)),
        lambda x: sum(epps_pulley_twin(column, form) for column in x.T),
        [WIDE],
        (0,),
    )


def of_slices(**options):
    """LeJEPA along fixed slices."""
    return (
        lambda z: noncontrastive.lejepa(z, jnp.asarray(SLICES, z.dtype), **options),
        functools.partial(lejepa_twin, slices=SLICES, **options),
        [SLICED],
        (0,),
    )


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
    "cassle_byol": (distill.cassle_byol, same_view_twin(byol_twin), [WIDE] * 4, (0, 1)),
    "cassle_mse": (distill.cassle_mse, same_view_twin(mse_twin), [WIDE] * 4, (0, 1)),
    "less_forget": (
        distill.less_forget,
        same_view_twin(lambda z, f: 1 - mean_cos(z, f)),
        [WIDE] * 4,
        (0, 1),
    ),
    "ibot": (
        functools.partial(noncontrastive.ibot, hides=np.array([1, 0, 1])),
        ibot_twin,
        [(3, 2, 5)] * 2,
        (0,),
    ),
    "koleo": (noncontrastive.koleo, koleo_twin, [(6, 4)], (0,)),
    "relative_squared": (
        distill.relative_squared,
        lambda h, f: np.sum((h - f) ** 2) / np.sum(f**2),
        [(4, 2, 5)] * 2,
        (0,),
    ),
    "pnr_supcon_default": supcon({}, {}),
    "pnr_supcon_others": supcon({"other_classes": True}, {"other_classes": "others"}),
    "pnr_supcon_pn1": supcon({"pn2": False}, {"pn2": "pn2"}),
    "pnr_supcon_pn2": supcon({"pn1": False}, {"pn1": "pn1"}),
    "pnr_supcon": supcon({"temperature": 0.5, "distill_temperature": 0.3}, NAMES),
    "simsiam": (noncontrastive.simsiam, simsiam_twin, [WIDE] * 4, (0, 1)),
    "epps_pulley": of_columns("code"),
    "epps_pulley_paper": of_columns("paper"),
    "lejepa_default": of_slices(),
    "lejepa": of_slices(weight=0.3, form="paper", centre=3),
    "dino_default": (noncontrastive.dino, dino_twin, [(4, 2, 5)] * 2, (0,)),
    "dino": (
        functools.partial(noncontrastive.dino, temperature=0.7),
        functools.partial(dino_twin, temperature=0.7),
        [(3, 4, 5), (3, 2, 5)],
        (0,),
    ),
    "cassle_prototypes_default": (
        distill.cassle_prototypes,
        cassle_prototypes_twin,
        [WIDE] * 4 + [(5, 4)] * 2,
        (0, 1, 4),
    ),
    "cassle_prototypes": (
        functools.partial(distill.cassle_prototypes, temperature=0.6),
        functools.partial(cassle_prototypes_twin, temperature=0.6),
        [WIDE] * 4 + [(5, 4)] * 2,
        (0, 1, 4),
    ),
}
for name, between in DISTANCES.items():
    CASES[f"pseudo_negative_{name}"] = (
        functools.partial(distill.pseudo_negative, distance=name),
        other_view_twin(between),
        [WIDE] * 4,
        (0, 1),
    )


# Those that are not another case with other numbers.
FORMS = [name for name in CASES if not name.endswith(("_default", "_pn1", "_pn2"))]


@pytest.mark.parametrize("name", CASES)
def test_values_and_gradients_equal_the_equation(name):
    loss, twin, shapes, moving = CASES[name]
    twins.check(loss, twin, draw(*shapes), moving)


@pytest.mark.parametrize("name", FORMS)
def test_bfloat16_is_computed_in_float32(name):
    loss, twin, shapes, _ = CASES[name]
    # Computed in bfloat16 it would be off by 1e-2.
    arrays = draw(*shapes, seed=3)
    twins.check_bfloat16(loss, twin, arrays, rtol=2e-5, atol=1e-6)


@pytest.mark.parametrize("name", FORMS)
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
    [(noncontrastive.barlow_twins, barlow_twin), (noncontrastive.vicreg, vicreg_twin)],
)
def test_a_large_mean_does_not_spoil_the_variance(loss, twin):
    # 4096 and steps of 1/16 are exact in float32; their squares are not.
    arrays = [np.round(16 * a) / 16 + 4096.0 for a in draw(TALL, TALL, seed=5)]
    value = jax.jit(loss)(*map(jnp.float32, arrays))
    np.testing.assert_allclose(value, twin(*arrays), rtol=1e-4)


# Numbers in the paper's terms, worked out by hand or by the closed form of T.


@pytest.mark.parametrize(
    "logits, iterations, want",
    [
        ([[1, 0], [1, 0]], 3, [[0.5, 0.5], [0.5, 0.5]]),
        ([[1, 0], [0, 1]], 3, [[0.7310585786, 0.2689414214]] * 2),
        ([[2, 0], [1, 0]], 1, [[0.593845485, 0.406154515], [0.3497554091] * 2]),
        ([[2, 0], [1, 0]], 3, [[0.6223578796, 0.3776421204], [0.3774392279] * 2]),
    ],
)
def test_sinkhorn_at_points_known_by_hand(logits, iterations, want):
    found = noncontrastive.sinkhorn(
        jnp.float32(logits), temperature=1.0, iterations=iterations
    )
    np.testing.assert_allclose(found.sum(axis=1), 1, rtol=1e-6)
    np.testing.assert_allclose(found[0], want[0], rtol=1e-5)
    if logits[1] == [0, 1]:
        np.testing.assert_allclose(found[1], want[1][::-1], rtol=1e-5)
    else:
        np.testing.assert_allclose(found[1, 0], want[1][0], rtol=1e-5)


def test_sinkhorn_uses_all_prototypes_alike():
    logits = np.random.default_rng(3).normal(size=(6, 4))
    balanced = functools.partial(
        noncontrastive.sinkhorn, temperature=0.5, iterations=100
    )
    found = balanced(jnp.float32(logits))
    np.testing.assert_allclose(found.sum(axis=0), 6 / 4, rtol=1e-4)
    # So a preference of all for one prototype, which a centre would take away, is gone.
    shifted = balanced(jnp.float32(logits + [3.0, 0.0, -1.0, 0.0]))
    np.testing.assert_allclose(shifted, found, rtol=2e-3)
    sharp = noncontrastive.sinkhorn(jnp.float32(logits), temperature=1e-3)
    assert np.isfinite(sharp).all()


def test_targets_carry_no_gradient():
    logits = jnp.ones((2, 3)).at[0, 1].set(2.0)
    for make in (lambda x: noncontrastive.centred(x, x[0]), noncontrastive.sinkhorn):
        slope = jax.grad(lambda x, make=make: jnp.sum(make(x) ** 2))(logits)
        assert not np.any(slope)
