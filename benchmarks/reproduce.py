"""Run settings that others published: `python benchmarks/reproduce.py NAME --seeds=5`.

A row of ROWS names a config, a published number and the source it was read in. A row
runs with several seeds; the same command resumes it. Its accuracies go into
docs/reproductions.json, and the table of docs/reproductions.md is written anew.
Without a NAME the command lists all rows. Exit codes are those of `jaxcl.main`.
"""

import argparse
import datetime
import math
import os
import pathlib
import platform
import statistics
import subprocess
import sys
from typing import Any, NamedTuple

import jax
from etils import epath

from jaxcl import storage
from jaxcl.config import build, command, files
from jaxcl.run import finish, result_file, seeds

ROOT = pathlib.Path(__file__).parents[1]
MARK = "<!-- The rest of this page is written by the script. -->"
TEST_ROWS = "predict/accuracy"  # over all rows of the test split
OVER_TASKS = "predict/class_incremental"  # mean over the tasks


class Published(NamedTuple):
    """A published mean, in percent."""

    value: float
    error: float | None = None  # standard error of the mean, if the source has one
    tolerance: float | None = None  # how far below its own value the source accepts
    spread: str = "no spread"  # as printed


class Row(NamedTuple):
    """A published number, and the run that measures it."""

    config: str  # FILE:WORDS of configs/
    data: str  # name of the set in the folder of --data
    published: Published
    source: str
    minutes: float  # of a seed on one core, roughly
    overrides: tuple[str, ...] = ()  # as of jaxcl.main, without --config.
    # A scalar of results.json, or a matrix, of which the mean over tasks counts; both
    # after the last task.
    measure: str = TEST_ROWS
    other: dict[str, Published] = {}  # further scalars of the same runs


class Comparison(NamedTuple):
    """A measured mean beside a published one, in percent."""

    mean: float
    deviation: float | None  # sample standard deviation over seeds; None: one seed
    difference: float  # measured - published
    allowed: float | None  # largest difference that agrees; None: unknown
    agrees: bool | None


def compare(values: list[float], published: Published) -> Comparison:
    """Compare the accuracies of several seeds with a published mean.

    A source's own tolerance decides if it has one; results above it agree, too. Else
    means agree within two standard errors of their difference,
    2 sqrt(s^2 / n + e^2), with our deviation s over n seeds and the published error e.
    """
    mean = statistics.fmean(values)
    deviation = statistics.stdev(values) if len(values) > 1 else None
    difference, allowed, agrees = mean - published.value, published.tolerance, None
    if allowed is not None:
        agrees = difference >= -allowed
    elif published.error is not None and deviation is not None:
        allowed = 2 * math.hypot(deviation / math.sqrt(len(values)), published.error)
        agrees = abs(difference) <= allowed
    return Comparison(mean, deviation, difference, allowed, agrees)


def _deviation(value: float, spread: float, runs: int) -> Published:
    """Return a published mean with its sample deviation over `runs` runs."""
    error = spread / math.sqrt(runs)
    return Published(value, error, spread=f"± {spread:g} ({runs})")


def _target(config, value, minutes, where="tests/target_results.csv", **more) -> Row:
    """Return a row of continual-learning-baselines, whose tests allow 3 points less."""
    source = f"ContinualAI/continual-learning-baselines 4900462, {where}"
    published = Published(value, tolerance=3.0, spread="(1)")
    return Row(config, more.pop("data", "mnist"), published, source, minutes, **more)


_AVALANCHE = {
    "gdumb_split_mnist": _target("baselines_mnist:gdumb", 97.0, 3),
    "replay_split_mnist": _target("baselines_mnist:replay", 92.0, 1),
    "mir_split_mnist": _target("baselines_mnist:mir", 87.0, 1),
    "gss_split_mnist": _target("baselines_mnist:gss", 78.0, 1),
    "agem_permuted_mnist": _target("baselines_mnist:agem", 81.0, 15),
    "gem_permuted_mnist": _target("baselines_mnist:gem", 93.0, 15),
    "gem_permuted_mnist_17": _target(
        "baselines_mnist:gem",
        80.0,
        150,
        "README",
        overrides=("scenario.num_tasks=17", "replay.capacity=17000"),
    ),
    "er_ace_split_cifar100": _target(
        "er_ace_cifar100:er_ace",
        24.0,
        10,
        data="cifar100",
        overrides=(
            "method.head=linear",
            "data.validation=0.0",
            "augment.mean=(0.5071,0.4865,0.4409)",
            "augment.std=(0.2009,0.1984,0.2023)",
        ),
    ),
}


