"""Less-Forget: projections keep the direction that the last network gave them."""

from jaxcl import core, schema
from jaxcl.losses import distill
from jaxcl.methods.two_view import records


def make(
    *,
    weight: schema.Weight = 1.0,
    frozen_bn: records.Statistics = "running",
) -> records.Strategy:
    """Add weight * (1 - cos(z, f)): Less-Forget (Hou et al., CVPR 2019, Sec. 3.3).

    The paper constrains the features that its cosine classifier reads; here these are
    the projections, which the loss reads. The paper's weight grows with the number of
    classes, which is not known here; so it is fixed.

    Args:
      weight: weight of the term that it adds.
      frozen_bn: the teacher normalises by "running" (eval mode) or "batch" statistics.
    """

    def term(base, x):
        return distill.less_forget(*core.split_views(x.z, x.f))

    return records.Strategy(term, weight, teacher=records.Teacher(frozen_bn))
