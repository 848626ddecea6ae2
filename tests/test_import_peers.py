"""Features of imported networks equal those of the library they come from.

Weights are random, all of them, so that every one matters: released ones cannot be had
in a test. Networks are narrow and shallow where the library lets them be.
"""

import chex
import jax
import numpy as np
import pytest
from safetensors import numpy as tensors

import jaxcl
from helpers import torch_peers
from jaxcl.nets import positions
from jaxcl.weights import architectures, import_file, pytorch

torch = pytest.importorskip(
    "torch", reason="PyTorch is not installed: pip install torch==2.13.0"
)
WIDTH, HEADS = 32, 2
PREPARED = {"heads": HEADS, "mean": (0.5,), "std": (0.25,)}


def shaken(model, seed=0):
    """The model in evaluation mode, every number away from where it begins."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, x in model.named_parameters():
            noise = torch.randn(x.shape, generator=generator)
            if x.ndim >= 2 and "token" not in name and "pos" not in name:
                x.copy_(noise * x[0].numel() ** -0.5)
            elif x.ndim == 1 and name.endswith("weight"):
                x.copy_(1 + 0.2 * noise)  # of a norm
            elif any(part in name for part in ("gamma", "lambda")):
                x.copy_(1 + 0.3 * noise)
            else:
                x.copy_(0.3 * noise)
        for name, x in model.named_buffers():
            if name.endswith("running_mean"):
                x.copy_(0.3 * torch.randn(x.shape, generator=generator))
            if name.endswith("running_var"):
                x.copy_(0.7 + torch.rand(x.shape, generator=generator))
    return model.eval()


def images_of(height, width, count=2):
    rng = np.random.default_rng(1)
    return rng.normal(size=(count, height, width, 3)).astype(np.float32)


def state_of(model):
    return {name: x.numpy().copy() for name, x in model.state_dict().items()}


def imported(folder, state, architecture, **options):
    """Our encoder of a state dict, through a file."""
    path = folder / "model.safetensors"
    path.write_bytes(tensors.save(state))
    import_file.import_file(str(path), architecture, str(folder / "out"), **options)
    return jaxcl.load_encoder(folder / "out")


def check(made, model, images, tolerance=1e-4):
    """Ours and theirs; `model` takes [B, C, H, W] and gives features."""
    with torch.no_grad():
        theirs = model(torch.from_numpy(images.transpose(0, 3, 1, 2).copy())).numpy()
    result = jax.jit(lambda p, s, x: made.apply(p, s, x)[0])(
        made.params, made.stats, images
    )
    assert result.shape == theirs.shape and np.std(theirs, axis=0).max() > 1e-2
    np.testing.assert_allclose(result, theirs, rtol=tolerance, atol=tolerance)


TIMM = {
    "vit": ("deit", {}),
    "deit3": ("deit3", {"init_values": 1.0, "no_embed_class": True}),
    "dinov2": ("dinov2", {"init_values": 1.0}),
    "dinov2-registers": (
        "dinov2",
        {"init_values": 1.0, "reg_tokens": 3, "no_embed_class": True},
    ),
    "dinov2-gated": ("dinov2", {"init_values": 1.0, "mlp_ratio": 4.0, "gated": True}),
}


def timm_vit(gated=False, **options):
    timm = torch_peers.library("timm")
    if gated:
        options |= {"mlp_layer": timm.layers.SwiGLUPacked, "act_layer": torch.nn.SiLU}
    made = timm.models.vision_transformer.VisionTransformer(
        **{"img_size": 24, "patch_size": 8, "embed_dim": WIDTH, "depth": 2}
        | {"num_heads": HEADS, "mlp_ratio": 3.0, "num_classes": 0}
        | {"dynamic_img_size": True, "global_pool": "token"}
        | options
    )
    return shaken(made)


@pytest.mark.parametrize("name", TIMM)
def test_transformers_of_timm(name, tmp_path):
    architecture, options = TIMM[name]
    model = timm_vit(**options)
    encoder = imported(tmp_path, state_of(model), architecture, size=24, **PREPARED)
    check(encoder, model, images_of(24, 24))
    if name in ("vit", "dinov2-registers"):
        check(encoder, model, images_of(16, 40))  # positions are resized
    # And back: what --torch writes is what timm had.
    state = pytorch.torch_state(encoder)
    assert state.keys() == model.state_dict().keys()
    for key, x in model.state_dict().items():
        np.testing.assert_allclose(state[key], x.numpy(), atol=1e-6, err_msg=key)


@pytest.mark.parametrize("biased", ["", "_qkvb"])
@pytest.mark.parametrize("size", ["small", "small_plus"])
def test_dinov3_of_timm(size, biased, tmp_path):
    timm = torch_peers.library("timm")
    small = dict(embed_dim=WIDTH, depth=2, num_heads=HEADS, global_pool="token")
    name = f"vit_{size}_patch16_dinov3{biased}"
    made = timm.create_model(name, pretrained=False, num_classes=0, **small)
    model = shaken(made)
    made = imported(tmp_path, state_of(model), "dinov3", size=32, **PREPARED)
    check(made, model, images_of(32, 48))
    state = pytorch.torch_state(made)
    assert state.keys() == model.state_dict().keys()
    if biased:  # and as Meta's files have it: one tensor, with biases of keys masked
        hub = renamed_to_hub(state)
        (tmp_path / "hub").mkdir()
        again = imported(tmp_path / "hub", hub, "dinov3", size=32, **PREPARED)
        assert again.card["imported"]["names"] == "dinov3"
        check(again, model, images_of(32, 48))


def renamed_to_hub(state):
    """Timm's names of DINOv3 -> Meta's."""
    hub = {"mask_token": np.zeros((1, WIDTH), "f4")}
    hub["rope_embed.periods"] = np.ones(4, "f4")
    names = {"reg_token": "storage_tokens", "gamma_1": "ls1.gamma"}
    names |= {"gamma_2": "ls2.gamma", "fc1_g": "w1", "fc1_x": "w2"}
    gated = any("fc1_g" in name for name in state)
    names |= {"mlp.fc2": "mlp.w3"} if gated else {}
    for name, x in state.items():
        if name.endswith("q_bias"):
            begin = name.removesuffix("q_bias")
            other = np.full_like(x, 3.0)  # it is masked, whatever it is
            biases = [x, other, state[f"{begin}v_bias"]]
            hub[f"{begin}qkv.bias"] = np.concatenate(biases)
            mask = np.repeat(np.array([1, 0, 1], "f4"), len(x))
            hub[f"{begin}qkv.bias_mask"] = mask
        elif not name.endswith("v_bias"):
            for old, new in names.items():
                name = name.replace(old, new)
            hub[name] = x
    return hub


# The names that these networks have in the files of their authors


def as_dino(state):
    """Student and teacher of DINO's checkpoints, with their heads."""
    other = {name: 2 * x for name, x in state.items()}
    both = {"student.module.backbone.": other, "teacher.backbone.": state}
    heads = {"teacher.head.mlp.0.weight": np.ones((3, WIDTH), "f4")}
    return heads | {
        f"{begin}{n}": x for begin, own in both.items() for n, x in own.items()
    }


