"""The loop: tasks, steps, evaluation, checkpoints. One loop trains everything.

A run saves a checkpoint while a task trains, after `end_task` and after the task's
evaluation, see `checkpoint.Phase`. The number of a checkpoint counts steps, plus one
for each task trained and one for each evaluated, so that numbers never repeat.
"""

import contextlib
from collections.abc import Callable
from typing import NamedTuple

import jax
import numpy as np
from etils import epath

from jaxcl import sharding
from jaxcl.evals import plots
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
from jaxcl.run.checkpoint import Phase


class Interrupted(Exception):
    """The run was told to stop, and has saved what it had done."""


class _Session(NamedTuple):
    """The things that stay the same throughout the loop."""

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
    workdir = epath.Path(workdir)
    with contextlib.ExitStack() as stack:
        stack.enter_context(lock.held(workdir))
        checkpoints = checkpoint.Checkpoints(
            workdir / "checkpoints", keep=work.loop.keep
        )
        stack.enter_context(contextlib.closing(checkpoints))
        state, cursor = _restore(work, checkpoints)
        session = _open(stack, work, workdir, checkpoints, state, cursor, stop, step)
        results, phase = cursor["results"], cursor["phase"]
        if cursor["resumed"]:
            if not work.logging.quiet:
                session.recorder.say(f"resumed at step {int(state.step)}: {workdir}")
        elif work.evaluation.untrained:
            results = _evaluate_untrained(session, state, results)
        if int(state.step) < session.total_steps:
            _say_phase(session, "compiling the step")
        _stop_if_asked(session, state)
        finished = results_lib.finished(results)
        for task in work.stream.tasks[finished : work.loop.first_tasks]:
            if phase == Phase.EVALUATED:
                state = job.begin(work, state, task)
            if phase != Phase.TRAINED:
                progress = cursor["epochs"] if phase == Phase.TRAINING else {}
                state, results = _train_task(session, state, task, results, progress)
                state = work.method.end_task(state, task)
                state = sharding.settle(state, work.mesh)
                _save(session, state, results, Phase.TRAINED)
                _stop_if_asked(session, state)
            results = _finish_task(session, state, task, results)
            _save(session, state, results, Phase.EVALUATED)
            _stop_if_asked(session, state)
            phase = Phase.EVALUATED
        return results


def _restore(work, checkpoints):
    """Return the state and the cursor to go on from, or those of a new run."""
    state, names = job.initial_state(work), work.data.task_names
    restored = checkpoints.restore(state)
    if restored is None and work.loop.start is not None:
        restored = checkpoint.restore_start(
            work.loop.start, state, names, keep=work.loop.keep
        )
    if restored is not None:
        state = sharding.settle(restored.state, work.mesh)
        return state, restored.cursor | {"resumed": True}
    results = results_lib.empty(len(names), task_names=names)
    cursor = {"phase": Phase.EVALUATED, "rows": [0, 0], "seconds": {}}
    return state, cursor | {"results": results, "resumed": False}


def _open(stack, work, workdir, checkpoints, state, cursor, stop, step) -> _Session:
    """Open the records of a run; `stack` closes them."""
    recorder = record.Recorder(
        workdir,
        num_tasks=len(work.stream.tasks),
        mark=cursor["rows"],
        write=jax.process_index() == 0,
        **work.logging.record,
    )
    stack.enter_context(contextlib.closing(recorder))
    clock = cost.Clock(cursor["seconds"])
    begun = state.step if cursor["phase"] == Phase.EVALUATED else state.task_start
    finished = results_lib.finished(cursor["results"])
    return _Session(
        job=work,
        workdir=workdir,
        checkpoints=checkpoints,
        recorder=recorder,
        step=clock.time_compilation(step or job.compile_step(work)),
        resident=job.resident(work),
        stop=stop,
        total_steps=int(begun) + job.steps_left(work.data, finished),
        clock=clock,
    )


def _evaluate_untrained(session, state, results) -> dict:
    """Evaluate before the first step; returns the results with what was measured."""
    evaluators = evaluation.due(session.job.evaluation.evaluators, state, 0)
    _say_phase(session, "judging the untrained network", evaluators)
    result, _ = _evaluate(session, state, 0)
    if result is None:
        _leave(session, state)
    return results | {"untrained": results_lib.plain(result.rows)}


def _say_phase(session, doing: str, names=()) -> None:
    """Say what is done before the bar moves, or goes on."""
    if not session.job.logging.quiet:
        what = f": {', '.join(names)}" if names else ""
        session.recorder.phase(f"{doing}{what}")


