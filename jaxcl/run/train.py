"""The loop: tasks, steps, evaluation, checkpoints. One loop trains everything.

A run saves a checkpoint while a task trains, after `end_task` and after the task's
evaluation, see `checkpoint.Phase`. The number of a checkpoint counts steps, plus one
for each task trained and one for each evaluated, so that numbers never repeat.
"""

import contextlib
import time
from collections.abc import Callable

import jax
import numpy as np
from etils import epath

from jaxcl import core, numerics, sharding
from jaxcl.data import stream
from jaxcl.run import (
    agreement,
    checkpoint,
    cost,
    evaluation,
    job,
    lock,
    metrics_log,
    record,
    result_file,
)
from jaxcl.run.checkpoint import Phase


class Interrupted(Exception):
    """A signal stopped the run, which has saved its progress."""


@numerics.pinned()
def run_tasks(
    work: job.Job,
    workdir: epath.PathLike,
    *,
    stop: Callable[[], bool] = lambda: False,
    step: Callable | None = None,
) -> dict:
    """Train on every task, or resume from the newest checkpoint.

    Args:
      work: job from `build.build`.
      workdir: the run directory; created if missing.
      stop: function called after each call of the step and before each evaluator; if it
        returns True the run saves and raises `Interrupted`.
      step: `job.compile_step(work)`, where several runs share the program.

    Returns:
      The results of all tasks, earlier ones included, see `result_file.empty_results`.

    Raises:
      Interrupted: `stop` returned True.
      lock.LockHeldError: another process works in the directory.
      metrics_log.Diverged: a metric or a parameter is not finite.
      checkpoint.CheckpointError: a checkpoint could not be written or read, or the run
        of config.start has not finished a task.
    """
    workdir = epath.Path(workdir)
    with contextlib.ExitStack() as stack:
        stack.enter_context(lock.hold_lock(workdir))
        run = _TrainingRun(work, workdir, stop, step, stack)
        done = result_file.count_finished(run.results)
        tasks = work.stream.tasks[done : work.loop.first_tasks]
        if not (run.start() and all(run.complete_task(task) for task in tasks)):
            run.checkpoints.wait()
            raise Interrupted(f"stopped at step {int(run.state.step)}")
        return run.results


