"""Whole experiments beside other libraries: from the command to the number.

  python benchmarks/experiments.py --mnist=mnist.npz --cifar10=cifar10.npz --core=0 \
      --peer lightly=lightly/bin/python avalanche=avalanche/bin/python --out=found.json

Both sides read one .npz file (train_x, train_y, test_x, test_y; images u8) and train
the same network on the same images, in as many steps of as many images, on one thread.
Each run is a process of its own. Ours runs with an empty folder of compiled programs
first, then in turn with the peer, `--repeats` times each. Every run is written to
`--out` at once; a second command goes on where the first stopped.

A peer is `NAME=PYTHON`, each in an environment of its own: lightly 1.6 or avalanche
(avalanche-lib 0.6). Rows without their peer run ours alone.
"""

import argparse
import json
import os
import pathlib
import statistics
import subprocess
import sys
import tempfile
import time

import numpy as np

PEERS = pathlib.Path(__file__).with_name("peers")
CIFAR10 = {
    "set": "cifar10",
    "size": 32,
    "mean": (0.4914, 0.4822, 0.4465),
    "std": (0.247, 0.2435, 0.2616),
}
MNIST = {"set": "mnist", "size": 28, "mean": (0.1307,), "std": (0.3081,)}
HALF = CIFAR10 | {
    "peer": "lightly",
    "train": 256,
    "test": 256,
    "epochs": 1,
    "batch": 64,
    "lr": 0.03,
    "depth": 18,
    "width": 32,
    "conv_init": "torch",  # as lightly's network
    "neighbours": 20,
}
ALIKE = {"temperature": 0.2}
SMALL_HEAD = {"hidden": 2048, "out": 128}
WIDE_HEAD = {"hidden": 2048, "out": 2048}
SLOW = {"momentum_start": 0.99, "momentum_end": 0.99}
QUEUED = ALIKE | SLOW | {"queue_size": 1024}
REPLAY = {"name": "er", "passes": "joint", "replay_from": "past_tasks"}
STREAM = MNIST | {"peer": "avalanche", "tasks": 5, "epochs": 1, "batch": 10, "lr": 0.1}
GDUMB = {
    "name": "gdumb",
    "passes": 4,
    "batch_size": 16,
    "lr": 0.1,
    "schedule": "constant",
    "momentum": 0.0,
    "weight_decay": 0.0,
    "clip": 1e9,
    "cutmix": 0.0,
}
# name -> settings, which both sides read
ROWS = {
    "replay_mnist": STREAM
    | {
        "train": 20000,
        "test": 10000,
        "encoder": {"name": "mlp", "widths": (512,), "dropout": 0.5},
        "replay": {"capacity": 1000, "policy": "class_balanced"},
        "method": REPLAY,
    },
    "gdumb_mnist": STREAM
    | {
        "train": 20000,
        "test": 10000,
        "encoder": {"name": "mlp", "widths": (400, 400)},
        "replay": {"capacity": 4400, "policy": "greedy_balanced"},
        "method": GDUMB,
    },
    "replay_cifar10": STREAM
    | CIFAR10
    | {
        "train": 2500,
        "test": 1000,
        "encoder": {
            "name": "resnet",
            "depth": 18,
            "width": 20,
            "pool": 4,
            "conv_init": "torch",
        },
        "replay": {"capacity": 500, "policy": "class_balanced"},
        "method": REPLAY,
    },
    "simclr": HALF | SMALL_HEAD | {"base": "simclr", "method": ALIKE},
    "simclr_2048": HALF
    | SMALL_HEAD
    | {"base": "simclr", "method": ALIKE, "train": 2048},
    "moco": HALF | SMALL_HEAD | {"base": "mocov2plus", "method": QUEUED},
    "barlow_twins": HALF
    | WIDE_HEAD
    | {"base": "barlow_twins", "method": {"scale": 1.0}, "lr": 0.001},
    "byol": HALF
    | {"hidden": 4096, "out": 256, "base": "byol", "method": {}, "lr": 0.03},
    "vicreg": HALF | WIDE_HEAD | {"base": "vicreg", "method": {}, "lr": 0.001},
}
# Of a few seconds, for tests
TINY = {"train": 60, "test": 40, "width": 4, "depth": 10, "batch": 10}
TINY_ENCODER = {"name": "mlp", "widths": (8,)}
STAGES = ("start", "read", "compile", "train", "evaluate", "save", "rest")


def parser() -> argparse.ArgumentParser:
    """Make the command line."""
    made = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    made.add_argument("--rows", nargs="*", choices=[*ROWS], default=[*ROWS])
    for name in ("mnist", "cifar10"):
        made.add_argument(f"--{name}", help="an .npz file; without: random images")
    made.add_argument("--peer", nargs="*", default=[], metavar="NAME=PYTHON")
    made.add_argument("--repeats", type=int, default=3)
    made.add_argument("--core", type=int, help="that both sides run on")
    made.add_argument("--tiny", action="store_true", help="a few images and units")
    made.add_argument("--out", type=pathlib.Path, help="JSON of all runs")
    return made


def prepare(asked: dict, path: str | None, folder: pathlib.Path) -> str:
    """Write the images of a row to an .npz file; return its path."""
    out = folder / f"{asked['set']}_{asked['train']}_{asked['test']}.npz"
    if out.exists():
        return str(out)
    arrays = {}
    for split in ("train", "test"):
        count = asked[split]
        if path is None:
            rng, shape = np.random.default_rng(0), (asked["size"],) * 2
            channels = (len(asked["mean"]),)
            images = rng.integers(0, 256, (count, *shape, *channels), np.uint8)
            labels = np.arange(count) % 10
        else:
            with np.load(path) as data:
                images, labels = (data[f"{split}_{x}"][:count] for x in "xy")
        arrays |= {f"{split}_x": images, f"{split}_y": labels.astype(np.int32)}
    np.savez(out, **arrays)
    return str(out)


