"""The configs of online self-supervised learning: every row is one that builds."""

import pathlib

import pytest
from absl import flags

from helpers import config_files
from jaxcl.config import build
from jaxcl.methods import online_ssl
from jaxcl.run import results, train

ROOT = pathlib.Path(__file__).parents[1]
CIFAR100 = config_files.load(ROOT / "configs" / "online_ssl_cifar100.py")
SMALL = config_files.load(ROOT / "configs" / "online_ssl_small.py")


@pytest.mark.parametrize("row", CIFAR100.ROWS)
def test_every_row_makes_a_method_that_is_told_no_label(row):
    name = "online_ssl_cifar100"
    small, _, method, _ = config_files.made(config_files.take(name, f"{row},debug"), 10)
    assert small.data["name"] == "digits" and not method.supervised
    top, _, method, replay = config_files.made(config_files.take(name, row), 100)
    assert not method.supervised and method.predict is None
    assert (method.memory is None) == (row in ("cla_b", "finetune", "iid"))
    # Images through the network, in both views: the budget of CLA.
    per_class, views = 450, 2
    steps = top.epochs * 100 * per_class // top.batch_size
    drawn = 0 if method.memory is None else replay.size
    images = views * replay.updates * steps * (top.batch_size + drawn)
    if row not in ("cla_b", "finetune"):
        assert images == pytest.approx(3.73e6, rel=0.02)


@pytest.mark.parametrize("argument", ["cla_f", "cla_e,minred", "cla_e,debugg"])
def test_refuses_rows_that_there_are_not(argument):
    said = f"'{argument}': '.*; allowed are, with commas between, one of cla_e, cla_r"
    with pytest.raises(flags.Error, match=said):
        config_files.take("online_ssl_cifar100", argument)


def test_the_small_config_has_a_rate_for_each_base_of_its_table():
    assert set(SMALL.RATES) <= set(online_ssl.list_bases())
    for base, rate in SMALL.RATES.items():
        config = SMALL.get_config()
        config.method.base = base
        assert config.optimizer.lr == rate
        config_files.made(config, 10)


@pytest.mark.parametrize(("words", "classes"), [("cifar100", 100), ("pacs", 7)])
def test_the_small_config_of_another_set_builds(words, classes):
    config = config_files.take("online_ssl_small", words)
    assert words in config.name and words in config.data.path
    config_files.made(config, classes)
    small = config_files.take("online_ssl_small", f"{words},debug")
    assert small.data.name == "digits"
    config_files.made(small, 10)


@pytest.mark.parametrize(
    ("argument", "said"),
    [
        ("pacs64", "'pacs64' is unknown; .* one of cifar100, pacs; debug"),
        ("cifar100,pacs", "'cifar100' and 'pacs' exclude one another"),
    ],
)
def test_the_small_config_refuses_other_words(argument, said):
    with pytest.raises(flags.Error, match=said):
        config_files.take("online_ssl_small", argument)


def test_a_shrunk_config_runs_on_a_blurry_stream(tmp_path):
    config = config_files.take("online_ssl_cifar100", "minred,debug")
    config.scenario.name = "blurry"
    config.evaluators = {"knn": {"k": 5}}
    found = train.run(build.build(config, tmp_path), tmp_path)
    assert results.finished(found) == 2
