"""FT_i: what a run on task i alone depends on, and a directory that keeps it.

Runs of several strategies with the same base, seed and data have the same FT_i. A
file holds it for one task, under the sha256 of all that it depends on, so that only
the first of these runs trains for it. Sets are told apart by their options, sizes
and labels; pixels that change while all of these stay are not noticed.
"""

import hashlib
import importlib.metadata
import json
import os
import uuid
from collections.abc import Callable
from typing import NamedTuple

import jax
import numpy as np
from etils import epath

from jaxcl import sharding
from jaxcl.data import storage, stream


class Alone(NamedTuple):
    """How the runs on one task are made, and where what they measure is kept."""

    make: Callable  # () -> Job, of the method that trains one task alone
    facts: dict  # all that FT_i depends on but for the task's number, as JSON
    cache: str | None  # directory; None: nothing is kept across runs


def version() -> str:
    """The library's version, "unknown" where it is not installed."""
    try:
        return importlib.metadata.version("jaxcl")
    except importlib.metadata.PackageNotFoundError:
        return "unknown"


def fingerprint(dataset: stream.Dataset) -> dict:
    """Name, and sha256 of labels and domains, of every split of a dataset."""
    found = {"name": dataset.name}
    for name in ("train", "validation", "test"):
        examples = getattr(dataset, name)
        if examples is not None:
            pairs = np.stack([examples.label, examples.domain]).astype("<i4")
            found[name] = hashlib.sha256(pairs.tobytes()).hexdigest()
    return found


def path(alone: Alone, task: int):
    """The file that keeps FT of a task, numbered from 0."""
    whole = {"config": alone.facts, "task": task, "version": version()}
    text = json.dumps(whole, sort_keys=True)
    name = hashlib.sha256(text.encode()).hexdigest()
    return epath.Path(alone.cache) / f"{name}.json"


def prepare(alone: Alone) -> None:
    """Make the cache's directory, so that one which cannot be is said at once."""
    if alone.cache is not None and jax.process_index() == 0:
        epath.Path(alone.cache).mkdir(parents=True, exist_ok=True)


def read(alone: Alone, task: int) -> dict | None:
    """Name of the matrix -> FT of a task, None where it is not kept.

    All processes get the same, None unless every one can read the file.
    """
    if alone.cache is None:
        return None
    try:
        found = json.loads(path(alone, task).read_text())["accuracy"]
    except (OSError, ValueError, KeyError, TypeError):  # not there, or damaged
        found = None
    return None if sharding.any_process(found is None) else found


def write(alone: Alone, task: int, accuracy: dict) -> None:
    """Keep FT of a task; a crash or another run leaves a whole file or none."""
    if alone.cache is None or jax.process_index() != 0:
        return
    where = path(alone, task)
    whole = {"accuracy": accuracy, "task": task, "version": version()}
    text = json.dumps(whole | {"config": alone.facts}, indent=1) + "\n"
    if storage.in_bucket(where):
        where.write_text(text)  # a bucket replaces an object whole
        return
    draft = where.with_name(f"{where.stem}.{uuid.uuid4().hex}.tmp")
    draft.write_text(text)
    os.replace(draft, where)
