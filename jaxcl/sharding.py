"""Devices and hosts: the only file that knows how many there are."""

import collections
import contextlib
import contextvars
import functools
import os
import re
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from jaxcl import numerics
from jaxcl.errors import Refused

AXIS = "data"  # of a mesh; rows of a batch are split over it
MODEL = "model"  # its other axis; weights of a Vision Transformer are split over it
# End of a leaf's path -> its axis that is split, from the last: heads of the attention,
# and units of the MLP.
_SPLIT = {
    r"attention/(query|key|value)/kernel": -1,
    r"attention/(query|key|value)/bias": -1,
    r"attention/out/kernel": -2,
    r"mlp/(fc1|gate|up)/kernel": -1,
    r"mlp/(fc1|gate|up)/bias": -1,
    r"mlp/(fc2|down)/kernel": -2,
}


class _Elsewhere(NamedTuple):
    """The devices that programs are compiled for, if not those of this machine."""

    devices: tuple  # descriptions; () where those of this machine stand in for them
    platform: str


# None: programs are for the devices that are here.
_ELSEWHERE = contextvars.ContextVar("elsewhere", default=None)
# Devices that share the rows of a program that is traced, see `use_mesh`; None: one has
# all.
_MESH = contextvars.ContextVar("mesh", default=None)
# True: one CPU does the work of all devices, see `on_host`.
_ON_HOST = contextvars.ContextVar("on_host", default=False)


def initialize(coordinator=None, num_processes=None, process_id=None, timeout=300):
    """Join the other processes of a run; on one process, do nothing.

    On TPU pods, SLURM and Kubernetes JAX finds the others by itself when
    `JAXCL_DISTRIBUTED=1` is set; elsewhere name the coordinator
    ("host:port"), the number of processes and this one's number.
    """
    if coordinator is None and os.environ.get("JAXCL_DISTRIBUTED") != "1":
        return
    jax.distributed.initialize(
        coordinator_address=coordinator,
        num_processes=num_processes,
        process_id=process_id,
        initialization_timeout=timeout,
    )


