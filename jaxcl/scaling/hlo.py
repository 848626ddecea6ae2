"""XLA's optimised HLO, `compiled.as_text()`, as data.

A program is a dict of computations, each a list of operations. Shapes are those of one
device and static, so the text tells what a program does before anything runs. Compilers
differ in what they write: GPUs note how often a loop runs, TPUs do not, and there the
constant that the loop's condition compares with tells it.
"""

import math
import re
from typing import NamedTuple

HOST = 5  # the memory space of the host, as layouts number them; 0 is the device's
_BITS = {"pred": 8, "token": 0, "opaque": 0}
_NAMED = re.compile(r"^\s*(ROOT )?%?([\w.-]+) = (.*)$")
_HEAD = re.compile(r"^(ENTRY )?%?([\w.-]+) .*\{$")
_ARRAY = re.compile(r"([a-z]+[a-z0-9]*)\[([^\]]*)\](\{[^}]*\})?")
_SPACE = re.compile(r"S\((\d+)\)")
_CALLED = re.compile(
    r"(calls|to_apply|body|condition|true_computation|false_computation)=%?([\w.-]+)"
)
_BRANCHES = re.compile(r"branch_computations=\{([^}]*)\}")
_TRIPS = re.compile(r'"known_trip_count":\{"n":"(\d+)"')
_NAME = re.compile(r'op_name="([^"]*)"')
_ALIASES = re.compile(r"\{([\d, ]*)\}: \((\d+), \{([\d, ]*)\}")


