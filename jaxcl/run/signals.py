"""Signals that tell a run to stop: the first saves it, the second ends it at once.

TERM, INT (Ctrl-C) and HUP are one: a run whose terminal closes saves, too, unless it
was told to ignore HUP (nohup). A thread of its own waits for them, for Python's own
handlers wait until the main thread comes back from a compilation or a program.

What the main thread says of itself decides what the first signal does: while there is
work that no checkpoint has (`busy`), the signal is noted and looked at by the loop;
while there is none (`idle`), for instance while data are read, the step is compiled or
a finished task is evaluated, the process ends at once. Where several processes share a
run they must end together: then a signal is always noted.
"""

import contextlib
import multiprocessing
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import jax

from jaxcl.run import lock

STOPPED = 75  # exit code
_ALL = ("SIGTERM", "SIGINT", "SIGHUP")  # not every system has all of them


class _Work(NamedTuple):
    """What the main thread does."""

    name: str
    settle: Callable[[], None] | None  # None: there is something to save


_NOTHING = _Work("", lambda: None)
_now = _NOTHING


def busy(name: str) -> None:
    """From now on there is work that no checkpoint has; a signal waits for `name`."""
    global _now
    _now = _Work(name, None)


def idle(settle: Callable[[], None]) -> None:
    """From now on nothing is lost if the process ends once `settle()` has returned."""
    global _now
    _now = _Work("", settle)


@contextlib.contextmanager
def watched(say: Callable[[str], None]) -> Iterator[Callable[[], bool]]:
    """Context in which signals stop the run; yields a function that says if one came.

    Only the main thread may enter it.

    Args:
      say: takes a line for the user; another thread calls it.
    """
    numbers = [getattr(signal, name) for name in _ALL if hasattr(signal, name)]
    numbers = [n for n in numbers if signal.getsignal(n) is not signal.SIG_IGN]
    asked = threading.Event()

    def hear(number):
        _hear(number, asked, say)

    with heard(numbers, hear, lambda *_: None):
        idle(_NOTHING.settle)
        yield asked.is_set


@contextlib.contextmanager
def heard(
    numbers: Sequence[int], hear: Callable[[int], None], handler: Callable
) -> Iterator[None]:
    """Context in which a thread of its own hears signals, at once.

    Only the main thread may enter it.

    Args:
      numbers: of the signals.
      hear: takes the number of each; that thread calls it.
      handler: (number, frame); the main thread calls it once it comes back to Python,
        for several signals perhaps once.
    """
    reads, writes = os.pipe()
    os.set_blocking(writes, False)

    def watch():
        while data := os.read(reads, 1):  # every byte is the number of a signal
            if data[0] in numbers:  # else somebody else's, as that of a child's end
                hear(data[0])

    watcher = threading.Thread(target=watch, name="signals", daemon=True)
    watcher.start()
    before = {number: signal.signal(number, handler) for number in numbers}
    wakeup = signal.set_wakeup_fd(writes, warn_on_full_buffer=False)
    try:
        yield
    finally:
        signal.set_wakeup_fd(wakeup)
        for number, handler in before.items():
            signal.signal(number, handler)
        os.close(writes)
        watcher.join()
        os.close(reads)


def _hear(number, asked, say) -> None:
    """Note a signal, or end the process; the thread that hears signals calls it."""
    name = signal.Signals(number).name
    if asked.is_set():
        say(f"{name}: ended at once; what came after the last checkpoint is lost")
        _end(128 + number)
    asked.set()
    work = _now
    if work.settle is None or jax.distributed.is_initialized():
        what = f" after {work.name}" if work.name else ""
        say(f"{name}: the run saves and stops{what}; a second signal ends it now")
        return
    # In a thread of its own, so that a second signal need not wait for it.
    threading.Thread(target=_settle, args=(name, work, say), daemon=True).start()


def _settle(name, work, say) -> None:
    """End the process once what it has saved is on the disk."""
    try:
        work.settle()
    except Exception as error:  # the main thread comes to this save, too
        say(f"{name}: {error}")
        return
    say(f"{name}: stopped, nothing is lost; the same command continues")
    _end(STOPPED)


def _end(code: int) -> None:
    """End the process as it is: checkpoints and files are whole at any moment."""
    for child in multiprocessing.active_children():
        child.kill()
    lock.release_all()
    sys.stdout.flush()
    os._exit(code)
