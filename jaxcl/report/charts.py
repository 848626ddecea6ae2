"""Charts of a page about runs, as SVG, and accuracy matrices as tables.

A run has the same colour and marker everywhere on the page; the page's style defines
the colour for light and dark screens. A label for screen readers says what a chart
shows.
"""

import base64
import io
import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from PIL import Image

from jaxcl.report import html, numbers

COLOURS = 7  # --c0 ... of the style, distinct for colour-blind readers, too
MOST_TASKS = 20  # larger matrices are shown as a picture without numbers
_MARKS = 6  # markers on a line


class Axis(NamedTuple):
    """Maps numbers to positions in the picture."""

    start: float  # position of `low`
    end: float  # position of `high`
    low: float
    high: float
    log: bool = False

    def at(self, values: np.ndarray | Sequence[float] | float) -> np.ndarray:
        """Positions of numbers; those beyond an end are put there."""
        values = np.clip(np.asarray(values, float), self.low, self.high)
        ends = np.array([self.low, self.high])
        values, ends = (np.log(x) if self.log else x for x in (values, ends))
        share = (values - ends[0]) / (ends[1] - ends[0])
        return self.start + share * (self.end - self.start)

    def text(self) -> str:
        """The axis as the page's script reads it."""
        return " ".join(f"{float(value):.10g}" for value in self)


def ticks(low: float, high: float, count: int = 5, *, log: bool = False) -> list[float]:
    """Round numbers from low to high, about `count` of them."""
    if log:
        powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
        factors = (1,) if high / low > 1000 else (1, 2, 5)
        values = [f * 10.0**p for p in powers for f in factors]
        values = [x for x in values if low * 0.999 <= x <= high * 1.001]
        return values[:: math.ceil(len(values) / 7)] if values else [low]
    raw = (high - low) / count
    size = 10 ** math.floor(math.log10(raw))
    step = size * next(f for f in (1, 2, 2.5, 5, 10) if f * size >= raw * 0.999)
    first = math.ceil(low / step - 1e-9)
    return [step * n for n in range(first, math.floor(high / step + 1e-9) + 1)]


def _limits(values, bounds, *, log) -> tuple[float, float]:
    """Ends of an axis: it holds all values, and bands as far as values keep room."""
    low, high = float(np.min(values)), float(np.max(values))
    if log:
        return low / 1.15, high * 1.15
    room = (high - low) or abs(high) * 0.1 or 1.0
    if len(bounds):
        low, high = (
            max(low - room, min(low, float(np.min(bounds)))),
            min(high + room, max(high, float(np.max(bounds)))),
        )
    room = 0.04 * (high - low) or room
    return low - room, high + room


def _tick(value: float) -> str:
    value = 0.0 if abs(value) < 1e-12 else value
    text = html.short(value) if value >= 10_000 else f"{value:,.6g}"
    return text.replace("-", html.MINUS)


def _frame(x: Axis, y: Axis, xlabel: str, ends) -> list:
    """What lies behind the curves: shaded tasks, grid lines, numbers of both axes."""
    drawn = []
    stops = [0, *(ends or ())]
    for first, last in list(zip(stops, stops[1:], strict=False))[1::2]:
        left, right = x.at([first, last])
        drawn.append(
            html.element(
                "rect",
                x=f"{left:.1f}",
                width=f"{right - left:.1f}",
                y=f"{y.end:.1f}",
                height=f"{y.start - y.end:.1f}",
                class_="task",
            )
        )
    for value in ticks(y.low, y.high, 4, log=y.log):
        at = f"{float(y.at(value)):.1f}"
        drawn.append(
            html.element(
                "path", d=f"M{x.start:.0f} {at}H{x.end:.0f}", class_="grid-line"
            )
        )
        place = {"x": f"{x.start - 5:.0f}", "y": at}
        more = {"text_anchor": "end", "dominant_baseline": "central"}
        drawn.append(html.element("text", _tick(value), **place, **more))
    for value in ticks(x.low, x.high, 4, log=x.log):
        place = {"x": f"{float(x.at(value)):.1f}", "y": f"{y.start + 14:.0f}"}
        drawn.append(html.element("text", _tick(value), **place, text_anchor="middle"))
    place = {"x": f"{x.end:.0f}", "y": f"{y.start + 28:.0f}"}
    drawn.append(html.element("text", xlabel, **place, text_anchor="end"))
    return drawn


