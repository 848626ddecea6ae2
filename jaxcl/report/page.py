"""Write one page about runs: `jaxcl report runs/er runs/er_ace --out=report.html`.

Each directory is a run, or holds the runs of several seeds (config.seeds). The page is
one file that loads nothing else. It shows measures with intervals over seeds,
differences to the first run, cost, accuracy matrices, curves, and how the configs
differ.
"""

import argparse
import base64
import datetime
import json
import pathlib
import tempfile
from collections.abc import Callable, Sequence
from typing import NamedTuple

import jinja2
import numpy as np
from etils import epath

import jaxcl
from jaxcl import plots
from jaxcl.report import comparability, compare, numbers, run_groups
from jaxcl.run import cost, result_file, updates

_PICTURE_BYTES = 2_000_000  # of all pictures of a run, so that the page stays small
_MOST_NAMES = 10  # columns of accuracies beside the cost
_MOST_TASKS = 20  # of a matrix that is a table, and no picture


def make_page(runs: list[run_groups.RunGroup], *, title: str) -> str:
    """Make the page about some runs as HTML.

    Args:
      runs: the runs; differences are to the first.
      title: title of the page.
    """
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("jaxcl.report"),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
    )
    text = environment.get_template("page.html").render(
        title=title,
        runs=[run.name for run in runs],
        header=describe_runs(runs),
        matrices=[_lay_out_matrix(name, runs) for name in _list_matrices(runs)],
        lives=_draw_lives(runs),
        loss=_draw_picture(_draw_loss, runs),
        pictures=[(run.name, *pair) for run in runs for pair in _read_pictures(run)],
        cost=cost_table(runs),
        scalars=list_scalars(runs),
        differing=_list_differences(runs),
        configs={
            run.name: json.dumps(run.configs.asked, indent=1, sort_keys=True)
            for run in runs
            if run.configs.asked is not None
        },
    )
    # Names of files, and JSON, may hold halves of surrogate pairs.
    return text.encode("utf-8", "replace").decode()


def _list_matrices(runs) -> list[str]:
    """Name the matrices that at least one run has."""
    return numbers.list_names(numbers.list_matrices(run) for run in runs)


# Cells


MINUS = "\u2212"


class Cell(NamedTuple):
    """A cell of a table."""

    text: str
    interval: str = ""  # 95 % interval, written below the text
    difference: str = ""  # difference to the first run, below the interval
    share: int | None = None  # strength of the colour behind the text, percent


class Table(NamedTuple):
    """A table whose first column holds the heads of the rows."""

    columns: list[str]
    rows: list[tuple[str, list[Cell]]]  # head, cells


def _format_signed(text: str, plus: bool) -> str:
    text = text.replace("-", MINUS)
    return f"+{text}" if plus and not text.startswith(MINUS) else text


def format_percent(value: float | None, *, plus: bool = False) -> str:
    """Write a share in percent with one decimal; "-" for None or nan."""
    if value is None or value != value:
        return "-"
    return _format_signed(f"{100 * value:.1f}", plus)


def format_number(value: float | None, *, plus: bool = False) -> str:
    """Write a number in four digits; "-" for None or nan."""
    if value is None or value != value:
        return "-"
    large = 10_000 <= abs(value) < 1e12
    if large or (value == round(value) and abs(value) < 1e12):
        text = f"{value:,.0f}"
    else:
        text = f"{value:#.4g}"  # zeros at the end say how exact it is
    return _format_signed(text.rstrip("."), plus)


def format_seconds(value: float | None) -> str:
    """Write seconds, with a decimal below 100; "-" for None."""
    if value is None:
        return "-"
    return f"{value:.1f}" if value < 99.95 else f"{value:,.0f}"


def format_flops(value: float | None) -> str:
    """Write a number of FLOPs; "-" for None."""
    return "-" if value is None else cost.format_count(value).strip()


def _format_estimate(run, value, form, delta=None) -> Cell:
    """Write a mean over the seeds of a run with its interval.

    Args:
      run: the run; if the mean is over fewer of its seeds, the cell says how many.
      value: the `numbers.Estimate`.
      form: `format_percent` or `format_number`.
      delta: difference to the first run; None: it is not shown.
    """

    def write_interval(estimate, **options):
        ends = "-"
        if estimate.low is not None:
            ends = (
                f"[{form(estimate.low, **options)}, {form(estimate.high, **options)}]"
            )
        fewer = estimate.seeds != len(run.results)
        return f"{ends} n = {estimate.seeds}" if fewer else ends

    interval = "" if value.mean is None else write_interval(value)
    if delta is None:
        return Cell(form(value.mean), interval)
    difference = "\u0394 -"
    if delta.mean is not None:
        ends = write_interval(delta, plus=True)
        difference = f"\u0394 {form(delta.mean, plus=True)} {ends}"
    return Cell(form(value.mean), interval, difference)


