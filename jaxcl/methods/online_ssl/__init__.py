"""Online continual self-supervised learning: one pass, a memory, no labels."""

from jaxcl.methods.online_ssl.step import list_bases, make

__all__ = ["list_bases", "make"]
