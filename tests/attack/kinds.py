"""Every kind of attack: each module here has some, listed by hand."""

from attack import configs, damage, kills, sets, writes

KINDS = tuple(
    kind for module in (kills, damage, writes, configs, sets) for kind in module.KINDS
)
