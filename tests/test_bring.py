"""Weights of other libraries: read safely, fitted whole or refused by name."""

import io
import json
import os
import pickle
import struct
import zipfile

import jax
import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy as st

import jaxcl
from jaxcl.bring import architectures, command, files, torch_file
from jaxcl.export import command as export_command
from jaxcl.export import encoder, torch_convnext, torch_resnet, torch_vit
from jaxcl.nets import convnext, resnet, vit
from jaxcl.run import folder as folder_lib

SMALL = dict(width=16, layers=2, heads=2, hidden=24, patch=4, image_size=12)
TURNED = {"positions": "rotary", "qkv_bias": "query_value", "class_position": False}
# scheme -> architecture, options of the network whose names it has
FAMILIES = {
    "timm": ("deit", {}),
    "timm-registers": ("dinov2", {"registers": 2, "class_position": False}),
    "deit3": ("deit3", {"layer_scale": 1.0, "class_position": False}),
    "dinov2": ("dinov2", {"layer_scale": 1.0, "registers": 2, "mlp": "swiglu"}),
    "dinov3": ("dinov3", TURNED | {"layer_scale": 1.0, "registers": 2}),
    "timm_dinov3": ("dinov3", TURNED | {"layer_scale": 1.0, "mlp": "swiglu"}),
    "transformers": ("augreg", {}),
    "transformers_dinov2": ("dinov2", {"layer_scale": 1.0, "registers": 1}),
    "transformers_dinov3": ("dinov3", TURNED | {"layer_scale": 1.0, "mlp": "swiglu"}),
}
PREPARED = dict(size=12, heads=2)


def numbers(shapes, seed=0):
    rng = np.random.default_rng(seed)
    return jax.tree.map(lambda x: rng.normal(size=x.shape).astype("f4"), shapes)


def network(options, seed=0):
    """Options with defaults, and leaves by their paths."""
    section = export_command._full(vit.vit, SMALL | options)
    net = vit.vit(**section)
    shapes = jax.eval_shape(net.init, jax.random.key(0), np.zeros((1, 12, 12, 3)))
    leaves = encoder.flat(numbers(shapes["params"], seed), {})
    return section, {name.partition("/")[2]: x for name, x in leaves.items()}


def foreign(family, seed=0):
    """The tensors of a small network by a library's names, and ours."""
    section, leaves = network(FAMILIES[family][1], seed)
    scheme = torch_vit.SCHEMES[family.partition("-")[0]]
    found = torch_vit.leaves(scheme, section, SMALL["layers"])
    theirs = torch_vit.theirs_of(found, leaves)
    if family == "dinov3":  # its files have biases of keys, which its code masks
        for name in [n for n in theirs if n.endswith("attn.qkv.bias")]:
            q, v = np.split(theirs[name], 2)
            theirs[name] = np.concatenate([q, np.full_like(q, 7.0), v])
    return theirs, leaves


def write(path, tensors):
    path.write_bytes(st.save({n: np.ascontiguousarray(x) for n, x in tensors.items()}))
    return str(path)


@pytest.mark.parametrize("family", FAMILIES)
def test_the_names_of_every_library_are_found_and_read(family, tmp_path):
    architecture, options = FAMILIES[family]
    theirs, ours = foreign(family)
    theirs["mask_token"] = np.zeros((1, 16), "f4")
    scheme = family.partition("-")[0]
    if scheme in ("timm", "deit3", "timm_dinov3"):  # there it would be DINOv2's mark
        del theirs["mask_token"]
        theirs["head.weight"] = np.zeros((3, 16), "f4")
    elif scheme.startswith("transformers"):
        theirs["embeddings.mask_token"] = theirs.pop("mask_token")
    source = write(tmp_path / "file.safetensors", theirs)
    out = tmp_path / "out"
    card = command.bring(source, architecture, str(out), **PREPARED)
    assert card["brought"]["names"] == scheme and len(card["brought"]["dropped"]) == 1
    section = card["encoder"]
    for name, value in (SMALL | options).items():
        if name != "image_size" or section["positions"] == "learned":
            assert section[name] == value, name
    saved = st.load((out / folder_lib.TENSORS).read_bytes())
    assert {name.partition("/")[2] for name in saved} == ours.keys()
    for name, x in ours.items():
        np.testing.assert_array_equal(saved[f"params/{name}"], x, err_msg=name)


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


