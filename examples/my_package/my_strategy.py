"""A strategy of `two_view`: stay near the teacher's projections.

The hint of FitNets (Romero et al., ICLR 2015, Eq. 3). Teacher and student have one
shape, so no regressor is between them. Every base goes with it.

Use it with --config.method.strategy=my_package.my_strategy.
"""

from jaxcl import core, schema
from jaxcl.losses import distill
from jaxcl.methods.two_view import records


def make(*, weight: schema.Weight = 1.0) -> records.Strategy:
    """Make the strategy. Its arguments are options of config.method.strategy.

    Args:
      weight: factor of the term that is added to the base's loss.
    """

    def term(base, x):
        """Compute the mean squared distance to the teacher, which the loss adds."""
        return distill.cassle_mse(*core.split_views(x.z, x.f))

    return records.Strategy(term, weight, teacher=records.Teacher("running"))
