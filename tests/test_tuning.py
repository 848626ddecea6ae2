"""Encoders that begin with given weights, and what of them is trained."""

import dataclasses
import functools
import json

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from helpers import toy, twins, two_view_losses
from jaxcl import optim
from jaxcl.config import build, resolve, sections
from jaxcl.errors import Refused
from jaxcl.methods.two_view import step, strategies
from jaxcl.nets import convnext, resnet, tuning, vit
from jaxcl.run import encoder_folder, job
from jaxcl.weights import encoder, writer

SMALL = dict(width=16, layers=3, heads=2, hidden=24, patch=4, image_size=8)
NET = vit.vit(**SMALL, layer_scale=1.0)
IMAGES = np.random.default_rng(0).normal(size=(4, 8, 8, 1)).astype(np.float32)


def tuned(net=NET, given=None, **options):
    return tuning.TunedEncoder(net, tuning.settings(**options), given)


def numbers(tree, seed=0):
    rng = np.random.default_rng(seed)
    return jax.tree.map(lambda x: rng.normal(0, 0.3, x.shape).astype("f4"), tree)


def names_of(tree):
    leaves, _ = jax.tree_util.tree_flatten_with_path(tree)
    return {tuple(entry.key for entry in path): x for path, x in leaves}


def leave(where, net=NET, section=None, seed=1, channels=1):
    """The folder of an encoder of any numbers; its parameters."""
    full = section or {"name": "vit", **SMALL, "layer_scale": 1.0}
    blank = np.zeros((1, 8, 8, channels), np.float32)
    shapes = jax.eval_shape(net.init, jax.random.key(0), blank)
    params = numbers(shapes["params"], seed)
    stats = jax.tree.map(np.abs, numbers(shapes.get("batch_stats", {}), 2))
    files = {
        encoder_folder.TENSORS: writer.pack_tensors(
            encoder.flatten_leaves(params, stats), "flax"
        )
    }
    inputs = {"kind": "images", "dtype": "uint8", "channels": channels, "size": 8}
    inputs |= {"resize": None, "interpolation": "bicubic", "decoder": None}
    inputs |= {"mean": [0.3] * channels, "std": [0.4] * channels}
    card = {"format": encoder_folder.FORMAT, "encoder": full, "num_features": 16}
    card |= {"input": inputs, "files": writer.hash_files(files)}
    card |= {"checksum": encoder_folder.checksum(card)}
    where.mkdir(parents=True)
    (where / encoder_folder.CARD).write_text(json.dumps(card))
    (where / encoder_folder.TENSORS).write_bytes(files[encoder_folder.TENSORS])
    return params


# Adapters


@functools.cache
def adapted():
    net = tuned(lora_rank=3, lora_alpha=6.0, lora_on="all", open_layers=1)
    params = jax.jit(net.init)(jax.random.key(0), IMAGES)["params"]
    return net, params


def test_fresh_adapters_change_nothing_and_trained_ones_can_be_merged():
    net, params = adapted()
    plain = {name: x for name, x in params.items() if name != "lora"}

    def run(net, params):
        return jax.jit(net.apply)({"params": params}, IMAGES)

    want = run(NET, plain)
    np.testing.assert_allclose(run(net, params), want, atol=1e-6)
    moved = params | {"lora": numbers(params["lora"])}
    found = run(net, moved)
    assert np.abs(found - want).max() > 1e-2
    merged = net.merge_adapters(moved)
    chex.assert_trees_all_equal_shapes(merged, plain)
    np.testing.assert_allclose(run(NET, merged), found, atol=1e-5)
    pair = moved["lora"]["block_0"]["mlp"]["fc1"]
    own = params["block_0"]["mlp"]["fc1"]["kernel"] + 2.0 * pair["a"] @ pair["b"]
    first, _, last = (merged[f"block_{i}"]["mlp"]["fc1"]["kernel"] for i in range(3))
    np.testing.assert_allclose(first, own, atol=1e-6)
    np.testing.assert_array_equal(last, plain["block_2"]["mlp"]["fc1"]["kernel"])


def test_what_is_not_trained_has_no_gradient_no_move_and_no_state():
    net, params = adapted()

    def loss(params):
        rows = net.apply({"params": params}, IMAGES)
        return jnp.sum(jnp.sin(rows)), rows

    slopes = jax.jit(jax.grad(loss, has_aux=True))(params)[0]
    tx = optim.by_leaf(optim.adam(weight_decay=0.1), net.rate_share)
    state = tx.init(params)
    moves, _ = tx.update(slopes, state, params)
    found = names_of(moves)
    trained = {name for name, x in found.items() if np.any(x)}
    for name in found:
        norm = any(part.startswith("norm") for part in name)
        assert (name in trained) == (norm or name[0] in ("lora", "block_2")), name
    for name, x in names_of(slopes).items():
        assert name in trained or not np.any(x), name
    assert len(jax.tree.leaves(state)) == 2 * len(trained) + 1  # moments, and a count
    # Without norms the recipe trains adapters and the open block alone.
    bare = tuned(lora_rank=3, norms=False)
    assert not bare.rate_share(("norm", "scale")) and not bare.rate_share(("class",))
    assert bare.rate_share(("lora", "block_0", "attention", "query", "a")) == 1


