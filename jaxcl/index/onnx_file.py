"""Write a map as an ONNX file, to be run where the vectors lie."""

import numpy as np

from jaxcl.errors import Refused
from jaxcl.index import maps


def pack_onnx(arrays: maps.Map) -> bytes:
    """Write a map as a program: vectors f32[N, D] -> mapped f32[N, E] of length 1.

    Args:
      arrays: the map, see `maps.map_features`.

    Raises:
      Refused: the package onnx is not installed.
    """
    try:
        import onnx
        from onnx import helper, numpy_helper
    except ImportError as error:
        raise Refused(
            "--out: .onnx needs the package onnx: pip install onnx"
        ) from error
    nodes, constants, count = [], [], 0

    def add(kind, *inputs, **options):
        nonlocal count
        count += 1
        nodes.append(helper.make_node(kind, inputs, [f"x{count}"], **options))
        return f"x{count}"

    def constant(name, value):
        constants.append(numpy_helper.from_array(np.asarray(value), name))
        return name

    axis = constant("axis", np.array([1], np.int64))
    least = constant("least", np.float32(1e-12))

    def scale(rows):
        lengths = add("ReduceL2", rows, axis, keepdims=1)
        return add("Div", rows, add("Max", lengths, least))

    values = {name: constant(name, np.float32(x)) for name, x in arrays.items()}
    rows, terms = scale("vectors"), []
    if "matrix" in values:
        terms.append(add("MatMul", rows, values["matrix"]))
    if "down" in values:
        hidden = add("MatMul", rows, values["down"])
        if "offset" in values:
            hidden = add("Add", hidden, values["offset"])
            hidden = add("Gelu", hidden, approximate="tanh")
        terms.append(add("MatMul", hidden, values["up"]))
    if "shift" in values:
        terms.append(values["shift"])
    result = terms[0]
    for term in terms[1:]:
        result = add("Add", result, term)
    add("Identity", scale(result))
    nodes[-1].output[0] = "mapped"
    last = arrays["up"] if "up" in arrays else arrays["matrix"]
    first = arrays["down"] if "down" in arrays else arrays["matrix"]
    sides = (("vectors", first.shape[0]), ("mapped", last.shape[1]))
    inputs, outputs = (
        [helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, ["n", width])]
        for name, width in sides
    )
    graph = helper.make_graph(nodes, "map", inputs, outputs, constants)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)])
    model.ir_version = 10
    onnx.checker.check_model(model)
    return model.SerializeToString()
