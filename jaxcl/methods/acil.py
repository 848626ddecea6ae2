"""ACIL: recursive least squares on random projections of frozen features.

Zhuang et al., "ACIL: Analytic Class-Incremental Learning with Absolute Memorization
and Privacy Protection", NeurIPS 2022, Equations 9 and 10, batch by batch as in G-ACIL
(2024). After any number of batches the weights equal those of ridge regression on all
rows so far, in any order, except for rounding.

Departures:
- All is in float32; the released code computes in float64. So the recursion moves a
  square root of the inverse, with half of its digits (Andrews, "A Square Root
  Formulation of the Kalman Covariance Equations", AIAA Journal 1968).
- There are 2,048 projections by default; the paper has 8,192.
- Projections are normal with variance 1 / D; the released code's are uniform with
  variance 1 / (3 D), where the same gamma is three times as strong.
"""

import functools
from typing import Annotated, NamedTuple

import jax
import jax.numpy as jnp
import jax.scipy.linalg

from jaxcl import core, schema
from jaxcl.methods import frozen, ranpac


class Recursion(NamedTuple):
    """The state of ACIL's recursion, for D features, M projections and C classes."""

    projection: jax.Array  # f32[D,M]; it never changes
    root: jax.Array  # f32[M,M], S with S S^T = (sum of h h^T + ridge I)^-1
    weights: jax.Array  # f32[M,C], least squares on all rows so far
    counts: jax.Array  # i32[C], rows of each class so far


@schema.checked("config.method")
@schema.debug(projections=32)
def make(
    parts: core.Parts,
    *,
    projections: schema.Count = 2048,
    ridge: Annotated[float, schema.Range(least=1e-6)] = 0.1,
) -> core.Method:
    """Predict by least squares, updated by each batch.

    Args:
      projections: M, number of random features relu(f W).
      ridge: gamma, the weight of the squared norm.
    """
    return frozen.make_method(parts, make_rule(projections, ridge))


def make_rule(projections: int, ridge: float) -> frozen.Rule:
    """Return ACIL's rule for M = `projections` random projections."""

    def start(key, dim, classes):
        scale = dim**-0.5  # so that random features are of the size of features
        return Recursion(
            scale * jax.random.normal(key, (dim, projections)),
            jnp.eye(projections) * ridge**-0.5,
            jnp.zeros((projections, classes)),
            jnp.zeros((classes,), jnp.int32),
        )

    def add(state, rows):
        # A row that does not exist is a row of zeros, which changes nothing.
        hidden = ranpac.project(state.projection, rows.features)
        classes = len(state.counts)
        solve = functools.partial(jax.scipy.linalg.solve_triangular, lower=True)
        with jax.default_matmul_precision("highest"):
            inputs = hidden @ state.root  # A^T, f32[B,M]
            projected = inputs @ state.root.T  # A^T S^T, f32[B,M]
            eye = jnp.eye(len(hidden))
            factor = factor_gram(inputs)  # L
            gain = solve(factor, projected)
            # S <- S (I - A L^-T (L + I)^-1 A^T)
            root = state.root - gain.T @ solve(factor + eye, inputs)
            residual = frozen.one_hot(rows, classes) - hidden @ state.weights
            step = gain.T @ solve(factor, residual)
            return Recursion(
                state.projection,
                root,
                state.weights + step,
                state.counts + frozen.count_rows(rows, classes),
            )

    def scores(state, features):
        hidden = ranpac.project(state.projection, features)
        logits = jnp.matmul(hidden, state.weights, precision="highest")
        return frozen.known_only(logits, state.counts)

    return frozen.Rule(start, add, scores)


def factor_gram(inputs: jax.Array) -> jax.Array:
    """Return the Cholesky factor of I + X X^T for X f32[B,M], lower f32[B,B].

    By QR: float32 would round I away from the sum if rows are long.
    """
    stacked = jnp.concatenate([jnp.eye(len(inputs)), inputs.T])
    upper = jnp.linalg.qr(stacked, mode="r")
    return (upper * jnp.sign(jnp.diagonal(upper))[:, None]).T
