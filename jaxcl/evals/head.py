"""A linear layer, and how SGD or Adam fits it to frozen features.

Used by the probe of `linear.py` and by the online head of a two-view method.
"""

import contextlib
import functools
from collections.abc import Callable
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jaxcl import core, optim, sharding
from jaxcl.data import prefetch, stream
from jaxcl.nets import layers

_STREAM = 0x11EA4  # keeps the probe's random numbers apart from the training's
_EXACT = jax.lax.Precision.HIGHEST  # TF32 loses accuracy; the layer is cheap anyway


class Head(NamedTuple):
    """The linear layer."""

    weight: jax.Array  # f32[D, C]
    bias: jax.Array  # f32[C]


Optimizer = Literal["sgd", "adam"]


class Rule(NamedTuple):
    """How a head is trained."""

    epochs: int
    batch_size: int
    lr: float
    momentum: float  # for SGD only
    weight_decay: float
    milestones: tuple[int, ...]
    factor: float
    optimizer: Optimizer = "sgd"


class _Carry(NamedTuple):
    """What a step of the head changes."""

    head: Head
    buffers: object  # a Head, the momentum of SGD; or the moments of Adam
    loss: jax.Array  # f32[], sum over the batches of the present epoch so far


def logits(head: Head, features: jax.Array) -> jax.Array:
    """Scores f32[n, C] of features f32[n, D]."""
    return jnp.dot(features, head.weight, precision=_EXACT) + head.bias


def probe_keys(
    seed: int, task: jax.typing.ArrayLike, probe: jax.typing.ArrayLike
) -> jax.Array:
    """The keys of a probe, for the layer's start and for its epochs.

    Args:
      probe: 0 for the probe over all classes, t + 1 for that of domain t alone.
    """
    key = jax.random.key(seed, impl="threefry2x32")
    for number in (_STREAM, task, probe):
        key = jax.random.fold_in(key, number)
    return jax.random.split(key)


def epoch_order(
    key: jax.Array, rows: jax.Array, count: jax.typing.ArrayLike
) -> jax.Array:
    """`rows` i32[n], the first `count` shuffled and the others behind them."""
    bits = jax.random.bits(key, rows.shape, jnp.uint32)
    return rows[jnp.lexsort((bits, jnp.arange(len(rows)) >= count))]


def class_uniform(
    rows: jax.Array,
    count: jax.typing.ArrayLike,
    labels: jax.Array,
    num_classes: int,
) -> Callable:
    """Draws with replacement: first one of the present classes, then one of its rows.

    A row is drawn with probability 1 / (P n), where P classes are present and n rows
    have the row's class. The draws are integers, since running sums of f32 weights
    would favour some of a million rows over others.

    Args:
      rows: i32[n]; only the first `count` are drawn.
      labels: i32[N], of every row, 0 to num_classes - 1.

    Returns:
      key -> i32[n], n drawn rows.
    """
    padding = jnp.arange(len(rows)) >= count
    classes = jnp.where(padding, num_classes, labels[rows])
    by_class = rows[jnp.argsort(classes)]
    sizes = jnp.bincount(classes, length=num_classes + 1)[:num_classes]
    begins = jnp.cumsum(sizes) - sizes
    present = jnp.argsort(sizes == 0)  # a stable sort: the present classes come first

    def below(key, most):
        return jax.random.randint(key, rows.shape, 0, jnp.maximum(most, 1))

    def draw(key):
        k_class, k_row = jax.random.split(key)
        chosen = present[below(k_class, jnp.sum(sizes > 0))]
        return by_class[begins[chosen] + below(k_row, sizes[chosen])]

    return draw


def start(key: jax.Array, dim: int, num_classes: int) -> Head:
    """A new layer, drawn as PyTorch's nn.Linear(dim, num_classes) draws it."""
    k_weight, k_bias = jax.random.split(key)
    uniform = layers.torch_uniform(dim)
    return Head(uniform(k_weight, (dim, num_classes)), uniform(k_bias, (num_classes,)))


def _adam(rule: Rule):
    """PyTorch's Adam, which adds weight decay to the gradient."""
    return optim.adam(weight_decay=rule.weight_decay)


def _begin(rule: Rule, key, dim, num_classes) -> _Carry:
    head = start(key, dim, num_classes)
    if rule.optimizer == "adam":
        buffers = _adam(rule).init(head)
    else:
        buffers = jax.tree.map(jnp.zeros_like, head)
    return _Carry(head, buffers, jnp.zeros(()))


def _gradient(head: Head, features, labels, mask):
    """((loss, scores), gradient), for the mean cross-entropy of the unmasked rows."""

    def loss_of(head):
        scores = logits(head, features)
        losses = optax.softmax_cross_entropy_with_integer_labels(scores, labels)
        return jnp.sum(losses * mask) / jnp.maximum(mask.sum(), 1.0), scores

    return jax.value_and_grad(loss_of, has_aux=True)(head)


def descend(
    head: Head,
    velocity: Head,
    features: jax.Array,
    labels: jax.Array,
    mask: jax.Array,
    *,
    lr: jax.typing.ArrayLike,
    momentum: float,
    weight_decay: float,
    scale: Callable = lambda gradient, head, lr: gradient,
) -> tuple[Head, Head, jax.Array, jax.Array]:
    """Take a step of PyTorch's SGD on the mean cross-entropy of the unmasked rows.

    Args:
      velocity: the momentum buffer.
      features: f32[B, D].
      labels: i32[B].
      mask: f32[B], 0 for rows that do not count.
      lr: a number or f32[].
      scale: what the gradient becomes before it joins the momentum, as LARS wants it.

    Returns:
      head and velocity after the step; loss f32[] and scores f32[B, C] before it.
    """
    (loss, scores), gradient = _gradient(head, features, labels, mask)
    gradient = scale(gradient, head, lr)
    velocity = jax.tree.map(
        lambda v, g, p: momentum * v + g + weight_decay * p, velocity, gradient, head
    )
    head = jax.tree.map(lambda p, v: p - lr * v, head, velocity)
    return head, velocity, loss, scores


