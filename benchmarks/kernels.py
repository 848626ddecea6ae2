"""Read a profile: time of each kernel of a step, by the part of jaxcl it belongs to.

`gpu_quarter_hour.py` uses it. A kernel is an instruction of the compiled program, whose
text says which line of Python it came from. On a GPU kernels of the streams count, on a
TPU its operations, on a CPU what XLA's threads do.
"""

import collections
import contextlib
import pathlib
import re
import warnings
from collections.abc import Iterator
from typing import NamedTuple

import jax

# Kind -> words of an operation's name and of its functions. The first match counts.
KINDS = {
    "augmentation": r"data/augment/",
    "convolutions": r"conv_general_dilated|convolution",
    "norms": r"[a-z]Norm\b|/bn\d*/",
    "optimizer": r"optim\.py|optax|apply_gradients",
    "loss": r"losses/",
    "memory": r"memory/",
    "network": r"nets/|linen/",
}
# Libraries' kernels that name no instruction.
_CONVOLUTION = re.compile(
    r"conv|fprop|dgrad|wgrad|winograd|implicit|cudnn|nchw|nhwc", re.I
)
_CONTROL = ("while", "conditional", "call")  # they hold other kernels
_TABLE = re.compile(r"^(FileNames|FunctionNames|FileLocations|StackFrames)$")
_HEAD = re.compile(r"^(?:ENTRY )?%?([\w.-]+) .*\{$")
_LINE = re.compile(r"^\s+(?:ROOT )?%?([\w.-]+) = .*? ([a-z][\w-]*)\((.*)$")


class Place(NamedTuple):
    """An instruction's part of the program."""

    kind: str  # a key of KINDS, "copies" or "other"
    code: str  # opcode
    name: str  # path of the operation in JAX


class Kernel(NamedTuple):
    """A kernel that ran once."""

    name: str
    place: Place
    start: float  # ns
    duration: float  # ns


@contextlib.contextmanager
def recorded(folder: str) -> Iterator[list]:
    """Record a profile; afterwards the list that is yielded holds it."""
    options, made = jax.profiler.ProfileOptions(), []
    options.python_tracer_level = 0
    with jax.profiler.trace(folder, profiler_options=options):
        yield made
    path = max(pathlib.Path(folder).rglob("*.xplane.pb"))
    made.append(jax.profiler.ProfileData.from_file(str(path)))


def read(trace: jax.profiler.ProfileData, text: str) -> list[Kernel]:
    """Return the kernels of a profile.

    Args:
      trace: the profile.
      text: the compiled program.
    """
    places, rows = read_places(text), []
    for name, op, start, duration in _events(trace):
        place = places.get(_plain(name)) or places.get(_plain(op))
        if place is None:
            kind = "convolutions" if _CONVOLUTION.search(name) else "other"
            kind = "copies" if "memcpy" in name.lower() else kind
            place = Place(kind, "", op)
        if place.code not in _CONTROL:
            rows.append(Kernel(name, place, start, duration))
    return rows


def _events(trace) -> list[tuple]:
    """List (name, hlo_op, start, duration) of what a chip, or else a CPU, did."""
    found = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of the reader's types
        planes = list(trace.planes)
        chips = [x for x in planes if re.match(r"/device:(GPU|TPU):", x.name)]
        for plane in chips[:1] or planes:
            lines = list(plane.lines)
            streams = [x for x in lines if x.name.startswith("Stream")]
            operations = [x for x in lines if x.name == "XLA Ops"]
            for line in (streams or operations or lines) if chips else lines:
                for event in line.events:
                    op = dict(event.stats).get("hlo_op")
                    if chips or op is not None:
                        times = event.start_ns, event.duration_ns
                        found.append((event.name, str(op or ""), *times))
    return found


def _plain(name: str) -> str:
    """Return the name that a kernel and its instruction share."""
    return re.sub(r"\W", "_", name.lstrip("%"))


