"""Draw pictures of runs as PNG, SVG or PDF, without matplotlib's global state."""

import contextlib
import functools
import io
import itertools
import os
import re
import zlib
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple, ParamSpec, TypeVar

import numpy as np
from absl import logging
from etils import epath

from jaxcl.errors import Refused

_P = ParamSpec("_P")
_R = TypeVar("_R")

# Figures, formats, colours, axes

# Colours that differ from each other with any colour vision, and from white.
COLOURS = ("#0b5cad", "#a83200", "#00805c", "#b04a86", "#a98600", "#2f9bd0", "#3d4248")
DASHES = ("-", "--", ":")  # with the colours again
MARKERS = ("o", "s", "^", "D", "v")
MOST_NAMES = 20  # more classes or tasks than this are not written out
MOST_NAMED_TASKS = 9  # above the axes; each takes at least this part of the width
LONGEST = 24  # letters of a name
FORMATS = ("png", "svg", "pdf")
_UNDATED = {"svg": {"Date": None}, "pdf": {"CreationDate": None}}


def _in_default_style(draw: Callable[_P, _R]) -> Callable[_P, _R]:
    """Make a function draw in matplotlib's own style, not a matplotlibrc's."""

    @functools.wraps(draw)
    def drawn(*args: _P.args, **kwargs: _P.kwargs) -> _R:
        from matplotlib import style

        with style.context("default"):
            return draw(*args, **kwargs)

    return drawn


def to_rgb(image: np.ndarray) -> np.ndarray:
    """Return three channels of an image u8[H, W, C] to draw: the first ones.

    Of fewer than three, all show the first.
    """
    if image.shape[-1] >= 3:
        return image[..., :3]
    return np.broadcast_to(image[..., :1], (*image.shape[:2], 3))


@contextlib.contextmanager
def optional(name: str) -> Iterator[None]:
    """Enter a context that turns an error into a warning: results need no picture.

    Args:
      name: name of the picture, for the warning.
    """
    try:
        yield
    except Exception as error:
        words = " ".join(f"{type(error).__name__}: {error}".split())
        logging.warning("%s could not be drawn: %.300s", name, words)
        logging.debug("%s", name, exc_info=True)


def make_figure(width, height):
    """Make an empty figure of a size in inches."""
    from matplotlib.figure import Figure  # half a second, for runs that draw alone

    return Figure(figsize=(width, height))


def save_figure(figure, path, *, dpi: int = 120) -> None:
    """Write a figure in the format that the path ends in, one of `FORMATS`.

    The same figure gives the same bytes. Raises Refused for another ending.
    """
    kind = read_format(path)
    # Else an SVG has the time of day and random names, a PDF the time.
    options = {} if kind == "png" else {"metadata": _UNDATED[kind]}
    picture = io.BytesIO()
    from matplotlib import rc_context

    with rc_context({"svg.hashsalt": "jaxcl", "pdf.fonttype": 42}):
        figure.savefig(picture, format=kind, dpi=dpi, bbox_inches="tight", **options)
    epath.Path(path).write_bytes(picture.getvalue())


def read_format(path) -> str:
    """Read the format in the name of a picture, before anything is computed."""
    kind = os.path.splitext(os.fspath(path))[1].lower().removeprefix(".")
    if kind not in FORMATS:
        raise Refused(f"{os.fspath(path)}: a picture must end in one of {FORMATS}")
    return kind


def choose_style(number: int) -> dict:
    """Return the colour and marker of a curve, class or run; 35 differ."""
    marker = MARKERS[number % len(MARKERS)]
    return {"color": COLOURS[number % len(COLOURS)], "marker": marker}


def number_styles(names: Sequence[str]) -> dict[str, int]:
    """Number the style of each name, see `choose_style`; no number comes twice.

    The letters of a name choose its number, so that a method looks alike in most
    pictures. If another name of the picture has the number, the next free one serves.

    Examples:
      >>> from jaxcl import plots
      >>> plots.number_styles(["ER-ACE"])["ER-ACE"]
      1
      >>> plots.number_styles(["er_ace"])["er_ace"]
      1
    """
    numbers: dict[str, int] = {}
    for name in names:
        letters = "".join(re.findall(r"[a-z0-9]", name.lower()))
        first = zlib.crc32(letters.encode()) % len(COLOURS)
        turn = [*range(first, len(COLOURS)), *range(first)]
        used, others = {*numbers.values()}, itertools.count(len(COLOURS))
        free = (n for n in itertools.chain(turn, others) if n not in used)
        numbers[name] = next(free)
    return numbers


