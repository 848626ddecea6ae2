"""A t-SNE picture of the evaluation split (van der Maaten and Hinton, JMLR 2008)."""

from collections.abc import Callable

import jax
import numpy as np
from etils import epath

from jaxcl import core, plots, sharding
from jaxcl.data import stream
from jaxcl.evals import features as features_lib

LAST_ONLY = True  # unless the entry of the config says otherwise, see evaluators.py


def choose(labels: np.ndarray, count: int, seed: int) -> np.ndarray:
    """`count` rows, each class in proportion to its size (within one row).

    Returns:
      i64[min(count, n)], increasing.
    """
    noise = np.random.default_rng(seed).random(len(labels))
    by_class = np.lexsort((noise, labels))
    count = min(count, len(labels))
    # Every (n / count)-th row of a list sorted by class.
    steps = ((np.arange(count) + 0.5) * len(labels) / count).astype(np.int64)
    return np.sort(by_class[steps])


def make(parts, *, directory, max_points=1000, perplexity=30.0) -> Callable:
    """Draw `tsne_task{t}.png`, t = number of the task from 0.

    Args:
      parts: core.EvalParts.
      directory: where the pictures go; made if missing, by process 0.
      max_points: draws this many rows, chosen by the run's seed, the same for all
        tasks.
      perplexity: lowered to (points - 1) / 3 where there are few.

    Returns:
      evaluate(state, task) -> core.Result, which is empty.

    Raises:
      ValueError: an option out of its range; no evaluation split, or fewer than 5
        rows in it; no labels.
    """
    whole = isinstance(max_points, int) and max_points >= 5
    features_lib.require("tsne.max_points", max_points, whole, "a whole number >= 5")
    features_lib.require("tsne.perplexity", perplexity, perplexity > 0, "> 0")
    features_lib.check_labels(parts, "tsne")
    examples, dataset = parts.stream.evaluation, parts.stream.dataset
    if stream.size(examples) < 5:
        raise ValueError(
            f"config.evaluators.tsne: {dataset.name} has {stream.size(examples)} "
            "evaluation rows, a picture needs at least 5"
        )
    chosen = choose(examples.label, max_points, parts.seed)
    embed = features_lib.make(parts, examples, rows=chosen)

    def evaluate(state, task: int) -> core.Result:
        features = sharding.fetch(embed(state))
        if jax.process_index() == 0:
            folder = epath.Path(directory)
            folder.mkdir(parents=True, exist_ok=True)
            plots.scatter(
                project(features, perplexity=perplexity, seed=parts.seed),
                examples.label[chosen],
                folder / f"tsne_task{task}.png",
                title=f"t-SNE after task {task + 1}",
                class_names=dataset.class_names,
            )
        return core.Result({}, {})

    return evaluate


def project(features: np.ndarray, *, perplexity: float, seed: int) -> np.ndarray:
    """Features f32[n, D] as points f32[n, 2]."""
    from sklearn import manifold  # takes a second, and few runs draw

    perplexity = min(perplexity, (len(features) - 1) / 3)
    # Features that have collapsed to a point have no principal components.
    init = (
        "pca" if features.shape[1] > 1 and np.ptp(features, axis=0).any() else "random"
    )
    tsne = manifold.TSNE(perplexity=perplexity, init=init, random_state=seed)
    return tsne.fit_transform(features)
