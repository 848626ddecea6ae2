"""Five seeds of the quick start and of what it is compared with: table and picture.

  python benchmarks/quickstart.py --isa=AVX2 --root=runs/benchmark
  python benchmarks/quickstart.py --table
  python benchmarks/quickstart.py --picture=docs/images/summary.png

The first trains every row of `ROWS` with configs/quickstart.py, each seed after the
other, and adds what it finds to docs/quickstart.json; a row that is there already is
not trained again, and a run that was stopped continues. `--isa` is the most that XLA
may use of the processor; results under two of them differ by rounding alone. The
others print the table and the conditions that it has to meet, and draw the picture.
"""

import argparse
import json
import os
import pathlib
import subprocess
import sys

import numpy as np

from jaxcl import plots
from jaxcl.data.sources import shapes
from jaxcl.run import result_file

ROOT = pathlib.Path(__file__).parents[1]
FOUND = ROOT / "docs" / "quickstart.json"
PREDICTED, NEIGHBOURS = "predict/class_incremental", "knn/class_incremental"
_FINETUNE = "--config.method.name=finetune"
# row -> what it is called, and what its command adds to that of the quick start
ROWS = {
    "er_ace": ("ER-ACE", ()),
    "finetune": ("fine-tuning, equal epochs", (_FINETUNE,)),
    # A step with replay trains on twice as many images.
    "finetune_long": (
        "fine-tuning, equal FLOPs",
        (_FINETUNE, "--config.epochs=20"),
    ),
    "joint": ("all classes at once", (_FINETUNE, "--config.scenario.name=joint")),
}


def train(row: str, isa: str, seeds: int, root: pathlib.Path) -> dict[str, dict]:
    """Train all seeds of a row in one process; return the measures of each."""
    folder = root / isa.lower() / row
    command = [sys.executable, "-m", "jaxcl.main", "--config=configs/quickstart.py"]
    command += [f"--workdir={folder}", f"--config.seeds={seeds}", *ROWS[row][1]]
    command += ["--config.plots=False", "--config.tensorboard=False"]
    command += ["--config.progress=False"]
    env = {**os.environ, "XLA_FLAGS": f"--xla_cpu_max_isa={isa}"}
    subprocess.run(command, cwd=ROOT, env=env, check=True, stdout=subprocess.DEVNULL)
    return {
        str(seed): measures(result_file.read_results(folder / f"seed_{seed}"))
        for seed in range(seeds)
    }


def measures(results: dict) -> dict:
    """Return the numbers of a run that the table and the picture show."""
    matrix = result_file.matrix(results, PREDICTED)
    total = results["cost"]["total"]
    summary = result_file.summary(results)
    seconds = ("train_seconds", "compile_seconds", "evaluation_seconds")
    return {
        "met": [float(matrix[t, : t + 1].mean()) for t in range(len(matrix))],
        "forgetting": summary[PREDICTED]["forgetting"],
        "neighbours": summary[NEIGHBOURS]["average_accuracy"],
        "untrained": {
            name: float(np.mean(results["untrained"][name]))
            for name in (PREDICTED, NEIGHBOURS)
            if name in results["untrained"]
        },
        "gflop": total["flops"] / 1e9,
        "seconds": sum(total[key] for key in seconds),
    }


def collect(isa: str, seeds: int, root: pathlib.Path, out: pathlib.Path) -> None:
    """Train the rows that a JSON file lacks, and add each as soon as it is done."""
    for row in ROWS:
        found = json.loads(out.read_text()) if out.exists() else {}
        if len(found.get(isa, {}).get(row, {})) >= seeds:
            continue
        found.setdefault(isa, {})[row] = train(row, isa, seeds, root)
        out.write_text(json.dumps(found, indent=1) + "\n")
        last = [100 * run["met"][-1] for run in found[isa][row].values()]
        print(f"{isa} {row}: {', '.join(f'{x:.1f}' for x in last)} %", flush=True)


def values(found: dict, isa: str, row: str, field: str) -> np.ndarray:
    """Return a measure of all seeds of a row, in their order."""
    seeds = sorted(found[isa][row].items(), key=lambda item: int(item[0]))
    read = [of_seed[field] for _, of_seed in seeds]
    return np.array([np.nan if x is None else x for x in read], float)


