"""benchmarks/cclis.py: what it measures, and that its numbers are those of the run."""

import contextlib
import json
import pathlib
import re
import shlex

import pytest

BENCHMARKS = pathlib.Path(__file__).parents[1] / "benchmarks"
SMALL = "--depth=10 --width=4 --size=16 --rows=60 --batch=16 --memory=10".split()


@pytest.fixture
def bench(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import cclis

    return cclis


def test_the_second_task_replays_what_the_first_left(bench, tmp_path):
    args = bench.parser().parse_args([*SMALL, "--steps=1"])
    work = bench.make_job(args, "cclis", tmp_path)
    with contextlib.ExitStack() as stack:
        state = bench.throughput.in_second_task(work, args.steps, stack).state
    assert int(state.task) == 1
    stored = state.extra.memory.row
    assert (stored >= 0).all() and len(set(stored.tolist())) == 10
    assert not set(stored.tolist()) & set(work.stream.tasks[1].train.rows.tolist())


def test_the_share_is_that_of_the_end_in_a_whole_task(bench, monkeypatch, capsys):
    monkeypatch.setattr(bench, "ending", lambda work, state: 3.0)
    given = ["--windows=2", "--steps=1", "--epochs=7"]
    cclis, co2l = bench.main([*SMALL, *given])
    # 60 fresh rows, 14 in a batch of 16; 70 rows of both, 16 in a batch.
    for found, steps in ((cclis, 7 * 4), (co2l, 7 * 4)):
        whole = 3 + steps * found["step_ms"] / 1e3
        assert found["share"] == pytest.approx(3 / whole)
    assert co2l["ratio"] == 1 and cclis["ratio_min"] <= cclis["ratio"]
    # Half the images, but for what both do alike.
    assert 0.45 < cclis["flops"] / co2l["flops"] < 0.55
    table = capsys.readouterr().out
    assert "share of a task" in table and f"{100 * co2l['share']:.2f} %" in table


def test_lines_are_kept(bench, tmp_path):
    path = tmp_path / "lines.json"
    given = ["--windows=1", "--steps=1", f"--json={path}"]
    rows = bench.main([*SMALL, *given])
    assert [json.loads(line) for line in path.read_text().splitlines()] == rows
    assert rows[0]["end_seconds"] > 0 and rows[0]["rows"] == 60


def test_commands_of_the_readme_parse(bench):
    text = (BENCHMARKS / "README.md").read_text()
    commands = re.findall(r"python benchmarks/cclis\.py(.*)", text)
    assert commands
    for command in commands:
        bench.parser().parse_args(shlex.split(command.strip("`")))
