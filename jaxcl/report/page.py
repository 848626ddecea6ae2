"""A page about runs: what it says, as text and numbers that templates lay out."""

import base64
import datetime
import hashlib

import jinja2

from jaxcl.evals.plots import canvas, svg
from jaxcl.report import charts, comparability, formats, numbers
from jaxcl.report import parts as parts_lib
from jaxcl.report import runs as runs_lib
from jaxcl.report.formats import Cell, Column, Table
from jaxcl.run import results as results_lib
from jaxcl.run import task_alone

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
    """Name the checkpoint that a transfer run evaluated."""
    source = run.first.get("checkpoint") or {}
    if not source:
        return "-"
    details = ", ".join(f"{k} {source[k]}" for k in ("step", "checksum") if k in source)
    return f"{source.get('path', '')} ({details})"


def _date(run) -> float:
    """When the results were made, in seconds since 1970.

    The time of the last logged row is preferred to that of the file, which is the time
    of the copy if somebody copied it.
    """
    rows = [own[-1] for own in run.rows.values() if own]
    logged = [row["time"]["unix"] for row in rows if "unix" in row.get("time", {})]
    files = (folder / results_lib.RESULTS for folder in run.folders.values())
    return max(logged) if logged else max(file.stat().mtime for file in files)


def header(runs: list[runs_lib.Run]) -> dict:
    """Describe the runs, and how far they have come."""
    count = f"{len(runs)} runs" if len(runs) > 1 else "1 run"
    dates = {run.name: _date(run) for run in runs}
    newest, version = _when(max(dates.values())), task_alone.version()
    transfers = any(run.first.get("checkpoint") for run in runs)
    columns = [Column("run"), Column("directory", prose=True)]
    columns += map(Column, ("seeds", "tasks", "results of", "device", "jax"))
    columns += [Column("encoder judged", prose=True)] * transfers
    rows = []
    for number, run in enumerate(runs):
        spent, device = run.first["cost"], "-"
        if spent["device"]:
            device = f"{spent['num_devices']} x {spent['device']}"
        come = f"{run.done} of {len(run.first['task_names'])}"
        texts = [run.workdir, _span(run.results), come, _when(dates[run.name]), device]
        texts += [spent.get("jax") or "-"] + [_judged(run)] * transfers
        rows.append((number, [*map(Cell, texts)]))
    return {
        "lead": _lead(runs),
        "about": f"{count}, results of {newest}, page made by jaxcl {version}",
        "runs": Table(columns, rows),
        "remarks": [remark for run in runs for remark in _remarks(run)],
        "tasks": _tasks(runs),
        "unlike": comparability.differences({run.name: run.configs for run in runs}),
    }


def _lead(runs) -> str:
    """Say in a sentence what the runs reached; "" where nothing was measured."""
    names = numbers.names_of(numbers.matrices(run) for run in runs)
    names = [name for name in names if not name.endswith("/task_aware")] or names
    names.sort(key=lambda name: not name.startswith("predict/"))
    for name in names:
        reached = []
        for run in runs:
            measured = numbers.measures(run).get(name, {}).get("average_accuracy")
            if measured is not None and measured.mean is not None:
                before = numbers.untrained(run, name).mean
                beside = f" (untrained {formats.percent(before)} %)" if before else ""
                whole = f"{formats.percent(measured.mean)} %{beside}"
                reached.append(f"{run.name} reaches {whole}")
        if reached:
            tasks = max(run.done for run in runs)
            over = f"the average over {tasks} tasks" if tasks > 1 else "accuracy"
            return f"{', '.join(reached)}: {over}, {name}."
    return ""


def _remarks(run) -> list[str]:
    """Say what a reader must know about a run before reading its numbers."""
    remarks = [f"{line}." for line in runs_lib.remarks(run)]
    lacking = [seed for seed in run.results if seed not in run.rows]
    if lacking:
        which = "" if len(lacking) == len(run.results) else f" for seeds {lacking}"
        remarks.append(f"{run.name}: there is no metrics.jsonl{which}, so no curves.")
    return remarks


