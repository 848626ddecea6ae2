"""SimCLR: the two views of an example attract, all other rows of the batch repel."""

from jaxcl import core, schema
from jaxcl.losses import contrastive, distill
from jaxcl.losses import streaming as streaming_lib
from jaxcl.methods.two_view import forms, records


def make(
    *,
    temperature: schema.Temperature = 0.2,
    distill_temperature: schema.Temperature = 0.2,
    form: records.Form = "code",
    streaming: bool = False,
) -> records.Base:
    """Contrast views over the batch by NT-Xent: SimCLR (Chen et al., ICML 2020).

    Args:
      temperature: of the loss.
      distill_temperature: of its forms under CaSSLe and PNR.
      form: "code" or "paper", of CaSSLe's term.
      streaming: make no matrix of logits, which takes less memory (`losses.streaming`).
    """
    logsumexp = streaming_lib.logsumexp if streaming else None

    def loss(x):
        return contrastive.nt_xent(
            *core.split_views(x.z),
            temperature=temperature,
            logsumexp=logsumexp,
        )

    def pnr(x, pn1, pn2):
        return distill.pnr_simclr(
            *core.split_views(x.z, x.p, x.f),
            temperature=distill_temperature,
            pn1=pn1,
            pn2=pn2,
            logsumexp=logsumexp,
        )

    return records.Base(
        loss,
        forms.distil_contrast(distill_temperature, form, logsumexp),
        pnr,
        linear_lr=1.0,
    )
