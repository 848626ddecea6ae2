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
    figure = canvas.figure_of(8, 5.2)
    axes = figure.add_subplot()
    canvas.logarithmic(axes, "x", (1, 2, 5))
    axes.grid(color="0.9")
    costs = [*budgets, *(cost for own in curves.values() for cost in own.cost)]
    ends = min(costs) / 2e9, max(costs) / 0.7e9
    for number, (name, own) in enumerate(curves.items()):
        style = canvas.style_of(number) | {"zorder": 4 if own.kind == "front" else 3}
        style |= {"markersize": 8 if own.kind == "front" else 4, "linewidth": 0.8}
        style |= {"mfc": "white", "markersize": 6} if own.kind == "control" else {}
        cost, label = np.array(own.cost) / 1e9, canvas.short(name)
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
    note = "bars: 95 % interval\ndotted: a budget"
    columns = 1 + (len(curves) > canvas.MOST_NAMES)
    canvas.legend(axes, title=note, fontsize=8, title_fontsize=8, ncols=columns)
    canvas.save(figure, path)
