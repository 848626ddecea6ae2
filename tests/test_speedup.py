"""How much sooner runs converge: numbers by hand, and what is refused."""

import json
import math
import pathlib
import re
import shlex
import shutil

import numpy as np
import pytest

from helpers import run_directories
from jaxcl.report import convergence, speedup
from jaxcl.run import results as results_lib

ROOT = pathlib.Path(__file__).parents[1]
# Two-sided 95 % quantiles of Student's t, from a printed table.
T1, T2 = 12.706204736, 4.302652730
leave = run_directories.leave_epochs


@pytest.fixture
def runs(tmp_path):
    """retrain and icl with seeds 0 and 1 at growth 0.5, seed 0 alone at 0.3.

    Of growth 0.5 the targets are 1.01 (seed 0) and 2.02 (seed 1).
    """
    base, icl = tmp_path / "retrain", tmp_path / "icl"
    # Seed 0 is within 1 % at epoch 3, before its best one; seed 1 at the best itself.
    leave(base / "seed_0", [3.0, 2.0, 1.01, 1.0, 1.5, 1.2], best=4, seconds=2.0)
    leave(base / "seed_1", [9.0, 2.0, 4.0, 1.9], best=2, seconds=3.0, svm=0.7, seed=1)
    # Seed 0 comes to 1.01 at epoch 2, its best epoch being the first; seed 1 never.
    leave(icl / "seed_0", [1.02, 1.005, 9.0], best=1, seconds=0.5, passes=30.0)
    leave(
        icl / "seed_1",
        [2.5, 2.03, 2.021],
        best=2,
        seconds=1.0,
        svm=0.6,
        patience=2,
        seed=1,
    )
    old = {"growth": 0.3, "patience": 2}
    leave(tmp_path / "retrain_3", [5.0, 4.0, 4.5, 4.5], best=2, **old)
    leave(tmp_path / "icl_3", [5.0, 4.02, 1.0], best=1, passes=50.0, **old)
    return tmp_path


def arguments(runs):
    names = {"retrain": ("retrain", "retrain_3"), "icl": ("icl", "icl_3")}
    told = [f"{n}={runs / each}" for n, pair in names.items() for each in pair]
    return ["--baseline=retrain", *told]


@pytest.fixture
def found(runs, capsys):
    assert speedup.main([*arguments(runs), f"--json={runs / 'x.json'}"]) == 0
    return json.loads((runs / "x.json").read_text()), capsys.readouterr().out


def test_groups_are_by_growth(found):
    whole, _ = found
    setting = {key: x for key, x in whole.items() if key != "growths"}
    assert setting == {
        "baseline": "retrain",
        "task": 1,
        "scalar": "objective/loss",
        "within": 0.01,
        "frozen": None,
    }
    assert [group["growth"] for group in whole["growths"]] == [0.3, 0.5]
    for group, count in zip(whole["growths"], (1, 2), strict=True):
        assert list(group["runs"]) == ["retrain", "icl"]
        assert [run["seeds"] for run in group["runs"].values()] == [count] * 2


def test_by_patience(found):
    base, icl = found[0]["growths"][1]["runs"].values()
    assert base["epoch"] == {"mean": 3.0, "std": pytest.approx(2**0.5), "seeds": 2}
    # 4 epochs of 2 s, 2 epochs of 3 s.
    assert base["seconds"] == {"mean": 7.0, "std": pytest.approx(2**0.5), "seeds": 2}
    assert icl["epoch"]["mean"] == 1.5
    assert icl["seconds"]["mean"] == pytest.approx((0.5 + 2.0) / 2)
    # Epochs 4 / 1 and 2 / 2: logs ln 4 and 0, their mean ln 2, their std ln 4 / 2^.5.
    epochs, half = icl["epoch_ratio"], T1 * math.log(4) / 2
    assert epochs["mean"] == pytest.approx(2.0) and epochs["seeds"] == 2
    assert epochs["low"] == pytest.approx(2 * math.exp(-half), rel=1e-6)
    assert epochs["high"] == pytest.approx(2 * math.exp(half), rel=1e-6)
    # Seconds 8 / 0.5 and 6 / 2.
    time, half = icl["time_ratio"], T1 * math.log(16 / 3) / 2
    assert time["mean"] == pytest.approx(48**0.5)
    assert time["high"] == pytest.approx(48**0.5 * math.exp(half), rel=1e-6)
    for name in convergence.RATIOS:
        assert base[name] == {"mean": 1, "low": 1, "high": 1, "seeds": 2}


