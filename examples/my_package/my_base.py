"""A base of `two_view`: learn one task by alignment and uniformity.

Every strategy takes it. Use it with --config.method.base=my_package.my_base.
"""

from jaxcl import schema
from jaxcl.methods.two_view import forms, records

from . import my_loss


def make(
    *, scale: schema.Positive = 2.0, uniformity: schema.Weight = 1.0
) -> records.Base:
    """Make the base. Its arguments are options of config.method.

    Args:
      scale: the paper's t.
      uniformity: weight of that term.
    """

    def loss(x):
        """Compute the loss of a task alone, from the projections z of both views."""
        z1, z2 = forms.split_views(x.z)
        return my_loss.align_uniform(z1, z2, scale=scale, weight=uniformity)

    # CaSSLe adds this term: predict the teacher's projection of the same view.
    distil = forms.distil_cosine
    return records.Base(
        loss,
        distil,
        # PNR subtracts the distance to the teacher's projection of the other view.
        forms.subtract_distance(loss, distil, "byol"),
        linear_lr=1.0,  # learning rate of a linear probe on another data set
        negative_weight=1.0,  # PNR's lambda
        unbounded=lambda terms: False,  # a cosine, which PNR subtracts, has a bound
    )
