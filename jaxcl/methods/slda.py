"""Streaming LDA on the features of a frozen encoder.

Hayes and Kanan, "Lifelong Machine Learning with Deep Streaming Linear Discriminant
Analysis", CVPR-W 2020: a running mean of each class and one covariance of all,
Equations 1 to 5. Both follow the order of the rows, one row at a time.

Departures:
- A direction has at least the variance that float32 resolves, 1e-7 of the sum of all
  variances; the released code inverts whatever rounding left.
- There is no base initialisation, which needs a set of its own.
- A class without a row is never predicted; the released code scores it 0.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxcl import core, schema
from jaxcl.methods import frozen


class Moments(NamedTuple):
    """Running means and covariance over the stream."""

    means: frozen.ClassMeans
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
        return Moments(frozen.start_means(classes, dim), jnp.zeros((dim, dim)))

    def add(moments, rows):
        # Of a class not met yet the mean is 0, as in the released code.
        means, gaps, _ = frozen.move_means(moments.means, rows)
        place = moments.means.counts.sum() + jnp.cumsum(rows.mask) - rows.mask  # t
        weights = rows.mask * place / (place + 1)
        scatter = frozen.sum_products(gaps * weights[:, None], gaps)
        return Moments(means, moments.scatter + scatter)

    def fit(moments):
        means, counts = moments.means
        covariance = moments.scatter / jnp.maximum(counts.sum(), 1)
        shrunk = (1 - shrinkage) * covariance + shrinkage * jnp.eye(len(covariance))
        inverse = invert_covariance(shrunk)
        weights = jnp.matmul(inverse, means.T, precision="highest")
        return weights, jnp.sum(means.T * weights, axis=0) / 2, counts

    def scores(fitted, features):
        weights, offset, counts = fitted
        logits = jnp.matmul(features, weights, precision="highest") - offset
        return frozen.known_only(logits, counts)

    return frozen.Rule(start, add, scores, fit)


def invert_covariance(covariance: jax.Array) -> jax.Array:
    """Invert a covariance f32[D,D]; the discriminant weighs its least variances most.

    Variances below the rounding of their sum count as that rounding, so the inverse is
    finite and positive whatever the rank. The inverse of 0 is the identity.
    """
    variances, directions = jnp.linalg.eigh(covariance)
    rounding = jnp.finfo(variances.dtype).eps * jnp.trace(covariance)
    variances = jnp.where(rounding > 0, jnp.maximum(variances, rounding), 1)
    return jnp.matmul(directions / variances, directions.T, precision="highest")
