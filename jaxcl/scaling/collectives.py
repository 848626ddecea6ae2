"""What a compiled program sends between devices: its collectives, read from its text.

The text is XLA's optimised HLO, `compiled.as_text()`. Shapes are static, so it tells
what devices send before anything runs. A collective that XLA merged from several has a
part for each of them.
"""

import math
import re
from typing import NamedTuple

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
_BITS = {"pred": 8, "token": 0, "opaque": 0}
_NAMED = re.compile(r"^\s*(?:ROOT )?%?([\w.-]+) = (.*)$")
_HEAD = re.compile(r"^(ENTRY )?%?([\w.-]+) .*\{$")
_ARRAY = re.compile(r"([a-z]+[a-z0-9]*)\[([^\]]*)\]")
_CALLED = re.compile(
    r"(calls|to_apply|body|condition|true_computation|false_computation)=%?([\w.-]+)"
)
_BRANCHES = re.compile(r"branch_computations=\{([^}]*)\}")
_TRIPS = re.compile(r'"known_trip_count":\{"n":"(\d+)"')
_NAME = re.compile(r'op_name="([^"]*)"')
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
    times: int  # how often a step does it; 1 in a loop of unknown length
    counted: bool  # False: it is in a loop of unknown length
    parts: tuple[Part, ...]

    @property
    def bytes(self) -> int:
        """Bytes of all parts, for one exchange."""
        return sum(part.bytes for part in self.parts)


class _Op(NamedTuple):
    """One line of HLO."""

    name: str
    shape: str
    code: str
    arguments: str  # the text in its parentheses
    operands: tuple[str, ...]  # names in that text
    rest: str  # attributes


class _Program(NamedTuple):
    """An HLO module."""

    computations: dict[str, list[_Op]]
    entry: str
    devices: int


def read(text: str) -> list[Collective]:
    """Every collective of a program between two or more devices.

    A start and its done are one collective. In a loop, a collective counts as often as
    the loop runs, if XLA knows. Of a conditional the branch that sends most counts.

    Args:
      text: of an HLO module after optimisation.

    Raises:
      ValueError: the text has no entry computation.
    """
    program = _parse(text)
    return _within(program, program.entry, 1, True, _needed(program))


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


def _parse(text) -> _Program:
    """The program of an HLO text."""
    computations, entry, current = {}, None, None
    for line in text.splitlines():
        head = None if line.startswith(" ") else _HEAD.match(line)
        if head and not line.startswith("HloModule"):
            current = computations[head[2]] = []
            entry = head[2] if head[1] else entry
        elif current is not None and (named := _NAMED.match(line)):
            current.append(_op(named[1], named[2]))
    if entry is None:
        raise ValueError("text: holds no ENTRY computation; give compiled.as_text()")
    header = text.partition("\n")[0]
    counts = re.findall(r"\b(?:num_partitions|replica_count)=(\d+)", header)
    return _Program(computations, entry, math.prod(map(int, counts)))


def _op(name, definition) -> _Op:
    """The operation of a line `name = definition`."""
    tuple_shape = definition.startswith("(")
    shape, rest = _cut(definition) if tuple_shape else definition.split(" ", 1)
    code, _, rest = rest.strip().partition("(")
    arguments, rest = _cut("(" + rest)
    operands = re.findall(r"%([\w.-]+)", arguments)
    return _Op(name, shape, code, arguments[1:-1], tuple(operands), rest)


def _cut(text) -> tuple[str, str]:
    """Split a text after the parenthesis that closes its first one."""
    depth = 0
    for place, letter in enumerate(text):
        depth += (letter == "(") - (letter == ")")
        if not depth:
            return text[: place + 1], text[place + 1 :]
    return text, ""


def _arrays(shape) -> list[int]:
    """Bytes of each array of a shape; tuples are flattened."""
    without_layout = re.sub(r"\{[^}]*\}", "", shape)
    return [_bytes(*array) for array in _ARRAY.findall(without_layout)]


