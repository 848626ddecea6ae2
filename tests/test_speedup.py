"""launch/speedup.py: numbers by hand, and what is refused."""

import json
import math

import pytest

from helpers import config_files, run_directories
from jaxcl.run import results as results_lib

# Two-sided 95 % quantiles of Student's t, from a printed table.
T1, T2 = 12.706204736, 4.302652730
leave = run_directories.leave_epochs
speedup = config_files.load(config_files.ROOT / "launch" / "speedup.py")


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
    leave(icl / "seed_1", [2.5, 2.03, 2.021], best=2, svm=0.6, seed=1)
    leave(tmp_path / "retrain_3", [5.0, 4.0, 4.5, 4.5], best=2, growth=0.3)
    leave(tmp_path / "icl_3", [5.0, 4.02, 1.0], best=1, passes=50.0, growth=0.3)
    return tmp_path


def arguments(runs):
    names = {"retrain": ("retrain", "retrain_3"), "icl": ("icl", "icl_3")}
    words = [f"{n}={runs / each}" for n, pair in names.items() for each in pair]
    return ["--baseline=retrain", *words]


def compare(folder, *words):
    """The growths of the JSON file that the command writes."""
    assert speedup.main([*words, f"--json={folder / 'x.json'}"]) == 0
    return json.loads((folder / "x.json").read_text())["growths"]


def test_by_patience(runs):
    base, icl = compare(runs, *arguments(runs))[1]["runs"].values()
    # 4 epochs of 2 s, 2 epochs of 3 s.
    assert [one["seconds"] for one in base["each"]] == [8.0, 6.0]
    assert base["seconds"]["mean"] == 7.0 and base["epoch"]["mean"] == 3.0
    assert base["seconds"]["high"] == pytest.approx(7.0 + T1)  # its error is 1
    assert icl["seconds"]["mean"] == pytest.approx((0.5 + 2.0) / 2)
    # Epochs 4 / 1 and 2 / 2: logs ln 4 and 0, their mean ln 2, their std ln 4 / 2^.5.
    epochs, half = icl["epoch_ratio"], T1 * math.log(4) / 2
    assert epochs["mean"] == pytest.approx(2.0) and epochs["seeds"] == 2
    assert epochs["low"] == pytest.approx(2 * math.exp(-half), rel=1e-6)
    assert epochs["high"] == pytest.approx(2 * math.exp(half), rel=1e-6)
    # Seconds 8 / 0.5 and 6 / 2.
    assert icl["time_ratio"]["mean"] == pytest.approx(48**0.5)
    for name in ("T", "E", "target T", "target P"):
        own = base[speedup.COLUMNS[name]]
        assert own == {"mean": 1, "low": 1, "high": 1, "seeds": 2}


def test_by_the_target(runs):
    base, icl = compare(runs, *arguments(runs))[1]["runs"].values()
    for run in (base, icl):
        assert [one["target"] for one in run["each"]] == pytest.approx([1.01, 2.02])
    # The baseline is there at epochs 3 (6 s) and 2 (6 s), not at 4 and 2.
    assert (base["reached"], icl["reached"]) == (2, 1)
    assert [one["target_passes"] for one in base["each"]] == [300, 200]
    assert base["target_seconds"]["mean"] == 6
    # Of icl seed 0 alone: epoch 2, 60 passes, 1 s; not the state before the task,
    # nor that of step 13, though both are below the target.
    assert icl["target_passes"]["mean"] == 60 and icl["target_seconds"]["mean"] == 1
    want = {"mean": pytest.approx(300 / 60), "low": None, "high": None, "seeds": 1}
    assert icl["target_passes_ratio"] == want
    assert icl["target_time_ratio"] == {**want, "mean": pytest.approx(6.0)}
    assert icl["each"][1]["reached"] is False


def test_options_choose_the_target_the_scalars_and_the_task(runs):
    words = [f"retrain={runs / 'retrain'}", f"icl={runs / 'icl'}", "--baseline=retrain"]
    (group,) = compare(runs, *words, "--within=0.02", "--scalars=knn/x,svm/new")
    icl = group["runs"]["icl"]
    # Targets 1.02 and 2.04: both come, at epochs 1 and 2; the baseline at 3 and 2.
    assert [one["target_passes"] for one in icl["each"]] == [30, 200]
    assert icl["target_passes_ratio"]["mean"] == pytest.approx(10**0.5)
    assert icl["knn/x"]["mean"] == 7.0 and icl["knn/x"]["seeds"] == 2
    assert icl["svm/new"]["mean"] == pytest.approx(0.45)
    # Task 0 has one epoch, its own scalar, and none of svm.
    (group,) = compare(runs, *words, "--task=0")
    icl = group["runs"]["icl"]
    assert icl["target_passes"]["mean"] == 7 and icl["seconds"]["mean"] == 0.5
    assert icl["svm/all"]["mean"] is None


