"""Nearest neighbours in a bounded memory of features; the encoder is frozen.

The memory is filled by reservoir sampling (Vitter, 1985). The vote is that of the
evaluator `knn`: each of the k nearest adds exp(cosine / temperature) to its class.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxcl import core, schema
from jaxcl.memory import buffer, policies
from jaxcl.methods import frozen


class Stored(NamedTuple):
    """The memory, and the state of its reservoir."""

    memory: Any  # buffer.Buffer of "features" f32[D] and "label" i32
    key: jax.Array  # of the reservoir, one for the whole stream


@schema.checked("config.method")
def make(
    parts: core.Parts,
    *,
    memory_size: schema.Count = 5000,
    k: schema.Count = 20,
    temperature: schema.Temperature = 0.07,
) -> core.Method:
    """Predict by the stored features that are nearest.

    Args:
      memory_size: number of stored features.
      k: neighbours that vote.
      temperature: temperature of their weights.
    """
    return frozen.make_method(
        parts, make_rule(parts.num_classes, memory_size, k, temperature)
    )


def make_rule(
    classes: int, memory_size: int, k: int, temperature: float
) -> frozen.Rule:
    """Return the rule of a memory; arguments as for `make`."""

    def start(key, dim, classes):
        example = {"features": jnp.zeros((dim,)), "label": jnp.zeros((), jnp.int32)}
        memory = buffer.create(example, memory_size)
        return Stored(memory, key)

    def add(stored, rows):
        slots = policies.reservoir(stored.memory, stored.key, rows.mask)
        items = {"features": core.l2_normalize(rows.features), "label": rows.label}
        memory = buffer.write(stored.memory, slots, items, rows.mask)
        return stored._replace(memory=memory)

    def scores(stored, features):
        memory = stored.memory
        cosines = core.dot(core.l2_normalize(features), memory.items["features"])
        cosines = jnp.where(memory.filled, cosines, -jnp.inf)
        nearest, slots = jax.lax.top_k(cosines, min(k, memory_size))
        votes = jax.nn.one_hot(memory.items["label"][slots], classes)
        # exp(1 / temperature) may exceed float32.
        logits = nearest[..., None] / temperature
        return jax.nn.logsumexp(logits, axis=1, b=votes)

    return frozen.Rule(start, add, scores)
