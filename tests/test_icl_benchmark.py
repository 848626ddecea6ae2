"""benchmarks/icl.py: what it measures, and that its numbers are those of the run."""

import json
import pathlib
import re
import shlex

import numpy as np
import pytest

BENCHMARKS = pathlib.Path(__file__).parents[1] / "benchmarks"
SMALL = "--rows=40 --batch=8 --windows=2 --steps=1".split()


@pytest.fixture
def bench(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import icl

    return icl


def test_what_is_said_of_graphs(bench, monkeypatch, tmp_path, capsys):
    told = {"continue": 2.0, "no_lrl": 5.0, "icl": 8.0}
    monkeypatch.setattr(bench, "VARIANTS", (*told,))
    monkeypatch.setattr(bench, "PAIRS", {"icl": "no_lrl"})

    class Side:
        steps = 4

        def __init__(self, work, steps, stack):
            assert work.graphs and steps == 1
            self.seconds = told[work.config["name"]]

        def window(self):
            return self.seconds, 0.0

    monkeypatch.setattr(bench.throughput, "in_second_task", Side)
    path = tmp_path / "lines.json"
    rows = bench.main([*SMALL, f"--json={path}"])
    assert [json.loads(line) for line in path.read_text().splitlines()] == rows
    assert [row["step_ms"] for row in rows] == [500.0, 1250.0, 2000.0]
    assert [row["ratio"] for row in rows] == [1.0, 2.5, 4.0]
    assert rows[0]["agents"] is rows[1]["agents"] is None
    assert rows[2]["agents"] == pytest.approx(3 / 8)
    # Of 8 rows at growth 1/2: one inner step, so four batches at a step.
    assert [row["rows_per_second"] for row in rows] == [16.0, 32 / 1.25, 16.0]
    assert rows[0]["flops"] < rows[1]["flops"] < rows[2]["flops"]
    nodes, edges = rows[0]["waste"]
    assert 0 < nodes < 0.5 and 0 < edges < 0.5
    table = capsys.readouterr().out
    assert "37.5 %" in table and f"{100 * nodes:.0f} % of the nodes" in table


def test_steps_are_of_the_second_task(bench, tmp_path):
    args = bench.parser().parse_args(
        [*SMALL, "--images", "--depth=10", "--width=2", "--size=8"]
    )
    work = bench.make_job(args, "no_meta", tmp_path)
    assert work.parts(1) == 2 and bench.filling(work) is None
    state = bench.throughput.begun(work, 1)
    assert int(state.task) == 1
    np.testing.assert_allclose(state.extra.growth, 0.5)


def test_commands_of_the_readme_parse(bench):
    text = (BENCHMARKS / "README.md").read_text() + bench.__doc__
    commands = re.findall(r"python benchmarks/icl\.py(.*)", text)
    assert len(commands) > 3
    for command in commands:
        bench.parser().parse_args(shlex.split(command))