def test_layers_count_from_the_images():
    net = tuned(layer_decay=0.5, frozen_layers=1)
    assert tuning.count_layers(NET) == 4
    for name, share in (
        ("class", 0),
        ("patch/kernel", 0),
        ("positions", 0),
        ("block_0/norm1/scale", 0.125),
        ("block_2/mlp/fc1/kernel", 0.5),
        ("norm/bias", 1),
    ):
        assert net.rate_share(tuple(name.split("/"))) == share, name
    stages = tuned(resnet.resnet(depth=10, width=4), layer_decay=0.5)
    for name, share in (
        ("conv1/kernel", 0.5**5),
        ("bn1/scale", 0.5**5),
        ("layer1_0/conv1/kernel", 0.5**4),
        ("layer4_0/bn2/bias", 0.5),
    ):
        assert stages.rate_share(tuple(name.split("/"))) == share, name
    maps = tuned(convnext.convnext(depths=(1, 2), width=4), layer_decay=0.5)
    for name, share in (
        ("stem/kernel", 0.125),
        ("stem_norm/scale", 0.125),
        ("stage1_0/depthwise/kernel", 0.25),
        ("stage2_down/kernel", 0.5),
        ("stage2_norm/bias", 0.5),
        ("stage2_1/fc1/bias", 0.5),
        ("norm/scale", 1),
    ):
        assert maps.rate_share(tuple(name.split("/"))) == share, name


def test_running_statistics_normalise_a_pass_that_trains_and_do_not_move():
    images = np.repeat(IMAGES, 3, axis=3)
    bare = resnet.resnet(depth=10, width=4)
    variables = bare.init(jax.random.key(0), images, train=False)
    stats = jax.tree.map(np.abs, numbers(variables["batch_stats"]))
    variables = {"params": variables["params"], "batch_stats": stats}

    def apply(net, params, train):
        given = variables | {"params": params}
        return net.apply(given, images, train=train, groups=2, mutable=["batch_stats"])

    still, params = tuned(bare, statistics="running"), variables["params"]
    rows, after = apply(still, params, True)
    chex.assert_trees_all_equal((rows, after), apply(bare, params, False))
    chex.assert_trees_all_equal(after["batch_stats"], stats)
    moved, after = apply(tuned(bare), params, True)
    assert abs(moved - rows).max() > 1e-3
    with pytest.raises(AssertionError):
        chex.assert_trees_all_equal(after["batch_stats"], stats)
    slopes = jax.grad(lambda p: apply(still, p, True)[0].sum())(params)
    assert all(np.any(x) for x in jax.tree.leaves(slopes))
    with pytest.raises(Refused, match="statistics"):
        tuned(statistics="running")
    assert tuned(resnet.conv_net(width=4), statistics="running").trains_whole


# word -> the options that docs/encoders.md says, and which leaves it trains: a share
# of the rate for those before the blocks, for the last block, and for its norms.
RECIPES = {
    "decay": ({"layer_decay": 0.75}, 0.75**4, 0.75, 0.75),
    "lora": ({"lora_rank": 8}, 0, 0, 1),
    "explora": ({"lora_rank": 64, "open_layers": 1}, 0, 1, 1),
}


@pytest.mark.parametrize("word", RECIPES)
def test_a_word_trains_what_it_says(word):
    options, first, last, norm = RECIPES[word]
    assert tuning.RECIPES.keys() == RECIPES.keys()
    net = sections.wrap_tuned(NET, word)
    assert net.chosen == tuning.settings(**options)
    leaves = names_of(jax.eval_shape(net.init, jax.random.key(0), IMAGES)["params"])
    own = {name: x for name, x in leaves.items() if name[0] == "lora"}
    for name in leaves.keys() - own.keys():
        is_norm = any(part.startswith("norm") for part in name)
        if name[0] == "norm":  # behind all blocks
            want = 1
        elif word == "decay" and name[0].startswith("block"):
            want = 0.75 ** (3 - int(name[0][-1]))
        elif is_norm:
            want = norm
        else:
            want = {"block_2": last}.get(name[0], first)
        assert net.rate_share(name) == pytest.approx(want), name
    assert all(net.rate_share(name) == 1 for name in own)
    blocks = {"decay": (), "lora": (0, 1, 2), "explora": (0, 1)}[word]
    places = {
        (f"block_{i}", "attention", x) for i in blocks for x in ("query", "value")
    }
    assert {name[1:4] for name in own} == places
    rank = options.get("lora_rank")
    assert {x.shape for x in own.values()} <= {(16, rank), (rank, 16)}


