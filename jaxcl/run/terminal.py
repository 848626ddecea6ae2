"""Colour text, if the terminal has colours."""

import os
import sys
from typing import Literal, TextIO

_CODES = {"good": 32, "bad": 31, "strong": 1}


def style_text(
    text: str, style: Literal["good", "bad", "strong"], file: TextIO | None = None
) -> str:
    """Return the text in green, red or bold if `file` is a terminal with colours.

    Otherwise, or if the variable NO_COLOR is set (no-color.org), the text is unchanged.

    Args:
      text: one line or more.
      style: "good", "bad" or "strong".
      file: output of the text; None: stdout.
    """
    file = sys.stdout if file is None else file
    plain = os.environ.get("NO_COLOR") or os.environ.get("TERM") == "dumb"
    if plain or not file.isatty():
        return text
    return f"\033[{_CODES[style]}m{text}\033[0m"
