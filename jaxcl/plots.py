"""Pictures of a run, as PNG; matplotlib without global state."""

import io

import matplotlib
import numpy as np
from etils import epath
from matplotlib.figure import Figure

# Okabe and Ito's colours: told apart with any colour vision.
COLOURS = (
    "#0072B2", "#E69F00", "#009E73", "#D55E00", "#CC79A7", "#56B4E9", "#F0E442",
    "#000000",
)  # fmt: skip
MOST_NAMES = 20  # more classes or tasks than this are not written out


def _save(figure: Figure, path) -> None:
    picture = io.BytesIO()
    figure.savefig(picture, format="png", dpi=120, bbox_inches="tight")
    epath.Path(path).write_bytes(picture.getvalue())


def accuracy_matrix(matrix, path, *, title, task_names=None) -> None:
    """Heat map of accuracies.

    Args:
      matrix: f[T, T] in [0, 1], [i, j] = accuracy on task j after task i, nan
        (left blank) where not measured.
      path: of the PNG.
      task_names: T names of the columns; by default numbers from 1.
    """
    matrix = np.asarray(matrix, np.float64)
    size = len(matrix)
    side = float(np.clip(2.0 + 0.62 * size, 4.0, 14.0))
    figure = Figure(figsize=(side + 1.2, side))
    axes = figure.add_subplot()
    picture = axes.imshow(100 * matrix, vmin=0, vmax=100, cmap="cividis")
    axes.set(title=title, xlabel="accuracy on task", ylabel="after task")
    numbers = [str(i + 1) for i in range(size)]
    names = numbers if task_names is None else task_names
    if size <= MOST_NAMES:
        turned = {"rotation": 45, "ha": "right"} if max(map(len, names)) > 3 else {}
        axes.set_xticks(range(size), names, **turned)
        axes.set_yticks(range(size), numbers)
        for i, j in np.argwhere(np.isfinite(matrix)):
            value = 100 * matrix[i, j]
            colour = "white" if value < 55 else "black"
            axes.text(
                j, i, f"{value:.1f}", ha="center", va="center", color=colour,
                fontsize=min(10.0, 110.0 / size),
            )  # fmt: skip
    figure.colorbar(picture, ax=axes, label="accuracy (%)", shrink=0.8)
    _save(figure, path)


def curves(rows, path, *, keys=("loss", "lr")) -> None:
    """Training curves against the step, tasks divided by dotted lines.

    Args:
      rows: rows of metrics.jsonl, see `record.read_rows`.
      keys: what to draw, one panel each; rows without a key are passed over.
    """
    figure = Figure(figsize=(8, 2.6 * len(keys)))
    panels = figure.subplots(len(keys), 1, sharex=True, squeeze=False)[:, 0]
    for colour, key, axes in zip(COLOURS, keys, panels, strict=False):
        points = [
            (r["step"], r["task"], r[key]) for r in rows if r.get(key) is not None
        ]
        if not points:
            continue
        steps, tasks, values = map(np.asarray, zip(*points, strict=True))
        axes.plot(steps, values, color=colour, linewidth=1)
        for border in steps[1:][np.diff(tasks) != 0]:
            axes.axvline(border, color="0.6", linestyle=":", linewidth=1)
        axes.set_ylabel({"lr": "learning rate"}.get(key, key))
        axes.grid(color="0.9")
        axes.margins(x=0.01)
    panels[-1].set_xlabel("step (dotted: a task begins)")
    figure.align_ylabels(panels)
    _save(figure, path)


def scatter(points, labels, path, *, title, class_names=None) -> None:
    """Points in the plane, coloured by class.

    Args:
      points: f[N, 2].
      labels: i[N]; class_names: their names, written out for few classes.
    """
    points, labels = np.asarray(points), np.asarray(labels)
    present = np.unique(labels)
    few = len(present) <= MOST_NAMES
    palette = matplotlib.colormaps["tab20" if few else "gist_rainbow"]
    figure = Figure(figsize=(7, 6))
    axes = figure.add_subplot()
    for number, label in enumerate(present):
        share = number / 20 if few else number / len(present)
        mine = labels == label
        name = str(label) if class_names is None else class_names[label]
        axes.scatter(
            *points[mine].T, s=9, color=palette(share), label=name, linewidths=0
        )
    axes.set(title=title, xticks=[], yticks=[])
    if few:
        axes.legend(
            markerscale=2.5, loc="center left", bbox_to_anchor=(1.0, 0.5), frameon=False
        )
    _save(figure, path)


def comparison(named_curves, path, *, title, ylabel="average accuracy (%)") -> None:
    """Average accuracy after each task, of several methods.

    Args:
      named_curves: name -> f[seeds, T] in [0, 1]; the band is one standard
        deviation over the seeds.
    """
    figure = Figure(figsize=(6.5, 4.2))
    axes = figure.add_subplot()
    for colour, (name, runs) in zip(COLOURS, named_curves.items(), strict=False):
        runs = 100 * np.atleast_2d(np.asarray(runs, np.float64))
        tasks, mean = np.arange(1, runs.shape[1] + 1), runs.mean(0)
        axes.plot(tasks, mean, color=colour, marker="o", markersize=4, label=name)
        if len(runs) > 1:
            spread = runs.std(0, ddof=1)
            axes.fill_between(
                tasks, mean - spread, mean + spread, color=colour, alpha=0.2, lw=0
            )
        axes.set_xticks(tasks)
    axes.set(title=title, xlabel="tasks learned", ylabel=ylabel)
    axes.grid(color="0.9")
    axes.legend(frameon=False)
    _save(figure, path)
