"""Sections of a page about runs: scalars, training, convergence, configs."""

import json
import re
from collections.abc import Iterable

import numpy as np

from jaxcl.report import charts, formats, numbers
from jaxcl.report import runs as runs_lib
from jaxcl.report.formats import Cell, Column, Table

MOST_CHARTS = 24  # of training metrics, and of scalars
FAMILY = 4  # so many scalars whose names differ only in numbers are folded away


def grouped(names: Iterable[str]) -> tuple[list[str], dict[str, list[str]]]:
    """Sort out families of names: `FAMILY` or more that differ in numbers alone."""
    groups = {}
    for name in names:
        groups.setdefault(re.sub(r"\d+", "#", name), []).append(name)
    families = {key: group for key, group in groups.items() if len(group) >= FAMILY}
    folded = {name for group in families.values() for name in group}
    return [name for name in names if name not in folded], families


def scalars(runs: list[runs_lib.Run], curves: list[dict]) -> dict | None:
    """Lay out last values and curves of the evaluators' scalars; None without any.

    Args:
      runs: of the page; differences are to the first.
      curves: `numbers.curves` of each run.
    """
    lasts = [numbers.scalars(run, runs[0]) for run in runs]
    drawable = [[name for kind, name in own if kind == "scalar"] for own in curves]
    names = numbers.names_of([*lasts, *drawable])
    if not names:
        return None
    single, families = grouped(names)
    return {
        "single": _last_values(single, runs, lasts),
        "families": {
            f"{pattern} ({len(group)} scalars)": _last_values(group, runs, lasts)
            for pattern, group in families.items()
        },
        "charts": _charts(single, runs, curves, "scalar"),
    }


def _last_values(names, runs, lasts) -> Table:
    """List the last values of scalars, a row for each."""
    rows = []
    for name in names:
        cells = []
        for i, run in enumerate(runs):
            last, delta = lasts[i].get(name, (numbers.UNKNOWN, None))
            shown = {"expected": len(run.results)}
            shown["delta"] = delta if i and name in lasts[0] else None
            cells.append(formats.estimate(last, formats.number, **shown))
        rows.append((name, cells))
    return Table([Column("scalar"), *map(Column, range(len(runs)))], rows)


def _charts(names, runs, curves, kind) -> dict:
    """Draw a chart for each name that has curves; list the names that are too many."""
    own = {name: [c[kind, name] for c in curves if (kind, name) in c] for name in names}
    names = [name for name in names if charts.drawable(own[name])]
    drawn = [chart(name, runs, curves, kind) for name in names[:MOST_CHARTS]]
    drawn = [made for made in drawn if made is not None]
    return {"drawn": drawn, "left": names[MOST_CHARTS:]}


def chart(name, runs, curves, kind, *, title="", **options) -> charts.Chart | None:
    """Draw the curves of one name.

    Args:
      name: of the curve.
      runs: of the page.
      curves: `numbers.curves` of each run.
      kind: "accuracy", "scalar" or "training".
      title: of the chart; "": the name.
      options: as of `charts.lines`.
    """
    having = [i for i, own in enumerate(curves) if (kind, name) in own]
    lines = [(i, runs[i].name, curves[i][kind, name]) for i in having]
    if kind != "training":  # these are means of stretches already
        lines = [(i, run, numbers.thin(curve)) for i, run, curve in lines]
    most = max([curve.every for *_, curve in lines], default=1)
    thinning = f"means of {most}" if kind == "training" else f"every {most}th"
    bands = any(np.isfinite(curve.low).any() for *_, curve in lines)
    note = ", ".join(["band: 95 %"] * bands + [thinning] * (most > 1))
    options |= {"note": note, "ends": numbers.common_ends(runs[i] for i in having)}
    return charts.lines(lines, title=title or name, key=f"{kind} {name}", **options)


def training(runs: list[runs_lib.Run], curves: list[dict]) -> dict:
    """Curves of the metrics of the steps; arguments as in `scalars`."""
    keys = numbers.names_of(curves)
    names = sorted(name for kind, name in keys if kind == "training")
    names.sort(key=lambda name: {"loss": 0, "lr": 1}.get(name, 2))
    drawn = _charts(names, runs, curves, "training")
    return {"charts": drawn, "points": numbers.POINTS}


def convergence(runs: list[runs_lib.Run]) -> Table | None:
    """Best and last epochs; None if no run counted epochs."""
    titles = {
        "best_number": "best epoch",
        "last_number": "last epoch",
        "best_loss": "loss at best",
        "best_seconds": "seconds to best",
        "best_passes": "passes to best",
        "last_seconds": "seconds to last",
    }
    rows = []
    for i, run in enumerate(runs):
        for task, estimates in numbers.convergence(run).items():
            shown = [estimates.get(key, numbers.UNKNOWN) for key in titles]
            count, name = len(run.results), run.first["task_names"][task]
            cells = [formats.estimate(x, formats.number, expected=count) for x in shown]
            rows.append((i, [Cell(name), *cells]))
    columns = [Column("run"), Column("task", prose=True), *map(Column, titles.values())]
    return Table(columns, rows) if rows else None


def configs(runs: list[runs_lib.Run]) -> dict:
    """List the fields that differ, and every config in full."""
    having = [i for i, run in enumerate(runs) if run.configs.asked is not None]
    differences = numbers.differing([runs[i].configs.asked for i in having])
    rows = [
        (path, [Cell("", "not set") if x is None else Cell(x) for x in values])
        for path, values in differences.items()
    ]
    columns = [Column("field"), *(Column(i, prose=True) for i in having)]
    texts = {
        run.name: json.dumps(run.configs.asked, indent=1, sort_keys=True)
        for run in runs
        if run.configs.asked is not None
    }
    return {"differences": Table(columns, rows), "texts": texts}
