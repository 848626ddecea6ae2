"""Show a run's progress: a bar in a terminal or notebook, else a line now and then."""

import contextlib
import datetime
import math
import sys
import time
from collections.abc import Iterator
from typing import Any

from jaxcl.errors import Refused


class Progress:
    """The progress of a run, as a bar or as lines.

    Args:
      num_tasks: number of tasks of the run.
      mode: True for a bar on stderr, False for none, "auto" for a bar if stderr is a
        terminal or a notebook's cell, else a line every `every` seconds.
      every: seconds between two lines.

    Raises:
      Refused: `mode` or `every` is not allowed.
    """

    def __init__(self, *, num_tasks=1, mode="auto", every=10.0):
        if mode not in ("auto", True, False):
            raise Refused("progress", mode, "allowed are 'auto', True, False")
        if not every >= 0:
            raise Refused("every", every, "must be >= 0 seconds")
        self._num_tasks, self._every, self._silent = num_tasks, every, mode is False
        self._wants_bar = _can_redraw() if mode == "auto" else mode
        self._bar = self._start = None
        self._measured = ""  # last logged loss, and the speed

    def show(self, row: dict) -> None:
        """Show the loss and the speed of a row of metrics.jsonl from now on."""
        if "loss" in row:
            loss, speed = row["loss"], row["time"].get("images_per_second")
            self._measured = f"  loss {math.nan if loss is None else loss:.4g}"
            self._measured += "" if speed is None else f"  {speed:.0f} images/s"

    def advance(self, step: int, task: int, total_steps: int) -> None:
        """Advance the progress; call it after every step.

        Args:
          step: batches trained on since the run began.
          task: number of the present task, from 0.
          total_steps: steps of all tasks of the run; may change.
        """
        if self._silent:
            return
        now = time.monotonic()
        if self._start is None:  # after the first step: compiling does not count
            self._start, self._printed = (step, now), now
        text = f"{step}/{total_steps} steps  task {task + 1}/{self._num_tasks}"
        text += self._measured
        if done := step - self._start[0]:
            left = max(total_steps - step, 0) * (now - self._start[1]) / done
            text += f"  {datetime.timedelta(seconds=round(left))} left"
        if self._wants_bar:
            self._draw_bar(step, total_steps, text)
        elif now - self._printed >= self._every or step >= total_steps:
            print(text, file=sys.stderr, flush=True)
            self._printed = now

    def _draw_bar(self, step, total_steps, text):
        if self._bar is None:
            import tqdm  # only runs with a bar pay for it

            layout = "{percentage:3.0f}%|{bar:20}| {desc}"
            self._bar = tqdm.tqdm(total=total_steps, initial=step, bar_format=layout)
        self._bar.total = total_steps  # may have changed
        self._bar.set_description_str(text, refresh=False)
        self._bar.update(step - self._bar.n)

    def show_phase(self, text: str) -> None:
        """Show the work between steps; a bar shows it until the next step."""
        if self._bar is not None:
            self._bar.set_description_str(text)
        elif not self._silent:
            print(text, file=sys.stderr, flush=True)

    def print_text(self, text: str) -> None:
        """Print to stdout without breaking the bar, even if there is none."""
        if self._bar is None:
            print(text, flush=True)
            return
        with self._bar.external_write_mode(file=sys.stdout):
            print(text, flush=True)  # before the bar is drawn again

    def close(self) -> None:
        """Close the bar, and leave it on the screen."""
        if self._bar is not None:
            self._bar.close()


@contextlib.contextmanager
def count_images(total: int, done: int = 0, every: float = 10.0) -> Iterator[Any]:
    """Show how many images are done: a bar where a line can be redrawn, else lines.

    Args:
      total: number of images.
      done: number of images that are done already.
      every: seconds between two lines.

    Yields:
      An object with `update(count)`.
    """
    import tqdm

    if _can_redraw():
        with tqdm.tqdm(total=total, initial=done, unit=" images") as bar:
            yield bar
        return
    yield _ImageLines(total, done, every)


class _ImageLines:
    """Prints a line now and then, and one at the end."""

    def __init__(self, total, done, every):
        self._total, self._done, self._every = total, done, every
        self._printed = time.monotonic()

    def update(self, count: int) -> None:
        """Count images that are done."""
        self._done += count
        now = time.monotonic()
        if now - self._printed >= self._every or self._done == self._total:
            print(f"{self._done}/{self._total} images", file=sys.stderr, flush=True)
            self._printed = now


def _can_redraw() -> bool:
    """Tell whether stderr is a terminal or a notebook, which can redraw a line."""
    shell = sys.modules.get("IPython")
    inside = shell and shell.get_ipython()
    is_notebook = inside and hasattr(inside, "kernel")
    return sys.stderr.isatty() or bool(is_notebook)
