"""A state that replayed rows, for evaluators that look at them."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from helpers import eval_toy

# Twice the same row, rows of the present task, none at all.
REPLAYED = {0: [], 1: [42, 42, 0, 17], 2: [3, 17, 41, 0, 42]}


class State(NamedTuple):
    params: dict
    replayed: jax.Array


def state_of(task=1, seed=0):
    rows = np.pad(REPLAYED[task], (0, 6 - len(REPLAYED[task])), constant_values=-1)
    rows = jnp.asarray(np.roll(rows, 2), jnp.int32)
    return State(eval_toy.state_of(seed).params, rows)


def parts_of(scenario="class", data=None, **more):
    more = {"replayed": lambda state: state.replayed} | more
    return eval_toy.parts_of(scenario, data, **more)