class _TrainingRun:
    """A run in progress: its state, its results and their records.

    Methods that may be stopped return False if they were, with all progress saved.
    """

    def __init__(self, work: job.Job, workdir, stop, step, stack: contextlib.ExitStack):
        """Restore or begin; `stack` closes what is opened."""
        self.job, self.workdir, self._stop = work, workdir, stop
        self.checkpoints = stack.enter_context(
            contextlib.closing(
                checkpoint.Checkpoints(workdir / "checkpoints", keep=work.loop.keep)
            )
        )
        self.state, cursor = _restore(work, self.checkpoints)
        self.phase, self.results = cursor["phase"], cursor["results"]
        self.progress = cursor.get("epochs", {})  # of the task's epochs
        self.is_resumed = cursor["resumed"]
        self.recorder = stack.enter_context(
            contextlib.closing(
                record.Recorder(
                    workdir,
                    num_tasks=len(work.stream.tasks),
                    rows=cursor["rows"],
                    write=jax.process_index() == 0,
                    loggers=work.logging.loggers,
                    progress=work.logging.progress,
                )
            )
        )
        is_between = self.phase == Phase.EVALUATED
        first_step = self.state.step if is_between else self.state.task_start
        finished = result_file.count_finished(self.results)
        left = job.steps_left(work.data, finished, work.loop.first_tasks)
        self.total_steps = int(first_step) + left  # an estimate, for the progress bar
        self.clock = cost.Clock(cursor["seconds"])  # of the present task
        self.step = self.clock.time_compilation(step or job.compile_step(work))
        self.resident = job.resident(work)
        self._calls, self._first_call = 0, 0.0  # of the step, by this process

    def start(self) -> bool:
        """Say where the run resumes, or evaluate the untrained network."""
        settings, step = self.job.evaluation, int(self.state.step)
        if self.is_resumed:
            if not self.job.logging.quiet:
                self.recorder.print_text(f"resumed at step {step}: {self.workdir}")
        elif settings.untrained:
            due = evaluation.due_evaluators(settings.evaluators, self.state, 0)
            self._say_phase("evaluating the untrained network", due)
            result, _ = self._evaluate(0)
            if result is None:
                return False
            self.results |= {"untrained": result_file.jsonable(result.rows)}
        if step < self.total_steps:
            self._say_phase("compiling the step")
        return not self._is_asked()

    def complete_task(self, task: stream.Task) -> bool:
        """Finish a task: train, end it, evaluate."""
        work = self.job
        if self.phase == Phase.EVALUATED:
            self.state, self.progress = job.begin_task(work, self.state, task), {}
        if self.phase != Phase.TRAINED:
            if not self._train_task(task):
                return False
            ended = work.method.end_task(self.state, task)
            self.state = sharding.commit_placement(ended, work.mesh)
            self._save_checkpoint(Phase.TRAINED)
            if self._is_asked():
                return False
        if not self._finish(task.index):
            return False
        self._save_checkpoint(Phase.EVALUATED)
        return not self._is_asked()

    def _train_task(self, task: stream.Task) -> bool:
        """Do the remaining steps of a task.

        A checkpoint within a task is saved before the work that is due after its last
        step: the end of an epoch, an evaluation. A resumed run begins with this work,
        so an interrupted evaluation is run again.
        """
        work, first = self.job, int(self.state.task_start)
        step, is_saved = int(self.state.step), True
        source = work.method.source(self.state, task)
        plan = job.schedule(work, source, task.index)
        end = first + len(plan)
        epochs = metrics_log.Epochs(work.loop.patience, self.progress)
        meter = metrics_log.MetricsMeter(work, self.recorder, task.index, step, epochs)
        feed = job.feed_batches(work, source, task.index, step - first)
        with self.clock.count("train"), contextlib.closing(feed):
            while True:
                if _is_due(work.loop, plan, step - first):
                    meter.flush(step)
                    self.progress = epochs.read()
                    if not self._end_step(task.index, plan, epochs):
                        if not is_saved:
                            self._save_checkpoint(Phase.TRAINING)
                        return False
                if step == end or epochs.is_over:
                    break
                count, batches, number = next(feed)
                with jax.transfer_guard("disallow"):
                    self.state, metrics = self.step(
                        self.state, self.resident, batches, number
                    )
                meter.add(step, count, metrics)
                step += count
                self._time_step(step, count, metrics)
                self.recorder.advance(step, task.index, self.total_steps)
                is_stopped = self._is_stopped(step, count)
                saves = step < end and _divides(work.loop.save_every, step - first)
                is_saved = is_stopped or saves
                if is_saved:
                    meter.flush(step)
                    self.progress = epochs.read()
                    self._save_checkpoint(Phase.TRAINING)
                if is_stopped:
                    return False
            meter.flush(step)  # waits for the last step
        if work.loop.counts_epochs:
            summary = task.index, epochs.summary()
            self.results = result_file.add_convergence(self.results, *summary)
        if step < end:
            # The task ended early. Evaluators that run at its end compare the steps
            # done with `task_steps`, so the latter must say how many there were.
            done = sharding.replicate(np.int32(step - first), work.mesh)
            self.state = self.state.replace(task_steps=done)
        return True

    def _time_step(self, step: int, count: int, metrics) -> None:
        """Say how long the run takes, from the time of the second call of the step."""
        self._calls += 1
        if self._calls > 2 or self.job.logging.quiet:
            return
        jax.block_until_ready(metrics)  # the first call compiles
        now = time.monotonic()
        if self._calls == 2:
            seconds, left = (now - self._first_call) / count, self.total_steps - step
            if text := cost.describe_duration(self.job, seconds, left):
                self.recorder.print_text(text)
        self._first_call = now

    def _end_step(self, task: int, plan, epochs) -> bool:
        """End an epoch and evaluate, as is due; False if a stop cut the evaluation."""
        loop, step = self.job.loop, int(self.state.step)
        steps = step - int(self.state.task_start)
        evaluates, row = _divides(loop.eval_every, steps), None
        if loop.counts_epochs and _divides(plan.steps_per_epoch, steps):
            row = epochs.end_epoch(self.clock.read().get("train", 0.0))
            evaluates = evaluates or epochs.is_due(loop.eval_epochs)
        if evaluates and steps < len(plan) and not epochs.is_over:
            metrics_log.check_state(self.state, step)
            if self._evaluate(task)[0] is None:
                return False
        if row is not None:  # now that nothing can be cut
            seconds = row.pop("seconds")
            self.recorder.log(step, task, epoch=row, time={"train": seconds})
        return True

    def _finish(self, task: int) -> bool:
        """Evaluate a finished task, write and show its results, draw."""
        work, settings = self.job, self.job.evaluation
        due = evaluation.due_evaluators(settings.evaluators, self.state, task)
        self._say_phase(f"evaluating after task {task + 1}", due)
        result, evaluated = self._evaluate(task)
        if result is None:
            return False
        costs = cost.sum_task_cost(work, self.state, task, self.clock)
        self.results = result_file.add_task(
            self.results, task, result.rows, result.scalars, sum(costs.seconds.values())
        )
        self.results["cost"] = cost.add_task(self.results["cost"], task, costs)
        if jax.process_index() == 0:
            result_file.write_results(self.workdir, self.results)
        # Task-aware rows would crowd the output; results.json has them.
        names = [name for name in result.rows if not name.endswith("/task_aware")]
        if names and not work.logging.quiet:
            matrices = {name: result_file.matrix(self.results, name) for name in names}
            self.recorder.print_text(result_file.latest_table(matrices, task))
        if pictures := evaluation.due_evaluators(settings.pictures, self.state, task):
            self._say_phase("drawing", pictures)
        drawn = {key: settings.pictures[key] for key in pictures}
        evaluation.draw_pictures(drawn, evaluated, task)
        self.clock.restart()
        return True

    def _evaluate(self, task: int) -> tuple[core.Result | None, core.TrainState]:
        """Run and log every evaluator; None in place of results: the run is to stop."""
        with self.clock.count("evaluation"):
            state = self.job.method.eval_state(self.state)
            evaluators, recorder = self.job.evaluation.evaluators, self.recorder
            result = evaluation.run_evaluators(
                evaluators, state, task, recorder, stop=self._is_asked
            )
            return result, state

    def _save_checkpoint(self, phase: Phase) -> None:
        """Save the state, and a cursor with the phase and what was recorded so far."""
        with self.clock.count("rest"):
            step = int(self.state.step)
            metrics_log.check_state(self.state, step)
            tasks = result_file.count_finished(self.results)
            cursor = {
                "phase": phase,
                "seconds": self.clock.read(),
                "results": self.results,
                "rows": self.recorder.save(),
                "epochs": self.progress,
            }
            lock.check_lock(self.workdir)
            number = step + 2 * tasks + (phase == Phase.TRAINED)
            self.checkpoints.save(number, self.state, cursor)
            self.phase = phase

    def _is_asked(self) -> bool:
        """Tell whether any process should stop. All must call it together."""
        return sharding.any_process(self._stop())

    def _is_stopped(self, step: int, count: int) -> bool:
        """Tell whether to stop after `count` steps up to number `step`.

        Processes agree on it every `log_every` steps.
        """
        if jax.process_count() == 1:
            return self._stop()
        interval = self.job.logging.every
        return step // interval > (step - count) // interval and self._is_asked()

    def _say_phase(self, doing: str, names=()) -> None:
        """Show the present phase while the bar stands still."""
        if not self.job.logging.quiet:
            self.recorder.show_phase(f"{doing}: {', '.join(names)}" if names else doing)


