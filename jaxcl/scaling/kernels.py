"""What a chip does in a step, read from the program that its compiler made.

A kernel is an operation of the optimised HLO that the chip runs as one: a fusion, a
convolution, a copy. Its arithmetic is that of the convolutions and matrix products in
it; multiplications by padding are not counted. Its traffic is what it reads and writes
of the device's memory, each operand once. What a cache holds from one kernel to the
next is not known, so traffic is an upper bound.
"""

import math
import re
from typing import NamedTuple

from jaxcl.scaling import collectives, hlo

KINDS = ("convolution", "product", "copy", "message", "prefetch", "other")
_NARROW = ("bf16", "f16")
_WHOLE = ("s8", "u8", "s4", "u4", "s32", "u32", "pred")
_WINDOW = re.compile(r"window=\{([^}]*)\}")
_LABELS = re.compile(r"dim_labels=(\w+)_(\w+)->(\w+)")
_CONTRACTED = re.compile(
    r'(?:lhs_contracting_dims=\{|"lhs_contracting_dimensions":\[)([\d,"]*)'
)
_CYCLES = re.compile(r'"estimated_cycles":"(\d+)"')
NO_ESTIMATE = 2**63 - 1  # cycles, where the estimate of a TPU's compiler overflowed
_TARGET = re.compile(r'custom_call_target="([^"]*)"')
_CUDNN = re.compile(r"__cudnn\$conv(\w+)")
_SLICES = ("slice", "dynamic-slice", "gather")
_UPDATES = {"dynamic-update-slice": 1, "scatter": 2}  # place of what is written
_HOST = ("outfeed", "infeed", "send", "recv", "send-start", "recv-start")


class Kernel(NamedTuple):
    """One operation of a program."""

    kind: str  # of `KINDS`
    times: float  # how often a step runs it; 1 in a loop of unknown length
    flops: float  # of its products, for one run
    bytes: float  # to and from the device's memory, for one run
    dtype: str | None  # the widest operand of its products: "float32", "bfloat16" ...
    cycles: int | None  # the compiler's estimate, where it makes one (TPU)
    name: str  # where in the source code it comes from
    shape: str  # of what it writes, as HLO has it
    products: tuple["Product", ...] = ()


class Product(NamedTuple):
    """A convolution or a matrix product."""

    convolution: bool
    dtype: str  # the widest operand
    flops: int
    groups: int  # of a convolution's features, 1 if they are not grouped


def of(program: hlo.Program, *, steps: int = 1) -> list[Kernel]:
    """Every kernel of a program, as often as one of its steps runs it.

    Of a conditional the branch that moves most counts.

    Args:
      program: after optimisation.
      steps: that it makes, see `hlo.parse`.
    """
    return _within(program, program.entry, 1 / steps)


def unknown_loops(program: hlo.Program) -> int:
    """How many loops there are whose length the text does not tell."""
    return sum(turns is None for turns in program.turns.values())


def copied(kernels: list[Kernel]) -> list[Kernel]:
    """Kernels that only copy an array of the device's memory."""
    return [kernel for kernel in kernels if kernel.kind == "copy"]


def host_transfers(program: hlo.Program) -> list[str]:
    """Names of operations that move data between the device and its host."""
    return [
        op.name
        for ops in program.computations.values()
        for op in ops
        if op.code in _HOST
        or any(array.space == hlo.HOST for array in hlo.arrays(op.shape))
    ]


def _within(program, computation, times) -> list[Kernel]:
    found: list[Kernel] = []
    ops = program.computations.get(computation, ())
    there = {op.name: op for op in ops}
    for op in ops:
        called = hlo.called(op)
        if op.code == "while":
            often = times * (program.turns[op.name] or 1)
            found += _within(program, called.get("body"), often)
            found += _within(program, called.get("condition"), often)
        elif op.code == "conditional":
            options = [_within(program, x, times) for x in hlo.branches(op)]
            found += max(options, key=_total_bytes, default=[])
        elif op.code in ("call", "async-start"):
            inner = called.get("calls") or called.get("to_apply")
            found += _within(program, inner, times)
        elif hlo.runs(op) and not _scalar(op):
            found.append(_kernel(program, there, op, times))
    return found


