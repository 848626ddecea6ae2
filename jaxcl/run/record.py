"""Record a run: rows go to metrics.jsonl, to the loggers and to the progress line.

Values that depend on the clock are under "time" in a row: two runs are equal if all
other values are.
"""

import contextlib
import time

from etils import epath

from jaxcl.run import log_file, progress_bar, result_file


class Recorder:
    """The open records of a run. Close them at its end.

    Args:
      workdir: the run directory; created if missing.
      num_tasks: number of tasks of the run.
      rows: bytes of rows to keep, returned by `save` at the checkpoint to resume from.
      write: whether anything is written: True in the first process alone.
      loggers: functions (directory, rows so far) -> logger, see `jaxcl.run.loggers`.
      progress, every: arguments `mode` and `every` of `progress.Progress`.

    Raises:
      Refused: `progress` or `every` is not allowed.
    """

    def __init__(
        self,
        workdir,
        *,
        num_tasks=1,
        rows=0,
        write=True,
        loggers=(),
        progress="auto",
        every=10.0,
    ):
        self._write, self._loggers = write, []
        self._progress = progress_bar.Progress(
            num_tasks=num_tasks, mode=progress, every=every
        )
        if not write:
            return
        directory = epath.Path(workdir)
        directory.mkdir(parents=True, exist_ok=True)
        path = directory / log_file.FILE
        self._rows = log_file.RowFile(path, rows)
        try:
            before = log_file.read_rows(directory) if loggers else []
            for make in loggers:
                self._loggers.append(make(directory, before))
        except BaseException:
            self.close()
            raise

    def log(self, step: int, task: int, **values) -> None:
        """Append one row `{"step", "task", **values}`.

        Training rows: `log(step, task, loss=..., lr=..., time={...})`; ends of epochs:
        `log(step, task, epoch={"number", "loss", "passes"}, time={...})`; evaluation
        rows: `log(step, task, eval={...})`. The time of day is added as `time["unix"]`.

        Args:
          step: batches trained on since the run began.
          task: number of the present task, from 0.
          values: values that `result_file.jsonable` takes.
        """
        if not self._write:
            return
        clock = {"unix": time.time(), **values.pop("time", {})}
        row = {"step": int(step), "task": int(task), **values, "time": clock}
        row = result_file.jsonable(row)
        self._rows.append(row)
        for logger in self._loggers:
            logger.write(row)
        self._progress.show(row)

    def save(self) -> int:
        """Write all rows to the disk; return their bytes, to resume from."""
        return self._rows.save() if self._write else 0

    def advance(self, step: int, task: int, total_steps: int) -> None:
        """Advance the progress, see `progress.Progress.advance`."""
        if self._write:
            self._progress.advance(step, task, total_steps)

    def show_phase(self, text: str) -> None:
        """Show the work between steps, see `progress.Progress.show_phase`."""
        if self._write:
            self._progress.show_phase(text)

    def print_text(self, text: str) -> None:
        """Print to stdout without breaking the progress bar."""
        if self._write:
            self._progress.print_text(text)

    def close(self) -> None:
        """Save all logged rows; a second call does nothing.

        If a part cannot be closed, the others still are.
        """
        write, self._write = self._write, False
        with contextlib.ExitStack() as stack:  # begins with the last
            for part in (self._progress, *self._loggers, self._rows) if write else ():
                stack.callback(part.close)
