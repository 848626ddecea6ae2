"""What a compiled program sends between devices: its collectives, read from its text.

The text is XLA's optimised HLO, `compiled.as_text()`. Shapes are static, so it tells
what devices send before anything runs. A collective that XLA merged from several has a
part for each of them.
"""

import math
import re
from typing import NamedTuple

from jaxcl.scaling import hlo

# The bytes of a collective are those of the whole shared buffer: what each device holds
# after an all-reduce or all-gather, or before a reduce-scatter.
KINDS = (
    "all-reduce",
    "all-gather",
    "reduce-scatter",
    "all-to-all",
    "ragged-all-to-all",
    "collective-permute",
    "collective-broadcast",
)
# Matrix products that a backend leaves to a library.
_LIBRARY = re.compile(r'custom_call_target="[^"]*(?:matmul|gemm|conv|dot)', re.I)
_SAME = ("bitcast", "copy", "reshape", "transpose", "get-tuple-element")


class Part(NamedTuple):
    """One array of a collective."""

    bytes: int
    waits: bool  # a product or a convolution of the program depends on it
    name: str  # where in the source code it comes from


class Collective(NamedTuple):
    """One exchange of data between devices."""

    kind: str  # one of KINDS
    group: int  # number of devices that take part
    times: float  # how often a step does it; 1 in a loop of unknown length
    counted: bool  # False: it is in a loop of unknown length
    parts: tuple[Part, ...]
    beside: int = 0  # operations that run between its start and its end; 0: all wait

    @property
    def bytes(self) -> int:
        """Bytes of all parts, for one exchange."""
        return sum(part.bytes for part in self.parts)


def read(text: str) -> list[Collective]:
    """Every collective of the text of a program, see `of`.

    Raises:
      ValueError: the text has no entry computation.
    """
    return of(hlo.parse(text))


def of(program: hlo.Program, *, steps: int = 1) -> list[Collective]:
    """Every collective of a program between two or more devices.

    A start and its done are one collective, and so are the fusions that send one piece
    by piece on a TPU. In a loop, a collective counts as often as
    the loop runs, if XLA knows. Of a conditional the branch that sends most counts.

    Args:
      program: after optimisation.
      steps: that it makes, see `hlo.parse`; `times` are of one of them.
    """
    entry = program.entry
    once = 1 if steps == 1 else 1 / steps
    return _within(program, entry, once, True, _needed(program, entry))


def plain(sent: list[Collective]) -> list[dict]:
    """The collectives in types that JSON can hold."""
    return [
        message._asdict() | {"parts": [part._asdict() for part in message.parts]}
        for message in sent
    ]


def restored(sent: list[dict]) -> list[Collective]:
    """The collectives that `plain` was given."""
    return [
        Collective(
            **message | {"parts": tuple(Part(**part) for part in message["parts"])}
        )
        for message in sent
    ]


def _within(program, computation, times, counted, needed) -> list[Collective]:
    """The collectives of a computation.

    Args:
      times: how often the computation runs.
      counted: whether this number is known.
      needed: see `_needed`; None: all of the computation.
    """
    sent, ops = [], program.computations.get(computation, ())
    chains: dict[str, list[int]] = {}  # channel -> its place in `sent`, its ops'
    for place, op in enumerate(ops):
        if op.code.removesuffix("-start") in KINDS:
            sent += _collective(program, ops, op, times, counted, needed)
            continue
        called = hlo.called(op)
        if op.code == "while":
            turns = program.turns[op.name]
            often, known = times * (turns or 1), counted and turns is not None
            of_steps = op.name == program.loop_of_steps
            inside = _needed(program, called["body"]) if of_steps else None
            sent += _within(program, called.get("body"), often, known, inside)
            sent += _within(program, called.get("condition"), often, known, None)
        elif op.code == "conditional":
            branches = [
                _within(program, branch, times, counted, None)
                for branch in hlo.branches(op)
            ]
            sent += max(branches, key=_total_bytes, default=[])
        elif op.code in ("call", "fusion", "async-start"):
            inner = called.get("calls") or called.get("to_apply")
            chain = _chain(program, inner)
            if chain is not None:
                chains.setdefault(chain, [len(sent)]).append(place)
                if len(chains[chain]) > 2:
                    continue
            sent += _within(program, inner, times, counted, None)
    for first, *places in chains.values():
        between = ops[places[0] + 1 : places[-1]]
        sent[first] = sent[first]._replace(beside=sum(map(hlo.runs, between)))
    return sent


