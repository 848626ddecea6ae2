"""Log-sum-exps without the matrix of products, against the matrix and the twins."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from helpers import interpreted, twins
from jaxcl import sharding
from jaxcl.losses import contrastive, distill, streaming
from jaxcl.memory import duel


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch):
    """Tiles so small that there are several, and a ragged one."""
    monkeypatch.setattr(streaming, "_TILE", 16)


def matrix(anchors, rows, counts=None):
    """The same by the matrix."""
    logits = anchors @ rows.T
    if counts is not None:
        logits = jnp.where(counts, logits, -jnp.inf)
    return jax.nn.logsumexp(logits, axis=1)


# Anchors, rows and their dimension: less than a tile, ragged ones, several tiles.
SIZES = [(3, 5, 4), (33, 50, 8), (64, 96, 16)]


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("sizes", SIZES)
def test_value_and_gradients_are_those_of_the_matrix(sizes, masked):
    (count, others, dim), rng = sizes, np.random.default_rng(0)
    anchors, rows = rng.normal(size=(count, dim)), rng.normal(size=(others, dim))
    slope, options, counts = rng.normal(size=count), {}, None
    if masked:
        groups = rng.integers(0, 3, count), rng.integers(0, 3, others)
        exists = rng.random(others) < 0.8
        options = dict(
            exists=jnp.asarray(exists), groups=tuple(map(jnp.asarray, groups))
        )
        counts = (groups[0][:, None] != groups[1]) & exists
    with jax.enable_x64(True):
        both = [
            interpreted.jit(
                jax.value_and_grad(lambda *x, f=f: jnp.sum(f(*x) * slope), (0, 1))
            )(jnp.asarray(anchors), jnp.asarray(rows))
            for f in (
                functools.partial(streaming.logsumexp, **options),
                functools.partial(matrix, counts=counts),
            )
        ]
    jax.tree.map(
        functools.partial(np.testing.assert_allclose, rtol=1e-10, atol=1e-12), *both
    )


def test_an_anchor_that_no_row_is_left_for_has_no_gradient():
    anchors, rows = jnp.ones((2, 4)), jnp.ones((3, 4))
    groups = jnp.array([0, 1]), jnp.zeros(3, jnp.int32)

    def loss(anchors, rows):
        total = streaming.logsumexp(anchors, rows, groups=groups)
        return jnp.sum(total), total  # whether or not a loss leaves it out

    slopes, total = jax.grad(loss, (0, 1), has_aux=True)(anchors, rows)
    assert total[0] < -1e29 and abs(total[1] - 4 - np.log(3)) < 1e-5
    np.testing.assert_allclose(slopes[0], [[0.0] * 4, [1.0] * 4], rtol=1e-5)
    np.testing.assert_allclose(slopes[1], np.full((3, 4), 1 / 3), rtol=1e-5)


ROWS, THERE = (3, 4), jnp.array([True, False, True, True, False])
OF = jnp.array([0, 0, 1, 2])
LOSSES = {
    "nt_xent": (contrastive.nt_xent, [ROWS] * 2),
    "nt_xent_one_row": (contrastive.nt_xent, [(1, 4)] * 2),
    "info_nce": (contrastive.info_nce, [ROWS, ROWS, (5, 4)]),
    "info_nce_decoupled": (
        functools.partial(contrastive.info_nce, positive_in_denominator=False),
        [ROWS, ROWS, (5, 4)],
    ),
    "info_nce_mixed": (
        functools.partial(contrastive.info_nce, examples=OF, negative_mask=THERE),
        [(4, 4), (4, 4), (5, 4)],
    ),
    "info_nce_of_nothing": (
        functools.partial(contrastive.info_nce, negative_mask=jnp.zeros(5, bool)),
        [ROWS, ROWS, (5, 4)],
    ),
    "m_hml": (functools.partial(contrastive.m_hml, mask=THERE), [ROWS, ROWS, (5, 4)]),
    "cassle": (distill.cassle_contrastive, [ROWS] * 4),
    "cassle_paper": (
        functools.partial(distill.cassle_contrastive, form="paper"),
        [ROWS] * 4,
    ),
    "pnr_simclr": (distill.pnr_simclr, [ROWS] * 6),
    "pnr_simclr_plain": (
        functools.partial(distill.pnr_simclr, pn1=False, pn2=False),
        [ROWS] * 6,
    ),
    "pnr_moco": (distill.pnr_moco, [ROWS] * 8 + [(2, 5, 4), (2, 6, 4)]),
    "pnr_moco_pn1": (
        functools.partial(distill.pnr_moco, pn2=False, distill_temperature=0.3),
        [ROWS] * 8 + [(2, 5, 4), (2, 6, 4)],
    ),
    "distinctiveness": (
        lambda *x, **k: jnp.mean(duel.distinctiveness(*x, filled=THERE, **k)),
        [ROWS, (5, 4)],
    ),
}


@pytest.mark.parametrize("name", LOSSES)
def test_a_loss_and_its_gradients_are_those_of_its_matrix(name):
    """Which equal the equation, as test_losses.py and test_duel_memory.py say."""
    loss, shapes = LOSSES[name]
    rng = np.random.default_rng(3)
    arrays = [twins.unit(rng.normal(size=shape)) for shape in shapes]
    every = tuple(range(len(arrays)))
    with jax.enable_x64(True):
        found = [
            interpreted.jit(
                jax.value_and_grad(functools.partial(loss, **options), every)
            )(*map(jnp.asarray, arrays))
            for options in ({}, {"logsumexp": streaming.logsumexp})
        ]
    jax.tree.map(
        functools.partial(np.testing.assert_allclose, rtol=1e-9, atol=1e-10), *found
    )


def test_devices_share_the_anchors():
    mesh, rng = sharding.mesh(2), np.random.default_rng(4)
    arrays = [jnp.float32(rng.normal(size=(n, 8))) for n in (32, 32, 48)]

    def loss(anchors, positives, queue):
        form = streaming.logsumexp
        first = contrastive.info_nce(anchors, positives, queue, logsumexp=form)
        return first + contrastive.nt_xent(anchors, positives, logsumexp=form)

    places = [sharding.split_sharding(mesh)] * 2 + [sharding.replicated(mesh)]
    every = (0, 1, 2)
    alone = jax.jit(jax.value_and_grad(loss, every))(*arrays)
    with sharding.use_mesh(mesh):
        shared = jax.jit(
            lambda *given: jax.value_and_grad(loss, every)(*given), in_shardings=places
        )(*arrays)
        with pytest.raises(ValueError, match="rows=5"):
            streaming.logsumexp(arrays[0][:5], arrays[2])
    jax.tree.map(
        functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-6),
        alone,
        shared,
    )


def test_no_program_has_the_matrix():
    shapes = [jax.ShapeDtypeStruct((n, 32), jnp.float32) for n in (96, 160)]

    def loss(form, *arrays):
        return jnp.sum(form(*arrays))

    def text(form):
        slope = jax.grad(functools.partial(loss, form), (0, 1))
        return jax.jit(slope).lower(*shapes).as_text()

    streamed = text(streaming.logsumexp)
    assert "96x16x" in streamed
    assert "96x160" not in streamed and "160x96" not in streamed
    assert "96x160" in text(matrix)  # a control
