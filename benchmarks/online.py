"""Time of a step of the online methods, beside the same step in PyTorch.

  python benchmarks/online.py --methods er er_ace

builds a job of each method on random images, fills the memory in the first task, and
times the compiled step in the second one as the training loop calls it, in turns with
its twin in eager PyTorch (peer_online.py).
"""

import argparse
import contextlib
import datetime
import importlib.util
import json
import os
import pathlib
import tempfile
import time
from typing import NamedTuple

import jax
import ml_collections
import numpy as np
import throughput

from jaxcl.config import build
from jaxcl.run import job


class Measured(NamedTuple):
    """A method as it is measured, and its passes over as many rows as come in."""

    options: dict  # of its make, where not its defaults
    forward: int
    backward: int
    scored: int = 0  # further rows that pass forward


METHODS = {
    "er": Measured({}, 2, 2),
    "er_ace": Measured({}, 2, 2),
    "er_aml": Measured({}, 4, 4),  # anchors, their positives and negatives, replay
    "mir": Measured({"candidates": 50}, 2, 2, 2 * 50),  # before and after the step
    "der": Measured({"alpha": 0.1, "beta": 0.5}, 3, 3),  # DER++
    "icarl": Measured({}, 4, 2),  # the teacher sees all rows
}


def parser() -> argparse.ArgumentParser:
    """The command line."""
    made = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    made.add_argument(
        "--methods", nargs="+", default=[*METHODS], choices=METHODS, metavar="METHOD"
    )
    made.add_argument("--width", type=int, default=20, help="of the first stage")
    made.add_argument("--size", type=int, default=32, help="pixels of a side")
    made.add_argument("--classes", type=int, default=10, help="a fifth per task")
    made.add_argument("--batch", type=int, default=10, help="incoming; drawn as many")
    made.add_argument("--per-class", type=int, default=20, help="slots of the memory")
    made.add_argument("--threads", type=int, help="default: all that there are")
    made.add_argument("--steps-per-call", type=int, help="default: as in training")
    made.add_argument("--windows", type=int, default=9)
    made.add_argument("--steps", type=int, default=10, help="per window")
    made.add_argument("--no-peer", action="store_true", help="without PyTorch")
    made.add_argument("--json", help="file to append one line per method to")
    return made


