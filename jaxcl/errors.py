"""Tell a user's mistake from a bug.

`Refused` is imported by name: it is raised in half of all modules.
"""

import functools
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

_P = ParamSpec("_P")
_R = TypeVar("_R")
_NO_VALUE = object()


class Refused(ValueError):
    """A user's mistake: a field, its value, what is allowed, and what to type instead.

    Commands print it in one line, `jaxcl.fit` without the frames inside jaxcl. An error
    of any other type but OSError is a bug and keeps its traceback.

    Args:
      field: name as the user knows it, such as "config.batch_size"; or, alone, the
        whole message.
      value: value that the field has.
      allowed: words for the allowed values, such as "must be 1 or more".
      advice: what to type instead.
    """

    def __init__(
        self, field: str, value: Any = _NO_VALUE, allowed: str = "", advice: str = ""
    ):
        self.field = field
        message = field if value is _NO_VALUE else f"{field}={value!r}"
        if allowed:
            message += f": {allowed}"
        if advice:
            message += f"; {advice}"
        super().__init__(message)


def shortened(function: Callable[_P, _R]) -> Callable[_P, _R]:
    """Wrap a function so that a user's mistake shows no frames inside jaxcl."""

    @functools.wraps(function)
    def call(*args: _P.args, **kwargs: _P.kwargs) -> _R:
        try:
            return function(*args, **kwargs)
        except (Refused, OSError) as error:
            raise error.with_traceback(None) from None

    return call
