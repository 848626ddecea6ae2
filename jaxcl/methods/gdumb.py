"""GDumb: store rows, balanced over classes; to predict, train on them from scratch.

Prabhu, Torr and Dokania, "GDumb: A Simple Approach that Questions Our Progress in
Continual Learning", ECCV 2020. The fit follows the released code.

Departures:
- The network of the last pass is evaluated; the released code reports the pass that is
  best on the test data.
- Every evaluation fits a network; the released code does so once, after the stream.
- Stored rows fill up the last batch of a pass; the loss does not count them.
- Network, crop and flip are the config's: config.encoder, config.augment, and
  config.replay.augment, which must be "replay" for them.
"""

import functools
import math
from collections.abc import Callable
from typing import Annotated, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jaxcl import core, optim, schema, sharding
from jaxcl.losses import replay as losses
from jaxcl.memory import buffer
from jaxcl.methods import online

_FIT = 0x6D0B  # keeps the randomness of a fit apart from that of the next step


@schema.checked("config.method")
def make(
    parts: core.Parts,
    *,
    head: online.Head = "linear",
    balanced: bool = True,
    passes: schema.Count = 256,
    batch_size: schema.Count = 16,
    lr: schema.Weight = 0.05,
    end_lr: schema.Weight = 0.0005,
    schedule: Literal["restarts", "constant"] = "restarts",
    momentum: schema.Momentum = 0.9,
    weight_decay: schema.Weight = 1e-6,
    clip: Annotated[float, schema.Range(least=1e-6)] = 10.0,
    cutmix: schema.Share = 0.5,
    cutmix_alpha: Annotated[float, schema.Range(least=1e-6)] = 1.0,
) -> core.Method:
    """Store rows in steps; train a new network on the memory in an evaluation.

    The loss that a step reports is 0. The method does not read config.optimizer and
    config.schedule. An evaluation costs passes * ceil(stored rows / batch_size)
    gradient steps; the network is evaluated and then dropped.

    Args:
      head: "linear" or "cosine".
      balanced: require config.replay.policy="greedy_balanced", the method's own; False
        allows any policy.
      passes: over the memory, in a fit.
      batch_size: rows in a gradient step of the fit. All options below are of the fit.
      lr: start of the cosine, in passes 1, 2, 4, 8 ...; pass 0 has a tenth of it.
      end_lr: end of the cosine before each restart.
      schedule: "restarts" is this cosine; "constant" is `lr` in every pass.
      momentum, weight_decay: settings of SGD.
      clip: norm above which a gradient is scaled down.
      cutmix: probability that the images of a batch are mixed, see `cut_mix`.
      cutmix_alpha: parameter of the Beta distribution of the share that an image keeps.

    Raises:
      Refused: naming field, value and range.
    """
    _check_replay(parts.replay, balanced)
    net = online.build_network(parts, head)
    sgd = optim.sgd(momentum=momentum, weight_decay=weight_decay)
    fit = _Fit(
        parts=parts,
        net=net,
        tx=optax.chain(optax.clip_by_global_norm(clip), sgd),
        batch_size=batch_size,
        cutmix=cutmix,
        cutmix_alpha=cutmix_alpha,
    )
    rates = [lr] * passes
    if schedule == "restarts":
        rates = [pass_learning_rate(number, lr, end_lr) for number in range(passes)]
    fit_memory = build_fit(fit, rates)

    def eval_state(state):
        memory = state.extra.memory
        count = int(sharding.copy_to_host(memory.filled).sum())
        if not count:
            return state
        key = jax.random.fold_in(core.step_key(state), _FIT)
        params, stats = fit_memory(key, memory, count)
        return state.replace(params=params, stats=stats)

    method = online.make_method(parts, net, _only_count, eval_state=eval_state)
    return method._replace(embeds="fit")


def _check_replay(replay: core.Replay, balanced: bool) -> None:
    core.check_choice("config.replay.sharded", replay.sharded, (False,))
    # It trains on no batch; what it does again is `passes`.
    core.check_choice("config.replay.updates with gdumb", replay.updates, (1,))
    # The fit takes the statistics of its own batches.
    core.check_choice("config.replay.statistics", replay.statistics, ("running",))
    if balanced:
        policy, allowed = replay.policy, ("greedy_balanced",)
        core.check_choice("config.replay.policy with gdumb", policy, allowed)


def _only_count(state, incoming, key):
    """Return the update of an online method that trains nothing."""
    zero = jnp.zeros(())
    return state.replace(step=state.step + 1), {"loss": zero, "lr": zero}, {}


class _Fit(NamedTuple):
    """The constants of a fit's steps, see `make`."""

    parts: core.Parts
    net: online.Network
    tx: optax.GradientTransformationExtraArgs
    batch_size: int
    cutmix: float
    cutmix_alpha: float


