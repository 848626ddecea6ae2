"""Co2L: supervised contrast for new classes, relations between rows kept.

Cha, Lee, Shin, "Co2L: Contrastive Continual Learning", ICCV 2021.

Departures:
- The contrastive loss is a mean over all rows, old ones counted as 0, as in the
  released code; the paper sums over rows of new classes.
- `loss_scale=None` is the code's temperature / 0.07, which it has from SupCon; the
  paper has 1.
- The teacher normalises by the batch, as in the code, but its running statistics,
  which nothing reads, do not move (`frozen_bn="running"`: in evaluation mode).
- Incomplete last batches are dropped.
"""

import math

import jax.numpy as jnp

from jaxcl import core
from jaxcl.losses import contrastive, prototype
from jaxcl.methods import rehearsal

_BASE_TEMPERATURE = 0.07  # of the released code of SupCon


def make(
    parts: core.Parts,
    *,
    temperature=0.5,
    loss_scale: float | None = None,
    weight=1.0,
    distill_temperature=0.2,
    past_temperature=0.01,
    frozen_bn="batch",
    memory_size=200,
    hidden_dim=512,
    output_dim=128,
) -> core.Method:
    """Asymmetric supervised contrast + weight * IRD, on a uniformly drawn memory.

    Rows of the present task's classes are anchors; stored ones are their negatives.

    Args:
      temperature: of the contrastive loss.
      loss_scale: multiplies it; None: temperature / 0.07.
      weight: of IRD, lambda; 0: without.
      distill_temperature, past_temperature: of IRD, kappa of student and teacher.
      frozen_bn: "batch" or "running" statistics in the teacher.
      memory_size: rows kept.
      hidden_dim, output_dim: of the projector.

    Raises:
      ValueError: naming the field, the value and what is allowed.
    """
    core.check_choice("config.method.frozen_bn", frozen_bn, ("batch", "running"))
    scale = temperature / _BASE_TEMPERATURE if loss_scale is None else loss_scale
    for name, value, least in (
        ("temperature", temperature, 1e-6),
        ("weight", weight, 0),
        ("loss_scale", scale, 0),
        ("distill_temperature", distill_temperature, 1e-6),
        ("past_temperature", past_temperature, 1e-6),
    ):
        if not least <= value < math.inf:
            raise ValueError(f"config.method.{name}={value}: must be at least {least}")
    net = rehearsal.network(
        parts, hidden_dim=hidden_dim, output_dim=output_dim, prototypes=False
    )

    def step(state, batch):
        views = parts.augment(core.step_key(state), batch["image"])
        if views.shape[1] != 2:
            raise ValueError(f"config.augment.views={views.shape[1]}: co2l takes 2")
        images = views.reshape((-1,) + views.shape[2:])  # rows 2i, 2i+1: one example
        label = jnp.repeat(batch["label"], 2)
        told = None
        if weight:
            train = frozen_bn == "batch"
            told = rehearsal.teach(net, state, images, train=train)

        def loss(params):
            z, stats = net(params, state.stats, images, train=True)
            value = scale * contrastive.sup_con(
                z,
                label,
                temperature=temperature,
                anchor_mask=state.extra.current[label],
            )
            if weight:
                later = weight * prototype.ird(
                    z,
                    told,
                    temperature=distill_temperature,
                    teacher_temperature=past_temperature,
                )
                value += jnp.where(state.task > 0, later, 0)
            return value, stats

        state, stats, metrics = core.descend(parts, state, loss)
        return state.replace(stats=stats), metrics

    return rehearsal.method(
        parts, net, step, memory_size=memory_size, mixed=rehearsal.together
    )
