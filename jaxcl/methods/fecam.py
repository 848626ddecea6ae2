"""FeCAM: the nearest class by Mahalanobis distance, on frozen features.

Goswami et al., "FeCAM: Exploiting the Heterogeneity of Class Distributions in
Exemplar-Free Continual Learning", NeurIPS 2023: Tukey's transform (Equation 6), shrunk
covariances (8), made correlations (9), one of each class or one of all.

Departures:
- The power of a negative feature is that of its absolute value, with its sign; the
  paper's features come from a ReLU.
- Features have unit length, as in the released code for Vision Transformers.
"""

from typing import Annotated, NamedTuple

import jax
import jax.numpy as jnp

from jaxcl import core, schema
from jaxcl.methods import frozen

_Power = Annotated[float, schema.Range(least=0.05, most=1.0)]


class Moments(NamedTuple):
    """Sums over the rows of each class; second moments may be shared by all classes."""

    total: jax.Array  # f32[C,D]
    counts: jax.Array  # f32[C]
    squares: jax.Array  # f32[C,D,D] or f32[1,D,D], sums of x x^T


@schema.checked("config.method")
def make(
    parts: core.Parts,
    *,
    power: _Power = 0.5,
    diagonal: schema.Weight = 1.0,
    off_diagonal: schema.Weight = 1.0,
    shared: bool = False,
) -> core.Method:
    """Predict by Mahalanobis distances to the class means.

    The covariances of C classes take 4 C D^2 bytes: 105 MB for 100 classes of 512
    features, 2.4 GB for 1,000 of 768.

    Args:
      power: lambda of Tukey's transform; 1 leaves features as they are.
      diagonal, off_diagonal: gamma_1 and gamma_2: factors of the mean variance and of
        the mean covariance that shrinkage adds.
      shared: one covariance for all classes.
    """
    return frozen.make_method(parts, make_rule(power, diagonal, off_diagonal, shared))


def transform(features: jax.Array, power: float) -> jax.Array:
    """Return Tukey's transform of unit features, of unit length again, f32[B,D]."""
    size = jnp.abs(features)
    # The gradient is never asked for, so a zero needs no care.
    return core.l2_normalize(jnp.sign(features) * size**power)


def make_rule(
    power: float, diagonal: float, off_diagonal: float, shared: bool
) -> frozen.Rule:
    """Return the rule of FeCAM; arguments as for `make`."""

    def start(key, dim, classes):
        kept = 1 if shared else classes
        return Moments(
            jnp.zeros((classes, dim)),
            jnp.zeros((classes,)),
            jnp.zeros((kept, dim, dim)),
        )

    def add(moments, rows):
        own = frozen.one_hot(rows, len(moments.counts))
        found = transform(rows.features, power) * rows.mask[:, None]
        if shared:
            squares = moments.squares + frozen.sum_products(found, found)
        else:
            products = found[:, :, None] * found[:, None, :]
            place = jnp.where(rows.mask, rows.label, 0)  # products of no row are 0
            squares = moments.squares.at[place].add(products)
        total = moments.total + frozen.sum_products(own, found)
        return Moments(total, moments.counts + own.sum(0), squares)

    def fit(moments):
        means = moments.total / jnp.maximum(moments.counts, 1)[:, None]
        outer = means[:, :, None] * means[:, None, :] * moments.counts[:, None, None]
        counts = moments.counts
        if shared:
            outer, counts = outer.sum(0, keepdims=True), counts.sum(keepdims=True)
        scatter = moments.squares - outer
        covariances = scatter / jnp.maximum(counts - 1, 1)[:, None, None]
        shrunk = jax.vmap(lambda x: shrink(x, diagonal, off_diagonal))(covariances)
        # A class not met yet has none: its distance is not used.
        blank = (counts == 0)[:, None, None]
        return means, jnp.where(blank, jnp.eye(means.shape[1]), shrunk), moments.counts

    def scores(fitted, features):
        means, covariances, counts = fitted
        rows = transform(features, power)

        def distance(mean, covariance):
            gaps = rows - mean
            pulled = jax.scipy.linalg.solve(covariance, gaps.T, assume_a="pos")
            return jnp.sum(gaps.T * pulled, axis=0)

        whole = jnp.broadcast_to(covariances, (len(means), *covariances.shape[1:]))
        found = jax.lax.map(lambda pair: distance(*pair), (means, whole))
        return frozen.known_only(-found.T, counts)

    return frozen.Rule(start, add, scores, fit)


def shrink(covariance: jax.Array, diagonal: float, off_diagonal: float) -> jax.Array:
    """Shrink a covariance f32[D,D] and return its correlations, Equations 8 and 9."""
    size = len(covariance)
    eye = jnp.eye(size)
    on = jnp.trace(covariance) / size
    off = jnp.sum(covariance * (1 - eye)) / max(size * (size - 1), 1)
    shrunk = covariance + diagonal * on * eye + off_diagonal * off * (1 - eye)
    deviation = jnp.sqrt(jnp.maximum(jnp.diagonal(shrunk), 1e-12))
    return shrunk / (deviation[:, None] * deviation[None, :])
