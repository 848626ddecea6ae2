"""Draw a t-SNE of test rows (van der Maaten and Hinton, JMLR 2008)."""

import os
from typing import Annotated

import jax
import numpy as np
from etils import epath

from jaxcl import core, plots, schema, sharding
from jaxcl.data import stream
from jaxcl.evals import embedding

_FEWEST = 5  # points of a picture


def draw_rows(labels: np.ndarray, count: int, seed: int) -> np.ndarray:
    """Draw `count` rows, each class in proportion to its size (within one row).

    Returns:
      i64[min(count, n)], increasing.
    """
    noise = np.random.default_rng(seed).random(len(labels))
    by_class = np.lexsort((noise, labels))
    count = min(count, len(labels))
    # Every (n / count)-th row of the list, which is sorted by class.
    steps = ((np.arange(count) + 0.5) * len(labels) / count).astype(np.int64)
    return np.sort(by_class[steps])


@schema.checked("config.evaluators.tsne")
def make(
    parts: core.EvalParts,
    *,
    directory: str | os.PathLike,
    max_points: Annotated[int, schema.Range(least=_FEWEST)] = 1000,
    perplexity: schema.Positive = 30.0,
) -> core.Evaluator:
    """Build the evaluator that draws a t-SNE of test rows, `tsne_task{t}.png`.

    Args:
      parts: the parts of every evaluator.
      directory: the folder for the pictures; process 0 makes it if it is missing.
      max_points: rows to embed, each class in proportion, drawn by the run's seed; the
        same for all tasks.
      perplexity: perplexity, lowered to (points - 1) / 3 if it is larger.

    Returns:
      evaluate(state, task) -> core.Result, which is empty.

    Raises:
      Refused: an option out of its range; no labels; no evaluation split, or fewer
        than 5 rows in it.
    """
    examples, name = parts.stream.evaluation, parts.stream.dataset.name
    embedding.check_labels(parts, "tsne", examples)  # no other is drawn
    count = stream.count_rows(examples)
    need = f"at least {_FEWEST} evaluation rows; {name} has {count}"
    embedding.refuse_unless(count >= _FEWEST, "tsne", need)
    chosen = draw_rows(examples.label, max_points, parts.seed)
    embed = embedding.make_embedder(parts, examples, rows=chosen)

    def evaluate(state, task: int) -> core.Result:
        features = sharding.copy_to_host(embed(state))
        if not np.isfinite(features).all():
            return core.Result({}, {}, (embedding.NOT_FINITE,))
        if jax.process_index() == 0:
            folder = epath.Path(directory)
            folder.mkdir(parents=True, exist_ok=True)
            plots.scatter(
                project(features, perplexity=perplexity, seed=parts.seed),
                examples.label[chosen],
                folder / f"tsne_task{task + 1}.png",
                title=f"t-SNE after task {task + 1}",
                class_names=parts.stream.dataset.class_names,
            )
        return core.Result({}, {})

    return core.Evaluator(evaluate, last_only=True)


def project(features: np.ndarray, *, perplexity: float, seed: int) -> np.ndarray:
    """Project finite features f32[n, D] to f32[n, 2]."""
    from sklearn import manifold  # takes a second, and few runs need it

    perplexity = min(perplexity, (len(features) - 1) / 3)
    # Features that have all collapsed to one point have no principal components.
    differ = features.shape[1] > 1 and np.ptp(features, axis=0).any()
    init = "pca" if differ else "random"
    tsne = manifold.TSNE(perplexity=perplexity, init=init, random_state=seed)
    return tsne.fit_transform(features)
