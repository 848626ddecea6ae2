"""The log of a run: rows in metrics.jsonl and in loggers, the progress bar.

`metrics.jsonl` holds one JSON object per line; loggers show the same numbers. Nan
and infinity are null there, other floats come back bit for bit. Whatever depends on the
clock is under "time" in a row: two runs are the same if all else in their rows is.
"""

import contextlib
import datetime
import errno
import io
import itertools
import json
import math
import os
import sys
import time
import zlib

from absl import logging
from etils import epath

from jaxcl.data import storage
from jaxcl.run import results
from jaxcl.run.loggers import tensorboard as tensorboard_lib

ROWS = "metrics.jsonl"


_TIMED = 3  # steps after which the time that is left is known,
_TIMED_SECONDS = 2.0  # and the seconds that they took at least
_SHORT, _LONG = 20, 3600  # seconds


def _about(seconds: float) -> str:
    """A time in words, no finer than the first steps know it."""
    if seconds < 90:
        return f"{10 * round(seconds / 10)} seconds"
    if seconds < 5400:
        return f"{seconds / 60:.0f} minutes"
    return f"{seconds / 3600:.0f} hours"


def _redraws() -> bool:
    """Whether a line on stderr can be drawn again: on a terminal, in a notebook."""
    shell = sys.modules.get("IPython")
    inside = shell and shell.get_ipython()
    notebook = inside and hasattr(inside, "kernel")
    return sys.stderr.isatty() or bool(notebook)


class RowsLost(ValueError):
    """metrics.jsonl is not what it was when the checkpoint was saved."""


def read_rows(workdir: epath.PathLike) -> list[dict]:
    """Rows of a run's metrics.jsonl; a last line that a crash cut off is left out.

    Raises:
      RowsLost: a line is no row; the message names the file and the line.
    """
    path = epath.Path(workdir) / ROWS
    data = path.read_bytes()
    rows = []
    for number, line in enumerate(data[: data.rfind(b"\n") + 1].splitlines(), 1):
        row = _row(line)
        if row is None:
            raise RowsLost(
                f"{path}: line {number} is damaged: it must be an object with the "
                "numbers step and task"
            )
        rows.append(row)
    return rows


def _row(line: bytes) -> dict | None:
    """The row that a line holds; None if it holds none."""
    try:
        row = json.loads(line)
    except ValueError:
        return None
    if not isinstance(row, dict):
        return None
    good = all(type(row.get(key)) is int for key in ("step", "task"))
    good = good and all(type(row.get(key, {})) is dict for key in ("time", "eval"))
    return row if good else None


class _Rows:
    """The file of rows, kept in memory for a bucket, where objects cannot grow."""

    def __init__(self, path, offset, checksum, lost):
        """Open the file and cut off what comes after `offset` bytes."""
        head = path.read_bytes()[:offset] if path.exists() else b""
        problem = _problem(head, offset, checksum)
        if problem and lost:
            head = _salvaged(path, head)
        elif problem:
            raise RowsLost(
                f"offset={offset}: {path} held whole rows of so many bytes when the "
                f"checkpoint was saved; now {problem}. The checkpoint is whole, and so "
                "are the results in it. Put the file back; or go on without the rows "
                "that are lost to curves and pages, with --lost_rows"
            )
        self._path, self._bucket = path, storage.in_bucket(path)
        self._file = io.BytesIO(head) if self._bucket else open(path, "ab")
        self._file.truncate(len(head))
        self._file.seek(0, io.SEEK_END)
        self.checksum = zlib.crc32(head)
        self.offset()

    def append(self, row):
        line = json.dumps(row, allow_nan=False).encode() + b"\n"
        with self._named():
            self._file.write(line)
            self._file.flush()  # visible at once to whoever follows the run
        self.checksum = zlib.crc32(line, self.checksum)

    def offset(self):
        """Bring all rows to the disk or the bucket; returns how many bytes they are."""
        with self._named():
            if self._bucket:
                self._path.write_bytes(self._file.getvalue())
            else:
                os.fsync(self._file.fileno())  # append() flushed
        return self._file.tell()

    @contextlib.contextmanager
    def _named(self):
        """The error of a full disk names no file by itself."""
        try:
            yield
        except OSError as error:
            reason = (error.strerror or str(error)) + storage.room(self._path, error)
            code = error.errno or errno.EIO
            raise OSError(code, reason, os.fspath(self._path)) from error

    def close(self):
        with self._file:
            self.offset()