def test_what_no_tensor_says():
    section = {}
    for family in ("timm", "transformers", "transformers_dinov2", "dinov3"):
        theirs, _ = foreign(family)
        known = architectures.get(FAMILIES[family][0])
        section[family] = architectures.vit_section(theirs, family, known, {})
    assert {n: s["epsilon"] for n, s in section.items()} == {
        "timm": 1e-6,
        "transformers": 1e-12,
        "transformers_dinov2": 1e-6,
        "dinov3": 1e-5,
    }
    assert section["timm"]["resize"] == "antialias"
    assert section["transformers"]["resize"] == "plain"
    assert section["transformers_dinov2"]["resize"] == "antialias"  # it has registers
    plain = {n: x for n, x in foreign("dinov2")[0].items() if n != "register_tokens"}
    known = architectures.get("dinov2")
    assert architectures.vit_section(plain, "dinov2", known, {})["resize"] == "offset"
    assert architectures.scheme_of({**plain, "mask_token": 0}) == "dinov2"
    # The published heads are 64 wide, but for MoCo v3's small network.
    wide = {
        n: np.zeros([384 if size == 16 else size for size in x.shape], "f4")
        for n, x in foreign("timm")[0].items()
    }
    for name, heads in (("deit", 6), ("mocov3", 12)):
        known = architectures.get(name)
        assert architectures.vit_section(wide, "timm", known, {})["heads"] == heads


CONVNEXTS = [(False, scheme) for scheme in torch_convnext.SCHEMES]
# V2, of the libraries that have it.
CONVNEXTS += [(True, x) for x, names in torch_convnext.SCHEMES.items() if names.grn[0]]


@pytest.mark.parametrize("grn, scheme", CONVNEXTS)
def test_a_convnext_is_read_by_the_names_of_every_library(grn, scheme, tmp_path):
    names = torch_convnext.SCHEMES[scheme]
    own = {"depths": (1, 2), "width": 4, "patch": 2, "grn": grn}
    own |= {"layer_scale": None if grn else 1e-6}
    section = export_command._full(convnext.convnext, own)
    net = convnext.convnext(**section)
    shapes = jax.eval_shape(net.init, jax.random.key(0), np.zeros((1, 8, 8, 3)))
    leaves = encoder.flat(numbers(shapes["params"]), {})
    ours = {name.partition("/")[2]: x for name, x in leaves.items()}
    found = torch_convnext.leaves(names, section)
    assert {leaf.ours for leaf in found} == ours.keys()
    theirs = torch_vit.theirs_of(found, ours)
    assert len(theirs) == len(found)
    if scheme == "transformers_dinov3_convnext":  # as later releases write them
        theirs = {
            name if name.startswith("layer_norm") else f"model.{name}": x
            for name, x in theirs.items()
        }
    theirs = {f"backbone.{name}": x for name, x in theirs.items()}
    source = write(tmp_path / "file.safetensors", theirs | {"queue": np.ones(3, "f4")})
    card = command.bring(source, "convnext", str(tmp_path / "out"), size=8)
    assert card["brought"]["names"] == scheme
    assert {n: card["encoder"][n] for n in own} == own | {"depths": [1, 2]}
    saved = st.load((tmp_path / "out" / folder_lib.TENSORS).read_bytes())
    assert saved.keys() == leaves.keys()
    for name, x in leaves.items():
        np.testing.assert_array_equal(saved[name], x, err_msg=name)


@pytest.mark.parametrize("change", [{"depths": [1, 2]}, {"patch": 2}, {"patch": 8}])
def test_a_convnext_that_timm_computes_in_another_way_is_not_written(change):
    section = {"depths": None, "patch": 4}
    torch_convnext.check(section)
    with pytest.raises(ValueError, match=f"--torch: .*{next(iter(change))}="):
        torch_convnext.check(section | change)


