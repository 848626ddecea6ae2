"""SimSiam: a predictor of one view finds the same network's projection of the other.

Its forms under CaSSLe and PNR are ours, see docs/methods.md; the rate of probes is that
of BYOL. The paper keeps the predictor's learning rate constant; here it follows the
schedule.
"""

from jaxcl import core, schema
from jaxcl.losses import noncontrastive
from jaxcl.methods.two_view import forms, records
from jaxcl.nets import mlp


@schema.debug(predictor_hidden_dim=16)
def make(*, predictor_hidden_dim: schema.Width = 512) -> records.Base:
    """Predict the other view, no slow network: SimSiam (Chen and He, CVPR 2021).

    Args:
      predictor_hidden_dim: hidden units of its predictor.
    """

    def loss(x):
        return noncontrastive.simsiam(*core.split_views(x.o, x.z))

    return records.Base(
        loss,
        forms.distil_cosine,
        distance="cosine",
        linear_lr=3.0,
        projector=mlp.SIAMESE,
        predictor_hidden_dim=predictor_hidden_dim,
        one_row=True,
    )
