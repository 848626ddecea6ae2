"""The entries of config.evaluators: which evaluator, under what name, and when."""

import inspect
from collections.abc import Callable
from typing import NamedTuple

import jax
from etils import epath

from jaxcl import core, schema
from jaxcl.augment import images as augment_images


def _check_evaluation(parts):
    """Refuse images that do not reach the encoder at the size it was trained on."""
    images = parts.stream.evaluation.images
    if images is not None:
        prepare = augment_images.make_eval(
            size=parts.size, resize=parts.resize, mean=parts.mean, std=parts.std
        )
        jax.eval_shape(prepare, jax.ShapeDtypeStruct((1, *images.shape[1:]), "uint8"))


class Entry(NamedTuple):
    """One entry of config.evaluators, its options checked."""

    name: str  # of the module of jaxcl.evals
    make: Callable
    options: dict
    last_only: bool  # runs at the end of the last task alone
    draws: bool  # measures nothing, and wants a directory


def entry(key: str, section) -> Entry:
    """Read one entry.

    Args:
      key: what its rows are called.
      section: options of the evaluator, and `name` (default: the key) and
        `last_only` (default: LAST_ONLY of the evaluator's module, or False).

    Raises:
      ValueError: a wrong name, key or type, naming the field.
    """
    field, section = f"config.evaluators.{key}", dict(section)
    where = f"{field}.name" if "name" in section else "config.evaluators"
    name = section.pop("name", key)
    module = schema.module("jaxcl.evals", name, where)
    last_only = section.pop("last_only", getattr(module, "LAST_ONLY", False))
    if not isinstance(last_only, bool):
        raise ValueError(f"{field}.last_only={last_only!r}: must be True or False")
    draws = {"directory"} & set(inspect.signature(module.make).parameters)
    chosen = schema.options(module.make, section, field, given=draws)
    return Entry(name, module.make, chosen, last_only, bool(draws))


def make(evaluators: dict, parts: core.EvalParts, workdir):
    """Evaluators that measure, and those that draw into a directory.

    Args:
      evaluators: config.evaluators.
      workdir: the run directory; pictures go to plots/, or plots/KEY.

    Returns:
      Two dicts of key -> (state, task number) -> core.Result.

    Raises:
      ValueError: what `entry` or an evaluator refuses, naming the key.
    """
    if parts.stream.evaluation is not None and evaluators:
        _check_evaluation(parts)
    judges, pictures = {}, {}
    for key, section in evaluators.items():
        found = entry(key, section)
        given = dict(found.options)
        if found.draws:
            folder = epath.Path(workdir) / "plots"
            given["directory"] = folder if key == found.name else folder / key
        try:
            evaluate = found.make(parts, **given)
        except ValueError as error:  # which knows the evaluator's name, not the key
            name, mine = (f"config.evaluators.{x}" for x in (found.name, key))
            raise ValueError(str(error).replace(name, mine)) from error
        if found.last_only:
            evaluate = _at_the_end(evaluate, len(parts.stream.tasks) - 1)
        (pictures if found.draws else judges)[key] = evaluate
    return judges, pictures


def run(judges: dict, state, task: int, recorder, *, pause=lambda: None) -> core.Result:
    """What every evaluator that measures says of a state, logged.

    Args:
      judges: from `make`.
      task: number of the task just finished, or of the present one.
      recorder: record.Recorder; the seconds that each took go to it alone.
      pause: called before each evaluator; what it raises ends the evaluation.

    Returns:
      Rows and scalars of all, named KEY/NAME.
    """
    rows, scalars, spent = {}, {}, {}
    for key, evaluate in judges.items():
        pause()
        found = evaluate(state, task)
        rows |= {f"{key}/{name}": row for name, row in found.rows.items()}
        for name, value in found.scalars.items():  # the clock's have a place apart
            (spent if name == "seconds" else scalars)[f"{key}/{name}"] = value
    step, time = int(state.step), {"evaluation": spent}
    recorder.log(step, task, eval={**rows, **scalars}, time=time)
    return core.Result(rows, scalars)


def _at_the_end(evaluate, last):
    """The evaluator, which has nothing to say before the last task is over."""

    def evaluate_last(state, task):
        over = int(state.step) - int(state.task_start) >= int(state.task_steps)
        return evaluate(state, task) if task == last and over else core.Result({}, {})

    return evaluate_last