def _restore(work, checkpoints):
    """Return the state and the cursor to resume from, or a new run's."""
    state, names = job.initial_state(work), work.data.task_names
    agreement.check(
        {"checkpoints in the run directory": checkpoints.numbers()},
        "The run directory must be on a disk that all processes share",
    )
    restored = checkpoints.restore(state)
    if restored is None and work.loop.start is not None:
        restored = checkpoint.restore_start(
            work.loop.start, state, names, keep=work.loop.keep
        )
    if restored is not None:
        state = sharding.commit_placement(restored.state, work.mesh)
        return state, restored.cursor | {"resumed": True}
    results = result_file.empty_results(
        len(names), task_names=names, embeds=work.method.embeds
    )
    cursor = {"phase": Phase.EVALUATED, "rows": 0, "seconds": {}}
    return state, cursor | {"results": results, "resumed": False}


def _divides(every: int, steps: int) -> bool:
    """Tell whether `every` divides the number of steps; 0 never does."""
    return every > 0 and steps > 0 and steps % every == 0


def _is_due(loop, plan, steps: int) -> bool:
    """Tell whether an epoch or an evaluation is due after so many steps of a task."""
    epoch = plan.steps_per_epoch if loop.counts_epochs else 0
    return _divides(epoch, steps) or _divides(loop.eval_every, steps)
