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


class Interrupted(Exception):
    """The run was told to stop, and has saved what it had done."""


class _Loop(NamedTuple):
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
    with contextlib.ExitStack() as stack:
        stack.enter_context(lock.held(workdir))
        loop, state, cursor = _open(stack, work, epath.Path(workdir), stop, step)
        results, phase = cursor["results"], cursor["phase"]
        _stop_if_asked(loop, state)
        for task in work.stream.tasks[results_lib.finished(results) : work.first_tasks]:
            if phase == "evaluated":
                state = job.begin(work, state, task)
            if phase != "trained":
                progress = cursor["epochs"] if phase == "training" else {}
                state, results = _train_task(loop, state, task, results, progress)
                state = work.method.end_task(state, task)
                state = sharding.settle(state, work.mesh)
                _save(loop, state, results, "trained")
                _stop_if_asked(loop, state)
            results = _finish_task(loop, state, task, results)
            _save(loop, state, results, "evaluated")
            _stop_if_asked(loop, state)
            phase = "evaluated"
        return results


def _open(stack, work, workdir, stop, step):
    """Open a run directory; returns the loop, and the state and cursor to go on from.

    `stack` closes the checkpoints and the recorder.
    """
    state, resident = job.initial_state(work), job.resident(work)
    checkpoints = checkpoint.Checkpoints(workdir / "checkpoints", keep=work.keep)
    stack.enter_context(contextlib.closing(checkpoints))
    restored = checkpoints.restore(state)
    if restored is None and work.start is not None:
        names = work.task_names
        restored = checkpoint.restore_start(work.start, state, names, keep=work.keep)
    if restored is None:
        results = results_lib.empty(len(work.task_names), task_names=work.task_names)
        cursor = {"rows": [0, 0], "phase": "evaluated", "seconds": {}}
        cursor |= {"results": results}
    else:
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
    step = clock.time_compilation(step or job.compile_step(work))
    begun = state.step if cursor["phase"] == "evaluated" else state.task_start
    total = int(begun) + job.steps_left(work, results_lib.finished(cursor["results"]))
    loop = _Loop(
        work, workdir, checkpoints, recorder, step, resident, stop, total, clock
    )
    if restored is not None and not work.quiet:
        recorder.say(f"resumed at step {int(state.step)}: {workdir}")
    elif restored is None and work.evaluate_untrained:
        evaluators = evaluation.due(work.evaluators, state, 0)
        _say_phase(loop, "judging the untrained network", evaluators)
        result, _ = _evaluate(loop, state, 0)
        if result is None:
            _leave(loop, state)
        cursor["results"]["untrained"] = results_lib.plain(result.rows)
    if int(state.step) < total:
        _say_phase(loop, "compiling the step")
    return loop, state, cursor


def _say_phase(loop, doing: str, names=()) -> None:
    """Say what is done before the bar moves, or goes on."""
    if not loop.job.quiet:
        what = f": {', '.join(names)}" if names else ""
        loop.recorder.phase(f"{doing}{what}")


def _train_task(loop, state, task, results, progress):
    """Do the remaining steps of a task; returns the state and the results.

    A checkpoint within a task is saved before what is due after its last step: the end
    of an epoch, an evaluation. A run that goes on from it begins with that, so that an
    evaluation which was cut is run again.

    Args:
      progress: of the task's epochs, from such a checkpoint; {} for a new task.
    """
    work, begun, step = loop.job, int(state.task_start), int(state.step)
    epochs = metrics_log.Epochs(work.patience, progress)
    source = work.method.source(state, task)
    plan = job.schedule(work, source, task.index)
    end = begun + len(plan)
    meter = metrics_log.Meter(work, loop.recorder, task.index, step, epochs)
    feed = job.feed(work, source, task.index, step - begun)
    is_saved = True
    with loop.clock.on("train"), contextlib.closing(feed):
        while True:
            if _is_due(work, plan, step - begun):
                meter.flush(step)
                progress = epochs.read()
                if not _end_step(loop, state, task.index, plan, epochs):
                    if not is_saved:
                        _save(loop, state, results, "training", epochs=progress)
                    _leave(loop, state)
            if step == end or epochs.over:
                break
            count, batches, number = next(feed)
            with jax.transfer_guard("disallow"):
                state, metrics = loop.step(state, loop.resident, batches, number)
            meter.add(step, count, metrics)
            step += count
            loop.recorder.advance(step, task.index, loop.total_steps)
            is_stopped = _is_stopped(loop, step, count)
            saves = step < end and _divides(work.save_every, step - begun)
            is_saved = is_stopped or saves
            if is_saved:
                meter.flush(step)
                _save(loop, state, results, "training", epochs=epochs.read())
            if is_stopped:
                _leave(loop, state)
        meter.flush(step)  # waits for the last step
    if work.counts_epochs:
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


