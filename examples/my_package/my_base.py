"""A base of `two_view`: learn one task by alignment and uniformity.

Every strategy takes it. Use it with --config.method.base=my_package.my_base.
"""

from jaxcl.losses import distill
from jaxcl.methods.two_view import bases

from . import my_loss


def loss(features, options):
    """Compute the loss of a task alone, from the projections z of both views."""
    z1, z2 = features.z[:, 0], features.z[:, 1]
    return my_loss.align_uniform(z1, z2)


def distil(features, options):
    """Compute CaSSLe's term: predict the teacher's projection of the same view."""
    return distill.cassle_byol(*_distilled(features))


def pnr(features, options):
    """Compute PNR's loss: move away from the teacher's projection of the other view."""
    distance = distill.pseudo_negative(*_distilled(features), distance="byol")
    cassle = loss(features, options) + options.weight * distil(features, options)
    return cassle - options.negative_weight * distance


def _distilled(features):
    p, f = features.p, features.f  # f32[B, 2, D]: the predictor g(z), the teacher
    return p[:, 0], p[:, 1], f[:, 0], f[:, 1]


def make() -> bases.Base:
    """Make the base."""
    return bases.Base(
        loss,
        distil,
        pnr,
        linear_lr=1.0,  # learning rate of a linear probe on another data set
        temperatures=False,  # the losses read no temperature
        unbounded=lambda options: False,  # a cosine, which PNR subtracts, has a bound
    )
