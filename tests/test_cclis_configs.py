"""The configs of the CCLIS paper: every row of their tables is one that builds."""

import pytest
from absl import flags

from helpers import config_files
from jaxcl.config import build
from jaxcl.run import results, train

NAMES = {"cclis_cifar10": 10, "cclis_cifar100": 100, "cclis_tinyimagenet": 200}
CONTRASTIVE = (
    "cclis",
    "released",
    "random",
    "no_prd",
    "selection_only",
    "neither",
    "co2l",
    "co2l_no_ird",
)
REPLAY = ("er", "icarl", "gem", "gss", "der", "derpp", "gcr")


@pytest.mark.parametrize("row", CONTRASTIVE + REPLAY)
@pytest.mark.parametrize("name", NAMES)
def test_every_row_makes_a_method(name, row):
    benchmark, tiny = name.removeprefix("cclis_"), name == "cclis_tinyimagenet"
    small, *_ = config_files.made(config_files.take(name, f"{row},debug"), 10)
    assert small.name == f"{row}_{benchmark}_debug"
    top, parts, method, settings = config_files.made(
        config_files.take(name, row), NAMES[name]
    )
    assert top.name == f"{row}_{benchmark}" and method.supervised
    assert top.scenario == {"name": "class", "num_tasks": 10 if tiny else 5}
    assert top.augment["size"] == (64 if tiny else 32)
    assert top.encoder == {"name": "resnet", "depth": 18, "width": 64}
    if row in REPLAY:
        assert (settings.capacity, settings.size, settings.augment) == (200, 32, "all")
        assert (top.batch_size, top.epochs) == (32, 100 if tiny else 50)
        assert method.predict is not None and method.replays
        return
    assert top.method["memory_size"] == 200 and method.replayed is not None
    assert (top.batch_size, top.epochs) == (512, (500, 50 if tiny else 100))
    assert top.augment["views"] == (2 if row.startswith("co2l") else 1)
    assert top.replay is None
    judge = top.evaluators["linear"]
    assert (judge["train_on"], judge["balanced"]) == ("visible", True)
    assert judge["lr"] == (0.1 if name == "cclis_cifar100" else 0.5)
    blur = 0.5 if tiny else 0.0
    assert judge.get("blur", 0.0) == blur
    assert set(top.augment.get("blur", (0.0,))) == {blur}
    for where in (judge, top.augment):
        assert where["scale"] == (0.1 if tiny else 0.2, 1.0)


@pytest.mark.parametrize("name", NAMES)
def test_the_released_row_has_the_released_mistakes(name):
    method = config_files.take(name, "released").method.to_dict()
    own = config_files.take(name, "cclis").method.to_dict()
    wrong = {"leftover": True}
    if name != "cclis_cifar10":  # its tasks of two classes hide this one
        wrong["scope"] = "all_negatives"
    assert method == own | wrong


@pytest.mark.parametrize("argument", ["ccliss", "cclis,er", "er,debugg"])
def test_refuses_rows_that_there_are_not(argument):
    said = (
        f"'{argument}': '.*; allowed are, with commas between, one of cclis, released"
    )
    with pytest.raises(flags.Error, match=said):
        config_files.take("cclis_cifar10", argument)


@pytest.mark.parametrize("row", ["cclis", "co2l", "icarl"])
def test_a_shrunk_config_runs(row, tmp_path):
    config = config_files.take("cclis_cifar10", f"{row},debug")
    found = train.run(build.build(config, tmp_path), tmp_path)
    assert results.finished(found) == 2
    pictures = {path.name for path in tmp_path.glob("plots/*.png")}
    assert pictures == (set() if row in REPLAY else {"memory_tsne_task2.png"})
