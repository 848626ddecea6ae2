"""What two-view methods train with after the first task, a module and a row each.

A module has `make(*, ...)`, whose keyword arguments are options of config.method, and
which returns a `records.Strategy`. A name with a dot is a module of a user's own
package. The losses of CaSSLe and PNR depend on the base and are defined there; the
others are the same for every base. Where their papers speak of logits or likelihoods,
projections and the loss of the base take their place.
"""

from collections.abc import Callable

from jaxcl import core, schema
from jaxcl.methods.two_view import records
from jaxcl.methods.two_view.strategies import (
    cassle,
    der,
    ewc,
    finetune,
    less_forget,
    lump,
    pnr,
)

STRATEGIES: dict[str, Callable[..., records.Strategy]] = {
    "finetune": finetune.make,
    "cassle": cassle.make,
    "pnr": pnr.make,
    "less_forget": less_forget.make,
    "ewc": ewc.make,
    "der": der.make,
    "lump": lump.make,
}


def find(name: str) -> Callable[..., records.Strategy]:
    """Find the `make` of a strategy, or raise a ValueError with the nearest names."""
    if isinstance(name, str) and "." in name:
        return schema.module(__name__, name, "config.method.strategy").make
    core.check_choice("config.method.strategy", name, tuple(STRATEGIES))
    return STRATEGIES[name]


def get(name: str, **options) -> records.Strategy:
    """Make the strategy of that name."""
    return find(name)(**options)
