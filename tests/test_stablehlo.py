"""An encoder as one program for other systems: what it computes, and for which."""

import dataclasses
import hashlib
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export as jax_export

from helpers import run_directories
from jaxcl import cli
from jaxcl.weights import encoder, export, onnx_program, stablehlo

pytest.importorskip("flatbuffers", reason="pip install flatbuffers")
VIT = {"name": "vit", "width": 16, "layers": 1, "heads": 2, "hidden": 32, "patch": 4}
NETS = {
    "resnet": {"name": "resnet", "depth": 10, "width": 4},
    "vit": VIT | {"image_size": 8},
    "convnext": {"name": "convnext", "depths": (1, 1), "width": 8, "patch": 2},
    "resnet-pooled": {"name": "resnet", "depth": 10, "width": 4, "pool": 1},
    "vit-rotary": VIT | {"positions": "rotary", "registers": 2, "features": "both"},
    "mlp": {"name": "mlp", "widths": (8,)},
}
IMAGES = np.random.default_rng(1).integers(0, 256, (5, 8, 8, 3), np.uint8)


def network(name):
    """An encoder of any numbers, for images of 8 x 8 in colour."""
    rng = np.random.default_rng(0)
    section = export._describe_architecture({"encoder": NETS[name]})
    inputs = {"kind": "images", "channels": 3, "size": 8, "resize": None}
    inputs |= {"interpolation": "bicubic", "mean": [0.4] * 3, "std": [0.2, 0.3, 0.25]}
    module = encoder.make_module(section)
    like = jax.eval_shape(module.init, jax.random.key(0), encoder.blank_inputs(inputs))
    filled = jax.tree.map(lambda x: rng.uniform(0.2, 0.7, x.shape).astype("f4"), like)
    params = jax.tree.map(lambda x: x - 0.45 if x.ndim > 1 else x, filled["params"])
    card = {"encoder": section, "input": inputs}
    return encoder.make_encoder(card, params, filled.get("batch_stats", {}))


@pytest.mark.parametrize("name", ["resnet", "vit", "convnext"])
def test_a_program_computes_the_features_of_any_number_of_images(name):
    made = network(name)
    loaded = jax_export.deserialize(bytearray(stablehlo.pack_program(made, "uint8")))
    assert set(loaded.platforms) == {"cpu", "cuda", "tpu"}
    for count in (1, 5):
        want = made.embed(IMAGES[:count])
        np.testing.assert_allclose(
            loaded.call(IMAGES[:count]), want, rtol=1e-4, atol=1e-5
        )
    assert np.ptp(want, axis=0).max() > 1e-2  # images are told apart


def run_onnx(data, images):
    onnxruntime = pytest.importorskip("onnxruntime", reason="jaxcl[onnx] has it")
    session = onnxruntime.InferenceSession(data, providers=["CPUExecutionProvider"])
    return session.run(["features"], {"images": images})[0]


@pytest.mark.parametrize("name", NETS)
def test_an_onnx_program_computes_the_same_features(name):
    pytest.importorskip("onnx", reason="jaxcl[onnx] has it")
    made = network(name)
    width = made.num_features
    matrix = np.random.default_rng(2).normal(size=(width, 6)).astype("f4")
    mapped = dataclasses.replace(made, adapter={"matrix": matrix})
    for pixels, one in (("uint8", made), ("float32", mapped)):
        data = onnx_program.pack_onnx(one, pixels)
        images = IMAGES if pixels == "uint8" else np.asarray(one.prepare(IMAGES))
        want = stablehlo.make_program(one, pixels)[0](images)
        for count in (1, 5):
            features = run_onnx(data, images[:count])
            np.testing.assert_allclose(features, want[:count], rtol=2e-4, atol=2e-5)
    assert np.ptp(want, axis=0).max() > 1e-3  # images are told apart
    assert onnx_program.describe(made, onnx_program.pack_onnx(made, "uint8"), "uint8")


def test_products_over_any_axes_are_translated(monkeypatch):
    pytest.importorskip("onnx", reason="jaxcl[onnx] has it")
    rng = np.random.default_rng(3)
    images, left, right = (
        rng.normal(size=x).astype("f4") for x in [(5, 3, 4), (8, 4), (3, 4, 8)]
    )

    def embed(x):
        rows = jax.lax.dot_general(x, left, (((2,), (1,)), ((), ())))
        return rows.sum(1) + jax.lax.dot_general(
            x, right, (((2,), (1,)), ((1,), (0,)))
        ).sum(0)

    monkeypatch.setattr(stablehlo, "make_program", lambda *_: (embed, (3, 4)))
    features = run_onnx(onnx_program.pack_onnx(network("mlp"), "float32"), images)
    want = np.einsum("bij,kj->bk", images, left)
    want += np.einsum("bij,ijk->bk", images, right)
    np.testing.assert_allclose(features, want, rtol=1e-5, atol=1e-5)


