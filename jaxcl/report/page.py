"""The sections of a page about runs."""

import datetime
import re

from jaxcl.report import charts, html, numbers
from jaxcl.report import parts as parts_lib

TITLES = {
    "average_accuracy": ("average accuracy", "after the last task, higher is better"),
    "anytime": ("anytime", "mean over tasks' ends, higher is better"),
    "forgetting": ("forgetting", "lower is better"),
    "stability": ("stability", "lower is better"),
    "plasticity": ("plasticity", "higher is better"),
}
MOST_NAMES = 10  # columns of accuracies beside the cost


# Header


def _when(unix: float) -> str:
    date = datetime.datetime.fromtimestamp(unix, datetime.UTC)
    return date.strftime("%Y-%m-%d %H:%M UTC")


def _span(seeds) -> str:
    """Seeds as text: 0-4 if they are consecutive, else one by one."""
    seeds = list(seeds)
    if len(seeds) > 2 and seeds == list(range(seeds[0], seeds[-1] + 1)):
        return f"{len(seeds)}: {seeds[0]}\u2013{seeds[-1]}"
    return f"{len(seeds)}: {', '.join(map(str, seeds))}"


def _judged(run) -> str:
    """The checkpoint that a transfer run evaluated."""
    source = run.first.get("checkpoint") or {}
    if not source:
        return "-"
    details = ", ".join(f"{k} {source[k]}" for k in ("step", "checksum") if k in source)
    return f"{source.get('path', '')} ({details})"


def header(
    runs: list[numbers.Run], *, title: str, dates: dict[str, float], version: str
) -> html.Html:
    """The title, and a table of the runs and how far they have come."""
    newest = max(dates.values())
    count = f"{len(runs)} runs" if len(runs) > 1 else "1 run"
    meta = f"{count}, results of {_when(newest)}, page made by jaxcl {version}"
    where = html.column("directory", text=True)
    head = ["run", where, "seeds", "tasks", "results of", "device", "jax"]
    transfers = any(run.first.get("checkpoint") for run in runs)
    rows = []
    for style, run in enumerate(runs):
        spent = run.first["cost"]
        device = "-"
        if spent["device"]:
            device = f"{spent['num_devices']} x {spent['device']}"
        cells = [
            html.cell(run.workdir, text=True),
            html.cell(_span(run.results)),
            html.cell(f"{run.done} of {len(run.first['task_names'])}"),
            html.cell(_when(dates[run.name])),
            html.cell(device),
            html.cell(spent.get("jax") or "-"),
        ]
        cells += [html.cell(_judged(run), text=True)] if transfers else []
        rows.append([charts.named(style, run.name), *cells])
    head += [html.column("encoder judged", text=True)] if transfers else []
    return html.element(
        "header",
        html.element("h1", title),
        html.element("p", meta, class_="muted"),
        html.table(head, rows, label="runs"),
        [html.note(remark) for run in runs for remark in _remarks(run)],
        _tasks(runs),
    )


def _remarks(run) -> list[str]:
    """What a reader must know about a run before reading its numbers."""
    remarks, size = [], len(run.first["task_names"])
    if run.done == 0:
        remarks.append(f"{run.name}: no task is finished yet.")
    elif run.done < size:
        remarks.append(
            f"{run.name}: {run.done} of {size} tasks are finished; its measures are "
            "over these."
        )
    if run.behind:
        behind = ", ".join(f"seed {s} ({n} of {size})" for s, n in run.behind.items())
        remarks.append(
            f"{run.name}: left out, since others have come further: {behind}."
        )
    lacking = [seed for seed in run.results if seed not in run.rows]
    if lacking:
        which = "" if len(lacking) == len(run.results) else f" for seeds {lacking}"
        remarks.append(f"{run.name}: there is no metrics.jsonl{which}, so no curves.")
    if run.together:
        remarks.append(
            f"{run.name}: its seeds ran side by side; steps, seconds and FLOPs are "
            "those of all of them, training metrics their mean."
        )
    return remarks