def test_a_run_takes_the_word_and_refuses_another(tmp_path):
    leave(tmp_path / "enc")
    config = begun(tmp_path / "enc", **{"method.base": "simclr"})
    with config.unlocked():
        config.tuning = "explora"
    work = build.build(config, tmp_path / "run")
    state, _ = job.shapes(work.method, work.data)
    pair = state.params["encoder"]["lora"]["block_1"]["attention"]["query"]
    assert (
        pair["a"].shape == (16, 64) and "block_2" not in state.params["encoder"]["lora"]
    )
    config.tuning = "explorer"
    with pytest.raises(ValueError, match=r"config\.tuning='explorer'.*explora"):
        build.build(config, tmp_path / "other")


def test_running_statistics_are_those_of_something_trained(tmp_path):
    small = {"name": "resnet", "depth": 10, "width": 4}
    config = toy.config(encoder=small, tuning={"statistics": "running"})
    with pytest.raises(ValueError, match=r"config\.tuning\.statistics.*config\.start"):
        build.build(config, tmp_path)
    top = sections.TopLevel(**config.to_dict())
    for name in ("start", "checkpoint"):  # what trains on, and what evaluates it
        made = sections.make_encoder(dataclasses.replace(top, **{name: "runs/a"}))
        assert made.chosen.statistics == "running"


# Runs that begin with a folder


def begun(where, **changes):
    """The toy's config, which begins with the folder at a place."""
    config = toy.config(**changes)
    with config.unlocked():
        config.start = str(where)
    return config


@pytest.mark.parametrize("name", ["vit", "convnext"])
def test_the_folder_says_what_the_network_is_the_config_how_it_runs(name, tmp_path):
    leave(tmp_path / "enc")
    how = {"drop_path": 0.1, "remat": True}
    config = begun(tmp_path / "enc", encoder={"name": name, "width": 32} | how)
    found = resolve.resolve(config.to_dict())["encoder"]
    how = how if name == "vit" else {}  # of another network, nothing is kept
    assert found == {"name": "vit", **SMALL, "layer_scale": 1.0} | how


def test_a_run_begins_with_the_encoder_and_every_copy_of_it(tmp_path, caplog):
    params = leave(tmp_path / "enc")
    update = tmp_path / "enc" / "updates" / "0001"
    update.mkdir(parents=True)
    (update / "update.json").write_text('{"accepted": true}')
    own = {"name": "vit", "drop_path": 0.1, "size": "base"}
    config = begun(
        tmp_path / "enc",
        encoder=own,
        **{"method.base": "mocov2plus", "method.strategy": "cassle"},
        **{"augment.mean": (0.9,), "devices": 8},
    )
    work = build.build(config, tmp_path / "run")
    assert str(update) in caplog.text  # the encoder is that of before it
    state = job.initial_state(work)
    for tree in (state.params, state.extra.momentum, state.extra.teacher):
        chex.assert_trees_all_equal(tree["encoder"], params)
    written = json.loads((tmp_path / "run" / "config.json").read_text())
    assert written["encoder"] == {"name": "vit", **SMALL, "layer_scale": 1.0} | {
        "drop_path": 0.1
    }
    assert written["augment"]["mean"] == [0.3]
    every = json.loads((tmp_path / "run" / "resolved.json").read_text())["encoder"]
    assert written["encoder"].items() < every.items()
    assert (every["registers"], every["mlp"]) == (0, "gelu")
    build.build(config, tmp_path / "run")  # the same config: it resumes


@pytest.mark.parametrize(
    "name, options, chosen",
    [
        ("vit", SMALL, None),
        ("vit", SMALL, {"lora_rank": 2}),
        ("vit", SMALL, {"frozen_layers": 1}),
        ("convnext", {"depths": (1, 1), "width": 16, "patch": 2}, None),
        ("conv_net", {"width": 4}, None),
        ("conv_net", {"width": 4}, {"statistics": "running"}),
    ],
)
def test_an_update_finds_the_state_of_a_run_that_began_with_a_folder(
    name, options, chosen, tmp_path
):
    """The optimizer's, too: an update of that run does not read the folder."""
    section = {"name": name, **options}
    leave(tmp_path / "enc", sections.ENCODERS[name](**options), section)
    first = build.build(begun(tmp_path / "enc", tuning=chosen), tmp_path / "run")
    if chosen == {"statistics": "running"}:
        chosen = None  # changes no state: an update of any run may choose it
    later = toy.config(encoder=section, tuning=chosen)
    later = build.build(later, tmp_path / "later")
    states = (job.shapes(x.method, x.data)[0] for x in (first, later))
    chex.assert_trees_all_equal_shapes_and_dtypes(*states)