def _cifar10(method, per_class, published, source, *overrides) -> Row:
    changes = (f"replay.per_class={per_class}", *overrides)
    minutes = 20 if method in ("er_aml", "mir") else 10
    config = f"er_ace_cifar10:{method}"
    return Row(config, "cifar10", published, source, minutes, changes)


# Mean and spread with 20 and with 100 images a class. The paper's code prints two
# standard errors of 20 runs behind "±"; MIR's cells have no spread.
_CACCIA = {
    "er": ((26.7, 0.3), (41.5, 0.6)),
    "er_ace": ((43.7, 0.3), (50.9, 0.4)),
    "er_aml": ((40.1, 0.4), (49.8, 0.5)),
    "mir": ((29.8, None), (47.6, None)),
}
# The search that the paper's code holds: mean and deviation of three runs of the best
# learning rate, on held-out train images.
_SEARCHED = {
    "er_task_free": ((24.6, 2.0), (40.0, 2.1)),
    "er_ace": ((44.7, 1.5), (53.7, 0.3)),
    "er_aml": ((45.7, 0.8), (52.5, 1.7)),
    "mir": ((28.2, 3.8), (45.7, 0.3)),
    "icarl": ((41.9, 3.6), (46.0, 0.4)),
    "agem": ((18.7, 0.2), (18.6, 0.2)),
}
_AML = ("method.loss=sup_con", "method.temperature=0.2", "optimizer.lr=0.1")
_AS_SEARCHED = {"er_ace": ("method.form=code",), "er_aml": _AML}


def _caccia() -> dict[str, Row]:
    """Return the rows of the ER-ACE paper, and of the search that its code holds."""
    rows = {}
    for at, per_class in enumerate((20, 100)):
        for method, cells in _CACCIA.items():
            mean, spread = cells[at]
            published = Published(mean)
            if spread is not None:
                published = Published(mean, spread / 2, spread=f"± {spread} (20)")
            source = "Caccia et al., arXiv 2104.05025, Table 2"
            name = f"{method}_split_cifar10_{per_class}"
            rows[name] = _cifar10(method, per_class, published, source)
        for method, cells in _SEARCHED.items():
            changes = ("data.validation=0.0", *_AS_SEARCHED.get(method, ()))
            if (method, per_class) == ("er_ace", 20):
                changes += ("optimizer.lr=0.01",)
            published = _deviation(*cells[at], 3)
            source = "pclucas14/AML 7c92936, hp_result_final.csv"
            name = f"searched_{method}_split_cifar10_{per_class}"
            rows[name] = _cifar10(method, per_class, published, source, *changes)
    return rows


# Dark Experience Replay's table: stream -> method -> mean and deviation of ten runs
# with 200, 500 and 5,120 images stored, or without a memory. The repository's first
# README prints the means; the deviations are the paper's from memory, since its table
# could not be opened.
_BUZZEGA = {
    "split": {
        "er": ((80.43, 1.89), (86.12, 1.89), (93.40, 1.29)),
        "der": ((84.55, 1.64), (90.54, 1.18), (94.90, 0.57)),
        "derpp": ((85.61, 1.40), (91.00, 1.49), (95.30, 1.20)),
        "gem": ((80.11, 1.54), (85.99, 1.35), (95.11, 0.87)),
        "agem": ((45.72, 4.26), (46.66, 5.85), (54.24, 6.49)),
        "finetune": ((19.60, 0.04),),
    },
    "permuted": {
        "er": ((72.37, 0.87), (80.60, 0.86), (89.90, 0.13)),
        "der": ((81.74, 1.07), (87.29, 0.46), (91.66, 0.11)),
        "derpp": ((83.58, 0.59), (88.21, 0.39), (92.26, 0.17)),
        "gem": ((66.93, 1.25), (76.88, 0.52), (87.42, 0.95)),
        "agem": ((66.42, 4.00), (67.56, 1.28), (73.32, 1.12)),
        "finetune": ((40.70, 2.33),),
    },
    "rotated": {
        "er": ((85.01, 1.90), (88.91, 1.44), (93.45, 0.56)),
        "der": ((90.04, 2.61), (92.24, 1.12), (94.14, 0.31)),
        "derpp": ((90.43, 1.87), (92.77, 1.05), (94.65, 0.33)),
        "gem": ((80.80, 1.15), (81.15, 1.98), (88.57, 0.40)),
        "agem": ((81.91, 0.76), (80.31, 6.29), (80.18, 5.52)),
        "finetune": ((67.66, 8.53),),
    },
}


