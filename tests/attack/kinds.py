"""Every kind of attack: each module here has some, listed by hand."""

from attack import configs, damage, kills, sets, weights, writes

MODULES = (kills, damage, writes, configs, sets, weights)
KINDS = tuple(kind for module in MODULES for kind in module.KINDS)
