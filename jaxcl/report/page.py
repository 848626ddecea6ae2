"""Lay out a page about runs: tables and pictures for the template."""

import base64
import datetime
import json
import pathlib
import tempfile
from collections.abc import Callable

import jinja2
import numpy as np

from jaxcl import core
from jaxcl.evals import plots
from jaxcl.report import comparability, compare, formats, numbers
from jaxcl.report import runs as runs_lib
from jaxcl.report.formats import Cell, Table
from jaxcl.run import cost as cost_lib
from jaxcl.run import results as results_lib

_PICTURE_BYTES = 2_000_000  # of all pictures of a run, so that the page stays small
_MOST_NAMES = 10  # columns of accuracies beside the cost
_MOST_TASKS = 20  # of a matrix that is a table, and no picture


def make_page(runs: list[runs_lib.RunGroup], *, title: str) -> str:
    """Make the page about some runs as HTML.

    Args:
      runs: differences are to the first.
      title: of the page.
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
        matrices=[
            _lay_out_matrix(name, runs)
            for name in _in_all_runs(runs, numbers.list_matrices)
        ],
        loss=_draw_picture(_draw_loss, runs),
        pictures=[(run.name, *found) for run in runs for found in _read_pictures(run)],
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


def _in_all_runs(runs, names: Callable) -> list[str]:
    return numbers.list_names(names(run) for run in runs)


# Header


def describe_runs(runs: list[runs_lib.RunGroup]) -> dict:
    """Describe the runs and their progress."""
    dates = [_time_of_results(run) for run in runs]
    judges = any(run.first_results.get("checkpoint") for run in runs)
    columns = ["run", "directory", "seeds", "tasks", "results of", "device", "jax"]
    rows = []
    for run, date in zip(runs, dates, strict=True):
        spent, source = (
            run.first_results["cost"],
            run.first_results.get("checkpoint") or {},
        )
        device = (
            f"{spent['num_devices']} x {spent['device']}" if spent["device"] else "-"
        )
        come = f"{run.finished_tasks} of {len(run.first_results['task_names'])}"
        seeds = f"{len(run.results)}: {', '.join(map(str, run.results))}"
        texts = [
            run.workdir,
            seeds,
            come,
            _format_time(date),
            device,
            spent.get("jax") or "-",
        ]
        judged = f"{source.get('path', '-')} (step {source.get('step', '-')})"
        rows.append((run.name, [*map(Cell, texts + [judged] * judges)]))
    count = f"{len(runs)} runs" if len(runs) > 1 else "1 run"
    made = f"made by jaxcl {core.library_version()}"
    return {
        "lead": _summary_sentence(runs),
        "about": f"{count}, results of {_format_time(max(dates))}, {made}",
        "runs": Table([*columns, *["encoder judged"] * judges], rows),
        "remarks": [f"{line}." for run in runs for line in runs_lib.list_remarks(run)],
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

    The time of the last logged row is preferred to that of the file, which is the time
    of the copy if somebody copied it.
    """
    rows = [own[-1] for own in run.logged_rows.values() if own]
    logged = [row["time"]["unix"] for row in rows if "unix" in row.get("time", {})]
    files = (folder / results_lib.RESULTS for folder in run.folders.values())
    return max(logged) if logged else max(file.stat().mtime for file in files)


def _summary_sentence(runs) -> str:
    """Summarise the results in one sentence; "" without measurements."""
    names = _in_all_runs(runs, numbers.list_matrices)
    names = [name for name in names if not name.endswith("/task_aware")] or names
    names.sort(key=lambda name: not name.startswith("predict/"))
    for name in names:
        reached = []
        for run in runs:
            measured = numbers.mean_measures(run).get(name, {}).get("average_accuracy")
            if measured is not None and measured.mean is not None:
                before = numbers.untrained_accuracy(run, name).mean
                beside = (
                    f" (untrained {formats.format_percent(before)} %)" if before else ""
                )
                whole = f"{formats.format_percent(measured.mean)} %{beside}"
                reached.append(f"{run.name} reaches {whole}")
        if reached:
            tasks = max(run.finished_tasks for run in runs)
            over = f"the average over {tasks} tasks" if tasks > 1 else "accuracy"
            return f"{', '.join(reached)}: {over}, {name}."
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
    keys = [key for key in numbers.MEASURES if any(key in own for own in measured)]
    before = [numbers.untrained_accuracy(run, name) for run in having]
    shows_before = any(estimate.mean is not None for estimate in before)
    rows = []
    for run, own, first in zip(having, measured, before, strict=True):
        cells, count = [], len(run.results)
        for key in keys:
            delta = None
            if key in own and run is not runs[0] and runs[0] in having:
                delta = numbers.mean_difference(run, runs[0], name, key)
            value = own.get(key, numbers.UNKNOWN)
            cells.append(
                formats.format_estimate(
                    value, formats.format_percent, expected=count, delta=delta
                )
            )
        if shows_before:
            cells.append(
                formats.format_estimate(first, formats.format_percent, expected=count)
            )
        rows.append((run.name, [Cell(str(count)), *cells]))
    titles = [key.replace("_", " ") for key in keys] + ["untrained"] * shows_before
    return Table(["run", "seeds", *titles], rows)