def mesh(num_devices: int | None = None, *, model: int = 1) -> Mesh:
    """Make a mesh of one axis over all devices, or over the first `num_devices`.

    Args:
      num_devices: number of devices; None: all.
      model: number of devices that weights are split over; above 1 the mesh has another
        axis for them.

    Raises:
      Refused: `num_devices` is not between 1 and the number of devices.
    """
    target = _ELSEWHERE.get()
    described = () if target is None else target.devices
    devices = list(described or jax.devices())
    count = len(devices) if num_devices is None else num_devices
    if not described and jax.process_count() > 1 and 1 <= count <= len(devices):
        devices = _share_devices(devices, count)
    if not 1 <= count <= len(devices):
        field = "config.devices" if model == 1 else "config.mesh: data * model"
        raise Refused(
            f"{field}={count}: allowed are 1 to {len(devices)} "
            f"({devices[0].platform}) or None for all"
        )
    if model > 1 and jax.process_count() > 1:
        raise Refused(
            f"config.mesh: model={model} splits weights among the devices of one "
            f"process, and there are {jax.process_count()}; must be 1"
        )
    shape, names = (count // model, model), (AXIS, MODEL)
    if model == 1:
        shape, names = shape[:1], names[:1]
    types = (AxisType.Auto,) * len(names)
    if described:  # no order of theirs is better known than the compiler's
        return Mesh(np.array(devices[:count]).reshape(shape), names, axis_types=types)
    return jax.make_mesh(shape, names, types, devices=devices[:count])


def _share_devices(devices: list, count: int) -> list:
    """Choose as many devices of each process; refuse a count that leaves one out."""
    processes = jax.process_count()
    if count % processes:
        raise Refused(
            f"config.devices={count}: the {processes} processes of this run need as "
            f"many devices each: must be a multiple of {processes}, such as "
            f"--config.devices={-(-count // processes) * processes}, or None for all"
        )
    ranks: collections.Counter = collections.Counter()
    chosen = []
    for device in devices:
        if ranks[device.process_index] < count // processes:
            chosen.append(device)
        ranks[device.process_index] += 1
    return chosen


def num_row_shards(mesh: Mesh) -> int:
    """Count the shards that the rows of a batch are split into."""
    return mesh.shape[AXIS]


# What JAX calls a platform -> what we call it.
_PLATFORMS = {"cuda": "gpu", "rocm": "gpu"}


def platform() -> str:
    """Return the platform of programs: "cpu", "gpu", "tpu", or "any" accelerator.

    These are the devices of this machine, or of `compile_target`. Call it while a
    program is traced, not before.
    """
    target = _ELSEWHERE.get()
    name = target.platform if target else jax.default_backend()
    return _PLATFORMS.get(name, name)


def on_cpu() -> bool:
    """Tell whether the devices are CPUs, where loops over steps are slow."""
    return platform() == "cpu"


def loop(body, carry, rows, *, convolves: bool = True):
    """Run `jax.lax.scan`; on a CPU write the steps out if the body has convolutions.

    On a CPU the gradients of convolutions are 8 to 15 times slower in a loop, and
    `jax.lax.scan(unroll=True)` leaves one where there is a single row.

    Args:
      body: (carry, row) -> (carry, outputs).
      carry: tree before the first row.
      rows: tree of leaves [N, ...], N at least 1.
      convolves: the body has gradients of convolutions.
    """
    if not (convolves and on_cpu()):
        return jax.lax.scan(body, carry, rows)
    outputs = []
    for i in range(len(jax.tree.leaves(rows)[0])):
        carry, output = body(carry, jax.tree.map(lambda x, i=i: x[i], rows))
        outputs.append(output)
    return carry, jax.tree.map(lambda *x: jnp.stack(x), *outputs)


def multiplies_bfloat16() -> bool:
    """Tell whether the devices multiply bfloat16: TPUs, and GPUs since Ampere."""
    if platform() != "gpu":
        return not on_cpu()
    return (_cuda_generation() or 8) >= 8  # AMD's that JAX runs on have them, too


def has_cudnn_attention() -> bool:
    """Tell whether the devices have cuDNN's attention: NVIDIA's GPUs since Ampere."""
    return platform() == "gpu" and (_cuda_generation() or 0) >= 8


def _cuda_generation() -> int | None:
    """Return the first number of the compute capability; None if unknown."""
    target = _ELSEWHERE.get()
    described = () if target is None else target.devices
    device = (described or jax.devices())[0]
    # AMD's are named otherwise ("gfx90a").
    first = str(getattr(device, "compute_capability", "")).partition(".")[0]
    return int(first) if first.isdigit() else None


@contextlib.contextmanager
def compile_target(devices: tuple = (), platform: str = "any"):
    """Enter a context in which programs are compiled for other accelerators.

    Args:
      devices: descriptions of the accelerators, from which `mesh` is built; (): the
        devices of this machine stand in for them.
      platform: platform of the accelerators, if CPUs stand in for them: "gpu", "tpu" or
        "any".
    """
    described = devices[0].platform if devices else "cpu"
    name = platform if described == "cpu" else described
    before = _ELSEWHERE.set(_Elsewhere(tuple(devices), name))
    try:
        yield
    finally:
        _ELSEWHERE.reset(before)


@contextlib.contextmanager
def use_mesh(mesh: Mesh):
    """Enter a context in which programs are traced for the devices of a mesh.

    `shard_rows_in_jit`, `gather`, `map_per_device` and a memory in shards
    (`memory.sharded`) ask for it.
    """
    before = _MESH.set(mesh)
    try:
        yield
    finally:
        _MESH.reset(before)


def current() -> Mesh | None:
    """Return the mesh of `use_mesh`; None outside of it."""
    return _MESH.get()


def bind_to_mesh(record, mesh: Mesh):
    """Make each function of a NamedTuple run within `use_mesh`."""

    def within(function):
        @functools.wraps(function)
        def call(*arguments, **options):
            with use_mesh(mesh), numerics.pinned():
                return function(*arguments, **options)

        return call

    fields = record._asdict().items()
    return record._replace(**{name: within(f) for name, f in fields if callable(f)})


def traced_once(function):
    """Wrap a function so that all programs that contain it share one trace.

    Tracing a step takes Python seconds. Arguments of other shapes or placements have a
    trace of their own, and so do programs for other platforms (`compile_target`).
    """

    @functools.cache
    def program(platform):
        # jax.jit knows a function by its identity.
        return jax.jit(lambda *arguments: function(*arguments), inline=True)

    @functools.wraps(function)
    def traced(*arguments):
        return program(platform())(*arguments)

    return traced


@contextlib.contextmanager
def on_host():
    """Enter a context in which JAX traces and lowers for one CPU of this machine.

    In programs of several devices that CPU does the work of all: `shard_rows_in_jit`,
    `gather` and `map_per_device` place nothing.

    Raises:
      RuntimeError: JAX was told to use other devices only (`JAX_PLATFORMS`).
    """
    before = _ON_HOST.set(True)
    try:
        with jax.default_device(jax.local_devices(backend="cpu")[0]):
            yield
    finally:
        _ON_HOST.reset(before)


def describe(mesh: Mesh) -> dict:
    """Describe kind and number of the devices, and the peak bytes of the fullest.

    The peak covers this process's devices since its start; None if the backend has no
    count (CPU).
    """
    memory_stats = [device.memory_stats() or {} for device in mesh.local_devices]
    peaks = [stats.get("peak_bytes_in_use", 0) for stats in memory_stats]
    return {
        "device": mesh.devices.flat[0].device_kind,
        "num_devices": mesh.size,
        "peak_bytes": max(peaks) or None,
    }


def replicated(mesh: Mesh) -> NamedSharding:
    """Return the sharding of arrays that every device holds whole."""
    return NamedSharding(mesh, PartitionSpec())


def split_sharding(mesh: Mesh, axis: int = 0) -> NamedSharding:
    """Return the sharding of arrays that are split over one axis."""
    return NamedSharding(mesh, PartitionSpec(*(None,) * axis, AXIS))


def replicate(tree, mesh: Mesh):
    """Put the same arrays, which every process has, whole on every device."""
    sharding = replicated(mesh)

    def place(x):
        x = np.asarray(x)  # no check across processes: a thread may call this
        return jax.make_array_from_process_local_data(sharding, x, x.shape)

    return jax.tree.map(place, tree)


def _is_split(node):
    return getattr(node, "over_devices", False)


def per_device(name: str, value: int, mesh: Mesh | None) -> int:
    """Divide a count, such as memory slots, by the number of devices.

    Raises:
      Refused: the devices cannot share it evenly; `name` is for the message.
    """
    count = 1 if mesh is None else num_row_shards(mesh)
    if value < 1 or value % count:
        raise Refused(
            f"{name}={value}: must be a positive multiple of the {count} devices "
            "that share the memory"
        )
    return value // count


def placement(tree, mesh: Mesh):
    """Return the sharding of each leaf of a state: memories split, the rest whole.

    If the mesh splits weights, so are those of a Vision Transformer, in every tree.

    Args:
      tree: arrays or their shapes.

    Raises:
      Refused: the devices cannot share the rows of a memory evenly.
    """

    def leaf_sharding(path, node):
        if not _is_split(node):
            return _place_weight(path, node, mesh)
        for leaf in jax.tree.leaves(node):
            per_device("the memory's rows", leaf.shape[0], mesh)
        return jax.tree.map(lambda leaf: split_sharding(mesh), node)

    return jax.tree_util.tree_map_with_path(leaf_sharding, tree, is_leaf=_is_split)


def _place_weight(path, leaf, mesh):
    """Return the sharding of a leaf that is not part of a memory."""
    if MODEL not in mesh.shape:
        return replicated(mesh)
    name = jax.tree_util.keystr(path, simple=True, separator="/")
    for ending, axis in _SPLIT.items():
        if re.search(f"(^|/){ending}$", name):
            before = (None,) * (len(leaf.shape) + axis)
            return NamedSharding(mesh, PartitionSpec(*before, MODEL))
    return replicated(mesh)


def commit_placement(tree, mesh: Mesh):
    """Commit each array to its `placement`.

    A step that sees its state in one form compiles once.
    """
    return jax.jit(_identity, out_shardings=placement(tree, mesh))(tree)


def _identity(tree):
    """Return the tree; a new function would be compiled again after every task."""
    return tree


def shard_rows(batch, mesh: Mesh, axis: int = 0):
    """Make global arrays from each process's own rows, split on `axis`."""
    sharding = split_sharding(mesh, axis)
    return jax.tree.map(
        lambda x: jax.make_array_from_process_local_data(sharding, np.asarray(x)),
        batch,
    )


def check_batch(batch_size: int, mesh: Mesh) -> None:
    """Refuse a global batch that the devices cannot share evenly."""
    if batch_size % (count := num_row_shards(mesh)):
        below = batch_size // count * count
        sizes = " or ".join(str(x) for x in (below, below + count) if x)
        raise Refused(
            f"config.batch_size={batch_size}: must be a multiple of the {count} "
            f"devices of the run, such as {sizes}; config.devices takes fewer devices"
        )


def shard_rows_in_jit(tree):
    """Split the rows of each leaf over the devices, within a program, like a batch.

    Leaves whose rows do not divide by the devices stay as they are.
    """
    mesh = current()
    if mesh is None or mesh.size == 1 or _ON_HOST.get():
        return tree

    def constrain(leaf):
        if len(leaf) % num_row_shards(mesh):
            return leaf
        return jax.lax.with_sharding_constraint(leaf, split_sharding(mesh))

    return jax.tree.map(constrain, tree)


def gather(tree):
    """Put, within a program, every row of each leaf on every device.

    A loop that reads the rows in turn then gets them once, not in every turn.
    """
    mesh = current()
    if mesh is None or mesh.size == 1 or _ON_HOST.get():
        return tree
    return jax.lax.with_sharding_constraint(tree, replicated(mesh))


def map_per_device(function, rows: tuple, shared: tuple):
    """Call a function, within a program, on each device by itself.

    The compiler may send messages within a loop; here it sends none.

    Args:
      function: (*rows, *shared) -> arrays with as many rows; it sends nothing.
      rows: pytrees of arrays whose axis 0 is split over the devices.
      shared: pytrees of arrays that each device reads whole.

    Returns:
      The function's result, split like `rows`, or whole without rows.

    Raises:
      Refused: the devices cannot share the rows evenly.
    """
    mesh = current()
    if mesh is None or num_row_shards(mesh) == 1:
        return function(*rows, *shared)
    for leaf in jax.tree.leaves(rows):
        per_device("rows", len(leaf), mesh)
    if _ON_HOST.get():
        return _map_in_turn(function, rows, shared, num_row_shards(mesh))
    split, everywhere = PartitionSpec(AXIS), PartitionSpec()
    local = jax.shard_map(
        function,
        mesh=mesh,
        in_specs=(split,) * len(rows) + (everywhere,) * len(shared),
        out_specs=split if rows else everywhere,
        check_vma=False,
    )
    return local(*rows, *shared)


def _map_in_turn(function, rows, shared, count):
    """Do the work of `map_per_device` on one device."""
    if not rows:
        return function(*shared)
    shares = jax.tree.map(lambda x: x.reshape(count, -1, *x.shape[1:]), rows)
    each = jax.vmap(lambda share: function(*share, *shared), axis_name=AXIS)
    outputs = each(shares)
    return jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), outputs)


def copy_to_host(tree):
    """Copy replicated arrays to NumPy, the same on every process."""
    return jax.tree.map(lambda x: np.asarray(jax.device_get(x)), tree)


def barrier(name: str) -> None:
    """Wait until every process gets here."""
    if jax.process_count() > 1:
        multihost_utils.sync_global_devices(name)


def any_process(flag: bool) -> bool:
    """Tell whether a flag is true on any process (a signal reached one host)."""
    if jax.process_count() == 1:
        return flag
    return bool(multihost_utils.process_allgather(np.asarray(flag)).any())


def gather_bytes(data: bytes) -> list[bytes]:
    """Return the bytes that each process gave, in the order of the processes."""
    if jax.process_count() == 1:
        return [data]
    sizes = multihost_utils.process_allgather(np.asarray(len(data), np.int32))
    filled = np.zeros(max(int(sizes.max()), 1), np.uint8)
    filled[: len(data)] = np.frombuffer(data, np.uint8)
    rows = multihost_utils.process_allgather(filled)
    return [row[:size].tobytes() for row, size in zip(rows, sizes, strict=True)]
