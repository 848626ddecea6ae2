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


# The whole of it is a slow test; this shows in a fifth of the steps that it learns.
SHORT = ("--config.epochs=10", "--config.first_tasks=2")


@pytest.mark.xdist_group("main")
@pytest.mark.parametrize(
    "changes", [SHORT, pytest.param((), marks=pytest.mark.slow)], ids=["short", "whole"]
)
def test_the_quick_start_learns_and_leaves_what_the_readme_says(tmp_path, changes):
    block = re.search(r"```\n(.*?)```", (ROOT / "README.md").read_text(), re.S)[1]
    install, command = block.strip().split(" && ")
    assert install == "pip install -e ."  # done already where tests run
    words = command.replace("python", sys.executable, 1).split()
    words[-1] = words[-1].replace("configs/", f"{ROOT}/configs/")
    words += changes
    env = {k: v for k, v in os.environ.items() if k not in CHEAP}
    env["PYTHONPATH"] = str(ROOT)
    done = subprocess.run(words, cwd=tmp_path, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    run = tmp_path / "runs" / "quickstart"
    results = json.loads((run / "results.json").read_text())
    name = "linear/domain_aware"
    measures = results["summary"][name]
    learned, before = measures["average_accuracy"], np.mean(results["untrained"][name])
    assert 1 - learned < (1 - before) / 2  # errors at least halve
    for measure in ("forgetting", "stability"):
        assert np.isfinite(measures[measure])
    tasks = 2 if changes else 3
    assert f"after task {tasks}" in done.stdout
    assert changes or "images/s" in done.stderr  # told once in some seconds
    pictures = {path.name for path in (run / "plots").iterdir()}
    assert {"linear_domain_aware.png", "curves.png"} <= pictures
    assert changes or "tsne_task3.png" in pictures  # of the last task alone
    for left in ("config.json", "metrics.jsonl", "tensorboard", "checkpoints"):
        assert (run / left).exists()
