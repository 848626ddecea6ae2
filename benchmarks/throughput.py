"""Speed and memory of a real training step, perhaps beside PyTorch.

  python benchmarks/throughput.py --base=byol --strategy=pnr --peer

builds a job from a config of PNR (configs/pnr_cifar100.py, above 64 pixels
configs/pnr_imagenet100.py) with random images, puts it into its second task, where
teacher, queues and predictor all work, and times the compiled step as the training
loop calls it.

A teacher costs nothing in the first task, which has none, and one forward pass per
view in all others; --first-task times both.
"""

import argparse
import collections
import contextlib
import datetime
import importlib.util
import json
import os
import pathlib
import runpy
import tempfile
import time

import jax
import ml_collections
import numpy as np

from jaxcl import core, estimate
from jaxcl.config import build, files, recipe, sections
from jaxcl.methods.two_view import strategies as strategies_lib
from jaxcl.run import cost, job

_CONFIGS = pathlib.Path(__file__).resolve().parents[1] / "configs"


def parser() -> argparse.ArgumentParser:
    """The command line."""
    made = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    bases = (*files.load_paper("pnr").CIFAR,)  # those that it has values for
    strategies = tuple(x for x in strategies_lib.STRATEGIES if x != "distil")
    made.add_argument("--base", default="mocov2plus", choices=bases)
    made.add_argument("--strategy", default="pnr", choices=strategies)
    made.add_argument("--depth", type=int, default=18, help="10, 18, 34 or 50")
    made.add_argument("--width", type=int, default=64, help="of the first stage")
    made.add_argument("--hidden", type=int, help="of all heads; default: the base's")
    made.add_argument("--output", type=int, help="of projections; default: the base's")
    made.add_argument("--queue", type=int, default=65536, help="rows per bank")
    made.add_argument("--size", type=int, default=32, help="pixels of a side")
    made.add_argument("--batch", type=int, default=256, help="global")
    made.add_argument("--precision", default="float32", choices=(*sections.PRECISIONS,))
    made.add_argument("--devices", type=int, default=1)
    made.add_argument("--steps-per-call", type=int, help="default: as in training")
    made.add_argument("--windows", type=int, default=5)
    made.add_argument("--steps", type=int, default=10, help="per window")
    made.add_argument("--no-augment", action="store_true", help="on both sides")
    made.add_argument("--stream", action="store_true", help="images are not resident")
    made.add_argument("--first-task", action="store_true", help="also time that one")
    made.add_argument("--peer", action="store_true", help="also time PyTorch")
    made.add_argument("--json", help="file to append one line to")
    return made


def _recipe(name: str) -> dict:
    """What the file of a config defines."""
    return runpy.run_path(str(_CONFIGS / f"{name}.py"))


def config(args, data: str) -> ml_collections.ConfigDict:
    """The job's config: PNR's, on the images of an .npz file."""
    name = "pnr_cifar100" if args.size <= 64 else "pnr_imagenet100"
    made = _recipe(name)["get_config"]()
    made.data = {"name": "npz", "path": data}
    # Updated and not replaced: other values follow these.
    scenario = {"num_tasks": 2, "class_order": "sorted", "evaluation": "none"}
    made.scenario.update(scenario)
    made.evaluators = {}
    made.augment.size = args.size
    if args.no_augment:
        off = {"crop": False, "jitter": (0.0,) * 4, "grayscale": 0.0, "flip": 0.0}
        made.augment.update(off, blur=(0.0, 0.0), solarize=(0.0, 0.0))
    made.encoder.update(depth=args.depth, width=args.width)
    made.method.update(base=args.base, strategy=args.strategy)
    queues = dict.fromkeys(("mocov2plus", "nnclr"), {"queue_size": args.queue})
    recipe.set_by_name(made.method.base, queues)
    if args.hidden is not None:
        made.method.hidden_dim = args.hidden
        for section, option, names in (
            ("base", "predictor_hidden_dim", ("byol", "simsiam", "nnclr")),
            ("strategy", "distill_hidden_dim", ("cassle", "pnr")),
        ):
            table = dict.fromkeys(names, {option: args.hidden})
            recipe.set_by_name(made.method[section], table)
    if args.output is not None:
        made.method.output_dim = args.output
    made.batch_size, made.precision = args.batch, args.precision
    made.devices, made.steps_per_call = args.devices, args.steps_per_call
    made.save_every = made.eval_every = 0
    # An epoch is two steps: enough for all windows, and for whole calls.
    made.epochs = max(made.epochs, args.windows * args.steps + 100)
    if args.stream:
        made.device_bytes = 0
    return made


