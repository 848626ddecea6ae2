"""Barlow Twins: features of the two views agree, and are not redundant."""

from jaxcl import core, schema
from jaxcl.losses import distill, noncontrastive
from jaxcl.methods.two_view import records
from jaxcl.nets import mlp


def make(
    *,
    scale: schema.Positive = 0.1,
    off_diagonal: schema.Weight = 5e-3,
    form: records.Form = "code",
) -> records.Base:
    """Decorrelate features: Barlow Twins (Zbontar et al., ICML 2021).

    Args:
      scale: factor of the whole loss.
      off_diagonal: weight of the redundancy term.
      form: "code" or "paper", of the distance that PNR subtracts.
    """

    def loss(x):
        return noncontrastive.barlow_twins(
            *core.split_views(x.z), scale=scale, off_diagonal=off_diagonal
        )

    def distil(x):
        return distill.cassle_barlow(
            *core.split_views(x.p, x.f), scale=scale, off_diagonal=off_diagonal
        )

    distance = {"code": "cosine", "paper": "squared"}[form]
    return records.Base(
        loss,
        distil,
        distance=distance,
        linear_lr=0.1,
        projector=mlp.DECORRELATED,
    )
