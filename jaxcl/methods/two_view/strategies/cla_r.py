"""CLA-R: projections of replayed rows stay near those that are stored with them.

A strategy that needs the memory of a stream.
"""

from jaxcl import core, schema
from jaxcl.losses import noncontrastive
from jaxcl.methods.two_view import records


@schema.debug(distill_hidden_dim=16)
def make(
    *,
    weight: schema.Weight = 1.0,
    stored_momentum: schema.Share = 0.5,
    distill_hidden_dim: schema.Width = 512,
) -> records.Strategy:
    """Add weight * mean of -cos(a(z), s): CLA-R (Cignoni et al., arXiv 2507.10434).

    s is stored with the row, and moves towards its z with every use.

    Args:
      weight: of the alignment; the stored snapshot of the released code has 0.1.
      stored_momentum: share of the old vector that stays stored, CLA's alpha.
      distill_hidden_dim: hidden units of the predictor a.
    """

    def term(base, x):
        return noncontrastive.simsiam(*core.split_views(x.p), x.stored, x.stored)

    return records.Strategy(
        term,
        weight,
        distiller_hidden_dim=distill_hidden_dim,
        stored_momentum=stored_momentum,
    )
