"""Distillation: a head of the student matches the features of another encoder.

The teacher is the encoder of a folder, config.teacher. It sees the student's augmented
views, since a teacher that sees the same views teaches best (Beyer et al., CVPR 2022),
at its own size, mean and deviation. Sources of the terms: `losses.teacher`.

Departures:
- The terms compare whole-image features, not maps of patches, which differ in shape
  between networks.
- Relations between rows are of the student's head, too, not of its encoder. They are
  within a view of the global batch, and each row is compared with others alone.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp

from jaxcl import schema
from jaxcl.errors import Refused
from jaxcl.losses import teacher
from jaxcl.methods.two_view import records

# Option of `make` -> (projections f32[B,D], features f32[B,D], mask=) -> f32[]
TERMS: dict[str, Callable[..., jax.Array]] = {
    "cosine": teacher.cosine,
    "smooth_l1": teacher.smooth_l1,
    "distance": teacher.rkd_distance,
    "angle": teacher.rkd_angle,
}


@schema.debug(head_dim=16)
def make(
    *,
    cosine: schema.Weight = 1.0,
    smooth_l1: schema.Weight = 0.0,
    distance: schema.Weight = 0.0,
    angle: schema.Weight = 0.0,
    base_weight: schema.Weight = 0.0,
    head_layers: schema.Layers = 0,
    head_dim: schema.Width = 2048,
) -> records.Strategy:
    """Match the features of the encoder in config.teacher.

    The loss is the sum of the terms, each with its weight, plus base_weight * base.
    Views without a finite feature of the teacher are left out; the metric "untaught"
    has their share.

    Args:
      cosine: weight of 1 - cos(p, t), of the head's output p and the teacher's feature.
      smooth_l1: weight of the smooth L1 distance between p and the standardised t.
      distance: weight of RKD's comparison of distances between images.
      angle: weight of RKD's comparison of angles between images.
      base_weight: weight of the base's own loss; 0: the teacher alone, and neither
        loss nor networks of config.method.base are used.
      head_layers: hidden layers of the student's head; 0: a single Linear.
      head_dim: width of each of them.
    """
    weights = dict(cosine=cosine, smooth_l1=smooth_l1, distance=distance, angle=angle)
    used = {name: weight for name, weight in weights.items() if weight > 0}
    if not used:
        raise Refused(
            f"config.method.strategy: {', '.join(f'{x}=0' for x in weights)}: at least "
            "one of them must be above 0"
        )

    def loss(base, x):
        total = base_weight * base.loss(x) if base_weight else 0.0
        return total + _match(x, used)

    return records.Strategy(
        loss=loss,
        student=records.StudentHead(head_layers, head_dim, alone=base_weight == 0),
    )


def _match(x: records.Features, weights: dict[str, float]) -> jax.Array:
    """Average the weighted terms over both views; nan if the teacher is nowhere finite.

    Without a base the projector is the head.
    """
    head = x.z if x.p is None else x.p
    finite = jnp.isfinite(x.f).all(axis=-1)
    features = jnp.where(finite[..., None], x.f, 0.0)
    total = jnp.zeros(())
    for view in range(head.shape[1]):
        p, t, mask = (rows[:, view] for rows in (head, features, finite))
        terms = (
            weight * TERMS[name](p, t, mask=mask) for name, weight in weights.items()
        )
        total = total + sum(terms)
    return jnp.where(finite.any(), total / head.shape[1], jnp.nan)
