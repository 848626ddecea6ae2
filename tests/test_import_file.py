"""Weights of other libraries: read safely, fitted whole or refused by name."""

import contextlib
import io
import json
import os
import pickle
import struct
import sys
import zipfile

import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy as st

import jaxcl
from helpers import foreign_weights
from helpers.foreign_weights import FAMILIES, SMALL, write
from jaxcl import cli
from jaxcl.run import encoder_folder
from jaxcl.weights import (
    architectures,
    encoder,
    files,
    import_file,
    names,
    side_files,
    wrappers,
)

PREPARED = dict(size=12, heads=2)


def foreign(family, seed=0):
    """The tensors of a small network by a library's names, and ours by path."""
    theirs, ours = foreign_weights.make(family, seed)
    return theirs, {name.partition("/")[2]: x for name, x in ours.items()}


@pytest.mark.parametrize("family", FAMILIES)
def test_the_names_of_every_library_are_found_and_read(family, tmp_path):
    known, (theirs, ours) = FAMILIES[family], foreign_weights.make(family)
    scheme = foreign_weights.scheme_of(family)
    for more in names.SCHEMES[scheme].dropped[:1]:
        theirs[f"{more}weight"] = np.zeros((3, 16), "f4")
    if scheme == "transformers_dinov3_convnext":  # as later releases write them
        theirs = {
            name if name.startswith("layer_norm") else f"model.{name}": x
            for name, x in theirs.items()
        }
    source, out = write(tmp_path / "file.safetensors", theirs), tmp_path / "out"
    card = import_file.import_file(source, known.architecture, str(out), **known.given)
    assert card["imported"]["names"] == scheme
    section = card["encoder"]
    for name, value in known.options.items():
        if name != "image_size" or section["positions"] == "learned":
            value = list(value) if isinstance(value, tuple) else value
            assert section[name] == value, name
    saved = st.load((out / encoder_folder.TENSORS).read_bytes())
    assert saved.keys() == ours.keys()
    for name, x in ours.items():
        np.testing.assert_array_equal(saved[name], x, err_msg=name)


def test_the_rows_of_one_tensor_by_hand():
    """Queries, keys, values, in this order, then heads; gates before what they gate."""
    theirs, ours = foreign("dinov2")
    qkv, rows = theirs["blocks.1.attn.qkv.weight"], SMALL["width"]
    for number, name in enumerate(("query", "key", "value")):
        kernel = ours[f"block_1/attention/{name}/kernel"]
        np.testing.assert_array_equal(qkv[number * rows + 9, 3], kernel[3, 9])
    both = theirs["blocks.0.mlp.w12.weight"]
    assert both[5, 2] == ours["block_0/mlp/gate/kernel"][2, 5]
    assert both[SMALL["hidden"] + 5, 2] == ours["block_0/mlp/up/kernel"][2, 5]
    table = theirs["pos_embed"]
    assert table.shape == (1, 10, 16) and table[0, 0, 4] == ours["class_position"][4]
    assert table[0, 1 + 3 * 1 + 2, 4] == ours["positions"][1, 2, 4]
    patch = theirs["patch_embed.proj.weight"]
    assert patch.shape == (16, 3, 4, 4)
    assert patch[7, 2, 1, 3] == ours["patch/kernel"][1, 3, 2, 7]


def of_resnet(path, family="torchvision"):
    """A file of a small ResNet, and our leaves."""
    theirs, ours = foreign_weights.make(family)
    theirs = {f"backbone.{name}": x for name, x in theirs.items()}
    theirs["backbone.bn1.num_batches_tracked"] = np.zeros((), np.int64)
    theirs |= {"backbone.fc.bias": np.zeros(3, "f4"), "queue": np.zeros(3, "f4")}
    return write(path, theirs), ours


def test_a_resnet_comes_back_as_it_was_exported(tmp_path):
    source, leaves = of_resnet(tmp_path / "file.safetensors")
    card = import_file.import_file(source, "resnet", str(tmp_path / "out"), size=32)
    made = jaxcl.load_encoder(tmp_path / "out")
    found = encoder.flatten_leaves(made.params, made.stats)
    assert found.keys() == leaves.keys()
    for name, x in leaves.items():
        np.testing.assert_array_equal(found[name], x, err_msg=name)
    section, said = card["encoder"], card["imported"]
    assert (section["depth"], section["width"], section["stem"]) == (10, 4, "imagenet")
    assert said["prefix"] == "backbone." and said["others"] == 1
    assert "fc.bias" in said["dropped"]


