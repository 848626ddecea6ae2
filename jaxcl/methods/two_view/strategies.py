"""What two-view methods train with after the first task, one entry per strategy.

A strategy is one entry of `STRATEGIES`; `step.py` combines it with any base of
`bases.py`. The losses of CaSSLe and PNR depend on the base and are defined there; the
others are the same for every base. Where their papers speak of logits or likelihoods,
projections and the loss of the base take their place.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxcl import schema
from jaxcl.losses import distill, replay


class Strategy(NamedTuple):
    """How the tasks after the first are trained."""

    loss: Callable  # (Base, Features, Options) -> f32[]
    teacher: bool = False  # keeps the network of the last task, frozen
    distiller: bool = False  # has the predictor g on top of the projections
    frozen_queue: bool = False  # reads the teacher's queue, if the base has queues
    stores: bool = False  # keeps examples of the past, from the first step on
    mixes: bool = False  # trains on mixtures with stored examples, LUMP
    consolidates: bool = False  # penalises moved parameters, EWC
    weight: float | None = None  # of the term it adds; None: the base's


def _base(base, features, options):
    return base.loss(features, options)


def _cassle(base, features, options):
    """CaSSLe (Fini et al., CVPR 2022): base + weight * its distillation of g(z)."""
    distilled = base.distil(features, options)
    return base.loss(features, options) + options.weight * distilled


def _pnr(base, features, options):
    """PNR (Cha et al., ICML 2024); its loss depends on the base."""
    return base.pnr(features, options)


def _less_forget(base, features, options):
    """Less-Forget (Hou et al., CVPR 2019, Sec. 3.3): base + weight * (1 - cos(z, f)).

    The paper constrains the features that its cosine classifier reads; here these are
    the projections, which the loss reads. The paper's weight grows with the number of
    classes, which is not known here; so it is fixed.
    """
    z, f = features.z, features.f
    forgotten = distill.less_forget(z[:, 0], z[:, 1], f[:, 0], f[:, 1])
    return base.loss(features, options) + options.weight * forgotten


def _der(base, features, options):
    """DER (Buzzega et al., NeurIPS 2020, Sec. 3): base + weight * |z(x') - z'|^2.

    x' are stored examples under new augmentation, z' the projections of their first
    view when they were stored. Madaan et al. (ICLR 2022) apply DER to projections in
    this way. The term counts from the first step, as there: DER knows no tasks.
    """
    distance = replay.der(
        features.replayed, features.stored, example_mask=features.stored_mask
    )
    return base.loss(features, options) + options.weight * distance


def mixed(
    key: jax.Array,
    mix: float,
    views: jax.Array,
    others: jax.Array,
    mask: jax.Array,
) -> tuple[jax.Array, jax.Array]:
    """Mix rows with stored ones, as LUMP does (Madaan et al., ICLR 2022).

    m x + (1 - m) x', where m ~ Beta(mix, mix) is the same for the batch and all views.
    A row stays as it is while its partner does not exist.

    Args:
      key: threefry key, of m.
      mix: both parameters of the distribution.
      views: f32[B,V,H,W,C].
      others: f32[R,V,H,W,C]; the partner of row i is row i modulo R.
      mask: bool[R], rows of `others` that exist.

    Returns:
      the mixtures, f32[B,V,H,W,C], and m, f32[].
    """
    rows = jnp.arange(len(views)) % len(others)
    share = jax.random.beta(key, mix, mix).astype(views.dtype)
    blend = share * views + (1 - share) * others[rows]
    exists = mask[rows][:, None, None, None, None]
    return jnp.where(exists, blend, views), share


STRATEGIES = {
    "finetune": Strategy(_base),
    "cassle": Strategy(_cassle, teacher=True, distiller=True),
    "pnr": Strategy(_pnr, teacher=True, distiller=True, frozen_queue=True),
    "less_forget": Strategy(_less_forget, teacher=True, weight=1.0),
    # Kirkpatrick et al., PNAS 2017, see memory/importance.py. The base loss takes the
    # place of the negative log-likelihood.
    "ewc": Strategy(_base, consolidates=True, weight=0.01),
    "der": Strategy(_der, stores=True, weight=1.0),
    # Madaan et al., ICLR 2022: the base loss on mixtures with stored rows, see `mixed`.
    "lump": Strategy(_base, stores=True, mixes=True),
}


def get(name: str) -> Strategy:
    """Look up a strategy of `STRATEGIES`, or have a module of your own make it.

    Raises:
      ValueError: naming config.method.strategy and what is allowed.
    """
    return schema.made(STRATEGIES, name, "config.method.strategy")
