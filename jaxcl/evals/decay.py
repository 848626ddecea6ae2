"""What a network loses of earlier tasks, measured without labels.

SOLAR (arXiv 2604.10586) watches the features of a stream by two measures: Deviation,
how far the features of an image vary under augmentation, and Overlap, how far those of
different images intersect. The text of it that we have gives no formula, so that all of
this is OURS. Let u_i and v_i be the unit features of two views of image i:
- deviation, the mean of 1 - u_i . v_i;
- overlap, the mean of max(0, u_i . u_j) over pairs of different images;
- retrieved, of a task's held-out images the share for which, among the second views of
  the task's images, v_i is nearest to u_i;
- clusters, of a task's held-out images the agreement beyond chance of both views, as
  Cohen's kappa: the first views are cut into clusters, and a second view falls into
  that of the nearest centre.

The last two are higher where the network tells the images of a task apart. As they are
measured of every task after each, their forgetting is what it can no longer tell apart.
"""

from collections.abc import Callable
from typing import Annotated

import numpy as np

from jaxcl import core, schema
from jaxcl.evals import features as features_lib

_ROUNDS = 20  # of k-means


def unit(features: np.ndarray) -> np.ndarray:
    """Scale rows to length 1, f64[N, D]; rows of zeros stay."""
    x = np.asarray(features, np.float64)
    return x / np.maximum(np.linalg.norm(x, axis=1, keepdims=True), 1e-12)


def deviation(first: np.ndarray, second: np.ndarray) -> float:
    """Average 1 - u . v over images, from 0 to 2.

    Args:
      first, second: f64[N, D], unit rows, of two views of each image.
    """
    return float(1 - np.mean(np.sum(first * second, axis=1)))


def overlap(rows: np.ndarray, others: np.ndarray | None = None) -> float:
    """Average max(0, u . w) over pairs, from 0 to 1.

    Args:
      rows: f64[N, D], unit rows.
      others: f64[M, D], unit rows of other images; None: pairs are of different `rows`.
    """
    cosines = np.maximum(rows @ (rows if others is None else others).T, 0)
    if others is not None:
        return float(cosines.mean())
    count = len(rows)
    return float((cosines.sum() - np.trace(cosines)) / (count * (count - 1)))


def retrieved(first: np.ndarray, second: np.ndarray) -> float:
    """Count the share of images whose second view is nearest to their first.

    Args:
      first, second: f64[N, D], unit rows. Of equal ones the first counts as nearest.
    """
    nearest = np.argmax(first @ second.T, axis=1)
    return float(np.mean(nearest == np.arange(len(first))))


def clusters(
    first: np.ndarray, second: np.ndarray, count: int, rng: np.random.Generator
) -> float:
    """Agreement beyond chance of the clusters into which both views fall, 0 to 1.

    It is (p - q) / (1 - q), where p is the share of images whose views fall into one
    cluster, and q that which would if they fell independently; 0 where it is negative
    or all fall into one cluster.

    Args:
      first, second: f64[N, D], unit rows.
      count: clusters; as many as there are rows, if these are fewer.
      rng: draws the centres that k-means starts from.
    """
    centres = centres_of(first, count, rng)
    owners = [np.argmax(x @ centres.T, axis=1) for x in (first, second)]
    shares = [np.bincount(x, minlength=len(centres)) / len(x) for x in owners]
    chance = float(np.sum(shares[0] * shares[1]))
    if chance >= 1:
        return 0.0
    same = float(np.mean(owners[0] == owners[1]))
    return max((same - chance) / (1 - chance), 0.0)


