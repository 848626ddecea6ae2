"""Describe a fault: a function of the package, and how a wrong one replaces it."""

import functools
import inspect
from collections.abc import Callable
from typing import NamedTuple


class Fault(NamedTuple):
    """One wrong behaviour, and the tests that must notice it."""

    name: str  # "part: what is wrong"
    target: str  # dotted path of what is replaced, "jaxcl.losses.contrastive.nt_xent"
    patch: Callable  # the right function -> the wrong one
    tests: tuple[str, ...]  # files or node ids, from tests/


def of(target: str, tests: str, *rows: tuple) -> list[Fault]:
    """List the faults of one function.

    Args:
      target: dotted path, from jaxcl.
      tests: node ids from tests/, with blanks between, that must notice the faults.
      rows: (name, patch), and behind them other tests in place of `tests`.
    """
    return [
        Fault(
            name, f"jaxcl.{target}", patch, tuple((named_tests or [tests])[0].split())
        )
        for name, patch, *named_tests in rows
    ]


def always(value) -> Callable:
    """Answer this value, whatever is given."""
    return lambda _: value


def _changes(change: Callable) -> Callable:
    """Patch: `change` the arguments, which it gets by name, on their way in."""

    def patch(function):
        signature = inspect.signature(function)

        @functools.wraps(function)
        def wrong(*positional, **named):
            call = signature.bind(*positional, **named)
            call.apply_defaults()
            change(call.arguments)
            return function(*call.args, **call.kwargs)

        return wrong

    return patch


def takes(**changes: Callable) -> Callable:
    """Patch: change arguments on their way in, `takes(labels=lambda x: 0 * x)`."""

    def change(arguments):
        for name, function in changes.items():
            arguments[name] = function(arguments[name])

    return _changes(change)


def swaps(one: str, other: str) -> Callable:
    """Patch: exchange two arguments."""

    def change(both):
        both[one], both[other] = both[other], both[one]

    return _changes(change)


def gives(change: Callable) -> Callable:
    """Patch: change the result; `change` gets it, and the arguments by name."""

    def patch(function):
        signature = inspect.signature(function)
        parameters = inspect.signature(change).parameters.values()
        wants = sum(parameter.default is parameter.empty for parameter in parameters)

        @functools.wraps(function)
        def wrong(*positional, **named):
            result = function(*positional, **named)
            if wants == 1:
                return change(result)
            call = signature.bind(*positional, **named)
            call.apply_defaults()
            return change(result, call.arguments)

        return wrong

    return patch


def instead(other: Callable) -> Callable:
    """Patch: call another function with the same arguments."""

    def patch(function):
        @functools.wraps(function)
        def wrong(*positional, **named):
            return other(*positional, **named)

        return wrong

    return patch


def makes(**fields: Callable) -> Callable:
    """Patch a `make`: wrap fields of the NamedTuple that it returns.

    Args:
      fields: name of a field -> function of the field's value, which returns another.
    """

    def change(record):
        return record._replace(
            **{name: wrap(getattr(record, name)) for name, wrap in fields.items()}
        )

    return gives(change)


def keeps(*fields: str) -> Callable:
    """Wrap a step or a task's begin or end: these fields of the state stay.

    Args:
      fields: names in the state, or "extra.NAME" of what the method keeps.
    """

    def wrap(function):
        def wrong(state, *others):
            result = function(state, *others)
            now, *rest = result if isinstance(result, tuple) else (result,)
            for field in fields:
                _, inner, name = field.rpartition("extra.")
                if inner:
                    old = getattr(state.extra, name)
                    now = now.replace(extra=now.extra._replace(**{name: old}))
                else:
                    now = now.replace(**{field: getattr(state, field)})
            return (now, *rest) if isinstance(result, tuple) else now

        return wrong

    return wrap
