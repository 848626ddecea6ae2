"""Base losses of two-view methods, a module and a row of `BASES` each.

A module has `make(*, ...)`, whose keyword arguments are options of
config.method.base, and which returns a `records.Base`. A name with a dot is a module of
a user's package.
"""

from collections.abc import Callable, Mapping
from typing import Annotated, Any

from jaxcl import lookup, schema
from jaxcl.methods.two_view import records
from jaxcl.methods.two_view.bases import (
    barlow_twins,
    byol,
    diet,
    dino,
    lejepa,
    mocov2plus,
    nnclr,
    simclr,
    simsiam,
    supcon,
    swav,
    vicreg,
)

BASES: dict[str, Callable[..., records.Base]] = {
    "simclr": simclr.make,
    "mocov2plus": mocov2plus.make,
    "supcon": supcon.make,
    "barlow_twins": barlow_twins.make,
    "byol": byol.make,
    "simsiam": simsiam.make,
    "dino": dino.make,
    "lejepa": lejepa.make,
    "vicreg": vicreg.make,
    "swav": swav.make,
    "nnclr": nnclr.make,
    "diet": diet.make,
}


BaseSection = Annotated[Any, schema.Choice(BASES)]


def find_make(name: str) -> Callable[..., records.Base]:
    """Find the `make` of a base, or raise Refused with the nearest names."""
    return lookup.find_entry(BASES, name, "config.method.base")


def make_base(section: str | Mapping[str, Any]) -> records.Base:
    """Make a base from its name, or from a section with its name and options."""
    options = {"name": section} if isinstance(section, str) else dict(section)
    name = options.pop("name")
    base = find_make(name)(**options)
    return lookup.check_type(base, records.Base, name, "config.method.base")
