"""The random numbers of a step: which keys its uses take."""

import jax
import numpy as np

from helpers import twins
from jaxcl.memory import buffer, policies


def of_steps(monkeypatch, make, states, incoming) -> list[list[tuple]]:
    """Keys of each state's step: of views, draws, slots and mixtures, in their order.

    Args:
      make: augmentation -> a method.
    """
    keys = []

    def seen(key):
        keys.append(jax.random.key_data(key))
        return key

    def augment(key, images):
        seen(key)
        return twins.views_of(images)

    sample, reservoir, beta = buffer.sample, policies.reservoir, jax.random.beta
    monkeypatch.setattr(
        buffer, "sample", lambda m, key, k, **o: sample(m, seen(key), k, **o)
    )
    monkeypatch.setattr(
        policies, "reservoir", lambda m, key, mask: reservoir(m, seen(key), mask)
    )
    monkeypatch.setattr(jax.random, "beta", lambda key, *ab: beta(seen(key), *ab))
    method = make(augment)

    @jax.jit
    def keys_of(state):
        keys.clear()
        method.step(state, incoming)
        return keys

    return [[(*np.asarray(key).tolist(),) for key in keys_of(x)] for x in states]
