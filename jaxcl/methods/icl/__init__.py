"""ICL: learn the change that new data make to InfoNCE, by meta-optimisation."""

from jaxcl.methods.icl.method import STRATEGIES, VARIANTS, make

__all__ = ["STRATEGIES", "VARIANTS", "make"]
