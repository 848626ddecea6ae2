"""Store the memory of config.replay whole on each device, or split over the devices.

Functions take both; `find_policy` makes a policy for one. A split memory holds images
that are too many for one device: each device keeps, writes and draws its own rows. Each
of n devices has capacity / n slots, offers its own share of every batch (axis 0 split)
to its own policy, and draws k / n of k rows. No item ever moves between devices.

A reservoir stays uniform. Every device is offered the same number of rows, s of the S =
n s rows of the stream, and keeps each of them with probability (capacity / n) / s =
capacity / S. So all devices store the same number of rows, and each stored row is drawn
with probability (k / n) / (rows stored / n), as in a uniform draw. The draw is
stratified: the number of rows from each device is fixed. With weights, a row is drawn
in proportion among the rows of its own device.

Other policies apply to each device's share of the stream, not to the whole stream: a
ring keeps the last rows of each share, classes are balanced within each share.

Slots are local: numbers from 0 to capacity / n - 1 on the device that holds the row,
`capacity / n` for no slot. With one device all is as in buffer.py, draws included.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxcl import core, sharding
from jaxcl.errors import Refused
from jaxcl.memory import buffer, policies


class Shards(NamedTuple):
    """A buffer in n shards, with the fields of `buffer.Buffer`."""

    items: core.PyTree  # pytree of [capacity, ...], split over the devices
    filled: jax.Array  # bool[capacity], split
    seen: jax.Array  # i32[n], examples offered to each device

    @property
    def capacity(self) -> int:
        """The number of slots of all devices."""
        return self.filled.shape[0]

    @property
    def over_devices(self) -> bool:
        """True: every leaf is split on axis 0, see `sharding.placement`."""
        return True


class ShardedPolicyState(NamedTuple):
    """A policy's state, with a part for each device."""

    each: core.PyTree  # pytree of [n, ...], split over the devices

    @property
    def over_devices(self) -> bool:
        """True: every leaf is split on axis 0, see `sharding.placement`."""
        return True


class SplitRows(NamedTuple):
    """Rows split over the devices and used as one array; XLA adds the messages.

    For policies that compare all rows, as DUEL's does. They keep the same rows on any
    number of devices.
    """

    rows: core.PyTree  # pytree of [capacity, ...], split over the devices

    @property
    def over_devices(self) -> bool:
        """True: every leaf is split on axis 0, see `sharding.placement`."""
        return True


def count_shards(replay: core.Replay) -> int:
    """Count the devices that share the memory; 1 if each holds all of it."""
    mesh = sharding.current()
    return sharding.num_row_shards(mesh) if replay.sharded and mesh is not None else 1


def create(example: core.PyTree, replay: core.Replay) -> buffer.Buffer | Shards:
    """Make an empty memory: `Shards` if `replay.sharded`, else a `buffer.Buffer`.

    Args:
      example: one item, as in `buffer.create`.
      replay: core.Replay, with the slots of all devices and whether they are split.
    """
    memory = buffer.create(example, replay.capacity)
    if not replay.sharded:
        return memory
    seen = jnp.zeros((count_shards(replay),), jnp.int32)
    return sharding.shard_rows_in_jit(Shards(memory.items, memory.filled, seen))


def find_policy(replay: core.Replay) -> policies.Policy:
    """Find the policy of config.replay, for a memory from `create`.

    If the memory is split, the policy runs on each device by itself: slots are local,
    and its state has a part for each device. A draw is uniform over the memory only if
    all devices are offered equally many unmasked rows.

    Raises:
      Refused: there is no such policy. Its `choose` refuses a batch that the devices
        cannot share evenly.
    """
    policy = policies.look_up(replay.policy)
    if not replay.sharded:
        return policy

    def choose(memory, state, key, items, mask):
        rows = memory, state, items, mask
        return sharding.map_per_device(choose_on_device, rows, (key,))

    def choose_on_device(memory, state, items, mask, key):
        memory, key = _read_shard(memory), _fold_device(key)
        local_state = jax.tree.map(lambda x: x[0], state.each)
        slots, local_state = policy.choose(memory, local_state, key, items, mask)
        return slots, ShardedPolicyState(jax.tree.map(lambda x: x[None], local_state))

    def start(num_classes, num_tasks):
        shard, count = policy.start(num_classes, num_tasks), count_shards(replay)
        each = jax.tree.map(lambda x: jnp.broadcast_to(x, (count, *x.shape)), shard)
        return sharding.shard_rows_in_jit(ShardedPolicyState(each))

    def least(num_classes, num_tasks):
        return policy.least(num_classes, num_tasks) * count_shards(replay)

    return policy._replace(choose=choose, start=start, least=least)