def of_resnet(path, **options):
    """A file of a small ResNet, and our leaves."""
    net = resnet.resnet(depth=10, width=4, **options)
    shapes = jax.eval_shape(net.init, jax.random.key(0), np.zeros((1, 32, 32, 3), "f4"))
    leaves = encoder.flat(numbers(shapes["params"]), numbers(shapes["batch_stats"], 1))
    theirs = {}
    for name, ours in torch_resnet.key_map(leaves).items():
        x = np.zeros((), np.int64) if ours is None else leaves[ours]
        theirs[f"backbone.{name}"] = x.transpose(3, 2, 0, 1) if x.ndim == 4 else x
    theirs |= {"backbone.fc.bias": np.zeros(3, "f4"), "queue": np.zeros(3, "f4")}
    return write(path, theirs), leaves


def test_a_resnet_comes_back_as_it_was_exported(tmp_path):
    source, leaves = of_resnet(tmp_path / "file.safetensors", stem="imagenet")
    card = command.bring(source, "resnet", str(tmp_path / "out"), size=32)
    made = jaxcl.load_encoder(tmp_path / "out")
    found = encoder.flat(made.params, made.stats)
    assert found.keys() == leaves.keys()
    for name, x in leaves.items():
        np.testing.assert_array_equal(found[name], x, err_msg=name)
    section, brought = card["encoder"], card["brought"]
    assert (section["depth"], section["width"], section["stem"]) == (10, 4, "imagenet")
    assert brought["prefix"] == "backbone." and brought["others"] == 1
    assert "fc.bias" in brought["dropped"]


def test_the_padding_of_a_small_stem_is_asked_for(tmp_path):
    source, _ = of_resnet(tmp_path / "file.safetensors")
    with pytest.raises(ValueError, match="3 x 3.*--stem-padding"):
        command.bring(source, "resnet", str(tmp_path / "out"), size=32)
    asked = [f"--from={source}", "--architecture=resnet", f"--out={tmp_path / 'out'}"]
    assert command.main([*asked, "--size=32", "--stem-padding=2"]) == 0
    made = jaxcl.load_encoder(tmp_path / "out").card["encoder"]
    assert (made["stem"], made["stem_padding"]) == ("cifar", 2)


def refused(match, source, architecture="deit", **options):
    out = os.path.join(os.path.dirname(source), "out")
    with pytest.raises(ValueError, match=match):
        command.bring(source, architecture, out, **(PREPARED | options))
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
        (lambda t: t | {"dist_token": t["cls_token"]}, "it has dist_token, which no"),
        (lambda t: t | {"pos_embed": np.zeros((1, 12, 16), "f4")}, "a square grid has"),
        (
            lambda t: {n.replace("blocks.0.", "blocks.5."): x for n, x in t.items()},
            r"it has no blocks\.0\.\*, of 6 blocks",
        ),
        (
            lambda t: {"a.b": t["norm.bias"]},
            "no ResNet, ViT or ConvNeXt that is known here, but a",
        ),
        (
            lambda t: t | {f"teacher.{n}": x for n, x in t.items()},
            "it holds 2 networks; --prefix names one of '', 'teacher'",
        ),
        (
            lambda t: t | {"patch_embed.proj.weight": np.zeros((16, 3, 4, 2), "f4")},
            "patches are 4 x 2",
        ),
    ],
)
def test_a_wrong_or_partial_state_dict_names_what_does_not_fit(change, match, tmp_path):
    theirs, _ = foreign("timm")
    refused(match, write(tmp_path / "file.safetensors", change(theirs)))


