"""config.accumulate: batches that pass the encoder in pieces."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from helpers import run_directories, toy
from jaxcl.nets import mlp, pieces, resnet

COUNT, GROUPS = 3, 2
ONLINE = {**toy.ONLINE, "replay.size": 24, "batch_size": 24}
# Losses of every kind; no encoder here has a batch norm.
METHODS = {
    "simclr": {"method.base": "simclr"},  # compares all rows
    "finetune": {**ONLINE, "method": {"name": "finetune"}},  # a mean over rows
    "er": {**ONLINE, "method": {"name": "er"}},  # two batches in a step
}


def after_a_step(workdir, accumulate, **changes):
    """The state after a step from one that no training made."""
    mlp = {"name": "mlp", "widths": (24, 16)}
    work = run_directories.untried(
        workdir, accumulate=accumulate, encoder=mlp, **changes
    )
    state = run_directories.random_state(work)
    resident, batches, _ = toy.first_call(work)
    rows = jax.tree.map(lambda x: x[0], batches)
    image = work.stream.dataset.train.images
    batch = {"index": rows["index"], "image": image[rows["index"]]}
    batch["label"] = resident["label"][rows["index"]]
    return jax.jit(work.method.step)(state, batch)


@pytest.mark.parametrize("name", METHODS)
def test_a_step_is_that_of_the_whole_batch(name, tmp_path):
    want, told = after_a_step(tmp_path / "whole", 1, **METHODS[name])
    have, ours = after_a_step(tmp_path / "pieces", 4, **METHODS[name])
    assert told["grad_norm"] > 1e-3
    chex.assert_trees_all_close(have.params, want.params, rtol=1e-4, atol=1e-6)
    chex.assert_trees_all_close(ours, told, rtol=1e-4, atol=1e-6)


def test_each_piece_is_normalised_by_itself():
    net = resnet.conv_net(width=4)
    rng = np.random.default_rng(0)
    images = rng.normal(size=(4 * COUNT * GROUPS, 8, 8, 1)).astype(np.float32)
    weight = rng.normal(size=(len(images), net.num_features)).astype(np.float32)
    start = net.init(jax.random.key(0), images[:1])
    params, stats = start["params"], start["batch_stats"]

    def loss(params, encoder, images, weight, stats):
        features, moved = encoder.apply(
            {"params": params, "batch_stats": stats},
            images,
            train=True,
            groups=GROUPS,
            mutable=["batch_stats"],
        )
        return jnp.mean(features * weight), moved["batch_stats"]

    slope = jax.value_and_grad(loss, has_aux=True)
    example = np.arange(len(images)) // GROUPS
    grads, values, moved = [], [], stats
    for piece in range(COUNT):
        rows = example % COUNT == piece
        (value, moved), grad = slope(params, net, images[rows], weight[rows], moved)
        values.append(value)
        grads.append(grad)
    cut = pieces.PiecewiseEncoder(net, COUNT)
    (value, stats), have = slope(params, cut, images, weight, stats)
    mean = jax.tree.map(lambda *x: sum(x) / COUNT, *grads)
    np.testing.assert_allclose(value, np.mean(values), rtol=1e-5)
    chex.assert_trees_all_close(stats, moved, rtol=1e-5, atol=1e-6)
    chex.assert_trees_all_close(have, mean, rtol=1e-4, atol=1e-6)


class Tally:
    """An encoder that doubles its images and counts the passes in its statistics."""

    def apply(self, variables, images, *, train, groups, mutable):
        seen = images.reshape(-1, groups, 1)
        stats = {"passes": variables["batch_stats"]["passes"] + 1, "last": seen[-1, 0]}
        return 2 * seen.reshape(-1, 1) * variables["params"], {"batch_stats": stats}


def test_pieces_pass_in_turn_and_rows_keep_their_order():
    rows = COUNT * GROUPS * 4
    images = jnp.arange(rows, dtype=jnp.float32).reshape(rows, 1)
    stats = {"passes": jnp.int32(0), "last": jnp.zeros(1)}
    features, moved = pieces.PiecewiseEncoder(Tally(), COUNT).apply(
        {"params": jnp.float32(1), "batch_stats": stats},
        images,
        train=True,
        groups=GROUPS,
        mutable=["batch_stats"],
    )
    np.testing.assert_array_equal(features, 2 * images)
    assert moved["batch_stats"]["passes"] == COUNT
    # The last piece has every third example, to the last.
    np.testing.assert_array_equal(moved["batch_stats"]["last"], images[-GROUPS])


class Noise:
    """An encoder of nothing but a draw by its key."""

    def apply(self, variables, images, *, train, groups, mutable, key):
        return jax.random.normal(key, (len(images), 1)), {}


def test_pieces_draw_by_keys_of_their_own():
    rows = COUNT * GROUPS * 4
    features, _ = pieces.PiecewiseEncoder(Noise(), COUNT).apply(
        {"params": {}},
        jnp.zeros((rows, 1)),
        train=True,
        groups=GROUPS,
        mutable=["batch_stats"],
        key=jax.random.key(0),
    )
    assert len(np.unique(features)) == rows


def test_evaluation_passes_all_rows_together():
    net = resnet.conv_net(width=4)
    images = np.ones((5, 8, 8, 1), np.float32)  # no multiple of the pieces
    start = net.init(jax.random.key(0), images)
    want = net.apply(start, images, train=False)
    have = pieces.PiecewiseEncoder(net, COUNT).apply(start, images, train=False)
    np.testing.assert_array_equal(have, want)


def temporary(net):
    """Count the bytes that a gradient needs beside its inputs and outputs."""
    images = jax.ShapeDtypeStruct((2048, 4, 4, 1), np.float32)
    start = jax.eval_shape(net.init, jax.random.key(0), images)

    def loss(params, images):
        features, _ = net.apply(
            {"params": params, "batch_stats": {}},
            images,
            train=True,
            mutable=["batch_stats"],
        )
        return jnp.mean(features**2)

    compiled = jax.jit(jax.grad(loss)).lower(start["params"], images).compile()
    return compiled.memory_analysis().temp_size_in_bytes


def test_pieces_need_less_memory():
    net = mlp.perceptron(widths=(256, 256, 256, 256, 4))
    assert temporary(pieces.PiecewiseEncoder(net, 8)) < 0.4 * temporary(net)


@pytest.mark.parametrize(
    "changes, told",
    [
        ({"accumulate": 5}, "accumulate=5.*batch_size=48"),
        ({**ONLINE, "method": {"name": "er"}, "replay.size": 10}, "accumulate=4.*10"),
        ({**ONLINE, "method": {"name": "ncm"}}, "accumulate=4.*must be 1"),
    ],
)
def test_batches_that_cannot_be_cut_are_refused(changes, told, tmp_path):
    with pytest.raises(ValueError, match=told):
        toy.job(tmp_path, **{"accumulate": 4, **changes})
