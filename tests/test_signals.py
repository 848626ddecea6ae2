"""Signals: the first saves, the second ends at once, whatever the main thread does."""

import pathlib
import signal
import subprocess
import sys
import threading
import time

import pytest

from jaxcl.run import lock, signals

# A main thread that is in C, as in a compilation: Python's own handlers wait for it.
PROGRAM = """
import ctypes, sys
from jaxcl.run import lock, signals
lock.acquire(sys.argv[1])
sleep = ctypes.CDLL(None).sleep
say = lambda text: print(text, file=sys.stderr, flush=True)
with signals.watch_signals(say) as stop:
    for line in sys.stdin:
        print("ready", flush=True)
        sleep(60)
"""


@pytest.fixture
def program(tmp_path):
    started = []

    def start(hangup="default"):
        """Start it; whoever runs the tests may have been told to ignore SIGHUP."""
        env = "env", f"--{hangup}-signal=HUP"
        process = subprocess.Popen(
            [*env, sys.executable, "-c", PROGRAM, str(tmp_path)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            cwd=pathlib.Path(lock.__file__).parents[2],
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


def test_the_first_is_noted_and_the_second_ends_the_process(program, tmp_path):
    process = program()
    assert tell(process, "sleep") == "ready"
    process.send_signal(signal.SIGHUP)
    assert "SIGHUP" in process.stderr.readline()
    with pytest.raises(subprocess.TimeoutExpired):
        process.wait(0.2)
    assert (tmp_path / lock.FILE).exists()
    process.send_signal(signal.SIGTERM)
    assert process.wait(60) == 128 + signal.SIGTERM
    assert "SIGTERM" in process.stderr.read()
    assert not (tmp_path / lock.FILE).exists()


@pytest.mark.slow
def test_nohup_is_obeyed(program):
    process = program(hangup="ignore")
    assert tell(process, "sleep") == "ready"
    process.send_signal(signal.SIGHUP)
    with pytest.raises(subprocess.TimeoutExpired):
        process.wait(0.2)
    process.send_signal(signal.SIGTERM)
    assert "SIGTERM" in process.stderr.readline()


def test_ctrl_c_is_one_of_them_unless_the_shell_says_otherwise():
    """A shell has those that it starts in the background ignore it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with signals.watch_signals(lambda text: None) as stop:
            signal.raise_signal(signal.SIGINT)
            give_up = time.monotonic() + 30
            while not stop():
                assert time.monotonic() < give_up
    finally:
        signal.signal(signal.SIGINT, before)


def test_handlers_are_what_they_were():
    before = [signal.getsignal(n) for n in (signal.SIGTERM, signal.SIGINT)]
    with signals.watch_signals(print):
        pass
    assert [signal.getsignal(n) for n in (signal.SIGTERM, signal.SIGINT)] == before
    assert signal.set_wakeup_fd(-1) == -1
