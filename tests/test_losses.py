"""Losses against float64 twins that spell out the equations row by row."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from helpers import interpreted, twins
from helpers import loss_twins as f64
from jaxcl import core, sharding
from jaxcl.losses import contrastive, distill, incremental, prototype, replay, teacher


def draw(*shapes, seed=0):
    rng = np.random.default_rng(seed)
    return [rng.normal(size=s) * rng.uniform(0.5, 2.0) for s in shapes]


ROWS, FIVE = (3, 4), (5, 4)
LABELS = np.array([0, 1, 0, 2, 1, 0])  # label 2 has no positive
MASK = np.array([True, True, False, True, True, False])
EXISTS = np.array([True, True, True, True, False, True])  # label 1 loses its pair
OF = np.array([0, 0, 1, 2])  # two views of one example, one of two others
THERE = np.array([True, False, True, True, False])
QUEUES = [ROWS] * 8 + [(2, 5, 4), (2, 6, 4)]


def case(loss, twin, shapes, moving, of_loss=None, of_twin=None, **options):
    """The loss, its twin, shapes, and the arguments that receive a gradient."""
    of_loss = {name: jnp.asarray(x) for name, x in (of_loss or {}).items()}
    loss = functools.partial(loss, **of_loss, **options)
    return loss, functools.partial(twin, **(of_twin or {}), **options), shapes, moving


nt_xent = functools.partial(case, contrastive.nt_xent, f64.nt_xent)
info_nce = functools.partial(case, contrastive.info_nce, f64.info_nce)
m_hml = functools.partial(case, contrastive.m_hml, f64.m_hml)
cassle = functools.partial(
    case, distill.cassle_contrastive, f64.cassle, [ROWS] * 4, (0, 1)
)
moco = functools.partial(case, distill.pnr_moco, f64.pnr_moco, QUEUES, (0, 1, 4, 5))
BOTH = {"temperature": 0.3, "distill_temperature": 0.15}


def sup_con(exists=None, mask=None, **options):
    there = slice(None) if exists is None else exists
    of_loss = {"example_mask": exists, "anchor_mask": mask}
    of_loss = {name: x for name, x in of_loss.items() if x is not None}
    mask = mask if mask is None else mask[there]
    return case(
        functools.partial(contrastive.sup_con, labels=jnp.asarray(LABELS)),
        lambda z, **o: f64.sup_con(z[there], LABELS[there], mask=mask, **o),
        [(6, 4)],
        (0,),
        of_loss,
        **options,
    )


NOBODY = {"mask": np.zeros(5, bool)}
CASES = {
    "nt_xent": nt_xent([ROWS] * 2, (0, 1), temperature=0.3),
    "nt_xent_default": nt_xent([ROWS] * 2, (0, 1)),
    "nt_xent_one_row": nt_xent([(1, 4)] * 2, (0, 1)),
    "info_nce": info_nce([ROWS, ROWS, FIVE], (0, 1, 2), temperature=0.3),
    "info_nce_decoupled": info_nce(
        [ROWS, ROWS, FIVE], (0, 1, 2), positive_in_denominator=False
    ),
    "info_nce_masked": info_nce(
        [ROWS, ROWS, FIVE], (0, 1, 2), {"negative_mask": THERE}, {"there": THERE}
    ),
    "info_nce_of_the_batch": info_nce(
        [(4, 4)] * 2, (0, 1), {"examples": OF}, {"of": OF}
    ),
    "info_nce_mixed": info_nce(
        [(4, 4), (4, 4), FIVE],
        (0, 1, 2),
        {"examples": OF, "negative_mask": THERE},
        {"of": OF, "there": THERE},
        temperature=0.3,
    ),
    "info_nce_mixed_decoupled": info_nce(
        [(4, 4), (4, 4), FIVE],
        (0, 1, 2),
        {"examples": OF},
        {"of": OF},
        positive_in_denominator=False,
    ),
    "m_hml": m_hml([ROWS, ROWS, FIVE], (0, 1, 2), weight=0.4, temperature=0.3),
    "m_hml_masked": case(
        contrastive.m_hml,
        lambda a, p, m: f64.m_hml(a, p, m[THERE]),
        [ROWS, ROWS, FIVE],
        (0, 1, 2),
        {"mask": THERE},
    ),
    "m_hml_of_nothing": case(
        functools.partial(contrastive.m_hml, weight=0.4, temperature=0.3),
        lambda a, p, m: f64.m_hml(a, p, a, 0.4, 0.3) - f64.m_hml(a, p, a, 0, 0.3),
        [ROWS, ROWS, FIVE],
        (0, 1),
        NOBODY,
    ),
    "sup_con": sup_con(),
    "sup_con_masked": sup_con(mask=MASK, temperature=0.4),
    "sup_con_of_existing_rows": sup_con(EXISTS),
    "sup_con_of_existing_rows_masked": sup_con(EXISTS, MASK),
    "cassle": cassle(temperature=0.3),
    "cassle_paper": cassle(form="paper"),
    "pnr_moco": moco(**BOTH),
    "pnr_moco_default": moco(),
    "pnr_moco_paper": moco(form="paper", **BOTH),
}
for pn1, pn2 in ((True, True), (True, False), (False, True), (False, False)):
    options = {"pn1": pn1, "pn2": pn2}
    CASES[f"pnr_simclr_{pn1}_{pn2}"] = case(
        distill.pnr_simclr,
        f64.pnr_simclr,
        [ROWS] * 6,
        (0, 1, 2, 3),
        temperature=0.3,
        **options,
    )
    if not (pn1 and pn2):
        CASES[f"pnr_moco_{pn1}_{pn2}"] = moco(**BOTH, **options)


# The student's rows are as wide as the teacher's, or their relations alone count.
for name, twin, width in (
    ("cosine", f64.teacher_cosine, 4),
    ("smooth_l1", f64.teacher_smooth_l1, 4),
    ("rkd_distance", f64.rkd_distance, 3),
    ("rkd_angle", f64.rkd_angle, 3),
):
    loss, shapes = getattr(teacher, name), [FIVE, (5, width)]
    CASES[name] = case(loss, twin, shapes, (0,))
    CASES[f"{name}_masked"] = case(
        lambda p, t, mask, loss=loss: loss(8 * p, t, mask=mask),
        lambda p, t, twin=twin: twin(8 * p[THERE], t[THERE]),
        shapes,
        (0,),
        {"mask": THERE},
    )


@pytest.mark.parametrize("name", CASES)
def test_values_and_gradients_equal_the_equation(name):
    loss, twin, shapes, moving = CASES[name]
    twins.check(loss, twin, draw(*shapes), moving)


BATCHED = ["nt_xent", "info_nce", "cassle", "pnr_simclr_True_True", "pnr_moco"]


@pytest.mark.parametrize("name", BATCHED)
def test_bfloat16_is_computed_in_float32(name):
    loss, _, shapes, _ = CASES[name]
    twins.check_bfloat16(loss, shapes)


COUNT, DIM = 6, 128
WIDE = (COUNT, DIM)
SOME = jnp.arange(COUNT) % 5


def nce_two(a, p, old, new, temperature):
    return incremental.nce_two(a, p, old, new, growth=0.25, temperature=temperature)


def prototypes_of(loss):
    def of(z, c, temperature):
        return loss(core.l2_normalize(z), core.l2_normalize(c[:5]), temperature)

    return of


def sample_nce(z, c, temperature):
    weights, old = jnp.full(COUNT, 0.2), jnp.arange(5) < 3
    return prototype.sample_nce(z, SOME, c, weights, old, temperature=temperature)


def prd(z, c, temperature):
    both = {"temperature": temperature, "teacher_temperature": temperature}
    return prototype.prd(z, z[::-1], c, c, jnp.ones(5), **both)


def ird(z, past, temperature):
    both = {"temperature": temperature, "teacher_temperature": temperature}
    return prototype.ird(z, past, **both)


def pnr_supcon(*arrays, temperature):
    both = {"temperature": temperature, "distill_temperature": temperature}
    return distill.pnr_supcon(*arrays, SOME, **both)


def pnr_moco(*arrays, temperature, **more):
    both = {"temperature": temperature, "distill_temperature": temperature}
    queues = (jnp.stack([x, x[::-1]]) for x in arrays[8:])
    return distill.pnr_moco(*arrays[:8], *queues, **both, **more)


def zero(temperature):
    return 0.0


def opposite(temperature):
    """Of a term whose positive, at most 1 / T, is not in the denominator."""
    return -2 / temperature


# name: loss of so many arrays, and its lower bound for a temperature
BOUNDED = {
    "nt_xent": (contrastive.nt_xent, 2, zero),
    "info_nce": (contrastive.info_nce, 3, zero),
    "info_nce_decoupled": (
        functools.partial(contrastive.info_nce, positive_in_denominator=False),
        3,
        opposite,
    ),
    "m_hml": (contrastive.m_hml, 3, opposite),
    "m_hml_of_nothing": (
        functools.partial(contrastive.m_hml, mask=jnp.zeros(COUNT, bool)),
        3,
        zero,
    ),
    "sup_con": (
        lambda z, temperature: contrastive.sup_con(z, SOME, temperature=temperature),
        1,
        zero,
    ),
    "aml_sup_con": (
        lambda a, p, n, temperature: replay.aml_sup_con(
            a, p, n, SOME, SOME + 1, temperature=temperature
        ),
        3,
        zero,
    ),
    "cassle": (distill.cassle_contrastive, 4, zero),
    "cassle_paper": (
        functools.partial(distill.cassle_contrastive, form="paper"),
        4,
        opposite,
    ),
    "pnr_simclr": (distill.pnr_simclr, 6, opposite),
    "pnr_supcon": (pnr_supcon, 6, opposite),
    "pnr_moco": (pnr_moco, 10, zero),
    "pnr_moco_paper": (functools.partial(pnr_moco, form="paper"), 10, opposite),
    "nce_one": (incremental.nce_one, 3, zero),
    "nce_two": (nce_two, 4, lambda temperature: math.log(0.75)),
    "sample_nce": (prototypes_of(sample_nce), 2, zero),
    "prd": (prototypes_of(prd), 2, zero),
    "ird": (ird, 2, zero),
}


def at_the_edge(count):
    """Rows for which a loss is at its bound, but for rounding."""
    for seed in range(2):
        arrays = [np.float32(a) for a in draw(*[WIDE] * count, seed=seed)]
        lengths = [1 + 0.3 * i for i in range(count)]
        same = [arrays[0] * x for x in lengths]
        yield arrays
        yield same  # all views agree
        if count > 1:  # each with the one after the next
            yield [arrays[i % 2] * x for i, x in enumerate(lengths)]
        yield [np.broadcast_to(a[:1], WIDE) for a in arrays]
        yield [np.broadcast_to(a[:1], WIDE) for a in same]  # collapsed
        yield [a * (-1) ** i for i, a in enumerate(same)]  # as far apart as can be
        yield [1e6 * a * (np.arange(COUNT) > 0)[:, None] for a in arrays]
    yield [np.zeros(WIDE, np.float32)] * count


@pytest.mark.parametrize("name", BOUNDED)
def test_no_temperature_takes_a_loss_below_its_bound(name):
    """NT-Xent at 1e-20 was -1.8e13, the difference of two rounded means."""
    loss, count, bound = BOUNDED[name]
    program = interpreted.jit(
        jax.value_and_grad(
            lambda arrays, temperature: loss(*arrays, temperature=temperature)
        )
    )
    for rows in at_the_edge(count):
        for temperature in (1.0, 1e-2, 1e-6):
            value, gradient = program(rows, temperature)
            assert all(np.isfinite(x).all() for x in gradient)
            # Cosines are rounded, and a bound below 0 is made of them.
            least = bound(temperature) * (1 + 1e-6)
            assert np.isfinite(value) and value >= least, (name, temperature)


def test_info_nce_without_any_negative_is_zero_with_a_zero_gradient():
    anchors, positives, negatives = map(jnp.float32, draw(ROWS, ROWS, (5, 4)))
    nobody = jnp.zeros(5, bool)
    for options in (
        {"negatives": negatives, "negative_mask": nobody},
        {"examples": jnp.zeros(3, int)},
        {"negatives": negatives, "negative_mask": nobody, "examples": jnp.ones(3)},
    ):
        for inside in (True, False):
            loss = functools.partial(
                contrastive.info_nce, positive_in_denominator=inside, **options
            )
            step = interpreted.jit(jax.value_and_grad(loss, argnums=(0, 1)))
            value, gradients = step(anchors, positives)
            assert value == 0.0 and not any(np.any(g) for g in gradients)


def test_sup_con_does_not_see_what_rows_that_do_not_exist_hold():
    (z,) = map(jnp.float32, draw((6, 4), seed=3))

    def loss(mask, z, labels=LABELS):
        labels = jnp.asarray(labels)
        return contrastive.sup_con(z, labels, example_mask=mask, temperature=0.01)

    exists = jnp.float32(EXISTS)
    value_of = interpreted.jit(loss)
    value, gradients = twins.check_masked(loss, exists, [z], [4])
    assert value == 0 and not np.any(np.asarray(gradients[0]))
    other = np.where(EXISTS, LABELS, 0)
    same = value_of(exists, z, other), value_of(exists, z)
    np.testing.assert_allclose(*same, rtol=1e-6)
    assert value_of(np.arange(6) == 0, z) == 0.0  # it has nothing to be near to


def test_a_batch_split_over_devices_gives_the_loss_of_the_whole_batch():
    split = sharding.split_sharding(sharding.mesh(2))
    arrays = [jnp.asarray(a, jnp.float32) for a in draw(*[(4, 4)] * 6, seed=6)]
    step = jax.jit(jax.value_and_grad(distill.pnr_simclr))
    value, gradient = step(*arrays)
    shared = [jax.device_put(a, split) for a in arrays]
    np.testing.assert_allclose(step(*shared)[0], value, rtol=1e-5)
    np.testing.assert_allclose(step(*shared)[1], gradient, rtol=1e-4, atol=1e-6)
    # Concatenated views would be moved between devices.
    assert "all-to-all" not in step.lower(*shared).compile().as_text()


def test_l2_normalize_divides_by_length_or_eps():
    x = jnp.array([[3.0, 4.0], [0.0, 0.0], [3e-13, 4e-13], [3e8, -4e8]])
    expected = [[0.6, 0.8], [0.0, 0.0], [0.3, 0.4], [0.6, -0.8]]
    np.testing.assert_allclose(core.l2_normalize(x), expected, rtol=1e-5)
    gradient = jax.grad(lambda x: core.l2_normalize(x)[:, 0].sum())(x)
    assert not np.any(np.asarray(gradient[1]))
    np.testing.assert_allclose(gradient[0], [0.128, -0.096], rtol=1e-5)


def test_unit_rows_need_no_normalising():
    """The keywords that skip it give the same on unit rows, and not on others."""
    *rows, one, other = map(np.float32, draw(*[(4, 6)] * 8, *[(2, 9, 6)] * 2))
    queues = one, other
    unit = [np.float32(twins.unit(queue)) for queue in queues]
    for own in (queues, unit):
        plain = interpreted.jit(distill.pnr_moco)(*rows, *own)
        skip = functools.partial(distill.pnr_moco, unit_queues=True)
        skipped = interpreted.jit(skip)(*rows, *own)
        assert bool(abs(plain - skipped) < 1e-5) == (own is unit)
        plain = interpreted.jit(contrastive.info_nce)(*rows[:2], own[0][0])
        skip = functools.partial(contrastive.info_nce, unit_negatives=True)
        skipped = interpreted.jit(skip)(*rows[:2], own[0][0])
        assert bool(abs(plain - skipped) < 1e-5) == (own is unit)


def test_sup_con_without_positives_is_zero_with_a_zero_gradient():
    for z, labels, mask in (
        (jnp.ones((1, 4)), jnp.zeros(1, int), None),
        (jnp.eye(4), jnp.arange(4), None),
        (jnp.eye(4), jnp.zeros(4, int), jnp.zeros(4)),
    ):
        step = interpreted.jit(jax.value_and_grad(contrastive.sup_con))
        value, gradient = step(z, labels, anchor_mask=mask)
        assert value == 0.0 and not np.any(np.asarray(gradient))
