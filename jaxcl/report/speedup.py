"""How much sooner runs converge than a baseline: `python -m jaxcl.speedup`.

  python -m jaxcl.speedup --baseline=retrain retrain=runs/retrain icl=runs/icl

A directory is a run, or holds the runs of several seeds. A name may be given several
times, for other growths or other seeds. Seeds are paired within a growth. There are two
measures: the epoch that config.patience found best, and what it took to come as low as
the baseline, by a scalar that is measured in the same way for all runs.
"""

import argparse
import io
import itertools
import math
import sys
from collections.abc import Sequence

import numpy as np
from etils import epath
from matplotlib import ticker
from matplotlib.figure import Figure

from jaxcl import plots
from jaxcl.data import storage
from jaxcl.report import convergence
from jaxcl.run import results

# Measure -> (title, key of the ratio) of its two panels.
PANELS = {
    "patience": (("time", "time_ratio"), ("epochs", "epoch_ratio")),
    "fair": (("time", "target_time_ratio"), ("passes", "target_passes_ratio")),
}


def _number(value, digits) -> str:
    return f"{value:,.0f}" if value >= 1000 else f"{value:.{digits}g}"


def _mean(spread) -> str:
    """A cell with a `convergence.spread`."""
    if spread["mean"] is None:
        return "-"
    std = "" if spread["std"] is None else f" ± {_number(spread['std'], 3)}"
    return _number(spread["mean"], 4) + std


def _times(ratio) -> str:
    """A cell with a `convergence.geometric`."""
    if ratio["mean"] is None:
        return "-"
    low, high = ratio["low"], ratio["high"]
    ends = "-" if low is None else f"{low:.2f}, {high:.2f}"
    return f"{ratio['mean']:.2f} [{ends}]"


def text(group: dict, *, baseline: str, scalar: str, within: float) -> str:
    """The markdown table of one growth, with an explanation of its columns.

    Args:
      group: an entry of `convergence.compared`.
      baseline, within: as given to `convergence.compared`.
      scalar: as given to `convergence.read`.
    """
    scalars = list(next(iter(group["runs"].values()))["scalars"])
    head = ["", "seeds", "best epoch", "seconds", "T", "E", "reached"]
    head += ["target passes", "target seconds", "target T", "target P", *scalars]
    lines = [
        "",
        f"T, E: seconds and epochs up to the best one, {baseline}'s / the row's",
        f"Target: {scalar} within {within:g} of {baseline}'s at its best epoch; T, P: "
        "seconds and passes up to it",
        "Ratios: geometric mean [95 % confidence]; others: mean ± standard deviation",
        "",
        "| " + " | ".join(head) + " |",
        "|" + "---|" * len(head),
    ]
    if group["growth"] is not None:
        lines[0] = f"Growth {group['growth']:g}"
    for name, run in group["runs"].items():
        cells = [name, str(run["seeds"]), _mean(run["epoch"]), _mean(run["seconds"])]
        cells += [_times(run["time_ratio"]), _times(run["epoch_ratio"])]
        cells += [f"{run['reached']} of {run['seeds']}"]
        cells += [_mean(run["target_passes"]), _mean(run["target_seconds"])]
        cells += [_times(run["target_time_ratio"]), _times(run["target_passes_ratio"])]
        cells += [_mean(run["scalars"][scalar]) for scalar in scalars]
        lines.append("| " + " | ".join(cells) + " |")
    cut = {name: run for name, run in group["runs"].items() if run["cut_off"]}
    if cut:
        told = [f"{n} ({run['cut_off']} of {run['seeds']})" for n, run in cut.items()]
        lines += ["", f"Ended by config.epochs, not by patience: {', '.join(told)}"]
    return "\n".join(lines)


def draw(
    groups: list[dict],
    path: epath.PathLike,
    *,
    baseline: str,
    measure: str = "patience",
) -> None:
    """Draw speed-ups against the growth, one line per name, as Figure 4 of ICL.

    Bars are 95 % confidence intervals.

    Args:
      groups: from `convergence.compared`, with growths.
      path: of the PNG.
      baseline: as given to `convergence.compared`.
      measure: "patience", or "fair" for the target.
    """
    figure = Figure(figsize=(10, 4.2))
    panels = figure.subplots(1, 2)
    growths = [group["growth"] for group in groups]
    names = dict.fromkeys(n for group in groups for n in group["runs"] if n != baseline)
    # Lines are shifted, or the interval of one run would hide that of another.
    gaps = [b - a for a, b in itertools.pairwise(sorted(growths))]
    apart = min(gaps, default=0.1) / 2 / max(len(names), 1)
    shifts = apart * (np.arange(len(names)) - (len(names) - 1) / 2)
    for (title, key), axes in zip(PANELS[measure], panels, strict=True):
        axes.axhline(1, color="0.5", linestyle=":", linewidth=1)
        shown = [1.0]
        for number, name in enumerate(names):
            shown += _draw_line(axes, groups, name, key, number, shifts[number])
        _scale(axes, shown)
        axes.set_xticks(growths, [f"{growth:g}" for growth in growths])
        axes.set(xlabel="growth", ylabel=f"{baseline} / run", title=title)
        axes.grid(color="0.9")
        axes.margins(x=0.1)
    if names:
        panels[1].legend(
            title="95 % intervals",
            loc="center left",
            bbox_to_anchor=(1.0, 0.5),
            frameon=False,
        )
    picture = io.BytesIO()
    figure.savefig(picture, format="png", dpi=120, bbox_inches="tight")
    epath.Path(path).write_bytes(picture.getvalue())