def _buzzega() -> dict[str, Row]:
    """Return the MNIST cells of the DER paper."""
    rows = {}
    source = "aimagelab/mammoth 7ab9db9, README; deviations: the paper, from memory"
    for stream, methods in _BUZZEGA.items():
        minutes = 1 if stream == "split" else 4
        for method, cells in methods.items():
            sizes = [["200"], ["500"], ["5120"]] if method != "finetune" else [[]]
            for size, cell in zip(sizes, cells, strict=True):
                name = "_".join([method, stream, "mnist", *size])
                rows[name] = Row(
                    "der_mnist:" + ",".join([method, stream, *size]),
                    "mnist",
                    _deviation(*cell, 10),
                    source,
                    3 * minutes if method == "gem" else minutes,
                    measure=OVER_TASKS,
                )
    return rows


def _graphcl(word, data, mean, spread, minutes) -> Row:
    published = _deviation(mean, spread, 5)
    source = "GraphCL, NeurIPS 2020, as GraphMAE's README prints it"
    return Row(f"graphcl:{word}", data, published, source, minutes, measure="svm/all")


ROWS = {
    **_AVALANCHE,
    **_caccia(),
    **_buzzega(),
    "survey_er_split_cifar100": Row(
        "survey_cifar100:er",
        "cifar100",
        _deviation(28.15, 1.22, 5),
        "AlbinSou/ocl_survey 5fcaa39, logs of five runs",
        40,
        other={"logistic/accuracy": _deviation(44.91, 0.90, 5)},
    ),
    "graphcl_mutag": _graphcl("mutag", "mutag", 86.80, 1.34, 1),
    "graphcl_proteins": _graphcl("proteins", "proteins", 74.39, 0.45, 5),
    "graphcl_reddit": _graphcl("reddit", "reddit_binary", 89.53, 0.84, 30),
}


def find_data(folder: str, name: str, source: str) -> dict[str, str]:
    """Return config.data's options for a set: a folder or .npz file in `folder`.

    Args:
      source: config.data.name; "arrays" of a file become "npz".

    Raises:
      ValueError: neither is there.
    """
    whole, packed = os.path.join(folder, name), os.path.join(folder, f"{name}.npz")
    if os.path.isdir(whole):
        return {"path": whole}
    if os.path.exists(packed):
        return {"path": packed, **({"name": "npz"} if source == "arrays" else {})}
    raise ValueError(f"--data={folder}: must hold {name}/ or {name}.npz")


def make_config(row: Row, *, count: int, data: str):
    """Build the config of a row, for `count` seeds."""
    words = [f"--config={row.config}", *(f"--config.{x}" for x in row.overrides)]
    config = files.read_config(words)
    config.seeds = count
    config.plots = config.tensorboard = False
    config.data.update(find_data(data, row.data, config.data.name))
    return config


def about() -> dict[str, str]:
    """Describe when and with which code and machine a run was made."""
    git = ["git", "-C", str(ROOT), "describe", "--always", "--exclude=*", "--dirty=+"]
    commit = subprocess.run(git, capture_output=True, text=True).stdout.strip()
    return {
        "commit": commit,
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "hardware": f"{jax.device_count()} x {jax.devices()[0].device_kind}, "
        f"{platform.machine()}, {os.cpu_count()} cores",
        "jax": jax.__version__,
    }