def run(python: str, script: str, asked: dict, folder: pathlib.Path, env: dict) -> dict:
    """Run one side in a process of its own.

    Returns:
      What it reports, and its seconds, CPU seconds, those of its children included, and
      MB at the peak.

    Raises:
      RuntimeError: it failed; the message ends with what it printed.
    """
    place = pathlib.Path(tempfile.mkdtemp(dir=folder))
    asked = asked | {"report": str(place / "report.json"), "folder": str(place / "run")}
    (place / "asked.json").write_text(json.dumps(asked))
    words, log = [python, str(PEERS / script), str(place / "asked.json")], place / "log"
    with log.open("w") as told:
        began = time.time()
        started = env | {"STARTED": repr(began)}
        child = subprocess.Popen(words, env=started, stdout=told, stderr=told)
        _, status, used = os.wait4(child.pid, 0)
        ended = time.time()
    child.returncode = os.waitstatus_to_exitcode(status)
    if child.returncode:
        raise RuntimeError(f"{' '.join(words)}:\n{log.read_text()[-3000:]}")
    found = json.loads((place / "report.json").read_text())
    found["stages"]["rest"] += ended - found.pop("until")
    return found | {
        "seconds": ended - began,
        "cpu": used.ru_utime + used.ru_stime,
        "peak_mb": used.ru_maxrss / 1024,
    }


def environment(cache: pathlib.Path | None) -> dict:
    """Variables of a side: one thread, and the folder of compiled programs."""
    one = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")
    made = dict(os.environ) | dict.fromkeys(one, "1")
    made["CUDA_VISIBLE_DEVICES"] = ""
    if cache is not None:
        made |= {"JAX_PLATFORMS": "cpu", "XDG_CACHE_HOME": str(cache)}
        made["XLA_FLAGS"] = "--xla_cpu_multi_thread_eigen=false"
    return made


def compare(name: str, args, folder: pathlib.Path, found: dict) -> None:
    """Fill in the runs of a row that are missing: a first one of ours, then in turn."""
    asked = ROWS[name]
    if args.tiny:
        asked = asked | TINY
        if "encoder" in asked:
            asked = asked | {"encoder": TINY_ENCODER}
    asked = asked | {"data": prepare(asked, getattr(args, asked["set"]), folder)}
    pythons = dict(word.split("=", 1) for word in args.peer)
    peer, cache = asked["peer"], folder / f"cache_{name}"
    runs = found.setdefault(name, {"first": [], "ours": [], "peer": []})
    own = sys.executable, "ours.py"
    theirs = pythons.get(peer), f"with_{peer}.py"
    order = [("first", *own)]
    for _ in range(args.repeats):
        order += [("ours", *own)] + ([("peer", *theirs)] if theirs[0] else [])
    for side, python, script in order:
        done = len(runs[side])
        wanted = 1 if side == "first" else args.repeats
        if done >= wanted:
            continue
        env = environment(None if side == "peer" else cache)
        result = run(python, script, asked | {"seed": done}, folder, env)
        runs[side].append(result)
        print(f"{name:16} {side:5} {json.dumps(result)}", flush=True)
        if args.out:
            args.out.write_text(json.dumps(found, indent=1))


def spread(values, digits=3) -> str:
    """Write the median, and the least and the most."""
    low, middle, high = (
        f"{x:.0f}" if x >= 100 else f"{x:.{digits}g}"
        for x in (min(values), statistics.median(values), max(values))
    )
    return middle if len(values) == 1 else f"{middle} ({low} to {high})"


def tables(found: dict) -> str:
    """Write two tables: whole runs, and their seconds by stage.

    Ratios are of CPU seconds, of ours to those of the peer's run beside it.
    """
    lines = ["| row | side | s | CPU s | to the peer | images/s | MB | accuracy |"]
    lines.append("|---" * 8 + "|")
    stages = ["| row | side | " + " | ".join(STAGES) + " |", "|---" * 9 + "|"]
    for name, sides in found.items():
        for side, runs in sides.items():
            if not runs:
                continue
            label = {"first": "ours, first", "ours": "ours", "peer": ROWS[name]["peer"]}
            pairs = zip(runs, sides["peer"] if side != "peer" else (), strict=False)
            ratios = [a["cpu"] / b["cpu"] for a, b in pairs]
            cells = [
                spread([x["seconds"] for x in runs]),
                spread([x["cpu"] for x in runs]),
                spread(ratios) if ratios else "",
                spread([x["images"] / x["stages"]["train"] for x in runs]),
                f"{statistics.median(x['peak_mb'] for x in runs):.0f}",
                spread([100 * x["accuracy"] for x in runs]),
            ]
            lines.append(f"| {name} | {label[side]} | " + " | ".join(cells) + " |")
            cells = [statistics.median(x["stages"][s] for x in runs) for s in STAGES]
            cells = [f"{cell:.1f}" for cell in cells]
            stages.append(f"| {name} | {label[side]} | " + " | ".join(cells) + " |")
    return "\n\n".join("\n".join(x) for x in (lines, stages))


def main(argv=None) -> dict:
    """Print the tables; return the runs, row by row."""
    args = parser().parse_args(argv)
    if args.core is not None:
        os.sched_setaffinity(0, {args.core})
    found = {}
    if args.out and args.out.exists():
        found = json.loads(args.out.read_text())
    with tempfile.TemporaryDirectory() as folder:
        for name in args.rows:
            compare(name, args, pathlib.Path(folder), found)
    print(tables(found))
    return found


if __name__ == "__main__":
    main()
