"""Compile a training step for a chip that need not be here, and bound its time.

  jaxcl estimate pnr_cifar100 --target=h200:8

prints what the compiler says of one step: memory by kind and whether it fits, FLOPs,
bytes, collectives, and the least time that follows. No data are read and nothing runs.
Without `--target` the step is compiled for the devices of this machine.
"""

import argparse
import collections
import contextlib
import importlib.metadata
import importlib.util
import json
import math
import os
import pathlib
import re
import time
from collections.abc import Iterator
from typing import NamedTuple

import jax
import ml_collections
import numpy as np
from jax.experimental import topologies

from jaxcl import schema, sharding, storage
from jaxcl.config import build, files
from jaxcl.data.sources import stand_in
from jaxcl.errors import Refused
from jaxcl.run import cost, job

# Chips and targets


class Chip(NamedTuple):
    """One chip's figures, as its vendor states them."""

    kinds: tuple[str, ...]  # parts of the `device_kind` that JAX reports
    bfloat16: float  # FLOP/s of dense products
    float32: float  # FLOP/s of float32 products by default: TF32; bfloat16 on TPUs
    memory: float  # bytes
    bandwidth: float  # bytes/s of that memory
    link: float  # bytes/s that a chip can send to its neighbours, one way
    source: str  # the vendor's page
    slice: str = ""  # TPUs: the smallest slice that libtpu can describe
    island: int | None = None  # GPUs: how many share the fast links
    outside: float = 0.0  # GPUs: bytes/s that each can send out of its island
    gpu: list[str] | None = None  # GPUs: XLA's `GpuTargetConfigProto`, as text


# GPUs are the SXM ones unless named otherwise. Of a device that is here, the first row
# counts whose kind is part of the device's kind.
_TABLE = pathlib.Path(__file__).with_name("chips.json")
CHIPS = {k: Chip(**row) for k, row in json.loads(_TABLE.read_text()).items()}


def chip_of(kind: str) -> Chip | None:
    """Find the chip of a `device_kind`; None if it is not in the table."""
    for chip in CHIPS.values():
        if any(part.lower() in kind.lower() for part in chip.kinds):
            return chip
    return None


class Target(NamedTuple):
    """Chips to compile for."""

    chip: Chip
    topology: str  # as `topologies.get_topology_desc` has it
    chips: int


def parse_target(text: str) -> Target:
    """Read a target: a TPU slice by its sides, or GPUs by their number.

    TPUs: v5e:2x4, v5p:2x2x1; v5e is one chip. GPUs: h200:8; h200:2x8 are two machines.

    Raises:
      Refused: there is no such chip or slice; the message lists those that exist.
    """
    name, _, sides = text.strip().partition(":")
    chip, counts = CHIPS.get(name), []
    if re.fullmatch(r"[1-9]\d*(x[1-9]\d*)*", sides or "1"):
        counts = [int(x) for x in (sides or "1").split("x")]
    chips = math.prod(counts)
    if chip and chip.slice and (not sides or len(counts) == chip.slice.count("x") + 1):
        # libtpu describes no slice of one chip: take the first of the smallest.
        return Target(chip, f"{name}:{sides if chips > 1 else chip.slice}", chips)
    if chip and chip.gpu and 0 < len(counts) <= 2:
        machines, each = [1, *counts][-2:]
        return Target(chip, f"1x{machines}x{each}", chips)
    allowed = [f"{k}:{x.slice or 8}" for k, x in CHIPS.items() if x.slice or x.gpu]
    raise Refused(f"--target={text}: must look like {', '.join(allowed)}")


def compiler(target: Target) -> str:
    """Name the package that compiles for a target, and its version.

    Raises:
      Refused: it is not installed; the message says how to install it.
    """
    cuda = "jax-cuda13-plugin", "jax-cuda12-plugin"
    for name in ("libtpu",) if target.chip.slice else cuda:
        if importlib.util.find_spec(name.replace("-", "_")):
            return f"{name} {importlib.metadata.version(name)}"
    extra = "tpu-compiler" if target.chip.slice else "gpu-compiler"
    raise Refused(f"--target: its compiler is missing, pip install 'jaxcl[{extra}]'")


def devices(target: Target) -> tuple:
    """Describe the devices of a target to JAX."""
    if gpu := target.chip.gpu:
        options = {"topology": target.topology, "target_config": " ".join(gpu)}
        return tuple(topologies.get_topology_desc(platform="cuda", **options).devices)
    tpu = topologies.get_topology_desc(platform="tpu", topology_name=target.topology)
    return tuple(tpu.devices[: target.chips])


