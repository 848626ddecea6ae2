"""SupCon: rows of one class attract, all other rows of the batch repel."""

from typing import Literal

from jaxcl import core, schema
from jaxcl.losses import contrastive, distill
from jaxcl.methods.two_view import forms, records


def make(
    *,
    temperature: schema.Temperature = 0.1,
    distill_temperature: schema.Temperature = 0.2,
    pseudo_negatives: Literal["all", "other_classes"] = "all",
    form: records.Form = "code",
) -> records.Base:
    """Attract rows of one class: SupCon (Khosla et al., NeurIPS 2020).

    Args:
      temperature: of the loss.
      distill_temperature: of CaSSLe's term, and of PNR's second one.
      pseudo_negatives: under PNR, rows of "all" classes, or only of "other_classes"
        than the anchor's.
      form: "code" or "paper", of CaSSLe's term.
    """

    def loss(x):
        rows = x.z.reshape(-1, x.z.shape[-1])
        labels = x.label.repeat(2)  # rows 2i and 2i + 1 are the views of i
        return contrastive.sup_con(rows, labels, temperature=temperature)

    def pnr(x, pn1, pn2):
        return distill.pnr_supcon(
            *core.split_views(x.z, x.p, x.f),
            x.label,
            temperature=temperature,
            distill_temperature=distill_temperature,
            pn1=pn1,
            pn2=pn2,
            other_classes=pseudo_negatives == "other_classes",
        )

    return records.Base(
        loss,
        forms.distil_contrast(distill_temperature, form),
        pnr,
        linear_lr=1.0,
        reads=("label",),
    )
