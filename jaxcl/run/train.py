"""The loop: tasks, steps, evaluation, checkpoints. One loop trains everything.

A task is saved while it trains, once it is trained (`end_task` done), and once it
is evaluated; the number of a checkpoint, steps plus those two events of every task
so far, orders them all.
"""

import contextlib
from collections.abc import Callable
from typing import NamedTuple

import jax
import numpy as np
from etils import epath

from jaxcl import sharding
from jaxcl.run import checkpoint, cost, evaluation, job, metrics_log, record
from jaxcl.run import results as results_lib


class Interrupted(Exception):
    """The run was told to stop; it has saved."""


class _Loop(NamedTuple):
    """What the loop holds beside the state."""

    job: job.Job
    workdir: epath.Path
    checkpoints: checkpoint.Checkpoints
    recorder: record.Recorder
    step: Callable
    resident: dict
    stop: Callable  # () -> bool
    total_steps: int  # about, for the progress bar
    clock: cost.Clock  # of the present task


def run(work: job.Job, workdir, *, stop=lambda: False, step=None) -> dict:
    """Train on every task, or go on where the run directory stands.

    Args:
      work: from `build.build`.
      workdir: the run directory; made if missing.
      stop: asked after each call of the step and around evaluations; true raises.
      step: `job.compile_step(work)`, where several runs share the program.

    Returns:
      The results so far and of this run, see `results.empty`.

    Raises:
      Interrupted: after `stop`. metrics_log.Diverged: something is not finite.
      checkpoint.CheckpointError: a checkpoint could not be written or read; the run
        of config.start has not come to the end of a task.
    """
    workdir, tasks = epath.Path(workdir), work.stream.tasks
    state, resident = job.initial_state(work), job.resident(work)
    results = results_lib.empty(len(work.task_names), task_names=work.task_names)
    cursor = {"offset": 0, "phase": "evaluated", "seconds": {}, "results": results}
    with contextlib.ExitStack() as stack:
        checkpoints = checkpoint.Checkpoints(workdir / "checkpoints", keep=work.keep)
        stack.enter_context(contextlib.closing(checkpoints))
        restored = checkpoints.restore(state)
        if restored is None and work.start is not None:
            names = work.task_names
            restored = checkpoint.taken_over(work.start, state, names, keep=work.keep)
        if restored is not None:
            state = sharding.settle(restored.state, work.mesh)
            cursor = restored.cursor
        recorder = record.Recorder(
            workdir,
            num_tasks=len(tasks),
            offset=cursor["offset"],
            write=jax.process_index() == 0,
            **work.record,
        )
        stack.enter_context(contextlib.closing(recorder))
        clock = cost.Clock(cursor["seconds"])
        step = clock.first_apart(step or job.compile_step(work))
        begun = int(state.step if cursor["phase"] == "evaluated" else state.task_start)
        total = begun + job.steps_left(work, results_lib.finished(cursor["results"]))
        loop = _Loop(
            work, workdir, checkpoints, recorder, step, resident, stop, total, clock
        )
        results, phase = cursor["results"], cursor["phase"]
        if restored is not None and not work.quiet:
            recorder.say(f"resumed at step {int(state.step)}: {workdir}")
        elif restored is None and work.evaluate_untrained:
            results["untrained"] = results_lib.plain(_evaluate(loop, state, 0)[0].rows)
        for task in tasks[results_lib.finished(results) : work.first_tasks]:
            if phase == "evaluated":
                state = job.begin(work, state, task)
            if phase != "trained":
                begun = cursor.get("epochs", {}) if phase == "training" else {}
                epochs = metrics_log.Epochs(work.patience, begun, task.index)
                state, results = _train_task(loop, state, task, results, epochs)
                state = work.method.end_task(state, task)
                state = sharding.settle(state, work.mesh)
                _save(loop, state, results, "trained")
                _pause(loop, state)
            results = _judge(loop, state, task, results)
            _save(loop, state, results, "evaluated")
            _pause(loop, state)
            phase = "evaluated"
        return results


