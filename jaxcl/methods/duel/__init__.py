"""DUEL: contrast against a memory that drops what it holds most of."""

from jaxcl.methods.duel.step import make

__all__ = ["make"]
