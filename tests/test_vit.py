"""Vision Transformers against a float64 twin, and what their options do."""

import functools
import types

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import special

from helpers import interpreted, toy, twins
from jaxcl import optim, sharding
from jaxcl.config import build, resolve, sections
from jaxcl.nets import chain, positions, vit

SMALL = dict(width=16, layers=2, heads=2, hidden=24, patch=4, image_size=8)
NETS = {
    "vit": SMALL | {"features": "both"},
    "plain-resize": SMALL | {"resize": "plain", "class_position": False},
    "offset": SMALL | {"resize": "offset", "registers": 2, "layer_scale": 0.1},
    "rotary": SMALL
    | {"positions": "rotary", "registers": 3, "mlp": "swiglu", "epsilon": 1e-3}
    | {"qkv_bias": "query_value", "layer_scale": 1.0, "features": "mean"},
    "sin_cos": SMALL | {"positions": "sin_cos", "qkv_bias": "none"},
}
SHAPE = (3, 8, 12, 3)  # another grid than the one that positions are learned for


@functools.cache
def made(name):
    net = vit.vit(**NETS[name])
    return net, *twins.draw_inputs(net, SHAPE)


def run(net, params, images, **options):
    return interpreted.jit(functools.partial(net.apply, **options))(
        {"params": params}, images
    )


# --- the same in float64, written from the definitions ------------------------


def np_dense(x, p):
    return x @ p["kernel"] + p.get("bias", 0)


