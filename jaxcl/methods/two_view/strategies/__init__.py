"""Strategies of two-view methods, a module and a row of `STRATEGIES` each.

A module has `make(*, ...)`, whose keyword arguments are options of
config.method.strategy, and which returns a `records.Strategy`. A name with a dot is a
module of a user's package. The losses of CaSSLe and PNR depend on the base and are
defined there; the others are the same for every base. Projections and the loss of the
base replace the logits and likelihoods of their papers.
"""

from collections.abc import Callable, Mapping
from typing import Annotated, Any

from jaxcl import lookup, schema
from jaxcl.methods.two_view import records
from jaxcl.methods.two_view.strategies import (
    cassle,
    cla_r,
    der,
    distil,
    ewc,
    finetune,
    l2_sp,
    less_forget,
    lump,
    lwf_features,
    pnr,
)

STRATEGIES: dict[str, Callable[..., records.Strategy]] = {
    "finetune": finetune.make,
    "cassle": cassle.make,
    "pnr": pnr.make,
    "less_forget": less_forget.make,
    "lwf_features": lwf_features.make,
    "l2_sp": l2_sp.make,
    "ewc": ewc.make,
    "der": der.make,
    "lump": lump.make,
    "distil": distil.make,
}
# These read the memory of a stream, so only `methods/online_ssl.py` takes them.
OF_STREAMS: dict[str, Callable[..., records.Strategy]] = {"cla_r": cla_r.make}


StrategySection = Annotated[Any, schema.Choice(STRATEGIES)]


def find_make(name: str) -> Callable[..., records.Strategy]:
    """Find the `make` of a strategy, or raise Refused with the nearest names."""
    return lookup.find_entry(STRATEGIES, name, "config.method.strategy")


def make_strategy(section: str | Mapping[str, Any]) -> records.Strategy:
    """Make a strategy from its name, or from a section with its name and options."""
    options = {"name": section} if isinstance(section, str) else dict(section)
    name = options.pop("name")
    strategy = find_make(name)(**options)
    return lookup.check_type(strategy, records.Strategy, name, "config.method.strategy")
