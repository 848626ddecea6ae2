"""Stop a run on a signal: the first is noted, the second ends the process at once.

TERM, INT (Ctrl-C) and HUP act alike: a run whose terminal closes saves, too, unless it
ignores HUP (nohup). A separate thread waits for them, since Python's handlers wait
until the main thread returns from a compilation or a program.
"""

import contextlib
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Sequence

from jaxcl.run import lock

STOPPED = 75  # exit code
_ALL = ("SIGTERM", "SIGINT", "SIGHUP")  # not every system has all of them


@contextlib.contextmanager
def watch_signals(say: Callable[[str], None]) -> Iterator[Callable[[], bool]]:
    """Note signals in this context; yields a function that tells whether one came.

    Only the main thread may enter it.

    Args:
      say: function of a line for the user; another thread calls it.
    """
    numbers = [getattr(signal, name) for name in _ALL if hasattr(signal, name)]
    numbers = [n for n in numbers if signal.getsignal(n) is not signal.SIG_IGN]
    stop = threading.Event()

    def record_signal(number):
        name = signal.Signals(number).name
        if stop.is_set():
            say(f"{name}: ended at once; what came after the last checkpoint is lost")
            _end_process(128 + number)
        stop.set()
        say(f"{name}: the run saves and stops; a second signal ends it now")

    with hear_at_once(numbers, record_signal, lambda *_: None):
        yield stop.is_set


@contextlib.contextmanager
def hear_at_once(
    numbers: Sequence[int], hear: Callable[[int], None], handler: Callable
) -> Iterator[None]:
    """Receive signals at once, in a separate thread.

    Only the main thread may enter it.

    Args:
      numbers: numbers of the signals.
      hear: function of a signal's number; that thread calls it.
      handler: function (number, frame); the main thread calls it when it returns to
        Python, perhaps once for several signals.
    """
    reads, writes = os.pipe()
    os.set_blocking(writes, False)

    def listen():
        while data := os.read(reads, 1):  # every byte is the number of a signal
            if data[0] in numbers:  # other signals, as of a child's end, come here too
                hear(data[0])

    listener = threading.Thread(target=listen, name="signals", daemon=True)
    listener.start()
    before = {number: signal.signal(number, handler) for number in numbers}
    wakeup = signal.set_wakeup_fd(writes, warn_on_full_buffer=False)
    try:
        yield
    finally:
        signal.set_wakeup_fd(wakeup)
        for number, handler in before.items():
            signal.signal(number, handler)
        os.close(writes)
        listener.join()
        os.close(reads)


def _end_process(code: int) -> None:
    """End the process now: checkpoints and files are whole at any moment."""
    lock.release_all()
    sys.stdout.flush()
    os._exit(code)
