"""The operations of a traced program."""

from jax.extend import core


def equations(program):
    """Yield the equations of a jaxpr, and those of the programs inside it."""
    for equation in program.eqns:
        yield equation
        for inner in core.jaxprs_in_params(equation.params):
            yield from equations(inner)
