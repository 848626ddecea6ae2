"""Decoration that fails: a terminal that is gone, pictures, a user's matplotlibrc."""

import contextlib
import errno
import os
import pty
import signal
import subprocess
import sys
import time

import matplotlib
import pytest

from helpers import processes, run_directories
from jaxcl import plots
from jaxcl.config import command
from jaxcl.run import evaluation, finish, terminal, train


@pytest.fixture(params=["terminal", "pipe"])
def gone(request, monkeypatch):
    """A function that makes stdout and stderr files of which nobody reads the end."""
    reads, writes = pty.openpty() if request.param == "terminal" else os.pipe()
    streams = [os.fdopen(os.dup(writes), "w") for _ in range(2)]
    os.close(writes)
    os.close(reads)

    def enter():  # called by the test, since pytest sets its own streams before it
        for name, stream in zip(("stdout", "stderr"), streams, strict=True):
            monkeypatch.setattr(sys, name, stream)
            monkeypatch.setattr(sys, f"__{name}__", stream)
        return streams

    yield enter
    for stream in streams:
        with contextlib.suppress(OSError):
            stream.close()


def test_a_print_to_nobody_is_dropped(gone):
    streams = gone()
    with pytest.raises(OSError) as told:
        print("a", flush=True)
    assert told.value.errno in (errno.EIO, errno.EPIPE)
    with terminal.outlive_terminal():
        print("b", flush=True)
        print("c", file=sys.stderr, flush=True)
    assert (sys.stdout, sys.stderr) == tuple(streams)
    for stream in streams:
        stream.flush()  # as the interpreter does at its end: else it exits with 120


def test_the_exit_code_is_that_of_the_run(gone):
    gone()

    def stopped(made, stop):
        print("a table", flush=True)
        raise train.Interrupted("stopped at step 3")

    assert command.run_until_signal(lambda: None, stopped) == 75
    done = command.run_until_signal(lambda: None, lambda made, stop: print("a table"))
    assert done == 0


def test_a_full_disk_of_a_log_may_have_room_again():
    """Its text is dropped, and the next one is tried."""
    with terminal._Lossy("/dev/full", "wb") as file:
        assert file.write(b"lost") == 4
        assert os.fstat(file.fileno()).st_rdev == os.stat("/dev/full").st_rdev


@pytest.mark.parametrize("hangup", ["default", "ignore"])
def test_the_terminal_of_a_run_closes(tmp_path, hangup):
    """A run that gets SIGHUP saves and exits with 75; one that ignores it ends."""
    paths = os.pathsep.join([str(processes.TESTS.parent), str(processes.TESTS)])
    words = ["setsid", "--ctty", "env", f"--{hangup}-signal=HUP"]
    words += [sys.executable, "-m", "jaxcl", "train"]
    words += [f"--config={processes.CONFIG}", f"--workdir={tmp_path}"]
    words += ["--config.scenario.num_tasks=2"]
    environment = os.environ | {"PYTHONPATH": paths, "JAX_NUM_CPU_DEVICES": "1"}
    master, end = pty.openpty()
    streams = dict.fromkeys(("stdin", "stdout", "stderr"), end)
    run = subprocess.Popen(words, env=environment, **streams)
    os.close(end)
    give_up = time.monotonic() + 300
    while processes.lines(tmp_path) < 4:
        assert time.monotonic() < give_up
        with contextlib.suppress(BlockingIOError):
            os.set_blocking(master, False)
            os.read(master, 4096)
        time.sleep(0.01)
    os.close(master)
    assert run.wait(timeout=300) == (75 if hangup == "default" else 0)
    assert (tmp_path / "results.json").exists() == (hangup == "ignore")


ROWS = [{"step": n, "task": 0, "loss": 1.0 / n, "lr": 0.1} for n in range(1, 9)]


@pytest.mark.parametrize(
    "rc", [{"text.usetex": True}, {"font.size": 40.0, "axes.facecolor": "red"}]
)
def test_pictures_are_in_the_librarys_own_style(tmp_path, rc):
    plots.curves(ROWS, tmp_path / "plain.png")
    with matplotlib.rc_context(rc):
        plots.curves(ROWS, tmp_path / "user.png")
        assert all(matplotlib.rcParams[name] == rc[name] for name in rc)
    plain, user = ((tmp_path / f"{x}.png").read_bytes() for x in ("plain", "user"))
    assert plain == user


def test_a_picture_that_fails_is_one_warning(tmp_path, monkeypatch, caplog):
    work, _ = run_directories.run_of(tmp_path)
    results = run_directories.results_of(work, done=2)
    run_directories.write(tmp_path / "x", {}, ROWS, results)
    drawn = []
    monkeypatch.setattr(plots, "curves", lambda rows, path: drawn.append(path))

    def fail(*_, **__):
        raise RuntimeError("no\nlatex")

    monkeypatch.setattr(plots, "accuracy_matrix", fail)
    finish.draw_run(work, tmp_path / "x", results)
    (told,) = [x.getMessage() for x in caplog.records if x.levelname == "WARNING"]
    assert "knn_x.png" in told and "no latex" in told and "\n" not in told
    assert drawn == [tmp_path / "x" / "plots" / "curves.png"]
    caplog.clear()
    evaluation.draw_pictures({"tsne": fail}, None, 0)
    assert "config.evaluators.tsne" in caplog.text


def test_a_signal_whose_line_cannot_be_shown_still_stops(gone):
    """The thread that hears signals prints, and must not die of it."""

    def work(made, stop):
        signal.raise_signal(signal.SIGTERM)
        give_up = time.monotonic() + 30
        while not stop():
            assert time.monotonic() < give_up
        raise train.Interrupted("stopped")

    gone()
    before = signal.getsignal(signal.SIGTERM)
    assert command.run_until_signal(lambda: None, work) == 75
    assert signal.getsignal(signal.SIGTERM) is before


def test_a_script_prints_a_warning_once_and_those_of_others():
    script = """
import logging
from jaxcl.run import terminal
from absl import logging as absl_logging
terminal.use_plain_warnings()
absl_logging.vlog(1, "as orbax does")
absl_logging.warning("take care")
logging.getLogger("other").warning("of another")
"""
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )
    lines = done.stderr.splitlines()
    assert [line for line in lines if "take care" in line] == [
        "jaxcl: warning: take care"
    ]
    assert [line for line in lines if "of another" in line] == [
        "WARNING:other:of another"
    ]
