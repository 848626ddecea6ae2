"""Base losses of two-view methods and what each strategy makes of them.

A base is one entry of `BASES`; `two_view.py` turns it into a method.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax

from jaxcl import core
from jaxcl.losses import contrastive, distill


class Features(NamedTuple):
    """What a loss may read; [:, v] belongs to view v."""

    z: jax.Array  # f32[B,2,D], projections of the network that learns
    k: jax.Array | None  # f32[B,2,D], of the slow network
    p: jax.Array | None  # f32[B,2,D], the distillation predictor g of z
    f: jax.Array | None  # f32[B,2,D], of the teacher
    key_queue: jax.Array | None  # f32[2,K,D]
    frozen_queue: jax.Array | None  # f32[2,K,D]
    label: jax.Array  # i32[B]


class Options(NamedTuple):
    """Hyper-parameters of the losses; see `two_view.make`."""

    temperature: float
    distill_temperature: float
    distill_weight: float
    form: str
    pn1: bool
    pn2: bool


class Base(NamedTuple):
    """One self-supervised method under each strategy: (Features, Options) -> f32[]."""

    loss: Callable
    cassle: Callable
    pnr: Callable
    momentum: bool = False  # has a slow network
    queues: bool = False  # has queues of negatives
    distiller_input: Callable = lambda z: z  # what g is given


def _views(x):
    return x[:, 0], x[:, 1]


def _cassle_contrastive(base_loss):
    def loss(features, options):
        distilled = distill.cassle_contrastive(
            *_views(features.p),
            *_views(features.f),
            temperature=options.distill_temperature,
            form=options.form,
        )
        return base_loss(features, options) + options.distill_weight * distilled

    return loss


def _simclr(features, options):
    return contrastive.nt_xent(*_views(features.z), temperature=options.temperature)


def _simclr_pnr(features, options):
    return distill.pnr_simclr(
        *_views(features.z),
        *_views(features.p),
        *_views(features.f),
        temperature=options.distill_temperature,
        pn1=options.pn1,
        pn2=options.pn2,
    )


def _moco(features, options):
    (q1, q2), (k1, k2) = _views(features.z), _views(features.k)
    bank1, bank2 = features.key_queue
    # The query of one view meets key and negatives of the other.
    terms = (
        contrastive.info_nce(
            *rows, temperature=options.temperature, unit_negatives=True
        )
        for rows in ((q1, k2, bank2), (q2, k1, bank1))
    )
    return sum(terms) / 2


def _moco_pnr(features, options):
    return distill.pnr_moco(
        *_views(features.z),
        *_views(features.k),
        *_views(features.p),
        *_views(features.f),
        features.key_queue,
        features.frozen_queue,
        temperature=options.temperature,
        distill_temperature=options.distill_temperature,
        form=options.form,
        pn1=options.pn1,
        pn2=options.pn2,
        unit_queues=True,
    )


BASES = {
    "simclr": Base(_simclr, _cassle_contrastive(_simclr), _simclr_pnr),
    "mocov2plus": Base(
        _moco,
        _cassle_contrastive(_moco),
        _moco_pnr,
        momentum=True,
        queues=True,
        # The released code hands g the already normalised query.
        distiller_input=contrastive.l2_normalize,
    ),
}


def get(name: str) -> Base:
    """The base of that name; ValueError with the nearest ones otherwise."""
    core.check_choice("config.method.base", name, tuple(BASES))
    return BASES[name]
