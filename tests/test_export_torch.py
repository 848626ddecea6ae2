"""PyTorch computes what an exported ResNet does, by the modules of examples/."""

import json

import jax
import numpy as np
import pytest
from safetensors import numpy as tensors

import jaxcl
from helpers import config_files, run_directories, torch_peers
from jaxcl import cli
from jaxcl.nets import layers
from jaxcl.weights import encoder, export, names, pytorch, writer

torch = pytest.importorskip(
    "torch", reason="PyTorch is not installed: pip install torch==2.13.0"
)
EXAMPLES = config_files.ROOT / "examples"
BASIC = {"name": "resnet", "depth": 10, "width": 8}
BOTTLENECK = {"name": "resnet", "depth": 50, "width": 4}
# name -> options of the encoder, pixels, channels; maps are even where strides are 2
NETS = {
    "basic-cifar": (BASIC, 16, 3),
    "basic-cifar-padded": (BASIC | {"depth": 18, "stem_padding": 2}, 16, 3),
    "basic-imagenet": (BASIC | {"stem": "imagenet"}, 64, 3),
    "basic-gray-pooled": (BASIC | {"pool": 2}, 32, 1),
    "basic-deep": (BASIC | {"depth": 34, "width": 4, "stem": "imagenet"}, 65, 3),
    "bottleneck-cifar": (BOTTLENECK | {"stem_padding": 2}, 16, 3),
    "bottleneck-imagenet": (BOTTLENECK | {"stem": "imagenet"}, 64, 3),
}


@pytest.fixture(scope="module")
def example():
    return config_files.load(EXAMPLES / "torch_resnet.py")


def network(options, size, channels, seed=0):
    """An encoder of any numbers, running statistics far from those it starts with."""
    rng = np.random.default_rng(seed)
    section = export._describe_architecture({"encoder": options})
    card = {"encoder": section, "input": {"kind": "images", "channels": channels}}
    card["input"] |= {"size": size, "resize": None, "interpolation": "bicubic"}
    card["input"] |= {"mean": [0.4] * channels, "std": [0.2, 0.3, 0.25][:channels]}
    module, blank = encoder.make_module(section), encoder.blank_inputs(card["input"])
    like = jax.eval_shape(module.init, jax.random.key(0), blank)

    def number(path, leaf):
        kind = path[-1].key
        if kind == "kernel":
            scale = np.sqrt(2 / np.prod(leaf.shape[:-1]))
            return rng.normal(scale=scale, size=leaf.shape).astype(np.float32)
        low, high = (-0.3, 0.3) if kind in ("bias", "mean") else (0.5, 1.5)
        return rng.uniform(low, high, leaf.shape).astype(np.float32)

    made = jax.tree_util.tree_map_with_path(number, like)
    return encoder.make_encoder(card, made["params"], made.get("batch_stats", {}))


def images_for(made, count=3):
    given = made.card["input"]
    shape = count, given["size"], given["size"], given["channels"]
    return np.random.default_rng(1).integers(0, 256, shape, np.uint8)


def twin(example, made, state=None):
    """The example's network with the parameters of an encoder."""
    model = example.ResNet(made.card)
    state = pytorch.torch_state(made) if state is None else state
    model.load_state_dict({name: torch.from_numpy(x) for name, x in state.items()})
    return model.eval()


def check(ours, theirs, tolerance=1e-4):
    theirs = np.asarray(theirs)
    assert ours.shape == theirs.shape and np.std(theirs, axis=0).max() > 1e-2
    gap = np.abs(np.asarray(ours) - theirs).max() / np.abs(theirs).max()
    assert gap < tolerance, gap


@pytest.mark.parametrize("name", NETS)
def test_features_are_the_same(name, example):
    made = network(*NETS[name])
    images = images_for(made)
    with torch.no_grad():
        theirs = twin(example, made)(torch.from_numpy(images))
    check(made.embed(images), theirs)


