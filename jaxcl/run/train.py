"""The loop: tasks, steps, evaluation, checkpoints. One loop trains everything.

A run saves a checkpoint while a task trains ("training"), after `end_task` ("trained")
and after the task's evaluation ("evaluated"). The number of a checkpoint counts steps,
plus one for each "trained" and one for each "evaluated", so that numbers never repeat.
"""

import contextlib
from collections.abc import Callable
from typing import NamedTuple

import jax
import numpy as np
from etils import epath

from jaxcl import plots, sharding
from jaxcl.run import (
    checkpoint,
    cost,
    evaluation,
    job,
    lock,
    metrics_log,
    record,
)
from jaxcl.run import results as results_lib


class Interrupted(Exception):
    """The run was told to stop, and has saved what it had done."""


class _Cut(Exception):
    """An evaluation in the midst of a task was told to stop."""

    def __init__(self, owed: str):
        self.owed = owed  # which evaluation, see `_after_step`


class _Loop(NamedTuple):
    """What stays the same throughout the loop."""

    job: job.Job
    workdir: epath.Path
    checkpoints: checkpoint.Checkpoints
    recorder: record.Recorder
    step: Callable
    resident: dict
    stop: Callable[[], bool]
    total_steps: int  # an estimate, for the progress bar
    clock: cost.Clock  # of the present task


def run(
    work: job.Job,
    workdir: epath.PathLike,
    *,
    stop: Callable[[], bool] = lambda: False,
    step: Callable | None = None,
) -> dict:
    """Train on every task, or resume from the newest checkpoint.

    Args:
      work: from `build.build`.
      workdir: the run directory; made if missing.
      stop: called after each call of the step and before each evaluator; when it
        returns True the run saves and raises `Interrupted`.
      step: `job.compile_step(work)`, where several runs share the program.

    Returns:
      The results of all tasks, earlier ones included, see `results.empty`.

    Raises:
      Interrupted: `stop` returned True.
      lock.Held: another process works in the directory.
      metrics_log.Diverged: a metric or a parameter is not finite.
      checkpoint.CheckpointError: a checkpoint could not be written or read, or the run
        of config.start has not finished a task.
    """
    with contextlib.ExitStack() as stack:
        stack.enter_context(lock.held(workdir))
        loop, state, cursor = _open(stack, work, epath.Path(workdir), stop, step)
        results, phase = cursor["results"], cursor["phase"]
        _pause(loop, state, False)
        for task in work.stream.tasks[results_lib.finished(results) : work.first_tasks]:
            if phase == "evaluated":
                state = job.begin(work, state, task)
            if phase != "trained":
                resumed = cursor if phase == "training" else {}
                state, results = _train_task(loop, state, task, results, resumed)
                state = work.method.end_task(state, task)
                state = sharding.settle(state, work.mesh)
                _save(loop, state, results, "trained")
                _pause(loop, state)
            results = _judge(loop, state, task, results)
            _save(loop, state, results, "evaluated")
            _pause(loop, state)
            phase = "evaluated"
        return results


def _open(stack, work, workdir, stop, step):
    """The loop, and the state and cursor to start or resume from.

    `stack` closes the checkpoints and the recorder.
    """
    state, resident = job.initial_state(work), job.resident(work)
    checkpoints = checkpoint.Checkpoints(workdir / "checkpoints", keep=work.keep)
    stack.enter_context(contextlib.closing(checkpoints))
    restored = _restored(work, checkpoints, state)
    cursor = _first_cursor(work)
    if restored is not None:
        state = sharding.settle(restored.state, work.mesh)
        cursor = restored.cursor
    recorder = record.Recorder(
        workdir,
        num_tasks=len(work.stream.tasks),
        mark=cursor["rows"],
        write=jax.process_index() == 0,
        **work.record,
    )
    stack.enter_context(contextlib.closing(recorder))
    clock = cost.Clock(cursor["seconds"])
    step = clock.first_apart(step or job.compile_step(work))
    total = _total_steps(work, state, cursor)
    loop = _Loop(
        work, workdir, checkpoints, recorder, step, resident, stop, total, clock
    )
    if restored is not None and not work.quiet:
        recorder.say(f"resumed at step {int(state.step)}: {workdir}")
    elif restored is None and work.evaluate_untrained:
        judges = evaluation.due(work.evaluators, state, 0)
        _tell(loop, "judging the untrained network", judges)
        rows = _evaluate(loop, state, 0, lambda: _pause(loop, state, False))[0].rows
        cursor["results"]["untrained"] = results_lib.plain(rows)
    if int(state.step) < total:
        _tell(loop, "compiling the step")
    return loop, state, cursor


