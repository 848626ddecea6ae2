"""Count what training costs: seconds by activity, images, FLOPs, memory.

FLOPs are XLA's count for one step before compilation, over all devices, with a
multiply-add as two. XLA counts the most expensive branch of a conditional, and the body
of a loop once. Therefore the step is traced as Python runs it: loops of known length
are written out, and a comparison of the task's number picks its branch.
"""

import contextlib
import functools
import hashlib
import os
import re
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import numpy as np
from absl import logging
from jaxlib import _jax

from jaxcl import core, sharding
from jaxcl.data import storage
from jaxcl.run import job

PHASES = ("first_task", "later_tasks")  # of which the steps are counted apart


class Clock:
    """Seconds of the present task by activity; "rest" is all other time."""

    def __init__(self, spent: dict):
        """Start from the seconds that the task took before, from `read`."""
        self._spent, self._name, self._since = dict(spent), "rest", time.monotonic()

    def _switch_to(self, name):
        """Count the seconds so far, switch to `name`, and return the previous name."""
        now, before = time.monotonic(), self._name
        self._spent[before] = self._spent.get(before, 0.0) + now - self._since
        self._name, self._since = name, now
        return before

    @contextlib.contextmanager
    def count(self, name: str) -> Iterator[None]:
        """Count the seconds of this context as `name`."""
        before = self._switch_to(name)
        try:
            yield
        finally:
            self._switch_to(before)

    def time_compilation(self, step: Callable) -> Callable:
        """Wrap a step (state, resident, batches, count) -> (state, metrics).

        The first call with batches of a new shape compiles: it counts as "compile".
        """
        compiled_shapes = set()

        def timed_step(state, resident, batches, count):
            shape = tuple(leaf.shape for leaf in jax.tree.leaves(batches))
            if shape in compiled_shapes:
                return step(state, resident, batches, count)
            compiled_shapes.add(shape)
            with self.count("compile"):
                return step(state, resident, batches, count)

        return timed_step

    def read(self) -> dict[str, float]:
        """Return the seconds of the task so far, by name."""
        self._switch_to(self._name)
        return dict(self._spent)

    def restart(self) -> None:
        """Begin another task."""
        self._switch_to(self._name)
        self._spent = {}


def count_flops(
    step: Callable, state: Any, batch: Any, task: int, *, kept: tuple = ()
) -> int | None:
    """Count the FLOPs of one step; None where they cannot be counted.

    Nothing is compiled, and the jitted step is not touched. The program is lowered for
    CPU on every machine, since XLA counts a program without compiling it only there.

    Args:
      step: (state, batch) -> (state, metrics), not jitted.
      state, batch: its arguments, as shapes.
      task: number of the task, from 0; all but the first share a program.
      kept: the arguments of the run's own program, to read the count of an earlier run
        from the folder of compiled programs, or to leave it there. Counting takes as
        long as tracing and lowering the step once more.
    """
    leaves, tree = jax.tree.flatten((state, batch))
    placed = tuple(jax.tree.leaves(kept))
    try:
        return _count_flops(step, tree, tuple(leaves), min(task, 1), placed)
    except Exception as error:  # a run does not stop for a missing number
        logging.warning("no FLOPs: %s: %s", type(error).__name__, str(error)[:200])
        return None


@functools.lru_cache(maxsize=8)  # runs on single tasks share a step
def _count_flops(step, tree, leaves, task, kept):
    """Count the FLOPs of a step, or read the count of an earlier run.

    Its arguments are flattened, to be hashable; those of `kept` are placed.
    """
    file = _find_count(step, jax.tree.unflatten(tree, kept), task) if kept else None
    if file is not None:
        with contextlib.suppress(OSError, ValueError):
            return int(storage.read_bytes(file))
    found = _lower_and_count(step, *jax.tree.unflatten(tree, leaves), task)
    if file is not None:
        with contextlib.suppress(OSError), storage.replacing(file) as out:
            out.write(str(found).encode())
    return found


def _find_count(step, placed, task) -> str | None:
    """Find where runs leave the count of a step; None without compiled programs."""
    folder = jax.config.jax_compilation_cache_dir  # type: ignore[attr-defined]
    if not folder:
        return None
    # Of arguments that are placed alike the step has been traced already.
    printed = str(jax.make_jaxpr(step)(*placed))
    key = f"{jax.__version__} {task} {re.sub('0x[0-9a-f]+', '', printed)}"
    return os.path.join(folder, f"flops-{hashlib.sha256(key.encode()).hexdigest()}")


