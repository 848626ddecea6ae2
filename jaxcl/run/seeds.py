"""Many seeds of one config: one after another, or side by side in one program.

Side by side, the state has one more axis, and one call does the step of every seed: by
`vmap`, or on a TPU with many seeds, in a loop. Under `vmap` convolutions become grouped
ones. A CPU computes these slowly (benchmarks/seeds.py), and so has one for each seed
instead (`nets/under_vmap.py`). A TPU also computes the zeros between the groups, whose
number grows with that of the seeds.
"""

import functools
import inspect
import math
from collections.abc import Callable, Iterable
from typing import NamedTuple

import jax
import numpy as np
from etils import epath

from jaxcl import core, sharding
from jaxcl.nets import under_vmap
from jaxcl.run import job
from jaxcl.run import results as results_lib

SUMMARY = "seeds.json"
_PREFIX = "seed_"
# Seeds that a TPU maps; by its compiler 4 are faster so with 20 channels, not with 64,
# and 20 are not with 20.
_MAPPED = 8
# Fields of a shared state that have an axis of seeds, and those common to all.
_OWN = ("key", "params", "stats", "opt_state", "extra")
_COMMON = ("step", "task", "task_start", "task_steps")
_AXES = core.TrainState(**dict.fromkeys(_OWN, 0), **dict.fromkeys(_COMMON))


class Seeds(NamedTuple):
    """What a config with `seeds` above 1 asks for."""

    seeds: tuple[int, ...]
    make: Callable  # seed -> job.Job, built when its turn comes
    side_by_side: bool | str  # "apart": see `together`


def folder(seed: int) -> str:
    """Name of a seed's run directory, inside that of all seeds."""
    return f"{_PREFIX}{seed}"


def folders(workdir: epath.PathLike) -> dict[int, epath.Path]:
    """Seed -> its run directory, of those that `workdir` has, in order."""
    paths = epath.Path(workdir).glob(f"{_PREFIX}*")
    marks = {path.name.removeprefix(_PREFIX): path for path in paths}
    return dict(sorted((int(x), path) for x, path in marks.items() if x.isdigit()))


def one_of(state: core.TrainState, i: int) -> core.TrainState:
    """The state of the i-th seed alone."""
    own_fields = {
        name: jax.tree.map(lambda x: x[i], getattr(state, name)) for name in _OWN
    }
    return state.replace(**own_fields)


def _mapped(function, state, *arguments):
    """Call a host-side hook with the state of each seed, and stack what it returns."""
    count = len(state.key)
    states = [function(one_of(state, i), *arguments) for i in range(count)]
    together = jax.tree.map(lambda *x: jax.numpy.stack(x), *states)
    return together.replace(**{name: getattr(states[0], name) for name in _COMMON})


def _mapped_step(apart, step, state, batch):
    """The step of all seeds at once, and metrics with an axis of seeds.

    Args:
      apart: make a convolution for each seed, not one with groups.
      step: of one seed.
      state: of all.
      batch: of all, with an axis of seeds.
    """
    step = inspect.unwrap(step)  # which may be traced already, for one network
    with under_vmap.networks_apart(apart):
        return jax.vmap(step, (_AXES, 0), (_AXES, 0))(state, batch)


def _in_turn(step, state, batch):
    """The step of one seed after another, and metrics with an axis of seeds."""

    def one(arguments):
        own, batch = arguments
        return step(state.replace(**own), batch)

    own = {name: getattr(state, name) for name in _OWN}
    states, metrics = jax.lax.map(one, (own, batch))
    common = {name: getattr(states, name)[0] for name in _COMMON}
    return states.replace(**common), metrics


def _method(method: core.Method, every: Callable) -> core.Method:
    """The method for several seeds, whose rows follow one another in a batch.

    Args:
      method: for one seed.
      every: takes the step of every seed: `_mapped_step`, `_in_turn`.
    """

    def init(keys, batch):
        return jax.vmap(method.init, (0, None), _AXES)(keys, batch)

    def step(state, batch):
        count = len(state.key)
        batch = jax.tree.map(lambda x: x.reshape(count, -1, *x.shape[1:]), batch)
        state, metrics = every(method.step, state, batch)
        return state, jax.tree.map(lambda x: x.mean(axis=0), metrics)

    hooks = {
        name: functools.partial(_mapped, getattr(method, name))
        for name in ("begin_task", "end_task", "eval_state")
    }
    return method._replace(
        init=init,
        step=step,
        **hooks,
        source=lambda state, task: method.source(one_of(state, 0), task),
    )


def _judge(seeds, judges):
    """An evaluator that runs each seed's own evaluator on that seed's state.

    Its rows f[S,T] and scalars f[S] have an axis of seeds; "seconds" is their sum.
    """

    def evaluate(state, task):
        results = [judge(one_of(state, i), task) for i, judge in enumerate(judges)]
        rows = _stacked([result.rows for result in results])
        scalars = _stacked([result.scalars for result in results])
        if "seconds" in scalars:
            scalars["seconds"] = scalars["seconds"].sum()
        warnings = tuple(
            f"seed {seed}: {words}"
            for seed, result in zip(seeds, results, strict=True)
            for words in result.warnings
        )
        return core.Result(rows, scalars, warnings)

    return evaluate


