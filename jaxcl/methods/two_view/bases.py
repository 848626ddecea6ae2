"""Base losses of two-view methods, with their CaSSLe and PNR forms.

A base is one entry of `BASES`; `step.py` turns it into a method under each strategy of
`strategies.py`. Non-contrastive bases have no negatives; there PNR subtracts the
distance to the OTHER view's frozen feature (Cha et al., ICML 2024, Eq. 5).
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from absl import logging

from jaxcl import core, schema
from jaxcl.losses import contrastive, distill, noncontrastive
from jaxcl.nets import heads


class Features(NamedTuple):
    """What a loss may read; [:, v] belongs to view v. None: the method has none."""

    z: jax.Array  # f32[B,2,D], projections of the network that learns
    label: jax.Array  # i32[B]
    o: jax.Array | None = None  # f32[B,2,D], the base's own predictor of z
    p: jax.Array | None = None  # f32[B,2,D], the distillation predictor g of z
    k: jax.Array | None = None  # f32[B,2,D], projections of the slow network
    f: jax.Array | None = None  # f32[B,2,D], projections of the teacher
    key_queue: jax.Array | None = None  # f32[2,K,D]
    frozen_queue: jax.Array | None = None  # f32[2,K,D]
    replayed: jax.Array | None = None  # f32[R,D], projections of stored examples
    stored: jax.Array | None = None  # f32[R,D], their projections when stored
    stored_mask: jax.Array | None = None  # bool[R], rows that exist
    local: jax.Array | None = None  # f32[B,L,D], projections of L local crops
    prototypes: jax.Array | None = None  # f32[K,D], of the network that learns
    distil_prototypes: jax.Array | None = None  # f32[K,D], of the distillation
    slow_prototypes: jax.Array | None = None  # f32[K,D], of the slow network
    frozen_prototypes: jax.Array | None = None  # f32[K,D], of the teacher
    centre: jax.Array | None = None  # f32[K], DINO's running mean of slow logits
    target_temperature: jax.Array | None = None  # f32[], of DINO's targets
    slices: jax.Array | None = None  # f32[S,D], LeJEPA's random unit rows


class Options(NamedTuple):
    """Hyper-parameters of the losses; see `two_view.make`."""

    temperature: float
    distill_temperature: float
    weight: float
    negative_weight: float
    form: str
    pn1: bool
    pn2: bool
    scale: float
    off_diagonal: float
    invariance: float
    variance: float
    covariance: float
    balance: str
    normality: float
    logsumexp: Callable | None = None  # in place of the matrix of logits


class Base(NamedTuple):
    """One self-supervised method; its losses are (Features, Options) -> f32[]."""

    loss: Callable  # the loss of a task alone
    distil: Callable  # the term that CaSSLe adds, without its weight
    pnr: Callable  # the whole loss under PNR
    # Learning rate of a linear probe on another data set: PNR, Table 17; VICReg's as in
    # the scripts. The table's last column has 3.0 for every base with PNR, its scripts
    # those of the base alone.
    linear_lr: float
    projector: heads.Shape = heads.CONTRASTIVE
    momentum: bool = False  # has a slow network
    queues: bool = False  # has queues of negatives
    predictor: bool = False  # predicts projections of the other view, `o`
    prototypes: bool = False  # compares projections with prototypes, as DINO does
    slices: bool = False  # reads random slices, as LeJEPA does
    local: bool = False  # takes local crops beside its two views
    temperatures: bool = True  # reads `temperature` and `distill_temperature`
    supervised: bool = False  # reads labels
    distiller_input: Callable = lambda z: z  # projections -> input of g
    # Options -> whether PNR's loss, which subtracts a distance, has no lower bound.
    # None: it subtracts none.
    unbounded: Callable | None = None
    # Defaults that differ by base, from the released scripts.
    temperature: float = 0.2
    distill_temperature: float = 0.2
    momentum_start: float = 0.99
    momentum_end: float = 0.999
    predictor_hidden_dim: int = 4096
    weight: float = 1.0  # of the distillation
    negative_weight: float = 1.0  # PNR's lambda


def _views(x):
    return x[:, 0], x[:, 1]


def _all_views(features):
    """Projections of both views and, behind them, of the local crops."""
    if features.local is None:
        return features.z
    return jnp.concatenate([features.z, features.local], axis=1)


def _distilled(features):
    return (*_views(features.p), *_views(features.f))


def _contrastive_distil(features, options):
    return distill.cassle_contrastive(
        *_distilled(features),
        temperature=options.distill_temperature,
        form=options.form,
        logsumexp=options.logsumexp,
    )


def _simclr(features, options):
    """SimCLR (Chen et al., ICML 2020): NT-Xent over the batch."""
    return contrastive.nt_xent(
        *_views(features.z),
        temperature=options.temperature,
        logsumexp=options.logsumexp,
    )


def _simclr_pnr(features, options):
    return distill.pnr_simclr(
        *_views(features.z),
        *_distilled(features),
        temperature=options.distill_temperature,
        pn1=options.pn1,
        pn2=options.pn2,
        logsumexp=options.logsumexp,
    )


def _supcon(features, options):
    """SupCon (Khosla et al., NeurIPS 2020): rows of one class attract."""
    rows = features.z.reshape(-1, features.z.shape[-1])
    labels = features.label.repeat(2)  # rows 2i and 2i + 1 are the views of i
    return contrastive.sup_con(rows, labels, temperature=options.temperature)


def _supcon_pnr(features, options):
    return distill.pnr_supcon(
        *_views(features.z),
        *_distilled(features),
        features.label,
        temperature=options.temperature,
        distill_temperature=options.distill_temperature,
        pn1=options.pn1,
        pn2=options.pn2,
    )


def _moco(features, options):
    """MoCo v2+ (He et al., CVPR 2020): InfoNCE against queues, both views."""
    (q1, q2), (k1, k2) = _views(features.z), _views(features.k)
    bank1, bank2 = features.key_queue
    # The query of one view meets key and negatives of the other.
    terms = (
        contrastive.info_nce(
            *rows,
            temperature=options.temperature,
            unit_negatives=True,
            logsumexp=options.logsumexp,
        )
        for rows in ((q1, k2, bank2), (q2, k1, bank1))
    )
    return sum(terms) / 2


def _moco_pnr(features, options):
    return distill.pnr_moco(
        *_views(features.z),
        *_views(features.k),
        *_distilled(features),
        features.key_queue,
        features.frozen_queue,
        temperature=options.temperature,
        distill_temperature=options.distill_temperature,
        form=options.form,
        pn1=options.pn1,
        pn2=options.pn2,
        unit_queues=True,
        logsumexp=options.logsumexp,
    )


def _apart(loss, distil, *, code, paper):
    """PNR without negatives: CaSSLe's loss minus lambda times a distance, Eq. 4 + 5.

    Args:
      code, paper: the distance in each form, see `distill.pseudo_negative`.
    """
    distances = {"code": code, "paper": paper}

    def pnr(features, options):
        total = loss(features, options) + options.weight * distil(features, options)
        if not options.pn2:
            return total
        apart = distill.pseudo_negative(
            *_distilled(features), distance=distances[options.form]
        )
        return total - options.negative_weight * apart

    return pnr


def _barlow(features, options):
    """Barlow Twins (Zbontar et al., ICML 2021): decorrelated features."""
    return noncontrastive.barlow_twins(
        *_views(features.z), scale=options.scale, off_diagonal=options.off_diagonal
    )


def _barlow_distil(features, options):
    return distill.cassle_barlow(
        *_distilled(features), scale=options.scale, off_diagonal=options.off_diagonal
    )


def _byol(features, options):
    """BYOL (Grill et al., NeurIPS 2020): predict the slow network's projection."""
    (o1, o2), (k1, k2) = _views(features.o), _views(features.k)
    total = noncontrastive.byol(o1, k2) + noncontrastive.byol(o2, k1)
    # The released code adds the views, the paper's Eq. 6 averages over their order.
    return total / 2 if options.form == "paper" else total


