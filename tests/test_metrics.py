"""Metrics against double loops over the definitions."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxcl import metrics

RNG = np.random.default_rng(0)
FULL = RNG.uniform(size=(5, 5))
LOWER = np.where(np.tri(5, dtype=bool), FULL, np.nan)


def forgetting_twin(a):
    size, total = len(a), 0.0
    for j in range(size - 1):
        seen = [a[i, j] for i in range(size - 1) if not math.isnan(a[i, j])]
        total += max(seen) - a[size - 1, j]
    return total / (size - 1)


def stability_twin(a):
    size, total = len(a), 0.0
    for i in range(size - 1):
        rows = [t for t in range(size) if not math.isnan(a[t, i])]
        total += max(a[t, i] - a[size - 1, i] for t in rows)
    return total / (size - 1)


def plasticity_twin(a, finetune):
    size, total = len(a), 0.0
    for j in range(1, size):
        inner = sum(a[j - 1, i - 1] - finetune[i - 1] for i in range(j + 1, size + 1))
        total += inner / (size - j)
    return total / (size - 1)


@pytest.mark.parametrize("a", [FULL, LOWER, FULL[:2, :2]])
def test_matrix_metrics_equal_the_double_loops(a):
    size = len(a)
    last = sum(a[-1]) / size
    np.testing.assert_allclose(metrics.average_accuracy(a), last, rtol=1e-14)
    per_task = [sum(a[t, j] for j in range(t + 1)) / (t + 1) for t in range(size)]
    np.testing.assert_allclose(
        metrics.average_accuracy_per_task(a), per_task, rtol=1e-14
    )
    np.testing.assert_allclose(metrics.forgetting(a), forgetting_twin(a), rtol=1e-14)
    np.testing.assert_allclose(metrics.stability(a), stability_twin(a), rtol=1e-14)


def test_plasticity_equals_the_double_loop_and_needs_the_upper_triangle():
    finetune = RNG.uniform(size=5)
    expected = plasticity_twin(FULL, finetune)
    np.testing.assert_allclose(metrics.plasticity(FULL, finetune), expected, rtol=1e-14)
    upper = np.where(np.tri(5, dtype=bool), np.nan, FULL)
    finetune[0] = np.nan
    np.testing.assert_allclose(
        metrics.plasticity(upper, finetune), expected, rtol=1e-14
    )
    assert math.isnan(metrics.plasticity(LOWER, finetune))


@pytest.mark.filterwarnings("error")
def test_one_task_and_missing_cells_give_nan_without_warnings():
    one = np.array([[0.4]])
    assert metrics.average_accuracy(one) == 0.4
    assert metrics.average_accuracy_per_task(one).tolist() == [0.4]
    assert math.isnan(metrics.forgetting(one)) and math.isnan(metrics.stability(one))
    assert math.isnan(metrics.plasticity(one, [0.4]))
    running = LOWER.copy()
    running[3:] = np.nan
    for function in (metrics.average_accuracy, metrics.forgetting, metrics.stability):
        assert math.isnan(function(running))
        assert not math.isnan(function(running[:3, :3]))
    missing = np.isnan(metrics.average_accuracy_per_task(running))
    assert missing.tolist() == [False] * 3 + [True] * 2
    assert math.isnan(metrics.forgetting(np.full((3, 3), np.nan)))
    unmet = [[np.nan, np.nan], [0.5, 0.6]]  # task 0 has no accuracy to fall from
    assert math.isnan(metrics.forgetting(unmet))
    assert math.isnan(metrics.stability(unmet))


def test_accuracy_counts_unmasked_rows():
    logits = jnp.array([[1.0, 0.0], [0.0, 2.0], [3.0, 1.0], [0.0, 1.0]])
    labels = jnp.array([0, 1, 1, 0])
    accuracy = jax.jit(metrics.accuracy)
    assert accuracy(logits, labels) == 0.5
    assert accuracy(logits, labels, jnp.array([True, True, True, False])) == (
        pytest.approx(2 / 3)
    )
    assert accuracy(logits, labels, jnp.array([0.0, 0.0, 1.0, 1.0])) == 0.0
    assert accuracy(logits, labels, jnp.zeros(4)) == 0.0


def class_twins(x, labels):
    """Eq. 8 and Eq. 9 of DUEL in float64, over the classes that occur."""
    means, variance = [], []
    for c in sorted(set(labels)):
        rows = [x[i] / math.sqrt(sum(x[i] ** 2)) for i in np.flatnonzero(labels == c)]
        mean = sum(rows) / len(rows)
        mean = mean / math.sqrt(sum(mean * mean))
        means.append(mean)
        variance.append(sum((mean @ r - 1) ** 2 for r in rows) / len(rows))
    size = len(means)
    pairs = [means[a] @ means[b] for a in range(size) for b in range(size) if a != b]
    return sum(variance) / size, sum(pairs) / max(len(pairs), 1)


def test_class_geometry_equals_the_loops_with_absent_classes_and_unlabelled_rows():
    labels = np.array([0, 3, 3, 1, 0, 3, 1, 0, 5])
    x = RNG.normal(size=(9, 4)) + np.eye(6, 4)[labels]
    variance, similarity = class_twins(x, labels)
    # Classes 2 and 4 do not occur; the last two rows have no class.
    x = np.concatenate([x, RNG.normal(size=(2, 4))]).astype(np.float32)
    y = jnp.asarray([*labels, -1, 6])
    intra = jax.jit(metrics.intra_class_variance, static_argnums=2)
    inter = jax.jit(metrics.inter_class_similarity, static_argnums=2)
    np.testing.assert_allclose(intra(x, y, 6), variance, rtol=1e-5)
    np.testing.assert_allclose(inter(x, y, 6), similarity, rtol=1e-5)
    np.testing.assert_allclose(intra(3 * x, y, 6), variance, rtol=1e-5)


def test_class_entropy_is_in_nats_over_valid_labels():
    entropy = jax.jit(metrics.class_entropy, static_argnums=1)
    labels = jnp.array([0, 0, 0, 2, -1, -1, 7])
    expected = -(0.75 * math.log(0.75) + 0.25 * math.log(0.25))
    np.testing.assert_allclose(entropy(labels, 4), expected, rtol=1e-6)
    np.testing.assert_allclose(entropy(jnp.arange(4), 4), math.log(4), rtol=1e-6)
    assert entropy(jnp.full(3, 2), 4) == 0.0
    assert entropy(jnp.full(3, -1), 4) == 0.0
