"""benchmarks/leaderboard.py: equal FLOPs, intervals, entries, and resuming."""

import json
import pathlib
import shutil

import numpy as np
import pytest

from helpers import config_files
from jaxcl.run import results as results_lib

BENCHMARKS = pathlib.Path(__file__).parents[1] / "benchmarks"


@pytest.fixture
def bench(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import leaderboard

    return leaderboard


def test_an_entry_takes_the_largest_amount_within_the_budget(bench):
    rng = np.random.default_rng(0)
    for _ in range(200):
        fixed, each = rng.integers(0, 50), rng.integers(1, 50)
        budget = rng.integers(1, 500)
        costs = {"fixed": int(fixed), "each": int(each), "state_bytes": 7}
        within = [n for n in range(1, 600) if fixed + each * n <= budget]
        amount = max(within, default=1)
        flops = fixed + each * amount
        want = {"amount": amount, "flops": flops, "state_bytes": 7}
        assert bench.plan(costs, budget) == want


def test_the_interval_is_that_of_student(bench):
    # Deviation 1 over three seeds: 4.3027 / sqrt(3) = 2.484.
    assert bench.interval([1.0, 2.0, 3.0]) == "2.0 [-0.5, 4.5] (3)"
    assert bench.interval([2.0]) == "2.0 (1)"


@pytest.mark.parametrize("name", ["looks", "digits_online", "looks_online"])
def test_entries_build(bench, name):
    check_entries(bench, name, "")


@pytest.mark.parametrize("name", ["rehearsal", "duel", "split_mnist", "icl_mutag"])
def test_entries_of_other_configs_build(bench, name, tmp_path):
    for folder in ("mnist", "mutag"):
        (tmp_path / folder).mkdir()
    check_entries(bench, name, str(tmp_path))


def check_entries(bench, name, data):
    problem = bench.PROBLEMS[name]
    for entry in problem.entries.values():
        config = bench.make_config(problem, entry, data)
        changes = {bench.FIELDS[entry.spends or problem.spends]: 1}
        if rates := entry.rates or problem.rates:
            changes |= bench._SEARCH | {entry.rate: rates[0]}
            chooser = problem.entries[entry.rate_of] if entry.rate_of else entry
            assert (chooser.rates or problem.rates) == rates
        top, *_ = config_files.made(bench.changed(config, changes), 10)
        assert problem.measure.partition("/")[0] in top.evaluators


def test_entries_run_and_resume(bench, tmp_path, monkeypatch):
    """GDumb's memory of 20 takes two batches of 16 a pass."""
    problem = bench.DIGITS_ONLINE
    chosen = {name: problem.entries[name] for name in ("er", "gdumb")}
    small = {"replay.per_class": 2, "scenario.per_class": 30}
    tiny = problem._replace(
        entries=chosen,
        changes=problem.changes | small,
        budget=2e8,
        rates=(0.01, 0.1),
        multiples=(1,),
    )
    monkeypatch.setattr(bench, "PROBLEMS", {"tiny": tiny})
    page = tmp_path / "page.md"
    page.write_text(f"# Mine\n\n{bench.reproduce.MARK}\nold\n")
    command = ["--problems=tiny", "--seeds=2", f"--out={tmp_path}/runs"]
    command.append(f"--page={page}")
    assert bench.main(command) == 0
    first = json.loads((tmp_path / "page.json").read_text())["tiny"]
    for name, record in ((name, first[name]["x1"]) for name in chosen):
        plan, costs = record["plan"], tmp_path / "runs" / "tiny" / name / "costs.json"
        costs = json.loads(costs.read_text())
        assert plan == bench.plan(costs, 2e8) and plan["amount"] > 1
        assert record["rate"] in (0.01, 0.1) and list(record["seeds"]) == ["0", "1"]
        for seed, own in record["seeds"].items():
            place = tmp_path / "runs" / "tiny" / name / "x1" / f"seed_{seed}"
            run = results_lib.read_results(place)
            accuracy = run["scalars"][-1]["predict/accuracy"]
            assert own["accuracy"] == pytest.approx(100 * accuracy, abs=1e-4)
            # What trial runs foretold is what the run took.
            assert own["flops"] == plan["flops"]
            if name == "er":
                assert run["cost"]["total"]["flops"] == plan["flops"]
    fit = results_lib.read_results(tmp_path / "runs" / "tiny" / "gdumb" / "fit")
    total = fit["cost"]["total"]
    assert costs["each"] == 2 * total["flops"] // total["steps"]
    text = page.read_text()
    assert text.startswith("# Mine") and "old" not in text
    for name, own in first.items():
        values = [seed["accuracy"] for seed in own["x1"]["seeds"].values()]
        assert f"| {name} | {bench.interval(values)} |" in text
    # One run is made again, the others are read.
    kept = tmp_path / "runs" / "tiny" / "er" / "x1" / "seed_0" / "results.json"
    before = kept.stat().st_mtime_ns
    shutil.rmtree(kept.parents[1] / "seed_1")
    assert bench.main([*command, "--only", "er"]) == 0
    again = json.loads((tmp_path / "page.json").read_text())["tiny"]
    assert kept.stat().st_mtime_ns == before and again["gdumb"] == first["gdumb"]
    both = [x["er"]["x1"]["seeds"]["1"]["accuracy"] for x in (first, again)]
    assert both[0] == both[1]


def test_wrong_names_are_refused(bench, tmp_path, capsys):
    for words in (["--problems=x"], ["--only=x"], ["--seeds=0"]):
        with pytest.raises(SystemExit):
            bench.main(words)
        assert words[0].partition("=")[2] in capsys.readouterr().err
    assert bench.main(["--problems=split_mnist", f"--data={tmp_path}"]) == 2
    assert "mnist" in capsys.readouterr().err
