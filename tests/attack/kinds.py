"""Every kind of attack: each module here has some, listed by hand."""

from attack import configs, sets, writes

KINDS = tuple(kind for module in (writes, configs, sets) for kind in module.KINDS)
