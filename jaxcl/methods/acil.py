"""ACIL: recursive least squares on random projections of frozen features.

Zhuang et al., "ACIL: Analytic Class-Incremental Learning with Absolute Memorization
and Privacy Protection", NeurIPS 2022, Equations 9 and 10, batch by batch as in G-ACIL
(2024). After any number of batches the weights equal those of ridge regression on all
rows so far, in any order, except for rounding.

Departure: all is in float32; the released code computes in float64.
"""

from typing import Annotated, NamedTuple

import jax
import jax.numpy as jnp

from jaxcl import core, schema
from jaxcl.methods import frozen, ranpac


class Recursion(NamedTuple):
    """The state of the recursion."""

    projection: jax.Array  # f32[D,M]; it never changes
    inverse: jax.Array  # f32[M,M], (sum of h h^T + ridge I)^-1
    weights: jax.Array  # f32[M,C]
    counts: jax.Array  # f32[C]


@schema.checked("config.method")
def make(
    parts: core.Parts,
    *,
    projections: schema.Count = 2048,
    ridge: Annotated[float, schema.Range(least=1e-6)] = 0.1,
) -> core.Method:
    """Predict by least squares, updated by each batch.

    Args:
      projections: M, number of random features relu(f W).
      ridge: gamma, the weight of the squared norm. A small one exceeds the accuracy of
        float32: raise it if accuracies fall with more batches.
    """
    return frozen.make_method(parts, make_rule(projections, ridge))


def make_rule(projections: int, ridge: float) -> frozen.Rule:
    """Return the rule of M random projections."""

    def start(key, dim, classes):
        scale = dim**-0.5  # so that random features are of the size of features
        return Recursion(
            scale * jax.random.normal(key, (dim, projections)),
            jnp.eye(projections) / ridge,
            jnp.zeros((projections, classes)),
            jnp.zeros((classes,)),
        )

    def add(state, rows):
        # A row that does not exist is a row of zeros, which changes nothing.
        hidden = ranpac.project(state.projection, rows.features)
        own = frozen.one_hot(rows, len(state.counts))
        with jax.default_matmul_precision("highest"):
            pulled = state.inverse @ hidden.T  # f32[M,B]
            inner = jnp.eye(len(hidden)) + hidden @ pulled
            gain = jax.scipy.linalg.solve(inner, pulled.T, assume_a="pos").T
            wrong = own - hidden @ state.weights
            inverse = state.inverse - gain @ pulled.T
            return Recursion(
                state.projection,
                (inverse + inverse.T) / 2,
                state.weights + gain @ wrong,
                state.counts + own.sum(0),
            )

    def scores(state, features):
        hidden = ranpac.project(state.projection, features)
        found = jnp.matmul(hidden, state.weights, precision="highest")
        return frozen.known_only(found, state.counts)

    return frozen.Rule(start, add, scores)
