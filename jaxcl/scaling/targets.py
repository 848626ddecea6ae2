"""A run's step, compiled by the compiler of a chip that is not there.

libtpu holds XLA's compiler for TPUs, JAX's CUDA plugin that for NVIDIA's GPUs. Both
compile for chips that are described to them, so the program is the one that the chip
would run: its fusions, its layouts, its plan of the memory. Nothing is run. One thing
is missing: on a GPU XLA times the algorithms of its libraries and chooses.
"""

import gzip
import hashlib
import importlib.metadata
import importlib.util
import json
import math
import re
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
from etils import epath
from jax.experimental import topologies

from jaxcl.data import storage
from jaxcl.run import job
from jaxcl.scaling import collectives, compiled, hardware, hlo, kernels

# For the process that compiles, before it imports jax: the CPU stays the only backend,
# no GPU that is there is touched, and several processes may load libtpu, which asks no
# metadata server where it runs.
ENVIRONMENT = {
    "JAX_PLATFORMS": "cpu",
    "CUDA_VISIBLE_DEVICES": "-1",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_ACCELERATOR_TYPE": "v5e-4",
    "TPU_WORKER_HOSTNAMES": "localhost",
}
# Of a GPU's compiler that has no chip to time kernels on, for some products of narrow
# sequences; all products are then its library's.
_NO_TILES = "Couldn't find output tile sizes"
_LIBRARY = {"xla_gpu_enable_triton_gemm": False}
_CUDA = ("jax_cuda13_plugin", "jax_cuda12_plugin")
# What a GPU's compiler asks for besides what `hardware.CHIPS` tells of each; the same
# for all from A100 to H200 (CUDA C++ Programming Guide, compute capabilities).
_LIMITS = {
    "threads_per_block_limit": 1024,
    "threads_per_warp": 32,
    "shared_memory_per_block": 49152,
    "threads_per_core_limit": 2048,
    "block_dim_limit_x": 2147483647,
    "block_dim_limit_y": 65535,
    "block_dim_limit_z": 65535,
    "thread_dim_limit_x": 1024,
    "thread_dim_limit_y": 1024,
    "thread_dim_limit_z": 64,
    "registers_per_core_limit": 65536,
    "registers_per_block_limit": 65536,
    "device_address_bits": 64,
}
_FULL = re.compile(r"RESOURCE_EXHAUSTED|Ran out of memory|exceeds? .*memory", re.I)
SHOWN = 8  # copies and kernels that are named


class Target(NamedTuple):
    """Chips to compile for."""

    text: str  # as the flag has it: "v5e:2x4", "h200:8"
    machine: str  # a name of `hardware.MACHINES`
    platform: str  # "tpu" or "cuda"
    topology: str  # as `topologies.get_topology_desc` has it
    chips: int


def parse(text: str) -> Target:
    """A target by its text: NAME:SIDES of a TPU slice, or NAME:GPUS.

    TPUs: v5e:2x4, v5p:2x2x1, v5e:1x1 for one chip. GPUs: h200:8, h100:2x8 for two
    machines of 8, a100 for one.

    Raises:
      ValueError: no such chip, or its sides are not as they must be.
    """
    name, _, sides = text.strip().partition(":")
    for machine, chip in hardware.CHIPS.items():
        tpu = chip.get("tpu")
        if tpu and tpu["name"] == name:
            return _slice(text.strip(), machine, tpu, sides)
        if "gpu" in chip and machine == name:
            return _gpus(text.strip(), machine, sides or "1")
    raise ValueError(f"--target={text}: must be of {', '.join(_examples())}")


def _examples() -> list[str]:
    tpus = [chip["tpu"] for chip in hardware.CHIPS.values() if "tpu" in chip]
    gpus = [name for name, chip in hardware.CHIPS.items() if "gpu" in chip]
    return [f"{x['name']}:{x['least']}" for x in tpus] + [f"{x}:8" for x in gpus]


