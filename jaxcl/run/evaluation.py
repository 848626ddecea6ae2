"""Evaluators: read the entries of config.evaluators, make them and run them."""

import inspect
import time
from collections.abc import Callable, Mapping
from typing import NamedTuple

import jax
import numpy as np
from absl import logging
from etils import epath

from jaxcl import core, lookup, plots, schema
from jaxcl.data.augment import images as augment_images
from jaxcl.errors import Refused
from jaxcl.evals import embedding
from jaxcl.run import job, record


def _check_evaluation(parts):
    """Refuse images that cannot be brought to the size the encoder was trained on."""
    images = parts.stream.evaluation.images
    if images is not None:
        prepare = augment_images.make_eval(
            size=parts.size, resize=parts.resize, mean=parts.mean, std=parts.std
        )
        shape = jax.ShapeDtypeStruct((1, *images.shape[1:]), images.dtype)
        jax.eval_shape(prepare, shape)


class EvaluatorEntry(NamedTuple):
    """One entry of config.evaluators, its options checked."""

    name: str  # its module in jaxcl.evals
    make: Callable
    options: dict
    last_only: bool | None  # runs only at the end of the last task; None: not told
    draws: bool  # draws pictures into a directory, and measures nothing
    skip: bool  # never runs


class AtTheEnd(NamedTuple):
    """An evaluator that runs once, when the last task is over."""

    evaluate: Callable
    last: int  # number of the last task

    def is_due(self, state, task: int) -> bool:
        """Tell whether the last task is over."""
        is_over = int(state.step) - int(state.task_start) >= int(state.task_steps)
        return task == self.last and is_over

    def __call__(self, state, task: int) -> core.Result:
        """Evaluate the state if the last task is over."""
        if self.is_due(state, task):
            return self.evaluate(state, task)
        return core.Result({}, {})


def due_evaluators(evaluators: dict[str, Callable], state, task: int) -> list[str]:
    """List the evaluators that run now; others wait for the end of the last task."""
    return [
        key
        for key, evaluate in evaluators.items()
        if not isinstance(evaluate, AtTheEnd) or evaluate.is_due(state, task)
    ]


def read_entry(key: str, section: Mapping) -> EvaluatorEntry:
    """Read and check one entry.

    Args:
      key: the prefix of the names of its rows and scalars.
      section: options of the evaluator, and `name` (default: the key), `last_only`
        (default: from its `core.Evaluator`, or False) and `skip` (False).

    Raises:
      Refused: a name, a key or a type is wrong; the message names the field.
    """
    field, section = f"config.evaluators.{key}", dict(section)
    path = f"{field}.name" if "name" in section else "config.evaluators"
    name = section.pop("name", key)
    module = lookup.find_module("jaxcl.evals", name, path)
    last_only, skip = section.pop("last_only", None), section.pop("skip", False)
    schema.check_value(last_only, bool | None, f"{field}.last_only")
    schema.check_value(skip, bool, f"{field}.skip")
    draws = {"directory"} & set(inspect.signature(module.make).parameters)
    chosen = schema.options(module.make, section, field, excluded=draws)
    return EvaluatorEntry(name, module.make, chosen, last_only, bool(draws), skip)


