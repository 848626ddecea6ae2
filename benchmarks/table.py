r"""A table of finished runs beside the numbers of a paper, as Markdown and CSV.

  python benchmarks/table.py runs/er_cifar10 runs/er_ace_cifar10 \
      --matrix=predict/class_incremental --measure=average_accuracy \
      --paper er_cifar10=26.7 er_ace_cifar10=43.7 --csv=table.csv

A directory is a run, or one of several seeds. The paper's numbers are of the first
--matrix (the evaluator) and --measure. All in percent.
"""

import argparse
import csv
import pathlib
import statistics
import sys
from typing import NamedTuple

from jaxcl.errors import Refused
from jaxcl.report import compare, numbers, run_groups

HEAD = (
    "Percent; mean ± standard deviation over seeds (n - 1), not the standard error. "
    "Difference: ours less the paper's."
)


class Cell(NamedTuple):
    """One measure of one run, a line of the CSV file; None where it is not known."""

    name: str
    matrix: str
    measure: str
    seeds: int  # number of them that have the measure
    mean: float | None  # percent
    std: float | None  # percent
    paper: float | None  # percent
    difference: float | None


def read_paper(words: list[str]) -> dict[str, float]:
    """Read NAME=VALUE: name of a run -> the paper's number."""
    paper = {}
    for word in words:
        name, _, value = word.rpartition("=")
        try:
            paper[name] = float(value)
        except ValueError as error:
            raise Refused("--paper", word, "must be NAME=NUMBER") from error
    return paper


def read_runs(folders: list[str]) -> list[run_groups.RunGroup]:
    """Read finished runs; say which seeds are left out."""
    runs = run_groups.read_all(folders)
    for run in runs:
        if run.finished_tasks < run.num_tasks:
            done = f"{run.finished_tasks} of {run.num_tasks} tasks are finished"
            raise Refused(f"{run.workdir}: {done}; continue it, or leave it out")
        if run.behind:
            left_out = ", ".join(map(str, sorted(run.behind)))
            print(f"{run.name}: left out, not finished: seed {left_out}")
    return runs


def make_cells(options) -> list[Cell]:
    """Compute all cells.

    Raises:
      Refused: no run has a matrix, a measure, or the name of a paper's number.
    """
    runs, paper = read_runs(options.runs), read_paper(options.paper)
    known = [by_name for run in runs for by_name in run.measures.values()]
    names = {"matrix": numbers.list_names(known)}
    names["measure"] = numbers.list_names(x for y in known for x in y.values())
    for field, allowed in names.items():
        for wanted in getattr(options, field) or ():
            if wanted not in allowed:
                raise Refused(f"--{field}", wanted, f"must be of {', '.join(allowed)}")
    matrices, cells = options.matrix or names["matrix"], []
    for run in runs:
        for matrix in matrices:
            for measure in options.measure:
                values = run_groups.measure_by_seed(run, matrix, measure).values()
                values = [100 * x for x in values if x is not None]
                mean = statistics.fmean(values) if values else None
                std = statistics.stdev(values) if len(values) > 1 else None
                number = difference = None
                if (matrix, measure) == (matrices[0], options.measure[0]):
                    number = paper.pop(run.name, None)
                if number is not None and mean is not None:
                    difference = mean - number
                cell = run.name, matrix, measure, len(values), mean, std
                cells.append(Cell(*cell, number, difference))
    for name in paper:
        allowed = ", ".join(run.name for run in runs)
        raise Refused("--paper", name, f"must be of {allowed}")
    return cells


def markdown(cells: list[Cell]) -> str:
    """Write a line for each run, matrix and measure."""
    lines = [HEAD, "", "| run | matrix | measure | seeds | ours | paper | difference |"]
    lines.append("|---" * 4 + "|---:" * 3 + "|")
    for cell in cells:
        ours = "not measured" if cell.mean is None else f"{cell.mean:.2f}"
        ours += "" if cell.std is None else f" ± {cell.std:.2f}"
        paper = "-" if cell.paper is None else f"{cell.paper:.2f}"
        gap = "-" if cell.difference is None else f"{cell.difference:+.2f}"
        lines.append(f"| {' | '.join(map(str, (*cell[:4], ours, paper, gap)))} |")
    return "\n".join(lines)


def parser() -> argparse.ArgumentParser:
    """Make the command line."""
    made = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add = made.add_argument
    add("runs", nargs="+", metavar="DIR", help="run directories")
    add("--matrix", action="append", help="default: all; any number")
    measures = f"default: {', '.join(compare.MEASURES)}"
    add("--measure", action="append", help=measures)
    add("--paper", nargs="+", default=[], metavar="NAME=NUMBER", help="in percent")
    add("--csv", type=pathlib.Path, help="a file for all cells, in long form")
    return made


def main(argv=None) -> int:
    """Print the table; return 2 if an argument is wrong."""
    options = parser().parse_args(argv)
    options.measure = options.measure or [*compare.MEASURES]
    try:
        cells = make_cells(options)
        print(markdown(cells))
        if options.csv:
            with open(options.csv, "w", newline="", encoding="utf-8") as file:
                csv.writer(file).writerows([Cell._fields, *cells])
    except (Refused, OSError) as error:
        print(f"jaxcl: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