def as_mae(state):
    """MAE's encoder, and the decoder of its pre-training."""
    grown = {"mask_token": np.ones((1, 1, 8), "f4")}
    grown |= {"decoder_embed.weight": np.ones((8, WIDTH), "f4")}
    return state | grown | {"decoder_pos_embed": np.ones((1, 10, 8), "f4")}


def as_mocov3(state):
    """The two encoders of MoCo v3's checkpoints, each with a head."""
    other = {name: 2 * x for name, x in state.items()}
    both = {"module.base_encoder.": state, "module.momentum_encoder.": other}
    whole = {f"{begin}{n}": x for begin, own in both.items() for n, x in own.items()}
    return whole | {"module.base_encoder.head.0.weight": np.ones((3, WIDTH), "f4")}


def as_deit3(state):
    """DeiT III, where scales lie in the block itself."""
    names = {"ls1.gamma": "gamma_1", "ls2.gamma": "gamma_2"}
    return renamed(state, names) | {"head.weight": np.ones((3, WIDTH), "f4")}


def as_dinov2(state):
    """Meta's DINOv2: its class token has a position of its own."""
    gated = any("mlp.fc1" in n and len(x) == 2 * 64 for n, x in state.items())
    names = {"reg_token": "register_tokens"}
    names |= {"mlp.fc1": "mlp.w12", "mlp.fc2": "mlp.w3"} if gated else {}
    hub = renamed(state, names) | {"mask_token": np.zeros((1, WIDTH), "f4")}
    if hub["pos_embed"].shape[1] == 9:  # timm has added it to the token
        own = np.full((1, 1, WIDTH), 0.5, "f4")
        hub["pos_embed"] = np.concatenate([own, hub["pos_embed"]], axis=1)
        hub["cls_token"] = hub["cls_token"] - own
    return hub


