"""Draw methods side by side, over tasks."""

import numpy as np

from jaxcl.plots import canvas


def comparison(named_curves, path, *, title, ylabel="average accuracy (%)") -> None:
    """Draw the average accuracy after each task, of several methods.

    Args:
      named_curves: name -> f[seeds, T] or f[T] in [0, 1]; the band is one
        standard deviation over the seeds.
    """
    figure = canvas.figure_of(6.5, 4.2)
    axes = figure.add_subplot()
    note, longest = None, 1
    for number, (name, runs) in enumerate(named_curves.items()):
        runs = 100 * np.atleast_2d(np.asarray(runs, np.float64))
        seeds, size = runs.shape
        tasks, name = np.arange(1, size + 1), canvas.short(name)
        if seeds > 1:
            name = f"{name} ({seeds} seeds)"
            note = "mean, band: 1 std"
        half = runs.std(0, ddof=1) if seeds > 1 else None
        canvas.mean_and_band(axes, number, tasks, runs.mean(0), half, name)
        longest = max(longest, size)
    axes.set_xticks(canvas.axis_numbers(longest))
    axes.set(title=title, xlabel="tasks learned", ylabel=ylabel)
    axes.grid(color="0.9")
    canvas.legend(axes, title=note)
    canvas.save(figure, path)
