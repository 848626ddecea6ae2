"""Non-contrastive losses over a batch of embeddings: no example is a negative.

Rows are examples, and a batch is the global batch: its moments are taken over all
devices. Every loss works in float32 at least (bfloat16 is cast first) and returns one
scalar. `barlow_twins`, `vicreg`, `lejepa` and `mse` take rows as they are; `byol`,
`simsiam` and `mean_cosine` L2-normalise them. `dino` compares logits over prototypes.
"""

import chex
import jax
import jax.numpy as jnp
import numpy as np

from jaxcl import core
from jaxcl.errors import Refused


def mse(a: jax.Array, b: jax.Array) -> jax.Array:
    """Compute the mean of (a - b)^2 over all B * D elements.

    Args:
      a, b: f32[B, D].

    Returns:
      f32[].
    """
    chex.assert_rank(a, 2)
    chex.assert_equal_shape([a, b])
    return jnp.mean(jnp.square(core.at_least_float32(a) - core.at_least_float32(b)))


def mean_cosine(a: jax.Array, b: jax.Array) -> jax.Array:
    """Compute the mean over the batch of the cosine of row i of `a` and row i of `b`.

    Args:
      a, b: f32[B, D]. A row of zeros counts 0 and receives no gradient.

    Returns:
      f32[] in [-1, 1].
    """
    chex.assert_rank(a, 2)
    chex.assert_equal_shape([a, b])
    a, b = core.l2_normalize(a), core.l2_normalize(b)
    return jnp.mean(jnp.sum(a * b, axis=-1))


def barlow_twins(
    z1: jax.Array, z2: jax.Array, *, scale: float = 0.1, off_diagonal: float = 5e-3
) -> jax.Array:
    """Compute Barlow Twins (Zbontar et al., ICML 2021, Eq. 1).

    Each feature d is standardised over the batch, (z - mean) / sqrt(var + 1e-5)
    with the biased variance, C = z1^T z2 / B, and the loss is
      scale * (sum_d (C_dd - 1)^2 + off_diagonal * sum_{d != e} C_de^2).
    The paper has scale 1; 0.1 is what CaSSLe and PNR train with.

    Args:
      z1: f32[B, D], embeddings of view 1; row i belongs with row i of `z2`.
      z2: f32[B, D], embeddings of view 2.
      scale: factor of the whole loss.
      off_diagonal: weight of the redundancy term, the paper's lambda.

    Returns:
      f32[].

    Example:
      >>> import jax.numpy as jnp
      >>> from jaxcl.losses import noncontrastive
      >>> z = jnp.array([[1.0, 1.0], [-1.0, -1.0]])  # features that are redundant
      >>> loss = noncontrastive.barlow_twins(z, z, scale=1.0, off_diagonal=0.5)
      >>> round(float(loss), 3)
      1.0
    """
    chex.assert_rank(z1, 2)
    chex.assert_equal_shape([z1, z2])
    rows, features = z1.shape
    a, b = _standardize(z1), _standardize(z2)
    correlation = core.dot(a.T, b.T) / rows
    identity = jnp.eye(features, dtype=bool)
    # One weighted sum: the sum of all minus that of the diagonal would lose digits.
    weight = jnp.where(identity, 1.0, off_diagonal)
    return scale * jnp.sum(weight * jnp.square(correlation - identity))


def byol(predictions: jax.Array, targets: jax.Array) -> jax.Array:
    """Compute BYOL's regression of one view on the other (Grill et al., 2020, Eq. 2).

    The mean over rows of 2 - 2 cos, the squared distance of unit rows. In BYOL the
    caller adds this loss for both orders of the views.

    Args:
      predictions: f32[B, D], the predictor's output for one view.
      targets: f32[B, D], the slow network's projection of the other; no gradient.

    Returns:
      f32[] in [0, 4].

    Example:
      >>> import jax.numpy as jnp
      >>> from jaxcl.losses import noncontrastive
      >>> predictions, targets = jnp.array([[2.0, 0.0]]), jnp.array([[0.0, 3.0]])
      >>> round(float(noncontrastive.byol(predictions, targets)), 3)
      2.0
    """
    return 2 - 2 * mean_cosine(predictions, jax.lax.stop_gradient(targets))