def test_the_padding_of_a_small_stem_is_asked_for(tmp_path):
    source, _ = of_resnet(tmp_path / "file.safetensors", "torchvision-small")
    with pytest.raises(ValueError, match="3 x 3.*--stem-padding"):
        import_file.import_file(source, "resnet", str(tmp_path / "out"), size=32)
    asked = [f"--from={source}", "--architecture=resnet", f"--out={tmp_path / 'out'}"]
    assert cli.main(["import", *asked, "--size=32", "--stem-padding=2"]) == 0
    made = jaxcl.load_encoder(tmp_path / "out").card["encoder"]
    assert (made["stem"], made["stem_padding"]) == ("cifar", 2)


def check_refused(match, source, architecture="deit", **options):
    out = os.path.join(os.path.dirname(source), "out")
    with pytest.raises(ValueError, match=match):
        import_file.import_file(source, architecture, out, **(PREPARED | options))
    assert not os.path.exists(out)


def without(tensors, name):
    return {key: x for key, x in tensors.items() if key != name}


@pytest.mark.parametrize(
    "change, match",
    [
        (
            lambda t: without(t, "blocks.1.mlp.fc2.bias"),
            r"lacks blocks\.1\.mlp\.fc2\.b",
        ),
        (
            lambda t: without(t, "patch_embed.proj.bias"),
            "it lacks patch_embed.proj.bia",
        ),
        (lambda t: t | {"neck.weight": t["norm.bias"]}, "it also has neck.weight"),
        (
            lambda t: t | {"norm.bias": np.zeros(9, "f4")},
            r"norm\.bias has the shape \[9",
        ),
        (lambda t: t | {"cls_token": np.full((1, 1, 16), np.nan, "f4")}, "not finite"),
        (lambda t: t | {"dist_token": t["cls_token"]}, "dist_token"),
        (lambda t: t | {"pos_embed": np.zeros((1, 12, 16), "f4")}, "a square grid has"),
        (
            lambda t: {n.replace("blocks.0.", "blocks.5."): x for n, x in t.items()},
            r"blocks\.0\.\*, of 6",
        ),
        (
            lambda t: {"a.b": t["norm.bias"]},
            "ResNet, ViT or ConvNeXt, but a",
        ),
        (
            lambda t: t | {f"teacher.{n}": x for n, x in t.items()},
            "2 networks.*--prefix.*'', 'teacher'",
        ),
        (
            lambda t: t | {"patch_embed.proj.weight": np.zeros((16, 3, 4, 2), "f4")},
            "4 x 2",
        ),
    ],
)
def test_a_wrong_or_partial_state_dict_names_what_does_not_fit(change, match, tmp_path):
    theirs, _ = foreign("timm")
    check_refused(match, write(tmp_path / "file.safetensors", change(theirs)))


@pytest.mark.parametrize(
    "options, match",
    [
        (
            dict(architecture="resnet"),
            "it is a vit, and --architecture=resnet is a resn",
        ),
        (dict(architecture="dinov3"), "--architecture"),
        (dict(architecture="deitt"), "--architecture='deitt'"),
        (dict(architecture="vit"), "--epsilon"),
        (dict(architecture="vit", epsilon=1e-6, size=None), "--size"),
        (dict(architecture="vit", epsilon=1e-6), "--mean"),
        (dict(heads=None), "--heads"),
        (dict(epsilon=0.0), r"epsilon=0\.0"),
        (dict(size=10), "--size=10"),
        (dict(size=2), "--size=2"),
        (dict(resize=8), "--resize=8"),
        (dict(mean=(0.5, 0.5)), "--mean="),
        (dict(std=(0.0,)), r"--std=0\.0"),
        (dict(stem_padding=1), "--stem-padding"),
        (dict(heads=0), "heads=0"),
        (dict(heads=3), r"config\.encoder\.width=16.*heads=3"),
        (dict(prefix="model"), "--prefix=model"),
    ],
)
def test_wrong_options_are_refused(options, match, tmp_path):
    theirs, _ = foreign("timm")
    check_refused(match, write(tmp_path / "file.safetensors", theirs), **options)


