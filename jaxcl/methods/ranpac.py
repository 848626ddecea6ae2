"""RanPAC: ridge regression on random projections of frozen features.

McDonnell et al., "RanPAC: Random Projections and Pre-trained Models for Continual
Learning", NeurIPS 2023, Equations 4 to 6. The result does not depend on the order of
the rows, except for rounding.

Departure: the ridge is chosen on a fifth of all rows so far, by a hash of their number
in the train split; the released code takes the last fifth of the task. Neither uses
test rows. First-session adaptation is not part of it.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from absl import logging

from jaxcl import core, schema, sharding
from jaxcl.methods import frozen

RIDGES = tuple(10.0**power for power in range(-8, 9))  # those that are tried
_SLOW = 5000  # projections with which an evaluation on a CPU takes longer than others
_MIX = 2654435761  # Knuth's multiplicative hash: 2^32 over the golden ratio


class Grams(NamedTuple):
    """Sums over all rows so far; [0] to fit, [1] to choose the ridge."""

    projection: jax.Array  # f32[D,M], normal; it never changes
    inputs: jax.Array  # f32[2,M,M], sum of h h^T
    targets: jax.Array  # f32[2,M,C], sum of h y^T
    counts: jax.Array  # i32[2,C]


@schema.checked("config.method")
@schema.debug(projections=32)
def make(parts: core.Parts, *, projections: schema.Count | None = None) -> core.Method:
    """Predict by ridge regression of one-hot labels on relu(features @ projection).

    Two M x M matrices are kept: 0.8 GB for 10,000. An evaluation factors one for each
    of 17 ridges, and their sum.

    Args:
      projections: M, number of random features. None: 16 for each feature of the
        encoder, but 10,000 at most, the paper's number for 768.
    """
    return frozen.make_method(parts, make_rule(projections))


def make_rule(projections: int | None) -> frozen.Rule:
    """Return the rule of M random projections; None: as many as `make` says."""

    def start(key, dim, classes):
        count = projections or min(16 * dim, 10_000)
        if count >= _SLOW and sharding.on_cpu():
            teraflop = (len(RIDGES) + 1) * count**3 / 3e12
            logging.log_first_n(
                logging.WARNING,
                f"config.method.projections={count}, of {dim} features: an evaluation "
                f"takes {teraflop:.0f} TFLOP; half as many take an eighth",
                1,
            )
        return Grams(
            jax.random.normal(key, (dim, count)),
            jnp.zeros((2, count, count)),
            jnp.zeros((2, count, classes)),
            jnp.zeros((2, classes), jnp.int32),
        )

    def add(grams, rows):
        hidden = project(grams.projection, rows.features)
        labels = frozen.one_hot(rows, grams.counts.shape[1])
        chooses = held_out(rows.index)
        parts = jnp.stack([~chooses, chooses])[..., None]
        inputs = jnp.stack(
            [frozen.sum_products(hidden * part, hidden) for part in parts]
        )
        targets = [frozen.sum_products(hidden * part, labels) for part in parts]
        counts = (labels * parts).sum(1, dtype=jnp.int32)
        return grams._replace(
            inputs=grams.inputs + inputs,
            targets=grams.targets + jnp.stack(targets),
            counts=grams.counts + counts,
        )

    def fit(grams):
        ridge = choose_ridge(grams)
        weights = solve_ridge(grams.inputs.sum(0), grams.targets.sum(0), ridge)
        return grams.projection, weights, grams.counts.sum(0)

    def scores(fitted, features):
        projection, weights, counts = fitted
        hidden = project(projection, features)
        logits = jnp.matmul(hidden, weights, precision="highest")
        return frozen.known_only(logits, counts)

    return frozen.Rule(start, add, scores, fit)


def held_out(index: jax.Array) -> jax.Array:
    """Mark a fifth of the rows, which choose the ridge, bool[B].

    Every fifth row might always be of the same classes, if a set repeats its classes in
    turn.
    """
    return (index.astype(jnp.uint32) * jnp.uint32(_MIX) >> 16) % 5 == 4


def project(projection: jax.Array, features: jax.Array) -> jax.Array:
    """Return the random features relu(f W), f32[B,M]."""
    return jax.nn.relu(jnp.matmul(features, projection, precision="highest"))


def solve_ridge(inputs: jax.Array, targets: jax.Array, ridge: jax.Array) -> jax.Array:
    """Return the weights (G + ridge I)^-1 Q, f32[M,C]; nan if float32 is too coarse.

    Args:
      inputs: G f32[M,M].
      targets: Q f32[M,C].
      ridge: f32[].
    """
    factor = jnp.linalg.cholesky(inputs + ridge * jnp.eye(len(inputs)))
    return jax.scipy.linalg.cho_solve((factor, True), targets)


def choose_ridge(grams: Grams) -> jax.Array:
    """Return the ridge with the least squared error on the held-out rows, f32[].

    For weights W that error is tr(W^T G W) - 2 tr(W^T Q) and a constant, with G and Q
    of these rows, so the rows need not be kept. A ridge below the rounding of the sums,
    relative to their trace, is raised to it, since float32 could not factor it. Where
    there are no rows to fit or to choose by, it is the middle of the smallest and the
    largest, in logarithms.
    """
    rounding = jnp.finfo(jnp.float32).eps * jnp.trace(grams.inputs.sum(0))
    ridges = jnp.maximum(jnp.array(RIDGES, jnp.float32), rounding)

    def error(ridge):
        weights = solve_ridge(grams.inputs[0], grams.targets[0], ridge)
        products = jnp.matmul(grams.inputs[1], weights, precision="highest")
        total = jnp.sum(weights * (products - 2 * grams.targets[1]))
        return jnp.where(jnp.isfinite(total), total, jnp.inf)

    best = ridges[jnp.argmin(jax.lax.map(error, ridges))]
    middle = jnp.sqrt(ridges[0] * ridges[-1])
    return jnp.where(jnp.all(grams.counts.sum(1) > 0), best, middle)
