"""An online method's step against its equation: a tiny network and 6 rows a batch.

Where as many rows are drawn as may be, their order does not matter, and a step is
known without its random numbers.
"""

import functools
import types

import chex
import jax
import jax.numpy as jnp
import numpy as np

from helpers import dense_net, interpreted, loss_twins, twins
from jaxcl import core, optim
from jaxcl.data.augment import images as augment_images
from jaxcl.methods.online import replay as replay_lib

CLASSES, LR = 5, 0.1
MOMENTS = {"mean": (0.3,), "std": (0.4,)}
PLAIN = {"jitter_probability": 0.0, **MOMENTS}  # augmentation is a mirror


def parts(encoder=None, **replay):
    """Components whose network is one layer and batch norm: it compiles at once."""
    return core.Parts(
        encoder=encoder or dense_net.Flat(4),
        augment=augment_images.make(size=8, views=1, crop=False, flip=1.0, **PLAIN),
        eval_transform=augment_images.make_eval(size=8, **MOMENTS),
        tx=optim.sgd(momentum=0.0),
        lr=optim.by_task([optim.constant(LR)]),
        schedule_with_peak=lambda peak: optim.by_task([optim.constant(peak)]),
        num_classes=CLASSES,
        replay=replay_lib.settings(CLASSES, 6, **{"capacity": 12, **replay}),
    )


def batch(seed, labels):
    rng = np.random.default_rng(seed)
    images = rng.integers(0, 256, (len(labels), 8, 8, 1)).astype(np.uint8)
    return {"image": jnp.array(images), "label": jnp.array(labels, jnp.int32)}


# The classes of two tasks; class 4 never comes.
FIRST, SECOND = batch(0, [0, 1, 1, 0, 0, 1]), batch(1, [2, 3, 2, 2, 3, 3])


cross_entropy = loss_twins.labelled_cross_entropy


@functools.cache
def compiled(method):
    return interpreted.jit(method.init), interpreted.jit(method.step)


def step(method, state, incoming):
    return compiled(method)[1](core.copy(state), incoming)


def fresh(method):
    return compiled(method)[0](jax.random.key(0), FIRST)


def begin(method, state, index):
    """The state at the first step of a task, as the loop makes it."""
    state = state.replace(task=jnp.int32(index))
    return method.begin_task(state, types.SimpleNamespace(index=index))


def shaken(state, seed=3):
    """The state elsewhere: parameters and statistics moved at random."""
    rng = np.random.default_rng(seed)
    params = twins.moved(state.params, rng, low=-0.3, high=0.3)
    stats = twins.moved(state.stats, rng, low=0, high=0.3)
    return state.replace(params=params, stats=stats)


def second_task(method):
    """In the second task: its first batch has come, and the network has moved since.

    The memory holds FIRST in its first six slots and SECOND in its last.
    """
    state, _ = step(method, begin(method, fresh(method), 0), FIRST)
    state = begin(method, shaken(state), 1)
    return shaken(step(method, state, SECOND)[0], seed=4)


@functools.cache
def programs(net):
    """Passes of u8 batches, one after another; their slopes; logits in eval mode."""
    plain = parts().eval_transform

    def passes(params, stats, batches):
        outputs = []
        for rows in batches:
            out, stats = net(params, stats, plain(rows), train=True)
            outputs.append(out.logits)
        return outputs, stats

    def slopes(params, stats, batches, of_logits):
        _, back, _ = jax.vjp(lambda p: passes(p, stats, batches), params, has_aux=True)
        return back(of_logits)[0]

    def evaluated(params, stats, rows):
        return net(params, stats, plain(rows), train=False)[0].logits

    return tuple(map(interpreted.jit, (passes, slopes, evaluated)))


def slope(net, params, stats, images, terms):
    """Value, statistics and gradient of the sum of share * mean cross-entropy.

    Images behind the last label move the statistics alone.
    """

    def loss(params):
        out, after = net(params, stats, images, train=True)
        logs = jax.nn.log_softmax(out.logits)
        means = [share * jnp.mean(logs[np.arange(len(y)), y]) for share, y in terms]
        return -sum(means), after

    return jax.value_and_grad(loss, has_aux=True)(params)


def check_step(method, net, state, incoming, images, twin):
    """The step descends `twin`, whose value and slopes are taken in float64.

    Args:
      images: u8 batches, one for each pass through the network, in order.
      twin: logits of each pass, f64[B,C] -> the loss.

    Returns:
      The new state, and the logits of each pass.
    """
    new, metrics = step(method, state, incoming)
    passes, back, _ = programs(net)
    logits, stats = passes(state.params, state.stats, images)
    arrays = [np.asarray(x, np.float64) for x in logits]
    np.testing.assert_allclose(metrics["loss"], twin(*arrays), rtol=1e-5)
    slopes = [twins.central_difference(twin, arrays, i) for i in range(len(arrays))]
    assert all(1e-3 < np.abs(slope).max() < 10 for slope in slopes)
    of_logits = [np.float32(slope) for slope in slopes]
    params, grads = jax.device_get(
        (state.params, back(state.params, state.stats, images, of_logits))
    )
    expected = jax.tree.map(lambda p, g: p - LR * g, params, grads)
    chex.assert_trees_all_close(new.params, expected, rtol=1e-4, atol=1e-6)
    chex.assert_trees_all_close(new.stats, stats, rtol=1e-5, atol=1e-6)
    assert int(new.step) == int(state.step) + 1
    return new, arrays


def answers(net, params, stats, images):
    """Logits in eval mode, f64[B,C]."""
    return np.asarray(programs(net)[2](params, stats, images), np.float64)
