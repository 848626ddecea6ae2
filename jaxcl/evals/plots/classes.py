"""Pictures over the classes of a set."""

import numpy as np

from jaxcl.evals.plots import canvas

MOST_TIMES = 6  # curves of one thing at several times


def class_shares(steps, shares, path, *, title="", time="step {}") -> None:
    """Draw how the classes of a set shift over time, as Fig. 10 of DUEL.

    Classes stand in the order of their shares at the first time, the largest first.

    Args:
      steps: i[n], n >= 1, increasing.
      shares: f[n, C] in [0, 1], of each class at each of these steps. If there are more
        than `MOST_TIMES`, so many are drawn, evenly spread, the first and last among
        them.
      path: of the picture.
      time: how one of `steps` is written.
    """
    from matplotlib import colormaps

    shares = 100 * np.asarray(shares, np.float64)
    times, size = shares.shape
    figure, axes, groups, what = _classes(np.argsort(-shares[0], kind="stable"))
    axes.axhline(100 / size, color="0.5", linestyle=":", linewidth=1)
    chosen = np.linspace(0, times - 1, min(times, MOST_TIMES)).round().astype(int)
    # From dark to light, except for the palest of the colours.
    colours = colormaps["viridis"](np.linspace(0.0, 0.9, len(chosen)))
    for number, (at, colour) in enumerate(zip(chosen, colours, strict=True)):
        style = canvas.choose_style(number) | {"color": colour, "markersize": 4}
        values = [shares[at, group].mean() for group in groups]
        axes.plot(range(len(groups)), values, label=time.format(steps[at]), **style)
    axes.set_ylim(bottom=0)
    xlabel = f"{what}, by its share at {time.format(steps[0])}"
    axes.set(title=title, xlabel=xlabel, ylabel="share of the labelled rows (%)")
    canvas.show_legend(axes, title="dotted: balanced")
    canvas.save_figure(figure, path)


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
            style = canvas.choose_style(number) | {"linestyle": line, "markersize": 4}
            style["label"] = f"{canvas.shorten_name(name)}: {kind}"
            axes.plot(range(len(groups)), [each[g].mean() for g in groups], **style)
    ylabel = "intra-class variance, inter-class similarity"
    axes.set(title=title, xlabel=f"{what}, by its similarity to others", ylabel=ylabel)
    canvas.show_legend(axes)
    canvas.save_figure(figure, path)


def _classes(order):
    """Make a figure over classes that stand in the order i[C].

    Returns:
      Make figure and axes; return the classes of each place, and its meaning.
    """
    figure = canvas.make_figure(7.5, 4.2)
    axes = figure.add_subplot()
    axes.grid(color="0.9")
    groups = np.array_split(order, min(len(order), canvas.MOST_NAMES))
    if len(groups) == len(order):
        axes.set_xticks(range(len(groups)), [str(label) for label in order])
        return figure, axes, groups, "class"
    begins = np.cumsum([1] + [len(group) for group in groups[:-1]])
    axes.set_xticks(range(len(groups)), [str(begin) for begin in begins], rotation=45)
    return figure, axes, groups, f"class (mean of {len(groups[-1])} or more at a time)"
