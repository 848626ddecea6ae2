import functools
import types

import chex
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from helpers import graph_sets, interpreted, key_uses, twins
from jaxcl import estimate, sharding
from jaxcl.data.stream import graph_arrays
from jaxcl.methods import online
from jaxcl.methods.two_view import bases
from jaxcl.nets import convnext, gcn, layers, mlp, resnet, vit

EPS = 1e-5


def variables(net, *args, seed=0, **kwargs):
    return jax.jit(lambda key: net.init(key, *args, **kwargs))(jax.random.key(seed))


@functools.partial(jax.jit, static_argnums=(0, 3))
def train_apply(net, tree, x, groups=1):
    out, updated = net.apply(tree, x, train=True, groups=groups, mutable="batch_stats")
    return out, updated.get("batch_stats", {})


# The same without a compiled program: where the equation is the subject.
apply_plainly = interpreted.jit(
    train_apply.__wrapped__, static_argnames=("net", "groups")
)


def drawn(net, x):
    """Variables of a network that no program initialises, none of them 0 or 1."""
    rng = np.random.default_rng(5)
    shapes = jax.eval_shape(lambda: net.init(jax.random.key(0), x))
    return randomised(
        jax.tree.map(
            lambda leaf: np.float32(
                rng.normal(size=leaf.shape) / np.sqrt(leaf.size / leaf.shape[-1])
            ),
            shapes,
        )
    )


def randomised(tree, seed=0):
    """Parameters and statistics away from 0 and 1, so that each one matters."""
    rng = np.random.default_rng(seed)

    def shake(path, leaf):
        noise = rng.normal(size=leaf.shape).astype(np.float32)
        name = path[-1].key
        if name == "kernel":
            return leaf
        return 0.8 + 0.3 * np.abs(noise) if name in ("scale", "var") else 0.3 * noise

    return jax.tree_util.tree_map_with_path(shake, tree)


# --- the same in float64, written from the definitions ------------------------


def np_batch_norm(x, p, stats, *, train, momentum=0.9, unbiased=True):
    """One PyTorch forward pass: output and the statistics after it."""
    x = np.asarray(x, np.float64)
    rows = x.reshape(-1, x.shape[-1])
    mean, var = np.asarray(stats["mean"]), np.asarray(stats["var"])
    if train:
        mean, var = rows.mean(0), rows.var(0)
        kept = rows.var(0, ddof=1) if unbiased else var
        stats = {
            "mean": momentum * np.asarray(stats["mean"]) + (1 - momentum) * mean,
            "var": momentum * np.asarray(stats["var"]) + (1 - momentum) * kept,
        }
    return (x - mean) / np.sqrt(var + EPS) * p["scale"] + p["bias"], stats


def np_sequential(x, p, stats, views):
    """Views 0, 1, ... one forward pass after the other, rows put back."""
    y = np.zeros(x.shape)
    for v in range(views):
        y[v::views], stats = np_batch_norm(x[v::views], p, stats, train=True)
    return y, stats


def np_windows(x, kernel, stride, pad, fill):
    """Yield ((i, j), window); pad = (before, after), the same for both axes."""
    x = np.pad(x, ((0, 0), pad, pad, (0, 0)), constant_values=fill)
    size = (x.shape[1] - kernel) // stride + 1
    for i in range(size):
        for j in range(size):
            a, b = i * stride, j * stride
            yield (i, j), x[:, a : a + kernel, b : b + kernel]


def np_conv(x, w, stride, pad):
    w = np.asarray(w, np.float64)
    cells = dict(np_windows(np.asarray(x, np.float64), len(w), stride, pad, 0.0))
    size = max(cells)[0] + 1
    y = np.zeros((len(x), size, size, w.shape[-1]))
    for (i, j), window in cells.items():
        y[:, i, j] = np.einsum("bhwc,hwco->bo", window, w)
    return y


def np_max_pool(x, pad):
    cells = dict(np_windows(x, 3, 2, pad, -np.inf))
    size = max(cells)[0] + 1
    y = np.zeros((len(x), size, size, x.shape[-1]))
    for (i, j), window in cells.items():
        y[:, i, j] = window.max((1, 2))
    return y


