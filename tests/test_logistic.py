"""Logistic regression against its objective, and the evaluator on a linear map."""

import itertools

import numpy as np
import pytest
from scipy import special
from sklearn import linear_model, pipeline, preprocessing

from helpers import eval_toy
from jaxcl.evals import embedding, logistic


def blobs(seed, classes, count=90, dim=4):
    """Gaussian classes that overlap, features of unequal scale and mean."""
    rng = np.random.default_rng(seed)
    label = rng.permutation(np.asarray(classes)[np.arange(count) % len(classes)])
    centres = rng.normal(size=(max(classes) + 1, dim))
    rows = centres[label] + rng.normal(size=(count, dim))
    return rows * np.linspace(0.3, 5, dim) + 3.0, label


def layer_of(machine):
    """Weights f[K, D] and biases f[K] of the classes, 0 for the first of two."""
    layer = machine[-1].coef_, machine[-1].intercept_
    if len(machine.classes_) == 2:
        layer = [np.concatenate([np.zeros_like(x), x]) for x in layer]
    return layer


@pytest.mark.parametrize("classes", [(0, 2, 5), (1, 4)])
def test_a_fit_is_where_the_slope_of_its_objective_is_zero(classes):
    rows, label = blobs(0, classes)
    found = logistic.fit_regression(rows, label, penalty=0.7, iterations=2000)
    (weight, bias), count = layer_of(found), found[-1].n_iter_[0]
    assert found.classes_.tolist() == list(classes) and 3 < count < 2000
    unit = (rows - rows.mean(axis=0)) / rows.std(axis=0)
    scores = logistic.score_classes(found, rows, 7)
    assert np.isneginf(np.delete(scores, classes, axis=1)).all()
    given = scores[:, list(classes)].astype(np.float64)
    np.testing.assert_allclose(given, unit @ weight.T + bias, rtol=1e-5)
    own = label[:, None] == np.asarray(classes)
    slope = (
        0.7 * (special.softmax(given, axis=1) - own).T
    )  # of the cross-entropies, by score
    by_weight, begin = slope @ unit, 0.7 * (1 / len(classes) - own).T @ unit
    if len(classes) == 2:
        by_weight, begin = by_weight[1:], begin[1:]
    whole = by_weight + weight[-len(by_weight) :]
    assert np.abs(whole).max() < 1e-5 * np.abs(begin).max()
    assert np.abs(slope.sum(axis=1)).max() < 1e-4
    # Features come in float32; the solver has more digits.
    narrow = logistic.fit_regression(
        np.float32(rows), label, penalty=0.7, iterations=2000
    )
    np.testing.assert_allclose(layer_of(narrow)[0], weight, rtol=1e-4, atol=1e-5)
    sooner = logistic.fit_regression(
        rows, label, penalty=0.7, iterations=2000, tolerance=0.01
    )
    assert sooner[-1].n_iter_[0] < count


def plain_features(state, images):
    mean, std = np.float32(eval_toy.MEAN), np.float32(eval_toy.STD)
    return np.asarray(eval_toy.embed(state, (images / np.float32(255) - mean) / std))


def test_without_augmentation_it_is_a_pipeline_of_scikit_learn():
    parts, state = eval_toy.parts_of(), eval_toy.state_of(0)
    evaluate = logistic.make(parts, passes=0, penalty=0.5, tolerance=1e-4)
    found = evaluate(state, 1)
    data = parts.stream.dataset
    machine = pipeline.make_pipeline(
        preprocessing.StandardScaler(),
        linear_model.LogisticRegression(C=0.5, max_iter=200),
    )
    train, test = (plain_features(state, x.images) for x in (data.train, data.test))
    right = machine.fit(train, data.train.label).predict(test) == data.test.label
    assert found.scalars["accuracy"] == pytest.approx(right.mean())
    assert 0.3 < right.mean() < 1
    rows = embedding.average_per_task(parts, right)
    np.testing.assert_allclose(found.rows["class_incremental"], rows)
    assert (found.rows["task_aware"] >= rows).all()
    assert found.scalars["iterations"] > 3


def test_each_pass_shifts_and_flips_anew(monkeypatch):
    seen, fit = [], logistic.fit_regression

    def recorded(features, labels, **options):
        seen.append((features, labels))
        return fit(features, labels, **options)

    monkeypatch.setattr(logistic, "fit_regression", recorded)
    parts, state = eval_toy.parts_of(), eval_toy.state_of(1)
    train, size = parts.stream.dataset.train, eval_toy.SIZE
    options = dict(passes=3, pad=1, batch_size=16, iterations=1)
    logistic.make(parts, **options)(state, 2)
    ((features, labels),) = seen
    np.testing.assert_array_equal(labels, np.concatenate([train.label] * 3))
    wide = np.pad(train.images, ((0, 0), (1, 1), (1, 1), (0, 0)))
    candidates = np.stack(
        [
            plain_features(state, wide[:, y : y + size, x : x + size][:, :, ::step])
            for y, x, step in itertools.product(range(3), range(3), (1, -1))
        ]
    )
    chosen = []
    for each in features.reshape(3, len(train.label), -1):
        gaps = np.abs(candidates - each).max(axis=2)
        assert gaps.min(axis=0).max() < 1e-4
        chosen.append(gaps.argmin(axis=0))
    assert len(np.unique(chosen)) == 18
    for first, second in itertools.combinations(chosen, 2):
        assert (first != second).mean() > 0.7
    assert (chosen[0][:16] != chosen[0][16:32]).mean() > 0.7  # nor do batches agree
    # The same draws whatever the task; others for another seed.
    logistic.make(parts, **options)(state, 0)
    np.testing.assert_array_equal(seen[1][0], features)
    logistic.make(parts._replace(seed=4), **options, flip=0.0)(state, 0)
    gaps = np.abs(candidates - seen[2][0][: len(train.label)]).max(axis=2)
    other = gaps.argmin(axis=0)
    assert not (other % 2).any() and (other // 2 != chosen[0] // 2).mean() > 0.7
    with pytest.raises(ValueError, match="logistic.passes=1"):
        logistic.make(parts._replace(resize=size), passes=1)
