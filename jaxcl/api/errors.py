"""Shorten tracebacks of errors that a caller can fix."""

import functools
import traceback
from collections.abc import Callable
from typing import ParamSpec, TypeVar

_P = ParamSpec("_P")
_R = TypeVar("_R")


def shortened(function: Callable[_P, _R]) -> Callable[_P, _R]:
    """Wrap a function so that its own errors come without the frames inside jaxcl.

    These are ValueErrors and OSErrors that jaxcl itself raised. Errors of other
    packages keep all their frames: these may be bugs.
    """

    @functools.wraps(function)
    def call(*args: _P.args, **kwargs: _P.kwargs) -> _R:
        try:
            return function(*args, **kwargs)
        except (ValueError, OSError) as error:
            frame, _ = [*traceback.walk_tb(error.__traceback__)][-1]
            if not frame.f_globals.get("__name__", "").startswith("jaxcl."):
                raise
            raise error.with_traceback(None) from None

    return call
