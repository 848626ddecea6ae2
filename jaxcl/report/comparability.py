"""Find differences between runs in data, scenario and evaluation."""

import json
from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple

from etils import epath

from jaxcl import storage
from jaxcl.config import options

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
            all_options = storage.read_object(path) if path.exists() else None
            return Configs(storage.read_object(folder / "config.json"), all_options)
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
    recorded = {name: run for name, run in runs.items() if run.asked is not None}
    all_resolved = all(run.resolved is not None for run in recorded.values())
    configs = {
        name: (run.resolved if all_resolved else run.asked) or {}
        for name, run in recorded.items()
    }
    differences: list[str] = []
    for path, sections in _shared_sections(configs):
        differences += _differing_fields(path, sections)
    return differences


def _shared_sections(configs) -> Iterator[tuple[str, dict[str, dict]]]:
    """Yield (path, run -> section) for runs that have the section."""
    for name in ("data", "scenario"):
        yield f"config.{name}", {r: c[name] for r, c in configs.items() if c.get(name)}
    evaluators = {run: x.get("evaluators") or {} for run, x in configs.items()}
    for key in dict.fromkeys(key for entries in evaluators.values() for key in entries):
        having = {run: x[key] for run, x in evaluators.items() if key in x}
        yield f"config.evaluators.{key}", having


def _differing_fields(path, sections) -> Iterator[str]:
    """Yield a text for each field in which a section differs between runs."""
    fields = {run: flatten(section) for run, section in sections.items()}
    names = sorted({name for flat in fields.values() for name in flat})
    names = [name for name in names if name.rpartition(".")[2] not in _ASIDE]
    if len({flat.get("name") for flat in fields.values()}) > 1:
        names = ["name"]  # other options are of other functions
    for name in names:
        by_value: dict[str, list[str]] = {}
        for run, flat in fields.items():
            by_value.setdefault(flat.get(name, "not set"), []).append(run)
        if len(by_value) > 1:
            texts = (f"{value} ({', '.join(x)})" for value, x in by_value.items())
            yield f"{path}.{name}: {', '.join(texts)}"
