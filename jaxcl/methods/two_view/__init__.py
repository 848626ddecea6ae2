"""Two-view self-supervised learning under a continual strategy."""

from jaxcl.methods.two_view.step import (
    DROPS_BRANCHES,
    TAKES_LOCAL,
    UNUSED_ALONE,
    alone,
    loss_options,
    make,
    settled,
    unread,
)

__all__ = [
    "DROPS_BRANCHES",
    "TAKES_LOCAL",
    "UNUSED_ALONE",
    "alone",
    "loss_options",
    "make",
    "settled",
    "unread",
]