def test_by_the_target(found):
    base, icl = found[0]["growths"][1]["runs"].values()
    assert [one["target"] for one in base["each"]] == pytest.approx([1.01, 2.02])
    assert [one["target"] for one in icl["each"]] == pytest.approx([1.01, 2.02])
    # The baseline is there at epochs 3 (6 s) and 2 (6 s), not at 4 and 2.
    assert (base["reached"], icl["reached"]) == (2, 1)
    assert [one["target_epoch"] for one in base["each"]] == [3, 2]
    assert base["target_passes"]["mean"] == 250 and base["target_seconds"]["mean"] == 6
    # Of icl seed 0 alone: epoch 2, 60 passes, 1 s; not the state before the task,
    # nor that of step 13, though both are below the target.
    assert icl["target_epoch"] == {"mean": 2.0, "std": None, "seeds": 1}
    assert icl["target_passes"]["mean"] == 60 and icl["target_seconds"]["mean"] == 1
    want = {"mean": pytest.approx(300 / 60), "low": None, "high": None, "seeds": 1}
    assert icl["target_passes_ratio"] == want
    assert icl["target_time_ratio"] == {**want, "mean": pytest.approx(6.0)}
    assert not icl["each"][1]["reached"] and "target_epoch" not in icl["each"][1]


def test_what_ended_early_is_counted(found):
    # retrain: 6 - 4 and 4 - 2 epochs after the best one; icl: 3 - 1 and 3 - 2.
    base, icl = found[0]["growths"][1]["runs"].values()
    assert (base["cut_off"], icl["cut_off"]) == (0, 1)
    assert [one["cut_off"] for one in icl["each"]] == [False, True]
    assert [one["last_epoch"] for one in icl["each"]] == [3, 3]


def test_the_table(found):
    lines = [line for line in found[1].splitlines() if line.startswith(("|", "Growth"))]
    lines = [x for i, x in enumerate(lines) if i not in (*range(5, 9), *range(14, 18))]
    cells = [[x.strip() for x in line.strip("|").split("|")] for line in lines]
    assert lines[0] == "Growth 0.3" and lines[5] == "Growth 0.5"
    assert cells[1][-3:] == ["svm/all", "svm/old", "svm/new"]
    assert {len(row) for row in cells[1:5] + cells[6:]} == {14}
    # Target 4.04: the baseline at epoch 2 (200 passes), icl at epoch 2 of 50 each.
    assert cells[4] == (
        "icl;1;1;1;2.00 [-];2.00 [-];1 of 1;100;2;1.00 [-];2.00 [-];0.5;0.6;0.4"
    ).split(";")
    half = math.exp(T1 * math.log(4) / 2)
    assert cells[9][:2] == ["icl", "2"] and cells[9][2] == "1.5 ± 0.707"
    assert cells[9][5] == f"2.00 [{2 / half:.2f}, {2 * half:.2f}]"
    assert cells[9][6:11] == ["1 of 2", "60", "1", "6.00 [-]", "5.00 [-]"]
    assert cells[9][11:] == ["0.55 ± 0.0707", "0.65 ± 0.0707", "0.45 ± 0.0707"]
    assert cells[8][11] == "0.6 ± 0.141"
    notes = [line for line in found[1].splitlines() if line.startswith("Ended")]
    assert notes == ["Ended by config.epochs, not by patience: icl (1 of 2)"]


def test_geometric_mean_and_its_interval():
    logs = np.log([1.0, 2.0, 8.0])
    half = T2 * np.sqrt(((logs - logs.mean()) ** 2).sum() / 2) / 3**0.5
    want = 16 ** (1 / 3)
    assert convergence.geometric([1.0, None, 2.0, 8.0]) == {
        "mean": pytest.approx(want),
        "low": pytest.approx(want * np.exp(-half)),
        "high": pytest.approx(want * np.exp(half)),
        "seeds": 3,
    }
    empty = {"low": None, "high": None}
    alone = {"mean": pytest.approx(3.0), **empty, "seeds": 1}
    assert convergence.geometric([3.0]) == alone
    assert convergence.geometric([None]) == {"mean": None, **empty, "seeds": 0}


