"""What training costs: seconds by activity, images, FLOPs, memory.

FLOPs are XLA's count for one step before compilation, over all devices, with a
multiply-add as two. Of a conditional XLA counts the most expensive branch; therefore
conditionals on the task's number are resolved first, once for the first task and once
for the later ones. The body of a loop counts as often as it runs where that is known
(`lax.scan`, `lax.map`), else once.
"""

import contextlib
import functools
import operator
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import numpy as np
from absl import logging
from jax.extend import core
from jax.extend.core import primitives

from jaxcl import sharding

PHASES = ("first_task", "later_tasks")  # each has its own program, see above


class Clock:
    """Seconds of the present task by activity; "rest" is what has no other name."""

    def __init__(self, spent: dict):
        """Start from the seconds that the task took before, as `read` gave them."""
        self._spent, self._name, self._since = dict(spent), "rest", time.monotonic()

    def _turn(self, name):
        """Count the seconds so far, and go over to `name`; returns the name before."""
        now, before = time.monotonic(), self._name
        self._spent[before] = self._spent.get(before, 0.0) + now - self._since
        self._name, self._since = name, now
        return before

    @contextlib.contextmanager
    def on(self, name: str) -> Iterator[None]:
        """Count the seconds inside as `name`, and not as the activity around it."""
        before = self._turn(name)
        try:
            yield
        finally:
            self._turn(before)

    def time_compilation(self, step: Callable) -> Callable:
        """Wrap a step (state, resident, batches, count) -> (state, metrics).

        The first call with batches of a new shape compiles: it counts as "compile".
        """
        compiled_shapes = set()

        def timed(state, resident, batches, count):
            shape = tuple(leaf.shape for leaf in jax.tree.leaves(batches))
            if shape in compiled_shapes:
                return step(state, resident, batches, count)
            compiled_shapes.add(shape)
            with self.on("compile"):
                return step(state, resident, batches, count)

        return timed

    def read(self) -> dict[str, float]:
        """Seconds of the task so far, by name."""
        self._turn(self._name)
        return dict(self._spent)

    def restart(self) -> None:
        """Begin another task."""
        self._turn(self._name)
        self._spent = {}


def flops(step: Callable, state: Any, batch: Any, task: int) -> int | None:
    """Floating-point operations of one step, None where they cannot be counted.

    Nothing is compiled, and the jitted step is not touched. The program is lowered for
    CPU on every machine, since XLA counts a program without compiling it only there.

    Args:
      step: (state, batch) -> (state, metrics), not jitted.
      state, batch: its arguments, as shapes.
      task: number of the task, from 0; all but the first share a program.
    """
    leaves, tree = jax.tree.flatten((state, batch))
    try:
        return _count(step, tree, tuple(leaves), min(task, 1))
    except Exception as error:  # a run does not stop for a missing number
        logging.warning("no FLOPs: %s: %s", type(error).__name__, str(error)[:200])
        return None


@functools.lru_cache(maxsize=4)  # runs on single tasks share a step
def _count(step, tree, leaves, task):
    """FLOPs of the step, whose arguments are flattened so that they can be hashed."""
    state, batch = jax.tree.unflatten(tree, leaves)
    program = jax.jit(step).trace(state, batch).jaxpr  # traced before, by job.checked
    known = [None] * len(leaves)
    known[jax.tree.unflatten(tree, range(len(leaves)))[0].task] = np.int32(task)
    with sharding.on_host():
        program = _decided(program, known)
        return _lowered(program) + _turns(program.jaxpr)


def _turns(program) -> int:
    """FLOPs that loops of known length add to XLA's count, which runs a body once."""
    extra = 0
    for equation in program.eqns:
        options = equation.params
        programs = core.jaxprs_in_params(options)
        if platforms := options.get("branches_platforms"):
            # The form for CPUs, which is the one that XLA counts.
            own = [named is None or "cpu" in named for named in platforms].index(True)
            programs = [options["branches"][own].jaxpr]
        inner = [_turns(jaxpr) for jaxpr in programs]
        extra += max(inner) if equation.primitive is primitives.cond_p else sum(inner)
        if equation.primitive is primitives.scan_p:
            body = _lowered(options["jaxpr"]) + sum(inner)
            extra += (options["length"] - 1) * body
    return extra


# `_decided` returns the same program for all tasks if no branch depends on the task.
@functools.lru_cache(maxsize=16)
def _lowered(program):
    """XLA's count for a program, where loop bodies run once."""
    run = jax.jit(core.jaxpr_as_fun(program))
    lowered = run.trace(*program.in_avals).lower(lowering_platforms=("cpu",))
    return round(lowered.cost_analysis()["flops"])


