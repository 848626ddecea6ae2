"""Metrics on their way from the device: fetched late, checked, logged; and the cost."""

import time

import jax
import jax.numpy as jnp
import numpy as np

from jaxcl import cost, job, record, sharding


class Diverged(Exception):
    """A metric or a parameter is not finite; nothing was saved since."""


class Meter:
    """Rows of the steps of a task, one every `log_every`.

    A row is fetched when later steps are under way, so that the device never
    waits for the host; what is saved or evaluated is checked first.
    """

    def __init__(self, work: job.Job, recorder: record.Recorder, task: int, step: int):
        """Args: the job, where rows go, the task's number and the run's step."""
        self._work, self._recorder, self._task = work, recorder, task
        self._pending = []  # (steps done before, count, metrics f32[K] each)
        self._last = time.monotonic(), step  # of the last row

    def add(self, before: int, count: int, metrics: dict) -> None:
        """Take the metrics of a call that did `count` steps after `before`."""
        self._pending.append((before, count, metrics))
        self.flush(before + count - 2 * self._work.steps_per_call)

    def flush(self, until: int) -> None:
        """Check and log all steps up to number `until`.

        Raises:
          Diverged: a metric is not finite, at a step that is named.
        """
        while self._pending and sum(self._pending[0][:2]) <= until:
            before, count, metrics = self._pending.pop(0)
            metrics = sharding.fetch(metrics)
            for i in range(count):
                row = {name: values[i] for name, values in metrics.items()}
                self._check(row, before + i + 1)
                if (before + i + 1) % self._work.log_every == 0:
                    self._log(row, before + i + 1)

    def _check(self, row, step):
        for name, value in row.items():
            if not np.isfinite(value):
                raise Diverged(
                    f"{name} is {value} at step {step} (task {self._task + 1}); the "
                    "last good checkpoint is kept. Lower config.optimizer.lr, or "
                    "look at the data"
                )

    def _log(self, row, step):
        now, (then, at) = time.monotonic(), self._last
        self._last = now, step
        speed = (step - at) * self._work.rows / max(now - then, 1e-9)
        self._recorder.log(step, self._task, **row, time={"images_per_second": speed})


@jax.jit
def _finite(tree):
    return jnp.stack([jnp.isfinite(x).all() for x in jax.tree.leaves(tree)]).all()


def check_parameters(params, step: int) -> None:
    """Refuse to save parameters that are not finite.

    Raises:
      Diverged: one is not, though the loss before the step's update was.
    """
    if not _finite(params):
        raise Diverged(
            f"a parameter is not finite after step {step}; the last good checkpoint "
            "is kept. Lower config.optimizer.lr, or look at the data"
        )


def spent(work: job.Job, state, task: int, clock: cost.Clock) -> cost.Spent:
    """What a task took, once its steps are done; counts FLOPs."""
    steps = int(state.step) - int(state.task_start)
    flops = cost.flops(work.method.step, *job.shapes(work), task)
    machine = sharding.describe(work.mesh)
    return cost.Spent(steps, steps * work.rows, flops, clock.read(), machine)