def _total_bytes(kernels) -> float:
    return sum(kernel.times * kernel.bytes for kernel in kernels)


def _scalar(op) -> bool:
    """Whether a TPU computes one number, as loops count: it costs next to nothing.

    Its arrays have tiles, those of GPUs have none, where every operation is launched.
    """
    arrays = hlo.arrays(op.shape)
    small = len(arrays) == 1 and not arrays[0].sides and ":T(" in op.shape
    return small and op.code not in ("fusion", "custom-call", "reduce", "dot")


def _kernel(program, there, op, times) -> Kernel:
    products = tuple(_products(program, there, op))
    cycles = _CYCLES.search(op.rest)
    return Kernel(
        kind=_kind(program, op, products),
        times=times,
        flops=sum(product.flops for product in products),
        bytes=_traffic(program, there, op),
        dtype=_widest([product.dtype for product in products]),
        cycles=int(cycles[1]) if cycles else None,
        name=_source(program, op),
        shape=op.shape,
        products=products,
    )


def _kind(program, op, products) -> str:
    if op.code.removesuffix("-start") in collectives.KINDS:
        return "message"
    if any(product.convolution for product in products):
        return "convolution"
    if products:
        return "product"
    if op.code in ("copy-start", "slice-start"):
        arrays = hlo.arrays(op.shape)
        return "prefetch" if any(array.space for array in arrays) else "copy"
    if op.code == "copy":
        return "copy"
    if op.code == "fusion":
        inner = program.computations[hlo.called(op)["calls"]]
        codes = {x.code for x in inner} - {"parameter", "bitcast", "tuple"}
        if codes & set(collectives.KINDS):
            return "message"
        return "copy" if codes <= {"copy", "transpose"} else "other"
    return "other"


def _source(program, op) -> str:
    """Where an op comes from; of a fusion that does not say, its first op that does."""
    name = hlo.source(op)
    if name or op.code != "fusion":
        return name
    inner = program.computations.get(hlo.called(op).get("calls"), ())
    return next((hlo.source(x) for x in inner if hlo.source(x)), "")


# Arithmetic


def _products(program, there, op):
    """The convolutions and matrix products of an op and of what it fuses."""
    if op.code == "convolution":
        yield _convolution(there, op, 0, 1, None)
    elif op.code == "dot":
        yield _matrix_product(there, op)
    elif op.code == "custom-call":
        yield from _library_product(there, op)
    elif op.code == "fusion":
        inner = program.computations.get(hlo.called(op).get("calls"), ())
        names = {x.name: x for x in inner}
        for fused in inner:
            yield from _products(program, names, fused)


def _shape(there, name) -> hlo.Array | None:
    op = there.get(name)
    arrays = hlo.arrays(op.shape) if op else ()
    return arrays[0] if arrays else None


def _library_product(there, op):
    """The product that a GPU leaves to a library."""
    target = _TARGET.search(op.rest)
    conv = _CUDNN.search(target[1]) if target else None
    if conv:
        # Labels and window are those of the forward pass, whatever is computed: the
        # input, the kernel and the output of it are in other places.
        places = {
            "BackwardInput": (None, 1, 0),
            "BackwardFilter": (0, None, 1),
        }.get(conv[1], (0, 1, None))
        yield _convolution(there, op, *places)
    elif target and re.search(r"gemm|matmul", target[1]):
        yield _matrix_product(there, op)


