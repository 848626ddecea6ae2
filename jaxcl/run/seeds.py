"""Run many seeds of one config: one after another, or side by side in one program.

Side by side, the state has one more axis, and `vmap` does the step of every seed. It
makes one convolution with groups of those of all seeds, which a CPU computes slowly
(benchmarks/seeds.py).
"""

import math
from collections.abc import Callable, Iterable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from etils import epath

from jaxcl import core
from jaxcl.run import job
from jaxcl.run import results as results_lib

SUMMARY = "seeds.json"
_PREFIX = "seed_"
# Fields of a shared state that have an axis of seeds, and those common to all.
_OWN = ("key", "params", "stats", "opt_state", "extra")
_COMMON = ("step", "task", "task_start", "task_steps")
_AXES = core.TrainState(**dict.fromkeys(_OWN, 0), **dict.fromkeys(_COMMON))


class Seeds(NamedTuple):
    """What a config with `seeds` above 1 asks for."""

    seeds: tuple[int, ...]
    make: Callable  # seed -> job.Job, built when its turn comes
    side_by_side: bool


def folder(seed: int) -> str:
    """Name a seed's run directory, inside that of all seeds."""
    return f"{_PREFIX}{seed}"


def folders(workdir: epath.PathLike) -> dict[int, epath.Path]:
    """Find the run directories of the seeds in `workdir`, in order."""
    paths = epath.Path(workdir).glob(f"{_PREFIX}*")
    marks = {path.name.removeprefix(_PREFIX): path for path in paths}
    return dict(sorted((int(x), path) for x, path in marks.items() if x.isdigit()))


def take_state(state: core.TrainState, i: int) -> core.TrainState:
    """Take the state of the i-th seed."""
    fields = {name: jax.tree.map(lambda x: x[i], getattr(state, name)) for name in _OWN}
    return state.replace(**fields)


def _stack_methods(method: core.Method) -> core.Method:
    """Make the method of several seeds, whose rows follow one another in a batch."""

    def init(keys, batch):
        return jax.vmap(method.init, (0, None), _AXES)(keys, batch)

    def step(state, batch):
        count = len(state.key)
        batch = jax.tree.map(lambda x: x.reshape(count, -1, *x.shape[1:]), batch)
        state, metrics = jax.vmap(method.step, (_AXES, 0), (_AXES, 0))(state, batch)
        return state, jax.tree.map(lambda x: x.mean(axis=0), metrics)

    def for_each_seed(hook):
        def call(state, *arguments):
            count = len(state.key)
            states = [hook(take_state(state, i), *arguments) for i in range(count)]
            stacked = jax.tree.map(lambda *x: jnp.stack(x), *states)
            return stacked.replace(**{x: getattr(states[0], x) for x in _COMMON})

        return call

    return method._replace(
        init=init,
        step=step,
        begin_task=for_each_seed(method.begin_task),
        end_task=for_each_seed(method.end_task),
        eval_state=for_each_seed(method.eval_state),
        source=lambda state, task: method.source(take_state(state, 0), task),
    )


def _stack_evaluators(seeds, evaluators):
    """Make an evaluator that runs each seed's own evaluator on its state.

    Its rows f[S,T] and scalars f[S] have an axis of seeds.
    """

    def evaluate(state, task):
        results = [own(take_state(state, i), task) for i, own in enumerate(evaluators)]
        rows = _stack([result.rows for result in results])
        scalars = _stack([result.scalars for result in results])
        warnings = tuple(
            f"seed {seed}: {words}"
            for seed, result in zip(seeds, results, strict=True)
            for words in result.warnings
        )
        return core.Result(rows, scalars, warnings)

    return evaluate


def _stack(of_seeds: list[dict]) -> dict:
    """Stack the arrays of all seeds by name; nan for a seed without the name."""
    shapes = {name: np.shape(x) for own in of_seeds for name, x in own.items()}
    return {
        name: np.stack([own.get(name, np.full(shape, np.nan)) for own in of_seeds])
        for name, shape in shapes.items()
    }


def take_values(named: dict, i: int) -> dict:
    """Take the i-th seed's part of values by name, which have an axis of seeds."""
    return {name: values[i] for name, values in named.items()}


def join_jobs(jobs: dict[int, job.Job]) -> job.Job:
    """Make one job that trains several seeds side by side.

    Args:
      jobs: seed -> its job; the jobs differ in nothing but the seed.

    Returns:
      A job without pictures; the results of its evaluators have an axis of seeds.
    """
    first = next(iter(jobs.values()))
    own = [single.evaluation.evaluators for single in jobs.values()]
    evaluators = {
        name: _stack_evaluators(jobs, [x[name] for x in own]) for name in own[0]
    }
    data = first.data._replace(together=tuple(jobs))
    untrained = first.evaluation.untrained
    return first._replace(
        method=job.checked(_stack_methods(first.method), data, first.mesh),
        data=data,
        evaluation=job.Evaluation(evaluators, {}, (), untrained, alone=None),
        logging=first.logging._replace(quiet=True),
    )


def take_results(results: dict, i: int) -> dict:
    """Take the i-th seed's part of the results of all, with the cost of all."""
    own = dict(results)
    own["matrices"] = {
        name: [row[i] for row in matrix] for name, matrix in results["matrices"].items()
    }
    own["scalars"] = [x if x is None else take_values(x, i) for x in results["scalars"]]
    if "untrained" in results:
        own["untrained"] = take_values(results["untrained"], i)
    return own


def spread(values: Iterable[float | None]) -> dict:
    """Compute mean, standard error of the mean and number of values, as JSON.

    Args:
      values: one per seed; None, where nothing was measured, is left out.
    """
    values = np.array([x for x in values if x is not None], float)
    count = len(values)
    error = values.std(ddof=1) / math.sqrt(count) if count > 1 else None
    mean = values.mean() if count else None
    return results_lib.plain({"mean": mean, "error": error, "seeds": count})


def measures(results: dict) -> dict:
    """Compute `results.summary`, with one number in place of the curve over tasks.

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
    """Compute mean and standard error over seeds of every measure of `measures`.

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
    """Write the `summary` as text: one line per matrix, in percent."""
    titles = ("average_accuracy", "anytime", "forgetting")
    rows = {"mean +- standard error (%)": ("average", *titles[1:])}
    for name, spreads in summary.items():
        rows[name] = tuple(percent(spreads[measure]) for measure in titles)
    return "\n".join(
        f"{name:32}" + "".join(f"{cell:>16}" for cell in cells)
        for name, cells in rows.items()
    )


def percent(spread: dict) -> str:
    """Write a `spread` in percent: mean and standard error."""
    if spread["mean"] is None:
        return "-"
    error = "" if spread["error"] is None else f" +- {100 * spread['error']:.1f}"
    return f"{100 * spread['mean']:.1f}{error}"


def write(workdir: epath.PathLike, summary: dict) -> None:
    """Write the summary into the directory of all seeds."""
    results_lib.write(epath.Path(workdir) / SUMMARY, summary)
