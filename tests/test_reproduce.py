"""benchmarks/reproduce.py: the comparison, its rows, and a run that resumes."""

import math
import pathlib

import numpy as np
import pytest

from helpers import config_files
from jaxcl.config import sections

BENCHMARKS = pathlib.Path(__file__).parents[1] / "benchmarks"


@pytest.fixture
def bench(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import reproduce

    return reproduce


@pytest.mark.parametrize(
    "difference, agrees", [(1.9, True), (2.1, False), (-2.1, False)]
)
def test_means_agree_within_two_standard_errors(bench, difference, agrees):
    """Five values of deviation 1 and an error of theirs that make 1 together."""
    values = np.array([-1.0, 1.0, 0.0, -1.0, 1.0])
    values = list(values / values.std(ddof=1) + 80 + difference)
    published = bench.Published(80.0, error=math.sqrt(1 - 1 / 5))
    said = bench.compare(values, published)
    want = (80 + difference, 1.0, difference, 2.0)
    assert said[:4] == pytest.approx(want) and said.agrees is agrees


@pytest.mark.parametrize("value, agrees", [(76.9, False), (77.1, True), (95.0, True)])
def test_a_tolerance_of_the_source_decides(bench, value, agrees):
    published = bench.Published(80.0, tolerance=3.0)
    assert bench.compare([value], published).agrees is agrees


def test_no_verdict_without_a_spread_on_both_sides(bench):
    assert bench.compare([80.0, 81.0], bench.Published(80.0)).agrees is None
    assert bench.compare([80.0], bench.Published(80.0, error=0.1)).agrees is None


def test_spreads_become_standard_errors(bench):
    error = bench.ROWS["survey_er_split_cifar100"].published.error
    assert error == pytest.approx(1.22 / math.sqrt(5))
    # The paper's code prints two standard errors.
    assert bench.ROWS["er_split_cifar10_100"].published.error == pytest.approx(0.3)


def test_rows_build(bench, tmp_path):
    for name, row in bench.ROWS.items():
        (tmp_path / row.data).mkdir(exist_ok=True)
        config = bench.make_config(row, count=3, data=str(tmp_path))
        assert (config.seeds, config.data.path) == (3, f"{tmp_path}/{row.data}"), name
        top = sections.top_of(config.to_dict())
        for measure in (row.measure, *row.other):
            assert measure.partition("/")[0] in top.evaluators, name
        config_files.made(config, 100 if row.data == "cifar100" else 10)
    config = bench.make_config(
        bench.ROWS["er_ace_split_cifar100"], count=1, data=str(tmp_path)
    )
    assert config.method.head == "linear" and config.data.validation == 0
    assert tuple(config.augment.std) == (0.2009, 0.1984, 0.2023)


def test_missing_data_are_refused(bench, tmp_path, capsys):
    assert bench.main(["gdumb_split_mnist", f"--data={tmp_path}"]) == 2
    assert f"--data={tmp_path}" in capsys.readouterr().err
    for words in (["x"], ["gdumb_split_mnist", "--seeds=0"]):
        with pytest.raises(SystemExit):
            bench.main(words)
