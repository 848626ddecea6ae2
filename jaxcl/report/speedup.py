"""How much sooner runs converge than a baseline: `python -m jaxcl.speedup`.

  python -m jaxcl.speedup --baseline=retrain retrain=runs/retrain icl=runs/icl

A directory is a run, or holds the runs of several seeds. A name may be given several
times, for other growths or other seeds. Seeds are paired within a growth. There are two
measures: the epoch that config.patience found best, and what it took to come as low as
the baseline, by a scalar that is measured in the same way for all runs.
"""

import argparse
import itertools
import math
import sys
from collections.abc import Sequence

import numpy as np
from etils import epath

from jaxcl.data import storage
from jaxcl.plots import canvas
from jaxcl.report import convergence
from jaxcl.run import results

# What a table calls those of `convergence.LEVELS`.
LEVELS = {
    "at_best": "at best epoch",
    "lowest": "lowest",
    "tail": f"last {convergence.TAIL}",
    "at_end": "at end",
}
# Measure -> (title, key of the ratio) of its two panels.
PANELS = {
    "patience": (("time", "time_ratio"), ("epochs", "epoch_ratio")),
    "fair": (("time", "target_time_ratio"), ("passes", "target_passes_ratio")),
}


def _number(value, digits) -> str:
    return f"{value:,.0f}" if value >= 1000 else f"{value:.{digits}g}"


def _mean(spread) -> str:
    """Write a `convergence.deviation` into a cell."""
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


def _range(taken) -> str:
    """Write a `convergence.taken` into a cell."""
    if taken is None:
        return "-"
    median, low, high = (_number(taken[x], 3) for x in ("median", "low", "high"))
    return median if low == high else f"{median} [{low}, {high}]"


def text(
    group: dict, *, baseline: str, scalar: str, within: float, frozen: str | None = None
) -> str:
    """The markdown tables of one growth, with an explanation of their columns.

    Args:
      group: an entry of `convergence.compared`.
      baseline, within, frozen: as given to `convergence.compared`.
      scalar: as given to `convergence.read`.
    """
    above = f"{scalar} within {within:g} of {baseline}'s at its best epoch"
    if frozen is not None:
        above = f"{baseline}'s {scalar} at its best epoch, plus {within:g} of "
        above += f"({frozen}'s - {baseline}'s)"
    scalars = list(next(iter(group["runs"].values()))["scalars"])
    head = ["", "seeds", "best epoch", "seconds", "T", "E", "reached"]
    head += ["target passes", "target seconds", "target T", "target P", *scalars]
    lines = [
        "",
        f"T, E: seconds and epochs up to the best one, {baseline}'s / the row's",
        f"Target: {above}; T, P: seconds and passes up to it",
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
    lines += _no_gain(group, baseline, frozen) + _agreement(group)
    return "\n".join([*lines, "", *_levels(group, scalar), *_differences(group)])


def _no_gain(group, baseline, frozen) -> list[str]:
    """A line that names the seeds in which there was nothing to gain."""
    seeds = [str(seed) for seed, gain in group["gain"].items() if gain <= 0]
    if not seeds:
        return []
    told = f"Seeds in which {baseline} is not below {frozen}: {', '.join(seeds)}"
    return ["", f"{told}; the target is {baseline}'s own there"]


def _agreement(group) -> list[str]:
    """A line that names the rows with the same best epoch."""
    told = [
        f"seed {same['seed']}: {', '.join(same['names'])} ({same['epoch']})"
        for same in group["agree"]
    ]
    head = "The same best epoch, which the order of the batches may decide: "
    return ["", head + "; ".join(told)] if told else []


def _levels(group, scalar) -> list[str]:
    """The table of what the scalar came to, and of the steps that were taken."""
    head = ["", "steps", *(LEVELS[level] for level in convergence.LEVELS)]
    head += ["rate", "inner rate", "inner steps move"]
    lines = [
        f"{scalar} at the best epoch, at its lowest, in the last "
        f"{convergence.TAIL} epochs and at the end; learning rates",
        "and |weights after the inner steps - weights| / |weights|: median [range]",
        "",
        "| " + " | ".join(head) + " |",
        "|" + "---|" * len(head),
    ]
    if group["constant"] is not None:
        lines.insert(2, f"An encoder whose rows are all alike: {group['constant']:.4g}")
    for name, run in group["runs"].items():
        cells = [name, _mean(run["steps"])]
        cells += [_mean(run[level]) for level in convergence.LEVELS]
        cells += [_range(run["rates"][rate]) for rate in convergence.RATES]
        lines.append("| " + " | ".join(cells) + " |")
    return lines


def _differences(group) -> list[str]:
    """The table of pairs of rows, empty where none were asked for."""
    if not group["pairs"]:
        return []
    measures = list(group["pairs"][0]["difference"])
    lines = [
        "",
        "Differences of two rows, seed by seed: mean [95 % confidence]",
        "",
        "| " + " | ".join(["", "seeds", *(LEVELS.get(x, x) for x in measures)]) + " |",
        "|" + "---|" * (2 + len(measures)),
    ]
    for pair in group["pairs"]:
        found = pair["difference"]
        count = max(found[x]["seeds"] for x in measures)
        cells = [" - ".join(pair["names"]), str(count)]
        cells += [_signed(found[x]) for x in measures]
        lines.append("| " + " | ".join(cells) + " |")
    return lines


def _signed(found) -> str:
    """Write a `convergence.interval` of differences into a cell."""
    if found["mean"] is None:
        return "-"
    low, high = found["low"], found["high"]
    ends = "-" if low is None else f"{low:+.3f}, {high:+.3f}"
    return f"{found['mean']:+.3f} [{ends}]"


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
    figure = canvas.figure_of(10, 4.2)
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
        axes.set(
            xlabel="growth", ylabel=f"{canvas.escaped(baseline)} / run", title=title
        )
        axes.grid(color="0.9")
        axes.margins(x=0.1)
    if names:
        canvas.legend(panels[1], title="95 % intervals")
    canvas.save(figure, path)


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
        linewidth=1,
        markersize=4,
        capsize=3,
        label=canvas.escaped(name),
        **canvas.style_of(number),
    )
    return y