def simsiam(p1: jax.Array, p2: jax.Array, z1: jax.Array, z2: jax.Array) -> jax.Array:
    """Compute SimSiam (Chen & He, CVPR 2021, Eq. 2 with the stop-gradient of Eq. 4).

    -(cos(p1, z2) + cos(p2, z1)) / 2, the mean over the batch.

    Args:
      p1, p2: f32[B, D], the predictor's outputs for both views.
      z1, z2: f32[B, D], projections of both views by the same network; no gradient.

    Returns:
      f32[] in [-1, 1].

    Example:
      >>> import jax.numpy as jnp
      >>> from jaxcl.losses import noncontrastive
      >>> p, z = jnp.array([[2.0, 0.0]]), jnp.array([[3.0, 0.0]])
      >>> round(float(noncontrastive.simsiam(p, p, z, z)), 3)  # one direction
      -1.0
    """
    z1, z2 = jax.lax.stop_gradient((z1, z2))
    return -(mean_cosine(p1, z2) + mean_cosine(p2, z1)) / 2


def epps_pulley(x: jax.Array, *, form: str = "code") -> jax.Array:
    """Compute the Epps-Pulley statistic of N numbers against N(0, 1).

    With the empirical characteristic function f(t) = mean_n exp(i t x_n),
      T = N integral |f(t) - exp(-t^2 / 2)|^2 exp(-t^2 / 2) dt,
    by the trapezoidal rule on 17 points: LeJEPA (Balestriero & LeCun 2025, Sec. 4). For
    normal numbers it is 1.06 on average, whatever N.

    Args:
      x: f32[N, ...], samples along axis 0.
      form: the range of t. "code": [-3, 3], by the 17 points of [0, 3], since the
        integrand is even. "paper" (Alg. 1): [-5, 5]; there x and x + 10 look the same.

    Returns:
      f32[...], one statistic for each column.

    Raises:
      Refused: if `form` is neither.

    Example:
      >>> import jax.numpy as jnp
      >>> from jaxcl.losses import noncontrastive
      >>> round(float(noncontrastive.epps_pulley(jnp.array([-1.0, 1.0]))), 4)
      0.2057
    """
    core.check_choice("form", form, tuple(_GRIDS))
    points, weights = _GRIDS[form]
    x = core.at_least_float32(x)
    total = jnp.zeros(x.shape[1:], x.dtype)
    # One point at a time: all at once would be 17 arrays as large as x.
    for t, weight in zip(points, weights, strict=True):
        real, imaginary = jnp.mean(jnp.cos(t * x), 0), jnp.mean(jnp.sin(t * x), 0)
        gap = jnp.square(real - np.exp(-t * t / 2)) + jnp.square(imaginary)
        total += weight * gap
    return x.shape[0] * total


def _quadrature_grid(low, high, copies):
    """Return points t, and weights of the trapezoidal rule times exp(-t^2 / 2)."""
    points = np.linspace(low, high, 17)
    weights = np.full(17, copies * (points[1] - points[0]))
    weights[[0, -1]] /= 2
    return points.tolist(), (weights * np.exp(-(points**2) / 2)).tolist()


_GRIDS = {
    "code": _quadrature_grid(0.0, 3.0, copies=2),
    "paper": _quadrature_grid(-5.0, 5.0, copies=1),
}


def sigreg(z: jax.Array, slices: jax.Array, *, form: str = "code") -> jax.Array:
    """Compute SIGReg, the distance from isotropic normal rows (LeJEPA, Sec. 4).

    The mean over slices of the Epps-Pulley statistic of z along each.

    Args:
      z: f32[B, D].
      slices: f32[S, D], unit rows, new ones at each step; no gradient.
      form: range of t, see `epps_pulley`.

    Returns:
      f32[]; 1.06 on average if z is standard normal, 0.41 B if it is all zeros.

    Example:
      >>> import jax.numpy as jnp
      >>> from jaxcl.losses import noncontrastive
      >>> z = jnp.zeros((10, 2))  # collapsed
      >>> round(float(noncontrastive.sigreg(z, jnp.eye(2))), 3)
      4.02
    """
    chex.assert_rank(z, 2)
    return jnp.mean(_slice_statistics(z, slices, form))


