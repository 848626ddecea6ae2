"""Run the arms of a trial, one run after another; what the scripts beside it share.

A trial is resumable: a finished run is read again, a stopped one goes on. All numbers
go to one JSON file after every run: arm -> seed -> measure -> value.
"""

import argparse
import contextlib
import functools
import json
import os
import pathlib
import re
import time
from collections.abc import Callable, Iterable, Sequence

import jax
import numpy as np
from scipy import stats

from jaxcl.config import build, command, files, recipe
from jaxcl.run import finish, job, result_file

QUIET = {"plots": False, "tensorboard": False, "progress": False, "plasticity": False}
Numbers = dict[str, dict[str, dict[str, float]]]


def parser(
    text: str, name: str, seeds: Sequence[int], data: str | None = None
) -> argparse.ArgumentParser:
    """Make the options that all trials have.

    Args:
      text: a script's docstring.
      name: names the default folder of the runs.
      seeds: first seed, and the one after the last.
      data: what --data, config.data.path, leads to; None for a trial that has its own.
    """
    made = argparse.ArgumentParser(description=text.partition("\n")[0])
    add = made.add_argument
    add("--seeds", type=int, nargs=2, default=seeds, metavar=("FIRST", "END"))
    if data:
        add("--data", required=True, help=data)
    add("--set", nargs="+", default=[], metavar="PATH=VALUE", help="further options")
    add("--out", default=f"runs/trials/{name}", help="run directories and numbers.json")
    add("--table", action="store_true", help="print the table of what is there")
    return made


def read_config(words: str, changes: dict, seed: int, further: Sequence[str] = ()):
    """Read a config file, FILE or FILE:WORDS, and change it for one run.

    `further` has words of the command line without --config., such as "epochs=3".
    """
    config = files.read_config(
        [f"--config={words}", *(f"--config.{w}" for w in further)]
    )
    recipe.change(config, QUIET | changes | {"seed": seed})
    return config


def train(config, folder: pathlib.Path, stop: Callable[[], bool], step=None):
    """Train or resume a run; return its compiled step. A finished run stays."""
    if result_file.complete(folder):
        return step
    folder.mkdir(parents=True, exist_ok=True)
    began, used = time.monotonic(), time.process_time()
    with open(folder / "log.txt", "a") as log, contextlib.redirect_stdout(log):
        made = build.build(config, folder)
        assert isinstance(made, job.Job)
        step = step or job.compile_step(made)
        finish.run_job(made, folder, stop=stop, step=step)
    minutes = [(time.monotonic() - began) / 60, (time.process_time() - used) / 60]
    (folder / "minutes.json").write_text(json.dumps(minutes))
    return step


def work_through(
    out: str,
    runs: Iterable[tuple[str, int, Callable[[], dict]]],
) -> Numbers:
    """Make the runs that the file of numbers lacks, in order.

    Args:
      out: folder of numbers.json.
      runs: (arm, seed, () -> measures), the most wanted first.
    """
    path = pathlib.Path(out) / "numbers.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    found: Numbers = read(out)
    for arm, seed, make in runs:
        of_arm = found.setdefault(arm, {})
        if str(seed) in of_arm:
            continue
        of_arm[str(seed)] = make()
        # Whole or not at all: a killed process leaves the old file.
        part = path.with_suffix(".part")
        part.write_text(json.dumps(found, indent=1))
        os.replace(part, path)
        print(arm, seed, json.dumps(of_arm[str(seed)]), flush=True)
    return found


def read(out: str) -> Numbers:
    """Read the numbers of a trial; {} before the first run."""
    path = pathlib.Path(out) / "numbers.json"
    return json.loads(path.read_text()) if path.exists() else {}


def interval(values: Sequence[float]) -> tuple[float, float, float]:
    """Return mean, lower and upper end of Student's 95 % interval."""
    numbers = np.asarray(values, float)
    mean = float(numbers.mean())
    if len(numbers) < 2:
        return mean, float("nan"), float("nan")
    error = numbers.std(ddof=1) / len(numbers) ** 0.5
    half = float(stats.t.ppf(0.975, len(numbers) - 1) * error)
    return mean, mean - half, mean + half


def compare(found: Numbers, arm: str, base: str, measure: str) -> str:
    """Print arm minus base over the seeds that both have, with its interval."""
    both = [s for s in found.get(arm, {}) if s in found.get(base, {})]
    gaps = [found[arm][s][measure] - found[base][s][measure] for s in both]
    if not gaps:
        return "-"
    mean, low, high = interval(gaps)
    return f"{mean:+.2f} ({low:+.2f} to {high:+.2f}), {len(gaps)} seeds"


def show(found: Numbers, measures: Sequence[str]) -> None:
    """Print a table of Markdown: mean ± standard error of each arm."""
    print("| arm | seeds |", " | ".join(measures), "|")
    print("|---" * (2 + len(measures)) + "|")
    for arm, runs in found.items():
        cells = []
        for measure in measures:
            values = [run[measure] for run in runs.values() if measure in run]
            error = np.std(values, ddof=1) / len(values) ** 0.5 if values[1:] else 0
            cells.append(f"{np.mean(values):.2f} ± {error:.2f}" if values else "-")
        print(f"| {arm} | {len(runs)} |", " | ".join(cells), "|")


def train_rows(options, plan: Callable, measure: Callable, tell: Callable) -> int:
    """Train and measure the runs of a plan, or print the table of what is there.

    Args:
      options: of `parser`.
      plan: seed -> (arm, config words, changes of each arm), the most wanted first.
      measure: run directory -> measures.
      tell: numbers -> prints the table.
    """

    def runs(stop):
        steps: dict = {}

        def run(arm, seed, words, changes):
            data = {"data.path": options.data} if "data" in options else {}
            config = read_config(words, data | changes, seed, options.set)
            folder = pathlib.Path(options.out) / re.sub(r"\W+", "_", arm)
            folder /= f"seed_{seed}"
            steps[arm] = train(config, folder, stop, steps.get(arm))
            return measure(folder)

        for seed in range(*options.seeds):
            for arm, words, changes in plan(seed):
                yield arm, seed, functools.partial(run, arm, seed, words, changes)

    return main(options, lambda stop: work_through(options.out, runs(stop)), tell)


def main(options: argparse.Namespace, work: Callable, tell: Callable) -> int:
    """Run a trial, or print its table.

    Args:
      options: of `parser`.
      work: stop -> makes the runs.
      tell: numbers -> prints the table.
    """
    if options.table:
        tell(read(options.out))
        return 0

    def run(options, stop):
        jax.config.update("jax_compilation_cache_dir", f"{options.out}/programs")
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.1)
        work(stop)
        tell(read(options.out))

    return command.run_until_signal(lambda: options, run)