def _mark(style: int, x: float, y: float, r: float = 3.2) -> str:
    """Path of a marker; there are 5 markers and 7 colours, so that few pairs repeat."""
    shapes = (
        f"m-{r} 0a{r} {r} 0 1 0 {2 * r} 0a{r} {r} 0 1 0 -{2 * r} 0",
        f"m-{r} -{r}h{2 * r}v{2 * r}h-{2 * r}z",
        f"m0 -{r * 1.2:.2f}l{r * 1.1:.2f} {2 * r}h-{r * 2.2:.2f}z",
        f"m0 -{r * 1.3:.2f}l{r * 1.3:.2f} {r * 1.3:.2f}l-{r * 1.3:.2f} {r * 1.3:.2f}"
        f"l-{r * 1.3:.2f} -{r * 1.3:.2f}z",
        f"m0 {r * 1.2:.2f}l{r * 1.1:.2f} -{2 * r}h-{r * 2.2:.2f}z",
    )
    return f"M{x:.1f} {y:.1f}{shapes[style % len(shapes)]}"


def swatch(style: int) -> html.Html:
    """A piece of a run's line with its marker."""
    return html.element(
        "svg",
        html.element("path", d="M0 5H22", class_="l", stroke_dasharray=_dash(style)),
        html.element("path", d=_mark(style, 11, 5), class_="m"),
        viewBox="0 0 22 10",
        class_=f"swatch c{style % COLOURS}",
        aria_hidden="true",
    )


def named(style: int, name: str) -> html.Html:
    """A run's name after its swatch."""
    return html.join(swatch(style), name)


def legend(names: list[str]) -> html.Html:
    """All runs with their swatches."""
    items = [html.element("li", named(i, name)) for i, name in enumerate(names)]
    return html.element("ul", items, class_="legend", aria_label="runs")


