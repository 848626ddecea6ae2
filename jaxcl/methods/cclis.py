"""CCLIS: replay drawn by importance, samples against prototypes, PRD.

Li, Azizov, Li, Liang, "Contrastive Continual Learning with Importance Sampling and
Prototype-Instance Relation Distillation", AAAI 2024 (P). Its parts are separate
options: `keep` chooses the memory, `scope` weighs negatives, `weight` distils.

Departures:
- Losses are means over the batch, as in the released code, where P writes sums.
- PRD goes over old classes, as in the code. P's goes over all classes, although the
  teacher's prototypes of new ones are random (`distill_over="seen"`).
- The importance weights are P's; the code takes those of `scope="all_negatives"` for
  its CIFAR-100 and Tiny-ImageNet, by mistake. Neither P nor the code has "all".
- P and the code do not weight a uniform memory; `keep="uniform"` does so by `scope`.
- A batch holds stored rows in proportion to their number, as in the code; P says
  half (`share=0.5`). Incomplete last batches are dropped.
- The prototypes' warm-up begins at the schedule's `start`, the code's at a tenth.
"""

import functools
from typing import Annotated, Literal

import jax
import jax.numpy as jnp

from jaxcl import core, schema, sharding
from jaxcl.losses import prototype
from jaxcl.methods import rehearsal

_CHUNK = 256  # images that are scored at a time


@schema.checked("config.method")
@schema.debug(hidden_dim=16, output_dim=8, memory_size=32)
def make(
    parts: core.Parts,
    *,
    temperature: schema.Temperature = 0.5,
    weight: schema.Weight = 0.6,
    distill_temperature: schema.Temperature = 0.2,
    past_temperature: schema.Temperature = 0.1,
    distill_over: Literal["old", "seen"] = "old",
    scope: prototype.Scope = "old",
    keep: Literal["importance", "uniform"] = "importance",
    passes: schema.Count = 5,
    leftover: bool = False,
    share: Annotated[float, schema.Range(above=0, below=1)] | None = None,
    memory_size: schema.Count = 200,
    prototype_rate: schema.Positive = 0.01,
    hidden_dim: schema.Width | None = None,
    output_dim: schema.Width = 128,
) -> core.Method:
    """Train by sample-NCE and PRD, on a memory chosen near other classes' prototypes.

    Args:
      temperature: temperature of Sample-NCE, and of the scores that choose the memory.
      weight: weight of PRD, lambda; 0: without PRD.
      distill_temperature, past_temperature: temperatures of PRD, kappa of student and
        teacher.
      distill_over: "old", the classes of earlier tasks, or all "seen".
      scope: candidates that have weights, see `prototype.sample_nce`; "none" is plain
        prototype NCE.
      keep: "importance" draws the rows to keep by `prototype.proposal`, which is also
        g of the weights; "uniform" draws them uniformly, and g is 1 over the pool.
      passes: augmented views of each row that scores are averaged over.
      leftover: keep a term of the row's own class in the scores, as the released code
        does by mistake.
      share: share of stored rows in a batch; None: their share of all rows.
      memory_size: number of stored rows.
      prototype_rate: learning rate of the prototypes, at the peak of the schedule.
      hidden_dim, output_dim: widths of the projector; None: as wide as the encoder's
        features.

    Raises:
      Refused: naming field, value and range.
    """
    net = rehearsal.build_network(
        parts, hidden_dim=hidden_dim, output_dim=output_dim, prototypes=True
    )

    def contrast(state, batch, z, prototypes):
        return prototype.sample_nce(
            z,
            batch["label"],
            prototypes,
            rehearsal.weights(state.extra, batch),
            state.extra.old,
            temperature=temperature,
            scope=scope,
        )

    def relations(state, z, teacher_z, prototypes):
        extra, classes = state.extra, state.extra.taught
        if distill_over == "seen":
            classes = extra.seen & (state.task > 0)
        return prototype.prd(
            z,
            teacher_z,
            prototypes,
            extra.teacher["prototypes"],
            classes,
            temperature=distill_temperature,
            teacher_temperature=past_temperature,
        )

    def step(state, batch):
        state = state.replace(params=_on_the_sphere(state.params))
        images = parts.augment(core.step_key(state), batch["image"])
        core.check_views(images, 1, "cclis")
        images = images[:, 0]
        teacher_z = None
        if weight:
            teacher_z = rehearsal.teacher_rows(net, state, images, train=False)

        def loss(params):
            z, stats = net(params, state.stats, images, train=True)
            value = contrast(state, batch, z, params["prototypes"])
            if weight:
                value += weight * relations(state, z, teacher_z, params["prototypes"])
            return value, stats

        rates = parts.schedule_with_peak(prototype_rate), parts.lr
        prototype_lr, lr = (rate(core.progress(state), state.task) for rate in rates)
        shares = {"prototypes": prototype_lr / jnp.where(lr > 0, lr, 1)}
        state, stats, metrics = core.descend(parts, state, loss, shares)
        return state.replace(stats=stats), metrics

    def score_rows(state, key, images, label, mask):
        """Compute the importance of rows for the choice of the memory, f32[N]."""
        return prototype.proposal(
            embed_views(parts, net, state, key, images, passes),
            label,
            state.params["prototypes"],
            state.extra.seen,
            temperature=temperature,
            example_mask=mask,
            leftover=leftover,
        )

    return rehearsal.make_method(
        parts,
        net,
        step,
        memory_size=memory_size,
        mix_sources=functools.partial(rehearsal.stratified, share=share),
        score=score_rows if keep == "importance" else None,
    )


def _on_the_sphere(params):
    """Scale prototypes to unit length; outside of the gradient."""
    return params | {"prototypes": core.l2_normalize(params["prototypes"])}


def embed_views(
    parts: core.Parts,
    net: rehearsal.Network,
    state: core.TrainState,
    key: jax.Array,
    images: jax.Array,
    passes: int,
) -> jax.Array:
    """Embed images under new augmentation in each pass, in evaluation mode.

    Args:
      parts: components that the config builds.
      net: the network.
      state: state with the network's parameters and statistics.
      key: threefry key of the views.
      images: u8[N,H,W,C].
      passes: views of each image.

    Returns:
      f32[passes,N,D], unit rows.
    """
    count = len(images)
    size = min(_CHUNK, count)
    steps = -(-count // size)
    padded = jnp.resize(images, (steps * size, *images.shape[1:]))
    padded = padded.reshape(steps, size, *images.shape[1:])

    def embed_pass(number):
        rows = sharding.shard_rows_in_jit(padded[number % steps])
        view = parts.augment(jax.random.fold_in(key, number), rows)[:, 0]
        return net(state.params, state.stats, view, train=False)[0]

    z = jax.lax.map(embed_pass, jnp.arange(passes * steps))
    return z.reshape(passes, steps * size, -1)[:, :count]
