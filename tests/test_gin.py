"""The isomorphism network against a float64 twin over dense matrices."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from helpers import graph_sets, twins
from jaxcl.data import graphs
from jaxcl.nets import gin

SMALL = dict(nodes=30, edges=80, graphs=5)
LARGE = dict(nodes=47, edges=131, graphs=9)
ROWS = [4, 0, 2, 5]
MADE = graph_sets.random_set(6, np.random.default_rng(0), least=2, features=3)
NETS = {
    "literature": gin.GIN(width=4),
    "other": gin.GIN(width=2, layers=2, eps=0.6, momentum=0.7),
}
TRAIN = {"train": True, "mutable": "batch_stats"}


@functools.partial(jax.jit, static_argnums=(0, 3))
def apply(net, tree, batch, train):
    kind = TRAIN if train else {"mutable": "batch_stats"}
    return net.apply(tree, batch, **kind)


def variables(net, batch):
    """Parameters and statistics away from 0 and 1, so that each one matters."""
    tree = jax.jit(net.init)(jax.random.key(0), batch)
    rng = np.random.default_rng(2)  # with 0 a unit lies at the kink of its ReLU

    def shake(path, leaf):
        noise = rng.normal(size=leaf.shape)
        if path[-1].key == "kernel":
            return leaf
        return 0.8 + np.abs(noise) if path[-1].key in ("scale", "var") else 0.3 * noise

    return jax.tree_util.tree_map_with_path(shake, tree)


def twin(net, params, stats, batch, train):
    """Embeddings and the statistics after them, in float64 from the definition."""
    given = list(graph_sets.dense(batch))
    cuts = np.cumsum([len(x) for x, _ in given])[:-1]
    x, outputs, after = [x for x, _ in given], [], {}
    for layer in range(1, net.layers + 1):
        first, second = (params[f"conv{layer}"][f"linear{i}"] for i in (1, 2))
        sums = [a @ y + (1 + net.eps) * y for y, (_, a) in zip(x, given, strict=True)]
        x = np.concatenate(sums) @ first["kernel"] + first["bias"]
        x = np.maximum(x, 0) @ second["kernel"] + second["bias"]
        x, bn = np.maximum(x, 0), f"bn{layer}"
        mean, var = stats[bn]["mean"], stats[bn]["var"]
        if train:
            mean, var, m = x.mean(0), x.var(0), net.momentum
            after[bn] = {
                "mean": m * stats[bn]["mean"] + (1 - m) * mean,
                "var": m * stats[bn]["var"] + (1 - m) * x.var(0, ddof=1),
            }
        x = (x - mean) / np.sqrt(var + 1e-5) * params[bn]["scale"] + params[bn]["bias"]
        x = np.split(x, cuts)
        outputs.append(np.stack([y.sum(0) for y in x]))
    return np.concatenate(outputs, axis=1), after


@pytest.mark.parametrize("train", [True, False])
@pytest.mark.parametrize("name", NETS)
def test_equals_dense_matrices_in_float64(name, train):
    net, batch = NETS[name], graphs.pad(MADE, ROWS, **SMALL)
    tree = variables(net, batch)
    want, moved = twin(net, tree["params"], tree["batch_stats"], batch, train)
    found, after = apply(net, tree, batch, train)
    if train:
        chex.assert_trees_all_close(after["batch_stats"], moved, rtol=1e-5, atol=1e-6)
    assert found.shape == (5, net.num_features) and found.dtype == jnp.float32
    np.testing.assert_allclose(found, want, rtol=1e-4, atol=1e-5)
    assert not np.any(found[4])  # an empty slot


@pytest.mark.parametrize("name", NETS)
def test_gradients_equal_differences_of_the_twin(name):
    net, batch = NETS[name], graphs.pad(MADE, ROWS, **SMALL)
    tree = jax.tree.map(np.float64, variables(net, batch))
    leaves, structure = jax.tree.flatten(tree["params"])
    weight = np.random.default_rng(1).normal(size=(5, net.num_features))
    stats = tree["batch_stats"]

    def loss(features, *leaves):
        given = {"params": jax.tree.unflatten(structure, leaves), "batch_stats": stats}
        found, _ = net.apply(given, batch._replace(features=features), **TRAIN)
        return jnp.sum(weight * found)

    def wanted(features, *leaves):
        params = jax.tree.unflatten(structure, leaves)
        moved = batch._replace(features=features)
        return np.sum(weight * twin(net, params, stats, moved, True)[0])

    features = np.asarray(batch.features, np.float64)
    twins.check(loss, wanted, [features, *leaves], range(len(leaves) + 1))


def test_filling_changes_nothing_whatever_it_holds():
    net = NETS["literature"]
    small, large = (graphs.pad(MADE, ROWS, **layout) for layout in (SMALL, LARGE))
    features = np.where(large.node_mask[:, None], large.features, np.nan)
    large = large._replace(features=features)
    tree = variables(net, small)

    @jax.jit
    def step(params, batch):
        def loss(params):
            found, after = net.apply(tree | {"params": params}, batch, **TRAIN)
            return jnp.sum(found**2), (found[:4], after)

        return jax.value_and_grad(loss, has_aux=True)(params)

    both = step(tree["params"], small), step(tree["params"], large)
    assert np.any(both[0][1]["conv1"]["linear1"]["kernel"])
    chex.assert_trees_all_close(*both, rtol=1e-4, atol=1e-4)
    found, _ = apply(net, tree, large, True)
    assert not np.any(found[4:])