def test_options_choose_the_target_and_the_scalars(runs, capsys):
    told = [f"retrain={runs / 'retrain'}", f"icl={runs / 'icl'}", "--baseline=retrain"]
    told += [f"--json={runs / 'x.json'}"]
    assert speedup.main([*told, "--within=0.02", "--scalars=knn/x,svm/new"]) == 0
    (group,) = json.loads((runs / "x.json").read_text())["growths"]
    icl = group["runs"]["icl"]
    # Targets 1.02 and 2.04: both come, at epochs 1 and 2; the baseline at 3 and 2.
    assert [one["target_epoch"] for one in icl["each"]] == [1, 2]
    assert icl["target_passes"]["mean"] == (30 + 200) / 2 and icl["reached"] == 2
    assert icl["target_passes_ratio"]["mean"] == pytest.approx(10**0.5)
    assert list(icl["scalars"]) == ["knn/x", "svm/new"]
    assert icl["scalars"]["knn/x"] == {"mean": 7.0, "std": 0.0, "seeds": 2}
    assert icl["scalars"]["svm/new"]["mean"] == pytest.approx(0.45)
    # Task 0 has one epoch, its own scalar, and none of svm.
    assert speedup.main([*told, "--task=0"]) == 0
    (group,) = json.loads((runs / "x.json").read_text())["growths"]
    icl = group["runs"]["icl"]
    assert icl["target_passes"]["mean"] == 7 and icl["seconds"]["mean"] == 0.5
    assert icl["scalars"]["svm/all"] == {"mean": None, "std": None, "seeds": 0}
    last = capsys.readouterr().out.rsplit("\n\nobjective", 1)[0].splitlines()
    assert last[-5].endswith("| - | - | - |")


def test_targets_of_scalars_below_zero_and_that_are_not_finite(tmp_path):
    leave(tmp_path / "a", [-2.0, -4.0, None, -3.97], best=2)
    leave(tmp_path / "b", [-1.0, None], best=2)
    setting = {"task": 1, "scalar": "objective/loss"}
    (a,), (b,) = (convergence.read(n, tmp_path / n, **setting) for n in "ab")
    assert convergence.target(a, 0.01) == pytest.approx(-3.96)
    assert convergence.reached(a, -3.96).number == 2
    assert convergence.reached(a, -5.0) is None  # null is never low enough
    with pytest.raises(ValueError, match="b: the scalar is not finite at the best"):
        convergence.target(b, 0.01)


@pytest.fixture
def gained(tmp_path):
    """Retraining gains 0.8 in seed 0 and nothing in seed 1; icl some of it."""
    retrain, frozen, icl = (tmp_path / name for name in ("retrain", "frozen", "icl"))
    judge = {"batch_size": 8}
    leave(retrain / "seed_0", [2.9, 2.4, 2.0, 2.5], best=3, steps=40, judge=judge)
    leave(retrain / "seed_1", [3.0, 3.1, 3.2], best=1, steps=50, seed=1, judge=judge)
    for seed, best in ((0, 3), (1, 2)):
        leave(frozen / f"seed_{seed}", [2.8] * 5, best=best, seed=seed)
    some = [{"lr": 0.01}, {"lr": 0.03, "inner_lr": 0.02, "inner_moved": 1e-3}]
    leave(icl / "seed_0", [2.7, 2.41, 2.3, 2.6], best=3, rates=some, steps=10)
    leave(icl / "seed_1", [2.9, 3.0], best=1, seed=1, rates=some[:1], steps=20)
    return tmp_path


def told(gained, *more):
    names = [f"{name}={gained / name}" for name in ("retrain", "frozen", "icl")]
    return ["--baseline=retrain", *names, f"--json={gained / 'x.json'}", *more]


