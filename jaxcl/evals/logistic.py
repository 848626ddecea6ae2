"""Evaluate standardised frozen features by logistic regression.

Source: the probe of Soutif-Cormerais et al., "A Comprehensive Empirical Evaluation on
Online Continual Learning", ICCV-W 2023, by its released code
(AlbinSou/ocl_survey, commit 5fcaa39): the features of three augmented passes over the
train rows, in evaluation mode; scikit-learn's regression with its defaults and at most
200 iterations; evaluated on the test rows, among all classes.

Departures: the augmentation is a shift and a flip as in the survey, set by the options
here, whatever the run trains with. Since version 1.4 scikit-learn compares its
tolerance with the gradient of the mean over rows. In the survey's time it was the
gradient of the sum, so it stopped much later. Here the iterations alone decide, unless
`tolerance` is above 0.
"""

import warnings
from collections.abc import Callable
from typing import Any

import numpy as np

from jaxcl import core, schema, sharding
from jaxcl.data.augment import images as augment_images
from jaxcl.evals import embedding


def fit_regression(
    features: np.ndarray,
    labels: np.ndarray,
    *,
    penalty: float,
    iterations: int,
    tolerance: float = 0.0,
) -> Any:
    """Minimise penalty * sum of cross-entropies + |W|^2 / 2 over standardised features.

    The biases are not penalised, and the solver is scikit-learn's L-BFGS. With two
    classes W is one row, the log odds of the second.

    Args:
      features: f[n, D].
      labels: i[n], labels of two classes or more.
      penalty: weight of the rows, scikit-learn's C.
      iterations: most iterations, converged or not.
      tolerance: the solver stops once the largest entry of the gradient of the
        objective / (penalty * n) is at most this.

    Returns:
      A pipeline of scikit-learn: the scaler, and the regression.
    """
    # They take a second, and few runs need them.
    from sklearn import exceptions, linear_model, pipeline, preprocessing

    settings = {"C": penalty, "max_iter": iterations, "tol": tolerance}
    machine = pipeline.make_pipeline(
        preprocessing.StandardScaler(), linear_model.LogisticRegression(**settings)
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", exceptions.ConvergenceWarning)
        # In float32 the solver gives up early, for want of digits of the objective.
        return machine.fit(np.asarray(features, np.float64), labels)


def score_classes(machine: Any, features: np.ndarray, num_classes: int) -> np.ndarray:
    """Score features by a regression, f32[n, num_classes]; -inf for absent classes."""
    scores = machine.decision_function(np.asarray(features, np.float64))
    if scores.ndim == 1:  # of two classes
        scores = np.stack([np.zeros_like(scores), scores], axis=1)
    all_scores = np.full((len(scores), num_classes), -np.inf, np.float32)
    all_scores[:, machine.classes_] = scores
    return all_scores


@schema.checked("config.evaluators.logistic")
@schema.debug(passes=1, iterations=5)
def make(
    parts: core.EvalParts,
    *,
    passes: schema.Natural = 3,
    pad: schema.Natural = 4,
    flip: schema.Share = 0.5,
    penalty: schema.Positive = 1.0,
    iterations: schema.Count = 200,
    tolerance: schema.Weight = 0.0,
    batch_size: schema.Count = 256,
) -> Callable:
    """Build the evaluator by logistic regression on all train rows.

    Args:
      parts: the parts of every evaluator.
      passes: number of passes over the train rows, each with its own shifts and flips;
        0: one pass without augmentation.
      pad: most pixels by which an image is shifted, to either side.
      flip: probability of a flip.
      penalty: scikit-learn's C; a smaller one gives smaller weights.
      iterations: most iterations of the solver.
      tolerance: largest gradient at which the solver stops, see `fit_regression`;
        scikit-learn's is 1e-4.
      batch_size: images that are embedded at a time.

    Returns:
      evaluate(state, task) -> core.Result. Rows as from `linear` with train_on="all":
      "class_incremental" and, if tasks are disjoint classes, "task_aware"; nan where
      features are not finite. Scalars: "accuracy" on all evaluation rows, "iterations".

    Raises:
      Refused: an option out of its range; no evaluation split; no labels; train
        rows of one class; augmented passes over images that stream or are resized.
    """
    embedding.check_learnable(parts.stream)
    embedding.check_labels(parts, "logistic")
    train, evaluation = parts.stream.dataset.train, parts.stream.evaluation
    several = len(np.unique(train.label)) > 1
    embedding.require("logistic", "", several, "left out of data of one class")
    shape = () if train.images is None else train.images.shape[1:3]
    fits = shape == (parts.size, parts.size) and parts.resize is None
    allowed = "0 for images that stream or are of another size than config.augment.size"
    embedding.require("logistic.passes", passes, not passes or fits, allowed)
    embed_train = _embed_augmented(parts, passes, pad, flip, batch_size)
    embed_test = embedding.make_embedder(parts, evaluation, batch_size=batch_size)
    groups = embedding.assign_tasks(parts)
    grade = embedding.make_grader(parts, groups, evaluation)
    labels = np.tile(train.label, max(passes, 1))

    settings = {"penalty": penalty, "iterations": iterations, "tolerance": tolerance}

    def evaluate(state, task: int) -> core.Result:
        features, test = embed_train(state), sharding.copy_to_host(embed_test(state))
        if not (np.isfinite(features).all() and np.isfinite(test).all()):
            blank = {"class_incremental": np.full(len(parts.stream.tasks), np.nan)}
            return core.Result(blank, {}, (embedding.NOT_FINITE,))
        machine = fit_regression(features, labels, **settings)
        right = grade(score_classes(machine, test, parts.num_classes))
        rows = embedding.average_rows(parts, right)
        accuracy = float(right["class_incremental"].mean())
        count = float(machine[-1].n_iter_.max())
        scalars = {"accuracy": accuracy, "iterations": count}
        answers = {"class_incremental": right["class_incremental"]}
        return core.Result(rows, scalars, answers=answers)

    return evaluate


def _embed_augmented(parts, passes, pad, flip, batch_size) -> Callable:
    """Make state -> f32[passes n, D], the features of n train rows, pass by pass."""
    train = parts.stream.dataset.train
    if not passes:
        embed = embedding.make_embedder(parts, train, batch_size=batch_size)
        return lambda state: sharding.copy_to_host(embed(state))
    view = augment_images.make(
        size=parts.size,
        views=passes,
        crop=False,
        pad=pad,
        flip=flip,
        jitter_probability=0.0,
        grayscale=0.0,
        mean=parts.mean,
        std=parts.std,
    )
    embed_views = embedding.make_views_embedder(
        parts, view, passes, batch_size=batch_size
    )
    return lambda state: np.concatenate(embed_views(state, train.images))
