"""The configs of the ER-ACE paper: every row of their tables is one that builds."""

import pathlib

import pytest
import test_docs
from absl import flags

from jaxcl import sections
from jaxcl.methods import online

ROOT = pathlib.Path(__file__).parents[1]
NAMES = {"er_ace_cifar10": 10, "er_ace_cifar100": 100, "er_ace_miniimagenet": 100}
ROWS = (
    "er_ace", "er_aml", "er", "er_task_free", "finetune", "iid", "iidpp",
    "iid_offline", "icarl", "gem", "agem", "mir", "aser", "gdumb", "der", "derpp",
    "derpp_ace", "ss_il", "gss", "gcr",
)  # fmt: skip


def take(name, argument):
    return test_docs.parse([f"--config={ROOT}/configs/{name}.py:{argument}"])


@pytest.mark.parametrize("row", ROWS)
@pytest.mark.parametrize("name", NAMES)
def test_every_row_makes_a_method(name, row):
    config = take(name, row)
    benchmark = name.removeprefix("er_ace_")
    assert config.name == f"{row}_{benchmark}"
    assert take(name, f"{row},debug").name == f"{row}_{benchmark}_debug"
    top = sections.top_of(config.to_dict())
    sections.check(top)
    parts, _ = sections.parts(top)
    classes = NAMES[name]
    settings = online.settings(classes, top.batch_size, **top.replay)
    method = sections.method(
        top.method, parts._replace(num_classes=classes, replay=settings)
    )
    assert method.supervised and method.predict is not None
    joint = row.startswith("iid")
    assert (top.scenario["name"] == "joint") == joint
    assert top.scenario["num_tasks"] == (1 if joint else 5 if classes == 10 else 20)
    assert settings.capacity == (200 if classes == 10 else 10_000)
    assert top.batch_size == (128 if row == "iid_offline" else 10)
    assert settings.augment == ("replay" if row == "gdumb" else "none")


@pytest.mark.parametrize("argument", ["er_acr", "er,mir", "er,debugg"])
def test_refuses_rows_that_there_are_not(argument):
    with pytest.raises(flags.Error, match=f"'{argument}': allowed are er_ace, er_aml"):
        take("er_ace_cifar10", argument)
