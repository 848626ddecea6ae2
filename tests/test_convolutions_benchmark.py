"""benchmarks/convolutions.py: its forms are one convolution's, and it runs."""

import pathlib
import re
import shlex

import jax
import numpy as np
import pytest

BENCHMARKS = pathlib.Path(__file__).parents[1] / "benchmarks"


@pytest.fixture
def bench(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import convolutions

    monkeypatch.setattr(convolutions, "CASES", ((20, 34, 4, 8, 2), (20, 5, 4, 6, 1)))
    return convolutions


def test_gradients_in_pieces_are_the_whole_one(bench):
    x = jax.random.normal(jax.random.key(0), (20, 34, 34, 4))
    kernel = jax.random.normal(jax.random.key(1), (3, 3, 4, 8))
    made = bench.forms(2, 20)
    outputs = made["forward"](x, kernel, None)
    whole = made["whole"](x, kernel, outputs)
    assert outputs.shape == (20, 17, 17, 8) and whole.shape == kernel.shape
    for name in ("pieces of 8", "pieces"):
        np.testing.assert_allclose(
            made[name](x, kernel, outputs), whole, rtol=1e-4, atol=0.05
        )
    images = made["for the images"](x, kernel, outputs)
    np.testing.assert_allclose(
        np.vdot(images, x), np.vdot(whole, kernel), rtol=1e-3
    )  # both are the slope along a factor of all outputs


def test_it_prints_a_table(bench, capsys):
    found = bench.main(["--repeats=1", "--cases", "1", "0"])
    assert [line["case"] for line in found] == [bench.CASES[1], bench.CASES[0]]
    assert all(line[name] > 0 for line in found for name in bench.COLUMNS)
    printed = capsys.readouterr().out.splitlines()
    assert printed[2].startswith("| 20, 5x5, 4 to 6 |")
    assert "34x34, 4 to 8, stride 2 |" in printed[3]
    assert printed[2].count("|") == printed[0].count("|") == len(bench.COLUMNS) + 2


def test_pytorch_is_timed_beside_it(bench):
    pytest.importorskip("torch")
    (line,) = bench.main(["--repeats=1", "--cases", "0", "--peer"])
    assert all(line[name] > 0 for name in bench.THEIRS)


def test_commands_of_the_readme_parse(bench):
    text = (BENCHMARKS / "README.md").read_text() + bench.__doc__
    commands = re.findall(r"python benchmarks/convolutions\.py([^`\n]*)", text)
    assert len(commands) == 2
    for command in commands:
        bench.parser().parse_args(shlex.split(command))