def make(
    evaluators: Mapping,
    parts: core.EvalParts,
    workdir: epath.PathLike | None,
    *,
    untrained: bool = False,
    plots: bool = False,
) -> job.Evaluation:
    """Make the evaluators of a config.

    Args:
      evaluators: config.evaluators.
      parts: core.EvalParts, which evaluators are built from.
      workdir: the run directory; pictures go to plots/, or plots/KEY.
      untrained: whether to evaluate before the first step, too.
      plots: whether pictures are drawn.

    Raises:
      Refused: an entry is wrong, or an evaluator refuses it; the message names the
        key.
    """
    if parts.stream.evaluation is not None and evaluators:
        _check_evaluation(parts)
    measuring, pictures, charts = {}, {}, []
    for key, section in evaluators.items():
        checked = read_entry(key, section)
        if checked.skip:
            continue
        options = dict(checked.options)
        if checked.draws:
            folder = epath.Path(workdir) / "plots"
            options["directory"] = folder if key == checked.name else folder / key
        try:
            evaluate = checked.make(parts, **options)
        except Refused as error:
            # The message has the evaluator's name; the user knows it by its key.
            by_name, by_key = (f"config.evaluators.{x}" for x in (checked.name, key))
            raise Refused(str(error).replace(by_name, by_key)) from error
        if not isinstance(evaluate, core.Evaluator):
            evaluate = core.Evaluator(evaluate)
        if evaluate.chart and evaluate.chart not in charts:
            charts.append(evaluate.chart)
        last_only = checked.last_only
        if last_only is None:
            last_only = evaluate.last_only
        if last_only:
            evaluate = AtTheEnd(evaluate.evaluate, len(parts.stream.tasks) - 1)
        (pictures if checked.draws else measuring)[key] = evaluate
    pictures = pictures if plots else {}
    return job.Evaluation(measuring, pictures, tuple(charts), untrained)


def run_evaluators(
    evaluators: dict[str, Callable],
    state: core.TrainState,
    task: int,
    recorder: record.Recorder,
    *,
    stop: Callable[[], bool] = lambda: False,
) -> core.Result | None:
    """Run every evaluator that measures, and log the results.

    Args:
      evaluators: evaluators from `make`.
      state: core.TrainState to evaluate.
      task: number of the task just finished, or the present task's.
      recorder: log that also takes the seconds of each evaluator.
      stop: function called before each evaluator; True ends the evaluation.

    Returns:
      The rows, scalars and answers of all evaluators, named KEY/NAME, and all warnings,
      which are also logged with their entry of the config. None if stopped: then
      nothing is logged.
    """
    rows, scalars, answers, seconds, warnings = {}, {}, {}, {}, []
    with embedding.share_passes():
        for key, evaluate in evaluators.items():
            if stop():
                return None
            start = time.monotonic()
            result = _warn_of_nan(evaluate(state, task))
            seconds[f"{key}/seconds"] = time.monotonic() - start
            rows |= {f"{key}/{name}": row for name, row in result.rows.items()}
            scalars |= {f"{key}/{name}": x for name, x in result.scalars.items()}
            answers |= {f"{key}/{n}": x for n, x in (result.answers or {}).items()}
            warnings += _log_warnings(result.warnings, key, state, task)
    measured = {**rows, **scalars}
    recorder.log(int(state.step), task, eval=measured, time={"evaluation": seconds})
    return core.Result(rows, scalars, tuple(warnings), answers)


def draw_pictures(
    pictures: dict[str, Callable], state: core.TrainState, task: int
) -> None:
    """Run evaluators that only draw; log their warnings, and their errors as warnings.

    Args:
      pictures: drawing evaluators from `make`.
      state, task: arguments of `run_evaluators`.
    """
    for key, evaluate in pictures.items():
        with plots.optional(f"config.evaluators.{key}"):
            _log_warnings(evaluate(state, task).warnings, key, state, task)


def _log_warnings(warnings, key, state, task: int) -> list[str]:
    """Log the warnings of an evaluator, each with its entry of the config."""
    messages = [f"config.evaluators.{key}: {words}" for words in warnings]
    for words in messages if jax.process_index() == 0 else ():
        logging.warning("task %d, step %d: %s", task + 1, int(state.step), words)
    return messages


def _warn_of_nan(result: core.Result) -> core.Result:
    """Add a warning for each scalar that is no number.

    Nan in a row means that a task was not measured. Evaluators leave out a scalar that
    they did not measure, so nan in its place is an error.
    """
    nans = {
        name: value
        for name, value in result.scalars.items()
        if not np.isfinite(value).all()
    }
    if result.warnings or not nans:
        return result
    warnings = [
        f"{name} is {value}: it was not measured" for name, value in nans.items()
    ]
    return result._replace(warnings=tuple(warnings))
