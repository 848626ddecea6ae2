"""Seconds of a process by stage, from the command on; both sides report them alike."""

import contextlib
import json
import os
import pathlib
import sys
import time
from collections.abc import Iterator, Sequence

STAGES = ("start", "read", "compile", "train", "evaluate", "save", "rest")


class Stages:
    """Seconds by stage; the first, "start", began when the command was given.

    The driver writes that time into the variable STARTED.
    """

    def __init__(self):
        self._spans, self._name = [], "start"
        self._since = float(os.environ.get("STARTED") or time.time())

    def turn(self, name: str) -> str:
        """Go over to another stage; return the one before."""
        now, before = time.time(), self._name
        self._spans.append((self._since, now, before))
        self._since, self._name = now, name
        return before

    @contextlib.contextmanager
    def on(self, name: str) -> Iterator[None]:
        """Count the seconds inside as `name`, and not as the stage around it."""
        before = self.turn(name)
        try:
            yield
        finally:
            self.turn(before)

    def during(self, name: str, function):
        """Wrap a function whose calls count as `name`."""

        def timed(*args, **options):
            with self.on(name):
                return function(*args, **options)

        return timed

    def seconds(self, compiling: Sequence[tuple[float, float]] = ()) -> dict:
        """Return the seconds of each stage so far.

        Args:
          compiling: (begin, end) of compilations, which count as "compile" alone. They
            may lie within one another.
        """
        self.turn(self._name)
        found, apart = dict.fromkeys(STAGES, 0.0), _union(compiling)
        for begin, end, name in self._spans:
            inside = sum(max(min(end, e) - max(begin, b), 0.0) for b, e in apart)
            found[name] += end - begin - inside
            found["compile"] += inside
        return found


def _union(spans) -> list[tuple[float, float]]:
    """Join spans that overlap."""
    joined: list[tuple[float, float]] = []
    for begin, end in sorted(spans):
        if joined and begin <= joined[-1][1]:
            joined[-1] = joined[-1][0], max(joined[-1][1], end)
        else:
            joined.append((begin, end))
    return joined


def settings() -> dict:
    """Read what the driver asks for: the JSON file that the command names."""
    return json.loads(pathlib.Path(sys.argv[1]).read_text())


def report(stages: Stages, asked: dict, compiling=(), **found) -> None:
    """Write what was measured to the file that the driver reads."""
    found["stages"] = stages.seconds(compiling)
    found["until"] = time.time()
    pathlib.Path(asked["report"]).write_text(json.dumps(found))
