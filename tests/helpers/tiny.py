"""A layer and a batch norm that take a step, and the same in numpy and float64."""

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from helpers import interpreted, twins
from jaxcl import core, optim
from jaxcl.memory import buffer
from jaxcl.methods import er
from jaxcl.methods.online import replay as replay_lib

CLASSES, LR, MOMENTUM = 4, 0.7, 0.5
NEW = [2, 3, 2, 2]  # labels of the incoming rows, of task 1


class Tiny(nn.Module):
    """A layer and a batch norm, so that whose statistics are used shows."""

    @nn.compact
    def __call__(self, x, *, train, groups=1):
        x = nn.Dense(3, use_bias=False)(x.reshape(len(x), -1))
        return nn.BatchNorm(
            use_running_average=not train,
            momentum=MOMENTUM,
            use_scale=False,
            use_bias=False,
        )(x)


def plain(images):
    return images.astype(jnp.float32) / 128 - 1


def moved(images):
    """An augmentation that shows, of u8 or of numbers already."""
    return jnp.float32(1.5) * images[:, ::-1] + 0.25


def make_parts(**replay):
    return core.Parts(
        encoder=Tiny(),
        augment=lambda key, images: moved(plain(images))[:, None],
        eval_transform=plain,
        tx=optim.sgd(momentum=0.0),
        lr=optim.by_task([optim.constant(LR)]),
        num_classes=CLASSES,
        replay=replay_lib.settings(CLASSES, len(NEW), **{"capacity": 10, **replay}),
        num_tasks=2,
    )


def pixels(seed, count):
    rng = np.random.default_rng(seed)
    return rng.integers(0, 256, (count, 2, 2, 1)).astype(np.uint8)


def incoming(seed, labels=NEW):
    label = jnp.array(labels, jnp.int32)
    return {"image": jnp.array(pixels(seed, len(labels))), "label": label}


@functools.cache
def begin(capacity):
    """ER's `init`, one program for the methods that keep no more than it does."""
    return interpreted.jit(er.make(make_parts(capacity=capacity)).init)


def start(seed, labels, *, capacity=10, task=1):
    """A state of the second task whose memory holds rows of `labels`, in order."""
    state = begin(capacity)(jax.random.key(seed), incoming(0))
    rng, stored = np.random.default_rng(seed + 50), len(labels)
    label = jnp.array(np.pad(np.int32(labels), (0, capacity - stored)))
    images = pixels(seed + 100, capacity)
    images[stored:] = 0
    memory = buffer.Buffer(
        items={"image": jnp.array(images), "label": label, "task": label // 2},
        filled=jnp.arange(capacity) < stored,
        seen=jnp.int32(stored),
    )
    stats = jax.tree.map(
        lambda x: jnp.asarray(x + np.float32(rng.uniform(0.2, 1, x.shape))),
        jax.device_get(state.stats),
    )
    extra = state.extra._replace(memory=memory)
    return state.replace(extra=extra, stats=stats, task=jnp.int32(task))


def arrays(state_params):
    layer = state_params["encoder"]["Dense_0"]["kernel"]
    head = state_params["head"]
    return [np.float64(x) for x in (layer, head["weight"], head["bias"])]


def raw(images):
    return np.float64(images).reshape(len(images), -1) / 128 - 1


def augmented(x):
    grid = x.reshape(len(x), 2, 2, 1)
    return 1.5 * grid[:, ::-1].reshape(len(x), -1) + 0.25


def normed(layer, x, stats=None):
    f = x @ layer
    mean, variance = (f.mean(0), f.var(0)) if stats is None else stats
    return (f - mean) / np.sqrt(variance + 1e-5)


def row_losses(params, x, label):
    layer, weight, bias = params
    z = normed(layer, x) @ weight.T + bias
    return np.log(np.exp(z).sum(1)) - z[np.arange(len(x)), label]


def slope(params, x, label, count=None):
    """Gradient of the mean loss of the first `count` rows."""

    def loss(*params):
        return row_losses(params, x, label)[:count].mean()

    return [twins.central_difference(loss, params, i) for i in range(3)]


def descended(params, grads, lr=LR):
    return [p - lr * g for p, g in zip(params, grads, strict=True)]


def running(state):
    stats = state.stats["encoder"]["BatchNorm_0"]
    return [np.float64(stats[name]) for name in ("mean", "var")]


def after_pass(stats, layer, x):
    """Running mean and variance after a pass of x in training mode."""
    f = x @ layer
    batch = f.mean(0), f.var(0)
    return [
        MOMENTUM * o + (1 - MOMENTUM) * n for o, n in zip(stats, batch, strict=True)
    ]


def check_descent(method, state, batch):
    """The step goes down the mean loss of the incoming rows, seen in one pass."""
    params, rows = arrays(state.params), raw(batch["image"])
    after, _ = interpreted.jit(method.step)(core.copy(state), batch)
    expected = descended(params, slope(params, rows, np.array(batch["label"])))
    for one, other in zip(arrays(after.params), expected, strict=True):
        np.testing.assert_allclose(one, other, rtol=2e-4, atol=2e-5)
    stats = after_pass(running(state), params[0], rows)
    for one, other in zip(running(after), stats, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-4)