def table(found: dict) -> str:
    """Return the rows as a table of Markdown, mean ± standard error in percent."""

    def shown(numbers):
        numbers = 100 * numbers[np.isfinite(numbers)]
        if not len(numbers):
            return ""
        error = numbers.std(ddof=1) / len(numbers) ** 0.5 if len(numbers) > 1 else 0
        return f"{numbers.mean():.1f} ± {error:.1f}"

    lines = [
        "| instructions | row | accuracy | forgetting | k-NN | GFLOP |",
        "|---|---|---|---|---|---|",
    ]
    for isa, rows in found.items():
        untrained = {
            name: np.array([run["untrained"][name] for run in rows["er_ace"].values()])
            for name in (PREDICTED, NEIGHBOURS)
        }
        lines.append(
            f"| {isa} | untrained | {shown(untrained[PREDICTED])} | | "
            f"{shown(untrained[NEIGHBOURS])} | 0 |"
        )
        for row in rows:
            last = np.array([run["met"][-1] for run in rows[row].values()])
            lost, near = (
                shown(values(found, isa, row, name))
                for name in ("forgetting", "neighbours")
            )
            gflop = values(found, isa, row, "gflop").mean()
            lines.append(
                f"| {isa} | {ROWS[row][0]} | {shown(last)} | {lost} | {near} | "
                f"{gflop:.0f} |"
            )
    return "\n".join(lines)


def conditions(found: dict) -> dict[str, dict[str, list[float]]]:
    """Return the four differences of each seed, in points, by instructions.

    All must be positive: training lifts k-NN by 20 points, fine-tuning forgets 8, the
    method ends 4 above fine-tuning at equal epochs and above it at equal FLOPs, and
    training on all classes at once ends above both.
    """
    by_isa = {}
    for isa, rows in found.items():
        last = {
            row: np.array([run["met"][-1] for run in rows[row].values()])
            for row in rows
        }
        before = [run["untrained"][NEIGHBOURS] for run in rows["er_ace"].values()]
        method, joint = last["er_ace"], last["joint"]
        best = np.maximum(last["finetune"], last["finetune_long"])
        points = {
            "lift - 20": values(found, isa, "er_ace", "neighbours") - before - 0.20,
            "forgetting - 8": values(found, isa, "finetune", "forgetting") - 0.08,
            "method - fine-tuning - 4": method - last["finetune"] - 0.04,
            "method - fine-tuning, equal FLOPs": method - last["finetune_long"],
            "joint - both": joint - np.maximum(method, best),
        }
        by_isa[isa] = {name: (100 * x).tolist() for name, x in points.items()}
    return by_isa


def picture(found: dict, path: str) -> None:
    """Draw images of each task above, accuracies below."""
    isa = next(iter(found))
    rows = found[isa]
    curves = {
        row: np.array([run["met"] for run in rows[row].values()])
        for row in ("er_ace", "finetune", "joint")
    }
    untrained = [run["untrained"][PREDICTED] for run in rows["er_ace"].values()]
    curves["untrained"] = np.array(untrained)[:, None]
    data = shapes.shapes(size=48, train=10, test=10)
    strips = [
        [
            data.train.images[row]
            for number in (2 * task, 2 * task + 1)
            for row in np.flatnonzero(data.train.label == number)[:4]
        ]
        for task in range(5)
    ]
    plots.summary(
        curves,
        strips,
        path,
        title="Two classes of silhouettes at a time",
        chance=0.1,
    )


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command."""
    made = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    made.add_argument("--isa", help="train under this xla_cpu_max_isa, as AVX2")
    made.add_argument("--seeds", type=int, default=5)
    made.add_argument("--root", type=pathlib.Path, default="runs/benchmark")
    made.add_argument("--json", type=pathlib.Path, default=FOUND, help="results")
    made.add_argument("--table", action="store_true", help="print the results")
    made.add_argument("--picture", help="draw the results to this file")
    return made


def main(argv=None) -> None:
    """The command."""
    args = parser().parse_args(argv)
    if args.isa:
        collect(args.isa, args.seeds, args.root.absolute(), args.json)
    found = json.loads(args.json.read_text())
    if args.table:
        print(table(found))
        for isa, points in conditions(found).items():
            for name, each in points.items():
                print(f"{isa} {name}: {', '.join(f'{x:.1f}' for x in each)}")
    if args.picture:
        picture(found, args.picture)


if __name__ == "__main__":
    main()
