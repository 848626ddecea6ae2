"""DUEL: contrast against a memory that drops its most frequent rows."""

from jaxcl.methods.duel.step import make

__all__ = ["make"]
