"""What online self-supervised learning adds to the loss of its base.

See `step.py` for the papers. A regulariser is one entry of `REGULARISERS`.
"""

from collections.abc import Callable
from typing import NamedTuple

from jaxcl.losses import noncontrastive, replay
from jaxcl.methods.two_view import strategies


class Regulariser(NamedTuple):
    """What is added to the base's loss on the rows that are aligned."""

    align: Callable | None = None  # (Base, Features of these rows, Options) -> f32[]
    teacher: bool = False  # reads features of the frozen network
    distiller: bool = False  # reads outputs of the predictor a
    stores: bool = False  # reads projections that are stored with the rows
    moves: bool = False  # what is stored moves with every use
    mixes: bool = False  # trains on mixtures of incoming with replayed rows alone
    weighs: bool = True  # `align` is multiplied by the option `weight`
    weight: float | None = None  # default of that option; None: the base's


def _cassle(base, rows, options):
    return base.distil(rows, options)


def _cla_r(base, rows, options):
    """The mean of -cos(a(z), s); s serves both views."""
    return noncontrastive.simsiam(rows.p[:, 0], rows.p[:, 1], rows.stored, rows.stored)


def _der(base, rows, options):
    """DER's distance of z to the stored projection s, the mean over both views."""
    first, second = (replay.der(rows.z[:, view], rows.stored) for view in (0, 1))
    return (first + second) / 2


def _pnr(base, rows, options):
    return base.pnr(rows, options) - base.loss(rows, options)


REGULARISERS = {
    "none": Regulariser(),
    "cassle": Regulariser(_cassle, teacher=True, distiller=True),
    "cla_r": Regulariser(_cla_r, distiller=True, stores=True, moves=True, weight=1.0),
    "pnr": Regulariser(_pnr, teacher=True, distiller=True, weighs=False),
    "der": Regulariser(_der, stores=True, weight=strategies.STRATEGIES["der"].weight),
    "lump": Regulariser(mixes=True),
}
