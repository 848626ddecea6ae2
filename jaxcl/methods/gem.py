"""GEM: a step that raises the loss of no past task, to first order.

Lopez-Paz and Ranzato, "Gradient Episodic Memory for Continual Learning", NeurIPS
2017. The gradient of each past task's memory is taken at every step, and that of the
incoming rows is moved to the nearest vector with no negative product with any.

Departures:
- One head over all classes, in training and prediction; on CIFAR-100 the paper's
  tasks each have their own.
- Of each past task `memory_rows` rows are drawn; the released code takes all it has,
  the same with policy="task_ring" and memory_rows = capacity / number of tasks.
- The released margin bounds the dual variables; the paper speaks of adding it to them.
- All passes are in training mode; running statistics follow the incoming pass, then
  those of past tasks in their order. The memory is written after the step.
"""

import functools

import chex
import jax
import jax.flatten_util
import jax.numpy as jnp

from jaxcl import core
from jaxcl.memory import quadratic
from jaxcl.methods import online


def make(
    parts: core.Parts,
    *,
    head="linear",
    form="paper",
    margin: float | None = None,
    memory_rows: int | None = None,
) -> core.Method:
    """A step on the incoming rows under one constraint per past task.

    Args:
      head: "linear" or "cosine".
      form: "paper" solves the paper's dual; "code" adds a ridge of 1e-3 to it, and
        its margin is 0.5.
      margin: lower bound of the dual variables, "memory strength": with more than 0
        each past task's gradient is added whenever any is violated. None: `form`'s.
      memory_rows: drawn of each past task at each step; None: config.replay.size.
    """
    core.check_choice("config.method.form", form, online.FORMS)
    default, ridge = (0.0, 0.0) if form == "paper" else (0.5, 1e-3)
    margin = default if margin is None else margin
    if not 0 <= margin < float("inf"):
        raise ValueError(f"config.method.margin={margin}: must be 0 or more")
    shards = online.memory_of(parts).shards
    if memory_rows is not None and (memory_rows < 1 or memory_rows % shards):
        raise ValueError(
            f"config.method.memory_rows={memory_rows}: must be at least 1 and a "
            f"multiple of {shards}, the devices that share the memory"
        )
    net = online.network(parts, head)

    loss = functools.partial(online.cross_entropy, net)
    slope = jax.value_and_grad(loss, has_aux=True)

    def update(state, incoming, key):
        (value, stats), grads = slope(state.params, state.stats, incoming)
        if parts.num_tasks > 1:
            gradient, restore = jax.flatten_util.ravel_pytree(grads)
            stats, found = _past(parts, slope, state, stats, key, memory_rows)
            gradient = project(gradient, found, margin=margin, ridge=ridge)
            grads = restore(gradient)
        return *online.move(parts, state, value, stats, grads), {}

    return online.method(parts, net, update, limit=False)


def _past(parts, slope, state, stats, key, size):
    """Statistics after the passes; gradients f32[T-1,P], 0 where there are no rows."""
    memory = state.extra.memory
    zero = jnp.zeros_like(jax.flatten_util.ravel_pytree(state.params)[0])

    def one(stats, task_key):
        task, key = task_key
        allowed = (memory.items["task"] == task) & online.past_tasks(state)
        weights = online.log_weights(allowed)
        rows = online.draw(parts, memory, key, size=size, log_weights=weights)

        def found(stats):
            (_, stats), grads = slope(state.params, stats, rows)
            return stats, jax.flatten_util.ravel_pytree(grads)[0]

        if parts.unroll:
            return found(stats)
        # A task without rows costs nothing.
        return jax.lax.cond(jnp.any(rows.mask), found, lambda s: (s, zero), stats)

    past = parts.num_tasks - 1
    loop = _written_out if parts.unroll else jax.lax.scan
    return loop(one, stats, (jnp.arange(past), jax.random.split(key, past)))


def _written_out(body, carry, rows):
    """The scan of `body`, without a loop in the program."""
    outputs = []
    for row in zip(*rows, strict=True):
        carry, output = body(carry, row)
        outputs.append(output)
    return carry, jnp.stack(outputs)


def project(gradient, memory_gradients, *, margin=0.5, ridge=1e-3, mask=None):
    """The gradient, moved so as not to point against any memory gradient.

    g + G^T v with v the minimum over v >= margin of
      1/2 v^T (G G^T + ridge I) v + (G g)^T v,
    the paper's dual; g itself where no inner product <g, g_k> is negative. With margin
    0 and ridge 0 it is the nearest vector to g with <x, g_k> >= 0 for all k. The
    defaults are the released code's.

    In f32 <x, g_k> >= -1e-4 |g| |g_k|, and x is within 1e-5 |g| of the exact vector for
    gradients in general position. Nearly dependent ones that oppose one another may
    leave so little room that the nearest within that tolerance is far from it.

    Args:
      gradient: f32[P].
      memory_gradients: f32[K,P], one row per past task.
      margin: lower bound of v, at least 0.
      ridge: on the diagonal, at least 0.
      mask: bool[K], rows that exist; what others hold reaches nothing. None: all.

    Returns:
      f32[P].
    """
    chex.assert_rank([gradient, memory_gradients], [1, 2])
    chex.assert_equal_shape_suffix([gradient, memory_gradients], 1)
    count = len(memory_gradients)
    if count == 0:
        return gradient
    mask = jnp.ones(count, bool) if mask is None else jnp.asarray(mask, bool)
    chex.assert_shape(mask, (count,))
    dot = functools.partial(jnp.matmul, precision="highest")
    rows = jnp.where(mask[:, None], memory_gradients, 0)
    along = dot(rows, gradient)
    violated = jnp.any(along < 0)
    matrix = dot(rows, rows.T) + ridge * jnp.eye(count, dtype=rows.dtype)
    linear = jnp.where(violated, along + margin * jnp.sum(matrix, axis=1), 0)
    moved = gradient + dot(margin + quadratic.minimum(matrix, linear), rows)
    return jnp.where(violated, moved, gradient)
