"""Herding against the equation, in float64, over all rows for every choice."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxcl.memory import herding

herd = functools.partial(jax.jit, static_argnums=1)(herding.herding)


def twin(features, k):
    """argmin_x ||mu - (phi(x) + sum of those chosen) / j||, j = 1 .. k, no repeats."""
    features, chosen = np.asarray(features, np.float64), []
    mean = features.mean(axis=0)
    for j in range(1, min(k, len(features)) + 1):
        total = sum((features[i] for i in chosen), np.zeros_like(mean))
        left = [i for i in range(len(features)) if i not in chosen]
        gaps = [np.linalg.norm(mean - (features[i] + total) / j) for i in left]
        chosen.append(left[int(np.argmin(gaps))])
    return chosen


def rows(count, seed=0, shift=0.0):
    rng = np.random.default_rng(seed)
    return (shift + rng.normal(size=(count, 5)) * rng.exponential(size=5)).astype("f4")


@pytest.mark.parametrize("shift", [0.0, 300.0])  # far from 0, where products round
@pytest.mark.parametrize("seed", range(3))
def test_against_all_rows_for_every_choice(seed, shift):
    features = rows(24, seed, shift)
    found = herd(features, 24)
    assert found.dtype == jnp.int32 and found.tolist() == twin(features, 24)
    assert herd(features, 7).tolist() == found[:7].tolist()


def test_features_are_used_as_they_are():
    """Neither the rows nor their mean are normalised."""
    features = np.array([[10.0, 0.0], [1.0, 1.0], [0.0, 1.0], [4.0, 0.5]])
    unit = features / np.linalg.norm(features, axis=1, keepdims=True)
    assert herd(features, 2).tolist() == twin(features, 2)
    assert herd(unit, 2).tolist() == twin(unit, 2) != twin(features, 2)


def test_rows_that_do_not_exist_are_never_chosen():
    features, mask = rows(12), np.arange(12) % 3 != 1
    there = np.flatnonzero(mask)
    wanted = [int(there[i]) for i in twin(features[there], 10)]
    for blank in (0.0, 1e6, np.nan):
        masked = np.where(mask[:, None], features, np.float32(blank))
        for kind in (bool, np.float32):
            found = herd(masked, 10, mask.astype(kind)).tolist()
            assert found == wanted + [12] * 2  # only 8 of them exist
    assert herd(features, 2, np.zeros(12, bool)).tolist() == [12, 12]


def test_more_than_there_are_and_equal_rows():
    assert herd(np.ones((3, 2)), 5).tolist() == [0, 1, 2, 3, 3]


def test_of_several_classes_at_once():
    features, labels = rows(20), np.arange(20) % 3
    found = jax.vmap(lambda c: herding.herding(features, 4, labels == c))(jnp.arange(3))
    for label in range(3):
        own = np.flatnonzero(labels == label)
        assert found[label].tolist() == own[twin(features[own], 4)].tolist()


def test_features_of_half_precision_are_summed_in_f32():
    features = rows(40, 1, 3.0).astype(jnp.bfloat16)
    assert herd(features, 20).tolist() == twin(features.astype(np.float64), 20)