def _update(rule: Rule, carry: _Carry, features, labels, mask, epoch, lr) -> _Carry:
    """Take a step of the rule's optimiser; `lr` is that of the first epoch."""
    milestones = jnp.asarray(rule.milestones, jnp.int32)
    lr = lr * rule.factor ** jnp.sum(milestones <= epoch)
    if rule.optimizer == "adam":
        (loss, _), gradient = _gradient(carry.head, features, labels, mask)
        adam = _adam(rule)
        direction, buffers = adam.update(gradient, carry.buffers, carry.head)
        head = jax.tree.map(lambda p, d: p - lr * d, carry.head, direction)
    else:
        head, buffers, loss, _ = descend(
            carry.head,
            carry.buffers,
            features,
            labels,
            mask,
            lr=lr,
            momentum=rule.momentum,
            weight_decay=rule.weight_decay,
        )
    return _Carry(head, buffers, carry.loss + loss)


def resident_fit(
    rule: Rule,
    parts: core.EvalParts,
    labels: jax.Array,
    read: Callable,
    *,
    balanced: bool = False,
) -> Callable:
    """Fit a head in one program that runs all epochs.

    Args:
      labels: i32[N] on the device.
      read: (state, data, rows i32[B], key) -> f32[B, D], features of a batch.
      balanced: an epoch draws its rows by `class_uniform`; False: it has each row once.

    Returns:
      (state, data, rows i32[count], task, probe, lr=rule.lr) -> (Head, loss of the last
      epoch). Every learning rate runs the same program.
    """
    batch_size = rule.batch_size

    def fit(state, data, labels, rows, count, task, probe, lr):
        k_start, k_epochs = probe_keys(parts.seed, task, probe)
        sample = jax.eval_shape(read, state, data, rows[:batch_size], k_epochs)
        steps = jnp.maximum(count // batch_size, 1)
        order_of = functools.partial(epoch_order, rows=rows, count=count)
        if balanced:
            order_of = class_uniform(rows, count, labels, parts.num_classes)

        def epoch(number, carry):
            k_order, k_read = jax.random.split(jax.random.fold_in(k_epochs, number))
            order = order_of(k_order)

            def step(i, carry):
                begin = i * batch_size
                at = jax.lax.dynamic_slice_in_dim(order, begin, batch_size)
                mask = (begin + jnp.arange(batch_size) < count).astype(jnp.float32)
                features = read(state, data, at, jax.random.fold_in(k_read, i))
                return _update(rule, carry, features, labels[at], mask, number, lr)

            carry = carry._replace(loss=jnp.zeros(()))
            return jax.lax.fori_loop(0, steps, step, carry)

        carry = _begin(rule, k_start, sample.shape[1], parts.num_classes)
        carry = jax.lax.fori_loop(0, rule.epochs, epoch, carry)
        return carry.head, carry.loss / steps

    program = jax.jit(fit, out_shardings=sharding.replicated(parts.mesh))

    def run(state, data, rows, task, probe, lr=rule.lr):
        # Every subset of the rows has the same length, so it runs the same program.
        padded = np.zeros(max(labels.size, batch_size), np.int32)
        padded[: len(rows)] = rows
        numbers = [np.int32(n) for n in (len(rows), task, probe)]
        return program(state, data, labels, padded, *numbers, np.float32(lr))

    return run


def streamed_fit(
    rule: Rule, parts: core.EvalParts, crop: prefetch.Crop, embed: Callable
) -> Callable:
    """`resident_fit` for images that workers decode and crop.

    Args:
      crop: how the workers crop.
      embed: (state, images u8[B,S,S,C], key) -> f32[B, D].

    Returns:
      As `resident_fit`, but its argument `data` is the width D.
    """
    train = parts.stream.dataset.train
    whole, mesh = sharding.replicated(parts.mesh), parts.mesh

    def begin(task, probe, *, dim):
        key, _ = probe_keys(parts.seed, task, probe)
        return _begin(rule, key, dim, parts.num_classes)

    def update(state, carry, batch, step, steps, task, probe, lr):
        epoch = step // steps
        _, k_epochs = probe_keys(parts.seed, task, probe)
        features = embed(state, batch["image"], jax.random.fold_in(k_epochs, step))
        carry = carry._replace(loss=jnp.where(step % steps == 0, 0.0, carry.loss))
        mask = jnp.ones(len(features))
        return _update(rule, carry, features, batch["label"], mask, epoch, lr)

    begin = jax.jit(begin, static_argnames="dim", out_shardings=whole)
    update = jax.jit(update, donate_argnums=1, out_shardings=whole)

    def run(state, data, rows, task, probe, lr=rule.lr):
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
        task, probe, lr = np.int32(task), np.int32(probe), np.float32(lr)
        carry = begin(task, probe, dim=data)
        placed = prefetch.ahead(batches, lambda batch: sharding.shard(batch, mesh))
        with contextlib.closing(placed):
            for i, batch in enumerate(placed):
                number = np.int32(i)
                carry = update(state, carry, batch, number, steps, task, probe, lr)
                # Or batches pile up on a device that is slower than the host.
                if i % 16 == 0:
                    jax.block_until_ready(carry.loss)
        return carry.head, carry.loss / steps

    return run
