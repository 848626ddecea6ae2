"""The configs of the ICL paper: every row of their tables is one that builds."""

import json

import pytest
from absl import flags

from helpers import config_files
from jaxcl.config import build, sections
from jaxcl.run import results, train

# Of the paper, by its tables; no_lrl_sgd and the last three are controls of our own.
ROWS = {
    "icl": {},
    "no_lrl": {"learnt_rate": False},
    "no_lrl_sgd": {"learnt_rate": False, "fixed_lr": 0.03},
    "no_meta": {"meta": False},
    "no_both": {"meta": False, "learnt_rate": False},
    "retrain": {"strategy": "retrain"},
    "finetune": {"strategy": "finetune"},
    "replay": {"strategy": "replay"},
    "distill": {"strategy": "distill"},
    "continue": {"strategy": "continue"},
    "frozen": {"strategy": "frozen"},
    "random": {"strategy": "random"},
}
GRAPHS = ("icl_proteins", "icl_reddit")
SMALL = ("icl_mnist2", "icl_cifar10")
NAMES = (*GRAPHS, *SMALL, "icl_imagenet2")


def made(config):
    """The top level and the parts of a config, of which a method can be made."""
    top = sections.top_of(config.to_dict())
    parts, _ = sections.parts(top)
    method = sections.method(top, parts)
    assert method.objective is not None and not method.supervised
    return top, parts


@pytest.mark.parametrize("row", ROWS)
@pytest.mark.parametrize("name", NAMES)
def test_every_row_makes_a_method(name, row):
    own = "" if row == "icl" else f"_{row}"
    small = config_files.take(name, f"{row},debug")
    top, _ = made(small)
    assert top.name == f"{name}{own}_debug" and top.epochs == 1
    graphs = name in GRAPHS
    assert top.data["name"] == ("rings_and_trees" if graphs else "digits")
    top, parts = made(config_files.take(name, row))
    assert top.name == name + own and top.first_tasks is None
    wide = {"output_dim": 1000} if name in ("icl_mnist2", "icl_imagenet2") else {}
    assert top.method == {"name": "icl", **ROWS[row], **wide}
    # Section 4.1.4 of the paper.
    assert (top.batch_size, top.patience, top.scale_lr) == (32, 50, False)
    assert top.optimizer["lr"] in (1e-3, 1e-4, 1e-5)
    assert (top.optimizer["name"], top.schedule["name"]) == ("adam", "constant")
    assert (top.scenario["name"], top.scenario["growth"]) == ("growth", 0.5)
    assert top.eval_epochs == 1
    assert set(top.evaluators) == {"objective", "svm", "collapse"}
    if graphs:
        encoder = parts.encoder
        assert (encoder.width, encoder.layers, encoder.num_features) == (32, 2, 64)
        assert top.scenario["evaluation"] == "none"
    else:
        assert top.encoder["depth"] == 18
        assert top.augment["size"] == (224 if wide else 32)
        if name in SMALL:  # the other's are in configs/imagenet2.txt
            assert len(top.scenario["classes"]) == 2


@pytest.mark.parametrize("name", SMALL)
def test_the_small_images_are_another_size_alone(name):
    for row in ROWS:
        whole, small = (config_files.take(name, f"{row}{s}") for s in ("", ",small"))
        top, _ = made(small)
        assert top.augment["size"] < 32 and top.scenario["per_class"] == 500
        assert top.encoder["name"] == "conv_net"
        assert top.method.get("output_dim", 0) == 0
        options = [{**m, "output_dim": 0} for m in (top.method, whole.method)]
        assert options[0] == options[1]
        for key in ("patience", "batch_size", "optimizer", "evaluators", "epochs"):
            assert getattr(top, key) == whole.to_dict()[key]


@pytest.mark.parametrize("name", NAMES)
def test_old_is_the_first_task_of_any_row(name):
    old, whole = (config_files.take(name, r).to_dict() for r in ("old", "retrain"))
    assert old.pop("name") == f"{name}_old" and old.pop("first_tasks") == 1
    assert old["method"].pop("strategy", None) is None
    # What is left is the same, so that each row can go on from it.
    del whole["name"], whole["method"]["strategy"]
    assert old == whole


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("argument", ["icll", "icl,frozen", "old,debugg"])
def test_refuses_rows_that_there_are_not(name, argument):
    said = f"'{argument}': '.*; allowed are, with commas between, one of icl, no_lrl"
    with pytest.raises(flags.Error, match=said):
        config_files.take(name, argument)


def test_growth_and_rate_are_overridden_by_the_command_line():
    config = config_files.parse(
        [
            f"--config={config_files.ROOT}/configs/icl_proteins.py:no_lrl",
            "--config.scenario.growth=0.3",
            "--config.optimizer.lr=1e-5",
        ]
    )
    top, _ = made(config)
    assert (top.scenario["growth"], top.optimizer["lr"]) == (0.3, 1e-5)


@pytest.fixture(scope="module")
def old(tmp_path_factory):
    """A shrunk run of the first task alone, and its results."""
    workdir = tmp_path_factory.mktemp("old")
    config = config_files.take("icl_proteins", "old,debug")
    found = train.run(build.build(config, workdir), workdir)
    return workdir, found


def test_a_shrunk_old_encoder_is_trained(old):
    workdir, found = old
    assert results.finished(found) == 1
    assert json.loads((workdir / "config.json").read_text())["first_tasks"] == 1
    assert set(found["convergence"]) == {"0"}


@pytest.mark.parametrize("row", ["icl", "no_meta", "frozen"])
def test_a_shrunk_row_goes_on_from_it(row, old, tmp_path):
    config = config_files.take("icl_proteins", f"{row},debug")
    config.start = str(old[0])
    found = train.run(build.build(config, tmp_path), tmp_path)
    assert results.finished(found) == 2
    assert found["scalars"][0] == old[1]["scalars"][0]
    new, past = found["convergence"]["1"]["last"], old[1]["convergence"]["0"]
    assert found["convergence"]["0"] == past and new["number"] == 1
    # 96 graphs, half of them new: passes of two batches of 32, 3 or 2 for each row.
    assert new["passes"] == 2 * 32 * {"icl": 6, "no_meta": 6, "frozen": 3}[row]
    scalars = found["scalars"][1]
    assert {"svm/all", "svm/old", "svm/new", "objective/loss"} <= set(scalars)
