"""Programs computed by NumPy, without XLA, give what XLA gives."""

import jax
import jax.numpy as jnp
import numpy as np

from helpers import interpreted


def program(key, x, count):
    """Loops, branches, draws, slices and reductions of x f32[4,6]."""

    def turn(carry, row):
        return carry * 0.5 + row, (carry.sum(), jnp.sort(row)[::-1])

    carry, rows = jax.lax.scan(turn, x[0], x, reverse=True)
    start = 0, jax.lax.stop_gradient(x)  # no gradient enters a loop of any length
    _, doubled = jax.lax.while_loop(
        lambda pair: pair[0] < count, lambda pair: (pair[0] + 1, pair[1] * 2), start
    )
    # Each row has another number of turns.
    halved = jax.vmap(
        lambda row: jax.lax.while_loop(
            lambda row: jnp.abs(row).sum() > 1, lambda row: row / 2, row
        )
    )(jax.lax.stop_gradient(x) * jnp.array([[1], [4], [0.1], [16]], x.dtype))
    branch = jax.lax.switch(count, [jnp.sin, jnp.cos, jnp.tanh], x)
    noise = jax.random.normal(key, (3, 2))
    keys = jax.random.split(key, 3)
    padded = jax.lax.pad(x, jnp.float32(0.5), ((1, 2, 1), (0, 1, 0)))
    inside = jax.lax.dynamic_slice(padded, (count, 5), (3, 4))
    return {
        "scan": (carry, rows),
        "while": (doubled, halved),
        "branch": branch,
        "noise": noise,
        "keys": jax.random.key_data(keys),
        "moved keys": [jax.random.key_data(x) for x in (keys[::-1][1:], keys[count])],
        "folded": jax.random.key_data(jax.random.fold_in(keys[2], count)),
        "rows of noise": jax.vmap(lambda key: jax.random.uniform(key, (2, 2)))(keys),
        "bytes": jax.random.bits(key, (3,), "uint8"),
        "kernel": jax.nn.initializers.lecun_normal()(key, (3, 3, 2, 4)),
        "pad": (padded, inside, padded.at[count, 1:3].set(7.0)),
        "running": (jnp.cumsum(x[::-1], axis=1), jax.lax.cummax(x, 0, reverse=True)),
        "places": (x.argmax(1), x.argmin(0), x[jnp.array([2, 0]), :3]),
        "products": (x @ x.T, jnp.einsum("ab,ac->abc", x, x), x[None] @ x[None].mT),
        "logic": (x > 0) & ~(x < -1) | jnp.isfinite(1 / (x - x)),
        "whole": (count // -2, count % 3, jnp.int8(count) << 1),
        "parts": (jnp.split(x, [1, 4], axis=1), jnp.stack([x, -x], 1), jnp.clip(x, -1)),
        "logs": jax.nn.log_softmax(x) + jax.nn.gelu(x) + jax.nn.sigmoid(x),
    }


def test_a_program_and_its_gradient_are_those_of_xla():
    key, x = jax.random.key(3), np.random.default_rng(0).normal(size=(4, 6))
    given = key, x.astype(np.float32), np.int32(2)

    def check(function):
        found, want = interpreted.jit(function)(*given), jax.jit(function)(*given)
        assert jax.tree.structure(found) == jax.tree.structure(want)
        for one, other in zip(*map(jax.tree.leaves, (found, want)), strict=True):
            assert one.dtype == other.dtype
            np.testing.assert_allclose(one, other, rtol=2e-6, atol=2e-6)

    check(program)

    def loss(key, x, count):
        leaves = jax.tree.leaves(program(key, x, count))
        return sum(jnp.sum(y**2) for y in leaves if y.dtype == x.dtype)

    check(jax.grad(loss, argnums=1))


def test_options_are_fixed_and_a_trace_goes_through():
    double = interpreted.jit(lambda x, *, times: x * times, static_argnames="times")
    assert double(3.0, times=2) == 6 and double(3.0, times=4) == 12
    assert jax.grad(lambda x: double(x, times=5))(1.0) == 5
