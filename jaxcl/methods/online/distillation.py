"""Teachers of online methods: a frozen copy of the network before the present task."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxcl import core
from jaxcl.data import stream
from jaxcl.memory import buffer
from jaxcl.methods import online


class Teacher(NamedTuple):
    """The network when the present task began."""

    params: core.PyTree  # f32
    stats: core.PyTree  # f32, running statistics, frozen too
    exists: jax.Array  # bool[], False in the first task


class Extra(NamedTuple):
    """The state of a method that groups classes by their task."""

    memory: buffer.Buffer
    seen: jax.Array  # bool[C], classes met so far
    kept: core.PyTree  # what the memory's policy counts
    teacher: Teacher | None  # None: the method does not distill
    task_of: jax.Array  # i32[C], task in which the class came first; -1: not yet
    # `means.ClassMeans` in an evaluation of a method that predicts by them
    means: core.PyTree = None


def create_teacher(params: core.PyTree, stats: core.PyTree) -> Teacher:
    """Make an empty teacher with the shapes of `params` and `stats`."""
    return Teacher(core.copy(params), core.copy(stats), jnp.zeros((), bool))


def begin_task(state: core.TrainState, task: stream.Task) -> core.TrainState:
    """Make the network the teacher, from the second task on."""
    if task.index == 0:
        return state
    teacher = create_teacher(state.params, state.stats)._replace(
        exists=jnp.ones((), bool)
    )
    return state.replace(extra=state.extra._replace(teacher=teacher))


def ask_teacher(net: Any, teacher: Teacher, *groups: Any, train: bool = False) -> tuple:
    """Return the teacher's logits, f32[R,C] for each `Rows`; zeros without one.

    There is no gradient, and no cost while there is no teacher.

    Args:
      net: the network.
      teacher: the teacher in the state.
      groups: groups of rows; each passes by itself.
      train: whether each group is normalised by its own batch, not by the running
        statistics.
    """

    def answer():
        return (
            *net.compute_logits(teacher.params, teacher.stats, *groups, train=train),
        )

    def zero_logits():
        return tuple(jnp.zeros(x.shape, x.dtype) for x in jax.eval_shape(answer))

    return jax.lax.stop_gradient(jax.lax.cond(teacher.exists, answer, zero_logits))


def by_task(
    parts: core.Parts,
    net: online.Network,
    update: Callable,
    *,
    distill: bool = True,
    seen_only: bool = True,
    **hooks: Callable,
) -> core.Method:
    """Make an online method whose state holds the task of each class.

    Args:
      parts, net, update, seen_only, hooks: arguments of `online.make_method`; the state
        that `update` gets has an `Extra`, whose `task_of` includes the incoming
        classes.
      distill: False: there is no teacher.
    """

    def with_classes(state, incoming, key):
        task_of = record_tasks(state.extra.task_of, incoming.label, state.task)
        state = state.replace(extra=state.extra._replace(task_of=task_of))
        return update(state, incoming, key)

    def extra(base, params, stats):
        task_of = jnp.full(parts.num_classes, -1, jnp.int32)
        teacher = create_teacher(params, stats) if distill else None
        return Extra(base.memory, base.seen, base.kept, teacher, task_of)

    if distill:
        hooks["begin_task"] = begin_task
    return online.make_method(
        parts, net, with_classes, extra=extra, seen_only=seen_only, **hooks
    )


def record_tasks(task_of: jax.Array, label: jax.Array, task: jax.Array) -> jax.Array:
    """Update i32[C] `task_of` with the labels of rows that came in `task`."""
    present = jnp.zeros(task_of.shape, bool).at[label].set(True)
    return jnp.where(present & (task_of < 0), task, task_of)
