"""DINO: views agree on prototypes, which a slow network assigns.

Its forms under CaSSLe and PNR are ours, see docs/methods.md; the rate of probes is that
of BYOL.

Departures:
- The warm-up of the target temperature and the time with frozen prototypes are shares
  of the first task, not numbers of epochs.
- No clipping of gradients by tensor, no schedule of the weight decay.
- iBOT (Zhou et al., ICLR 2022): hidden patches are drawn one by one, not in blocks, and
  as many in each view; they show their position alone, no learned token; both losses
  share head, prototypes and the targets' temperature. Views that hide no patch count
  in the patches' centre and Sinkhorn, too.
- KoLeo (Sablayrolles et al., ICLR 2019; Oquab et al., TMLR 2024) compares rows of the
  global batch.
- Prototypes are always compared by their direction. There are 4,096 by default; the
  paper has 65,536.
"""

import functools
from typing import Annotated, Literal, NamedTuple

import jax
import jax.numpy as jnp

from jaxcl import core, optim, schema
from jaxcl.losses import noncontrastive
from jaxcl.methods.two_view import forms, records
from jaxcl.nets import mlp

_CENTRE_MOMENTUM = 0.9  # of the mean of logits, as in the paper


def warm_temperature(
    task: jax.Array, progress: jax.Array, start: float, end: float, share: float
) -> jax.Array:
    """Choose the targets' temperature, f32[]: it rises in a share of the first task."""
    fraction = jnp.float32(progress) / max(share, 1e-6)
    fraction = jnp.where(task > 0, 1.0, jnp.minimum(fraction, 1.0))
    if share == 0:
        fraction = 1.0
    return start + (end - start) * fraction


class Centres(NamedTuple):
    """Running means of the slow network's logits."""

    views: jax.Array  # f32[K]
    patches: jax.Array | None  # f32[K], of masked patches; None without iBOT


def move_centres(centres: Centres, x: records.Features, keep: float) -> Centres:
    """Move the centres to the means of the slow network's logits."""
    unit = core.l2_normalize(x.slow_params["prototypes"])

    def move_centre(centre, rows):
        # Cosines are linear in unit rows: the mean of logits is the logit of the mean.
        mean = jnp.mean(core.l2_normalize(rows), axis=(0, 1))
        return optim.ema(centre, core.dot(unit, mean[None])[:, 0], keep)

    patches = centres.patches
    if patches is not None:
        patches = move_centre(patches, x.slow_patches)
    return Centres(move_centre(centres.views, x.k), patches)


def assign_views(x: records.Features, centred: bool) -> jax.Array:
    """Assign prototypes to the views by the slow network, f32[B,2,K]."""
    slow = noncontrastive.prototype_cosines(x.k, x.slow_params["prototypes"])
    if centred:
        return noncontrastive.centred(slow, x.state.views, temperature=x.prepared)
    return _balance(slow, x.prepared)


def assign_patches(x: records.Features, centred: bool) -> jax.Array:
    """Assign prototypes to masked patches by the slow network, f32[2B,M,K]."""
    prototypes = x.slow_params["prototypes"]
    slow = noncontrastive.prototype_cosines(x.slow_patches, prototypes)
    if centred:
        return noncontrastive.centred(slow, x.state.patches, temperature=x.prepared)
    return _balance(slow, x.prepared)


def _balance(logits, temperature):
    """Apply Sinkhorn-Knopp to all rows f32[N,M,K] together, as DINOv2 does."""
    rows = logits.reshape(-1, logits.shape[-1])
    targets = noncontrastive.sinkhorn(rows, temperature=temperature)
    return targets.reshape(logits.shape)


@schema.debug(prototypes=16)
def make(
    *,
    temperature: schema.Temperature = 0.1,
    distill_temperature: schema.Temperature = 0.1,
    momentum_start: schema.Share = 0.996,
    momentum_end: schema.Share = 1.0,
    prototypes: schema.Count = 4096,
    balance: Literal["centre", "sinkhorn"] = "centre",
    target_temperature: schema.Temperature = 0.04,
    target_start: schema.Temperature = 0.04,
    target_warmup: schema.Share = 0.3,
    centre_momentum: schema.Share = _CENTRE_MOMENTUM,
    prototypes_held: schema.Share = 0.01,
    ibot: schema.Weight = 0.0,
    mask_share: Annotated[float, schema.Range(above=0, most=1)] = 0.3,
    mask_chance: Annotated[float, schema.Range(above=0, most=1)] = 0.5,
    koleo: schema.Weight = 0.0,
) -> records.Base:
    """Learn prototypes that a slow network assigns: DINO (Caron et al., ICCV 2021).

    Args:
      temperature: temperature of the network that learns.
      distill_temperature: temperature of CaSSLe's term.
      momentum_start, momentum_end: momentum of the slow network, at the start and end
        of each task.
      prototypes: number of prototypes.
      balance: rule for the targets: "centre" subtracts a running mean, "sinkhorn" uses
        all prototypes equally over both views of the batch.
      target_temperature, target_start, target_warmup: temperature of the targets. It
        starts at `target_start` and rises over the share `target_warmup` of the first
        task.
      centre_momentum: momentum of the running mean.
      prototypes_held: share of the first task in which prototypes are frozen.
      ibot: weight of iBOT's loss of hidden patches, of Vision Transformers; DINOv2 has
        1. 0: none are hidden.
      mask_share, mask_chance: share of patches that a view hides; share of views that
        hide any.
      koleo: weight of KoLeo, which spreads features of the encoder; DINOv2 has 0.1.
    """
    centred = balance == "centre"

    def loss(x):
        wanted, prototypes = assign_views(x, centred), x.params["prototypes"]
        logits = noncontrastive.prototype_cosines(forms.join_views(x), prototypes)
        total = noncontrastive.dino(logits, wanted, temperature=temperature)
        if ibot:
            wanted = assign_patches(x, centred)
            logits = noncontrastive.prototype_cosines(x.patches, prototypes)
            total += ibot * noncontrastive.ibot(
                logits, wanted, x.hides, temperature=temperature
            )
        if koleo:
            total += koleo * sum(map(noncontrastive.koleo, core.split_views(x.h)))
        return total

    def update(state, x, *, active=True, aligned=True):
        return move_centres(state, x, centre_momentum) if centred else state

    def init_state(key, dim):
        return Centres(jnp.zeros(prototypes), jnp.zeros(prototypes) if ibot else None)

    unread = not centred and centre_momentum != _CENTRE_MOMENTUM
    return records.Base(
        loss,
        lambda x: forms.distil_prototypes(x, distill_temperature),
        distance="cosine",
        linear_lr=3.0,
        projector=mlp.BOTTLENECK,
        momentum=(momentum_start, momentum_end),
        reads=("local", "h") if koleo else ("local",),
        one_row=not koleo,
        masks=(mask_share, mask_chance) if ibot else None,
        unread=("centre_momentum",) if unread else (),
        init_params=lambda key, dim: forms.init_prototypes(key, prototypes, dim),
        init_state=init_state if centred else None,
        prepare=lambda key, task, progress, dim: warm_temperature(
            task, progress, target_start, target_temperature, target_warmup
        ),
        mask_gradients=functools.partial(forms.hold_prototypes, share=prototypes_held),
        update=update,
    )