@pytest.mark.parametrize(
    ("options", "field"),
    [
        (dict(heads=2, epsilon=None), "--heads"),
        (dict(features="mean"), "--features"),
        (dict(size=0), "--size=0"),
    ],
)
def test_options_of_a_transformer_are_not_for_a_resnet(options, field, tmp_path):
    source, _ = of_resnet(tmp_path / "file.safetensors")
    check_refused(field, source, "resnet", **({"heads": None, "size": 32} | options))


def test_images_are_large_enough_for_the_stages_of_a_convnext():
    section = {"name": "convnext", "patch": 4, "depths": [1, 1, 1]}
    for size in (15, 16):
        held = contextlib.nullcontext()
        if size < 16:
            held = pytest.raises(ValueError, match=r"--size=15: must be 16 ")
        with held:
            found = import_file._find_sizes(section, {"resize": 20}, size, None)
    assert found == {"size": 16, "resize": 16, "interpolation": "bicubic"}


def test_a_summary_names_what_was_left_out_and_the_licence():
    images = {"size": 8, "resize": 9, "mean": [0.5], "std": [0.2]}
    imported = {"names": "timm", "licence": "mit", "dropped": [f"x{i}" for i in "0123"]}
    card = {"encoder": {"name": "resnet"}, "parameters": 4321, "num_features": 16}
    card |= {"imported": imported, "input": images | {"interpolation": "bicubic"}}
    imported["dropped"] += [f"y{i}" for i in range(6)] + ["a.num_batches_tracked"]
    said = import_file.summarise_card(card)
    assert "4,321" in said and "16" in said and "mit" in said and "heads" not in said
    assert "x3, y0, y1, y2, y3 and 2 more" in said and "tracked" not in said
    imported |= {"dropped": ["x0"], "licence": None}
    said = import_file.summarise_card(card)
    assert "x0" in said and "more" not in said and "licence" not in said


def test_one_of_two_networks_is_chosen_by_its_prefix(tmp_path):
    one, two = foreign("timm"), foreign("timm", seed=5)
    both = {f"model.student.{n}": x for n, x in one[0].items()}
    both |= {f"model.teacher.backbone.{n}": x for n, x in two[0].items()}
    source = write(tmp_path / "file.safetensors", both)
    chosen = PREPARED | {"prefix": "model.teacher.backbone"}
    card = import_file.import_file(source, "dino", str(tmp_path / "out"), **chosen)
    saved = st.load((tmp_path / "out" / encoder_folder.TENSORS).read_bytes())
    np.testing.assert_array_equal(saved["params/class"], two[1]["class"])
    assert card["imported"]["others"] == len(one[0])


def test_the_command_and_what_it_prints(tmp_path, capsys):
    theirs, _ = foreign("transformers")
    source = write(tmp_path / "file.safetensors", theirs)
    stated = {"num_attention_heads": 4, "layer_norm_eps": 1e-7}
    (tmp_path / "config.json").write_text(json.dumps(stated))
    asked = [f"--from={source}", f"--out={tmp_path / 'out'}", "--size=12"]
    asked += ["--architecture=vit", "--mean=0.5", "--std=0.2,0.3,0.4"]
    assert cli.main(["import", *asked]) == 0
    printed = capsys.readouterr().out
    assert "cuts" not in printed  # images of the network's size stay whole
    assert "heads=4 epsilon=1e-07" in printed and "0.2, 0.3, 0.4" in printed
    assert cli.main(["import", *asked]) == 0  # the same again
    assert cli.main(["import", *asked, "--features=mean"]) == 0  # the same tensors
    made = jaxcl.load_encoder(tmp_path / "out")
    assert made.card["encoder"]["features"] == "mean" and made.num_features == 16
    other = write(tmp_path / "other.safetensors", foreign("transformers", 3)[0])
    capsys.readouterr()
    assert cli.main(["import", f"--from={other}", *asked[1:]]) == 2
    assert str(tmp_path / "out") in capsys.readouterr().err
    (tmp_path / "config.json").write_text(json.dumps(stated | {"hidden_act": "relu"}))
    assert cli.main(["import", *asked]) == 2
    assert "'relu'" in capsys.readouterr().err