def _train_task(loop, state, task, results, epochs):
    """All steps of a task that are not done yet; the state and the results after."""
    work, begun, step = loop.job, int(state.task_start), int(state.step)
    source = work.method.source(state, task)
    plan = job.schedule(work, source, task.index)
    end = begun + len(plan)
    rows = metrics_log.Meter(work, loop.recorder, task.index, step, epochs)
    feed = job.feed(work, source, task.index, step - begun)
    with loop.clock.on("train"), contextlib.closing(feed):
        for count, batches, number in () if epochs.over else feed:
            with jax.transfer_guard("disallow"):
                state, metrics = loop.step(state, loop.resident, batches, number)
            rows.add(step, count, metrics)
            step += count
            local, inside = step - begun, step < end
            loop.recorder.advance(step, task.index, loop.total_steps)
            if inside and work.eval_every and local % work.eval_every == 0:
                rows.flush(step)
                _evaluate(loop, state, task.index)
            if work.counts_epochs and local % plan.steps_per_epoch == 0:
                rows.flush(step)
                epochs.end(loop.clock.read().get("train", 0.0), loop.recorder, step)
                if inside and epochs.due(work.eval_epochs):
                    _evaluate(loop, state, task.index)
            stopped = _stopped(loop, step, count)
            if stopped or (inside and work.save_every and local % work.save_every == 0):
                rows.flush(step)
                _save(loop, state, results, "training", epochs=epochs.read())
            if stopped:
                _leave(loop, state)
            if epochs.over:
                break
        rows.flush(step)  # waits for the last step
    if work.counts_epochs:
        results = results_lib.add_convergence(results, task.index, epochs.summary())
    if step < end:  # or evaluators of the end of a task would wait for more
        done = sharding.replicate(np.int32(step - begun), work.mesh)
        state = state.replace(task_steps=done)
    return state, results


def _stopped(loop, step: int, count: int) -> bool:
    """Whether to stop; all processes agree, and ask each other now and then."""
    if jax.process_count() == 1:
        return loop.stop()
    every = loop.job.log_every
    return step // every > (step - count) // every and sharding.any_process(loop.stop())


def _pause(loop, state) -> None:
    """Stop between two parts of a task, both saved, where that was asked for."""
    if sharding.any_process(loop.stop()):
        _leave(loop, state)


def _leave(loop, state) -> None:
    loop.checkpoints.wait()
    raise Interrupted(f"stopped at step {int(state.step)}, saved")


def _save(loop, state, results, phase, **more) -> None:
    """Save the state, after which phase it is, and what was recorded so far."""
    with loop.clock.on("rest"):
        step = int(state.step)
        metrics_log.check_parameters(state.params, step)
        number = step + 2 * results_lib.finished(results) + (phase == "trained")
        cursor = {"phase": phase, "seconds": loop.clock.read(), "results": results}
        cursor |= {"offset": loop.recorder.offset(), **more}
        loop.checkpoints.save(number, state, cursor)


def _evaluate(loop, state, task: int):
    """What every evaluator says of a state, logged, and the state that was judged."""
    with loop.clock.on("evaluation"):
        state = loop.job.method.eval_state(state)
        found = evaluation.run(loop.job.evaluators, state, task, loop.recorder)
    return found, state


def _judge(loop, state, task, results) -> dict:
    """The results with those of the finished task, shown as a table."""
    work = loop.job
    (rows, scalars), judged = _evaluate(loop, state, task.index)
    spent = metrics_log.spent(work, state, task.index, loop.clock)
    seconds = sum(spent.seconds.values())
    results = results_lib.add(results, task.index, rows, scalars, seconds)
    results["cost"] = cost.add(results["cost"], task.index, spent)
    if jax.process_index() == 0:
        results_lib.write_results(loop.workdir, results)
    for name in rows:
        crowds = work.quiet or name.endswith("/task_aware")  # it is in results.json
        if not crowds:
            loop.recorder.say(
                results_lib.table(results_lib.matrix(results, name), name=name)
            )
    for draw in work.pictures.values():
        draw(judged, task.index)
    loop.clock.restart()
    return results
