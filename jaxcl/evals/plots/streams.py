"""Pictures over the steps of a stream of tasks."""

import numpy as np

from jaxcl.evals.plots import canvas

_STEPS = "optimiser step"


def anytime(
    runs, path, task_ends, *, title="", ylabel="accuracy (%)", scale=100.0
) -> None:
    """Draw accuracy over a stream of tasks, of several methods.

    Args:
      runs: name -> (steps i[n], mean f[n] in [0, 1], spread f[n], the half of the
        band's height, or None for no band); a nan leaves a gap.
      path: of the picture.
      task_ends: i[T], the last step of each task; every other task is shaded.
      scale: factor of the drawn values; 1.0 for values that are no shares.
    """
    figure, axes = _stream(task_ends)
    for name, number in canvas.number_styles([*runs]).items():
        steps, mean, spread = runs[name]
        mean = scale * np.asarray(mean, np.float64)
        half = None if spread is None else scale * np.asarray(spread, np.float64)
        canvas.draw_mean_and_band(
            axes, number, steps, mean, half, canvas.shorten_name(name)
        )
    _finish(figure, axes, path, title=title, ylabel=ylabel)


def per_step(runs, path, task_ends, *, title="", ylabel="drift", xlabel=_STEPS) -> None:
    """Draw a measure of several methods at each step of a stream of tasks.

    Args:
      runs: name -> (steps i[n], values f[n]).
      path: of the picture.
      task_ends: i[T], the last step of each task; every other task is shaded.
      xlabel: the unit of the x axis, if not steps.
    """
    figure, axes = _stream(task_ends)
    for name, number in canvas.number_styles([*runs]).items():
        steps, values = runs[name]
        # Few points may be a single one, of which no line is seen.
        marker = "." if len(steps) < 100 else None
        style = {
            "color": canvas.choose_style(number)["color"],
            "linestyle": canvas.line_style(number),
        }
        label = canvas.shorten_name(name)
        axes.plot(steps, values, linewidth=1, marker=marker, label=label, **style)
    axes.set_ylim(bottom=0)
    _finish(figure, axes, path, title=title, ylabel=ylabel, xlabel=xlabel)


def _stream(task_ends):
    """Make a figure over the steps of a stream, with tasks shaded and numbered."""
    figure = canvas.make_figure(7.5, 4.2)
    axes = figure.add_subplot()
    canvas.shade_tasks(axes, task_ends)
    canvas.name_tasks(axes, task_ends)
    end = [0, *task_ends][-1]
    axes.set_xlim(0, 1.02 * end)  # the last markers are whole
    return figure, axes


def _finish(figure, axes, path, *, title, ylabel, xlabel=_STEPS):
    axes.set(xlabel=xlabel, ylabel=ylabel)
    axes.set_title(title, pad=20)  # above the names of the tasks
    axes.xaxis.set_major_locator(canvas.whole_number_ticks())
    axes.grid(color="0.85")
    canvas.show_legend(axes)
    canvas.save_figure(figure, path)
