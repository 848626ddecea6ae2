"""What online self-supervised learning adds to the loss of its base.

See `step.py` for the papers. A regulariser is one entry of `REGULARISERS`.
"""

from collections.abc import Callable
from typing import NamedTuple

from jaxcl.losses import noncontrastive


class Regulariser(NamedTuple):
    """What is added to the base's loss on the rows that are aligned."""

    align: Callable | None = None  # (Base, Features of these rows, Options) -> f32[]
    teacher: bool = False  # reads features of the frozen network
    stores: bool = False  # reads projections that are stored with the rows
    weighs: bool = True  # `align` is multiplied by the option `weight`
    weight: float | None = None  # default of that option; None: the base's


def _cassle(base, rows, options):
    return base.distil(rows, options)


def _cla_r(base, rows, options):
    """The mean of -cos(a(z), s); s serves both views."""
    return noncontrastive.simsiam(rows.p[:, 0], rows.p[:, 1], rows.stored, rows.stored)


def _pnr(base, rows, options):
    return base.pnr(rows, options) - base.loss(rows, options)


REGULARISERS = {
    "none": Regulariser(),
    "cassle": Regulariser(_cassle, teacher=True),
    "cla_r": Regulariser(_cla_r, stores=True, weight=1.0),
    "pnr": Regulariser(_pnr, teacher=True, weighs=False),
}
