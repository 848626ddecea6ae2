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

import jax
import jax.numpy as jnp

from jaxcl import core, sharding
from jaxcl.methods import gdumb_fit, online

_FIT = 0x6D0B  # keeps the randomness of a fit apart from that of the next step


def make(
    parts: core.Parts,
    *,
    head="linear",
    balanced=True,
    passes=256,
    batch_size=16,
    lr=0.05,
    end_lr=0.0005,
    momentum=0.9,
    weight_decay=1e-6,
    clip=10.0,
    cutmix=0.5,
    cutmix_alpha=1.0,
) -> core.Method:
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
    recipe = gdumb_fit.Recipe(
        passes,
        batch_size,
        lr,
        end_lr,
        momentum,
        weight_decay,
        clip,
        cutmix,
        cutmix_alpha,
    )
    recipe.check()
    if parts.replay:
        core.check_choice("config.replay.sharded", parts.replay.sharded, (False,))
        core.check_choice(  # the fit has its own
            "config.replay.statistics", parts.replay.statistics, ("running",)
        )
        if balanced:
            policy, wanted = parts.replay.policy, ("greedy_balanced",)
            core.check_choice("config.replay.policy with gdumb", policy, wanted)
    net = online.network(parts, head)
    fit = gdumb_fit.fit(parts, net, recipe)

    def update(state, incoming, key):
        zero = jnp.zeros(())
        return state.replace(step=state.step + 1), {"loss": zero, "lr": zero}, {}

    def eval_state(state):
        memory = state.extra.memory
        count = int(sharding.fetch(memory.filled).sum())
        if not count:
            return state
        key = jax.random.fold_in(core.step_key(state), _FIT)
        params, stats = fit(key, memory, count)
        return state.replace(params=params, stats=stats)

    return online.method(parts, net, update, eval_state=eval_state)
