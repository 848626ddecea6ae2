"""A-GEM: the gradient does not point against the gradient of replayed rows.

Chaudhry et al., "Efficient Lifelong Learning with A-GEM", ICLR 2019: GEM with a single
constraint, on the mean over past tasks, whose solution has a closed form. A-GEM++ is a
baseline in the released code of Caccia et al., "New Insights on Reducing Abrupt
Representation Change in Online Continual Learning", ICLR 2022.

Departures:
- One head over all classes; on CIFAR-100 each of the paper's tasks has its own.
- A reference gradient of 0 changes nothing; released codes divide by its length.
- Incoming and replayed rows pass in training mode; running statistics follow the
  incoming pass, then the replayed one.
"""

import functools

import jax
import jax.flatten_util
import jax.numpy as jnp

from jaxcl import core, schema
from jaxcl.methods import online


@schema.checked("config.method")
def make(
    parts: core.Parts,
    *,
    head: online.Head = "linear",
    replay_from: online.ReplayFrom = "past_tasks",
    plus: bool = False,
) -> core.Method:
    """Take steps on incoming rows that do not raise the loss of replayed ones.

    Args:
      head: "linear" or "cosine".
      replay_from: "past_tasks", "all" or "other_classes", see `er.make`.
      plus: A-GEM++, which adds the reference gradient after the projection.
    """
    net = online.build_network(parts, head)

    loss = functools.partial(online.cross_entropy, net)
    slope = jax.value_and_grad(loss, has_aux=True)

    def update(state, incoming, key):
        allowed = online.replayable(replay_from, state, incoming)
        replayed = online.draw_rows(parts, state.extra.memory, key, allowed=allowed)
        (value, stats), grads = slope(state.params, state.stats, incoming)
        (_, stats), old_grads = slope(state.params, stats, replayed)
        gradient, restore = jax.flatten_util.ravel_pytree(grads)
        reference, _ = jax.flatten_util.ravel_pytree(old_grads)
        gradient = project(gradient, reference) + (reference if plus else 0.0)
        return *online.apply_grads(parts, state, value, stats, restore(gradient)), {}

    return online.make_method(parts, net, update, seen_only=False)


def project(gradient: jax.Array, reference: jax.Array) -> jax.Array:
    """Return the nearest vector to `gradient` that does not point against `reference`.

    g - <g, r> / <r, r> r where <g, r> < 0, else g; r = 0 changes nothing.

    Args:
      gradient: f32[P].
      reference: f32[P].

    Returns:
      f32[P].
    """
    # Only the direction of r counts; the squares of small numbers would underflow.
    largest = jnp.max(jnp.abs(reference))
    unit = reference / jnp.where(largest > 0, largest, 1.0)
    against = jnp.minimum(jnp.vdot(gradient, unit, precision="highest"), 0.0)
    length = jnp.vdot(unit, unit, precision="highest")
    return gradient - against / jnp.where(length > 0, length, 1.0) * unit