def read_places(text: str) -> dict[str, Place]:
    """Find the part of jaxcl of each instruction of a compiled program.

    A fusion belongs where most of its instructions do; a convolution decides alone.
    """
    tables: dict[str, dict] = collections.defaultdict(dict)
    bodies: dict[str, list] = collections.defaultdict(list)
    table = body = ""
    for line in text.splitlines():
        if found := _TABLE.match(line):
            table = found[1]
        elif (found := re.match(r"(\d+) (.*)", line)) and table:
            tables[table][int(found[1])] = found[2]
        elif (found := _HEAD.match(line)) and not line.startswith("HloModule"):
            table, body = "", found[1]
        elif found := _LINE.match(line):
            bodies[body].append(found.groups())
    frames = _describe_frames(tables)

    def place(name, code, rest) -> Place:
        op = re.search(r'op_name="([^"]*)"', rest)
        op = op[1] if op else ""
        frame = re.search(r"stack_frame_id=(\d+)", rest)
        words = f"{code} {op} {frames.get(int(frame[1]), '') if frame else ''}"
        kind = next((k for k, x in KINDS.items() if re.search(x, words)), "other")
        if kind == "other" and code.startswith(("copy", "transpose")):
            kind = "copies"
        called = re.search(r"calls=%?([\w.-]+)", rest) if code == "fusion" else None
        if called and (inner := [place(*x) for x in bodies[called[1]]]):
            votes = collections.Counter(x.kind for x in inner if x.kind != "other")
            kind = votes.most_common(1)[0][0] if votes else kind
            kind = "convolutions" if "convolutions" in votes else kind
            op = op or next((x.name for x in inner if x.kind == kind), "")
        return Place(kind, code, op)

    return {_plain(x[0]): place(*x) for body in bodies.values() for x in body}


def _describe_frames(tables) -> dict[int, str]:
    """Write the files and functions of each stack frame, the innermost first."""

    def field(text, name):
        return int(re.search(rf"{name}=(\d+)", text)[1])

    found: dict[int, str] = {}
    for number, frame in sorted(tables["StackFrames"].items()):
        where = tables["FileLocations"][field(frame, "file_location_id")]
        file = tables["FileNames"][field(where, "file_name_id")].strip('"')
        function = tables["FunctionNames"][field(where, "function_name_id")].strip('"')
        outer = found.get(field(frame, "parent_frame_id") - 1, "")
        found[number] = f"{file}:{function} {outer}"
    return found


def summarize(rows: list[Kernel], steps: int, *, untraced_ms: float) -> dict:
    """Sum the kernels of some steps.

    Args:
      rows: the kernels.
      steps: number of steps that they did.
      untraced_ms: milliseconds of a step without the profiler, which slows it down.

    Returns:
      A dict for JSON: "ms" of a step by kind, with "busy", "gaps" between kernels in
      the profile, and "gaps untraced"; "kernels", the longest first.
    """
    if not rows:
        raise ValueError("the profile has no kernels")
    busy, end = 0.0, 0.0
    for row in sorted(rows, key=lambda x: x.start):
        last = row.start + row.duration
        busy, end = busy + max(0.0, last - max(row.start, end)), max(end, last)
    scale = 1e-6 / steps
    kinds, sums = collections.Counter(), collections.defaultdict(list)
    for row in rows:
        kinds[row.place.kind] += row.duration * scale
        sums[row.name, row.place].append(row.duration * scale)
    whole = (end - min(x.start for x in rows)) * scale
    ms = dict(kinds) | {"busy": busy * scale, "gaps": whole - busy * scale}
    ms["gaps untraced"] = max(0.0, untraced_ms - busy * scale)
    longest = sorted(sums.items(), key=lambda x: -sum(x[1]))
    kernels = [
        {"name": name, "kind": place.kind, "ms": sum(times)}
        | {"count": len(times) / steps, "from": place.name}
        for (name, place), times in longest
    ]
    return {"ms": ms, "kernels": kernels}
