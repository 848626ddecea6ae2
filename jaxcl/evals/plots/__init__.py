"""Draw pictures of runs as PNG, SVG or PDF, without matplotlib's global state."""

from jaxcl.evals.plots.canvas import FORMATS, read_format
from jaxcl.evals.plots.classes import class_shares, class_spread
from jaxcl.evals.plots.examples import neighbours, scatter
from jaxcl.evals.plots.methods import comparison, summary
from jaxcl.evals.plots.runs import accuracy_matrix, curves, overview, write_title
from jaxcl.evals.plots.streams import anytime, per_step

__all__ = (
    "FORMATS",
    "accuracy_matrix",
    "anytime",
    "class_shares",
    "class_spread",
    "comparison",
    "curves",
    "read_format",
    "neighbours",
    "overview",
    "per_step",
    "scatter",
    "summary",
    "write_title",
)