def _lay_out_heatmap(run, name) -> dict:
    """Lay out the accuracy matrix of a run, averaged over its seeds."""
    matrix, label = numbers.mean_matrix(run, name), f"{name} of {run.name}"
    if matrix.shape[1] > _MOST_TASKS:
        drawn = _draw_picture(plots.accuracy_matrix, matrix, title=label)
        return {"label": label, "picture": drawn}
    rows = [(f"after {i + 1}", row, row[: i + 1]) for i, row in enumerate(matrix)]
    for head, key, at in (("untrained", "untrained", 0), ("alone", "finetune", None)):
        if (row := numbers.mean_row(run, key, name)) is not None:
            rows.insert(len(rows) if at is None else at, (head, row, row))
    cells = [
        (head, [*map(_format_share, row), _mean_cell(met)]) for head, row, met in rows
    ]
    columns = [str(task + 1) for task in range(matrix.shape[1])]
    return {
        "label": label,
        "picture": None,
        "table": Table(["", *columns, "mean"], cells),
    }


def _format_share(value) -> Cell:
    known = np.isfinite(value)
    return Cell(
        formats.format_percent(value), share=round(60 * value) if known else None
    )


def _mean_cell(row) -> Cell:
    known = row[np.isfinite(row)]
    return Cell(formats.format_percent(float(known.mean()) if len(known) else None))


def list_scalars(runs: list[runs_lib.RunGroup]) -> Table:
    """List the last values of the evaluators' scalars, a row for each."""
    lasts = [numbers.mean_scalars(run, runs[0]) for run in runs]
    rows = []
    for name in numbers.list_names(lasts):
        cells = []
        for run, own in zip(runs, lasts, strict=True):
            last, delta = own.get(name, (numbers.UNKNOWN, None))
            delta = delta if run is not runs[0] and name in lasts[0] else None
            count = len(run.results)
            cells.append(
                formats.format_estimate(
                    last, formats.format_number, expected=count, delta=delta
                )
            )
        rows.append((name, cells))
    return Table(["scalar", *(run.name for run in runs)], rows)


# Cost

_SPENT = (
    ("training (s)", "train", formats.format_seconds),
    ("compiling (s)", "compile", formats.format_seconds),
    ("evaluation (s)", "evaluation", formats.format_seconds),
    ("rest (s)", "rest", formats.format_seconds),
    ("steps", "steps", formats.format_number),
    ("images", "images", formats.format_number),
    (
        "FLOPs",
        "flops",
        lambda x: "-" if x is None else cost_lib.format_count(x).strip(),
    ),
    ("ms/step", "milliseconds", formats.format_number),
    ("memory (GB)", "peak_bytes", lambda x: "-" if x is None else f"{x / 1e9:.2f}"),
)


def cost_table(runs: list[runs_lib.RunGroup]) -> Table:
    """List the cost of each run, with its accuracies."""
    names, rows = _in_all_runs(runs, numbers.list_matrices)[:_MOST_NAMES], []
    for run in runs:
        measured, spent = numbers.mean_measures(run), numbers.mean_cost(run)
        means = (measured.get(x, {}).get("average_accuracy") for x in names)
        cells = [formats.format_percent(mean and mean.mean) for mean in means]
        cells += [form(spent[key]) for _, key, form in _SPENT]
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
    curves = {key: found for key, found in curves.items() if len(found[0]) > 1}
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


def _read_pictures(run) -> list[tuple[str, str]]:
    """Read the pictures of the first seed, except those that the page draws itself.

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
            found.append((file.stem.replace("_", " "), _encode_picture(data)))
            left -= len(data)
    return found


# Configs


def _list_differences(runs) -> Table:
    """List the fields in which the configs differ."""
    having = [run for run in runs if run.configs.asked is not None]
    flats = [comparability.flatten(run.configs.asked) for run in having]
    rows = [
        (path, [Cell(own.get(path, "not set")) for own in flats])
        for path in sorted(numbers.list_names(flats))
        if len({own.get(path) for own in flats}) > 1
    ]
    return Table(["field", *(run.name for run in having)], rows)