@pytest.mark.parametrize(
    "name, family",
    [
        ("vit_tiny_patch16_224", "augreg"),
        ("timm/vit_base_patch16_224.augreg2_in21k_ft_in1k", "augreg"),
        ("google/vit-base-patch16-224", "augreg"),
        ("vit_base_patch16_224.mae", "mae"),
        ("facebook/vit-mae-base", "mae"),
        ("vit_small_patch16_224.dino", "dino"),
        ("dino_vits16", "dino"),
        ("dinov2_vits14", "dinov2"),
        ("vit_small_patch14_dinov2.lvd142m", "dinov2"),
        ("facebook/dinov3-vits16-pretrain-lvd1689m", "dinov3"),
        ("facebook/dinov3-convnext-tiny-pretrain-lvd1689m", "dinov3_convnext"),
        ("deit3_small_patch16_224.fb_in1k", "deit3"),
        ("facebook/deit-tiny-patch16-224", "deit"),
        ("convnext_tiny.fb_in1k", "convnext"),
        ("microsoft/resnet-50", "resnet"),
        ("resnet18", "resnet"),
    ],
)
def test_a_published_name_has_its_family(name, family):
    assert architectures.find_family(name) == family
    assert architectures.look_up(name) == architectures.ARCHITECTURES[family]


def test_published_names_of_other_networks_are_refused_and_sizes_are_read():
    for name in ("vit_base_patch16_clip_224.openai", "eva02_tiny", "resnext50"):
        with pytest.raises(ValueError, match=f"--architecture='{name}'"):
            architectures.look_up(name)
    images = architectures.look_up("vit_base_patch16_384").images
    assert (images["size"], images["resize"]) == (384, 384)


# Wrappers of training code


@pytest.mark.parametrize(
    "name, bare",
    [
        ("module._orig_mod.conv1.weight", "conv1.weight"),
        ("_orig_mod.module.a._fsdp_wrapped_module.b", "a.b"),
        ("blocks.0._checkpoint_wrapped_module.norm1.bias", "blocks.0.norm1.bias"),
        ("modules.1.weight", "modules.1.weight"),
    ],
)
def test_wrappers_go_wherever_they_stand(name, bare):
    assert wrappers.strip_prefixes({name: 1, "x.module.y": 2}) == {bare: 1, "x.y": 2}


@pytest.mark.parametrize("numbers", [(0, 1, 2, 3, 4), (0, 1, 0, 1, 0)])
def test_chunks_of_blocks_are_counted_through(numbers):
    chunks = zip((0, 0, 1, 1, 2), numbers, strict=True)
    tensors = {f"a.blocks.{i}.{j}.w": at for at, (i, j) in enumerate(chunks)}
    want = {f"a.blocks.{at}.w": at for at in range(5)}
    assert wrappers.strip_prefixes(tensors) == want
    if numbers[2] == 0:  # with a block less, nobody knows which is which
        del tensors["a.blocks.0.1.w"]
        with pytest.raises(wrappers.RefusedTensors, match="chunks"):
            wrappers.strip_prefixes(tensors)


def sequential(kernel, pooled):
    """A ResNet's tensors by their places in an `nn.Sequential`."""
    first = 4 if pooled else 3
    tensors = {"f.0.weight": np.zeros((4, 3, kernel, kernel)), "f.1.running_mean": 1}
    return tensors | {f"f.{first + i}.0.conv1.weight": i for i in range(4)}


def test_numbers_of_a_sequential_become_names():
    for kernel, pooled in ((7, True), (3, False)):
        found = wrappers.strip_prefixes(sequential(kernel, pooled))
        assert found["f.bn1.running_mean"] == 1 and "f.conv1.weight" in found
        layers = [found[f"f.layer{i + 1}.0.conv1.weight"] for i in range(4)]
        assert layers == [0, 1, 2, 3]
    for kernel, pooled in ((7, False), (3, True)):  # that network is not known here
        with pytest.raises(wrappers.RefusedTensors, match=f"f.{4 if pooled else 3}"):
            wrappers.strip_prefixes(sequential(kernel, pooled))


def test_two_tensors_of_one_name_are_refused():
    with pytest.raises(wrappers.RefusedTensors, match="'a.b'"):
        wrappers.strip_prefixes({"module.a.b": 1, "a._orig_mod.b": 2})


# Files beside the weights

MOMENTS = {"image_mean": [0.5, 0.4, 0.3], "image_std": [0.2, 0.2, 0.2]}
SAID = {"mean": [0.5, 0.4, 0.3], "std": [0.2, 0.2, 0.2]}


def beside(folder, config=None, preprocessor=None):
    for name, value in (("config", config), ("preprocessor_config", preprocessor)):
        if value is not None:
            (folder / f"{name}.json").write_text(json.dumps(value))
    return side_files.read_folder(folder, "timm")


