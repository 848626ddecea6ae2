"""What a kind of attack is."""

import pathlib
import tempfile
from collections.abc import Callable
from typing import NamedTuple

import numpy as np


class Broken(AssertionError):
    """A promise was broken; the message says which, and what was seen."""


class Place(NamedTuple):
    """Where an attack works."""

    folder: pathlib.Path  # of this attack alone; new, empty, removed if it passes
    shared: pathlib.Path  # of all attacks of a session, see `once`

    def once(self, name: str, make: Callable[[pathlib.Path], None]) -> pathlib.Path:
        """The folder `name`, which the first attack that asks for it makes.

        Args:
          name: of the folder; attacks that use the same name share it.
          make: fills the folder that it is given. If it fails, the next that asks
            tries again.
        """
        folder = self.shared / name
        if not folder.exists():
            self.shared.mkdir(exist_ok=True)
            draft = pathlib.Path(tempfile.mkdtemp(prefix=f"{name}-", dir=self.shared))
            make(draft)
            draft.rename(folder)
        return folder


# (random numbers, where) -> the outcome in a few words; outcomes are counted.
Attack = Callable[[np.random.Generator, Place], str]


class Kind(NamedTuple):
    """One kind of attack."""

    name: str  # "part: what is attacked", as "kill: train er"
    attack: Attack
    often: int = 1  # times in each round, beside the other kinds
