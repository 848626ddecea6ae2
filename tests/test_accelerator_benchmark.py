"""benchmarks/accelerator.py: what it measures first, when it stops, and its table."""

import json
import pathlib
import re
import shlex
import types

import pytest

BENCHMARKS = pathlib.Path(__file__).parents[1] / "benchmarks"
ABOUT = {
    "device": "NVIDIA H200",
    "platform": "gpu",
    "jax": "0.11.2",
    "torch": "2.11.0",
    "torch_has_it": True,
}


@pytest.fixture
def bench(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import accelerator

    return accelerator


def numbers(**changes):
    least = {"arithmetic": 1e-3, "memory": 2e-3, "links": 0.0, "total": 2e-3}
    program = {"memory": {"held": 3e9}, "least": least}
    times = {"ms": 8.0, "ms_min": 7.0, "ms_max": 9.0}
    about = {"examples": 256, "compile_seconds": 61.0, "program": program}
    return times | about | changes


@pytest.fixture
def clock(bench, monkeypatch):
    """Time that passes where a test says so; what is asked for takes 100 seconds."""
    made = types.SimpleNamespace(now=0.0, asked=[], answers={})

    def ask(one, args, timeout):
        if one == "about":
            return dict(ABOUT)
        made.asked.append(one)
        made.now += min(100, timeout)
        late = {"late": timeout} if timeout < 100 else numbers()
        return dict(made.answers.get(one, late))

    monkeypatch.setattr(bench, "ask", ask)
    fake = types.SimpleNamespace(monotonic=lambda: made.now, strftime=lambda _: "today")
    monkeypatch.setattr(bench, "time", fake)
    return made


def test_the_table_sets_measured_beside_least_and_pytorch(bench):
    unknown = numbers(program={"memory": {"held": 3e9}, "least": None})
    found = {
        "about": ABOUT | {"rehearsed": False},
        "rows": {
            "er_ace": {"ours": numbers(), "peer": {"ms": 12.0}},
            "cclis": {"ours": unknown},
            "icl": {"ours": {"failed": "OutOfMemory: 9 GB"}, "peer": {"late": 9}},
        },
    }
    page = bench.page(json.loads(json.dumps(found)))
    rows = dict(re.findall(r"^\| (\w+) \| (.*) \|$", page, re.M))
    want = ["256", "61", "3", "8 (7 to 9)", "2", "4", "12.5", "12", "1.5"]
    assert rows["er_ace"].split(" | ") == want
    assert rows["cclis"].split(" | ")[4:] == ["-"] * 5
    assert set(rows["icl"].split(" | ")) == {"-"}
    assert "icl, ours: OutOfMemory: 9 GB" in page and "icl, peer: not done" in page


def test_rows_come_first_and_pytorch_where_it_has_the_chip(bench):
    args = bench.parser().parse_args([])
    plan = bench.plan(args, ABOUT)
    assert [name for name, side in plan if side == "ours"] == [*bench.ROWS]
    peers = [name for name, side in plan if side == "peer"]
    assert peers and plan[len(bench.ROWS) :] == [(name, "peer") for name in peers]
    for lacks in ({"torch": None}, {"torch_has_it": False}):
        assert {side for _, side in bench.plan(args, ABOUT | lacks)} == {"ours"}
    rehearsed = bench.parser().parse_args(["--rehearse"])
    assert bench.plan(rehearsed, ABOUT | {"torch_has_it": False}) == plan


def test_it_stops_in_time_and_goes_on(bench, clock, tmp_path):
    words = ["--rows", "duel_moco", "icl", "cclis", f"--out={tmp_path / 'page.md'}"]
    clock.answers["icl,ours"] = {"failed": "no"}
    found = bench.main([*words, "--minutes=4"])  # 230 seconds: the third never begins
    assert clock.asked == ["duel_moco,ours", "icl,ours"]
    assert json.loads((tmp_path / "page.json").read_text()) == found
    assert (tmp_path / "page.md").read_text() == bench.page(found)
    bench.main([*words, "--minutes=4"])
    bench.main([*words, "--minutes=4"])
    assert clock.asked[2:] == ["cclis,ours"]  # what has failed is not tried again
    bench.main([*words, "--minutes=4", "--again"])
    assert len(clock.asked) == 5
    for field, value in (("device", "TPU v5 lite"), ("rehearsed", True)):
        changed = json.loads(json.dumps(found))
        changed["about"][field] = value
        (tmp_path / "page.json").write_text(json.dumps(changed))
        with pytest.raises(SystemExit):
            bench.main(words)


def test_what_was_late_begins_again_where_there_is_more_time(bench, clock, tmp_path):
    words = ["--rows", "cclis", f"--out={tmp_path / 'page.md'}"]
    found = bench.main([*words, "--minutes=1.4"])  # 74 seconds, it takes 100
    assert found["rows"]["cclis"]["ours"]["late"] == pytest.approx(74)
    bench.main([*words, "--minutes=1.4"])
    assert len(clock.asked) == 1
    found = bench.main([*words, "--minutes=3"])
    assert found["rows"]["cclis"]["ours"]["ms"] == 8.0


def test_a_cpu_is_only_rehearsed_on(bench, clock, monkeypatch, tmp_path):
    monkeypatch.setattr(bench, "ask", lambda *_: ABOUT | {"platform": "cpu"})
    with pytest.raises(SystemExit):
        bench.main([f"--out={tmp_path / 'x.md'}"])


def test_a_process_that_fails_or_lasts_is_told(bench, monkeypatch):
    args = bench.parser().parse_args([])
    assert bench.ask("about", args, 0.01) == {"late": 0}
    monkeypatch.setattr(bench.sys, "executable", "/bin/false")
    assert "failed" in bench.ask("about", args, 60)


def test_windows_last_as_long_as_asked(bench):
    seen = []

    def window(calls):
        seen.append(calls)
        return 0.5 * calls

    args = bench.parser().parse_args(["--seconds=2"])
    found = bench._windows(window, args, steps=8)
    assert found == dict.fromkeys(("ms", "ms_min", "ms_max"), 500 / 8)
    assert seen == [1, 1, 4, 4, 4]


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", ["pnr_moco_resnet18", "er_ace", "er_ace_20_seeds", "duel_moco", "icl"]
)
def test_a_rehearsal(bench, tmp_path, name):
    words = ["--rehearse", "--seconds=0.05", f"--out={tmp_path / 'x.md'}"]
    found = bench.main([*words, "--rows", name])
    sides = found["rows"][name]
    assert not any("failed" in side for side in sides.values())
    ours = sides["ours"]
    assert ours["ms_min"] <= ours["ms"] <= ours["ms_max"]
    assert ours["program"]["flops"] > 0 and ours["program"]["memory"]["held"] > 0
    if "peer" in sides:
        assert sides["peer"]["peer"].startswith("PyTorch") and sides["peer"]["ms"] > 0
    assert name in (tmp_path / "x.md").read_text()


def test_all_rows_have_arguments(bench):
    for kind, options in bench.ROWS.values():
        for tiny in ((), bench.KINDS[kind].tiny):
            assert bench.KINDS[kind].parse([*options, *tiny])


def test_commands_of_the_readme_parse(bench):
    text = (BENCHMARKS / "README.md").read_text() + bench.__doc__
    commands = re.findall(r"python benchmarks/accelerator\.py([^`\n]*)", text)
    assert len(commands) > 5
    for command in commands:
        bench.parser().parse_args(shlex.split(command))
