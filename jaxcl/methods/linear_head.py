"""A linear classifier by gradient descent on frozen features, with a replay memory.

Each batch makes `steps` descents on the cross-entropy of its rows and of as many drawn
from the memory. The memory is filled by reservoir sampling (Vitter, 1985). Without a
memory it is sequential fine-tuning of a head, the control that forgets.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxcl import core, schema
from jaxcl.losses import replay
from jaxcl.memory import buffer, policies
from jaxcl.methods import frozen


class Learner(NamedTuple):
    """What the head has learned, and the rows that it keeps."""

    weights: jax.Array  # f32[D,C]
    biases: jax.Array  # f32[C]
    counts: jax.Array  # f32[C], rows met of each class
    memory: Any  # buffer.Buffer of "features" f32[D] and "label" i32; None: none
    key: jax.Array  # of the reservoir and of all draws


@schema.checked("config.method")
def make(
    parts: core.Parts,
    *,
    memory_size: schema.Natural = 2000,
    lr: schema.Positive = 1.0,
    steps: schema.Count = 8,
) -> core.Method:
    """Predict by a linear layer on features of unit length.

    Args:
      memory_size: features that are kept and replayed; 0: none.
      lr: rate of the descent, which has no momentum and no decay.
      steps: descents on each batch, each with other rows from the memory.
    """
    return frozen.method(parts, rule(memory_size, lr, steps))


def rule(memory_size: int, lr: float, steps: int) -> frozen.Rule:
    """Return the rule of a linear head; arguments as of `make`."""

    def start(key, dim, classes):
        example = {"features": jnp.zeros((dim,)), "label": jnp.zeros((), jnp.int32)}
        memory = buffer.create(example, memory_size) if memory_size else None
        counts = jnp.zeros((classes,))
        return Learner(jnp.zeros((dim, classes)), counts, counts, memory, key)

    def add(learner, rows):
        own = {"features": core.l2_normalize(rows.features), "label": rows.label}
        counts = learner.counts + frozen.one_hot(rows, len(learner.counts)).sum(0)
        layer = learner.weights, learner.biases
        k_slots, k_draws = jax.random.split(learner.key)
        k_draws = jax.random.fold_in(k_draws, counts.sum().astype(jnp.int32))
        for k_draw in jax.random.split(k_draws, steps):
            batch, mask = own, rows.mask
            if memory_size:
                drawn, there, _ = buffer.sample(
                    learner.memory, k_draw, min(len(rows.label), memory_size)
                )
                batch = jax.tree.map(lambda *x: jnp.concatenate(x), own, drawn)
                mask = jnp.concatenate([rows.mask, there])
            layer = descend(layer, batch, mask, counts > 0, lr)
        memory = learner.memory
        if memory_size:
            slots = policies.reservoir(memory, k_slots, rows.mask)
            memory = buffer.write(memory, slots, own, rows.mask)
        return Learner(*layer, counts, memory, learner.key)

    def fit(learner):
        return learner

    def scores(learner, features):
        found = logits((learner.weights, learner.biases), core.l2_normalize(features))
        return frozen.known_only(found, learner.counts)

    return frozen.Rule(start, add, fit, scores)


def logits(layer: tuple[jax.Array, jax.Array], features: jax.Array) -> jax.Array:
    """Apply weights f32[D,C] and biases f32[C] to features f32[B,D]."""
    return jnp.matmul(features, layer[0], precision="highest") + layer[1]


def descend(
    layer: tuple[jax.Array, jax.Array],
    batch: dict[str, jax.Array],
    mask: jax.Array,
    seen: jax.Array,
    lr: float,
) -> tuple[jax.Array, jax.Array]:
    """Make one step down the mean cross-entropy over the classes met so far.

    Args:
      layer: weights f32[D,C] and biases f32[C].
      batch: "features" f32[B,D] and "label" i32[B].
      mask: bool[B], rows that exist.
      seen: bool[C], classes of which a row was met.
      lr: length of the step.
    """

    def loss(layer):
        found = logits(layer, batch["features"])
        how = {"class_mask": seen, "example_mask": mask}
        return replay.cross_entropy(found, batch["label"], **how)

    slope = jax.grad(loss)(layer)
    return jax.tree.map(lambda x, d: x - lr * d, layer, slope)
