"""Many seeds of one config: one after another, or side by side in one program.

Side by side, the state has an axis more and the method's step is mapped over it, so
that one call does the step of every seed. Which of the two is faster depends on the
machine, see benchmarks/seeds.py: a CPU computes a mapped convolution slowly, while an
accelerator that small batches leave idle takes many seeds in the time of one.
"""

import functools
import math
from collections.abc import Callable
from typing import NamedTuple

import jax
import numpy as np
from etils import epath

from jaxcl import core
from jaxcl.run import job
from jaxcl.run import results as results_lib

SUMMARY = "seeds.json"
# Axes of a state of several seeds; what is None they share.
_AXES = core.TrainState(
    key=0,
    step=None,
    task=None,
    task_start=None,
    task_steps=None,
    params=0,
    stats=0,
    opt_state=0,
    extra=0,
)


class Seeds(NamedTuple):
    """What a config with `seeds` above 1 asks for."""

    seeds: tuple[int, ...]
    make: Callable  # seed -> job.Job, built when its turn comes
    side_by_side: bool


def folder(seed: int) -> str:
    """Name of a seed's run directory, within that of all."""
    return f"seed_{seed}"


def one_of(state: core.TrainState, i: int) -> core.TrainState:
    """The state of the i-th seed alone."""
    mine = {
        name: jax.tree.map(lambda x: x[i], getattr(state, name))
        for name in ("key", "params", "stats", "opt_state", "extra")
    }
    return state.replace(**mine)


def _mapped(function, state, *arguments):
    """A hook of the host, called with each seed's state, the results put together."""
    count = len(state.key)
    states = [function(one_of(state, i), *arguments) for i in range(count)]
    together = jax.tree.map(lambda *x: jax.numpy.stack(x), *states)
    shared = ("step", "task", "task_start", "task_steps")
    return together.replace(**{name: getattr(states[0], name) for name in shared})


def _method(one: core.Method) -> core.Method:
    """The method of several seeds; batches hold their rows one after another."""

    def init(keys, batch):
        return jax.vmap(one.init, (0, None), _AXES)(keys, batch)

    def step(state, batch):
        count = len(state.key)
        batch = jax.tree.map(lambda x: x.reshape(count, -1, *x.shape[1:]), batch)
        state, metrics = jax.vmap(one.step, (_AXES, 0), (_AXES, 0))(state, batch)
        return state, jax.tree.map(lambda x: x.mean(axis=0), metrics)

    hooks = {
        name: functools.partial(_mapped, getattr(one, name))
        for name in ("begin_task", "end_task", "eval_state")
    }
    return one._replace(
        init=init,
        step=step,
        **hooks,
        source=lambda state, task: one.source(one_of(state, 0), task),
    )


def _judge(seeds, judges):
    """An evaluator that asks that of each seed about its state."""

    def evaluate(state, task):
        rows, scalars = {}, {}
        for i, (seed, judge) in enumerate(zip(seeds, judges, strict=True)):
            found = judge(one_of(state, i), task)
            rows |= {f"{folder(seed)}/{name}": x for name, x in found.rows.items()}
            for name, value in found.scalars.items():
                if name == "seconds":  # of all seeds
                    scalars[name] = scalars.get(name, 0.0) + value
                else:
                    scalars[f"{folder(seed)}/{name}"] = value
        return core.Result(rows, scalars)

    return evaluate


def together(jobs: dict[int, job.Job]) -> job.Job:
    """One job of the jobs of several seeds, which differ in nothing else.

    Args:
      jobs: seed -> its job.

    Returns:
      A job without pictures whose evaluators name their rows seed_S/NAME.
    """
    seeds, first = tuple(jobs), next(iter(jobs.values()))
    evaluators = {
        name: _judge(seeds, [one.evaluators[name] for one in jobs.values()])
        for name in first.evaluators
    }
    made = first._replace(
        method=_method(first.method),
        together=seeds,
        evaluators=evaluators,
        pictures={},
        quiet=True,
        alone=None,
    )
    return job.checked(made)


def apart(results: dict, seeds) -> dict[int, dict]:
    """Results of each seed, of those of `together`; the cost is that of all."""
    found = {}
    for seed in seeds:
        mark = f"/{folder(seed)}/"

        def own(named, mark=mark):
            return {k.replace(mark, "/"): x for k, x in named.items() if mark in k}

        parts = {key: own(results.get(key, {})) for key in ("matrices", "untrained")}
        scalars = [x if x is None else own(x) for x in results["scalars"]]
        found[seed] = {**results, **parts, "scalars": scalars}
        if not parts["untrained"]:
            found[seed].pop("untrained", None)
    return found


def spread(values) -> dict:
    """Mean, standard error of the mean and number of values, JSON-ready.

    Args:
      values: numbers, or None where nothing was measured.
    """
    values = np.array([x for x in values if x is not None], float)
    count = len(values)
    error = values.std(ddof=1) / math.sqrt(count) if count > 1 else None
    mean = values.mean() if count else None
    return results_lib.plain({"mean": mean, "error": error, "seeds": count})


def measures(results: dict) -> dict:
    """`results.summary` with one number for all times in place of the curve.

    Returns:
      matrix name -> measure -> number or None; "anytime" is the mean over tasks of
      the average accuracy after each.
    """
    found = results_lib.summary(results)
    for each in found.values():
        curve = each.pop("average_accuracy_per_task")
        whole = curve and None not in curve
        each["anytime"] = sum(curve) / len(curve) if whole else None
    return found


def summary(results: dict[int, dict]) -> dict:
    """Mean and standard error over seeds of each of `measures`.

    Args:
      results: seed -> results, see `results.empty`.

    Returns:
      matrix name -> measure -> {"mean", "error", "seeds"}.
    """
    each = [measures(one) for one in results.values()]
    return {
        name: {
            measure: spread([one.get(name, {}).get(measure) for one in each])
            for measure in each[0][name]
        }
        for name in each[0]
    }


def text(found: dict) -> str:
    """The summary, one line per matrix, in percent."""
    titles = {"average_accuracy": "average", "anytime": "anytime"}
    titles |= {"forgetting": "forgetting"}
    lines = [f"{'mean +- standard error (%)':32}"]
    lines[0] += "".join(f"{title:>16}" for title in titles.values())
    for name, measures in found.items():
        line = f"{name:32}"
        for measure in titles:
            x = measures[measure]
            line += f"{percent(x):>16}"
        lines.append(line)
    return "\n".join(lines)


def percent(found: dict) -> str:
    """`spread`'s answer in percent."""
    if found["mean"] is None:
        return "-"
    error = "" if found["error"] is None else f" +- {100 * found['error']:.1f}"
    return f"{100 * found['mean']:.1f}{error}"


def write(workdir, found: dict) -> None:
    """Leave the summary in the directory of all seeds."""
    results_lib.write(epath.Path(workdir) / SUMMARY, found)
