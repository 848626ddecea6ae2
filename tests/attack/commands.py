"""The commands of the package, started as processes that can be killed.

A server has imported what they all need and forks for each command: that spares most
of the second or two that each would take to start.
"""

import contextlib
import multiprocessing
import os
import pathlib
import runpy
import signal
import sys
import time
from typing import NamedTuple

import psutil

TESTS = pathlib.Path(__file__).parents[1]
CONFIG = pathlib.Path(__file__).with_name("row.py")
_FORKS = multiprocessing.get_context("forkserver")
_FORKS.set_forkserver_preload(
    [
        "jaxcl.config.build",
        "jaxcl.config.command",
        "jaxcl.weights.export",
        "jaxcl.update.command",
        "jaxcl.evals.knn",
        "ml_collections.config_flags",
        "sklearn.datasets",
        "test_methods",
        "tensorboardX",
    ]
)
LONGEST = 1800.0  # seconds that a command may take on a machine that is busy


def _become(words, out, folder):
    """Run a command in this process: `-m MODULE ...` or a file."""
    os.setsid()
    os.chdir(folder)
    file = os.open(out, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for stream in (1, 2):
        os.dup2(file, stream)
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    module = words[0] == "-m"
    sys.argv = words[1:] if module else words
    if module:
        runpy.run_module(words[1], run_name="__main__", alter_sys=True)
    else:
        runpy.run_path(words[0], run_name="__main__")


class Ended(NamedTuple):
    """How a command ended."""

    code: int
    text: str  # all that it printed


class Command:
    """A command at work."""

    def __init__(self, words, out: pathlib.Path):
        self._out = out
        self._process = _FORKS.Process(
            target=_become, args=(list(map(str, words)), str(out), str(TESTS.parent))
        )
        self._process.start()

    def ended(self) -> bool:
        """Whether it is over."""
        return not self._process.is_alive()

    def send(self, number: int) -> None:
        """Send it a signal."""
        os.kill(self._process.pid, number)

    def kill(self) -> None:
        """SIGKILL, for it and all that it has started."""
        with contextlib.suppress(psutil.NoSuchProcess):
            own = psutil.Process(self._process.pid)
            for process in (own, *own.children(recursive=True)):
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.kill()
        self._process.join()

    def wait(self, seconds: float = LONGEST) -> Ended:
        """Its end; TimeoutError if it does not come."""
        self._process.join(seconds)
        if self._process.is_alive():
            self.kill()
            raise TimeoutError(f"no end after {seconds:g} s:\n{self.text()}")
        return Ended(self._process.exitcode, self.text())

    def text(self) -> str:
        """What it has printed so far."""
        return self._out.read_text(errors="replace") if self._out.exists() else ""


def start(words, folder: pathlib.Path) -> Command:
    """Start a command, whose output goes to a new file in a folder."""
    folder.mkdir(parents=True, exist_ok=True)
    number = len([*folder.glob("output-*")])
    return Command(words, folder / f"output-{number}.txt")


def finish(words, folder: pathlib.Path, code: int = 0) -> float:
    """Run a command to its end; returns the seconds. RuntimeError for another code."""
    began = time.monotonic()
    ended = start(words, folder).wait()
    if ended.code != code:
        raise RuntimeError(f"{words}: exit code {ended.code}\n{ended.text[-4000:]}")
    return time.monotonic() - began