def _decided(program, arguments):
    """The program with conditionals resolved where their predicate is known.

    Args:
      program: closed jaxpr.
      arguments: one number per input, None where it is not known.

    Returns:
      Closed jaxpr; the same object if no conditional was resolved.
    """
    inside, equations = program.jaxpr, []
    values = dict(zip(inside.invars, arguments, strict=True))

    def read(atom):
        return atom.val if isinstance(atom, core.Literal) else values.get(atom)

    for equation in inside.eqns:
        inputs, options = [read(atom) for atom in equation.invars], equation.params
        values |= zip(equation.outvars, _numbers(equation, inputs), strict=True)
        if equation.primitive is primitives.cond_p and inputs[0] is not None:
            branches = options["branches"]
            taken = _decided(branches[int(inputs[0])], inputs[1:])
            # XLA counts the most expensive branch, so every branch becomes this one.
            equation = equation.replace(
                params={**options, "branches": (taken,) * len(branches)}
            )
        elif equation.primitive is primitives.jit_p:
            inner = _decided(options["jaxpr"], inputs)
            if inner is not options["jaxpr"]:
                equation = equation.replace(params={**options, "jaxpr": inner})
        equations.append(equation)
    if all(map(operator.is_, equations, inside.eqns)):
        return program
    return program.replace(jaxpr=inside.replace(eqns=equations))


def _numbers(equation, inputs) -> list:
    """Outputs of an equation if they are scalars and all inputs known, else Nones."""
    outputs, options = equation.outvars, equation.params
    unknown = [x for x in inputs if x is None] or equation.effects
    if unknown or any(atom.aval.shape for atom in outputs):
        return [None] * len(outputs)
    if equation.primitive is primitives.jit_p:
        return core.jaxpr_as_fun(options["jaxpr"])(*inputs)
    if [*core.jaxprs_in_params(options)]:
        return [None] * len(outputs)
    values = equation.primitive.bind(*inputs, **options)
    return values if equation.primitive.multiple_results else [values]


def empty(num_tasks: int) -> dict:
    """The cost before the first task, as JSON."""
    return {
        "per_task": [None] * num_tasks,
        "total": None,
        "flops_per_step": dict.fromkeys(PHASES),
        "device": None,
        "num_devices": None,
        "jax": jax.__version__,
    }


class Spent(NamedTuple):
    """What one task took."""

    steps: int
    images: int  # rows of the task's data that its steps read, on all devices
    flops_per_step: int | None  # see `flops`
    seconds: dict  # see `Clock.read`
    machine: dict  # see `sharding.describe`


def add(cost: dict, task: int, spent: Spent) -> dict:
    """Add the cost of a finished task, and sum over tasks; returns a new dict.

    Args:
      cost: from `empty` or `add`; not changed.
      task: number of the task, from 0; replaced if it is there already.
      spent: what the task took.
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


def line(cost: dict) -> str:
    """One line of text: the cost of all tasks so far, without what is not known.

    Tasks of a run that this one continues, as an update does, are among them.
    """
    total = cost["total"]
    if total is None:
        return "cost: not measured"
    parts = [] if total["flops"] is None else [f"{short(total['flops'])}FLOP"]
    parts += [f"{total['steps']:,} steps", f"{total['images']:,} images"]
    times = [
        f"{_seconds(total[key])} {name}"
        for key, name in (
            ("train_seconds", "training"),
            ("compile_seconds", "compiling"),
            ("evaluation_seconds", "evaluation"),
        )
    ]
    parts.append(f"{' + '.join(times)} on {cost['num_devices']} x {cost['device']}")
    if total["peak_bytes"] is not None:
        parts.append(f"{short(total['peak_bytes'])}B at the peak")
    tasks = sum(task is not None for task in cost["per_task"])
    of = f" of {tasks} tasks" if tasks > 1 else ""
    return f"cost{of}: {', '.join(parts)}"


def _seconds(value) -> str:
    return f"{value:.1f} s" if value < 9.95 else f"{value:,.0f} s"


def short(value) -> str:
    """A count in three digits, with the prefix that goes before its unit."""
    power = min(int(f"{value:.2e}".partition("e")[2]) // 3, 6)
    return f"{value / 1000**power:.3g} {['', 'k', 'M', 'G', 'T', 'P', 'E'][power]}"
