"""Test whether two samples of embeddings come from one distribution.

Source: Gretton et al., "A kernel two-sample test", JMLR 13, 2012. The squared maximum
mean discrepancy with a Gaussian kernel on rows of length 1, whose width is the median
distance. The p-value is of permutations, so it is exact for any size.
"""

from typing import NamedTuple

import numpy as np


class Difference(NamedTuple):
    """The maximum mean discrepancy of two samples, and its p-value."""

    squared_mmd: float  # 0 for equal samples
    p_value: float
    witness: np.ndarray  # f64[M], of the second sample; high where it alone is dense
    far: float  # share of the second sample that lies farther from the first
    # than 95 % of the first lie from their own nearest row


def compare_samples(
    first: np.ndarray, second: np.ndarray, *, permutations: int = 999, seed: int = 0
) -> Difference:
    """Compare two samples.

    Args:
      first: f[N, D], N > 1.
      second: f[M, D], M > 0.
      permutations: the least p-value is 1 / (permutations + 1).
      seed: seed of the permutations.
    """
    rows = np.concatenate([first, second]).astype(np.float64)
    rows /= np.maximum(np.linalg.norm(rows, axis=1, keepdims=True), 1e-12)
    squares = np.maximum(2 - 2 * rows @ rows.T, 0)
    total, count = len(rows), len(first)
    pairs = squares[np.triu_indices(total, 1)]
    width = np.median(pairs[pairs > 1e-12]) if (pairs > 1e-12).any() else 1.0
    kernel = np.exp(-squares / width)
    weights = np.full(total, -1 / (total - count))
    weights[:count] = 1 / count
    rng = np.random.default_rng(seed)
    drawn = np.stack(
        [weights, *(rng.permutation(weights) for _ in range(permutations))]
    )
    values = np.einsum("pi,pi->p", drawn @ kernel, drawn)
    # Rounding must not make a permutation smaller than its equal.
    reached = (values[1:] >= values[0] - 1e-12).sum()
    witness = -(kernel @ weights)[count:]
    np.fill_diagonal(squares, np.inf)
    threshold = np.quantile(squares[:count, :count].min(axis=1), 0.95)
    far = (squares[count:, :count].min(axis=1) > threshold + 1e-12).mean()
    p_value = (1 + reached) / (1 + permutations)
    return Difference(float(values[0]), float(p_value), witness, float(far))
