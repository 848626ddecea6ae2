"""GEM: a step that raises the loss of no past task, to first order.

Lopez-Paz and Ranzato, "Gradient Episodic Memory for Continual Learning", NeurIPS
2017. Each step takes the gradient of every past task's memory. It moves the gradient of
the incoming rows to the nearest vector that has no negative product with any of them.

Departures:
- One head over all classes, in training and prediction; on CIFAR-100 each of the
  paper's tasks has its own.
- `memory_rows` rows of each past task are drawn. The released code takes all stored
  ones, as does policy="task_ring" with memory_rows = capacity / number of tasks.
- The released code's margin bounds the dual variables; the paper adds it to them.
- All passes are in training mode; running statistics follow the incoming pass, then
  those of past tasks in their order. The memory is written after the step.
"""

import functools

import chex
import jax
import jax.flatten_util
import jax.numpy as jnp

from jaxcl import core, schema, sharding
from jaxcl.errors import Refused
from jaxcl.memory import quadratic, sharded
from jaxcl.methods import online


def _fill_options(options: dict, replay: core.Replay | None) -> dict:
    """Fill in the form's margin and the rows of a draw for options that are None."""
    margin, rows = options["margin"], options["memory_rows"]
    if margin is None:
        margin = 0.0 if options["form"] == "paper" else 0.5
    if rows is None and replay is not None:
        rows = replay.size
    return {"margin": margin, "memory_rows": rows}


@schema.checked("config.method", fill=_fill_options)
def make(
    parts: core.Parts,
    *,
    head: online.Head = "linear",
    form: online.Form = "paper",
    margin: schema.Weight | None = None,
    memory_rows: schema.Count | None = None,
) -> core.Method:
    """Take steps on incoming rows under one constraint for each past task.

    Args:
      head: "linear" or "cosine".
      form: "paper" solves the paper's dual; "code" adds a ridge of 1e-3 to it, and
        its margin is 0.5.
      margin: lower bound of the dual variables, "memory strength". Above 0, every past
        task's gradient is added whenever one constraint is violated. None: `form`'s.
      memory_rows: rows drawn of each past task at each step; None: config.replay.size.
    """
    ridge = 0.0 if form == "paper" else 1e-3
    shards = sharded.count_shards(parts.replay)
    if memory_rows is not None and memory_rows % shards:
        raise Refused(
            f"config.method.memory_rows={memory_rows}: must be a multiple of {shards}, "
            "the devices that share the memory"
        )
    net = online.build_network(parts, head)

    loss = functools.partial(online.cross_entropy, net)
    slope = jax.value_and_grad(loss, has_aux=True)

    def update(state, incoming, key):
        (value, stats), grads = slope(state.params, state.stats, incoming)
        if parts.num_tasks > 1:
            gradient, restore = jax.flatten_util.ravel_pytree(grads)
            stats, past_gradients = _compute_past_gradients(
                parts, slope, state, stats, key, memory_rows
            )
            gradient = project(gradient, past_gradients, margin=margin, ridge=ridge)
            grads = restore(gradient)
        return *online.apply_grads(parts, state, value, stats, grads), {}

    return online.make_method(parts, net, update, seen_only=False)


def _compute_past_gradients(parts, slope, state, stats, key, size):
    """Return f32[T-1,P], a gradient for each past task, and the statistics."""
    memory = state.extra.memory
    zero = jnp.zeros_like(jax.flatten_util.ravel_pytree(state.params)[0])

    def gradient_of(stats, task_key):
        task, key = task_key
        allowed = (memory.items["task"] == task) & online.past_tasks(state)
        rows = online.draw_rows(parts, memory, key, size=size, allowed=allowed)

        def descend(stats):
            (_, stats), grads = slope(state.params, stats, rows)
            return stats, jax.flatten_util.ravel_pytree(grads)[0]

        if sharding.on_cpu():
            return descend(stats)
        # A task without rows costs nothing.
        return jax.lax.cond(jnp.any(rows.mask), descend, lambda s: (s, zero), stats)

    num_past = parts.num_tasks - 1
    each = jnp.arange(num_past), jax.random.split(key, num_past)
    return sharding.loop(gradient_of, stats, each)


def project(
    gradient: jax.Array,
    memory_gradients: jax.Array,
    *,
    margin: float = 0.5,
    ridge: float = 1e-3,
    mask: jax.Array | None = None,
) -> jax.Array:
    """Move the gradient so that it does not point against any memory gradient.

    x = g + G^T v, where v is the minimum over v >= margin of
      1/2 v^T (G G^T + ridge I) v + (G g)^T v,
    the paper's dual; x = g if no inner product <g, g_k> is negative. With margin 0 and
    ridge 0, x is the nearest vector to g with <x, g_k> >= 0 for all k. The defaults are
    the released code's.

    In f32 <x, g_k> >= -1e-4 |g| |g_k|, and x is within 1e-5 |g| of the exact vector for
    gradients in general position. If nearly dependent gradients oppose one another, the
    vector nearest within that tolerance may be far from the exact one.

    Args:
      gradient: f32[P].
      memory_gradients: f32[K,P], one row per past task.
      margin: lower bound of v, at least 0.
      ridge: number added to the diagonal, at least 0.
      mask: bool[K], rows that exist; the others have no effect. None: all exist.

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
    products = dot(rows, gradient)
    violated = jnp.any(products < 0)
    matrix = dot(rows, rows.T) + ridge * jnp.eye(count, dtype=rows.dtype)
    linear = jnp.where(violated, products + margin * jnp.sum(matrix, axis=1), 0)
    projected = gradient + dot(margin + quadratic.find_minimum(matrix, linear), rows)
    return jnp.where(violated, projected, gradient)