# The text of a compiled program

_HEAD = re.compile(r"^(ENTRY )?%?([\w.-]+) .*\{$")
_LINE = re.compile(r"^\s+(?:ROOT )?%?([\w.-]+) = (.*?) ([a-z][\w-]*)\((.*)$")
_CALLED = re.compile(r"(?:calls|to_apply|body|condition)=%?([\w.-]+)")
_BRANCHES = re.compile(r"(?:branch|true|false)_computations?=\{?([^}=]*?)\}?(?:, \w|$)")
_TRIPS = re.compile(r'"known_trip_count":\{"n":"(\d+)"')
_KIND = re.compile(
    r"(all-reduce|all-gather|reduce-scatter|(?:ragged-)?all-to-all|collective-\w+)"
    r"(-start)?"
)


class _Op(NamedTuple):
    name: str
    shape: str
    code: str
    rest: str  # operands and attributes

    @property
    def operands(self) -> list[str]:
        return re.findall(r"%([\w.-]+)", self.rest.partition(")")[0])


def _executed(text: str) -> Iterator[tuple]:
    """Yield (operation, all bodies, name of its body, times it runs, if known).

    A loop counts as often as the text says, else once. A conditional counts by its
    longest branch. A fusion is one operation; collectives inside it are yielded, too.
    """
    bodies: dict[str, list[_Op]] = {}
    entry, current = "", []
    for line in text.splitlines():
        if (head := _HEAD.match(line)) and not line.startswith("HloModule"):
            current = bodies[head[2]] = []
            entry = head[2] if head[1] else entry
        elif match := _LINE.match(line):
            current.append(_Op(*match.groups()))

    def within(name, times, counted):
        for op in bodies.get(name, ()):
            yield op, bodies, name, times, counted
            inner, often, exact = _CALLED.findall(op.rest), times, counted
            if op.code == "fusion":
                for fused in bodies.get(inner[0], ()):
                    if _KIND.fullmatch(fused.code):
                        yield fused, bodies, inner[0], times, counted
            elif op.code == "while":
                trips = _TRIPS.search(op.rest)
                often, exact = times * int(trips[1] if trips else 1), counted and trips
            elif op.code == "conditional":
                names = re.findall(r"[\w.-]+", ",".join(_BRANCHES.findall(op.rest)))
                inner = [max(names, key=lambda x: len(bodies.get(x, ())))]
            if op.code in ("while", "conditional", "call", "async-start"):
                for called in inner:
                    yield from within(called, often, bool(exact))

    yield from within(entry, 1, True)


class Collective(NamedTuple):
    """One exchange of data between devices."""

    kind: str  # "all-reduce"
    group: int  # how many devices take part
    bytes: int  # after an all-gather or all-to-all, before a reduce-scatter
    times: int  # how often it runs
    counted: bool  # False: a loop of unknown length holds it, and counts once


def collectives(text: str) -> list[Collective]:
    """Find every collective between devices in `compiled.as_text()`.

    A start and its done are one. So are fusions of a TPU that share one channel.
    """
    header = text.partition("\n")[0]
    sizes = re.findall(r"\b(?:num_partitions|replica_count)=(\d+)", header)
    num_devices, messages, seen = math.prod(map(int, sizes)), [], set()
    for op, bodies, name, times, counted in _executed(text):
        matched = _KIND.fullmatch(op.code)
        channel = "chain_id=" in op.rest and re.search(r"channel_id=\d+", op.rest)[0]
        if matched is None or channel in seen:
            continue
        seen |= {channel} - {False}
        kind, shape = matched[1], op.shape
        if matched[2]:  # the shape of a start holds its inputs, too
            ends = [x for x in bodies[name] if x.code == f"{kind}-done"]
            shape = next(x.shape for x in ends if op.name in x.operands)
        group = _group_size(op.rest, kind, num_devices)
        size = _shape_bytes(shape) * (group if kind == "reduce-scatter" else 1)
        messages.append(Collective(kind, group, size, times, counted))
    return [message for message in messages if message.group > 1]