def np_resnet(net, tree, images):
    """Forward pass in train mode with PyTorch's padding, and the new statistics."""
    params, stats = tree["params"], tree["batch_stats"]
    new = {}

    def conv_bn(x, p, s, conv, bn, stride, pad, out):
        y = np_conv(x, p[conv]["kernel"], stride, (pad, pad))
        y, out[bn] = np_batch_norm(y, p[bn], s[bn], train=True)
        return y

    imagenet = net.stem == "imagenet"
    stride, pad = (2, 3) if imagenet else (1, net.stem_padding)
    x = conv_bn(images, params, stats, "conv1", "bn1", stride, pad, new)
    x = np.maximum(x, 0)
    if imagenet:
        x = np_max_pool(x, (1, 1))
    # Which convolution of the block carries the stride, and their paddings.
    strided, pads = (1, (1, 1)) if net.block == "basic" else (2, (0, 1, 0))
    for stage, size in enumerate(net.stage_sizes):
        for i in range(size):
            name = f"layer{stage + 1}_{i}"
            p, s, out = params[name], stats[name], new.setdefault(name, {})
            stride = 2 if stage and not i else 1
            y = x
            for k, pad in enumerate(pads, start=1):
                step = stride if k == strided else 1
                y = conv_bn(y, p, s, f"conv{k}", f"bn{k}", step, pad, out)
                y = np.maximum(y, 0) if k < len(pads) else y
            if "downsample_conv" in p:
                names = ("downsample_conv", "downsample_bn")
                x = conv_bn(x, p, s, *names, stride, 0, out)
            x = np.maximum(x + y, 0)
    return x.mean((1, 2)), new


# --- batch norm ---------------------------------------------------------------


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("shape", [(6, 3), (6, 4, 2, 3)])
def test_batch_norm_equals_pytorch_passes_one_after_the_other(shape, groups, dtype):
    rng = np.random.default_rng(0)
    # The views differ in mean and spread, so mixing them up shows.
    x = rng.normal(size=shape) * np.array([1.0, 3.0, 0.5])
    x[1::2] = 2.0 * x[1::2] + 5.0
    x = jnp.asarray(x, dtype)
    net = layers.BatchNorm(dtype=dtype)
    tree = randomised(variables(net, x, train=True))
    y, stats = train_apply(net, tree, x, groups)
    want, want_stats = np_sequential(x, tree["params"], tree["batch_stats"], groups)
    assert y.dtype == dtype and y.shape == shape
    tolerance = 4e-5 if dtype == jnp.float32 else 2e-2
    np.testing.assert_allclose(y.astype("f4"), want, rtol=tolerance, atol=tolerance)
    # bf16 inputs are exact in float64: statistics are f32-accurate all the same.
    chex.assert_trees_all_close(stats, want_stats, rtol=1e-5, atol=1e-6)
    assert all(leaf.dtype == jnp.float32 for leaf in jax.tree.leaves(stats))

    evaluate = functools.partial(net.apply, train=False, groups=groups)
    y = jax.jit(evaluate)(tree, x)
    want, _ = np_batch_norm(x, tree["params"], tree["batch_stats"], train=False)
    np.testing.assert_allclose(y.astype("f4"), want, rtol=tolerance, atol=tolerance)


def test_batch_norm_options():
    x = np.random.default_rng(1).normal(size=(4, 3)).astype("f4")
    net = layers.BatchNorm(
        momentum=0.7, unbiased=False, use_scale=False, use_bias=False
    )
    tree = variables(net, x, train=True)
    assert set(tree) == {"batch_stats"}
    chex.assert_trees_all_close(
        tree["batch_stats"], {"mean": np.zeros(3), "var": np.ones(3)}, atol=0
    )
    y, stats = train_apply(net, tree, x)
    identity = {"scale": 1.0, "bias": 0.0}
    want, want_stats = np_batch_norm(
        x, identity, tree["batch_stats"], train=True, momentum=0.7, unbiased=False
    )
    np.testing.assert_allclose(y, want, rtol=1e-5, atol=1e-6)
    chex.assert_trees_all_close(stats, want_stats, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("mean", "known", "rtol"), [(3000.0, 2990.0, 1e-4), (30.0, 0.0, 1e-3)]
)
def test_batch_norm_survives_a_large_mean(mean, known, rtol):
    x = (np.random.default_rng(2).normal(size=(64, 2)) + mean).astype("f4")
    net = layers.BatchNorm()
    tree = variables(net, x, train=True)
    tree["batch_stats"]["mean"] = jnp.full(2, known, jnp.float32)
    y, stats = train_apply(net, tree, x)
    want, want_stats = np_batch_norm(x, tree["params"], tree["batch_stats"], train=True)
    np.testing.assert_allclose(y, want, atol=2e-3)
    chex.assert_trees_all_close(stats, want_stats, rtol=rtol)


