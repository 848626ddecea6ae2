"""ICL: what new data change of InfoNCE, learnt by meta-optimisation at learnt rates."""

from jaxcl.methods.icl.method import TAKES_GRAPHS, VARIANTS, Strategy, make

__all__ = ["Strategy", "TAKES_GRAPHS", "VARIANTS", "make"]
