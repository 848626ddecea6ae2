"""The loop: tasks, steps, evaluation, checkpoints. One loop trains everything.

A task is saved while it trains, once it is trained (`end_task` done), and once it
is evaluated; the number of a checkpoint, steps plus those two events of every task
so far, orders them all.
"""

import contextlib
import time
from collections.abc import Callable
from typing import NamedTuple

import jax
import numpy as np
from etils import epath

from jaxcl import checkpoint, core, job, record, sharding


class Interrupted(Exception):
    """The run was told to stop; it has saved."""


class Diverged(Exception):
    """A metric is not finite; nothing was saved since."""


class _Loop(NamedTuple):
    """What the loop holds beside the state."""

    job: job.Job
    workdir: epath.Path
    checkpoints: checkpoint.Checkpoints
    recorder: record.Recorder
    step: Callable
    resident: dict
    stop: Callable  # () -> bool
    total_steps: int
    pending: list  # (step before, count, metrics f32[K] each), not yet fetched
    clock: dict  # "row": time and step of the last row, "task": when it began


def run(work: job.Job, workdir, *, stop=lambda: False, step=None) -> dict:
    """Train on every task, or go on where the run directory stands.

    Args:
      work: from `build.build`.
      workdir: the run directory; made if missing.
      stop: asked after every call of the step; true saves and raises.
      step: `job.compile_step(work)`, where several runs share the program.

    Returns:
      The results so far and of this run, see `record.empty`.

    Raises:
      Interrupted: after `stop`. Diverged: a metric is not finite.
      checkpoint.CheckpointError: a checkpoint could not be written or read.
    """
    workdir, tasks = epath.Path(workdir), work.stream.tasks
    total = sum(len(job.schedule(work, task.train, task.index)) for task in tasks)
    state, resident = job.initial_state(work), job.resident(work)
    results = record.empty(len(work.task_names), task_names=work.task_names)
    cursor = {"offset": 0, "phase": "evaluated", "seconds": 0.0, "results": results}
    with contextlib.ExitStack() as stack:
        checkpoints = checkpoint.Checkpoints(workdir / "checkpoints", keep=work.keep)
        stack.enter_context(contextlib.closing(checkpoints))
        restored = checkpoints.restore(state)
        if restored is not None:
            state = sharding.settle(restored.state, work.mesh)
            cursor = restored.cursor
        recorder = record.Recorder(
            workdir, num_tasks=len(tasks), offset=cursor["offset"],
            write=jax.process_index() == 0, **work.record,
        )  # fmt: skip
        stack.enter_context(contextlib.closing(recorder))
        loop = _Loop(
            work, workdir, checkpoints, recorder, step or job.compile_step(work),
            resident, stop, total, [], {"task": time.monotonic() - cursor["seconds"]},
        )  # fmt: skip
        results, phase = cursor["results"], cursor["phase"]
        if restored is not None and not work.quiet:
            recorder.say(f"resumed at step {int(state.step)}: {workdir}")
        elif restored is None and work.evaluate_untrained:
            results["untrained"] = record.plain(_evaluate(loop, state, 0).rows)
        for task in tasks[_finished(results) :]:
            if phase == "evaluated":
                state = _begin_task(loop, state, task)
            if phase != "trained":
                state = _train_task(loop, state, task, results)
                state = work.method.end_task(state, task)
                state = sharding.settle(state, work.mesh)
                _save(loop, state, results, "trained")
            results = _judge(loop, state, task, results)
            _save(loop, state, results, "evaluated")
            phase = "evaluated"
        return results


def single_tasks(work: job.Job, workdir, **options) -> dict[str, list]:
    """FT_i: accuracy on task i of the method trained on task i alone.

    Each task is a run of its own in `workdir`, kept, so that it resumes and is
    not trained twice.

    Returns: name of the matrix -> f64[T].
    """
    tasks, alone = work.stream.tasks, {}
    for i, task in enumerate(tasks):
        only = work._replace(
            stream=work.stream._replace(tasks=(task._replace(index=0),)),
            evaluators={
                name: lambda state, _, judge=judge, i=i: judge(state, i)
                for name, judge in work.evaluators.items()
            },
            pictures={},
            evaluate_untrained=False,
            quiet=True,
            record={"tensorboard": False, "progress": False},
        )
        results = run(only, epath.Path(workdir) / f"task_{i}", **options)
        for name, matrix in results["matrices"].items():
            alone.setdefault(name, [None] * len(tasks))[i] = matrix[0][i]
    return alone


def _begin_task(loop, state, task):
    """The state at the first step of a task."""
    source = loop.job.method.source(state, task)
    numbers = {
        "task": task.index,
        "task_start": int(state.step),
        "task_steps": len(job.schedule(loop.job, source, task.index)),
    }
    numbers = {name: np.int32(number) for name, number in numbers.items()}
    state = state.replace(**sharding.replicate(numbers, loop.job.mesh))
    return sharding.settle(loop.job.method.begin_task(state, task), loop.job.mesh)


