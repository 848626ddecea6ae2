"""Losses without negatives, and distillation by them, against float64 twins.

The twins spell out the equations element by element and share no code with the
losses; gradients are checked by central differences of the twins.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from helpers import interpreted, twins
from helpers import loss_twins as f64
from jaxcl.losses import distill, noncontrastive


def simsiam_twin(p1, p2, z1, z2):
    return -f64.mean_cos(p1, z2) / 2 - f64.mean_cos(p2, z1) / 2


def same_view_twin(between):
    return lambda p1, p2, f1, f2: (between(p1, f1) + between(p2, f2)) / 2


def other_view_twin(between):
    return lambda p1, p2, f1, f2: (between(p1, f2) + between(p2, f1)) / 2


DISTANCES = {
    "cosine": lambda p, f: -f64.mean_cos(p, f),
    "byol": f64.byol,
    "mse": f64.mse,
    "squared": f64.squared,
    "squared_mean": lambda p, f: f64.squared(p, f) / len(p),
}


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
        functools.partial(f64.pnr_supcon, labels=LABELS, **twin),
        SUPCON,
        (0, 1, 2, 3),
    )


NAMES = {"temperature": "tau", "distill_temperature": "tau_d"}
BARLOW = {"scale": 0.7, "off_diagonal": 0.3}
BARLOW_TWIN = functools.partial(f64.barlow, scale=0.7, weight=0.3)
WEIGHTS = {"invariance": 3.0, "variance": 5.0, "covariance": 7.0}
SLICES = twins.unit(np.random.default_rng(9).normal(size=(5, 4)))
SLICED = (3, 3, 4)  # three views, of which two are global


def of_columns(form):
    """The statistics of all columns, added."""
    return (
        lambda x: jnp.sum(noncontrastive.epps_pulley(x, form=form)),
        lambda x: sum(f64.epps_pulley(column, form) for column in x.T),
        [WIDE],
        (0,),
    )


def of_slices(**options):
    """LeJEPA along fixed slices."""
    return (
        lambda z: noncontrastive.lejepa(z, jnp.asarray(SLICES, z.dtype), **options),
        functools.partial(f64.lejepa, slices=SLICES, **options),
        [SLICED],
        (0,),
    )


# name: loss, twin, shapes, and the arguments that receive a gradient
CASES = {
    "barlow_default": (noncontrastive.barlow_twins, f64.barlow, [TALL] * 2, (0, 1)),
    "barlow": (
        functools.partial(noncontrastive.barlow_twins, **BARLOW),
        BARLOW_TWIN,
        [WIDE] * 2,
        (0, 1),
    ),
    "byol": (noncontrastive.byol, f64.byol, [WIDE] * 2, (0,)),
    "mse": (noncontrastive.mse, f64.mse, [WIDE] * 2, (0, 1)),
    "mean_cosine": (noncontrastive.mean_cosine, f64.mean_cos, [WIDE] * 2, (0, 1)),
    "vicreg_default": (noncontrastive.vicreg, f64.vicreg, [TALL] * 2, (0, 1)),
    "vicreg": (
        functools.partial(noncontrastive.vicreg, **WEIGHTS),
        functools.partial(f64.vicreg, **WEIGHTS),
        [WIDE] * 2,
        (0, 1),
    ),
    "cassle_barlow_default": (
        distill.cassle_barlow,
        same_view_twin(f64.barlow),
        [TALL] * 4,
        (0, 1),
    ),
    "cassle_barlow": (
        functools.partial(distill.cassle_barlow, **BARLOW),
        same_view_twin(BARLOW_TWIN),
        [WIDE] * 4,
        (0, 1),
    ),
    "cassle_byol": (distill.cassle_byol, same_view_twin(f64.byol), [WIDE] * 4, (0, 1)),
    "cassle_mse": (distill.cassle_mse, same_view_twin(f64.mse), [WIDE] * 4, (0, 1)),
    "less_forget": (
        distill.less_forget,
        same_view_twin(lambda z, f: 1 - f64.mean_cos(z, f)),
        [WIDE] * 4,
        (0, 1),
    ),
    "ibot": (
        functools.partial(noncontrastive.ibot, hides=np.array([1, 0, 1])),
        f64.ibot,
        [(3, 2, 5)] * 2,
        (0,),
    ),
    "koleo": (noncontrastive.koleo, f64.koleo, [(6, 4)], (0,)),
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
    "dino_default": (noncontrastive.dino, f64.dino, [(4, 2, 5)] * 2, (0,)),
    "dino": (
        functools.partial(noncontrastive.dino, temperature=0.7),
        functools.partial(f64.dino, temperature=0.7),
        [(3, 4, 5), (3, 2, 5)],
        (0,),
    ),
    "cassle_prototypes_default": (
        distill.cassle_prototypes,
        f64.cassle_prototypes,
        [WIDE] * 4 + [(5, 4)] * 2,
        (0, 1, 4),
    ),
    "cassle_prototypes": (
        functools.partial(distill.cassle_prototypes, temperature=0.6),
        functools.partial(f64.cassle_prototypes, temperature=0.6),
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
    loss, _, shapes, _ = CASES[name]
    twins.check_bfloat16(loss, shapes)


@pytest.mark.parametrize("name", FORMS)
def test_constant_columns_and_empty_rows_stay_finite(name):
    loss, _, shapes, _ = CASES[name]
    arrays = [jnp.asarray(a, jnp.float32) for a in draw(*shapes, seed=4)]
    inputs = (
        [a.at[:, 0].set(5.0) for a in arrays],
        [a.at[0].set(0.0) for a in arrays],
        [jnp.zeros_like(a) for a in arrays],
        [1e-20 * a for a in arrays],
        [jnp.ones_like(a) for a in arrays],
    )
    twins.check_finite(loss, inputs)


@pytest.mark.parametrize(
    "loss, twin",
    [(noncontrastive.barlow_twins, f64.barlow), (noncontrastive.vicreg, f64.vicreg)],
)
def test_a_large_mean_does_not_spoil_the_variance(loss, twin):
    # 4096 and steps of 1/16 are exact in float32; their squares are not.
    arrays = [np.round(16 * a) / 16 + 4096.0 for a in draw(TALL, TALL, seed=5)]
    value = interpreted.jit(loss)(*map(jnp.float32, arrays))
    np.testing.assert_allclose(value, twin(*arrays), rtol=1e-4)


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
