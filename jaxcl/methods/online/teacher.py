"""A frozen copy of the network at the end of the last task, for online methods."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxcl import core
from jaxcl.data import stream


class Teacher(NamedTuple):
    """The network when the present task began."""

    params: core.PyTree  # f32
    stats: core.PyTree  # f32, running statistics, frozen too
    exists: jax.Array  # bool[], False in the first task


def create(params: core.PyTree, stats: core.PyTree) -> Teacher:
    """A teacher of the shapes of `params` and `stats` that does not exist yet."""
    return Teacher(core.copy(params), core.copy(stats), jnp.zeros((), bool))


def begin_task(state: core.TrainState, task: stream.Task) -> core.TrainState:
    """The state with its network as `extra.teacher`, from the second task on."""
    if task.index == 0:
        return state
    teacher = create(state.params, state.stats)._replace(exists=jnp.ones((), bool))
    return state.replace(extra=state.extra._replace(teacher=teacher))


def logits(net: Any, teacher: Teacher, *parts: Any, train: bool = False) -> tuple:
    """The teacher's logits, f32[R,C] for each `online.Rows`; zeros without a teacher.

    Without gradient, and at no cost while there is no teacher.

    Args:
      net: the network.
      teacher: of the state.
      parts: rows, whose logits are those of a pass of each by itself.
      train: normalise each by its own batch, in place of the running statistics.
    """

    def ask():
        return (*net.answers(teacher.params, teacher.stats, *parts, train=train),)

    def zeros():
        return tuple(jnp.zeros(x.shape, x.dtype) for x in jax.eval_shape(ask))

    return jax.lax.stop_gradient(jax.lax.cond(teacher.exists, ask, zeros))