def _group_size(rest, kind, num_devices) -> int:
    """Count the devices that exchange data in a collective."""
    if kind == "collective-permute":
        pairs = re.search(r"source_target_pairs=\{(.*?)\}\}", rest)
        moves = re.findall(r"(\d+),(\d+)", pairs[1]) if pairs else []
        return num_devices if any(a != b for a, b in moves) else 1
    if mesh := re.search(r"replica_groups=mesh\[([^\]]*)\] \{([^}]*)\}", rest):
        sides = dict(re.findall(r"'?([\w.]+)'?=(\d+)", mesh[1]))
        parts = re.findall(r"'?([\w.]+)'?(?::\(\d+\)(\d+))?", mesh[2])
        return math.prod(int(size or sides[axis]) for axis, size in parts)
    if listed := re.search(r"replica_groups=\[\d+,(\d+)\]", rest):
        return int(listed[1])
    first = re.search(r"replica_groups=\{\{([\d,]+)\}", rest)
    return len(first[1].split(",")) if first else num_devices


def _shape_bytes(shape) -> int:
    """Count the bytes of a shape, without padding; a tuple is the sum of its parts."""
    total = 0
    for dtype, sides in re.findall(r"([a-z]\w*)\[([\d,<=]*)\]", shape):
        bits = re.search(r"\d+", dtype)
        width = int(bits[0]) if bits else 8 * (dtype == "pred")
        total += -(-width * math.prod(map(int, re.findall(r"\d+", sides))) // 8)
    return total


def count_moved_bytes(text: str) -> int:
    """Count the bytes that a compiled program's text moves to and from memory.

    Each operation reads its operands and writes its results once. An array that it
    slices, gathers from or updates in place is left out, with the result of its shape.
    """
    total, sizes = 0, {}
    for op, bodies, name, times, _ in _executed(text):
        sizes = sizes or {
            k: {x.name: _shape_bytes(x.shape) for x in ops} for k, ops in bodies.items()
        }
        if op.code in ("fusion", "custom-call", "copy"):
            body = _CALLED.search(op.rest)[1] if op.code == "fusion" else ""
            tensors = collections.Counter(map(sizes[name].get, [op.name, *op.operands]))
            for part in bodies.get(body, ()):
                if part.code in ("dynamic-slice", "gather", "dynamic-update-slice"):
                    is_update = part.code == "dynamic-update-slice"
                    tensors -= {sizes[body][part.operands[0]]: 1 + is_update}
            total += times * sum(tensors.elements())
    return total


# The least time


def least_seconds(
    flops: float, traffic: float, sent: list[Collective], chip: Chip, precision: str
) -> dict[str, float]:
    """Bound the seconds of a step from below, by arithmetic, memory and links.

    Args:
      flops: FLOPs of a step on one device.
      traffic: bytes to and from the device's memory.
      sent: messages that devices send each other.
      chip: the device.
      precision: "bfloat16" or "float32", of the products.

    Returns:
      Seconds for "arithmetic", "memory" and "links", and "total", the largest of
      them: all three can run at once.
    """
    bounds = {
        "arithmetic": flops / getattr(chip, precision),
        "memory": traffic / chip.bandwidth,
        "links": sum(message.times * link_seconds(message, chip) for message in sent),
    }
    return bounds | {"total": max(bounds.values())}


def link_seconds(message: Collective, chip: Chip) -> float:
    """Bound the seconds of one collective, as rings in each island and across them.

    Latency is left out, since no vendor states it.
    """
    group, size = message.group, message.bytes
    near = min(group, chip.island or group)
    islands = math.ceil(group / near)
    outside = chip.outside if islands > 1 else chip.link
    if message.kind.startswith("collective"):
        return size / outside
    if message.kind.endswith("all-to-all"):
        inside, across = size * (near - 1) / group, size * (group - near) / group
    else:
        ways = 2 if message.kind == "all-reduce" else 1
        inside = ways * size * (near - 1) / near
        across = ways * size / near * (islands - 1) / islands
    return max(inside / chip.link, across / outside)


# A step, compiled


def _later_task(work: job.Job) -> int:
    """Number a later task, with teacher and distillation, if there is one."""
    return work.stream.tasks[:2][-1].index


def lower_step(work: job.Job) -> jax.stages.Lowered:
    """Lower the program that a run calls: `steps_per_call` steps of a later task."""

    def placed(x, place, *axes):
        return jax.ShapeDtypeStruct((*axes, *x.shape), x.dtype, sharding=place)

    def rows_only(batch):  # the images are on the device
        inner = {k: rows_only(x) for k, x in batch.items() if k == "labelled"}
        return {"index": batch["index"]} | inner

    num_batches = work.batches_per_step(_later_task(work))
    steps = work.loop.steps_per_call
    state, batch = job.placed_shapes(work.method, work.data, work.mesh, num_batches)
    replicated = sharding.replicated(work.mesh)
    split = sharding.split_sharding(work.mesh, axis=2 if num_batches > 1 else 1)
    place = replicated if work.data.graphs else split
    constants = {name: batch.pop(name) for name in job.constant_shapes(work.method)}
    batch = rows_only(batch) if work.data.resident else batch
    batches = jax.tree.map(lambda x: placed(x, place, steps), batch)
    shapes = job.resident_shapes(work.data) | constants
    images = jax.tree.map(lambda x: placed(x, replicated), shapes)
    count = jax.ShapeDtypeStruct((), np.int32, sharding=replicated)
    return job.compile_step(work).lower(state, images, batches, count)


def read_program(
    compiled: jax.stages.Compiled, work: job.Job, chip: Chip | None
) -> dict:
    """Read the memory, FLOPs and messages of one step on one device.

    FLOPs are the compiler's count, or XLA's count of the step as it is written, shared
    among the devices, if that is more: the first counts loops once and calls of
    libraries not at all, the second counts nothing that all devices repeat.

    Args:
      compiled: the program of a call.
      work: job of the program.
      chip: the device; None: no figures are known.

    Returns:
      A dict for JSON: "memory" in bytes by kind, with "held" in all; "fits"; "flops";
      "bytes" to and from memory; "collectives"; "least" in seconds. Without a chip
      "fits" and "least" are None.
    """
    analysis, text = compiled.memory_analysis(), compiled.as_text()
    memory = {
        "arguments": analysis.argument_size_in_bytes,
        "outputs": analysis.output_size_in_bytes,
        "aliased": analysis.alias_size_in_bytes,
        "temporaries": analysis.temp_size_in_bytes,
        "program": analysis.generated_code_size_in_bytes,
    }
    memory["held"] = sum(memory.values()) - 2 * memory["aliased"]
    costs, task = compiled.cost_analysis() or {}, _later_task(work)
    shapes = job.shapes(work.method, work.data, work.batches_per_step(task))
    written = cost.count_flops(work.method.step, *shapes, task=task)
    flops = max(costs.get("flops", 0.0), (written or 0) / work.mesh.size)
    # A GPU's compiler tells no bytes of a chip that is absent, nor of libraries' calls.
    gpu = work.mesh.devices.flat[0].platform == "gpu"
    traffic = count_moved_bytes(text) if gpu else costs.get("bytes accessed", 0.0)
    sent, precision = collectives(text), work.config.get("precision", "float32")
    return {
        "memory": memory,
        "fits": chip and memory["held"] <= chip.memory,
        "flops": flops,
        "bytes": traffic,
        "collectives": [message._asdict() for message in sent],
        "least": chip and least_seconds(flops, traffic, sent, chip, precision),
    }


_FULL = re.compile(r"RESOURCE_EXHAUSTED|Ran out of memory|exceeds? .*memory", re.I)


def estimate(
    config: ml_collections.ConfigDict,
    target: Target | None = None,
    *,
    classes: int | None = None,
    rows: int | None = None,
) -> tuple[dict, Chip | None]:
    """Compile the step of a config for a target.

    Args:
      config: result of a config file's `get_config`, overrides applied.
      target: the chips; None: the devices of this machine.
      classes, rows: numbers of the train split; None: as in the config.

    Returns:
      `read_program`'s dict with what was compiled, and the figures of one device. If
      the compiler itself reports that the program does not fit, "fits" is False and
      "error" is its message.

    Raises:
      Refused: the config is wrong, or does not state the classes of its data.
    """
    start = time.monotonic()
    sections = (config.get(name, {}) for name in ("data", "scenario", "augment"))
    data = stand_in.make_blank_dataset(*sections, classes=classes, rows=rows)
    with contextlib.ExitStack() as stack:
        if target is not None:
            stack.enter_context(sharding.compile_target(devices(target)))
            with config.unlocked(), config.ignore_type():
                config.devices = None  # all of the target's
        work = build.plan_job(config, data, one_step=False)
        result = {
            "name": work.config.get("name", "run"),
            "device": work.mesh.devices.flat[0].device_kind,
            "devices": work.mesh.size,
            "examples": work.data.batch_size * work.batches_per_step(_later_task(work)),
            "precision": work.config.get("precision", "float32"),
        }
        chip = target.chip if target else chip_of(result["device"])
        try:
            compiled = _compiled(lower_step(work))
        except jax.errors.JaxRuntimeError as error:
            if not _FULL.search(str(error)):
                raise
            text = " ".join(str(error).split())[:300]
            return result | {"fits": False, "error": text}, chip
        result["seconds"] = time.monotonic() - start
        return result | read_program(compiled, work, chip), chip


def _compiled(lowered):
    try:
        return lowered.compile()
    except jax.errors.JaxRuntimeError as error:
        # Without a chip XLA finds no tiles for some products: a library computes them.
        if "Couldn't find output tile sizes" not in str(error):
            raise
        return lowered.compile(compiler_options={"xla_gpu_enable_triton_gemm": False})


# The command


def format_estimate(facts: dict, chip: Chip | None) -> str:
    """Write what `estimate` returns as text."""
    head = f"{facts['name']}: {facts['examples']} examples a step, {facts['precision']}"
    head += f", {facts['devices']} x {facts['device']}"
    if "error" in facts:
        return f"{head}\nIT DOES NOT FIT: {facts['error']}"
    memory = {name: size / 1e9 for name, size in facts["memory"].items()}
    step = {"GFLOP": facts["flops"] / 1e9, "GB of memory": facts["bytes"] / 1e9}
    sent: dict[tuple, list[int]] = {}
    for x in facts["collectives"]:
        sent.setdefault((x["kind"], x["group"]), []).extend([x["bytes"]] * x["times"])
    sums = {f"{k}, {len(x)} among {n}": sum(x) / 1e6 for (k, n), x in sent.items()}
    groups = {"memory of a device, GB": memory, "a step of a device": step}
    groups["collectives of a step, MB"] = sums
    last = "No least time: jaxcl/chips.json has no row for this device."
    if chip:
        bound, peak = facts["least"], getattr(chip, facts["precision"])
        number = format_number
        groups["least time of a step, ms"] = {
            f"arithmetic at {number(peak / 1e12)} TFLOP/s": 1e3 * bound["arithmetic"],
            f"memory at {number(chip.bandwidth / 1e9)} GB/s": 1e3 * bound["memory"],
            f"links at {number(chip.link / 1e9)} GB/s": 1e3 * bound["links"],
        }
        fits = "It fits" if facts["fits"] else "IT DOES NOT FIT"
        last = (
            f"{fits}: {number(memory['held'])} of {number(chip.memory / 1e9)} GB.\n"
            f"At least {number(1e3 * bound['total'])} ms, so at most "
            f"{number(facts['examples'] / bound['total'])} examples/s; {chip.source}"
        )
    lines = [head]
    for title, rows in groups.items():
        lines += [title] if rows else []
        lines += [
            f"  {name:36}{format_number(value):>9}" for name, value in rows.items()
        ]
    return "\n".join([*lines, last, f"Compiled in {facts['seconds']:.0f} s"])


def format_number(value: float) -> str:
    """Write a number with three digits."""
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


# The CPU stays the only backend, no GPU is touched, and libtpu asks no metadata server.
_ENVIRONMENT = {
    "CUDA_VISIBLE_DEVICES": "-1",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_ACCELERATOR_TYPE": "v5e-4",
    "TPU_WORKER_HOSTNAMES": "localhost",
}


def add_options(parser) -> None:
    """Add the options of `jaxcl estimate`."""
    parser.epilog = """examples:
  jaxcl estimate pnr_cifar100
  jaxcl estimate pnr_cifar100 --target=h200:8
  jaxcl estimate pnr_cifar100 --target=v5e:2x4 --json=step.json

exit codes: 0 compiled, 1 failed, 2 wrong command or config"""
    parser.add_config()
    add = parser.add_argument
    chips = "chips: a TPU slice by its sides, or GPUs by number (this machine's)"
    add("--target", metavar="CHIPS", help=chips)
    add("--classes", type=int, metavar="N", help="classes of the data set (config's)")
    add("--rows", type=int, metavar="N", help="train images of the set (config's)")
    add("--json", metavar="FILE", help="file for all numbers")


def main(options: argparse.Namespace) -> int:
    """Run `jaxcl estimate`; return its exit code."""
    target, version = None, f"jax {jax.__version__}"
    sizes = {"classes": options.classes, "rows": options.rows}
    for name, size in sizes.items():
        schema.check_value(size, schema.Count | None, f"--{name}")
    config = files.read_config(options.config)
    if options.target is not None:
        target = parse_target(options.target)
        version = compiler(target)
        os.environ.update(_ENVIRONMENT)
        jax.config.update("jax_platforms", "cpu")
    figures, chip = estimate(config, target, **sizes)
    if options.json:
        storage.write_json(options.json, figures | {"compiler": version})
    print(f"{format_estimate(figures, chip)} by {version}")
    return 0
