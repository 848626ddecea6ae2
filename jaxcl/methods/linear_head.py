"""A linear classifier by gradient descent on frozen features, with a replay memory.

Each batch makes `steps` descents on the cross-entropy of its rows and of as many drawn
from the memory. The memory is filled by reservoir sampling (Vitter, 1985). Without a
memory it is sequential fine-tuning of a head, the control that forgets.

Features are standardised by the mean and variance of all rows so far (Chan et al.,
1983), and divided by the square root of their number: rows have a mean square length
of 1, whatever the encoder.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxcl import core, schema
from jaxcl.losses import replay
from jaxcl.memory import buffer, policies
from jaxcl.methods import frozen


class Moments(NamedTuple):
    """Mean and scatter of all features so far."""

    count: jax.Array  # i32[]
    mean: jax.Array  # f32[D]
    scatter: jax.Array  # f32[D], sum of squared distances from the mean


class Learner(NamedTuple):
    """The head, the moments of its features, and the stored rows."""

    layer: tuple[jax.Array, jax.Array]  # weights f32[D,C] and biases f32[C]
    moments: Moments
    counts: jax.Array  # i32[C], rows met of each class
    memory: Any  # buffer.Buffer of "features" f32[D] and "label" i32; None: none
    key: jax.Array  # of the reservoir and of all draws


@schema.checked("config.method")
def make(
    parts: core.Parts,
    *,
    memory_size: schema.Natural = 2000,
    lr: schema.Positive = 10.0,
    steps: schema.Count = 32,
) -> core.Method:
    """Predict by a linear layer on standardised features; our control, of no paper.

    Args:
      memory_size: number of features stored for replay; 0: none.
      lr: rate of the descent, which has no momentum and no decay.
      steps: descents on each batch, each with other rows from the memory.
    """
    return frozen.make_method(parts, make_rule(memory_size, lr, steps))


def make_rule(memory_size: int, lr: float, steps: int) -> frozen.Rule:
    """Return the rule of a linear head; arguments as for `make`."""

    def start_learner(key, dim, classes):
        example = {"features": jnp.zeros((dim,)), "label": jnp.zeros((), jnp.int32)}
        layer = jnp.zeros((dim, classes)), jnp.zeros((classes,))
        none = jnp.zeros((), jnp.int32)
        moments = Moments(none, jnp.zeros((dim,)), jnp.zeros((dim,)))
        memory = buffer.create(example, memory_size) if memory_size else None
        counts = jnp.zeros((classes,), jnp.int32)
        return Learner(layer, moments, counts, memory, key)

    def add_rows(learner, rows):
        items = {"features": rows.features, "label": rows.label}
        counts = learner.counts + frozen.count_rows(rows, len(learner.counts))
        moments, memory = observe(learner.moments, rows), learner.memory
        k_slots, k_draws = jax.random.split(learner.key)
        k_draws = jax.random.fold_in(k_draws, moments.count)

        def step(layer, k_draw):
            batch, mask = items, rows.mask
            if memory_size:
                count = min(len(rows.label), memory_size)
                drawn, exists, _ = buffer.sample(memory, k_draw, count)
                batch = jax.tree.map(lambda *x: jnp.concatenate(x), items, drawn)
                mask = jnp.concatenate([mask, exists])
            features = standardise(moments, batch["features"])
            return descend(layer, features, batch["label"], mask, counts > 0, lr), None

        layer, _ = jax.lax.scan(step, learner.layer, jax.random.split(k_draws, steps))
        if memory_size:
            slots = policies.reservoir(memory, k_slots, rows.mask)
            memory = buffer.write(memory, slots, items, rows.mask)
        return Learner(layer, moments, counts, memory, learner.key)

    def scores(learner, features):
        values = logits(learner.layer, standardise(learner.moments, features))
        return frozen.known_only(values, learner.counts)

    return frozen.Rule(start_learner, add_rows, scores)


def observe(moments: Moments, rows: frozen.Rows) -> Moments:
    """Return the moments after more rows."""
    new = rows.mask.sum(dtype=jnp.int32)
    count = moments.count + new
    mean = (rows.features * rows.mask[:, None]).sum(0) / jnp.maximum(new, 1)
    gaps = (rows.features - mean) * rows.mask[:, None]
    shift = mean - moments.mean
    share = new / jnp.maximum(count, 1)
    scatter = moments.scatter + (gaps * gaps).sum(0)
    scatter = scatter + shift * shift * moments.count * share
    return Moments(count, moments.mean + shift * share, scatter)


def standardise(moments: Moments, features: jax.Array) -> jax.Array:
    """Return features f32[B,D] with mean 0 and a mean square length of 1."""
    variance = moments.scatter / jnp.maximum(moments.count, 1)
    # A feature that hardly varies has no scale to be divided by.
    variance = variance + 1e-6 * variance.mean()
    variance = jnp.where(variance > 0, variance, 1)  # all rows are equal
    return (features - moments.mean) / jnp.sqrt(variance * features.shape[1])


def logits(layer: tuple[jax.Array, jax.Array], features: jax.Array) -> jax.Array:
    """Apply weights f32[D,C] and biases f32[C] to features f32[B,D]."""
    return jnp.matmul(features, layer[0], precision="highest") + layer[1]


def descend(
    layer: tuple[jax.Array, jax.Array],
    features: jax.Array,
    label: jax.Array,
    mask: jax.Array,
    seen: jax.Array,
    lr: float,
) -> tuple[jax.Array, jax.Array]:
    """Make one step down the mean cross-entropy over the classes so far.

    Args:
      layer: weights f32[D,C] and biases f32[C].
      features: f32[B,D].
      label: i32[B].
      mask: bool[B], rows that exist.
      seen: bool[C], classes with at least one row so far.
      lr: length of the step.
    """

    def loss(layer):
        scores = logits(layer, features)
        return replay.cross_entropy(scores, label, class_mask=seen, example_mask=mask)

    return jax.tree.map(lambda x, d: x - lr * d, layer, jax.grad(loss)(layer))
