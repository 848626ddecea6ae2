"""Time of a training step of several configs, beside the first one's.

  python benchmarks/steps.py cclis_cifar10:co2l cclis_cifar10:cclis --size=16
  python benchmarks/steps.py duel_cifar10:moco duel_cifar10:d_moco
  python benchmarks/steps.py icl_proteins:continue icl_proteins --graphs=proteins.npz

builds a job of each config on the same data, and times the compiled steps in turns: in
the second task, where teachers work, or in the only one. Memories are full by then.
"End" is what follows a task's last step, as the choice of a memory. Images are a
pattern for each class, and noise.
"""

import argparse
import contextlib
import pathlib
import time

import jax
import numpy as np
import throughput

from jaxcl.config import build, files
from jaxcl.run import job


def parser() -> argparse.ArgumentParser:
    """Make the command line."""
    made = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = made.add_argument
    add(
        "configs",
        nargs="+",
        help="names of `jaxcl list configs`; all of images, or graphs",
    )
    add("--graphs", help="a file or folder of graphs, for configs of graphs")
    add("--rows", type=int, default=2000, help="train images of all tasks")
    add("--classes", type=int, default=10)
    add("--size", type=int, default=32, help="pixels of a side")
    add("--width", type=int, help="of a ResNet's first stage; default: the config's")
    add("--batch", type=int, help="default: the config's")
    add(
        "--override", nargs="+", default=[], metavar="PATH=VALUE", help="of all configs"
    )
    add("--windows", type=int, default=5)
    add("--steps", type=int, default=4, help="per window")
    add("--json", help="file to append one line per config to")
    return made


def make_job(args, config: str, directory: str) -> job.Job:
    """Make the job of a config, on these data and without evaluation."""
    made = files.read_config(
        [f"--config={config}", *(f"--config.{word}" for word in args.override)]
    )
    with made.unlocked(), made.ignore_type():
        made.evaluators, made.scenario.evaluation = {}, "none"
        made.devices, made.save_every, made.eval_every = 1, 0, 0
        made.plots = made.tensorboard = False
        made.plasticity = made.evaluate_untrained = False
        made.patience = made.eval_epochs = 0
        # Enough steps for all windows, whatever the number of tasks.
        made.epochs = 10_000
        made.schedule = {"name": "constant"}
        if args.batch:
            made.batch_size = args.batch
        if args.graphs:
            made.data.path = args.graphs
        elif made.data.name != "rings_and_trees":
            made.data = {"name": "npz", "path": write_images(args, directory)}
            made.augment.size = args.size
            if args.width:
                made.encoder.width = args.width
    place = pathlib.Path(directory) / config.replace(":", "_").replace("/", "_")
    return build.build(made, place)


def write_images(args, directory: str) -> str:
    """Write the train images, once; return the path."""
    path = pathlib.Path(directory) / "images.npz"
    if not path.exists():
        rng, shape = np.random.default_rng(0), (args.size, args.size, 3)
        label = np.arange(args.rows) % args.classes
        pattern = rng.integers(0, 128, (args.classes, *shape), np.uint8)
        noise = rng.integers(0, 128, (args.rows, *shape), np.uint8)
        np.savez(path, train_x=pattern[label] + noise, train_y=label)
    return str(path)


def fill_memory(ours: throughput.Ours, work: job.Job) -> None:
    """Take steps until twice as many rows have passed as a memory holds."""
    memory = getattr(ours.state.extra, "memory", None)
    rows = 0 if memory is None else 2 * len(jax.tree.leaves(memory)[0])
    ours.window(1 + rows // (work.data.batch_size * work.loop.steps_per_call))


def time_end(work: job.Job, state) -> float:
    """Measure the seconds that the end of a task takes; the first call compiles."""
    task = work.stream.tasks[:2][-1]
    for _ in range(2):
        start = time.perf_counter()
        jax.block_until_ready(work.method.end_task(state, task))
    return time.perf_counter() - start


def measure(args, directory: str) -> list[dict]:
    """Measure each config: name of a column -> value."""
    with contextlib.ExitStack() as stack:
        works = {name: make_job(args, name, directory) for name in args.configs}
        sides, seconds = throughput.in_turns(works, args, stack, begin=fill_memory)
        ends = {name: time_end(work, sides[name].state) for name, work in works.items()}
    rows = []
    for name, work in works.items():
        ratio = np.divide(seconds[name], seconds[args.configs[0]])
        rows.append(
            {
                "config": name,
                "flops": throughput.flops(work, work.stream.tasks[:2][-1].index),
                "step_ms": 1e3 * float(np.median(seconds[name])),
                "ratio": float(np.median(ratio)),
                "ratio_min": float(ratio.min()),
                "ratio_max": float(ratio.max()),
                "end_seconds": ends[name],
            }
        )
    return rows


def line(row: dict | None = None) -> str:
    """Write a row of the table, or its head."""
    cells = "config", "G FLOP", "step ms", "to the first", "end s"
    if row is not None:
        flops = row["flops"]
        cells = (
            row["config"],
            "-" if flops is None else f"{flops / 1e9:.2f}",
            f"{row['step_ms']:.2f}",
            f"{row['ratio']:.2f} ({row['ratio_min']:.2f} to {row['ratio_max']:.2f})",
            f"{row['end_seconds']:.2f}",
        )
    widths = 28, 9, 11, 24, 8
    return "".join(f"{c:>{w}}" for c, w in zip(cells, widths, strict=True))


def main(argv=None) -> list[dict]:
    """Measure all configs, print the table, return its rows."""
    return throughput.lines(parser().parse_args(argv), measure, line)


if __name__ == "__main__":
    main()