def test_the_target_may_be_a_share_of_what_was_gained(gained, capsys):
    assert speedup.main(told(gained, "--frozen=frozen", "--within=0.5")) == 0
    (group,) = json.loads((gained / "x.json").read_text())["growths"]
    assert group["gain"] == {"0": pytest.approx(0.8), "1": pytest.approx(-0.2)}
    # 2.0 + half of 0.8; where nothing was gained the baseline's own 3.0.
    goals = [one["target"] for one in group["runs"]["icl"]["each"]]
    assert goals == pytest.approx([2.4, 3.0])
    reached = {name: run["reached"] for name, run in group["runs"].items()}
    assert reached == {"retrain": 2, "frozen": 1, "icl": 2}
    assert group["runs"]["icl"]["each"][0]["target_epoch"] == 3
    out = capsys.readouterr().out
    share = "retrain's objective/loss at its best epoch, plus 0.5 of (frozen's - retr"
    assert share in out
    assert "Seeds in which retrain is not below frozen: 1; the target" in out
    # As a share of the loss itself: 3.0, where the frozen encoder already is.
    assert speedup.main(told(gained, "--within=0.5")) == 0
    (group,) = json.loads((gained / "x.json").read_text())["growths"]
    assert group["runs"]["frozen"]["reached"] == 2 and group["gain"] == {}
    assert group["runs"]["icl"]["each"][0]["target"] == pytest.approx(3.0)
    assert "Seeds in which" not in capsys.readouterr().out


def test_losses_steps_and_rates_of_each_row(gained, capsys):
    assert speedup.main(told(gained)) == 0
    (group,) = json.loads((gained / "x.json").read_text())["growths"]
    icl = group["runs"]["icl"]
    assert icl["at_best"]["mean"] == pytest.approx((2.3 + 2.9) / 2)
    assert icl["lowest"]["mean"] == pytest.approx((2.3 + 2.9) / 2)
    assert icl["at_end"]["mean"] == pytest.approx((2.6 + 3.0) / 2)
    assert icl["tail"]["mean"] == pytest.approx((10.01 / 4 + 5.9 / 2) / 2)
    assert icl["steps"]["mean"] == 15 and group["runs"]["frozen"]["steps"]["seeds"] == 0
    # Of all logged steps of both seeds: 7, 0.01, 0.03 and 7, 0.01.
    assert icl["rates"]["lr"] == {"median": 0.03, "low": 0.01, "high": 7.0}
    assert icl["rates"]["inner_moved"]["median"] == 1e-3
    assert group["runs"]["frozen"]["rates"]["lr"] is None
    assert group["constant"] == pytest.approx(math.log(8))
    out = capsys.readouterr().out
    assert "An encoder whose rows are all alike: 2.079" in out
    (row,) = [x for x in out.splitlines() if x.startswith("| icl | 15")]
    cells = [x.strip() for x in row.strip("|").split("|")]
    assert cells[6:] == ["0.03 [0.01, 7]", "0.02", "0.001"]
    # retrain and frozen are at their best in epoch 3 of seed 0, icl too.
    (same,) = [x for x in out.splitlines() if x.startswith("The same best epoch")]
    assert same.endswith("seed 0: retrain, frozen, icl (3); seed 1: retrain, icl (1)")
    assert group["agree"][0] == {
        "seed": 0,
        "epoch": 3,
        "names": ["retrain", "frozen", "icl"],
    }


def test_differences_are_seed_by_seed(gained, capsys):
    leave(gained / "icl" / "seed_2", [9.0] * 7, best=1, seed=2)
    leave(gained / "frozen" / "seed_2", [8.0] * 7, best=1, seed=2)
    leave(gained / "retrain" / "seed_2", [8.0, *range(1, 7)], best=1, seed=2)
    shutil.rmtree(gained / "frozen" / "seed_1")
    pairs = ["--pair=icl:retrain", "--pair=icl:frozen", "--pair=frozen:retrain"]
    assert speedup.main(told(gained, *pairs)) == 0
    (group,) = json.loads((gained / "x.json").read_text())["growths"]
    assert [pair["names"] for pair in group["pairs"]] == [
        ["icl", "retrain"],
        ["icl", "frozen"],
        ["frozen", "retrain"],
    ]
    first, second, _ = [pair["difference"] for pair in group["pairs"]]
    # Best epochs: 2.3 - 2.0, 2.9 - 3.0, 9 - 8.
    values = np.array([0.3, -0.1, 1.0])
    half = T2 * values.std(ddof=1) / 3**0.5
    want = {"mean": values.mean(), "low": values.mean() - half}
    want |= {"high": values.mean() + half, "seeds": 3}
    assert first["at_best"] == pytest.approx(want)
    # The last five of seed 2: 9 less the mean of 2 to 6.
    tails = [10.01 / 4 - 9.8 / 4, 5.9 / 2 - 9.3 / 3, 5.0]
    assert first["tail"]["mean"] == pytest.approx(np.mean(tails))
    # Of the old encoder there is no seed 1.
    assert second["lowest"]["seeds"] == 2
    assert second["lowest"]["mean"] == pytest.approx((2.3 - 2.8 + 9.0 - 8.0) / 2)
    assert first["svm/all"]["mean"] == 0
    (row,) = [x for x in capsys.readouterr().out.splitlines() if "| icl - r" in x]
    cells = [x.strip() for x in row.strip("|").split("|")]
    assert cells[:2] == ["icl - retrain", "3"]
    assert cells[2] == f"+0.400 [{0.4 - half:+.3f}, {0.4 + half:+.3f}]"


