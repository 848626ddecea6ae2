"""Two-view self-supervised learning under a continual strategy."""

from jaxcl.methods.two_view.method import make

__all__ = ["make"]
