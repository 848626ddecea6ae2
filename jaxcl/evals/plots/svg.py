"""Charts of a page as SVG, which the page's style colours for light and dark screens.

matplotlib places and writes everything. Of what it writes shapes and texts stay, with
classes in place of its colours and fonts: `c0` ... is the colour of a curve, and
`_KINDS` say what it is. matplotlib draws numbers and names of axes alone; names that
come from files are titles, shown under the pointer.
"""

import io
import re
from typing import NamedTuple
from xml.etree import ElementTree

import numpy as np

from jaxcl.evals.plots import canvas

_MARKS = 6  # markers on a line
_LEFT, _RIGHT, _BELOW, _ABOVE = 48, 16, 34, 14  # margins, for the numbers of the axes
_KINDS = ("line", "band", "mark", "bar", "axis", "task")  # groups that stay
_SHAPES = ("path", "use", "text", "defs")
_ATTRIBUTES = ("id", "href", "x", "y", "d", "text-anchor", "stroke-dasharray")


class Curve(NamedTuple):
    """A curve with its band, or a point with its interval."""

    number: int  # of its colour and marker
    name: str
    x: np.ndarray  # f[n], increasing
    mean: np.ndarray  # f[n], nan: a gap
    low: np.ndarray  # f[n], nan: no band
    high: np.ndarray  # f[n]


class Axis(NamedTuple):
    """Two positions of an axis in the chart, and the numbers there."""

    start: float
    end: float
    low: float
    high: float
    log: int  # 1: logarithmic between them


class Drawing(NamedTuple):
    """A chart, in points: a text is 10 high."""

    width: int
    height: int
    content: str  # of an svg element
    x: Axis
    y: Axis


# Lines and points


def lines(
    curves: list[Curve],
    *,
    key: str,
    xlabel: str = "",
    ends: list[int] | None = None,
    wide: bool = False,
) -> Drawing:
    """Curves; the y axis is logarithmic if values differ by 1000 times.

    Args:
      curves: of different numbers; each has a finite value, one has two.
      key: differs between the charts of a page, as names of parts must.
      xlabel: of the x axis.
      ends: steps at which tasks end; every other task is shaded.
      wide: draw a larger picture.
    """
    values, bounds = _values(curves)
    log = values.min() > 0 and values.max() / values.min() > 1000
    last = max(*(curve.x[-1] for curve in curves), *(ends or [0]))
    first = 0.0 if ends else min(curve.x[0] for curve in curves)
    with _settings(key):
        axes = _axes(*((480, 240) if wide else (340, 190)), xlabel)
        axes.set_xlim(first if first < last else 0.0, last)
        _limit(axes, "y", values, bounds, log=log)
        canvas.shade(axes, ends or [], gid="task", clip_on=False)
        for curve in curves:
            _draw_line(axes, curve)
        return _drawing(axes, curves)


def scatter(points: list[Curve], *, key: str, xlabel: str = "") -> Drawing:
    """Points with vertical intervals; x is logarithmic if it differs by 10 times.

    Args:
      points: of different numbers, n = 1, x above 0.
      key: differs between the charts of a page.
      xlabel: of the x axis.
    """
    xs = np.concatenate([point.x for point in points])
    with _settings(key):
        axes = _axes(480, 240, xlabel)
        _limit(axes, "x", xs, [], log=xs.max() / xs.min() > 10)
        _limit(axes, "y", *_values(points), log=False)
        for number, _, x, mean, low, high in points:
            ends = np.clip([low, high], *axes.get_ylim())
            if np.isfinite(ends).all():
                axes.plot([x, x], ends, clip_on=False, gid=f"bar {number}")
            style = canvas.style_of(number) | {"linestyle": "", "markersize": 8}
            axes.plot(x, mean, **style, clip_on=False, gid=f"mark {number}")
        return _drawing(axes, points)


def swatch(number: int) -> Drawing:
    """Draw a piece of a line with its marker."""
    gap = np.full(3, np.nan)
    line = Curve(number, "", np.array([0, 11, 22]), np.full(3, 5.0), gap, gap)
    with _settings(f"swatch {number}"):
        axes = _figure_of(22, 10).add_axes((0, 0, 1, 1), frame_on=False)
        axes.set(xlim=(0, 22), ylim=(0, 10), xticks=[], yticks=[])
        _draw_line(axes, line, marks=[1], size=6.4)
        return _drawing(axes, [])