def _tell(loop, doing: str, names=()) -> None:
    """Say what is done before the bar moves, or goes on."""
    if not loop.job.quiet:
        what = f": {', '.join(names)}" if names else ""
        loop.recorder.phase(f"{doing}{what}")


def _restored(work, checkpoints, state) -> checkpoint.Restored | None:
    """The run's newest checkpoint, else that of config.start, else None."""
    restored = checkpoints.restore(state)
    if restored is None and work.start is not None:
        names = work.task_names
        restored = checkpoint.taken_over(work.start, state, names, keep=work.keep)
    return restored


def _first_cursor(work) -> dict:
    """The cursor of a run that has done nothing yet, see `_save`."""
    results = results_lib.empty(len(work.task_names), task_names=work.task_names)
    return {
        "rows": [0, 0],
        "phase": "evaluated",
        "seconds": {},
        "results": results,
    }


def _total_steps(work, state, cursor) -> int:
    """About how many steps the whole run has."""
    begun = state.step if cursor["phase"] == "evaluated" else state.task_start
    return int(begun) + job.steps_left(work, results_lib.finished(cursor["results"]))


def _train_task(loop, state, task, results, resumed):
    """Do the remaining steps of a task; returns the state and the results.

    `resumed` is the cursor of a checkpoint from the midst of the task, or {}.
    """
    epochs = metrics_log.Epochs(
        loop.job.patience, resumed.get("epochs", {}), task.index
    )
    work, begun, step = loop.job, int(state.task_start), int(state.step)
    source = work.method.source(state, task)
    plan = job.schedule(work, source, task.index)
    end = begun + len(plan)
    meter = metrics_log.Meter(work, loop.recorder, task.index, step, epochs)
    feed = job.feed(work, source, task.index, step - begun)

    def after_step(owed=None):
        meter.flush(step)
        try:
            _after_step(loop, state, task.index, plan, epochs, owed)
        except _Cut as cut:
            if owed is None:  # else the checkpoint that the run went on from says so
                saved = {"epochs": epochs.read(), "owed": cut.owed}
                _save(loop, state, results, "training", **saved)
            _leave(loop, state)

    if resumed.get("owed"):
        after_step(resumed["owed"])
    with loop.clock.on("train"), contextlib.closing(feed):
        for count, batches, number in () if epochs.over else feed:
            with jax.transfer_guard("disallow"):
                state, metrics = loop.step(state, loop.resident, batches, number)
            meter.add(step, count, metrics)
            step += count
            local, inside = step - begun, step < end
            loop.recorder.advance(step, task.index, loop.total_steps)
            if _due(work, plan, local):
                after_step()
            stopped = _stopped(loop, step, count)
            if stopped or (inside and work.save_every and local % work.save_every == 0):
                meter.flush(step)
                _save(loop, state, results, "training", epochs=epochs.read())
            if stopped:
                _leave(loop, state)
            if epochs.over:
                break
        meter.flush(step)  # waits for the last step
    if work.counts_epochs:
        results = results_lib.add_convergence(results, task.index, epochs.summary())
    if step < end:
        # The task ended early. Evaluators that run at its end compare the steps done
        # with `task_steps`, so the latter must say how many there were.
        steps_done = sharding.replicate(np.int32(step - begun), work.mesh)
        state = state.replace(task_steps=steps_done)
    return state, results


def _due(work, plan, local: int) -> bool:
    """Whether something is to be done after the step `local` of a task."""
    ends = work.counts_epochs and local % plan.steps_per_epoch == 0
    return ends or bool(work.eval_every) and local % work.eval_every == 0


