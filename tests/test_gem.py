"""GEM and A-GEM against a general solver in float64, and their steps by hand."""

import contextlib
import functools
import inspect

import chex
import jax
import jax.flatten_util
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import optimize

from helpers import interpreted, online_toy
from jaxcl import sharding
from jaxcl.methods import agem, gem, online

CODE = {"margin": 0.5, "ridge": 1e-3}
PAPER = {"margin": 0.0, "ridge": 0.0}
WIDTH, MOST = 40, 20
_project = jax.jit(gem.project)


def project(gradient, rows, margin, ridge, mask=None):
    """One program for all: rows that are not there, and hold nan, are masked."""
    dtype, missing = gradient.dtype, MOST - len(rows)
    rows = np.pad(rows, ((0, missing), (0, 0)), constant_values=np.nan)
    mask = np.ones(MOST - missing, bool) if mask is None else mask
    mask = np.pad(mask, (0, missing))
    found = _project(
        gradient, rows, margin=dtype.type(margin), ridge=dtype.type(ridge), mask=mask
    )
    assert found.dtype == dtype and found.shape == gradient.shape
    return np.array(found)


def twin(gradient, rows, margin, ridge):
    """The same by least squares in v - margin, without a Gram matrix."""
    if not (rows @ gradient < 0).any():
        return gradient
    count = len(rows)
    matrix = np.concatenate([rows.T, np.sqrt(ridge) * np.eye(count)])
    target = -np.concatenate([gradient, np.zeros(count)]) - matrix.sum(axis=1) * margin
    more, _ = optimize.nnls(matrix, target, maxiter=1000 * count)
    return gradient + rows.T @ (margin + more)


def cases(count):
    """Name, gradient and memory gradients; all but the last are violated."""
    rng = np.random.default_rng(count)
    rows, gradient = rng.normal(size=(count, WIDTH)), rng.normal(size=WIDTH)
    common = rng.normal(size=WIDTH)
    toward = rows + 2 * common
    every = np.arange(count)[:, None]
    pairs, three = every[:, 0] // 2, np.arange(WIDTH) < 3
    yield "some violated", gradient - rows[0], rows
    yield "all violated", gradient - 3 * common, toward
    yield "collinear", gradient - 3 * common, toward[pairs] * (1 + every)
    yield "opposite", gradient - rows[0], rows[pairs] * (1 - 2 * (every % 2))
    yield "equal", gradient - 3 * common, np.tile(common, (count, 1))
    yield "zeros", gradient - 3 * common, toward * (every % 3 != 1)
    yield "scales", gradient - 3 * common, toward * 10.0 ** ((every * 3) % 7 - 3)
    yield "three dimensions", gradient - 3 * common, toward * three
    yield "unviolated", common, toward * np.sign(toward @ common)[:, None]


@pytest.mark.parametrize("options", [PAPER, CODE, {"margin": 2.0, "ridge": 0.0}])
@pytest.mark.parametrize("count", [1, 7, 20])
def test_projection_is_the_general_solver_s(count, options):
    for name, gradient, rows in cases(count):
        expected = twin(gradient, rows, **options)
        assert np.array_equal(expected, gradient) == (name == "unviolated"), name
        size = np.abs(expected).max() + np.abs(gradient).max()
        near = functools.partial(
            np.testing.assert_allclose, desired=expected, rtol=0, err_msg=name
        )
        with jax.enable_x64(True):
            near(project(gradient, rows, **options), atol=1e-9 * size)
        gradient, rows = np.float32(gradient), np.float32(rows)
        near(project(gradient, rows, **options), atol=2e-5 * size)
        if name == "unviolated":
            assert np.array_equal(project(gradient, rows, **options), gradient)


def test_projection_of_many_that_hardly_differ():
    """In f32 the constraints hold, if the vector is not quite the nearest."""
    rng = np.random.default_rng(0)
    common, noise = rng.normal(size=WIDTH), rng.normal(size=(MOST, WIDTH))
    for apart in (1e-2, 1e-3, 1e-4, 1e-6):
        rows = np.float32(common + apart * noise)
        gradient = np.float32(0.1 * rng.normal(size=WIDTH) - common)
        found = np.float64(project(gradient, rows, **PAPER))
        length = np.linalg.norm(gradient)
        unit = rows / np.linalg.norm(rows, axis=1, keepdims=True)
        assert (unit @ found).min() > -1e-4 * length
        exact = twin(np.float64(gradient), np.float64(rows), **PAPER)
        assert np.linalg.norm(found - exact) < 2e-3 * length


def test_an_inner_product_of_0_is_none_that_is_violated():
    rows = np.eye(2, WIDTH, dtype=np.float32)
    gradient = np.pad(np.float32([0.0, 2.0, 3.0]), (0, WIDTH - 3))
    np.testing.assert_array_equal(project(gradient, rows, **CODE), gradient)
    defaults = inspect.signature(gem.project).parameters
    assert {name: defaults[name].default for name in CODE} == CODE


@pytest.mark.parametrize("options", [PAPER, CODE])
def test_rows_that_do_not_exist_reach_nothing(options):
    _, gradient, rows = next(cases(5))
    gradient, rows = np.float32(gradient), np.float32(rows)
    mask = np.array([True, False, True, False, True])
    expected = project(gradient, rows[mask], **options)
    assert not np.array_equal(expected, gradient)
    for other in (np.nan, -1e3 * gradient):
        given = np.where(mask[:, None], rows, other)
        found = project(gradient, given, mask=mask, **options)
        np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)
        none = project(gradient, given, mask=np.zeros(5, bool), **options)
        assert np.array_equal(none, gradient)


