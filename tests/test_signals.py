"""Signals: the first saves, the second ends at once, whatever the main thread does."""

import pathlib
import signal
import subprocess
import sys
import threading

import pytest

from jaxcl.run import lock, signals

# A main thread that is in C, as in a compilation: Python's own handlers wait for it.
PROGRAM = """
import ctypes, sys
from jaxcl.run import lock, signals
lock.take(sys.argv[1])
sleep = ctypes.CDLL(None).sleep
with signals.watched(lambda text: print(text, file=sys.stderr, flush=True)) as stop:
    for line in sys.stdin:
        if line.startswith("busy"):
            signals.busy(line[5:].strip())
        if line.startswith("idle"):
            signals.idle(lambda: print("settled", file=sys.stderr, flush=True))
        if line.startswith("stuck"):
            signals.idle(lambda: sleep(60))
        if line.startswith("failing"):
            def fail():
                raise OSError("no room")
            signals.idle(fail)
        if line.startswith("asked"):
            print(stop(), flush=True)
            continue
        print("ready", flush=True)
        sleep(60)
"""


@pytest.fixture
def program(tmp_path):
    started = []

    def start(hangup=signal.SIG_DFL):
        """Start it; whoever runs the tests may have been told to ignore SIGHUP."""
        process = subprocess.Popen(
            [sys.executable, "-c", PROGRAM, str(tmp_path)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            cwd=pathlib.Path(lock.__file__).parents[2],
            preexec_fn=lambda: signal.signal(signal.SIGHUP, hangup),
        )
        # What waits for a line that never comes fails and does not hang.
        killer = threading.Timer(120, process.kill)
        killer.start()
        started.append((process, killer))
        return process

    yield start
    for process, killer in started:
        killer.cancel()
        process.kill()
        process.communicate()


def tell(process, line):
    process.stdin.write(f"{line}\n")
    process.stdin.flush()
    return process.stdout.readline().strip()


def test_with_work_to_save_the_first_waits_and_says_for_what(program, tmp_path):
    process = program()
    assert tell(process, "busy the present step") == "ready"
    process.send_signal(signal.SIGHUP)
    words = "SIGHUP: the run saves and stops after the present step; a second signal"
    assert words in process.stderr.readline()
    assert process.poll() is None
    process.send_signal(signal.SIGTERM)
    assert process.wait(60) == 128 + signal.SIGTERM
    assert "SIGTERM" in process.stderr.read()
    assert not (tmp_path / lock.FILE).exists()


def test_with_nothing_to_save_the_first_ends_once_all_is_on_the_disk(program, tmp_path):
    process = program()
    assert tell(process, "idle") == "ready"
    assert (tmp_path / lock.FILE).exists()
    process.send_signal(signal.SIGTERM)
    assert process.wait(60) == signals.STOPPED == 75
    settled, said = process.stderr.read().splitlines()
    assert settled == "settled"
    assert said.startswith("SIGTERM: stopped, nothing is lost; the same command")
    assert not (tmp_path / lock.FILE).exists()


@pytest.mark.slow
def test_a_save_that_hangs_or_fails_does_not_hold_the_second(program):
    for what, word in (("stuck", ""), ("failing", "SIGTERM: no room")):
        process = program()
        assert tell(process, what) == "ready"
        process.send_signal(signal.SIGTERM)
        if word:
            assert word in process.stderr.readline()
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(0.2)
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 128 + signal.SIGTERM


@pytest.mark.slow
def test_nohup_is_obeyed(program):
    process = program(hangup=signal.SIG_IGN)
    assert tell(process, "busy x") == "ready"
    process.send_signal(signal.SIGHUP)
    with pytest.raises(subprocess.TimeoutExpired):
        process.wait(0.2)
    process.send_signal(signal.SIGTERM)
    assert "SIGTERM" in process.stderr.readline()


def test_processes_that_share_a_run_end_together(monkeypatch):
    """One that ends by itself would leave the others waiting for it."""
    told = []
    monkeypatch.setattr(signals.jax.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(signals, "_end", lambda code: told.append(code))
    with signals.watched(told.append) as stop:
        assert not stop()
        signal.raise_signal(signal.SIGTERM)
        while not told:
            pass
        assert stop()
    assert len(told) == 1


def test_ctrl_c_is_one_of_them_unless_the_shell_says_otherwise():
    """A shell has those that it starts in the background ignore it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with signals.watched(lambda text: None) as stop:
            signals.busy("x")
            signal.raise_signal(signal.SIGINT)
            while not stop():
                pass
    finally:
        signal.signal(signal.SIGINT, before)


def test_handlers_are_what_they_were(monkeypatch):
    before = [signal.getsignal(n) for n in (signal.SIGTERM, signal.SIGINT)]
    with signals.watched(print):
        pass
    assert [signal.getsignal(n) for n in (signal.SIGTERM, signal.SIGINT)] == before
    assert signal.set_wakeup_fd(-1) == -1