def shade_tasks(axes, task_ends) -> None:
    """Shade every other task; `task_ends` has the last step of each."""
    ends = itertools.pairwise([0, *np.asarray(task_ends).tolist()])
    for first, last in itertools.islice(ends, 1, None, 2):
        axes.axvspan(first, last, color="0.93", lw=0, zorder=0)


def name_tasks(axes, task_ends) -> None:
    """Write the number of each task above the axes, if none is too short."""
    ends = [0, *np.asarray(task_ends).tolist()]
    if min(np.diff(ends), default=0) * MOST_NAMED_TASKS < ends[-1]:
        return
    place = axes.get_xaxis_transform()  # x in steps, y as a share of the axes
    for number, (first, last) in enumerate(itertools.pairwise(ends)):
        name, middle = f"task {number + 1}", (first + last) / 2
        axes.text(middle, 1.02, name, transform=place, ha="center", color="0.3")


def show_legend(axes, **options) -> None:
    """Show the legend to the right of the axes."""
    place = {"loc": "center left", "bbox_to_anchor": (1.0, 0.5), "frameon": False}
    axes.legend(**place, **options)


def escape_dollars(text: str) -> str:
    """Escape dollars, which would begin and end maths in matplotlib."""
    return text.replace("$", r"\$")


def shorten_name(name) -> str:
    """Shorten a name for a legend: `LONGEST` letters at most, and no maths."""
    name = str(name)
    name = name if len(name) <= LONGEST else name[: LONGEST - 3] + "..."
    return escape_dollars(name)


def whole_number_ticks():
    """Make a locator that places the ticks of an axis at integers."""
    from matplotlib import ticker

    return ticker.MaxNLocator(integer=True, min_n_ticks=1)


def choose_axis_numbers(count: int) -> list[int]:
    """Choose which of 1..count an axis shows: all, or 1, 5, 10, ... of many."""
    numbers = range(1, count + 1)
    return [n for n in numbers if count <= MOST_NAMES or n == 1 or n % 5 == 0]


def draw_mean_and_band(axes, number, x, mean, half, name) -> None:
    """Draw a curve, with a band of `half` to each side unless it is None."""
    style = choose_style(number)
    if half is not None:
        colour = style["color"]
        axes.fill_between(x, mean - half, mean + half, color=colour, alpha=0.2, lw=0)
    axes.plot(x, mean, markersize=4, label=name, **style)


# Over the steps of a stream of tasks


_STEPS = "step (one batch)"


@_in_default_style
def anytime(
    runs, path, task_ends, *, title="", ylabel="accuracy (%)", scale=100.0
) -> None:
    """Draw accuracy over a stream of tasks, of several methods.

    Args:
      runs: name -> (steps i[n], mean f[n] in [0, 1], spread f[n], the half of the
        band's height, or None for no band); a nan leaves a gap.
      path: path of the picture.
      task_ends: i[T], the last step of each task; every other task is shaded.
      scale: factor of the drawn values; 1.0 for values that are not shares.
    """
    figure, axes = _make_stream(task_ends, title, ylabel)
    for name, number in number_styles([*runs]).items():
        steps, mean, spread = runs[name]
        mean = scale * np.asarray(mean, np.float64)
        half = None if spread is None else scale * np.asarray(spread, np.float64)
        draw_mean_and_band(axes, number, steps, mean, half, shorten_name(name))
    show_legend(axes)
    save_figure(figure, path)


class LifePoint(NamedTuple):
    """One update in the life of an encoder; accuracies are shares."""

    reference: float  # accuracy of the reference on the images that judged
    accuracy: float  # of the new encoder on them
    low: float  # the interval of `accuracy`, for the same images of the reference
    high: float
    limit: float | None  # most that may be lost
    accepted: bool


