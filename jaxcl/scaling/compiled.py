"""A run's step as it would be on devices that are not there: compiled, never run.

The mesh is of fake CPU devices, the arguments are shapes. What this tells of a GPU or
TPU: what is exchanged, the bytes of state and batch, the FLOPs; and what it does not:
how that backend fuses, and so how much memory its intermediate results take.
"""

import math

import jax
import jax.numpy as jnp
import numpy as np

from jaxcl import sharding
from jaxcl.data import files, sources, stand_in
from jaxcl.run import cost, job
from jaxcl.scaling import collectives

# Only the machine code is made with less care: the program is the same.
_QUICK = {
    "xla_backend_optimization_level": 0,
    "xla_llvm_disable_expensive_passes": True,
}
ROWS_PER_CLASS = 1000  # where nothing tells how many there are


def blank(data: dict, scenario: dict, augment: dict, *, classes, rows, pixels):
    """A stand-in for config.data, None where that makes its own.

    Args:
      data, scenario, augment: sections of the config.
      classes, rows, pixels: of the train split; None: as the config tells.

    Raises:
      ValueError: it is of graphs, or nothing tells how many classes there are.
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
    """The first option that is a list of names, () where none is."""
    for option in options:
        if not isinstance(option, str | None) and isinstance(option[0], str):
            return tuple(option)
    return ()


def measure(work: job.Job, task: int) -> dict:
    """What one step of a job takes, by its compiled program.

    Args:
      work: from `build.planned`; its mesh is what the program is for.
      task: number of the task, from 0; all but the first are one program.

    Returns:
      A dict that JSON can hold: "devices", "batch_size", "task", "flops" of one device,
      "flops_written" of all devices as `cost.flops` counts them, "state", "batch" and
      "images" in bytes of one device (the state by part), "memory" as XLA tells it of
      one device, "collectives" as `collectives.plain` gives them.
    """
    made = work.method
    fixed = made._replace(step=lambda *given: made.step(*_at(task, *given)))
    planned = work._replace(method=fixed)
    with sharding.for_elsewhere():
        state, batch, resident = _arguments(planned, task)
        one = jax.ShapeDtypeStruct(
            (), np.int32, sharding=sharding.replicated(work.mesh)
        )
        step = job.compile_step(planned).lower(state, resident, batch, one)
        compiled = step.compile(compiler_options=_QUICK)
        written = cost.flops(made.step, *job.shapes(work, work.parts(task)), task)
    memory = compiled.memory_analysis()
    return {
        "devices": work.mesh.size,
        "batch_size": work.batch_size,
        "task": task,
        "flops": compiled.cost_analysis()["flops"],
        "flops_written": written,
        "state": _parts(state),
        "batch": _bytes(batch),
        "images": _bytes(resident),
        "memory": {
            "arguments": memory.argument_size_in_bytes,
            "outputs": memory.output_size_in_bytes,
            "aliased": memory.alias_size_in_bytes,
            "temporaries": memory.temp_size_in_bytes,
        },
        "collectives": collectives.plain(collectives.read(compiled.as_text())),
    }


def _at(task, state, batch):
    """A step's arguments with the task's number known, which decides its branches."""
    return state.replace(task=jnp.asarray(task, jnp.int32)), batch


def _arguments(work, task):
    """Shapes, placed, of what `job.compile_step` takes: state, batches, images."""
    parts = work.parts(task)
    state, batch = job.shapes(work, parts)
    resident = {}
    if work.resident:
        examples = work.stream.dataset.train
        resident = {"image": examples.images, "label": examples.label}
        batch = _rows_alone(batch)
    split = sharding.split(work.mesh, axis=2 if parts > 1 else 1)
    whole = sharding.replicated(work.mesh)
    batch = jax.tree.map(lambda x: jax.ShapeDtypeStruct((1, *x.shape), x.dtype), batch)
    return (
        _placed(state, sharding.placement(state, work.mesh)),
        _placed(batch, jax.tree.map(lambda _: whole if work.graphs else split, batch)),
        _placed(resident, jax.tree.map(lambda _: whole, resident)),
    )


def _rows_alone(batch):
    """A batch that names rows of a set on the device, and its labelled part."""
    found = {"index": batch["index"]}
    more = batch.get("labelled")
    return found if more is None else found | {"labelled": _rows_alone(more)}


def _placed(tree, shardings):
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
    """Bytes of a state on one device, by what they are."""
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