def test_pairs_are_of_names_that_there_are(gained, capsys):
    err = refused(capsys, *told(gained, "--pair=icl:x"))
    assert "--pair=icl:x: names are retrain, frozen, icl" in err
    err = refused(capsys, *told(gained, "--pair=icl"))
    assert "--pair=icl: must be NAME:NAME" in err


def test_a_frozen_row_must_be_there_for_every_seed(gained, capsys):
    err = refused(capsys, *told(gained, "--frozen=still"))
    assert "--frozen=still: allowed are retrain, frozen, icl" in err
    for path in sorted((gained / "frozen" / "seed_1").iterdir()):
        path.unlink()
    (gained / "frozen" / "seed_1").rmdir()
    err = refused(capsys, *told(gained, "--frozen=frozen"))
    assert "seed_1: --frozen=frozen has no seed 1 at growth 0.5" in err


def test_passes_that_were_not_counted_have_no_ratio(tmp_path, capsys):
    leave(tmp_path / "a", [2.0, 1.0], best=2, passes=0.0, patience=0)
    told = ["--baseline=a", f"a={tmp_path / 'a'}"]
    assert speedup.main(told) == 0
    table = capsys.readouterr().out
    assert "| 1.00 [-] | - | 0.5 |" in table
    assert "not by patience: a (1 of 1)" in table


def test_folders_of_one_seed_and_of_many(tmp_path):
    many = tmp_path / "many"
    leave(many / "seed_3", [1.0], best=1, seed=9, config=False, growth=None)
    (many / "config.json").write_text(json.dumps({"scenario": {"name": "growth"}}))
    leave(tmp_path / "one", [1.0], best=1, seed=4, scenario="class", growth=0.2)
    setting = {"task": 1, "scalar": "objective/loss"}
    (seed_3,) = convergence.read("x", many, **setting)
    (one,) = convergence.read("x", tmp_path / "one", **setting)
    # The config of all seeds, and the growth that a scenario has by default.
    assert (seed_3.seed, seed_3.growth) == (3, 0.5)
    assert (one.seed, one.growth) == (4, None)


def test_the_plot(runs, figures):
    figure = runs / "x.png"
    half = math.exp(T1 * math.log(4) / 2)
    for measure, right in (("patience", [2.0, 2.0]), ("fair", [2.0, 5.0])):
        told = [*arguments(runs), f"--plot={figure}", f"--measure={measure}"]
        assert speedup.main(told) == 0
        assert figure.read_bytes()[:4] == b"\x89PNG" and figure.stat().st_size > 5000
        left, axes = figures.pop().axes
        (bars,) = axes.containers  # the baseline is the line at 1
        assert bars.get_label() == "icl" and left.get_title() == "time"
        points = np.array(bars[0].get_xydata(), float)
        np.testing.assert_allclose(points, np.transpose([[0.3, 0.5], right]))
        assert axes.get_ylim()[1] < 30  # an interval of two seeds goes far beyond
        ends = np.array([line[:, 1] for line in bars[2][0].get_segments()])
        np.testing.assert_allclose(ends[0], [2.0, 2.0])
        want = [2 / half, 2 * half] if measure == "patience" else [5.0, 5.0]
        np.testing.assert_allclose(ends[1], want)
        assert axes.get_title() == {"patience": "epochs", "fair": "passes"}[measure]


def test_names_are_no_maths(runs):
    named = [rf"$\frac${name}={runs / name}" for name in ("retrain", "icl")]
    told = [r"--baseline=$\frac$retrain", f"--plot={runs / 'x.png'}"]
    assert speedup.main([*named, *told]) == 0


def refused(capsys, *told):
    assert speedup.main(list(told)) == 2
    out = capsys.readouterr()
    assert out.out == "" and out.err.count("\n") == 1
    return out.err