def _slice(text, machine, tpu, sides) -> Target:
    counts = sides.split("x")
    if len(counts) != tpu["axes"] or not all(x.isdigit() and int(x) for x in counts):
        raise ValueError(
            f"--target={text}: must be {tpu['name']} and the {tpu['axes']} sides of a "
            f"slice, as {tpu['name']}:{tpu['least']}"
        )
    chips = math.prod(map(int, counts))
    # libtpu knows no slice of one chip: it is the first of the smallest slice.
    named = tpu["least"] if chips == 1 else sides
    return Target(text, machine, "tpu", f"{tpu['name']}:{named}", chips)


def _gpus(text, machine, sides) -> Target:
    counts = sides.split("x")
    if len(counts) > 2 or not all(x.isdigit() and int(x) for x in counts):
        raise ValueError(
            f"--target={text}: must be {machine}:GPUS or {machine}:MACHINESxGPUS, as "
            f"{machine}:8 or {machine}:2x8"
        )
    hosts, each = [1, *map(int, counts)][-2:]
    return Target(text, machine, "cuda", f"1x{hosts}x{each}", hosts * each)


def missing(target: Target) -> str | None:
    """What must be installed before a target can be compiled for; None: nothing."""
    if target.platform == "tpu":
        there = importlib.util.find_spec("libtpu") is not None
        return None if there else "libtpu: pip install 'jaxcl[tpu-compiler]'"
    there = any(importlib.util.find_spec(name) for name in _CUDA)
    return None if there else "JAX's CUDA plugin: pip install 'jaxcl[gpu-compiler]'"


def compiler(target: Target) -> str:
    """Name and version of what compiles for a target."""
    names = ("libtpu",) if target.platform == "tpu" else _CUDA
    name = next(name for name in names if importlib.util.find_spec(name))
    return f"{name.replace('_', '-')} {importlib.metadata.version(name)}"


def description(machine: str) -> str:
    """A GPU as XLA wants it described, a `GpuTargetConfigProto` as text."""
    gpu, facts = hardware.CHIPS[machine]["gpu"], hardware.MACHINES[machine]
    major, minor = gpu["capability"]
    fields = _LIMITS | {k: v for k, v in gpu.items() if k not in ("name", "capability")}
    fields |= {
        "memory_bandwidth": int(facts.memory_bandwidth),
        "device_memory_size": int(facts.memory),
    }
    lines = [f"{name}: {value}" for name, value in fields.items()]
    lines += [
        f"cuda_compute_capability {{ major: {major} minor: {minor} }}",
        'device_vendor: "NVIDIA Corporation"',
        f'name: "{gpu["name"]}"',
    ]
    inside = "\n  ".join(lines)
    return (
        f'gpu_device_info {{\n  {inside}\n}}\nplatform_name: "CUDA"\n'
        "dnn_version_info { major: 9 minor: 10 }\n"
        f'device_description_str: "{gpu["name"]}"\n'
    )


