r"""A table of runs beside the numbers of a paper, as markdown and CSV.

  python benchmarks/table.py runs/er_cifar10 runs/er_ace_cifar10 \
      --matrix=predict/class_incremental --measure=average_accuracy \
      --paper er_cifar10=26.7 er_ace_cifar10=43.7 --csv=table.csv

A directory is a run, or one of several seeds. A number of a paper is compared with ours
only if it is of the same name, matrix (the evaluator) and measure. It is NAME=VALUE,
which takes --matrix and the first --measure, or a file: .csv with the columns name,
matrix, measure, value and perhaps std, or .json, a list of objects with these keys.
All in percent.
"""

import argparse
import csv
import dataclasses
import io
import json
import math
import statistics
import sys
from typing import NamedTuple

from etils import epath

from jaxcl.errors import Refused
from jaxcl.report import compare, run_groups
from jaxcl.run import result_file, seeds

HEAD = (
    "Percent; mean ± standard deviation over seeds (n - 1), not the standard error. "
    "Difference: ours less the paper's."
)
NO_RUN, NO_PAPER = "not measured", "no number"
FIELDS = ("name", "matrix", "measure")


class Number(NamedTuple):
    """What a paper has for a cell, in percent."""

    value: float
    std: float | None


class Cell(NamedTuple):
    """One measure of one run beside the paper's; None where there is none."""

    name: str
    matrix: str
    measure: str
    mean: float | None  # percent
    std: float | None  # percent; None of one seed
    seeds: int  # that were measured
    of: int  # finished seeds
    paper: Number | None

    def difference(self) -> float | None:
        """Ours less the paper's."""
        known = self.mean is not None and self.paper is not None
        return self.mean - self.paper.value if known else None


def read_runs(given: list[str]) -> tuple[dict[str, run_groups.RunGroup], list[str]]:
    """Name -> its finished seeds, and what was left out, one line each.

    Args:
      given: directories, or NAME=DIR.

    Raises:
      Refused: a directory holds no run, no finished one, or a name comes twice.
    """
    runs, notes = {}, []
    for text in given:
        name, mark, place = text.partition("=")
        # A directory of a sweep has = in its name.
        if not mark or epath.Path(text).exists():
            name, place = None, text
        run = run_groups.read_run(place)
        name = name or run.name
        if name in runs:
            raise Refused(f"{text}: there is a run {name} already; give NAME=DIR")
        whole = {seed: one for seed, one in run.results.items() if _whole(one)}
        begun = {seed for seed in run.results if seed not in whole}
        begun |= {*seeds.folders(place)} - {*run.results}
        if begun:
            listed = ", ".join(map(str, sorted(begun)))
            notes.append(f"{name}: left out, not finished: seed {listed}")
        if not whole:
            raise Refused(f"{text}: no run in it is finished")
        runs[name] = dataclasses.replace(run, name=name, results=whole)
    return runs, notes


def _whole(results: dict) -> bool:
    return result_file.count_finished(results) == len(results["task_names"])


def read_paper(given: list[str], *, matrix, measure) -> dict[tuple, Number]:
    """(name, matrix, measure) -> the paper's number.

    Args:
      given: NAME=VALUE or files.
      matrix: of NAME=VALUE; None where it was not said.
      measure: the same.

    Raises:
      Refused: a number without a name, matrix or measure, or two for one cell.
    """
    found = {}
    for text in given:
        if text.endswith((".json", ".csv")):
            rows = _rows(text)
        else:
            name, _, value = text.rpartition("=")
            if matrix is None:
                raise Refused(
                    f"--paper {text}: of which evaluator? --matrix=NAME is missing"
                )
            rows = [{"name": name, "matrix": matrix, "measure": measure}]
            rows[0]["value"] = value
        for number, row in enumerate(rows, 1):
            where = f"--paper {text}, row {number}"
            lacking = [key for key in (*FIELDS, "value") if not str(row.get(key) or "")]
            if lacking:
                raise Refused(f"{where}: has no {lacking[0]}")
            key = tuple(row[field] for field in FIELDS)
            if key in found:
                raise Refused(f"{where}: a second number of {' '.join(key)}")
            std = row.get("std")
            std = None if std in (None, "") else _number(where, "std", std)
            found[key] = Number(_number(where, "value", row["value"]), std)
    return found


def _rows(path: str) -> list[dict]:
    text = epath.Path(path).read_text()
    if path.endswith(".csv"):
        return list(csv.DictReader(io.StringIO(text)))
    rows = json.loads(text)
    if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
        raise Refused(f"--paper {path}: must be a list of objects")
    return rows


def _number(where: str, field: str, text) -> float:
    try:
        value = float(text)
    except (TypeError, Refused):
        value = math.nan
    if not math.isfinite(value):
        raise Refused(f"{where}: {field}={text}: must be a number")
    return value