# Header


def describe_runs(runs: list[run_groups.RunGroup]) -> dict:
    """Describe the runs and their progress."""
    dates = [_time_of_results(run) for run in runs]
    evaluates_only = any(run.first_results.get("checkpoint") for run in runs)
    columns = ["run", "directory", "seeds", "tasks", "results of", "device", "jax"]
    rows = []
    for run, date in zip(runs, dates, strict=True):
        run_cost = run.first_results["cost"]
        source = run.first_results.get("checkpoint") or {}
        device = f"{run_cost['num_devices']} x {run_cost['device']}"
        texts = [
            run.workdir,
            f"{len(run.results)}: {', '.join(map(str, run.results))}",
            f"{run.finished_tasks} of {run.num_tasks}",
            _format_time(date),
            device if run_cost["device"] else "-",
            run_cost.get("jax") or "-",
        ]
        encoder_text = f"{source.get('path', '-')} (step {source.get('step', '-')})"
        rows.append((run.name, [*map(Cell, texts + [encoder_text] * evaluates_only)]))
    count = f"{len(runs)} runs" if len(runs) > 1 else "1 run"
    version = f"made by jaxcl {jaxcl.__version__}"
    return {
        "lead": _summary_sentence(runs),
        "about": f"{count}, results of {_format_time(max(dates))}, {version}",
        "runs": Table([*columns, *["encoder judged"] * evaluates_only], rows),
        "remarks": [f"{x}." for run in runs for x in run_groups.list_remarks(run)],
        "tasks": {
            run.name: "; ".join(f"{i + 1}: {name}" for i, name in enumerate(names))
            for run in runs
            if (names := run.first_results["task_names"])
        },
        "unlike": comparability.list_differences(
            {run.name: run.configs for run in runs}
        ),
    }


def _format_time(unix: float) -> str:
    date = datetime.datetime.fromtimestamp(unix, datetime.UTC)
    return date.strftime("%Y-%m-%d %H:%M UTC")


def _time_of_results(run) -> float:
    """Return the time of the results in seconds since 1970.

    It is the time of the last logged row, or else the file's, which changes if the file
    is copied.
    """
    rows = [log[-1] for log in run.logged_rows.values() if log]
    logged = [row["time"]["unix"] for row in rows if "unix" in row.get("time", {})]
    files = (folder / result_file.RESULTS for folder in run.folders.values())
    return max(logged) if logged else max(file.stat().mtime for file in files)


def _summary_sentence(runs) -> str:
    """Summarise the results in one sentence; "" without measurements."""
    names = _list_matrices(runs)
    names = [name for name in names if not name.endswith("/task_aware")] or names
    names.sort(key=lambda name: not name.startswith("predict/"))
    for name in names:
        reached = []
        for run in runs:
            measured = numbers.mean_measures(run).get(name, {}).get("average_accuracy")
            if measured is not None and measured.mean is not None:
                text = f"{run.name} reaches {format_percent(measured.mean)} %"
                if before := numbers.untrained_accuracy(run, name).mean:
                    text += f" (untrained {format_percent(before)} %)"
                reached.append(text)
        if reached:
            tasks = max(run.finished_tasks for run in runs)
            measure = f"the average over {tasks} tasks" if tasks > 1 else "accuracy"
            return f"{', '.join(reached)}: {measure}, {name}."
    return ""


# Results


def _lay_out_matrix(name, runs) -> dict:
    """Lay out one matrix, for the runs that have it."""
    having = [run for run in runs if name in numbers.list_matrices(run)]
    return {
        "name": name,
        "measures": _list_measures(name, runs, having),
        "lacking": [run.name for run in runs if run not in having],
        "curve": _draw_picture(_draw_curves, having, name),
        "heats": [_lay_out_heatmap(run, name) for run in having],
    }