def pixels(count=48):
    """A batch of images of noise."""
    rng = np.random.default_rng(0)
    image = rng.integers(0, 256, (count, 8, 8, 1)).astype(np.uint8)
    rows = np.arange(count, dtype=np.int32)
    return {"image": image, "label": rows % 10, "index": rows}


@pytest.mark.parametrize(
    "base, strategy",
    [
        ("simclr", "less_forget"),
        ("simclr", "lwf_features"),
        ("simclr", "cassle"),
        ("simclr", "pnr"),
        ("mocov2plus", "pnr"),
    ],
)
def test_a_begun_encoder_teaches_in_the_first_task(
    base, strategy, tmp_path, monkeypatch
):
    """The first step's loss is the strategy's equation, not the base's alone."""
    params, read, make = leave(tmp_path / "enc"), {}, strategies.STRATEGIES[strategy]

    @functools.wraps(make)  # its options are those of its signature
    def watched(**options):
        plan = make(**options)

        def loss(spec, features):
            x = two_view_losses.of_library(features)
            jax.debug.callback(lambda x: read.update(x=x), x)
            return step.compute_loss(spec, plan, features)

        return plan._replace(loss=loss)

    monkeypatch.setitem(strategies.STRATEGIES, strategy, watched)
    changes = {"method.base": base, "method.strategy": strategy}
    work = build.build(begun(tmp_path / "enc", **changes), tmp_path / "run")
    state = job.begin_task(work, job.initial_state(work), work.stream.tasks[0])
    chex.assert_trees_all_equal(state.extra.teacher["encoder"], params)
    moved = state.replace(params=jax.tree.map(lambda x: 1.3 * x, state.params))
    after, metrics = jax.jit(work.method.step)(moved, pixels())
    jax.effects_barrier()
    x = jax.tree.map(np.asarray, read["x"])
    options = two_view_losses.Options(0.2, 0.2, weight=1.0)  # the bases' defaults
    found = {
        name: two_view_losses.loss(base, name, x, options)
        for name in (strategy, "finetune")
    }
    assert abs(found[strategy] - found["finetune"]) > 1e-2
    np.testing.assert_allclose(metrics["loss"], found[strategy], rtol=1e-5)
    # The teacher is the encoder as it came: where nothing moved, it agrees.
    jax.jit(work.method.step)(state, pixels())
    jax.effects_barrier()
    still = jax.tree.map(np.asarray, read["x"])
    np.testing.assert_allclose(still.f, x.f, atol=1e-5)
    if base == "mocov2plus":  # the teacher's queue fills from the first step on
        queue = np.asarray(after.extra.strategy.rows)[:, :48]
        np.testing.assert_allclose(queue, twins.unit(x.f).swapaxes(0, 1), atol=1e-5)


NARROW = {"hidden_dim": 16, "output_dim": 8, "memory_size": 24}
OTHERS = {
    "cclis": {"method": NARROW | {"name": "cclis"}, "augment.views": 1},
    "er_ace": toy.ONLINE | {"method": {"name": "er_ace"}},
    "duel": {"method": NARROW | {"name": "duel"}},
    "icl": {"method": {"name": "icl", "output_dim": 8, "strategy": "retrain"}},
}


@pytest.mark.parametrize("name", OTHERS)
def test_other_methods_begin_with_the_encoder(name, tmp_path):
    section = {"name": "conv_net", "width": 4}
    params = leave(tmp_path / "enc", sections.ENCODERS["conv_net"](width=4), section)
    work = build.build(begun(tmp_path / "enc", **OTHERS[name]), tmp_path / "run")
    state = job.begin_task(work, job.initial_state(work), work.stream.tasks[0])
    shape = jax.tree.structure(params)
    kept = [x for x in state.extra if type(x) is dict]
    copies = [x for x in kept if jax.tree.structure(x.get("encoder")) == shape]
    assert len(copies) == {"cclis": 1, "duel": 1}.get(name, 0)
    for tree in (state.params, *copies):
        chex.assert_trees_all_equal(tree["encoder"], params)
    after, metrics = jax.jit(work.method.step)(state, pixels())
    assert np.isfinite(metrics["loss"])
    moved = jax.tree.map(lambda a, b: np.any(a != b), params, after.params["encoder"])
    assert all(jax.tree.leaves(moved))