@pytest.mark.parametrize(
    "preprocessor, want",
    [
        (MOMENTS, SAID),
        (
            MOMENTS | {"size": {"shortest_edge": 60}, "crop_size": 56, "resample": 3},
            SAID | {"size": 56, "resize": 60, "interpolation": "bicubic"},
        ),
        (
            {"size": {"height": 56, "width": 56}, "resample": 2},
            {"size": 56, "resize": 56, "interpolation": "bilinear"},
        ),
        ({"size": 224, "do_center_crop": False}, {"size": 224, "resize": 224}),
        (
            {"size": 256, "do_center_crop": False, "crop_size": 224},
            {"size": 256, "resize": 256},
        ),
        (
            {"size": 60, "crop_size": {"height": 56, "width": 56}},
            {"size": 56, "resize": 60},
        ),
        (
            {"size": 256, "do_center_crop": True, "crop_size": 224},
            {"size": 224, "resize": 256},
        ),
        (
            {"size": {"shortest_edge": 224}, "crop_pct": 0.875},
            {"size": 224, "resize": 256},
        ),
        (  # from 384 pixels on ConvNeXt cuts nothing
            {"size": {"shortest_edge": 384}, "crop_pct": 0.875},
            {"size": 384, "resize": 384},
        ),
    ],
)
def test_how_transformers_prepares_images(preprocessor, want, tmp_path):
    assert beside(tmp_path, preprocessor=preprocessor).images == want


@pytest.mark.parametrize(
    "odd",
    [
        {"rescale_factor": 2 / 255},
        {"do_rescale": False},
        {"do_normalize": False},
        {"do_resize": False},
        {"resample": 1},
        {"size": {"height": 56, "width": 48}},
    ],
)
def test_an_unusual_image_processor_is_refused(odd, tmp_path):
    with pytest.raises(ValueError):
        beside(tmp_path, preprocessor=MOMENTS | {"size": 56} | odd)


def test_images_are_as_those_of_imagenet_unless_the_table_says_otherwise():
    usual = {"mean": (0.485, 0.456, 0.406), "std": (0.229, 0.224, 0.225)}
    for name, known in architectures.ARCHITECTURES.items():
        found = {x: (known.images or usual)[x] for x in usual}
        assert (found == usual) == (name not in ("augreg", "resnet_plain")), name


def test_how_timm_prepares_images_and_what_it_says_of_the_network(tmp_path):
    images = {"mean": SAID["mean"], "std": SAID["std"], "input_size": [3, 224, 224]}
    images |= {"crop_pct": 0.9, "interpolation": "bicubic", "license": "mit"}
    config = {"architecture": "vit_small_patch16_224", "pretrained_cfg": images}
    config["model_args"] = {"num_heads": 7, "img_size": [224, 224]}
    found = beside(tmp_path, config)
    want = SAID | {"size": 224, "resize": 248, "interpolation": "bicubic"}
    assert found.images == want and found.licence == "mit"
    assert found.network == {"heads": 7}
    for crop, share, resize in (("border", 0.9, 224), ("center", None, 256)):
        cut = images | {"crop_mode": crop, "crop_pct": share}
        found = beside(tmp_path, config | {"pretrained_cfg": cut})
        assert found.images["resize"] == resize
    found = beside(tmp_path, {"architecture": "x", **images})  # as older files have it
    assert found.images == want and found.licence == "mit"
    assert (
        beside(tmp_path, config | {"pretrained_cfg": {"license": "mit"}}).images == {}
    )
    with pytest.raises(ValueError, match=r"config\.json.*'mean'"):
        beside(tmp_path, config | {"pretrained_cfg": {"input_size": [3, 8, 8]}})
    config["architecture"] = "resnetblur50"  # by the tensors it is a ResNet-50
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match="resnetblur50"):
        side_files.read_folder(tmp_path, "torchvision")


@pytest.mark.parametrize(
    "config, match",
    [
        ({"layer_norm_eps": 1e-5}, "epsilon"),
        ({"hidden_act": "silu"}, "silu"),
        ({"rope_theta": 10.0}, "rope_theta=10"),
    ],
)
def test_numbers_that_contradict_each_other_are_refused(config, match, tmp_path):
    theirs, _ = foreign("transformers")
    source = write(tmp_path / "file.safetensors", theirs)
    good = {"num_attention_heads": 2, "layer_norm_eps": 1e-12, "num_hidden_layers": 3}
    (tmp_path / "config.json").write_text(json.dumps(good | config))
    check_refused(match, source, "augreg")


