"""DUEL's Algorithm 4 as the paper writes it, in JAX and in eager PyTorch.

All products of rows first, then sums of scores that run along: what `duel.py` times
beside jaxcl.memory.duel.select, which makes the same choices without the products.
"""

import jax
import jax.numpy as jnp

from jaxcl import core
from jaxcl.memory import duel


def in_jax(memory, incoming):
    """Algorithm 4 of the paper: all scores first, then their sums run along.

    Args:
      memory: f32[K, Z], unit rows, all of them there.
      incoming: f32[B, Z].

    Returns:
      bool[K+B], which rows of both are held then.
    """
    capacity, count = len(memory), len(incoming)
    both = jnp.concatenate([memory, incoming])
    alike = duel.similarity(core.dot(both, both))
    none = jnp.zeros(count, both.dtype)
    sums = jnp.concatenate([jnp.sum(alike[:capacity, :capacity], axis=1), none])

    def turn(new, carry):
        sums, held = carry
        worst = jnp.argmax(sums)
        sums = (sums - alike[worst] * held).at[worst].set(0)
        held = held.at[worst].set(False)
        joins = alike[new] * held
        sums = (sums + joins).at[new].set(jnp.sum(joins) + 1)
        return sums, held.at[new].set(True)

    carry = sums, jnp.arange(capacity + count) < capacity
    return jax.lax.fori_loop(capacity, capacity + count, turn, carry)[1]


def in_torch(memory, incoming):
    """The same in eager PyTorch, on tensors."""
    import torch

    capacity, count = len(memory), len(incoming)
    both = torch.cat((memory, incoming))
    alike = (1 + both @ both.T) / 2
    held = torch.arange(capacity + count, device=both.device) < capacity
    sums = torch.cat((alike[:capacity, :capacity].sum(1), both.new_zeros(count)))
    for new in range(capacity, capacity + count):
        worst = torch.argmax(sums)
        sums -= alike[worst] * held
        held[worst] = False
        sums[worst] = 0
        joins = alike[new] * held
        sums += joins
        held[new] = True
        sums[new] = joins.sum() + 1
    return held
