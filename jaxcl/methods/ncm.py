"""NCM: predict the class with the nearest mean feature; the encoder is frozen.

Mensink et al., "Distance-Based Image Classification", TPAMI 2013 (euclidean); SimpleCIL
of Zhou et al., "Revisiting Class-Incremental Learning with Pre-Trained Models", 2023
(cosine). The result does not depend on the order of the rows, except for rounding.
"""

from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp

from jaxcl import core, schema
from jaxcl.methods import frozen


class Sums(NamedTuple):
    """Sums over the rows of each class."""

    total: jax.Array  # f32[C,D], sum of its features
    counts: jax.Array  # f32[C]


@schema.checked("config.method")
def make(
    parts: core.Parts, *, distance: Literal["cosine", "euclidean"] = "cosine"
) -> core.Method:
    """Predict by the mean feature of each class.

    Args:
      distance: "cosine" is SimpleCIL's, the angle between a feature and a mean;
        "euclidean" is NCM's.
    """
    return frozen.make_method(parts, make_rule(distance))


def make_rule(distance: str) -> frozen.Rule:
    """Return the rule of a distance, "cosine" or "euclidean"."""

    def start(key, dim, classes):
        return Sums(jnp.zeros((classes, dim)), jnp.zeros((classes,)))

    def add(sums, rows):
        own = frozen.one_hot(rows, len(sums.counts))
        total = sums.total + frozen.sum_products(own, rows.features)
        return Sums(total, sums.counts + own.sum(0))

    def fit(sums):
        means = sums.total / jnp.maximum(sums.counts, 1)[:, None]
        if distance == "cosine":
            means = core.l2_normalize(means)
        return means, sums.counts

    def scores(fitted, features):
        means, counts = fitted
        if distance == "cosine":
            found = core.dot(core.l2_normalize(features), means)
        else:
            gaps = features[:, None] - means
            found = -jnp.sum(gaps * gaps, axis=2)
        return frozen.known_only(found, counts)

    return frozen.Rule(start, add, scores, fit)
