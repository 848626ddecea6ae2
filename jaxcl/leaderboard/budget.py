"""From a budget of FLOPs to the epochs, updates or passes that it pays for.

What a run will cost is counted before it begins: `counted` walks through its tasks as
the loop does, without a step, and adds up each task's steps times the FLOPs of its
step, which are those of results.json (`run.cost`). An entry then gets
- "epochs": the largest number whose count is within the budget, the same for all tasks;
- "updates" on each incoming batch of a stream that comes once, likewise;
- "passes" over the memory that GDumb fits a network to when it is judged. Its steps
  compute nothing, and no results count the fit: a pass is taken for so many steps of
  fine-tuning the same network on batches of the fit's size. One fit counts, the last.
Nobody gets less than one. Whoever would cost more even so is over the budget.

Not counted, here and in results.json: evaluations, and what happens between tasks, such
as iCaRL's means or the choice of rows that CCLIS keeps.
"""

import copy
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import ml_collections

from jaxcl import core, schema, sharding
from jaxcl.config import build, recipe
from jaxcl.data import stream
from jaxcl.leaderboard import table
from jaxcl.methods import gdumb
from jaxcl.run import cost, job

FIELDS = {
    "epochs": "epochs",
    "updates": "replay.updates",
    "passes": "method.passes",
}


class Count(NamedTuple):
    """What a run costs, known before it begins."""

    flops: int  # of all its steps
    steps: int
    # Of what it carries along: parameters, optimiser, copies of the network, memory;
    # images that a memory names by their row are in it.
    state_bytes: int


class Plan(NamedTuple):
    """What an entry does with a budget."""

    amount: int  # of epochs, updates or passes
    flops: int  # counted, of results.json and beside it
    beside: int  # of these, what results.json does not count
    state_bytes: int


def changed(config: ml_collections.ConfigDict, changes: dict[str, Any]):
    """A copy of a config with changes, as of `recipe.change`."""
    config = copy.deepcopy(config)
    recipe.change(config, changes)
    return config


def counted(config: ml_collections.ConfigDict) -> Count:
    """What a run of a config would cost; reads its data and trains nothing.

    Raises:
      ValueError: as `build.build`; or the FLOPs of its step cannot be counted.
    """
    work = build.planned(config)
    flops = steps = 0
    for index, count in enumerate(_steps(work)):
        places = job.placed(work, work.parts(index))
        per_step = cost.flops(work.method.step, *places, index)
        if per_step is None:
            raise ValueError(f"config.method={work.config['method']}: no FLOPs")
        flops, steps = flops + count * per_step, steps + count
    return Count(flops, steps, _bytes(work))


def _steps(work) -> list[int]:
    """Steps of each task that is trained.

    What a task trains on may follow what its state says, as that of CCLIS, but nothing
    that a step changes: there the walk goes through all that happens between tasks.
    """
    tasks = work.stream.tasks[: work.first_tasks]
    if work.method.source is core.Method._field_defaults["source"]:
        return [len(job.schedule(work, task.train, task.index)) for task in tasks]
    state, counts = job.initial_state(work), []
    for task in tasks:
        state = job.begin(work, state, task)
        counts.append(int(state.task_steps))
        state = sharding.settle(work.method.end_task(state, task), work.mesh)
    return counts


def _bytes(work) -> int:
    """Bytes of the state, and of images that its memory names by their row."""
    state, batch = job.shapes(work)
    total = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(state))
    if work.method.replayed is not None:
        rows = jax.eval_shape(work.method.memory, state).filled.size
        image = batch["image"]
        total += rows * math.prod(image.shape[1:]) * image.dtype.itemsize
    return int(total)


def plan(
    spends: table.Spends, config: ml_collections.ConfigDict, budget: float
) -> Plan:
    """What a config does with a budget.

    Args:
      spends: on what.
      config: of which epochs, updates and passes do not matter.
      budget: FLOPs.
    """

    def count(amount):
        return counted(changed(config, {FIELDS[spends]: amount}))

    one = count(1)
    if spends == "passes":
        return _of_fits(config, one, budget)
    costs = {1: one.flops}

    def flops(amount):
        if spends == "epochs":
            return amount * one.flops
        if amount not in costs:
            costs[amount] = count(amount).flops
        return costs[amount]

    amount = affordable(flops, budget)
    return Plan(amount, flops(amount), 0, one.state_bytes)


def _of_fits(config, own, budget) -> Plan:
    """The plan of GDumb, which trains when it is judged, on its memory alone.

    Args:
      own: the count of the steps, which store rows.
    """
    options = schema.defaults(gdumb.make) | config.method.to_dict()
    fits = counted(
        changed(
            config,
            {
                "method": {"name": "finetune", "head": options["head"]},
                "batch_size": options["batch_size"],
                "replay.policy": "reservoir",
            },
        )
    )
    work = build.planned(config)
    memory = jax.eval_shape(work.method.memory, job.shapes(work)[0])
    stored = min(memory.filled.size, stream.size(work.stream.dataset.train))
    one = -(-stored // options["batch_size"]) * fits.flops // fits.steps
    passes = affordable(lambda n: own.flops + n * one, budget)
    return Plan(passes, own.flops + passes * one, passes * one, own.state_bytes)


def affordable(flops: Callable[[int], int], budget: float) -> int:
    """The largest amount that costs no more than the budget, at least 1.

    Args:
      flops: amount -> what it costs: a + b n with a >= 0 < b, or hardly more.
      budget: FLOPs.
    """
    one = flops(1)
    # So much is paid for, since what is there once need not be paid again.
    other = max(2, int(budget // one))
    each = (flops(other) - one) / (other - 1)
    amount = max(1, 1 + math.floor((budget - one) / each + 1e-9))
    while amount > 1 and flops(amount) > budget:
        amount -= 1
    return amount
