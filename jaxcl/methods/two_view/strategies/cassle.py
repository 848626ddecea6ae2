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
    teacher: records.Following = "task",
    teacher_ema: schema.Share = 0.999,
    snapshot_every: schema.Count = 100,
) -> records.Strategy:
    """Add the base's distillation of g(z): CaSSLe (Fini et al., CVPR 2022).

    Args:
      weight: weight of the distillation; None: the base's.
      distill_hidden_dim: hidden units of the predictor g.
      frozen_bn: the teacher normalises by "running" (eval mode) or "batch" statistics.
      teacher: frozen network, that of the last "task", an "ema" of the one that learns,
        or its last "snapshot".
      teacher_ema: share of the old average after each step.
      snapshot_every: batches between snapshots.
    """
    return records.Strategy(
        lambda base, x: base.distil(x),
        weight,
        check=check_form,
        teacher=records.Teacher(frozen_bn, teacher, teacher_ema, snapshot_every),
        distiller_hidden_dim=distill_hidden_dim,
    )