def _draw_line(axes, curve, *, marks=None, size=5.2) -> None:
    """Draw band, line and markers.

    Args:
      marks: where markers are; by default a few, evenly spread.
      size: of a marker.
    """
    number, _, x, mean, low, high = curve
    finite = np.flatnonzero(np.isfinite(mean))
    if marks is None:
        # Each line has them at other places, so that lines that coincide are seen.
        every = max(1, len(finite) // _MARKS)
        marks = finite[number % 5 * every // 5 :: every].tolist()
    style = canvas.style_of(number) | {"clip_on": False, "markersize": size}
    style["linestyle"] = canvas.dashes(number)
    axes.plot(x, mean, **style, markevery=marks, gid=f"line {number}")
    if np.isfinite(low).any():
        low, high = (np.clip(end, *axes.get_ylim()) for end in (low, high))
        axes.fill_between(x, low, high, lw=0, clip_on=False, gid=f"band {number}")


# Axes


def _settings(key):
    """Set matplotlib up for a chart, in a context."""
    import matplotlib

    settings = {"svg.fonttype": "none", "svg.hashsalt": key, "path.simplify": False}
    return matplotlib.rc_context(settings)


def _figure_of(width, height):
    # At 72 dots per inch a point is a unit of the picture.
    return canvas.figure_of(width / 72, height / 72, dpi=72, frameon=False)


def _axes(width, height, xlabel):
    """Axes with numbers, and with lines behind the curves."""
    inner = (width - _LEFT - _RIGHT) / width, (height - _BELOW - _ABOVE) / height
    place = (_LEFT / width, _BELOW / height, *inner)
    axes = _figure_of(width, height).add_axes(place, frame_on=False)
    axes.tick_params(length=0, pad=5)
    axes.locator_params(nbins=6)
    axes.grid(axis="y", clip_on=False)
    axes.set_xlabel(xlabel)
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_gid("axis")
    return axes


def _values(curves):
    """Collect all means, and all ends of bands, that are finite."""
    means = np.concatenate([curve.mean for curve in curves])
    bounds = np.concatenate([end for curve in curves for end in curve[4:]])
    return means[np.isfinite(means)], bounds[np.isfinite(bounds)]


def _limit(axes, which, values, bounds, *, log) -> None:
    """End axis "x" or "y" so that all values fit, and bands as far as they keep room.

    Args:
      values: f[n], n >= 1.
      bounds: f[m], of the bands.
      log: make the axis logarithmic.
    """
    low, high = float(np.min(values)), float(np.max(values))
    if log:
        canvas.logarithmic(axes, which, (1,) if high / low > 1000 else (1, 2, 5))
        axes.set(**{f"{which}lim": (low / 1.15, high * 1.15)})
        return
    room = (high - low) or abs(high) * 0.1 or 1.0
    if len(bounds):
        low = max(low - room, min(low, float(np.min(bounds))))
        high = min(high + room, max(high, float(np.max(bounds))))
    room = 0.04 * (high - low) or room
    axes.set(**{f"{which}lim": (low - room, high + room)})


def _drawing(axes, curves) -> Drawing:
    """Finish the figure of these axes; the curves name its parts."""
    text, names = io.StringIO(), {str(curve.number): curve.name for curve in curves}
    axes.figure.savefig(text, format="svg", metadata={"Date": None})
    content = _kept(ElementTree.fromstring(text.getvalue()), names)
    markup = "".join(ElementTree.tostring(part, encoding="unicode") for part in content)
    width, height = map(round, axes.figure.bbox.size)
    ends = np.array([axes.get_xlim(), axes.get_ylim()])
    corners = axes.transData.transform(ends.T).T
    corners[1] = height - corners[1]
    x = Axis(*corners[0], *ends[0], int(axes.get_xscale() == "log"))
    y = Axis(*corners[1], *ends[1], int(axes.get_yscale() == "log"))
    return Drawing(width, height, markup, x, y)


# Markup


def _kept(node, names) -> list[ElementTree.Element]:
    """Keep what a page needs of an element: shapes, texts, and groups of `_KINDS`.

    Args:
      node: of matplotlib's SVG; the id of a group is a kind, and a curve's number.
      names: number -> title of all that is of this curve.
    """
    tag = node.tag.rpartition("}")[2]
    children = [kept for child in node for kept in _kept(child, names)]
    kind, _, number = node.get("id", "").partition(" ")
    if tag not in _SHAPES and kind not in _KINDS or tag == "defs" and not children:
        return children
    element = ElementTree.Element(tag, _attributes(node))
    if kind in _KINDS:
        colour = f" c{int(number) % len(canvas.COLOURS)}" if number else ""
        element.attrib = {"class": kind + colour}
    if number in names:
        ElementTree.SubElement(element, "title").text = names[number]
    element.text = node.text if tag == "text" else None
    element.extend(children)
    return [element]


def _attributes(node) -> dict[str, str]:
    """Attributes of a shape or a text, with two decimals, in few letters."""
    style = re.findall(r"([a-z-]+): ([^;]+)", node.get("style", ""))
    kept = {}
    for key, value in (*node.items(), *style):
        name = key.rpartition("}")[2]
        if name in _ATTRIBUTES:
            value = re.sub(r"\d+\.\d+", lambda x: f"{round(float(x[0]), 2):g}", value)
            kept[name] = re.sub(r"\s*([A-Za-z])\s*", r"\1", value).strip()
    return kept
