"""A base of `two_view`: learn one task by alignment and uniformity.

Every strategy takes it. Use it with --config.method.base=my_package.my_base.
"""

from jaxcl import core, schema
from jaxcl.methods.two_view import forms, records

from . import my_loss


def make(
    *, scale: schema.Positive = 2.0, uniformity: schema.Weight = 1.0
) -> records.Base:
    """Make the base. Its arguments are options of config.method.base.

    Args:
      scale: the paper's t.
      uniformity: weight of the uniformity term.
    """

    def loss(x):
        """Compute the loss of a task alone, from the projections z of both views."""
        z1, z2 = core.split_views(x.z)
        return my_loss.align_uniform(z1, z2, scale=scale, weight=uniformity)

    return records.Base(
        loss,
        # CaSSLe adds this term: predict the teacher's projection of the same view.
        forms.distil_cosine,
        # PNR subtracts this distance to the teacher's projection of the other view.
        distance="byol",
        linear_lr=1.0,  # learning rate of a linear probe on another data set
    )