def _chain(program, computation) -> str | None:
    """The channel of a message that a TPU sends piece by piece, in several fusions.

    One starts it, others go on with it beside their own arithmetic, one ends it. All
    name the whole message, which counts once.
    """
    for op in program.computations.get(computation, ()):
        if op.code in KINDS and "chain_id=" in op.rest:
            return re.search(r"channel_id=(\d+)", op.rest)[1]
    return None


def _total_bytes(sent) -> int:
    return sum(message.times * message.bytes for message in sent)


def _collective(program, ops, op, times, counted, needed) -> list[Collective]:
    """The collective that an op is, [] if nothing leaves a device; see `_within`."""
    kind, group = op.code.removesuffix("-start"), _group(op, program.devices)
    if group < 2:
        return []
    attributes, beside = op.rest, 0
    if op.code != kind:  # the shape of a start also holds its inputs
        start = op
        op = next(x for x in ops if x.code == f"{kind}-done" and op.name in x.operands)
        between = ops[ops.index(start) + 1 : ops.index(op)]
        beside = sum(hlo.runs(x) for x in between)
    sizes, elements = [array.bytes for array in hlo.arrays(op.shape)], {}
    for user in ops:
        if user.code == "get-tuple-element" and op.name in user.operands:
            elements[int(re.search(r"index=(\d+)", user.rest)[1])] = user
    parts = []
    for place, size in enumerate(sizes):
        value = op if len(sizes) == 1 else elements.get(place)
        name = (value and hlo.source(value)) or hlo.source(op._replace(rest=attributes))
        waits = needed is None or (value is not None and value.name in needed)
        if kind == "reduce-scatter":
            size *= group
        if "_promoted" in attributes and value and _narrowed(program, ops, value.name):
            size //= 2
        parts.append(Part(size, waits, name))
    return [Collective(kind, group, times, counted, tuple(parts), beside)]


def _group(op, devices) -> int:
    """Number of devices that exchange data in an op."""
    pairs = re.search(r"source_target_pairs=\{(.*?)\}\}", op.rest)
    if op.code.startswith("collective-permute"):
        moves = re.findall(r"(\d+),(\d+)", pairs[1]) if pairs else []
        return devices if any(a != b for a, b in moves) else 1
    mesh = re.search(r"replica_groups=mesh\[([^\]]*)\] \{([^}]*)\}", op.rest)
    if mesh:
        sides = dict(re.findall(r"'?([\w.]+)'?=(\d+)", mesh[1]))
        parts = re.findall(r"'?([\w.]+)'?(?::\(\d+\)(\d+))?", mesh[2])
        return math.prod(int(size or sides[axis]) for axis, size in parts)
    listed = re.search(r"replica_groups=\[\d+,(\d+)\]", op.rest)
    if listed:
        return int(listed[1])
    first = re.search(r"replica_groups=\{\{([\d,]+)\}", op.rest)
    return len(first[1].split(",")) if first else devices


def _narrowed(program, ops, name) -> bool:
    """Whether every use of a value converts it to 16 bits.

    XLA's CPU backend adds in 32 bits what other devices add, and send, in 16.
    """
    users = [op for op in ops if name in op.operands]
    return bool(users) and all(_narrows(program, ops, op, name) for op in users)


def _narrows(program, ops, op, name) -> bool:
    """Whether an op converts the value `name` to 16 bits, by itself or by its users."""
    if op.code == "convert":
        return op.shape.startswith(("bf16[", "f16["))
    if op.code in _SAME:
        return _narrowed(program, ops, op.name)
    if op.code != "fusion":
        return False
    inner = program.computations[hlo.called(op)["calls"]]
    places = [str(i) for i, operand in enumerate(op.operands) if operand == name]
    taken = [x for x in inner if x.code == "parameter" and x.arguments in places]
    return all(_narrowed(program, inner, x.name) for x in taken)


def _needed(program, computation) -> set[str]:
    """Names of values that a product or a convolution of a computation depends on."""
    needed = set()
    for op in reversed(program.computations[computation]):
        if op.name in needed or _multiplies(program, op):
            needed |= set(op.operands)
    return needed


def _multiplies(program, op) -> bool:
    """Whether an op is or calls a product or a convolution."""
    if op.code == "custom-call":
        return _LIBRARY.search(op.rest) is not None
    inner = [*hlo.called(op).values(), *hlo.branches(op)]
    return op.code in ("dot", "convolution") or any(
        _multiplies(program, called)
        for name in inner
        for called in program.computations.get(name, ())
    )
