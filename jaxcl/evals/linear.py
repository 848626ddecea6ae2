"""Linear probe: how well one linear layer on frozen features tells the classes.

Sources: the offline linear evaluation of CaSSLe (Fini et al., CVPR 2022) and PNR
(Cha et al., ICML 2024): SGD, learning rate not scaled by the batch, times 0.1
after epochs 60 and 80, random resized crops and flips, encoder in evaluation mode.

The layer starts as PyTorch's nn.Linear, uniform in +-1/sqrt(D), and weight decay
also acts on its bias, as PyTorch's SGD. An epoch drops its incomplete last batch;
a set smaller than a batch is one batch, masked (in memory) or with rows repeated
(streaming). Order, augmentation and start are a function of (seed, task, epoch).

Departures: one layer learns from every class at each task ("all", as the released
code does; the papers' text says the classes seen so far: train_on="seen").
Images that stream are cropped by the workers from NumPy's random numbers, so that
an augmented probe of the same set in memory sees other crops and another order.
"""

import contextlib
import time
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jaxcl import augment as augment_lib
from jaxcl import core, sharding
from jaxcl.data import prefetch, stream
from jaxcl.evals import features as features_lib

_STREAM = 0x11EA4  # keeps the probe's random numbers apart from the training's
_EXACT = jax.lax.Precision.HIGHEST  # the layer is small, TF32 would cost accuracy
_RATIO = (3 / 4, 4 / 3)


class Head(NamedTuple):
    """The linear layer."""

    weight: jax.Array  # f32[D, C]
    bias: jax.Array  # f32[C]


class _Sgd(NamedTuple):
    """How a head is trained; all fixed when `make` is called."""

    epochs: int
    batch_size: int
    lr: float
    momentum: float
    weight_decay: float
    milestones: tuple[int, ...]
    factor: float


class _Carry(NamedTuple):
    """What a step of the head changes."""

    head: Head
    velocity: Head
    loss: jax.Array  # f32[], sum over the batches of the present epoch


def logits(head: Head, features: jax.Array) -> jax.Array:
    """Scores f32[n, C] of features f32[n, D]."""
    return jnp.dot(features, head.weight, precision=_EXACT) + head.bias


def probe_keys(seed: int, task, probe):
    """Keys of a probe: (start of the layer, epochs). probe 0 is over all classes."""
    key = jax.random.key(seed, impl="threefry2x32")
    for number in (_STREAM, task, probe):
        key = jax.random.fold_in(key, number)
    return jax.random.split(key)


def epoch_order(key: jax.Array, rows: jax.Array, count) -> jax.Array:
    """`rows` i32[n] with its first `count` entries shuffled and the others last."""
    bits = jax.random.bits(key, rows.shape, jnp.uint32)
    return rows[jnp.lexsort((bits, jnp.arange(len(rows)) >= count))]


def start(key: jax.Array, dim: int, num_classes: int) -> Head:
    """A layer as PyTorch's nn.Linear(dim, num_classes) draws it."""
    k_weight, k_bias = jax.random.split(key)
    bound = dim**-0.5
    return Head(
        jax.random.uniform(k_weight, (dim, num_classes), minval=-bound, maxval=bound),
        jax.random.uniform(k_bias, (num_classes,), minval=-bound, maxval=bound),
    )


def _begin(key, dim, num_classes) -> _Carry:
    head = start(key, dim, num_classes)
    return _Carry(head, jax.tree.map(jnp.zeros_like, head), jnp.zeros(()))


def _update(sgd: _Sgd, carry: _Carry, features, labels, mask, epoch) -> _Carry:
    """One step of PyTorch's SGD on the mean cross-entropy of the unmasked rows."""

    def loss_of(head):
        losses = optax.softmax_cross_entropy_with_integer_labels(
            logits(head, features), labels
        )
        return jnp.sum(losses * mask) / jnp.maximum(mask.sum(), 1.0)

    loss, gradient = jax.value_and_grad(loss_of)(carry.head)
    milestones = jnp.asarray(sgd.milestones, jnp.int32)
    lr = sgd.lr * sgd.factor ** jnp.sum(milestones <= epoch)
    velocity = jax.tree.map(
        lambda v, g, p: sgd.momentum * v + g + sgd.weight_decay * p,
        carry.velocity, gradient, carry.head,
    )  # fmt: skip
    head = jax.tree.map(lambda p, v: p - lr * v, carry.head, velocity)
    return _Carry(head, velocity, carry.loss + loss)


