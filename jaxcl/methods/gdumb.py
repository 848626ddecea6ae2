"""GDumb: store rows, balanced over classes; to predict, train on them from scratch.

Prabhu, Torr and Dokania, "GDumb: A Simple Approach that Questions Our Progress in
Continual Learning", ECCV 2020.

Departures:
- The network that is judged is that of the last pass; the released code reports the
  pass that does best on the test data.
- Every evaluation fits a network; the released code does so once, after the stream.
- Stored rows fill up the last batch of a pass; the loss does not count them.
- Network, crop and flip are the config's: config.encoder, config.augment, and
  config.replay.augment, which is to be "replay" for them.
"""

import math

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jaxcl import core, optim, sharding
from jaxcl.losses import replay as losses
from jaxcl.methods import gdumb_fit, online

_FIT = 0x6D0B  # keeps the randomness of a fit apart from that of the next step


def make(
    parts: core.Parts, *, head="linear", balanced=True, passes=256, batch_size=16,
    lr=0.05, end_lr=0.0005, momentum=0.9, weight_decay=1e-6, clip=10.0, cutmix=0.5,
    cutmix_alpha=1.0,
) -> core.Method:  # fmt: skip
    """Steps only store; an evaluation trains a new network on the memory alone.

    The loss that a step reports is 0. Of config.optimizer and config.schedule nothing
    is read. An evaluation costs passes * ceil(stored rows / batch_size) gradient
    steps, whose network is judged and dropped.

    Args:
      head: "linear" or "cosine".
      balanced: insist on config.replay.policy="greedy_balanced", which is the method's;
        False lets the memory have any policy.
      passes: over the memory.
      batch_size: of the fit, as all below.
      lr: where the cosine begins, in passes 1, 2, 4, 8 ...; pass 0 has a tenth of it.
      end_lr: what it runs to before each restart.
      momentum, weight_decay: of SGD.
      clip: norm of the gradient above which it is scaled down.
      cutmix: probability that the images of a batch are mixed, see `gdumb_fit.mixed`.
      cutmix_alpha: of the Beta distribution of the share that an image keeps.

    Raises:
      ValueError: naming the field, the value and what is allowed.
    """
    for name, value, least in (
        ("passes", passes, 1), ("batch_size", batch_size, 1), ("lr", lr, 0),
        ("end_lr", end_lr, 0), ("clip", clip, 1e-6), ("cutmix", cutmix, 0),
        ("cutmix_alpha", cutmix_alpha, 1e-6),
    ):  # fmt: skip
        most = 1 if name == "cutmix" else math.inf
        if not least <= value <= most:
            raise ValueError(
                f"config.method.{name}={value}: allowed is {least} to {most}"
            )
    if parts.replay:
        core.check_choice("config.replay.sharded", parts.replay.sharded, (False,))
        if balanced:
            policy, wanted = parts.replay.policy, ("greedy_balanced",)
            core.check_choice("config.replay.policy with gdumb", policy, wanted)
    net = online.network(parts, head)
    sgd = optim.sgd(momentum=momentum, weight_decay=weight_decay)
    tx = optax.chain(optax.clip_by_global_norm(clip), sgd)

    def update(state, incoming, key):
        zero = jnp.zeros(())
        return state.replace(step=state.step + 1), {"loss": zero, "lr": zero}, {}

    @jax.jit
    def start(key, images):
        params, stats = net.init(key, parts.plain(images[:1]))
        return params, stats, tx.init(params)

    def one(fit, memory, key, number, lr):
        """Batch `number` of a pass; the key is that of the pass."""
        k_order, key = jax.random.split(key)
        k_augment, k_mix = jax.random.split(jax.random.fold_in(key, number))
        raw, label, mask = gdumb_fit.batch_of(k_order, memory, number, batch_size)
        images = online.images_of(parts, k_augment, raw, parts.replay.augment != "none")
        images, other, share = gdumb_fit.mixed(
            k_mix, images, label, probability=cutmix, alpha=cutmix_alpha
        )
        params, stats, opt_state = fit

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

    def several(fit, memory, key, number, begin, end, lr):
        """Batches `begin` to `end` of pass `number`; one of them where loops cost."""
        key = jax.random.fold_in(key, number)
        if parts.unroll:
            return one(fit, memory, key, begin, lr)
        return jax.lax.fori_loop(
            begin, end, lambda i, fit: one(fit, memory, key, i, lr), fit
        )

    run = jax.jit(several, donate_argnums=0)

    def eval_state(state):
        memory = state.extra.memory
        count = int(sharding.fetch(memory.filled).sum())
        if not count:
            return state
        key = jax.random.fold_in(core.step_key(state), _FIT)
        fit, batches = start(key, memory.items["image"]), -(-count // batch_size)
        stride = 1 if parts.unroll else batches
        for number in range(passes):
            speed = np.float32(gdumb_fit.rate(number, lr, end_lr))
            for begin in range(0, batches, stride):
                span = np.int32([number, begin, begin + stride])
                fit = run(fit, memory, key, *span, speed)
        return state.replace(params=fit[0], stats=fit[1])

    return online.method(parts, net, update, eval_state=eval_state)
