"""Co2L: supervised contrast for new classes, and distilled relations between rows.

Cha, Lee, Shin, "Co2L: Contrastive Continual Learning", ICCV 2021.

Departures:
- The contrastive loss is a mean over all rows, where old ones count 0, as in the
  released code; the paper sums over rows of new classes.
- `loss_scale=None` is the code's temperature / 0.07, which comes from SupCon; the
  paper has 1.
- The teacher normalises by the batch, as in the code, but its running statistics do
  not move, which nothing reads (`frozen_bn="running"`: evaluation mode).
- Incomplete last batches are dropped.
"""

from typing import Literal

import jax.numpy as jnp

from jaxcl import core, schema
from jaxcl.losses import contrastive, prototype
from jaxcl.methods import rehearsal

_BASE_TEMPERATURE = 0.07  # of the released code of SupCon


def _fill_options(options: dict, replay: core.Replay | None) -> dict:
    """Fill in the factor of the contrastive loss if it is None."""
    scale = options["loss_scale"]
    default = options["temperature"] / _BASE_TEMPERATURE
    return {"loss_scale": default if scale is None else scale}


@schema.checked("config.method", fill=_fill_options)
@schema.debug(hidden_dim=16, output_dim=8, memory_size=32)
def make(
    parts: core.Parts,
    *,
    temperature: schema.Temperature = 0.5,
    loss_scale: schema.Weight | None = None,
    weight: schema.Weight = 1.0,
    distill_temperature: schema.Temperature = 0.2,
    past_temperature: schema.Temperature = 0.01,
    frozen_bn: Literal["batch", "running"] = "batch",
    memory_size: schema.Count = 200,
    hidden_dim: schema.Width | None = None,
    output_dim: schema.Width = 128,
) -> core.Method:
    """Train by asymmetric supervised contrast and IRD, on a uniformly drawn memory.

    Rows of the present task's classes are anchors; stored ones are their negatives.

    Args:
      temperature: temperature of the contrastive loss.
      loss_scale: factor of the contrastive loss; None: temperature / 0.07.
      weight: weight of IRD, lambda; 0: without IRD.
      distill_temperature, past_temperature: temperatures of IRD, kappa of student and
        teacher.
      frozen_bn: "batch" or "running" statistics in the teacher.
      memory_size: number of stored rows.
      hidden_dim, output_dim: widths of the projector; None: as wide as the encoder's
        features.

    Raises:
      Refused: naming field, value and range.
    """
    frozen_train = frozen_bn == "batch"
    net = rehearsal.build_network(
        parts, hidden_dim=hidden_dim, output_dim=output_dim, prototypes=False
    )

    def contrast(state, z, label):
        return loss_scale * contrastive.sup_con(
            z, label, temperature=temperature, anchor_mask=state.extra.current[label]
        )

    def relations(state, z, teacher_z):
        value = prototype.ird(
            z,
            teacher_z,
            temperature=distill_temperature,
            teacher_temperature=past_temperature,
        )
        return jnp.where(state.task > 0, weight * value, 0)

    def step(state, batch):
        images = _two_views(parts, state, batch)
        label = jnp.repeat(batch["label"], 2)
        teacher_z = None
        if weight:
            teacher_z = rehearsal.teacher_rows(net, state, images, train=frozen_train)

        def loss(params):
            z, stats = net(params, state.stats, images, train=True)
            value = contrast(state, z, label)
            if weight:
                value += relations(state, z, teacher_z)
            return value, stats

        state, stats, metrics = core.descend(parts, state, loss)
        return state.replace(stats=stats), metrics

    return rehearsal.make_method(
        parts,
        net,
        step,
        memory_size=memory_size,
        mix_sources=rehearsal.mix_rows,
    )


def _two_views(parts, state, batch):
    """Augment images to f32[2B,H,W,C]; rows 2i and 2i + 1 are one example's views."""
    views = parts.augment(core.step_key(state), batch["image"])
    core.check_views(views, 2, "co2l")
    return views.reshape((-1,) + views.shape[2:])
