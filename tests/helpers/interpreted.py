"""Programs that NumPy computes, an operation after another, instead of XLA.

A small program takes a hundred times as long to compile as to compute. Where the
equation is the subject and not the program, a test traces it and computes it here. An
operation that is not in a table below is JAX's own, compiled for its shapes alone and
shared by all programs.
"""

import contextlib
import functools
import threading

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core
from scipy import special


def jit(function, *, static_argnames=()):
    """Return a function that computes as `jax.jit` of it would."""
    programs = {}
    names = [static_argnames] if isinstance(static_argnames, str) else static_argnames

    def call(*arguments, **named):
        fixed = {x: named.pop(x) for x in names if x in named}
        leaves, tree = jax.tree.flatten((arguments, named))
        if any(isinstance(x, jax.core.Tracer) for x in leaves):
            return function(*arguments, **named, **fixed)
        types = tuple(map(jax.typeof, leaves))
        key = tree, types, tuple(fixed.items()), jax.config.jax_enable_x64
        if key not in programs:
            part = functools.partial(function, **fixed)
            trace = jax.make_jaxpr(part, return_shape=True)
            program, shapes = trace(*arguments, **named)
            programs[key] = program, jax.tree.structure(shapes)
        program, structure = programs[key]
        inputs = [_plain(x, var.aval) for x, var in _pairs(leaves, program.jaxpr)]
        with np.errstate(all="ignore"):
            outputs = _evaluate(program, inputs)
        pairs = zip(outputs, program.out_avals, strict=True)
        arrays = [
            _leave(x, aval) if _is_key(aval) else jnp.asarray(x) for x, aval in pairs
        ]
        return jax.tree.unflatten(structure, arrays)

    return call


def value_and_grad(function, **options):
    """Return the value and gradients of a function, interpreted."""
    return jit(jax.value_and_grad(function, **options))


@contextlib.contextmanager
def everything():
    """Compute by NumPy what JAX would compile: programs and single operations.

    XLA still computes long loops, and what names another device than the first. Two
    private functions of JAX are needed; a JAX without them compiles everything.
    """
    try:
        from jax._src import pjit
        from jax._src.lib import xla_client

        compiled, put = pjit._pjit_call_impl_python, xla_client.batched_device_put
    except (ImportError, AttributeError):
        yield
        return

    def call(*inputs, jaxpr, **params):
        if _LOCAL.compiles or not _is_plain_call(inputs, jaxpr, params):
            return compiled(*inputs, jaxpr=jaxpr, **params)
        places = _places_of_results(inputs, params)
        # What XLA would compute on the device is no transfer to it.
        with np.errstate(all="ignore"), jax.transfer_guard("allow"):
            pairs = zip(inputs, jaxpr.in_avals, strict=True)
            outputs = _evaluate(jaxpr, [_plain(x, aval) for x, aval in pairs])
            triples = zip(outputs, jaxpr.out_avals, places, strict=True)
            arrays = [_array(*triple, put) for triple in triples]
        for x, donated in zip(inputs, params["donated_invars"], strict=True):
            if donated and isinstance(x, jax.Array):
                x.delete()
        return arrays, None, None, []

    pjit._pjit_call_impl_python = call
    try:
        yield
    finally:
        pjit._pjit_call_impl_python = compiled
        _PLAIN.clear()


class _Local(threading.local):
    compiles = False  # while an operation that no table has is left to JAX


_LOCAL = _Local()
_PLAIN = {}  # id of a program -> the program, and whether NumPy computes it


def _is_plain_call(inputs, jaxpr, params) -> bool:
    """Tell whether NumPy computes a call: a short one, on the first device."""
    for x in inputs:
        if isinstance(x, jax.Array) and not _is_first_device(x.sharding):
            return False
    config = jax.config
    if config.jax_default_device is not None or config.jax_debug_nans:
        return False
    if id(jaxpr) not in _PLAIN:
        short = _length(jaxpr) < 10_000  # a longer one is compiled in less time
        plain = short and not jaxpr.effects and _is_plain(jaxpr, params)
        _PLAIN[id(jaxpr)] = jaxpr, plain
    return _PLAIN[id(jaxpr)][1]


