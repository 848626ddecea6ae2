"""Datasets, the tasks cut from them, and the order in which a task is read."""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np


class Examples(NamedTuple):
    """One split of a dataset, addressed by row.

    Exactly one of `images` and `load` is there: sets that fit in memory are
    one array, others are decoded row by row.
    """

    label: np.ndarray  # i32[N], -1 where unknown
    domain: np.ndarray  # i32[N], 0 where the set has one domain
    images: np.ndarray | None = None  # u8[N,H,W,C]
    load: Callable | None = None  # row -> u8[h,w,C]; picklable, no jax inside


class Dataset(NamedTuple):
    """All splits of a source."""

    name: str
    class_names: tuple[str, ...]
    domain_names: tuple[str, ...]
    train: Examples
    validation: Examples | None  # cut out of train by a seeded draw
    test: Examples | None


def epoch_order(rng: np.random.Generator, rows: np.ndarray, batch_size: int):
    """One shuffled epoch without its incomplete last batch, i32[steps, batch]."""
    steps = len(rows) // batch_size
    return rng.permutation(rows)[: steps * batch_size].reshape(steps, batch_size)


class Source(NamedTuple):
    """What a task trains on: rows of some examples and how to order an epoch."""

    examples: Examples
    rows: np.ndarray  # i32[n]
    order: Callable = epoch_order  # (rng, rows, batch_size) -> i32[steps, batch]


class Task(NamedTuple):
    """One step of a scenario."""

    index: int  # from 0
    name: str
    classes: np.ndarray  # i32[k], classes that occur in it
    domain: int  # -1 where the task is not one domain
    train: Source
    test: np.ndarray  # i32[m], rows of the stream's evaluation examples


class Stream(NamedTuple):
    """A scenario: the dataset, its tasks, and the split that judges them."""

    dataset: Dataset
    tasks: tuple[Task, ...]
    evaluation: Examples  # dataset.test or dataset.validation