def measured(row: Row, runs: dict[int, dict], minutes: float) -> dict[str, Any]:
    """Collect the accuracies of a row in percent: seed -> results to a JSON record."""

    def read(results, measure):
        last = results["scalars"][-1]
        if measure in last:
            return last[measure]
        return result_file.summary(results)[measure]["average_accuracy"]

    def values(measure):
        return {
            str(seed): round(100 * read(results, measure), 4)
            for seed, results in runs.items()
        }

    record = {"values": values(row.measure), "minutes": round(minutes, 1)}
    if row.other:
        record["other"] = {measure: values(measure) for measure in row.other}
    return record


def table(numbers: dict[str, dict]) -> list[str]:
    """Return the markdown table of all measured rows, and the sources by number."""
    lines = [
        "| row | config | ours | published | difference | allowed | agrees | source |",
        "|---|---|---|---|---|---|---|---|",
    ]
    places = {}  # source -> its number
    for name, row in ROWS.items():
        if name not in numbers:
            continue
        record, place = numbers[name], places.setdefault(row.source, len(places) + 1)
        overrides = "".join(f", `{x}`" for x in row.overrides)
        start = f"| `{name}` | `{row.config}`{overrides}"
        lines.append(_line(start, record["values"], row.published, str(place)))
        for measure, published in row.other.items():
            start = f"| `{measure}` of the row above | "
            lines.append(_line(start, record["other"][measure], published))
    lines += ["", *(f"{place}. {source}" for source, place in places.items())]
    missing = len(ROWS.keys() - numbers.keys())
    note = f"{missing} further rows were not run."
    return [*lines, "", note] if missing else lines


def _line(start: str, values: dict, published: Published, source="") -> str:
    said = compare(list(values.values()), published)
    theirs = f"{published.value:.2f} {published.spread}"
    spread = "" if said.deviation is None else f" ± {said.deviation:.2f}"
    ours = f"{said.mean:.2f}{spread} ({len(values)})"
    allowed = "" if said.allowed is None else f"{said.allowed:.2f}"
    agrees = {True: "yes", False: "no", None: ""}[said.agrees]
    cells = (ours, theirs, f"{said.difference:+.2f}", allowed, agrees, source)
    return f"{start} | {' | '.join(cells)} |"


def write_page(path: str | os.PathLike, lines: list[str]) -> None:
    """Write tables below MARK; the text above it stays."""
    page = pathlib.Path(path)
    above = page.read_text().partition(MARK)[0] if page.exists() else ""
    with storage.replacing(page) as file:
        file.write("\n".join([above + MARK, "", *lines, ""]).encode())


def main(argv: list[str] | None = None) -> int:
    """Run the command; returns its exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("name", nargs="?", choices=[*ROWS], metavar="NAME")
    parser.add_argument("--seeds", type=int, default=5, help="how many; 5")
    parser.add_argument("--data", default="data", help="folder of the data sets")
    parser.add_argument("--out", default="runs/reproduce", help="run directories")
    parser.add_argument("--page", default=str(ROOT / "docs" / "reproductions.md"))
    options = parser.parse_args(argv)
    if options.name is None:
        for name, row in ROWS.items():
            print(f"{name:40}{row.minutes:4g} minutes a seed  {row.source}")
        return 0
    if options.seeds < 1:
        parser.error(f"--seeds={options.seeds}: must be at least 1")
    row, folder = ROWS[options.name], epath.Path(options.out) / options.name

    def make():
        config = make_config(row, count=options.seeds, data=options.data)
        workdir = folder if options.seeds > 1 else folder / seeds.folder(config.seed)
        return build.build(config, workdir), workdir, config.seed, about()

    def work(made, stop):
        job, workdir, first, when = made
        finish.run_job(job, workdir, stop=stop)
        chosen = range(first, first + options.seeds)
        runs = {s: result_file.read_results(folder / seeds.folder(s)) for s in chosen}
        minutes = sum(sum(results["seconds"]) for results in runs.values()) / 60
        path = epath.Path(options.page).with_suffix(".json")
        numbers = storage.read_object(path) if path.exists() else {}
        numbers[options.name] = measured(row, runs, minutes) | when
        result_file.write_json(path, dict(sorted(numbers.items())))
        lines = table(numbers)
        write_page(options.page, lines)
        own = next(line for line in lines if line.startswith(f"| `{options.name}` "))
        print("\n".join([*lines[:2], own]))

    return command.run_until_signal(make, work)


if __name__ == "__main__":
    sys.exit(main())
