"""Count what training costs: seconds by activity, images, FLOPs, memory.

FLOPs are XLA's count for one step before compilation, over all devices, with a
multiply-add as two. XLA counts the most expensive branch of a conditional, and the body
of a loop once. Therefore the step is traced as Python runs it: loops of known length
are written out, and a comparison of the task's number picks its branch.
"""

import contextlib
import functools
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import numpy as np
from absl import logging

from jaxcl import core, sharding
from jaxcl.data import stream
from jaxcl.run import job

LONG = 600  # seconds of training, above which a run says how long it takes
PHASES = ("first_task", "later_tasks")  # of which the steps are counted apart


class Clock:
    """Seconds of the present task by activity; "rest" is all other time."""

    def __init__(self, seconds: dict):
        """Start from the seconds that the task took before, from `read`."""
        self._spent, self._name, self._since = dict(seconds), "rest", time.monotonic()

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
        """Wrap a step so that the seconds of its compilation are counted apart.

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


def count_flops(step: Callable, state: Any, batch: Any, task: int) -> int | None:
    """Count the FLOPs of one step; None if they cannot be counted.

    Nothing is compiled, and the jitted step is not touched. The program is lowered for
    CPU on every machine, since XLA counts a program without compiling it only there.

    Args:
      step: (state, batch) -> (state, metrics), not jitted.
      state, batch: arguments of the step, as shapes.
      task: number of the task, from 0; all but the first share a program.
    """
    leaves, tree = jax.tree.flatten((state, batch))
    try:
        return _count_flops(step, tree, tuple(leaves), min(task, 1))
    except Exception as error:  # a run does not stop for a missing number
        logging.warning("no FLOPs: %s: %s", type(error).__name__, str(error)[:200])
        return None


@functools.lru_cache(maxsize=8)  # runs on single tasks share a step
def _count_flops(step, tree, leaves, task) -> int:
    """Count the FLOPs of a step, whose arguments are flattened, to be hashable."""

    def step_of_task(state, batch):
        return step(state.replace(task=np.int32(task)), batch)

    with sharding.on_host(), jax.disable_jit():  # Python runs loops and known branches
        traced = jax.jit(step_of_task).trace(*jax.tree.unflatten(tree, leaves))
    with sharding.on_host():
        lowered = traced.lower(lowering_platforms=("cpu",))
        costs = lowered.cost_analysis()
    if not isinstance(costs, dict):
        raise RuntimeError("XLA counts no program of this machine's CPU")
    return round(costs["flops"])


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
    steps = int(state.step) - int(state.task_start)
    num_batches = work.batches_per_step(task)
    shapes = job.shapes(work.method, work.data, num_batches)
    flops = count_flops(work.method.step, *shapes, task=task)
    images = steps * work.data.batch_size * num_batches
    machine = sharding.describe(work.mesh)
    return TaskCost(steps, images, flops, clock.read(), machine)


def add_task(cost: dict, task: int, spent: TaskCost) -> dict:
    """Add the cost of a finished task, and sum over tasks; returns a new dict.

    Args:
      cost: cost from `empty_cost` or `add_task`; not changed.
      task: number of the task, from 0; replaced if it is there already.
      spent: cost of the task.
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


def describe_duration(work: job.Job, seconds: float, steps: int) -> str:
    """Say how long a run takes on this machine, and which choice is cheaper.

    Args:
      work: the run.
      seconds: time of a step.
      steps: number of steps that are left.

    Returns:
      One line; "" for a run of less than `LONG` seconds.
    """
    total = seconds * steps
    if total < LONG:
        return ""
    epochs = max(stream.epochs_of_tasks(work.data.epochs))
    fewer = max(int(epochs * LONG / total), 1)
    ways = []
    if fewer < epochs:
        shorter = format_duration(total * fewer / epochs)
        ways.append(f"--config.epochs={fewer}, {shorter}")
    on_cpu = work.mesh.devices.flat[0].platform == "cpu"
    own, name = work.config.get("name") == "own_images", work.config["encoder"]["name"]
    if on_cpu and own and name != "conv_net":
        ways.append("own_images:FOLDER,encoder=conv_net,size=32")
    text = f"{steps:,} steps take {format_duration(total)} on this machine, evaluation "
    text += "left out; Ctrl-C saves"
    return f"jaxcl: {text}. Cheaper: {'; or '.join(ways)}" if ways else f"jaxcl: {text}"


def format_duration(seconds: float) -> str:
    """Write a duration in a unit that suits it, as "about 5 h"."""
    sizes = {"days": 86_400, "h": 3600, "min": 60}
    unit = next((x for x, size in sizes.items() if seconds >= 2 * size), "min")
    return f"about {max(round(seconds / sizes[unit]), 1)} {unit}"


def format_line(cost: dict) -> str:
    """Write the known cost of all tasks so far, in one line.

    The sums include the earlier run's tasks if this run continues one, as an update
    does.
    """
    total = cost["total"]
    if total is None:
        return "cost: not measured"
    phrases = [] if total["flops"] is None else [f"{format_count(total['flops'])}FLOP"]
    phrases += [f"{total['steps']:,} steps", f"{total['images']:,} images"]
    names = {"train": "training", "compile": "compiling", "evaluation": "evaluation"}
    seconds = {name: total[f"{key}_seconds"] for key, name in names.items()}
    times = [f"{_seconds(value)} {name}" for name, value in seconds.items()]
    phrases.append(f"{' + '.join(times)} on {cost['num_devices']} x {cost['device']}")
    if total["peak_bytes"] is not None:
        phrases.append(f"{format_count(total['peak_bytes'])}B at the peak")
    tasks = sum(task is not None for task in cost["per_task"])
    of = f" of {tasks} tasks" if tasks > 1 else ""
    return f"cost{of}: {', '.join(phrases)}"


def _seconds(value) -> str:
    return f"{value:.1f} s" if value < 9.95 else f"{value:,.0f} s"


def format_count(value) -> str:
    """Write a count in three digits with an SI prefix, for the unit to follow."""
    power = min(int(f"{value:.2e}".partition("e")[2]) // 3, 6)
    return f"{value / 1000**power:.3g} {['', 'k', 'M', 'G', 'T', 'P', 'E'][power]}"