def _after_step(loop, state, task: int, plan, epochs, owed: str | None) -> None:
    """Evaluate and end an epoch, where that is due after the step just done.

    Args:
      owed: the evaluation that was cut off when the run stopped here, "every" that by
        config.eval_every, "epochs" that by eval_epochs; what comes before it was done.

    Raises:
      _Cut: the run is told to stop.
    """
    work, step = loop.job, int(state.step)
    local = step - int(state.task_start)
    inside = local < len(plan)

    def evaluate(which):
        def pause():
            if sharding.any_process(loop.stop()):
                raise _Cut(which)

        metrics_log.check_state(state, step)
        _evaluate(loop, state, task, pause)

    if owed != "epochs" and inside and work.eval_every and local % work.eval_every == 0:
        evaluate("every")
    if work.counts_epochs and local % plan.steps_per_epoch == 0:
        if owed != "epochs":
            epochs.end(loop.clock.read().get("train", 0.0), loop.recorder, step)
        if inside and epochs.due(work.eval_epochs):
            evaluate("epochs")


def _stopped(loop, step: int, count: int) -> bool:
    """Whether to stop. Processes agree on it every `log_every` steps."""
    if jax.process_count() == 1:
        return loop.stop()
    every = loop.job.log_every
    return step // every > (step - count) // every and sharding.any_process(loop.stop())


def _pause(loop, state, saved=True) -> None:
    """Stop here if that was asked for; `saved`: whether the caller has just saved."""
    if sharding.any_process(loop.stop()):
        _leave(loop, state, saved)


def _leave(loop, state, saved=True) -> None:
    """Wait for the checkpoint that is being written, and raise."""
    loop.checkpoints.wait()
    done = "saved" if saved else "nothing was to be saved"
    raise Interrupted(f"stopped at step {int(state.step)}, {done}")


def _save(loop, state, results, phase, **more) -> None:
    """Save the state, and a cursor with the phase and what was recorded so far."""
    with loop.clock.on("rest"):
        step = int(state.step)
        metrics_log.check_state(state, step)
        number = step + 2 * results_lib.finished(results) + (phase == "trained")
        cursor = {"phase": phase, "seconds": loop.clock.read(), "results": results}
        cursor |= {"rows": loop.recorder.save()}
        cursor |= more
        lock.check(loop.workdir)
        loop.checkpoints.save(number, state, cursor)


def _evaluate(loop, state, task: int, pause):
    """Run and log every evaluator; returns their result and the evaluated state.

    `pause` is called before each of them.
    """
    with loop.clock.on("evaluation"):
        pause()
        state = loop.job.method.eval_state(state)
        result = evaluation.run(
            loop.job.evaluators, state, task, loop.recorder, pause=pause
        )
    return result, state


def _judge(loop, state, task, results) -> dict:
    """Evaluate a finished task, write and show its results; returns all results."""
    work = loop.job
    judges = evaluation.due(work.evaluators, state, task.index)
    _tell(loop, f"judging after task {task.index + 1}", judges)
    result, judged = _evaluate(loop, state, task.index, lambda: _pause(loop, state))
    rows, scalars = result.rows, result.scalars
    spent = metrics_log.spent(work, state, task.index, loop.clock)
    seconds = sum(spent.seconds.values())
    results = results_lib.add(results, task.index, rows, scalars, seconds)
    results["cost"] = cost.add(results["cost"], task.index, spent)
    if jax.process_index() == 0:
        results_lib.write_results(loop.workdir, results)
    for name in rows:
        # Task-aware tables would crowd the output; results.json has them.
        if not work.quiet and not name.endswith("/task_aware"):
            matrix = results_lib.matrix(results, name)
            loop.recorder.say(results_lib.table(matrix, name=name))
    if pictures := evaluation.due(work.pictures, state, task.index):
        _tell(loop, "drawing", pictures)
    with plots.written_as(work.plot_formats):
        for key in pictures:
            drawn = work.pictures[key](judged, task.index)
            evaluation.warn(drawn.warnings, key, state, task.index)
    loop.clock.restart()
    return results
