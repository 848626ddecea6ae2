"""Pictures of a run, as PNG, SVG or PDF; matplotlib without its global state."""

import contextlib
import contextvars
import io
import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Literal, NamedTuple

import numpy as np
from etils import epath

# Told apart with any colour vision, and from white: a curve, class or run has the same
# colour and marker in all pictures.
COLOURS = ("#0b5cad", "#a83200", "#00805c", "#b04a86", "#a98600", "#2f9bd0", "#3d4248")
# The same on dark screens.
DARK_COLOURS = (
    "#7db4ee",
    "#ee8a4e",
    "#3cc296",
    "#e094c0",
    "#e6cc50",
    "#a9dcf8",
    "#f2f2f2",
)
DASHES = ("-", "--", ":")  # with the colours again
MARKERS = ("o", "s", "^", "D", "v")
MOST_NAMES = 20  # more classes or tasks than this are not written out
LONGEST = 24  # letters of a name
MOST_TIMES = 6  # curves of one thing at several times
FORMATS = ("png", "svg", "pdf")
# What `save` writes in place of the format that a name ends in; (): that one.
_FORMATS: contextvars.ContextVar[tuple[str, ...]] = contextvars.ContextVar(
    "_FORMATS", default=()
)
_UNDATED = {"svg": {"Date": None}, "pdf": {"CreationDate": None}}
_IN_WORDS = {
    "knn": "Nearest neighbours",
    "linear": "Linear probe",
    "logistic": "Logistic regression",
    "svm": "Support vector machine",
}
_STEPS = "optimiser step (shaded: every other task)"


def figure_of(width, height, **options):
    """An empty figure, with its size in inches."""
    from matplotlib.figure import Figure  # half a second, for runs that draw alone

    return Figure(figsize=(width, height), **options)


def _whole_numbers():
    from matplotlib import ticker

    return ticker.MaxNLocator(integer=True, min_n_ticks=1)


@contextlib.contextmanager
def written_as(formats: Sequence[str]) -> Iterator[None]:
    """Context in which `save` writes each picture in these formats.

    So a run writes all its pictures as its config says, and nobody who draws one need
    know of it.

    Args:
      formats: of `FORMATS`; a picture NAME.png is then NAME.FORMAT, for each.
    """
    token = _FORMATS.set(tuple(formats))
    try:
        yield
    finally:
        _FORMATS.reset(token)


def save(figure, path) -> None:
    """Write a figure in the format that the path ends in, one of `FORMATS`.

    Within `written_as` it is written in the formats there, under the same name. The
    same figure gives the same bytes. Raises ValueError for another ending.
    """
    own = format_of(path)
    for kind in _FORMATS.get() or (own,):
        name = os.fspath(path)
        _write(figure, name if kind == own else name[: -len(own)] + kind, kind)


def _write(figure, path, kind) -> None:
    # Else an SVG has the time of day and random names, a PDF the time.
    options = {} if kind == "png" else {"metadata": _UNDATED[kind]}
    picture = io.BytesIO()
    from matplotlib import rc_context

    with rc_context({"svg.hashsalt": "jaxcl", "pdf.fonttype": 42}):
        figure.savefig(picture, format=kind, dpi=120, bbox_inches="tight", **options)
    epath.Path(path).write_bytes(picture.getvalue())


def format_of(path) -> str:
    """What the name of a picture ends in, checked before anything is computed."""
    kind = os.path.splitext(os.fspath(path))[1].lower().removeprefix(".")
    if kind not in FORMATS:
        raise ValueError(f"{os.fspath(path)}: a picture must end in one of {FORMATS}")
    return kind


def words(name: str) -> str:
    """The name of a matrix as a title says it: knn/all is "Nearest neighbours, all"."""
    first, *more = name.replace("_", " ").split("/")
    first = _IN_WORDS.get(first, first[:1].upper() + first[1:])
    return ", ".join([first, *more])


def style_of(number: int) -> dict:
    """Colour and marker of a curve, class or run; 35 differ."""
    marker = MARKERS[number % len(MARKERS)]
    return {"color": COLOURS[number % len(COLOURS)], "marker": marker}