def renamed(state, names):
    for old, new in names.items():
        state = {name.replace(old, new): x for name, x in state.items()}
    return state


# architecture-... -> as whose files have it, the names that are found, the prefix
AUTHORS = {
    "dino": (as_dino, "timm", "teacher.backbone"),
    "mae": (as_mae, "timm", None),
    "mocov3": (as_mocov3, "timm", "module.base_encoder"),
    "deit3": (as_deit3, "deit3", None),
    "dinov2": (as_dinov2, "dinov2", None),
    "dinov2-registers": (as_dinov2, "dinov2", None),
    "dinov2-gated": (as_dinov2, "dinov2", None),
}


@pytest.mark.parametrize("name", AUTHORS)
def test_transformers_by_the_names_of_their_authors(name, tmp_path):
    architecture, options = TIMM.get(name, (name, {}))
    as_theirs, names, prefix = AUTHORS[name]
    model = timm_vit(**options)
    state = as_theirs(state_of(model))
    more = PREPARED | {"prefix": prefix}
    encoder = imported(tmp_path, state, architecture, size=24, **more)
    assert encoder.card["imported"]["names"] == names
    check(encoder, model, images_of(24, 24))
    if name == "dinov2-registers":  # the other rules are not timm's
        check(encoder, model, images_of(16, 40))


# architecture -> timm's networks that were published under its name
PUBLISHED = {
    "augreg": ("tiny_patch16", "small_patch32", "base_patch8", "large_patch16")
    + ("huge_patch14", "giant_patch14", "gigantic_patch14"),
    "deit": ("deit_tiny", "deit_small", "deit_base"),
    "deit3": ("deit3_small", "deit3_medium", "deit3_base", "deit3_large")
    + ("deit3_huge_patch14",),
    "mae": ("base_patch16", "large_patch16", "huge_patch14"),
    "dinov2": ("small", "base", "large", "giant"),
    "dinov3": ("small", "base", "large", "huge_plus", "7b"),
}


@pytest.mark.parametrize("architecture", PUBLISHED)
def test_heads_are_those_of_the_published_sizes(architecture):
    timm = torch_peers.library("timm")
    end = {"dinov2": "_patch14_dinov2", "dinov3": "_patch16_dinov3"}
    for size in PUBLISHED[architecture]:
        name = f"{size}_224" if "patch" in size else f"{size}_patch16_224"
        name = size + end[architecture] if architecture in end else name
        name = name if name.startswith("deit") else f"vit_{name}"
        with torch.device("meta"):
            model = timm.create_model(name, pretrained=False)
        known = architectures.look_up(architecture).heads
        block = model.blocks[0]
        assert known[model.embed_dim, len(model.blocks)] == block.attn.num_heads
        assert block.norm1.eps == architectures.look_up(architecture).epsilon


SHAPE = dict(hidden_size=WIDTH, num_hidden_layers=2, num_attention_heads=HEADS)
SHAPE |= dict(intermediate_size=80, patch_size=8)
TRANSFORMERS = {
    "ViT": ("augreg", dict(image_size=24)),
    "Dinov2": ("dinov2", dict(image_size=24, mlp_ratio=3)),
    "Dinov2-gated": ("dinov2", dict(image_size=24, use_swiglu_ffn=True)),
    "Dinov2WithRegisters": ("dinov2", dict(image_size=24, num_register_tokens=2)),
    "DINOv3ViT": ("dinov3", dict(num_register_tokens=2)),
    "DINOv3ViT-gated": ("dinov3", dict(use_gated_mlp=True, hidden_act="silu")),
}


