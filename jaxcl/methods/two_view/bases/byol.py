"""BYOL: a predictor of one view finds the slow network's projection of the other."""

from jaxcl import core, schema
from jaxcl.losses import noncontrastive
from jaxcl.methods.two_view import forms, records
from jaxcl.nets import mlp


@schema.debug(predictor_hidden_dim=16)
def make(
    *,
    predictor_hidden_dim: schema.Width = 4096,
    momentum_start: schema.Share = 0.99,
    momentum_end: schema.Share = 1.0,
    form: records.Form = "code",
) -> records.Base:
    """Predict the slow network's projection: BYOL (Grill et al., NeurIPS 2020).

    Args:
      predictor_hidden_dim: hidden units of its predictor.
      momentum_start, momentum_end: of the slow network, over each task.
      form: "code" adds the views, "paper" averages them (Eq. 6); also of the forms
        under CaSSLe (Eq. 7) and PNR.
    """
    distil = forms.distil_squared if form == "paper" else forms.distil_cosine

    def loss(x):
        o1, o2, k1, k2 = core.split_views(x.o, x.k)
        total = noncontrastive.byol(o1, k2) + noncontrastive.byol(o2, k1)
        return total / 2 if form == "paper" else total

    distance = {"code": "byol", "paper": "squared_mean"}[form]
    return records.Base(
        loss,
        distil,
        distance=distance,
        linear_lr=3.0,
        projector=mlp.PREDICTED,
        predictor_hidden_dim=predictor_hidden_dim,
        momentum=(momentum_start, momentum_end),
        one_row=True,
    )
