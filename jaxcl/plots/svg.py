"""Charts of a page as SVG, which the page's style colours for light and dark screens.

matplotlib places and writes everything. Of what it writes shapes and texts stay, with
classes in place of its colours and fonts: `c0` ... is the colour of a curve, `line`,
`band`, `mark`, `bar`, `axis` and `task` say what it is. The texts are numbers and names
of axes; what comes from files is not drawn, but an attribute, or a title.
"""

import io
import re
from typing import NamedTuple
from xml.etree import ElementTree

import numpy as np

from jaxcl import plots

DASHES = ("-", "--", ":")  # with the colours again
_MARKS = 6  # markers on a line
_LEFT, _RIGHT, _BELOW, _ABOVE = 48, 16, 34, 14  # margins, for the numbers of the axes


class Line(NamedTuple):
    """A curve with its band."""

    number: int  # of its colour and marker
    name: str
    x: np.ndarray  # f[n], increasing
    mean: np.ndarray  # f[n], nan: a gap
    low: np.ndarray  # f[n], nan: no band
    high: np.ndarray  # f[n]


class Point(NamedTuple):
    """A point with its interval."""

    number: int  # of its colour and marker
    title: str  # shown under the pointer
    x: float
    y: float
    low: float | None  # None: no interval
    high: float | None


class Axis(NamedTuple):
    """Two positions of an axis in the chart, and the numbers there."""

    start: float
    end: float
    low: float
    high: float
    log: bool

    def text(self) -> str:
        """The axis as the page's script reads it."""
        return " ".join(f"{float(value):.10g}" for value in self)


class Drawing(NamedTuple):
    """A chart, in points: a text is 10 high."""

    width: int
    height: int
    content: str  # of an svg element
    x: Axis
    y: Axis


# Lines and points