def devices(target: Target) -> tuple[Any, ...]:
    """The devices of a target, to make a mesh of; a TPU v4 has two for each chip."""
    if target.platform == "cuda":
        there = topologies.get_topology_desc(
            platform="cuda",
            topology=target.topology,
            target_config=description(target.machine),
        )
        return tuple(there.devices)
    there = topologies.get_topology_desc(
        platform="tpu", topology_name=target.topology
    ).devices
    whole = math.prod(map(int, target.topology.partition(":")[2].split("x")))
    return tuple(there[: len(there) * target.chips // whole])


def measure(
    work: job.Job,
    task: int,
    target: Target,
    machine: hardware.Machine,
    *,
    kept: str | None = None,
    known: str | None = None,
) -> dict:
    """What a step of a job is on the chips of a target, by its compiled program.

    The program is the one that a run calls: `steps_per_call` steps in a loop, all
    numbers are of one of them. On later tasks it is compiled as it is; of a branch on
    the number of the task the larger counts. For the first task the branch is decided.

    Args:
      work: from `build.planned` within `sharding.for_elsewhere(devices(target))`.
      task: number of the task, from 0.
      machine: the chip's peaks, perhaps overridden.
      kept: a folder; what was compiled before is read there and not compiled again.
      known: a program's name by "program" of an earlier result, that need not be
        compiled, or None.

    Returns:
      A dict for JSON. "seconds" of compiling; "options", without which the compiler
      fails; "memory" of a device by kind, in bytes, with its "limit"; "fits";
      "kernels" a step by kind; "products" by type; "flops"
      and "bytes" of a step on a device; "least" from `least`; "cycles", seconds by the
      compiler's own estimate or None; "collectives"; "copies" and "longest", the
      kernels that copy most and that take longest; and what the tests ask for. With
      "error" alone where the program does not fit; with "same" where it is `known`.
    """
    cores = work.mesh.size // target.chips
    machine = hardware.shared(machine, cores)
    found = {
        "target": target.text,
        "machine": target.machine,
        "compiler": compiler(target),
        "chips": target.chips,
        "devices": work.mesh.size,
        "batch_size": work.batch_size,
        "seeds": max(len(work.together), 1),
        "task": task,
        "steps_per_call": work.steps_per_call,
        "peaks": machine._asdict(),
    }
    lowered, arguments = compiled.lowered(work, task, decided=task == 0)
    # StableHLO, which has no locations of the source: it is the same until the program
    # is another one.
    text = f"{target.text}\n{found['compiler']}\n{lowered.as_text()}"
    found["program"] = hashlib.sha256(text.encode()).hexdigest()[:16]
    if found["program"] == known:
        return found | {"same": True}
    made = _compiled(lowered, found["program"], kept)
    if "error" in made:
        return found | {"fits": False, "error": made["error"]}
    memory = made["memory"]
    memory |= {"held": compiled.held(memory), "limit": int(machine.memory)}
    found |= {"seconds": made["seconds"], "memory": memory, **arguments}
    found["options"] = made.get("options", {})  # programs kept by older code lack it
    found["fits"] = memory["held"] <= memory["limit"]
    return found | program(made["text"], work.steps_per_call, machine)


def _compiled(lowered, name, kept) -> dict:
    """What the compiler says: "text", "memory", "seconds" and "options", or "error"."""
    path = None if kept is None else epath.Path(kept) / f"{name}.json.gz"
    if path is not None and path.exists():
        return json.loads(gzip.decompress(path.read_bytes()))
    began = time.monotonic()
    options: dict[str, bool] = {}
    try:
        try:
            made = lowered.compile()
        except jax.errors.JaxRuntimeError as error:
            if _NO_TILES not in str(error):
                raise
            options, began = _LIBRARY, time.monotonic()
            made = lowered.compile(compiler_options=options)
    except jax.errors.JaxRuntimeError as error:
        if not _FULL.search(str(error)):
            raise
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        told = {"error": " ".join(lines[:3])[:300]}
    else:
        told = {
            "seconds": time.monotonic() - began,
            "memory": compiled.memory_of(made.memory_analysis()),
            "text": made.as_text(),
            "options": options,
        }
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        with storage.replacing(path) as file:
            file.write(gzip.compress(json.dumps(told).encode(), mtime=0))
    return told


def program(text: str, steps: int, machine: hardware.Machine) -> dict:
    """What the text of a compiled program tells of one of its steps; see `measure`.

    Args:
      text: optimised HLO.
      steps: that the program makes in a loop.
      machine: the peaks of a device.
    """
    parsed = hlo.parse(text, steps=steps)
    if steps > 1 and parsed.loop_of_steps is None:
        steps = 1
    ran = kernels.of(parsed, steps=steps)
    sent = collectives.of(parsed, steps=steps)
    products: dict[str, dict[str, float]] = {"convolution": {}, "product": {}}
    for kernel in ran:
        for product in kernel.products:
            kind = products["convolution" if product.convolution else "product"]
            kind[product.dtype] = kind.get(product.dtype, 0) + kernel.times
    times = {kind: 0.0 for kind in kernels.KINDS}
    for kernel in ran:
        times[kernel.kind] += kernel.times
    return {
        "kernels": {kind: count for kind, count in times.items() if count},
        "products": products,
        "grouped": sum(
            x.times for x in ran for y in x.products if y.convolution and y.groups > 1
        ),
        "flops": sum(x.times * x.flops for x in ran),
        "bytes": sum(x.times * x.bytes for x in ran if x.kind != "message"),
        "least": least(ran, sent, machine)._asdict(),
        "cycles": _estimated(ran, machine),
        "collectives": collectives.plain(sent),
        "copies": _named(kernels.copied(ran), lambda x: x.times * x.bytes),
        "longest": _named(ran, lambda x: x.times * max(_seconds(x, machine))),
        "unknown_loops": kernels.unknown_loops(parsed),
        "host_transfers": kernels.host_transfers(parsed),
        "outputs": len(
            hlo.arrays(hlo.returned(parsed.computations[parsed.entry]).shape)
        ),
        "outputs_aliased": len(parsed.aliases),
    }


def _estimated(ran, machine) -> float | None:
    """Seconds by a TPU's compiler; None where it has no estimate or one overflowed."""
    timed = [x for x in ran if x.cycles is not None]
    overflowed = any(x.cycles == kernels.NO_ESTIMATE for x in timed)
    if machine.clock is None or not timed or overflowed:
        return None
    return sum(x.times * x.cycles for x in timed) / machine.clock


def _named(ran: list[kernels.Kernel], size: Callable) -> list[dict]:
    """The largest kernels, for JSON; those of one source and shape are added up."""
    sums: dict[tuple, list[float]] = {}
    for kernel in ran:
        key = kernel.kind, _plain(kernel.shape), kernel.name
        entry = sums.setdefault(key, [0.0, 0.0, 0.0])
        entry[0] += kernel.times
        entry[1] += kernel.times * kernel.bytes
        entry[2] += size(kernel)
    largest = sorted(sums.items(), key=lambda item: -item[1][2])[:SHOWN]
    return [
        {"kind": kind, "shape": shape, "name": name, "times": times, "bytes": moved}
        for (kind, shape, name), (times, moved, _) in largest
    ]


def _plain(shape) -> str:
    """A shape without its layout; of a tuple the first array and how many more."""
    first, *others = [
        f"{array.dtype}[{','.join(map(str, array.sides))}]"
        for array in hlo.arrays(shape)
    ] or [shape]
    return f"{first} and {len(others)} more" if others else first


class Least(NamedTuple):
    """The least seconds of a step, by what kernels are bound by."""

    arithmetic: float
    memory: float
    launches: float
    messages: float  # those that nothing runs beside

    @property
    def total(self) -> float:
        """The least seconds of a step."""
        return sum(self)


def _seconds(kernel, machine) -> tuple[float, float, float]:
    """The least seconds of one run of a kernel: arithmetic, memory, launch."""
    if kernel.kind == "message":
        return 0.0, 0.0, 0.0
    wide = kernel.dtype == "float32"
    peak = machine.peak_float32 if wide else machine.peak
    launch = 0.0 if kernel.kind == "prefetch" else machine.launch
    return kernel.flops / peak, kernel.bytes / machine.memory_bandwidth, launch


def least(
    ran: list[kernels.Kernel],
    sent: list[collectives.Collective],
    machine: hardware.Machine,
) -> Least:
    """A bound from below on the seconds of a step.

    A kernel takes at least as long as its arithmetic at the peak, its traffic at the
    memory's bandwidth, and its launch; the longest is what it is bound by. One runs
    after another. Messages that the compiler lets something run beside are free.
    """
    sums = dict.fromkeys(Least._fields, 0.0)
    for kernel in ran:
        parts = _seconds(kernel, machine)
        longest = max(parts)
        name = Least._fields[parts.index(longest)]
        sums[name] += kernel.times * longest
    for message in sent:
        if not message.beside:
            moving, hops = hardware.seconds(
                message.kind, message.bytes, message.group, machine
            )
            sums["messages"] += message.times * (moving + hops)
    return Least(**sums)


def largest(fits: Callable[[int], bool], first: int) -> int:
    """The largest number of rows that fits, to within a sixteenth.

    Args:
      fits: of a number of rows; asked seldom, since each answer is a compilation.
      first: a number to begin with.

    Returns:
      A number that fits, or 0 if not even 1 does.
    """
    low, high = 0, first
    while fits(high):
        low, high = high, 2 * high
    while high - low > max(low // 16, 1):
        # As long as none is known to fit, a quarter is tried and not a half.
        middle = (low + high) // 2 if low else max(high // 4, 1)
        if fits(middle):
            low = middle
        else:
            high = middle
    return low
