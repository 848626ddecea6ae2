"""A queue of the features of views."""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxcl import core
from jaxcl.memory import queue


class Queue(NamedTuple):
    """Features of each view, the oldest of which are overwritten first."""

    rows: jax.Array  # f32[V,K,D], unit rows; [v] from view v
    pointer: jax.Array  # i32[], where the next rows go


def start(key: jax.Array, size: int, dim: int, views: int = 2) -> Queue:
    """Start a queue of `size` random unit rows of each view."""
    rows = core.l2_normalize(jax.random.normal(key, (views, size, dim)))
    return Queue(rows, jnp.zeros((), jnp.int32))


def push(held: Queue, features: jax.Array, *, active=True, aligned=True) -> Queue:
    """Write features f32[B,V,D] over the oldest rows, see `queue.enqueue`."""
    rows = core.l2_normalize(features).swapaxes(0, 1)
    return Queue(*queue.enqueue(*held, rows, active=active, aligned=aligned))
