"""What the trials share: seeds of a config that resume, and intervals over seeds."""

import argparse
import json
import pathlib
import time
from collections.abc import Callable

import numpy as np
from scipy import stats

from jaxcl.config import build, files
from jaxcl.run import job, train


def parser(text: str) -> argparse.ArgumentParser:
    """Make a command line with the options that all trials have."""
    made = argparse.ArgumentParser(description=text.splitlines()[0])
    made.add_argument("--data", help="config.data.path")
    made.add_argument("--out", type=pathlib.Path, required=True)
    made.add_argument("--seeds", type=int, default=5)
    made.add_argument(
        "--set", nargs="+", default=[], metavar="PATH=VALUE", help="further options"
    )
    return made


def settings(options: argparse.Namespace) -> dict:
    """Describe a trial by its options, without paths."""
    return {k: v for k, v in vars(options).items() if k not in ("data", "out")}


def seeds_of(
    options: argparse.Namespace, config: str, changes: dict, name: str, read: Callable
) -> list[dict]:
    """Train the seeds of a config, unless done before.

    Args:
      options: of `parser`.
      config: "configs/NAME.py:ROW".
      changes: "scenario.per_class" -> value, without the leading "config."; SEED in a
        value stands for the seed.
      name: of the folder of these runs. A stopped run resumes there.
      read: (job, run directory) -> numbers by name, JSON.

    Returns:
      what `read` found of each seed, with the "minutes" that it took.
    """
    step, found = None, []
    words = [f"{path}={value}" for path, value in changes.items()]
    words += [f"data.path={options.data}", *options.set]
    for seed in range(options.seeds):
        place = options.out / name / f"seed_{seed}"
        done = place / "found.json"
        if not done.exists():
            began = time.monotonic()
            own = [f"--config.{word.replace('SEED', str(seed))}" for word in words]
            config_words = [f"--config={config}", *own, f"--config.seed={seed}"]
            work = build.build(files.read(config_words), place)
            step = step or job.compile_step(work)  # all seeds share it
            train.run(work, place, step=step)
            numbers = read(work, place)
            save(done, numbers | {"minutes": (time.monotonic() - began) / 60})
        found.append(json.loads(done.read_text()))
    return found


def rows(place: pathlib.Path) -> list[dict]:
    """Read metrics.jsonl."""
    return [json.loads(line) for line in open(place / "metrics.jsonl")]


def spread(values) -> dict:
    """Summarise one number per seed: mean, 95 % t interval, the values."""
    values, half = np.asarray(values, float), np.nan
    mean = values.mean()
    if len(values) > 1:
        error = values.std(ddof=1) / np.sqrt(len(values))
        half = stats.t.ppf(0.975, len(values) - 1) * error
    interval = {"mean": mean, "low": mean - half, "high": mean + half}
    return interval | {"values": values.tolist()}


def summary(found: list[dict]) -> dict:
    """Summarise each number over seeds."""
    return {
        name: spread(values)
        if isinstance(values[0], float | int)
        else values  # curves, one for each seed
        for name in found[0]
        for values in [[one[name] for one in found]]
    }


def save(path: pathlib.Path, results: dict) -> None:
    """Write JSON; a reader never sees half a file."""
    part = path.with_suffix(".part")
    part.write_text(json.dumps(results, indent=1) + "\n")
    part.replace(path)