@pytest.mark.parametrize("name", TRANSFORMERS)
def test_networks_of_transformers(name, tmp_path):
    transformers = torch_peers.library("transformers")
    architecture, options = TRANSFORMERS[name]
    kind = name.partition("-")[0]
    config = getattr(transformers, f"{kind}Config")(**SHAPE | options)
    more = {"add_pooling_layer": False} if kind == "ViT" else {}
    model = shaken(getattr(transformers, f"{kind}Model")(config, **more))
    model.save_pretrained(tmp_path)
    own = {"heads": None} if kind == "ViT" else {}  # its config.json says them
    out = tmp_path / "out"
    source = str(tmp_path / "model.safetensors")
    import_file.import_file(source, architecture, str(out), size=24, **PREPARED | own)
    encoder = jaxcl.load_encoder(out)
    if kind == "ViT":
        assert encoder.card["encoder"]["epsilon"] == 1e-12
    assert encoder.card["encoder"]["heads"] == HEADS
    plain = {"interpolate_pos_encoding": True} if kind == "ViT" else {}

    def features(x):
        return model(x, **plain).last_hidden_state[:, 0]

    check(encoder, features, images_of(24, 24))
    check(encoder, features, images_of(16, 40))


@pytest.mark.parametrize("depth", [18, 34, 50, 101])
def test_resnets_of_torchvision(depth, tmp_path):
    torchvision = torch_peers.library("torchvision")
    width = {"width_per_group": 64}  # the narrowest that it takes
    model = shaken(getattr(torchvision.models, f"resnet{depth}")(**width))
    torch.save(model.state_dict(), tmp_path / "resnet.pth")
    out = tmp_path / "out"
    import_file.import_file(str(tmp_path / "resnet.pth"), "resnet", str(out))
    encoder = jaxcl.load_encoder(out)
    model.fc = torch.nn.Identity()
    check(encoder, model, images_of(64, 64))


# library -> what its names begin with, and what else its files hold
RESNETS = {
    "moco": ("module.encoder_q.", ("module.encoder_q.fc.2.bias", "module.queue")),
    "simsiam": ("module.encoder.", ("module.predictor.0.weight",)),
    "solo": ("backbone.", ("projector.0.weight",)),
}


def test_resnets_of_timm_and_of_its_names(tmp_path):
    timm = torch_peers.library("timm")
    model = shaken(timm.create_model("resnet18", pretrained=False, num_classes=0))
    own = state_of(model)
    (tmp_path / "timm").mkdir()
    encoder = imported(tmp_path / "timm", own, "resnet")
    check(encoder, model, images_of(64, 64))
    for library, (prefix, others) in RESNETS.items():
        state = {f"{prefix}{name}": x for name, x in own.items()}
        if library == "moco":  # the encoder of the keys
            state |= {f"module.encoder_k.{n}": np.ones_like(x) for n, x in own.items()}
        state |= {name: np.ones((4,), "f4") for name in others}
        (tmp_path / library).mkdir()
        asked = {"prefix": "module.encoder_q"} if library == "moco" else {}
        again = imported(tmp_path / library, state, "resnet", **asked)
        assert again.card["imported"]["prefix"] == prefix.removeprefix("module.")
        for name in ("params", "stats"):  # and so the same features
            chex.assert_trees_all_equal(getattr(again, name), getattr(encoder, name))
    # The plain kind differs in the pixels that it is given.
    (tmp_path / "plain").mkdir()
    plain = imported(tmp_path / "plain", own, "resnet_plain", size=64)
    rng = np.random.default_rng(2)
    pixels = rng.integers(0, 256, (2, 64, 64, 3)).astype(np.uint8)
    given = torch.from_numpy((pixels / np.float32(255)).transpose(0, 3, 1, 2).copy())
    with torch.no_grad():
        theirs = model(given).numpy()
    np.testing.assert_allclose(plain.embed(pixels), theirs, rtol=1e-4, atol=1e-4)


CONVNEXT = dict(depths=(1, 2, 1, 1), dims=(8, 16, 32, 64))
KINDS = {
    "v1": {"ls_init_value": 1.0},
    "v1-convolutions": {"ls_init_value": 1.0, "conv_mlp": True},
    "v2": {"ls_init_value": None, "use_grn": True},
}


