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

import math
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


# The vendors' figures, except latencies: Google's pages on each TPU (between chips, one
# direction: 2400, 1600 and 4800 Gbit/s), NVIDIA's data sheets of H100 SXM (NVLink: 900
# GB/s in both directions) and DGX H100 (one link of 400 Gbit/s to others for each GPU).
MACHINES = {
    "tpu-v4": Machine(275e12, 275e12, 32 * 2**30, 300e9, 1e-6),
    "tpu-v5e": Machine(197e12, 197e12, 16e9, 200e9, 1e-6),
    "tpu-v5p": Machine(459e12, 459e12, 95 * 2**30, 600e9, 1e-6),
    "h100": Machine(989e12, 495e12, 80e9, 450e9, 3e-6, island=8, outside=50e9),
}


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