def _slice_statistics(z, slices, form):
    """Return statistics of f32[B, ..., D] along the slices f32[S, D], f32[..., S]."""
    chex.assert_shape(slices, (None, z.shape[-1]))
    slices = jax.lax.stop_gradient(slices)
    return epps_pulley(core.dot(core.at_least_float32(z), slices), form=form)


def lejepa(
    z: jax.Array,
    slices: jax.Array,
    *,
    weight: float = 0.05,
    form: str = "code",
    centre: int = 2,
) -> jax.Array:
    """Compute LeJEPA (Balestriero & LeCun 2025, Eq. 6).

    With m_n the mean of the first `centre` views of example n,
      weight * mean_v SIGReg(z_v) + (1 - weight) * mean over n, v of |m_n - z_nv|^2.
    Gradients flow through m, too. The paper's squared norm is a sum over the D
    features, the released code's a mean.

    Args:
      z: f32[B, V, D], V views of each example, the global ones first.
      slices: f32[S, D], unit rows; no gradient.
      weight: the paper's lambda.
      form: "code" or "paper": mean or sum over D, and the grid of `epps_pulley`.
      centre: number of global views.

    Returns:
      f32[].

    Example:
      >>> import jax.numpy as jnp
      >>> from jaxcl.losses import noncontrastive
      >>> z = jnp.array([[[0.0], [2.0]]])  # two views, each 1 from their mean
      >>> round(float(noncontrastive.lejepa(z, jnp.ones((1, 1)), weight=0.0)), 3)
      1.0
    """
    chex.assert_rank(z, 3)
    z = core.at_least_float32(z)
    mean = jnp.mean(z[:, :centre], axis=1, keepdims=True)
    spread = jnp.mean(jnp.square(mean - z))
    if form == "paper":
        spread = spread * z.shape[-1]
    return weight * jnp.mean(_slice_statistics(z, slices, form)) + (1 - weight) * spread


def prototype_cosines(z: jax.Array, prototypes: jax.Array) -> jax.Array:
    """Compute the cosines of rows and prototypes: DINO's weight-normalised layer.

    Args:
      z: f32[..., D].
      prototypes: f32[K, D].

    Returns:
      f32[..., K].

    Example:
      >>> import jax.numpy as jnp
      >>> from jaxcl.losses import noncontrastive
      >>> prototypes = jnp.array([[2.0, 0.0], [0.0, -1.0]])
      >>> noncontrastive.prototype_cosines(jnp.array([[3.0, 0.0]]), prototypes).tolist()
      [[1.0, 0.0]]
    """
    chex.assert_shape(prototypes, (None, z.shape[-1]))
    return core.dot(core.l2_normalize(z), core.l2_normalize(prototypes))


def centred(
    logits: jax.Array, centre: jax.Array, *, temperature: jax.Array | float = 0.04
) -> jax.Array:
    """Compute DINO's targets, softmax((logits - centre) / temperature).

    Args:
      logits: f32[..., K], from the slow network.
      centre: f32[K], a running mean of them.
      temperature: divisor, below the student's, so that targets are sharp.

    Returns:
      f32[..., K], rows that sum to 1, without gradient.

    Example:
      >>> import jax.numpy as jnp
      >>> from jaxcl.losses import noncontrastive
      >>> logits = jnp.array([[0.3, 0.1]])  # what all rows have favours none
      >>> noncontrastive.centred(logits, jnp.array([0.3, 0.1])).tolist()
      [[0.5, 0.5]]
    """
    chex.assert_shape(centre, (logits.shape[-1],))
    logits, centre = jax.lax.stop_gradient((core.at_least_float32(logits), centre))
    return jax.nn.softmax((logits - centre) / temperature, axis=-1)