def _convolution(there, op, lhs, rhs, out) -> Product:
    """A convolution by its text.

    Args:
      lhs, rhs, out: which operands are the input, the kernel and the output of the
        forward pass; None: what the op returns.
    """

    def array(place):
        if place is None:
            return hlo.arrays(op.shape)[0]
        return _shape(there, op.operands[place])

    inputs, kernel, outputs = array(lhs), array(rhs), array(out)
    labels = _LABELS.search(op.rest)
    window = _WINDOW.search(op.rest)
    sizes = _window(window[1] if window else "", len(labels[1]) - 2)
    taps = 1
    for axis in range(len(labels[1]) - 2):
        taken, given = (
            array.sides[text.index(str(axis))]
            for array, text in ((inputs, labels[1]), (outputs, labels[3]))
        )
        taps *= _taps(taken, given, *sizes[axis])
    features = kernel.sides[labels[2].index("i")] * kernel.sides[labels[2].index("o")]
    batch = outputs.sides[labels[3].index("b")]
    groups = re.search(r"feature_group_count=(\d+)", op.rest)
    groups = int(groups[1]) if groups else _diagonal(sizes)
    name = hlo.source(op)
    spatial = any(size[0] > 1 for size in sizes)
    convolution = "conv_general" in name or (spatial and "dot_general" not in name)
    arrays = [hlo.arrays(op.shape)[0], *(_shape(there, x) for x in op.operands[:2])]
    given = arrays[1:] if op.code == "convolution" else arrays[:3]
    return Product(
        convolution or (not name and op.code == "custom-call"),
        _widest([_type(x.dtype) for x in given if x is not None]),
        2 * taps * features * batch,
        groups,
    )


def _window(text, axes) -> list[tuple[int, int, int, int, int]]:
    """(size, stride, padding before, dilation of the input, of the kernel) per axis."""
    found = dict(re.findall(r"(\w+)=(\S+)", text))

    def each(name, default):
        values = found.get(name, "x".join([default] * axes)).split("x")
        return values if axes else []

    return [
        (int(size), int(stride), int(pad.split("_")[0]), int(lhs), int(rhs))
        for size, stride, pad, lhs, rhs in zip(
            each("size", "1"),
            each("stride", "1"),
            each("pad", "0_0"),
            each("lhs_dilate", "1"),
            each("rhs_dilate", "1"),
            strict=True,
        )
    ]


def _taps(given, outputs, size, stride, pad, lhs, rhs) -> int:
    """Pairs of an output and a tap of the kernel along an axis that meet an input.

    Args:
      given, outputs: lengths of the axis in the input and in the output.
      size, stride, pad, lhs, rhs: from `_window`.
    """
    count = 0
    for tap in range(size):
        first = tap * rhs - pad  # the place in the dilated input of output 0
        for output in range(outputs):
            place = first + output * stride
            count += place % lhs == 0 and 0 <= place < given * lhs
    return count


def _diagonal(sizes) -> int:
    """How many groups an axis of a TPU's convolution stands for.

    Grouped features become an axis of the window as long as there are groups, whose
    stride and dilation let each meet its own.
    """
    for size, stride, _, lhs, _ in sizes:
        if size > 1 and lhs == size and stride == size - 1:
            return size
    return 1


def _matrix_product(there, op) -> Product:
    lhs = _shape(there, op.operands[0])
    contracted = _CONTRACTED.search(op.rest)
    axes = [int(x) for x in re.findall(r"\d+", contracted[1] if contracted else "")]
    inner = math.prod(lhs.sides[axis] for axis in axes) if lhs else 1
    out = hlo.arrays(op.shape)[0]
    given = [_shape(there, name) for name in op.operands[:2]]
    dtype = _widest([_type(x.dtype) for x in given if x is not None])
    return Product(False, dtype or "float32", 2 * math.prod(out.sides) * inner, 1)


def _type(dtype) -> str:
    if dtype in _NARROW:
        return {"bf16": "bfloat16", "f16": "float16"}[dtype]
    if dtype in _WHOLE:
        return "whole"
    return "float32" if dtype in ("f32", "f64") else "float8"