@_in_default_style
def life(points: dict[int, LifePoint], path, *, title="") -> None:
    """Draw the accuracy of an encoder over its updates, beside that of its reference.

    Args:
      points: number of the update -> what was measured.
      path: path of the picture.
      title: above it.
    """
    figure = make_figure(7.0, 3.4)
    axes, numbers = figure.subplots(), np.array(list(points))
    rows = list(points.values())
    first, current = (
        100 * np.array([getattr(x, k) for x in rows]) for k in LifePoint._fields[:2]
    )
    edges = 100 * np.array([[x.accuracy - x.low, x.high - x.accuracy] for x in rows]).T
    limits = [
        np.nan if x.limit is None else 100 * (x.reference - x.limit) for x in rows
    ]
    axes.step(numbers, first, where="mid", color=COLOURS[6], lw=1, label="reference")
    line = {"where": "mid", "color": COLOURS[1], "ls": "--", "lw": 1}
    axes.step(numbers, limits, label="limit", **line)
    for accepted, number, face in ((True, 0, COLOURS[0]), (False, 1, "white")):
        mask = np.array([x.accepted is accepted for x in rows])
        if mask.any():
            style = {"fmt": MARKERS[0], "color": COLOURS[number], "mfc": face}
            word = "accepted" if accepted else "rolled back"
            axes.errorbar(
                numbers[mask],
                current[mask],
                edges[:, mask],
                label=word,
                capsize=2,
                **style,
            )
    axes.set(xlabel="update", ylabel="accuracy (%)", title=title)
    axes.xaxis.set_major_locator(whole_number_ticks())
    show_legend(axes)
    save_figure(figure, path)