def test_the_target_may_be_a_share_of_the_gain(tmp_path):
    """Retraining gains 0.8 in seed 0 and nothing in seed 1; icl some of it."""
    retrain, frozen, icl = (tmp_path / name for name in ("retrain", "frozen", "icl"))
    leave(retrain / "seed_0", [2.9, 2.4, 2.0, 2.5], best=3)
    leave(retrain / "seed_1", [3.0, 3.1, 3.2], best=1, seed=1)
    for seed, best in ((0, 3), (1, 2)):
        leave(frozen / f"seed_{seed}", [2.8] * 5, best=best, seed=seed)
    leave(icl / "seed_0", [2.7, 2.41, 2.3, 2.6], best=3)
    leave(icl / "seed_1", [2.9, 3.0], best=1, seed=1)
    names = [f"{name}={tmp_path / name}" for name in ("retrain", "frozen", "icl")]
    words = ["--baseline=retrain", *names, "--within=0.5"]
    (group,) = compare(tmp_path, *words, "--frozen=frozen")
    # 2.0 + half of 0.8; where nothing was gained the baseline's own 3.0.
    icl = group["runs"]["icl"]
    assert [one["target"] for one in icl["each"]] == pytest.approx([2.4, 3.0])
    reached = {name: run["reached"] for name, run in group["runs"].items()}
    assert reached == {"retrain": 2, "frozen": 1, "icl": 2}
    assert icl["at_best"]["mean"] == pytest.approx((2.3 + 2.9) / 2)
    # As a share of the loss itself: 3.0, where the frozen encoder already is.
    (group,) = compare(tmp_path, *words)
    assert group["runs"]["frozen"]["reached"] == 2
    for path in (tmp_path / "frozen" / "seed_1").iterdir():
        path.unlink()
    (tmp_path / "frozen" / "seed_1").rmdir()
    assert speedup.main([*words, "--frozen=frozen"]) == 2
    assert speedup.main([*words, "--frozen=still"]) == 2


def refuse(capsys, *words):
    assert speedup.main(["--baseline=retrain", *map(str, words)]) == 2
    out = capsys.readouterr()
    assert out.out == "" and out.err.count("\n") == 1
    return out.err


def test_seeds_and_growths_that_do_not_pair_are_refused(runs, capsys):
    base, icl = f"retrain={runs / 'retrain'}", f"icl={runs / 'icl'}"
    assert "--baseline=x" in refuse(capsys, base, icl, "--baseline=x")
    assert str(runs / "retrain" / "seed_0") in refuse(capsys, base, base)
    assert "icl_3" in refuse(capsys, base, f"icl={runs / 'icl_3'}")
    leave(runs / "icl" / "seed_2", [1.0], best=1)
    assert str(runs / "icl" / "seed_2") in refuse(capsys, base, icl)


def test_runs_that_lack_something_are_refused(runs, capsys):
    path = runs / "retrain_3"
    base = f"retrain={path}"
    assert str(path) in refuse(capsys, path)
    assert "nothing" in refuse(capsys, base, f"icl={runs / 'nothing'}")
    for scalar in ("objective/x", "knn/class_incremental"):  # a matrix is no scalar
        assert scalar in refuse(capsys, base, f"--scalar={scalar}")
    assert "x.jpg" in refuse(capsys, base, f"--plot={runs / 'x.jpg'}")
    leave(runs / "every_2", [2.0, 1.5, 1.0], best=3, drop=(1, 2))
    err = refuse(capsys, f"retrain={runs / 'every_2'}")
    assert "every_2" in err and "config.eval_epochs" in err
    leave(runs / "other", [1.0], best=1, scenario="class")
    err = refuse(capsys, f"retrain={runs / 'other'}", f"--plot={runs / 'y.png'}")
    assert "y.png" in err and not (runs / "y.png").exists()
    results = results_lib.read_results(path)
    results_lib.write_results(path, {**results, "convergence": {}})
    assert "config.patience" in refuse(capsys, base)
    unfinished = [results["scalars"][0], None]
    results_lib.write_results(path, {**results, "scalars": unfinished})
    assert str(path) in refuse(capsys, base)
    (runs / "retrain" / "seed_1" / "results.json").unlink()
    err = refuse(capsys, f"retrain={runs / 'retrain'}")
    assert str(runs / "retrain" / "seed_1") in err
