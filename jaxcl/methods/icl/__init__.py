"""ICL: what new data change of InfoNCE, learnt by meta-optimisation at learnt rates."""

from jaxcl.methods.icl.method import STRATEGIES, TAKES_GRAPHS, VARIANTS, make, settled

__all__ = ["STRATEGIES", "TAKES_GRAPHS", "VARIANTS", "make", "settled"]
