"""Time of a step of CCLIS beside one of Co2L, and what choosing the memory costs.

  python benchmarks/cclis.py

builds a job of each method on random images, times their compiled steps in the second
task as the training loop calls them, in turns, and then the end of that task, where
the memory is chosen: CCLIS scores all rows of the task and of the memory. The share is
that of the end in a whole task of `--epochs`.
"""

import argparse
import contextlib
import pathlib
import time

import jax
import ml_collections
import numpy as np
import throughput

from jaxcl.config import build
from jaxcl.run import job

METHODS = {"cclis": 1, "co2l": 2}  # views of an image


def parser() -> argparse.ArgumentParser:
    """The command line."""
    made = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    made.add_argument("--depth", type=int, default=18, help="of the ResNet")
    made.add_argument("--width", type=int, default=64, help="of its first stage")
    made.add_argument("--size", type=int, default=32, help="pixels of a side")
    made.add_argument("--classes", type=int, default=10, help="a fifth per task")
    made.add_argument("--rows", type=int, default=10_000, help="of a task")
    made.add_argument("--batch", type=int, default=512)
    made.add_argument("--memory", type=int, default=200)
    made.add_argument("--precision", default="float32")
    made.add_argument(
        "--epochs", type=int, default=100, help="of a task, for the share"
    )
    made.add_argument("--steps-per-call", type=int, help="default: as in training")
    made.add_argument("--windows", type=int, default=5)
    made.add_argument("--steps", type=int, default=8, help="per window")
    made.add_argument("--json", help="file to append one line per method to")
    return made


def config(args, method: str, data: str) -> ml_collections.ConfigDict:
    """The job's config: five tasks, on the images of a file."""
    steps = (args.windows + 2) * args.steps + 20
    return ml_collections.ConfigDict(
        {
            "name": method,
            "data": {"name": "npz", "path": data},
            "scenario": {"name": "class", "num_tasks": 5, "evaluation": "none"},
            "augment": {
                "size": args.size,
                "views": METHODS[method],
                "scale": (0.2, 1.0),
                "interpolation": "bilinear",
                "jitter": (0.4, 0.4, 0.4, 0.1),
                "mean": (0.5,) * 3,
                "std": (0.25,) * 3,
            },
            "encoder": {"name": "resnet", "depth": args.depth, "width": args.width},
            "method": {"name": method, "memory_size": args.memory},
            "batch_size": args.batch,
            "epochs": max(args.epochs, -(-steps * args.batch // args.rows) + 1),
            "precision": args.precision,
            "optimizer": {"name": "sgd", "lr": 0.1, "weight_decay": 1e-4},
            "scale_lr": False,
            "schedule": {"name": "constant"},
            "evaluators": {},
            "devices": 1,
            "steps_per_call": args.steps_per_call,
            "evaluate_untrained": False,
            "plasticity": False,
            "save_every": 0,
        }
    )


def make_job(args, method: str, directory) -> job.Job:
    """The job, its random images written to `directory` and read back."""
    label = np.arange(5 * args.rows) % args.classes
    shape = (len(label), args.size, args.size, 3)
    images = np.random.default_rng(0).integers(0, 256, shape, np.uint8)
    path = pathlib.Path(directory) / "random.npz"
    if not path.exists():
        np.savez(path, train_x=images, train_y=label)
    made = config(args, method, str(path))
    return build.build(made, pathlib.Path(directory) / method)


def ending(work: job.Job, state) -> float:
    """Seconds that the end of the second task takes."""
    start = time.perf_counter()
    jax.block_until_ready(work.method.end_task(state, work.stream.tasks[1]))
    return time.perf_counter() - start


def measure(args, directory) -> list[dict]:
    """What the table says of each method, name -> value."""
    with contextlib.ExitStack() as stack:
        works = {name: make_job(args, name, directory) for name in METHODS}
        sides, seconds = throughput.in_turns(works, args, stack)
        # The first call of each compiles, where the task is of another size.
        ends = {
            name: [ending(work, sides[name].state) for _ in range(3)][1:]
            for name, work in works.items()
        }
    found = []
    for name, work in works.items():
        step, end = np.median(seconds[name]), np.median(ends[name])
        source = work.method.source(sides[name].state, work.stream.tasks[1])
        data = work.data._replace(epochs=args.epochs)
        steps = len(job.schedule(work._replace(data=data), source, 1))
        ratio = np.divide(seconds[name], seconds["co2l"])
        found.append(
            {
                "method": name,
                "flops": throughput.flops(work, 1),
                "step_ms": 1e3 * float(step),
                "ratio": float(np.median(ratio)),
                "ratio_min": float(ratio.min()),
                "ratio_max": float(ratio.max()),
                "end_seconds": float(end),
                "share": float(end / (end + steps * step)),
            }
        )
    return found


def line(found: dict | None = None) -> str:
    """One row of the table, or its head."""
    heads = "method", "G FLOP", "step ms", "step / Co2L's", "end s", "share of a task"
    cells = heads
    if found is not None:
        flops = found["flops"]
        cells = (
            found["method"],
            "-" if flops is None else f"{flops / 1e9:.2f}",
            f"{found['step_ms']:.1f}",
            f"{found['ratio']:.2f}  ({found['ratio_min']:.2f} to "
            f"{found['ratio_max']:.2f})",
            f"{found['end_seconds']:.2f}",
            f"{100 * found['share']:.2f} %",
        )
    widths = 8, 10, 10, 24, 10, 18
    return "".join(f"{c:>{w}}" for c, w in zip(cells, widths, strict=True))


def main(argv=None) -> list[dict]:
    """Measure both methods, print the table, return what it holds."""
    return throughput.lines(parser().parse_args(argv), measure, line)


if __name__ == "__main__":
    main()
