"""The configs of the ER-ACE paper: every row of their tables is one that builds."""

import pathlib

import pytest
from absl import flags

from helpers import config_files
from jaxcl.config import build
from jaxcl.run import results, train

ROOT = pathlib.Path(__file__).parents[1]
NAMES = {"er_ace_cifar10": 10, "er_ace_cifar100": 100, "er_ace_miniimagenet": 100}
ROWS = (
    "er_ace",
    "er_aml",
    "er",
    "er_task_free",
    "finetune",
    "iid",
    "iidpp",
    "iid_offline",
    "icarl",
    "gem",
    "agem",
    "mir",
    "aser",
    "gdumb",
    "der",
    "derpp",
    "derpp_ace",
    "ss_il",
    "gss",
    "gcr",
)


@pytest.mark.parametrize("row", ROWS)
@pytest.mark.parametrize("name", NAMES)
def test_every_row_makes_a_method(name, row):
    benchmark, classes = name.removeprefix("er_ace_"), NAMES[name]
    small, _, method, _ = config_files.made(config_files.take(name, f"{row},debug"), 10)
    assert small.name == f"{row}_{benchmark}_debug" and method.supervised
    assert small.data["name"] == "digits"
    top, parts, method, settings = config_files.made(
        config_files.take(name, row), classes
    )
    assert top.name == f"{row}_{benchmark}"
    assert method.supervised and method.predict is not None
    joint = row.startswith("iid")
    assert (top.scenario["name"] == "joint") == joint
    assert top.scenario["num_tasks"] == (1 if joint else 5 if classes == 10 else 20)
    assert settings.capacity == (200 if classes == 10 else 10_000)
    assert top.batch_size == (128 if row == "iid_offline" else 10)
    augmented = {"gdumb": "replay", "derpp": "all", "derpp_ace": "all"}
    assert settings.augment == augmented.get(row, "none")


@pytest.mark.parametrize("argument", ["er_acr", "er,mir", "er,debugg"])
def test_refuses_rows_that_there_are_not(argument):
    said = f"'{argument}': '.*; allowed are, with commas between, one of er_ace, er_aml"
    with pytest.raises(flags.Error, match=said):
        config_files.take("er_ace_cifar10", argument)


def test_a_shrunk_config_runs(tmp_path):
    config = config_files.take("er_ace_cifar10", "mir,debug")
    found = train.run(build.build(config, tmp_path), tmp_path)
    assert results.finished(found) == 2
