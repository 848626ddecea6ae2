"""Programs that NumPy computes, an operation after another, instead of XLA.

A small program takes a hundred times as long to compile as to compute. Where the
equation is the subject and not the program, a test traces it and computes it here. An
operation that is not in a table below is JAX's own, compiled for its shapes alone and
shared by all programs: convolutions, gathers, sorts.
"""

import functools
import math

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
        return jax.tree.unflatten(structure, map(jnp.asarray, outputs))

    return call


def value_and_grad(function, **options):
    """Return the value and gradients of a function, interpreted."""
    return jit(jax.value_and_grad(function, **options))


def _pairs(values, jaxpr):
    return zip(values, jaxpr.invars, strict=True)


def _is_key(aval) -> bool:
    return jax.dtypes.issubdtype(aval.dtype, jax.dtypes.extended)


def _plain(value, aval):
    """The array as NumPy's; random keys stay as they are."""
    return value if _is_key(aval) else np.asarray(value, aval.dtype)


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
            values[variable] = _plain(result, variable.aval)
    return [read(x) for x in jaxpr.outvars]


def _compute(equation, inputs):
    """Return the outputs of an equation."""
    name, params = equation.primitive.name, equation.params
    if name in _CONTROL:
        return _CONTROL[name](inputs, equation)
    for inner in params.values():
        if isinstance(inner, core.ClosedJaxpr | core.Jaxpr):
            jaxpr = getattr(inner, "jaxpr", inner)
            if len(jaxpr.invars) == len(inputs):
                return _evaluate(inner, inputs)
    if name in _PASSED_ON:
        return inputs
    if name in _DRAWS and str(jax.random.key_impl(inputs[0])) == _THREEFRY:
        return [_DRAWS[name](params, *inputs)]
    if name in _MOVES and _is_key(equation.invars[0].aval):
        return _move_keys(name, params, *inputs)
    avals = [x.aval for x in (*equation.invars, *equation.outvars)]
    if not any(map(_is_key, avals)):
        if name in _SAME:
            return [_SAME[name](*inputs)]
        if name in _OPERATIONS:
            result = _OPERATIONS[name](params, *inputs)
            if result is not NotImplemented:
                return result if isinstance(result, list) else [result]
    results = equation.primitive.bind(*inputs, **params)
    return results if equation.primitive.multiple_results else [results]


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
    avals = params["jaxpr"].out_avals[carried:]
    stacked = [
        jnp.stack(x) if _is_key(aval) else np.stack(x)
        for x, aval in zip(zip(*collected, strict=True), avals, strict=True)
    ]
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
    select = jnp.where if _is_key(new) else np.where
    return select(np.reshape(wanted, shape), new, old)


def _cond(inputs, equation):
    """Compute the chosen branch."""
    branches = equation.params["branches"]
    number = min(max(int(inputs[0]), 0), len(branches) - 1)
    return _evaluate(branches[number], inputs[1:])


_CONTROL = {"scan": _scan, "while": _while, "cond": _cond}
_PASSED_ON = {
    *("copy", "copy_p", "device_put", "optimization_barrier", "stop_gradient"),
    *("sharding_constraint", "reshard"),
}
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
    "eq": np.equal,
    "erf": special.erf,
    "erf_inv": special.erfinv,
    "erfc": special.erfc,
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
    "not": np.invert,
    "or": np.bitwise_or,
    "pow": np.power,
    "rem": np.fmod,
    "rsqrt": lambda x: 1 / np.sqrt(x),
    "sign": np.sign,
    "sin": np.sin,
    "sqrt": np.sqrt,
    "square": np.square,
    "sub": np.subtract,
    "tanh": np.tanh,
    "xor": np.bitwise_xor,
}


def _mix(keys, high, low):
    """Threefry-2x32 of counters, in 20 rounds (Salmon et al., 2011).

    Args:
      keys: u32[..., 2], whose leading axes suit those of the counters.
      high, low: u32 words of the counters.
    """
    first, second = keys[..., 0], keys[..., 1]
    schedule = [first, second, first ^ second ^ np.uint32(0x1BD11BDA)]
    x, y = high + first, low + second
    for turn in range(5):
        for turned in ((13, 15, 26, 6), (17, 29, 16, 24))[turn % 2]:
            x = x + y
            y = ((y << np.uint32(turned)) | (y >> np.uint32(32 - turned))) ^ x
        x = x + schedule[(turn + 1) % 3]
        y = y + schedule[(turn + 2) % 3] + np.uint32(turn + 1)
    return x, y


def _mix_places(keys, shape):
    """Threefry of the places in an array, for each key of an array of keys."""
    words = np.asarray(jax.random.key_data(keys))
    words = words.reshape(keys.shape + (1,) * len(shape) + (2,))
    places = np.arange(math.prod(shape), dtype=np.uint64).reshape(shape)
    high = (places >> np.uint64(32)).astype(np.uint32)
    return _mix(words, high, places.astype(np.uint32))


