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
    found = datetime.datetime.fromtimestamp(unix, datetime.UTC)
    return found.strftime("%Y-%m-%d %H:%M UTC")


def _span(seeds) -> str:
    """Seeds as text: 0-4 where they follow one another, else one by one."""
    seeds = list(seeds)
    if len(seeds) > 2 and seeds == list(range(seeds[0], seeds[-1] + 1)):
        return f"{len(seeds)}: {seeds[0]}\u2013{seeds[-1]}"
    return f"{len(seeds)}: {', '.join(map(str, seeds))}"


def _judged(run) -> str:
    """What a transfer run judged."""
    found = run.first.get("checkpoint") or {}
    if not found:
        return "-"
    told = ", ".join(f"{k} {found[k]}" for k in ("step", "checksum") if k in found)
    return f"{found.get('path', '')} ({told})"


def header(runs, *, title: str, dates: dict, version: str) -> html.Html:
    """Title, what is compared, and where each run stands."""
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
        [html.note(told) for run in runs for told in _remarks(run)],
        _tasks(runs),
    )


def _remarks(run) -> list[str]:
    """What a reader must know of a run before the numbers."""
    told, size = [], len(run.first["task_names"])
    if run.done == 0:
        told.append(f"{run.name}: no task is finished yet.")
    elif run.done < size:
        told.append(
            f"{run.name}: {run.done} of {size} tasks are finished; its measures are "
            "over these."
        )
    if run.behind:
        each = ", ".join(f"seed {s} ({n} of {size})" for s, n in run.behind.items())
        told.append(f"{run.name}: left out, since others have come further: {each}.")
    lacking = [seed for seed in run.results if seed not in run.rows]
    if lacking:
        which = "" if len(lacking) == len(run.results) else f" for seeds {lacking}"
        told.append(f"{run.name}: there is no metrics.jsonl{which}, so no curves.")
    if run.together:
        told.append(
            f"{run.name}: its seeds ran side by side; steps, seconds and FLOPs are "
            "those of all of them, training metrics their mean."
        )
    return told


def _tasks(runs) -> html.Html | None:
    """Names of the tasks, where they say more than their numbers."""
    found = {}
    for run in runs:
        found.setdefault(tuple(run.first["task_names"]), []).append(run.name)
    shown = []
    for names, of in found.items():
        if any(name != f"task {i + 1}" for i, name in enumerate(names)):
            whose = "Tasks" if len(found) == 1 else f"Tasks of {', '.join(of)}"
            listed = "; ".join(f"{i + 1}: {name}" for i, name in enumerate(names))
            summary = html.element("summary", f"{whose} ({len(names)})")
            shown.append(html.element("details", summary, html.note(listed)))
    return html.join(shown) if shown else None


# Results


def results(runs, every: list[dict]) -> html.Html:
    """Every matrix: table, curves, cost, heat maps.

    Args:
      every: of each run its `numbers.curves`.
    """
    names = numbers.names_of(numbers.matrices(run) for run in runs)
    if not names:
        text = "No evaluator of these runs left an accuracy matrix; see Scalars, below."
        return html.section("results", "Results", html.note(text))
    told = [
        "Mean over seeds, in percent; below it the 95 % interval of the mean "
        "(Student\u2019s t), \u201c-\u201d for one seed."
    ]
    if len(runs) > 1:
        told += [
            f" \u0394: paired difference to {runs[0].name}, over the seeds that both "
            "have, with its interval. Runs that stand after different numbers of "
            "tasks have none."
        ]
    told += [" n says how many seeds, where it is not all of the run."]
    measured = [numbers.measures(run) for run in runs]
    parts = [_matrix(name, runs, measured, every) for name in names]
    parts = html.element("div", parts, data_choose="evaluator")
    return html.section("results", "Results", html.note(told), charts.key(), parts)


