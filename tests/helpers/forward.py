"""Programs that are traced at half of the cost, to be read and never run."""

import contextlib
import functools
from unittest import mock

import jax
import numpy as np
from flax import linen as nn


@contextlib.contextmanager
def cheap_traces():
    """Gradients are left out, and a network is traced once for all of its passes."""
    shared = {name: _share_calls(getattr(nn.Module, name)) for name in _PASSES}
    with _no_gradients(), mock.patch.multiple(nn.Module, **shared):
        yield


def forget_traces():
    """Drop the networks traced so far."""
    for programs in _PASSES.values():
        programs.clear()


def _no_gradients():
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

    return mock.patch.multiple(jax, value_and_grad=value_and_grad, grad=grad, vjp=vjp)


# Method of a network -> what is no array in a call -> the jitted function of arrays
_PASSES = {"apply": {}, "init_with_output": {}}
_JIT = jax.jit


def _share_calls(method):
    """A method of a network, traced once for all equal calls."""
    programs = _PASSES[method.__name__]

    @functools.wraps(method)
    def call(net, *arguments, **options):
        leaves, tree = jax.tree.flatten((arguments, options))
        arrays = [x for x in leaves if isinstance(x, jax.Array | np.ndarray)]
        fixed = [None if isinstance(x, jax.Array | np.ndarray) else x for x in leaves]

        def run(arrays):
            rest = iter(arrays)
            given = [next(rest) if x is None else x for x in fixed]
            arguments, options = jax.tree.unflatten(tree, given)
            return method(net, *arguments, **options)

        key = net, tree, (*fixed,)
        return programs.setdefault(key, _JIT(run))(arrays)

    return call
