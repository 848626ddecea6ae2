"""DIET: a linear head classifies an augmented image by its number in the set.

Balestriero, "Unsupervised Learning on a DIET", arXiv 2302.10260; Rodas et al.,
"DIET-CP", arXiv 2509.06990, for encoders that come without heads.

Departures:
- The head has a bias.
- With two views of each image the loss is the mean over both; config.augment.views=1 is
  the papers'.
- Images of a later task get new rows of the head, even if they come from another set,
  which counts from 0 again.
"""

from jaxcl import schema
from jaxcl.losses import contrastive
from jaxcl.methods.two_view import records
from jaxcl.nets import mlp


def make(
    *, rows: schema.Count | None = None, smoothing: schema.Fraction = 0.3
) -> records.Base:
    """Classify each image by its number: DIET-CP (Rodas et al., 2025).

    Args:
      rows: rows of the head, at least one for each train image; None: one each. An
        update keeps the head of the run.
      smoothing: of the labels.
    """

    def loss(x):
        return contrastive.diet(x.z, x.index, smoothing=smoothing)

    return records.Base(
        loss,
        projector=mlp.ProjectorShape(0, False, 1, rows or 0),
        reads=("index",),
        one_row=True,
        strategies=("finetune", "lwf_features", "l2_sp"),
    )
