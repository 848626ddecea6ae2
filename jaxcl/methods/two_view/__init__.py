"""Two-view self-supervised learning under a continual strategy."""

from jaxcl.methods.two_view.step import (
    DROPS_BRANCHES,
    UNUSED_ALONE,
    alone,
    make,
    unread,
)

__all__ = ["DROPS_BRANCHES", "UNUSED_ALONE", "alone", "make", "unread"]
