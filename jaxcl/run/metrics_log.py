"""Metrics of the steps: fetch them from the device, check them and log them.

A task ends once the mean loss of its epochs no longer falls.
"""

import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxcl import sharding
from jaxcl.run import job

_MEND = (
    "the last good checkpoint is kept. Lower config.optimizer.lr, or look at the data"
)


class Diverged(Exception):
    """A metric or a number of the state is not finite; such a state is never saved."""


class MetricsMeter:
    """Checks the metrics of every step of a task, and logs every `log_every`-th.

    Metrics are fetched while later steps are under way, so that the device never waits
    for the host. Call `flush` before a state is saved or evaluated.

    Args:
      work: the job.
      recorder: log of the rows.
      task: number of the task, from 0.
      step: number of steps that the run has done.
      epochs: record that also gets the metrics of every step.
    """

    def __init__(self, work: job.Job, recorder, task: int, step: int, epochs: "Epochs"):
        self._work, self._recorder, self._task = work, recorder, task
        self._epochs = epochs
        self._pending = []  # (steps done before, count, metrics f32[K] each)
        self._last = time.monotonic(), step  # of the last measurement
        self._speed = 0.0  # images a second, up to it

    def add(self, before: int, count: int, metrics: dict) -> None:
        """Take the metrics of a call that did `count` steps after step `before`."""
        self._pending.append((before, count, metrics))
        self.flush(before + count - 2 * self._work.loop.steps_per_call)

    def flush(self, until: int) -> None:
        """Check and log all steps up to number `until`.

        Raises:
          Diverged: a metric is not finite; the message names the step.
        """
        interval, ready = self._work.logging.every, []
        while self._pending and sum(self._pending[0][:2]) <= until:
            before, count, metrics = self._pending.pop(0)
            ready.append((before, count, sharding.copy_to_host(metrics)))
        if not ready:
            return
        done = sum(ready[-1][:2])
        if done - done % interval > ready[0][0]:
            self._measure(done - done % interval)
        for before, count, metrics in ready:
            for i in range(count):
                step, row = before + i + 1, {name: x[i] for name, x in metrics.items()}
                for name, value in row.items():
                    if not np.isfinite(value):
                        where = f"at step {step} (task {self._task + 1})"
                        raise Diverged(f"{name} is {value} {where}; {_MEND}")
                self._epochs.add(row)
                if step % interval == 0:
                    speed = {"images_per_second": self._speed}
                    self._recorder.log(step, self._task, **row, time=speed)

    def _measure(self, step):
        """Measure images a second up to a step that is logged.

        Steps that arrive together share one number.
        """
        now, (last_time, last_step) = time.monotonic(), self._last
        self._last = now, step
        rows = self._work.data.batch_size * self._work.batches_per_step(self._task)
        self._speed = (step - last_step) * rows / max(now - last_time, 1e-9)


class Epochs:
    """Mean losses of a task's epochs, and whether they still fall.

    An epoch is the best so far if no earlier epoch has a lower mean loss.
    With patience n the task is over n epochs after the best one (the rule of ICL, Ji et
    al., WSDM 2023, as released; the paper has n = 50).

    Args:
      patience: n; 0: the task never ends by patience.
      saved: result of `read` when the task was saved; {} for a new task.
    """

    def __init__(self, patience: int, saved: dict):
        start = {"sum": 0.0, "steps": 0, "passes": 0.0, "number": 0, "best": None}
        self._patience, self._progress = patience, start | saved

    def add(self, row: dict) -> None:
        """Add the metrics of a step: its loss, and its passes through the encoder."""
        self._progress["sum"] += float(row["loss"])
        self._progress["steps"] += 1
        self._progress["passes"] += float(row.get("passes", 0.0))

    def end_epoch(self, seconds: float) -> dict:
        """End an epoch; return its mean loss and cost.

        Args:
          seconds: training time of the task so far.

        Returns:
          The epoch: its number from 1, its mean loss, and the seconds and passes of the
          task up to its end.
        """
        epoch = self._progress
        epoch["number"] += 1
        row = {"number": epoch["number"], "loss": epoch["sum"] / epoch["steps"]}
        row |= {"seconds": seconds, "passes": epoch["passes"]}
        if epoch["best"] is None or row["loss"] <= epoch["best"]["loss"]:
            epoch["best"] = row
        epoch |= {"last": row, "sum": 0.0, "steps": 0}
        return dict(row)

    @property
    def number(self) -> int:
        """Count the epochs that have ended."""
        return self._progress["number"]

    def is_due(self, every: int) -> bool:
        """Tell whether the last epoch's number is a multiple of `every` (0: never)."""
        return bool(every) and self.number % every == 0

    @property
    def is_over(self) -> bool:
        """Tell whether the task ends here, by patience."""
        best = self._progress["best"]
        late = best is not None and self.number - best["number"] >= self._patience
        return self._patience > 0 and late

    def read(self) -> dict:
        """Return the progress so far, as JSON, to resume from."""
        return dict(self._progress)

    def summary(self) -> dict:
        """Return {"best": epoch, "last": epoch}, each as from `end_epoch`."""
        return {name: self._progress.get(name) for name in ("best", "last")}


@jax.jit
def _finite(leaves):
    return jnp.stack([jnp.isfinite(x).all() for x in leaves])


def check_state(state: Any, step: int) -> None:
    """Refuse to save or evaluate a state in which a number is not finite.

    A finite loss does not suffice: its update may be infinite. Nor do finite
    parameters: a moment of the optimiser or a statistic of batch norm may be infinite
    or nan.

    Raises:
      Diverged: a number is not finite; the message names its place.
    """
    numbers = {
        jax.tree_util.keystr(path, simple=True, separator="/"): leaf
        for path, leaf in jax.tree_util.tree_flatten_with_path(state)[0]
        if jax.dtypes.issubdtype(leaf.dtype, jnp.inexact)
    }
    finite = np.asarray(_finite([*numbers.values()])) if numbers else []
    for name, fine in zip(numbers, finite, strict=True):
        if not fine:
            raise Diverged(f"{name} is not finite after step {step}; {_MEND}")
