"""Evaluate frozen features by a support vector machine with an RBF kernel.

Source: Ji et al., "Unbiased and Efficient Self-Supervised Incremental Contrastive
Learning" (ICL), WSDM 2023, section 5, after GraphCL (You et al., NeurIPS 2020). The
paper names the classifier alone; kernel, folds and penalties come from the released
code: nested cross-validation with 5 outer folds (GraphCL reports 10) and 5 inner ones.

A machine is trained and tested on rows of the same subset of the train split, with the
present features. So "old" does not measure forgetting, unlike the accuracy of a
classifier trained earlier.

Departures: the outer folds are drawn from the run's seed, while the released code draws
them again each time. The released code embeds one random crop of each image; here
images are not augmented.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Annotated, Any, Literal

import numpy as np

from jaxcl import core, schema, sharding
from jaxcl.evals import embedding, tsne

_Folds = Annotated[int, schema.Range(least=2)]
_Penalties = Annotated[tuple[schema.Positive, ...], schema.Entries()]
_Subset = Literal["all", "old", "new"]
_Subsets = Annotated[tuple[_Subset, ...], schema.Entries(once=True)]


@schema.checked("config.evaluators.svm")
@schema.debug(folds=2, inner_folds=2, penalties=(1.0,), max_rows=200)
def make(
    parts: core.EvalParts,
    *,
    folds: _Folds = 5,
    inner_folds: _Folds = 5,
    penalties: _Penalties = (1e-3, 1e-2, 1e-1, 1.0, 1e1, 1e2, 1e3),
    subsets: _Subsets = ("all", "old", "new"),
    max_rows: schema.Count | None = None,
    batch_size: schema.Count = 256,
) -> Callable:
    """Build the evaluator by a support vector machine on the train rows so far.

    Args:
      parts: core.EvalParts; the evaluation split is not read.
      folds: number of test folds, stratified and shuffled by the run's seed. Each row
        is tested once, by a machine trained on the other folds.
      inner_folds: number of folds into which the other folds are divided to choose the
        penalty.
      penalties: values of C to choose from; the first of equally good ones.
      subsets: subsets to measure: "all" rows of the tasks up to the present one, "old"
        rows of the tasks before it, "new" rows of the present task.
      max_rows: most rows of a subset, each class in proportion, drawn by the run's
        seed; None: all. Time and memory grow with the square of the rows.
      batch_size: rows that are embedded at a time.

    Returns:
      evaluate(state, task) -> core.Result without rows. Scalars: "all", "old", "new",
      mean accuracy over the folds, in [0, 1]. The first task has no "old" rows, and its
      "new" rows are all: both scalars are left out. So is a subset with a single class
      or with a feature that is not finite.

    Raises:
      Refused: an option out of its range; rows without a label; a class with too
        few rows for the folds; nothing to measure in any task.
    """
    embedding.check_learnable(parts.stream)
    enough = max_rows is None or max_rows >= folds
    allowed = f"at least {folds} (folds), or None"
    embedding.require("svm.max_rows", max_rows, enough, allowed)
    dataset, tasks = parts.stream.dataset, range(len(parts.stream.tasks))
    _check_labels(dataset, _join_rows(task.train.rows for task in parts.stream.tasks))
    settings: dict[str, Any] = {"folds": folds, "inner_folds": inner_folds}
    chosen = [
        _choose_rows(parts, subsets, max_rows, task, **settings) for task in tasks
    ]
    used = _join_rows(rows for of_task in chosen for rows in of_task.values())
    allowed = f"of rows of two classes; none of {len(tasks)} tasks has such"
    embedding.require("svm.subsets", subsets, len(used), allowed)
    embed = embedding.make_embedder(
        parts, dataset.train, rows=used, batch_size=batch_size
    )
    settings |= {"penalties": penalties, "seed": parts.seed}

    def evaluate(state, task: int) -> core.Result:
        scalars, warnings = {}, []
        # Without a subset to judge, nothing is worth embedding.
        features = sharding.copy_to_host(embed(state)) if chosen[task] else None
        for name, rows in chosen[task].items():
            subset = features[np.searchsorted(used, rows)]
            if np.isfinite(subset).all():
                labels = dataset.train.label[rows]
                scalars[name] = nested_accuracy(subset, labels, **settings)
            else:
                warnings.append(f"{name}: {embedding.NOT_FINITE}")
        return core.Result({}, scalars, tuple(warnings))

    return evaluate


def nested_accuracy(
    features: np.ndarray,
    labels: np.ndarray,
    *,
    folds: int,
    inner_folds: int,
    penalties: Sequence[float],
    seed: int,
) -> float:
    """Compute the accuracy of nested cross-validation, averaged over outer folds.

    The kernel is k(x, y) = exp(-|x - y|^2 / (D v)), where v is the variance of all
    entries of the training rows: scikit-learn's gamma="scale".

    Args:
      features: f[n, D], not scaled.
      labels: i32[n], of at least two classes.
      folds, inner_folds, penalties: options of `make`.
      seed: seed that shuffles the outer folds; inner folds are not shuffled.
    """
    from sklearn import model_selection, svm  # takes a second, and few runs need it

    outer = model_selection.StratifiedKFold(folds, shuffle=True, random_state=seed)
    inner = model_selection.StratifiedKFold(inner_folds)
    grid = {"C": [*penalties]}
    search = model_selection.GridSearchCV(svm.SVC(), grid, cv=inner)
    features = np.asarray(features, np.float64)
    shares = model_selection.cross_val_score(search, features, labels, cv=outer)
    return float(shares.mean())


def _join_rows(rows: Iterable[np.ndarray]) -> np.ndarray:
    """List the rows of several arrays, each once, increasing."""
    return np.unique(np.concatenate([np.zeros(0, np.int64), *rows]))


def _choose_rows(parts, subsets, max_rows, task, **folds) -> dict[str, np.ndarray]:
    """Choose the rows of each subset that is measured after a task."""
    label = parts.stream.dataset.train.label
    tasks = {"all": range(task + 1), "old": range(task), "new": [task]}
    chosen = {}
    for name in subsets if task else {"all"} & {*subsets}:
        rows = _join_rows(parts.stream.tasks[t].train.rows for t in tasks[name])
        classes = np.unique(label[rows])
        if len(classes) < 2:
            continue
        if max_rows is not None:
            rows = rows[tsne.draw_rows(label[rows], max_rows, parts.seed)]
        subset = f"the {name!r} rows of task {task} of {parts.stream.dataset.name}"
        _check_classes(label[rows], classes, subset, **folds)
        chosen[name] = rows
    return chosen


def _check_labels(dataset, rows):
    """Refuse tasks with rows without a label."""
    unknown = int((dataset.train.label[rows] < 0).sum())
    need = "a label for every train row of a task: "
    need += f"{unknown} of {len(rows)} rows of {dataset.name} have none (-1)"
    embedding.refuse_unless(not unknown, "svm", need)


def _check_classes(labels, classes, subset, *, folds, inner_folds):
    """Refuse a class that is missing from some fold, in training or in the test.

    At most ceil(n / folds) of a class's n rows are in one outer fold; the others must
    suffice for one row in each inner fold.
    """
    # n - ceil(n / folds) = floor(n (folds - 1) / folds) is at least inner_folds from:
    least = max(folds, -(-inner_folds * folds // (folds - 1)))
    for label in classes:
        count = int((labels == label).sum())
        need = f"with inner_folds={inner_folds!r} {least} rows of each class; "
        need += f"of {subset} only {count} are of class {label}"
        advice = "choose fewer folds or inner_folds, more max_rows, or other subsets"
        embedding.refuse_unless(count >= least, f"svm.folds={folds!r}", need, advice)
