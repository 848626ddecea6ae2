"""The convolution of the networks: XLA's numbers, in the form quick on a CPU."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from helpers import jaxprs
from jaxcl import sharding
from jaxcl.nets import conv, resnet, under_vmap

# rows, side, channels, filters, kernel, stride, padding; 2**16 numbers out and more.
CASES = [
    (10, 34, 3, 8, 3, 1, "SAME"),
    (13, 34, 5, 20, 3, 2, ((1, 1), (1, 1))),
    (70, 18, 4, 6, 1, 1, ((0, 0), (0, 0))),
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
    return arguments, function(jax.lax.conv_general_dilated), function(conv.conv)


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


def of_three(case, mapped):
    """Arguments of three networks, and outputs with their slopes: lax's and ours.

    Args:
      mapped: the axes of x and kernel that `vmap` maps, or None.
    """
    arguments, theirs, ours = functions(case)
    factors = jnp.arange(1.0, 4.0).reshape(3, 1, 1, 1, 1)
    arguments = [
        x if axis is None else x * factors
        for x, axis in zip(arguments, mapped, strict=True)
    ]
    given = np.random.default_rng(3).normal(
        size=jax.vmap(theirs, mapped)(*arguments).shape
    )

    def slopes(function):
        def of_one(x, kernel, given):
            made, backward = jax.vjp(function, x, kernel)
            return made, backward(given)

        return jax.vmap(of_one, (*mapped, 0))

    return (*arguments, given.astype("f4")), slopes(theirs), slopes(ours)


@pytest.mark.parametrize("mapped", [(0, 0), (None, 0), (0, None)])
@pytest.mark.parametrize("case", [CASES[0], SMALL])
def test_networks_apart_have_a_convolution_each(case, mapped):
    """Of three networks, of one with three batches, and of three with one batch."""
    arguments, theirs, ours = of_three(case, mapped)
    with under_vmap.networks_apart():
        text = str(jax.make_jaxpr(ours)(*arguments))
        found = jax.jit(ours)(*arguments)
    close(found, theirs(*arguments))
    groups = "_group_count=3"
    # Gradients of one kernel for each of three batches are a grouped convolution.
    assert (groups in text) == (mapped[1] is None)
    assert groups in str(jax.make_jaxpr(theirs)(*arguments))


@pytest.mark.parametrize("own", [1, 2])
def test_batches_of_each_of_several_networks(own):
    """Two `vmap`s: the inner one over two batches that share a kernel of their network.

    Args:
      own: groups that the convolution has by itself.
    """
    rng = np.random.default_rng(4)
    x = jnp.float32(rng.normal(size=(3, 2, 5, 8, 8, 4)))
    kernel = jnp.float32(rng.normal(size=(3, 3, 3, 4 // own, 6)))
    weights = jnp.float32(rng.normal(size=(3, 2, 5, 4, 4, 6)))
    options = {"dimension_numbers": ("NHWC", "HWIO", "NHWC")}
    options["feature_group_count"] = own

    def slopes(made):
        def loss(kernel, x, weights):
            return jnp.vdot(made(x, kernel, (2, 2), "SAME", **options), weights)

        of_batches = jax.vmap(jax.grad(loss, (0, 1)), (None, 0, 0))
        return jax.vmap(of_batches)

    arguments = kernel, x, weights
    with sharding.for_elsewhere(platform="gpu"), under_vmap.networks_apart():
        found = jax.jit(slopes(conv.conv))(*arguments)
    close(found, slopes(jax.lax.conv_general_dilated)(*arguments))


def close(found, want):
    jax.tree.map(
        lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-2), found, want
    )


def test_bfloat16_gradients_are_added_in_float32():
    case = (64, 34, 4, 4, 3, 1, "SAME")
    arguments, theirs, ours = functions(case, "bfloat16")
    given = jnp.ones((64, 34, 34, 4), "bfloat16")
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
        given = jax.eval_shape(ours, *arguments)
        back = gradients(ours, jnp.zeros(given.shape))
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
