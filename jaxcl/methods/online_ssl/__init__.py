"""Online continual self-supervised learning: one pass, a memory, no labels."""

from jaxcl.methods.online_ssl.step import Base, make, settled

__all__ = ["Base", "make", "settled"]
