"""Layers of several networks under `vmap`: the channels of all in a row."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxcl import sharding
from jaxcl.nets import norm, under_vmap

NETWORKS, ROWS, SIDE, CHANNELS = 3, 8, 4, 5


def test_the_channels_of_networks_follow_one_another():
    seen = []

    def function(count, x, y):
        seen.append((count, x.shape, y.shape))
        return {"first": x, "sums": x.sum(0), "numbers": jnp.arange(x.shape[-1])}

    x = jnp.arange(24.0).reshape(NETWORKS, 2, 4)
    found = jax.vmap(under_vmap.in_channels(function))(x, x[:, 0])
    assert seen[-1] == (3, (2, 12), (12,))
    chex.assert_trees_all_equal(found["first"], x)
    chex.assert_trees_all_equal(found["sums"], x.sum(1))
    assert found["numbers"].tolist() == np.arange(12).reshape(3, 4).tolist()


def test_what_networks_have_in_common_is_not_put_in_a_row():
    def function(count, x, y):
        assert count == 1
        return x * y.sum()

    x, y = jnp.arange(6.0).reshape(NETWORKS, 2), jnp.ones(2)
    made = under_vmap.in_channels(function)
    chex.assert_trees_all_equal(jax.vmap(made, (0, None))(x, y), 2 * x)
    chex.assert_trees_all_equal(made(x[0], y), 2 * x[0])  # no vmap


def test_a_vmap_within_a_network_leaves_the_outer_one_its_way():
    seen = []

    def function(count, x, y):
        seen.append((count, x.shape, y.shape))
        return x * y

    x, y = jnp.arange(24.0).reshape(NETWORKS, 4, 2), jnp.arange(6.0).reshape(3, 2)
    within = jax.vmap(under_vmap.in_channels(function), (0, None))
    chex.assert_trees_all_equal(jax.vmap(within)(x, y), x * y[:, None])
    assert seen[-1] == (3, (6,), (6,))


@pytest.mark.parametrize("groups", [1, 2])
def test_batch_norm_sums_over_the_channels_of_all_networks(groups):
    """Values, slopes and running statistics are those of `vmap` as JAX has it."""
    rng = np.random.default_rng(0)
    x = jnp.float32(rng.normal(1, 2, (NETWORKS, ROWS, SIDE, SIDE, CHANNELS)))
    slope = jnp.float32(rng.normal(size=x.shape))
    layer = norm.BatchNorm()
    keys = jax.random.split(jax.random.key(0), NETWORKS)
    variables = jax.vmap(lambda key, x: layer.init(key, x, train=True))(keys, x)
    params = jax.tree.map(
        lambda p: p + jnp.float32(rng.normal(size=p.shape)), variables["params"]
    )

    def of_one(params, stats, x, slope):
        def apply(params, x):
            tree = {"params": params, "batch_stats": stats}
            options = {"train": True, "groups": groups, "mutable": ["batch_stats"]}
            return layer.apply(tree, x, **options)

        made, backward, after = jax.vjp(apply, params, x, has_aux=True)
        return made, backward(slope), after

    def program():
        """A new function each time: `jax.jit` would take the other's trace."""
        return jax.vmap(lambda *own: of_one(*own))

    arguments = params, variables["batch_stats"], x, slope
    with sharding.for_elsewhere(platform="gpu"):
        usual = jax.jit(program())(*arguments)
        text = str(jax.make_jaxpr(program())(*arguments))
        with under_vmap.networks("grouped"):
            found = jax.jit(program())(*arguments)
            in_a_row = str(jax.make_jaxpr(program())(*arguments))
    chex.assert_trees_all_close(found, usual, rtol=1e-4, atol=1e-5)
    rows = f"f32[2,{ROWS // groups},{groups},{SIDE},{SIDE},{NETWORKS * CHANNELS}]"
    assert in_a_row.count(rows) == 2 and rows not in text  # forward and backward
