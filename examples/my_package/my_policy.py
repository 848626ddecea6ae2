"""A replay policy: keep every fourth row of the stream, and drop the oldest ones.

The memory then reaches four times as far back as with "fifo". Use it in any method that
replays, with --config.replay.policy=my_package.my_policy.
"""

import jax.numpy as jnp

from jaxcl.memory import policies

EVERY = 4


def choose(buffer, state, key, items, mask):
    """Choose a slot for each incoming row.

    Args:
      buffer: the memory, a `buffer.Buffer`; `seen` counts the rows offered so far.
      state: counts of the policy; this one counts nothing.
      key: key of random draws; this policy draws nothing.
      items: the incoming rows, with what `Policy.reads` names.
      mask: bool[B], rows that exist.

    Returns:
      i32[B], slots; `buffer.capacity` drops the row. And `state`, after the batch.
    """
    number = buffer.seen + jnp.cumsum(mask) - mask  # place of each row in the stream
    enters = mask & (number % EVERY == 0)
    slots = number // EVERY % buffer.capacity
    return jnp.where(enters, slots, buffer.capacity), state


def make() -> policies.Policy:
    """Make the policy."""
    return policies.Policy(choose)