def test_files_beside_the_weights_are_believed_before_the_architecture(tmp_path):
    source = write(tmp_path / "file.safetensors", foreign("transformers_dinov2")[0])
    config = {"num_attention_heads": 4, "layer_norm_eps": 1e-6, "model_type": "dinov2"}
    own = MOMENTS | {"size": {"shortest_edge": 20}, "crop_size": 16, "resample": 2}
    beside(tmp_path, config, own)
    card = import_file.import_file(source, "dinov2", str(tmp_path / "out"))
    want = SAID | {"size": 16, "resize": 20, "interpolation": "bilinear"}
    assert {name: card["input"][name] for name in want} == want
    assert card["encoder"]["heads"] == 4
    more = dict(size=12, mean=(0.1,), force=True)  # an option goes before both
    card = import_file.import_file(source, "dinov2", str(tmp_path / "out"), **more)
    assert card["input"]["size"] == 12 and card["input"]["mean"] == [0.1] * 3


def test_the_features_in_the_card_are_checked_when_asked(tmp_path):
    source = write(tmp_path / "f.safetensors", foreign("timm")[0])
    out = tmp_path / "out"
    import_file.import_file(source, "deit", str(out), **PREPARED)
    made = jaxcl.load_encoder(out, check=True)
    assert made.check() < 1e-5
    for heads in (4, 2):  # as if no tensor had said it, and somebody had guessed
        card = json.loads((out / encoder_folder.CARD).read_text())
        card["encoder"]["heads"] = heads
        card["checksum"] = encoder_folder.checksum(card)
        (out / encoder_folder.CARD).write_text(json.dumps(card))
        jaxcl.load_encoder(out)
        if heads == 4:
            with pytest.raises(ValueError, match="check"):
                jaxcl.load_encoder(out, check=True)
    assert jaxcl.load_encoder(out, check=True).card["encoder"]["heads"] == 2
    card = {name: value for name, value in card.items() if name != "check"}
    (out / encoder_folder.CARD).write_text(
        json.dumps(card | {"checksum": encoder_folder.checksum(card)})
    )
    with pytest.raises(ValueError, match="check"):
        jaxcl.load_encoder(out, check=True)


# Files


def test_parts_of_a_file_and_sixteen_bits(tmp_path):
    x = np.linspace(-1, 1, 6, dtype=np.float32).reshape(2, 3)
    write(tmp_path / "one.safetensors", {"a": x.astype(ml_dtypes.bfloat16)})
    write(tmp_path / "two.safetensors", {"b": x.astype(np.float16), "n": np.arange(2)})
    index = tmp_path / "model.safetensors.index.json"
    parts = {"a": "one.safetensors", "b": "two.safetensors", "n": "two.safetensors"}
    index.write_text(json.dumps({"weight_map": parts}))
    found, hashes = files.read_tensors(index)
    types = {n: x.dtype.name for n, x in found.items()}
    assert types == {"a": "float32", "b": "float32", "n": "int64"}
    np.testing.assert_allclose(found["a"], x, atol=4e-3)
    np.testing.assert_allclose(found["b"], x, atol=4e-4)
    assert sorted(hashes) == [index.name, "one.safetensors", "two.safetensors"]
    with pytest.raises(ValueError, match=r"folder.*model\.safetensors\.index.*one"):
        files.read_tensors(tmp_path)
    write(tmp_path / "two.safetensors", {"a": x})
    with pytest.raises(ValueError, match="'a'"):
        files.read_tensors(index)
    for text in ("{", '{"weight_map": 3}', "{}"):
        index.write_text(text)
        with pytest.raises(ValueError, match="index"):
            files.read_tensors(index)
    for name in ("../one.safetensors", "/etc/passwd", 3):
        index.write_text(json.dumps({"weight_map": {"a": name}}))
        with pytest.raises(ValueError, match="beside|index"):
            files.read_tensors(index)


def header(entries, data=b""):
    text = entries if isinstance(entries, bytes) else json.dumps(entries).encode()
    return struct.pack("<Q", len(text)) + text + data


ENTRY = {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}
TWICE = f'{{"a":{json.dumps(ENTRY)},"a":{json.dumps(ENTRY)}}}'.encode()


