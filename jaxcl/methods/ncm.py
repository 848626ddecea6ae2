"""NCM: predict the class with the nearest mean feature; the encoder is frozen.

Mensink et al., "Distance-Based Image Classification", TPAMI 2013 (euclidean); SimpleCIL
of Zhou et al., "Revisiting Class-Incremental Learning with Pre-Trained Models", 2023
(cosine). The result does not depend on the order of the rows, except for rounding.
"""

from typing import Literal

import jax.numpy as jnp

from jaxcl import core, schema
from jaxcl.methods import frozen


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
        return frozen.start_means(classes, dim)

    def add(means, rows):
        return frozen.move_means(means, rows)[0]

    def fit(means):
        if distance == "cosine":
            means = means._replace(mean=core.l2_normalize(means.mean))
        return means

    def scores(fitted, features):
        means, counts = fitted
        if distance == "cosine":
            similarity = core.dot(core.l2_normalize(features), means)
        else:
            gaps = features[:, None] - means
            similarity = -jnp.sum(gaps * gaps, axis=2)
        return frozen.known_only(similarity, counts)

    return frozen.Rule(start, add, scores, fit)
