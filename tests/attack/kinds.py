"""Every kind of attack: each module here has some, listed by hand."""

from attack import writes

KINDS = tuple(kind for module in (writes,) for kind in module.KINDS)
