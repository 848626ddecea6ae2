"""Write an encoder as an ONNX program: `jaxcl export --onnx`.

The network is traced as for `stablehlo`, and each operation of JAX becomes one or a few
of ONNX. What depends on weights alone is computed here. The program takes batches of
any size and computes in float32.
"""

import dataclasses
import importlib.util
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import export
from jax.extend import core as jax_core

from jaxcl import numerics, sharding
from jaxcl.errors import Refused
from jaxcl.weights import encoder, stablehlo

FILE = "encoder.onnx"
OPSET = 20  # of ONNX 1.15, November 2023
_BATCH = "batch"
_TOLERANCE = 1e-4  # of the features' length, in float32

# Operations that have one equal in ONNX
_SAME = {
    "add": "Add",
    "sub": "Sub",
    "mul": "Mul",
    "div": "Div",
    "max": "Max",
    "min": "Min",
    "pow": "Pow",
    "neg": "Neg",
    "exp": "Exp",
    "log": "Log",
    "sin": "Sin",
    "cos": "Cos",
    "tanh": "Tanh",
    "sqrt": "Sqrt",
    "erf": "Erf",
    "abs": "Abs",
    "logistic": "Sigmoid",
    "eq": "Equal",
    "lt": "Less",
    "gt": "Greater",
    "le": "LessOrEqual",
    "ge": "GreaterOrEqual",
}
_REDUCTIONS = {"reduce_sum": "ReduceSum", "reduce_max": "ReduceMax"}
_PASSED_ON = (
    "copy",
    "copy_p",
    "stop_gradient",
    "reduce_precision",
    "optimization_barrier",
)
_CALLS = ("jit", "pjit", "closed_call", "custom_jvp_call", "custom_vjp_call", "remat2")
_CALLS += ("checkpoint", "custom_vjp_call_jaxpr")


class _Graph:
    """An ONNX graph under construction; a value is an array or the name of a tensor."""

    def __init__(self):
        self.nodes: list[Any] = []
        self.constants: list[Any] = []

    def add(self, kind: str, *inputs: Any, outputs: int = 1, **options: Any) -> Any:
        """Add a node; return the name of its output, or a list of several."""
        from onnx import helper

        first = len(self.nodes)
        names = [f"x{first}_{number}" for number in range(outputs)]
        inputs = [x if isinstance(x, str) else self._hold(x) for x in inputs]
        self.nodes.append(helper.make_node(kind, inputs, names, **options))
        return names if outputs > 1 else names[0]

    def _hold(self, value) -> str:
        """Hold an array as a constant; return its name."""
        from onnx import numpy_helper

        name = f"c{len(self.constants)}"
        self.constants.append(numpy_helper.from_array(np.asarray(value), name))
        return name

    def reshape(self, value: Any, shape: Sequence[Any]) -> Any:
        """Reshape a tensor, of which one dimension may depend on the batch."""
        sizes = [x if isinstance(x, int) else -1 for x in shape]
        if sizes.count(-1) > 1:
            raise Refused(f"--onnx: {tuple(shape)} has two sizes that are not fixed")
        return self.add("Reshape", value, np.array(sizes, np.int64))

    def transpose(self, value: Any, order: Sequence[int]) -> Any:
        """Reorder the axes of a tensor."""
        if [*order] == [*range(len(order))]:
            return value
        return self.add("Transpose", value, perm=[int(x) for x in order])


def _broadcast(graph, inputs, eqn) -> Any:
    """Translate `broadcast_in_dim`."""
    value, shape = inputs[0], eqn.params["shape"]
    places = eqn.params["broadcast_dimensions"]
    before = eqn.invars[0].aval.shape
    sizes = [1] * len(shape)
    for place, size in zip(places, before, strict=True):
        sizes[place] = size
    if len(before) < len(shape):
        static = all(isinstance(x, int) for x in sizes)
        if isinstance(value, np.ndarray) and static:
            value = np.reshape(value, sizes)
        else:
            value = graph.reshape(value, sizes)
    if [*sizes] == [*shape]:
        return value
    target: Any = [x if isinstance(x, int) else 1 for x in shape]
    for place, size in enumerate(shape):
        if not isinstance(size, int) and sizes[place] == 1:
            count = graph.add("Shape", "images", start=0, end=1)
            operands = (np.array(target[:place], np.int64), count)
            rest = np.array(target[place + 1 :], np.int64)
            return graph.add(
                "Expand", value, graph.add("Concat", *operands, rest, axis=0)
            )
    return graph.add("Expand", value, np.array(target, np.int64))


