"""benchmarks/accelerator.py: what it measures first, when it stops, and its page."""

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
    "machine": "h200",
    "devices": 8,
    "jax": "0.11.2",
    "torch": "2.11.0",
    "torch_has_it": True,
    "cores": 16,
}
LEAST = {"arithmetic": 1e-3, "memory": 2e-3, "launches": 1e-3, "messages": 0.0}


@pytest.fixture
def bench(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import accelerator

    return accelerator


def numbers(**changes):
    program = {"kernels": 1000, "flops": 9e9, "bytes": 8e9, "least": LEAST}
    return {
        "ms": 8.0,
        "ms_min": 7.0,
        "ms_max": 9.0,
        "examples": 256,
        "compile_seconds": 61.0,
        "planned_bytes": 2_000_000_000,
        "peak_bytes": 3_000_000_000,
        "precision": "bfloat16",
        "flops": 1e12,
        "peak_flops": 1e15,
        "seeds": None,
        "program": program,
        "date": "2026-11-23",
    } | changes


def cells(page, name):
    (row,) = re.findall(rf"^\| {name} \|(.*)\|$", page, re.M)
    return [cell.strip() for cell in row.split("|")]


def test_the_page_shows_what_was_measured(bench):
    before = {"least": LEAST, "kernels": 900, "flops": 9e9, "bytes": 5e8}
    before["memory"] = {"held": 4e9}
    peer = {"ms": 12.0, "ms_min": 11.0, "ms_max": 13.0, "peer": "PyTorch 2 compiled"}
    found = {
        "about": ABOUT | {"rehearsed": False},
        "rows": {
            "moco_r18_32px_256": {"ours": numbers(), "peer": peer},
            "online_er_ace": {"ours": numbers(ms=2.0, peak_bytes=None, program=None)},
            "online_er_ace_20_seeds": {"ours": numbers(ms=5.0, seeds=20)},
            "duel_share": {
                "ours": numbers(base="moco", base_ms=7.0, share=0.125),
            },
            "moco_r50_32px_4096": {"ours": {"failed": "out of memory"}},
            "icl": {"ours": {"late": 90}},
            "table_er_ace": {
                "ours": {"seconds": 70, "random": False, "mean": 0.437}
                | {"error": 0.01, "seeds": 10}
            },
        },
        "predicted": {"h200:1": {"moco_r18_32px_256": {"predicted": before}}},
    }
    page = bench.page(found)
    assert bench.page(json.loads(json.dumps(found, sort_keys=True))) == page
    want = ["256", "8 (7 to 9)", "32,000", "12.5", "4", "4", "2", "1,000"]
    want += ["4,000", "2,000", "3,000", "61", "12 (11 to 13)", "1.5"]
    steps, predicted = page.split("## h200:1")
    assert cells(steps, "moco_r18_32px_256") == want
    plain = cells(steps, "online_er_ace")
    assert plain[4:8] == ["-"] * 4 and plain[10] == "-" and plain[12:] == ["-", "-"]
    assert "- PyTorch 2 compiled\n" in page
    assert "20 seeds side by side: 2.5 times the step of one" in page
    assert "D-MoCo's step: 8 ms, moco's 7; DUEL is 12.5 % of it" in page
    assert "10 seeds: 43.7 +- 1.0 (the paper's is 43.7) in 70 s" in page
    assert "- moco_r50_32px_4096, ours: out of memory" in page
    assert "- icl, ours: not done in time" in page and "A rehearsal" not in page
    want = ["4", "25 / 50 / 25", "900", "9", "500", "4,000"]
    assert cells(predicted, "moco_r18_32px_256") == want
    assert "byol_r18_32px_256" in re.search(r"Not measured yet: (.*)", page)[1]


def test_predictions_of_targets_are_found(bench):
    told = json.loads((BENCHMARKS.parent / "docs" / "targets.json").read_text())
    assert bench.expected({}, "er_ace", "h200:1") == told["er_ace"]["h200:1"]
    assert bench.expected({}, "moco_r18_32px_256", "h200:1") is None
    assert bench.target_of("h200") == "h200:1" and bench.target_of(None) is None
    assert bench.target_of("tpu-v5e") == "v5e:1x1"
    assert bench.target_of("tpu-v5p") == "v5p:1x1x1"


def test_what_is_of_most_interest_comes_first(bench):
    args = bench.parser().parse_args([])
    plan = bench.plan(args, ABOUT)
    assert len(set(plan)) == len(plan)
    assert [name for name, side in plan if side == "ours"] == [*bench.order()]
    last = max(plan.index((name, "ours")) for name in bench.FIRST)
    assert last == len(bench.FIRST) - 1
    assert plan[last + 1] == ("online_er_ace", "peer")
    asked = {"torch": None}, {"torch_has_it": False}
    for lacks in asked:
        sides = {side for _, side in bench.plan(args, ABOUT | lacks)}
        assert sides == {"ours"}
    rehearsed = bench.parser().parse_args(["--rehearse"])
    assert ("online_er_ace", "peer") in bench.plan(rehearsed, ABOUT | asked[1])
    alone = bench.parser().parse_args(["--no-peer"])
    assert {side for _, side in bench.plan(alone, ABOUT)} == {"ours"}


@pytest.fixture
def clock(bench, monkeypatch):
    """Time that passes where a test says so; what is asked for takes 100 seconds."""
    made = types.SimpleNamespace(now=0.0, asked=[], answers={})

    def ask(name, side, args, *, timeout, target=None):
        if name == "about":
            return dict(ABOUT)
        made.asked.append((name, side))
        made.now += min(100, timeout)
        return dict(
            made.answers.get(name)
            or ({"late": timeout} if timeout < 100 else numbers())
        )

    monkeypatch.setattr(bench, "ask", ask)
    fake = types.SimpleNamespace(monotonic=lambda: made.now, strftime=lambda _: "today")
    monkeypatch.setattr(bench, "time", fake)
    return made


def test_it_stops_in_time_and_goes_on(bench, clock, tmp_path, capsys):
    words = ["--rows", "er_ace", "icl", "cclis", "--no-peer", "--minutes=4"]
    words += [f"--out={tmp_path / 'page.md'}"]
    clock.answers["icl"] = {"failed": "no"}
    found = bench.main(words)  # 230 seconds: two rows, and 30 are not begun
    assert clock.asked == [("icl", "ours"), ("cclis", "ours")]
    assert "the same command again goes on" in capsys.readouterr().out
    assert json.loads((tmp_path / "page.json").read_text()) == found
    assert (tmp_path / "page.md").read_text() == bench.page(found)
    bench.main(words)
    assert len(clock.asked) == 3  # what has failed is not tried again
    assert bench.main(words) and len(clock.asked) == 3
    bench.main([*words, "--again"])
    assert len(clock.asked) == 5
    found["about"]["device"] = "TPU v5 lite"
    (tmp_path / "page.json").write_text(json.dumps(found))
    with pytest.raises(SystemExit):
        bench.main(words)
    assert "is of TPU v5 lite, here is NVIDIA H200" in capsys.readouterr().err


def test_what_was_late_is_begun_where_there_is_more_time(bench, clock, tmp_path):
    words = ["--rows", "er_ace", "--no-peer", f"--out={tmp_path / 'page.md'}"]
    found = bench.main([*words, "--minutes=1.4"])  # 74 seconds, it takes 100
    assert found["rows"]["er_ace"]["ours"]["late"] == pytest.approx(74)
    assert "- er_ace, ours: not done in time" in bench.page(found)
    bench.main([*words, "--minutes=1.4"])
    assert len(clock.asked) == 1
    found = bench.main([*words, "--minutes=3"])
    assert found["rows"]["er_ace"]["ours"]["ms"] == 8.0


def test_a_process_that_fails_or_lasts_is_told(bench, monkeypatch):
    args = bench.parser().parse_args([])
    assert bench.ask("about", "ours", args, timeout=0.01) == {"late": 0}
    monkeypatch.setattr(bench.sys, "executable", "/bin/false")
    told = bench.ask("about", "ours", args, timeout=60)
    assert told["failed"].startswith("the process ended with 1")


def test_errors_are_told_in_a_line(bench):
    def fails(error):
        raise error

    told = bench.rows.guarded(fails, RuntimeError("RESOURCE_EXHAUSTED: 9 bytes\nmore"))
    assert told == {"failed": "out of memory"}
    told = bench.rows.guarded(fails, ValueError("config.x=1\nmust be 2\nat all"))
    assert told == {"failed": "ValueError: config.x=1 must be 2"}


def test_windows_last_as_long_as_asked_and_take_turns(bench):
    seen = []

    class Step:
        steps, calls = 40, 5

        def __init__(self, name, seconds):
            self.name, self.seconds = name, seconds

        def window(self, calls):
            seen.append((self.name, calls))
            return calls * self.seconds, 0.0

    running = {"a": Step("a", 0.5), "b": Step("b", 4.0)}
    times = bench.rows.timed(running, seconds=2.0, windows=2)
    assert times == {"a": [0.5 / 8] * 2, "b": [0.5] * 2}
    assert seen[4:] == [("a", 4), ("b", 1)] * 2


def test_a_rehearsal_is_not_kept_by_mistake(bench, clock, tmp_path, capsys):
    with pytest.raises(SystemExit):
        bench.main(["--rehearse"])
    assert "needs an --out" in capsys.readouterr().err
    cpu = ABOUT | {"platform": "cpu"}
    bench.ask = lambda *given, **options: cpu
    with pytest.raises(SystemExit):
        bench.main([f"--out={tmp_path / 'x.md'}"])
    assert "--rehearse is the same in small" in capsys.readouterr().err


KIND = "moco_r18_32px_256 online_er_ace er_ace table_er_ace".split()


@pytest.mark.slow
def test_a_rehearsal(bench, tmp_path):
    pytest.importorskip("torch")
    words = ["--rehearse", "--seconds=0.1", "--windows=2", f"--out={tmp_path / 'x.md'}"]
    found = bench.main([*words, "--rows", *KIND])
    assert all(
        "failed" not in x for row in found["rows"].values() for x in row.values()
    )
    for name in KIND[:3]:
        ours = found["rows"][name]["ours"]
        assert ours["ms_min"] <= ours["ms"] <= ours["ms_max"]
        assert ours["program"]["kernels"] > 100 and ours["planned_bytes"] > 0
        assert 0.5 < ours["program"]["flops"] / ours["flops"] < 2
    for name in KIND[:2]:
        assert found["rows"][name]["peer"]["peer"].startswith("PyTorch")
    assert found["rows"]["table_er_ace"]["ours"]["seeds"] == 2
    page = (tmp_path / "x.md").read_text()
    assert "A rehearsal" in page and len(cells(page, "online_er_ace")) == 14


@pytest.mark.slow
@pytest.mark.parametrize("name", ["duel_share", "online_er_ace_20_seeds", "cclis"])
def test_other_kinds_of_rows(bench, tmp_path, name):
    folder = tmp_path
    told = bench.rows.ours(name, tiny=True, seconds=0.01, windows=1, folder=folder)
    assert told["ms"] > 0 and told["examples"] > 0
    if name == "duel_share":
        assert told["base"] == "moco" and told["share"] < 1
    if name == "online_er_ace_20_seeds":
        assert told["seeds"] == 2 and told["examples"] == 8


def test_all_rows_have_arguments(bench):
    for name, row in bench.rows.ROWS.items():
        assert bench.rows.sides(name)[0] == "ours"
        if row.kind != "cell":
            for tiny in (False, True):
                assert bench.rows.KINDS[row.kind].parse(row.options, tiny)


def test_commands_of_the_readme_parse(bench):
    text = (BENCHMARKS / "README.md").read_text() + bench.__doc__
    commands = re.findall(r"python benchmarks/accelerator\.py([^`\n]*)", text)
    assert len(commands) > 5
    for command in commands:
        bench.parser().parse_args(shlex.split(command))
