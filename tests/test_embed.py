"""A file of features: written once, resumed, and trained from."""

import pathlib
import shlex

import jax
import numpy as np
import pytest
from etils import epath

import jaxcl
from helpers import pages
from jaxcl import cli
from jaxcl.config import build, files
from jaxcl.data.sources import by_name, features
from jaxcl.run import encoder_folder, finish, train
from jaxcl.weights import embed, encoder, writer

PAGE = pathlib.Path(__file__).parents[1] / "docs" / "frozen_heads.md"
CARD = {
    "encoder": {"name": "conv_net", "width": 4},
    "input": {
        "kind": "images",
        "dtype": "uint8",
        "channels": 1,
        "size": 8,
        "resize": None,
        "interpolation": "bicubic",
        "mean": [0.5],
        "std": [0.25],
        "decoder": None,
        "background": 255,
        "bits": None,
    },
}
DATA = {"name": "digits", "validation": 0.1}


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    """A folder with an encoder of random weights, and its features of the digits."""
    root = tmp_path_factory.mktemp("embed")
    module = encoder.make_module(CARD["encoder"])
    variables = module.init(jax.random.key(0), encoder.blank_inputs(CARD["input"]))
    made = encoder.make_encoder(
        CARD, variables["params"], variables.get("batch_stats", {})
    )
    files = {
        encoder_folder.TENSORS: writer.pack_tensors(
            encoder.flatten_leaves(made.params, made.stats), "flax"
        )
    }
    card = CARD | writer.describe(made, files)
    writer.write_folder(epath.Path(root / "encoder"), files, card, False)
    return root


@pytest.fixture(scope="module")
def work(root):
    return embed.prepare_work(str(root / "encoder"), DATA)


@pytest.fixture(scope="module")
def whole(root, work):
    """The path of a file that was written in one go."""
    path = str(root / "whole.npz")
    embed.write_features(work, path, batch_size=500)
    return path


def test_a_file_holds_what_the_encoder_says_of_every_split(root, whole):
    made, data = by_name.load("features", path=whole), by_name.load(**DATA)
    plain = jaxcl.load_encoder(root / "encoder")
    for split in ("train", "validation", "test"):
        found, images = getattr(made, split), getattr(data, split)
        want = plain.embed(images.images)
        np.testing.assert_allclose(found.images[:, 0, 0], want, rtol=1e-5, atol=1e-6)
        np.testing.assert_array_equal(found.label, images.label)
        np.testing.assert_array_equal(found.domain, images.domain)
    assert (made.class_names, made.domain_names) == (data.class_names, ("all",))
    assert features.read(whole)[1]["card"] == encoder_folder.read_card(root / "encoder")


@pytest.mark.parametrize("suffix", ["npz", "safetensors"])
def test_a_command_that_was_cut_goes_on_to_the_same_file(suffix, tmp_path, work, whole):
    path, stops = str(tmp_path / f"cut.{suffix}"), iter([False, True])
    with pytest.raises(train.Interrupted):
        embed.write_features(work, path, batch_size=500, stop=lambda: next(stops))
    draft = pathlib.Path(f"{path}.part")
    before = draft.read_bytes()
    draft.write_bytes(before[:-100])  # a kill amid a write
    calls = []
    embed.write_features(work, path, batch_size=500, stop=lambda: calls.append(1))
    assert len(calls) == 3 + 1 + 1 - 1  # batches of the splits, but the whole one
    assert not draft.exists()
    if suffix == "npz":
        assert pathlib.Path(path).read_bytes() == pathlib.Path(whole).read_bytes()
    (found, about), (want, same) = (features.read(x) for x in (path, whole))
    assert about == same and found.keys() == want.keys()
    for name, array in want.items():
        np.testing.assert_array_equal(found[name], array)


def test_other_features_are_not_overwritten(root, work, whole, tmp_path):
    before = pathlib.Path(whole).read_bytes()
    embed.write_features(
        work, whole, batch_size=500, stop=lambda: pytest.fail("embedded")
    )
    with pytest.raises(ValueError, match="whole.npz"):
        embed.write_features(work, whole, batch_size=400)
    assert pathlib.Path(whole).read_bytes() == before
    path = str(tmp_path / "begun.npz")
    with pytest.raises(train.Interrupted):
        embed.write_features(work, path, batch_size=500, stop=lambda: True)
    with pytest.raises(ValueError, match=r"begun\.npz\.part"):
        embed.write_features(work, path, batch_size=400)
    words = ["features", f"--encoder={root}/encoder", "--data=digits", "--out=x.h5"]
    assert cli.main(words) == 2


def test_the_command_takes_a_section_as_json(root, monkeypatch, capsys):
    calls = []

    def write(work, out, **options):
        calls.append((len(work.parts.stream.dataset.test.label), out, options))

    monkeypatch.setattr(embed, "write_features", write)
    data = '{"name": "digits", "size": 8, "validation": 0.1}'
    words = [f"--encoder={root}/encoder", f"--data={data}", "--out=x.npz"]
    assert cli.main(["features", *words, "--batch-size=7"]) == 0
    ((rows, out, options),) = calls
    assert (rows, out, options["batch_size"]) == (359, "x.npz", 7)
    assert not options["stop"]() and "x.npz" in capsys.readouterr().out


def test_damaged_files_are_refused(tmp_path):
    rows = np.zeros((4, 3), np.float32)
    for suffix in ("npz", "safetensors"):
        path = tmp_path / f"x.{suffix}"
        features.write(str(path), {"train_x": rows}, {})
        assert by_name.load("features", path=str(path)).train.label[0] == -1
        path.write_bytes(path.read_bytes()[:60])
        with pytest.raises(ValueError, match=path.name):
            by_name.load("features", path=str(path))
        for wrong in (rows.astype("f8"), rows[0], rows * np.nan):
            features.write(str(path), {"train_x": wrong}, {})
            with pytest.raises(ValueError, match="train_x"):
                by_name.load("features", path=str(path))


def test_the_commands_of_the_page_learn_as_from_images(root, monkeypatch):
    """Embed, then train: with the accuracies that a run on the images has."""
    monkeypatch.chdir(root)
    commands = [
        shlex.split(line)[1:]
        for block in pages.blocks(PAGE.read_text(), "")
        for line in block.replace("\\\n", " ").splitlines()
        if line.startswith(("jaxcl features", "jaxcl train frozen_heads:features"))
    ]
    (_, *make), (_, config, *options) = commands
    own = {"exports/mine": "encoder", "my_images": "digits"}
    make = [word.partition("=") for word in make]
    assert cli.main(["features", *(f"{k}={own.get(x, x)}" for k, _, x in make)]) == 0
    options = [x for x in options if not x.startswith("--workdir")]
    options = [*options, "--config.plots=False", "--config.tensorboard=False"]
    found = []
    for word, more in (
        (config, []),
        (
            "frozen_heads:cifar100",
            ["--config.data.name=digits", f"--config.start={root}/encoder"]
            + ["--config.augment.size=8", "--config.augment.resize=8"],
        ),
    ):
        mine = [x for x in options if not more or "data.path" not in x]
        made = files.read_config([f"--config={word}", *mine, *more])
        if more:
            del made.data.path
        workdir = root / f"run_{len(found)}"
        results = finish.run_job(build.build(made, workdir), workdir)
        found.append(results["matrices"]["predict/class_incremental"][-1])
    np.testing.assert_allclose(*found, atol=0.005)
    assert np.mean(found[0]) > 0.3