def _length(jaxpr) -> int:
    """Count the equations that are computed; a `while` has one turn."""
    total = len(jaxpr.eqns)
    for equation in jaxpr.eqns:
        turns = equation.params["length"] if equation.primitive.name == "scan" else 1
        inner = filter(_is_program, _single_options(equation.params))
        total += turns * sum(map(_length, inner))
    return total


def _single_options(params):
    """Yield options, of a list of options each."""
    for value in params.values():
        yield from value if isinstance(value, tuple | list) else [value]


def _is_program(option) -> bool:
    return isinstance(option, core.ClosedJaxpr | core.Jaxpr)


def _is_first_device(sharding) -> bool:
    if isinstance(getattr(sharding, "mesh", None), jax.sharding.AbstractMesh):
        return sharding.mesh.size <= 1
    return sharding.device_set == {jax.devices()[0]}


def _places_of_results(inputs, params) -> list:
    """Return where JAX puts each result: where it is told, or beside the inputs.

    None: on the first device, but it may be moved.
    """
    beside = None
    for x in inputs:
        if isinstance(x, jax.Array) and x.committed:
            beside = x.sharding
            if isinstance(beside, jax.sharding.NamedSharding):
                beside = beside.update(spec=jax.sharding.PartitionSpec())
    told = [
        [x if isinstance(x, jax.sharding.Sharding) else None for x in params[name]]
        for name in ("in_shardings", "out_shardings")
    ]
    beside = next((x for x in told[0] if x), beside)
    return [x or beside for x in told[1]]


def _is_plain(jaxpr, params=None) -> bool:
    """Tell whether neither a program nor one inside it names other devices."""
    if any(x.primitive.name in _DEVICES for x in jaxpr.eqns):
        return False
    if not jax.config.jax_threefry_partitionable:
        return False
    for options in (params or {}, *(x.params for x in jaxpr.eqns)):
        for x in _single_options(options):
            if isinstance(x, jax.sharding.Sharding) and not _is_first_device(x):
                return False
            if isinstance(x, jax.Device) and x != jax.devices()[0]:
                return False
            if isinstance(x, jax.sharding.Mesh | jax.sharding.AbstractMesh):
                if x.size > 1:
                    return False
            if _is_program(x) and not _is_plain(x):
                return False
    inputs = getattr(jaxpr, "jaxpr", jaxpr).invars
    variables = [*inputs, *(x for y in jaxpr.eqns for x in y.outvars)]
    return all(_is_threefry(x.aval) or not _is_key(x.aval) for x in variables)


def _array(value, aval, place, put):
    """Return JAX's array of a result; `put` keeps its weak type, if it has one."""
    if _is_key(aval):
        data = _key_data(value)
        aval = jax.core.ShapedArray(data.shape, data.dtype)
        return _wrap(_array(data, aval, place, put))
    if value.base is not None or not value.flags.c_contiguous:
        value = np.array(value, order="C")  # nobody else may change it
    device, committed = jax.devices()[0], place is not None
    if place is None:
        place = jax.sharding.SingleDeviceSharding(device)
    return put(aval, place, [value], [device], committed)


def _wrap(data):
    return jax.random.wrap_key_data(data, impl="threefry2x32")


def _pairs(values, jaxpr):
    return zip(values, jaxpr.invars, strict=True)


def _is_key(aval) -> bool:
    return jax.dtypes.issubdtype(aval.dtype, jax.dtypes.extended)


def _is_threefry(aval) -> bool:
    return str(aval.dtype) == "key<fry>"


def _plain(value, aval):
    """The array as NumPy's; a random key is one number of its 64 bits."""
    if not _is_key(aval):
        return np.asarray(value, aval.dtype)
    if isinstance(value, np.ndarray | np.generic):
        return np.asarray(value)
    return _keys(np.asarray(jax.random.key_data(value)))


