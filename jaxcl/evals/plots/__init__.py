"""Pictures of a run, as PNG, SVG or PDF; matplotlib without its global state."""

from jaxcl.evals.plots.canvas import FORMATS, format_of
from jaxcl.evals.plots.classes import class_shares, class_spread
from jaxcl.evals.plots.examples import neighbours, scatter
from jaxcl.evals.plots.methods import comparison, summary
from jaxcl.evals.plots.runs import accuracy_matrix, curves, overview, words
from jaxcl.evals.plots.streams import anytime, per_step

__all__ = (
    "FORMATS",
    "accuracy_matrix",
    "anytime",
    "class_shares",
    "class_spread",
    "comparison",
    "curves",
    "format_of",
    "neighbours",
    "overview",
    "per_step",
    "scatter",
    "summary",
    "words",
)
