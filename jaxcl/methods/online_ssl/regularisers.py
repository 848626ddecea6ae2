"""The strategies that online self-supervised learning takes as regularisers.

They are strategies of `two_view`, some with other defaults, and CLA-R. See `step.py`
for the papers.
"""

from collections.abc import Callable

from jaxcl import lookup, schema
from jaxcl.methods.online_ssl import cla_r as cla_r_module
from jaxcl.methods.two_view import records
from jaxcl.methods.two_view.strategies import cassle as cassle_module
from jaxcl.methods.two_view.strategies import der as der_module
from jaxcl.methods.two_view.strategies import finetune
from jaxcl.methods.two_view.strategies import lump as lump_module
from jaxcl.methods.two_view.strategies import pnr as pnr_module

_STREAM = {"distill_hidden_dim": 512, "frozen_bn": "batch", "teacher": "ema"}

cassle = schema.adapt(cassle_module.make, **_STREAM)
pnr = schema.adapt(pnr_module.make, **_STREAM)
cla_r = cla_r_module.make
# Their memory is that of config.replay.
der = schema.adapt(der_module.make, hidden=("memory_size",))
lump = schema.adapt(lump_module.make, hidden=("memory_size",))

REGULARISERS: dict[str, Callable[..., records.Strategy]] = {
    "none": finetune.make,
    "cassle": cassle,
    "cla_r": cla_r,
    "pnr": pnr,
    "der": der,
    "lump": lump,
}


def find_make(name: str) -> Callable[..., records.Strategy]:
    """Find a regulariser, or raise Refused with the nearest names."""
    return lookup.find_entry(REGULARISERS, name, "config.method.regulariser")