@pytest.mark.parametrize(
    "options, match",
    [
        (
            dict(architecture="resnet"),
            "it is a vit, and --architecture=resnet is a resn",
        ),
        (
            dict(architecture="dinov3"),
            "--architecture",
        ),
        (dict(architecture="deitt"), "--architecture='deitt'"),
        (
            dict(architecture="vit", size=None),
            "--size",
        ),
        (
            dict(architecture="vit"),
            "--mean",
        ),
        (dict(size=10), "--size=10"),
        (dict(size=2), "--size=2"),
        (dict(resize=8), "--resize=8"),
        (dict(mean=(0.5, 0.5)), "--mean="),
        (dict(std=(0.0,)), r"--std=0\.0"),
        (dict(stem_padding=1), "--stem-padding"),
        (dict(heads=0), "--heads=0"),
        (dict(heads=3), r"config\.encoder\.width=16.*heads=3"),
        (dict(prefix="model"), "--prefix=model"),
    ],
)
def test_wrong_options_are_refused(options, match, tmp_path):
    theirs, _ = foreign("timm")
    refused(match, write(tmp_path / "file.safetensors", theirs), **options)


def test_a_file_without_positions_is_no_plain_vit(tmp_path):
    theirs, _ = foreign("timm")
    del theirs["pos_embed"]
    source = write(tmp_path / "file.safetensors", theirs)
    refused("it has no pos_embed; rotary.*=dinov3", source, "vit")


def test_numbers_that_are_none_are_said_as_such(capsys):
    with pytest.raises(SystemExit):
        command.main(["--from=a", "--architecture=vit", "--out=b", "--mean=0.5;0.5"])
    assert "'0.5;0.5'" in capsys.readouterr().err


def test_one_of_two_networks_is_chosen_by_its_prefix(tmp_path):
    one, two = foreign("timm"), foreign("timm", seed=5)
    both = {f"model.student.{n}": x for n, x in one[0].items()}
    both |= {f"model.teacher.backbone.{n}": x for n, x in two[0].items()}
    source = write(tmp_path / "file.safetensors", both)
    chosen = PREPARED | {"prefix": "model.teacher.backbone"}
    card = command.bring(source, "dino", str(tmp_path / "out"), **chosen)
    saved = st.load((tmp_path / "out" / folder_lib.TENSORS).read_bytes())
    np.testing.assert_array_equal(saved["params/class"], two[1]["class"])
    assert card["brought"]["others"] == len(one[0])


def test_the_command_and_what_it_prints(tmp_path, capsys):
    theirs, _ = foreign("transformers")
    source = write(tmp_path / "file.safetensors", theirs)
    stated = {"num_attention_heads": 4, "layer_norm_eps": 1e-7}
    (tmp_path / "config.json").write_text(json.dumps(stated))
    asked = [f"--from={source}", f"--out={tmp_path / 'out'}", "--size=12"]
    asked += ["--architecture=vit", "--mean=0.5", "--std=0.2,0.3,0.4"]
    assert command.main(asked) == 0
    printed = capsys.readouterr().out
    assert "heads=4 epsilon=1e-07" in printed and "0.2, 0.3, 0.4" in printed
    assert command.main(asked) == 0  # the same again
    assert command.main([*asked, "--features=mean", "--heads=2"]) == 0  # same tensors
    made = jaxcl.load_encoder(tmp_path / "out")
    assert made.card["encoder"]["features"] == "mean" and made.num_features == 16
    other = write(tmp_path / "other.safetensors", foreign("transformers", 3)[0])
    capsys.readouterr()
    assert command.main([f"--from={other}", *asked[1:]]) == 2
    assert str(tmp_path / "out") in capsys.readouterr().err
    (tmp_path / "config.json").write_text(json.dumps(stated | {"hidden_act": "relu"}))
    assert command.main(asked) == 2
    assert "hidden_act='relu'" in capsys.readouterr().err


# Files


