"""Show how far a run is: a bar on a terminal or in a notebook, else a line at times."""

import collections
import datetime
import math
import statistics
import sys
import time

_TIMED_STEPS, _TIMED_SECONDS = 3, 2.0  # after which the time that is left is known
_LONG, _DAY = 3600, 86400  # seconds that are left: worth advice, worth a warning
_SMOOTHED = 9  # logged speeds, of which the median is shown


class Progress:
    """The bar or the line.

    Args:
      num_tasks: of the run.
      mode: True for a bar on stderr, False for none, "auto" for a bar if stderr is a
        terminal or a notebook's cell, else a line every `every` seconds.
      every: seconds between two lines.
      slow: advice, said with the time that is left if it is over an hour. Over a day
        there is other advice, too.

    Raises:
      ValueError: `mode` or `every` is not allowed.
    """

    def __init__(self, *, num_tasks=1, mode="auto", every=10.0, slow=""):
        if mode not in ("auto", True, False):
            raise ValueError(f"progress={mode!r}: allowed are 'auto', True, False")
        if not every >= 0:
            raise ValueError(f"every={every}: must be >= 0 seconds")
        self._num_tasks, self._every, self._slow = num_tasks, every, slow
        self._silent = mode is False
        self._wants_bar = _can_redraw() if mode == "auto" else mode
        self._bar = self._start = None
        self._measured = ""  # last logged loss, and the speed
        self._speeds: collections.deque[float] = collections.deque(maxlen=_SMOOTHED)
        self._said_time = False
        self._paused_at: float | None = None
        self._pauses: list[float] = []  # seconds of each task's evaluation so far
        self._first_pause = 0.0  # of the untrained network

    def show(self, row: dict) -> None:
        """Show the loss of a row of metrics.jsonl, and the speed, from now on.

        The speed is the median of the last rows: single ones hold a compilation, or
        steps that were only queued.
        """
        if "loss" in row:
            loss, speed = row["loss"], row["time"].get("images_per_second")
            self._measured = f"  loss {math.nan if loss is None else loss:.4g}"
            self._speeds.extend([] if speed is None else [speed])
            if self._speeds:
                self._measured += f"  {statistics.median(self._speeds):.0f} images/s"

    def advance(self, step: int, task: int, total_steps: int) -> None:
        """Move on; call it after every step.

        Args:
          step: optimiser steps done since the run began.
          task: number of the present task, from 0.
          total_steps: steps of the whole run, all tasks; may change.
        """
        if self._silent:
            return
        now = time.monotonic()
        if self._start is None:  # after the first step: compiling does not count
            self._start, self._printed = (step, now), now
        elif self._paused_at is not None:
            self._pauses.append(now - self._paused_at)
        self._paused_at = None
        text = f"{step}/{total_steps} steps  task {task + 1}/{self._num_tasks}"
        text += self._measured
        done, seconds = step - self._start[0], now - self._start[1]
        if done > 0:
            left = max(total_steps - step, 0) * (seconds - sum(self._pauses)) / done
            # Each task that is left ends in an evaluation.
            pause = statistics.mean(self._pauses or [self._first_pause])
            left += pause * (self._num_tasks - task)
            text += f"  {datetime.timedelta(seconds=round(left))} left"
            if done >= _TIMED_STEPS and seconds >= _TIMED_SECONDS:
                self._say_time_once(left, total_steps - step)
        if self._wants_bar:
            self._draw(step, total_steps, text)
        elif now - self._printed >= self._every or step >= total_steps:
            print(text, file=sys.stderr, flush=True)
            self._printed = now

    def _say_time_once(self, left, steps):
        """Say how long training takes where that is long, and what would help."""
        advice = [self._slow] if self._slow else []
        if left > _DAY:
            advice += [
                "fewer config.epochs or a pretrained encoder (config.start=FOLDER) help"
            ]
        if left > _LONG and not self._said_time:
            text = f"about {_describe(left)} left for {steps:,} steps at this speed"
            self._print("; ".join([text, *advice]), sys.stderr)
        self._said_time = True

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

        A bar shows the text until the next step. Before the first step it is a line.
        """
        now = time.monotonic()
        if self._start is None and self._paused_at is not None:
            self._first_pause, self._paused_at = now - self._paused_at, now
        self._paused_at = self._paused_at or now
        if self._silent:
            return
        if self._bar is None:
            self._print(text, sys.stderr)
        else:
            self._bar.set_description_str(text)

    def say(self, text: str) -> None:
        """Print to stdout, even if there is no progress to be seen."""
        self._print(text, sys.stdout)

    def _print(self, text, file):
        """Print without tearing the bar."""
        write = print if self._bar is None else self._bar.write
        write(text, file=file)
        file.flush()

    def close(self) -> None:
        """Leave the bar as it is."""
        if self._bar is not None:
            self._bar.close()


def _can_redraw() -> bool:
    """Tell whether stderr is a terminal or a notebook, which can redraw a line."""
    shell = sys.modules.get("IPython")
    inside = shell and shell.get_ipython()
    is_notebook = inside and hasattr(inside, "kernel")
    return sys.stderr.isatty() or bool(is_notebook)


def _describe(seconds: float) -> str:
    """Write a time in words, no finer than the first steps know it."""
    if seconds < 5400:
        return f"{seconds / 60:.0f} minutes"
    return f"{seconds / 3600:.0f} hours"
