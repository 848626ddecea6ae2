"""Programs that are traced without their gradients."""

import contextlib
from unittest import mock

import jax


@contextlib.contextmanager
def no_gradients():
    """A gradient is what it is taken by: to differentiate is half of a trace.

    What a backward pass alone would read or draw is not seen; there is none today.
    """

    def value_and_grad(function, argnums=0, has_aux=False):
        return lambda *x: (function(*x), x[argnums])

    def grad(function, argnums=0, has_aux=False):
        def call(*x):
            outputs = function(*x)
            return (x[argnums], outputs[1]) if has_aux else x[argnums]

        return call

    def vjp(function, *x, has_aux=False):
        outputs, *aux = function(*x) if has_aux else (function(*x),)
        return outputs, lambda _: x, *aux

    with mock.patch.multiple(jax, value_and_grad=value_and_grad, grad=grad, vjp=vjp):
        yield