def test_an_operation_without_a_translation_is_named():
    pytest.importorskip("onnx", reason="jaxcl[onnx] has it")
    traced = jax.make_jaxpr(jnp.sort)(np.zeros((2, 8)))
    with pytest.raises(ValueError, match="--onnx: .*sort"):
        onnx_program._translate(onnx_program._Graph(), traced.jaxpr, [], ["images"])


def test_normalised_images_are_taken_as_they_are():
    made = network("mlp")
    loaded = jax_export.deserialize(bytearray(stablehlo.pack_program(made, "float32")))
    assert loaded.in_avals[0].dtype == np.float32
    rows = loaded.call(made.prepare(IMAGES))
    np.testing.assert_allclose(rows, made.embed(IMAGES), rtol=1e-5, atol=1e-6)


def test_the_adapter_to_an_old_index_is_part_of_the_program():
    turned = np.eye(8, dtype=np.float32)[:, ::-1]
    made = dataclasses.replace(network("mlp"), adapter={"matrix": turned})
    loaded = jax_export.deserialize(bytearray(stablehlo.pack_program(made, "uint8")))
    rows, want = loaded.call(IMAGES), made.embed(IMAGES)
    np.testing.assert_allclose(rows, want, rtol=1e-5, atol=1e-6)
    plain = dataclasses.replace(made, adapter=None).embed(IMAGES)
    assert np.abs(want - plain).max() > 1e-3


@pytest.mark.parametrize("name", NETS)
def test_networks_are_traced_for_any_batch_size(name):
    made = network(name)
    (batch,) = jax_export.symbolic_shape("batch")
    images = jax.ShapeDtypeStruct((batch, 8, 8, 3), np.float32)
    trace = jax_export.export(jax.jit(made.apply))
    rows = trace(made.params, made.stats, images).out_avals[0]
    assert rows.shape == (batch, made.num_features)


def test_an_encoder_of_graphs_is_refused():
    made = network("mlp")
    graphs = made.card | {"input": {"kind": "graphs", "features": 3}}
    with pytest.raises(ValueError, match="graphs"):
        stablehlo.pack_program(dataclasses.replace(made, card=graphs), "uint8")


def test_the_command_writes_the_program_beside_the_card(tmp_path):
    run, out = tmp_path / "run", tmp_path / "out"
    run_directories.run_of(run)
    options = [f"--run={run}", f"--out={out}"]
    assert cli.main(["export", *options, "--stablehlo"]) == 0
    card, data = json.loads((out / "card.json").read_text()), out / stablehlo.FILE
    assert (
        card["files"][stablehlo.FILE] == hashlib.sha256(data.read_bytes()).hexdigest()
    )
    loaded = jax_export.deserialize(bytearray(data.read_bytes()))
    told = card["stablehlo"]["input"]
    assert told["dtype"] == loaded.in_avals[0].dtype == np.uint8
    assert told["shape"][1:] == list(loaded.in_avals[0].shape[1:])
    assert cli.main(["export", *options]) == 0  # the same weights, now without
    assert not data.exists()
    assert "stablehlo" not in json.loads((out / "card.json").read_text())


def test_the_command_writes_onnx_for_a_run_and_for_an_encoder(tmp_path, capsys):
    pytest.importorskip("onnx", reason="jaxcl[onnx] has it")
    run, out, again = (str(tmp_path / name) for name in ("run", "out", "again"))
    run_directories.run_of(tmp_path / "run")
    assert cli.main(["export", f"--run={run}", f"--out={out}", "--onnx"]) == 0
    assert "ONNX" in capsys.readouterr().out
    assert cli.main(["export", f"--run={out}", f"--out={again}", "--onnx=float32"]) == 0
    made = encoder.load_encoder(again, check=True)
    size, channels = (made.card["input"][key] for key in ("size", "channels"))
    images = np.random.default_rng(3).integers(0, 256, (3, size, size, channels), "u1")
    want = made.embed(images)
    for folder, given in ((out, images), (again, np.asarray(made.prepare(images)))):
        data = (tmp_path / folder / onnx_program.FILE).read_bytes()
        np.testing.assert_allclose(run_onnx(data, given), want, rtol=2e-4, atol=2e-5)
    assert cli.main(["export", f"--run={out}", f"--out={tmp_path / 'x'}"]) == 2