def test_batch_norm_sends_one_message_forward():
    x, net = jnp.zeros((8, 4, 4, 3)), layers.BatchNorm()
    tree = variables(net, x, train=True)
    split = sharding.split_sharding(sharding.mesh(2))

    def forward(x):
        return net.apply(tree, x, train=True, groups=2, mutable=["batch_stats"])

    text = jax.jit(forward, in_shardings=split).lower(x).compile().as_text()
    found = [op for op in estimate.collectives(text) if op.kind == "all-reduce"]
    assert len(found) == 1


def test_batch_norm_gradient_equals_finite_differences():
    rng = np.random.default_rng(3)
    x = rng.normal(size=(6, 2, 1, 3)) + 1.0
    weight = rng.normal(size=x.shape)
    net = layers.BatchNorm()
    tree = randomised(variables(net, jnp.asarray(x, "f4"), train=True))
    stats = tree["batch_stats"]
    params = {k: np.asarray(v, np.float64) for k, v in tree["params"].items()}

    def loss(x, params):
        tree = {"params": params, "batch_stats": stats}
        return jnp.sum(weight.astype("f4") * train_apply(net, tree, x, 2)[0])

    def twin(*leaves):
        x, params = structure.unflatten(leaves)
        return np.sum(weight * np_sequential(x, params, stats, 2)[0])

    gradient = jax.grad(loss, argnums=(0, 1))(jnp.asarray(x, "f4"), tree["params"])
    leaves, structure = jax.tree.flatten((x, params))
    for i, got in enumerate(jax.tree.leaves(gradient)):
        want = twins.central_difference(twin, leaves, i)
        np.testing.assert_allclose(got, want, rtol=1e-3, atol=2e-5)


def test_statistics_are_of_the_whole_batch_on_two_devices():
    rows = sharding.split_sharding(sharding.mesh(2))
    x = np.random.default_rng(4).normal(size=(8, 4, 4, 1)).astype("f4")
    x[:4] += 3.0  # device 0's rows differ: local statistics would show
    net = resnet.ConvNet(width=2)
    tree = variables(net, x)
    split = jax.device_put(x, rows)
    assert len(split.addressable_shards) == 2
    tolerance = dict(rtol=1e-5, atol=1e-5)
    whole = train_apply(net, tree, x, 2)
    chex.assert_trees_all_close(train_apply(net, tree, split, 2), whole, **tolerance)


# --- convolutions and pooling -------------------------------------------------


class OneConv(nn.Module):
    """A convolution as those of a ResNet, and a batch norm that does nothing."""

    shape: tuple  # filters, kernel, stride, padding
    start: str
    dtype: object = jnp.float32

    @nn.compact
    def __call__(self, x):
        return resnet._conv_norm(
            self.start, self.dtype, False, 1, x, "{}1", *self.shape
        )