def _random_bits(params, keys):
    high, low = _mix_places(keys, params["shape"])
    if params["bit_width"] == 64:
        return high.astype(np.uint64) << np.uint64(32) | low
    return (high ^ low).astype(f"uint{params['bit_width']}")


def _split_keys(params, keys):
    return _as_keys(*_mix_places(keys, params["shape"]))


def _fold_in(params, keys, numbers):
    words, low = np.asarray(jax.random.key_data(keys)), np.asarray(numbers)
    return _as_keys(*_mix(words, np.zeros_like(low, np.uint32), low.astype(np.uint32)))


def _as_keys(first, second):
    words = np.stack(np.broadcast_arrays(first, second), axis=-1)
    return jax.random.wrap_key_data(words, impl=_THREEFRY)


def _move_keys(name, params, keys, *rest):
    """Return what an operation that moves the entries of an array makes of keys."""
    words = np.asarray(jax.random.key_data(keys))
    places = np.arange(keys.size).reshape(keys.shape)
    moved = _OPERATIONS[name](params, places, *rest)
    words = words.reshape(-1, words.shape[-1])
    return [
        jax.random.wrap_key_data(words[x], impl=jax.random.key_impl(keys))
        for x in (moved if isinstance(moved, list) else [moved])
    ]


_MOVES = {
    *("broadcast_in_dim", "dynamic_slice", "reshape", "rev", "slice", "split"),
    *("squeeze", "transpose", "unstack"),
}
_THREEFRY = "threefry2x32"
# What follows from keys of this kind, as `jax_threefry_partitionable` has it
_DRAWS = {
    "random_bits": _random_bits,
    "random_split": _split_keys,
    "random_fold_in": _fold_in,
}


def _divide(params, one, other):
    whole = np.issubdtype(one.dtype, np.integer)  # rounded towards zero
    return NotImplemented if whole else np.divide(one, other)


def _shift(params, one, other):
    unsigned = np.issubdtype(one.dtype, np.unsignedinteger)
    return np.right_shift(one, other) if unsigned else NotImplemented


def _broadcast(params, x, *sizes):
    shape, places = params["shape"], params["broadcast_dimensions"]
    sides = [1] * len(shape)
    for place, size in zip(places, x.shape, strict=True):
        sides[place] = size
    return np.broadcast_to(x.reshape(sides), shape)


def _reshape(params, x, *sizes):
    return x.reshape(params["new_sizes"])


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
    letters = iter("abcdefghijklmnopqrstuvwxyz")
    first, second = ([next(letters) for _ in x.shape] for x in (one, other))
    for pair in ((left_batch, right_batch), (left, right)):
        for place, same in zip(*pair, strict=True):
            second[same] = first[place]
    outputs = [first[x] for x in left_batch]
    outputs += [x for n, x in enumerate(first) if n not in (*left, *left_batch)]
    outputs += [x for n, x in enumerate(second) if n not in (*right, *right_batch)]
    equation = f"{''.join(first)},{''.join(second)}->{''.join(outputs)}"
    return np.einsum(equation, one, other)


def _select(params, which, *cases):
    if len(cases) == 2:
        return np.where(which, cases[1], cases[0])
    return np.choose(which, cases)


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


_OPERATIONS = {
    "argmax": _position(np.argmax),
    "argmin": _position(np.argmin),
    "bitcast_convert_type": _bitcast,
    "broadcast_in_dim": _broadcast,
    "concatenate": lambda params, *x: np.concatenate(x, params["dimension"]),
    "convert_element_type": lambda params, x: x.astype(params["new_dtype"]),
    "cummax": _running(np.maximum.accumulate),
    "cumprod": _running(np.cumprod),
    "cumsum": _running(np.cumsum),
    "div": _divide,
    "dot_general": _dot,
    "dynamic_slice": _dynamic_slice,
    "dynamic_update_slice": _dynamic_update_slice,
    "integer_pow": lambda params, x: x ** params["y"],
    "iota": _iota,
    "pad": _pad,
    "reduce_and": _reduce(np.all),
    "reduce_max": _reduce(np.max),
    "reduce_min": _reduce(np.min),
    "reduce_or": _reduce(np.any),
    "reduce_prod": _reduce(np.prod),
    "reduce_sum": _reduce(np.sum),
    "reshape": _reshape,
    "rev": lambda params, x: np.flip(x, params["dimensions"]),
    "select_n": _select,
    "shift_right_logical": _shift,
    "slice": _cut,
    "split": lambda params, x: np.split(
        x, np.cumsum(params["sizes"])[:-1], params["axis"]
    ),
    "stack": lambda params, *x: np.stack(x, params["axis"]),
    "squeeze": lambda params, x: np.squeeze(x, params["dimensions"]),
    "transpose": lambda params, x: np.transpose(x, params["permutation"]),
    "unstack": lambda params, x: list(np.moveaxis(x, params["axis"], 0)),
}