def _byol_distil(features, options):
    if options.form == "paper":
        return _squared(features)  # Eq. 7, on raw features
    return distill.cassle_byol(*_distilled(features))


def _vicreg(features, options):
    """VICReg (Bardes et al., ICLR 2022): invariance, variance, covariance."""
    # The paper's distance is a sum over the D features, the released code's a mean.
    dim = features.z.shape[-1] if options.form == "paper" else 1
    return noncontrastive.vicreg(
        *_views(features.z),
        invariance=options.invariance * dim,
        variance=options.variance,
        covariance=options.covariance,
    )


def _mse_distil(features, options):
    if options.form == "paper":
        return _squared(features)  # VICReg's Eq. 11
    return distill.cassle_mse(*_distilled(features))


def _simsiam(features, options):
    """SimSiam (Chen and He, CVPR 2021): predicts the other view, no slow network."""
    return noncontrastive.simsiam(*_views(features.o), *_views(features.z))


def _cosine_distil(features, options):
    return distill.cassle_byol(*_distilled(features))


def _lejepa(features, options):
    """LeJEPA (Balestriero and LeCun, 2025): nearness of views, Gaussian embeddings."""
    return noncontrastive.lejepa(
        _all_views(features),
        features.slices,
        weight=options.normality,
        form=options.form,
    )


