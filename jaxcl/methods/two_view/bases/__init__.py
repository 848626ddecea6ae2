"""Base losses of two-view methods, a module and a row of `BASES` each.

A module has `make(*, ...)`, whose keyword arguments are options of config.method, and
which returns a `records.Base`. A name with a dot is a module of a user's own package.
"""

from collections.abc import Callable, Mapping

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


def find_make(name: str) -> Callable[..., records.Base]:
    """Find the `make` of a base, or raise Refused with the nearest names."""
    return lookup.find_entry(BASES, name, "config.method.base")


def make_base(name: str, options: Mapping = {}) -> records.Base:
    """Make the base of that name, with those of the options that it has."""
    make = find_make(name)
    made = make(**schema.pick_options(make, options))
    return lookup.check_made(made, records.Base, name, "config.method.base")
