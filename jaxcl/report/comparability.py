"""Find differences between runs in data, scenario and evaluation."""

import json
from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple

from etils import epath

from jaxcl.config import options
from jaxcl.data import storage

# Options that change no measurement, or in which compared runs may differ.
_ASIDE = {"seed", "last_only", "skip"}


class Configs(NamedTuple):
    """The config and the resolved options of a run; None for a missing file."""

    asked: dict | None = None  # config.json
    resolved: dict | None = None  # resolved.json


def read_config(folders: Iterable[epath.Path]) -> Configs:
    """Read the configs of the first directory that has any.

    Raises:
      Refused: a file is damaged.
    """
    for folder in folders:
        if (folder / "config.json").exists():
            path = folder / options.RESOLVED
            every = storage.read_object(path) if path.exists() else None
            return Configs(storage.read_object(folder / "config.json"), every)
    return Configs()


def flatten(config: Mapping) -> dict[str, str]:
    """Flatten a config into path -> JSON of the value."""
    values = options.flatten(config, "").items()
    return {path[1:]: json.dumps(value, sort_keys=True) for path, value in values}


def list_differences(runs: Mapping[str, Configs]) -> list[str]:
    """List how runs were evaluated differently, a text for each field.

    The sections `data` and `scenario` are compared, and evaluators that several runs
    have; seeds are ignored. If every run has a resolved.json, unset options count as
    their defaults.

    Args:
      runs: name -> configs; runs without any are passed over.
    """
    known = {name: run for name, run in runs.items() if run.asked is not None}
    whole = all(run.resolved is not None for run in known.values())
    configs = {
        name: (run.resolved if whole else run.asked) or {}
        for name, run in known.items()
    }
    found: list[str] = []
    for path, sections in _shared_sections(configs):
        found += _differing_fields(path, sections)
    return found


def _shared_sections(configs) -> Iterator[tuple[str, dict[str, dict]]]:
    """Yield (path, run -> section) for runs that have the section."""
    for name in ("data", "scenario"):
        yield f"config.{name}", {r: c[name] for r, c in configs.items() if c.get(name)}
    judges = {run: config.get("evaluators") or {} for run, config in configs.items()}
    for key in dict.fromkeys(key for own in judges.values() for key in own):
        having = {run: own[key] for run, own in judges.items() if key in own}
        yield f"config.evaluators.{key}", having


def _differing_fields(path, sections) -> Iterator[str]:
    """Yield a text for each field in which a section differs between runs."""
    fields = {run: flatten(section) for run, section in sections.items()}
    names = sorted({name for own in fields.values() for name in own})
    names = [name for name in names if name.rpartition(".")[2] not in _ASIDE]
    if len({own.get("name") for own in fields.values()}) > 1:
        names = ["name"]  # other options are of other functions
    for name in names:
        by_value: dict[str, list[str]] = {}
        for run, own in fields.items():
            by_value.setdefault(own.get(name, "not set"), []).append(run)
        if len(by_value) > 1:
            told = (f"{value} ({', '.join(own)})" for value, own in by_value.items())
            yield f"{path}.{name}: {', '.join(told)}"
