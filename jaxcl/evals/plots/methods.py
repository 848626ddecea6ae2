"""Draw methods side by side, over tasks."""

import numpy as np

from jaxcl.evals.plots import canvas

_CALLED = {
    "cassle": "CaSSLe",
    "der": "DER",
    "er": "ER",
    "er_ace": "ER-ACE",
    "finetune": "fine-tuning",
    "joint": "all at once",
    "pnr": "PNR",
}


def comparison(named_curves, path, *, title, ylabel="average accuracy (%)") -> None:
    """Draw the average accuracy after each task, of several methods.

    Args:
      named_curves: name -> f[seeds, T] or f[T] in [0, 1]; the band is one
        standard deviation over the seeds.
    """
    figure = canvas.make_figure(6.5, 4.2)
    axes = figure.add_subplot()
    note, longest = None, 1
    for name, number in canvas.number_styles([*named_curves]).items():
        runs = named_curves[name]
        runs = 100 * np.atleast_2d(np.asarray(runs, np.float64))
        seeds, size = runs.shape
        tasks, name = np.arange(1, size + 1), canvas.shorten_name(name)
        if seeds > 1:
            name = f"{name} ({seeds} seeds)"
            note = "mean, band: 1 std"
        half = runs.std(0, ddof=1) if seeds > 1 else None
        canvas.draw_mean_and_band(axes, number, tasks, runs.mean(0), half, name)
        longest = max(longest, size)
    axes.set_xticks(canvas.choose_axis_numbers(longest))
    axes.set(title=title, xlabel="tasks learned", ylabel=ylabel)
    axes.grid(color="0.9")
    canvas.show_legend(axes, title=note)
    canvas.save_figure(figure, path)


def summary(named_curves, strips, path, *, title, chance=None) -> None:
    """Draw a strip of images for each task, and accuracies over tasks below.

    Args:
      named_curves: name -> f[seeds, T] or f[T] in [0, 1], on the tasks so far; a single
        value is drawn as a horizontal line. The band is one standard deviation over the
        seeds.
      strips: images u8[H, W, C] of the first tasks, up to eight of each are drawn.
      path: of the picture.
      title: of the picture.
      chance: accuracy in [0, 1] of a guess, where the axis begins; None: 0.
    """
    figure = canvas.make_figure(8.5, 5.8)
    tasks = max(np.atleast_2d(curve).shape[1] for curve in named_curves.values())
    grid = figure.add_gridspec(
        2, len(strips), height_ratios=(1, 3), hspace=0.05, wspace=0.08
    )
    for number, images in enumerate(strips):
        _draw_strip(figure.add_subplot(grid[0, number]), images, f"task {number + 1}")
    axes = figure.add_subplot(grid[1, :])
    ends = []
    for name, number in canvas.number_styles([*named_curves]).items():
        runs = 100 * np.atleast_2d(np.asarray(named_curves[name], np.float64))
        if runs.shape[1] == 1 and tasks > 1:
            runs = np.repeat(runs, tasks, axis=1)
        half = runs.std(0, ddof=1) if len(runs) > 1 else None
        mean = runs.mean(0)
        steps = np.arange(1, runs.shape[1] + 1)
        canvas.draw_mean_and_band(axes, number, steps, mean, half, name)
        ends.append((float(mean[-1]), name, number))
    low = 0.0 if chance is None else 100 * chance
    axes.set(ylim=(low - 2, 101), xlim=(0.9, tasks + 0.1))
    _label_ends(axes, ends, low)
    axes.set_xticks(canvas.choose_axis_numbers(tasks))
    axes.set(xlabel="tasks learned", ylabel="accuracy on the tasks so far (%)")
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    axes.grid(color="0.9")
    figure.suptitle(title, y=0.96)
    canvas.save_figure(figure, path, dpi=200)


def _draw_strip(axes, images, name) -> None:
    """Draw up to eight images in two rows, beneath the name of their task."""
    shown = [image if image.shape[-1] == 3 else image.repeat(3, -1) for image in images]
    shown = shown[:8]
    columns = -(-len(shown) // 2)
    side = shown[0].shape[0]
    sheet = np.full((2 * side, columns * side, 3), 255, np.uint8)
    for number, image in enumerate(shown):
        top, left = number // columns * side, number % columns * side
        sheet[top : top + side, left : left + side] = image
    axes.imshow(sheet)
    axes.set_title(name, fontsize=10)
    axes.set_axis_off()


def _label_ends(axes, ends, low) -> None:
    """Write the name and last value of each line at its end, without overlap."""
    apart = (101 - low) / 14
    height = -np.inf
    for value, name, number in sorted(ends):
        height = max(value, height + apart)
        axes.annotate(
            f"{_CALLED.get(name, canvas.shorten_name(name))}  {value:.0f} %",
            (1.0, height),
            xycoords=("axes fraction", "data"),
            xytext=(8, 0),
            textcoords="offset points",
            va="center",
            color=canvas.choose_style(number)["color"],
            fontsize=11,
        )
