"""Format numbers and tables of a page about runs."""

from collections.abc import Callable
from typing import NamedTuple

from jaxcl.report import numbers

MINUS = "\u2212"


class Cell(NamedTuple):
    """A cell of a table."""

    text: str
    interval: str = ""  # below it, of 95 %
    difference: str = ""  # to the first run, below that
    share: int | None = None  # percent of the colour behind it


class Table(NamedTuple):
    """A table whose first column holds the heads of the rows."""

    columns: list[str]
    rows: list[tuple[str, list[Cell]]]  # head, cells


def _format_signed(text: str, plus: bool) -> str:
    text = text.replace("-", MINUS)
    return f"+{text}" if plus and not text.startswith(MINUS) else text


def format_percent(value: float | None, *, plus: bool = False) -> str:
    """Write a share in percent with one decimal; "-" for None or nan."""
    if value is None or value != value:
        return "-"
    return _format_signed(f"{100 * value:.1f}", plus)


def format_number(value: float | None, *, plus: bool = False) -> str:
    """Write a number in four digits; "-" for None or nan."""
    if value is None or value != value:
        return "-"
    large = 10_000 <= abs(value) < 1e12
    if large or (value == round(value) and abs(value) < 1e12):
        text = f"{value:,.0f}"
    else:
        text = f"{value:#.4g}"  # zeros at the end say how exact it is
    return _format_signed(text.rstrip("."), plus)


def format_seconds(value: float | None) -> str:
    """Write seconds, with a decimal below 100; "-" for None."""
    if value is None:
        return "-"
    return f"{value:.1f}" if value < 99.95 else f"{value:,.0f}"


def format_estimate(
    value: numbers.Estimate,
    form: Callable[..., str],
    *,
    expected: int,
    delta: numbers.Estimate | None = None,
) -> Cell:
    """Write a mean over seeds with its interval.

    Args:
      value: the mean.
      form: `format_percent` or `format_number`.
      expected: seeds of the row; if the mean is over fewer, the cell says how many.
      delta: the difference to the first run; None: not shown.
    """
    interval = "" if value.mean is None else _format_interval(value, form, expected)
    if delta is None:
        return Cell(form(value.mean), interval)
    difference = "\u0394 -"
    if delta.mean is not None:
        ends = _format_interval(delta, form, expected, plus=True)
        difference = f"\u0394 {form(delta.mean, plus=True)} {ends}"
    return Cell(form(value.mean), interval, difference)


def _format_interval(value, form, expected, **options) -> str:
    ends = "-"
    if value.low is not None:
        ends = f"[{form(value.low, **options)}, {form(value.high, **options)}]"
    count = "" if value.seeds == expected else f" n = {value.seeds}"
    return ends + count