def _train_task(loop, state, task, results):
    """All steps of a task that are not done yet."""
    work, begun = loop.job, int(state.task_start)
    source, step = work.method.source(state, task), int(state.step)
    loop.clock["row"] = time.monotonic(), step
    with contextlib.closing(job.feed(work, source, task.index, step - begun)) as feed:
        for count, batches, number in feed:
            with jax.transfer_guard("disallow"):
                state, metrics = loop.step(state, loop.resident, batches, number)
            loop.pending.append((step, count, metrics))
            step += count
            local, last = step - begun, step - begun == int(state.task_steps)
            # A row is fetched when later steps are under way, so that the
            # device never waits for the host.
            _log(loop, task, step - 2 * work.steps_per_call)
            loop.recorder.advance(step, task.index, loop.total_steps)
            if work.eval_every and local % work.eval_every == 0 and not last:
                _log(loop, task, step)
                _evaluate(loop, state, task.index)
            stopped = _stopped(loop, step)
            due = work.save_every and local % work.save_every == 0 and not last
            if stopped or due:
                _log(loop, task, step)
                _save(loop, state, results, "training")
            if stopped:
                loop.checkpoints.wait()
                raise Interrupted(f"stopped at step {step}, saved")
    _log(loop, task, step)
    return state


def _stopped(loop, step) -> bool:
    """Whether to stop; all processes agree, and ask each other now and then."""
    if jax.process_count() == 1:
        return loop.stop()
    asks = step // loop.job.log_every != (step - 1) // loop.job.log_every
    return asks and sharding.any_process(loop.stop())


def _log(loop, task, until: int) -> None:
    """Fetch the metrics of the steps before `until`, check and write them.

    Raises:
      Diverged: one is not finite.
    """
    work = loop.job
    while loop.pending and loop.pending[0][0] + loop.pending[0][1] <= until:
        begin, count, metrics = loop.pending.pop(0)
        metrics = sharding.fetch(metrics)
        for i in range(count):
            row = {name: values[i] for name, values in metrics.items()}
            wrong = [name for name, value in row.items() if not np.isfinite(value)]
            if wrong:
                raise Diverged(
                    f"{wrong[0]} is {row[wrong[0]]} at step {begin + i} (task "
                    f"{task.index + 1}); lower config.optimizer.lr or look at the data"
                )
            done = begin + i + 1
            if done % work.log_every == 0:
                now, (before, at) = time.monotonic(), loop.clock["row"]
                speed = (done - at) * work.batch_size / max(now - before, 1e-9)
                loop.clock["row"] = now, done
                loop.recorder.log(
                    done, task.index, **row, time={"images_per_second": speed}
                )


def _save(loop, state, results, phase) -> None:
    """Save the state, after which phase it is, and what was recorded so far."""
    number = int(state.step) + 2 * _finished(results) + (phase == "trained")
    spent = time.monotonic() - loop.clock["task"]
    cursor = {"phase": phase, "seconds": spent, "results": results}
    cursor["offset"] = loop.recorder.offset()
    loop.checkpoints.save(number, state, cursor)


def _evaluate(loop, state, task: int) -> core.Result:
    """What every evaluator says of a state, logged."""
    rows, scalars, spent = {}, {}, {}
    state = loop.job.method.eval_state(state)
    for name, evaluate in loop.job.evaluators.items():
        start = time.monotonic()
        result = evaluate(state, task)
        rows |= {f"{name}/{key}": row for key, row in result.rows.items()}
        for key, value in result.scalars.items():
            if key.startswith("seconds"):
                spent[f"{name}/{key}"] = value
            else:
                scalars[f"{name}/{key}"] = value
        spent[name] = time.monotonic() - start
    loop.recorder.log(
        int(state.step), task, eval={**rows, **scalars}, time={"evaluation": spent}
    )
    return core.Result(rows, scalars)


def _judge(loop, state, task, results) -> dict:
    """The results with those of the finished task, shown as a table."""
    work = loop.job
    rows, scalars = _evaluate(loop, state, task.index)
    now, began = time.monotonic(), loop.clock["task"]
    loop.clock["task"] = now
    results = record.add(results, task.index, rows, scalars, now - began)
    if jax.process_index() == 0:
        record.write_results(loop.workdir, results)
    for name in rows:
        crowds = work.quiet or name.endswith("/task_aware")  # it is in results.json
        if not crowds:
            loop.recorder.say(record.table(record.matrix(results, name), name=name))
    for draw in work.pictures.values():
        draw(state, task.index)
    return results


def _finished(results: dict) -> int:
    """How many tasks have been evaluated."""
    return sum(scalars is not None for scalars in results["scalars"])
