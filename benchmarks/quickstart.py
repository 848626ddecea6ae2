"""Train the quick start and what it is compared with: table, conditions, picture.

  XLA_FLAGS=--xla_cpu_max_isa=AVX2 python benchmarks/quickstart.py
  python benchmarks/quickstart.py --picture=docs/images/summary.png

trains every row of `ROWS` with several seeds; the same command resumes. The variable
limits the instructions of the processor; results differ by rounding alone.
"""

import argparse
import pathlib
import subprocess
import sys

import numpy as np

from jaxcl import plots
from jaxcl.data.sources import shapes
from jaxcl.run import result_file, seeds

ROOT = pathlib.Path(__file__).parents[1]
PREDICTED, NEIGHBOURS = "predict/class_incremental", "knn/class_incremental"
_FINETUNE = "--config.method.name=finetune"
# Title of a row -> what its command adds to that of the quick start
ROWS = {
    "fine-tuning": (_FINETUNE,),
    # A step with replay trains on twice as many images.
    "fine-tuning, 20 epochs": (_FINETUNE, "--config.epochs=20"),
    "ER-ACE": (),
    "all classes at once": (_FINETUNE, "--config.scenario.name=joint"),
}


def train(row: str, count: int, root: pathlib.Path) -> list[dict]:
    """Train all seeds of a row, or find them; return the measures of each."""
    folder = root / row.replace(", ", "_").replace(" ", "_")
    command = [sys.executable, "-m", "jaxcl.main", "--config=configs/quickstart.py"]
    command += [f"--workdir={folder}", f"--config.seeds={count}", *ROWS[row]]
    command += ["--config.plots=False", "--config.tensorboard=False"]
    command += ["--config.progress=False"]
    subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
    folders = seeds.folders(folder) or {0: folder}  # a single seed has no folder
    return [measures(pathlib.Path(x)) for x in folders.values()]


def measures(folder: pathlib.Path) -> dict:
    """Return the numbers of a run that the table and the picture show."""
    results = result_file.read_results(folder)
    matrix, untrained = result_file.matrix(results, PREDICTED), results["untrained"]
    summary = result_file.summary(results)
    return {
        "met": [float(matrix[t, : t + 1].mean()) for t in range(len(matrix))],
        "forgetting": summary[PREDICTED]["forgetting"],
        "neighbours": summary[NEIGHBOURS]["average_accuracy"],
        "untrained": [np.mean(untrained[x]) for x in (PREDICTED, NEIGHBOURS)],
        "gflop": results["cost"]["total"]["flops"] / 1e9,
    }


def table(rows: dict[str, list[dict]]) -> str:
    """Write mean ± standard error of each row in percent, as Markdown."""

    def show(values):
        return seeds.percent(seeds.mean_and_error(values)).replace("+-", "±")

    lines = ["| | accuracy | forgetting | k-NN | GFLOP |", "|---|---:|---:|---:|---:|"]
    untrained = zip(*(x["untrained"] for x in rows["ER-ACE"]), strict=True)
    before = [show(x) for x in untrained]
    lines.append(f"| untrained | {before[0]} | | {before[1]} | 0 |")
    for title, runs in rows.items():
        lost, near = (show(x[k] for x in runs) for k in ("forgetting", "neighbours"))
        gflop = np.mean([x["gflop"] for x in runs])
        accuracy = show(x["met"][-1] for x in runs)
        lines.append(f"| {title} | {accuracy} | {lost} | {near} | {gflop:.0f} |")
    return "\n".join(lines)


def conditions(rows: dict[str, list[dict]]) -> dict[str, float]:
    """Return the least of four differences over the seeds, in points.

    All must be positive: training lifts k-NN by 20 points, fine-tuning forgets 8, the
    method ends 4 above fine-tuning, and training on all classes ends above both.
    """
    last = {name: np.array([x["met"][-1] for x in runs]) for name, runs in rows.items()}
    short, long, method, joint = last.values()
    best, runs = np.maximum(short, long), rows["ER-ACE"]
    lifts = [x["neighbours"] - x["untrained"][1] - 0.20 for x in runs]
    points = {
        "lift - 20": np.array(lifts),
        "forgetting - 8": np.array([x["forgetting"] for x in rows["fine-tuning"]])
        - 0.08,
        "method - fine-tuning - 4": method - best - 0.04,
        "joint - both": joint - np.maximum(method, best),
    }
    return {name: 100 * float(x.min()) for name, x in points.items()}


def draw(rows: dict[str, list[dict]], path: str) -> None:
    """Draw images of each task above, accuracies below."""
    names = {"er_ace": "ER-ACE", "finetune": "fine-tuning"}
    names["joint"] = "all classes at once"
    curves = {x: np.array([y["met"] for y in rows[name]]) for x, name in names.items()}
    curves["untrained"] = np.array([[x["untrained"][0]] for x in rows["ER-ACE"]])
    data = shapes.shapes(size=48, train=10, test=10)
    strips = [
        [
            data.train.images[row]
            for number in (2 * task, 2 * task + 1)
            for row in np.flatnonzero(data.train.label == number)[:4]
        ]
        for task in range(5)
    ]
    title = "Two classes of silhouettes at a time"
    plots.summary(curves, strips, path, title=title, chance=0.1)


def parser() -> argparse.ArgumentParser:
    """Make the command line."""
    made = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    made.add_argument("--seeds", type=int, default=5)
    made.add_argument("--out", type=pathlib.Path, default="runs/benchmark")
    made.add_argument("--picture", help="draw the results to this file")
    return made


def main(argv=None) -> None:
    """Print the table and the conditions; draw the picture if asked."""
    args = parser().parse_args(argv)
    rows = {row: train(row, args.seeds, args.out.absolute()) for row in ROWS}
    print(table(rows))
    for name, points in conditions(rows).items():
        print(f"{name}: {points:.1f}")
    if args.picture:
        draw(rows, args.picture)


if __name__ == "__main__":
    main()
