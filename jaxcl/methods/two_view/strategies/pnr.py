"""PNR: features of the last task's network are negatives, too.

Cha, Cho, Moon, "Regularizing with Pseudo-Negatives for Continual Self-Supervised
Learning", ICML 2024. Non-contrastive bases have no negatives; there it subtracts the
distance to the OTHER view's frozen feature (Eq. 5).
"""

from absl import logging

from jaxcl import core, schema
from jaxcl.errors import Refused
from jaxcl.losses import distill
from jaxcl.memory import queue
from jaxcl.methods.two_view import records

# Distances that have no lower bound where lambda is so large: (lambda, weight of the
# distillation) -> whether it is. The others are cosines, bounded whatever their weight.
_UNBOUNDED = {
    "mse": lambda negative_weight, weight: negative_weight >= weight,
    "squared_mean": lambda negative_weight, weight: negative_weight >= weight,
    "squared": lambda negative_weight, weight: negative_weight > 0,
}


def check_form(
    name: str, base: records.Base, weight: float, negative_weight: float, pn2: bool
) -> None:
    """Refuse a base without a form under PNR; warn of a loss that a distance dominates.

    Either such a loss has no lower bound, or the distance that it subtracts weighs more
    than the distillation: it is far below 0 where the network has left the frozen one.
    """
    if base.pnr is None and base.distance is None:
        raise Refused(
            f"config.method.strategy='pnr': base {name!r} has no form under PNR "
            "(records.Base.pnr); choose another strategy"
        )
    if base.pnr is not None:
        if weight != base.weight:
            logging.warning(
                "config.method.strategy.weight=%s changes nothing: base %s has "
                "negatives, and PNR adds its own to them",
                weight,
                name,
            )
        return
    danger = ""
    if _UNBOUNDED.get(base.distance, lambda *_: False)(negative_weight, weight):
        danger = "has no bound below: it may diverge"
    elif negative_weight > weight:
        danger = (
            "is ruled by the distance to the frozen features: it pays to leave them, "
            "and a negative loss says so"
        )
    if danger and pn2:
        logging.warning(
            "PNR with %s, config.method.strategy.negative_weight=%s and weight=%s %s",
            name,
            negative_weight,
            weight,
            danger,
        )


@schema.debug(distill_hidden_dim=16)
def make(
    *,
    weight: schema.Weight | None = None,
    negative_weight: schema.Weight | None = None,
    pn1: bool = True,
    pn2: bool = True,
    distill_hidden_dim: schema.Width = 2048,
    frozen_bn: records.Statistics = "running",
    teacher: records.Following = "task",
    teacher_ema: schema.Share = 0.999,
    snapshot_every: schema.Count = 100,
) -> records.Strategy:
    """Repel the last task's features, too: PNR (Cha et al., ICML 2024).

    Args:
      weight: of the distillation, for bases without negatives; None: the base's.
      negative_weight: lambda, for bases without negatives; None: the base's.
      pn1, pn2: pseudo-negatives in the first and second term (Table 7).
      distill_hidden_dim: hidden units of the predictor g.
      frozen_bn: the teacher normalises by "running" (eval mode) or "batch" statistics.
      teacher: frozen network, that of the last "task", an "ema" of the one that learns,
        or its last "snapshot".
      teacher_ema: share of the old average after each step.
      snapshot_every: batches between snapshots.
    """

    def loss(base, x):
        if base.pnr is not None:
            return base.pnr(x, pn1, pn2)
        # CaSSLe's loss minus lambda times the distance to the OTHER view's frozen
        # feature (Eq. 4 + 5)
        total = base.loss(x) + weight * base.distil(x)
        if not pn2:
            return total
        views = core.split_views(x.p, x.f)
        distance = distill.pseudo_negative(*views, distance=base.distance)
        return total - negative_weight * distance

    def init_state(setup, key, params, image):
        size = setup.base.queue_size
        return None if size is None else queue.start_queue(key, size, setup.dim)

    def read(state, keys, views, parts):
        queued = {} if state is None else {"frozen_queue": state.rows}
        return records.Reading(views, features=queued)

    def update(state, x, **how):
        return None if state is None else queue.push_features(state, x.f, **how)

    return records.Strategy(
        lambda base, x: loss(base, x) - base.loss(x),
        loss=loss,
        check=lambda name, base: check_form(name, base, weight, negative_weight, pn2),
        teacher=records.Teacher(frozen_bn, teacher, teacher_ema, snapshot_every),
        distiller_hidden_dim=distill_hidden_dim,
        init_state=init_state,
        read=read,
        update=update,
    )