def _dino(features, options):
    """DINO (Caron et al., ICCV 2021): prototypes that a slow network assigns."""
    slow = noncontrastive.prototype_cosines(features.k, features.slow_prototypes)
    temperature = features.target_temperature
    if options.balance == "sinkhorn":
        views = (
            noncontrastive.sinkhorn(view, temperature=temperature)
            for view in _views(slow)
        )
        targets = jnp.stack(list(views), axis=1)
    else:
        targets = noncontrastive.centred(slow, features.centre, temperature=temperature)
    logits = noncontrastive.prototype_cosines(_all_views(features), features.prototypes)
    return noncontrastive.dino(logits, targets, temperature=options.temperature)


def _dino_distil(features, options):
    return distill.cassle_prototypes(
        *_distilled(features),
        features.distil_prototypes,
        features.frozen_prototypes,
        temperature=options.distill_temperature,
    )


def _squared(features):
    """Mean over rows and views of |g(z) - f|^2, f32[]."""
    return features.p.shape[-1] * distill.cassle_mse(*_distilled(features))


def _outweighs(options):
    return options.negative_weight >= options.weight


def _never(options):
    return False  # a cosine is what PNR subtracts


BASES = {
    "simclr": Base(_simclr, _contrastive_distil, _simclr_pnr, linear_lr=1.0),
    "mocov2plus": Base(
        _moco,
        _contrastive_distil,
        _moco_pnr,
        linear_lr=3.0,
        momentum=True,
        queues=True,
        # The released code hands g the already normalised query.
        distiller_input=core.l2_normalize,
    ),
    "supcon": Base(
        _supcon,
        _contrastive_distil,
        _supcon_pnr,
        linear_lr=1.0,
        supervised=True,
        temperature=0.1,
    ),
    "barlow_twins": Base(
        _barlow,
        _barlow_distil,
        _apart(_barlow, _barlow_distil, code="cosine", paper="squared"),
        linear_lr=0.1,
        temperatures=False,
        projector=heads.DECORRELATED,
        unbounded=lambda options: (
            options.form == "paper" and options.negative_weight > 0
        ),
    ),
    "byol": Base(
        _byol,
        _byol_distil,
        _apart(_byol, _byol_distil, code="byol", paper="squared_mean"),
        linear_lr=3.0,
        temperatures=False,
        projector=heads.PREDICTED,
        unbounded=lambda options: options.form == "paper" and _outweighs(options),
        momentum=True,
        predictor=True,
        momentum_end=1.0,
    ),
    # What CaSSLe and PNR add to the next three is ours, see docs/methods.md; rates of
    # probes are those of BYOL and VICReg, which they are nearest to.
    "simsiam": Base(
        _simsiam,
        _cosine_distil,
        _apart(_simsiam, _cosine_distil, code="cosine", paper="cosine"),
        linear_lr=3.0,
        temperatures=False,
        projector=heads.SIAMESE,
        unbounded=_never,
        predictor=True,
        predictor_hidden_dim=512,
    ),
    "dino": Base(
        _dino,
        _dino_distil,
        _apart(_dino, _dino_distil, code="cosine", paper="cosine"),
        linear_lr=3.0,
        projector=heads.BOTTLENECK,
        unbounded=_never,
        momentum=True,
        prototypes=True,
        local=True,
        temperature=0.1,
        distill_temperature=0.1,
        momentum_start=0.996,
        momentum_end=1.0,
    ),
    "lejepa": Base(
        _lejepa,
        _mse_distil,
        _apart(_lejepa, _mse_distil, code="mse", paper="squared_mean"),
        linear_lr=0.3,
        temperatures=False,
        projector=heads.NORMAL,
        unbounded=_outweighs,
        slices=True,
        local=True,
        negative_weight=0.92,  # VICReg's 23 of 25
    ),
    "vicreg": Base(
        _vicreg,
        _mse_distil,
        _apart(_vicreg, _mse_distil, code="mse", paper="squared_mean"),
        linear_lr=0.3,
        temperatures=False,
        projector=heads.DECORRELATED,
        unbounded=_outweighs,
        weight=25.0,
        negative_weight=23.0,
    ),
}


def get(name: str) -> Base:
    """Look up a base of `BASES`, or have a module of your own make it.

    Raises:
      ValueError: naming config.method.base and what is allowed.
    """
    return schema.made(BASES, name, "config.method.base")


def warn_of_distance(base: str, options: Options) -> None:
    """Warn of a PNR loss that is ruled by the distance which it subtracts.

    Either it has no lower bound, or the distance weighs more than the distillation:
    such a loss is far below 0 where the network has left the frozen one.
    """
    unbounded = get(base).unbounded
    if unbounded is None or not options.pn2:
        return
    if unbounded(options):
        danger = "has no bound below: it may diverge"
    elif options.negative_weight > options.weight:
        danger = (
            "is ruled by the distance to the frozen features: it pays to leave them, "
            "and a negative loss says so"
        )
    else:
        return
    logging.warning(
        "PNR with %s, config.method.form=%r, config.method.negative_weight=%s and "
        "config.method.weight=%s %s",
        base,
        options.form,
        options.negative_weight,
        options.weight,
        danger,
    )