def _problem(head: bytes, offset: int, checksum: int | None) -> str:
    """What is wrong with the first `offset` bytes of the file; "" if nothing is."""
    if len(head) < offset:
        return f"it has {len(head)}"
    if offset and not head.endswith(b"\n"):
        return "a row lies across that mark"
    if checksum is not None and zlib.crc32(head) != checksum:
        lines = enumerate(head.splitlines(), 1)
        bad = [number for number, line in lines if _row(line) is None]
        return "they are others" + (f", line {bad[0]} is no row" if bad else "")
    return ""


def _salvaged(path, head: bytes) -> bytes:
    """The rows that can still be read; a copy of the file as it is stays aside.

    A row whose bytes changed and are a row still cannot be told from a good one.
    """
    if path.exists():
        for copy in itertools.count():
            aside = path.parent / f"damaged-{copy}-{path.name}"
            if not aside.exists():
                aside.write_bytes(path.read_bytes())
                break
    lines = head[: head.rfind(b"\n") + 1].splitlines(keepends=True)
    kept = [line for line in lines if _row(line) is not None]
    with storage.replacing(path) as file:
        file.write(b"".join(kept))
    logging.warning("%s: went on with the %d rows that can be read", path, len(kept))
    return b"".join(kept)


class Recorder:
    """Writes what one run logs.

    Rows go to `workdir/metrics.jsonl`. A checkpoint keeps the `offset()` of the file. A
    resumed run passes it on: rows logged after the checkpoint are cut off, since they
    will be logged again. In a bucket only `offset()` and `close()` write the file.

    Args:
      workdir: directory of the run, made if missing.
      num_tasks: T, for the progress line.
      offset: bytes of metrics.jsonl to keep, 0 to start afresh.
      checksum: `checksum` when these bytes were written; None: not known.
      lost: go on with the rows that can be read, where some of these bytes are not
        there or others.
      write: False on all processes but the first: every method does nothing.
      tensorboard: also write events to `workdir/tensorboard`.
      loggers: `make` of other loggers, see `jaxcl.run.loggers`.
      progress: True for a bar on stderr, False for none, "auto" for a bar if
        stderr is a terminal or a notebook's cell, else a line every `every` seconds.
      every: seconds between two progress lines.
      slow: what would help, said with the time that is left if it is over an hour.

    Raises:
      ValueError: `progress` or `every` is not allowed, or metrics.jsonl does
        not hold `offset` bytes of whole rows.
    """

    def __init__(
        self,
        workdir,
        *,
        num_tasks=1,
        offset=0,
        checksum=None,
        lost=False,
        write=True,
        tensorboard=True,
        loggers=(),
        progress="auto",
        every=10.0,
        slow="",
    ):
        if progress not in ("auto", True, False):
            raise ValueError(f"progress={progress!r}: allowed are 'auto', True, False")
        if not every >= 0:
            raise ValueError(f"every={every}: must be >= 0 seconds")
        self._write, self._every, self._num_tasks = write, every, num_tasks
        self._rows = self._bar = self._started = None
        self._loggers = []
        self._shown = ""  # last logged loss and speed
        self._slow, self._told = slow, False
        if not write:
            return
        directory = epath.Path(workdir)
        directory.mkdir(parents=True, exist_ok=True)
        self._rows = _Rows(directory / ROWS, offset, checksum, lost)
        makes = [tensorboard_lib.make] if tensorboard else []
        if makes := [*makes, *loggers]:
            self._open(makes, directory)
        bar = _redraws() if progress == "auto" else progress
        self._mode = "bar" if bar else ("line" if progress == "auto" else "none")

    def _open(self, makes, directory):
        """Open the loggers; where one fails, close what is open."""
        try:
            rows = read_rows(directory)
            for make in makes:
                self._loggers.append(make(directory, rows))
        except BaseException:
            self.close()
            raise

    def log(self, step: int, task: int, **values) -> None:
        """Append one row `{"step", "task", **values}`.

        Training rows: `log(step, task, loss=..., lr=..., time={...})`; ends of epochs:
        `log(step, task, epoch={"number", "loss", "passes"}, time={...})`; evaluation
        rows: `log(step, task, eval={...})`. The recorder adds the time of day as
        `time["unix"]`; `loss` and `time["images_per_second"]` are shown in the
        progress bar.

        Args:
          step: optimiser steps done since the run began.
          task: number of the present task, from 0.
          values: anything `results.plain` takes.
        """
        if not self._write:
            return
        clock = {"unix": time.time(), **values.pop("time", {})}
        row = {"step": int(step), "task": int(task), **values, "time": clock}
        row = results.plain(row)
        self._rows.append(row)
        for logger in self._loggers:
            logger.write(row)
        if "loss" in row:
            loss, speed = row["loss"], row["time"].get("images_per_second")
            self._shown = f"  loss {math.nan if loss is None else loss:.4g}"
            self._shown += "" if speed is None else f"  {speed:.0f} images/s"

    def offset(self) -> int:
        """Bytes of metrics.jsonl that are safely on disk: all logged so far."""
        return self._rows.offset() if self._write else 0

    def checksum(self) -> int:
        """Checksum of all bytes logged so far."""
        return self._rows.checksum if self._write else 0

    def advance(self, step: int, task: int, total_steps: int) -> None:
        """Move the progress bar; call it after every step.

        Args:
          step: optimiser steps done since the run began.
          task: number of the present task, from 0.
          total_steps: steps of the whole run, all tasks; may change.
        """
        if not self._write or self._mode == "none":
            return
        now = time.monotonic()
        if self._started is None:
            # From the first step on, so that compiling does not count.
            self._started, self._printed = (step, now), now
        text = f"{step}/{total_steps} steps  task {task + 1}/{self._num_tasks}"
        text += self._shown
        done = step - self._started[0]
        if done > 0:
            left = max(total_steps - step, 0) * (now - self._started[1]) / done
            text += f"  {datetime.timedelta(seconds=round(left))} left"
            timed = done >= _TIMED and now - self._started[1] >= _TIMED_SECONDS
            if timed and not self._told:
                self._tell(left)
        if self._mode == "bar":
            self._draw(step, total_steps, text)
        elif now - self._printed >= self._every or step >= total_steps:
            print(text, file=sys.stderr, flush=True)
            self._printed = now

    def _tell(self, left):
        """Say once how long training will take, if that is worth a line."""
        self._told = True
        if left >= _SHORT:
            help = f": {self._slow}" if left > _LONG and self._slow else ""
            self._note(f"about {_about(left)} of training left at this speed{help}")

    def _draw(self, step, total_steps, text):
        if self._bar is None:
            import tqdm  # only runs with a bar pay for it

            layout = "{percentage:3.0f}%|{bar:20}| {desc}"
            self._bar = tqdm.tqdm(total=total_steps, initial=step, bar_format=layout)
        self._bar.total = total_steps  # may have changed
        self._bar.set_description_str(text, refresh=False)
        self._bar.update(step - self._bar.n)

    def phase(self, text: str) -> None:
        """Say what is done while no step is, which may take long.

        A bar shows it until the next step; where there is none yet, it is a line.
        """
        if not self._write or self._mode == "none":
            return
        if self._bar is None:
            self._note(text)
        else:
            self._bar.set_description_str(text)

    def _note(self, text: str) -> None:
        """Print to stderr without tearing the progress bar."""
        write = print if self._bar is None else self._bar.write
        write(text, file=sys.stderr)
        sys.stderr.flush()

    def say(self, text: str) -> None:
        """Print to stdout without tearing the progress bar."""
        if self._write:
            write = print if self._bar is None else self._bar.write
            write(text, file=sys.stdout)
            sys.stdout.flush()

    def close(self) -> None:
        """Save all that was logged; a second call does nothing.

        Where a part cannot be closed, the others are.
        """
        write, self._write = self._write, False
        with contextlib.ExitStack() as stack:  # begins with the last
            for part in (self._bar, *self._loggers, self._rows):
                if write and part is not None:
                    stack.callback(part.close)