def _keys(data):
    """Return keys u64[...] of their data u32[..., 2]."""
    return np.ascontiguousarray(data).view(np.uint64)[..., 0]


def _key_data(keys):
    """Return the data u32[..., 2] of keys u64[...]."""
    return np.array(keys)[..., None].copy().view(np.uint32)


def _leave(value, aval):
    """Return an input as JAX's operations take it."""
    return _wrap(_key_data(value)) if _is_key(aval) else value


def _evaluate(program, inputs):
    """Compute the outputs of a jaxpr, closed or not."""
    closed = isinstance(program, core.ClosedJaxpr)
    jaxpr, consts = (program.jaxpr, program.consts) if closed else (program, ())
    values = dict(zip(jaxpr.invars, inputs, strict=True))
    for variable, value in zip(jaxpr.constvars, consts, strict=True):
        values[variable] = _plain(value, variable.aval)

    def read(atom):
        if isinstance(atom, core.Literal):
            return _plain(atom.val, atom.aval)
        return values[atom]

    for equation in jaxpr.eqns:
        results = _compute(equation, [read(x) for x in equation.invars])
        for variable, result in zip(equation.outvars, results, strict=True):
            values[variable] = array = _plain(result, variable.aval)
            assert array.shape == variable.aval.shape, equation
    return [read(x) for x in jaxpr.outvars]


def _compute(equation, inputs):
    """Return the outputs of an equation."""
    name, params = equation.primitive.name, equation.params
    if name in _CONTROL:
        return _CONTROL[name](inputs, equation)
    for inner in params.values() if name not in _OPERATIONS else ():
        if _is_program(inner):
            jaxpr = getattr(inner, "jaxpr", inner)
            if len(jaxpr.invars) == len(inputs):
                return _evaluate(inner, inputs)
    if name in _PASSED_ON:
        return inputs
    if name in _SAME:
        return [_SAME[name](*inputs)]
    if name in _OPERATIONS:
        result = _OPERATIONS[name](params, *inputs)
        if result is not NotImplemented:
            return result if isinstance(result, list) else [result]
    inputs = [
        _leave(x, var.aval) for x, var in zip(inputs, equation.invars, strict=True)
    ]
    before, _LOCAL.compiles = _LOCAL.compiles, True
    try:
        results = _left_to_jax(equation.primitive, tuple(params.items()))(*inputs)
    finally:
        _LOCAL.compiles = before
    return results if equation.primitive.multiple_results else [results]


@functools.lru_cache
def _left_to_jax(primitive, options):
    """Return a primitive as a function that is compiled once for each shape."""
    return jax.jit(functools.partial(primitive.bind, **dict(options)))


def _scan(inputs, equation):
    """Compute the turns of a loop, one by one."""
    params, body = equation.params, equation.params["jaxpr"].jaxpr
    # Carried arrays have one rank inside and outside; rows lose their first axis.
    pairs = zip(equation.outvars, body.outvars, strict=True)
    carried = sum(x.aval.ndim == y.aval.ndim for x, y in pairs)
    pairs = zip(equation.invars, body.invars, strict=True)
    whole = sum(x.aval.ndim == y.aval.ndim for x, y in pairs)
    fixed, carry = inputs[: whole - carried], inputs[whole - carried : whole]
    rows, turns, collected = inputs[whole:], range(params["length"]), []
    for turn in reversed(turns) if params["reverse"] else turns:
        outputs = _evaluate(params["jaxpr"], [*fixed, *carry, *(x[turn] for x in rows)])
        carry = outputs[:carried]
        collected.append(outputs[carried:])
    if params["reverse"]:
        collected.reverse()
    stacked = [np.stack(x) for x in zip(*collected, strict=True)]
    return [*carry, *stacked]