def make_job(args, directory) -> job.Job:
    """The job, its random images written to `directory` and read back."""
    rng, count = np.random.default_rng(0), max(4 * args.batch, 64)
    images = rng.integers(0, 256, (count, args.size, args.size, 3), np.uint8)
    path = pathlib.Path(directory) / "random.npz"
    label = np.arange(count) % 4
    np.savez(path, train_x=images, train_y=label)
    return build.build(config(args, str(path)), pathlib.Path(directory) / "run")


def begun(work: job.Job, index: int) -> core.TrainState:
    """The state at the first step of a task, as the training loop has it."""
    tasks = work.stream.tasks
    state = job.begin_task(work, job.initial_state(work), tasks[0])
    for task, following in zip(tasks[:index], tasks[1:], strict=False):
        state = job.begin_task(work, work.method.end_task(state, task), following)
    return state


class Ours:
    """The compiled step of a job with its feed; `window` runs and times it.

    `like` is another one of the same job, whose program and images it shares.
    """

    def __init__(self, work, state, feed, steps, like=None):
        self.state, self.feed = state, feed
        self.calls = -(-steps // work.loop.steps_per_call)
        self.steps = self.calls * work.loop.steps_per_call
        _, batches, number = next(feed)
        if like is not None:
            self.resident, self.compiled = like.resident, like.compiled
            return
        self.resident = job.resident(work)
        start = time.perf_counter()
        step = job.compile_step(work)
        if work.data.graphs:  # batches of several sizes, a program each
            self.compiled, self.compile_seconds = step, None
            return
        self.compiled = step.lower(state, self.resident, batches, number).compile()
        self.compile_seconds = time.perf_counter() - start

    def window(self, calls=None):
        """Seconds of a window, and those of them spent waiting for data."""
        waited, pending = 0.0, collections.deque()
        start = time.perf_counter()
        for _ in range(calls or self.calls):
            asked = time.perf_counter()
            _, batches, number = next(self.feed)
            waited += time.perf_counter() - asked
            self.state, metrics = self.compiled(
                self.state, self.resident, batches, number
            )
            pending.append(metrics)
            if len(pending) > 2:  # as the loop, which logs two calls behind
                jax.block_until_ready(pending.popleft())
        jax.block_until_ready(self.state)
        return time.perf_counter() - start, waited

    def memory(self):
        """Bytes on one device, and what they are."""
        stats = jax.local_devices()[0].memory_stats()
        if stats and "peak_bytes_in_use" in stats:
            return stats["peak_bytes_in_use"], "peak in use"
        sizes = self.compiled.memory_analysis()
        if sizes is None:
            return None, "unknown"
        total = sizes.temp_size_in_bytes + sizes.argument_size_in_bytes
        return total, "temporaries + arguments of the program"


def in_second_task(work: job.Job, steps: int, stack) -> Ours:
    """The step in the second task, once it is compiled; `stack` closes its feed.

    Where there is one task alone, in that.
    """
    task = work.stream.tasks[:2][-1]
    state = begun(work, task.index)
    feed = job.feed_batches(work, work.method.source(state, task), task.index, 0)
    feed = stack.enter_context(contextlib.closing(feed))
    ours = Ours(work, state, feed, steps)
    ours.window(
        60 if work.data.graphs else 1
    )  # until each size of batches has been met
    return ours


def in_turns(works: dict, args, stack, begin=None) -> tuple[dict, dict]:
    """Steps of the second task of several jobs, timed in turns.

    Noise of the machine hits all sides alike.

    Args:
      works: name -> job.
      args: with `steps` of a window and `windows`.
      stack: closes the feeds.
      begin: called before with (`Ours`, its job); None: nothing is.

    Returns:
      name -> `Ours`, and name -> seconds of a step in each window.
    """
    sides = {k: in_second_task(work, args.steps, stack) for k, work in works.items()}
    for name in sides if begin else ():
        begin(sides[name], works[name])
    seconds = {name: [] for name in sides}
    for _ in range(args.windows):
        for name, ours in sides.items():
            seconds[name].append(ours.window()[0] / ours.steps)
    return sides, seconds


def flops(work: job.Job, task: int) -> float | None:
    """Of one step on one device; branches that the task does not take cost none."""
    shapes = job.shapes(work.method, work.data, work.batches_per_step(task))
    count = cost.count_flops(work.method.step, *shapes, task=task)
    return count and count / work.mesh.size


def cores() -> int:
    """Those that this process may use, as XLA counts them."""
    if hasattr(os, "sched_getaffinity"):  # Linux alone
        return len(os.sched_getaffinity(0))
    return os.cpu_count()


def run_windows(args, work) -> tuple:
    """(our side, side -> its windows, the peer's name).

    A window is (seconds, CPU seconds of the process, seconds it waited for data);
    sides are "peer", "first" (ours in the first task) and "ours".
    """
    state, about, sides = begun(work, 1), None, {}
    with contextlib.ExitStack() as stack:

        def side(state, task, like=None):
            feed = job.feed_batches(work, work.stream.tasks[task].train, task, 0)
            stack.enter_context(contextlib.closing(feed))
            made = Ours(work, state, feed, args.steps, like)
            made.window(1)
            return made

        if args.peer:
            import peer  # PyTorch is needed with --peer alone

            numpy = jax.device_get(state.replace(key=None))
            theirs, about = peer.timed(args, work, numpy, cores())
            sides["peer"] = lambda: (theirs(ours.steps), 0.0)
        ours = side(state, 1)
        if args.first_task:
            sides["first"] = side(begun(work, 0), 0, like=ours).window
        sides["ours"] = ours.window
        windows = {name: [] for name in sides}
        for _ in range(args.windows):  # interleaved: noise of the machine hits all
            for name, window in sides.items():
                busy = time.process_time()
                spent, waited = window()
                windows[name].append((spent, time.process_time() - busy, waited))
    return ours, {name: np.array(rows) for name, rows in windows.items()}, about


def ratios(name: str, seconds, ours) -> dict:
    """Of neighbours in time, so that a slow minute slows both."""
    found = seconds / ours
    return {
        f"{name}_ratio_min": found.min(),
        f"{name}_ratio_max": found.max(),
        f"{name}_ratio": float(np.median(found)),
    }


def measure(args, directory) -> dict:
    """Everything the table holds, name -> value."""
    work = make_job(args, directory)
    first_flops, step_flops = flops(work, 0), flops(work, 1)
    ours, windows, about = run_windows(args, work)
    seconds, cpu, waits = windows["ours"].T
    images, typical = ours.steps * args.batch, float(np.median(seconds))
    speed = step_flops and step_flops * ours.steps / typical
    peak = device_peak(jax.devices()[0], args.precision)
    memory, memory_is = ours.memory()
    found = {
        "compile_seconds": ours.compile_seconds,
        "images_per_second": images / typical,
        "images_per_second_min": images / seconds.max(),
        "images_per_second_max": images / seconds.min(),
        "step_ms": 1e3 * typical / ours.steps,
        "cpu_ms": 1e3 * cpu.sum() / (len(cpu) * ours.steps),
        "memory_bytes": memory,
        "memory_is": memory_is,
        "flops_per_step": step_flops,
        "first_task_flops_per_step": first_flops,
        "flops_per_second": speed,
        "peak_fraction": speed and peak and speed / peak,
        "input_stall": waits.sum() / seconds.sum(),
    }
    if args.first_task:
        theirs, their_cpu, _ = windows["first"].T
        found |= {
            "first_task_step_ms": 1e3 * float(np.median(theirs)) / ours.steps,
            **ratios("first_task", theirs, seconds),
            "first_task_ratio_cpu": their_cpu.sum() / cpu.sum(),
        }
    if about:
        theirs, their_cpu, _ = windows["peer"].T
        found |= {
            "peer": about,
            "peer_images_per_second": images / float(np.median(theirs)),
            **ratios("peer", theirs, seconds),
            "peer_ratio_cpu": their_cpu.sum() / cpu.sum(),
        }
    return found


def device_peak(device, precision: str) -> float | None:
    """FLOP/s that a device can do at most, None where the table has no row."""
    chip = estimate.chip_of(device.device_kind)
    return chip and getattr(chip, precision)


def table(found: dict) -> str:
    """One line per number, in units people read."""

    def show(name, unit="", scale=1.0, digits=1):
        value = found.get(name)
        return "-" if value is None else f"{value * scale:,.{digits}f}{unit}"

    def span(name):
        low, high = show(f"{name}_min", digits=2), show(f"{name}_max", digits=2)
        return f"{show(name, digits=2)}  ({low} to {high})"

    speed = f"{show('images_per_second_min')} to {show('images_per_second_max')}"
    first = show("first_task_flops_per_step", " G", 1e-9, 3)
    lines = [
        ("compile", show("compile_seconds", " s")),
        ("images/s", f"{show('images_per_second')}  ({speed})"),
        ("step", f"{show('step_ms', ' ms')}  ({show('cpu_ms')} of CPU time)"),
        ("memory", f"{show('memory_bytes', ' MB', 1e-6)}  ({found['memory_is']})"),
        ("FLOPs", f"{show('flops_per_step', ' G', 1e-9, 3)}  (first task {first})"),
        ("FLOP/s", show("flops_per_second", " G", 1e-9)),
        ("of the peak", show("peak_fraction", " %", 100)),
        ("input stall", show("input_stall", " %", 100)),
    ]
    if "first_task_ratio" in found:
        lines += [
            ("first task", show("first_task_step_ms", " ms a step")),
            ("first / second", span("first_task_ratio")),
            ("in CPU time", show("first_task_ratio_cpu", digits=2)),
        ]
    if "peer" in found:
        lines += [
            ("peer", found["peer"]),
            ("peer images/s", show("peer_images_per_second")),
            ("ours / peer", span("peer_ratio")),
            ("in CPU time", show("peer_ratio_cpu", digits=2)),
        ]
    return "\n".join(f"{name:14} {value}" for name, value in lines)


def check_peer(args) -> None:
    """Exit with the reason where --peer cannot be had."""
    if args.stream or args.devices > 1:
        parser().error("--peer: needs resident images and one device")
    if importlib.util.find_spec("torch") is None:
        parser().error("--peer: PyTorch is missing, pip install --group peers")
    import peer

    try:
        peer.check(args.base, args.strategy)
    except ValueError as error:
        parser().error(f"--peer: {error}")


def lines(args, measure, line) -> list[dict]:
    """Rows that a benchmark measures, printed as a table and kept where args.json says.

    Args:
      args: parsed.
      measure: (args, an empty directory) -> dicts.
      line: a dict -> a line of text; without one the head.
    """
    about = {
        "date": datetime.date.today().isoformat(),
        "jax": jax.__version__,
        "device": jax.devices()[0].device_kind,
    }
    setting = {k: v for k, v in vars(args).items() if k != "json" and v is not None}
    for values in (about, setting):
        print(" ".join(f"{k}={v}" for k, v in values.items()))
    with tempfile.TemporaryDirectory() as directory:
        rows = [about | setting | found for found in measure(args, directory)]
    print(line())
    for row in rows:
        print(line(row))
    if args.json:
        with open(args.json, "a", encoding="utf-8") as file:
            file.writelines(json.dumps(row) + "\n" for row in rows)
    return rows


def main(argv=None) -> dict:
    """Measure one setting, print the table, return what it holds."""
    args = parser().parse_args(argv)
    if args.peer:
        check_peer(args)
    # PyTorch must find memory on a GPU too.
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    cached = jax.config.jax_enable_compilation_cache
    jax.config.update("jax_enable_compilation_cache", False)
    try:
        with tempfile.TemporaryDirectory() as directory:
            found = measure(args, directory)
    finally:
        jax.config.update("jax_enable_compilation_cache", cached)
    setting = {name: value for name, value in vars(args).items() if name != "json"}
    about = {
        "date": datetime.date.today().isoformat(),
        "jax": jax.__version__,
        "device": jax.devices()[0].device_kind,
        "cores": cores(),
        "load": round(os.getloadavg()[0], 1),
    }
    given = {name: value for name, value in setting.items() if value is not None}
    shown = " ".join(f"{name}={value}" for name, value in given.items())
    print(f"{' '.join(f'{n}={v}' for n, v in about.items())}\n{shown}")
    print(table(found), flush=True)
    found = about | setting | found
    if args.json:
        with open(args.json, "a", encoding="utf-8") as file:
            file.write(json.dumps(found) + "\n")
    return found


if __name__ == "__main__":
    main()