def sinkhorn(
    logits: jax.Array, *, temperature: jax.Array | float = 0.04, iterations: int = 3
) -> jax.Array:
    """Compute targets that use all prototypes equally, by Sinkhorn-Knopp.

    Columns (prototypes) of exp(logits / temperature) are scaled to the sum B / K and
    rows to the sum 1, in turn: SwAV (Caron et al., NeurIPS 2020) and DINOv2 (Oquab et
    al. 2023).

    Args:
      logits: f32[B, K], from the slow network, for one view of the whole batch.
      temperature: divisor of the logits.
      iterations: number of times that columns and rows are scaled.

    Returns:
      f32[B, K], rows that sum to 1, without gradient.

    Example:
      >>> import jax.numpy as jnp
      >>> from jaxcl.losses import noncontrastive
      >>> both_prefer_0 = jnp.array([[1.0, 0.0], [1.0, 0.0]])
      >>> float(noncontrastive.sinkhorn(both_prefer_0)[0, 0])
      0.5
    """
    chex.assert_rank(logits, 2)
    # In logarithms: over a low temperature the exponentials leave float32.
    q = jax.lax.stop_gradient(core.at_least_float32(logits)) / temperature
    for _ in range(iterations):
        q = jax.nn.log_softmax(jax.nn.log_softmax(q, axis=0), axis=1)
    return jnp.exp(q)


def dino(
    logits: jax.Array, targets: jax.Array, *, temperature: float = 0.1
) -> jax.Array:
    """Compute DINO (Caron et al., 2021, Eq. 3): cross-entropy between views.

    With p_v = softmax(logits_v / temperature) and q_i the targets of the global view i,
    the mean over the batch and over all pairs i != v of -sum_k q_ik log p_vk.

    Args:
      logits: f32[B, V, K], from the network that learns, global views first.
      targets: f32[B, G, K], probabilities of the G global views, from `centred` or
        `sinkhorn`; no gradient.
      temperature: divisor of the logits.

    Returns:
      f32[], in nats; log K where all logits are equal.

    Raises:
      Refused: V is 1, and a view has no other.

    Example:
      >>> import jax.numpy as jnp
      >>> from jaxcl.losses import noncontrastive
      >>> targets = jnp.array([[[1.0, 0.0], [1.0, 0.0]]])  # one example, two views
      >>> round(float(noncontrastive.dino(jnp.zeros((1, 2, 2)), targets)), 3)
      0.693
    """
    chex.assert_rank([logits, targets], 3)
    (rows, views, count), target_views = logits.shape, targets.shape[1]
    chex.assert_shape(targets, (rows, min(target_views, views), count))
    if views < 2:
        raise Refused(f"logits has V={views} views: allowed are 2 and more")
    targets = jax.lax.stop_gradient(targets)
    logs = jax.nn.log_softmax(core.at_least_float32(logits) / temperature, axis=-1)
    high = jax.lax.Precision.HIGH  # a TPU's default is too coarse, see core.dot
    products = jnp.einsum("bik,bvk->iv", targets, logs, precision=high)
    other = ~np.eye(target_views, views, dtype=bool)
    return -jnp.sum(jnp.where(other, products, 0.0)) / (rows * other.sum())


def ibot(
    logits: jax.Array,
    targets: jax.Array,
    hides: jax.Array,
    *,
    temperature: float = 0.1,
) -> jax.Array:
    """Compute iBOT, cross-entropy of hidden patches (Zhou et al., ICLR 2022, Eq. 2).

    With p = softmax(logits / temperature) and q the targets of the same patches, the
    mean of -sum_k q_k log p_k over the patches of a view, then over all N views. A view
    that hides no patch counts as 0, as in the released code and in DINOv2's.

    Args:
      logits: f32[N, M, K], from the network that learns, for M patches of each view.
      targets: f32[N, M, K], probabilities from a network that sees them; no gradient.
      hides: i32[N], 1 where the view hides its patches, else 0.
      temperature: divisor of the logits.

    Returns:
      f32[], in nats; 0 where no view hides any.

    Example:
      >>> import jax.numpy as jnp
      >>> from jaxcl.losses import noncontrastive
      >>> targets = jnp.array([[[1.0, 0.0]]])  # one patch of one view
      >>> loss = noncontrastive.ibot(jnp.zeros((1, 1, 2)), targets, jnp.array([1]))
      >>> round(float(loss), 3)
      0.693
    """
    chex.assert_equal_shape([logits, targets])
    chex.assert_equal_shape_prefix([logits, hides], 1)
    targets = jax.lax.stop_gradient(targets)
    logs = jax.nn.log_softmax(core.at_least_float32(logits) / temperature, axis=-1)
    by_view = -jnp.mean(jnp.sum(targets * logs, axis=-1), axis=1)
    return jnp.mean(by_view * hides)