def _tasks(runs) -> list[tuple[str, str]]:
    """(whose, names) of tasks, unless they are just "task 1", "task 2", ..."""
    runs_by_tasks = {}
    for run in runs:
        runs_by_tasks.setdefault(tuple(run.first["task_names"]), []).append(run.name)
    told = []
    for names, owners in runs_by_tasks.items():
        if any(name != f"task {i + 1}" for i, name in enumerate(names)):
            alike = len(runs_by_tasks) == 1
            whose = "Tasks" if alike else f"Tasks of {', '.join(owners)}"
            listed = "; ".join(f"{i + 1}: {name}" for i, name in enumerate(names))
            told.append((f"{whose} ({len(names)})", listed))
    return told


# Results


def results(runs: list[runs_lib.Run], curves: list[dict]) -> dict:
    """Lay out each matrix: table, curves, accuracy against time, heat maps.

    Args:
      runs: of the page; differences are to the first.
      curves: `numbers.curves` of each run.
    """
    measured = [numbers.measures(run) for run in runs]
    names = numbers.names_of(numbers.matrices(run) for run in runs)
    key = [charts.share(n / 100, str(n)) for n in (0, 25, 50, 75, 100)]
    matrices = [_matrix(name, runs, measured, curves) for name in names]
    return {"matrices": matrices, "key": key}


def _matrix(name, runs, measured, curves) -> dict:
    """Lay out one matrix, for the runs that have it."""
    having = [i for i in range(len(runs)) if name in measured[i]]
    title = "average accuracy over the tasks met (%)"
    curve = parts_lib.chart(
        name, runs, curves, "accuracy", title=title, scale=100, wide=True
    )
    pair = (curve, _against_time(name, runs, having, measured))
    return {
        "name": name,
        "measures": _measures(name, runs, having, measured),
        "lacking": [run.name for i, run in enumerate(runs) if i not in having],
        "charts": [chart for chart in pair if chart is not None],
        "has_curve": curve is not None,
        "heats": [charts.heat(runs[i], name, i) for i in having],
    }


def _measures(name, runs, having, measured) -> Table:
    """List the measures of one matrix, a row for each run that has it."""
    keys = [k for k in TITLES if any(k in measured[i][name] for i in having)]
    columns = [Column("run"), Column("seeds"), *(Column(*TITLES[key]) for key in keys)]
    before = {i: numbers.untrained(runs[i], name) for i in having}
    shows_before = any(estimate.mean is not None for estimate in before.values())
    columns += [Column("untrained", "mean over tasks")] * shows_before
    rows = []
    for i in having:
        count, shown = len(runs[i].results), []
        for key in keys:
            estimate, delta = measured[i][name].get(key), None
            if estimate is not None and i and 0 in having:
                delta = numbers.difference(runs[i], runs[0], name, key)
            shown.append((estimate or numbers.UNKNOWN, delta))
        shown += [(before[i], None)] * shows_before
        cells = [
            formats.estimate(value, formats.percent, expected=count, delta=delta)
            for value, delta in shown
        ]
        rows.append((i, [Cell(str(count)), *cells]))
    return Table(columns, rows)


def _against_time(name, runs, having, measured) -> charts.Chart | None:
    """Draw accuracy against seconds of training, for the runs that have both."""
    points = []
    for i in having:
        accuracy = measured[i][name]["average_accuracy"]
        spent = numbers.cost(runs[i])["train"]
        if spent and accuracy.mean is not None:
            points.append((i, runs[i].name, spent, accuracy))
    return charts.against_time(points, key=name) if len(points) > 1 else None


def pictures(runs: list[runs_lib.Run]) -> list[dict] | None:
    """List the pictures that the runs left, by run; None if there are none."""
    shown = [
        {"run": number, "name": name, "png": base64.b64encode(data).decode()}
        for number, run in enumerate(runs)
        for name, data in _pictures(run)
    ]
    return shown or None


_PICTURE_BYTES = 2_000_000  # of all pictures of a run, so that the page stays small


