"""A state that replayed rows and holds a memory, for evaluators that look at them."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from helpers import eval_toy
from jaxcl.memory import buffer

# Twice the same row, rows of the present task, none at all.
REPLAYED = {0: [], 1: [42, 42, 0, 17], 2: [3, 17, 41, 0, 42]}


class State(NamedTuple):
    params: dict
    replayed: jax.Array
    memory: buffer.Buffer | None = None


def state_of(task=1, seed=0):
    rows = np.pad(REPLAYED[task], (0, 6 - len(REPLAYED[task])), constant_values=-1)
    rows = jnp.asarray(np.roll(rows, 2), jnp.int32)
    return State(eval_toy.state_of(seed).params, rows)


def parts_of(scenario="class", data=None, **more):
    more = {"replayed": lambda state: state.replayed} | more
    return eval_toy.parts_of(scenario, data, **more)


def remembering(filled=6, seed=0, by_row=False):
    """A memory of six rows, three of class 0, two of 1, one of 4; two empty slots.

    It holds images, or names rows of the train split.
    """
    rng = np.random.default_rng(seed)
    label = np.array([0, 5, 1, 0, 4, 1, 5, 0], np.int32)
    there = np.array([1, 0, 1, 1, 1, 1, 0, 1], bool) & (np.arange(8) < filled + 2)
    images = rng.integers(0, 256, (8, 4, 4, 3)).astype(np.uint8)
    items = {"image": images, "label": label}
    if by_row:
        items = {"index": rng.permutation(50)[:8] * there, "label": label}
    memory = jax.tree.map(jnp.asarray, buffer.Buffer(items, there, 6))
    return state_of()._replace(memory=memory)


def remembered(data=None, **more):
    return parts_of(data=data, memory=lambda state: state.memory, **more)