def dashes(number: int) -> str:
    """Line style of a curve without markers; with the colours 21 differ."""
    return DASHES[number // len(COLOURS) % len(DASHES)]


def shade(axes, task_ends, **options) -> None:
    """Shade every other task; `task_ends` has the last step of each."""
    ends = [0, *np.asarray(task_ends).tolist()]
    for first, last in list(zip(ends, ends[1:], strict=False))[1::2]:
        axes.axvspan(first, last, color="0.93", lw=0, zorder=0, **options)


def logarithmic(axes, which, parts) -> None:
    """Make axis "x" or "y" logarithmic, with ticks at `parts` times powers of 10."""
    from matplotlib import ticker

    axes.set(**{f"{which}scale": "log"})
    axis = getattr(axes, f"{which}axis")
    axis.set_major_locator(ticker.LogLocator(subs=parts))
    axis.set_major_formatter(ticker.FormatStrFormatter("%g"))
    axis.set_minor_locator(ticker.NullLocator())


def legend(axes, *entries, **options) -> None:
    """Show the legend to the right of the axes."""
    place = {"loc": "center left", "bbox_to_anchor": (1.0, 0.5), "frameon": False}
    axes.legend(*entries, **place, **options)


def escaped(text: str) -> str:
    """The text as matplotlib writes it: dollars would begin and end maths."""
    return text.replace("$", r"\$")


def _short(name) -> str:
    name = str(name)
    name = name if len(name) <= LONGEST else name[: LONGEST - 3] + "..."
    return escaped(name)


def _written(count: int) -> list[int]:
    """Which of 1..count to write at an axis: all, or 1, 5, 10, ..."""
    return [
        n for n in range(1, count + 1) if count <= MOST_NAMES or n in (1, n // 5 * 5)
    ]


def accuracy_matrix(matrix, path, *, title, task_names=None) -> None:
    """Draw a heat map of accuracies.

    Args:
      matrix: f[T, T] in [0, 1], [i, j] = accuracy on task j after task i, nan
        (hatched) where not measured.
      path: of the picture.
      task_names: T names of the columns, shortened where long and left out where
        many; by default numbers from 1.
    """
    matrix = np.asarray(matrix, np.float64)
    side = float(np.clip(2.0 + 0.62 * len(matrix), 4.0, 14.0))
    figure = figure_of(side + 1.2, side)
    _heat_map(figure, figure.add_subplot(), matrix, title, task_names)
    save(figure, path)


def heat_range(matrix) -> tuple[float, float]:
    """The least and the most percent of the colours for accuracies in [0, 1].

    Whole tens around what was measured, 20 or more apart: from 0 to 100 the accuracies
    of one run would often have one colour.
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
    low, high = heat_range(matrix)
    picture = axes.imshow(100 * matrix, vmin=low, vmax=high, cmap="cividis")
    axes.set(title=title, xlabel="accuracy on task", ylabel="after task")
    few = size <= MOST_NAMES
    numbers = names = [str(n) for n in _written(size)]
    places = [n - 1 for n in _written(size)]
    if few and task_names is not None:
        names = [_short(name) for name in task_names]
    turned = {"rotation": 45, "ha": "right"} if max(map(len, names)) > 3 else {}
    axes.set_xticks(places, names, **turned)
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


def overview(results, rows, path=None):
    """Draw a run in one figure: what it came to, and its loss.

    Args:
      results: of results.json.
      rows: of metrics.jsonl.
      path: of a PNG, SVG or PDF; None: none is written.

    Returns:
      The matplotlib figure, which a notebook shows.
    """
    names = [name for name in results["matrices"] if name.endswith("_incremental")]
    figure = figure_of(11, 4.4)
    panels = figure.subplots(1, 2 if names else 1, squeeze=False)[0]
    if names:
        matrix = np.array(results["matrices"][names[0]], np.float64)
        if len(matrix) > 1:
            title = words(names[0])
            _heat_map(figure, panels[0], matrix, title, results["task_names"])
        else:
            _before_and_after(panels[0], results, names)
    points = [(r["step"], r["loss"]) for r in rows if r.get("loss") is not None]
    panels[-1].set(xlabel="step", ylabel="loss", title="training")
    panels[-1].plot(*np.array(points).reshape(-1, 2).T, lw=1)
    panels[-1].xaxis.set_major_locator(_whole_numbers())
    figure.tight_layout()
    if path is not None:
        save(figure, path)
    # Jupyter knows figures by itself only once pyplot was imported.
    figure._repr_png_ = lambda: _png(figure)
    return figure


def _png(figure) -> bytes:
    """A figure as the bytes of a PNG file."""
    data = io.BytesIO()
    figure.savefig(data, format="png", dpi=80, bbox_inches="tight")
    return data.getvalue()


def _before_and_after(axes, results, names) -> None:
    """Bars of the accuracies of one task, of the untrained network beside the run's."""
    places = np.arange(len(names))
    after = [np.array(results["matrices"][name], float)[0, 0] for name in names]
    first = [results.get("untrained", {}).get(name, [None])[0] for name in names]
    before = [np.nan if value is None else value for value in first]
    for shift, values, label in ((-0.2, before, "untrained"), (0.2, after, "trained")):
        bars = axes.bar(places + shift, 100 * np.array(values), 0.38, label=label)
        axes.bar_label(bars, fmt="%.1f")
    axes.set_xticks(places, [_short(name) for name in names])
    axes.set(ylabel="accuracy (%)", ylim=(0, 110))
    axes.legend(frameon=False, loc="upper left", ncols=2)


def curves(rows, path, *, keys=("loss", "lr")) -> None:
    """Draw training curves against the step, tasks divided by dotted lines.

    Args:
      rows: rows of metrics.jsonl, see `record.read_rows`.
      keys: what to draw, one panel each; rows without a key are passed over.
    """
    figure = figure_of(8, 2.6 * len(keys))
    panels = figure.subplots(len(keys), 1, sharex=True, squeeze=False)[:, 0]
    for number, (key, axes) in enumerate(zip(keys, panels, strict=True)):
        axes.set_ylabel({"lr": "learning rate"}.get(key, key))
        axes.margins(x=0.02)
        axes.xaxis.set_major_locator(_whole_numbers())
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
        parts = (np.split(x, starts) for x in (steps, values))
        for of_task in zip(*parts, strict=True):
            axes.plot(*of_task, color=colour, linewidth=1, marker=marker)
        axes.grid(color="0.9")
    panels[-1].set_xlabel("optimiser step (dotted: a task begins)")
    figure.align_ylabels(panels)
    save(figure, path)


def scatter(points, labels, path, *, title, class_names=None) -> None:
    """Draw points in the plane, coloured by class.

    Args:
      points: f[N, 2], of no particular unit.
      labels: i[N].
      class_names: their names, written out for few classes; a class without one
        goes by its number.
    """
    points, labels = np.asarray(points), np.asarray(labels)
    present, names = np.unique(labels), class_names or ()
    figure = figure_of(7, 6)
    axes = figure.add_subplot()
    axes.set(title=title, xticks=[], yticks=[])
    axes.set(xlabel="dimension 1 (no unit)", ylabel="dimension 2 (no unit)")
    dots = {"s": 14, "linewidths": 0.3, "edgecolors": "0.3"}
    picture = _dots(axes, points, labels, present, names, **dots)
    if picture is not None:
        figure.colorbar(picture, ax=axes, label="number of the class", shrink=0.8)
    else:
        legend(axes, markerscale=2)
    save(figure, path)


def _dots(axes, points, labels, present, names, **dots):
    """Points coloured by class; what a colour bar needs where classes are many.

    Args:
      present: i[P], all classes of the figure, in order.
    """
    if len(present) > MOST_NAMES:
        # No colours tell so many classes apart: those with near numbers look alike.
        dots |= {"cmap": "viridis", "vmin": present[0], "vmax": present[-1]}
        return axes.scatter(*points.T, c=labels, **dots)
    for number, label in enumerate(present):
        name = names[label] if 0 <= label < len(names) else label
        mine = points[labels == label].T
        axes.scatter(*mine, label=_short(name), **style_of(number), **dots)


def marked(points, labels, pale, marks, path, *, title, class_names=None) -> None:
    """Draw the same points in panels side by side, others marked in each.

    Args:
      points: f[N, 2], of no particular unit.
      labels: i[N].
      pale: bool[N], points that all panels show, in pale colours of their classes.
      marks: title of a panel -> bool[N], points that it shows large, with a dark edge.
      path: of the picture.
      class_names: as of `scatter`.
    """
    points, labels = np.asarray(points), np.asarray(labels)
    present, names = np.unique(labels), class_names or ()
    figure = figure_of(6 * len(marks), 6)
    figure.suptitle(title, y=0.98)
    panels = figure.subplots(1, len(marks), sharex=True, sharey=True, squeeze=False)[0]
    strong = {"s": 34, "linewidths": 1.0, "edgecolors": "black"}
    for (name, chosen), axes in zip(marks.items(), panels, strict=True):
        axes.set(title=name, xticks=[], yticks=[], xlabel="dimension 1 (no unit)")
        for shown, dots in (
            (np.asarray(pale), {"s": 10, "linewidths": 0, "alpha": 0.3}),
            (np.asarray(chosen), strong),
        ):
            picture = _dots(axes, points[shown], labels[shown], present, names, **dots)
    panels[0].set_ylabel("dimension 2 (no unit)")
    if picture is not None:
        figure.colorbar(picture, ax=panels, label="number of the class", shrink=0.8)
    else:
        handles, texts = axes.get_legend_handles_labels()
        last = len(present)  # the names are there twice: pale, then marked
        legend(axes, handles[last:], texts[last:])
    save(figure, path)


def neighbours(queries, found, similarities, path, *, title) -> None:
    """Draw images, and beside each its nearest neighbours under their similarity.

    Args:
      queries: u8[Q, H, W, C], C is 1 or 3.
      found: u8[Q, K, H, W, C].
      similarities: f[Q, K], written above each.
      path: of the picture.
    """
    rows, columns = similarities.shape
    figure = figure_of(1.0 + 1.1 * (columns + 1), 0.6 + 1.25 * rows)
    figure.suptitle(title)
    panels = figure.subplots(rows, columns + 1, squeeze=False)
    for row, (query, others) in enumerate(zip(queries, found, strict=True)):
        for column, image in enumerate([query, *others]):
            axes = panels[row, column]
            axes.imshow(image.squeeze(), cmap="gray", vmin=0, vmax=255)
            axes.set(xticks=[], yticks=[])
            if column:
                axes.set_title(f"{similarities[row, column - 1]:.2f}", fontsize=8)
            else:
                axes.spines[:].set(linewidth=3, edgecolor=COLOURS[0])
    panels[0, 0].set_title("image", fontsize=8)
    figure.tight_layout()
    save(figure, path)


def comparison(named_curves, path, *, title, ylabel="average accuracy (%)") -> None:
    """Draw the average accuracy after each task, of several methods.

    Args:
      named_curves: name -> f[seeds, T] or f[T] in [0, 1]; the band is one
        standard deviation over the seeds.
    """
    figure = figure_of(6.5, 4.2)
    axes = figure.add_subplot()
    note, longest = None, 1
    for number, (name, runs) in enumerate(named_curves.items()):
        runs = 100 * np.atleast_2d(np.asarray(runs, np.float64))
        seeds, size = runs.shape
        tasks, name = np.arange(1, size + 1), _short(name)
        if seeds > 1:
            name = f"{name} ({seeds} seeds)"
            note = "mean, band: 1 std"
        half = runs.std(0, ddof=1) if seeds > 1 else None
        _mean_and_band(axes, number, tasks, runs.mean(0), half, name)
        longest = max(longest, size)
    axes.set_xticks(_written(longest))
    axes.set(title=title, xlabel="tasks learned", ylabel=ylabel)
    axes.grid(color="0.9")
    legend(axes, title=note)
    save(figure, path)


def _mean_and_band(axes, number, x, mean, half, name) -> None:
    """Draw a curve, and a band that is `half` as high to each side, or None."""
    style = style_of(number)
    if half is not None:
        colour = style["color"]
        axes.fill_between(x, mean - half, mean + half, color=colour, alpha=0.2, lw=0)
    axes.plot(x, mean, markersize=4, label=name, **style)


def anytime(
    runs, path, task_ends, *, title="", ylabel="accuracy (%)", scale=100.0
) -> None:
    """Draw accuracy over a stream of tasks, of several methods.

    Args:
      runs: name -> (steps i[n], mean f[n] in [0, 1], spread f[n], the half of the
        band's height, or None for no band); a nan leaves a gap.
      path: of the picture.
      task_ends: i[T], the last step of each task; every other task is shaded.
      scale: what is drawn of 1; 1.0 for what is no share.
    """
    figure, axes = _stream(task_ends)
    for number, (name, (steps, mean, spread)) in enumerate(runs.items()):
        mean = scale * np.asarray(mean, np.float64)
        half = None if spread is None else scale * np.asarray(spread, np.float64)
        _mean_and_band(axes, number, steps, mean, half, _short(name))
    _finish(figure, axes, path, title=title, ylabel=ylabel)


def per_step(runs, path, task_ends, *, title="", ylabel="drift", xlabel=_STEPS) -> None:
    """Draw what was measured of each step of a stream of tasks, of several methods.

    Args:
      runs: name -> (steps i[n], values f[n]).
      path: of the picture.
      task_ends: i[T], the last step of each task; every other task is shaded.
      xlabel: what is counted, where it is not steps.
    """
    figure, axes = _stream(task_ends)
    for number, (name, (steps, values)) in enumerate(runs.items()):
        # Few points may be a single one, of which no line is seen.
        marker = "." if len(steps) < 100 else None
        style = {"color": style_of(number)["color"], "linestyle": dashes(number)}
        label = _short(name)
        axes.plot(steps, values, linewidth=1, marker=marker, label=label, **style)
    axes.set_ylim(bottom=0)
    _finish(figure, axes, path, title=title, ylabel=ylabel, xlabel=xlabel)


class Costs(NamedTuple):
    """What a method reaches at several costs."""

    cost: Sequence[float]  # FLOPs, n of them
    mean: Sequence[float]  # n accuracies in percent
    half: Sequence[float]  # n halves of their intervals, nan where there is none
    kind: Literal["front", "control", "other"]  # how it is shown


def cost_and_accuracy(
    curves: Mapping[str, Costs], front, path, *, budgets, title="", floor=None
) -> None:
    """Draw accuracy against the FLOPs of training, with the Pareto front.

    Methods on the front are large, the others small, controls open.

    Args:
      curves: name -> what it reaches.
      front: (cost, mean) of each point on the front, cheapest first.
      path: of the picture.
      budgets: FLOPs, of which each has a dotted line.
      title: of the picture.
      floor: accuracy of the untrained network in percent, None: not known.
    """
    figure = figure_of(8, 5.2)
    axes = figure.add_subplot()
    logarithmic(axes, "x", (1, 2, 5))
    axes.grid(color="0.9")
    costs = [*budgets, *(cost for own in curves.values() for cost in own.cost)]
    ends = min(costs) / 2e9, max(costs) / 0.7e9
    for number, (name, own) in enumerate(curves.items()):
        style = style_of(number) | {"zorder": 4 if own.kind == "front" else 3}
        style |= {"markersize": 8 if own.kind == "front" else 4, "linewidth": 0.8}
        style |= {"mfc": "white", "markersize": 6} if own.kind == "control" else {}
        cost, label = np.array(own.cost) / 1e9, _short(name)
        axes.errorbar(cost, own.mean, own.half, label=label, elinewidth=0.8, **style)
    if front:
        cost, mean = np.array(front, np.float64).T * [[1e-9], [1]]
        steps = [*cost, ends[1]], [*mean, mean[-1]]
        axes.step(*steps, where="post", label="front", color="0.25", zorder=2)
    for budget in budgets:
        axes.axvline(budget / 1e9, color="0.5", linestyle=":", linewidth=1)
    if floor is not None:
        axes.axhline(floor, color="0.5", linestyle="--", linewidth=1, label="untrained")
    axes.set(title=title, xlabel="GFLOP of training", ylabel="accuracy (%)", xlim=ends)
    words = "bars: 95 % interval\ndotted: a budget"
    columns = 1 + (len(curves) > MOST_NAMES)
    legend(axes, title=words, fontsize=8, title_fontsize=8, ncols=columns)
    save(figure, path)


def class_shares(steps, shares, path, *, title="", time="step {}") -> None:
    """Draw how the classes of a set shift over time, as Fig. 10 of DUEL.

    Classes stand in the order of their shares at the first time, the largest first.

    Args:
      steps: i[n], n >= 1, increasing.
      shares: f[n, C] in [0, 1], of each class at each of these steps. Of more than
        `MOST_TIMES` so many are drawn, evenly spread, the first and last among them.
      path: of the picture.
      time: how one of `steps` is written.
    """
    from matplotlib import colormaps

    shares = 100 * np.asarray(shares, np.float64)
    times, size = shares.shape
    figure, axes, groups, what = _classes(np.argsort(-shares[0], kind="stable"))
    axes.axhline(100 / size, color="0.5", linestyle=":", linewidth=1)
    chosen = np.linspace(0, times - 1, min(times, MOST_TIMES)).round().astype(int)
    # From dark to light, but for the palest of the colours.
    colours = colormaps["viridis"](np.linspace(0.0, 0.9, len(chosen)))
    for number, (at, colour) in enumerate(zip(chosen, colours, strict=True)):
        style = style_of(number) | {"color": colour, "markersize": 4}
        values = [shares[at, group].mean() for group in groups]
        axes.plot(range(len(groups)), values, label=time.format(steps[at]), **style)
    axes.set_ylim(bottom=0)
    xlabel = f"{what}, by its share at {time.format(steps[0])}"
    axes.set(title=title, xlabel=xlabel, ylabel="share of the labelled rows (%)")
    legend(axes, title="dotted: balanced")
    save(figure, path)


def class_spread(runs, path, *, title="") -> None:
    """Draw variance within each class and its similarity to others (DUEL, Fig. 9).

    Classes stand in the order of the first run's similarities, the smallest first.

    Args:
      runs: name -> (variances f[C], similarities f[C]), nan where a class has none.
      path: of the picture.
    """
    first = next(iter(runs.values()))
    order = np.argsort(np.asarray(first[1], np.float64), kind="stable")
    figure, axes, groups, what = _classes(order)
    for number, (name, values) in enumerate(runs.items()):
        for kind, line, each in zip(("intra", "inter"), ":-", values, strict=True):
            each = np.asarray(each, np.float64)
            style = style_of(number) | {"linestyle": line, "markersize": 4}
            style["label"] = f"{_short(name)}: {kind}"
            axes.plot(range(len(groups)), [each[g].mean() for g in groups], **style)
    ylabel = "intra-class variance, inter-class similarity"
    axes.set(title=title, xlabel=f"{what}, by its similarity to others", ylabel=ylabel)
    legend(axes)
    save(figure, path)


def arrivals(streams, path) -> None:
    """Draw which class comes when: a dot for every image of a stream.

    Args:
      streams: title -> `stream.Arrivals`, one panel each, two side by side. Domains
        have colours of their own; of images without a label none is drawn.
      path: of the picture.
    """
    lines = -(-len(streams) // 2)
    figure = figure_of(9, 2.2 * lines, layout="constrained")
    panels = figure.subplots(lines, 2, squeeze=False).ravel()
    for axes, (title, shown) in zip(panels, streams.items(), strict=False):
        label, domain = np.asarray(shown.label), np.asarray(shown.domain)
        shade(axes, shown.task_ends)
        for number, value in enumerate(np.unique(domain)):
            places = np.flatnonzero((domain == value) & (label >= 0))
            colour = COLOURS[number % len(COLOURS)]
            axes.plot(places, label[places], "|", color=colour, markersize=4)
        axes.set(title=title, xlim=(0, len(label)), ylabel="class")
        axes.yaxis.set_major_locator(_whole_numbers())
        axes.set_xlabel("images met (shaded: every other task)")
    for axes in panels[len(streams) :]:
        axes.remove()
    save(figure, path)


def _classes(order):
    """A figure over classes that stand in the order i[C].

    Returns:
      Figure, axes, the classes of each place, one or many, and what a place is.
    """
    figure = figure_of(7.5, 4.2)
    axes = figure.add_subplot()
    axes.grid(color="0.9")
    groups = np.array_split(order, min(len(order), MOST_NAMES))
    if len(groups) == len(order):
        axes.set_xticks(range(len(groups)), [str(label) for label in order])
        return figure, axes, groups, "class"
    begins = np.cumsum([1] + [len(group) for group in groups[:-1]])
    axes.set_xticks(range(len(groups)), [str(begin) for begin in begins], rotation=45)
    return figure, axes, groups, f"class (mean of {len(groups[-1])} or more at a time)"


def _stream(task_ends):
    """A figure over the steps of a stream, every other task shaded."""
    figure = figure_of(7.5, 4.2)
    axes = figure.add_subplot()
    shade(axes, task_ends)
    axes.set_xlim(0, [0, *task_ends][-1])
    return figure, axes


def _finish(figure, axes, path, *, title, ylabel, xlabel=_STEPS):
    axes.set(title=title, xlabel=xlabel, ylabel=ylabel)
    axes.xaxis.set_major_locator(_whole_numbers())
    axes.grid(color="0.85")
    legend(axes)
    save(figure, path)
