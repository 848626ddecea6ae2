"""GCN and GIN against float64 twins over dense matrices, graph by graph."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from helpers import graph_sets, twins
from jaxcl.data.stream import graph_arrays
from jaxcl.nets import gcn, gin

SMALL = dict(nodes=30, edges=80, graphs=5)
LARGE = dict(nodes=47, edges=131, graphs=9)
ROWS = [4, 0, 2, 5]
MADE = graph_sets.random_set(6, np.random.default_rng(0), least=2, features=3)


@functools.partial(jax.jit, static_argnums=0)
def init(net, batch):
    return net.init(jax.random.key(0), batch)


@functools.partial(jax.jit, static_argnums=0)
def evaluate(net, tree, batch, key=None):
    return net.apply(tree, batch, key=key)


def variables(net, batch):
    """Parameters and statistics away from 0 and 1, so that each one matters."""
    tree = init(net, batch)
    rng = np.random.default_rng(2)  # with 0 a unit lies at the kink of its ReLU

    def shake(path, leaf):
        noise = rng.normal(size=leaf.shape)
        if path[-1].key == "kernel":
            return leaf
        return 0.8 + np.abs(noise) if path[-1].key in ("scale", "var") else 0.3 * noise

    return jax.tree_util.tree_map_with_path(shake, tree)


@functools.partial(jax.jit, static_argnums=0)
def train_apply(net, tree, batch, key=None):
    return net.apply(tree, batch, train=True, mutable="batch_stats", key=key)


# --- the same in float64, from the definitions --------------------------------


def np_convolved(net, p, x, matrices):
    """What one layer makes of all nodes, before its batch norm."""
    if isinstance(net, gin.GIN):
        pairs = zip(x, matrices, strict=True)
        x = np.concatenate([a @ y + (1 + net.eps) * y for y, a in pairs])
        for name in ("linear1", "linear2"):
            x = np.maximum(x @ p[name]["kernel"] + p[name]["bias"], 0)
        return x
    rows = []
    for y, matrix in zip(x, matrices, strict=True):
        hat = matrix + np.eye(len(matrix))
        scale = np.diag(1 / np.sqrt(hat.sum(1)))
        rows.append(scale @ hat @ scale @ y @ p["kernel"])
    return np.concatenate(rows) + p["bias"]


def np_net(net, params, stats, batch, train):
    """Embeddings and the statistics after them."""
    x, matrices = zip(*graph_sets.dense(batch), strict=True)
    cuts = np.cumsum([len(y) for y in x])[:-1]
    outputs, after = [], {}
    for layer in range(1, net.layers + 1):
        x, bn = np_convolved(net, params[f"conv{layer}"], x, matrices), f"bn{layer}"
        mean, var = stats[bn]["mean"], stats[bn]["var"]
        if train:
            mean, var, m = x.mean(0), x.var(0), net.momentum
            after[bn] = {
                "mean": m * stats[bn]["mean"] + (1 - m) * mean,
                "var": m * stats[bn]["var"] + (1 - m) * x.var(0, ddof=1),
            }
        x = (x - mean) / np.sqrt(var + 1e-5)
        if bn in params:
            x = x * params[bn]["scale"] + params[bn]["bias"]
        if isinstance(net, gcn.GCN):
            x = np.where(x > 0, x, 0.01 * x)
        x = np.split(x, cuts)
        outputs.append([y.sum(0) for y in x])
    return np.concatenate([np.stack(o) for o in outputs], axis=1), after


# Widths above and below the 3 features: either order of the two products.
NETS = {
    "wide": gcn.GCN(width=4, dropout=0.0),
    "narrow": gcn.GCN(width=2, layers=3, dropout=0.0, affine=True, momentum=0.7),
    "literature": gin.GIN(width=4),
    "other": gin.GIN(width=2, layers=2, eps=0.6, momentum=0.7),
}


@pytest.mark.parametrize("train", [True, False])
@pytest.mark.parametrize("name", NETS)
def test_equals_dense_matrices_in_float64(name, train):
    net, batch = NETS[name], graph_arrays.pad_batch(MADE, ROWS, **SMALL)
    tree = variables(net, batch)
    want, want_stats = np_net(net, tree["params"], tree["batch_stats"], batch, train)
    if train:
        got, updated = train_apply(net, tree, batch)
        chex.assert_trees_all_close(
            updated["batch_stats"], want_stats, rtol=1e-5, atol=1e-6
        )
    else:
        got = evaluate(net, tree, batch)
    assert got.shape == (5, net.num_features) and got.dtype == jnp.float32
    np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-5)
    assert not np.any(got[4])  # an empty slot


@pytest.mark.parametrize("name", NETS)
def test_gradients_equal_differences_of_the_twin(name):
    net, batch = NETS[name], graph_arrays.pad_batch(MADE, ROWS, **SMALL)
    tree = jax.tree.map(np.asarray, variables(net, batch))
    leaves, structure = jax.tree.flatten(tree["params"])
    leaves = [np.asarray(leaf, np.float64) for leaf in leaves]
    weight = np.random.default_rng(1).normal(size=(5, net.num_features))
    paths = [p[-1].key for p, _ in jax.tree_util.tree_leaves_with_path(tree["params"])]
    owner = [p[0].key for p, _ in jax.tree_util.tree_leaves_with_path(tree["params"])]

    def loss(features, *leaves):
        given = {"params": jax.tree.unflatten(structure, leaves)}
        given["batch_stats"] = tree["batch_stats"]
        out = net.apply(given, batch._replace(features=features), **kind)[0]
        return jnp.sum(weight * out)

    def twin(features, *leaves):
        params = jax.tree.unflatten(structure, leaves)
        moved = batch._replace(features=features)
        return np.sum(weight * np_net(net, params, tree["batch_stats"], moved, True)[0])

    kind = {"train": True, "mutable": "batch_stats"}
    features = np.asarray(batch.features, np.float64)
    # The mean that batch norm takes off cancels the offset of a GCN's convolution.
    cancels = isinstance(net, gcn.GCN)
    moving = [
        i + 1
        for i, (who, what) in enumerate(zip(owner, paths, strict=True))
        if not (cancels and who.startswith("conv") and what == "bias")
    ]
    with jax.enable_x64(True):
        for i in {*range(1, len(leaves) + 1)} - {*moving}:
            gradient = jax.jit(jax.grad(loss, argnums=i))(features, *leaves)
            np.testing.assert_allclose(gradient, 0, atol=1e-9)

    def rest(values):
        given, moved = list(leaves), dict(zip(moving, values, strict=True))
        return [moved.get(i + 1, leaf) for i, leaf in enumerate(given)]

    twins.check(
        lambda x, *values: loss(x, *rest(values)),
        lambda x, *values: twin(x, *rest(values)),
        [features, *(leaves[i - 1] for i in moving)],
        range(len(moving) + 1),
    )


# --- filling and order --------------------------------------------------------

DROPS = gcn.GCN(width=4, dropout=0.4)


@pytest.mark.parametrize("layout", [LARGE, dict(nodes=200, edges=80, graphs=5)])
@pytest.mark.parametrize("net", [DROPS, NETS["literature"]], ids=["gcn", "gin"])
def test_filling_changes_nothing(net, layout):
    key = jax.random.key(1) if net is DROPS else None
    small, large = (graph_arrays.pad_batch(MADE, ROWS, **x) for x in (SMALL, layout))
    tree = variables(net, small)
    want, want_stats = train_apply(net, tree, small, key)
    got, stats = train_apply(net, tree, large, key)
    np.testing.assert_allclose(got[:4], want[:4], rtol=1e-4, atol=1e-4)
    assert not np.any(got[4:])
    chex.assert_trees_all_close(stats, want_stats, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("net", [DROPS, NETS["literature"]], ids=["gcn", "gin"])
def test_what_the_filling_holds_does_not_matter(net):
    batch = graph_arrays.pad_batch(MADE, ROWS, **LARGE)
    features = np.where(batch.node_mask[:, None], batch.features, np.nan)
    senders = np.where(batch.edge_mask, batch.senders, 0)
    receivers = np.where(batch.edge_mask, batch.receivers, len(features) - 1)
    other = batch._replace(features=features, senders=senders, receivers=receivers)
    tree, key = variables(net, batch), jax.random.key(1) if net is DROPS else None

    def loss(params, batch):
        out, stats = train_apply(net, tree | {"params": params}, batch, key)
        return jnp.sum(out**2), (out, stats)

    value = jax.jit(jax.value_and_grad(loss, has_aux=True))
    same = value(tree["params"], batch), value(tree["params"], other)
    assert np.isfinite(same[1][0][0])
    assert any(np.any(x) for x in jax.tree.leaves(same[0][1]["conv1"]))
    chex.assert_trees_all_close(*same, rtol=0, atol=0)
    jax.tree.map(
        np.testing.assert_array_equal,
        evaluate(net, tree, batch),
        evaluate(net, tree, other),
    )


def test_masked_nodes_and_edges_are_as_if_they_were_not_there():
    whole = graph_sets.graph_set([[(0, 1), (1, 2), (2, 3)], [(0, 1)]], [4, 2])
    batch = graph_arrays.pad_batch(whole, [0, 1], nodes=8, edges=10, graphs=2)
    gone = ~np.isin(np.arange(8), [1])
    live = batch.edge_mask & gone[batch.senders] & gone[batch.receivers]
    batch = batch._replace(node_mask=batch.node_mask & gone, edge_mask=live)
    part = graph_sets.graph_set(
        [[(1, 2)], [(0, 1)]], [3, 2], whole.features[[0, 2, 3, 4, 5]]
    )
    want = graph_arrays.pad_batch(part, [0, 1], nodes=5, edges=4, graphs=2)
    net = NETS["wide"]
    tree = variables(net, batch)
    chex.assert_trees_all_close(
        train_apply(net, tree, batch),
        train_apply(net, tree, want),
        rtol=1e-5,
        atol=1e-5,
    )


# --- parts --------------------------------------------------------------------


def test_dropout_zeroes_entries_by_themselves_and_scales_the_rest():
    loose = graph_sets.graph_set([[]] * 10, [200] * 10)
    batch = graph_arrays.pad_batch(loose, range(10), nodes=2000, edges=1, graphs=10)
    x = jnp.arange(1.0, 17.0) * jnp.ones((2000, 1))
    y = np.asarray(gcn.dropout(jax.random.key(0), x, batch, rate=0.3)) / x
    values = np.unique(np.round(y, 4))
    np.testing.assert_allclose(values, [0, 1 / 0.7], atol=1e-3)
    # 32,000 draws: the share is known to 0.26 %; columns and rows are independent.
    dropped = y == 0
    assert abs(dropped.mean() - 0.3) < 0.01
    assert np.abs(np.corrcoef(dropped.T) - np.eye(16)).max() < 0.12
    by_graph = dropped.reshape(10, -1)
    assert np.abs(np.corrcoef(by_graph) - np.eye(10)).max() < 0.08


def test_statistics_of_fewer_than_two_nodes_do_not_move():
    bn = gcn.MaskedBatchNorm()
    x = jnp.array([[3.0], [9.0], [5.0]])
    tree = {"batch_stats": {"mean": jnp.array([2.0]), "var": jnp.array([4.0])}}

    def apply(*mask):
        kind = {"train": True, "mutable": "batch_stats"}
        y, updated = bn.apply(tree, x, jnp.array(mask), **kind)
        return y, updated["batch_stats"]

    for mask in ((False, True, False), (False, False, False)):
        y, stats = apply(*mask)
        assert np.isfinite(y).all()
        chex.assert_trees_all_close(stats, tree["batch_stats"], rtol=0, atol=0)
    y, stats = apply(True, False, True)
    # Mean 4, variance 1 of all and 2 of a sample.
    np.testing.assert_allclose(y[jnp.array([0, 2]), 0], [-1, 1], atol=1e-4)
    np.testing.assert_allclose([stats["mean"][0], stats["var"][0]], [2.2, 3.8])
