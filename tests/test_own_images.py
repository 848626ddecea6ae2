"""configs/own_images.py: what follows from the images."""

import json
import pathlib

import numpy as np
import pytest
from PIL import Image

from helpers import config_files
from jaxcl.config import build, own_images
from jaxcl.data.sources import in_memory
from jaxcl.run import encoder_folder

ROOT = pathlib.Path(__file__).parents[1]


def hold(count=64, height=32, width=None, labels=None, **more):
    rng = np.random.default_rng(0)
    shape = (count, height, width or height, 3)
    images = rng.integers(0, 256, shape).astype(np.uint8)
    return in_memory.store_set("set", images, labels=labels, **more)


def config_of(held, test=0.0, **options):
    return own_images.config(held.section | {"test": test}, **options)


def test_size_and_statistics_are_those_of_the_images():
    held = hold(height=32)
    config = config_of(held)
    pixels = held.examples.images / 255
    np.testing.assert_allclose(
        config.augment.mean, pixels.mean(axis=(0, 1, 2)), atol=1e-4
    )
    np.testing.assert_allclose(
        config.augment.std, pixels.std(axis=(0, 1, 2)), atol=1e-4
    )
    assert (config.augment.size, config.augment.resize) == (32, None)
    assert config.encoder.to_dict() == {"name": "resnet", "depth": 18, "stem": "cifar"}
    assert config.augment.blur == (0.0, 0.0)
    grey = in_memory.store_set("grey", held.examples.images[..., 0])
    assert len(config_of(grey).augment.mean) == 1
    blank = in_memory.store_set("blank", np.zeros((8, 4, 4), np.uint8))
    assert config_of(blank).augment.std == (0.01,)


@pytest.mark.parametrize(
    "height, width, size, want",
    [
        (32, 48, None, (32, 32)),  # not square: resized to be judged
        (100, 100, None, (100, None)),
        (300, 400, None, (224, 256)),
        (230, 230, None, (224, 230)),  # never enlarged first
        (64, 64, 48, (48, 55)),
        (16, 16, 32, (32, 32)),
    ],
)
@pytest.mark.parametrize("later", [False, True])
def test_images_are_brought_to_a_square(height, width, size, want, later):
    config = config_of(hold(8, height, width), size=None if later else size)
    if later:  # as --config.augment.size does
        config.augment.size = size or config.augment.size
    assert (config.augment.size, config.augment.resize) == want
    small = want[0] < 96
    assert config.augment.scale == ((0.2, 1.0) if small else (0.08, 1.0))
    assert config.augment.blur == ((0.0, 0.0) if small else (1.0, 0.1))
    stem = "cifar" if want[0] <= 64 else "imagenet"
    assert config.encoder.stem == stem


def test_a_folder_its_encoder_and_its_size_are_one_word(tmp_path):
    path = tmp_path / "a,b=c.npz"
    images = np.zeros((8, 48, 48, 3), np.uint8)
    np.savez(path, train_x=images, train_y=np.arange(8) % 2)
    word = f"--config={ROOT / 'configs' / 'own_images.py'}:{path}"
    config = config_files.parse([f"{word},encoder=conv_net,size=32"])
    assert config.data.path == str(path) and config.encoder.name == "conv_net"
    assert (config.augment.size, config.augment.resize) == (32, 37)
    with pytest.raises(ValueError, match="size='big'"):
        config_files.parse([f"{word},size=big"])


@pytest.mark.parametrize(
    "side, patch, size", [(32, 4, 32), (50, 8, 48), (64, 8, 64), (230, 16, 224)]
)
def test_a_transformer_has_patches_that_divide_its_images(side, patch, size):
    config = config_of(hold(8, side), encoder="vit_tiny")
    made = config.encoder.to_dict()
    assert made == {"name": "vit", "size": "tiny", "patch": patch, "image_size": size}
    assert config.augment.size == size and config.optimizer.name == "adam"
    section = {"name": "vit", "size": "tiny", "patch": 14, "image_size": 224}
    assert config_of(hold(8, side), encoder=section).augment.size % 14 == 0


