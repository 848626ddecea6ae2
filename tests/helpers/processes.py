"""Commands in processes of their own: started, awaited, compared."""

import os
import pathlib
import socket
import subprocess
import sys
import time

import numpy as np

from helpers import toy
from jaxcl.config import build
from jaxcl.run import checkpoint, log_file, result_file

TESTS = pathlib.Path(__file__).parents[1]
CONFIG = TESTS / "helpers" / "toy_config.py"
STEPS = 58  # of five tasks, two epochs each


def run(words, folder, packages=TESTS.parent):
    """Run Python with these words in a folder, to its end without an error.

    Returns:
      What it printed.
    """
    settings = {"PYTHONPATH": str(packages), "JAX_NUM_CPU_DEVICES": "1"}
    done = subprocess.run(
        [sys.executable, *words],
        cwd=folder,
        env=os.environ | settings,
        timeout=600,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, f"{words}\n{done.stdout}\n{done.stderr[-3000:]}"
    return done.stdout


def start(workdir, *arguments, devices=1, config=CONFIG):
    command = [sys.executable, "-m", "jaxcl.main", f"--config={config}"]
    command += [f"--workdir={workdir}", *arguments]
    paths = os.pathsep.join([str(TESTS.parent), str(TESTS)])
    return subprocess.Popen(
        command,
        env={**os.environ, "PYTHONPATH": paths, "JAX_NUM_CPU_DEVICES": str(devices)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=TESTS.parent,
    )


def free_port():
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return sock.getsockname()[1]


def finish(process, code=0, timeout=300):
    out, err = process.communicate(timeout=timeout)
    assert process.returncode == code, f"{process.returncode}\n{out}\n{err[-4000:]}"
    return out, err


def ended(workdir):
    """Checksum of the final state, and all rows without the clock."""
    config = toy.config(**{"scenario.num_tasks": 5, "method.strategy": "pnr"})
    work = build.build(config, workdir / "like")
    state = toy.saved(work, workdir).state
    rows = [{k: v for k, v in r.items() if k != "time"} for r in rows_of(workdir)]
    return np.asarray(checkpoint.checksum(state)), rows, state


def rows_of(workdir):
    path = pathlib.Path(workdir) / "metrics.jsonl"
    return log_file.read_rows(workdir) if path.exists() else []


def until(process, ready, seconds=120):
    """Wait for `ready()` while the process lives."""
    give_up = time.monotonic() + seconds
    while not ready():
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < give_up
        time.sleep(0.0005)


def lines(workdir):
    path = pathlib.Path(workdir) / "metrics.jsonl"
    return path.read_bytes().count(b"\n") if path.exists() else 0


def check_same(workdir, reference):
    (sums, rows, _), (want_sums, want_rows, _) = ended(workdir), ended(reference)
    np.testing.assert_array_equal(sums, want_sums)
    assert rows == want_rows
    assert sorted(r["step"] for r in rows if "loss" in r) == list(range(1, STEPS + 1))
    results, expected = (result_file.read_results(w) for w in (workdir, reference))
    assert results["matrices"] == expected["matrices"]
    assert results["scalars"] == expected["scalars"]