def _while(inputs, equation):
    """Compute the turns of a loop until its test fails.

    Under `vmap` there is a test for each row; rows whose test has failed stay.
    """
    params = equation.params
    of_test, of_body = params["cond_nconsts"], params["body_nconsts"]
    test, body = inputs[:of_test], inputs[of_test : of_test + of_body]
    carry = inputs[of_test + of_body :]
    while np.any(going := _evaluate(params["cond_jaxpr"], [*test, *carry])[0]):
        moved = _evaluate(params["body_jaxpr"], [*body, *carry])
        carry = [_select_rows(going, *pair) for pair in zip(moved, carry, strict=True)]
    return carry


def _select_rows(wanted, new, old):
    """Return rows of `new` where `wanted`, the others of `old`."""
    if not np.ndim(wanted):
        return new
    shape = np.shape(wanted) + (1,) * (np.ndim(new) - np.ndim(wanted))
    return np.where(np.reshape(wanted, shape), new, old)


def _cond(inputs, equation):
    """Compute the chosen branch."""
    branches = equation.params["branches"]
    number = min(max(int(inputs[0]), 0), len(branches) - 1)
    return _evaluate(branches[number], inputs[1:])


_CONTROL = {"scan": _scan, "while": _while, "cond": _cond}
# Primitives that hold a program for devices, or one that JAX cannot show
_DEVICES = {"shard_map", "call_exported"}
_PASSED_ON = {
    *("copy", "copy_p", "device_put", "optimization_barrier", "stop_gradient"),
    *("sharding_constraint", "reshard"),
}


def _divide(one, other):
    if not np.issubdtype(one.dtype, np.integer):
        return np.divide(one, other)
    # Rounded towards zero; by zero it is -1, as XLA has it.
    whole = one // np.where(other == 0, 1, other)
    whole += (whole < 0) & (whole * other != one)
    return np.where(other == 0, np.array(-1).astype(one.dtype), whole)


def _remainder(one, other):
    if not np.issubdtype(one.dtype, np.integer):
        return np.fmod(one, other)
    return np.where(other == 0, one, np.fmod(one, np.where(other == 0, 1, other)))


def _shift(function, *, filled=False):
    """A shift of bits; that by a whole number or more leaves zeros, or signs."""

    def shift(one, other):
        bits = one.dtype.itemsize * 8
        unsigned = np.dtype(f"u{one.dtype.itemsize}")
        count = other.astype(unsigned)
        if filled:
            return function(one, np.minimum(count, bits - 1).astype(one.dtype))
        moved = function(one.view(unsigned), np.minimum(count, bits - 1))
        return np.where(count < bits, moved, 0).astype(unsigned).view(one.dtype)

    return shift


def _threefry(one, two, *counts):
    """Return the two words of Threefry-2x32's hash of two words."""
    words, keys = list(counts), [one, two, one ^ two ^ np.uint32(0x1BD11BDA)]
    words = [x + key for x, key in zip(words, keys[:2], strict=True)]
    for turn in range(5):
        for bits in ((13, 15, 26, 6), (17, 29, 16, 24))[turn % 2]:
            words[0] = words[0] + words[1]
            words[1] = (words[1] << np.uint32(bits)) | (
                words[1] >> np.uint32(32 - bits)
            )
            words[1] = words[0] ^ words[1]
        words[0] = words[0] + keys[(turn + 1) % 3]
        words[1] = words[1] + keys[(turn + 2) % 3] + np.uint32(turn + 1)
    return words


def _count(shape):
    """Return high and low words that number the places of an array."""
    numbers = np.arange(np.prod(shape, dtype=int), dtype=np.uint64).reshape(shape)
    return [(numbers >> np.uint64(32)).astype(np.uint32), numbers.astype(np.uint32)]


def _hash(keys, shape):
    """Return two words for each place of an array of a shape, for each key."""
    data = _key_data(keys.reshape(keys.shape + (1,) * len(shape)))
    return _threefry(data[..., 0], data[..., 1], *_count(shape))


