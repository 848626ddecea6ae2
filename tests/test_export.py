"""The encoder of a run as a folder: what is written, read back, and refused."""

import dataclasses
import hashlib
import json
import pathlib
import re
import shutil
import struct
from unittest import mock

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors import numpy as tensors

import jaxcl
import test_methods
from helpers import config_files, graph_sets, pages, run_directories, toy
from jaxcl import cli
from jaxcl.config import build, checks
from jaxcl.data import stream
from jaxcl.data.augment import images as augment_images
from jaxcl.data.images import readers
from jaxcl.data.sources import toys
from jaxcl.data.stream import graph_arrays
from jaxcl.evals import embedding
from jaxcl.nets import positions
from jaxcl.run import checkpoint, encoder_folder, finish, result_file
from jaxcl.weights import encoder, export, pytorch, writer

PAGE = (pathlib.Path(__file__).parents[1] / "docs" / "export.md").read_text()
# What trains is no subject here: a step that compiles in a third of the time.
RUN = {"method.base": "simclr", "method.strategy": "finetune", "epochs": 1}
RUN |= {"scenario.num_tasks": 5}
RUN |= {"augment.crop": False, "augment.jitter_probability": 0.0}


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A run with any numbers after the first of five tasks, and its export."""
    workdir = tmp_path_factory.mktemp("run")
    run_directories.run_of(workdir, **RUN)
    out = tmp_path_factory.mktemp("out") / "deep" / "export"
    before = run_directories.contents(workdir)
    card = export.export(str(workdir), str(out))
    assert run_directories.contents(workdir) == before
    return workdir, out, card


@pytest.fixture(scope="module")
def residual(tmp_path_factory):
    """A run with a ResNet, and its export with the file for PyTorch."""
    workdir = tmp_path_factory.mktemp("resnet")
    run_directories.run_of(workdir, encoder=run_directories.RESNET)
    out = tmp_path_factory.mktemp("out") / "export"
    return workdir, out, export.export(str(workdir), str(out), torch=True)


def test_embeds_as_an_evaluation_of_the_run_does(trained, tmp_path):
    workdir, out, _ = trained
    work = run_directories.untried(tmp_path / "like", tasks=1, **RUN)
    state = toy.saved(work, workdir).state
    parts = run_directories.eval_parts(work)
    want = embedding.make_embedder(parts, work.stream.evaluation, batch_size=100)(state)
    made = jaxcl.load_encoder(out)
    images = work.stream.evaluation.images
    np.testing.assert_allclose(made.embed(images), want, rtol=1e-5, atol=1e-6)
    assert made.embed(images).dtype == np.float32
    chex.assert_trees_all_equal(made.params, state.params["encoder"])
    chex.assert_trees_all_equal(made.stats, state.stats["encoder"])
    assert made.num_features == want.shape[1] == 16


def test_the_last_batch_and_few_images(trained):
    made, images = jaxcl.load_encoder(trained[1]), toys.digits().test.images
    whole = made.embed(images[:11])
    compiled = []
    monitored = jax.jit(
        lambda *x: compiled.append(1) or encoder._apply_module(made.module, *x)[0]
    )
    counted = dataclasses.replace(made, _program=monitored)
    for batch_size in (4, 16, 256):
        found = counted.embed(images[:11], batch_size=batch_size)
        np.testing.assert_allclose(found, whole, rtol=1e-5, atol=1e-6)
    assert len(compiled) == 2  # of 4 rows and of 16
    counted.embed(images[:14])
    assert len(compiled) == 2
    assert made.embed(images[:0]).shape == (0, 16)
    np.testing.assert_allclose(made.embed(images[3:4])[0], whole[3], rtol=1e-5)
    with pytest.raises(ValueError, match="batch_size=0"):
        made.embed(images, batch_size=0)


def test_apply_is_pure_and_trains(trained):
    made, images = jaxcl.load_encoder(trained[1]), toys.digits().test.images[:32]
    inputs = made.prepare(images)
    want = (images / 255.0 - 0.3) / 0.4
    np.testing.assert_allclose(inputs, want, atol=1e-5)
    rows, same = made.apply(made.params, made.stats, inputs)
    np.testing.assert_allclose(rows, made.embed(images), rtol=1e-5, atol=1e-6)
    chex.assert_trees_all_equal(same, made.stats)
    other, moved = jax.jit(made.apply, static_argnames="train")(
        made.params, made.stats, inputs, train=True
    )
    assert np.abs(other - rows).max() > 1e-3
    assert not np.allclose(moved["bn1"]["mean"], made.stats["bn1"]["mean"])
    zero = jax.tree.map(jnp.zeros_like, made.params)
    tuned = dataclasses.replace(made, params=zero)
    assert not tuned.embed(images).any() and made.embed(images).any()


# The others run with `-m slow`.
FAMILIES = ("mocov2plus-pnr-head", "er_ace-measured", "cclis", "icl")


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=() if name in FAMILIES else pytest.mark.slow)
        for name in test_methods.METHODS
        if name != "gdumb"
    ],
)
def test_every_method(name, tmp_path):
    changes = json.loads(json.dumps(test_methods.METHODS[name].changes))
    if changes.get("method", {}).get("name") == "icl":
        changes["method"]["output_dim"] = 0
    work, state = run_directories.run_of(tmp_path / "run", **changes)
    card = export.export(str(tmp_path / "run"), str(tmp_path / "out"))
    made = jaxcl.load_encoder(tmp_path / "out")
    images = toys.digits().test.images[:16]
    view = augment_images.make_eval(size=8, mean=(0.3,), std=(0.4,))
    want = jax.jit(work.method.embed)(state, view(images))
    assert np.std(want, axis=0).max() > 1e-3
    np.testing.assert_allclose(made.embed(images), want, rtol=1e-5, atol=1e-6)
    method = changes.get("method", {}).get("name", "two_view")
    assert card["method"]["name"] == method and card["results"]["of"] == "encoder"


def test_icl_leaves_its_head_behind_and_says_so(tmp_path):
    _, state = run_directories.run_of(
        tmp_path / "run", method={"name": "icl", "output_dim": 8}
    )
    card = export.export(str(tmp_path / "run"), str(tmp_path / "out"))
    assert card["results"]["of"] == "encoder and head" and card["num_features"] == 16
    made = jaxcl.load_encoder(tmp_path / "out")
    chex.assert_trees_all_equal(made.params, state.params["encoder"])


def test_gdumb_has_nothing_to_export(tmp_path, capsys):
    run_directories.run_of(tmp_path / "run", **test_methods.METHODS["gdumb"].changes)
    check_refused(
        r"config\.method\.name='gdumb' .*at each evaluation",
        tmp_path / "run",
        tmp_path / "out",
        capsys,
    )


@pytest.fixture(scope="module")
def of_graphs(tmp_path_factory):
    workdir = tmp_path_factory.mktemp("graphs")
    changes = {
        "data": {"name": "rings_and_trees"},
        "scenario": {"name": "growth", "evaluation": "none"},
        "augment": {"name": "graphs"},
        "encoder": {"name": "gcn", "width": 4},
        "method": {"name": "icl"},
    }
    work, state = run_directories.run_of(workdir, **changes)
    card = export.export(str(workdir), str(workdir / "export"))
    return work, state, card, jaxcl.load_encoder(workdir / "export")


def test_graphs(of_graphs):
    work, state, card, made = of_graphs
    rows, examples = np.arange(11), work.stream.dataset.train
    want = embedding.make_embedder(
        run_directories.eval_parts(work), examples, rows=rows
    )(state)
    batch = graph_arrays.pad_batch(
        examples.graphs, rows, nodes=400, edges=900, graphs=16
    )
    found = made.embed(batch)
    np.testing.assert_allclose(found[:11], want, rtol=1e-4, atol=1e-5)
    assert found.shape == (16, card["num_features"]) == (16, 8)
    width = examples.graphs.features.shape[1]
    assert card["input"] == {"kind": "graphs", "features": width}
    other, _ = made.apply(
        made.params, made.stats, batch, train=True, key=jax.random.key(0)
    )
    assert np.abs(other - found).max() > 1e-3
    wide = batch._replace(features=np.zeros((400, 99), np.float32))
    with pytest.raises(ValueError, match="99 features"):
        made.embed(wide)
    with pytest.raises(ValueError, match=r"ndarray.*Graphs"):
        made.embed(np.zeros((2, 8, 8, 1), np.uint8))
    with pytest.raises(ValueError, match="inputs"):
        made.prepare(np.zeros((2, 8, 8, 1), np.uint8))


def test_an_encoder_takes_graphs_of_as_many_features():
    section = export._describe_architecture(
        {"encoder": {"name": "gin", "width": 4, "layers": 1}}
    )
    inputs, module = {"kind": "graphs", "features": 3}, encoder.make_module(section)
    blank, rng = encoder.blank_inputs(inputs), np.random.default_rng(0)
    like = jax.eval_shape(lambda key: module.init(key, blank), jax.random.key(0))
    filled = jax.tree.map(lambda x: rng.uniform(0.2, 0.7, x.shape).astype("f4"), like)
    card = {"encoder": section, "input": inputs}
    made = encoder.make_encoder(card, filled["params"], filled["batch_stats"])
    examples = graph_sets.random_set(4, rng, features=3)
    batch = graph_arrays.pad_batch(
        examples, np.arange(3), nodes=64, edges=256, graphs=4
    )
    want = module.apply(filled, batch)
    np.testing.assert_allclose(made.embed(batch), want, rtol=1e-5)
    assert made.embed(batch)[0].any() and "graphs" in repr(made)
    for wrong in (batch._replace(features=np.zeros((64, 99), "f4")), batch.features):
        with pytest.raises(ValueError, match="99 features|ndarray"):
            made.embed(wrong)


# Images of other sizes


def resized(out, resize, decoder=None):
    """The encoder of an export as if its run had resized images."""
    made = jaxcl.load_encoder(out)
    given = made.card["input"] | {"resize": resize, "decoder": decoder}
    return dataclasses.replace(made, card=made.card | {"input": given})


@pytest.mark.parametrize("resize", [None, 10])
def test_a_list_is_resized_as_a_set_that_streams(trained, tmp_path, resize):
    rng = np.random.default_rng(0)
    sizes = [(20, 13), (8, 8), (11, 30), (16, 16), (9, 12)]
    images = [rng.integers(0, 256, (*size, 1), np.uint8) for size in sizes]
    label = np.zeros(len(images), np.int32)
    reader = readers.FunctionRows(images.__getitem__, len(images), "list")
    examples = stream.Examples(label, label, reader=reader)
    work = run_directories.untried(tmp_path, tasks=1, **RUN)
    state = toy.saved(work, trained[0]).state
    parts = run_directories.eval_parts(work)._replace(resize=resize)
    streamed = work.stream.dataset._replace(decoder="pillow")
    parts = parts._replace(stream=work.stream._replace(dataset=streamed))
    want = embedding.make_embedder(parts, examples)(state)
    found = resized(trained[1], resize, "pillow").embed(images, batch_size=2)
    np.testing.assert_allclose(found, want, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    "images, match",
    [
        (np.zeros((2, 8, 8, 1), np.float32), r"images.*float32\[2, 8, 8, 1\]"),
        (np.zeros((2, 8, 8, 3), np.uint8), r"uint8\[N, H, W, 1\]"),
        (np.zeros((8, 8, 3), np.uint8), r"8 x 3 .*8 x 8"),
        (np.zeros((2, 9, 8, 1), np.uint8), r"9 x 8 .*8 x 8"),
        (
            [np.zeros((8, 8, 1), np.uint8), np.zeros((8, 8, 3), np.uint8)],
            r"images\[1\]",
        ),
        ([3], r"images\[0\]"),
    ],
)
def test_refuses_other_images(trained, images, match):
    with pytest.raises(ValueError, match=match):
        jaxcl.load_encoder(trained[1]).embed(images)


# The card


def test_the_card_of_a_trained_run(trained):
    workdir, out, card = trained
    assert json.loads((out / "card.json").read_text()) == card
    assert card["encoder"] == {"name": "conv_net", "width": 4, "precision": "float32"}
    given = card["input"]
    assert (given["kind"], given["channels"], given["size"]) == ("images", 1, 8)
    assert (given["mean"], given["std"]) == ([0.3], [0.4])
    told = card["training"]
    assert (told["seed"], told["num_tasks"], told["whole_tasks"]) == (0, 5, 1)
    method = card["method"]
    names = method["base"]["name"], method["strategy"]["name"]
    assert names == ("simclr", "finetune")
    found = card["results"]["matrices"]["knn/x"]
    assert found == {"accuracy": [0.5, *[None] * 4], "average": 0.5}
    newest = max(int(p.name) for p in (workdir / "checkpoints").iterdir())
    assert card["checkpoint"]["number"] == newest
    assert card["config"] == json.loads((workdir / "config.json").read_text())
    data = (out / "encoder.safetensors").read_bytes()
    assert card["files"] == {"encoder.safetensors": hashlib.sha256(data).hexdigest()}
    leaves = tensors.load(data)
    count = sum(x.size for name, x in leaves.items() if name.startswith("params/"))
    assert card["parameters"] == count and "stats/bn3/var" in leaves
    assert card["versions"]["jax"] == jax.__version__


def test_a_network_computes_in_the_precision_of_its_card():
    section = {"name": "mlp", "widths": (3,)}
    for more, dtype in (({}, jnp.float32), ({"precision": "bfloat16"}, jnp.bfloat16)):
        assert encoder.make_module(section | more).dtype == dtype


def test_a_card_is_read_as_the_config_of_a_run(tmp_path):
    look = {"size": 8, "resize": 9, "mean": [0.5], "std": [0.25]}
    card = {"encoder": {"name": "conv_net", "precision": "bfloat16"}, "format": 1}
    card |= {"input": {"kind": "images"} | look, "num_features": 4, "files": {}}
    card["checksum"] = encoder_folder.checksum(card)
    (tmp_path / "card.json").write_text(json.dumps(card))
    wanted = {"encoder": {"name": "conv_net"}, "precision": "bfloat16", "augment": look}
    assert encoder_folder.as_config(str(tmp_path)) == wanted


def test_precision_and_pooled_windows_are_kept(tmp_path):
    made = {"name": "resnet", "depth": 10, "width": 4, "pool": 1}
    changes = {"encoder": made, "precision": "bfloat16", "augment.size": 16}
    changes["data"] = {"name": "digits", "size": 16}
    work, state = run_directories.run_of(tmp_path / "run", **changes)
    card = export.export(str(tmp_path / "run"), str(tmp_path / "out"))
    assert card["encoder"]["precision"] == "bfloat16"
    assert card["num_features"] == 4 * 32  # two by two windows
    found = jaxcl.load_encoder(tmp_path / "out")
    images = work.stream.evaluation.images[:4]
    view = augment_images.make_eval(size=16, mean=(0.3,), std=(0.4,))
    want = jax.jit(work.method.embed)(state, view(images))
    np.testing.assert_allclose(found.embed(images), want, rtol=2e-2, atol=1e-3)
    assert found.module.dtype == jnp.bfloat16


def test_a_card_has_the_results_of_its_own_network_alone():
    """Not those of the task before, if the run has trained since."""
    none = result_file.empty_results(2)
    one = result_file.add_task(none, 0, {"knn/x": np.array([0.4, 0.1])}, {"a": 1}, 1.0)
    two = result_file.add_task(one, 1, {"knn/x": np.array([0.3, 0.9])}, {"a": 2}, 1.0)
    for results, row, average in (
        (none, None, None),
        (one, [0.4, 0.1], 0.4),
        (two, [0.3, 0.9], 0.6),
    ):
        for phase in checkpoint.Phase:
            cursor = {"phase": phase, "results": results}
            found = export._read_results({"method": {"name": "er"}}, cursor)
            if phase != "evaluated" or row is None:
                assert found is None
                continue
            want = {"accuracy": row, "average": pytest.approx(average)}
            assert found["matrices"] == {"knn/x": want} and found["of"] == "encoder"


@pytest.mark.parametrize(
    "phase, done, whole", [("training", 2, 2), ("trained", 2, 3), ("evaluated", 3, 3)]
)
def test_a_task_that_is_trained_is_whole(phase, done, whole):
    results = result_file.empty_results(5)
    results |= {"scalars": [{}] * done + [None] * (5 - done)}
    card = export._describe_training({}, {"phase": phase, "results": results})
    assert card["whole_tasks"] == whole


def test_how_far_the_run_had_come(tmp_path):
    run = tmp_path / "run"
    work = run_directories.untried(run, **RUN)
    state = run_directories.random_state(work)
    for number, (phase, done, begun, whole) in enumerate(
        [
            ("training", 0, 1, 0),
            ("training", 2, 3, 2),
            ("trained", 2, 3, 3),
            ("evaluated", 3, 3, 3),
        ]
    ):
        run_directories.save(work, run, state, number=number, phase=phase, done=done)
        card = export.export(str(run), str(tmp_path / "out"))
        assert card["checkpoint"]["number"] == number
        assert card["training"]["tasks"] == list(work.data.task_names[:begun])
        assert card["training"]["whole_tasks"] == whole
        assert (card["results"] is not None) == (phase == "evaluated")
    row = [0.7, 0.7, 0.7, None, None]
    found = {"knn/x": {"accuracy": row, "average": pytest.approx(0.7)}}
    assert card["results"]["matrices"] == found
    assert card["results"]["scalars"] == {"knn/loss": 1.5}


def test_the_last_accepted_update_takes_the_place_of_its_run(trained, tmp_path):
    run, out = shutil.copytree(trained[0], tmp_path / "run"), tmp_path / "out"
    states = []
    for number, accepted in ((1, True), (2, False)):
        folder = run / "updates" / f"{number:04d}"
        scenario = {"name": "after", "num_tasks": 2}
        data = {"name": "digits", "size": 8}
        with mock.patch.object(checks, "check_start"):
            _, state = run_directories.run_of(
                folder, data=data, scenario=scenario, start=str(run)
            )
        (folder / "update.json").write_text(json.dumps({"accepted": accepted}))
        states.append(state)
    shutil.rmtree(run / "updates" / "0002" / "checkpoints")  # as one rolled back
    card = export.export(str(run), str(out))
    place = str(run / "updates" / "0001")
    assert card["checkpoint"]["run"] == export.hash_path(place)
    assert card["data"]["source"] == "digits"
    made = jaxcl.load_encoder(out)
    chex.assert_trees_all_equal(made.params, states[0].params["encoder"])
    (run / "updates" / "0001" / "update.json").write_text('{"accepted": false}')
    export.export(str(run), str(out), force=True)
    found = jaxcl.load_encoder(out).card["checkpoint"]
    assert found == trained[2]["checkpoint"] | {"run": export.hash_path(str(run))}


# What is refused


def check_refused(match, run, out, capsys, *options, errors=()):
    assert cli.main(["export", f"--run={run}", f"--out={out}", *options]) == 2
    said = capsys.readouterr().err.splitlines()
    patterns = [*(f"jaxcl: error: .*{x}" for x in errors), f"jaxcl: .*{match}"]
    for line, pattern in zip(said, patterns, strict=True):
        assert re.match(pattern, line), line


def test_what_is_wrong_with_the_run_is_one_line(trained, tmp_path, capsys):
    out = tmp_path / "out"
    check_refused(r"--run='.*nowhere': no such", tmp_path / "nowhere", out, capsys)
    copy = shutil.copytree(trained[0], tmp_path / "copy")
    there = json.loads((copy / "config.json").read_text())
    there["encoder"]["width"] = 8
    (copy / "config.json").write_text(json.dumps(there))
    match = r"does not fit the encoder .*\['bn1'\]\['bias'\] is float32\[4\] in"
    check_refused(match, copy, out, capsys)
    there["checkpoint"] = "runs/a"
    (copy / "config.json").write_text(json.dumps(there))
    check_refused(r"--run=.*runs/a; ", copy, out, capsys)
    shutil.copy(trained[0] / "config.json", copy)
    shutil.rmtree(copy / "checkpoints")
    check_refused(
        r"--run='.*copy': there is no checkpoint in it yet", copy, out, capsys
    )
    (copy / "checkpoints" / "3").mkdir(parents=True)
    match = r"every checkpoint in .* is damaged \(\[3\]\)"
    check_refused(match, copy, out, capsys, errors=["checkpoint 3 in .* is damaged"])
    assert not out.exists()


def test_a_folder_of_something_else_is_refused(trained, tmp_path, capsys):
    out = tmp_path / "out"
    out.mkdir()
    export.export(str(trained[0]), str(out))  # it was empty
    again = export.export(str(trained[0]), str(out), torch=False)
    assert {*again} == {*trained[2]}
    same = {*again} - {"date", "checksum"}
    assert all(again[name] == trained[2][name] for name in same)
    assert {p.name for p in out.iterdir()} == {"card.json", "encoder.safetensors"}
    assert [p.name for p in tmp_path.iterdir()] == ["out"]
    (out / "notes.txt").write_text("mine")
    before = run_directories.contents(out)
    match = r"holds notes\.txt, which is no part of an export"
    for options in ([], ["--force"]):
        check_refused(match, trained[0], out, capsys, *options)
    assert run_directories.contents(out) == before
    check_refused("is a file", trained[0], out / "notes.txt", capsys)


def test_another_export_gives_way_to_force(trained, residual, tmp_path, capsys):
    out = shutil.copytree(residual[1], tmp_path / "out")
    check_refused("holds another export, of step 7; --force", trained[0], out, capsys)
    assert run_directories.contents(out) == run_directories.contents(residual[1])
    assert cli.main(["export", f"--run={trained[0]}", f"--out={out}", "--force"]) == 0
    assert jaxcl.load_encoder(out).num_features == 16
    assert {p.name for p in out.iterdir()} == {"card.json", "encoder.safetensors"}
    (out / "card.json").write_text("{")
    check_refused(
        r"card\.json: it is damaged.*--force replaces it", trained[0], out, capsys
    )
    assert cli.main(["export", f"--run={trained[0]}", f"--out={out}", "--force"]) == 0
    said = capsys.readouterr().out
    assert f"{trained[2]['parameters']:,}" in said and "1 of 5 tasks" in said


def change(out, name, value):
    card = json.loads((out / "card.json").read_text())
    toy.put(card, {name: value})
    card["checksum"] = encoder_folder.checksum(card)
    (out / "card.json").write_text(json.dumps(card))


@pytest.mark.parametrize(
    "name, value, match",
    [
        ("format", 2, "format=2"),
        ("num_features", 99, "num_features=99.* 16"),
        ("encoder.width", 8, r"params/bn1/bias .*float32\[4\].*float32\[8\]"),
        ("encoder.name", "resnet", r"encoder"),
        ("encoder.name", "swin", r"encoder\.name='swin'"),
        ("encoder.size", 8, r"encoder\.size"),
        ("encoder.precision", "int8", r"encoder\.precision='int8'"),
        ("input.channels", 3, r"params/conv1/kernel.*float32\[3, 3, 1, 4\]"),
    ],
)
def test_a_card_that_does_not_fit_is_refused(trained, tmp_path, name, value, match):
    out = shutil.copytree(trained[1], tmp_path / "out")
    change(out, name, value)
    with pytest.raises(ValueError, match=match):
        jaxcl.load_encoder(out)


def test_damaged_files_are_refused(trained, tmp_path):
    out = shutil.copytree(trained[1], tmp_path / "out")
    path = out / "encoder.safetensors"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    with pytest.raises(ValueError, match="sha256"):
        jaxcl.load_encoder(out)
    path.write_bytes(b"no tensors")
    change(out, "files", {path.name: hashlib.sha256(b"no tensors").hexdigest()})
    with pytest.raises(ValueError, match="safetensors"):
        jaxcl.load_encoder(out)
    path.unlink()
    with pytest.raises(ValueError, match=r"encoder\.safetensors"):
        jaxcl.load_encoder(out)
    text = (out / "card.json").read_text()
    (out / "card.json").write_text(text.replace('"seed": 0', '"seed": 1', 1))
    with pytest.raises(ValueError, match=r"card\.json"):
        jaxcl.load_encoder(out)
    (out / "card.json").write_text('{"format": 1}')
    with pytest.raises(ValueError, match=r"'encoder', 'files', 'input'"):
        jaxcl.load_encoder(out)
    (out / "card.json").write_text("{")
    with pytest.raises(ValueError, match=r"card\.json"):
        jaxcl.load_encoder(out)
    with pytest.raises(ValueError, match="card.json"):
        jaxcl.load_encoder(tmp_path / "nowhere")


def tensor_file(header, data=bytes(16), size=None):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text) if size is None else size) + text + data


def entry(dtype="F32", shape=(4,), at=(0, 16)):
    return {"dtype": dtype, "shape": list(shape), "data_offsets": list(at)}


HEADERS = {
    "no file": b"",
    "a part of the length": b"\1\0",
    "longer than any file": tensor_file({}, size=2**63),
    "longer than the file": tensor_file({}, size=2**40),
    "no JSON": tensor_file(b"{" * 50),
    "deep": tensor_file(b'{"a":' * 100_000 + b"1" + b"}" * 100_000),
    "a list": tensor_file([1]),
    "no text": tensor_file(b"\xff\xfe"),
    "the same bytes twice": tensor_file({"a": entry(), "b": entry()}),
    "overlapping": tensor_file({"a": entry(), "b": entry(at=(8, 24))}, bytes(24)),
    "beyond the end": tensor_file({"a": entry(shape=(400,), at=(0, 1600))}),
    "before the start": tensor_file({"a": entry(at=(-16, 0))}),
    "backwards": tensor_file({"a": entry(at=(16, 0))}),
    "a hole": tensor_file({"a": entry(shape=(1,), at=(12, 16))}),
    "bytes behind": tensor_file({"a": entry()}, bytes(20)),
    "more than 64 bits": tensor_file({"a": entry(shape=(2**40, 2**40))}),
    "huge and empty": tensor_file({"a": entry(shape=(2**62, 0), at=(0, 0))}, b""),
    "a type of nobody": tensor_file({"a": entry("Q4")}),
    "a type of others": tensor_file({"a": entry("F8_E4M3", (16,))}),
}


@pytest.mark.parametrize("name", HEADERS)
def test_hostile_headers_are_refused_by_name(name):
    with pytest.raises(ValueError, match="^f: "):
        encoder_folder.read_tensors(HEADERS[name], "f")


def test_no_path_of_this_machine_is_in_the_card(trained, tmp_path):
    copy = shutil.copytree(trained[0], tmp_path / "secret")
    there = json.loads((copy / "config.json").read_text())
    there["data"] = {
        "name": "joined",
        "sets": [{"name": "npz", "path": "secret/x.npz"}],
    }
    there |= {"start": "secret/runs", "plasticity_from": "secret"}
    there["notes"] = {
        "a": "/secret",
        "b": "gs://secret/x",
        "c": ["~/secret", "../secret"],
    }
    there["name"] = "kept/name"
    (copy / "config.json").write_text(json.dumps(there))
    card = export.export(str(copy), str(tmp_path / "out"))
    text = (tmp_path / "out" / "card.json").read_text()
    assert "secret" not in text and str(tmp_path) not in text
    hidden = export.hash_path("secret/x.npz")
    assert card["data"]["options"]["sets"][0]["path"] == hidden
    assert re.fullmatch("sha256:[0-9a-f]{16}", hidden)
    assert card["checkpoint"]["run"] == export.hash_path(str(copy))
    assert card["training"]["run"] == card["config"]["name"] == "kept/name"


def test_an_export_that_was_killed_is_made_again(trained, tmp_path):
    out = shutil.copytree(trained[1], tmp_path / "out")
    (out / "card.json").unlink()  # it is written last
    export.export(str(trained[0]), str(out))
    whole = (out / "card.json").read_text()
    (out / "card.json").unlink()
    (out / "encoder.safetensors").write_bytes(b"another's")
    with pytest.raises(ValueError, match="--force"):
        export.export(str(trained[0]), str(out))
    assert json.loads(whole)["files"] == trained[2]["files"]


# PyTorch's file, without PyTorch


def test_the_state_dict_by_hand(residual):
    workdir, out, card = residual
    made, state = jaxcl.load_encoder(out), pytorch.torch_state(out)
    saved = tensors.load((out / "resnet_torch.safetensors").read_bytes())
    again = pytorch.torch_state(made)
    assert set(state) == set(saved) == set(again)
    for name in state:
        np.testing.assert_array_equal(saved[name], state[name])
    kernel = np.asarray(made.params["layer2_0"]["conv1"]["kernel"])
    assert saved["layer2.0.conv1.weight"].shape == (8, 4, 3, 3)
    assert saved["layer2.0.conv1.weight"][5, 2, 0, 1] == kernel[0, 1, 2, 5]
    bn = made.params["layer3_0"]["downsample_bn"], made.stats["layer3_0"]
    for name, want in (
        ("weight", bn[0]["scale"]),
        ("bias", bn[0]["bias"]),
        ("running_mean", bn[1]["downsample_bn"]["mean"]),
        ("running_var", bn[1]["downsample_bn"]["var"]),
    ):
        np.testing.assert_array_equal(saved[f"layer3.0.downsample.1.{name}"], want)
    seen = saved["layer3.0.downsample.1.num_batches_tracked"]
    assert seen.shape == () and seen.dtype == np.int64 and seen == 0
    data = (out / "resnet_torch.safetensors").read_bytes()
    assert card["files"]["resnet_torch.safetensors"] == hashlib.sha256(data).hexdigest()
    counters = [name for name in saved if name.endswith("num_batches_tracked")]
    leaves = encoder.flatten_leaves(made.params, made.stats)
    assert len(saved) == len(leaves) + len(counters)


@pytest.mark.parametrize(
    "kind, registers", [("learned", 0), ("learned", 2), ("sin_cos", 0)]
)
def test_positions_are_for_the_images_trained_on(kind, registers):
    """Images of 24 pixels have 36 patches of 4; the learned table is for 16."""
    options = {"name": "vit", "width": 8, "layers": 1, "heads": 2, "hidden": 8}
    options |= {"patch": 4, "image_size": 16, "positions": kind}
    options["registers"] = registers
    section = export._describe_architecture({"encoder": options})
    card = {"encoder": section, "input": {"size": 24}}
    module, images = encoder.make_module(section), np.zeros((1, 24, 24, 3), "f4")
    like = jax.eval_shape(module.init, jax.random.key(0), images)["params"]
    rng = np.random.default_rng(0)
    params = jax.tree.map(lambda x: rng.normal(size=x.shape).astype("f4"), like)
    network = encoder.Encoder(module, 8, card, params, {}, None)
    found = pytorch.torch_state(network)
    token, apart = params["class"], kind == "learned" and not registers
    assert found["pos_embed"].shape == (1, 36 + apart, 8)
    if kind == "sin_cos":
        table = positions.sin_cos_table((6, 6), 8)
        np.testing.assert_allclose(found["pos_embed"][0], table.reshape(36, 8))
    elif apart:
        place = params["class_position"].ravel()
        np.testing.assert_array_equal(found["pos_embed"][0, 0], place)
    else:  # there timm's class token includes its position
        token = token + params["class_position"]
    np.testing.assert_array_equal(found["cls_token"].ravel(), token.ravel())


def test_networks_that_pytorch_has_not_are_refused(trained, tmp_path, capsys):
    match = r"--torch: config\.encoder\.name='conv_net'"
    check_refused(match, trained[0], tmp_path / "out", capsys, "--torch")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("section", "field"),
    [
        ({"name": "resnet", "padding": "same"}, "padding='same'"),
        (
            {"name": "vit", "positions": "rotary", "qkv_bias": "all"},
            "qkv_bias='all'",
        ),
        ({"name": "vit", "positions": "rotary", "qkv_bias": "query_value"}, None),
        ({"name": "vit", "positions": "learned", "qkv_bias": "all"}, None),
        ({"name": "convnext", "depths": (1, 1), "patch": 4}, "depths=(1, 1)"),
        ({"name": "convnext", "depths": None, "patch": 2}, "patch=2"),
        ({"name": "convnext", "depths": (1, 1, 2, 1), "patch": 4}, None),
        ({"name": "resnet", "padding": "torch"}, None),
    ],
)
def test_options_that_pytorch_has_not_are_refused(section, field):
    if field is None:
        return pytorch.check_supported(section)
    with pytest.raises(ValueError, match=re.escape(field)):
        pytorch.check_supported(section)


def test_the_commands_and_the_code_of_the_page(residual, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    path = config_files.ROOT / "configs" / "quickstart.py"
    changes = (
        "scenario.name=joint",
        "data.train=400",
        "epochs=2",
        "evaluators.knn.k=1",
    )
    words = [f"--config={path}", *(f"--config.{change}" for change in changes)]
    config, folder = config_files.parse(words), tmp_path / "runs" / "quickstart"
    finish.run_job(build.build(config, folder), folder)
    shutil.copytree(residual[0], tmp_path / "runs" / "pnr_cifar100")
    commands = pages.commands(PAGE, "jaxcl export")
    # test_stablehlo.py has ONNX, an extra.
    whole = [x for x in commands if len(x) > 1 and "--onnx" not in x]
    assert len(whole) == 2
    for arguments in whole:
        program = ["--stablehlo"] if "runs/quickstart" in str(arguments) else []
        assert cli.main(["export", *arguments + program]) == 0
    found = jaxcl.load_encoder("exports/pnr_cifar100")
    assert writer.PYTORCH["resnet"] in found.card["files"]
    run = export.hash_path("runs/pnr_cifar100")
    assert found.card["checkpoint"]["run"] == run
    capsys.readouterr()
    blocks = pages.blocks(PAGE, "python")
    codes = [code for code in blocks if "exports/quickstart" in code]
    assert len(codes) == 2
    example = (config_files.ROOT / "examples" / "fine_tune.py").read_text()
    for text in (*codes, example):
        exec(compile(text, "export.md", "exec"), {})
    first, last, *_ = capsys.readouterr().out.splitlines()[2].split()
    assert float(last) < 0.9 * float(first)


def test_a_run_directory_is_loaded_as_its_export(tmp_path):
    """Without a further command; an export of images can be checked."""
    run_directories.run_of(tmp_path / "run")
    images = np.random.default_rng(0).integers(0, 256, (3, 8, 8, 1), np.uint8)
    of_run = jaxcl.load_encoder(tmp_path / "run", check=True)
    of_export = jaxcl.load_encoder(tmp_path / "run" / "encoder")
    np.testing.assert_array_equal(of_run.embed(images), of_export.embed(images))
    card = of_export.card | {"check": [1.0] * of_export.num_features}
    with pytest.raises(ValueError, match="check"):
        dataclasses.replace(of_export, card=card).check()