@pytest.mark.parametrize(
    "rows, epochs, batch, joint",
    [(64, 400, 2, 16), (1000, 400, 32, 128), (20_000, 250, 256, 256),
     (200_000, 50, 256, 256)],
)  # fmt: skip
def test_epochs_and_batch_follow_the_number_of_images(rows, epochs, batch, joint):
    images = np.zeros((rows, 2, 2), np.uint8)
    held = in_memory.store_set("many", images)
    config = config_of(held)
    assert (config.epochs, config.batch_size) == (epochs, joint)
    config.method.strategy = "pnr"
    scenario = config.scenario.to_dict()
    assert scenario == {"name": "data", "num_tasks": 5, "evaluation": "none"}
    assert config.batch_size == batch
    assert 4 * batch <= max(rows // 5, 8)
    config.method.base = "mocov2plus"
    assert config.method.base.queue_size >= batch
    config.epochs = 3
    assert config.schedule.warmup_epochs == 1
    config.epochs = 1
    assert config.schedule.warmup_epochs == 0
    config.schedule.warmup_epochs = 0
    config.epochs = 200
    assert config.schedule.warmup_epochs == 0  # an override stays


@pytest.mark.parametrize("sizes, told", [([200] * 4 + [8], "8"), ([200] * 5, None)])
def test_a_rare_class_that_sets_every_batch_is_said(sizes, told, capsys):
    labels = np.repeat(np.arange(5), sizes)
    held = in_memory.store_set(
        "x", np.zeros((len(labels), 2, 2), np.uint8), labels=labels
    )
    how = {"scenario": "class", "num_tasks": 5, "by_strategy": False}
    made, said = config_of(held, **how), capsys.readouterr().out
    assert (f"config.batch_size={made.batch_size}" in said) == bool(told)
    assert told is None or all(x in said for x in ("task 5 ", f" {told} ", "200", "32"))


def test_a_base_brings_its_rates_and_a_strategy_its_tasks():
    config = config_of(hold(labels=np.arange(64) % 8), scenario="class", num_tasks=4)
    assert config.scenario.name == "joint" and config.optimizer.lr == 0.6
    config.method.update(base="byol", strategy="cassle")
    assert (config.optimizer.lr, config.optimizer.weight_decay) == (1.0, 1e-5)
    assert (config.scenario.name, config.scenario.num_tasks) == ("class", 4)
    always = config_of(hold(), num_tasks=2, by_strategy=False)
    assert (always.scenario.name, always.scenario.num_tasks) == ("data", 2)
    usual = config_of(hold(labels=np.arange(64) % 3), by_strategy=False)
    assert (usual.scenario.name, usual.scenario.num_tasks) == ("class", 3)


def test_what_judges_follows_the_labels():
    labels = np.arange(64) % 8
    known = config_of(hold(labels=labels), test=0.25).to_dict()
    assert known["evaluators"]["knn"] == {"k": 12, "train_on": "all"}
    assert known["scenario"]["evaluation"] == "test"
    some = np.where(np.arange(64) < 32, labels, -1)
    partly = config_of(hold(labels=some), test=0.25).to_dict()
    assert partly["evaluators"]["knn"] == {"k": 6, "train_on": "labelled"}
    none = config_of(hold()).to_dict()
    assert set(none["evaluators"]) == {"collapse", "uniformity", "neighbours"}
    assert none["scenario"]["evaluation"] == "none"


def write(folder, side, count=6):
    folder.mkdir(parents=True)
    rng = np.random.default_rng(0)
    for i in range(count):
        width = side + (7 * i if side > 96 else i % 2)
        pixels = rng.integers(0, 256, (side, width, 3)).astype(np.uint8)
        Image.fromarray(pixels).save(folder / f"{i}.png")


def test_small_files_are_decoded_once_and_large_ones_stream(tmp_path):
    write(tmp_path / "small" / "a", 20)
    config = own_images.config(own_images.make_section(str(tmp_path / "small")))
    data = config.data.to_dict()
    assert (data["size"], data["resident"], config.augment.size) == (20, True, 20)
    assert config.augment.resize is None
    write(tmp_path / "large", 120)
    config = own_images.config(own_images.make_section(str(tmp_path / "large")))
    assert set(config.data) == {"name", "path"}
    assert (config.augment.size, config.augment.resize) == (120, 120)
    with pytest.raises(ValueError, match="/none'"):
        own_images.make_section(str(tmp_path / "none"))


def test_the_config_file_takes_a_folder(tmp_path):
    write(tmp_path / "mine" / "a", 16, count=10)
    path = f"--config={ROOT}/configs/own_images.py"
    config = config_files.parse([f"{path}:{tmp_path / 'mine'}", "--config.epochs=5"])
    assert (config.epochs, config.schedule.warmup_epochs) == (5, 1)
    assert config.data.path == str(tmp_path / "mine")
    config_files.check_options(config)
    with pytest.raises(ValueError, match="own_images:FOLDER"):
        config_files.parse([path])
    small = config_files.take("own_images", "debug")
    assert small.scenario.to_dict() == {"name": "class", "num_tasks": 2}


def test_the_debug_form_of_a_paper_reads_the_folder_that_the_command_names(tmp_path):
    for name in "abcde":
        write(tmp_path / "train" / name, 20, count=130)
        write(tmp_path / "val" / name, 20, count=5)
    words = [f"--config={ROOT}/configs/pnr_imagenet100.py:debug"]
    digits = config_files.parse(words)
    assert digits.data.path is None and digits.augment.resize is None
    assert "tsne" not in digits.evaluators
    config = config_files.parse([*words, f"--config.data.path={tmp_path}"])
    config.plasticity = False
    stream = build.build(config, tmp_path / "run").stream
    assert stream.dataset.class_names == tuple("abcd") and len(stream.tasks) == 2
    assert np.bincount(stream.dataset.train.label).tolist() == [100] * 4
    assert np.bincount(stream.dataset.test.label).tolist() == [5] * 4
    assert stream.dataset.train.streams  # images are read from their files
    # As the whole config does: evaluation sees whole images.
    assert config.augment.resize == config.augment.size == 16


@pytest.mark.parametrize(
    "name, epochs, warmup",
    [("pnr_imagenet100", 3, 2), ("pnr_cifar100", 50, 10), ("digits", 2, 1)]
    + [("keep_fresh", 1, 0), ("cclis_cifar10", 5, 4), ("quickstart_pnr", 20, 3)],
)
def test_a_warm_up_is_shorter_than_the_training(name, epochs, warmup):
    path = f"--config={ROOT}/configs/{name}.py"
    config = config_files.parse([path, f"--config.epochs={epochs}"])
    assert config.schedule.warmup_epochs == warmup


def test_the_folder_of_an_encoder_is_what_a_config_begins_with(tmp_path):
    card = {"format": 1, "encoder": {"name": "vit", "patch": 5}, "files": {}}
    inputs = {"kind": "images", "size": 10, "resize": None, "mean": [0], "std": [1]}
    card |= {"num_features": 3, "input": inputs}
    card |= {"checksum": encoder_folder.checksum(card)}
    (tmp_path / "card.json").write_text(json.dumps(card))
    config = config_of(hold(8, 32), encoder=tmp_path)
    assert config.start == str(tmp_path)
    assert config.encoder.to_dict() == {"name": "vit", "patch": 5}
    assert config.augment.size == 30 and config.optimizer.name == "adam"


@pytest.mark.parametrize("name", own_images.ENCODERS)
def test_every_encoder_builds(name):
    config = config_of(hold(8), encoder=name)
    config_files.check_options(config)
