"""The command itself: overrides, kills, signals, several processes."""

import json
import pathlib
import signal
import subprocess

import jax
import numpy as np
import pytest

from helpers import processes
from jaxcl.run import result_file


def saving(workdir):
    folder = pathlib.Path(workdir) / "checkpoints"
    return folder.exists() and any("tmp" in p.name for p in folder.iterdir())


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A run that nobody disturbed."""
    workdir = tmp_path_factory.mktemp("whole")
    out, _ = processes.finish(processes.start(workdir))
    return workdir, out


def test_leaves_a_run_directory_and_ends_again_at_once(whole):
    workdir, out = whole
    assert out.count("after task") == 5
    results = json.loads((workdir / "results.json").read_text())
    assert set(results["summary"]) == set(results["matrices"])
    again, _ = processes.finish(processes.start(workdir))
    assert f"resumed at step {processes.STEPS}" in again


TRANSFER = processes.TESTS.parent / "configs" / "transfer.py"


def test_its_encoder_is_judged_on_other_images(whole, tmp_path):
    arguments = [f"--config.checkpoint={whole[0]}", "--config.data.channels=1"]
    arguments += ["--config.augment.size=8", "--config.augment.resize=8"]
    told, _ = processes.finish(
        processes.start(tmp_path, *arguments, config=f"{TRANSFER}:stl10,debug")
    )
    assert "linear/class_incremental" in told
    results = result_file.read_results(tmp_path)
    assert results["task_names"] == ["joint"]
    assert results["checkpoint"]["step"] == processes.STEPS
    assert results["checkpoint"]["path"] == str(whole[0])
    assert len(processes.rows_of(tmp_path)) == 1


def test_killed_and_continued_is_the_same_bit_for_bit(whole, tmp_path):
    """SIGKILL in the midst of training, then in the midst of a save."""
    killed = processes.start(tmp_path)
    processes.until(killed, lambda: processes.lines(tmp_path) > 10)
    killed.kill()
    killed.communicate()
    killed = processes.start(tmp_path)
    before = processes.lines(tmp_path)
    processes.until(
        killed, lambda: processes.lines(tmp_path) > before + 3 and saving(tmp_path)
    )
    killed.kill()
    killed.communicate()
    out, _ = processes.finish(processes.start(tmp_path))
    assert "resumed at step" in out
    processes.check_same(tmp_path, whole[0])


def test_sigterm_saves_and_exits_with_75(whole, tmp_path):
    process = processes.start(tmp_path)
    processes.until(process, lambda: processes.lines(tmp_path) > 10)
    process.send_signal(signal.SIGTERM)
    _, err = processes.finish(process, code=75)
    stopped = max(r["step"] for r in processes.rows_of(tmp_path))
    out, _ = processes.finish(processes.start(tmp_path))
    assert f"resumed at step {stopped}" in out
    processes.check_same(tmp_path, whole[0])


def two(workdir, devices=2):
    """Two processes on this machine over loopback, of `devices` devices each."""
    port = processes.free_port()
    return [
        processes.start(
            workdir,
            f"--coordinator=127.0.0.1:{port}",
            "--processes=2",
            f"--process={i}",
            devices=devices,
        )
        for i in range(2)
    ]


def test_two_processes_train_save_resume_and_one_goes_on(whole, tmp_path):
    """4 devices in 2 processes, killed, resumed, and finished on 2 devices in one."""
    pair = two(tmp_path)
    processes.until(pair[0], lambda: processes.lines(tmp_path) > 12)
    for process in pair:
        process.kill()
    for process in pair:
        process.communicate()
    pair = two(tmp_path)
    processes.until(pair[0], lambda: processes.lines(tmp_path) > 26)
    for process in pair:
        process.send_signal(signal.SIGTERM)
    for process in pair:
        processes.finish(process, code=75)
    out, _ = processes.finish(processes.start(tmp_path, devices=2))
    assert "resumed at step" in out
    (_, rows, state), (_, want, one) = (
        processes.ended(tmp_path),
        processes.ended(whole[0]),
    )
    assert [r["step"] for r in rows] == [r["step"] for r in want]
    for ours, theirs in zip(
        *map(jax.tree.leaves, (state.params, one.params)), strict=True
    ):
        # 58 steps apart from 1 device: rounding has grown
        np.testing.assert_allclose(ours, theirs, rtol=0.05, atol=1e-2)
    ours, theirs = ([r["loss"] for r in x if "loss" in r] for x in (rows, want))
    np.testing.assert_allclose(ours, theirs, rtol=0.01)


@pytest.mark.parametrize(
    "arguments, words",
    [
        (["--config.method.temprature=0.1"], ["temprature", "temperature"]),
        (["--config=configs/nothing.py"], ["configs/nothing.py"]),
        (["--config.data.name=npz", "--config.data.path=/no/such"], ["/no/such"]),
        (["--config.checkpoint=/no/such"], ["config.checkpoint='/no/such'"]),
    ],
)
def test_a_wrong_command_is_one_line_and_code_2(tmp_path, arguments, words):
    out, err = processes.finish(processes.start(tmp_path / "run", *arguments), code=2)
    assert all(word in err for word in words), err
    assert "Traceback" not in err
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_killed_many_times_anywhere(whole, tmp_path):
    rng = np.random.default_rng(0)
    kills = 0
    while True:
        process = processes.start(tmp_path)
        try:
            # Later with each kill, or a slow machine might never come to a checkpoint.
            process.communicate(timeout=rng.uniform(2.0, 12.0 + kills))
            break
        except subprocess.TimeoutExpired:
            process.kill()
            process.communicate()
            kills += 1
    processes.finish(processes.start(tmp_path))
    assert kills > 0
    processes.check_same(tmp_path, whole[0])
