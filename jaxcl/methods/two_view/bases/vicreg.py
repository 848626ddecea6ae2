"""VICReg: views agree, features vary, and do so independently."""

from jaxcl import core, schema
from jaxcl.losses import noncontrastive
from jaxcl.methods.two_view import forms, records
from jaxcl.nets import mlp


def make(
    *,
    invariance: schema.Weight = 25.0,
    variance: schema.Weight = 25.0,
    covariance: schema.Weight = 1.0,
    form: records.Form = "code",
) -> records.Base:
    """Align views, keep variance, decorrelate: VICReg (Bardes et al., ICLR 2022).

    Args:
      invariance, variance, covariance: weights of its three terms.
      form: "code" or "paper": squared distances are means or sums over the features
        (Eq. 11), also under CaSSLe and PNR.
    """
    paper = form == "paper"
    distil = forms.distil_squared if paper else forms.distil_mean_squared

    def loss(x):
        return noncontrastive.vicreg(
            *core.split_views(x.z),
            invariance=invariance * (x.z.shape[-1] if paper else 1),
            variance=variance,
            covariance=covariance,
        )

    distance = "squared_mean" if paper else "mse"
    return records.Base(
        loss,
        distil,
        distance=distance,
        linear_lr=0.3,
        projector=mlp.DECORRELATED,
        weight=25.0,
        negative_weight=23.0,
    )
