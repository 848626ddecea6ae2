"""A cache of FT_i, the accuracy on task i of a model trained on task i alone.

Runs of several strategies with the same base, seed and data have the same FT_i. The
cache has a file for each task, named by the sha256 of all that FT_i depends on, so that
only the first of these runs trains for it. Datasets are told apart by their options and
by `data.identity`.
"""

import hashlib
import importlib.metadata
import json
from collections.abc import Callable
from typing import NamedTuple

import jax
from etils import epath

from jaxcl import sharding
from jaxcl.data import identity, storage, stream


class SingleTaskRuns(NamedTuple):
    """How to make the runs on single tasks, and where to cache their accuracies."""

    make: Callable  # the run's Job -> that of the method which trains one task alone
    facts: dict  # all that FT_i depends on except the task's number, as JSON
    cache: str | None  # directory; None: nothing is cached


def version() -> str:
    """Return the library's version, "unknown" where it is not installed."""
    try:
        return importlib.metadata.version("jaxcl")
    except importlib.metadata.PackageNotFoundError:
        return "unknown"


def fingerprint(dataset: stream.Dataset) -> dict:
    """Return the name of a dataset, and a digest of its rows, see `data.identity`."""
    return {"name": dataset.name, "sha256": identity.identify(dataset).digest()}


def cache_path(alone: SingleTaskRuns, task: int) -> epath.Path:
    """Name the file with FT of a task, numbered from 0."""
    identity = {"config": alone.facts, "task": task, "version": version()}
    text = json.dumps(identity, sort_keys=True)
    name = hashlib.sha256(text.encode()).hexdigest()
    return epath.Path(alone.cache) / f"{name}.json"


def prepare(alone: SingleTaskRuns) -> None:
    """Make the cache's directory now, so that a wrong one fails before training."""
    if alone.cache is not None and jax.process_index() == 0:
        epath.Path(alone.cache).mkdir(parents=True, exist_ok=True)


def read_cached(alone: SingleTaskRuns, task: int) -> dict | None:
    """Read FT of a task, by matrix name; None if the cache does not have it.

    All processes get the same: None unless every one of them can read the file.
    """
    if alone.cache is None:
        return None
    try:
        accuracy = storage.read_json(cache_path(alone, task))["accuracy"]
    except (OSError, ValueError, KeyError, TypeError):  # not there, or damaged
        accuracy = None
    return None if sharding.any_process(accuracy is None) else accuracy


def write_cached(alone: SingleTaskRuns, task: int, accuracy: dict) -> None:
    """Cache FT of a task. A crash, or a run beside this one, leaves no partial file."""
    if alone.cache is None or jax.process_index() != 0:
        return
    content = {"accuracy": accuracy, "task": task, "version": version()}
    storage.write_json(cache_path(alone, task), content | {"config": alone.facts})