def _bytes(dtype, dimensions) -> int:
    """Bytes of an array, by the texts of its type and of its dimensions."""
    bits = _BITS.get(dtype)
    if bits is None:
        bits = int(re.search(r"\d+", dtype)[0])
    sides = re.findall(r"\d+", dimensions)
    return -(-bits * math.prod(map(int, sides)) // 8)


def _within(program, computation, times, counted, needed) -> list[Collective]:
    """The collectives of a computation.

    Args:
      times: how often the computation runs.
      counted: whether this number is known.
      needed: see `_needed`; None: all of the computation.
    """
    sent, ops = [], program.computations.get(computation, ())
    for op in ops:
        if op.code.removesuffix("-start") in KINDS:
            sent += _collective(program, ops, op, times, counted, needed)
            continue
        called = dict(_CALLED.findall(op.rest))
        if op.code == "while":
            trips = _TRIPS.search(op.rest)
            often = times * int(trips[1]) if trips else times
            known = counted and trips is not None
            for inner in (called.get("body"), called.get("condition")):
                sent += _within(program, inner, often, known, None)
        elif op.code == "conditional":
            branches = [
                _within(program, branch, times, counted, None)
                for branch in _branches(op)
            ]
            sent += max(branches, key=_total_bytes, default=[])
        elif op.code in ("call", "fusion", "async-start"):
            inner = called.get("calls") or called.get("to_apply")
            sent += _within(program, inner, times, counted, None)
    return sent


def _branches(op) -> list[str]:
    """Names of the computations that a conditional chooses from."""
    listed = _BRANCHES.search(op.rest)
    if listed:
        return re.findall(r"[\w.-]+", listed[1])
    return [name for key, name in _CALLED.findall(op.rest) if key.endswith("tation")]


def _total_bytes(sent) -> int:
    return sum(message.times * message.bytes for message in sent)


def _collective(program, ops, op, times, counted, needed) -> list[Collective]:
    """The collective that an op is, [] if nothing leaves a device; see `_within`."""
    kind, group = op.code.removesuffix("-start"), _group(op, program.devices)
    if group < 2:
        return []
    attributes = op.rest
    if op.code != kind:  # the shape of a start also holds its inputs
        op = next(x for x in ops if x.code == f"{kind}-done" and op.name in x.operands)
    sizes, elements = _arrays(op.shape), {}
    for user in ops:
        if user.code == "get-tuple-element" and op.name in user.operands:
            elements[int(re.search(r"index=(\d+)", user.rest)[1])] = user
    parts = []
    for place, size in enumerate(sizes):
        value = op if len(sizes) == 1 else elements.get(place)
        name = _NAME.search(value.rest if value else "") or _NAME.search(attributes)
        waits = needed is None or (value is not None and value.name in needed)
        if kind == "reduce-scatter":
            size *= group
        if "_promoted" in attributes and value and _narrowed(program, ops, value.name):
            size //= 2
        parts.append(Part(size, waits, name[1] if name else ""))
    return [Collective(kind, group, times, counted, tuple(parts))]


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
    inner = program.computations[dict(_CALLED.findall(op.rest))["calls"]]
    places = [str(i) for i, operand in enumerate(op.operands) if operand == name]
    taken = [x for x in inner if x.code == "parameter" and x.arguments in places]
    return all(_narrowed(program, inner, x.name) for x in taken)


def _needed(program) -> set[str]:
    """Names of values in the entry that a product or a convolution depends on."""
    needed = set()
    for op in reversed(program.computations[program.entry]):
        if op.name in needed or _multiplies(program, op):
            needed |= set(op.operands)
    return needed


def _multiplies(program, op) -> bool:
    """Whether an op is or calls a product or a convolution."""
    if op.code == "custom-call":
        return _LIBRARY.search(op.rest) is not None
    inner = [name for _, name in _CALLED.findall(op.rest)] + _branches(op)
    return op.code in ("dot", "convolution") or any(
        _multiplies(program, called)
        for name in inner
        for called in program.computations.get(name, ())
    )
