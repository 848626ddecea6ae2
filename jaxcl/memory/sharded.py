"""A memory split over the devices: each keeps, writes and draws its own rows.

For memories that are too large for one device. Each of n devices has capacity / n
slots, offers its own share of every batch (axis 0 split) to its own policy, and draws
k / n of k rows. No item ever moves between devices.

A reservoir stays uniform. Every device is offered the same number of rows, s of the
S = n s rows of the stream, and keeps each of them with probability
(capacity / n) / s = capacity / S. So all devices store the same number of rows, and
each stored row is drawn with probability (k / n) / (rows stored / n), that of a uniform
draw. The draw is stratified: the number of rows from each device is fixed. With
weights, a row is drawn in proportion among the rows of its own device.

Other policies apply to each device's share of the stream, not to the whole stream: a
ring keeps the last rows of each share, classes are balanced within each share.

Slots are local: numbers from 0 to capacity / n - 1 on the device that holds the row,
`capacity / n` for no slot. With one device all is as in buffer.py, draws included.
"""

import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from jaxcl import core, sharding
from jaxcl.memory import buffer, policies


class Shards(NamedTuple):
    """A buffer in n shards; the fields are those of `buffer.Buffer`."""

    over_devices = True  # every leaf is split on axis 0, see `sharding.placement`

    items: object  # pytree of [capacity, ...], split over the devices
    filled: jax.Array  # bool[capacity], split
    seen: jax.Array  # i32[n], examples offered to each device

    @property
    def capacity(self) -> int:
        """Number of slots of all devices."""
        return self.filled.shape[0]


class Kept(NamedTuple):
    """What a policy counts, separately on each device."""

    over_devices = True  # every leaf is split on axis 0, see `sharding.placement`

    each: object  # pytree of [n, ...], split over the devices


class Spread(NamedTuple):
    """Rows split over the devices and used as one array; XLA adds the messages.

    For policies that compare all rows, as DUEL's does. They keep the same rows on any
    number of devices.
    """

    over_devices = True  # every leaf is split on axis 0, see `sharding.placement`

    rows: object  # pytree of [capacity, ...], split over the devices


class Memory(NamedTuple):
    """The functions of a memory, whole on each device or split over them."""

    create: Callable  # (example, capacity) -> buffer
    start: Callable  # (name of a policy, num_classes, num_tasks) -> kept
    choose: Callable  # (name, buffer, kept, key, items, mask) -> (slots, kept)
    write: Callable  # (buffer, slots, items, mask=None, *, after=()) -> buffer
    sample: Callable  # (buffer, key, k, *, log_weights=None) -> (items, mask, slots)
    on_each_device: Callable  # (function, *trees) -> `function` of its own rows
    shards: int = 1  # number of devices that share the memory


def create(example: core.PyTree, capacity: int, mesh: jax.sharding.Mesh) -> Shards:
    """An empty memory, see `buffer.create`.

    Args:
      example: as in `buffer.create`.
      capacity: slots of all devices, a multiple of their number.
      mesh: of one axis.

    Raises:
      ValueError: capacity is not a positive multiple of the number of devices.
    """
    own = sharding.share("capacity", capacity, mesh)
    example = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), example)
    return _on_each(mesh, lambda: _shards(buffer.create(example, own)))


def start(
    policy: str, num_classes: int, num_tasks: int, *, mesh: jax.sharding.Mesh
) -> Kept:
    """Start the counts that a policy keeps."""
    begin = policies.get(policy).start
    return _on_each(mesh, lambda: _kept(begin(num_classes, num_tasks)))


def choose(
    policy: str,
    memory: Shards,
    kept: Kept,
    key: jax.Array,
    items: core.PyTree,
    mask: jax.Array,
    *,
    mesh: jax.sharding.Mesh,
):
    """Where each row goes on its own device, see `policies.Policy`.

    Args:
      items: pytree of [B, ...], B a multiple of the number of devices.
      mask: bool or f32 [B], rows that exist. A draw is uniform over the memory only
        if each device's share of the stream has as many of them.

    Returns:
      slots: i32[B], local, split over the devices.
      kept: after the batch.

    Raises:
      ValueError: the devices cannot share the rows evenly.
    """
    sharding.share("rows", len(mask), mesh)

    def local(memory, kept, items, mask, key):
        own = jax.tree.map(lambda x: x[0], kept.each)
        slots, own = policies.get(policy).choose(
            _whole(memory), own, _own_key(key, mesh), items, mask
        )
        return slots, _kept(own)

    return _on_each(mesh, local, memory, kept, items, mask, everywhere=(key,))


