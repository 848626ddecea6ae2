"""Regularisers, which online self-supervised learning adds to the base's loss.

See `step.py` for the papers. A regulariser is a function with options of config.method
and a row of `REGULARISERS`.
"""

from collections.abc import Callable
from typing import Literal, NamedTuple

from jaxcl import core, schema
from jaxcl.losses import noncontrastive, replay
from jaxcl.methods.two_view import records
from jaxcl.methods.two_view.strategies import pnr as pnr_strategy

Following = Literal["ema", "snapshot"]


class Teacher(NamedTuple):
    """The rule by which the frozen network follows the one that learns."""

    ema: float  # share of the old average after each update
    snapshot_every: int | None  # batches between snapshots; None: it is an average
    batch: bool  # it normalises by its batch, not by running statistics


class Regulariser(NamedTuple):
    """A term that is added to the base's loss on the aligned rows."""

    align: Callable | None = None  # (Base, Features of these rows) -> f32[]
    weight: float = 1.0  # of `align`
    check: Callable | None = None  # (name of the base, Base): refuse it, or warn
    teacher: Teacher | None = None  # reads features of the frozen network
    queues: bool = False  # reads a queue of these features, if the base has queues
    distiller_hidden_dim: int | None = None  # of the predictor a; None: it reads none
    stores: bool = False  # reads projections that are stored with the rows
    stored_momentum: float | None = None  # what is stored moves, keeping this share
    mix: float | None = None  # mixes in replayed rows, from Beta(mix, mix)


def _follow(teacher, ema, snapshot_every, frozen_bn) -> Teacher:
    """Make the record of options that "cassle" and "pnr" have."""
    every = snapshot_every if teacher == "snapshot" else None
    return Teacher(ema, every, frozen_bn == "batch")


def none() -> Regulariser:
    """Add nothing to L_SSL."""
    return Regulariser()


@schema.debug(distill_hidden_dim=16)
def cassle(
    *,
    weight: schema.Weight | None = None,
    distill_hidden_dim: schema.Width = 512,
    teacher: Following = "ema",
    teacher_ema: schema.Share = 0.999,
    snapshot_every: schema.Count = 100,
    frozen_bn: records.Statistics = "batch",
) -> Regulariser:
    """Distil from a frozen network that follows the trained one, as in CaSSLe.

    Args:
      weight: of the distillation; None: the base's.
      distill_hidden_dim: hidden units of the predictor a.
      teacher: the frozen network is an "ema" of the one that learns, or a "snapshot".
      teacher_ema: share of the old average after each update.
      snapshot_every: batches between snapshots, which are taken before the batch.
      frozen_bn: the teacher normalises by its "batch" or by "running" statistics.
    """
    return Regulariser(
        lambda base, x: base.distil(x),
        weight,
        teacher=_follow(teacher, teacher_ema, snapshot_every, frozen_bn),
        distiller_hidden_dim=distill_hidden_dim,
    )


@schema.debug(distill_hidden_dim=16)
def cla_r(
    *,
    weight: schema.Weight = 1.0,
    stored_momentum: schema.Share = 0.5,
    distill_hidden_dim: schema.Width = 512,
) -> Regulariser:
    """Average -cos(a(z), s) over views; s is stored with the row.

    Args:
      weight: of the alignment.
      stored_momentum: share of the old vector that stays stored, CLA's alpha.
      distill_hidden_dim: hidden units of the predictor a.
    """

    def align(base, x):
        return noncontrastive.simsiam(*core.split_views(x.p), x.stored, x.stored)

    return Regulariser(
        align,
        weight,
        distiller_hidden_dim=distill_hidden_dim,
        stores=True,
        stored_momentum=stored_momentum,
    )


@schema.debug(distill_hidden_dim=16)
def pnr(
    *,
    weight: schema.Weight | None = None,
    negative_weight: schema.Weight | None = None,
    pn1: bool = True,
    pn2: bool = True,
    distill_hidden_dim: schema.Width = 512,
    teacher: Following = "ema",
    teacher_ema: schema.Share = 0.999,
    snapshot_every: schema.Count = 100,
    frozen_bn: records.Statistics = "batch",
) -> Regulariser:
    """Add the pseudo-negatives of PNR to the base's loss.

    Args:
      weight: of the distillation, for bases without negatives; None: the base's.
      negative_weight: lambda, for bases without negatives; None: the base's.
      pn1, pn2: pseudo-negatives in PNR's first and second term.
      distill_hidden_dim: hidden units of the predictor a.
      teacher: the frozen network is an "ema" of the one that learns, or a "snapshot".
      teacher_ema: share of the old average after each update.
      snapshot_every: batches between snapshots, which are taken before the batch.
      frozen_bn: the teacher normalises by its "batch" or by "running" statistics.
    """
    terms = records.PnrTerms(weight, negative_weight, pn1, pn2)
    return Regulariser(
        lambda base, x: pnr_strategy.compute_loss(base, x, terms) - base.loss(x),
        check=lambda name, base: pnr_strategy.check_form(name, base, terms),
        teacher=_follow(teacher, teacher_ema, snapshot_every, frozen_bn),
        queues=True,
        distiller_hidden_dim=distill_hidden_dim,
    )


def der(*, weight: schema.Weight = 1.0) -> Regulariser:
    """Average DER's distance of z to the stored projection s over both views.

    Args:
      weight: of the distance.
    """

    def align(base, x):
        first, second = (replay.der(z, x.stored) for z in core.split_views(x.z))
        return (first + second) / 2

    return Regulariser(align, weight, stores=True)


def lump(*, mix: schema.Positive = 0.4) -> Regulariser:
    """Take L_SSL of mixtures of incoming with replayed rows alone.

    Args:
      mix: mixtures are drawn from Beta(mix, mix).
    """
    return Regulariser(mix=mix)


REGULARISERS: dict[str, Callable[..., Regulariser]] = {
    "none": none,
    "cassle": cassle,
    "cla_r": cla_r,
    "pnr": pnr,
    "der": der,
    "lump": lump,
}


def find_make(name: str) -> Callable[..., Regulariser]:
    """Find a regulariser, or raise Refused with the nearest names."""
    core.check_choice("config.method.regulariser", name, tuple(REGULARISERS))
    return REGULARISERS[name]
