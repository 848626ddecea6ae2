"""CaSSLe: a predictor maps the projections to those of the last task's network."""

from jaxcl import schema
from jaxcl.errors import Refused
from jaxcl.methods.two_view import records


def check_form(name: str, base: records.Base) -> None:
    """Refuse a base that has no form under CaSSLe."""
    if base.distil is None:
        raise Refused(
            f"config.method.strategy='cassle': base {name!r} has no distillation "
            "(records.Base.distil); choose another strategy"
        )


@schema.debug(distill_hidden_dim=16)
def make(
    *,
    weight: schema.Weight | None = None,
    distill_hidden_dim: schema.Width = 2048,
    frozen_bn: records.Statistics = "running",
) -> records.Strategy:
    """Add the base's distillation of g(z): CaSSLe (Fini et al., CVPR 2022).

    Args:
      weight: of the distillation; None: the base's.
      distill_hidden_dim: hidden units of the predictor g.
      frozen_bn: the teacher normalises by "running" (eval mode) or "batch" statistics.
    """

    def loss(base, x):
        return base.loss(x) + weight * base.distil(x)

    return records.Strategy(
        loss,
        check=check_form,
        teacher=frozen_bn,
        distiller_hidden_dim=distill_hidden_dim,
    )
