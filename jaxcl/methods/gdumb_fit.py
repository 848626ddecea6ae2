"""GDumb's fit of a new network to the memory: its rates, batches, mixtures, passes.

Prabhu, Torr and Dokania, "GDumb", ECCV 2020, as its released code trains.
"""

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jaxcl import core, optim
from jaxcl.losses import replay as losses
from jaxcl.methods import online


class Recipe(NamedTuple):
    """How a network is fitted; `gdumb.make` says what each of them is."""

    passes: int
    batch_size: int
    lr: float
    end_lr: float
    momentum: float
    weight_decay: float
    clip: float
    cutmix: float
    cutmix_alpha: float

    def check(self):
        """Raises a ValueError that names what is out of range."""
        for name, least, most in _RANGES:
            value = getattr(self, name)
            if not least <= value <= most:
                raise ValueError(
                    f"config.method.{name}={value}: allowed is {least} to {most}"
                )


_RANGES = (
    ("passes", 1, math.inf),
    ("batch_size", 1, math.inf),
    ("lr", 0, math.inf),
    ("end_lr", 0, math.inf),
    ("clip", 1e-6, math.inf),
    ("cutmix", 0, 1),
    ("cutmix_alpha", 1e-6, math.inf),
)


class _Setup(NamedTuple):
    parts: core.Parts
    net: online.Network
    recipe: Recipe
    tx: Any


def fit(parts: core.Parts, net: online.Network, recipe: Recipe) -> Callable:
    """The fit: (key, memory, rows in it) -> (parameters, running statistics)."""
    sgd = optim.sgd(momentum=recipe.momentum, weight_decay=recipe.weight_decay)
    tx = optax.chain(optax.clip_by_global_norm(recipe.clip), sgd)
    setup = _Setup(parts, net, recipe, tx)
    begin = jax.jit(functools.partial(_begin, setup))
    run = jax.jit(functools.partial(_several, setup), donate_argnums=0)

    def fitted(key, memory, count: int):
        state = begin(key, memory.items["image"])
        batches = -(-count // recipe.batch_size)
        stride = 1 if parts.unroll else batches
        for number in range(recipe.passes):
            lr = np.float32(rate(number, recipe.lr, recipe.end_lr))
            for first in range(0, batches, stride):
                span = np.int32([number, first, first + stride])
                state = run(state, memory, key, *span, lr)
        return state[:2]

    return fitted


def _begin(setup, key, images):
    params, stats = setup.net.init(key, setup.parts.plain(images[:1]))
    return params, stats, setup.tx.init(params)


def _several(setup, state, memory, key, number, first, end, lr):
    """Batches `first` to `end` of pass `number`; one of them where loops cost."""
    key = jax.random.fold_in(key, number)
    if setup.parts.unroll:
        return _one(setup, state, memory, key, first, lr)
    return jax.lax.fori_loop(
        first, end, lambda i, state: _one(setup, state, memory, key, i, lr), state
    )


def _one(setup, state, memory, key, number, lr):
    """Batch `number` of a pass; the key is that of the pass."""
    parts, net, recipe, tx = setup
    k_order, key = jax.random.split(key)
    k_augment, k_mix = jax.random.split(jax.random.fold_in(key, number))
    raw, label, mask = batch_of(k_order, memory, number, recipe.batch_size)
    images = online.images_of(parts, k_augment, raw, parts.replay.augment != "none")
    images, other, share = mixed(
        k_mix, images, label, probability=recipe.cutmix, alpha=recipe.cutmix_alpha
    )
    params, stats, opt_state = state

    def loss(params):
        outputs, after = net(params, stats, images, train=True)
        terms = (share, label), (1 - share, other)
        return sum(
            weight * losses.cross_entropy(outputs.logits, y, example_mask=mask)
            for weight, y in terms
        ), after

    grads, stats = jax.grad(loss, has_aux=True)(params)
    direction, opt_state = tx.update(grads, opt_state, params)
    params = jax.tree.map(lambda p, d: p - lr * d, params, direction)
    return params, stats, opt_state


def rate(number: int, lr: float, end_lr: float) -> float:
    """Learning rate of a pass: cosines over 1, 2, 4, 8 ... passes after the first."""
    if number == 0:
        return lr / 10
    length = 1 << (number.bit_length() - 1)
    done = (number - length) / length
    return end_lr + (lr - end_lr) * (1 + math.cos(math.pi * done)) / 2


def batch_of(key, memory, number, size: int):
    """Images, labels and mask of a pass's batch; a key shuffles a pass."""
    noise = jnp.where(memory.filled, jax.random.uniform(key, memory.filled.shape), 2)
    place, count = number * size + jnp.arange(size), jnp.sum(memory.filled)
    rows = jnp.argsort(noise)[place % jnp.maximum(count, 1)]
    return memory.items["image"][rows], memory.items["label"][rows], place < count


def mixed(key, images, label, *, probability, alpha):
    """CutMix (Yun et al., ICCV 2019): one box of each image is another image's.

    Args:
      images: f32[B,H,W,C]. label: i32[B].
      probability: that the batch is mixed at all.
      alpha: the box has a share of 1 - Beta(alpha, alpha) of the area, but for what
        sticks out and for whole pixels.

    Returns:
      Images; i32[B], labels of what fills the boxes; f32[], share outside the box.
    """
    k_any, k_share, k_rows, k_y, k_x = jax.random.split(key, 5)
    side = jnp.sqrt(1 - jax.random.beta(k_share, alpha, alpha, dtype=jnp.float32))
    rows = jax.random.permutation(k_rows, len(label))
    inside, area = True, 1.0
    for axis, k_centre in ((1, k_y), (2, k_x)):
        extent = images.shape[axis]
        centre = jax.random.randint(k_centre, (), 0, extent)
        half = jnp.floor(extent * side).astype(jnp.int32) // 2
        low = jnp.clip(centre - half, 0, extent)
        high = jnp.clip(centre + half, 0, extent)
        shape = [-1 if i == axis else 1 for i in range(4)]
        pixel = jnp.arange(extent).reshape(shape)
        inside, area = inside & (low <= pixel) & (pixel < high), area * (high - low)
    due = jax.random.uniform(k_any) < probability
    share = jnp.where(due, 1 - area / math.prod(images.shape[1:3]), 1)
    return jnp.where(inside & due, images[rows], images), label[rows], share