def write(
    memory: Shards,
    slots: jax.Array,
    items: core.PyTree,
    mask: jax.Array | None = None,
    *,
    after: core.PyTree = (),
    mesh: jax.sharding.Mesh,
) -> Shards:
    """Put each row into its slot on the device that has the row, see `buffer.write`.

    Args:
      slots: i32[B], local; B a multiple of the number of devices.

    Raises:
      ValueError: `items` does not match the example of `create`, or the devices
        cannot share the rows evenly.
    """
    sharding.share("rows", len(slots), mesh)
    slots = jnp.asarray(slots, jnp.int32)
    mask = jnp.ones(slots.shape, bool) if mask is None else mask
    # `after` only orders the computation; a flag per leaf spares sending the arrays.
    after = [jnp.any(x != 0) for x in jax.tree.leaves(after)]

    def local(memory, slots, items, mask, after):
        return _shards(buffer.write(_whole(memory), slots, items, mask, after=after))

    return _on_each(mesh, local, memory, slots, items, mask, everywhere=(after,))


def sample(
    memory: Shards,
    key: jax.Array,
    k: int,
    *,
    log_weights: jax.Array | None = None,
    mesh: jax.sharding.Mesh,
):
    """Draw k / n rows on each device without replacement, see `buffer.sample`.

    Args:
      k: rows in all, a multiple of the number of devices.
      log_weights: f32[capacity]; they compare the rows of one device.

    Returns:
      items: pytree of [k, ...], split over the devices.
      mask: bool[k]; False at the end of the share of a device that has fewer rows.
      slots: i32[k], local.

    Raises:
      ValueError: k is above the capacity or no multiple of the number of devices.
    """
    count = sharding.share("k", k, mesh)
    if k > memory.capacity:
        raise ValueError(f"k={k}: allowed are up to the capacity, {memory.capacity}")

    def local(memory, log_weights, key):
        own = _own_key(key, mesh)
        return buffer.sample(_whole(memory), own, count, log_weights=log_weights)

    return _on_each(mesh, local, memory, log_weights, everywhere=(key,))


# A memory that every device holds whole.
WHOLE = Memory(
    create=buffer.create,
    start=lambda policy, *of: policies.get(policy).start(*of),
    choose=lambda policy, *of: policies.get(policy).choose(*of),
    write=buffer.write,
    sample=buffer.sample,
    on_each_device=lambda function, *trees: function(*trees),
)


def over(mesh: jax.sharding.Mesh, replay: core.Replay | None = None) -> Memory:
    """The functions of a memory that is split over the devices of a mesh.

    Args:
      mesh: of one axis.
      replay: config.replay, to be checked; None: no check.

    Raises:
      ValueError: the devices cannot share capacity or size evenly.
    """
    for name in ("capacity", "size") if replay else ():
        sharding.share(f"config.replay.{name}", getattr(replay, name), mesh)
    bound = {
        function.__name__: functools.partial(function, mesh=mesh)
        for function in (create, start, choose, write, sample)
    }
    on_each_device = functools.partial(_on_each, mesh)
    return Memory(**bound, on_each_device=on_each_device, shards=mesh.size)


def _on_each(mesh, function, *trees, everywhere=()):
    """The function of each device's own rows; results are joined on axis 0.

    Args:
      trees: pytrees of arrays whose axis 0 is split over the devices.
      everywhere: further arguments, whole on each device.
    """
    own, whole = PartitionSpec(mesh.axis_names[0]), PartitionSpec()
    specs = (own,) * len(trees) + (whole,) * len(everywhere)
    # The function sends nothing, so the check of what varies has no use.
    local = jax.shard_map(
        function, mesh=mesh, in_specs=specs, out_specs=own, check_vma=False
    )
    return local(*trees, *everywhere)


def _own_key(key, mesh):
    """A key for each device; with one device the key itself, as in buffer.py."""
    if mesh.size == 1:
        return key
    return jax.random.fold_in(key, jax.lax.axis_index(mesh.axis_names[0]))


def _whole(shards: Shards) -> buffer.Buffer:
    return buffer.Buffer(shards.items, shards.filled, shards.seen[0])


def _shards(whole: buffer.Buffer) -> Shards:
    return Shards(whole.items, whole.filled, whole.seen[None])


def _kept(own) -> Kept:
    return Kept(jax.tree.map(lambda x: x[None], own))
