"""Support vector machine with an RBF kernel on frozen features.

Source: Ji et al., "Unbiased and Efficient Self-Supervised Incremental Contrastive
Learning" (ICL), WSDM 2023, section 5, after GraphCL (You et al., NeurIPS 2020). The
paper names the classifier alone; kernel, folds and penalties are those of the released
code: nested cross-validation with 5 outer folds (GraphCL reports 10) and 5 inner ones.

A machine is trained and tested on rows of one subset of the train split, by the
features as they are now: "old" is no measure of forgetting, as the accuracy of an old
classifier would be.

Departures: the outer folds are drawn from the run's seed, the released code draws them
anew each time; it embeds one random crop of each image, here images are not augmented.
"""

import functools
import itertools
import math
import time
from collections.abc import Callable, Sequence

import numpy as np

from jaxcl import core, sharding
from jaxcl.evals import features as features_lib
from jaxcl.evals import tsne

SUBSETS = ("all", "old", "new")


def make(
    parts: core.EvalParts,
    *,
    folds: int = 5,
    inner_folds: int = 5,
    penalties: Sequence[float] = (1e-3, 1e-2, 1e-1, 1.0, 1e1, 1e2, 1e3),
    subsets: Sequence[str] = ("all", "old", "new"),
    max_rows: int | None = None,
    batch_size: int = 256,
) -> Callable:
    """Accuracy of a support vector machine on the train rows met so far.

    Args:
      parts: core.EvalParts; no evaluation split is read.
      folds: of the test, stratified and shuffled by the run's seed. Each row is
        tested once, by a machine that the other folds trained.
      inner_folds: of the choice of the penalty, within those other folds.
      penalties: C to choose from; of equally good ones the first.
      subsets: which are measured: "all" rows of the tasks up to the present one,
        "old" ones, of the tasks before it, "new" ones, of the present task.
      max_rows: as many rows of a subset at most, each class in proportion, by the
        run's seed; None: all. Time and memory grow with the square of the rows.
      batch_size: rows that are embedded at a time.

    Returns:
      evaluate(state, task) -> core.Result without rows. Scalars: "all", "old", "new",
      mean accuracy over the folds, in [0, 1]; "seconds". In the first task "old" has
      no rows and "new" has the same as "all": both are left out. So is a subset of
      one class alone, and one with a feature that is not finite.

    Raises:
      ValueError: an option out of its range; rows without a label; a class with too
        few rows for the folds; nothing to measure in any task.
    """
    subsets, penalties = _listed(subsets), _listed(penalties)
    _check(folds, inner_folds, penalties, subsets, max_rows, batch_size)
    _check_labels(parts)
    train = parts.stream.dataset.train
    plan = functools.partial(
        _chosen, parts, subsets, max_rows, folds=folds, inner_folds=inner_folds
    )
    chosen = [plan(task) for task in range(_tasks(parts))]
    used = _used(parts, subsets, chosen)
    embed = features_lib.make(parts, train, rows=used, batch_size=batch_size)
    measure = functools.partial(
        accuracy,
        folds=folds,
        inner_folds=inner_folds,
        penalties=penalties,
        seed=parts.seed,
    )

    def evaluate(state, task: int) -> core.Result:
        began, scalars = time.monotonic(), {}
        # Without a subset to judge, nothing is worth embedding.
        features = sharding.fetch(embed(state)) if chosen[task] else None
        for name, rows in chosen[task].items():
            mine = features[np.searchsorted(used, rows)]
            if np.isfinite(mine).all():
                scalars[name] = measure(mine, train.label[rows])
        scalars["seconds"] = time.monotonic() - began
        return core.Result({}, scalars)

    return evaluate


def _used(parts, subsets, chosen) -> np.ndarray:
    """Every row that any task's evaluation reads, each once, increasing.

    Args:
      chosen: the subsets of each task, see `_chosen`.
    """
    rows = list(itertools.chain(*(of_task.values() for of_task in chosen)))
    features_lib.require(
        "svm.subsets",
        subsets,
        rows,
        f"able to measure something: of {parts.stream.dataset.name}, cut into "
        f"{_tasks(parts)} tasks, none has rows of two classes in any task",
    )
    return np.unique(np.concatenate(rows))


def accuracy(
    features, labels, *, folds: int, inner_folds: int, penalties, seed: int
) -> float:
    """Accuracy of nested cross-validation, a mean over the outer folds.

    The kernel is k(x, y) = exp(-|x - y|^2 / (D v)), where v is the variance of all
    numbers of the rows that train: scikit-learn's gamma="scale". Squared distances are
    computed once and each kernel serves all penalties; results are those of
    GridSearchCV over SVC within StratifiedKFold, at less than half the time for 1,100
    rows of 64 features.

    Args:
      features: f[n, D], as they are: no scaling.
      labels: i32[n], of two classes at least.
      folds, inner_folds, penalties: see `make`.
      seed: shuffles the outer folds; the inner ones are not shuffled.
    """
    from sklearn import model_selection  # takes a second, and few runs want it

    features, labels = np.asarray(features, np.float64), np.asarray(labels)
    squares = _squared_distances(features)
    kernels = _kernels(features, squares)
    outer = model_selection.StratifiedKFold(folds, shuffle=True, random_state=seed)
    inner = model_selection.StratifiedKFold(inner_folds)
    shares = []
    for train, test in outer.split(features, labels):
        scores = np.zeros((len(penalties), inner_folds))
        for fold, parts in enumerate(inner.split(features[train], labels[train])):
            fit, held = (train[at] for at in parts)
            scores[:, fold] = _scores(kernels(fit, held), labels, fit, held, penalties)
        best = penalties[int(scores.mean(axis=1).argmax())]
        shares += _scores(kernels(train, test), labels, train, test, [best])
    return float(np.mean(shares))


