"""Configs at random: each is built, or refused by a message that names a field."""

import collections
import functools
import json
import pathlib
import re
import signal
import tempfile

import hypothesis
import ml_collections
import numpy as np

from attack import draw, kind
from helpers import toy
from jaxcl.config import build

SECONDS = 60  # a config that takes longer hangs
TOYS = {
    "two_view": {},
    "online": toy.ONLINE | {"method": {"name": "er"}},
    "cclis": {"method": {"name": "cclis", "memory_size": 24}, "augment.views": 1},
    "graphs": {
        "data": {"name": "rings_and_trees"},
        "scenario": {"name": "growth", "evaluation": "none"},
        "augment": {"name": "graphs"},
        "encoder": {"name": "gcn", "width": 4},
        "method": {"name": "icl"},
        "batch_size": 8,
    },
}


def drawn_from(name: str):
    """A strategy of (name of the toy, changes to it)."""
    start = toy.config(**TOYS[name]).to_dict()
    return draw.changes(start).map(lambda made: (name, made))


def config_of(name: str, made: dict) -> ml_collections.ConfigDict:
    """The toy with the changes."""
    config = toy.config(**TOYS[name])
    with config.unlocked(), config.ignore_type():
        for field, value in made.items():
            section, _, option = field.rpartition(".")
            (config[section] if section else config)[option] = value
    return config


# A message names a field as "config.SECTION.OPTION" or as "OPTION = value", and some
# relations of options without a value: "sets: ...".
FIELD = re.compile(
    r"config\.\w+|\b(" + "|".join(sorted(draw.every_option())) + r")(\[\d+\])?( ?=|:)"
)


def start(name: str, folder: pathlib.Path) -> None:
    """Build a toy without changes: near one that is refused nothing is built."""
    build.build(config_of(name, {}), folder / "run")


def outcome(name: str, made: dict, workdir) -> str:
    """Build a config: "built" or "refused"; raises `Broken` for anything else."""

    def late(*_):
        raise kind.Broken(f"{made}: not built after {SECONDS} s")

    before = signal.signal(signal.SIGALRM, late)
    signal.alarm(SECONDS)
    try:
        config = config_of(name, made)
        build.build(config, workdir)
    except (ValueError, OSError) as error:
        text = str(error)
        if not FIELD.search(text):
            raise kind.Broken(f"{made}: refused without a field: {text}") from error
        if len(text) > 20_000:
            raise kind.Broken(f"{made}: a message of {len(text)} letters") from error
        return "refused"
    except kind.Broken:
        raise
    except Exception as error:
        raise kind.Broken(f"{made}: {type(error).__name__}: {error}") from error
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)
    json.loads((workdir / "config.json").read_text())
    return "built"


def attack(name: str, rng: np.random.Generator, place: kind.Place, count=5) -> str:
    """Draw `count` configs near one toy; a failure prints the changes."""
    found: collections.Counter[str] = collections.Counter()
    place.once(f"config {name}", functools.partial(start, name))

    @hypothesis.seed(int(rng.integers(2**31)))
    @hypothesis.settings(
        max_examples=count,
        database=None,
        deadline=None,
        print_blob=False,
        phases=[hypothesis.Phase.generate],  # making small takes minutes of builds
        suppress_health_check=[*hypothesis.HealthCheck],
    )
    @hypothesis.given(drawn_from(name))
    def one(drawn):
        with tempfile.TemporaryDirectory(dir=place.folder) as folder:
            workdir = pathlib.Path(folder) / "run"
            found[outcome(*drawn, workdir)] += 1

    one()
    return "built and refused" if len(found) > 1 else f"all {next(iter(found))}"


KINDS = tuple(
    kind.Kind(f"config: {name}", functools.partial(attack, name)) for name in TOYS
)
