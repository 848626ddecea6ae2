"""A simple model of how long a step would take on machines that are not at hand.

time = arithmetic + communication. Arithmetic is FLOPs over a share of the peak. A
collective of S bytes among n devices is a ring within each "island" of h devices with
fast links, and a ring across the m = n / h islands, for which each device has its own
link. To the time for the bytes it adds a hop's latency for every doubling of n:

  all-reduce      2 (h-1)/h S / bandwidth + 2 (m-1)/m S/h / outside + 2 log2(n) latency
  all-gather, reduce-scatter      half of that
  all-to-all      (h-1)/n S / bandwidth + (n-h)/n S / outside + log2(n) latency
  others          S / (outside, or bandwidth within an island) + log2(n) latency

There are two bounds. In one nothing runs while devices communicate. In the other,
messages that no product or convolution of the step waits for, such as gradients that
only the optimiser reads, overlap with the arithmetic.
"""

import json
import math
import pathlib
from typing import NamedTuple


class Machine(NamedTuple):
    """A kind of device and what connects it to others of its kind."""

    peak: float  # FLOP/s, dense, of bfloat16
    peak_float32: float  # of float32 products by default: TF32, on TPUs bfloat16
    memory: float  # bytes
    bandwidth: float  # bytes/s that a device sends at most, over all its links
    latency: float  # seconds of a hop; an assumption of ours
    island: int | None = None  # devices that have this bandwidth; None: all
    outside: float | None = None  # bytes/s that a device sends out of its island
    memory_bandwidth: float | None = None  # bytes/s of the device's own memory
    launch: float = 0.0  # seconds that a kernel takes at least; an assumption of ours
    clock: float | None = None  # cycles/s of a TPU; None: not known


# The vendors' figures, except latencies and launches, which are assumptions of ours.
# Google's pages on each TPU (links between chips, one direction: 2400, 1600, 4800 and
# 3200 Gbit/s); a clock is the peak over what the matrix units do in a cycle, 128 x 128
# multiply-adds for each of 4 (v5e) or 8 (v4, v5p). NVIDIA's data sheets of A100, H100
# and H200 SXM (dense; NVLink: 600 and 900 GB/s in both directions) and of DGX (one link
# of 200 Gbit/s, from H100 on 400, to others for each GPU); what their compiler asks for
# is from the tables of compute capabilities in the CUDA C++ Programming Guide.
CHIPS = json.loads(pathlib.Path(__file__).with_name("chips.json").read_text())
MACHINES = {name: Machine(**chip["machine"]) for name, chip in CHIPS.items()}


def shared(machine: Machine, cores: int) -> Machine:
    """A part of a chip that is several devices; links are those of the chip."""
    fields = ("peak", "peak_float32", "memory", "memory_bandwidth")
    parts = {name: getattr(machine, name) / cores for name in fields}
    return machine._replace(**parts) if cores > 1 else machine


class Estimate(NamedTuple):
    """Seconds of one step."""

    compute: float
    waited: float  # communication that something waits for
    beside: float  # communication that the arithmetic can run beside

    @property
    def fast(self) -> float:
        """Time of a step if everything that can overlap does."""
        return self.waited + max(self.compute, self.beside)

    @property
    def slow(self) -> float:
        """Time of a step if nothing overlaps."""
        return self.compute + self.waited + self.beside


def seconds(kind: str, size: int, group: int, machine: Machine) -> tuple[float, float]:
    """Seconds of one collective, for its bytes and for its hops.

    Args:
      kind: a name in `collectives.KINDS`.
      size: bytes of the whole buffer, see `collectives.KINDS`.
      group: devices that take part.
    """
    if group < 2:
        return 0.0, 0.0
    inside = min(group, machine.island or group)
    islands = math.ceil(group / inside)
    outside = machine.outside or machine.bandwidth
    rounds = math.ceil(math.log2(group)) * machine.latency
    if kind in ("all-reduce", "all-gather", "reduce-scatter"):
        ways = 2 if kind == "all-reduce" else 1
        near = (inside - 1) / inside * size / machine.bandwidth
        far = (islands - 1) / islands * size / inside / outside
        return ways * (near + far), ways * rounds
    if kind.endswith("all-to-all"):
        near = (inside - 1) / group * size / machine.bandwidth
        return near + (group - inside) / group * size / outside, rounds
    return size / (outside if islands > 1 else machine.bandwidth), rounds


def estimate(
    flops: float, sent: list, machine: Machine, *, utilisation: float, precision: str
) -> Estimate:
    """Seconds of one step.

    Args:
      flops: of one device.
      sent: from `collectives.read`.
      utilisation: share of the peak that the arithmetic reaches.
      precision: "bfloat16" or "float32", of the computation.
    """
    peak = machine.peak if precision == "bfloat16" else machine.peak_float32
    waited = beside = 0.0
    for message in sent:
        moving, hops = seconds(message.kind, message.bytes, message.group, machine)
        needed = sum(part.bytes for part in message.parts if part.waits)
        share = needed / message.bytes if message.bytes else 0.0
        waited += message.times * (moving * share + (hops if share else 0.0))
        beside += message.times * (moving * (1 - share) + (0.0 if share else hops))
    return Estimate(flops / (peak * utilisation), waited, beside)


def efficiency(
    examples: float, first_examples: float, time: float, first_time: float
) -> float:
    """Examples per second and device, relative to the run with the fewest devices.

    Args:
      examples, first_examples: of one device at each step.
      time, first_time: seconds of a step.
    """
    return (examples / time) / (first_examples / first_time)
