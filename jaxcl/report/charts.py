"""Charts of a page about runs, and accuracy matrices as tables.

A run has the same colour and marker everywhere on the page. A label for screen readers
says what a chart shows.
"""

import base64
import io
import math
from collections.abc import Iterable
from typing import NamedTuple

import numpy as np
from PIL import Image

from jaxcl.evals.plots import svg
from jaxcl.report import formats, numbers
from jaxcl.report import runs as runs_lib

MOST_TASKS = 20  # larger matrices are shown as a picture without numbers


class Chart(NamedTuple):
    """A figure of the page."""

    title: str
    remark: str  # in the caption, behind the title
    label: str  # for screen readers
    drawing: svg.Drawing


# Curves and points


def drawable(curves: Iterable[numbers.Curve]) -> bool:
    """Tell whether one of the curves has two points or more."""
    return any(np.isfinite(curve.mean).sum() > 1 for curve in curves)


def lines(
    curves: list[tuple[int, str, numbers.Curve]],
    *,
    title: str,
    key: str,
    note: str = "",
    scale: float = 1.0,
    ends: list[int] | None = None,
    wide: bool = False,
) -> Chart | None:
    """Draw curves over steps; None if no curve has two points.

    Args:
      curves: number, name and curve of each run.
      title: what is drawn, with its unit.
      key: unique on the page.
      note: goes into the caption, after the title.
      scale: 100 for percent.
      ends: steps at which tasks end; every other task is shaded.
      wide: draw a larger picture.
    """
    if not drawable(curve for *_, curve in curves):
        return None
    drawn = [
        svg.Curve(number, name, curve.x, *(scale * part for part in curve[1:4]))
        for number, name, curve in curves
        if np.isfinite(curve.mean).any()
    ]
    xlabel = "optimiser step"
    drawing = svg.lines(drawn, key=key, xlabel=xlabel, ends=ends, wide=wide)
    last_values = "; ".join(
        f"{line.name} ends at {formats.number(line.mean[-1])}" for line in drawn
    )
    remark = f"{', logarithmic' if drawing.y.log else ''}{f'; {note}' if note else ''}"
    return Chart(title, remark, f"{title} over steps. {last_values}", drawing)


def against_time(
    points: list[tuple[int, str, float, numbers.Estimate]], *, key: str
) -> Chart:
    """Draw accuracies with their intervals against the time of training.

    Args:
      points: number, name, seconds and accuracy of each run.
      key: unique among such charts.
    """
    drawn = []
    for number, name, seconds, accuracy in points:
        mean = formats.percent(accuracy.mean)
        tip = f"{name}: {mean} % in {formats.number(seconds)} s"
        parts = (100 * np.array([part], float) for part in accuracy[:3])  # None: nan
        drawn.append(svg.Curve(number, tip, np.array([seconds]), *parts))
    drawing = svg.scatter(drawn, key=f"time {key}", xlabel="seconds of training")
    title = "average accuracy (%) against training time"
    remark = ", logarithmic" if drawing.x.log else ""
    label = "; ".join(point.name for point in drawn)
    return Chart(title, remark, f"{title}. {label}", drawing)


# Accuracy matrices


class Share(NamedTuple):
    """An accuracy as a shaded cell."""

    text: str  # empty: not measured
    percent: int  # how strong the colour is
    shade: str  # class of the cell, for text that can be read on the colour
    title: str  # shown under the pointer


def share(value: float, text: str | None = None, title: str = "") -> Share:
    """Shade a cell by an accuracy in [0, 1], nan where it was not measured."""
    if np.isnan(value):
        return Share("", 0, "", title)
    percent = 100 * min(max(value, 0.0), 1.0)
    shade = "on-full" if percent >= 74 else "on-middle" if percent >= 60 else ""
    return Share(text or formats.percent(value), round(percent), shade, title)


def heat(run: runs_lib.Run, name: str, number: int) -> dict:
    """Lay out the accuracy matrix of a run that has it, a mean over its seeds.

    Args:
      run: one of the page.
      name: of the matrix.
      number: of the run.
    """
    matrix, count = numbers.mean_matrix(run, name)
    size, most, rows = matrix.shape[1], len(run.results), []
    figure = {"run": number, "label": f"{name} of {run.name}", "tasks": size}
    if size > MOST_TASKS:
        return figure | {"picture": _picture(matrix)}
    before = numbers.mean_row(run, "untrained", name)
    if before is not None:
        rows.append(_heat_row("untrained", before))
    for task, row in enumerate(matrix):
        titles = [f", n = {n}" if 0 < n < most else "" for n in count[task]]
        rows.append(_heat_row(f"after {task + 1}", row, titles, met=row[: task + 1]))
    alone = numbers.mean_row(run, "finetune", name)
    if alone is not None:
        rows.append(_heat_row("alone", alone))
    return figure | {"picture": None, "rows": rows}


def _heat_row(head, row, notes=None, met=None) -> tuple[str, list[Share], str]:
    """Head, cells and mean of a row, over `met`, by default over all measured."""
    notes = notes or [""] * len(row)
    cells = [
        share(value, title=f"task {task + 1}{note}")
        for task, (value, note) in enumerate(zip(row, notes, strict=True))
    ]
    return head, cells, _mean(row[~np.isnan(row)] if met is None else met)


def _mean(values) -> str:
    return formats.percent(float(np.mean(values)) if len(values) else math.nan)


def _picture(matrix) -> dict:
    """Draw the matrix: a stronger blue is a higher accuracy, grey has none."""
    strength = np.clip(np.nan_to_num(matrix), 0.0, 1.0)
    pixels = np.empty((*matrix.shape, 4), np.uint8)
    pixels[..., :3], pixels[..., 3] = (47, 127, 193), np.round(255 * strength)
    pixels[np.isnan(matrix)] = (128, 128, 128, 110)
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, format="png", optimize=True)
    data = base64.b64encode(file.getvalue()).decode()
    mean = f"{_mean(matrix[-1])} %" if len(matrix) else "not there"
    return {"png": data, "height": len(matrix), "mean": mean}
