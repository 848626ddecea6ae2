"""Sections of a page about runs: scalars, training, convergence, configs."""

import json
import re

import numpy as np

from jaxcl.report import charts, html, numbers

MOST_CHARTS = 24  # of training metrics, and of scalars
FAMILY = 4  # so many scalars that differ in numbers alone are folded away


def families(names) -> dict[str, list[str]]:
    """Pattern -> names that differ in numbers alone, of patterns with many."""
    found = {}
    for name in names:
        found.setdefault(re.sub(r"\d+", "#", name), []).append(name)
    return {key: each for key, each in found.items() if len(each) >= FAMILY}


def scalars(runs, every: list[dict]) -> html.Html | None:
    """What evaluators measured beside accuracies: last values, and over steps."""
    each = [numbers.scalars(run, runs[0]) for run in runs]
    curves = [{n: c for (k, n), c in one.items() if k == "scalar"} for one in every]
    names = numbers.names_of([*each, *curves])
    if not names:
        return None
    groups = families(names)
    folded = {name for group in groups.values() for name in group}
    single = [name for name in names if name not in folded]
    told = "After the last finished task: mean over seeds, 95 % interval below it"
    told += f", \u0394 to {runs[0].name} over the seeds of both" * (len(runs) > 1)
    tables = [_scalar_table(single, runs, each)] if single else []
    for key, group in groups.items():
        summary = html.element("summary", f"{key} ({len(group)} scalars)")
        tables.append(
            html.element("details", summary, _scalar_table(group, runs, each))
        )
    drawn = _charts(single, runs, every, "scalar")
    return html.section("scalars", "Scalars", html.note(told, "."), tables, drawn)


def _scalar_table(names, runs, each) -> html.Html:
    head = [
        "scalar",
        *(html.join(charts.named(i, run.name)) for i, run in enumerate(runs)),
    ]
    rows = []
    for name in names:
        cells = []
        for i, run in enumerate(runs):
            if name not in each[i]:
                cells.append(html.cell("-"))
                continue
            found, delta = each[i][name]
            delta = delta if i and name in each[0] else None
            count = len(run.results)
            shown = html.estimate(found, html.number, expected=count, delta=delta)
            cells.append(html.cell(shown))
        rows.append([name, *cells])
    return html.table(head, rows, label="scalars")


def _charts(names, runs, every, kind) -> html.Html | None:
    """A chart for each name that has one, with what they have in common."""
    drawn, left = [], []
    for name in names:
        curves = []
        for i, run in enumerate(runs):
            curve = every[i].get((kind, name))
            if curve is not None:
                fewer = curve if kind == "training" else numbers.thin(curve)
                curves.append((i, run.name, fewer))
        most = max([curve.every for *_, curve in curves], default=1)
        told = f"means of {most}" if kind == "training" else f"every {most}th"
        bands = any(np.isfinite(curve.low).any() for *_, curve in curves)
        note = ", ".join(["band: 95 %"] * bands + [told] * (most > 1))
        ends = numbers.common_ends(runs[i] for i, *_ in curves)
        figure = charts.lines(curves, title=name, note=note, ends=ends)
        if figure is not None:
            (drawn if len(drawn) < MOST_CHARTS else left).append((name, figure))
    if not drawn:
        return None
    grid = html.element(
        "div", [figure for _, figure in drawn], class_="grid", data_choose="chart"
    )
    told = f"Not drawn, to keep the page small: {', '.join(n for n, _ in left)}."
    return html.join(
        charts.legend([run.name for run in runs]),
        grid,
        html.note(told) if left else None,
    )


# Training


def training(runs, every: list[dict]) -> html.Html:
    """Metrics of the steps."""
    found = numbers.names_of(every)
    names = sorted(name for kind, name in found if kind == "training")
    names.sort(key=lambda name: {"loss": 0, "lr": 1}.get(name, 2))
    drawn = _charts(names, runs, every, "training")
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


def convergence(runs) -> html.Html | None:
    """Best and last epochs, where they were counted."""
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
        for task, found in numbers.convergence(run).items():
            cells = [html.cell(run.first["task_names"][task], text=True)]
            blank = numbers.Estimate(None, None, None, 0)
            count = len(run.results)
            for key in columns:
                shown = html.estimate(
                    found.get(key, blank), html.number, expected=count
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


def configs(runs) -> html.Html:
    """The fields that differ, and every config whole."""
    having = [(i, run) for i, run in enumerate(runs) if run.config is not None]
    shown = []
    if len(having) > 1:
        found = numbers.differing([run.config for _, run in having])
        head = ["field"]
        for i, run in having:
            head.append(
                html.element(
                    "th", charts.named(i, run.name), scope="col", class_="text"
                )
            )
        rows = []
        for path, values in found.items():
            code = [
                html.element("span", "not set", class_="muted")
                if value is None
                else html.element("code", value)
                for value in values
            ]
            cells = [html.cell(one, text=True) for one in code]
            rows.append([html.element("code", path), *cells])
        if rows:
            shown.append(html.note("Fields that differ; others are the same in all."))
            shown.append(html.table(head, rows, label="fields that differ"))
        else:
            shown.append(html.note("All fields are the same."))
    for run in runs:
        if run.config is None:
            shown.append(html.note(f"{run.name}: there is no config.json."))
            continue
        summary = html.element("summary", f"config.json of {run.name}")
        text = json.dumps(run.config, indent=1, sort_keys=True)
        shown.append(html.element("details", summary, html.element("pre", text)))
    return html.section("configs", "Configs", shown)
