"""Batch norms that sum at once: of networks of one form, and of a block's two ends.

Batch norm sums over the rows of a batch. On a GPU each sum is two kernels, and with
several devices a message for which all wait. Networks that pass one after another, as
the one that learns and its slow copy, sum twice as often as if they passed together,
layer by layer; and a residual block sums for its shortcut what it could sum with its
last convolution.
"""

import collections
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.extend import core as jaxprs

from jaxcl.nets import norm

# Equations that sum, forward or backward, by name: what evaluates several at once.
_JOINED = {
    norm.moments_apart.__name__: norm.moments_together,
    norm.affine_apart.__name__: norm.affine_together,
}
# Those evaluated at once for all networks. Others would take gradients of networks that
# need none.
_OF_ALL = (norm.moments_apart.__name__,)


def passes(function: Callable, arguments: Sequence[tuple]) -> list[Any]:
    """What the function makes of each tuple of arguments, with sums in common.

    The function is traced once, and the equations of its trace are evaluated for each
    tuple in turn. But those of `norm.moments_apart` are evaluated for all tuples at
    once, and so are others of their shape that can be; those of `norm.affine_apart` in
    the same way, but for one tuple after another. Values and gradients are those of
    separate calls, up to rounding.

    Args:
      function: calls networks; of arrays alone, with no Python value among them.
      arguments: for each call, pytrees of one structure, shapes and types.

    Raises:
      ValueError: the arguments differ in structure, shapes or types.
    """
    forms = [jax.tree.map(jax.typeof, own) for own in arguments]
    if any(form != forms[0] for form in forms):
        raise ValueError(f"arguments must have one form, got {forms}")
    closed, result = jax.make_jaxpr(function, return_shape=True)(*arguments[0])
    jaxpr = closed.jaxpr
    values_of = [
        dict(zip(jaxpr.constvars, closed.consts, strict=True))
        | dict(zip(jaxpr.invars, jax.tree.leaves(own), strict=True))
        for own in arguments
    ]
    for part, joined in _parts(jaxpr):
        for values in values_of:
            outputs = jax.core.eval_jaxpr(part, (), *(values[x] for x in part.invars))
            values |= dict(zip(part.outvars, outputs, strict=True))
        for equations in joined:
            name = _name(equations[0])
            for some in [values_of] if name in _OF_ALL else [[x] for x in values_of]:
                _evaluate(equations, some, _JOINED[name])
    tree = jax.tree.structure(result)
    return [
        jax.tree.unflatten(tree, [_read(x, values) for x in jaxpr.outvars])
        for values in values_of
    ]


def _evaluate(equations, values_of, together):
    """Evaluate some equations of one shape for some networks, at once."""
    places = [(values, eqn) for values in values_of for eqn in equations]
    inputs = [[_read(x, values) for x in eqn.invars] for values, eqn in places]
    for (values, eqn), made in zip(places, together(*inputs), strict=True):
        values |= dict(zip(eqn.outvars, jax.tree.leaves(made), strict=True))


def _parts(jaxpr) -> list[tuple[Any, list[list]]]:
    """The equations of a jaxpr in parts, each with the joined equations after it.

    A part is a jaxpr. Every equation is in the last part that comes early enough for
    whatever reads it. So the shortcut of a block is summed with the last convolution
    beside it.

    Joined equations are in lists, each of equations with one name and one shape. None
    of those after one part needs the result of another.
    """
    turn: dict[Any, int] = {}  # variable -> in which part, from the last one, it is due
    turn_of = []
    for equation in reversed(jaxpr.eqns):
        due = max((turn.get(x, 0) for x in equation.outvars), default=0)
        due += _name(equation) in _JOINED
        turn_of.append(due)
        turn |= {
            x: max(turn.get(x, 0), due) for x in equation.invars if not _is_literal(x)
        }
    parts, read_later = [], {x for x in jaxpr.outvars if not _is_literal(x)}
    in_turn = collections.defaultdict(list)
    for equation, due in zip(jaxpr.eqns, reversed(turn_of), strict=True):
        in_turn[due].append(equation)
    for due in sorted(in_turn):
        joined = collections.defaultdict(list)
        equations = []
        for equation in in_turn[due]:
            if _name(equation) in _JOINED:
                forms = (*(x.aval.str_short() for x in equation.invars),)
                joined[_name(equation), forms].append(equation)
            else:
                equations.append(equation)
        for others in joined.values():
            inputs = {x for equation in others for x in equation.invars}
            read_later |= {x for x in inputs if not _is_literal(x)}
        written = {x for equation in equations for x in equation.outvars}
        read = dict.fromkeys(
            x
            for equation in equations
            for x in equation.invars
            if not _is_literal(x) and x not in written
        )
        kept = [x for eqn in equations for x in eqn.outvars if x in read_later]
        part = jaxpr.replace(constvars=[], invars=[*read], outvars=kept, eqns=equations)
        parts.append((part, [*joined.values()]))
        read_later |= set(read)
    return parts[::-1]


def _name(equation) -> str | None:
    return equation.params.get("name")


def _read(x, values):
    return x.val if _is_literal(x) else values[x]


def _is_literal(x) -> bool:
    return isinstance(x, jaxprs.Literal)
