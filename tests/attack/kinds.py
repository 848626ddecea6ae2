"""Every kind of attack: each module here has some, listed by hand."""

from attack import damage, kills, writes

MODULES = (kills, damage, writes)
KINDS = tuple(kind for module in MODULES for kind in module.KINDS)