def _list_measures(name, runs, having) -> Table:
    """List the measures of one matrix, a row for each run that has the matrix."""
    measured = [numbers.mean_measures(run)[name] for run in having]
    keys = [key for key in numbers.MEASURES if any(key in x for x in measured)]
    before = [numbers.untrained_accuracy(run, name) for run in having]
    shows_before = any(estimate.mean is not None for estimate in before)
    rows = []
    for run, estimates, first in zip(having, measured, before, strict=True):
        cells = [Cell(str(len(run.results)))]
        for key in keys:
            delta = None
            if key in estimates and run is not runs[0] and runs[0] in having:
                delta = numbers.mean_difference(run, runs[0], name, key)
            value = estimates.get(key, numbers.UNKNOWN)
            cells.append(_format_estimate(run, value, format_percent, delta))
        if shows_before:
            cells.append(_format_estimate(run, first, format_percent))
        rows.append((run.name, cells))
    titles = [key.replace("_", " ") for key in keys] + ["untrained"] * shows_before
    return Table(["run", "seeds", *titles], rows)


def _lay_out_heatmap(run, name) -> dict:
    """Lay out the accuracy matrix of a run, averaged over its seeds."""
    matrix, label = numbers.mean_matrix(run, name), f"{name} of {run.name}"
    if matrix.shape[1] > _MOST_TASKS:
        drawn = _draw_picture(plots.accuracy_matrix, matrix, title=label)
        return {"label": label, "picture": drawn}
    rows = [(f"after {i + 1}", row, row[: i + 1]) for i, row in enumerate(matrix)]
    if (row := numbers.mean_row(run, "untrained", name)) is not None:
        rows.insert(0, ("untrained", row, row))
    if (row := numbers.mean_row(run, "finetune", name)) is not None:
        rows.append(("alone", row, row))
    cells = [
        (head, [*map(_format_share, row), _mean_cell(seen)]) for head, row, seen in rows
    ]
    columns = [str(task + 1) for task in range(matrix.shape[1])]
    table = Table(["", *columns, "mean"], cells)
    return {"label": label, "picture": None, "table": table}


def _format_share(value) -> Cell:
    share = round(60 * value) if np.isfinite(value) else None
    return Cell(format_percent(value), share=share)


def _mean_cell(row) -> Cell:
    measured = row[np.isfinite(row)]
    return Cell(format_percent(float(measured.mean()) if len(measured) else None))


def list_scalars(runs: list[run_groups.RunGroup]) -> Table:
    """List the last values of the evaluators' scalars, a row for each."""
    lasts = [numbers.mean_scalars(run, runs[0]) for run in runs]
    rows = []
    for name in numbers.list_names(lasts):
        cells = []
        for run, scalars in zip(runs, lasts, strict=True):
            last, delta = scalars.get(name, (numbers.UNKNOWN, None))
            delta = delta if run is not runs[0] and name in lasts[0] else None
            cells.append(_format_estimate(run, last, format_number, delta))
        rows.append((name, cells))
    return Table(["scalar", *(run.name for run in runs)], rows)


# Cost

_SPENT = (
    ("training (s)", "train", format_seconds),
    ("compiling (s)", "compile", format_seconds),
    ("evaluation (s)", "evaluation", format_seconds),
    ("rest (s)", "rest", format_seconds),
    ("steps", "steps", format_number),
    ("images", "images", format_number),
    ("FLOPs", "flops", format_flops),
    ("ms/step", "milliseconds", format_number),
    ("memory (GB)", "peak_bytes", lambda x: "-" if x is None else f"{x / 1e9:.2f}"),
)


def cost_table(runs: list[run_groups.RunGroup]) -> Table:
    """List the cost of each run, with its accuracies."""
    names, rows = _list_matrices(runs)[:_MOST_NAMES], []
    for run in runs:
        measured, costs = numbers.mean_measures(run), numbers.mean_run_cost(run)
        means = (measured.get(x, {}).get("average_accuracy") for x in names)
        cells = [format_percent(mean and mean.mean) for mean in means]
        cells += [form(costs[key]) for _, key, form in _SPENT]
        rows.append((run.name, [*map(Cell, cells)]))
    return Table(["run", *names, *(title for title, *_ in _SPENT)], rows)


# Pictures


def _draw_picture(draw: Callable, *arguments, **options) -> str | None:
    """Draw a picture; return its PNG as text, or None if nothing is drawn."""
    with tempfile.TemporaryDirectory() as folder:
        path = pathlib.Path(folder) / "picture.png"
        draw(*arguments, path, **options)
        return _encode_picture(path.read_bytes()) if path.exists() else None


def _encode_picture(data: bytes) -> str:
    return base64.b64encode(data).decode()


