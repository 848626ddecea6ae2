"""The first command of the README, run as a newcomer would run it."""

import json
import os
import pathlib
import re
import subprocess
import sys

import numpy as np
import pytest

from helpers import config_files

ROOT = pathlib.Path(__file__).parents[1]
CHEAP = ("XLA_FLAGS", "JAX_NUM_CPU_DEVICES")  # settings of tests, not of users


# The whole of it is a slow test; this shows in a fraction of the steps that it runs.
SHORT = (
    "--config.epochs=2",
    "--config.first_tasks=2",
    "--config.data.train=80",
    "--config.data.test=20",
)


@pytest.mark.parametrize(
    "changes", [SHORT, pytest.param((), marks=pytest.mark.slow)], ids=["short", "whole"]
)
def test_the_quick_start_learns_and_leaves_what_the_readme_says(tmp_path, changes):
    text = (ROOT / "README.md").read_text()
    command = re.search(r"(python -m jaxcl\.main .*quickstart\.py)$", text, re.M)[1]
    words = command.replace("python", sys.executable, 1).split()
    words[-1] = words[-1].replace("configs/", f"{ROOT}/configs/")
    words += changes
    env = dict(os.environ)
    if not changes:
        env = {k: v for k, v in env.items() if k not in CHEAP}
    env["PYTHONPATH"] = str(ROOT)
    done = subprocess.run(words, cwd=tmp_path, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    run = tmp_path / "runs" / "quickstart"
    results = json.loads((run / "results.json").read_text())
    name = "predict/class_incremental"
    before = np.mean(results["untrained"][name])
    assert before == pytest.approx(0.1, abs=0.05)  # ten classes, none of them met
    measures = results["summary"][name]
    if not changes:  # ten points below the mean of five seeds, and no warning
        assert measures["average_accuracy"] > 0.55
        near = "knn/class_incremental"
        lift = results["summary"][near]["average_accuracy"]
        assert lift - np.mean(results["untrained"][near]) > 0.2
    for measure in ("forgetting", "stability"):
        assert np.isfinite(measures[measure])
    assert "not finite" not in done.stdout + done.stderr
    pictures = {path.name for path in (run / "plots").iterdir()}
    assert {"summary.png", "predict_class_incremental.png", "curves.png"} <= pictures
    for left in ("config.json", "metrics.jsonl", "tensorboard", "checkpoints"):
        assert (run / left).exists()


def rows(**last):
    """Two seeds of each row of benchmarks/quickstart.py under one instruction set."""
    before = {"predict/class_incremental": 0.1, "knn/class_incremental": 0.25}
    return {
        row: {
            str(seed): {
                "met": [0.95, value + 0.01 * seed],
                "forgetting": 0.5,
                "neighbours": 0.8,
                "untrained": before,
                "gflop": 10.0,
                "seconds": 1.0,
            }
            for seed in range(2)
        }
        for row, value in last.items()
    }


def test_the_conditions_of_the_quick_start_are_differences_by_seed():
    script = config_files.load(ROOT / "benchmarks" / "quickstart.py")
    good = rows(er_ace=0.7, finetune=0.2, finetune_long=0.3, joint=0.85)
    found = script.conditions({"AVX2": good})["AVX2"]
    expected = [35, 42, 46, 40, 15]
    for each, value in zip(found.values(), expected, strict=True):
        np.testing.assert_allclose(each, [value, value])
    low = rows(er_ace=0.7, finetune=0.68, finetune_long=0.71, joint=0.69)
    found = script.conditions({"AVX2": low})["AVX2"]
    assert [min(each) > 0 for each in found.values()] == [True, True] + [False] * 3
    table = script.table({"AVX2": good})
    assert "| AVX2 | ER-ACE | 70.5 ± 0.5 | 50.0 ± 0.0 | 80.0 ± 0.0 | 10 |" in table