def cell(run: run_groups.RunGroup, matrix: str, measure: str, paper: dict) -> Cell:
    """One measure of one run, over its seeds."""
    each = [seeds.measures(one).get(matrix, {}) for one in run.results.values()]
    values = [100 * one[measure] for one in each if one.get(measure) is not None]
    mean = statistics.fmean(values) if values else None
    std = statistics.stdev(values) if len(values) > 1 else None
    number = paper.get((run.name, matrix, measure))
    return Cell(run.name, matrix, measure, mean, std, len(values), len(each), number)


def ours(one: Cell) -> str:
    """What we measured, as it stands in the table."""
    if one.mean is None:
        return NO_RUN
    std = "" if one.std is None else f" ± {one.std:.2f}"
    # Of seeds that were all measured the table has a column.
    part = "" if one.seeds == one.of else f" ({one.seeds} of {one.of} seeds)"
    return f"{one.mean:.2f}{std}{part}"


def theirs(one: Cell) -> str:
    """What the paper has, as it stands in the table."""
    if one.paper is None:
        return NO_PAPER
    std = "" if one.paper.std is None else f" ± {one.paper.std:.2f}"
    return f"{one.paper.value:.2f}{std}"


def markdown(cells: list[Cell], notes: list[str]) -> str:
    """One line per run and matrix, three columns per measure that a paper has."""
    measures = list(dict.fromkeys(one.measure for one in cells))
    compared = {one.measure for one in cells if one.paper is not None}
    head = ["run", "matrix", "seeds"]
    for measure in measures:
        title = measure.replace("_", " ")
        head += [title, *(["paper", "difference"] if measure in compared else [])]
    lines = [HEAD, "", "| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    rows = {}
    for one in cells:
        row = rows.setdefault((one.name, one.matrix), [str(one.of)])
        row.append(ours(one))
        if one.measure in compared:
            gap = one.difference()
            row += [theirs(one), "-" if gap is None else f"{gap:+.2f}"]
    lines += ["| " + " | ".join([*key, *row]) + " |" for key, row in rows.items()]
    return "\n".join([*lines, *([""] if notes else []), *notes])


def as_csv(cells: list[Cell]) -> str:
    """One line per cell; what is not known is empty."""
    made = io.StringIO()
    writer = csv.writer(made, lineterminator="\n")
    writer.writerow(
        [*FIELDS, "seeds", "mean", "std", "paper", "paper_std", "difference"]
    )
    for one in cells:
        paper = one.paper or (None, None)
        writer.writerow(
            [*one[:3], one.seeds, one.mean, one.std, *paper, one.difference()]
        )
    return made.getvalue()


def table(options) -> tuple[list[Cell], list[str]]:
    """The cells, and notes about what is not in them.

    Raises:
      Refused: a run cannot be read, or no run has a matrix or measure.
    """
    runs, notes = read_runs(options.runs)
    given = options.matrix
    paper = read_paper(
        options.paper,
        matrix=given[0] if given and len(given) == 1 else None,
        measure=options.measure[0],
    )
    known = {}  # matrix -> its measures
    for run in runs.values():
        for one in run.results.values():
            for name, measured in seeds.measures(one).items():
                known.setdefault(name, {}).update(measured)
    for name in given or ():
        if name not in known:
            raise Refused(f"--matrix={name}: allowed are {', '.join(known)}")
    for measure in options.measure:
        if not any(measure in measured for measured in known.values()):
            allowed = sorted(set().union(*known.values()))
            raise Refused(f"--measure={measure}: allowed are {', '.join(allowed)}")
    cells = [
        cell(run, matrix, measure, paper)
        for run in runs.values()
        for matrix in given or known
        for measure in options.measure
    ]
    shown = {one[:3] for one in cells}
    notes += [
        f"{' '.join(key)}: the paper has {number.value:g}, and no row here is of it"
        for key, number in paper.items()
        if key not in shown
    ]
    return cells, notes


def parser() -> argparse.ArgumentParser:
    """The options of the command."""
    made = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    made.add_argument("runs", nargs="+", metavar="DIR", help="or NAME=DIR")
    made.add_argument("--matrix", action="append", help="default: all; any number")
    made.add_argument(
        "--measure", action="append", help=f"default: {', '.join(compare.MEASURES)}"
    )
    made.add_argument(
        "--paper",
        nargs="+",
        action="extend",
        default=[],
        metavar="NUMBER",
        help="NAME=VALUE, FILE.json or FILE.csv",
    )
    made.add_argument("--csv", help="a file for it, in long form")
    made.add_argument("--out", help="a file for the markdown")
    return made


def main(argv=None) -> int:
    """The command; exit code 2 where an argument is wrong."""
    options = parser().parse_args(argv)
    options.measure = options.measure or [*compare.MEASURES]
    try:
        cells, notes = table(options)
        text = markdown(cells, notes)
        print(text)
        if options.out:
            epath.Path(options.out).write_text(text + "\n")
        if options.csv:
            epath.Path(options.csv).write_text(as_csv(cells))
    except (Refused, OSError) as error:
        print(f"jaxcl: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
