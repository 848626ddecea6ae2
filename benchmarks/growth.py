"""How time and memory of a run grow with tasks, classes, memory rows and images.

  taskset -c 0 python benchmarks/growth.py --out=growth.json
  python benchmarks/growth.py --axes images --largest=10000000
  python benchmarks/growth.py --table growth.json

Each point is a run of ER on random images of 8 x 8 pixels in a process of its own, with
a perceptron of 32 units; all but the axis stays as in `BASE`. The images lie on disk,
as arrays. Exponents p are of the fit a + b x^p; "flat": b x^p is below a tenth.
Compilation is left out: only the first run of some shapes compiles.
"""

import argparse
import json
import pathlib
import tempfile

import experiments
import numpy as np

BASE = {"tasks": 5, "classes": 10, "memory": 1000, "images": 10_000}
AXES = {
    "tasks": (2, 5, 10, 20, 50, 100),
    "classes": (10, 30, 100, 300, 1000),
    "memory": (100, 1000, 10_000, 100_000),
    "images": (1000, 10_000, 100_000, 1_000_000),
}
WITH = {"tasks": {"classes": 100}}  # beside an axis
COLUMNS = ("read", "train", "evaluate", "save", "rest", "peak_mb")
SIDE, BATCH, TESTED = 8, 20, 1000


def parser() -> argparse.ArgumentParser:
    """The options of the command."""
    made = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    made.add_argument("--axes", nargs="*", choices=[*AXES], default=[*AXES])
    made.add_argument("--points", type=int, help="only so many of each, the smallest")
    made.add_argument("--largest", type=int, help="one more point of the axes")
    made.add_argument("--out", type=pathlib.Path, help="JSON of all runs")
    made.add_argument("--table", type=pathlib.Path, help="show what this file holds")
    return made


def write_images(count: int, classes: int, folder: pathlib.Path) -> str:
    """Write random images and labels as arrays on disk; return the folder."""
    place, rng = folder / f"{count}_{classes}", np.random.default_rng(0)
    place.mkdir(exist_ok=True)
    splits = {}
    for split, rows in (("train", count), ("test", max(TESTED, classes))):
        arrays = {
            "images": rng.integers(0, 256, (rows, SIDE, SIDE, 1), np.uint8),
            "label": np.arange(rows, dtype=np.int32) % classes,
        }
        splits[split] = {}
        for name, array in arrays.items():
            np.save(place / f"{split}_{name}.npy", array)
            splits[split][name] = {"file": f"{split}_{name}.npy"}
    (place / "meta.json").write_text(json.dumps({"splits": splits}))
    return str(place)


def measure(chosen: dict, folder: pathlib.Path) -> dict:
    """Run one point; return the seconds of its stages, CPU seconds, MB at the peak."""
    count, classes = chosen["images"], max(chosen["classes"], chosen["tasks"])
    asked = {
        "source": {"name": "arrays", "path": write_images(count, classes, folder)},
        "seed": 0,
        "epochs": 1,
        "batch": BATCH,
        "lr": 0.1,
        "tasks": chosen["tasks"],
        "size": SIDE,
        "mean": (0.5,),
        "std": (0.29,),
        "encoder": {"name": "mlp", "widths": (32,)},
        "replay": {"capacity": chosen["memory"], "policy": "reservoir"},
        "method": experiments.REPLAY,
    }
    env = experiments.environment(folder / "cache")
    found = experiments.run(experiments.sys.executable, "ours.py", asked, folder, env)
    return {**found["stages"], **{x: found[x] for x in ("seconds", "cpu", "peak_mb")}}


def fit(sizes, values) -> tuple[float, float]:
    """Fit a + b x^p, with a and b not negative, by relative error.

    Returns:
      p, and the share of b x^p in the value at the largest size.
    """
    x, y = np.array(sizes, float), np.maximum(np.array(values, float), 1e-3)
    best = (np.inf, 0.0, 0.0)
    for p in np.arange(0.1, 2.51, 0.05):
        columns = np.stack([np.ones_like(x), (x / x.max()) ** p], axis=1) / y[:, None]
        weights = np.linalg.lstsq(columns, np.ones_like(y), rcond=None)[0]
        if weights[0] < 0:
            only = columns[:, 1]
            weights = np.array([0.0, only.sum() / (only @ only)])
        error = np.square(columns @ weights - 1).sum()
        if weights[1] >= 0 and error < best[0] - 1e-9:
            best = (error, p, weights[1] / weights.sum())
    return best[1], best[2]


def tables(found: dict) -> str:
    """Write a table of all points, and one of the exponents."""
    lines = ["| axis | size | " + " | ".join(COLUMNS) + " |"]
    lines.append("|---" * (len(COLUMNS) + 2) + "|")
    powers = [
        "| axis | " + " | ".join(COLUMNS) + " |",
        "|---" * (len(COLUMNS) + 1) + "|",
    ]
    for axis, points in found.items():
        sizes = sorted(map(int, points))
        rows = [points[str(size)] for size in sizes]
        for size, row in zip(sizes, rows, strict=True):
            cells = [f"{row[column]:.3g}" for column in COLUMNS]
            lines.append(f"| {axis} | {size:,} | " + " | ".join(cells) + " |")
        cells = []
        for column in COLUMNS if len(sizes) > 2 else ():
            p, share = fit(sizes, [row[column] for row in rows])
            cells.append(f"{p:.2g}" if share > 0.1 else "flat")
        powers.append(f"| {axis} | " + " | ".join(cells) + " |")
    return "\n\n".join("\n".join(x) for x in (lines, powers))


def main(argv=None) -> dict:
    """The command; prints two tables and returns the points of each axis."""
    args = parser().parse_args(argv)
    if args.table:
        found = json.loads(args.table.read_text())
        print(tables(found))
        return found
    found = {}
    if args.out and args.out.exists():
        found = json.loads(args.out.read_text())
    with tempfile.TemporaryDirectory() as folder:
        for axis in args.axes:
            points = found.setdefault(axis, {})
            more = () if args.largest is None else (args.largest,)
            for size in (*AXES[axis][: args.points], *more):
                if str(size) in points:
                    continue
                chosen = BASE | WITH.get(axis, {}) | {axis: size}
                points[str(size)] = measure(chosen, pathlib.Path(folder))
                print(axis, size, json.dumps(points[str(size)]), flush=True)
                if args.out:
                    args.out.write_text(json.dumps(found, indent=1))
    print(tables(found))
    return found


if __name__ == "__main__":
    main()
