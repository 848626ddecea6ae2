"""Order stored vectors by how wrong a map will place them.

Jaeckle et al., "FastFill: Efficient Compatible Model Update", ICLR 2023
(arXiv 2303.04766), embed the worst predicted vectors again first. Departure: the error
is not predicted by a trained network, but by the fitted pairs nearest to a vector.
"""

from typing import Any, NamedTuple

import numpy as np

from jaxcl.index import drift, maps

_NEAREST = 10


class Reference(NamedTuple):
    """Pairs with the error that a map makes where it was not fitted to them."""

    rows: np.ndarray  # f32[N, D], of length 1, by the encoder to map from
    errors: np.ndarray  # f32[N], 1 - cosine


def make_reference(source: Any, target: Any, fitted: maps.FittedMap) -> Reference:
    """Measure the error of a map at each pair, fitted to the other half of the pairs.

    Args:
      source: f32[N, D], embeddings by the encoder to map from.
      target: f32[N, E], embeddings of the same images by the other encoder.
      fitted: the kind of map and its options.
    """
    source, target = drift.unit(source), drift.unit(target)
    errors = np.empty(len(source), np.float32)
    for first in (0, 1):
        rest, half = slice(1 - first, None, 2), slice(first, None, 2)
        arrays = maps.fit(source[rest], target[rest], fitted.kind, fitted.options)
        mapped = maps.map_features(arrays, source[half])
        errors[half] = 1 - np.einsum("nd,nd->n", mapped, target[half])
    return Reference(source, errors)


def predict_errors(vectors: np.ndarray, reference: Reference) -> np.ndarray:
    """Predict the error of each vector: the mean of its nearest pairs' errors, f32[N].

    Args:
      vectors: f32[N, D], by the encoder to map from.
      reference: result of `make_reference`.
    """
    k = min(_NEAREST, len(reference.rows))
    cosines = drift.unit(vectors) @ reference.rows.T
    places = np.argpartition(-cosines, k - 1, axis=1)[:, :k]
    return reference.errors[places].mean(axis=1)