def config(args, method: str, data: str) -> ml_collections.ConfigDict:
    """The job's config: online learning of five tasks, on the images of a file."""
    labels = _labels(args)
    steps = args.per_class * args.classes // args.batch + args.windows * args.steps
    half = (0.5,) * 3
    return ml_collections.ConfigDict(
        {
            "name": method,
            "data": {"name": "npz", "path": data},
            "scenario": {"name": "class", "num_tasks": 5, "evaluation": "none"},
            "augment": {"size": args.size, "views": 1, "mean": half, "std": half},
            "encoder": {
                "name": "resnet",
                "width": args.width,
                "pool": 4,
                "conv_init": "torch",
            },
            "method": {"name": method, **METHODS[method].options},
            "replay": {"per_class": args.per_class},
            "batch_size": args.batch,
            # An epoch is a fifth of the rows: enough steps to fill the memory, for
            # all windows, and for whole calls.
            "epochs": 5 * (2 * steps + 200) * args.batch // len(labels),
            "optimizer": {"name": "sgd", "lr": 0.1, "momentum": 0.0},
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


def _labels(args):
    return np.arange(max(20 * args.batch, 10 * args.classes)) % args.classes


def make_job(args, method: str, directory) -> job.Job:
    """The job, its random images written to `directory` and read back."""
    label = _labels(args)
    shape = (len(label), args.size, args.size, 3)
    images = np.random.default_rng(0).integers(0, 256, shape, np.uint8)
    path = pathlib.Path(directory) / "random.npz"
    np.savez(path, train_x=images, train_y=label)
    made = config(args, method, str(path))
    return build.build(made, pathlib.Path(directory) / method)


def ready(args, work: job.Job, stack) -> throughput.Ours:
    """Our side in the second task, its memory full; `stack` closes its feed."""
    state = throughput.begun(work, 0)
    with contextlib.closing(
        job.feed_batches(work, work.stream.tasks[0].train, 0, 0)
    ) as feed:
        first = throughput.Ours(work, state, feed, args.steps)
        memory = state.extra.memory.capacity if state.extra.memory else 0
        first.window(-(-memory // (args.batch * work.loop.steps_per_call)))
    before, task = work.stream.tasks[:2]
    state = job.begin_task(work, work.method.end_task(first.state, before), task)
    feed = stack.enter_context(
        contextlib.closing(job.feed_batches(work, task.train, 1, 0))
    )
    ours = throughput.Ours(work, state, feed, args.steps, like=first)
    ours.compile_seconds = first.compile_seconds
    return ours


def measure(args, method: str, directory) -> dict:
    """What the table says of one method, name -> value."""
    work = make_job(args, method, directory)
    made, about = METHODS[method], {}
    with contextlib.ExitStack() as stack:
        ours, sides = ready(args, work, stack), {}
        if not args.no_peer:
            import peer_online  # PyTorch is needed for this alone

            state = jax.device_get(ours.state.replace(key=None))
            theirs, name = peer_online.timed(args, work, state, args.threads)
            about["peer"] = name
            sides["peer"] = lambda: theirs(ours.steps)
        sides["ours"] = lambda: ours.window()[0]
        ours.window(1)
        seconds = {name: [] for name in sides}
        busy = {name: 0.0 for name in sides}
        for _ in range(args.windows):  # in turns: noise of the machine hits both
            for name, window in sides.items():
                start = time.process_time()
                seconds[name].append(window() / ours.steps)
                busy[name] += time.process_time() - start
    found = {
        "method": method,
        "forward": made.forward + made.scored / args.batch,
        "backward": made.backward,
        "flops": throughput.flops(work, 1),
        "compile_seconds": ours.compile_seconds,
    }
    for name, each in seconds.items():
        found[f"{name}_ms"] = 1e3 * float(np.median(each))
        found[f"{name}_cpu_ms"] = 1e3 * busy[name] / (len(each) * ours.steps)
    if about:
        ratio = np.divide(seconds["ours"], seconds["peer"])
        found |= about | {
            "ratio_cpu": busy["ours"] / busy["peer"],
            "ratio_min": ratio.min(),
            "ratio_max": ratio.max(),
            "ratio": float(np.median(ratio)),
        }
    return found


@contextlib.contextmanager
def _on(threads: int):
    """Keep this process to so many cores, and XLA, unless it is up, to as many threads.

    Both, since another process may move this one to other cores.
    """
    os.environ.setdefault("NPROC", str(threads))
    if not hasattr(os, "sched_setaffinity"):  # Linux alone
        yield
        return
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, sorted(before)[:threads])
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


_UNITS = ("_ms", "_cpu_ms")  # of the wall, of the process
_HEADS = (
    ("method", 7),
    ("passes f/b", 12),
    ("G FLOP", 7),
    ("ours ms", 8),
    ("(CPU)", 8),
    ("PyTorch ms", 11),
    ("(CPU)", 8),
    ("CPU ratio", 10),
    ("ours / PyTorch", 22),
)


def line(found: dict | None = None) -> str:
    """One row of the table, or its head."""
    if found is None:
        return "".join(f"{name:>{width}}" for name, width in _HEADS)

    def show(name, digits=1):
        value = found.get(name)
        return "-" if value is None else f"{value:,.{digits}f}"

    low, high = show("ratio_min", 2), show("ratio_max", 2)
    flops = found["flops"]
    cells = [
        found["method"],
        f"{found['forward']:g} / {found['backward']:g}",
        "-" if flops is None else f"{flops / 1e9:.2f}",
        *(show(f"{side}{unit}") for side in ("ours", "peer") for unit in _UNITS),
        show("ratio_cpu", 2),
        f"{show('ratio', 2)}  ({low} to {high})" if "ratio" in found else "-",
    ]
    widths = [width for _, width in _HEADS]
    return "".join(f"{c:>{w}}" for c, w in zip(cells, widths, strict=True))


def main(argv=None) -> list[dict]:
    """Measure each method, print the table, return what it holds."""
    args = parser().parse_args(argv)
    args.threads = args.threads or throughput.cores()
    if not args.no_peer and importlib.util.find_spec("torch") is None:
        parser().error(
            "PyTorch is missing: pip install --group peers, or give --no-peer"
        )
    # PyTorch must find memory on a GPU too.
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    cached = jax.config.jax_enable_compilation_cache
    jax.config.update("jax_enable_compilation_cache", False)
    try:
        with _on(args.threads):
            return [*_measured(args)]
    finally:
        jax.config.update("jax_enable_compilation_cache", cached)


def _measured(args):
    about = {
        "date": datetime.date.today().isoformat(),
        "jax": jax.__version__,
        "device": jax.devices()[0].device_kind,
    }
    setting = {k: v for k, v in vars(args).items() if k not in ("methods", "json")}
    for values in (about, setting):
        print(" ".join(f"{k}={v}" for k, v in values.items() if v is not None))
    print(line(), flush=True)
    for method in args.methods:
        with tempfile.TemporaryDirectory() as directory:
            found = measure(args, method, directory)
        print(line(found), flush=True)
        found = about | setting | {"load": round(os.getloadavg()[0], 1)} | found
        if args.json:
            with open(args.json, "a", encoding="utf-8") as file:
                file.write(json.dumps(found) + "\n")
        yield found


if __name__ == "__main__":
    main()