_ORDER = ("float8", "whole", "float16", "bfloat16", "float32")


def _widest(types) -> str | None:
    return max(types, key=_ORDER.index, default=None)


# Traffic


def _traffic(program, there, op) -> float:
    """Bytes that an op reads and writes of the device's memory."""
    if op.code == "fusion":
        inner = program.computations.get(hlo.called(op).get("calls"), [])
        return _read(program, there, op, inner) + _written(inner, op)
    if op.code in ("copy-start", "slice-start"):  # its shape names its operand, too
        sides = [x for x in hlo.arrays(op.shape) if x.sides][:2]
        size = min((array.bytes for array in sides), default=0)
        return float(size * sum(_bytes(array) > 0 for array in sides))
    outputs = sum(map(_bytes, hlo.arrays(op.shape)))
    if op.code in _SLICES:
        return 2.0 * outputs
    if op.code in _UPDATES:
        place = _UPDATES[op.code]
        update = _shape(there, op.operands[place]) if place < len(op.operands) else None
        return 2.0 * _bytes(update) if update else outputs
    return outputs + sum(
        _bytes(array)
        for name in set(op.operands)
        if name in there and there[name].code != "constant"
        for array in hlo.arrays(there[name].shape)
    )


def _bytes(array) -> int:
    """Bytes of an array in the device's memory; on the chip itself it costs none."""
    return array.bytes if array.space in (0, hlo.HOST) else 0


def _read(program, there, op, inner) -> float:
    """Bytes that a fusion reads: of an operand that is only sliced, the slices."""
    total = 0.0
    names = {x.arguments: x for x in inner if x.code == "parameter"}
    for place, name in enumerate(op.operands):
        array = _shape(there, name)
        parameter = names.get(str(place))
        if array is None or parameter is None or not _bytes(array):
            continue
        sliced = _sliced(program, inner, parameter.name)
        total += array.bytes if sliced is None else min(sliced, array.bytes)
    return total


def _sliced(program, inner, name) -> float | None:
    """Bytes that are read of a value which is only sliced; None: all is read."""
    total = 0.0
    for user in inner:
        if name not in user.operands:
            continue
        if user.code in _SLICES and user.operands[0] == name:
            part = sum(array.bytes for array in hlo.arrays(user.shape))
        elif user.code in _UPDATES and user.operands[0] == name:
            part = 0.0 if name not in user.operands[1:] else None
        elif user.code == "bitcast":
            part = _sliced(program, inner, user.name)
        elif user.code == "fusion":
            called = program.computations.get(hlo.called(user).get("calls"), [])
            places = [str(i) for i, x in enumerate(user.operands) if x == name]
            taken = [x for x in called if x.code == "parameter"]
            parts = [
                _sliced(program, called, x.name) for x in taken if x.arguments in places
            ]
            part = None if None in parts else sum(parts)
        else:
            part = None
        if part is None:
            return None
        total += part
    return total


def _written(inner, op) -> float:
    """Bytes that a fusion writes: of an array that is updated in place, the update."""
    there = {x.name: x for x in inner}

    def of(value) -> float:
        while value.code == "bitcast" and value.operands[0] in there:
            value = there[value.operands[0]]
        if value.code in _UPDATES:
            update = _shape(there, value.operands[_UPDATES[value.code]])
            if update is not None:
                return update.bytes
        return sum(map(_bytes, hlo.arrays(value.shape)))

    outputs = hlo.arrays(op.shape)
    root = hlo.returned(inner)
    if root is None:
        return sum(map(_bytes, outputs))
    values = [there[x] for x in root.operands] if root.code == "tuple" else [root]
    if len(values) != len(outputs):
        return sum(map(_bytes, outputs))
    return sum(
        min(of(value), _bytes(array))
        for value, array in zip(values, outputs, strict=True)
    )
