"""Pictures that compare methods: over tasks, and by their cost."""

from collections.abc import Mapping, Sequence
from typing import Literal, NamedTuple

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


class Costs(NamedTuple):
    """What a method reaches under several budgets."""

    budget: Sequence[float]  # FLOPs that it might spend, n of them
    cost: Sequence[float]  # n FLOPs that it spent
    mean: Sequence[float]  # n accuracies in percent
    half: Sequence[float]  # n halves of their intervals, nan where there is none
    kind: Literal["front", "control", "other"]  # how it is shown


def cost_and_accuracy(
    methods: Mapping[str, Costs], path, *, title="", floor=None
) -> None:
    """Draw what methods reach beside the FLOPs of their training, a row each.

    The best is on top. Methods on the Pareto front of cost and accuracy are large,
    controls open; each budget has a colour, and a dotted line among the costs.

    Args:
      methods: name -> what it reaches.
      path: of the picture.
      title: of the picture.
      floor: accuracy of the untrained network in percent, None: not known.
    """
    rows = sorted(methods.items(), key=lambda named: max(named[1].mean))
    budgets = sorted({budget for _, own in rows for budget in own.budget})
    figure = canvas.figure_of(8, 1.4 + 0.19 * len(rows))
    left, right = figure.subplots(
        1, 2, sharey=True, width_ratios=(3, 1), gridspec_kw={"wspace": 0.06}
    )
    for axes in (left, right):
        axes.grid(color="0.9")
        axes.set_axisbelow(True)
    canvas.logarithmic(right, "x", (1, 2, 5))
    for place, (_, own) in enumerate(rows):
        shape = {"markersize": 8 if own.kind == "front" else 4}
        shape |= {"mfc": "white", "markersize": 5} if own.kind == "control" else {}
        for budget, cost, mean, half in zip(*own[:4], strict=True):
            style = canvas.style_of(budgets.index(budget)) | shape
            left.errorbar(mean, place, xerr=half, elinewidth=0.8, **style)
            right.plot(cost / 1e9, place, **style)
    for number, budget in enumerate(budgets):
        style = canvas.style_of(number) | {"marker": "", "linestyle": ":"}
        label = f"{budget / 1e9:g} GFLOP"
        right.axvline(budget / 1e9, linewidth=1, label=label, **style)
    if floor is not None:
        left.axvline(floor, color="0.5", linestyle="--", linewidth=1)
    left.set_yticks(
        range(len(rows)), [canvas.escaped(name) for name, _ in rows], fontsize=8
    )
    left.set(title=title, ylim=(-0.7, len(rows) - 0.3))
    under = "accuracy (%), 95 % intervals\nlarge: on the front, open: a control"
    left.set_xlabel(under + (", dashed: untrained" if floor is not None else ""))
    right.set_xlabel("GFLOP of training")
    canvas.legend(right, title="budget", fontsize=8, title_fontsize=8)
    canvas.save(figure, path)
