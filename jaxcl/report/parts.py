"""Sections of a page about runs: scalars, training, convergence, configs."""

import json
import re
from collections.abc import Iterable

import numpy as np

from jaxcl.report import charts, html, numbers

MOST_CHARTS = 24  # of training metrics, and of scalars
FAMILY = 4  # so many scalars whose names differ only in numbers are folded away


def families(names: Iterable[str]) -> dict[str, list[str]]:
    """Pattern -> names that differ only in numbers, if there are `FAMILY` or more."""
    groups = {}
    for name in names:
        groups.setdefault(re.sub(r"\d+", "#", name), []).append(name)
    return {key: group for key, group in groups.items() if len(group) >= FAMILY}


def scalars(runs: list[numbers.Run], curves: list[dict]) -> html.Html | None:
    """The scalars of evaluators: last values and curves; None if there are none.

    Args:
      runs: of the page; differences are to the first.
      curves: `numbers.curves` of each run.
    """
    lasts = [numbers.scalars(run, runs[0]) for run in runs]
    drawable = [[name for kind, name in own if kind == "scalar"] for own in curves]
    names = numbers.names_of([*lasts, *drawable])
    if not names:
        return None
    groups = families(names)
    folded = {name for group in groups.values() for name in group}
    single = [name for name in names if name not in folded]
    text = "After the last finished task: mean over seeds, 95 % interval below it"
    text += f", \u0394 to {runs[0].name} over the seeds of both" * (len(runs) > 1)
    tables = [_scalar_table(single, runs, lasts)] if single else []
    for key, group in groups.items():
        summary = html.element("summary", f"{key} ({len(group)} scalars)")
        tables.append(
            html.element("details", summary, _scalar_table(group, runs, lasts))
        )
    drawn = _charts(single, runs, curves, "scalar")
    return html.section("scalars", "Scalars", html.note(text, "."), tables, drawn)


def _scalar_table(names, runs, lasts) -> html.Html:
    """The last values of scalars, a row for each."""
    head = [
        "scalar",
        *(html.join(charts.named(i, run.name)) for i, run in enumerate(runs)),
    ]
    rows = []
    for name in names:
        cells = []
        for i, run in enumerate(runs):
            if name not in lasts[i]:
                cells.append(html.cell("-"))
                continue
            last, delta = lasts[i][name]
            delta = delta if i and name in lasts[0] else None
            count = len(run.results)
            shown = html.estimate(last, html.number, expected=count, delta=delta)
            cells.append(html.cell(shown))
        rows.append([name, *cells])
    return html.table(head, rows, label="scalars")


def _charts(names, runs, curves, kind) -> html.Html | None:
    """A chart for each name that has curves, under a common legend."""
    drawn, left = [], []
    for name in names:
        figure = _chart(name, runs, curves, kind)
        if figure is not None:
            (drawn if len(drawn) < MOST_CHARTS else left).append((name, figure))
    if not drawn:
        return None
    grid = html.element(
        "div", [figure for _, figure in drawn], class_="grid", data_choose="chart"
    )
    text = f"Not drawn, to keep the page small: {', '.join(n for n, _ in left)}."
    return html.join(
        charts.legend([run.name for run in runs]),
        grid,
        html.note(text) if left else None,
    )


def _chart(name, runs, curves, kind) -> html.Html | None:
    """The curves of one name."""
    lines = []
    for i, run in enumerate(runs):
        curve = curves[i].get((kind, name))
        if curve is not None:
            thinned = curve if kind == "training" else numbers.thin(curve)
            lines.append((i, run.name, thinned))
    most = max([curve.every for *_, curve in lines], default=1)
    thinning = f"means of {most}" if kind == "training" else f"every {most}th"
    bands = any(np.isfinite(curve.low).any() for *_, curve in lines)
    note = ", ".join(["band: 95 %"] * bands + [thinning] * (most > 1))
    ends = numbers.common_ends(runs[i] for i, *_ in lines)
    return charts.lines(lines, title=name, note=note, ends=ends)


# Training


def training(runs: list[numbers.Run], curves: list[dict]) -> html.Html:
    """Curves of the metrics of the steps; arguments as in `scalars`."""
    keys = numbers.names_of(curves)
    names = sorted(name for kind, name in keys if kind == "training")
    names.sort(key=lambda name: {"loss": 0, "lr": 1}.get(name, 2))
    drawn = _charts(names, runs, curves, "training")
    if drawn is None:
        text = "No curves: there are no logged steps, or no metrics.jsonl."
        return html.section("training", "Training", html.note(text))
    told = (
        f"Mean over seeds. A curve has about "
        f"{numbers.POINTS} points at most; where more steps were logged each point is "
        "the mean of as many in turn as the chart says. Seeds are aligned by the task "
        "and the step within it, as far as all have come. Shaded: every other task, "
        "where all runs have the same."
    )
    return html.section("training", "Training", html.note(told), drawn)


def convergence(runs: list[numbers.Run]) -> html.Html | None:
    """Best and last epochs; None if no run counted epochs."""
    columns = {
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
            cells = [html.cell(run.first["task_names"][task], text=True)]
            blank = numbers.Estimate(None, None, None, 0)
            count = len(run.results)
            for key in columns:
                shown = html.estimate(
                    estimates.get(key, blank), html.number, expected=count
                )
                cells.append(html.cell(shown))
            rows.append([charts.named(i, run.name), *cells])
    if not rows:
        return None
    text = html.column("task", text=True)
    told = "Mean over seeds, 95 % interval below it. Best: as config.patience counts."
    whole = html.table(["run", text, *columns.values()], rows, label="convergence")
    return html.section("convergence", "Convergence", html.note(told), whole)


# Configs


def configs(runs: list[numbers.Run]) -> html.Html:
    """The fields that differ, and every config in full."""
    having = [(i, run) for i, run in enumerate(runs) if run.config is not None]
    shown = _differences(having) if len(having) > 1 else []
    for run in runs:
        if run.config is None:
            shown.append(html.note(f"{run.name}: there is no config.json."))
            continue
        summary = html.element("summary", f"config.json of {run.name}")
        text = json.dumps(run.config, indent=1, sort_keys=True)
        shown.append(html.element("details", summary, html.element("pre", text)))
    return html.section("configs", "Configs", shown)


def _differences(having) -> list[html.Html]:
    """A table of the fields that differ between (number, run) pairs with a config."""
    fields = numbers.differing([run.config for _, run in having])
    if not fields:
        return [html.note("All fields are the same.")]
    head = ["field"]
    for i, run in having:
        name = charts.named(i, run.name)
        head.append(html.element("th", name, scope="col", class_="text"))
    rows = []
    for path, values in fields.items():
        texts = [
            html.element("span", "not set", class_="muted")
            if value is None
            else html.element("code", value)
            for value in values
        ]
        cells = [html.cell(text, text=True) for text in texts]
        rows.append([html.element("code", path), *cells])
    note = html.note("Fields that differ; others are the same in all.")
    return [note, html.table(head, rows, label="fields that differ")]