def test_refuses_seeds_and_growths_that_do_not_pair(runs, capsys):
    base, icl = f"retrain={runs / 'retrain'}", f"icl={runs / 'icl'}"
    of = "--baseline=retrain"
    assert "--baseline=x: allowed are retrain, icl" in refused(
        capsys, "--baseline=x", base, icl
    )
    leave(runs / "icl" / "seed_2", [1.0], best=1)
    err = refused(capsys, of, base, icl)
    assert f"icl={runs / 'icl' / 'seed_2'}: --baseline=retrain has no seed 2 at " in err
    err = refused(capsys, of, base, f"icl={runs / 'icl_3'}")
    assert "--baseline=retrain has no seed 0 at growth 0.3" in err
    err = refused(capsys, of, base, base)
    assert "seed 0 at growth 0.5 is that of" in err


def test_refuses_runs_that_lack_something(runs, capsys):
    of, base = "--baseline=retrain", f"retrain={runs / 'retrain_3'}"
    assert "retrain_3: must be NAME=DIR" in refused(capsys, of, str(runs / "retrain_3"))
    err = refused(capsys, of, base, f"icl={runs / 'nothing'}")
    assert f"icl={runs / 'nothing'}: holds no config.json; name the" in err
    err = refused(capsys, of, base, "--scalar=objective/x")
    assert "retrain_3: no scalar objective/x in task 1: measured are obj" in err
    # The list of a matrix is no scalar.
    err = refused(capsys, of, base, "--scalar=knn/class_incremental")
    assert "no scalar knn/class_incremental" in err
    err = refused(capsys, of, base, "--scalars=svm/all,svm/x")
    assert "retrain_3: no scalar svm/x at the end of task 1: there are svm/all" in err
    assert "--within=-0.1: must be 0 or more" in refused(
        capsys, of, base, "--within=-0.1"
    )
    leave(runs / "every_2", [2.0, 1.5, 1.0], best=3, drop=(1, 2))
    plot = f"--plot={runs / 'x.jpg'}"
    assert "x.jpg: a picture must" in refused(capsys, of, "retrain=nothing", plot)
    err = refused(capsys, of, f"retrain={runs / 'every_2'}")
    assert "every_2: epoch 1 of task 1 has no objective/loss: config.eval_epochs" in err
    leave(runs / "other", [1.0], best=1, scenario="class")
    err = refused(capsys, of, f"retrain={runs / 'other'}", f"--plot={runs / 'y.png'}")
    assert (
        "other: no growth, which --plot wants" in err and not (runs / "y.png").exists()
    )


def test_refuses_runs_that_are_not_finished(runs, capsys):
    of = "--baseline=retrain"
    path = runs / "retrain_3"
    results = results_lib.read_results(path)
    results_lib.write_results(path, {**results, "convergence": {}})
    err = refused(capsys, of, f"retrain={path}")
    assert "retrain_3: no convergence of task 1: config.patience was 2" in err
    results_lib.write_results(
        path, {**results, "scalars": [results["scalars"][0], None]}
    )
    err = refused(capsys, of, f"retrain={path}")
    assert "retrain_3: not finished: it has no results of task 1" in err
    (runs / "retrain" / "seed_1" / "results.json").unlink()
    err = refused(capsys, of, f"retrain={runs / 'retrain'}")
    assert f"{runs / 'retrain' / 'seed_1'}: not finished" in err


def test_the_documentation_states_the_options_there_are():
    text = (ROOT / "docs" / "evaluation.md").read_text()
    section = re.search(r"^## How much sooner\n(.*?)^## ", text, re.M | re.S)[1]
    joined = re.sub(r"\\\n\s*", " ", section)
    found = re.findall(r"^python -m jaxcl\.speedup\b([^\n`]*)", joined, re.M)
    assert found
    for told in found:
        given = speedup.parser().parse_args(shlex.split(told))
        names = [name.partition("=")[0] for name in given.runs]
        assert given.baseline in names and all("=" in name for name in given.runs)
    table = dict(re.findall(r"^\| `(--\w+)` \| `?([^|`]+?)`? \|", section, re.M))
    actions = [a for a in speedup.parser()._actions if a.dest not in ("runs", "help")]
    want = {
        a.option_strings[0]: "required" if a.required else str(a.default)
        for a in actions
    }
    want |= {"--pair": "none", "--plot": "none", "--json": "none", "--frozen": "none"}
    assert table == want | {"--scalars": ",".join(convergence.SCALARS)}
