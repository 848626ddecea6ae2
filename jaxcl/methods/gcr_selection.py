"""What GCR does when a task ends: a new memory out of its two.

Tiwari et al., "GCR: Gradient Coreset Based Replay Buffer Selection for Continual
Learning", CVPR 2022 (algorithm 2); how rows are chosen is in `memory/coreset.py`.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax import flatten_util

from jaxcl import core, sharding
from jaxcl.losses import replay as losses
from jaxcl.memory import buffer, coreset

_SELECT = 0x6C2  # keeps the selection's randomness apart from that of the next step


def at_the_end(parts: core.Parts, net, *, alpha, beta, ridge) -> Callable:
    """(state, task) -> state, its candidates gone and its memory chosen anew.

    One pass of all stored rows in evaluation mode, and no gradient but the head's. The
    host learns labels, tasks and weights alone.
    """

    @jax.jit
    def pool_of(state):
        """Items of both memories, which of them exist, their features f32[N,D]."""
        held = state.extra.memory, state.extra.candidates
        items = jax.tree.map(lambda *x: jnp.concatenate(x), *(b.items for b in held))
        filled = jnp.concatenate([b.filled for b in held])

        def features(image):
            images = parts.plain(image[None])
            return net(state.params, state.stats, images, train=False)[0].features[0]

        return items, filled, jax.lax.map(features, items["image"], batch_size=256)

    @jax.jit
    def atoms(head, items, features, rows):
        return gradients(
            net,
            head,
            features[rows],
            items["logits"][rows],
            items["label"][rows],
            items["weight"][rows],
            alpha=alpha,
            beta=beta,
        )

    @jax.jit
    def rebuilt(state, items, rows, weight, filled):
        old, held = state.extra.memory, state.extra.candidates
        items = jax.tree.map(lambda x: x[rows], items) | {"weight": weight}
        memory = buffer.Buffer(items, filled, old.seen + held.seen)
        empty = jax.tree.map(jnp.zeros_like, held)
        extra = state.extra._replace(memory=memory, candidates=empty)
        return state.replace(extra=extra)

    def end_task(state, task):
        items, filled, features = pool_of(state)
        facts = {name: items[name] for name in ("weight", "task", "label")}
        facts = sharding.fetch(facts | {"filled": filled})
        capacity = parts.replay.capacity
        weight = coreset.reselect(
            jax.random.fold_in(core.step_key(state), _SELECT),
            lambda rows: atoms(state.params["head"], items, features, rows),
            **facts,
            capacity=capacity,
            ridge=ridge,
        )
        rows = np.flatnonzero(weight)
        there = np.arange(capacity) < len(rows)
        rows = np.pad(rows, (0, capacity - len(rows)))
        return rebuilt(state, items, rows, weight[rows] * there, there)

    return end_task


def gradients(net, head, features, logits, labels, weights, *, alpha, beta):
    """Of w (beta * CE + alpha * MSE) of each row, by the head's parameters, f32[N, P].

    Args:
      features: f32[N,D]. logits: f32[N,C], stored. labels: i32[N]. weights: f32[N], w.
    """

    def loss(head, feature, stored, label):
        now = net.logits({"head": head}, feature[None])
        value = beta * losses.cross_entropy(now, label[None])
        return value + alpha * losses.der(now, stored[None])

    def one(feature, stored, label, weight):
        slope = jax.grad(loss)(head, feature, stored, label)
        return weight * flatten_util.ravel_pytree(slope)[0]

    return jax.vmap(one)(features, logits, labels, weights)