def test_agem_projection():
    rng = np.random.default_rng(0)
    gradient, reference = rng.normal(size=(2, 30))
    reference *= -np.sign(gradient @ reference)
    expected = gradient - gradient @ reference / (reference @ reference) * reference
    for scale in (1.0, 1e-30, 1e30):  # their squares are not f32
        found = agem.project(np.float32(gradient), np.float32(scale * reference))
        np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)
    gradient = np.float32(gradient)
    for other in (-reference, 0 * reference):
        assert np.array_equal(agem.project(gradient, np.float32(other)), gradient)
    # One constraint: GEM's.
    same = project(gradient, np.float32(reference[None]), **PAPER)
    np.testing.assert_allclose(same, expected, rtol=1e-5, atol=1e-6)


# Steps

CLASSES, LR, TASKS = 6, online_toy.LR, 4
FOR_ACCELERATORS = sharding.compile_target  # a loop is not written out


def parts(size=6):
    made = online_toy.parts(capacity=24, size=size)
    return made._replace(num_classes=CLASSES, num_tasks=TASKS)


# Three tasks; the third is the present one, and has rows in the memory too.
BATCHES = [
    online_toy.batch(0, [0, 1, 1, 0, 0, 1]),
    online_toy.batch(1, [2, 3, 2, 2, 3, 3]),
    online_toy.batch(2, [4, 5, 4, 4, 5, 5]),
]
NEXT = online_toy.batch(3, [4, 4, 5, 5, 5, 5])


@functools.cache
def compiled(module, **given):
    options = {"size": 12} if module is agem else {}
    # Its quadratic program takes too many turns for Python.
    compile_step = interpreted.jit if module is agem else jax.jit
    return compile_step(module.make(parts(**options), **given).step)


@functools.cache
def started():
    """A state in the third task, whose memory holds all BATCHES."""
    state = jax.jit(agem.make(parts()).init)(jax.random.key(0), NEXT)
    step = compiled(agem)
    for task, rows in enumerate(BATCHES):
        learnt = state.replace(task=jnp.int32(task))
        state, _ = step(learnt, rows)
        for _ in range(4):  # on the same batch; it is stored once
            again = learnt.replace(params=state.params, stats=state.stats)
            state, _ = step(again, rows)
    assert int(state.extra.memory.filled.sum()) == 18
    return state


@interpreted.jit
def slope(params, stats, rows):
    net, images = (
        online.build_network(parts(), "linear"),
        parts().eval_transform(rows["image"]),
    )
    return online_toy.slope(net, params, stats, images, [(1.0, rows["label"])])


def gradient_of(state, stats, rows):
    """Value, flat gradient, statistics and how to restore a tree."""
    (value, after), grads = slope(state.params, stats, rows)
    flat, restore = jax.flatten_util.ravel_pytree(grads)
    return value, np.float64(flat), after, restore


@functools.cache
def gradients():
    """Of the incoming rows, then of each past task, with the statistics' path."""
    state = started()
    value, own, stats, restore = gradient_of(state, state.stats, NEXT)
    path, past = [stats], []
    for rows in BATCHES[:2]:
        _, flat, stats, _ = gradient_of(state, stats, rows)
        path.append(stats)
        past.append(flat)
    return value, own, np.stack(past), path, restore


def check(step, direction, stats, task=2):
    state = started().replace(task=jnp.int32(task))
    new, metrics = step(state, NEXT)
    value, *_, restore = gradients()
    expected = jax.tree.map(
        lambda p, g: p - LR * g, state.params, restore(jnp.float32(direction))
    )
    chex.assert_trees_all_close(new.params, expected, rtol=1e-4, atol=2e-6)
    chex.assert_trees_all_close(new.stats, stats, rtol=1e-5, atol=1e-6)
    length = np.linalg.norm(direction)
    np.testing.assert_allclose(metrics["grad_norm"], length, rtol=1e-4)
    np.testing.assert_allclose(metrics["loss"], value, rtol=1e-5)


@pytest.mark.parametrize(
    ("given", "options", "where"),
    [
        ({}, PAPER, contextlib.nullcontext),
        ({"form": "code", "margin": 0.1}, CODE | {"margin": 0.1}, FOR_ACCELERATORS),
    ],
)
def test_gem_s_step(given, options, where):
    """Rows of the present task and tasks to come are no constraints."""
    _, own, past, path, _ = gradients()
    assert (past @ own < 0).any()
    step = compiled(gem, **given)  # six rows are all there are of a task
    with where():
        check(step, twin(own, past, **options), path[2])
    one = twin(own, past[:1], **options)
    assert not np.allclose(one, twin(own, past, **options), rtol=0.1)
    check(step, one, path[1], task=1)
    check(step, own, path[0], task=0)  # fine-tuning


@pytest.mark.parametrize("plus", [False, True])
def test_agem_s_step(plus):
    """With twelve rows of two tasks in the past, all are drawn."""
    _, own, _, path, _ = gradients()
    rows = {key: jnp.concatenate([b[key] for b in BATCHES[:2]]) for key in NEXT}
    _, reference, stats, _ = gradient_of(started(), path[0], rows)
    assert own @ reference < 0
    direction = own - own @ reference / (reference @ reference) * reference
    step = compiled(agem, plus=True) if plus else compiled(agem)
    check(step, direction + plus * reference, stats)
    check(step, own, path[0], task=0)
