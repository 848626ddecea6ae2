"""Fit a linear layer to frozen features by SGD or Adam.

The probe of `linear.py` and a two-view method's online head use it.
"""

import contextlib
import functools
from collections.abc import Callable
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxcl import core, numerics, optim, sharding
from jaxcl.data import stream
from jaxcl.data.feed import prefetch
from jaxcl.data.images import crops
from jaxcl.nets import linear_head

_STREAM = 0x11EA4  # keeps the probe's random numbers apart from the training's
_EXACT = jax.lax.Precision.HIGHEST  # TF32 loses accuracy; the layer is cheap anyway


Optimizer = Literal["sgd", "adam"]


class ProbeSettings(NamedTuple):
    """The options of a probe; the defaults are the preset "cassle" of `linear`."""

    epochs: int = 100
    batch_size: int = 256
    lr: float = 0.1
    lrs: tuple[float, ...] = ()  # rates to choose from on a cut; (): `lr` is fixed
    held_out: float = 0.1  # share of the labelled train rows in that cut
    momentum: float = 0.9  # SGD's momentum
    weight_decay: float = 0.0  # joins the gradient
    milestones: tuple[int, ...] = (60, 80)  # epochs, from 0, at which the rate falls
    factor: float = 0.1  # factor of the rate at each of them
    optimizer: Optimizer = "sgd"
    train_on: str = "all"
    augment: bool = True
    scale: tuple[float, float] = (0.08, 1.0)  # share of the area of a crop
    flip: float = 0.5
    jitter: tuple[float, float, float, float] = (0.4, 0.4, 0.4, 0.1)
    jitter_probability: float = 0.0
    grayscale: float = 0.0
    blur: float = 0.0
    balanced: bool = False  # draw with replacement, by `class_uniform`
    normalize_features: bool = False
    fraction: float = 1.0
    fraction_seed: int = 0  # seed of the draws of `fraction` and of the cut


def probe_keys(
    seed: int, task: jax.typing.ArrayLike, probe: jax.typing.ArrayLike
) -> jax.Array:
    """Make the keys of a probe, for the layer's start and for its epochs.

    Args:
      probe: number, 0 for the probe over all classes, t + 1 for the probe of domain t.
    """
    key = numerics.make_key(seed)
    for number in (_STREAM, task, probe):
        key = jax.random.fold_in(key, number)
    return jax.random.split(key)


def epoch_order(
    key: jax.Array, rows: jax.Array, count: jax.typing.ArrayLike
) -> jax.Array:
    """Shuffle the first `count` of `rows`, i32[n]; the others stay at the end."""
    bits = jax.random.bits(key, rows.shape, jnp.uint32)
    return rows[jnp.lexsort((bits, jnp.arange(len(rows)) >= count))]


def class_uniform(
    rows: jax.Array,
    count: jax.typing.ArrayLike,
    labels: jax.Array,
    num_classes: int,
) -> Callable:
    """Draw a present class, then one of its rows, with replacement.

    A row is drawn with probability 1 / (P n), where P classes are present and n rows
    have the row's class. The draws are integers, since running sums of f32 weights
    would favour some of a million rows over others.

    Args:
      rows: i32[n]; only the first `count` of them are drawn.
      labels: i32[N], labels of all rows, 0 to num_classes - 1.

    Returns:
      key -> i32[n], n drawn rows.
    """
    padding = jnp.arange(len(rows)) >= count
    classes = jnp.where(padding, num_classes, labels[rows])
    by_class = rows[jnp.argsort(classes)]
    sizes = jnp.bincount(classes, length=num_classes + 1)[:num_classes]
    starts = jnp.cumsum(sizes) - sizes
    present = jnp.argsort(sizes == 0)  # a stable sort: the present classes come first

    def draw_below(key, most):
        return jax.random.randint(key, rows.shape, 0, jnp.maximum(most, 1))

    def draw_batch(key):
        k_class, k_row = jax.random.split(key)
        chosen = present[draw_below(k_class, jnp.sum(sizes > 0))]
        return by_class[starts[chosen] + draw_below(k_row, sizes[chosen])]

    return draw_batch


def _make_training(rule: ProbeSettings, num_classes: int) -> tuple[Callable, Callable]:
    """Make start and step of a rule; both return (head, state, sum of losses).

    The sum is over the present epoch; `lr` is the first epoch's rate.
    """
    if rule.optimizer == "adam":
        tx = optim.adam(weight_decay=rule.weight_decay)
    else:
        tx = optim.sgd(momentum=rule.momentum, weight_decay=rule.weight_decay)
    milestones = np.array(rule.milestones, np.int32)

    def begin_training(key, dim):
        head = linear_head.start_head(key, dim, num_classes)
        return head, tx.init(head), jnp.zeros(())

    def update(carry, features, labels, mask, epoch, lr):
        head, opt_state, losses = carry
        lr = lr * rule.factor ** jnp.sum(milestones <= epoch)
        rows = features, labels, mask
        head, opt_state, loss, _ = linear_head.take_step(tx, head, opt_state, *rows, lr)
        return head, opt_state, losses + loss

    return begin_training, update