def _random_bits(params, keys):
    high, low = _hash(keys, params["shape"])
    width = params["bit_width"]
    if width == 64:
        return high.astype(np.uint64) << np.uint64(32) | low
    return (high ^ low).astype(f"u{width // 8}")


def _random_split(params, keys):
    return _keys(np.stack(_hash(keys, params["shape"]), -1))


def _random_fold_in(params, keys, numbers):
    data = _key_data(keys)
    words = _threefry(
        data[..., 0], data[..., 1], np.uint32(0), numbers.astype(np.uint32)
    )
    return _keys(np.stack(words, -1))


def _random_seed(params, seeds):
    wide = seeds.view(f"u{seeds.dtype.itemsize}").astype(np.uint64)
    words = wide >> np.uint64(32), wide & np.uint64(0xFFFFFFFF)
    return _keys(np.stack(words, -1).astype(np.uint32))


def _broadcast(params, x, *sizes):
    shape, places = params["shape"], params["broadcast_dimensions"]
    sides = [1] * len(shape)
    for place, size in zip(places, x.shape, strict=True):
        sides[place] = size
    return np.broadcast_to(x.reshape(sides), shape)


def _reshape(params, x, *sizes):
    order = params["dimensions"]
    return (x if order is None else x.transpose(order)).reshape(params["new_sizes"])


def _cut(params, x):
    steps = params["strides"] or [None] * x.ndim
    bounds = zip(params["start_indices"], params["limit_indices"], steps, strict=True)
    return x[tuple(slice(*bound) for bound in bounds)]


def _box(x, starts, sizes):
    """Return the index of a box, which is moved into the array."""
    firsts = [
        min(max(int(start), 0), side - size)
        for start, side, size in zip(starts, x.shape, sizes, strict=True)
    ]
    pairs = zip(firsts, sizes, strict=True)
    return tuple(slice(first, first + size) for first, size in pairs)


def _dynamic_slice(params, x, *starts):
    return x[_box(x, starts, params["slice_sizes"])]


def _dynamic_update_slice(params, x, update, *starts):
    x = x.copy()
    x[_box(x, starts, update.shape)] = update
    return x


def _pad(params, x, value):
    config = params["padding_config"]
    if any(number < 0 for sides in config for number in sides):
        return NotImplemented
    shape, places = [], []
    for size, (low, high, inside) in zip(x.shape, config, strict=True):
        length = size + max(size - 1, 0) * inside
        shape.append(low + length + high)
        places.append(slice(low, low + length, inside + 1))
    padded = np.full(shape, value, x.dtype)
    padded[tuple(places)] = x
    return padded


def _bitcast(params, x):
    kind = np.dtype(params["new_dtype"])
    return x.view(kind) if kind.itemsize == x.dtype.itemsize else NotImplemented


def _iota(params, *sizes):
    place, shape = params["dimension"], params["shape"]
    sides = [-1 if i == place else 1 for i in range(len(shape))]
    numbers = np.arange(shape[place], dtype=params["dtype"]).reshape(sides)
    return np.broadcast_to(numbers, shape)


def _dot(params, one, other):
    if one.dtype == jnp.bfloat16:  # summed as XLA does; NumPy's einsum knows none
        one, other = (x.astype(np.float32) for x in (one, other))
    (left, right), (left_batch, right_batch) = params["dimension_numbers"]
    if not left_batch:
        return np.tensordot(one, other, (left, right))
    rows = [x for x in range(one.ndim) if x not in (*left, *left_batch)]
    columns = [x for x in range(other.ndim) if x not in (*right, *right_batch)]
    one = one.transpose(*left_batch, *rows, *left)
    other = other.transpose(*right_batch, *right, *columns)
    batch, number = one.shape[: len(left_batch)], len(left_batch)
    rows = one.shape[number : number + len(rows)]
    columns = other.shape[other.ndim - len(columns) :]
    size = np.prod(one.shape[number + len(rows) :], dtype=int)
    one = one.reshape(*batch, np.prod(rows, dtype=int), size)
    other = other.reshape(*batch, size, np.prod(columns, dtype=int))
    return (one @ other).reshape(*batch, *rows, *columns)