def _draw_line(axes, groups, name, key, number, shift) -> list[float]:
    """Draw the ratios of one name with their bars; returns the ratios."""
    ratios = [(g["growth"], g["runs"].get(name, {}).get(key)) for g in groups]
    ratios = [(growth, ratio) for growth, ratio in ratios if ratio and ratio["mean"]]
    x = [growth + shift for growth, _ in ratios]
    y = [ratio["mean"] for _, ratio in ratios]
    bars = [
        [m - (m if ratio["low"] is None else ratio["low"]), (ratio["high"] or m) - m]
        for m, (_, ratio) in zip(y, ratios, strict=True)
    ]
    axes.errorbar(
        x,
        y,
        yerr=np.reshape(bars, (-1, 2)).T,
        color=plots.COLOURS[number % len(plots.COLOURS)],
        marker=plots.MARKERS[number // len(plots.COLOURS) % len(plots.MARKERS)],
        linewidth=1,
        markersize=4,
        capsize=3,
        label=name.replace("$", r"\$"),
    )
    return y


def _scale(axes, shown) -> None:
    """A logarithmic axis of ratios, with the limits and ticks for those shown."""
    # On it a speed-up of 2 is as far from 1 as one of 1/2.
    axes.set_yscale("log")
    # The wide intervals of two seeds are cut off, or ratios would look all the same.
    low, high = axes.get_ylim()
    axes.set_ylim(max(low, min(shown) / 4), min(high, max(shown) * 4))
    axes.yaxis.set_major_locator(ticker.LogLocator(subs=(1, 1.5, 2, 3, 5)))
    axes.yaxis.set_major_formatter(ticker.FormatStrFormatter("%g"))
    axes.yaxis.set_minor_locator(ticker.NullLocator())


def parser() -> argparse.ArgumentParser:
    """The options of the command."""
    arguments = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = arguments.add_argument
    add("runs", nargs="+", metavar="NAME=DIR", help="run directories")
    add("--baseline", required=True, help="a NAME")
    add("--task", type=int, default=1, help="its number, from 0")
    add("--scalar", default="objective/loss", help="lower is better")
    add("--within", type=float, default=0.01, help="of the baseline's")
    add("--scalars", default=None, help=f"default: {','.join(convergence.SCALARS)}")
    add("--measure", default="patience", choices=[*PANELS])
    add("--plot", default=None, help="a .png of --measure by growth")
    add("--json", default=None, help="a file for all numbers")
    return arguments


def main(argv: Sequence[str] | None = None) -> int:
    """The command; exit code 2 if an argument is wrong or a run lacks something."""
    options = parser().parse_args(argv)
    try:
        _tell(options)
    except (ValueError, OSError) as error:
        print(f"jaxcl: {error}", file=sys.stderr)
        return 2
    return 0


def _tell(options) -> None:
    """Read the runs, compare them, and print, write and draw what was asked for."""
    for field in ("within", "task"):
        value = getattr(options, field)
        if not 0 <= value < math.inf:
            raise ValueError(f"--{field}={value}: must be 0 or more")
    runs = []
    for argument in options.runs:
        name, _, workdir = argument.partition("=")
        if not (name and workdir):
            raise ValueError(f"{argument}: must be NAME=DIR")
        runs += convergence.read(
            name, workdir, task=options.task, scalar=options.scalar
        )
    scalars = (
        convergence.SCALARS if options.scalars is None else options.scalars.split(",")
    )
    for run in runs:
        lacking = [name for name in scalars if name not in run.scalars]
        if lacking and options.scalars is not None:
            raise ValueError(
                f"{run.name}={run.folder}: no scalar {lacking[0]} at the end of task "
                f"{options.task}: there are {', '.join(run.scalars) or 'none'}"
            )
        if options.plot and run.growth is None:
            raise ValueError(f"{run.name}={run.folder}: no growth, which --plot wants")
    setting = {"baseline": options.baseline, "within": options.within}
    groups = convergence.compared(runs, scalars=scalars, **setting)
    setting["scalar"] = options.scalar
    print("\n\n".join(text(group, **setting) for group in groups))
    if options.json:
        numbers = results.plain({"task": options.task, **setting, "growths": groups})
        storage.write_json(options.json, numbers)
    if options.plot:
        draw(groups, options.plot, baseline=options.baseline, measure=options.measure)
