"""Measure how far embeddings moved, and whether an index of the old ones still works.

Functions of two arrays of features f32[N, D]: row i of both is the same example,
embedded before and after. All of them use only directions, as cosine search does.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxcl import core

_EXACT = lax.Precision.HIGHEST  # TF32 would swap neighbours
_unit = core.l2_normalize


def unit(rows: np.ndarray) -> np.ndarray:
    """Scale rows f32[N, D] to length 1, as NumPy does."""
    rows = np.asarray(rows, np.float32)
    return rows / np.maximum(np.linalg.norm(rows, axis=1, keepdims=True), 1e-12)


def _row_products(a, b):
    return jnp.dot(a, b.T, precision=_EXACT)


def mean_cosine(before: jax.Array, after: jax.Array) -> jax.Array:
    """Average the cosine between the two embeddings of each example, f32[].

    Args:
      before, after: f32[N, D], embeddings of the same images.
    """
    return jnp.mean(jnp.sum(_unit(before) * _unit(after), axis=1))


def linear_cka(before: jax.Array, after: jax.Array) -> jax.Array:
    """Compute linear CKA, f32[] in [0, 1] (Kornblith et al., ICML 2019).

    |A'B|^2 / (|A'A| |B'B|) of centred unit rows: 1 if one set of embeddings is the
    other one rotated and scaled.

    Args:
      before, after: f32[N, D], embeddings of the same images.
    """
    a, b = (_unit(x) - _unit(x).mean(axis=0) for x in (before, after))
    # Of norm 1, since fourth powers of small distances leave float32.
    a, b = (_unit(x.ravel()).reshape(x.shape) for x in (a, b))
    inner = [jnp.sum(_row_products(x.T, y.T) ** 2) for x, y in ((a, b), (a, a), (b, b))]
    return inner[0] / jnp.maximum(jnp.sqrt(inner[1] * inner[2]), 1e-12)


def find_rotation(before: jax.Array, after: jax.Array) -> jax.Array:
    """Find the orthogonal Q f32[D, D] that brings `after @ Q` nearest to `before`.

    Orthogonal Procrustes (Schönemann, 1966), of unit rows: with U S V' the singular
    value decomposition of after' before, Q = U V'.
    """
    products = _row_products(_unit(after).T, _unit(before).T)
    left, _, right = jnp.linalg.svd(products, full_matrices=False)
    return jnp.dot(left, right, precision=_EXACT)


def find_neighbours(
    queries: jax.Array, index: jax.Array, k: int, skip: jax.Array | None = None
) -> jax.Array:
    """Find the k rows of an index with the largest cosine to each query, i32[Q, k].

    Args:
      queries: f32[Q, D].
      index: f32[N, D], N > k.
      k: number of neighbours.
      skip: i32[Q], the row of the index that is the query itself and is left out.
    """
    cosines = _row_products(_unit(queries), _unit(index))
    if skip is not None:
        cosines = jnp.where(jnp.arange(len(index)) == skip[:, None], -jnp.inf, cosines)
    return lax.top_k(cosines, k)[1]


def mean_overlap(first: jax.Array, second: jax.Array) -> jax.Array:
    """Average the share of neighbours that two searches have in common, f32[].

    Args:
      first, second: i32[Q, k], rows that each search found for each query.
    """
    matches = first[:, :, None] == second[:, None, :]
    return jnp.mean(jnp.sum(matches, axis=(1, 2)) / first.shape[1])


def measure_drift(before: jax.Array, after: jax.Array, *, k: int = 10) -> dict:
    """Measure how an update changed embeddings, and searches among them.

    A search looks for the neighbours of each row among all other rows.

    Args:
      before, after: f32[N, D], N > 2 k, or the searches would be trivial.
      k: number of neighbours that a search returns.

    Returns:
      dict of f32[], where an overlap is the share of the neighbours of old queries in
      the old index that another search also finds:
      "cosine", "cka": as above.
      "aligned_cosine": of the odd rows, after the best rotation of the even rows.
      "overlap": new queries in an index of new embeddings.
      "index_overlap": new queries in the OLD index, which can be kept if this is high.
    """
    rows = jnp.arange(len(before))
    turn = find_rotation(before[::2], after[::2])
    rotated = jnp.dot(_unit(after[1::2]), turn, precision=_EXACT)
    old = find_neighbours(before, before, k, rows)
    return {
        "cosine": mean_cosine(before, after),
        "cka": linear_cka(before, after),
        "aligned_cosine": mean_cosine(before[1::2], rotated),
        "overlap": mean_overlap(find_neighbours(after, after, k, rows), old),
        "index_overlap": mean_overlap(find_neighbours(after, before, k, rows), old),
    }