def _tasks(runs) -> html.Html | None:
    """The names of the tasks, unless they are just "task 1", "task 2", ..."""
    runs_by_tasks = {}
    for run in runs:
        runs_by_tasks.setdefault(tuple(run.first["task_names"]), []).append(run.name)
    shown = []
    for names, owners in runs_by_tasks.items():
        if any(name != f"task {i + 1}" for i, name in enumerate(names)):
            alike = len(runs_by_tasks) == 1
            whose = "Tasks" if alike else f"Tasks of {', '.join(owners)}"
            listed = "; ".join(f"{i + 1}: {name}" for i, name in enumerate(names))
            summary = html.element("summary", f"{whose} ({len(names)})")
            shown.append(html.element("details", summary, html.note(listed)))
    return html.join(shown) if shown else None


# Results


def results(runs: list[numbers.Run], curves: list[dict]) -> html.Html:
    """The results of each matrix: table, curves, accuracy against time, heat maps.

    Args:
      runs: of the page; differences are to the first.
      curves: `numbers.curves` of each run.
    """
    names = numbers.names_of(numbers.matrices(run) for run in runs)
    if not names:
        text = "No evaluator of these runs left an accuracy matrix; see Scalars, below."
        return html.section("results", "Results", html.note(text))
    remarks = [
        "Mean over seeds, in percent; below it the 95 % interval of the mean "
        "(Student\u2019s t), \u201c-\u201d for one seed."
    ]
    if len(runs) > 1:
        remarks += [
            f" \u0394: paired difference to {runs[0].name}, over the seeds that both "
            "have, with its interval. Runs that stand after different numbers of "
            "tasks have none."
        ]
    remarks += [" n says how many seeds, where it is not all of the run."]
    measured = [numbers.measures(run) for run in runs]
    parts = [_matrix(name, runs, measured, curves) for name in names]
    parts = html.element("div", parts, data_choose="evaluator")
    return html.section("results", "Results", html.note(remarks), charts.key(), parts)


def _matrix(name, runs, measured, curves) -> html.Html:
    """All about one matrix, for the runs that have it."""
    having = [i for i in range(len(runs)) if name in measured[i]]
    lacking = [run.name for i, run in enumerate(runs) if i not in having]
    drawn = _accuracy_curves(name, runs, having, curves)
    pair = [drawn, _against_time(name, runs, having, measured)]
    heats = [charts.heat(runs[i], name, i) for i in having]
    text = f"Not measured by {', '.join(lacking)}." if lacking else None
    return html.element(
        "section",
        html.element("h3", name),
        _measures_table(name, runs, having, measured),
        html.note(text) if text else None,
        html.element("div", pair, class_="grid wide") if any(pair) else None,
        None if drawn else html.note("No curve: no run was evaluated twice."),
        html.element("div", heats, class_="heats"),
        data_name=name,
    )


def _measures_table(name, runs, having, measured) -> html.Html:
    """The measures of one matrix, a row for each run that has it."""
    keys = [k for k in TITLES if any(k in measured[i][name] for i in having)]
    head = ["run", "seeds"]
    for key in keys:
        small = html.element("small", TITLES[key][1])
        head.append(html.join(TITLES[key][0], small))
    before = [numbers.untrained(runs[i], name) for i in having]
    if any(estimate.mean is not None for estimate in before):
        head.append(html.join("untrained", html.element("small", "mean over tasks")))
    else:
        before = []
    rows = []
    for place, i in enumerate(having):
        cells = [html.cell(str(len(runs[i].results)))]
        for key in keys:
            estimate = measured[i][name].get(key)
            cells.append(_compared(estimate, runs, i, 0 in having, name, key))
        if before:
            count = len(runs[i].results)
            shown = html.estimate(before[place], html.percent, expected=count)
            cells.append(html.cell(shown))
        rows.append([charts.named(i, runs[i].name), *cells])
    return html.table(head, rows, label=f"measures of {name}")


def _accuracy_curves(name, runs, having, curves) -> html.Html | None:
    """The average accuracy of one matrix over steps."""
    drawn = [(i, runs[i].name, curves[i].get(("accuracy", name))) for i in having]
    drawn = [(i, run, numbers.thin(curve)) for i, run, curve in drawn if curve]
    note = "band: 95 %" if any(curve.seeds > 1 for *_, curve in drawn) else ""
    most = max([curve.every for *_, curve in drawn], default=1)
    note += f"; every {most}th evaluation and tasks\u2019 ends" if most > 1 else ""
    return charts.lines(
        drawn,
        title="average accuracy over the tasks met (%)",
        scale=100,
        wide=True,
        ends=numbers.common_ends(runs[i] for i in having),
        note=note.removeprefix("; "),
    )