def test_parts_of_a_file_and_sixteen_bits(tmp_path):
    x = np.linspace(-1, 1, 6, dtype=np.float32).reshape(2, 3)
    write(tmp_path / "one.safetensors", {"a": x.astype(ml_dtypes.bfloat16)})
    write(tmp_path / "two.safetensors", {"b": x.astype(np.float16), "n": np.arange(2)})
    index = tmp_path / "model.safetensors.index.json"
    parts = {"a": "one.safetensors", "b": "two.safetensors", "n": "two.safetensors"}
    index.write_text(json.dumps({"weight_map": parts}))
    found, hashes = files.read(index)
    assert {n: x.dtype.name for n, x in found.items()} == {
        "a": "float32",
        "b": "float32",
        "n": "int64",
    }
    np.testing.assert_allclose(found["a"], x, atol=4e-3)
    np.testing.assert_allclose(found["b"], x, atol=4e-4)
    assert sorted(hashes) == [index.name, "one.safetensors", "two.safetensors"]
    for name in ("../one.safetensors", "/etc/passwd", 3):
        index.write_text(json.dumps({"weight_map": {"a": name}}))
        with pytest.raises(ValueError, match="beside|index"):
            files.read(index)


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
        files.read(path)


@pytest.mark.parametrize("begin", [b"PK", b"\x80\x02"])
def test_the_length_of_a_header_is_not_taken_for_a_file_of_pytorch(begin, tmp_path):
    length = int.from_bytes(begin, "little")
    text = json.dumps({"a": ENTRY}).ljust(length).encode()
    (tmp_path / "x.safetensors").write_bytes(header(text, b"\0\0\x80?"))
    found, _ = files.read(tmp_path / "x.safetensors")
    assert found["a"].tolist() == [1.0]


