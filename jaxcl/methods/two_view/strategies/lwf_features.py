"""Feature distillation: the encoder's features of new images stay near the old ones.

Departures:
- The paper halves the squared distance and averages it over rows. Here it is divided by
  the mean squared length of the old features, so that one weight fits every encoder.
- The paper also freezes the classifier; here there is none.
"""

from jaxcl import schema
from jaxcl.losses import distill
from jaxcl.methods.two_view import records


def make(
    *,
    weight: schema.Weight = 1.0,
    frozen_bn: records.Statistics = "running",
) -> records.Strategy:
    """Keep features: Less-forgetful learning (Jung et al., AAAI 2018, Eq. 4).

    No old images are stored. The loss is base + weight * |h - h'|^2 / |h'|^2, with
    features h of the encoder and h' of the last task's encoder.

    Args:
      weight: of the term that it adds.
      frozen_bn: the teacher normalises by "running" (eval mode) or "batch" statistics.
    """

    def term(base, x):
        return distill.relative_squared(x.h, x.frozen_h)

    teacher = records.Teacher(frozen_bn)
    return records.Strategy(term, weight, teacher=teacher, reads=("h",))