def _lower_and_count(step, state, batch, task) -> int:
    """Lower a step of a task for CPU, as Python runs it, and count its FLOPs."""

    def step_of_task(state, batch):
        return step(state.replace(task=np.int32(task)), batch)

    with jax.disable_jit():  # Python runs loops, and branches that are known
        traced = jax.jit(step_of_task).trace(state, batch)
    with sharding.on_host():
        lowered = traced.lower(lowering_platforms=("cpu",))
        counted = lowered.cost_analysis()
        if counted is None:  # of a program for an accelerator JAX does not ask XLA
            client = jax.local_devices(backend="cpu")[0].client
            module = lowered.compiler_ir("hlo").as_hlo_module()
            counted = _jax.hlo_module_cost_analysis(client, module)
        return round(counted["flops"])


def empty_cost(num_tasks: int) -> dict:
    """Return the cost before the first task, as JSON."""
    return {
        "per_task": [None] * num_tasks,
        "total": None,
        "flops_per_step": dict.fromkeys(PHASES),
        "device": None,
        "num_devices": None,
        "jax": jax.__version__,
    }


class TaskCost(NamedTuple):
    """The cost of one task."""

    steps: int
    images: int  # rows of the task's data that its steps read, on all devices
    flops_per_step: int | None  # see `count_flops`
    seconds: dict  # see `Clock.read`
    machine: dict  # see `sharding.describe`


def sum_task_cost(
    work: job.Job, state: core.TrainState, task: int, clock: Clock
) -> TaskCost:
    """Sum up the cost of a task, with the FLOPs of a step, after its steps."""
    steps, parts = int(state.step) - int(state.task_start), work.parts(task)
    shapes = job.shapes(work.method, work.data, parts)
    kept = job.placed_shapes(work.method, work.data, work.mesh, parts)
    flops = count_flops(work.method.step, *shapes, task, kept=kept)
    images, machine = steps * work.data.batch_size * parts, sharding.describe(work.mesh)
    return TaskCost(steps, images, flops, clock.read(), machine)


def add_task(cost: dict, task: int, spent: TaskCost) -> dict:
    """Add the cost of a finished task, and sum over tasks; returns a new dict.

    Args:
      cost: from `empty_cost` or `add_task`; not changed.
      task: number of the task, from 0; replaced if it is there already.
      spent: the cost of the task.
    """
    per_step, seconds = spent.flops_per_step, spent.seconds
    entry = {
        "steps": spent.steps,
        "images": spent.images,
        "flops": None if per_step is None else spent.steps * per_step,
        "train_seconds": seconds.get("train", 0.0),
        "compile_seconds": seconds.get("compile", 0.0),
        "evaluation_seconds": seconds.get("evaluation", 0.0),
        "peak_bytes": spent.machine["peak_bytes"],
    }
    per_task = [*cost["per_task"][:task], entry, *cost["per_task"][task + 1 :]]
    finished = [task_cost for task_cost in per_task if task_cost is not None]
    columns = {key: [task_cost[key] for task_cost in finished] for key in entry}
    peaks = [peak for peak in columns.pop("peak_bytes") if peak is not None]
    total = {key: None if None in x else sum(x) for key, x in columns.items()}
    return {
        "per_task": per_task,
        "total": {**total, "peak_bytes": max(peaks, default=None)},
        "flops_per_step": {**cost["flops_per_step"], PHASES[min(task, 1)]: per_step},
        "device": spent.machine["device"],
        "num_devices": spent.machine["num_devices"],
        "jax": jax.__version__,
    }


def format_line(cost: dict) -> str:
    """Write the known cost of all tasks so far, in one line.

    They include tasks of a run that this one continues, as an update does.
    """
    total = cost["total"]
    if total is None:
        return "cost: not measured"
    parts = [] if total["flops"] is None else [f"{format_count(total['flops'])}FLOP"]
    parts += [f"{total['steps']:,} steps", f"{total['images']:,} images"]
    names = {"train": "training", "compile": "compiling", "evaluation": "evaluation"}
    seconds = {name: total[f"{key}_seconds"] for key, name in names.items()}
    times = [f"{_seconds(value)} {name}" for name, value in seconds.items()]
    parts.append(f"{' + '.join(times)} on {cost['num_devices']} x {cost['device']}")
    if total["peak_bytes"] is not None:
        parts.append(f"{format_count(total['peak_bytes'])}B at the peak")
    tasks = sum(task is not None for task in cost["per_task"])
    of = f" of {tasks} tasks" if tasks > 1 else ""
    return f"cost{of}: {', '.join(parts)}"


def _seconds(value) -> str:
    return f"{value:.1f} s" if value < 9.95 else f"{value:,.0f} s"


def format_count(value) -> str:
    """Write a count in three digits with an SI prefix, for the unit to follow."""
    power = min(int(f"{value:.2e}".partition("e")[2]) // 3, 6)
    return f"{value / 1000**power:.3g} {['', 'k', 'M', 'G', 'T', 'P', 'E'][power]}"