@pytest.mark.parametrize("kind", KINDS)
def test_convnexts_of_timm(kind, tmp_path):
    timm = torch_peers.library("timm")
    made = timm.models.convnext.ConvNeXt(num_classes=0, **CONVNEXT | KINDS[kind])
    model = shaken(made)
    made = imported(tmp_path, state_of(model), "convnext", size=64)
    assert made.card["imported"]["names"] == "timm_convnext"
    assert made.card["encoder"]["depths"] == [1, 2, 1, 1]
    check(made, model, images_of(64, 64))
    check(made, model, images_of(50, 71))  # what windows do not fill is left out
    state = pytorch.torch_state(made)
    assert state.keys() == model.state_dict().keys()
    for key, x in model.state_dict().items():
        x = x.numpy().reshape(state[key].shape)
        np.testing.assert_allclose(state[key], x, atol=1e-6, err_msg=key)
    if kind == "v1":  # and by Meta's names, as DINOv3's files have them
        (tmp_path / "hub").mkdir()
        again = imported(tmp_path / "hub", renamed_to_meta(state), "dinov3_convnext")
        assert again.card["imported"]["names"] == "meta_convnext"
        check(again, model, images_of(64, 64))


def renamed_to_meta(state):
    """Timm's names of ConvNeXt -> Meta's."""
    names = {"stem.": "downsample_layers.0.", ".blocks": "", "conv_dw": "dwconv"}
    names |= {"mlp.fc": "pwconv", "head.norm": "norm"}
    hub = {}
    for name, x in state.items():
        if ".downsample." in name:
            _, stage, _, layer, leaf = name.split(".")
            name = f"downsample_layers.{stage}.{layer}.{leaf}"
        for old, new in names.items():
            name = name.replace(old, new)
        hub[name] = x
    return hub | {
        "norms.3.weight": np.ones(64, "f4"),
        "norms.3.bias": np.ones(64, "f4"),
    }


def test_convnexts_of_torchvision(tmp_path):
    models = torch_peers.library("torchvision").models.convnext
    widths = (8, 16, 32, 64, None)
    stages = [
        models.CNBlockConfig(own, after, depth)
        for own, after, depth in zip(widths, widths[1:], (1, 2, 1, 1), strict=False)
    ]
    model = shaken(models.ConvNeXt(stages, layer_scale=1.0))
    torch.save(model.state_dict(), tmp_path / "convnext.pth")
    out = tmp_path / "out"
    card = import_file.import_file(str(tmp_path / "convnext.pth"), "convnext", str(out))
    assert card["imported"]["names"] == "torchvision_convnext"
    assert card["imported"]["dropped"] == ["classifier.2.bias", "classifier.2.weight"]
    model.classifier[2] = torch.nn.Identity()
    check(jaxcl.load_encoder(out), model, images_of(64, 64))


@pytest.mark.parametrize("kind", ["ConvNext", "ConvNextV2", "DINOv3ConvNext"])
def test_convnexts_of_transformers(kind, tmp_path):
    transformers = torch_peers.library("transformers")
    config = getattr(transformers, f"{kind}Config")(
        hidden_sizes=list(CONVNEXT["dims"]), depths=list(CONVNEXT["depths"])
    )
    model = shaken(getattr(transformers, f"{kind}Model")(config))
    model.save_pretrained(tmp_path)
    dinov3 = kind == "DINOv3ConvNext"
    out, source = tmp_path / "out", str(tmp_path / "model.safetensors")
    import_file.import_file(
        source, "dinov3_convnext" if dinov3 else "convnext", str(out)
    )
    encoder = jaxcl.load_encoder(out)
    check(encoder, lambda x: model(x).pooler_output, images_of(64, 64))


@pytest.mark.parametrize("old, new", [(37, 16), (16, 37), (14, 24), (24, 14), (1, 3)])
def test_positions_are_resized_as_pytorch_does(old, new):
    table = np.random.default_rng(0).normal(size=(old, old, 4)).astype(np.float32)
    x = torch.from_numpy(table.transpose(2, 0, 1).copy())[None]
    bicubic = {"mode": "bicubic", "align_corners": False}
    scale = (new + 0.1) / old
    resize = torch.nn.functional.interpolate
    wanted = {
        "antialias": resize(x, size=(new, new), antialias=True, **bicubic),
        "plain": resize(x, size=(new, new), **bicubic),
        "offset": resize(x, scale_factor=(scale, scale), **bicubic),
    }
    for rule, want in wanted.items():
        found = np.moveaxis(positions.resize_table(table, (new, new), rule), 2, 0)
        np.testing.assert_allclose(found, want[0].numpy(), atol=2e-5, err_msg=rule)