class Evil:
    """What unpickling runs: it makes a directory."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (self.path,)


def archive(program, **entries):
    made = io.BytesIO()
    with zipfile.ZipFile(made, "w") as file:
        for name, data in ({"data.pkl": program} | entries).items():
            file.writestr(f"archive/{name}", data)
    return made.getvalue()


@pytest.mark.parametrize("form", ["zip", "older"])
def test_code_in_a_file_is_never_run(form, tmp_path):
    here = tmp_path / "made by the file"
    program = pickle.dumps({"conv1.weight": Evil(str(here))}, 2)
    pickle.loads(program)  # a control: this is what unpickling would do
    assert here.exists()
    here.rmdir()
    data = archive(program)
    if form == "older":
        parts = [torch_file._MAGIC, 1001, {"little_endian": True}]
        data = b"".join(pickle.dumps(x, 2) for x in parts) + program
        data += pickle.dumps([], 2)
    path = tmp_path / "evil.pth"
    path.write_bytes(data)
    refused("no tensor", str(path))
    assert not here.exists()


def tensor(shape, strides, offset=0, count=6, kind="FloatStorage"):
    """A program by hand: {"x": a tensor of that view}."""
    text = pickle.dumps(("storage", "KIND", "0", "cpu", count), 2)[2:-1]
    known = f"ctorch\n{kind}\n".encode()
    name = b"X\x04\x00\x00\x00KIND"
    assert name in text
    text = text.replace(name, known)
    call = b"ctorch._utils\n_rebuild_tensor_v2\n("
    inner = b"".join(
        pickle.dumps(part, 2)[2:-1] for part in (offset, shape, strides, False)
    )
    return b"\x80\x02}X\x01\x00\x00\x00x" + call + text + b"Q" + inner + b"tRs."


def test_a_tensor_by_hand_and_views_of_it():
    numbers = np.arange(6, dtype="<f4")
    store = {"data/0": numbers.tobytes()}
    for shape, strides, offset, want in (
        ((2, 3), (3, 1), 0, numbers.reshape(2, 3)),
        ((3, 2), (1, 3), 0, numbers.reshape(2, 3).T),
        ((2,), (2,), 1, numbers[[1, 3]]),
        ((), (), 5, numbers[5]),
        ((0, 4), (4, 1), 0, np.zeros((0, 4))),
    ):
        found = torch_file.read(archive(tensor(shape, strides, offset), **store))
        np.testing.assert_array_equal(found["x"], want)
        assert found["x"].flags.c_contiguous and found["x"].flags.writeable


@pytest.mark.parametrize(
    "program, match",
    [
        (tensor((2, 4), (3, 1)), "[(]2, 4[)]"),
        (tensor((2, 3), (3, 1), offset=1), "[(]2, 3[)]"),
        (tensor((2**20, 2**20), (0, 0)), "1048576"),
        (tensor((2,), (-1,)), "[(]2,[)]"),
        (tensor((2,), (1,), count=7), "24 bytes, not 7"),
        (tensor((2,), (1,), kind="QInt8Storage"), "QInt8"),
        (pickle.dumps({}, 4), "protocol 4"),
        (b"\x80\x02(cos\nsystem\no.", "OBJ"),
        (b"\x80\x02\x96" + struct.pack("<Q", 4) + b"code.", "BYTEARRAY8"),
        (b"\x80\x02}r\xff\xff\xff\xff.", "4294967295"),  # memory for so many
        (b"\x80\x02cos\nsystem\n)\x81.", None),
        (b"\x80\x02ccollections\nOrderedDict\n}b.", None),
        (b"\x80\x02ctorch._utils\n_rebuild_parameter\n}b.", None),
        (b"\x80\x02K\x01K\x02s.", "."),
        (b"\x80\x02K\x01X\x01\x00\x00\x00aK\x02s.", "."),
        (b"\x80\x02}X\x01\x00\x00\x00x", "."),
        (b"\x80\x02h\x07.", "."),
    ],
)
def test_programs_that_are_no_state_dict(program, match):
    data = archive(program, **{"data/0": np.zeros(6, "f4").tobytes()})
    if match is None:  # classes and their objects are of no use, and do no harm
        assert torch_file.read(data) == {}
        return
    with pytest.raises(torch_file.Refused, match=match):
        torch_file.read(data)


def test_archives_of_another_kind():
    good = archive(tensor((2,), (1,)), **{"data/0": np.zeros(6, "f4").tobytes()})
    assert torch_file.read(good)["x"].shape == (2,)
    with pytest.raises(torch_file.Refused, match="TorchScript"):
        torch_file.read(archive(b"", **{"constants.pkl": b""}))
    with pytest.raises(torch_file.Refused, match="data/0"):
        torch_file.read(archive(tensor((2,), (1,))))
    with pytest.raises(torch_file.Refused, match="zip"):
        torch_file.read(good[: len(good) // 2])
    with pytest.raises(torch_file.Refused, match="big-endian"):
        torch_file.read(archive(b"", byteorder=b"big"))
    squeezed = io.BytesIO()
    with zipfile.ZipFile(squeezed, "w", zipfile.ZIP_DEFLATED) as file:
        file.writestr("archive/data.pkl", b"0" * 1000)
    with pytest.raises(torch_file.Refused, match="data.pkl"):
        torch_file.read(squeezed.getvalue())
    with zipfile.ZipFile(squeezed, "a", zipfile.ZIP_DEFLATED) as file:
        file.writestr("archive/constants.pkl", b"")
    with pytest.raises(torch_file.Refused, match="TorchScript"):
        torch_file.read(squeezed.getvalue())
    older = [torch_file._MAGIC, 1001, {"little_endian": False}, {}, []]
    with pytest.raises(torch_file.Refused, match="big-endian"):
        torch_file.read(b"".join(pickle.dumps(x, 2) for x in older))


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
    saved = {"state_dict": state, "epoch": 3, "args": Exception("any object")}
    saved["optimizer"] = {"state": {0: {"step": torch.tensor(1.0)}}, "lr": [0.1, None]}
    path = tmp_path / "file.pth"
    torch.save(saved, path, _use_new_zipfile_serialization=not older)
    found, _ = files.read(path)
    assert found.keys() == {f"state_dict.{name}" for name in state}
    for name, want in state.items():
        want = want.detach()
        want = want.float() if want.is_floating_point() else want
        np.testing.assert_array_equal(found[f"state_dict.{name}"], want.numpy())
    # Damage anywhere ends in an error of ours, or is read for what it is.
    rng, data = np.random.default_rng(0), path.read_bytes()
    for _ in range(60):
        broken = bytearray(data)
        for at in rng.integers(0, len(data), rng.integers(1, 4)):
            broken[at] = rng.integers(0, 256)
        cut = rng.integers(1, len(data)) if rng.integers(4) == 0 else len(data)
        try:
            torch_file.read(bytes(broken[:cut]))
        except torch_file.Refused:
            pass
