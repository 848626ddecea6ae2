"""The random keys of a traced program, and how often each is used.

A program is a jaxpr. Only what its keys are made of is computed, when a draw asks for
it: the key of the state, the number of the step. Images, parameters and activations
stay abstract, so nothing is compiled and networks cost no time.
"""

import collections
import functools
import hashlib
import math

import jax
import numpy as np
from jax.extend import core

from helpers.forward import cheap_traces

DRAWS = ("random_bits", "random_gamma", "threefry2x32")
PARENTS = ("random_split", "random_fold_in")
WHOLE = object()  # an input that is not known


def of(program, inputs) -> collections.Counter:
    """Count the draws by each key.

    Args:
      program: a closed jaxpr.
      inputs: its arguments, flat; WHOLE where no key depends on the value.

    Returns:
      A counter of (bits of the key, kind). A "split" makes other keys of it, also by
      `fold_in`, a "draw" makes random numbers.
    """
    counts = collections.Counter()
    env = {}
    _bind(env, program.jaxpr.constvars, [_known(x) for x in program.consts])
    _bind(env, program.jaxpr.invars, [_known(x) for x in inputs])
    _follow(program.jaxpr, env, counts)
    return counts


def shared(counts) -> list:
    """List the keys that two draws share, or a draw and a split."""
    kinds = collections.Counter()
    for (bits, kind), number in counts.items():
        kinds[bits] += number if kind == "draw" else 0
    both = [bits for bits, kind in counts if kind == "split" and kinds[bits]]
    return sorted({*both, *(bits for bits, number in kinds.items() if number > 1)})


def _known(value):
    def read():
        if value is WHOLE:
            raise ValueError("a key depends on an input that is not known")
        return value

    return read


def _bind(env, variables, readers):
    for variable, reader in zip(variables, readers, strict=True):
        env[variable] = reader


def _reader(env, atom):
    return _known(atom.val) if isinstance(atom, core.Literal) else env[atom]


def _draws(jaxpr) -> bool:
    """Tell whether a program or one inside it draws."""
    return any(
        equation.primitive.name in (*DRAWS, *PARENTS)
        or any(map(_draws, core.jaxprs_in_params(equation.params)))
        for equation in jaxpr.eqns
    )


def _closed(program):
    """A jaxpr and its constants."""
    if isinstance(program, core.ClosedJaxpr):
        return program.jaxpr, program.consts
    return program, ()


def _run(program, readers, counts):
    """Readers of the outputs of an inner program."""
    jaxpr, consts = _closed(program)
    env = {}
    _bind(env, jaxpr.constvars, map(_known, consts))
    _bind(env, jaxpr.invars, readers)
    _follow(jaxpr, env, counts)
    return [_reader(env, atom) for atom in jaxpr.outvars]


def _follow(jaxpr, env, counts):
    for equation in jaxpr.eqns:
        readers = [_reader(env, atom) for atom in equation.invars]
        outputs = _outputs(equation, readers, counts)
        _bind(env, equation.outvars, outputs)


def _outputs(equation, readers, counts):
    name, params = equation.primitive.name, equation.params
    if name in (*DRAWS, *PARENTS):
        kind = "split" if name in PARENTS else "draw"
        for bits in np.asarray(jax.random.key_data(readers[0]())).reshape(-1, 2):
            counts[(*bits.tolist(),), kind] += 1
    if name == "optimization_barrier":
        return readers
    inner = list(core.jaxprs_in_params(params))
    if name == "scan" and any(map(_draws, inner)):
        return _scan(equation, readers, counts)
    if name == "cond":
        return _branches(equation, readers, counts)
    if name in ("scan", "while"):
        assert not any(map(_draws, inner)), "a loop of unknown length draws"
        inner = []
    if len(inner) == 1 and len(inner[0].invars) == len(readers):
        program = next(
            x for x in params.values() if isinstance(x, core.ClosedJaxpr | core.Jaxpr)
        )
        return _run(program, readers, counts)
    assert not any(map(_draws, inner)), f"{name} draws"

    @functools.cache
    def compute():
        if name in PARENTS:
            return _children(*(read() for read in readers), params.get("shape"))
        return equation.primitive.bind(*(read() for read in readers), **params)

    if equation.primitive.multiple_results:
        return [lambda i=i: compute()[i] for i in range(len(equation.outvars))]
    return [compute]