def _draw_curves(runs, name, path) -> None:
    """Draw accuracy over the tasks so far, for runs with at least two evaluations."""
    curves = {run.name: compare.mean_curve(run, name) for run in runs}
    curves = {key: curve for key, curve in curves.items() if len(curve[0]) > 1}
    if curves:
        plots.anytime(curves, path, task_ends=compare.list_task_ends(runs[0]))


def _draw_loss(runs, path) -> None:
    """Draw the loss of the first seed of each run."""
    curves = {}
    for run in runs:
        rows = next(iter(run.logged_rows.values()), [])
        points = [(row["step"], row["loss"]) for row in rows if row.get("loss")]
        if len(points) > 1:
            curves[run.name] = tuple(np.array(points).T)
    if curves:
        plots.per_step(curves, path, compare.list_task_ends(runs[0]), ylabel="loss")


def _draw_lives(runs) -> list[tuple[str, str]]:
    """Draw the life of each encoder that was updated: name, picture."""
    lives = []
    for run in runs:
        folder = next(iter(run.folders.values()))
        for matrix, points in read_lives(folder).items():
            title = matrix if len(runs) == 1 else f"{run.name}, {matrix}"
            drawn = _draw_picture(plots.life, points)
            if drawn is not None:
                lives.append((title, drawn))
    return lives


def read_lives(run: epath.PathLike) -> dict[str, dict[int, plots.LifePoint]]:
    """Read the updates of a run that were compared with a reference.

    Returns:
      matrix -> number of the update -> what was measured.
    """
    lives: dict[str, dict[int, plots.LifePoint]] = {}
    for path in updates.list_updates(str(run)):
        report = updates.read_report(path) or {}
        comparison = report.get("gate", {"matrices": {}})
        for matrix, pairs in comparison["matrices"].items():
            interval = pairs["reference"]
            first = interval["before"]
            lives.setdefault(matrix, {})[int(path.name)] = plots.LifePoint(
                first,
                interval["after"],
                first - interval["high"],
                first - interval["low"],
                comparison["limit"],
                report["accepted"],
            )
    return lives


def _read_pictures(run) -> list[tuple[str, str]]:
    """Read the pictures of the first seed, except those that the page draws itself.

    The summary is the first; pictures that would make the page too large are left out.
    """
    seed, folder = next(iter(run.folders.items()))
    drawn = {name.replace("/", "_") for name in run.results[seed]["matrices"]}
    pictures = folder / "plots"
    files = [*sorted(pictures.glob("*.png")), *sorted(pictures.glob("*/*.png"))]
    files = [file for file in files if file.stem not in (*drawn, "curves")]
    files.sort(key=lambda file: file.stem != "summary")
    drawings, left = [], _PICTURE_BYTES
    for file in files:
        data = file.read_bytes()
        if len(data) <= left:
            drawings.append((file.stem.replace("_", " "), _encode_picture(data)))
            left -= len(data)
    return drawings


# Configs


def _list_differences(runs) -> Table:
    """List the fields in which the configs differ."""
    having = [run for run in runs if run.configs.asked is not None]
    flats = [comparability.flatten(run.configs.asked) for run in having]
    rows = [
        (path, [Cell(config.get(path, "not set")) for config in flats])
        for path in sorted(numbers.list_names(flats))
        if len({config.get(path) for config in flats}) > 1
    ]
    return Table(["field", *(run.name for run in having)], rows)


# The command


def add_options(parser) -> None:
    """Add the options of `jaxcl report`."""
    add = parser.add_argument
    add("runs", nargs="+", metavar="RUN", help="run directories")
    add("--out", default="report.html", help="HTML file to write")
    add("--title", default=None, help="default: the runs' names")


def write_page(
    workdirs: Sequence[epath.PathLike], out: epath.PathLike, title: str | None = None
) -> str:
    """Write the page of some runs, and return it.

    Args:
      workdirs: run directories, of one seed or of several.
      out: path of the page.
      title: title of the page; None: the names of the runs.

    Raises:
      Refused, OSError: a directory holds no run, or the page cannot be written.
    """
    runs = run_groups.read_all(workdirs)
    title = title or ", ".join(run.name for run in runs)
    page = make_page(runs, title=title)
    epath.Path(out).write_text(page)
    return page


def main(options: argparse.Namespace) -> int:
    """Run `jaxcl report`."""
    page = write_page(options.runs, options.out, options.title)
    size = len(page.encode()) / 1000
    count = f"{len(options.runs)} runs" if len(options.runs) > 1 else "1 run"
    print(f"{options.out}: {count}, {size:,.0f} kB")
    return 0
