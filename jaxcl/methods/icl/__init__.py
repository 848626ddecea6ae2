"""ICL: what new data change of InfoNCE, learnt by meta-optimisation at learnt rates."""

from jaxcl.methods.icl.method import STRATEGIES, VARIANTS, make

__all__ = ["STRATEGIES", "VARIANTS", "make"]