def store_rows(
    policy: policies.Policy,
    memory: buffer.Buffer | Shards,
    state: core.PyTree,
    key: jax.Array,
    items: core.PyTree,
    mask: jax.Array | None = None,
    *,
    after: core.PyTree = (),
) -> tuple[buffer.Buffer | Shards, core.PyTree]:
    """Store the incoming rows that a policy keeps, each on the device that has it.

    Args:
      policy: policy of `find_policy`, for this memory.
      memory: memory of `create`.
      state: the policy's state, at first `policy.start(num_classes, num_tasks)`.
      key: threefry key, of the policy.
      items: pytree of [B, ...], as the example of `create`; B a multiple of the number
        of devices.
      mask: bool[B], rows that exist; None: all.
      after: arrays that the step read from the memory, see `buffer.write`.

    Returns:
      The memory and the policy's state, after the rows.

    Raises:
      Refused: `items` does not match the example of `create`, or the devices
        cannot share the rows evenly.
    """
    if mask is None:
        mask = jnp.ones(len(jax.tree.leaves(items)[0]), bool)
    slots, state = policy.choose(memory, state, key, items, mask)
    if isinstance(memory, buffer.Buffer):
        return buffer.write(memory, slots, items, mask, after=after), state

    def write_on_device(memory, *rows):
        shard = buffer.write(_read_shard(memory), *rows)
        return Shards(shard.items, shard.filled, shard.seen[None])

    # Ordered here: a sum over what was read is one over all devices.
    rows = memory, buffer.order_after(slots, after), items, mask
    return sharding.map_per_device(write_on_device, rows, ()), state


def sample(
    memory: buffer.Buffer | Shards,
    key: jax.Array,
    k: int,
    *,
    log_weights: jax.Array | None = None,
) -> tuple[core.PyTree, jax.Array, jax.Array]:
    """Draw k / n rows on each device without replacement, see `buffer.sample`.

    Args:
      k: rows in all, a multiple of the number of devices.
      log_weights: f32[capacity]; they compare the rows of one device.

    Returns:
      items: pytree of [k, ...], split over the devices.
      mask: bool[k]; False at the end of the share of a device that has fewer rows.
      slots: i32[k], local.

    Raises:
      Refused: k is above the capacity or no multiple of the number of devices.
    """
    if isinstance(memory, buffer.Buffer):
        return buffer.sample(memory, key, k, log_weights=log_weights)
    count = sharding.per_device("k", k, sharding.current())
    if k > memory.capacity:
        raise Refused(f"k={k}: allowed are up to the capacity, {memory.capacity}")

    def sample_on_device(memory, log_weights, key):
        memory, key = _read_shard(memory), _fold_device(key)
        return buffer.sample(memory, key, count, log_weights=log_weights)

    return sharding.map_per_device(sample_on_device, (memory, log_weights), (key,))


def on_each_device(replay: core.Replay, function: Callable, *trees: core.PyTree):
    """Call a function on the memory's rows, on each device if the rows are split.

    Args:
      replay: core.Replay, which says whether the rows are split.
      function: function (*trees) -> arrays with rows; it sends nothing.
      trees: pytrees of arrays whose axis 0 is split as the memory is.
    """
    if replay.sharded:
        return sharding.map_per_device(function, trees, ())
    return function(*trees)


def _read_shard(memory: Shards) -> buffer.Buffer:
    """Return a device's own part of the memory, on that device."""
    return buffer.Buffer(memory.items, memory.filled, memory.seen[0])


def _fold_device(key: jax.Array) -> jax.Array:
    """Return a key for each device; with one device the key itself."""
    mesh = sharding.current()
    if mesh is None or sharding.num_row_shards(mesh) == 1:
        return key
    return jax.random.fold_in(key, jax.lax.axis_index(sharding.AXIS))