def _dash(style: int) -> str | None:
    return (None, "5 3", "2 2")[style // COLOURS % 3]


def _path(xs, ys) -> str:
    """A line through points, broken where one is nan."""
    parts, broken = [], True
    for x, y in zip(xs, ys, strict=True):
        if np.isnan(y):
            broken = True
            continue
        parts.append(f"{'M' if broken else ' '}{x:.1f} {y:.2f}")
        broken = False
    return "".join(parts)


def _band(xs, low, high) -> str | None:
    """The area between two lines, where both are finite."""
    finite = np.isfinite(low) & np.isfinite(high)
    edges = np.flatnonzero(np.diff(np.concatenate([[False], finite, [False]])))
    parts = []
    for start, stop in edges.reshape(-1, 2):
        part = slice(start, stop)
        forth = zip(xs[part], high[part], strict=True)
        back = zip(xs[part][::-1], low[part][::-1], strict=True)
        drawn = " ".join(f"{x:.1f} {y:.1f}" for x, y in (*forth, *back))
        parts.append(f"M{drawn}z")
    return "".join(parts) or None


def _run_lines(style, name, curve, x: Axis, y: Axis, scale) -> list:
    """Band, line and markers of one run."""
    xs = x.at(curve.x)
    mean, low, high = (
        y.at(scale * part) for part in (curve.mean, curve.low, curve.high)
    )
    band, finite = _band(xs, low, high), np.flatnonzero(np.isfinite(mean))
    # Each run has its markers at other places, so that lines that coincide are seen.
    shift = style % 5 / 5 if len(finite) > 5 * _MARKS else 0
    spaced = (np.arange(_MARKS) + shift) * (len(finite) - 1) / (_MARKS - 1)
    shown = np.unique(spaced[spaced <= len(finite) - 1].astype(int))
    marks = "".join(_mark(style, xs[i], mean[i], 2.6) for i in finite[shown])
    return [
        None if band is None else html.element("path", d=band, class_="b"),
        html.element(
            "path",
            d=_path(xs, mean),
            class_="l",
            data_name=name,
            stroke_dasharray=_dash(style),
        ),
        html.element("path", d=marks, class_="m"),
    ]


def _axes(curves, ends, scale, width, height) -> tuple[Axis, Axis]:
    """Axes that hold the curves; y is logarithmic if values differ by 1000 times."""
    values = scale * np.concatenate([curve.mean for *_, curve in curves])
    bounds = scale * np.concatenate([np.append(c.low, c.high) for *_, c in curves])
    values, bounds = (x[np.isfinite(x)] for x in (values, bounds))
    log = values.min() > 0 and values.max() / values.min() > 1000
    last = max(*(float(curve.x[-1]) for *_, curve in curves), *(ends or [0]))
    first = 0.0 if ends else min(float(curve.x[0]) for *_, curve in curves)
    x = Axis(48, width - 10, first if first < last else 0.0, last)
    y = Axis(height - 34, 8, *_limits(values, bounds, log=log), log)
    return x, y


def lines(
    curves: list[tuple[int, str, numbers.Curve]],
    *,
    title: str,
    note: str = "",
    scale: float = 1.0,
    ends: list[int] | None = None,
    wide: bool = False,
) -> html.Html | None:
    """A figure of curves over steps; None if no curve has two points.

    Args:
      curves: style, name and curve of each run.
      title: what is drawn, with its unit.
      note: goes into the caption, after the title.
      scale: 100 for percent.
      ends: steps at which tasks end; every other task is shaded.
      wide: draw a larger picture.
    """
    curves = [
        (style, name, curve)
        for style, name, curve in curves
        if np.isfinite(curve.mean).any()
    ]
    if not any(np.isfinite(curve.mean).sum() > 1 for *_, curve in curves):
        return None
    width, height = (480, 240) if wide else (340, 190)
    x, y = _axes(curves, ends, scale, width, height)
    last_values = "; ".join(
        f"{name} ends at {html.number(scale * curve.mean[-1])}"
        for _, name, curve in curves
    )
    drawn = [
        html.element(
            "g",
            _run_lines(style, name, curve, x, y, scale),
            class_=f"c{style % COLOURS}",
        )
        for style, name, curve in curves
    ]
    rule = html.element("line", y1=f"{y.end:.0f}", y2=f"{y.start:.0f}", class_="rule")
    picture = html.element(
        "svg",
        _frame(x, y, "optimiser step", ends),
        drawn,
        rule,
        viewBox=f"0 0 {width} {height}",
        class_="chart",
        role="img",
        aria_label=f"{title} over steps. {last_values}",
        data_x=x.text(),
        data_y=y.text(),
    )
    remarks = f"{', logarithmic' if y.log else ''}{f'; {note}' if note else ''}"
    caption = html.element("figcaption", html.element("b", title), remarks)
    return html.element("figure", caption, picture, data_name=title)


def scatter(
    points: list[tuple[int, str, float, numbers.Estimate]], *, title: str, xlabel: str
) -> html.Html:
    """A figure of one point per run, in percent, with vertical intervals.

    Args:
      points: style, name, x (above 0) and y of each run.
      title: of the figure.
      xlabel: of the x axis.
    """
    width, height = 480, 240
    xs = [x for _, _, x, _ in points]
    means = [100 * y.mean for *_, y in points]
    bounds = [
        100 * end for *_, y in points for end in (y.low, y.high) if end is not None
    ]
    log = max(xs) / min(xs) > 10
    ends = (min(xs) / 1.3, max(xs) * 1.3) if log else _limits(xs, [], log=False)
    x, y = Axis(48, width - 14, *ends, log), None
    y = Axis(height - 34, 8, *_limits(means, bounds, log=False))
    drawn = []
    for style, name, seconds, accuracy in points:
        at, mean = float(x.at(seconds)), float(y.at(100 * accuracy.mean))
        bar = None
        if accuracy.low is not None:
            ends = (accuracy.low, accuracy.high)
            low, high = (float(y.at(100 * end)) for end in ends)
            bar = html.element("path", d=f"M{at:.1f} {low:.1f}V{high:.1f}", class_="e")
        tip = f"{name}: {html.percent(accuracy.mean)} % in {html.number(seconds)} s"
        mark = html.element("path", d=_mark(style, at, mean, 4), class_="m")
        group = html.element("title", tip), bar, mark
        drawn.append(html.element("g", group, class_=f"c{style % COLOURS}"))
    described = "; ".join(
        f"{name} {html.percent(accuracy.mean)} % in {html.number(seconds)} s"
        for _, name, seconds, accuracy in points
    )
    picture = html.element(
        "svg",
        _frame(x, y, xlabel, None),
        drawn,
        viewBox=f"0 0 {width} {height}",
        class_="chart",
        role="img",
        aria_label=f"{title}. {described}",
    )
    remark = ", logarithmic" if log else ""
    caption = html.element("figcaption", html.element("b", title), remark)
    return html.element("figure", caption, picture)


# Accuracy matrices


def _cell(value: float, title: str):
    if np.isnan(value):
        hidden = html.element("span", "not measured", class_="sr")
        return html.element("td", "\u00b7", hidden, class_="none", title=title)
    share = 100 * min(max(value, 0.0), 1.0)
    shade = " on-full" if share >= 74 else " on-middle" if share >= 60 else ""
    return html.element(
        "td",
        html.percent(value),
        class_=f"cell{shade}",
        style=f"--p:{share:.0f}%",
        title=title,
    )


def _heat_row(head, row, count, most, met):
    cells = []
    for task, value in enumerate(row):
        few = count is not None and 0 < count[task] < most
        some = f", n = {count[task]}" if few else ""
        cells.append(_cell(value, f"task {task + 1}{some}"))
    met = row[:met]
    met = met if count is not None else met[~np.isnan(met)]
    mean = float(np.mean(met)) if len(met) else math.nan
    cells.append(html.element("td", html.percent(mean)))
    return html.element("tr", html.element("th", head, scope="row"), cells)


def heat(run: numbers.Run, name: str, style: int) -> html.Html | None:
    """The accuracy matrix of a run, a mean over its seeds; None if it has none."""
    if name not in numbers.matrices(run):
        return None
    matrix, count = numbers.mean_matrix(run, name)
    caption = html.element("figcaption", swatch(style), html.element("b", run.name))
    if matrix.shape[1] > MOST_TASKS:
        return html.element(
            "figure", caption, _picture(matrix, f"{name} of {run.name}")
        )
    rows, most = [], len(run.results)
    before = numbers.mean_row(run, "untrained", name)
    if before is not None:
        rows.append(_heat_row("untrained", before, None, most, len(before)))
    for task, row in enumerate(matrix):
        rows.append(_heat_row(f"after {task + 1}", row, count[task], most, task + 1))
    alone = numbers.mean_row(run, "finetune", name)
    if alone is not None:
        rows.append(_heat_row("alone", alone, None, most, len(alone)))
    heads = [*map(str, range(1, matrix.shape[1] + 1)), "mean"]
    label = f"{name} of {run.name}"
    columns = [html.element("th", head, scope="col") for head in heads]
    table = html.element(
        "table",
        html.element("caption", f"{label}: accuracy on task (%)", class_="sr"),
        html.element("thead", html.element("tr", html.element("td"), columns)),
        html.element("tbody", rows),
        class_="heat",
    )
    scroll = {"class_": "scroll", "tabindex": "0", "role": "region"}
    return html.element(
        "figure", caption, html.element("div", table, **scroll, aria_label=label)
    )


def _picture(matrix, title: str):
    """The matrix as an image: a stronger blue is a higher accuracy, grey has none."""
    share = np.clip(np.nan_to_num(matrix), 0.0, 1.0)
    pixels = np.empty((*matrix.shape, 4), np.uint8)
    pixels[..., :3], pixels[..., 3] = (47, 127, 193), np.round(255 * share)
    pixels[np.isnan(matrix)] = (128, 128, 128, 110)
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, format="png", optimize=True)
    data = base64.b64encode(file.getvalue()).decode()
    description = f"Accuracy of {title}: {len(matrix)} rows, after each task, and "
    description += f"{matrix.shape[1]} columns, on each; the last row's mean is "
    description += (
        f"{html.percent(float(np.mean(matrix[-1])))} %" if len(matrix) else "not there"
    )
    image = html.element(
        "img", src=f"data:image/png;base64,{data}", alt=description, class_="picture"
    )
    text = f"{len(matrix)} tasks down, {matrix.shape[1]} across; grey: not measured"
    return html.join(image, html.element("p", text, class_="muted"))


def key() -> html.Html:
    """What the colours of accuracy matrices mean."""
    steps = []
    for percent in (0, 25, 50, 75, 100):
        shade = " on-full" if percent >= 74 else ""
        style = {"class_": f"cell{shade}", "style": f"--p:{percent}%"}
        steps.append(html.element("span", str(percent), **style))
    none = html.element("span", "\u00b7 not measured", class_="none")
    explanation = (
        " Rows: after each task; columns: on each; mean: over the tasks met. Alone: of "
        "a model trained on that task alone."
    )
    text = html.element("span", explanation, class_="muted")
    return html.element("p", "Matrices (%) ", steps, " ", none, text, class_="key")
