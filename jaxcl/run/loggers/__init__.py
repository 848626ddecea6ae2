"""Loggers of a run's rows, in addition to metrics.jsonl.

A logger is a module with a function `make(directory, rows)`, which gives an object with
`write(row)` and `close()`. `config.loggers` names those of this package and, with a
dot, a user's module:

    # mine/log.py, for --config.loggers=mine.log
    class _Printer:
        def write(self, row): print(dict(loggers.numbers(row)))
        def close(self): pass

    def make(directory, rows): return _Printer()

`directory` is the run's, an `epath.Path`, and `rows` are those that a resumed run has
logged, so that a logger may show them again or leave them out. A row is as in
metrics.jsonl: {"step", "task", ..., "time": {"unix", ...}}. Only the first process of a
run has loggers. A module may have `check()`, which raises Refused before data are
read where no logger can be made.
"""

from collections.abc import Callable, Iterator
from typing import Any

from jaxcl import lookup


def makers(names: str) -> tuple[Callable, ...]:
    """Find the `make` of each logger in `names`, which are separated by commas.

    Raises Refused for an unknown name, or from the `check` of the module.
    """
    listed = [name.strip() for name in names.split(",") if name.strip()]
    modules = [lookup.find_module(__name__, name, "config.loggers") for name in listed]
    for module in modules:
        if hasattr(module, "check"):
            module.check()
    return tuple(module.make for module in modules)


def numbers(row: dict) -> Iterator[tuple[str, float]]:
    """Yield (tag, number) for every number of a row; train/NAME for a step."""
    for tag, value in _flatten(row):
        if tag not in ("step", "task", "time/unix"):
            yield tag if "/" in tag else f"train/{tag}", value


def _flatten(value: Any, tag: str = "") -> Iterator[tuple[str, float]]:
    """Yield (tag, number) of every number in nested dicts and lists, counted from 1."""
    if isinstance(value, list):
        value = dict(enumerate(value, 1))
    if isinstance(value, dict):
        for key, child in value.items():
            yield from _flatten(child, f"{tag}/{key}" if tag else str(key))
    elif isinstance(value, int | float):
        yield tag, float(value)