def lines(
    curves: list[Line],
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
    values = np.concatenate([line.mean for line in curves])
    bounds = np.concatenate([np.append(line.low, line.high) for line in curves])
    values, bounds = (x[np.isfinite(x)] for x in (values, bounds))
    log = values.min() > 0 and values.max() / values.min() > 1000
    last = max(*(line.x[-1] for line in curves), *(ends or [0]))
    first = 0.0 if ends else min(line.x[0] for line in curves)
    with _settings(key):
        axes = _axes(*((480, 240) if wide else (340, 190)), xlabel)
        _limit(axes, "x", (first if first < last else 0.0, last), log=False)
        _limit(axes, "y", _room(values, bounds, log=log), log=log)
        plots.shade(axes, ends or [], gid="task", clip_on=False)
        attributes = {"task": {"class": "task"}}
        for line in curves:
            attributes |= _draw_line(axes, line)
        return _drawing(axes, attributes)


def scatter(points: list[Point], *, key: str, xlabel: str = "") -> Drawing:
    """Points with vertical intervals; x is logarithmic if it differs by 10 times.

    Args:
      points: one or more, of different numbers, with x above 0.
      key: differs between the charts of a page.
      xlabel: of the x axis.
    """
    xs = np.array([point.x for point in points])
    bounds = [end for point in points for end in point[4:] if end is not None]
    log = xs.max() / xs.min() > 10
    attributes = {}
    with _settings(key):
        axes = _axes(480, 240, xlabel)
        _limit(axes, "x", _room(xs, [], log=log), log=log)
        _limit(axes, "y", _room([point.y for point in points], bounds), log=False)
        for number, title, x, y, low, high in points:
            bar, mark = f"bar{number}", f"mark{number}"
            if low is not None:
                ends = np.clip([low, high], *axes.get_ylim())
                axes.plot([x, x], ends, clip_on=False, gid=bar)
            style = plots.style_of(number) | {"linestyle": "", "markersize": 8}
            axes.plot(x, y, **style, clip_on=False, gid=mark)
            attributes[bar] = {"class": f"bar {_colour(number)}"}
            attributes[mark] = {"class": f"mark {_colour(number)}", "title": title}
        return _drawing(axes, attributes)


def swatch(number: int) -> Drawing:
    """A piece of a line with its marker."""
    gap = np.full(3, np.nan)
    line = Line(number, "", np.array([0, 11, 22]), np.full(3, 5.0), gap, gap)
    with _settings(f"swatch {number}"):
        axes = _figure_of(22, 10).add_axes((0, 0, 1, 1), frame_on=False)
        axes.set(xlim=(0, 22), ylim=(0, 10), xticks=[], yticks=[])
        return _drawing(axes, _draw_line(axes, line, marks=[1], size=6.4))


def _colour(number) -> str:
    return f"c{number % len(plots.COLOURS)}"


def _draw_line(axes, line, *, marks=None, size=5.2) -> dict:
    """Draw band, line and markers; what `_markup` writes of them.

    Args:
      marks: where markers are; by default a few, evenly spread.
      size: of a marker.
    """
    number, finite = line.number, np.flatnonzero(np.isfinite(line.mean))
    if marks is None:
        # Each line has them at other places, so that lines that coincide are seen.
        shift = number % 5 / 5 if len(finite) > 5 * _MARKS else 0
        spaced = (np.arange(_MARKS) + shift) * (len(finite) - 1) / (_MARKS - 1)
        spaced = spaced[spaced <= len(finite) - 1]
        marks = np.unique(finite[spaced.astype(int)]).tolist()
    style = plots.style_of(number) | {"clip_on": False, "markersize": size}
    style["linestyle"] = DASHES[number // len(plots.COLOURS) % len(DASHES)]
    axes.plot(line.x, line.mean, **style, markevery=marks, gid=f"line{number}")
    attributes = {"class": f"line {_colour(number)}", "data-name": line.name}
    banded = np.isfinite(line.low) & np.isfinite(line.high)
    if not banded.any():
        return {f"line{number}": attributes}
    low, high = (np.clip(end, *axes.get_ylim()) for end in (line.low, line.high))
    area = {"where": banded, "lw": 0, "clip_on": False, "gid": f"band{number}"}
    axes.fill_between(line.x, low, high, **area)
    band = {"class": f"band {_colour(number)}"}
    return {f"line{number}": attributes, f"band{number}": band}


# Axes


def _settings(key):
    """What matplotlib goes by while a chart is made."""
    import matplotlib

    settings = {"svg.fonttype": "none", "svg.hashsalt": key, "path.simplify": False}
    return matplotlib.rc_context(settings)


def _figure_of(width, height):
    # At 72 dots per inch a point is a unit of the picture.
    figure = plots.figure_of(width / 72, height / 72)
    figure.set(dpi=72, frameon=False)
    return figure


def _axes(width, height, xlabel):
    """Axes with numbers, and with lines behind the curves."""
    inner = (width - _LEFT - _RIGHT) / width, (height - _BELOW - _ABOVE) / height
    place = (_LEFT / width, _BELOW / height, *inner)
    axes = _figure_of(width, height).add_axes(place, frame_on=False)
    axes.tick_params(length=0)
    axes.locator_params(nbins=6)
    axes.grid(axis="y", clip_on=False)
    axes.set_xlabel(xlabel)
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_gid("axis")
    return axes


def _room(values, bounds, *, log=False) -> tuple[float, float]:
    """Ends of an axis: it holds all values, and bands as far as values keep room."""
    low, high = float(np.min(values)), float(np.max(values))
    if log:
        return low / 1.15, high * 1.15
    room = (high - low) or abs(high) * 0.1 or 1.0
    if len(bounds):
        low = max(low - room, min(low, float(np.min(bounds))))
        high = min(high + room, max(high, float(np.max(bounds))))
    room = 0.04 * (high - low) or room
    return low - room, high + room


def _limit(axes, which, ends, *, log) -> None:
    """Give an axis its ends, and ticks if it is logarithmic."""
    if log:
        axes.set(**{f"{which}scale": "log"})
        parts = (1,) if ends[1] / ends[0] > 1000 else (1, 2, 5)
        plots.logarithmic(getattr(axes, f"{which}axis"), parts)
    axes.set(**{f"{which}lim": ends})


def _drawing(axes, attributes) -> Drawing:
    """The figure of these axes; attributes as of `_markup`."""
    width, height = (round(72 * inches) for inches in axes.figure.get_size_inches())
    ends = np.array([axes.get_xlim(), axes.get_ylim()])
    corners = axes.transData.transform(ends.T).T
    corners[1] = height - corners[1]
    x = Axis(*corners[0], *ends[0], axes.get_xscale() == "log")
    y = Axis(*corners[1], *ends[1], axes.get_yscale() == "log")
    attributes |= {"axis": {"class": "axis"}}
    return Drawing(width, height, _markup(axes.figure, attributes), x, y)


# Markup


def _markup(figure, attributes: dict[str, dict[str, str]]) -> str:
    """What is in the svg element of a figure, in as few letters as show the same.

    Args:
      attributes: gid of an artist -> attributes of its element; "title" is a text that
        is shown under the pointer.
    """
    text = io.StringIO()
    figure.savefig(text, format="svg", metadata={"Date": None})
    root = ElementTree.fromstring(text.getvalue())
    return "".join(
        ElementTree.tostring(element, encoding="unicode")
        for element in _kept(root, attributes)
    )


def _kept(node, attributes) -> list[ElementTree.Element]:
    """What a page needs of an element: shapes, texts, and groups with attributes."""
    tag = node.tag.rpartition("}")[2]
    if tag in ("metadata", "style"):
        return []
    children = [kept for child in node for kept in _kept(child, attributes)]
    own = dict(attributes.get(node.get("id"), {}))
    title = own.pop("title", None)
    if tag in ("svg", "g", "defs") and not (own and children):
        return [_bare("defs", {}, children)] if tag == "defs" and children else children
    if title is not None:
        children.insert(0, _bare("title", {}, []))
        children[0].text = title
    element = _bare(tag, own or _shape(node), children)
    element.text = node.text if tag == "text" else None
    return [element]


def _bare(tag, attributes, children):
    element = ElementTree.Element(tag, attributes)
    element.extend(children)
    return element


def _shape(node) -> dict[str, str]:
    """Attributes of a shape or a text, with two decimals."""
    shape = {key: node.get(key) for key in ("id", "x", "y", "d") if node.get(key)}
    for key in shape.keys() & {"x", "y", "d"}:
        shape[key] = re.sub(r"-?\d+\.\d+", _two_decimals, shape[key])
        shape[key] = re.sub(r"\s*([A-Za-z])\s*", r"\1", shape[key]).strip()
    link = node.get("{http://www.w3.org/1999/xlink}href")
    kept = ("text-anchor", "stroke-dasharray")
    styles = re.findall(r"([a-z-]+): ([^;]+)", node.get("style", ""))
    return (
        ({"href": link} if link else {})
        | shape
        | {key: value for key, value in styles if key in kept}
    )


def _two_decimals(number) -> str:
    return f"{float(number[0]):.2f}".rstrip("0").rstrip(".")