def _select(params, which, *cases):
    if len(cases) == 2:
        return np.where(which, cases[1], cases[0])
    return np.choose(which, cases)


def _convolve(params, x, kernel):
    """Multiply the windows of each group with its kernels."""
    kind = params["preferred_element_type"] or np.result_type(x, kernel)
    if x.dtype.itemsize == 2:  # summed as XLA does
        x, kernel = (y.astype(np.float32) for y in (x, kernel))
    numbers = params["dimension_numbers"]
    x, kernel = x.transpose(numbers.lhs_spec), kernel.transpose(numbers.rhs_spec)
    sides = zip(params["padding"], params["lhs_dilation"], strict=True)
    config = [(0, 0, 0)] * 2 + [(*side, step - 1) for side, step in sides]
    if any(number < 0 for side in config for number in side):
        return NotImplemented
    x = _pad({"padding_config": config}, x, 0)
    count, outputs, steps = kernel.ndim - 2, len(kernel), params["rhs_dilation"]
    axes = tuple(range(2, x.ndim))
    reach = [(n - 1) * k + 1 for n, k in zip(kernel.shape[2:], steps, strict=True)]
    views = np.lib.stride_tricks.sliding_window_view(x, reach, axes)
    strides = [slice(None, None, step) for step in (*params["window_strides"], *steps)]
    views = views[(..., *strides)]
    groups = params["feature_group_count"] * params["batch_group_count"]
    if params["batch_group_count"] > 1:
        views = views.reshape(groups, -1, *views.shape[1:])
    else:
        views = views.reshape(len(x), groups, -1, *views.shape[2:]).swapaxes(0, 1)
    # groups, rows, features, places and offsets; features go beside the offsets.
    rows, places = views.shape[1], views.shape[3 : 3 + count]
    views = np.moveaxis(views, 2, 2 + count)
    views = views.reshape(groups, rows * np.prod(places, dtype=int), -1)
    result = views @ kernel.reshape(groups, outputs // groups, -1).swapaxes(1, 2)
    result = result.reshape(groups, rows, *places, outputs // groups)
    result = np.moveaxis(result, (1, -1), (0, 2)).reshape(rows, outputs, *places)
    return result.transpose(np.argsort(numbers.out_spec)).astype(kind)


def _places(starts, sizes, shape, windows, numbers, mode):
    """Return the index into an array of each element of what indices choose.

    Args:
      starts: i[..., C], first element of each window.
      sizes: sizes of a window, one for each axis of the array.
      shape: of the array.
      windows: axes of the result along which a window lies.
      numbers: axes of the array: those that windows lack, those that `starts` has, and
        pairs of those that go along with axes of `starts`.
      mode: what becomes of indices beyond the array.
    """
    absent, chosen, together = numbers
    starts, outer = starts.astype(np.int64), starts.ndim - 1
    rank = outer + len(windows)
    outside = [axis for axis in range(rank) if axis not in windows]
    inside = [axis for axis in range(len(shape)) if axis not in absent]

    def along(numbers, axes):
        sides = [1] * rank
        for axis, size in zip(axes, numbers.shape, strict=True):
            sides[axis] = size
        return numbers.reshape(sides)

    index, valid = [], np.True_
    for axis, (side, size) in enumerate(zip(shape, sizes, strict=True)):
        place = np.zeros((1,) * rank, np.int64)
        if axis in chosen:
            first = along(starts[..., chosen.index(axis)], outside)
            valid = valid & (first >= 0) & (first <= side - size)
            place = np.clip(first, 0, side - size)
        elif axis in together:
            other = outside[together[axis]]
            place = along(np.arange(side), [other])
        if axis in inside:
            place = place + along(np.arange(size), [windows[inside.index(axis)]])
        index.append(place)
    filled = mode in (None, jax.lax.GatherScatterMode.FILL_OR_DROP)
    return tuple(index), valid if filled else np.True_


def _gather(params, x, starts):
    numbers = params["dimension_numbers"]
    if params["mode"] == jax.lax.GatherScatterMode.ONE_HOT:
        return NotImplemented
    batch = numbers.operand_batching_dims
    index, valid = _places(
        starts,
        params["slice_sizes"],
        x.shape,
        numbers.offset_dims,
        (
            (*numbers.collapsed_slice_dims, *batch),
            numbers.start_index_map,
            dict(zip(batch, numbers.start_indices_batching_dims, strict=True)),
        ),
        params["mode"],
    )
    filling = params["fill_value"]
    if 0 in x.shape or x.dtype == np.uint64 and not np.all(valid):  # keys, perhaps
        return NotImplemented
    result = x[index]
    return (
        result
        if np.all(valid)
        else np.where(valid, result, np.array(filling).astype(x.dtype))
    )


def _scatter(function):
    def scatter(params, x, starts, updates):
        numbers = params["dimension_numbers"]
        batch = numbers.operand_batching_dims
        absent = (*numbers.inserted_window_dims, *batch)
        windows = iter(numbers.update_window_dims)
        sizes = [
            1 if axis in absent else updates.shape[next(windows)]
            for axis in range(x.ndim)
        ]
        index, valid = _places(
            starts,
            sizes,
            x.shape,
            numbers.update_window_dims,
            (
                absent,
                numbers.scatter_dims_to_operand_dims,
                dict(zip(batch, numbers.scatter_indices_batching_dims, strict=True)),
            ),
            params["mode"],
        )
        if not updates.size or not x.size:
            return x
        valid = np.broadcast_to(valid, updates.shape)
        places = [np.broadcast_to(y, updates.shape)[valid] for y in index]
        result = x.copy()
        if function is None:
            result[tuple(places)] = updates[valid]
        else:
            function.at(result, tuple(places), updates[valid])
        return result

    return scatter


def _sort(params, *arrays):
    axis, count = params["dimension"], params["num_keys"]
    if count > 1:
        order = np.lexsort(arrays[:count][::-1], axis)
    else:
        order = np.argsort(arrays[0], axis, kind="stable")
    return [np.take_along_axis(x, order, axis) for x in arrays]


def _top(params, x):
    axis = params.get("axis", x.ndim - 1)
    ranks = x
    if jnp.issubdtype(x.dtype, jnp.floating):  # -0 is below 0, as XLA has it
        ranks = x.view(f"i{x.dtype.itemsize}")
        ranks = np.where(ranks < 0, ranks ^ np.iinfo(ranks.dtype).max, ranks)
    flipped = np.flip(ranks, axis)
    order = x.shape[axis] - 1 - np.argsort(flipped, axis, kind="stable")
    order = np.take(np.flip(order, axis), np.arange(params["k"]), axis)
    return [np.take_along_axis(x, order, axis), order]


def _platform(params):
    names = params["platforms"]
    places = [x for x, name in enumerate(names) if name is None or "cpu" in name]
    return np.int32(places[0])


def _reduce(function):
    return lambda params, x: function(x, axis=tuple(params["axes"]))


def _running(function):
    def run(params, x):
        way = slice(None, None, -1 if params["reverse"] else 1)
        at = (*[slice(None)] * params["axis"], way)
        return function(x[at], axis=params["axis"], dtype=x.dtype)[at]

    return run


def _position(function):
    return lambda params, x: function(x, axis=params["axes"][0])


# Operations that are one function of NumPy
_SAME = {
    "abs": np.abs,
    "acos": np.arccos,
    "add": np.add,
    "add_any": np.add,
    "and": np.bitwise_and,
    "asin": np.arcsin,
    "atan2": np.arctan2,
    "ceil": np.ceil,
    "clamp": lambda low, x, high: np.minimum(np.maximum(x, low), high),
    "cos": np.cos,
    "cosh": np.cosh,
    "div": _divide,
    "eq": np.equal,
    "erf": special.erf,
    "erf_inv": special.erfinv,
    "erfc": special.erfc,
    "exp2": np.exp2,
    "exp": np.exp,
    "expm1": np.expm1,
    "floor": np.floor,
    "ge": np.greater_equal,
    "gt": np.greater,
    "is_finite": np.isfinite,
    "le": np.less_equal,
    "log": np.log,
    "log1p": np.log1p,
    "logistic": special.expit,
    "lt": np.less,
    "max": np.maximum,
    "min": np.minimum,
    "mul": np.multiply,
    "ne": np.not_equal,
    "neg": np.negative,
    "nextafter": np.nextafter,
    "not": np.invert,
    "or": np.bitwise_or,
    "pow": np.power,
    "rem": _remainder,
    "rsqrt": lambda x: 1 / np.sqrt(x),
    "sign": np.sign,
    "sin": np.sin,
    "sqrt": np.sqrt,
    "square": np.square,
    "shift_left": _shift(np.left_shift),
    "shift_right_arithmetic": _shift(np.right_shift, filled=True),
    "shift_right_logical": _shift(np.right_shift),
    "sinh": np.sinh,
    "sub": np.subtract,
    "tan": np.tan,
    "tanh": np.tanh,
    "xor": np.bitwise_xor,
}

_OPERATIONS = {
    "argmax": _position(np.argmax),
    "argmin": _position(np.argmin),
    "bitcast_convert_type": _bitcast,
    "broadcast_in_dim": _broadcast,
    "concatenate": lambda params, *x: np.concatenate(x, params["dimension"]),
    "convert_element_type": lambda params, x: x.astype(params["new_dtype"]),
    "conv_general_dilated": _convolve,
    "cumlogsumexp": _running(np.logaddexp.accumulate),
    "cummax": _running(np.maximum.accumulate),
    "cummin": _running(np.minimum.accumulate),
    "cumprod": _running(np.cumprod),
    "cumsum": _running(np.cumsum),
    "dot_general": _dot,
    "dynamic_slice": _dynamic_slice,
    "dynamic_update_slice": _dynamic_update_slice,
    "gather": _gather,
    "integer_pow": lambda params, x: x ** params["y"],
    "iota": _iota,
    "iota_2x32_shape": lambda params: _count(params["shape"]),
    "pad": _pad,
    "platform_index": _platform,
    "random_bits": _random_bits,
    "random_fold_in": _random_fold_in,
    "random_seed": _random_seed,
    "random_split": _random_split,
    "random_unwrap": lambda params, x: _key_data(x),
    "random_wrap": lambda params, x: _keys(x),
    "reduce_and": _reduce(np.all),
    "reduce_max": _reduce(np.max),
    "reduce_min": _reduce(np.min),
    "reduce_or": _reduce(np.any),
    "reduce_prod": _reduce(np.prod),
    "reduce_sum": _reduce(np.sum),
    "reshape": _reshape,
    "rev": lambda params, x: np.flip(x, params["dimensions"]),
    "scatter": _scatter(None),
    "scatter-add": _scatter(np.add),
    "scatter-max": _scatter(np.maximum),
    "scatter-min": _scatter(np.minimum),
    "scatter-mul": _scatter(np.multiply),
    "select_n": _select,
    "slice": _cut,
    "sort": _sort,
    "split": lambda params, x: np.split(
        x, np.cumsum(params["sizes"])[:-1], params["axis"]
    ),
    "stack": lambda params, *x: np.stack(x, params["axis"]),
    "squeeze": lambda params, x: np.squeeze(x, params["dimensions"]),
    "threefry2x32": lambda params, *x: _threefry(*x),
    "top_k": _top,
    "transpose": lambda params, x: np.transpose(x, params["permutation"]),
    "unstack": lambda params, x: list(np.moveaxis(x, params["axis"], 0)),
}