def _resident_fit(sgd: _Sgd, parts, labels, read: Callable) -> Callable:
    """Fit a head by one program that holds all epochs.

    Args:
      labels: i32[N] on the device.
      read: (state, data, rows i32[B], key) -> f32[B, D], features of a batch.

    Returns:
      (state, data, rows i32[count], task, probe) -> (Head, loss of the last epoch).
    """
    batch_size = sgd.batch_size

    def fit(state, data, labels, rows, count, task, probe):
        k_start, k_epochs = probe_keys(parts.seed, task, probe)
        sample = jax.eval_shape(read, state, data, rows[:batch_size], k_epochs)
        steps = jnp.maximum(count // batch_size, 1)

        def epoch(number, carry):
            k_order, k_read = jax.random.split(jax.random.fold_in(k_epochs, number))
            order = epoch_order(k_order, rows, count)

            def step(i, carry):
                begin = i * batch_size
                at = jax.lax.dynamic_slice_in_dim(order, begin, batch_size)
                mask = (begin + jnp.arange(batch_size) < count).astype(jnp.float32)
                seen = read(state, data, at, jax.random.fold_in(k_read, i))
                return _update(sgd, carry, seen, labels[at], mask, number)

            carry = carry._replace(loss=jnp.zeros(()))
            return jax.lax.fori_loop(0, steps, step, carry)

        carry = _begin(k_start, sample.shape[1], parts.num_classes)
        carry = jax.lax.fori_loop(0, sgd.epochs, epoch, carry)
        return carry.head, carry.loss / steps

    program = jax.jit(fit, out_shardings=sharding.replicated(parts.mesh))

    def run(state, data, rows, task, probe):
        # One length for every subset of the rows, so that none compiles anew.
        padded = np.zeros(max(labels.size, batch_size), np.int32)
        padded[: len(rows)] = rows
        numbers = [np.int32(n) for n in (len(rows), task, probe)]
        return program(state, data, labels, padded, *numbers)

    return run


def _streamed_fit(sgd: _Sgd, parts, crop, embed: Callable) -> Callable:
    """`_resident_fit` for images that workers decode and crop.

    Args:
      crop: what the workers do.
      embed: (state, images u8[B,S,S,C], key) -> f32[B, D].

    Returns:
      As `_resident_fit`, but `data` is D.
    """
    train = parts.stream.dataset.train
    whole, mesh = sharding.replicated(parts.mesh), parts.mesh

    def begin(task, probe, *, dim):
        return _begin(probe_keys(parts.seed, task, probe)[0], dim, parts.num_classes)

    def update(state, carry, batch, step, steps, task, probe):
        epoch = step // steps
        _, k_epochs = probe_keys(parts.seed, task, probe)
        found = embed(state, batch["image"], jax.random.fold_in(k_epochs, step))
        carry = carry._replace(loss=jnp.where(step % steps == 0, 0.0, carry.loss))
        return _update(sgd, carry, found, batch["label"], jnp.ones(len(found)), epoch)

    begin = jax.jit(begin, static_argnames="dim", out_shardings=whole)
    update = jax.jit(update, donate_argnums=1, out_shardings=whole)

    def run(state, data, rows, task, probe):
        # Repeating rows is for sets smaller than one batch.
        rows = np.resize(rows, max(len(rows), sgd.batch_size))
        batches = prefetch.batches(
            stream.Source(train, rows), seed=parts.seed, task=task, epochs=sgd.epochs,
            batch_size=sgd.batch_size, workers=parts.workers, crop=crop,
            process_index=jax.process_index(), process_count=jax.process_count(),
            resident=False,
        )  # fmt: skip
        steps = np.int32(len(rows) // sgd.batch_size)
        task, probe = np.int32(task), np.int32(probe)
        carry = begin(task, probe, dim=data)
        placed = prefetch.ahead(batches, lambda batch: sharding.shard(batch, mesh))
        with contextlib.closing(placed):
            for i, batch in enumerate(placed):
                number = np.int32(i)
                carry = update(state, carry, batch, number, steps, task, probe)
                if i % 16 == 0:  # or batches pile up on a device slower than the host
                    jax.block_until_ready(carry.loss)
        return carry.head, carry.loss / steps

    return run


def _augmented(parts, scale, flip, normalize):
    """(state, images u8[B,h,w,C] or u8[B,1,S,S,C], key) -> features f32[B, D]."""
    whole = sharding.replicated(parts.mesh)
    view = augment_lib.make(
        size=parts.size, views=1, scale=scale, ratio=_RATIO, interpolation="bilinear",
        jitter_probability=0.0, grayscale=0.0, flip=flip,
        mean=parts.mean, std=parts.std,
    )  # fmt: skip

    def embed(state, images, key):
        found = parts.embed(state, view(key, images)[:, 0])
        found = jax.lax.with_sharding_constraint(found, whole)
        return features_lib.unit(found) if normalize else found

    return embed


def _fitting(parts, sgd, use_augment, scale, flip, normalize):
    """How a probe reads the train split.

    Returns:
      fit, see `_resident_fit`, and (state, D) -> the `data` it wants.
    """
    dataset = parts.stream.dataset
    labels = sharding.replicate(dataset.train.label, parts.mesh)
    if not use_augment:
        embed = _plain(parts, dataset.train, normalize)

        def look_up(state, features, at, key):
            return features[at]

        return _resident_fit(sgd, parts, labels, look_up), lambda state, _: embed(state)
    embed = _augmented(parts, scale, flip, normalize)
    if dataset.train.images is None:
        crop = prefetch.Crop(
            size=parts.size, scale=scale, ratio=_RATIO, interpolation="bilinear",
            decoder=dataset.decoder or "auto",
        )  # fmt: skip
        return _streamed_fit(sgd, parts, crop, embed), lambda state, dim: dim
    images = features_lib.place(parts, dataset.train)
    rows = features_lib.constraint(parts, sgd.batch_size)

    def read(state, images, at, key):
        at = jax.lax.with_sharding_constraint(at, rows)
        return embed(state, images[at], key)

    return _resident_fit(sgd, parts, labels, read), lambda state, _: images


def _plain(parts, examples, normalize):
    """State -> f32[n, D], features of a split without augmentation."""
    embed = features_lib.make(parts, examples)
    unit = jax.jit(features_lib.unit)
    return lambda state: unit(embed(state)) if normalize else embed(state)


def _judge(parts, groups) -> Callable:
    """(head, test features) -> bool[M]: right over all classes, within the task."""
    labels = sharding.replicate(parts.stream.evaluation.label, parts.mesh)
    # A row of no task may be any class.
    allowed = np.concatenate([groups.classes, np.ones((1, parts.num_classes), bool)])
    allowed, test_task = sharding.replicate((allowed, groups.test_task), parts.mesh)

    def judge(head, features, labels, allowed, test_task):
        scores = logits(head, features)
        told = jnp.where(allowed[test_task], scores, -jnp.inf)
        return scores.argmax(axis=1) == labels, told.argmax(axis=1) == labels

    program = jax.jit(judge, out_shardings=sharding.replicated(parts.mesh))

    def run(head, features):
        return sharding.fetch(program(head, features, labels, allowed, test_task))

    return run


def _evaluate(parts, train_on, embed_test, data_of, fit, judge, groups) -> Callable:
    """The evaluator, of its compiled parts."""

    def evaluate(state, task: int) -> core.Result:
        began = time.monotonic()
        held = embed_test(state)
        data = data_of(state, held.shape[1])
        mask = features_lib.train_mask(groups, train_on, task)
        head, loss = fit(state, data, np.flatnonzero(mask), task, 0)
        right, told = judge(head, held)
        rows = {"class_incremental": features_lib.per_task(parts, right)}
        if groups.aware == "task_aware":
            told = features_lib.per_task(parts, told)
            rows["task_aware"] = features_lib.blank_unseen(told, train_on, task)
        elif groups.aware == "domain_aware":
            rows["domain_aware"] = np.full(len(parts.stream.tasks), np.nan)
            for t in range(task + 1 if train_on == "seen" else len(groups.classes)):
                mine = np.flatnonzero(groups.train_task == t)
                right_t, _ = judge(fit(state, data, mine, task, t + 1)[0], held)
                rows["domain_aware"][t] = features_lib.per_task(parts, right_t)[t]
        scalars = {
            "accuracy": float(right.mean()),
            "train_loss": float(sharding.fetch(loss)),
            "seconds": time.monotonic() - began,
        }
        return core.Result(rows, scalars)

    return evaluate


def _check(parts, sgd, train_on, use_augment, scale, flip):
    numbers = "config.evaluators.linear."
    core.check_choice(numbers + "train_on", train_on, ("all", "seen"))
    whole = "a whole number >= 1"
    for name, good, allowed in (
        ("epochs", isinstance(sgd.epochs, int) and sgd.epochs >= 1, whole),
        ("batch_size", isinstance(sgd.batch_size, int) and sgd.batch_size >= 1, whole),
        ("lr", sgd.lr > 0, "> 0"),
        ("momentum", 0 <= sgd.momentum < 1, "in [0, 1)"),
        ("weight_decay", sgd.weight_decay >= 0, ">= 0"),
        ("milestones", all(m > 0 for m in sgd.milestones), "epochs >= 1"),
        ("factor", sgd.factor > 0, "> 0"),
    ):
        features_lib.require(f"linear.{name}", getattr(sgd, name), good, allowed)
    good = len(scale) == 2 and 0 < scale[0] <= scale[1] <= 1
    features_lib.require(
        "linear.scale", scale, good, "(low, high), 0 < low <= high <= 1"
    )
    features_lib.require("linear.flip", flip, 0 <= flip <= 1, "in [0, 1]")
    if use_augment and parts.stream.dataset.train.images is None:
        share = sgd.batch_size % parts.mesh.size == 0
        allowed = f"a multiple of the {parts.mesh.size} devices for images that stream"
        features_lib.require("linear.batch_size", sgd.batch_size, share, allowed)


def make(
    parts,
    *,
    epochs=100,
    batch_size=256,
    lr=0.1,
    momentum=0.9,
    weight_decay=0.0,
    milestones=(60, 80),
    factor=0.1,
    train_on="all",
    augment=True,
    scale=(0.08, 1.0),
    flip=0.5,
    normalize_features=False,
) -> Callable:
    """Linear evaluation after a task.

    Args:
      parts: core.EvalParts.
      lr, momentum, weight_decay: of SGD; lr is times `factor` from each of the
        `milestones` (epochs, from 0) on.
      train_on: "all" train rows after every task, or those of the tasks "seen".
      augment: random resized crops (`scale`, share of the area) and flips (with
        probability `flip`) anew each epoch; False embeds each train image once.
      normalize_features: to length 1.

    Returns:
      evaluate(state, task) -> core.Result. Rows (accuracy per task, nan without
      test rows): "class_incremental", over all classes ("data" and "joint": every
      task has all test rows, so that each column is the same number); where tasks
      are disjoint classes also "task_aware", the same head over the task's classes;
      where tasks are domains also "domain_aware", a probe of its own per domain,
      nan for domains to come under "seen". Scalars: "accuracy" on all evaluation
      rows, "train_loss" of the last epoch, "seconds".

    Raises:
      ValueError: an option out of its range; no evaluation split; no labels.
    """
    scale, flip = tuple(scale), float(flip)
    sgd = _Sgd(
        epochs, batch_size, lr, momentum, weight_decay, tuple(milestones), factor
    )
    _check(parts, sgd, train_on, augment, scale, flip)
    features_lib.check_labels(parts, "linear")
    groups = features_lib.split(parts)
    embed_test = _plain(parts, parts.stream.evaluation, normalize_features)
    judge = _judge(parts, groups)
    fit, data_of = _fitting(parts, sgd, augment, scale, flip, normalize_features)

    return _evaluate(parts, train_on, embed_test, data_of, fit, judge, groups)
