"""Check an installation: versions, devices, caches, and a run of ten steps."""

import argparse
import importlib.metadata
import os
import pathlib
import platform
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator
from typing import Any

import jax

import jaxcl
from jaxcl.config import build, files, recipe
from jaxcl.data.images import decode
from jaxcl.run import compile_cache, cost, job, log_file, terminal, train

_PACKAGES = ("jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "numpy", "scipy")
STEPS = 10
_BATCH = 16
_LEAST_FREE = 2**30  # bytes of the current folder's disk


def list_versions() -> list[str]:
    """List the versions and settings that a report of a bug needs, a line each."""
    lines = [f"Python {platform.python_version()}, {platform.platform()}"]
    lines += [f"{name} {importlib.metadata.version(name)}" for name in _PACKAGES]
    flags = {x: y for x, y in os.environ.items() if x.startswith(("JAX_", "XLA_"))}
    return [*lines, *(f"{name}={value}" for name, value in sorted(flags.items()))]


def describe_devices() -> str:
    """Describe the devices that JAX uses, and the memory of one."""
    devices = jax.devices()
    stats = devices[0].memory_stats() or {}
    memory = stats.get("bytes_limit")
    size = f", {cost.format_count(memory)}B each" if memory else ""
    return f"{len(devices)} x {devices[0].device_kind} ({devices[0].platform}){size}"


def describe_cache() -> str:
    """Describe the folder of compiled programs: files, bytes; or why there is none."""
    folder = compile_cache.use_cache("auto")
    if folder is None:
        return "none: each run compiles again"
    sizes = [x.stat().st_size for x in pathlib.Path(folder).iterdir() if x.is_file()]
    return f"{folder}, {len(sizes)} files, {cost.format_count(sum(sizes))}B"


def time_steps(folder: str | os.PathLike) -> str:
    """Train the quick start for `STEPS` steps and evaluate it.

    Args:
      folder: new run directory.

    Returns:
      The seconds that compiling, a step and the evaluation took.

    Raises:
      ArithmeticError: the loss or the accuracy is not finite.
    """
    config = files.read_config(["--config=quickstart"])
    changes: dict[str, Any] = {
        "epochs": 1,
        "batch_size": _BATCH,
        "scenario.num_tasks": 1,
    }
    changes |= {"data.train": STEPS * _BATCH // 4, "data.test": 40, "progress": False}
    changes |= {"scenario.name": "joint", "log_every": 1, "evaluate_untrained": False}
    recipe.change(config, changes | {"evaluators": {"knn": {"k": 5}}})
    work = build.build(config, folder)
    assert isinstance(work, job.Job)  # of one seed
    quiet = work.logging._replace(quiet=True, loggers=())
    results = train.run_tasks(work._replace(logging=quiet), folder)
    losses = [row["loss"] for row in log_file.read_rows(folder) if "loss" in row]
    accuracy = results["matrices"]["knn/class_incremental"][0][0]
    if len(losses) != STEPS or None in [*losses, accuracy]:
        raise ArithmeticError(f"losses {losses}, accuracy {accuracy}: must be finite")
    spent = results["cost"]["total"]
    return (
        f"{spent['compile_seconds']:.1f} s compiling, {spent['train_seconds']:.1f} s "
        f"training, {spent['evaluation_seconds']:.1f} s evaluation"
    )


def examine() -> Iterator[tuple[str, str, str]]:
    """Check each part of the installation: yield (part, finding, problem or "")."""
    yield "jaxcl", f"{jaxcl.__version__}, {pathlib.Path(jaxcl.__file__).parent}", ""
    for line in list_versions():
        yield "", line, ""
    yield "devices", describe_devices(), ""
    yield "programs", describe_cache(), ""
    yield "JPEG decoder", decode.choose_decoder("auto"), ""
    free = shutil.disk_usage(".").free
    low = "" if free >= _LEAST_FREE else "less than 1 GB: checkpoints may not fit"
    yield "free disk", f"{cost.format_count(free)}B in {os.getcwd()}", low
    start = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        try:
            finding, problem = time_steps(os.path.join(folder, "run")), ""
        except Exception as error:
            finding, problem = "failed", f"{type(error).__name__}: {error}"
    yield f"{STEPS} steps", f"{finding} ({time.monotonic() - start:.0f} s)", problem


def add_options(parser) -> None:
    """Add the options of `jaxcl doctor`: none."""


def main(options: argparse.Namespace) -> int:
    """Print the findings; return 1 if a part has a problem."""
    problems = []
    for part, finding, problem in examine():
        print(f"{part:14}{finding}", flush=True)
        if problem:
            problems.append(f"{part}: {problem}")
    for problem in problems:
        print(f"jaxcl: {terminal.style_text(problem, 'bad')}", file=sys.stderr)
    if not problems:
        print(terminal.style_text("No problem found.", "good"))
    return int(bool(problems))
