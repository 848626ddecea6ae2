"""Measure whether two views of an image lie together and images fill the sphere.

Wang & Isola, "Understanding Contrastive Representation Learning through Alignment and
Uniformity on the Hypersphere", ICML 2020, with alpha = 2 and t = 2. It reads no labels.

Departures: embeddings are the encoder's, in evaluation mode, of unit length. The views
come from the defaults of `augment.images.make`, so that runs with different
augmentations compare; they depend on the seed and on the place of an image alone.
Uniformity is measured on the first view; the released code averages both.
"""

import math
from collections.abc import Callable
from typing import Annotated

import jax
import jax.numpy as jnp

from jaxcl import core, schema
from jaxcl.data.augment import images as augment_images
from jaxcl.evals import embedding

_EXACT = jax.lax.Precision.HIGHEST  # TF32 would blur distances between near rows


def alignment(first: jax.Array, second: jax.Array) -> jax.Array:
    """Compute the mean squared distance between the unit rows of two views.

    Args:
      first, second: f32[N, D], embeddings of two views; scaled to length 1 here.
    """
    gap = embedding.unit_rows(first) - embedding.unit_rows(second)
    return jnp.mean(jnp.sum(gap**2, axis=1))


def uniformity(embeddings: jax.Array) -> jax.Array:
    """Compute log mean_{i<j} exp(-2 |u_i - u_j|^2) of unit rows.

    It is 0 if all rows are equal, and at least -8, for two opposite rows.

    Args:
      embeddings: f32[N, D], N >= 2; scaled to length 1 here.
    """
    unit = embedding.unit_rows(embeddings)
    count = len(unit)
    lengths = jnp.sum(unit**2, axis=1)  # 1, or 0 of rows of zeros
    products = jnp.dot(unit, unit.T, precision=_EXACT)
    squares = lengths[:, None] + lengths - 2 * products
    pairs = jnp.triu(jnp.exp(-2 * squares), k=1)
    return jnp.log(jnp.sum(pairs) / (count * (count - 1) / 2))


@schema.checked("config.evaluators.uniformity")
def make(
    parts: core.EvalParts,
    *,
    max_rows: Annotated[int, schema.Range(2, 8192)] = 1024,
) -> Callable:
    """Build the evaluator of alignment and uniformity.

    Args:
      parts: the parts of every evaluator; labels are not read.
      max_rows: most rows to embed, evenly spaced in the evaluation split, or without
        one in the train split.

    Returns:
      evaluate(state, task) -> core.Result without rows. Scalars: "alignment" and
      "uniformity", see these functions; lower is better for both.

    Raises:
      Refused: an option out of its range; fewer than 2 rows.
    """
    examples, rows = embedding.sample_rows(parts, "uniformity", max_rows, least=2)
    images = embedding.read_images(parts, examples, rows)
    augment = augment_images.make(size=parts.size, mean=parts.mean, std=parts.std)
    embed = embedding.make_views_embedder(parts, augment, 2)

    def evaluate(state, task: int) -> core.Result:
        first, second = embed(state, images)
        scalars = {
            "alignment": float(alignment(first, second)),
            "uniformity": float(uniformity(first)),
        }
        finite = all(map(math.isfinite, scalars.values()))
        warnings = () if finite else (embedding.NOT_FINITE,)
        return core.Result({}, scalars, warnings)

    return evaluate