def _stacked(of_seeds: list[dict]) -> dict:
    """Name -> the arrays of all seeds; nan for a seed that does not have the name."""
    shapes = {name: np.shape(x) for own in of_seeds for name, x in own.items()}
    return {
        name: np.stack([own.get(name, np.full(shape, np.nan)) for own in of_seeds])
        for name, shape in shapes.items()
    }


def of_one(named: dict, i: int) -> dict:
    """Name -> what is the i-th seed's of values with an axis of seeds."""
    return {name: values[i] for name, values in named.items()}


def together(jobs: dict[int, job.Job], *, apart: bool = False) -> job.Job:
    """One job that trains several seeds side by side.

    Args:
      jobs: seed -> its job; the jobs differ in nothing but the seed.
      apart: make a convolution for each seed, not one with groups, as a CPU has always.

    Returns:
      A job without pictures; what its evaluators give has an axis of seeds.
    """
    first = next(iter(jobs.values()))
    every = functools.partial(_mapped_step, apart or sharding.on_cpu())
    if not apart and sharding.platform() == "tpu" and len(jobs) > _MAPPED:
        every = _in_turn
    evaluators = {
        name: _judge(jobs, [own.evaluators[name] for own in jobs.values()])
        for name in first.evaluators
    }
    combined = first._replace(
        method=_method(first.method, every),
        together=tuple(jobs),
        evaluators=evaluators,
        pictures={},
        quiet=True,
        alone=None,
    )
    return job.checked(combined)


def apart(results: dict, seeds: Iterable[int]) -> dict[int, dict]:
    """Split the results of a `together` run by seed; `seeds`: all, in their order."""
    return {seed: results_of(results, i) for i, seed in enumerate(seeds)}


def results_of(results: dict, i: int) -> dict:
    """The i-th seed's part of the results of a `together` run, with the cost of all."""
    own = dict(results)
    own["matrices"] = {
        name: [row[i] for row in matrix] for name, matrix in results["matrices"].items()
    }
    own["scalars"] = [x if x is None else of_one(x, i) for x in results["scalars"]]
    if "untrained" in results:
        own["untrained"] = of_one(results["untrained"], i)
    return own


def spread(values: Iterable[float | None]) -> dict:
    """Mean, standard error of the mean and number of values, as JSON.

    Args:
      values: one per seed; None, where nothing was measured, is left out.
    """
    values = np.array([x for x in values if x is not None], float)
    count = len(values)
    error = values.std(ddof=1) / math.sqrt(count) if count > 1 else None
    mean = values.mean() if count else None
    return results_lib.plain({"mean": mean, "error": error, "seeds": count})


def measures(results: dict) -> dict:
    """`results.summary`, with one number in place of the curve over tasks.

    Returns:
      matrix name -> measure -> number or None; "anytime" is the mean over tasks of
      the average accuracy after each.
    """
    by_matrix = results_lib.summary(results)
    for own_measures in by_matrix.values():
        curve = own_measures.pop("average_accuracy_per_task")
        complete = curve and None not in curve
        own_measures["anytime"] = sum(curve) / len(curve) if complete else None
    return by_matrix


def summary(results: dict[int, dict]) -> dict:
    """Mean and standard error over seeds of every measure of `measures`.

    Args:
      results: seed -> results, see `results.empty`.

    Returns:
      matrix name -> measure -> {"mean", "error", "seeds"}.
    """
    of_seeds = [measures(seed_results) for seed_results in results.values()]
    return {
        name: {
            measure: spread([own.get(name, {}).get(measure) for own in of_seeds])
            for measure in of_seeds[0][name]
        }
        for name in of_seeds[0]
    }


def text(summary: dict) -> str:
    """The `summary`, one line per matrix, in percent."""
    titles = {"average_accuracy": "average", "anytime": "anytime"}
    titles |= {"forgetting": "forgetting"}
    lines = [f"{'mean +- standard error (%)':32}"]
    lines[0] += "".join(f"{title:>16}" for title in titles.values())
    for name, spreads in summary.items():
        cells = "".join(f"{percent(spreads[measure]):>16}" for measure in titles)
        lines.append(f"{name:32}{cells}")
    return "\n".join(lines)


def percent(spread: dict) -> str:
    """What `spread` gives, in percent: mean and standard error."""
    if spread["mean"] is None:
        return "-"
    error = "" if spread["error"] is None else f" +- {100 * spread['error']:.1f}"
    return f"{100 * spread['mean']:.1f}{error}"


def write(workdir: epath.PathLike, summary: dict) -> None:
    """Write the summary into the directory of all seeds."""
    results_lib.write(epath.Path(workdir) / SUMMARY, summary)
