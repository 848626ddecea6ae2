"""Two-view self-supervised learning under a continual strategy."""

from jaxcl.methods.two_view.step import UNUSED_ALONE, alone, make

__all__ = ["UNUSED_ALONE", "alone", "make"]
