"""Metrics on their way from the device: fetched late, checked, logged; what they say.

Epochs of which the mean loss no longer falls end a task; the cost of a task is counted.
"""

import time

import jax
import jax.numpy as jnp
import numpy as np

from jaxcl import sharding
from jaxcl.run import cost, job, record


class Diverged(Exception):
    """A metric or a parameter is not finite; nothing was saved since."""


class Meter:
    """Rows of the steps of a task, one every `log_every`.

    A row is fetched when later steps are under way, so that the device never
    waits for the host; what is saved or evaluated is checked first.
    """

    def __init__(
        self, work: job.Job, recorder: record.Recorder, task: int, step: int, epochs
    ):
        """Args: the job, where rows go, the task's number, the run's step, `Epochs`."""
        self._work, self._recorder, self._task = work, recorder, task
        self._epochs = epochs
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
                self._epochs.add(row)
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
        rows = self._work.rows * self._work.parts(self._task)
        speed = (step - at) * rows / max(now - then, 1e-9)
        self._recorder.log(step, self._task, **row, time={"images_per_second": speed})


class Epochs:
    """The epochs of a task: their mean losses, and whether these still fall.

    An epoch is the best so far if its mean loss is at most that of the best before it.
    With patience n the task is over n epochs after the best one (the rule of ICL, Ji et
    al., WSDM 2023, as released; the paper has n = 50).
    """

    def __init__(self, patience: int, found: dict, task: int = 0):
        """Args: n, 0 for never; what `read` gave, {} for a new task; its number."""
        self._task = task
        start = {"sum": 0.0, "steps": 0, "passes": 0.0, "number": 0, "best": None}
        self._patience, self._found = patience, start | found

    def add(self, row: dict) -> None:
        """Take the metrics of a step: its loss, and the passes that it took."""
        self._found["sum"] += float(row["loss"])
        self._found["steps"] += 1
        self._found["passes"] += float(row.get("passes", 0.0))

    def end(self, seconds: float, recorder=None, step: int = 0) -> None:
        """End an epoch, with the seconds that the task has trained, and log it.

        What is kept of it is its number from 1, its mean loss, and the seconds and
        passes of the task.
        """
        now = self._found
        now["number"] += 1
        row = {"number": now["number"], "loss": now["sum"] / now["steps"]}
        row |= {"seconds": seconds, "passes": now["passes"]}
        if now["best"] is None or row["loss"] <= now["best"]["loss"]:
            now["best"] = row
        now |= {"last": row, "sum": 0.0, "steps": 0}
        if recorder is not None:
            shown = {name: value for name, value in row.items() if name != "seconds"}
            recorder.log(step, self._task, epoch=shown, time={"train": seconds})

    @property
    def number(self) -> int:
        """How many have ended."""
        return self._found["number"]

    def due(self, every: int) -> bool:
        """Whether what is done at the end of each so many epochs is; 0: never."""
        return bool(every) and self.number % every == 0 and not self.over

    @property
    def over(self) -> bool:
        """Whether the patience is at its end."""
        best = self._found["best"]
        late = best is not None and self.number - best["number"] >= self._patience
        return self._patience > 0 and late

    def read(self) -> dict:
        """All that it knows, as JSON."""
        return dict(self._found)

    def summary(self) -> dict:
        """{"best": epoch, "last": epoch}, as `end` keeps them."""
        return {name: self._found.get(name) for name in ("best", "last")}


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
    parts = work.parts(task)
    flops = cost.flops(work.method.step, *job.placed(work, parts), task)
    machine = sharding.describe(work.mesh)
    return cost.Spent(steps, steps * work.rows * parts, flops, clock.read(), machine)
