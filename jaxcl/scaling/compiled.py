"""A run's step, compiled for devices that are not there, and never run.

The mesh is of fake CPU devices, and the arguments are shapes. The program has the same
messages, bytes of state and batch, and FLOPs as on GPUs or TPUs. It does not show how
their compilers fuse operations, and so how much memory intermediate results take.
"""

import math

import jax
import jax.numpy as jnp
import numpy as np

from jaxcl import sharding
from jaxcl.data import files, sources, stand_in, stream
from jaxcl.run import cost, job
from jaxcl.scaling import collectives

# The program is the same; only its machine code is less optimised.
_QUICK = {
    "xla_backend_optimization_level": 0,
    "xla_llvm_disable_expensive_passes": True,
}
ROWS_PER_CLASS = 1000  # if neither flags nor config tell the number of rows


def blank(
    data: dict,
    scenario: dict,
    augment: dict,
    *,
    classes: int | None,
    rows: int | None,
    pixels: int | None,
) -> stream.Dataset | None:
    """A stand-in for the set of config.data; None if that set needs no files.

    Args:
      data, scenario, augment: sections of the config.
      classes, rows, pixels: of the train split; None: as the config tells.

    Raises:
      ValueError: a set of graphs, or an unknown number of classes.
    """
    name = data.get("name")
    if name in sources.MADE:
        return None
    if name == "graphs":
        raise ValueError(
            "config.data.name='graphs': there is no stand-in for a set of graphs; "
            "must be a set of images, or 'rings_and_trees'"
        )
    count, known_rows, side = sources.SIZES.get(name, (None, None, None))
    names = _names(scenario.get("classes"), scenario.get("class_order"))
    if data.get("classes") is not None:
        names, known_rows = files.class_list(data["classes"]), None
        count = len(names)
    classes = classes or count or len(names)
    if not classes:
        raise ValueError(
            f"--classes: missing, and config.data.name={name!r} does not tell how many "
            "there are"
        )
    domains = _names(data.get("domains"), data.get("domain_names"))
    domains = domains or _names(scenario.get("domain_order")) or ("all",)
    inside = data.get("resident")
    return stand_in.dataset(
        classes=classes,
        rows=rows or known_rows or ROWS_PER_CLASS * classes * len(domains),
        pixels=pixels or data.get("size") or side or augment["size"],
        channels=len(augment["mean"]),
        class_names=names[:classes],
        domain_names=domains,
        in_memory=name in sources.IN_MEMORY if inside is None else inside,
    )


def _names(*options) -> tuple[str, ...]:
    """The first option that is a list of names, () if none is."""
    for option in options:
        if not isinstance(option, str | None) and isinstance(option[0], str):
            return tuple(option)
    return ()


def measure(work: job.Job, task: int) -> dict:
    """The cost of one step of a job, by its compiled program.

    Args:
      work: from `build.planned`; the program is compiled for its mesh.
      task: number of the task, from 0; all but the first have the same program.

    Returns:
      A dict for JSON: "devices"; "batch_size" of each of the "seeds" that go side by
      side; "task"; "flops" of one device;
      "flops_written" of all devices, see `cost.flops`; "state", "batch" and "images" in
      bytes on one device (the state by part); "memory" of one device as XLA plans it;
      "collectives" from `collectives.plain`.
    """
    with sharding.for_elsewhere():
        step, sizes = lowered(work, task)
        compiled = step.compile(compiler_options=_QUICK)
        shapes = job.shapes(work, work.parts(task))
        written = cost.flops(work.method.step, *shapes, task)
    return {
        "devices": work.mesh.size,
        "batch_size": work.batch_size,
        "seeds": max(len(work.together), 1),
        "task": task,
        "flops": compiled.cost_analysis()["flops"],
        "flops_written": written,
        **sizes,
        "memory": memory_of(compiled.memory_analysis()),
        "collectives": collectives.plain(collectives.read(compiled.as_text())),
    }


def memory_of(told) -> dict[str, int]:
    """Bytes of a device by kind."""
    return {
        "arguments": told.argument_size_in_bytes,
        "outputs": told.output_size_in_bytes,
        "aliased": told.alias_size_in_bytes,
        "temporaries": told.temp_size_in_bytes,
        "program": told.generated_code_size_in_bytes,
        "peak": getattr(told, "peak_memory_in_bytes", 0),
    }


def held(memory: dict[str, int]) -> int:
    """Bytes that a program holds on a device, of those by kind from `memory_of`."""
    kinds = ("arguments", "outputs", "temporaries", "program")
    return sum(memory[name] for name in kinds) - memory["aliased"]


def lowered(work: job.Job, task: int, *, decided: bool = True) -> tuple:
    """The program of a call, not yet compiled, within `sharding.for_elsewhere`.

    Args:
      work: from `build.planned`.
      task: number of the task, from 0.
      decided: whether branches on the number of the task are; else both are compiled,
        as for a run.

    Returns:
      (`jax.stages.Lowered`, a dict with "state", "batch" and "images" in bytes on one
      device, the state by part).
    """
    method, planned = work.method, work
    if decided:
        in_task = method._replace(
            step=lambda state, *others: method.step(_at(task, state), *others)
        )
        planned = work._replace(method=in_task)
    state, batch, resident = _arguments(planned, task)
    count = jax.ShapeDtypeStruct((), np.int32, sharding=sharding.replicated(work.mesh))
    step = job.compile_step(planned).lower(state, resident, batch, count)
    sizes = {
        "state": _parts(state),
        "batch": _bytes(batch),
        "images": _bytes(resident),
    }
    return step, sizes


def _at(task, state):
    """The state with a constant task, so that branches on it are decided."""
    return state.replace(task=jnp.asarray(task, jnp.int32))


def _arguments(work, task):
    """Placed shapes of the arguments of `job.compile_step`: state, batches, images."""
    parts = work.parts(task)
    state, batch = job.shapes(work, parts)
    resident = job.resident_shapes(work)
    if work.resident:
        batch = _rows_only(batch)
    split = sharding.split(work.mesh, axis=2 if parts > 1 else 1)
    whole = sharding.replicated(work.mesh)
    steps = work.steps_per_call
    batch = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct((steps, *x.shape), x.dtype), batch
    )
    return (
        _placed(state, sharding.placement(state, work.mesh)),
        _placed(batch, jax.tree.map(lambda _: whole if work.graphs else split, batch)),
        _placed(resident, jax.tree.map(lambda _: whole, resident)),
    )


def _rows_only(batch):
    """The row numbers of a batch and of its labelled part, for a set on the device."""
    rows = {"index": batch["index"]}
    labelled = batch.get("labelled")
    return rows if labelled is None else rows | {"labelled": _rows_only(labelled)}


def _placed(tree, shardings):
    """Shapes with the shardings of the same tree."""

    def shape(x, where):
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=where)

    return jax.tree.map(shape, tree, shardings)


def _bytes(tree) -> int:
    """Bytes of placed shapes on one device."""
    return sum(
        math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize
        for x in jax.tree.leaves(tree)
    )


def _parts(state) -> dict[str, int]:
    """Bytes of a state on one device, by part."""
    extra = state.extra
    fields = extra._asdict() if hasattr(extra, "_asdict") else {"extra": extra}
    sizes = {
        "parameters": _bytes(state.params),
        "batch statistics": _bytes(state.stats),
        "optimiser": _bytes(state.opt_state),
        **{name: _bytes(value) for name, value in fields.items()},
    }
    numbers = _bytes(state) - sum(sizes.values())
    return {name: size for name, size in sizes.items() if size} | {"counters": numbers}
