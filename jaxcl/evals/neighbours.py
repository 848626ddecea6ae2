"""Draw images beside their nearest neighbours in feature space.

No labels are needed. Each neighbour is drawn below its cosine similarity, as figures of
retrieved images do since Wu et al., "Unsupervised Feature Learning via Non-Parametric
Instance Discrimination", CVPR 2018.
"""

import os
from typing import Annotated

import jax
import numpy as np
from etils import epath

from jaxcl import core, plots, schema
from jaxcl.evals import embedding


def find_nearest(features: np.ndarray, queries: np.ndarray, k: int):
    """Find the k rows most similar to each query; a query is not its own neighbour.

    Args:
      features: f32[n, D]; rows of zeros are similar to none.
      queries: i64[q], rows of `features`.
      k: at most n - 1.

    Returns:
      rows: i64[q, k], the most similar first; of equal ones the earlier row.
      similarities: f64[q, k], their cosines.
    """
    features = np.asarray(features, np.float64)
    lengths = np.linalg.norm(features, axis=1, keepdims=True)
    rows = features / np.where(lengths > 0, lengths, 1.0)
    cosines = rows[queries] @ rows.T
    masked = cosines.copy()
    masked[np.arange(len(queries)), queries] = -np.inf
    neighbours = np.argsort(-masked, axis=1, kind="stable")[:, :k]
    return neighbours, np.take_along_axis(cosines, neighbours, axis=1)


@schema.checked("config.evaluators.neighbours")
def make(
    parts: core.EvalParts,
    *,
    directory: str | os.PathLike,
    queries: Annotated[int, schema.Range(1, 50)] = 8,
    k: Annotated[int, schema.Range(1, 20)] = 7,
    max_rows: Annotated[int, schema.Range(2, 8192)] = 1024,
) -> core.Evaluator:
    """Build the evaluator that draws neighbours in `neighbours_task{t}.png`.

    t is the number of the task just finished, from 1.

    Args:
      parts: the parts of every evaluator; labels are not read.
      directory: the folder for the pictures; process 0 makes it if it is missing.
      queries: number of images whose neighbours are drawn, a row each; evenly spaced,
        and the same after every task.
      k: neighbours of each, the nearest first.
      max_rows: number of images to search, evenly spaced rows of the evaluation split;
        without one, of the train split. With fewer than k + 1 images all others are
        drawn.

    Returns:
      evaluate(state, task) -> core.Result, which is empty.

    Raises:
      Refused: an option out of its range; a set of graphs; fewer than 2 images.
    """
    examples, rows = embedding.sample_rows(parts, "neighbours", max_rows, least=2)
    is_images = examples.graphs is None
    embedding.refuse_unless(is_images, "neighbours", "images, not graphs")
    images = embedding.read_images(parts, examples, rows)
    query_rows = embedding.pick_evenly(np.arange(len(rows)), queries)
    embed = embedding.make_embedder(parts, examples, rows=rows)

    def evaluate(state, task: int) -> core.Result:
        features = np.asarray(jax.device_get(embed(state)))
        if not np.isfinite(features).all():
            return core.Result({}, {}, (embedding.NOT_FINITE,))
        chosen, cosines = find_nearest(features, query_rows, min(k, len(rows) - 1))
        if jax.process_index() == 0:
            folder = epath.Path(directory)
            folder.mkdir(parents=True, exist_ok=True)
            plots.neighbours(
                images[query_rows],
                images[chosen],
                cosines,
                folder / f"neighbours_task{task + 1}.png",
                title=f"Nearest neighbours after task {task + 1}",
            )
        return core.Result({}, {})

    return core.Evaluator(evaluate, last_only=True)
