"""Streaming LDA on the features of a frozen encoder.

Hayes and Kanan, "Lifelong Machine Learning with Deep Streaming Linear Discriminant
Analysis", CVPR-W 2020: a running mean of each class and one covariance of all,
Equations 1 to 5. Both follow the order of the rows, one row at a time.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxcl import core, schema
from jaxcl.methods import frozen


class Moments(NamedTuple):
    """Running means, covariance and counts over the stream."""

    total: jax.Array  # f32[C,D], sum of the features of each class
    counts: jax.Array  # f32[C]
    scatter: jax.Array  # f32[D,D], t times the running covariance after t rows


@schema.checked("config.method")
def make(parts: core.Parts, *, shrinkage: schema.Share = 1e-4) -> core.Method:
    """Predict by a linear discriminant of running means and a running covariance.

    Args:
      shrinkage: e in the covariance (1 - e) S + e I that is inverted.
    """
    return frozen.make_method(parts, make_rule(shrinkage))


def make_rule(shrinkage: float) -> frozen.Rule:
    """Return the rule of streaming LDA."""

    def start(key, dim, classes):
        return Moments(
            jnp.zeros((classes, dim)), jnp.zeros((classes,)), jnp.zeros((dim, dim))
        )

    def add(moments, rows):
        own = frozen.one_hot(rows, len(moments.counts))
        # Entry [i, j]: row j came before row i and is of its class.
        before = jnp.tril(core.dot(own, own), k=-1)
        met = own @ moments.counts + before.sum(1)
        total = frozen.sum_products(own.T, moments.total) + frozen.sum_products(
            before.T, rows.features
        )
        # Of a class not met yet the mean is 0, as in the released code.
        gaps = rows.features - total / jnp.maximum(met, 1)[:, None]
        place = moments.counts.sum() + jnp.cumsum(rows.mask) - rows.mask  # t
        weights = rows.mask * place / (place + 1)
        return Moments(
            moments.total + frozen.sum_products(own, rows.features),
            moments.counts + own.sum(0),
            moments.scatter + frozen.sum_products(gaps * weights[:, None], gaps),
        )

    def fit(moments):
        means = moments.total / jnp.maximum(moments.counts, 1)[:, None]
        covariance = moments.scatter / jnp.maximum(moments.counts.sum(), 1)
        shrunk = (1 - shrinkage) * covariance + shrinkage * jnp.eye(len(covariance))
        # As in the released code: after a few rows it is singular in float32.
        inverse = jnp.linalg.pinv(shrunk, hermitian=True)
        weights = jnp.matmul(inverse, means.T, precision="highest")
        return weights, jnp.sum(means.T * weights, axis=0) / 2, moments.counts

    def scores(fitted, features):
        weights, offset, counts = fitted
        found = jnp.matmul(features, weights, precision="highest") - offset
        return frozen.known_only(found, counts)

    return frozen.Rule(start, add, scores, fit)