def build_fit(fit: _Fit, rates: list[float]) -> Callable:
    """Build (key, memory, rows in it) -> (parameters, running statistics).

    Args:
      fit: the constants.
      rates: learning rate of each pass.
    """
    start = jax.jit(functools.partial(_start_network, fit))
    order_of = jax.jit(_order_pass)
    descend = jax.jit(functools.partial(_descend_span, fit), donate_argnums=0)

    def fit_memory(key, memory, count: int):
        state = start(key, memory.items["image"])
        batches = -(-count // fit.batch_size)
        stride = 1 if sharding.on_cpu() else batches
        for number, lr in enumerate(rates):
            order = order_of(key, memory, np.int32(number))
            for first in range(0, batches, stride):
                span = np.int32([number, first, first + stride])
                state = descend(state, memory, order, key, *span, np.float32(lr))
        return state[:2]

    return fit_memory


def _start_network(fit, key, images):
    params, stats = fit.net.init(key, fit.parts.eval_transform(images[:1]))
    return params, stats, fit.tx.init(params)


def _order_pass(key, memory, number):
    """Shuffle the rows for pass `number`."""
    return shuffle(jax.random.split(jax.random.fold_in(key, number))[0], memory)


def _descend_span(fit, state, memory, order, key, number, first, end, lr):
    """Take the steps on batches `first` to `end` of pass `number`."""
    key = jax.random.split(jax.random.fold_in(key, number))[1]

    def step(i, state):
        return _descend(fit, state, memory, order, jax.random.fold_in(key, i), i, lr)

    if sharding.on_cpu():  # the span is one batch
        return step(first, state)
    return jax.lax.fori_loop(first, end, step, state)


def _descend(fit, state, memory, order, key, number, lr):
    """Take the step on batch `number` of a pass."""
    parts = fit.parts
    k_augment, k_mix = jax.random.split(key)
    raw, label, mask = batch_of(order, memory, number, fit.batch_size)
    images = online.prepare_images(
        parts, k_augment, raw, parts.replay.augment != "none"
    )
    terms = ((1.0, label),)
    if fit.cutmix:
        images, other_label, share = cut_mix(
            k_mix, images, label, probability=fit.cutmix, alpha=fit.cutmix_alpha
        )
        terms = (share, label), (1 - share, other_label)
    params, stats, opt_state = state

    def loss(params):
        outputs, new_stats = fit.net(params, stats, images, train=True)
        return sum(
            weight * losses.cross_entropy(outputs.logits, y, example_mask=mask)
            for weight, y in terms
        ), new_stats

    grads, stats = jax.grad(loss, has_aux=True)(params)
    direction, opt_state = fit.tx.update(grads, opt_state, params)
    params = jax.tree.map(lambda p, d: p - lr * d, params, direction)
    return params, stats, opt_state


def pass_learning_rate(number: int, lr: float, end_lr: float) -> float:
    """Return a pass's learning rate: cosines over 1, 2, 4, 8 ... passes."""
    if number == 0:
        return lr / 10
    length = 1 << (number.bit_length() - 1)
    progress = (number - length) / length
    return end_lr + (lr - end_lr) * (1 + math.cos(math.pi * progress)) / 2


def shuffle(key: jax.Array, memory: buffer.Buffer) -> jax.Array:
    """Shuffle the slots of the memory, i32[capacity]; those that hold rows come first.

    A pass sorts once, since sorting for every batch took half of a step's time.
    """
    noise = jax.random.uniform(key, memory.filled.shape)
    return jnp.argsort(jnp.where(memory.filled, noise, 2))


def batch_of(order: jax.Array, memory: buffer.Buffer, number: jax.Array, size: int):
    """Return batch `number` of a pass over the memory.

    Args:
      order: result of `shuffle`.
      memory: the stored rows.
      number: number of the batch.
      size: rows of a batch.

    Returns:
      images u8[size,H,W,C]; labels i32[size]; bool[size], False for rows that fill up
      the last batch.
    """
    place, count = number * size + jnp.arange(size), jnp.sum(memory.filled)
    rows = order[place % jnp.maximum(count, 1)]
    return memory.items["image"][rows], memory.items["label"][rows], place < count


def cut_mix(
    key: jax.Array,
    images: jax.Array,
    label: jax.Array,
    *,
    probability: float,
    alpha: float,
):
    """Apply CutMix (Yun et al., ICCV 2019): another image replaces a box.

    Args:
      key: threefry key.
      images: f32[B,H,W,C].
      label: i32[B].
      probability: probability that the batch is mixed at all.
      alpha: the box has a share of 1 - Beta(alpha, alpha) of the area, minus its part
        outside the image, rounded to pixels.

    Returns:
      Images; i32[B], labels of the boxes' images; f32[], share outside the box.
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
    is_mixed = jax.random.uniform(k_any) < probability
    share = jnp.where(is_mixed, 1 - area / math.prod(images.shape[1:3]), 1)
    return jnp.where(inside & is_mixed, images[rows], images), label[rows], share
