"""Time training steps of several configs, beside the first one's and PyTorch's.

  python benchmarks/steps.py cclis_cifar10:co2l cclis_cifar10:cclis --size=16
  python benchmarks/steps.py icl_proteins:continue icl_proteins --graphs=proteins.npz
  taskset -c 0 python benchmarks/steps.py pnr_cifar100 er_ace_cifar10 --peer

builds a job of each config on the same data, and times the compiled steps in turns: in
the second task, where teachers work and memories are full, or in the only one. "End" is
what follows a task's last step, as the choice of a memory. Images are a pattern for
each class, and noise. With `--peer` the same step in eager PyTorch is timed, too
(peers/torch_two_view.py, peers/torch_online.py).
"""

import argparse
import collections
import contextlib
import datetime
import importlib
import importlib.util
import json
import os
import pathlib
import tempfile
import time

import jax
import numpy as np

from jaxcl import core
from jaxcl.config import build, files
from jaxcl.run import cost, job


def parser() -> argparse.ArgumentParser:
    """Make the command line."""
    made = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = made.add_argument
    names = "names of `jaxcl list configs`; all of images, or graphs"
    add("configs", nargs="+", help=names)
    add("--graphs", help="a file or folder of graphs, for configs of graphs")
    add("--rows", type=int, help="train images of all tasks; default: 2,000 or more")
    add("--classes", type=int, default=10)
    add("--size", type=int, default=32, help="pixels of a side")
    add("--width", type=int, help="of a ResNet's first stage; default: the config's")
    add("--batch", type=int, help="default: the config's")
    many = "of all configs"
    add("--override", nargs="+", default=[], metavar="PATH=VALUE", help=many)
    add("--windows", type=int, default=5)
    add("--steps", type=int, default=10, help="per window")
    add("--peer", action="store_true", help="also time PyTorch")
    add("--json", help="file to append one line for each row to")
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
        if made.get("precision") == "auto":
            made.precision = "float32"
        if "class_order" in made.scenario:
            made.scenario.class_order = "sorted"
        if args.batch:
            made.batch_size = args.batch
        if args.graphs:
            made.data.path = args.graphs
        elif made.data.name != "rings_and_trees":
            rows = args.rows or max(2000, 10 * made.batch_size)
            path = write_images(args, rows, directory)
            made.data = {"name": "npz", "path": path}
            made.augment.size = args.size
            if args.width:
                made.encoder.width = args.width
    place = pathlib.Path(directory) / config.replace(":", "_").replace("/", "_")
    return build.build(made, place)


def write_images(args, rows: int, directory: str) -> str:
    """Write the train images, once; return the path."""
    path = pathlib.Path(directory) / f"{rows}_images.npz"
    if not path.exists():
        rng, shape = np.random.default_rng(0), (args.size, args.size, 3)
        label = np.arange(rows) % args.classes
        pattern = rng.integers(0, 128, (args.classes, *shape), np.uint8)
        noise = rng.integers(0, 128, (rows, *shape), np.uint8)
        np.savez(path, train_x=pattern[label] + noise, train_y=label)
    return str(path)