def _scores(kernels, labels, train, test, penalties) -> list:
    """Accuracy on the test rows of one machine for each penalty."""
    from sklearn import svm

    found = []
    for penalty in penalties:
        machine = svm.SVC(C=penalty, kernel="precomputed")
        machine.fit(kernels[0], labels[train])
        found.append((machine.predict(kernels[1]) == labels[test]).mean())
    return found


def _squared_distances(features) -> np.ndarray:
    """|x - y|^2 of all pairs, f64[n, n]."""
    # Distances do not change, but rounding does: far from 0 it would dominate.
    centred = features - features.mean(axis=0)
    lengths = (centred**2).sum(axis=1)
    found = lengths[:, None] + lengths - 2.0 * centred @ centred.T
    return np.maximum(found, 0.0)


def _kernels(features, squares) -> Callable:
    """(train rows, test rows) -> kernels among the first, and of second with first."""

    def kernels(train, test):
        variance = features[train].var()
        gamma = 1.0 / (features.shape[1] * variance) if variance else 1.0
        pairs = (train, train), (test, train)
        return [np.exp(-gamma * squares[np.ix_(*pair)]) for pair in pairs]

    return kernels


def _tasks(parts) -> int:
    return len(parts.stream.tasks)


def _rows(parts, tasks) -> np.ndarray:
    """Train rows of several tasks, each once, increasing."""
    rows = [parts.stream.tasks[t].train.rows for t in tasks]
    return np.unique(np.concatenate([np.zeros(0, np.int64), *rows]))


def _chosen(parts, subsets, max_rows, task, **folds) -> dict[str, np.ndarray]:
    """The rows of each subset that is measured after a task."""
    label = parts.stream.dataset.train.label
    of = {"all": range(task + 1), "old": range(task), "new": [task]}
    found = {}
    for name in subsets if task else {"all"} & {*subsets}:
        rows = _rows(parts, of[name])
        classes = np.unique(label[rows])
        if len(classes) < 2:
            continue
        if max_rows is not None:
            rows = rows[tsne.choose(label[rows], max_rows, parts.seed)]
        where = f"the {name!r} rows of task {task} of {parts.stream.dataset.name}"
        _check_classes(label[rows], classes, where, **folds)
        found[name] = rows
    return found


def _listed(values):
    """A tuple of what the config may give as a list."""
    return tuple(values) if isinstance(values, list) else values


def _check(folds, inner_folds, penalties, subsets, max_rows, batch_size):
    """Refuse options out of their range."""
    for name, value, least in (
        ("folds", folds, 2),
        ("inner_folds", inner_folds, 2),
        ("batch_size", batch_size, 1),
        ("max_rows", max_rows, folds),
    ):
        good = isinstance(value, int) and not isinstance(value, bool)
        good = good and value >= least
        allowed = f"a whole number >= {least}"
        if name == "max_rows":
            good, allowed = good or value is None, f"{allowed} (folds), or None"
        features_lib.require(f"svm.{name}", value, good, allowed)
    good = isinstance(penalties, tuple) and len(penalties) > 0
    good = good and all(
        isinstance(c, (int, float)) and 0 < c < math.inf for c in penalties
    )
    features_lib.require("svm.penalties", penalties, good, "numbers > 0, one at least")
    good = isinstance(subsets, tuple) and len(subsets) > 0
    good = good and set(subsets) <= {*SUBSETS} and len(set(subsets)) == len(subsets)
    allowed = f"some of {', '.join(SUBSETS)}, each once"
    features_lib.require("svm.subsets", subsets, good, allowed)


def _check_labels(parts):
    """Refuse tasks with rows that have no label."""
    dataset = parts.stream.dataset
    rows = _rows(parts, range(_tasks(parts)))
    unknown = int((dataset.train.label[rows] < 0).sum())
    if unknown:
        raise ValueError(
            "config.evaluators.svm: needs a label for every train row of a task, but "
            f"{unknown} of {len(rows)} rows of {dataset.name} have none (-1); use a "
            "labelled dataset, or take the evaluator out"
        )


def _check_classes(labels, classes, where, *, folds, inner_folds):
    """Refuse a class that some fold would lack, in training or in the test.

    Of n rows of a class at most ceil(n / folds) are in one outer fold; the others must
    give one row to each inner fold.
    """
    least = next(n for n in itertools.count(folds) if n - -(-n // folds) >= inner_folds)
    for label in classes:
        count = int((labels == label).sum())
        if count < least:
            raise ValueError(
                f"config.evaluators.svm.folds={folds!r}: with inner_folds="
                f"{inner_folds!r} each class needs {least} rows, but of {where} only "
                f"{count} are of class {label}; choose fewer folds or inner_folds, "
                "more max_rows, or other subsets"
            )
