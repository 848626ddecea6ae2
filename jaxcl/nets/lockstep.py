"""Several networks of one form, layer by layer together, so that they share sums.

Batch norm sums over the rows of a batch. On a GPU each sum is two kernels, and with
several devices a message for which all wait. Networks that pass one after another, as
the one that learns and its slow copy, sum twice as often as if they passed together.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.extend import core as jaxprs

from jaxcl.nets import norm


def passes(function: Callable, arguments: Sequence[tuple]) -> list[Any]:
    """What the function makes of each tuple of arguments, with sums in common.

    The function is traced once. The equations of its trace are then evaluated for each
    tuple in turn, but those of `norm.moments_apart` for all at once
    (`norm.moments_together`). Values and gradients are those of separate calls, up to
    rounding.

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
    for part in _parts(jaxpr):
        inputs = [[values[x] for x in part.invars] for values in values_of]
        if _sums(part.eqns[0]):  # the only one of its part
            outputs = norm.moments_together(*(rows for (rows,) in inputs))
        else:
            outputs = [jax.core.eval_jaxpr(part, (), *own) for own in inputs]
        for values, own in zip(values_of, outputs, strict=True):
            values |= dict(zip(part.outvars, own, strict=True))
    tree = jax.tree.structure(result)
    return [
        jax.tree.unflatten(
            tree, [x.val if _is_literal(x) else values[x] for x in jaxpr.outvars]
        )
        for values in values_of
    ]


def _parts(jaxpr) -> list:
    """The jaxpr cut before and after each equation that sums, as jaxprs."""
    groups: list[list] = [[]]
    for equation in jaxpr.eqns:
        if _sums(equation):
            groups += [[equation], []]
        else:
            groups[-1].append(equation)
    parts, read_later = [], {x for x in jaxpr.outvars if not _is_literal(x)}
    for equations in reversed([group for group in groups if group]):
        written = {x for equation in equations for x in equation.outvars}
        read = dict.fromkeys(
            x
            for equation in equations
            for x in equation.invars
            if not _is_literal(x) and x not in written
        )
        kept = [x for equation in equations for x in equation.outvars]
        if not _sums(equations[0]):
            kept = [x for x in kept if x in read_later]
        parts.append(
            jaxpr.replace(constvars=[], invars=[*read], outvars=kept, eqns=equations)
        )
        read_later |= set(read)
    return parts[::-1]


def _sums(equation) -> bool:
    return equation.params.get("name") == norm.moments_apart.__name__


def _is_literal(x) -> bool:
    return isinstance(x, jaxprs.Literal)