class Array(NamedTuple):
    """One array of a shape."""

    dtype: str  # as HLO writes it: "f32", "bf16", "pred"
    sides: tuple[int, ...]
    space: int  # where it lies: 0 is the device's memory, see `HOST`

    @property
    def bytes(self) -> int:
        """Bytes without padding."""
        bits = _BITS.get(self.dtype)
        if bits is None:
            bits = int(re.search(r"\d+", self.dtype)[0])
        return -(-bits * math.prod(self.sides) // 8)


class Op(NamedTuple):
    """One line of HLO."""

    name: str
    shape: str
    code: str  # "fusion", "all-reduce"
    arguments: str  # the text in its parentheses
    operands: tuple[str, ...]  # names in that text
    rest: str  # attributes
    root: bool  # whether it is what its computation returns


class Program(NamedTuple):
    """An HLO module."""

    computations: dict[str, list[Op]]
    entry: str
    devices: int
    turns: dict[str, int | None]  # of each `while` by name; None: not known
    loop_of_steps: str | None  # the `while` over the steps of a call
    # The place of each output that is written over an input -> that input's place.
    aliases: dict[tuple[int, ...], int]


def parse(text: str, *, steps: int = 1) -> Program:
    """The program of an HLO text.

    Args:
      text: of an HLO module after optimisation.
      steps: how often the loop over a call's steps turns. The text does not say, so
        the entry's largest loop of unknown length is taken to be it.

    Raises:
      ValueError: the text has no entry computation.
    """
    computations, entry, current = {}, None, None
    for line in text.splitlines():
        head = None if line.startswith(" ") else _HEAD.match(line)
        if head and not line.startswith("HloModule"):
            current = computations[head[2]] = []
            entry = head[2] if head[1] else entry
        elif current is not None and (named := _NAMED.match(line)):
            current.append(_op(named[2], named[3], bool(named[1])))
    if entry is None:
        raise ValueError("text: holds no ENTRY computation; give compiled.as_text()")
    header = text.partition("\n")[0]
    counts = re.findall(r"\b(?:num_partitions|replica_count)=(\d+)", header)
    turns = {
        op.name: _turns(computations, ops, op)
        for ops in computations.values()
        for op in ops
        if op.code == "while"
    }
    loop = _loop_of_steps(computations, entry, turns) if steps > 1 else None
    if loop:
        turns[loop] = steps
    devices, aliases = math.prod(map(int, counts)), _aliases(header)
    return Program(computations, entry, devices, turns, loop, aliases)


def arrays(shape: str) -> list[Array]:
    """Each array of a shape; tuples are flattened."""
    return [
        Array(
            dtype,
            tuple(int(x) for x in re.findall(r"\d+", sides)),
            int(space[1]) if (space := _SPACE.search(layout)) else 0,
        )
        for dtype, sides, layout in _ARRAY.findall(shape)
    ]


# Operations that only name values, or that end what another one started.
_FREE = {
    "add-dependency",
    "after-all",
    "bitcast",
    "constant",
    "domain",
    "get-tuple-element",
    "opt-barrier",
    "parameter",
    "partition-id",
    "replica-id",
    "tuple",
}


def runs(op: Op) -> bool:
    """Whether a device does something for an op."""
    return op.code not in _FREE and not op.code.endswith(("-done", "-update"))


def called(op: Op) -> dict[str, str]:
    """Computations that an op calls, by what for: "calls", "body", "condition" ..."""
    return dict(_CALLED.findall(op.rest))


def branches(op: Op) -> list[str]:
    """Names of the computations that a conditional chooses from."""
    listed = _BRANCHES.search(op.rest)
    if listed:
        return re.findall(r"[\w.-]+", listed[1])
    return [name for key, name in _CALLED.findall(op.rest) if key.endswith("tation")]


def source(op: Op) -> str:
    """Where in the source code an op comes from, "" where the text does not tell."""
    name = _NAME.search(op.rest)
    return name[1] if name else ""


def returned(ops: list[Op]) -> Op | None:
    """What a computation returns."""
    return next((op for op in ops if op.root), ops[-1] if ops else None)


def _op(name, definition, root) -> Op:
    """The operation of a line `name = definition`."""
    tuple_shape = definition.startswith("(")
    shape, rest = _cut(definition) if tuple_shape else definition.split(" ", 1)
    code, _, rest = rest.strip().partition("(")
    arguments, rest = _cut("(" + rest)
    operands = re.findall(r"%([\w.-]+)", arguments)
    return Op(name, shape, code, arguments[1:-1], tuple(operands), rest, root)


def _cut(text) -> tuple[str, str]:
    """Split a text after the parenthesis that closes its first one."""
    depth = 0
    for place, letter in enumerate(text):
        depth += (letter == "(") - (letter == ")")
        if not depth:
            return text[: place + 1], text[place + 1 :]
    return text, ""


def _aliases(header) -> dict[tuple[int, ...], int]:
    _, _, listed = header.partition("input_output_alias={")
    return {
        tuple(int(x) for x in output.split(",") if x.strip()): int(given)
        for output, given, _ in _ALIASES.findall(listed.partition(" }")[0])
    }


def _turns(computations, ops, loop) -> int | None:
    """How often a loop runs, None where the text does not tell.

    Where XLA left no note, only this form is understood: a counter that starts at a
    constant, grows by one, and is compared with a constant.

    Args:
      ops: of the computation that the loop is in.
    """
    known = _TRIPS.search(loop.rest)
    if known:
        return int(known[1])
    inside = called(loop)
    test = computations.get(inside.get("condition"), [])
    body = computations.get(inside.get("body"), [])
    match _value(computations, test, returned(test)):
        case ("LT", ("element", place), ("constant", limit)):
            pass
        case ("GT", ("constant", limit), ("element", place)):
            pass
        case _:
            return None
    raised = _value(computations, body, _entry_of(body, returned(body), place))
    given = next((op for op in ops if op.name == loop.operands[0]), None)
    first = _value(computations, ops, _entry_of(ops, given, place))
    one = ("element", place), ("constant", 1)
    if (
        first is None
        or first[0] != "constant"
        or raised
        not in (
            ("add", *one),
            ("add", *one[::-1]),
        )
    ):
        return None
    return max(limit - first[1], 0)


def _entry_of(ops, value, place) -> Op | None:
    """An entry of a tuple."""
    if value is None or value.code != "tuple" or place >= len(value.operands):
        return None
    return next((op for op in ops if op.name == value.operands[place]), None)


def _value(computations, ops, op, given=None) -> tuple | None:
    """What a number of a loop is: ("constant", n), ("element", place of the loop's
    state), ("add", a, b), (direction of a comparison, a, b); None for all else.

    Args:
      ops: of the computation of `op`.
      given: values of its parameters, in a fusion.
    """

    def of(name):
        found = next((x for x in ops if x.name == name), None)
        return _value(computations, ops, found, given)

    if op is None:
        return None
    if op.code in ("bitcast", "copy", "convert", "reshape"):
        return of(op.operands[0])
    if op.code == "parameter" and given is not None:
        return given[int(op.arguments)]
    if op.code == "get-tuple-element":
        source = next((x for x in ops if x.name == op.operands[0]), None)
        if source is None or source.code != "parameter" or given is not None:
            return None
        return "element", int(re.search(r"index=(\d+)", op.rest)[1])
    if op.code == "constant" and re.fullmatch(r"-?\d+", op.arguments):
        return "constant", int(op.arguments)
    if op.code == "fusion":
        inner = computations.get(called(op).get("calls"), [])
        values = [of(name) for name in op.operands]
        return _value(computations, inner, returned(inner), values)
    if op.code in ("add", "compare"):
        direction = re.search(r"direction=(\w+)", op.rest)
        name = direction[1] if direction else "add"
        return name, *map(of, op.operands)
    return None


def _loop_of_steps(computations, entry, turns) -> str | None:
    """Name of the largest loop of unknown length of the entry computation."""
    unknown = [
        (len(computations.get(called(op).get("body"), ())), op.name)
        for op in computations[entry]
        if op.code == "while" and turns[op.name] is None
    ]
    return max(unknown)[1] if unknown else None
