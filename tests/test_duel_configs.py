"""The configs of the DUEL paper: every row of their tables is one that builds."""

import pytest
from absl import flags

from helpers import config_files
from jaxcl.config import build
from jaxcl.run import results, train

COMPARED = ("d_moco", "moco", "d_simclr", "simclr")
ROWS = {
    "duel_cifar10": (*COMPARED, "memory_only", "mixed_eps0", "barlow_twins", "byol"),
    "duel_stl10": (*COMPARED, "barlow_twins", "byol"),
    "duel_imagenetlt": COMPARED,
    "duel_cifar10_small": COMPARED,
}
# without a memory
FORGETFUL = ("simclr", "barlow_twins", "byol")


@pytest.mark.parametrize(
    "name, row", [(name, row) for name, rows in ROWS.items() for row in rows]
)
def test_every_row_makes_a_method(name, row):
    small, *_ = config_files.made(config_files.take(name, f"{row},debug"), 10)
    assert small.name == name + ("" if row == "d_moco" else f"_{row}") + "_debug"
    top, _, method, _ = config_files.made(config_files.take(name, row), 10)
    assert not method.supervised and method.project is not None
    assert (method.memory is None) == (row in FORGETFUL)
    assert ("memory" in top.evaluators) == (row not in FORGETFUL)
    assert top.optimizer["name"] == "adam"
    if name == "duel_cifar10_small":
        return
    steps = top.scenario.get("imbalance", {"epoch_steps": 115_846 // 256})
    total = top.epochs * steps["epoch_steps"]
    assert abs(total - (40_000 if name == "duel_stl10" else 160_000)) < 256
    assert (top.batch_size, top.encoder["depth"]) == (256, 50)
    assert top.encoder["stem"] == ("cifar" if name == "duel_cifar10" else "imagenet")
    assert top.augment["flip"] == 0.75 and not top.augment["crop"]
    judge = top.evaluators["linear"]
    assert (judge["optimizer"], judge["lr"], judge["weight_decay"]) == (
        "adam",
        1e-3,
        1e-6,
    )


@pytest.mark.parametrize("argument", ["d_mocoo", "moco,simclr", "moco,debugg"])
def test_refuses_rows_that_there_are_not(argument):
    said = f"'{argument}': '.*; allowed are, with commas between, one of d_moco, moco"
    with pytest.raises(flags.Error, match=said):
        config_files.take("duel_cifar10", argument)


def test_another_share_of_the_dominant_class():
    config = config_files.take("duel_cifar10", "moco")
    config.scenario.imbalance.rho_max = 0.75
    top, *_ = config_files.made(config, 10)
    assert top.scenario["imbalance"]["rho_max"] == 0.75


@pytest.mark.parametrize("row", ["d_moco", "d_simclr"])
def test_a_shrunk_config_runs(row, tmp_path):
    config = config_files.take("duel_cifar10_small", f"{row},debug")
    found = train.run(build.build(config, tmp_path), tmp_path)
    assert results.finished(found) == 1
    pictures = {path.name for path in tmp_path.glob("plots/*.png")}
    assert "filter_tsne_task1.png" in pictures
