"""benchmarks/trials/speedup.py: numbers by hand."""

import json
import math

import pytest

from helpers import config_files, run_directories

T1 = 12.706204736  # two-sided 95 % quantile of Student's t, from a printed table
leave = run_directories.leave_epochs
speedup = config_files.load(config_files.ROOT / "benchmarks" / "trials" / "speedup.py")


@pytest.fixture
def runs(tmp_path):
    """retrain and icl with seeds 0 and 1; the targets are 1.01 and 2.02."""
    base, icl = tmp_path / "retrain", tmp_path / "icl"
    # Seed 0 is within 1 % at epoch 3, before its best one; seed 1 at the best itself.
    leave(base / "seed_0", [3.0, 2.0, 1.01, 1.0, 1.5, 1.2], best=4, seconds=2.0)
    leave(base / "seed_1", [9.0, 2.0, 4.0, 1.9], best=2, seconds=3.0, svm=0.7, seed=1)
    # Seed 0 comes to 1.01 at epoch 2, its best epoch being the first; seed 1 never.
    leave(icl / "seed_0", [1.02, 1.005, 9.0], best=1, seconds=0.5, passes=30.0)
    leave(icl / "seed_1", [2.5, 2.03, 2.021], best=2, svm=0.6, seed=1)
    return tmp_path


def arguments(runs):
    return ["--baseline=retrain", *(f"{x}={runs / x}" for x in ("retrain", "icl"))]


def compare(folder, *words):
    """The runs of the JSON file that the command writes."""
    assert speedup.main([*words, f"--json={folder / 'x.json'}"]) == 0
    return json.loads((folder / "x.json").read_text())["runs"].values()


def test_by_patience(runs):
    base, icl = compare(runs, *arguments(runs))
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
    base, icl = compare(runs, *arguments(runs))
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