class Step:
    """The compiled step of a job, and its state in a task."""

    def __init__(self, work: job.Job, steps: int):
        in_call = work.loop.steps_per_call
        self.work, self.calls = work, -(-steps // in_call)
        self.steps = self.calls * in_call  # in a window
        self.state, self.feed = job.initial_state(work), None
        self.compile_seconds = 0.0
        self._step, self._resident = job.compile_step(work), job.resident(work)
        self._programs = {}  # shapes of a call's batches -> its program

    def begin(self, index: int, stack: contextlib.ExitStack) -> None:
        """Go over to the first step of a task; `stack` closes its feed."""
        work, task = self.work, self.work.stream.tasks[index]
        if index:
            self.state = work.method.end_task(self.state, work.stream.tasks[index - 1])
        self.state = job.begin_task(work, self.state, task)
        feed = job.feed_batches(work, work.method.source(self.state, task), index, 0)
        self.feed = stack.enter_context(contextlib.closing(feed))

    def _program(self, *arguments):
        shapes = tuple(x.shape for x in jax.tree.leaves(arguments[2]))
        if shapes not in self._programs:
            start = time.perf_counter()
            self._programs[shapes] = self._step.lower(*arguments).compile()
            self.compile_seconds += time.perf_counter() - start
        return self._programs[shapes]

    @property
    def compiled(self) -> jax.stages.Compiled:
        """Return the program that was compiled last."""
        return list(self._programs.values())[-1]

    def window(self, calls: int | None = None) -> float:
        """Take the steps of a window, or of so many calls; return seconds."""
        pending, start = collections.deque(), time.perf_counter()
        for _ in range(calls or self.calls):
            _, batches, number = next(self.feed)
            arguments = self.state, self._resident, batches, number
            self.state, metrics = self._program(*arguments)(*arguments)
            pending.append(metrics)
            if len(pending) > 2:  # as the loop, which logs two calls behind
                jax.block_until_ready(pending.popleft())
        jax.block_until_ready(self.state)
        return time.perf_counter() - start


def in_second_task(work: job.Job, steps: int, stack: contextlib.ExitStack) -> Step:
    """Return the step in the second task, or in the only one, memories full.

    Args:
      work: the job.
      steps: number of steps in a window.
      stack: closes the feeds.
    """
    step = Step(work, steps)
    step.begin(0, stack)
    memory = getattr(step.state.extra, "memory", None)
    if memory is not None:
        rows = len(jax.tree.leaves(memory)[0])
        batch = work.data.batch_size * work.loop.steps_per_call
        step.window(-(-2 * rows // batch))
    if len(work.stream.tasks) > 1:
        step.begin(1, stack)
    step.window(60 if work.data.graphs else 1)  # until each size of batches was met
    return step


def second_task(work: job.Job) -> core.TrainState:
    """Return the state at the first step of the second task, nothing trained."""
    step = Step(work, 1)
    with contextlib.ExitStack() as stack:
        step.begin(0, stack)
        step.begin(1, stack)
    return step.state


def flops(work: job.Job, task: int) -> float | None:
    """Count FLOPs of a step; branches that the task does not take cost none."""
    shapes = job.shapes(work.method, work.data, work.batches_per_step(task))
    return cost.count_flops(work.method.step, *shapes, task=task)


def cores() -> int:
    """Count the cores that this process may use, as XLA does."""
    if hasattr(os, "sched_getaffinity"):  # Linux alone
        return len(os.sched_getaffinity(0))
    return os.cpu_count()


def time_peer(work: job.Job, state: core.TrainState, **how) -> tuple:
    """Make the step of a job in PyTorch, see `timed` of peers/torch_two_view.py."""
    name = "two_view" if work.config["method"]["name"] == "two_view" else "online"
    state = jax.device_get(state.replace(key=None))
    return importlib.import_module(f"peers.torch_{name}").timed(
        work, state, cores(), **how
    )


def time_end(work: job.Job, state: core.TrainState) -> float:
    """Measure the seconds that the end of a task takes; the first call compiles."""
    task = work.stream.tasks[:2][-1]
    for _ in range(2):
        start = time.perf_counter()
        jax.block_until_ready(work.method.end_task(state, task))
    return time.perf_counter() - start


def measure(args, directory: str) -> list[dict]:
    """Measure each config, and its peer: name of a column -> value."""
    rows, sides = {}, {}
    with contextlib.ExitStack() as stack:
        for config in args.configs:
            work = make_job(args, config, directory)
            step = in_second_task(work, args.steps, stack)
            sizes = step.compiled.memory_analysis()
            rows[config] = {
                "beside": args.configs[0],
                "flops": flops(work, work.stream.tasks[:2][-1].index),
                "compile_seconds": step.compile_seconds,
                "bytes": sizes.temp_size_in_bytes + sizes.argument_size_in_bytes,
                "end_seconds": time_end(work, step.state),
            }
            sides[config] = step.window, step.steps, work.data.batch_size
            if args.peer:
                window, form = time_peer(work, step.state)
                rows[form := f"{config}, {form}"] = {"beside": config}
                sides[form] = (
                    lambda window=window, step=step: window(step.steps),
                    step.steps,
                    work.data.batch_size,
                )
        times = {name: [] for name in sides}
        for _ in range(args.windows):  # in turns: noise of the machine hits all sides
            for name, (window, steps, _) in sides.items():
                busy = time.process_time()
                seconds = window()
                busy = time.process_time() - busy
                times[name].append((1e3 * seconds / steps, 1e3 * busy / steps))
    for name, row in rows.items():
        ms, cpu = np.transpose(times[name])
        beside, beside_cpu = np.transpose(times[row["beside"]])
        ratio = ms / beside
        row |= {
            "row": name,
            "step_ms": float(np.median(ms)),
            "cpu_ms": float(cpu.mean()),
            "images_per_second": 1e3 * sides[name][2] / float(np.median(ms)),
            "ratio": float(np.median(ratio)),
            "ratio_min": float(ratio.min()),
            "ratio_max": float(ratio.max()),
            "ratio_cpu": float(cpu.sum() / beside_cpu.sum()),
        }
    return list(rows.values())


# Head of a column -> (its key, scale, digits)
COLUMNS = {
    "G FLOP": ("flops", 1e-9, 3),
    "compile s": ("compile_seconds", 1, 1),
    "MB": ("bytes", 1e-6, 0),
    "step ms": ("step_ms", 1, 2),
    "CPU ms": ("cpu_ms", 1, 2),
    "images/s": ("images_per_second", 1, 0),
    "ratio": ("ratio", 1, 2),
    "least": ("ratio_min", 1, 2),
    "most": ("ratio_max", 1, 2),
    "of CPU time": ("ratio_cpu", 1, 2),
    "end s": ("end_seconds", 1, 2),
}


def table(rows: list[dict]) -> str:
    """Write the rows as Markdown.

    A ratio is that of a config's time to the first config's, and of PyTorch's to that
    of the config above it.
    """
    lines = [f"| step | {' | '.join(COLUMNS)} |", "|---" * (len(COLUMNS) + 1) + "|"]
    for row in rows:
        cells = [row["row"]]
        for key, scale, digits in COLUMNS.values():
            value = row.get(key)
            cells.append("-" if value is None else f"{value * scale:,.{digits}f}")
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def main(argv=None) -> list[dict]:
    """Measure all configs, print the table, return its rows."""
    args = parser().parse_args(argv)
    if args.peer and importlib.util.find_spec("torch") is None:
        parser().error("--peer: PyTorch is missing, pip install --group peers")
    # PyTorch must find memory on a GPU too.
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    about = {
        "date": datetime.date.today().isoformat(),
        "jax": jax.__version__,
        "device": jax.devices()[0].device_kind,
        "cores": cores(),
        "load": round(os.getloadavg()[0], 1),
    }
    setting = {k: v for k, v in vars(args).items() if k != "json" and v is not None}
    for values in (about, setting):
        print(" ".join(f"{k}={v}" for k, v in values.items()), flush=True)
    cached = jax.config.jax_enable_compilation_cache
    jax.config.update("jax_enable_compilation_cache", False)  # to time compilation
    try:
        with tempfile.TemporaryDirectory() as directory:
            rows = measure(args, directory)
    finally:
        jax.config.update("jax_enable_compilation_cache", cached)
    print(table(rows))
    if args.json:
        with open(args.json, "a", encoding="utf-8") as file:
            file.writelines(json.dumps(about | setting | row) + "\n" for row in rows)
    return rows


if __name__ == "__main__":
    main()