def _convolve(graph, inputs, eqn) -> Any:
    """Translate `conv_general_dilated`: ONNX has channels before pixels."""
    options = eqn.params
    numbers = options["dimension_numbers"]
    if options["batch_group_count"] != 1 or {*options["lhs_dilation"]} != {1}:
        raise Refused("--onnx: transposed and batch-grouped convolutions are unknown")
    image = graph.transpose(inputs[0], numbers.lhs_spec)
    kernel = inputs[1]
    if isinstance(kernel, np.ndarray):
        kernel = np.transpose(kernel, numbers.rhs_spec)
    else:
        kernel = graph.transpose(kernel, numbers.rhs_spec)
    low, high = zip(*options["padding"], strict=True)
    result = graph.add(
        "Conv",
        image,
        kernel,
        pads=[*low, *high],
        strides=[*options["window_strides"]],
        dilations=[*options["rhs_dilation"]],
        group=options["feature_group_count"],
    )
    return graph.transpose(result, np.argsort(numbers.out_spec))


def _pool(graph, inputs, eqn) -> Any:
    """Translate the maximum or sum over windows of [B, H, W, C]."""
    options = eqn.params
    window, strides = options["window_dimensions"], options["window_strides"]
    ends = [window[0], window[-1], strides[0], strides[-1]]
    dilated = {*options["base_dilation"], *options["window_dilation"]} != {1}
    if len(window) != 4 or ends != [1] * 4 or dilated:
        raise Refused(f"--onnx: pooling over windows {window} is unknown")
    low, high = zip(*options["padding"][1:3], strict=True)
    image = graph.transpose(inputs[0], (0, 3, 1, 2))
    options = {"kernel_shape": [*window[1:3]], "strides": [*strides[1:3]]}
    options["pads"] = [*low, *high]
    if eqn.primitive.name == "reduce_window_sum":
        result = graph.add("AveragePool", image, count_include_pad=1, **options)
        result = graph.add("Mul", result, np.float32(window[1] * window[2]))
    else:
        result = graph.add("MaxPool", image, **options)
    return graph.transpose(result, (0, 2, 3, 1))


def _multiply(graph, inputs, eqn) -> Any:
    """Translate `dot_general` as an Einsum, or a MatMul by a matrix of weights."""
    (left, right), (left_batch, right_batch) = eqn.params["dimension_numbers"]
    ranks = [len(x.aval.shape) for x in eqn.invars]
    if (
        not left_batch
        and [*left] == [ranks[0] - 1]
        and [*right] == [0]
        and ranks[1] == 2
    ):
        return graph.add("MatMul", *inputs)
    letters = iter("abcdefghijklmnopqrstuvwxyz")
    first = [next(letters) for _ in range(ranks[0])]
    second = [next(letters) for _ in range(ranks[1])]
    for left_axes, right_axes in ((left_batch, right_batch), (left, right)):
        for left_axis, right_axis in zip(left_axes, right_axes, strict=True):
            second[right_axis] = first[left_axis]
    batch = [first[x] for x in left_batch]
    free = [x for n, x in enumerate(first) if n not in (*left, *left_batch)]
    free += [x for n, x in enumerate(second) if n not in (*right, *right_batch)]
    equation = f"{''.join(first)},{''.join(second)}->{''.join(batch + free)}"
    return graph.add("Einsum", *inputs, equation=equation)


def _slice(graph, value, starts, ends, steps=None) -> Any:
    """Cut out a box; None as an end: all of that axis."""
    axes = [n for n, end in enumerate(ends) if end is not None]
    arrays = [
        np.array([source[n] for n in axes], np.int64) for source in (starts, ends)
    ]
    arrays += [np.array(axes, np.int64)]
    arrays += [np.array([1 if steps is None else steps[n] for n in axes], np.int64)]
    return graph.add("Slice", value, *arrays)


def _gather(graph, inputs, eqn) -> Any:
    """Translate `gather` of one box at a fixed place, as x[:, 0]."""
    value, place = inputs
    shape, numbers = eqn.invars[0].aval.shape, eqn.params["dimension_numbers"]
    if not isinstance(place, np.ndarray) or place.ndim != 1:
        raise Refused("--onnx: a gather at places that depend on the image is unknown")
    starts: list[int] = [0] * len(shape)
    ends: list[int | None] = [None] * len(shape)
    for axis, start in zip(numbers.start_index_map, place.tolist(), strict=True):
        size = eqn.params["slice_sizes"][axis]
        starts[axis] = min(max(start, 0), shape[axis] - size)
        ends[axis] = starts[axis] + size
    return graph.reshape(_slice(graph, value, starts, ends), eqn.outvars[0].aval.shape)