@pytest.mark.parametrize("name", ["basic-cifar", "basic-imagenet"])
def test_a_training_pass_moves_the_same_statistics(name, example):
    """Momentum, epsilon, and which variance is kept."""
    made = network(*NETS[name])
    images, model = images_for(made, 6), twin(example, made).train()
    theirs = model(torch.from_numpy(images)).detach()
    inputs = made.prepare(images)
    ours, stats = jax.jit(made.apply, static_argnames="train")(
        made.params, made.stats, inputs, train=True
    )
    check(ours, theirs, 1e-3)
    leaves = encoder.flatten_leaves(made.params, stats)
    before = encoder.flatten_leaves(made.params, made.stats)
    moved = model.state_dict()
    for ours_name in leaves:
        if ours_name.startswith("stats/"):
            path = ours_name.partition("/")[2]
            place = names.find_tensor(names.SCHEMES["torchvision"], path)
            want = moved[place.tensor].numpy()
            np.testing.assert_allclose(leaves[ours_name], want, rtol=2e-3, atol=2e-4)
            assert np.abs(want - before[ours_name]).max() > 1e-3
    assert int(moved["bn1.num_batches_tracked"]) == 1
    theirs = [m for m in model.modules() if isinstance(m, torch.nn.BatchNorm2d)]
    ours = layers.BatchNorm()
    assert {m.eps for m in theirs} == {ours.epsilon}
    assert all(m.momentum == pytest.approx(1 - ours.momentum) for m in theirs)


def test_a_folder_of_the_command(example, tmp_path):
    run, out = tmp_path / "run", tmp_path / "out"
    changes = {"encoder": run_directories.RESNET, "augment.size": 16}
    work, _ = run_directories.run_of(
        run, **changes, data={"name": "digits", "size": 16}
    )
    assert cli.main(["export", f"--run={run}", f"--out={out}", "--torch"]) == 0
    model, images = example.load(out), work.stream.evaluation.images[:8]
    assert not model.training
    with torch.no_grad():
        theirs = model(torch.from_numpy(images))
    check(jaxcl.load_encoder(out).embed(images), theirs)
    state = tensors.load((out / "resnet_torch.safetensors").read_bytes())
    assert set(state) == set(model.state_dict())


VIT = {"name": "vit", "width": 16, "layers": 2, "heads": 2, "hidden": 24}
VIT |= {"patch": 4, "image_size": 16}
# name -> options of the encoder, pixels, channels
VITS = {
    "mean": (VIT | {"features": "mean", "registers": 2}, 16, 1),
    "no-biases": (VIT | {"qkv_bias": "none", "epsilon": 0.1}, 16, 3),
    "biases-of-two": (VIT | {"qkv_bias": "query_value"}, 16, 3),
    "fixed": (VIT | {"positions": "sin_cos"}, 24, 3),
    "resized": (VIT | {"resize": "offset"}, 24, 3),
}


def load_transformer(folder):
    return config_files.load(EXAMPLES / "torch_vit.py").load(folder)


@pytest.mark.parametrize("name", VITS)
def test_transformers_are_what_the_example_makes_of_their_cards(name, tmp_path):
    torch_peers.library("timm")
    made, folder = network(*VITS[name]), tmp_path
    (folder / "card.json").write_text(json.dumps(made.card))
    state = pytorch.torch_state(made)
    (folder / writer.PYTORCH["vit"]).write_bytes(tensors.save(state))
    images = images_for(made)
    inputs = np.asarray(made.prepare(images)).transpose(0, 3, 1, 2).copy()
    with torch.no_grad():
        theirs = load_transformer(folder)(torch.from_numpy(inputs))
    check(made.embed(images), theirs)


def test_a_transformer_with_adapters_of_the_command(tmp_path, monkeypatch):
    """Adapters are part of the weights that timm's network loads."""
    torch_peers.library("timm")
    monkeypatch.chdir(tmp_path)
    section = {"name": "vit", "width": 16, "layers": 3, "heads": 2, "hidden": 24}
    section |= {"patch": 4, "image_size": 16, "layer_scale": 0.5, "drop_path": 0.1}
    work, state = run_directories.run_of(
        tmp_path / "run",
        encoder=section,
        tuning={"lora_rank": 2, "lora_on": "all", "open_layers": 1},
        data={"name": "digits", "size": 16, "channels": 3},
        **{"augment.size": 16, "augment.mean": (0.3,) * 3, "augment.std": (0.4,) * 3},
    )
    assert cli.main(["export", "--run=run", "--out=exports/vit", "--torch"]) == 0
    model = load_transformer("exports/vit")
    made = jaxcl.load_encoder("exports/vit")
    inputs = np.asarray(made.prepare(work.stream.evaluation.images[:8]))
    with torch.no_grad():
        theirs = model(torch.from_numpy(inputs.transpose(0, 3, 1, 2).copy()))
    check(jax.jit(work.method.embed)(state, inputs), theirs)
    check(made.embed(work.stream.evaluation.images[:8]), theirs)
    # Without the adapters they are other features.
    bare = {name: x for name, x in state.params["encoder"].items() if name != "lora"}
    ours = jax.jit(lambda params: made.apply(params, made.stats, inputs)[0])(bare)
    with pytest.raises(AssertionError):
        check(ours, theirs)