@_in_default_style
def per_step(runs, path, task_ends, *, title="", ylabel="drift", xlabel=_STEPS) -> None:
    """Draw a measure of several methods at each step of a stream of tasks.

    Args:
      runs: name -> (steps i[n], values f[n]).
      path: path of the picture.
      task_ends: i[T], the last step of each task; every other task is shaded.
      xlabel: unit of the x axis, if not steps.
    """
    figure, axes = _make_stream(task_ends, title, ylabel, xlabel)
    for name, number in number_styles([*runs]).items():
        steps, values = runs[name]
        # Few points may be a single one, of which no line is seen.
        marker = "." if len(steps) < 100 else None
        (line,) = axes.plot(steps, values, linewidth=1, marker=marker)
        dashes = DASHES[number // len(COLOURS) % len(DASHES)]  # 21 lines differ
        line.set(label=shorten_name(name), linestyle=dashes)
        line.set_color(choose_style(number)["color"])
    axes.set_ylim(bottom=0)
    show_legend(axes)
    save_figure(figure, path)


def _make_stream(task_ends, title, ylabel, xlabel=_STEPS):
    """Make a figure over the steps of a stream, with tasks shaded and numbered."""
    figure = make_figure(7.5, 4.2)
    axes = figure.add_subplot()
    shade_tasks(axes, task_ends)
    name_tasks(axes, task_ends)
    axes.set_xlim(0, 1.02 * [0, *task_ends][-1])  # the last markers are whole
    axes.set(xlabel=xlabel, ylabel=ylabel)
    axes.set_title(title, pad=20)  # above the names of the tasks
    axes.xaxis.set_major_locator(whole_number_ticks())
    axes.grid(color="0.85")
    return figure, axes


# Over the classes of a set


MOST_TIMES = 6  # curves of one thing at several times


@_in_default_style
def class_shares(steps, shares, path, *, title="", time="step {}") -> None:
    """Draw how the classes of a set shift over time, as Fig. 10 of DUEL.

    Classes stand in the order of their shares at the first time, the largest first.

    Args:
      steps: i[n], n >= 1, increasing.
      shares: f[n, C] in [0, 1], of each class at each of these steps. At most
        `MOST_TIMES` steps are drawn, evenly spread, with the first and the last.
      path: path of the picture.
      time: format of one of `steps`.
    """
    from matplotlib import colormaps

    shares = 100 * np.asarray(shares, np.float64)
    times, size = shares.shape
    figure, axes, groups, unit = _classes(np.argsort(-shares[0], kind="stable"))
    axes.axhline(100 / size, color="0.5", linestyle=":", linewidth=1)
    chosen = np.linspace(0, times - 1, min(times, MOST_TIMES)).round().astype(int)
    # From dark to light, except for the palest of the colours.
    colours = colormaps["viridis"](np.linspace(0.0, 0.9, len(chosen)))
    for number, (label, colour) in enumerate(zip(chosen, colours, strict=True)):
        style = choose_style(number) | {"color": colour, "markersize": 4}
        values = [shares[label, group].mean() for group in groups]
        axes.plot(range(len(groups)), values, label=time.format(steps[label]), **style)
    axes.set_ylim(bottom=0)
    xlabel = f"{unit}, by its share at {time.format(steps[0])}"
    axes.set(title=title, xlabel=xlabel, ylabel="share of the labelled rows (%)")
    show_legend(axes, title="dotted: balanced")
    save_figure(figure, path)


@_in_default_style
def class_spread(runs, path, *, title="") -> None:
    """Draw each class's variance and its similarity to other classes (DUEL, Fig. 9).

    Classes stand in the order of the first run's similarities, the smallest first.

    Args:
      runs: name -> (variances f[C], similarities f[C]), nan where a class has none.
      path: path of the picture.
    """
    first = next(iter(runs.values()))
    order = np.argsort(np.asarray(first[1], np.float64), kind="stable")
    figure, axes, groups, unit = _classes(order)
    for number, (name, values) in enumerate(runs.items()):
        for kind, line, each in zip(("intra", "inter"), ":-", values, strict=True):
            each = np.asarray(each, np.float64)
            style = choose_style(number) | {"linestyle": line, "markersize": 4}
            style["label"] = f"{shorten_name(name)}: {kind}"
            axes.plot(range(len(groups)), [each[g].mean() for g in groups], **style)
    ylabel = "intra-class variance, inter-class similarity"
    axes.set(title=title, xlabel=f"{unit}, by its similarity to others", ylabel=ylabel)
    show_legend(axes)
    save_figure(figure, path)


def _classes(order):
    """Make a figure over classes that stand in the order i[C].

    Returns:
      Figure and axes; the classes in each place, and the label of the x axis.
    """
    figure = make_figure(7.5, 4.2)
    axes = figure.add_subplot()
    axes.grid(color="0.9")
    groups = np.array_split(order, min(len(order), MOST_NAMES))
    if len(groups) == len(order):
        axes.set_xticks(range(len(groups)), [str(label) for label in order])
        return figure, axes, groups, "class"
    begins = np.cumsum([1] + [len(group) for group in groups[:-1]])
    axes.set_xticks(range(len(groups)), [str(begin) for begin in begins], rotation=45)
    return figure, axes, groups, f"class (mean of {len(groups[-1])} or more at a time)"


# Examples: points in the plane, images beside their neighbours


@_in_default_style
def scatter(points, labels, path, *, title, class_names=None) -> None:
    """Draw points in the plane, coloured by class.

    Args:
      points: f[N, 2], in any unit.
      labels: i[N].
      class_names: names of the classes, drawn if they are few; a class without a name
        is drawn as its number.
    """
    points, labels = np.asarray(points), np.asarray(labels)
    present, names = np.unique(labels), class_names or ()
    figure = make_figure(7, 6)
    axes = figure.add_subplot()
    axes.set(title=title, xticks=[], yticks=[])
    axes.set(xlabel="dimension 1 (no unit)", ylabel="dimension 2 (no unit)")
    dots = {"s": 14, "linewidths": 0.3, "edgecolors": "0.3"}
    if len(present) > MOST_NAMES:
        # No colours tell so many classes apart: those with near numbers look alike.
        picture = axes.scatter(*points.T, c=labels, cmap="viridis", **dots)
        figure.colorbar(picture, ax=axes, label="number of the class", shrink=0.8)
    else:
        for number, label in enumerate(present):
            name = names[label] if 0 <= label < len(names) else label
            style = choose_style(number) | {"label": shorten_name(name)}
            axes.scatter(*points[labels == label].T, **style, **dots)
        show_legend(axes, markerscale=2)
    save_figure(figure, path)


@_in_default_style
def neighbours(queries, nearest, similarities, path, *, title) -> None:
    """Draw images, and beside each its nearest neighbours under their similarity.

    Args:
      queries: u8[Q, H, W, C].
      nearest: u8[Q, K, H, W, C].
      similarities: f[Q, K], written above each neighbour.
      path: path of the picture.
    """
    rows, columns = similarities.shape
    figure = make_figure(1.0 + 1.1 * (columns + 1), 0.6 + 1.25 * rows)
    figure.suptitle(title)
    panels = figure.subplots(rows, columns + 1, squeeze=False)
    for row, (query, others) in enumerate(zip(queries, nearest, strict=True)):
        for column, image in enumerate([query, *others]):
            axes = panels[row, column]
            axes.imshow(to_rgb(image))
            axes.set(xticks=[], yticks=[])
            if column:
                axes.set_title(f"{similarities[row, column - 1]:.2f}", fontsize=11)
            else:
                axes.spines[:].set(linewidth=3, edgecolor=COLOURS[0])
    panels[0, 0].set_title("image", fontsize=11)
    figure.tight_layout()
    save_figure(figure, path)


# Methods side by side, over tasks


@_in_default_style
def comparison(named_curves, path, *, title, ylabel="average accuracy (%)") -> None:
    """Draw the average accuracy after each task, of several methods.

    Args:
      named_curves: name -> f[seeds, T] or f[T] in [0, 1]; the band is one
        standard deviation over the seeds.
    """
    figure = make_figure(6.5, 4.2)
    axes = figure.add_subplot()
    drawn = _draw_methods(axes, named_curves)
    axes.set_xticks(choose_axis_numbers(max(len(method.means) for method in drawn)))
    axes.set(title=title, xlabel="tasks learned", ylabel=ylabel)
    axes.grid(color="0.9")
    several = any(method.seeds > 1 for method in drawn)
    show_legend(axes, title="mean, band: 1 std" if several else None)
    save_figure(figure, path)


class _DrawnMethod(NamedTuple):
    """The curve of a method over its tasks."""

    name: str
    style: int  # see `choose_style`
    means: np.ndarray  # f64[T], percent
    seeds: int


def _draw_methods(axes, named_curves, tasks: int = 1) -> list[_DrawnMethod]:
    """Draw the mean of each method over its seeds, with a band of one deviation.

    Args:
      named_curves: name -> f[seeds, T] or f[T] in [0, 1].
      tasks: tasks over which a single value is drawn as a horizontal line.
    """
    drawn = []
    for name, number in number_styles([*named_curves]).items():
        runs = 100 * np.atleast_2d(np.asarray(named_curves[name], np.float64))
        if runs.shape[1] == 1:
            runs = np.repeat(runs, tasks, axis=1)
        seeds, size = runs.shape
        half = runs.std(0, ddof=1) if seeds > 1 else None
        label = shorten_name(name) + (f" ({seeds} seeds)" if seeds > 1 else "")
        steps, means = np.arange(1, size + 1), runs.mean(0)
        draw_mean_and_band(axes, number, steps, means, half, label)
        drawn.append(_DrawnMethod(name, number, means, seeds))
    return drawn


@_in_default_style
def summary(named_curves, strips, path, *, title, chance=None) -> None:
    """Draw a strip of images for each task, and accuracies over tasks below.

    Args:
      named_curves: name -> f[seeds, T] or f[T] in [0, 1], on the tasks so far; a single
        value is drawn as a horizontal line. The band is one standard deviation over the
        seeds.
      strips: images u8[H, W, C] of the first tasks; up to eight of each task are drawn.
      path: path of the picture.
      title: title of the picture.
      chance: accuracy in [0, 1] of a guess, at which the axis begins; None: 0.
    """
    figure = make_figure(8.5, 5.8)
    tasks = max(np.atleast_2d(curve).shape[1] for curve in named_curves.values())
    grid = figure.add_gridspec(
        2, len(strips), height_ratios=(1, 3), hspace=0.05, wspace=0.08
    )
    for number, images in enumerate(strips):
        _draw_strip(figure.add_subplot(grid[0, number]), images, f"task {number + 1}")
    axes = figure.add_subplot(grid[1, :])
    drawn = _draw_methods(axes, named_curves, tasks)
    low = 0.0 if chance is None else 100 * chance
    axes.set(ylim=(low - 2, 101), xlim=(0.9, tasks + 0.1))
    _label_ends(axes, drawn, low)
    axes.set_xticks(choose_axis_numbers(tasks))
    axes.set(xlabel="tasks learned", ylabel="accuracy on the tasks so far (%)")
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    axes.grid(color="0.9")
    figure.suptitle(title, y=0.96)
    save_figure(figure, path, dpi=200)


def _draw_strip(axes, images, name) -> None:
    """Draw up to eight images in two rows, beneath the name of their task."""
    pictures = [to_rgb(image) for image in images[:8]]
    columns = -(-len(pictures) // 2)
    side = pictures[0].shape[0]
    sheet = np.full((2 * side, columns * side, 3), 255, np.uint8)
    for number, image in enumerate(pictures):
        top, left = number // columns * side, number % columns * side
        sheet[top : top + side, left : left + side] = image
    axes.imshow(sheet)
    axes.set_title(name, fontsize=10)
    axes.set_axis_off()


def _label_ends(axes, drawn, low) -> None:
    """Write the name and last value of each line at its end, without overlap."""
    gap = (101 - low) / 14
    height = -np.inf
    for method in sorted(drawn, key=lambda method: (method.means[-1], method.name)):
        height = max(method.means[-1], height + gap)
        name = shorten_name(method.name)
        axes.annotate(
            f"{name}  {method.means[-1]:.0f} %",
            (1.0, height),
            xycoords=("axes fraction", "data"),
            xytext=(8, 0),
            textcoords="offset points",
            va="center",
            color=choose_style(method.style)["color"],
            fontsize=11,
        )


# One run: accuracy matrices, training curves, an overview


_IN_WORDS = {
    "knn": "Nearest neighbours",
    "linear": "Linear probe",
    "logistic": "Logistic regression",
    "svm": "Support vector machine",
}


def write_title(name: str) -> str:
    """Write the name of a matrix as a title: knn/all is "Nearest neighbours, all"."""
    first, *more = name.replace("_", " ").split("/")
    first = _IN_WORDS.get(first, first[:1].upper() + first[1:])
    return ", ".join([first, *more])


@_in_default_style
def accuracy_matrix(matrix, path, *, title, task_names=None) -> None:
    """Draw a heat map of accuracies.

    Args:
      matrix: f[T, T] in [0, 1], [i, j] = accuracy on task j after task i, nan
        (hatched) where not measured.
      path: path of the picture.
      task_names: T names of the columns; long ones are shortened, and many are left
        out. By default numbers from 1.
    """
    matrix = np.asarray(matrix, np.float64)
    side = float(np.clip(2.0 + 0.62 * len(matrix), 4.0, 14.0))
    figure = make_figure(side + 1.2, side)
    _heat_map(figure, figure.add_subplot(), matrix, title, task_names)
    save_figure(figure, path)


def _heat_range(matrix) -> tuple[float, float]:
    """Choose the percentages of the lowest and the highest colour.

    The measured range is rounded to whole tens, at least 20 wide. With 0 to 100 the
    accuracies of a run would often have one colour.
    """
    measured = 100 * matrix[np.isfinite(matrix)]
    if not measured.size:
        return 0.0, 100.0
    # A rounding error is no ten more.
    low = 10 * np.floor(measured.min() / 10 + 1e-9)
    high = 10 * np.ceil(measured.max() / 10 - 1e-9)
    low = min(low, max(high - 20, 0))
    return float(low), float(max(high, low + 20))


def _heat_map(figure, axes, matrix, title, task_names) -> None:
    """Draw accuracies f64[T, T] into axes, see `accuracy_matrix`."""
    size = len(matrix)
    # Seen where the picture has no value, such as of tasks that are yet to come.
    axes.patch.set(facecolor="white", edgecolor="0.8", hatch="//")
    low, high = _heat_range(matrix)
    picture = axes.imshow(100 * matrix, vmin=low, vmax=high, cmap="cividis")
    axes.set(title=title, xlabel="accuracy on task", ylabel="after task")
    few = size <= MOST_NAMES
    numbers = names = [str(n) for n in choose_axis_numbers(size)]
    places = [n - 1 for n in choose_axis_numbers(size)]
    if few and task_names is not None:
        names = [shorten_name(name) for name in task_names]
    style = {"rotation": 45, "ha": "right"} if max(map(len, names)) > 3 else {}
    axes.set_xticks(places, names, **style)
    axes.set_yticks(places, numbers)
    for i, j in np.argwhere(np.isfinite(matrix)) if few else ():
        value = 100 * matrix[i, j]
        axes.text(
            j,
            i,
            f"{value:.1f}",
            ha="center",
            va="center",
            # At 46 % of the way both have the same contrast.
            color="white" if value - low < 0.46 * (high - low) else "black",
            fontsize=min(10.0, 150.0 / size),
        )
    figure.colorbar(picture, ax=axes, label="accuracy (%)", shrink=0.8)


@_in_default_style
def overview(results, rows, path=None):
    """Draw a run in one figure: its accuracies and its loss.

    Args:
      results: content of results.json.
      rows: rows of metrics.jsonl.
      path: path of a PNG, SVG or PDF; None: no file is written.

    Returns:
      The matplotlib figure, which a notebook shows.
    """
    names = [name for name in results["matrices"] if name.endswith("_incremental")]
    figure = make_figure(9, 3.8)
    panels = figure.subplots(1, 2 if names else 1, squeeze=False)[0]
    if names:
        matrix = np.array(results["matrices"][names[0]], np.float64)
        if len(matrix) > 1:
            title = write_title(names[0])
            _heat_map(figure, panels[0], matrix, title, results["task_names"])
        else:
            _before_and_after(panels[0], results, names)
    points = [(r["step"], r["loss"]) for r in rows if r.get("loss") is not None]
    panels[-1].set(xlabel=_STEPS, ylabel="loss", title="training")
    line = np.array(points).reshape(-1, 2).T
    panels[-1].plot(*line, lw=1, color=COLOURS[0])
    panels[-1].grid(color="0.9")
    panels[-1].xaxis.set_major_locator(whole_number_ticks())
    figure.tight_layout()
    if path is not None:
        save_figure(figure, path)
    # Jupyter knows figures by itself only once pyplot was imported.
    figure._repr_png_ = lambda: to_png(figure)
    return figure


def to_png(figure) -> bytes:
    """Write a figure as the bytes of a PNG file."""
    data = io.BytesIO()
    figure.savefig(data, format="png", dpi=80, bbox_inches="tight")
    return data.getvalue()


def _before_and_after(axes, results, names) -> None:
    """Draw the accuracies of one task, before and after training."""
    places = np.arange(len(names))
    after = [np.array(results["matrices"][name], float)[0, 0] for name in names]
    first = [results.get("untrained", {}).get(name, [None])[0] for name in names]
    before = [np.nan if value is None else value for value in first]
    placed = {"untrained": (-0.2, before), "trained": (0.2, after)}
    for label, number in number_styles([*placed]).items():
        shift, values = placed[label]
        style = {"label": label, "color": choose_style(number)["color"]}
        bars = axes.bar(places + shift, 100 * np.array(values), 0.38, **style)
        axes.bar_label(bars, fmt="%.1f")
    axes.set_xticks(places, [shorten_name(name) for name in names])
    axes.set(ylabel="accuracy (%)", ylim=(0, 110))
    axes.legend(frameon=False, loc="upper left", ncols=2)


@_in_default_style
def curves(rows, path, *, keys=("loss", "lr")) -> None:
    """Draw training curves against the step, tasks divided by dotted lines.

    Args:
      rows: rows of metrics.jsonl, see `log_file.read_rows`.
      keys: metrics to draw, one panel each; rows without a metric are passed over.
    """
    figure = make_figure(8, 2.6 * len(keys))
    panels = figure.subplots(len(keys), 1, sharex=True, squeeze=False)[:, 0]
    for number, (key, axes) in enumerate(zip(keys, panels, strict=True)):
        axes.set_ylabel({"lr": "learning rate"}.get(key, key))
        axes.margins(x=0.02)
        axes.xaxis.set_major_locator(whole_number_ticks())
        points = [
            (r["step"], r["task"], r[key]) for r in rows if r.get(key) is not None
        ]
        if not points:
            axes.text(0.5, 0.5, "not logged", ha="center", transform=axes.transAxes)
            axes.set_yticks([])
            continue
        steps, tasks, values = map(np.asarray, zip(*points, strict=True))
        starts = 1 + np.flatnonzero(np.diff(tasks))
        for border in steps[starts]:
            axes.axvline(border, color="0.6", linestyle=":", linewidth=1)
        colour = COLOURS[number % len(COLOURS)]
        # Few rows may leave a task with a single one, of which no line is seen.
        marker = "." if len(points) < 100 else None
        by_task = (np.split(x, starts) for x in (steps, values))
        for of_task in zip(*by_task, strict=True):
            axes.plot(*of_task, color=colour, linewidth=1, marker=marker)
        axes.grid(color="0.9")
    panels[-1].set_xlabel(f"{_STEPS}; dotted: a task begins")
    figure.align_ylabels(panels)
    save_figure(figure, path)