def _cut(graph, inputs, eqn) -> Any:
    """Translate `slice`."""
    shape, options = eqn.invars[0].aval.shape, eqn.params
    pairs = zip(options["limit_indices"], shape, strict=True)
    ends = [x if isinstance(size, int) else None for x, size in pairs]
    return _slice(graph, inputs[0], options["start_indices"], ends, options["strides"])


def _split(graph, inputs, eqn) -> Any:
    """Translate `split` into several outputs."""
    sizes = np.array(eqn.params["sizes"], np.int64)
    axis = eqn.params["axis"]
    return graph.add("Split", inputs[0], sizes, outputs=len(sizes), axis=axis)


def _cast(graph, inputs, eqn) -> Any:
    """Translate `convert_element_type`."""
    from onnx import helper

    kind = helper.np_dtype_to_tensor_dtype(np.dtype(eqn.params["new_dtype"]))
    return graph.add("Cast", inputs[0], to=kind)


# Operation of JAX -> its translation (graph, inputs, equation) -> value
_TRANSLATIONS: dict[str, Callable] = {
    **{
        name: lambda graph, inputs, eqn, kind=kind: graph.add(kind, *inputs)
        for name, kind in _SAME.items()
    },
    **{
        name: lambda graph, inputs, eqn, kind=kind: graph.add(
            kind, *inputs, np.array(eqn.params["axes"], np.int64), keepdims=0
        )
        for name, kind in _REDUCTIONS.items()
    },
    **{name: lambda graph, inputs, eqn: inputs[0] for name in _PASSED_ON},
    "square": lambda graph, inputs, eqn: graph.add("Mul", inputs[0], inputs[0]),
    "rsqrt": lambda graph, inputs, eqn: graph.add(
        "Reciprocal", graph.add("Sqrt", inputs[0])
    ),
    "erfc": lambda graph, inputs, eqn: graph.add(
        "Sub", np.float32(1), graph.add("Erf", inputs[0])
    ),
    "integer_pow": lambda graph, inputs, eqn: graph.add(
        "Pow", inputs[0], np.float32(eqn.params["y"])
    ),
    "select_n": lambda graph, inputs, eqn: graph.add(
        "Where", inputs[0], inputs[2], inputs[1]
    ),
    "concatenate": lambda graph, inputs, eqn: graph.add(
        "Concat", *inputs, axis=eqn.params["dimension"]
    ),
    "transpose": lambda graph, inputs, eqn: graph.transpose(
        inputs[0], eqn.params["permutation"]
    ),
    **dict.fromkeys(
        ("reshape", "squeeze", "expand_dims"),
        lambda graph, inputs, eqn: graph.reshape(inputs[0], eqn.outvars[0].aval.shape),
    ),
    "broadcast_in_dim": _broadcast,
    "conv_general_dilated": _convolve,
    "reduce_window_max": _pool,
    "reduce_window_sum": _pool,
    "dot_general": _multiply,
    "gather": _gather,
    "slice": _cut,
    "split": _split,
    "convert_element_type": _cast,
}


def _translate(graph, jaxpr, constants, inputs) -> list[Any]:
    """Add the equations of a jaxpr to a graph; return its outputs."""
    values = dict(zip(jaxpr.constvars, map(np.asarray, constants), strict=True))
    values |= dict(zip(jaxpr.invars, inputs, strict=True))

    def read(variable):
        if isinstance(variable, jax_core.Literal):
            aval: Any = variable.aval
            return np.asarray(variable.val, aval.dtype)
        return values[variable]

    for eqn in jaxpr.eqns:
        operands = [read(x) for x in eqn.invars]
        results = _translate_equation(graph, eqn, operands)
        values |= dict(zip(eqn.outvars, results, strict=True))
    return [read(x) for x in jaxpr.outvars]