def centres_of(rows: np.ndarray, count: int, rng: np.random.Generator) -> np.ndarray:
    """Centres of clusters by spherical k-means, f64[K, D], unit rows.

    It starts from rows, each drawn in proportion to its distance (1 - cosine) from the
    nearest centre before, and ends when no row changes its cluster. A cluster without
    rows keeps its centre.

    Args:
      rows: f64[N, D], unit rows.
      count: K; fewer, if there are not so many different rows.
      rng: of the draws.
    """
    centres = rows[[rng.integers(len(rows))]]
    while len(centres) < count:
        far = 1 - np.max(rows @ centres.T, axis=1)
        far = np.where(far > 1e-9, far, 0)
        if not far.any():
            break
        drawn = rng.choice(len(rows), p=far / far.sum())
        centres = np.concatenate([centres, rows[[drawn]]])
    owner = np.full(len(rows), -1)
    for _ in range(_ROUNDS):
        before, owner = owner, np.argmax(rows @ centres.T, axis=1)
        if np.array_equal(before, owner):
            break
        sums = np.zeros_like(centres)
        np.add.at(sums, owner, rows)
        some = np.linalg.norm(sums, axis=1, keepdims=True) > 1e-12
        centres = np.where(some, unit(sums), centres)
    return centres


@schema.checked("config.evaluators.decay")
def make(
    parts: core.EvalParts,
    *,
    features: features_lib.Features = "embedding",
    max_rows: Annotated[int, schema.Range(2, 8192)] = 1024,
    count: Annotated[int, schema.Range(least=2)] = 10,
) -> Callable:
    """Deviation, overlap, and which images of each task are told apart.

    Args:
      parts: labels are not read here; the scenario may have cut the tasks by them.
      features: "embedding" of the encoder, or "projection", which the loss compares.
      max_rows: held-out rows, in equal shares from all tasks, evenly spaced in each;
        and as many stored ones.
      count: clusters of each task.

    Returns:
      evaluate(state, task) -> core.Result. Rows per task, nan for a task with fewer
      than 2 held-out rows: "retrieved" and "clusters". Scalars: "deviation" and
      "overlap" of held-out rows of the tasks met; with a method that stores images,
      "stored_deviation" of these, and "stored_overlap" of held-out rows of the tasks
      met with stored ones.

    Raises:
      ValueError: an option out of its range; no evaluation rows; no projection.
    """
    parts = features_lib.reading(parts, "decay", features)
    examples = parts.stream.evaluation
    features_lib.need_rows(examples, "decay")
    tests = [np.asarray(task.test) for task in parts.stream.tasks]
    most = max(max_rows // len(tests), 2)
    chosen = [features_lib.evenly(rows, most) for rows in tests]
    images = [features_lib.images_of(parts, examples, rows) for rows in chosen]
    ends = np.cumsum([len(rows) for rows in chosen])
    embed = features_lib.two_views(parts)
    stored = features_lib.stored(parts, "image")

    def evaluate(state, task: int) -> core.Result:
        views = embed(state, np.concatenate(images))
        kept, of_kept = stored(state).get("image", ()), None
        if len(kept):
            of_kept = embed(state, features_lib.evenly(kept, max_rows))
        finite = np.isfinite(views).all() and np.isfinite(of_kept or 0).all()
        first, second = (np.split(unit(view), ends[:-1]) for view in views)
        rows = {"retrieved": [], "clusters": []}
        for pair in zip(first, second, strict=True):  # both views of a task's rows
            enough = finite and len(pair[0]) > 1
            rng = np.random.default_rng(parts.seed)
            rows["retrieved"].append(retrieved(*pair) if enough else np.nan)
            rows["clusters"].append(clusters(*pair, count, rng) if enough else np.nan)
        # Tasks may share their rows, and an image is no other beside itself.
        once = np.unique(np.concatenate(chosen[: task + 1]), return_index=True)[1]
        met = [np.concatenate(view[: task + 1])[once] for view in (first, second)]
        scalars = {"deviation": deviation(*met), "overlap": overlap(met[0])}
        if of_kept is not None:
            of_kept = [unit(view) for view in of_kept]
            scalars["stored_deviation"] = deviation(*of_kept)
            scalars["stored_overlap"] = overlap(met[0], of_kept[0])
        warnings = () if finite else (features_lib.NOT_FINITE,)
        return core.Result(
            {name: np.array(row) for name, row in rows.items()}, scalars, warnings
        )

    return evaluate
