"""Every kind of attack: each module here has some, listed by hand."""

from attack import damage, kills, writes

KINDS = tuple(kind for module in (kills, damage, writes) for kind in module.KINDS)