def np_turned(x, row, column, grid):
    """One head's vector, by DINOv3's equations for each pair of numbers."""
    size, out = len(x), np.array(x)
    count = size // 4
    for j in range(size // 2):
        place, length = ((row, grid[0]), (column, grid[1]))[j // count]
        middle = 2 * (place + 0.5) / length - 1
        angle = 2 * np.pi * middle / 100 ** ((j % count) / count)
        a, b = x[j], x[j + size // 2]
        out[j] = a * np.cos(angle) - b * np.sin(angle)
        out[j + size // 2] = b * np.cos(angle) + a * np.sin(angle)
    return out


def np_vit(net, params, images, hidden=None):
    p = jax.tree.map(lambda x: np.asarray(x, np.float64), params)
    side, width = net.patch, net.width
    grid = images.shape[1] // side, images.shape[2] // side
    cells = [(r, c) for r in range(grid[0]) for c in range(grid[1])]
    patches = [
        images[:, r * side : (r + 1) * side, c * side : (c + 1) * side]
        for r, c in cells
    ]
    kernel = p["patch"]["kernel"]
    x = np.stack([np.einsum("bijc,ijcd->bd", y, kernel) for y in patches], axis=1)
    x = x + p["patch"]["bias"]
    if hidden is not None:
        x[hidden] = 0
    first = p["class"]
    if net.positions == "learned":
        table = positions.resize_table(params["positions"], grid, net.resize)
        x = x + np.asarray(table, np.float64).reshape(-1, width)
        first = first + p.get("class_position", 0)
    if net.positions == "sin_cos":
        n = width // 4
        rates = [10_000 ** (-j / n) for j in range(n)]
        for place, (r, c) in enumerate(cells):
            waves = [f(v * w) for v in (c, r) for f in (np.sin, np.cos) for w in rates]
            x[:, place] += waves
    rows = [first, *p.get("registers", [])]
    skip = len(rows)
    x = np.concatenate([np.broadcast_to(rows, (len(x), skip, width)), x], axis=1)
    for i in range(net.layers):
        q = p[f"block_{i}"]
        y = twins.layer_norm(x, q["norm1"], net.epsilon)
        heads = {}
        for name in ("query", "key", "value"):
            h = np_dense(y, q["attention"][name])
            heads[name] = h.reshape(*h.shape[:2], net.heads, -1)
            if net.positions == "rotary" and name != "value":
                for place in np.ndindex(len(x), len(cells), net.heads):
                    b, t, head = place
                    heads[name][b, skip + t, head] = np_turned(
                        heads[name][b, skip + t, head], *cells[t], grid
                    )
        scores = np.einsum("bqhd,bkhd->bhqk", heads["query"], heads["key"])
        shares = special.softmax(scores / np.sqrt(width / net.heads), axis=-1)
        y = np.einsum("bhqk,bkhd->bqhd", shares, heads["value"]).reshape(x.shape)
        x = x + np_dense(y, q["attention"]["out"]) * q.get("scale1", 1)
        y, m = twins.layer_norm(x, q["norm2"], net.epsilon), q["mlp"]
        if net.mlp == "gelu":
            y = np_dense(y, m["fc1"])
            y = np_dense(y * special.ndtr(y), m["fc2"])
        else:
            gate = np_dense(y, m["gate"])
            y = np_dense(gate * special.expit(gate) * np_dense(y, m["up"]), m["down"])
        x = x + y * q.get("scale2", 1)
    x = twins.layer_norm(x, p["norm"], net.epsilon)
    parts = {"class": x[:, 0], "mean": x[:, skip:].mean(axis=1)}
    parts["both"] = np.concatenate([parts["class"], parts["mean"]], axis=1)
    found = parts[net.features]
    return found if hidden is None else (found, x[:, skip:])


@pytest.mark.parametrize("name", NETS)
def test_equals_the_definition_in_float64(name):
    net, params, images = made(name)
    found = run(net, params, images, train=True)
    assert found.shape == (3, net.num_features) and found.dtype == jnp.float32
    want = np_vit(net, params, images)
    np.testing.assert_allclose(found, want, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("name", ["vit", "rotary"])
def test_hidden_patches_show_their_position_alone(name):
    """The features of all patches come with those of the image."""
    net, params, images = made(name)
    hidden = np.random.default_rng(2).random((3, 6)) < 0.5
    found = run(net, params, images, train=True, hidden=hidden)
    want = np_vit(net, params, images, hidden)
    chex.assert_trees_all_close(found, want, rtol=2e-5, atol=2e-5)
    assert not np.allclose(found[0], run(net, params, images), atol=0.1)


@pytest.mark.parametrize(
    "options, count",
    [
        (dict(size="tiny"), 5_524_416),
        (dict(size="small"), 21_665_664),
        (dict(size="base"), 85_798_656),
        (dict(size="large"), 303_301_632),
        (dict(size="base", patch=32), 87_455_232),
        # DeiT III, DINOv2 with registers, DINOv3 with and without biases
        (dict(layer_scale=1e-5, class_position=False), 21_674_496),
        (dict(patch=14, image_size=518, layer_scale=1.0, registers=4), 22_057_728),
        (
            dict(positions="rotary", registers=4, layer_scale=1.0)
            | {"qkv_bias": "query_value"},
            21_596_160,
        ),
    ],
)
def test_as_many_parameters_as_the_papers_networks(options, count):
    net = vit.vit(**options)
    shapes = jax.eval_shape(net.init, jax.random.key(0), np.zeros((1, 224, 224, 3)))
    assert sum(leaf.size for leaf in jax.tree.leaves(shapes)) == count


def np_resize(size, new, rule):
    """f64[new, size], bicubic weights as PyTorch's `interpolate` takes them."""

    def cubic(x, a):
        x = np.abs(x)
        near = ((a + 2) * x - (a + 3)) * x * x + 1
        far = (((x - 5) * x + 8) * x - 4) * a
        return np.where(x <= 1, near, np.where(x < 2, far, 0.0))

    rows, matrix = np.arange(new)[:, None], np.zeros((new, size))
    if rule == "antialias":  # the kernel widens; its weights sum to 1 at the ends
        reach = max(size / new, 1.0)
        centre = size / new * (rows + 0.5)
        matrix = cubic((np.arange(size) + 0.5 - centre) / reach, -0.5)
        return matrix / matrix.sum(axis=1, keepdims=True)
    step = size / (new + 0.1) if rule == "offset" else size / new
    place = step * (rows + 0.5) - 0.5
    for shift in (-1, 0, 1, 2):  # entries at the ends are repeated
        column = np.floor(place) + shift
        at = rows, np.clip(column, 0, size - 1).astype(int)
        np.add.at(matrix, at, cubic(place - column, -0.75))
    return matrix


def test_tables_are_resized_by_the_weights_of_pytorch():
    """And as PyTorch itself does, see tests/test_import_peers.py."""
    size, grid = 5, (3, 7)
    table = np.random.default_rng(0).normal(size=(size, size, 2)).astype(np.float32)

    for rule in ("antialias", "plain", "offset"):
        rows, columns = (np_resize(size, n, rule) for n in grid)
        want = np.einsum("ri,cj,ijd->rcd", rows, columns, table)
        result = jax.jit(lambda x, rule=rule: positions.resize_table(x, grid, rule))(
            table
        )
        np.testing.assert_allclose(result, want, atol=2e-5, err_msg=rule)
    assert positions.resize_table(table, (size, size), "offset") is table


def test_branches_are_dropped_by_row_and_weighed_up():
    options = SMALL | {"drop_path": 0.5, "layers": 2}
    net, plain = vit.vit(**options), vit.vit(**SMALL)
    _, params, images = made("vit")
    images = np.repeat(images[:1], 64, axis=0)
    apply = jax.jit(lambda key: net.apply({"params": params}, images, key=key))
    rows = apply(jax.random.key(0))
    np.testing.assert_array_equal(rows, apply(jax.random.key(0)))
    assert np.abs(rows - apply(jax.random.key(1))).max() > 1e-3
    # The first block drops nothing; the second has two branches, each there or not.
    kinds = np.unique(np.round(np.asarray(rows), 4), axis=0)
    assert len(kinds) == 4
    whole = run(plain, params, images)
    np.testing.assert_array_equal(run(net, params, images, train=True), whole)


def test_remat_changes_no_gradient():
    net, params, images = made("rotary")
    again = net.clone(remat=True)

    def slopes(net):
        def loss(params):
            return jnp.sum(net.apply({"params": params}, images) ** 2)

        return interpreted.jit(jax.grad(loss))(params)

    chex.assert_trees_all_close(slopes(net), slopes(again), rtol=1e-4, atol=1e-5)
    program = str(jax.make_jaxpr(lambda p: again.apply({"params": p}, images))(params))
    assert "checkpoint" in program or "remat" in program


@pytest.mark.parametrize(
    "there, dtype, heads, told",
    [
        (True, jnp.bfloat16, 2, None),
        (False, jnp.bfloat16, 2, "GPU"),
        (True, jnp.float32, 2, "float32"),
        (True, jnp.bfloat16, 4, "4"),  # numbers of a head
    ],
)
def test_cudnn_attention_is_taken_where_it_is(
    there, dtype, heads, told, monkeypatch, caplog
):
    """A network whose chip lacks it computes the same by XLA, and says so once."""
    asked, attend = [], jax.nn.dot_product_attention

    def spy(*rows, implementation):
        asked.append(implementation)
        return attend(*rows)

    monkeypatch.setattr(sharding, "has_cudnn_attention", lambda: there)
    monkeypatch.setattr(jax.nn, "dot_product_attention", spy)
    vit._warn_of_xla.cache_clear()
    net = vit.vit(**SMALL | {"heads": heads}, attention="cudnn", dtype=dtype)
    images = jax.ShapeDtypeStruct(SHAPE, jnp.float32)
    jax.eval_shape(net.init, jax.random.key(0), images)
    assert asked == ["xla" if told else "cudnn"] * SMALL["layers"]
    lines = [line for line in caplog.messages if "config.encoder.attention" in line]
    assert len(lines) == bool(told)
    assert not told or told in lines[0]


@pytest.mark.parametrize(
    "platform, capability, there",
    [
        ("gpu", "9.0", True),
        ("gpu", "7.5", False),
        ("gpu", "gfx90a", False),  # AMD's
        ("tpu", "", False),
        ("cpu", "", False),
    ],
)
def test_chips_that_have_cudnn_attention(platform, capability, there, monkeypatch):
    chip = types.SimpleNamespace(compute_capability=capability)
    monkeypatch.setattr(sharding, "platform", lambda: platform)
    monkeypatch.setattr(jax, "devices", lambda: [chip])
    assert sharding.has_cudnn_attention() is there


def test_bfloat16_computes_in_bfloat16_and_keeps_float32():
    twins.check_bfloat16_network(*made("offset"), run)


def test_a_frozen_patch_projection_is_never_moved():
    config = toy.config(
        encoder={"name": "vit", **SMALL, "patch": 2, "frozen_patch": True},
        optimizer={"name": "adam", "lr": 0.1, "weight_decay": 0.1, "decoupled": True},
    )
    make_parts, _ = sections.read_parts(
        sections.read_top(resolve.resolve(config.to_dict()))
    )
    parts = make_parts(num_classes=10)
    net = chain.Chain({"encoder": parts.encoder})
    images = np.random.default_rng(0).normal(size=(2, 8, 8, 1)).astype(np.float32)
    params, _ = jax.jit(net.init)(jax.random.key(0), images)
    kernel = params["encoder"]["patch"]["kernel"]
    bound = np.sqrt(6 / (2 * 2 * 1 + 16))  # MoCo v3's
    assert 0.9 * bound < np.abs(kernel).max() < bound

    def loss(params):
        return jnp.sum(net(params, {"encoder": {}}, images, train=True)[0] ** 2)

    slopes = interpreted.jit(jax.grad(loss))(params)
    assert not np.any(slopes["encoder"]["patch"]["kernel"])
    module = vit.vit(**(SMALL | {"patch": 2}), frozen_patch=True)  # alone, too

    def own_loss(params):
        return jnp.sum(module.apply({"params": params}, images, train=True) ** 2)

    result = interpreted.jit(jax.grad(own_loss))(params["encoder"])
    assert not np.any(result["patch"]["kernel"]) and np.any(result["class"])
    moves, _ = parts.tx.update(slopes, parts.tx.init(params), params, lr=0.1)
    still = jax.tree.map(lambda x: not np.any(x), moves["encoder"])
    assert all(jax.tree.leaves(still.pop("patch"))) and not still["class"]
    assert not np.any(jax.tree.leaves(still["block_0"]["mlp"]))


def test_shares_of_leaves():
    """Momentum of what is frozen is not kept; shares multiply decay, too."""
    shares = {"a": 0.0, "b": 0.5, "c": 1.0}
    tree = {"one": {name: jnp.full(2, 3.0) for name in shares}}
    grads = jax.tree.map(jnp.ones_like, tree)
    plain = optim.sgd(momentum=0.9, weight_decay=0.1)
    tx = optim.by_leaf(plain, lambda path: shares[path[1]])
    state = tx.init(tree)
    assert len(jax.tree.leaves(state)) == 2
    want_state = plain.init(tree)
    for _ in range(2):
        moves, state = tx.update(grads, state, tree, lr=0.1)
        want, want_state = plain.update(grads, want_state, tree, lr=0.1)
        for name, share in shares.items():
            np.testing.assert_allclose(
                moves["one"][name], share * want["one"][name], rtol=1e-6
            )


@pytest.mark.parametrize("shape", [(1, 3, 8, 3), (1, 8, 10, 3), (1, 2, 2, 3)])
def test_images_that_patches_do_not_fill_are_refused(shape):
    net = vit.vit(**SMALL)
    with pytest.raises(ValueError, match=r"pixels \(config\.augment\.size\).*patch=4"):
        jax.eval_shape(net.init, jax.random.key(0), np.zeros(shape))


def test_dropped_branches_need_a_method_that_gives_a_key(tmp_path):
    encoder = {"name": "vit", **SMALL, "drop_path": 0.1}
    config = toy.config(encoder=encoder, **toy.ONLINE | {"method": {"name": "er"}})
    with pytest.raises(ValueError, match=r"drop_path=0\.1"):
        build.build(config, tmp_path)
