"""Call a function for many items at once, in threads or in other processes."""

import collections
import concurrent.futures
import contextlib
import ctypes
import importlib.util
import itertools
import multiprocessing
import os
import pickle
import sys
import threading
import tokenize
from collections.abc import Callable, Generator, Iterable
from typing import Any

_TRIM_THRESHOLD, _MMAP_MAX = -1, -4  # of glibc's mallopt


def in_threads(
    function: Callable, items: Iterable, count: int | None = None
) -> Generator[Any, None, None]:
    """Yield function(item) of each item, in order, computed by `count` threads.

    At most `count` + 2 results wait, while `ThreadPoolExecutor.map` has no limit.

    Args:
      count: None: a number that suits image decoders, which release the GIL.
    """
    count = min(32, (os.cpu_count() or 1) + 2) if count is None else count
    pool = concurrent.futures.ThreadPoolExecutor(count)
    try:
        yield from _in_order(
            lambda item: pool.submit(function, item).result, items, count + 2
        )
    finally:
        pool.shutdown(cancel_futures=True)


def in_processes(
    function: Callable, items: Iterable, count: int
) -> Generator[Any, None, None]:
    """Yield function(item) of each item, in order, computed by `count` processes.

    Processes are started once and stay for the next call. They end with this one, even
    if it is killed. Errors of the function are raised here, in order.

    Args:
      function: picklable, without JAX.
    """
    workers = [_take_worker() for _ in range(count)]
    turns = itertools.cycle(workers)
    try:
        whole = pickle.dumps(function)
        for worker in workers:
            worker.connection.send_bytes(whole)
        yield from _in_order(lambda item: next(turns).ask(item), items, 2 * count)
    finally:
        for worker in workers:
            if worker.is_free():
                _free.append(worker)


def _in_order(submit, items, ahead):
    """Yield the results of items in order, `ahead` of them in progress.

    Args:
      submit: item -> a function that waits for its result.
    """
    waiting: collections.deque = collections.deque()
    for item in items:
        waiting.append(submit(item))
        if len(waiting) == ahead:
            yield waiting.popleft()()
    while waiting:
        yield waiting.popleft()()


_free: list["_Worker"] = []  # processes that wait for work
_LOCK = threading.Lock()  # or two threads would take the same one


def _take_worker() -> "_Worker":
    with _LOCK:
        return _free.pop() if _free else _Worker()


class _Worker:
    """A process that calls the function that it received last."""

    def __init__(self):
        context = multiprocessing.get_context("spawn")
        self.connection, theirs = context.Pipe()
        self.process = context.Process(target=_serve_calls, args=(theirs,), daemon=True)
        self.process.start()
        theirs.close()
        self.owed = 0  # results that it has not given

    def ask(self, item) -> Callable:
        """Ask for the result of an item; return a function that waits for it."""
        self.connection.send(item)
        self.owed += 1
        return self._receive

    def _receive(self):
        try:
            result = self.connection.recv()
        except (EOFError, OSError) as error:
            self.process.join()
            raise RuntimeError(
                "a process that reads images has ended, with exit code "
                f"{self.process.exitcode}; memory may be short: try fewer "
                "config.workers, 0 for none"
            ) from error
        self.owed -= 1
        if isinstance(result, Exception):
            raise result
        return result

    def is_free(self) -> bool:
        """Drop the results that nobody waits for; return whether it still lives."""
        while self.owed and self.process.is_alive():
            with contextlib.suppress(Exception):
                self._receive()
        return self.process.is_alive()


def _serve_calls(connection) -> None:
    """Call functions for another process until that one ends."""
    _settle()
    function = None
    with contextlib.suppress(EOFError, OSError):  # the other process has ended
        while True:
            item = connection.recv()
            if callable(item):
                function = item
                continue
            try:
                result = function(item)
            except Exception as error:
                result = _picklable(error)
            connection.send(result)


def _picklable(error) -> Exception:
    """Return the error, or one with its text if it cannot be pickled."""
    try:
        return pickle.loads(pickle.dumps(error))
    except Exception:
        return RuntimeError(repr(error))


def may_start_processes() -> bool:
    """Tell whether the main script allows new processes.

    Each of them runs that script once more. Without `if __name__ == "__main__":` in it
    the whole run would start again, in every one.
    """
    main = sys.modules["__main__"]
    script = getattr(main, "__file__", None)
    if script is None or getattr(main, "__spec__", None) is not None:
        return True  # a notebook, or a module run by `python -m`
    try:
        with tokenize.open(script) as file:
            return "__name__" in file.read()
    except (OSError, SyntaxError, UnicodeDecodeError):  # a program that is no text
        return True


def _settle() -> None:
    """Set up a worker process."""
    # A terminal sends Ctrl-C to a whole process group. In a group of their own
    # processes live until the run has saved its state.
    if hasattr(os, "setpgrp"):
        os.setpgrp()
    # glibc keeps freed memory: images come and go, and each page costs a fault.
    adjust = sys.platform == "linux" and getattr(ctypes.CDLL(None), "mallopt", None)
    if adjust:  # not in musl
        adjust(_MMAP_MAX, 0)
        adjust(_TRIM_THRESHOLD, 2**30)
    # Each process has a core; OpenCV's own threads would compete for the same cores.
    if importlib.util.find_spec("cv2") is not None:
        import cv2

        cv2.setNumThreads(1)
