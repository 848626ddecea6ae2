"""CCLIS and Co2L on three tasks of two classes: tiny images, a tiny network.

Class 6 never comes. Augmentation mirrors every image, and so is no chance.
"""

import functools
import types

import chex
import jax
import jax.numpy as jnp
import numpy as np

from helpers import interpreted, online_toy, twins
from jaxcl.data import stream
from jaxcl.data.stream import scenarios
from jaxcl.methods import rehearsal

COUNTS = (7, 9, 8, 7, 8, 7)  # train rows of each class
CLASSES, LR = 7, online_toy.LR
WIDTHS = {"hidden_dim": 8, "output_dim": 4}
shaken, step, compiled = online_toy.shaken, online_toy.step, online_toy.compiled


def _examples():
    rng = np.random.default_rng(0)
    label = rng.permutation(np.repeat(np.arange(6, dtype=np.int32), COUNTS))
    shape = len(label), 8, 8, 1
    # Some are bright and some even: else all features would be near each other.
    bright, contrast = rng.uniform(0, [[200], [55]], (2, len(label)))[..., *[None] * 3]
    images = (bright + contrast * rng.uniform(size=shape)).astype(np.uint8)
    return stream.Examples(label, np.zeros_like(label), images)


EXAMPLES = _examples()
TASKS = scenarios.make(
    stream.Dataset(
        "toy", tuple("abcdef"), ("all",), EXAMPLES, validation=None, test=None
    ),
    name="class",
    num_tasks=3,
    evaluation="none",
).tasks


def rows_of(*classes):
    """Rows of the train split, i32[n]."""
    return np.flatnonzero(np.isin(EXAMPLES.label, classes)).astype(np.int32)


def task_of(index, *classes):
    """A task like no other, of any classes."""
    train = stream.Source(EXAMPLES, rows_of(*classes))
    return types.SimpleNamespace(index=index, train=train)


def parts(views=1):
    """Of two views the second alone is mirrored."""
    components = online_toy.parts()._replace(num_classes=CLASSES, replay=None)
    plain, mirror = components.eval_transform, components.augment

    def both(key, images):
        return jnp.stack([plain(images), mirror(key, images)[:, 0]], axis=1)

    return components if views == 1 else components._replace(augment=both)


def fresh(method):
    return compiled(method)[0](jax.random.key(0), batch([0]))


def begin(method, state, task):
    """The state at the first step of a task, as the loop makes it."""
    return method.begin_task(state.replace(task=jnp.int32(task.index)), task)


def batch(rows):
    rows = np.asarray(rows, np.int32)
    arrays = {"image": EXAMPLES.images, "label": EXAMPLES.label}
    return {"index": jnp.asarray(rows)} | {k: x[rows] for k, x in arrays.items()}


def in_task(method, stored, weights=None, task=TASKS[2]):
    """Within the third task, its network and its teacher both far from fresh.

    The memory holds the rows `stored` and has room for more.
    """
    state = fresh(method)
    for earlier in TASKS[:2]:
        state = begin(method, state, earlier)
    size, count = len(state.extra.memory.row), len(stored)
    weights = np.zeros(count) if weights is None else weights
    memory = rehearsal.Memory(
        jnp.full(size, -1, jnp.int32).at[:count].set(jnp.asarray(stored)),
        jnp.full(size, -1, jnp.int32).at[:count].set(EXAMPLES.label[stored]),
        jnp.zeros(size).at[:count].set(jnp.asarray(weights, jnp.float32)),
    )
    state = shaken(state.replace(extra=state.extra._replace(memory=memory)))
    return shaken(begin(method, state, task), seed=4)


def told(net, state, images, *, train=False):
    """The teacher's unit rows, f64[N,D]."""
    extra = state.extra
    told = programs(net)[train]
    return np.asarray(told(extra.teacher, extra.teacher_stats, images)[0], np.float64)


_PROGRAMS = {}  # id of a network, which has no hash -> itself and its programs


def programs(net):
    """A pass in evaluation mode, one in training mode, and the slopes of that."""
    if id(net) in _PROGRAMS:
        return _PROGRAMS[id(net)][1]

    def passes(params, stats, images, *, train):
        return net(params, stats, images, train=train)

    def slopes(params, stats, images, of_rows):
        def forward(params):
            return net(params, stats, images, train=True)

        _, back, _ = jax.vjp(forward, params, has_aux=True)
        return back(of_rows)[0]

    evaluate, trained = (functools.partial(passes, train=x) for x in (False, True))
    _PROGRAMS[id(net)] = net, tuple(map(interpreted.jit, (evaluate, trained, slopes)))
    return _PROGRAMS[id(net)][1]


def check_step(method, net, state, incoming, images, twin, prototype_rate=None):
    """The step descends `twin`, whose value and slopes are taken in float64.

    Args:
      images: f32[N,8,8,1], those that enter the network.
      twin: unit rows f64[N,D], and if `prototype_rate` is given unit prototypes
        f64[C,D] -> the loss.

    Returns:
      The new state.
    """
    new, metrics = step(method, state, incoming)
    _, forward, back = programs(net)
    z, stats = forward(state.params, state.stats, images)
    arrays = [np.asarray(z, np.float64)]
    params = jax.device_get(state.params)
    if prototype_rate is not None:
        prototypes = np.asarray(params["prototypes"], np.float64)
        unit = prototypes / np.sqrt((prototypes**2).sum(axis=1, keepdims=True))
        assert np.abs(prototypes - unit).max() > 0.1
        arrays.append(unit)
        params = params | {"prototypes": np.float32(unit)}
    np.testing.assert_allclose(metrics["loss"], twin(*arrays), rtol=2e-5)
    slopes = [twins.central_difference(twin, arrays, i) for i in range(len(arrays))]
    assert all(1e-3 < np.abs(slope).max() < 10 for slope in slopes)
    grads = jax.device_get(
        back(state.params, state.stats, images, np.float32(slopes[0]))
    )
    shares = jax.tree.map(lambda x: 1.0, grads)
    if prototype_rate is not None:
        grads["prototypes"] = slopes[1]
        shares["prototypes"] = prototype_rate / LR
    expected = jax.tree.map(lambda p, g, s: p - LR * s * g, params, grads, shares)
    chex.assert_trees_all_close(new.params, expected, rtol=1e-4, atol=2e-6)
    chex.assert_trees_all_close(new.stats, stats, rtol=1e-5, atol=1e-6)
    chex.assert_trees_all_equal(new.extra, state.extra)
    norm = np.sqrt(sum(np.sum(np.square(g)) for g in jax.tree.leaves(grads)))
    np.testing.assert_allclose(metrics["grad_norm"], norm, rtol=1e-4)
    np.testing.assert_allclose(metrics["lr"], LR, rtol=1e-6)
    assert int(new.step) == int(state.step) + 1
    return new


def check_teacher_is_not_read(method, state, incoming, new):
    """The step to `new` is the same whatever the teacher is."""
    extra = state.extra
    wild, stats = jax.tree.map(
        lambda x: x + jnp.nan, (extra.teacher, extra.teacher_stats)
    )
    extra = extra._replace(teacher=wild, teacher_stats=stats)
    other, _ = step(method, state.replace(extra=extra), incoming)
    chex.assert_trees_all_equal(other.params, new.params)


def count_products(method, state, incoming):
    """Count the matrix products of a step."""
    traced = jax.make_jaxpr(method.step)(state, incoming)
    return str(traced).count("dot_general[")
