"""Proposition 3 of the DUEL paper (AAAI 2024), by this library's I_d in float64."""

import jax
import jax.numpy as jnp
import numpy as np

from jaxcl.memory import duel

C = 5
UNEVEN = np.repeat(np.arange(C), [12, 2, 2, 2, 2])


def mean_distinctiveness(memory, weights):
    """I_d of classes at right angles, Eq. 11; at tau = 0.01 q of two is e^-100."""
    with jax.enable_x64(True):
        rows, memory = jnp.eye(C), jnp.asarray(np.eye(C)[memory])
        found = duel.distinctiveness(rows, memory, temperature=0.01)
    return float(np.average(found, weights=weights))


def change_of_one_exchange(counts):
    """Change of the stream's mean I_d where a rare row replaces a dominant one."""
    rho = np.bincount(UNEVEN) / len(UNEVEN)
    before = np.repeat(np.arange(C), counts)
    after = np.repeat(np.arange(C), np.array(counts) + [-1, 1, 0, 0, 0])
    each = [mean_distinctiveness(memory, rho) for memory in (before, after)]
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