def _scale(axes, shown) -> None:
    """Make the axis of ratios logarithmic, with limits and ticks for those shown."""
    # On it a speed-up of 2 is as far from 1 as one of 1/2.
    canvas.logarithmic(axes, "y", (1, 1.5, 2, 3, 5))
    # The wide intervals of two seeds are cut off, or ratios would look all the same.
    low, high = axes.get_ylim()
    axes.set_ylim(max(low, min(shown) / 4), min(high, max(shown) * 4))


def parser() -> argparse.ArgumentParser:
    """The options of the command."""
    arguments = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = arguments.add_argument
    add("runs", nargs="+", metavar="NAME=DIR", help="run directories")
    add("--baseline", required=True, help="a NAME")
    add("--task", type=int, default=1, help="its number, from 0")
    add("--scalar", default="objective/loss", help="lower is better")
    add("--within", type=float, default=0.01, help="of the baseline's, or of the gain")
    add("--frozen", default=None, help="a NAME; the gain is its scalar - baseline's")
    add("--pair", action="append", default=[], help="NAME:NAME, their differences")
    add("--scalars", default=None, help=f"default: {','.join(convergence.SCALARS)}")
    add("--measure", default="patience", choices=[*PANELS])
    add("--plot", default=None, help="a .png, .svg or .pdf of --measure by growth")
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
    for pair in options.pair:
        if pair.count(":") != 1:
            raise ValueError(f"--pair={pair}: must be NAME:NAME")
    for field in ("within", "task"):
        value = getattr(options, field)
        if not 0 <= value < math.inf:
            raise ValueError(f"--{field}={value}: must be 0 or more")
    if options.plot:
        canvas.format_of(options.plot)
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
    setting = {
        name: getattr(options, name) for name in ("baseline", "within", "frozen")
    }
    pairs = [tuple(pair.split(":")) for pair in options.pair]
    groups = convergence.compared(runs, scalars=scalars, pairs=pairs, **setting)
    setting["scalar"] = options.scalar
    print("\n\n".join(text(group, **setting) for group in groups))
    if options.json:
        numbers = results.plain({"task": options.task, **setting, "growths": groups})
        storage.write_json(options.json, numbers)
    if options.plot:
        draw(groups, options.plot, baseline=options.baseline, measure=options.measure)
