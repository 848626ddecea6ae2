"""The first command of the README, run as a newcomer would run it."""

import json
import os
import pathlib
import re
import subprocess
import sys

import numpy as np
import pytest

ROOT = pathlib.Path(__file__).parents[1]
CHEAP = ("XLA_FLAGS", "JAX_NUM_CPU_DEVICES")  # settings of tests, not of users


@pytest.mark.slow
def test_the_quick_start_learns_and_leaves_what_the_readme_says(tmp_path):
    text = (ROOT / "README.md").read_text()
    command = re.search(r"(python -m jaxcl\.main .*quickstart\.py)$", text, re.M)[1]
    words = command.replace("python", sys.executable, 1).split()
    words[-1] = words[-1].replace("configs/", f"{ROOT}/configs/")
    env = {k: v for k, v in os.environ.items() if k not in CHEAP}
    env["PYTHONPATH"] = str(ROOT)
    done = subprocess.run(words, cwd=tmp_path, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    run = tmp_path / "runs" / "quickstart"
    results = json.loads((run / "results.json").read_text())
    name = "predict/class_incremental"
    before = np.mean(results["untrained"][name])
    assert before == pytest.approx(0.1, abs=0.05)  # ten classes, none of them met
    measures = results["summary"][name]
    # Ten points below the mean of five seeds, and no warning.
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