@pytest.mark.parametrize("kernel", [3, 7])
def test_strided_convolution_pads_as_asked(kernel):
    x = np.random.default_rng(5).normal(size=(2, 8, 8, 2)).astype("f4")
    outputs = {}
    # SAME needs kernel - stride pixels in all, the odd one at the end.
    pads = {"torch": (kernel // 2,) * 2, "same": (kernel // 2 - 1, kernel // 2)}
    for padding, pad in pads.items():
        net = OneConv((3, kernel, 2, padding), "torch")
        tree = variables(net, x)
        y = net.apply(tree, x)
        want = np_conv(x, tree["params"]["conv1"]["kernel"], 2, pad)
        np.testing.assert_allclose(y, want, rtol=1e-4, atol=1e-5)
        outputs[padding] = y
    assert outputs["torch"].shape == outputs["same"].shape == (2, 4, 4, 3)
    assert np.abs(outputs["torch"] - outputs["same"]).max() > 0.1


@pytest.mark.parametrize("padding,pad", [("torch", (3, 3)), ("same", (2, 3))])
def test_imagenet_stem(padding, pad):
    """7x7 / 2, batch norm, ReLU, 3x3 / 2 max pool, on a 16x16 image."""
    x = np.random.default_rng(6).normal(size=(2, 16, 16, 3)).astype("f4")
    net = resnet.ResNet((), width=4, stem="imagenet", padding=padding)
    tree = variables(net, x)
    # No stages: the output is the stem's map, averaged.
    got, _ = train_apply(net, tree, x)
    p, s = tree["params"], tree["batch_stats"]
    y = np_conv(x, p["conv1"]["kernel"], 2, pad)
    y = np.maximum(np_batch_norm(y, p["bn1"], s["bn1"], train=True)[0], 0)
    want = {k: np_max_pool(y, w) for k, w in (("torch", (1, 1)), ("same", (0, 1)))}
    np.testing.assert_allclose(got, want[padding].mean((1, 2)), rtol=1e-4, atol=1e-5)
    assert np.abs(want["torch"] - want["same"]).max() > 0.1


@pytest.mark.parametrize("fan", ["in", "out"])
@pytest.mark.parametrize("shape", [(3, 2, 5, 4), (6, 3), (7, 7, 1, 8)])
def test_a_kernel_drawn_as_a_matrix_has_the_same_values(shape, fan):
    key = jax.random.key(0)
    for kind in ("normal", "uniform"):
        plain = nn.initializers.variance_scaling(2.0, f"fan_{fan}", kind)
        drawn = layers.draw_matrix(plain, fan)(key, shape)
        np.testing.assert_array_equal(drawn, plain(key, shape))


def test_kernels_are_kaiming_normal_over_fan_out():
    net = OneConv((64, 3, 1, "same"), "kaiming")
    kernel = variables(net, jnp.zeros((1, 4, 4, 16)))["params"]["conv1"]["kernel"]
    want = np.sqrt(2 / (3 * 3 * 64))  # 9,216 draws: std is known to 0.7 %
    assert abs(np.std(kernel) / want - 1) < 0.03
    assert np.abs(kernel).max() > 3 * want  # not truncated at two deviations


# --- whole networks -----------------------------------------------------------


@pytest.mark.parametrize(
    "depth,count,features",
    [(18, 11_176_512, 512), (34, 21_284_672, 512), (50, 23_508_032, 2048)],
)
def test_as_many_parameters_as_torchvision(depth, count, features):
    net = resnet.resnet(depth=depth, stem="imagenet")
    images = jnp.zeros((2, 64, 64, 3))
    tree = jax.eval_shape(lambda key: net.init(key, images), jax.random.key(0))
    assert sum(leaf.size for leaf in jax.tree.leaves(tree["params"])) == count
    out = jax.eval_shape(net.apply, tree, images)
    assert out.shape == (2, features) and out.dtype == jnp.float32
    assert net.num_features == features


NETS = {
    "basic": resnet.ResNet((1, 2), width=2),
    "pnr stem": resnet.ResNet((1, 1), width=3, stem_padding=2),
    "bottleneck": resnet.ResNet((1, 1), block="bottleneck", width=2),
    "imagenet": resnet.ResNet((1, 1), width=2, stem="imagenet"),
}


@pytest.mark.parametrize("name", NETS)
def test_forward_equals_numpy(name):
    net = NETS[name]
    side = 16 if net.stem == "imagenet" else 8
    images = np.random.default_rng(7).normal(size=(3, side, side, 3)).astype("f4")
    tree = drawn(net, images)
    got, stats = apply_plainly(tree=tree, x=images, net=net)
    want, want_stats = np_resnet(net, tree, images)
    assert got.shape == (3, net.num_features)
    np.testing.assert_allclose(got, want, rtol=2e-4, atol=2e-5)
    chex.assert_trees_all_close(stats, want_stats, rtol=2e-4, atol=2e-5)


def test_conv_net():
    net = resnet.conv_net(width=2)
    images = np.random.default_rng(8).normal(size=(4, 8, 8, 1)).astype("f4")
    tree = randomised(variables(net, images))
    got, _ = train_apply(net, tree, images)
    x = images
    for i, stride in ((1, 1), (2, 2), (3, 2)):
        x = np_conv(x, tree["params"][f"conv{i}"]["kernel"], stride, (1, 1))
        p, s = tree["params"][f"bn{i}"], tree["batch_stats"][f"bn{i}"]
        x = np.maximum(np_batch_norm(x, p, s, train=True)[0], 0)
    assert got.shape == (4, net.num_features) == (4, 8)
    np.testing.assert_allclose(got, x.mean((1, 2)), rtol=1e-4, atol=1e-5)


def test_zero_init_residual_makes_blocks_their_shortcut():
    images = np.random.default_rng(9).normal(size=(2, 8, 8, 3)).astype("f4")
    blocks = resnet.ResNet((2,), width=2, zero_init_residual=True)
    tree = variables(blocks, images)
    stem = {k: {n: v[n] for n in v if n in ("conv1", "bn1")} for k, v in tree.items()}
    got, _ = train_apply(blocks, tree, images)
    want, _ = train_apply(resnet.ResNet((), width=2), stem, images)
    np.testing.assert_allclose(got, want, rtol=1e-6)


@pytest.mark.parametrize("block, last", [("basic", "bn2"), ("bottleneck", "bn3")])
def test_the_last_norm_of_a_block_alone_starts_at_zero(block, last):
    net = resnet.ResNet((2,), block=block, width=1, zero_init_residual=True)
    params = jax.jit(net.init)(jax.random.key(0), jnp.ones((1, 2, 2, 1)))["params"]
    for name, tree in params.items():
        for norm in {"bn1", "bn2", "bn3", "downsample_bn"} & set(tree):
            scale = np.asarray(tree[norm]["scale"])
            assert (scale == (0 if norm == last else 1)).all(), (name, norm)
    assert (params["bn1"]["scale"] == 1).all()  # of the stem


def test_a_branch_is_dropped_by_row_and_weighed_up():
    """Three of four rows keep it, and have it by 4/3: the mean stays."""
    block = types.SimpleNamespace(layer_scale=None, drop=0.25)
    x, key = jnp.zeros((2000, 3)), jax.random.key(0)
    rows = layers.add_branch(block, x, x + 1, key, scale="scale")
    assert (np.ptp(rows, axis=1) == 0).all()
    np.testing.assert_allclose(np.unique(rows), [0, 4 / 3], rtol=1e-6)
    np.testing.assert_allclose(np.mean(rows), 1, atol=0.06)
    whole = layers.add_branch(block, x, x + 1, None, scale="scale")
    np.testing.assert_array_equal(whole, 1)


def test_groups_reach_every_layer():
    net = resnet.ResNet((1, 1), width=2)
    images = np.random.default_rng(10).normal(size=(6, 8, 8, 3)).astype("f4")
    images[1::2] = 3 * images[1::2] + 1
    tree = drawn(net, images)
    got, stats = apply_plainly(tree=tree, x=images, net=net, groups=2)
    first, between = apply_plainly(tree=tree, x=images[0::2], net=net)
    then = {"params": tree["params"], "batch_stats": between}
    second, want_stats = apply_plainly(tree=then, x=images[1::2], net=net)
    np.testing.assert_allclose(got[0::2], first, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(got[1::2], second, rtol=1e-4, atol=1e-5)
    chex.assert_trees_all_close(stats, want_stats, rtol=1e-4, atol=1e-5)


def test_bfloat16_computes_in_bfloat16_and_keeps_float32():
    images = np.random.default_rng(11).normal(size=(4, 8, 8, 3)).astype("f4")
    net = resnet.ResNet((1, 1), width=4)
    twins.check_bfloat16_network(net, variables(net, images), images, train_apply)


# --- heads --------------------------------------------------------------------


def np_hidden(x, tree, count):
    """The hidden layers of a perceptron, two groups of rows one after the other."""
    y, params = x.astype(np.float64).reshape(len(x), -1), tree["params"]
    for i in range(1, count + 1):
        y = y @ params[f"linear{i}"]["kernel"] + params[f"linear{i}"]["bias"]
        if "batch_stats" in tree:
            stats = tree["batch_stats"][f"bn{i}"]
            y, _ = np_sequential(y, params[f"bn{i}"], stats, 2)
        y = np.maximum(y, 0)
    return y


@pytest.mark.parametrize("batch_norm", [False, True])
def test_mlp_equals_numpy(batch_norm):
    net = mlp.MLP((5, 4, 3), batch_norm=batch_norm)
    x = np.random.default_rng(12).normal(size=(6, 7)).astype("f4")
    x[1::2] += 2.0
    tree = drawn(net, x)
    got, _ = apply_plainly(tree=tree, x=x, net=net, groups=2)
    y = np_hidden(x, tree, 2)
    y = y @ tree["params"]["linear3"]["kernel"] + tree["params"]["linear3"]["bias"]
    np.testing.assert_allclose(got, y, rtol=1e-4, atol=1e-5)
    assert ("batch_stats" in tree) == batch_norm


def test_mlp_starts_as_pytorch_linear():
    net = mlp.MLP((400, 400), dtype=jnp.bfloat16)
    x = jnp.zeros((1, 25))
    tree = variables(net, x)
    for name, fan_in in (("linear1", 25), ("linear2", 400)):
        for leaf in tree["params"][name].values():
            assert leaf.dtype == jnp.float32
            # Uniform in +-1/sqrt(fan_in): the extremes and the spread.
            scaled = np.asarray(leaf) * np.sqrt(fan_in)
            assert 0.97 < np.abs(scaled).max() <= 1.0
            assert abs(scaled.std() * np.sqrt(3) - 1) < 0.12
    assert net.apply(tree, x).dtype == jnp.float32


def shapes_of(net):
    """Layers of a head on 512 features, in order."""
    made = jax.eval_shape(
        lambda key: net.init(key, jnp.zeros((2, 512))), jax.random.key(0)
    )
    tree, layers = made["params"], []
    for i in range(1, len(net.features) + 1):
        layers.append(tree[f"linear{i}"]["kernel"].shape)
        assert tree[f"linear{i}"]["bias"].shape == layers[-1][1:]
        if f"bn{i}" in made.get("batch_stats", {}):
            layers += ["bn" if f"bn{i}" in tree else "bare bn"]
    return layers


@pytest.mark.parametrize(
    "base,layers",
    [
        ("simclr", [(512, 2048), (2048, 128)]),
        ("supcon", [(512, 2048), (2048, 128)]),
        ("mocov2plus", [(512, 2048), (2048, 128)]),
        ("byol", [(512, 4096), "bn", (4096, 256)]),
        ("barlow_twins", [(512, 2048), "bn", (2048, 2048), "bn", (2048, 2048)]),
        ("vicreg", [(512, 2048), "bn", (2048, 2048), "bn", (2048, 2048)]),
        ("lejepa", [(512, 2048), "bn", (2048, 2048), "bn", (2048, 64)]),
        ("dino", [(512, 2048), (2048, 2048), (2048, 256)]),
        ("swav", [(512, 2048), "bn", (2048, 128)]),
        ("nnclr", [(512, 2048), "bn", (2048, 2048), "bn", (2048, 256), "bare bn"]),
        ("simsiam", [(512, 2048), "bn", (2048, 2048), "bn", (2048, 2048), "bare bn"]),
    ],
)
def test_projector_layers(base, layers):
    assert shapes_of(mlp.projector(bases.make_base(base).projector)) == layers
    shape = bases.make_base(base).projector._replace(hidden_dim=5, output_dim=3)
    small = mlp.projector(shape, dtype=jnp.bfloat16)
    assert small.features == (5,) * (len(small.features) - 1) + (3,)
    assert small.dtype == jnp.bfloat16


# --- a perceptron as an encoder -----------------------------------------------


@pytest.mark.parametrize("batch_norm", [False, True])
def test_perceptron_equals_numpy(batch_norm):
    net = mlp.perceptron(widths=(5, 4), batch_norm=batch_norm)
    x = np.random.default_rng(12).normal(size=(6, 3, 2, 1)).astype("f4")
    tree = randomised(variables(net, x))
    got, _ = train_apply(net, tree, x, groups=2)
    np.testing.assert_allclose(got, np_hidden(x, tree, 2), rtol=1e-4, atol=1e-5)
    assert got.shape[1] == net.num_features == 4
    assert ("batch_stats" in tree) == batch_norm


@pytest.mark.parametrize("start", ["torch", "glorot"])
def test_perceptron_and_the_head_behind_it_start_as_asked(start):
    net = online.Network(mlp.perceptron(widths=(300,), start=start), "linear", 100)
    params, _ = jax.jit(net.init)(jax.random.key(0), jnp.zeros((1, 5, 5, 1)))
    inner = params["encoder"]["linear1"]
    for weight, bias, fan_in, fan_out in (
        (inner["kernel"], inner["bias"], 25, 300),
        (params["head"]["weight"], params["head"]["bias"], 300, 100),
    ):
        bound = fan_in**-0.5 if start == "torch" else (6 / (fan_in + fan_out)) ** 0.5
        scaled = np.asarray(weight) / bound
        assert 0.98 < np.abs(scaled).max() <= 1
        assert abs(scaled.std() * np.sqrt(3) - 1) < 0.05
        assert bool(np.any(np.asarray(bias))) == (start == "torch")


def test_dropout_draws_anew_in_every_pass_of_training_alone():
    net = mlp.perceptron(widths=(400,), dropout=0.25)
    x = jax.random.normal(jax.random.key(3), (50, 4, 4, 1))
    tree = variables(net, x)
    plain = np.asarray(net.apply(tree, x))
    whole = mlp.perceptron(widths=(400,)).apply({"params": tree["params"]}, x)
    np.testing.assert_array_equal(plain, whole)
    one, after = train_apply(net, tree, x)
    again, _ = train_apply(net, tree, x)
    other, last = train_apply(net, tree | {"batch_stats": after}, x)
    np.testing.assert_array_equal(one, again)
    assert (np.asarray(one) != np.asarray(other)).any()
    keys = [s["key"].tolist() for s in (tree["batch_stats"], after, last)]
    assert len({*map(tuple, keys)}) == 3
    for found in (np.asarray(one), np.asarray(other)):
        kept = found[plain > 0] != 0
        assert abs(kept.mean() - 0.75) < 0.02
        wanted = np.where(found != 0, plain / 0.75, 0)
        np.testing.assert_allclose(found, wanted, rtol=1e-5)
    # Another run has another key.
    seed = variables(net, x, seed=1)["batch_stats"]["key"]
    assert seed.tolist() != keys[0]


@pytest.mark.parametrize(
    "net, branches",
    [
        (vit.vit(width=8, layers=4, heads=2, hidden=8, patch=4, drop_path=0.3), 2),
        (convnext.convnext(depths=(1, 2, 1), width=4, patch=1, drop_path=0.3), 1),
    ],
)
def test_the_chance_to_skip_a_branch_rises_to_that_of_the_last_block(
    net, branches, monkeypatch
):
    chances = []

    def record(block, x, branch, key, *, scale):
        chances.append(block.drop)
        return x + branch

    monkeypatch.setattr(layers, "add_branch", record)
    images = jax.ShapeDtypeStruct((1, 8, 8, 1), jnp.float32)
    jax.eval_shape(net.init, jax.random.key(0), images)
    np.testing.assert_allclose(chances, np.repeat([0, 0.1, 0.2, 0.3], branches))


GRAPHS = graph_arrays.pad_batch(
    graph_sets.graph_set([[(0, 1), (1, 2)]] * 2, [3, 3]),
    np.arange(2),
    nodes=8,
    edges=16,
    graphs=3,
)
DROPS = {
    "perceptron": mlp.perceptron(widths=(4, 4, 4), dropout=0.5),
    "vit": vit.vit(width=8, layers=3, heads=2, hidden=8, patch=4, drop_path=0.3),
    "convnext": convnext.convnext(depths=(1, 2), width=4, patch=1, drop_path=0.3),
    "gcn": gcn.gcn(width=4, layers=3),
}


@pytest.mark.parametrize("name", DROPS)
def test_no_two_layers_drop_by_one_key(name):
    net, key = DROPS[name], jax.random.key(1)
    inputs = GRAPHS if name == "gcn" else jnp.zeros((2, 8, 8, 1))
    drawn = {} if name == "perceptron" else {"key": key}  # it keeps its own
    tree = jax.eval_shape(net.init, key, inputs)
    tree = jax.tree.map(lambda x: np.zeros(x.shape, x.dtype), tree)

    def run(tree, inputs, drawn):
        return net.apply(tree, inputs, train=True, mutable="batch_stats", **drawn)

    given = tree, inputs, drawn
    uses = key_uses.of(jax.make_jaxpr(run)(*given), jax.tree.leaves(given))
    assert sum(kind == "draw" for _, kind in uses) > 1
    assert not key_uses.shared(uses)
