"""A strategy of `two_view`: stay near the teacher's projections.

The hint of FitNets (Romero et al., ICLR 2015, Eq. 3). Teacher and student have one
shape, so no regressor is between them. Every base goes with it.

Use it with --config.method.strategy=my_package.my_strategy.
"""

from jaxcl.losses import distill
from jaxcl.methods.two_view import strategies


def loss(base, features, options):
    """Add weight * the mean squared distance to the teacher to the base's loss."""
    z, f = features.z, features.f  # f32[B, 2, D]: the student, the teacher
    hint = distill.cassle_mse(z[:, 0], z[:, 1], f[:, 0], f[:, 1])
    return base.loss(features, options) + options.weight * hint


def make() -> strategies.Strategy:
    """Make the strategy; config.method.weight sets another weight."""
    return strategies.Strategy(loss, teacher=True, weight=1.0)