@pytest.mark.parametrize(
    "data, match",
    [
        (b"", "safetensors"),
        (b"x" * 100, "safetensors"),
        (header({"a": ENTRY}, b"1234")[:-2], "safetensors"),
        (header(TWICE, b"1234"), "twice"),
        (header({"a": ENTRY | {"dtype": "U8", "shape": [4]}}, b"1234"), "U8"),
        (header({"a": ENTRY | {"data_offsets": [0, 9]}}, b"1234"), "safetensors"),
        (header({}), "no tensor"),
        (struct.pack("<Q", 2**40) + b"{}", "safetensors"),
    ],
)
def test_damaged_safetensors_are_refused(data, match, tmp_path):
    path = tmp_path / "x.safetensors"
    path.write_bytes(data)
    with pytest.raises(ValueError, match=match):
        files.read_tensors(path)


@pytest.mark.parametrize("begin", [b"PK", b"\x80\x02"])
def test_the_length_of_a_header_is_not_taken_for_a_file_of_pytorch(begin, tmp_path):
    length = int.from_bytes(begin, "little")
    text = json.dumps({"a": ENTRY}).ljust(length).encode()
    (tmp_path / "x.safetensors").write_bytes(header(text, b"\0\0\x80?"))
    found, _ = files.read_tensors(tmp_path / "x.safetensors")
    assert found["a"].tolist() == [1.0]


class Evil:
    """What unpickling runs: it makes a directory."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (self.path,)


def archive(program):
    made = io.BytesIO()
    with zipfile.ZipFile(made, "w") as file:
        file.writestr("archive/data.pkl", program)
    return made.getvalue()


def test_code_in_a_file_is_never_run(tmp_path):
    """Refused with PyTorch and without it."""
    here = tmp_path / "made by the file"
    program = pickle.dumps({"conv1.weight": Evil(str(here))}, 2)
    pickle.loads(program)  # a control: this is what unpickling would do
    assert here.exists()
    here.rmdir()
    path = tmp_path / "evil.pth"
    for data in (archive(program), program):
        path.write_bytes(data)
        with pytest.raises(ValueError, match="evil.pth.*torch"):
            files.read_tensors(path)
        assert not here.exists()


def test_without_pytorch_its_files_are_refused_by_name(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "torch", None)
    (tmp_path / "x.pth").write_bytes(archive(b""))
    with pytest.raises(ValueError, match="x.pth.*pip install torch.*safetensors"):
        files.read_tensors(tmp_path / "x.pth")


@pytest.mark.parametrize("older", [False, True])
def test_files_of_pytorch_itself(older, tmp_path):
    torch = pytest.importorskip("torch", reason="PyTorch is not installed")
    generator = torch.Generator().manual_seed(0)
    whole = torch.randn(4, 6, generator=generator)
    state = {
        "a.weight": whole,
        "a.turned": whole.T,
        "a.part": whole[1:3, ::2],
        "half": whole.half(),
        "rough": whole.bfloat16(),
        "count": torch.tensor(3),
        "own": torch.nn.Parameter(whole + 1),
    }
    saved = {"state_dict": state, "epoch": 3, "args": None}
    saved["optimizer"] = {"state": {0: {"step": torch.tensor(1.0)}}, "lr": [0.1, None]}
    path = tmp_path / "file.pth"
    torch.save(saved, path, _use_new_zipfile_serialization=not older)
    found, _ = files.read_tensors(path)
    assert found.keys() == {f"state_dict.{name}" for name in state}
    for name, want in state.items():
        want = want.detach()
        want = want.float() if want.is_floating_point() else want
        np.testing.assert_array_equal(found[f"state_dict.{name}"], want.numpy())


def test_a_folder_is_what_was_imported_and_names_its_update(tmp_path, caplog):
    source = write(tmp_path / "f.safetensors", foreign("timm")[0])
    out = tmp_path / "out"
    import_file.import_file(source, "deit", str(out), **PREPARED)
    jaxcl.load_encoder(out)
    assert not caplog.records
    for number, accepted in ((1, True), (2, False)):
        folder = out / "updates" / f"{number:04d}"
        folder.mkdir(parents=True)
        (folder / "update.json").write_text(json.dumps({"accepted": accepted}))
    jaxcl.load_encoder(out)
    (said,) = (x.getMessage() for x in caplog.records)
    assert f"{out}/updates/0001" in said and f"--run={out}" in said