def _train_task(session, state, task, results, progress):
    """Do the remaining steps of a task; returns the state and the results.

    A checkpoint within a task is saved before what is due after its last step: the end
    of an epoch, an evaluation. A run that goes on from it begins with that, so that an
    evaluation which was cut is run again.

    Args:
      progress: of the task's epochs, from such a checkpoint; {} for a new task.
    """
    work, begun, step = session.job, int(state.task_start), int(state.step)
    epochs = metrics_log.Epochs(work.loop.patience, progress)
    source = work.method.source(state, task)
    plan = job.schedule(work, source, task.index)
    end = begun + len(plan)
    meter = metrics_log.Meter(work, session.recorder, task.index, step, epochs)
    feed = job.feed(work, source, task.index, step - begun)
    is_saved = True
    with session.clock.on("train"), contextlib.closing(feed):
        while True:
            if _is_due(work.loop, plan, step - begun):
                meter.flush(step)
                progress = epochs.read()
                if not _end_step(session, state, task.index, plan, epochs):
                    if not is_saved:
                        _save(session, state, results, Phase.TRAINING, epochs=progress)
                    _leave(session, state)
            if step == end or epochs.over:
                break
            count, batches, number = next(feed)
            with jax.transfer_guard("disallow"):
                state, metrics = session.step(state, session.resident, batches, number)
            meter.add(step, count, metrics)
            step += count
            session.recorder.advance(step, task.index, session.total_steps)
            is_stopped = _is_stopped(session, step, count)
            saves = step < end and _divides(work.loop.save_every, step - begun)
            is_saved = is_stopped or saves
            if is_saved:
                meter.flush(step)
                _save(session, state, results, Phase.TRAINING, epochs=epochs.read())
            if is_stopped:
                _leave(session, state)
        meter.flush(step)  # waits for the last step
    if work.loop.counts_epochs:
        results = results_lib.add_convergence(results, task.index, epochs.summary())
    if step < end:
        # The task ended early. Evaluators that run at its end compare the steps done
        # with `task_steps`, so the latter must say how many there were.
        steps_done = sharding.replicate(np.int32(step - begun), work.mesh)
        state = state.replace(task_steps=steps_done)
    return state, results


def _divides(every: int, steps: int) -> bool:
    """Tell whether something is done after so many steps; `every` 0: never."""
    return every > 0 and steps > 0 and steps % every == 0


def _is_due(loop, plan, steps: int) -> bool:
    """Tell whether an epoch or an evaluation is due after so many steps of a task."""
    epoch = plan.steps_per_epoch if loop.counts_epochs else 0
    return _divides(epoch, steps) or _divides(loop.eval_every, steps)


def _end_step(session, state, task: int, plan, epochs) -> bool:
    """End an epoch and evaluate, as is due; False if a stop cut the evaluation."""
    loop, step = session.job.loop, int(state.step)
    steps = step - int(state.task_start)
    evaluates, row = _divides(loop.eval_every, steps), None
    if loop.counts_epochs and _divides(plan.steps_per_epoch, steps):
        row = epochs.end(session.clock.read().get("train", 0.0))
        evaluates = evaluates or epochs.is_due(loop.eval_epochs)
    if evaluates and steps < len(plan) and not epochs.over:
        metrics_log.check_state(state, step)
        if _evaluate(session, state, task)[0] is None:
            return False
    if row is not None:  # now that nothing can be cut
        seconds = row.pop("seconds")
        session.recorder.log(step, task, epoch=row, time={"train": seconds})
    return True


def _is_stopped(session, step: int, count: int) -> bool:
    """Tell whether to stop. Processes agree on it every `log_every` steps."""
    if jax.process_count() == 1:
        return session.stop()
    every = session.job.logging.every
    agrees = step // every > (step - count) // every
    return agrees and sharding.any_process(session.stop())


def _stop_if_asked(session, state) -> None:
    """Leave if that was asked for, in any process. All must be saved."""
    if sharding.any_process(session.stop()):
        _leave(session, state)


def _leave(session, state) -> None:
    """Wait for the checkpoint that is being written, and raise."""
    session.checkpoints.wait()
    raise Interrupted(f"stopped at step {int(state.step)}")


def _save(session, state, results, phase, **more) -> None:
    """Save the state, and a cursor with the phase and what was recorded so far."""
    with session.clock.on("rest"):
        step = int(state.step)
        metrics_log.check_state(state, step)
        number = step + 2 * results_lib.finished(results) + (phase == Phase.TRAINED)
        cursor = {"phase": phase, "seconds": session.clock.read(), "results": results}
        cursor |= {"rows": session.recorder.save(), **more}
        lock.check(session.workdir)
        session.checkpoints.save(number, state, cursor)


def _evaluate(session, state, task: int):
    """Run and log every evaluator; returns their result and the evaluated state.

    The result is None if the run is to stop.
    """

    def stop():
        return sharding.any_process(session.stop())

    with session.clock.on("evaluation"):
        state = session.job.method.eval_state(state)
        judges, recorder = session.job.evaluation.evaluators, session.recorder
        return evaluation.run(judges, state, task, recorder, stop=stop), state


def _finish_task(session, state, task, results) -> dict:
    """Evaluate a finished task, write and show its results; returns all results."""
    work, judged = session.job, session.job.evaluation
    evaluators = evaluation.due(judged.evaluators, state, task.index)
    _say_phase(session, f"judging after task {task.index + 1}", evaluators)
    result, evaluated = _evaluate(session, state, task.index)
    if result is None:
        _leave(session, state)
    spent = metrics_log.spent(work, state, task.index, session.clock)
    seconds = sum(spent.seconds.values())
    results = results_lib.add(results, task.index, result.rows, result.scalars, seconds)
    results["cost"] = cost.add(results["cost"], task.index, spent)
    if jax.process_index() == 0:
        results_lib.write_results(session.workdir, results)
    # Task-aware rows would crowd the output; results.json has them.
    shown = [name for name in result.rows if not name.endswith("/task_aware")]
    if shown and not work.logging.quiet:
        matrices = {name: results_lib.matrix(results, name) for name in shown}
        session.recorder.say(results_lib.latest_table(matrices, task.index))
    if pictures := evaluation.due(judged.pictures, state, task.index):
        _say_phase(session, "drawing", pictures)
    with plots.written_as(work.logging.plot_formats):
        for key in pictures:
            drawn = judged.pictures[key](evaluated, task.index)
            evaluation.warn(drawn.warnings, key, state, task.index)
    session.clock.restart()
    return results