def make_resident_fit(
    rule: ProbeSettings,
    parts: core.EvalParts,
    labels: jax.Array,
    read: Callable,
) -> Callable:
    """Make a function that fits a head in one program for all epochs.

    Args:
      labels: i32[N] on the device.
      read: (state, data, rows i32[B], key) -> f32[B, D], features of a batch.

    Returns:
      (state, data, rows i32[count], task, probe, lr) -> (Head, loss of the last epoch).
      Every learning rate runs the same program.
    """
    batch_size = rule.batch_size
    begin, update = _make_training(rule, parts.num_classes)

    def fit_head(state, data, labels, rows, count, task, probe, lr):
        k_start, k_epochs = probe_keys(parts.seed, task, probe)
        sample = jax.eval_shape(read, state, data, rows[:batch_size], k_epochs)
        steps = jnp.maximum(count // batch_size, 1)
        order_of = functools.partial(epoch_order, rows=rows, count=count)
        if rule.balanced:
            order_of = class_uniform(rows, count, labels, parts.num_classes)

        def run_epoch(number, carry):
            k_order, k_read = jax.random.split(jax.random.fold_in(k_epochs, number))
            order = order_of(k_order)

            def step(i, carry):
                first = i * batch_size
                rows = jax.lax.dynamic_slice_in_dim(order, first, batch_size)
                mask = (first + jnp.arange(batch_size) < count).astype(jnp.float32)
                features = read(state, data, rows, jax.random.fold_in(k_read, i))
                return update(carry, features, labels[rows], mask, number, lr)

            return jax.lax.fori_loop(0, steps, step, (*carry[:2], jnp.zeros(())))

        carry = begin(k_start, sample.shape[1])
        head, _, losses = jax.lax.fori_loop(0, rule.epochs, run_epoch, carry)
        return head, losses / steps

    program = jax.jit(fit_head, out_shardings=sharding.replicated(parts.mesh))

    def run_fit(state, data, rows, task, probe, lr):
        # Every subset of the rows has the same length, so it runs the same program.
        padded = np.zeros(max(labels.size, batch_size), np.int32)
        padded[: len(rows)] = rows
        numbers = [np.int32(n) for n in (len(rows), task, probe)]
        return program(state, data, labels, padded, *numbers, np.float32(lr))

    return run_fit


def make_streamed_fit(
    rule: ProbeSettings,
    parts: core.EvalParts,
    crop: crops.RandomCrop,
    embed: Callable,
) -> Callable:
    """Make a function that fits a head to images that workers decode and crop.

    Args:
      crop: crops.RandomCrop or crops.CenterCrop of the workers.
      embed: (state, images u8[B,S,S,C], key) -> f32[B, D].

    Returns:
      A function as from `make_resident_fit`, except that `data` is the number of
      features D.
    """
    train = parts.stream.dataset.train
    replicated, mesh = sharding.replicated(parts.mesh), parts.mesh
    begin, update = _make_training(rule, parts.num_classes)

    def step(state, carry, batch, number, steps, k_epochs, lr):
        features = embed(state, batch["image"], jax.random.fold_in(k_epochs, number))
        losses = jnp.where(number % steps == 0, 0.0, carry[2])
        inputs = features, batch["label"], jnp.ones(len(features))
        return update((*carry[:2], losses), *inputs, number // steps, lr)

    begin = jax.jit(begin, static_argnums=1, out_shardings=replicated)
    step = jax.jit(step, donate_argnums=1, out_shardings=replicated)

    def split_keys(task, probe):
        return tuple(probe_keys(parts.seed, task, probe))

    split_keys = jax.jit(split_keys, out_shardings=replicated)

    def run_fit(state, data, rows, task, probe, lr):
        # A set smaller than a batch repeats its rows.
        rows = np.resize(rows, max(len(rows), rule.batch_size))
        batches = prefetch.batches(
            stream.Source(train, rows),
            seed=parts.seed,
            task=task,
            epochs=rule.epochs,
            batch_size=rule.batch_size,
            workers=parts.workers,
            crop=crop,
            process_index=jax.process_index(),
            process_count=jax.process_count(),
            resident=False,
        )
        steps = np.int32(len(rows) // rule.batch_size)
        k_start, k_epochs = split_keys(np.int32(task), np.int32(probe))
        carry, lr = begin(k_start, data), np.float32(lr)
        placed = prefetch.run_ahead(
            batches, lambda batch: sharding.shard_rows(batch, mesh)
        )
        with contextlib.closing(placed):
            for i, batch in enumerate(placed):
                carry = step(state, carry, batch, np.int32(i), steps, k_epochs, lr)
                # Wait, or batches pile up on a device that is slower than the host.
                if i % 16 == 0:
                    jax.block_until_ready(carry[2])
        return carry[0], carry[2] / steps

    return run_fit
