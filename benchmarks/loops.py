"""FLOPs of programs whose loops turn as often as the data says."""

import functools

import jax
import numpy as np
from jax.extend import core
from jax.extend.core import primitives

from jaxcl import sharding


def operations(program, *arguments):
    """FLOPs of a call, and how often each of its outer loops turned.

    XLA counts the body of a loop once. Here the loops whose number of turns depends on
    the data run one turn after the other, and each turn counts.

    Args:
      program: `jax.make_jaxpr` of a function.
      arguments: its arguments; not read where no such loop is in it.

    Raises:
      ValueError: a loop is where it would not be seen.
    """
    with sharding.on_host():
        runs = _loops(program, (primitives.while_p,))
        _, count, turns = _run(program, map(np.asarray, arguments), runs)
    return count, turns


_LOOPS = primitives.while_p, primitives.scan_p


def _loops(program, kinds=_LOOPS):
    return any(equation.primitive in kinds for equation in program.jaxpr.eqns)


@functools.lru_cache
def _written(program):
    """XLA's count of a program as written; a loop's test and body count once."""
    run = jax.jit(core.jaxpr_as_fun(program))
    return run.lower(*program.in_avals).cost_analysis().get("flops", 0)


@functools.lru_cache
def _jitted(program):
    return jax.jit(core.jaxpr_as_fun(program))


def _run(program, arguments, runs=True):
    """(outputs, FLOPs, turns of its loops); no outputs where it is not to be run."""
    inside, count, turns = program.jaxpr, _written(program), []
    values = dict(zip(inside.constvars, program.consts, strict=True))
    values |= zip(inside.invars, arguments, strict=True)

    def read(atom):
        return atom.val if isinstance(atom, core.Literal) else values[atom]

    for equation in inside.eqns:
        kind, options = equation.primitive, equation.params
        inner = [] if kind is primitives.while_p else core.jaxprs_in_params(options)
        if any(each.primitive in _LOOPS for one in inner for each in one.eqns):
            raise ValueError(f"a loop inside of {kind}: it is not counted")
        if kind is primitives.scan_p:
            count += (options["length"] - 1) * _written(options["jaxpr"])
            turns.append(options["length"])
        if not runs:
            continue
        given = [read(atom) for atom in equation.invars]
        if kind is primitives.while_p:
            found, more, number = _turned(options, given)
            count, turns = count + more, [*turns, number]
        elif kind is primitives.jit_p:
            found = _jitted(options["jaxpr"])(*given)
        else:
            found = kind.bind(*given, **options)
            found = found if kind.multiple_results else [found]
        values |= zip(equation.outvars, found, strict=True)
    return [read(atom) for atom in inside.outvars] if runs else None, count, turns


def _turned(options, given):
    """(outputs, FLOPs beyond those of one turn, turns) of a while loop."""
    test, body = options["cond_jaxpr"], options["body_jaxpr"]
    first = options["cond_nconsts"]
    last = first + options["body_nconsts"]
    carry, turns, count = given[last:], 0, -_written(body)
    while _jitted(test)(*given[:first], *carry)[0]:
        both = [*given[first:last], *carry]
        if _loops(body):
            carry, more, _ = _run(body, both)
        else:
            carry, more = _jitted(body)(*both), _written(body)
        turns, count = turns + 1, count + more
    return carry, count + turns * _written(test), turns
