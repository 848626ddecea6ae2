"""benchmarks/leaderboard.py: equal FLOPs, intervals, entries, and resuming."""

import pathlib

import numpy as np
import pytest

from helpers import config_files

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
    assert bench.interval([1.0, 2.0, 3.0]) == "2.0 ± 2.5"
    assert bench.interval([2.0]) == "2.0"


def test_the_table_has_a_row_for_each_entry_that_ran(bench):
    problem = bench.PROBLEMS["duel"]

    def ran(flops, *seeds):
        plan = {"amount": 1, "flops": flops * problem.budget, "state_bytes": 2e3}
        return {"rate": problem.rates[0], "plan": plan, "seeds": dict(enumerate(seeds))}

    entries = {
        "moco": {"x1": ran(0.9, {"accuracy": 50.0})},
        "d_moco": {"x1": ran(2, {"accuracy": 70.0}), "x4": ran(4, {"failed": True})},
    }
    head, _, *rows, _ = bench.table(problem, entries)
    assert head.count("GFLOP") == 2 and len(rows) == 2
    best, other = ([cell.strip() for cell in row.split("|")] for row in rows)
    assert "d_moco" in best[1] and "over" in best[1] and best[2] == "70.0"
    assert "1 diverged" in best[3] and best[5].startswith("2")
    assert other[1:4] == ["moco", "50.0", ""] and other[6].endswith("*")


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


def test_pnr_is_given_a_rate_of_its_own(bench):
    """Fine-tuning's is chosen for another loss; CaSSLe and the controls share it."""
    looks = bench.PROBLEMS["looks"].entries
    names = ("pnr", "cassle", "joint")
    found = [looks[f"mocov2plus-{name}"].rate_of for name in names]
    assert found == [None, *["mocov2plus-finetune"] * 2]


def test_wrong_names_are_refused(bench, tmp_path, capsys):
    for words in (["--problems=x"], ["--only=x"], ["--seeds=0"]):
        with pytest.raises(SystemExit):
            bench.main(words)
        assert words[0].partition("=")[2] in capsys.readouterr().err
    assert bench.main(["--problems=split_mnist", f"--data={tmp_path}"]) == 2
    assert "mnist" in capsys.readouterr().err
