"""FeCAM: the nearest class by Mahalanobis distance, on frozen features.

Goswami et al., "FeCAM: Exploiting the Heterogeneity of Class Distributions in
Exemplar-Free Continual Learning", NeurIPS 2023: Tukey's transform (Equation 6), shrunk
covariances (8), made correlations (9), one of each class or one of all.

Departures:
- The power of a negative feature is that of its absolute value, with its sign; the
  paper's features come from a ReLU.
- Transformed features have unit length, as in the released code for Vision
  Transformers. Its scripts have no transform (power=1), and shrink by 1 and 0, or 10
  and 10. The defaults here are those for ResNets.
- The released code for ResNets shrinks twice, lets transformed features keep their
  length in covariances, and transforms the mean of the features: `form="code"`.
- `shared` pools the covariances within classes, shrinks them and makes correlations.
  The released one is the covariance of all rows of a task, averaged over tasks.
- A class of one row, or of equal rows, has the pooled covariance of the other classes.
  If there is none, it has the identity. The released code gives nan.
"""

from typing import Annotated, Literal, NamedTuple

import jax
import jax.numpy as jnp
import jax.scipy.linalg

from jaxcl import core, schema
from jaxcl.errors import Refused
from jaxcl.methods import frozen

_Power = Annotated[float, schema.Range(least=0.05, most=1.0)]
_FLAT = 1e-10  # a variance is none below this share of the squared length of the mean


class Moments(NamedTuple):
    """Running moments of each class; second ones may be shared by all classes."""

    means: frozen.ClassMeans  # of transformed features
    features: frozen.ClassMeans | None  # of features as they are; None: not needed
    scatter: jax.Array  # f32[C,D,D] or f32[1,D,D], sums of gaps times gaps


@schema.checked("config.method")
def make(
    parts: core.Parts,
    *,
    power: _Power = 0.5,
    diagonal: schema.Weight = 1.0,
    off_diagonal: schema.Weight = 1.0,
    shared: bool = False,
    form: Literal["paper", "code"] = "paper",
) -> core.Method:
    """Predict by Mahalanobis distances to the class means.

    The covariances of C classes take 4 C D^2 bytes: 105 MB for 100 classes of 512
    features, 2.4 GB for 1,000 of 768.

    Args:
      power: lambda of Tukey's transform; 1 leaves features as they are.
      diagonal, off_diagonal: gamma_1 and gamma_2: factors of the mean variance and of
        the mean covariance that shrinkage adds. The second must not exceed the first.
        If features lie far from 0, compared to their spread, take 0 for the second:
        unit rows hardly vary along their mean, and equal factors leave nothing there.
      shared: one covariance for all classes.
      form: "paper", or the released "code" for ResNets.

    Raises:
      Refused: off_diagonal is above diagonal.
    """
    if off_diagonal > diagonal:
        raise Refused(
            f"config.method.off_diagonal={off_diagonal}: must be at most "
            f"config.method.diagonal={diagonal}, or distances may be negative"
        )
    rule = make_rule(power, diagonal, off_diagonal, shared, form)
    return frozen.make_method(parts, rule)


def transform(features: jax.Array, power: float) -> jax.Array:
    """Return Tukey's transform of features, of unit length, f32[B,D]."""
    return core.l2_normalize(_raise_to_power(features, power))


def _raise_to_power(features, power):
    # The gradient is never asked for, so a zero needs no care.
    return jnp.sign(features) * jnp.abs(features) ** power


def make_rule(
    power: float,
    diagonal: float,
    off_diagonal: float,
    shared: bool,
    form: str = "paper",
) -> frozen.Rule:
    """Return the rule of FeCAM; arguments as for `make`."""
    by_code = form == "code"

    def start(key, dim, classes):
        matrices = 1 if shared else classes
        means = frozen.start_means(classes, dim)
        scatter = jnp.zeros((matrices, dim, dim))
        return Moments(means, means if by_code else None, scatter)

    def add(moments, rows):
        change = _raise_to_power if by_code else transform
        changed = rows._replace(features=change(rows.features, power))
        means, gaps, before = frozen.move_means(moments.means, changed)
        weighted = gaps * (rows.mask * before / (before + 1))[:, None]
        if shared:
            scatter = moments.scatter + frozen.sum_products(weighted, gaps)
        else:
            products = weighted[:, :, None] * gaps[:, None, :]
            place = jnp.where(rows.mask, rows.label, 0)  # products of no row are 0
            scatter = moments.scatter.at[place].add(products)
        features = moments.features
        if by_code:
            features = frozen.move_means(features, rows)[0]
        return Moments(means, features, scatter)

    def fit(moments):
        mean, counts = moments.means
        if by_code:
            mean = transform(moments.features.mean, power)
        correlations = jax.vmap(lambda x: shrink(x, diagonal, off_diagonal, form=form))(
            _covariances(moments)
        )
        # The ridge is of the size of rounding, for covariances that are not shrunk.
        size = correlations.shape[-1]
        ridge = size * jnp.finfo(correlations.dtype).eps * jnp.eye(size)
        return mean, jnp.linalg.cholesky(correlations + ridge), counts

    def scores(fitted, features):
        means, factors, counts = fitted
        rows = transform(features, power)

        def distance(mean, factor):
            gaps = (rows - mean).T
            whitened = jax.scipy.linalg.solve_triangular(factor, gaps, lower=True)
            return jnp.sum(whitened * whitened, axis=0)

        factors = jnp.broadcast_to(factors, (len(means), *factors.shape[1:]))
        distances = jax.lax.map(lambda pair: distance(*pair), (means, factors))
        return frozen.known_only(-distances.T, counts)

    return frozen.Rule(start, add, scores, fit)


def _covariances(moments):
    """Return the covariance of each class, or one of all, f32[C or 1,D,D]."""
    (mean, counts), scatter = moments.means, moments.scatter
    freedom, size = jnp.maximum(counts - 1, 0), jnp.sum(mean * mean, axis=1)
    if len(scatter) != len(counts):  # shared
        freedom, size = freedom.sum(keepdims=True), jnp.max(size, keepdims=True)
    covariances = scatter / jnp.maximum(freedom, 1)[:, None, None]
    variance = jnp.trace(covariances, axis1=1, axis2=2)
    flat = (variance <= _FLAT * size)[:, None, None]
    pooled = jnp.sum(jnp.where(flat, 0, scatter), axis=0)
    return jnp.where(flat, pooled / jnp.maximum(freedom.sum(), 1), covariances)


def shrink(
    covariance: jax.Array, diagonal: float, off_diagonal: float, *, form: str = "paper"
) -> jax.Array:
    """Shrink a covariance f32[D,D] and return its correlations, Equations 8 and 9.

    The released code shrinks twice; its mean covariance leaves zeros out.
    """
    eye = jnp.eye(len(covariance), dtype=bool)
    for _ in range(2 if form == "code" else 1):
        outside = jnp.where(eye, 0, covariance)
        counted = outside != 0 if form == "code" else ~eye
        mean = jnp.sum(outside) / jnp.maximum(jnp.sum(counted), 1)
        variance = jnp.mean(jnp.diagonal(covariance))
        covariance += jnp.where(eye, diagonal * variance, off_diagonal * mean)
    variances = jnp.diagonal(covariance)
    scale = jax.lax.rsqrt(jnp.where(variances > 0, variances, 1))
    return jnp.where(eye, 1, covariance * scale[:, None] * scale)
