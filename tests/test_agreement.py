"""Processes of one run that disagree: refused in all of them, by name."""

import json
import os
import pathlib
import subprocess
import sys

import jax
import pytest

from helpers import processes
from jaxcl import sharding
from jaxcl.errors import Refused
from jaxcl.run import agreement

ROOT = pathlib.Path(__file__).parents[1]
PROGRAM = ROOT / "tests" / "helpers" / "disagreeing.py"


@pytest.fixture(scope="module")
def told(tmp_path_factory):
    """Case -> what process 0 and process 1 said."""
    folder, port = tmp_path_factory.mktemp("pair"), processes.free_port()
    paths = os.pathsep.join([str(ROOT), str(ROOT / "tests")])
    env = os.environ | {"PYTHONPATH": paths, "JAX_NUM_CPU_DEVICES": "2"}
    pair = [
        subprocess.Popen(
            [sys.executable, str(PROGRAM), str(port), str(rank), str(folder)],
            env=env,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    both = [processes.finish(process, timeout=120)[0].splitlines() for process in pair]
    cases = [dict(json.loads(x) for x in lines if x.startswith('["')) for lines in both]
    return {case: [told[case] for told in cases] for case in cases[0]}


@pytest.mark.parametrize(
    "case, words",
    [
        ("lr", ["config.optimizer.lr", "0.1 in process 0", "1e-05 in process 1"]),
        ("seed", ["config.seed", "0 in process 0", "1 in process 1"]),
        ("in one alone", ["config.optimizer.momentum", "0.5 in process 1"]),
        ("misspelt in one", ["config.method.temprature"]),
        ("x64", ["jax_enable_x64", "True in process 1"]),
        ("prng", ["jax_default_prng_impl", "'rbg' in process 1"]),
        ("precision", ["jax_default_matmul_precision", "'bfloat16' in process 1"]),
        ("workdir", ["--workdir", "run0", "run1"]),
        ("code", ["code of jaxcl", "sha256 1' in process 1"]),
        ("one device", ["config.devices=1", "2 processes"]),
        ("one fails", ["a lost disk"]),
        ("pixels", ["config.data", "row 7 of train"]),
        ("rows", ["config.data", "row 36 of train"]),
    ],
)
def test_a_difference_is_refused_in_all_processes(told, case, words):
    for text in told[case]:
        assert all(word in text for word in words), text


def test_options_of_a_process_alone_may_differ(told):
    assert told["may differ"] == ["", ""]


def test_an_error_without_a_message_is_told_by_its_name(monkeypatch):
    sent = []
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    monkeypatch.setattr(
        sharding, "gather_bytes", lambda text: sent.append(text) or [b"", b"other"]
    )
    with pytest.raises(ValueError), agreement.failing_together():
        raise ValueError
    with pytest.raises(Refused, match="process 1 .*other"):
        with agreement.failing_together():
            pass
    assert sent == [b"ValueError()", b""]
