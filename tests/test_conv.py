"""The convolution of the networks: XLA's numbers, in the form quick on a CPU."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from helpers import jaxprs
from jaxcl import sharding
from jaxcl.nets import cpu, resnet

# rows, side, channels, filters, kernel, stride, padding; 2**16 numbers out and more.
CASES = [
    (10, 34, 3, 8, 3, 1, "SAME"),
    (13, 34, 5, 20, 3, 2, ((1, 1), (1, 1))),
    (70, 18, 4, 6, 1, 2, ((0, 0), (0, 0))),
    (70, 17, 4, 6, 1, 2, "SAME"),
]
SMALL = (12, 8, 4, 4, 3, 1, "SAME")


def functions(case, dtype="f4"):
    """Arguments of a convolution; lax's and ours, of (x, kernel)."""
    rows, side, channels, filters, size, stride, padding = case
    rng = np.random.default_rng(2)
    x = rng.normal(size=(rows, side, side, channels))
    kernel = rng.normal(size=(size, size, channels, filters))
    options = {"dimension_numbers": ("NHWC", "HWIO", "NHWC")}

    def function(made):
        return lambda x, kernel: made(x, kernel, (stride,) * 2, padding, **options)

    arguments = jnp.asarray(x, dtype), jnp.asarray(kernel, dtype)
    return arguments, function(jax.lax.conv_general_dilated), function(cpu.conv)


def gradients(function, given):
    return jax.jit(lambda x, kernel: jax.vjp(function, x, kernel)[1](given))


@pytest.mark.parametrize("case", [*CASES, SMALL])
def test_value_and_gradients_are_those_of_lax(case):
    arguments, theirs, ours = functions(case)
    want = theirs(*arguments)
    np.testing.assert_allclose(ours(*arguments), want, rtol=1e-4, atol=1e-4)
    given = np.random.default_rng(3).normal(size=want.shape).astype("f4")
    found = gradients(ours, given)(*arguments)
    for got, want in zip(found, gradients(theirs, given)(*arguments), strict=True):
        assert got.shape == want.shape and got.dtype == want.dtype
        np.testing.assert_allclose(got, want, rtol=1e-4, atol=2e-3)


def test_bfloat16_gradients_are_added_in_float32():
    """Seven pieces of eight images each are too small to be added to the first."""
    (x, kernel), theirs, ours = functions((64, 66, 4, 4, 3, 1, "SAME"), "bfloat16")
    x = (1 + 0.1 * x).at[8:].multiply(0.0015)
    arguments, given = (x, kernel), jnp.ones((64, 66, 66, 4), "bfloat16")
    exact = gradients(theirs, given.astype("f4"))(*(x.astype("f4") for x in arguments))
    found = gradients(ours, given)(*arguments)[1]
    assert found.dtype == jnp.bfloat16
    # Each piece is rounded once, by 2**-9 at most, and the sum once more.
    error = np.abs(np.asarray(found, "f4") - exact[1]).max()
    assert error < 2**-8 * np.abs(exact[1]).max()


def convolutions(function, *arguments):
    """Shapes of the inputs of each convolution of a program."""
    program = jax.make_jaxpr(function)(*arguments).jaxpr
    return [
        equation.invars[0].aval.shape
        for equation in jaxprs.equations(program)
        if equation.primitive.name == "conv_general_dilated"
    ]


def test_only_large_maps_are_cut_in_pieces_and_only_on_a_cpu(monkeypatch):
    def count(case):
        arguments, _, ours = functions(case)
        shapes = jax.eval_shape(ours, *arguments)
        back = gradients(ours, jnp.zeros(shapes.shape))
        return len(convolutions(back, *arguments)) - 1  # but for x's gradient

    many_filters = (10, 8, 128, 128, 3, 1, "SAME")
    assert [count(c) for c in (CASES[0], SMALL, many_filters)] == [2 + 1, 2, 2]
    (x, kernel), _, ours = functions(CASES[0])
    assert convolutions(ours, x, kernel) == [(10, 34, 34, 4)]
    monkeypatch.setattr(sharding, "on_cpu", lambda: False)
    assert count(CASES[0]) == 2
    (x, kernel), _, ours = functions(CASES[0])  # jax remembers what it traced
    assert convolutions(ours, x, kernel) == [(10, 34, 34, 3)]


def test_the_networks_convolve_by_it():
    net, x = resnet.resnet(depth=10, width=4), jnp.zeros((2, 8, 8, 3))
    tree = jax.eval_shape(lambda: net.init(jax.random.key(0), x))
    assert convolutions(net.apply, tree, x)[0] == (2, 8, 8, 4)
    assert tree["params"]["conv1"]["kernel"].shape == (3, 3, 3, 4)
