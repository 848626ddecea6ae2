"""What training costs: seconds by what they went to, images, FLOPs, memory.

FLOPs are XLA's count of one step as written, before its compiler: products, sums and
the like of all devices together, a multiply-add as two. The program is that of the
first task or of a later one: conditionals on the task's number are decided first,
since of others XLA takes the dearest branch. The body of a loop counts as often as it
runs where that is known (`lax.scan`, `lax.map`), else once.
"""

import contextlib
import functools
import operator
import time
from collections.abc import Callable
from typing import NamedTuple

import jax
import numpy as np
from absl import logging
from jax.extend import core
from jax.extend.core import primitives

from jaxcl import sharding

PHASES = ("first_task", "later_tasks")  # of a run: the programs that are counted


class Clock:
    """Seconds of the present task, by what they went to; "rest" is all else."""

    def __init__(self, spent: dict):
        """Args: seconds by name that the task has taken before, as `read` gives."""
        self._spent, self._name, self._since = dict(spent), "rest", time.monotonic()

    def _turn(self, name):
        now, before = time.monotonic(), self._name
        self._spent[before] = self._spent.get(before, 0.0) + now - self._since
        self._name, self._since = name, now
        return before

    @contextlib.contextmanager
    def on(self, name: str):
        """What runs inside goes to `name`, and to nothing around it."""
        before = self._turn(name)
        try:
            yield
        finally:
            self._turn(before)

    def first_apart(self, step: Callable) -> Callable:
        """The same function of (state, resident, batches, count).

        The first call with batches of a shape, which compiles, goes to "compile".
        """
        met = set()

        def timed(state, resident, batches, count):
            shape = tuple(leaf.shape for leaf in jax.tree.leaves(batches))
            if shape in met:
                return step(state, resident, batches, count)
            met.add(shape)
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


def flops(step: Callable, state, batch, task: int) -> int | None:
    """Floating-point operations of one step, None where they cannot be counted.

    Nothing is compiled, and the jitted step is not touched. The count is made for
    CPU on every machine: XLA has none for a program that is not compiled elsewhere.

    Args:
      step: (state, batch) -> (state, metrics), not jitted.
      state, batch: its arguments, as shapes.
      task: number of the task, from 0; all but the first are one program.
    """
    leaves, tree = jax.tree.flatten((state, batch))
    try:
        return _count(step, tree, tuple(leaves), min(task, 1))
    except Exception as error:  # a number that is missing stops no run
        logging.warning("no FLOPs: %s: %s", type(error).__name__, str(error)[:200])
        return None


@functools.lru_cache(maxsize=4)  # runs on single tasks share a step
def _count(step, tree, leaves, task):
    state, batch = jax.tree.unflatten(tree, leaves)
    program = jax.jit(step).trace(state, batch).jaxpr  # traced before, by job.checked
    known = [None] * len(leaves)
    known[jax.tree.unflatten(tree, range(len(leaves)))[0].task] = np.int32(task)
    with sharding.on_host():
        program = _decided(program, known)
        return _lowered(program) + _turns(program.jaxpr)


def _turns(program) -> int:
    """FLOPs that loops of known length add to XLA's count, which takes one turn."""
    more = 0
    for equation in program.eqns:
        options = equation.params
        inner = [_turns(each) for each in core.jaxprs_in_params(options)]
        more += max(inner) if equation.primitive is primitives.cond_p else sum(inner)
        if equation.primitive is primitives.scan_p:
            more += (options["length"] - 1) * (_lowered(options["jaxpr"]) + sum(inner))
    return more


@functools.lru_cache(maxsize=16)  # where no branch depends on the task there is but one
def _lowered(program):
    run = jax.jit(core.jaxpr_as_fun(program))
    lowered = run.trace(*program.in_avals).lower(lowering_platforms=("cpu",))
    return round(lowered.cost_analysis()["flops"])


def _decided(program, arguments):
    """The jaxpr where every branch of a conditional is the one that numbers pick.

    Args:
      program: closed jaxpr.
      arguments: one number per input, None where it is not known.

    Returns:
      Closed jaxpr, the same object where nothing is decided.
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
            # XLA takes the dearest: of branches that are all the same, this one.
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
    """What an equation gives where that is known numbers, else None for each."""
    outputs, options = equation.outvars, equation.params
    unknown = [x for x in inputs if x is None] or equation.effects
    if unknown or any(atom.aval.shape for atom in outputs):
        return [None] * len(outputs)
    if equation.primitive is primitives.jit_p:
        return core.jaxpr_as_fun(options["jaxpr"])(*inputs)
    if [*core.jaxprs_in_params(options)]:
        return [None] * len(outputs)
    found = equation.primitive.bind(*inputs, **options)
    return found if equation.primitive.multiple_results else [found]


def empty(num_tasks: int) -> dict:
    """Cost before the first task: a dict that JSON can hold as it is."""
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
    images: int  # rows of the task's data that its steps drew, on all devices
    flops_per_step: int | None  # see `flops`
    seconds: dict  # see `Clock.read`
    machine: dict  # see `sharding.describe`


def add(cost: dict, task: int, spent: Spent) -> dict:
    """New cost that holds that of a finished task, and the sums over tasks.

    Args:
      cost: from `empty` or `add`; not changed.
      task: number of the task, from 0; replaced if it is there already.
      spent: what it took.
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
    done = [each for each in per_task if each is not None]
    columns = {key: [each[key] for each in done] for key in entry}
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
    """One line of text on the cost of all tasks so far, what is not known left out."""
    total = cost["total"]
    if total is None:
        return "cost: not measured"
    parts = [] if total["flops"] is None else [f"{_short(total['flops'])}FLOP"]
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
        parts.append(f"{_short(total['peak_bytes'])}B at the peak")
    return f"cost: {', '.join(parts)}"


def _seconds(value) -> str:
    return f"{value:.1f} s" if value < 9.95 else f"{value:,.0f} s"


def _short(value) -> str:
    """A count in three digits and a prefix that fits before its unit."""
    power = min(int(f"{value:.2e}".partition("e")[2]) // 3, 6)
    return f"{value / 1000**power:.3g} {['', 'k', 'M', 'G', 'T', 'P', 'E'][power]}"