def _compared(estimate, runs, i, first_has, name, key) -> html.Html:
    """A cell with a measure of run i, and its difference to the first run."""
    if estimate is None:
        return html.cell("-")
    delta = None
    if i and first_has:
        delta = numbers.difference(runs[i], runs[0], name, key)
    count = len(runs[i].results)
    return html.cell(html.estimate(estimate, html.percent, expected=count, delta=delta))


def _against_time(name, runs, having, measured):
    """Accuracy against seconds of training, for the runs that have both."""
    points = []
    for i in having:
        accuracy = measured[i][name]["average_accuracy"]
        spent = numbers.cost(runs[i])["train"]
        if spent and accuracy.mean is not None:
            points.append((i, runs[i].name, spent, accuracy))
    if len(points) < 2:
        return None
    title = "average accuracy (%) against training time"
    return charts.scatter(points, title=title, xlabel="seconds of training")


# Cost

SPENT = (
    ("training (s)", "train", html.seconds),
    ("compiling (s)", "compile", html.seconds),
    ("evaluation (s)", "evaluation", html.seconds),
    ("rest (s)", "rest", html.seconds),
    ("steps", "steps", html.number),
    ("images", "images", html.number),
    ("FLOPs", "flops", html.short),
    ("ms/step", "milliseconds", html.number),
    ("memory (B)", "peak_bytes", html.short),
)


def cost(runs: list[numbers.Run]) -> html.Html:
    """The cost of each run, beside its accuracies."""
    columns, spent = _outcomes(runs), [numbers.cost(run) for run in runs]
    for title, key, form in SPENT:
        if key != "peak_bytes" or any(own[key] is not None for own in spent):
            columns.append((title, [form(own[key]) for own in spent]))
    rows = [
        [charts.named(i, run.name), *(html.cell(texts[i]) for _, texts in columns)]
        for i, run in enumerate(runs)
    ]
    head = ["run", *(title for title, _ in columns)]
    told = (
        "Means over seeds, of all finished tasks. Rest: saving, and what a method does "
        "between tasks. FLOPs are those of the steps. \u201c-\u201d: not known."
    )
    whole = html.table(head, rows, label="cost")
    return html.section("cost", "Cost", html.note(told), whole)


def _outcomes(runs) -> list[tuple[html.Html, list[str]]]:
    """(head, text of each run) of accuracies, or of scalars if there are none."""
    measured = [numbers.measures(run) for run in runs]
    columns = []
    for name in numbers.names_of(measured)[:MOST_NAMES]:
        estimates = [own.get(name, {}).get("average_accuracy") for own in measured]
        head = html.join(name, html.element("small", "average accuracy (%)"))
        columns.append((head, [html.percent(x and x.mean) for x in estimates]))
    if columns:
        return columns
    lasts = [numbers.scalars(run, runs[0]) for run in runs]
    names = numbers.names_of(lasts)
    folded = [n for group in parts_lib.families(names).values() for n in group]
    for name in [n for n in names if n not in folded][:MOST_NAMES]:
        means = [own[name][0].mean if name in own else None for own in lasts]
        head = html.join(name, html.element("small", "last value"))
        columns.append((head, [html.number(x) for x in means]))
    return columns


def page(
    runs: list[numbers.Run], *, title: str, dates: dict[str, float], version: str
) -> str:
    """The whole page.

    Args:
      runs: differences are to the first.
      title: of the page.
      dates: name of a run -> when its results were made, in seconds since 1970.
      version: of jaxcl.
    """
    curves = [numbers.curves(run) for run in runs]
    sections = [
        results(runs, curves),
        cost(runs),
        parts_lib.scalars(runs, curves),
        parts_lib.training(runs, curves),
        parts_lib.convergence(runs),
        parts_lib.configs(runs),
    ]
    sections = [section for section in sections if section is not None]
    links = [
        html.element("a", key.capitalize(), href=f"#{key}")
        for key in (re.search(r'^<section id="(\w+)"', part)[1] for part in sections)
    ]
    head = header(runs, title=title, dates=dates, version=version)
    nav = html.element("nav", links, aria_label="sections")
    return html.document(title, html.join(head, nav, html.element("main", sections)))