def _children(keys, *rest):
    """Other keys than JAX would make, but as distinct, and without compiling.

    Part i of a split key is also what folding i into the key gives, as in JAX.

    Args:
      rest: the shape that each key is split into, or numbers to fold in and None.
    """
    bits = np.asarray(jax.random.key_data(keys))
    if len(rest) == 1:
        numbers = np.arange(math.prod(rest[0])).reshape(rest[0])
        parents = bits.reshape(keys.shape + (1,) * numbers.ndim + (2,))
    else:
        numbers, parents = np.asarray(rest[0]), bits
    shape = np.broadcast_shapes(parents.shape[:-1], numbers.shape)
    parents = np.broadcast_to(parents, (*shape, 2)).reshape(-1, 2)
    rows = np.column_stack([parents, np.broadcast_to(numbers, shape).ravel()])
    children = [
        hashlib.blake2b(row.tobytes(), digest_size=8).digest()
        for row in rows.astype(np.int64)
    ]
    children = np.frombuffer(b"".join(children), np.uint32).reshape(*shape, 2)
    return jax.random.wrap_key_data(children, impl=jax.random.key_impl(keys))


def _scan(equation, readers, counts):
    """Run the body once a turn, as far as keys are made of it."""
    params, body = equation.params, equation.params["jaxpr"].jaxpr
    # What is carried has one shape inside and outside; rows lose their first axis.
    pairs = zip(equation.outvars, body.outvars, strict=True)
    carried = sum(x.aval.shape == y.aval.shape for x, y in pairs)
    pairs = zip(equation.invars, body.invars, strict=True)
    rows = readers[sum(x.aval.shape == y.aval.shape for x, y in pairs) :]
    consts = len(readers) - len(rows) - carried
    fixed, carry = readers[:consts], readers[consts : consts + carried]
    turns = range(params["length"])
    for turn in reversed(turns) if params["reverse"] else turns:
        here = [lambda x=x, i=turn: x()[i] for x in rows]
        outputs = _run(params["jaxpr"], [*fixed, *carry, *here], counts)
        carry = outputs[:carried]
    return [*carry, *[_known(WHOLE)] * (len(equation.outvars) - carried)]


def _branches(equation, readers, counts):
    """One branch runs: of all, the most uses of a key count."""
    branches = equation.params["branches"]
    try:
        number = int(readers[0]())
        chosen = [branches[min(max(number, 0), len(branches) - 1)]]
    except ValueError:
        chosen = branches
    most = collections.Counter()
    for branch in chosen:
        uses = collections.Counter()
        outputs = _run(branch, readers[1:], uses)
        most |= uses
    counts.update(most)
    return outputs if len(chosen) == 1 else [_known(WHOLE)] * len(equation.outvars)


def of_steps(method, state, batch, *, numbers) -> list[collections.Counter]:
    """Count the draws of some steps of a method, see `of`.

    Args:
      method: core.Method.
      state, batch: shapes, as `job.shapes` returns them.
      numbers: of the steps, with which every counter of the state grows.
    """
    with cheap_traces():
        program = jax.make_jaxpr(method.step)(state, batch)
    leaves = jax.tree.leaves((state, batch))
    return [of(program, [_value(x, number) for x in leaves]) for number in numbers]


def of_start(method, batch) -> collections.Counter:
    """Count the draws that make a method's state before the first step, see `of`."""
    key = jax.random.key(7)
    program = jax.make_jaxpr(method.init)(key, batch)
    return of(program, [key, *[WHOLE] * len(jax.tree.leaves(batch))])


def _value(leaf, step):
    """A state at a step, as far as keys may depend on it: keys and counters."""
    if jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        keys = jax.random.split(jax.random.key(7), max(math.prod(leaf.shape), 1))
        return keys.reshape(leaf.shape)
    if leaf.dtype == np.uint32:  # bits of a key, as layers keep it
        return np.random.default_rng(step).integers(0, 2**32, leaf.shape, np.uint32)
    if leaf.shape == () and leaf.dtype != bool:
        return np.asarray(1000 * step, leaf.dtype)
    if leaf.dtype in (np.int32, bool):
        return np.zeros(leaf.shape, leaf.dtype)
    return WHOLE