def koleo(h: jax.Array) -> jax.Array:
    """Compute KoLeo, which keeps rows apart (Sablayrolles et al., ICLR 2019, Eq. 6).

    -mean_i log d_i, with d_i the distance of unit row i to the nearest other one.

    Args:
      h: f32[B, D], features of one view; B at least 2.

    Returns:
      f32[]; 18.4 if all rows are equal.

    Example:
      >>> import jax.numpy as jnp
      >>> from jaxcl.losses import noncontrastive
      >>> h = jnp.array([[1.0, 0.0], [0.0, 2.0]])  # sqrt 2 apart
      >>> round(float(noncontrastive.koleo(h)), 3)
      -0.347
    """
    chex.assert_rank(h, 2)
    unit = core.l2_normalize(h)
    cosines = core.dot(unit, unit)
    masked = jnp.where(jnp.eye(len(h), dtype=bool), -jnp.inf, cosines)
    nearest = jnp.argmax(masked, axis=1)
    squared = jnp.sum(jnp.square(unit - unit[nearest]), axis=-1)
    # Below 1e-8, as in DINOv2, a distance is rounding, and has no gradient.
    return -jnp.mean(jnp.log(jnp.maximum(squared, 1e-16))) / 2


def vicreg(
    z1: jax.Array,
    z2: jax.Array,
    *,
    invariance: float = 25.0,
    variance: float = 25.0,
    covariance: float = 1.0,
) -> jax.Array:
    """Compute VICReg (Bardes et al., ICLR 2022, Eq. 6), weights as in the paper.

    With Cov(z) = sum_i (z_i - mean)(z_i - mean)^T / (B - 1), a D x D matrix:
      invariance * mean over all B * D elements of (z1 - z2)^2
      + variance * sum over views of mean_d max(0, 1 - sqrt(Cov_dd + 1e-4))
      + covariance * sum over views of sum_{d != e} Cov_de^2 / D.
    The paper's invariance term is a sum over D; its code and this function use a mean.

    Args:
      z1: f32[B, D], embeddings of view 1; row i belongs with row i of `z2`.
      z2: f32[B, D], embeddings of view 2.
      invariance, variance, covariance: weights of the three terms.

    Returns:
      f32[].

    Raises:
      Refused: B is 1, and one row has no variance.

    Example:
      >>> import jax.numpy as jnp
      >>> from jaxcl.losses import noncontrastive
      >>> collapsed = jnp.ones((4, 2))  # the variance terms alone are left
      >>> round(float(noncontrastive.vicreg(collapsed, collapsed)), 3)
      49.5
    """
    chex.assert_rank(z1, 2)
    chex.assert_equal_shape([z1, z2])
    if z1.shape[0] < 2:
        raise Refused(f"z1 has B={z1.shape[0]} rows: allowed are 2 and more")
    (hinge1, redundancy1), (hinge2, redundancy2) = map(_moment_terms, (z1, z2))
    return (
        invariance * mse(z1, z2)
        + variance * (hinge1 + hinge2)
        + covariance * (redundancy1 + redundancy2)
    )


def _moment_terms(z):
    """Return VICReg's variance and covariance terms of one view, v(Z) and c(Z)."""
    z = _centre(z)
    rows, features = z.shape
    spread = jnp.sqrt(jnp.sum(z * z, axis=0) / (rows - 1) + 1e-4)
    product = core.dot(z.T, z.T) / (rows - 1)
    off_diagonal = jnp.where(jnp.eye(features, dtype=bool), 0.0, product)
    hinge = jnp.mean(jax.nn.relu(1 - spread))
    return hinge, jnp.sum(jnp.square(off_diagonal)) / features


def _standardize(z):
    """Apply batch norm without affine part: biased variance, eps 1e-5."""
    z = _centre(z)
    return z * jax.lax.rsqrt(jnp.mean(z * z, axis=0) + 1e-5)


def _centre(z):
    z = core.at_least_float32(z)
    return z - jnp.mean(z, axis=0)