def _pictures(run) -> list[tuple[str, bytes]]:
    """Read the pictures of the first seed, but those that the page draws itself.

    The summary is the first; pictures that would make the page too large are left out.
    """
    seed, folder = next(iter(run.folders.items()))
    drawn = {name.replace("/", "_") for name in run.results[seed]["matrices"]}
    files = [
        file
        for pattern in ("*.png", "*/*.png")
        for file in sorted((folder / "plots").glob(pattern))
        if file.stem not in (*drawn, "curves")
    ]
    files.sort(key=lambda file: file.stem != "summary")
    found, left = [], _PICTURE_BYTES
    for file in files:
        data = file.read_bytes()
        if len(data) <= left:
            found.append((file.stem.replace("_", " "), data))
            left -= len(data)
    return found


# Cost

SPENT = (
    ("training (s)", "train", formats.seconds),
    ("compiling (s)", "compile", formats.seconds),
    ("evaluation (s)", "evaluation", formats.seconds),
    ("rest (s)", "rest", formats.seconds),
    ("steps", "steps", formats.number),
    ("images", "images", formats.number),
    ("FLOPs", "flops", formats.short),
    ("ms/step", "milliseconds", formats.number),
    ("memory (B)", "peak_bytes", formats.short),
)


def cost(runs: list[runs_lib.Run]) -> Table:
    """List the cost of each run, beside its accuracies."""
    columns, spent = _outcomes(runs), [numbers.cost(run) for run in runs]
    for title, key, form in SPENT:
        if key != "peak_bytes" or any(own[key] is not None for own in spent):
            columns[Column(title)] = [form(own[key]) for own in spent]
    rows = [
        (i, [Cell(texts[i]) for texts in columns.values()]) for i in range(len(runs))
    ]
    return Table([Column("run"), *columns], rows)


def _outcomes(runs) -> dict[Column, list[str]]:
    """Columns of accuracies, or else of scalars, with the text of each run."""
    measured = [numbers.measures(run) for run in runs]
    columns = {}
    for name in numbers.names_of(measured)[:MOST_NAMES]:
        estimates = [own.get(name, {}).get("average_accuracy") for own in measured]
        texts = [formats.percent(x and x.mean) for x in estimates]
        columns[Column(name, "average accuracy (%)")] = texts
    if columns:
        return columns
    lasts = [numbers.scalars(run, runs[0]) for run in runs]
    single, _ = parts_lib.grouped(numbers.names_of(lasts))
    for name in single[:MOST_NAMES]:
        means = [own[name][0].mean if name in own else None for own in lasts]
        columns[Column(name, "last value")] = [formats.number(x) for x in means]
    return columns


# The page


def page(runs: list[runs_lib.Run], *, title: str) -> str:
    """Make the whole page.

    Args:
      runs: differences are to the first.
      title: of the page.
    """
    curves = [numbers.curves(run) for run in runs]
    sections = {
        "results": results(runs, curves),
        "pictures": pictures(runs),
        "cost": cost(runs),
        "scalars": parts_lib.scalars(runs, curves),
        "training": parts_lib.training(runs, curves),
        "convergence": parts_lib.convergence(runs),
        "configs": parts_lib.configs(runs),
    }
    return _rendered(
        title=title,
        header=header(runs),
        runs=[run.name for run in runs],
        sections={key: part for key, part in sections.items() if part is not None},
    )


def _rendered(*, runs, **values) -> str:
    """Fill the template of the page with these values; text in them is escaped."""
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("jaxcl.report"),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        keep_trailing_newline=True,
    )
    script = environment.get_template("script.js").render()
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    text = environment.get_template("page.html").render(
        script=script,
        digest=digest,
        runs=runs,
        swatches=[svg.swatch(number) for number in range(len(runs))],
        colours=(canvas.COLOURS, canvas.DARK_COLOURS),
        **values,
    )
    # Names of files, and JSON, may hold halves of surrogate pairs.
    return text.encode("utf-8", "replace").decode()
