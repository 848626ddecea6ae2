"""What the DUEL paper proves, by this library's I_d and M-HML in float64.

Choi et al., AAAI 2024: Corollary 1, Proposition 2, Theorem 1, Proposition 3. Classes
are unit vectors at right angles; tau = 0.01 makes q of two classes e^-100.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from helpers import twins
from jaxcl.losses import contrastive
from jaxcl.memory import duel

C = 5
CRISP, SOFT = 0.01, 0.5  # temperatures of f*, where q is 0 or 1, and of any other f
UNEVEN = np.repeat(np.arange(C), [12, 2, 2, 2, 2])
EVEN = np.repeat(np.arange(C), 4)


def perfect(labels):
    """f*: rows of one class are equal, of two classes at right angles (Eq. 11)."""
    return np.eye(C)[labels]


def imperfect(labels, seed):
    rng = np.random.default_rng(seed)
    return twins.unit(
        rng.normal(size=(C, 3))[labels] + rng.normal(size=(len(labels), 3))
    )


def hml(rows, labels, memory, *, weight=1.0, temperature):
    """weight I_h(f; D') - I_d(f; D', M), with all pairs of a class as positives."""
    pairs = np.argwhere(labels[:, None] == labels)
    # Each row as often as it is drawn, whatever the size of its class.
    share = 1 / np.bincount(labels)[labels[pairs[:, 0]]] / len(rows)
    with jax.enable_x64(True):
        memory = jnp.asarray(memory)

        def loss(row, other):
            given = {"weight": weight, "temperature": temperature}
            return contrastive.m_hml(row[None], other[None], memory, **given)

        each = jax.jit(jax.vmap(loss))(*jnp.asarray(rows)[pairs.T])
    return float(share @ np.array(each))


def distinct(rows, memory, temperature, weights=None):
    with jax.enable_x64(True):
        rows, memory = jnp.asarray(rows), jnp.asarray(memory)
        scores = duel.distinctiveness(rows, memory, temperature=temperature)
    return float(np.average(scores, weights=weights))


def test_the_loss_is_least_where_classes_are_told_apart():
    """Corollary 1, Eq. 12: -log C at f*, and no other f is below."""
    best = perfect(EVEN)
    np.testing.assert_allclose(
        hml(best, EVEN, best, temperature=CRISP), -np.log(C), rtol=1e-12
    )
    for seed in range(3):
        rows = imperfect(EVEN, seed)
        assert hml(rows, EVEN, rows, temperature=SOFT) > -np.log(C) + 0.01


def test_with_an_even_memory_an_uneven_stream_has_the_same_least_loss():
    """Theorem 1. A memory like the stream (control) has another."""
    weight = 1 / (C * np.min(np.bincount(UNEVEN)) / len(UNEVEN))
    stream, even = perfect(UNEVEN), perfect(EVEN)
    options = {"weight": weight, "temperature": CRISP}
    found = hml(stream, UNEVEN, even, **options)
    np.testing.assert_allclose(found, -np.log(C), rtol=1e-12)
    assert hml(stream, UNEVEN, stream, **options) > -np.log(C) + 0.1


@pytest.mark.parametrize("seed", range(3))
def test_the_empirical_loss_bounds_the_ideal_one(seed):
    """Proposition 2, Eq. 4, for an f that confuses classes and any memory."""
    both = imperfect(np.concatenate([EVEN, UNEVEN]), seed)
    # The classes' own distributions are the same in both: each row counts by class.
    ideal, stream = both[: len(EVEN)], both[: len(EVEN)]
    rho = np.bincount(UNEVEN) / len(UNEVEN)
    weights = rho[EVEN]
    memory = both[len(EVEN) :]
    weight = 1 / (C * rho.min())

    def hebbian(weights):
        q = np.exp((ideal @ ideal.T - 1) / SOFT)
        same = EVEN[:, None] == EVEN
        each = np.sum(same * -np.log(q), axis=1) / same.sum(axis=1)
        return np.average(each, weights=weights)

    of_data = distinct(ideal, ideal, SOFT)
    of_memory = distinct(stream, memory, SOFT, weights)
    left = hebbian(None) - of_data
    right = weight * hebbian(weights) - of_memory + abs(of_memory - of_data)
    assert left <= right + 1e-12


def change_of_one_exchange(counts):
    """Change of the stream's mean I_d where a rare row replaces a dominant one."""
    rho = np.bincount(UNEVEN) / len(UNEVEN)
    before = np.repeat(np.arange(C), counts)
    after = np.repeat(np.arange(C), np.array(counts) + [-1, 1, 0, 0, 0])
    each = [distinct(np.eye(C), perfect(m), CRISP, rho) for m in (before, after)]
    return each[1] - each[0]


def test_the_policy_is_safe_only_as_far_as_the_memory_is_even_as_the_stream():
    """Proposition 3 at f*, with the sign that its printed proof lacks.

    The mean over the stream of I_d is a cross-entropy, least where the memory is like
    the stream: evening out raises it from there on, and lowers it before.
    """
    counts = [600, 100, 100, 100, 100]  # as the stream
    np.testing.assert_allclose(
        change_of_one_exchange(counts),
        0.6 * np.log(600 / 599) - 0.1 * np.log(101 / 100),
        rtol=1e-6,
    )
    assert 0 < change_of_one_exchange(counts) < 1e-5
    assert change_of_one_exchange([400, 150, 150, 150, 150]) > 1e-4
    assert change_of_one_exchange([800, 50, 50, 50, 50]) < -1e-4