def _matrix(name, runs, measured, every) -> html.Html:
    having = [i for i in range(len(runs)) if name in measured[i]]
    lacking = [run.name for i, run in enumerate(runs) if i not in having]
    keys = [k for k in TITLES if any(k in measured[i][name] for i in having)]
    head = ["run", "seeds"]
    for key in keys:
        small = html.element("small", TITLES[key][1])
        head.append(html.join(TITLES[key][0], small))
    before = [numbers.untrained(runs[i], name) for i in having]
    if any(each.mean is not None for each in before):
        head.append(html.join("untrained", html.element("small", "mean over tasks")))
    else:
        before = []
    rows = []
    for place, i in enumerate(having):
        cells = [html.cell(str(len(runs[i].results)))]
        for key in keys:
            found = measured[i][name].get(key)
            cells.append(_compared(found, runs, i, 0 in having, name, key))
        if before:
            count = len(runs[i].results)
            shown = html.estimate(before[place], html.percent, expected=count)
            cells.append(html.cell(shown))
        rows.append([charts.named(i, runs[i].name), *cells])
    curves = [(i, runs[i].name, every[i].get(("accuracy", name))) for i in having]
    curves = [(i, of, numbers.thin(curve)) for i, of, curve in curves if curve]
    note = "band: 95 %" if any(curve.seeds > 1 for *_, curve in curves) else ""
    most = max([curve.every for *_, curve in curves], default=1)
    note += f"; every {most}th evaluation and tasks\u2019 ends" if most > 1 else ""
    drawn = charts.lines(
        curves,
        title="average accuracy over the tasks met (%)",
        scale=100,
        wide=True,
        ends=numbers.common_ends(runs[i] for i in having),
        note=note.removeprefix("; "),
    )
    pair = [drawn, _against_time(name, runs, having, measured)]
    heats = [charts.heat(runs[i], name, i) for i in having]
    text = f"Not measured by {', '.join(lacking)}." if lacking else None
    return html.element(
        "section",
        html.element("h3", name),
        html.table(head, rows, label=f"measures of {name}"),
        html.note(text) if text else None,
        html.element("div", pair, class_="grid wide") if any(pair) else None,
        None if drawn else html.note("No curve: no run was evaluated twice."),
        html.element("div", heats, class_="heats"),
        data_name=name,
    )


def _compared(found, runs, i, first_has, name, key) -> html.Html:
    if found is None:
        return html.cell("-")
    delta = None
    if i and first_has:
        delta = numbers.difference(runs[i], runs[0], name, key)
    count = len(runs[i].results)
    return html.cell(html.estimate(found, html.percent, expected=count, delta=delta))


def _against_time(name, runs, having, measured):
    """Accuracy against seconds, of the runs that have both."""
    points = []
    for i in having:
        found = measured[i][name]["average_accuracy"]
        spent = numbers.cost(runs[i])["train"]
        if spent and found.mean is not None:
            points.append((i, runs[i].name, spent, found))
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


def cost(runs) -> html.Html:
    """What each run took, beside what it came to."""
    columns, spent = _outcomes(runs), [numbers.cost(run) for run in runs]
    for title, key, form in SPENT:
        if key != "peak_bytes" or any(one[key] is not None for one in spent):
            columns.append((title, [form(one[key]) for one in spent]))
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
    """(head, text of each run) of accuracies; of scalars, where there are none."""
    measured = [numbers.measures(run) for run in runs]
    columns = []
    for name in numbers.names_of(measured)[:MOST_NAMES]:
        found = [one.get(name, {}).get("average_accuracy") for one in measured]
        head = html.join(name, html.element("small", "average accuracy (%)"))
        columns.append((head, [html.percent(x and x.mean) for x in found]))
    if columns:
        return columns
    lasts = [numbers.scalars(run, runs[0]) for run in runs]
    names = numbers.names_of(lasts)
    folded = [n for group in parts_lib.families(names).values() for n in group]
    for name in [n for n in names if n not in folded][:MOST_NAMES]:
        found = [one[name][0].mean if name in one else None for one in lasts]
        head = html.join(name, html.element("small", "last value"))
        columns.append((head, [html.number(x) for x in found]))
    return columns


def page(runs, *, title: str, dates: dict[str, float], version: str) -> str:
    """The whole page.

    Args:
      runs: `numbers.Run`s; differences are to the first.
      title: of the page.
      dates: name of a run -> when its results were made, in seconds since 1970.
      version: of jaxcl.
    """
    every = [numbers.curves(run) for run in runs]
    sections = [
        results(runs, every),
        cost(runs),
        parts_lib.scalars(runs, every),
        parts_lib.training(runs, every),
        parts_lib.convergence(runs),
        parts_lib.configs(runs),
    ]
    sections = [section for section in sections if section is not None]
    links = [
        html.element("a", key.capitalize(), href=f"#{key}")
        for key in (re.search(r'^<section id="(\w+)"', one)[1] for one in sections)
    ]
    head = header(runs, title=title, dates=dates, version=version)
    nav = html.element("nav", links, aria_label="sections")
    return html.document(title, html.join(head, nav, html.element("main", sections)))