def _is_due(work, plan, steps: int) -> bool:
    """Tell whether an epoch or an evaluation is due after so many steps of a task."""
    epoch = plan.steps_per_epoch if work.counts_epochs else 0
    return _divides(epoch, steps) or _divides(work.eval_every, steps)


def _end_step(loop, state, task: int, plan, epochs) -> bool:
    """End an epoch and evaluate, as is due; False if a stop cut the evaluation."""
    work, step = loop.job, int(state.step)
    steps = step - int(state.task_start)
    evaluates, row = _divides(work.eval_every, steps), None
    if work.counts_epochs and _divides(plan.steps_per_epoch, steps):
        row = epochs.end(loop.clock.read().get("train", 0.0))
        evaluates = evaluates or epochs.is_due(work.eval_epochs)
    if evaluates and steps < len(plan) and not epochs.over:
        metrics_log.check_state(state, step)
        if _evaluate(loop, state, task)[0] is None:
            return False
    if row is not None:  # now that nothing can be cut
        seconds = row.pop("seconds")
        loop.recorder.log(step, task, epoch=row, time={"train": seconds})
    return True


def _is_stopped(loop, step: int, count: int) -> bool:
    """Tell whether to stop. Processes agree on it every `log_every` steps."""
    if jax.process_count() == 1:
        return loop.stop()
    every = loop.job.log_every
    return step // every > (step - count) // every and sharding.any_process(loop.stop())


def _stop_if_asked(loop, state) -> None:
    """Leave if that was asked for, in any process. All must be saved."""
    if sharding.any_process(loop.stop()):
        _leave(loop, state)


def _leave(loop, state) -> None:
    """Wait for the checkpoint that is being written, and raise."""
    loop.checkpoints.wait()
    raise Interrupted(f"stopped at step {int(state.step)}")


def _save(loop, state, results, phase, **more) -> None:
    """Save the state, and a cursor with the phase and what was recorded so far."""
    with loop.clock.on("rest"):
        step = int(state.step)
        metrics_log.check_state(state, step)
        number = step + 2 * results_lib.finished(results) + (phase == "trained")
        cursor = {"phase": phase, "seconds": loop.clock.read(), "results": results}
        cursor |= {"rows": loop.recorder.save(), **more}
        lock.check(loop.workdir)
        loop.checkpoints.save(number, state, cursor)


def _evaluate(loop, state, task: int):
    """Run and log every evaluator; returns their result and the evaluated state.

    The result is None if the run is to stop.
    """

    def stop():
        return sharding.any_process(loop.stop())

    with loop.clock.on("evaluation"):
        state = loop.job.method.eval_state(state)
        evaluators = loop.job.evaluators
        return evaluation.run(evaluators, state, task, loop.recorder, stop=stop), state


def _finish_task(loop, state, task, results) -> dict:
    """Evaluate a finished task, write and show its results; returns all results."""
    work = loop.job
    evaluators = evaluation.due(work.evaluators, state, task.index)
    _say_phase(loop, f"judging after task {task.index + 1}", evaluators)
    result, evaluated = _evaluate(loop, state, task.index)
    if result is None:
        _leave(loop, state)
    spent = metrics_log.spent(work, state, task.index, loop.clock)
    seconds = sum(spent.seconds.values())
    results = results_lib.add(results, task.index, result.rows, result.scalars, seconds)
    results["cost"] = cost.add(results["cost"], task.index, spent)
    if jax.process_index() == 0:
        results_lib.write_results(loop.workdir, results)
    # Task-aware rows would crowd the output; results.json has them.
    shown = [name for name in result.rows if not name.endswith("/task_aware")]
    if shown and not work.quiet:
        matrices = {name: results_lib.matrix(results, name) for name in shown}
        loop.recorder.say(results_lib.latest_table(matrices, task.index))
    if pictures := evaluation.due(work.pictures, state, task.index):
        _say_phase(loop, "drawing", pictures)
    with plots.written_as(work.plot_formats):
        for key in pictures:
            drawn = work.pictures[key](evaluated, task.index)
            evaluation.warn(drawn.warnings, key, state, task.index)
    loop.clock.restart()
    return results
