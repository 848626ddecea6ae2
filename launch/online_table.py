r"""The replay methods on Split CIFAR-10: their runs, one by one, and the table of them.

  python launch/online_table.py --data=data/cifar10 --per-class 100 --seeds 0 1 2

trains each row of ROWS with each number of stored images per class and each seed, one
run at a time. Whenever a run ends, ROOT/table.md is written anew from all that are
finished, in the columns of docs/paper_er_ace.md. The same command goes on where it was
stopped, and a larger one keeps what is there: a finished run is not trained again.
"""

import argparse
import pathlib
import sys
from typing import NamedTuple

import sweep

from jaxcl.run import result_file, seeds

HEAD = (
    "| method | M | seeds | final accuracy | paper | forgetting | paper | anytime "
    "| with task labels | TFLOP | ms/step |",
    "|---|---|---|---|---|---|---|---|---|---|---|",
)
CONFIG = "configs/er_ace_cifar10.py"
MATRIX, AWARE = "predict/class_incremental", "predict/task_aware"


class Row(NamedTuple):
    """A method in one of its forms."""

    title: str
    method: str  # what follows the colon of the config
    changes: tuple[tuple[str, str], ...] = ()  # options and values
    # M -> final accuracy, forgetting; "-": the paper prints none.
    paper: dict[int, tuple[float, float | str]] = {}


# The later released code, which has "sup_con", chose that learning rate for it.
ROWS = {
    "er": Row(
        "ER",
        "er",
        (),
        {5: (19.0, "-"), 20: (26.7, 47.1), 50: (36.1, 37.6), 100: (41.5, 28.6)},
    ),
    "er_task_free": Row("ER task-free", "er_task_free"),
    "mir": Row(
        "MIR", "mir", (), {20: (29.8, 50.2), 50: (40.0, 30.2), 100: (47.6, 17.4)}
    ),
    "er_ace": Row(
        "ER-ACE",
        "er_ace",
        (),
        {5: (35.3, "-"), 20: (43.7, 27.6), 50: (48.0, 22.7), 100: (50.9, 20.3)},
    ),
    "er_ace_paper": Row(
        'ER-ACE, `form="paper"`', "er_ace", (("config.method.form", "paper"),)
    ),
    "er_aml": Row(
        "ER-AML",
        "er_aml",
        (),
        {5: (33.0, "-"), 20: (40.1, 28.9), 50: (46.0, 21.6), 100: (49.8, 17.9)},
    ),
    "er_aml_code": Row(
        'ER-AML, `form="code"`', "er_aml", (("config.method.form", "code"),)
    ),
    "er_aml_sup_con": Row(
        'ER-AML, `loss="sup_con"`, lr 0.1',
        "er_aml",
        (("config.method.loss", "sup_con"), ("config.optimizer.lr", "0.1")),
    ),
}


def planned(options) -> dict[tuple[int, str], list[sweep.Run]]:
    """(M, name of a row) -> its runs, one for each seed.

    Directories are those that launch/sweep.py gives the same runs.
    """
    runs = {}
    for per_class in options.per_class:
        for name in options.rows:
            row = ROWS[name]
            config = f"{CONFIG}:{row.method}"
            changes = (("config.replay.per_class", str(per_class)), *row.changes)
            folder = pathlib.Path(options.root) / sweep.name_of(config, changes)
            runs[per_class, name] = [
                sweep.Run(
                    config,
                    (("config.data.path", options.data), *changes),
                    seed,
                    folder / seeds.folder(seed),
                )
                for seed in options.seeds
            ]
    return runs


def in_order(runs: dict[tuple[int, str], list[sweep.Run]]) -> list[sweep.Run]:
    """All runs, one seed of every row before the next seed of any."""
    return [run for of_seed in zip(*runs.values(), strict=True) for run in of_seed]


def table(runs: dict[tuple[int, str], list[sweep.Run]]) -> str:
    """Mean and standard error over the finished seeds, one line for each row."""
    lines = [*HEAD]
    for (per_class, name), of_seeds in runs.items():
        results = {
            run.seed: result_file.read_results(run.folder)
            for run in of_seeds
            if sweep.finished(run.folder)
        }
        if results:
            lines.append(line(ROWS[name], per_class, results))
    return "\n".join(lines)


def line(row: Row, per_class: int, results: dict[int, dict]) -> str:
    """A line of the table; TFLOP of a run, milliseconds of the quickest.

    Args:
      row: what was run.
      per_class: M, stored images of each class.
      results: seed -> results.
    """
    spreads = seeds.summary(results)

    def percent(matrix, measure):
        return seeds.percent(spreads[matrix][measure]).replace("+-", "±")

    paper = [str(number) for number in row.paper.get(per_class, ("-", "-"))]
    totals = [one["cost"]["total"] for one in results.values()]
    flops = [total["flops"] for total in totals if total["flops"] is not None]
    steps = [1000 * total["train_seconds"] / total["steps"] for total in totals]
    cells = [
        row.title,
        str(per_class),
        str(len(results)),
        percent(MATRIX, "average_accuracy"),
        paper[0],
        percent(MATRIX, "forgetting"),
        paper[1],
        percent(MATRIX, "anytime"),
        percent(AWARE, "average_accuracy"),
        f"{sum(flops) / len(flops) / 1e12:.1f}" if flops else "-",
        f"{min(steps):.0f}",
    ]
    return "| " + " | ".join(cells) + " |"


def parser() -> argparse.ArgumentParser:
    """The options of the command."""
    made = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    made.add_argument(
        "--data", required=True, help="CIFAR-10 as `jaxcl convert` writes it"
    )
    made.add_argument("--per-class", nargs="+", type=int, default=[100], metavar="M")
    made.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    sweep.add_options(made, ROWS, "runs/online")
    return made


def main(argv=None) -> int:
    """The command; exit codes are those of launch/sweep.py."""
    options = parser().parse_args(argv)
    runs = planned(options)
    return sweep.with_table(in_order(runs), options, lambda: table(runs))


if __name__ == "__main__":
    sys.exit(main())