def _translate_equation(graph, eqn, inputs) -> list[Any]:
    """Translate an equation, or compute it if its inputs and sizes are fixed."""
    name = eqn.primitive.name
    if name in _CALLS:
        inner = eqn.params.get("call_jaxpr") or eqn.params.get("jaxpr")
        inner = eqn.params["fun_jaxpr"] if inner is None else inner
        constants = getattr(inner, "consts", ())
        return _translate(graph, getattr(inner, "jaxpr", inner), constants, inputs)
    sizes = [size for x in eqn.outvars for size in x.aval.shape]
    if all(isinstance(x, np.ndarray) for x in inputs) and all(
        isinstance(size, int) for size in sizes
    ):
        results = eqn.primitive.bind(*map(jnp.asarray, inputs), **eqn.params)
        several = eqn.primitive.multiple_results
        return [np.asarray(x) for x in (results if several else [results])]
    if name not in _TRANSLATIONS:
        raise Refused(f"--onnx: the network uses {name}, which has no translation")
    result = _TRANSLATIONS[name](graph, inputs, eqn)
    return result if isinstance(result, list) else [result]


@numerics.pinned()
def pack_onnx(network: encoder.Encoder, pixels: stablehlo.Pixels) -> bytes:
    """Write the program of an encoder as the bytes of an ONNX file.

    Args:
      network: an encoder of images; the program contains its adapter, if any, too.
      pixels: type of the images, see `stablehlo.make_program`.

    Raises:
      Refused: the package onnx is not installed; the network has an operation that is
        not translated.
    """
    if importlib.util.find_spec("onnx") is None:
        raise Refused("--onnx: needs the package onnx: pip install -e '.[onnx]'")
    import onnx
    from onnx import helper

    section = network.card["encoder"] | {"precision": "float32"}
    card = network.card | {"encoder": section}
    in_float32 = encoder.make_encoder(card, network.params, network.stats)
    in_float32 = dataclasses.replace(in_float32, adapter=network.adapter)
    embed, shape = stablehlo.make_program(in_float32, pixels)
    (batch,) = export.symbolic_shape(_BATCH)
    images = jax.ShapeDtypeStruct((batch, *shape), jnp.dtype(pixels))
    with sharding.compile_target():  # convolutions as they are written
        traced = jax.make_jaxpr(embed)(images)
    graph = _Graph()
    (result,) = _translate(graph, traced.jaxpr, traced.consts, ["images"])
    graph.add("Identity", result)
    graph.nodes[-1].output[0] = "features"
    kind = helper.np_dtype_to_tensor_dtype(np.dtype(pixels))
    sides = (
        ("images", kind, [_BATCH, *shape]),
        ("features", onnx.TensorProto.FLOAT, [_BATCH, network.num_features]),
    )
    inputs, outputs = ([helper.make_tensor_value_info(*side)] for side in sides)
    proto = helper.make_graph(graph.nodes, "encoder", inputs, outputs, graph.constants)
    model = helper.make_model(proto, opset_imports=[helper.make_opsetid("", OPSET)])
    model.ir_version = 10
    onnx.checker.check_model(model)
    return model.SerializeToString()


@numerics.pinned()
def compare(network: encoder.Encoder, data: bytes, pixels: stablehlo.Pixels) -> float:
    """Compare the features of a program, by ONNX Runtime, with the encoder's.

    Args:
      network: the encoder.
      data: bytes of the program.
      pixels: type of its images.

    Returns:
      The largest difference of random images, as a share of the features' length.
    """
    import onnxruntime

    embed, shape = stablehlo.make_program(network, pixels)
    providers = ["CPUExecutionProvider"]
    session = onnxruntime.InferenceSession(data, providers=providers)
    rng, gaps = np.random.default_rng(0), []
    for count in (1, 3):
        images = rng.integers(0, 256, (count, *shape), np.uint8)
        images = images if pixels == "uint8" else np.asarray(network.prepare(images))
        (actual,) = session.run(None, {"images": images})
        expected = np.asarray(jax.jit(embed)(images))
        gaps.append(np.linalg.norm(actual - expected) / np.linalg.norm(expected))
    return float(max(gaps))


def describe(network: encoder.Encoder, data: bytes, pixels: stablehlo.Pixels) -> dict:
    """Describe the program for the card; compare it, if ONNX Runtime is installed.

    Raises:
      Refused: the features of a network in float32 differ from JAX's.
    """
    shape = stablehlo.make_program(network, pixels)[1]
    gap = None
    if importlib.util.find_spec("onnxruntime") is not None:
        gap = compare(network, data, pixels)
        exact = network.card["encoder"].get("precision") == "float32"
        if exact and not gap <= _TOLERANCE:
            raise Refused(f"--onnx: features differ from JAX's by {gap:.1e} of 1")
    return {
        "input": {"dtype": pixels, "shape": [_BATCH, *shape]},
        "output": {"dtype": "float32", "shape": [_BATCH, network.num_features]},
        "opset": OPSET,
        "difference": gap,
    }
