"""Pictures of one run: accuracy matrices, training curves, an overview."""

import io

import numpy as np

from jaxcl.evals.plots import canvas

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


def accuracy_matrix(matrix, path, *, title, task_names=None) -> None:
    """Draw a heat map of accuracies.

    Args:
      matrix: f[T, T] in [0, 1], [i, j] = accuracy on task j after task i, nan
        (hatched) where not measured.
      path: of the picture.
      task_names: T names of the columns; long ones are shortened, and many are left
        out. By default numbers from 1.
    """
    matrix = np.asarray(matrix, np.float64)
    side = float(np.clip(2.0 + 0.62 * len(matrix), 4.0, 14.0))
    figure = canvas.make_figure(side + 1.2, side)
    _heat_map(figure, figure.add_subplot(), matrix, title, task_names)
    canvas.save_figure(figure, path)


def _heat_range(matrix) -> tuple[float, float]:
    """Choose the lowest and highest percentage of the colours.

    Round the measured range to whole tens, at least 20 wide: from 0 to 100 the
    accuracies of one run would often have one colour.
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
    few = size <= canvas.MOST_NAMES
    numbers = names = [str(n) for n in canvas.choose_axis_numbers(size)]
    places = [n - 1 for n in canvas.choose_axis_numbers(size)]
    if few and task_names is not None:
        names = [canvas.shorten_name(name) for name in task_names]
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
    """Draw a run in one figure: its accuracies and its loss.

    Args:
      results: of results.json.
      rows: of metrics.jsonl.
      path: of a PNG, SVG or PDF; None: none is written.

    Returns:
      The matplotlib figure, which a notebook shows.
    """
    names = [name for name in results["matrices"] if name.endswith("_incremental")]
    figure = canvas.make_figure(9, 3.8)
    panels = figure.subplots(1, 2 if names else 1, squeeze=False)[0]
    if names:
        matrix = np.array(results["matrices"][names[0]], np.float64)
        if len(matrix) > 1:
            title = write_title(names[0])
            _heat_map(figure, panels[0], matrix, title, results["task_names"])
        else:
            _before_and_after(panels[0], results, names)
    points = [(r["step"], r["loss"]) for r in rows if r.get("loss") is not None]
    panels[-1].set(xlabel="optimiser step", ylabel="loss", title="training")
    line = np.array(points).reshape(-1, 2).T
    panels[-1].plot(*line, lw=1, color=canvas.COLOURS[0])
    panels[-1].grid(color="0.9")
    panels[-1].xaxis.set_major_locator(canvas.whole_number_ticks())
    figure.tight_layout()
    if path is not None:
        canvas.save_figure(figure, path)
    # Jupyter knows figures by itself only once pyplot was imported.
    figure._repr_png_ = lambda: _png_bytes(figure)
    return figure


def _png_bytes(figure) -> bytes:
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
    both = {"untrained": (-0.2, before), "trained": (0.2, after)}
    for label, number in canvas.number_styles([*both]).items():
        shift, values = both[label]
        style = {"label": label, "color": canvas.choose_style(number)["color"]}
        bars = axes.bar(places + shift, 100 * np.array(values), 0.38, **style)
        axes.bar_label(bars, fmt="%.1f")
    axes.set_xticks(places, [canvas.shorten_name(name) for name in names])
    axes.set(ylabel="accuracy (%)", ylim=(0, 110))
    axes.legend(frameon=False, loc="upper left", ncols=2)


def curves(rows, path, *, keys=("loss", "lr")) -> None:
    """Draw training curves against the step, tasks divided by dotted lines.

    Args:
      rows: rows of metrics.jsonl, see `rows.read_rows`.
      keys: what to draw, one panel each; rows without a key are passed over.
    """
    figure = canvas.make_figure(8, 2.6 * len(keys))
    panels = figure.subplots(len(keys), 1, sharex=True, squeeze=False)[:, 0]
    for number, (key, axes) in enumerate(zip(keys, panels, strict=True)):
        axes.set_ylabel({"lr": "learning rate"}.get(key, key))
        axes.margins(x=0.02)
        axes.xaxis.set_major_locator(canvas.whole_number_ticks())
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
        colour = canvas.COLOURS[number % len(canvas.COLOURS)]
        # Few rows may leave a task with a single one, of which no line is seen.
        marker = "." if len(points) < 100 else None
        parts = (np.split(x, starts) for x in (steps, values))
        for of_task in zip(*parts, strict=True):
            axes.plot(*of_task, color=colour, linewidth=1, marker=marker)
        axes.grid(color="0.9")
    panels[-1].set_xlabel("optimiser step (dotted: a task begins)")
    figure.align_ylabels(panels)
    canvas.save_figure(figure, path)
