"""What two-view methods train with after the first task, one entry per strategy.

A strategy is one entry of `STRATEGIES`; `two_view.py` puts it to work on any base of
`bases.py`. CaSSLe and PNR differ by base, so that a base holds their losses; the
others are the same for every base. Where their papers speak of logits or of
likelihoods, a self-supervised method has projections and its own loss.
"""

from collections.abc import Callable
from typing import NamedTuple

from jaxcl import core
from jaxcl.losses import distill, replay


class Strategy(NamedTuple):
    """How the tasks after the first are trained."""

    loss: Callable  # (Base, Features, Options) -> f32[]
    teacher: bool = False  # keeps the network of the last task, frozen
    distiller: bool = False  # has the predictor g on top of the projections
    frozen_queue: bool = False  # reads the teacher's queue, of bases with queues
    stores: bool = False  # keeps examples of the past, from the first step on
    mixes: bool = False  # trains on mixtures with stored examples, LUMP
    consolidates: bool = False  # penalises moved parameters, EWC
    weight: float | None = None  # of what it adds; None: the base's


def _base(base, features, options):
    return base.loss(features, options)


def _cassle(base, features, options):
    """CaSSLe (Fini et al., CVPR 2022): base + weight * its distillation of g(z)."""
    distilled = base.distil(features, options)
    return base.loss(features, options) + options.weight * distilled


def _pnr(base, features, options):
    """PNR (Cha et al., ICML 2024); what it is depends on the base."""
    return base.pnr(features, options)


def _less_forget(base, features, options):
    """Less-Forget (Hou et al., CVPR 2019, Sec. 3.3): base + weight * (1 - cos(z, f)).

    The paper constrains the features that its cosine classifier reads; here those
    that the loss reads, the projections. Its weight grows with the number of
    classes, which are not known here: it is fixed.
    """
    z, f = features.z, features.f
    held = distill.less_forget(z[:, 0], z[:, 1], f[:, 0], f[:, 1])
    return base.loss(features, options) + options.weight * held


def _der(base, features, options):
    """DER (Buzzega et al., NeurIPS 2020, Sec. 3): base + weight * |z(x') - z'|^2.

    x' are stored examples under new augmentation, z' the projections of their first
    view when they were stored; as Madaan et al. (ICLR 2022) take DER to projections.
    In force from the first step, as there, since it knows no tasks.
    """
    held = replay.der(
        features.replayed, features.stored, example_mask=features.stored_mask
    )
    return base.loss(features, options) + options.weight * held


STRATEGIES = {
    "finetune": Strategy(_base),
    "cassle": Strategy(_cassle, teacher=True, distiller=True),
    "pnr": Strategy(_pnr, teacher=True, distiller=True, frozen_queue=True),
    "less_forget": Strategy(_less_forget, teacher=True, weight=1.0),
    # Kirkpatrick et al., PNAS 2017, see memory/importance.py. The base loss stands
    # for the negative log-likelihood.
    "ewc": Strategy(_base, consolidates=True, weight=0.01),
    "der": Strategy(_der, stores=True, weight=1.0),
    # Madaan et al., ICLR 2022: x <- m x + (1 - m) x', m ~ Beta(mix, mix), one m for
    # the batch and both views, x' a stored example. The base loss, on mixtures.
    "lump": Strategy(_base, stores=True, mixes=True),
}


def get(name: str) -> Strategy:
    """The strategy of that name; ValueError with the nearest ones otherwise."""
    core.check_choice("config.method.strategy", name, tuple(STRATEGIES))
    return STRATEGIES[name]
