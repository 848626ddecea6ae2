"""LeJEPA: views agree, and embeddings are normally distributed.

Its forms under CaSSLe and PNR are ours, see docs/methods.md; the rate of probes is that
of VICReg. The mean view is that of the two views, without local crops.
"""

import jax

from jaxcl import core, schema
from jaxcl.losses import noncontrastive
from jaxcl.methods.two_view import forms, records
from jaxcl.nets import mlp

_SLICES = 0x51CE  # keeps the slices apart from other uses of a step's key


def draw_slices(key: jax.Array, count: int, dim: int) -> jax.Array:
    """Draw the random directions of a step, unit rows f32[count, dim]."""
    key = jax.random.fold_in(key, _SLICES)
    return core.l2_normalize(jax.random.normal(key, (count, dim)))


@schema.debug(slices=16)
def make(
    *,
    normality: schema.Share = 0.05,
    slices: schema.Count = 1024,
    form: records.Form = "code",
) -> records.Base:
    """Join views, make embeddings Gaussian: LeJEPA (Balestriero and LeCun, 2025).

    Args:
      normality: lambda, the weight of SIGReg.
      slices: random directions of SIGReg in each step.
      form: "code" or "paper", see `noncontrastive.lejepa`; the paper's squared
        distances are sums over the features, also under CaSSLe and PNR.
    """
    paper = form == "paper"
    distil = forms.distil_squared if paper else forms.distil_mean_squared

    def loss(x):
        return noncontrastive.lejepa(
            forms.join_views(x), x.prepared, weight=normality, form=form
        )

    distance = "squared_mean" if paper else "mse"
    return records.Base(
        loss,
        distil,
        distance=distance,
        linear_lr=0.3,
        projector=mlp.NORMAL,
        reads=("local",),
        negative_weight=0.92,  # VICReg's 23 of 25
        prepare=lambda key, task, progress, dim: draw_slices(key, slices, dim),
    )
