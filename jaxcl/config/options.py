"""List every option of a config with its value, defaults included.

`iterate_options` yields them. A run leaves their values in resolved.json, `jaxcl
options` prints them, and `run_config` compares them when a run resumes.
"""

import contextlib
import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from jaxcl import core, lookup, schema
from jaxcl.config import sections
from jaxcl.data import scenarios
from jaxcl.errors import Refused
from jaxcl.nets import tuning

RESOLVED = "resolved.json"
# Options of a section that its function does not take.
_NAME = "one of those that `jaxcl list` prints"
_BESIDE = {
    "config.augment": (
        ("name", "images", '"images" or "graphs"'),
        ("resize", None, "shorter side before the centre crop, for evaluation"),
    ),
    "config.optimizer": (
        ("name", schema.NONE, _NAME),
        ("lr", schema.NONE, "learning rate at its peak, see config.scale_lr"),
    ),
    "config.evaluators": (
        ("name", schema.NONE, "of the evaluator, if it is not the key"),
        ("last_only", False, "run after the last task only"),
        ("skip", False, "never run"),
    ),
}
# Parameters that no config sets, by the path of the section.
_WITHOUT = {
    "config.encoder": ("dtype",),
    "config.augment": ("dtype",),
    "config.schedule": ("epochs",),
    "config.evaluators": ("directory",),
}


def iterate_options(
    raw: Mapping[str, Any], replay: core.Replay | None = None
) -> Iterator[schema.Option]:
    """Yield every option of a config, section by section.

    Args:
      raw: the config.
      replay: the values of config.replay, for options that depend on it.

    Raises:
      Refused: a section names a function that does not exist.
    """
    raw = sections.nest_method(raw)
    fields = {field.name: field for field in dataclasses.fields(sections.TopLevel)}
    inner = sections.names_of_sections()
    top = {name: value for name, value in raw.items() if name not in inner}
    yield from _iterate_function("config", sections.TopLevel, top, raw, replay, inner)
    for name in fields:
        section = raw.get(name) if name in inner else None
        if name == "tuning" and isinstance(section, str):
            section = tuning.RECIPES.get(section)
        if name == "evaluators":
            for key, entry in (section or {}).items():
                yield from _iterate_section(
                    f"config.evaluators.{key}", entry, raw, replay
                )
        elif isinstance(section, Mapping):
            yield from _iterate_section(f"config.{name}", section, raw, replay)


def _iterate_section(path, section, raw, replay) -> Iterator[schema.Option]:
    """Yield the options of a section, and of the sections inside it."""
    method = lookup.name_of(raw.get("method"))
    function = sections.find_function(path, section, method)
    inner = {
        name: value
        for name, value in _entries(section)
        if isinstance(value, Mapping) and _is_section(path, name, value, function)
    }
    own = {name: value for name, value in section.items() if name not in inner}
    yield from _iterate_function(path, function, own, raw, replay, inner)
    for name, value in inner.items():
        yield from _iterate_section(f"{path}.{name}", value, raw, replay)


def _is_section(path, name, value, function) -> bool:
    """Return whether an option is a section that a function of its own reads."""
    if path.startswith("config.data"):
        return "name" in value
    if path == "config.method":
        return name in schema.choices(function)
    return (path, name) == ("config.augment", "local")


def _entries(section: Mapping) -> Iterator[tuple[str, Any]]:
    """Yield the entries of a section, those of a list each by its own number."""
    for name, value in section.items():
        if isinstance(value, list | tuple):
            yield from ((f"{name}.{i}", x) for i, x in enumerate(value))
        else:
            yield name, value


def _iterate_function(
    path, function, section, raw, replay, inner
) -> Iterator[schema.Option]:
    """Yield the options of one section."""
    kind = "config.evaluators" if path.startswith("config.evaluators.") else path
    named = (("name", schema.NONE, _NAME),) if "name" in section else ()
    beside = {
        name: schema.Option(name, function, None, default, meaning=meaning)
        for name, default, meaning in _BESIDE.get(kind, named)
    }
    without = {*inner, *_WITHOUT.get(kind, ())}
    options = schema.read_options(function, section, path, without, beside)
    own = [x for x in options if x.function and x.name not in beside]
    known = {x.name: x.value for x in own if x.value is not schema.NONE}
    filled = {}
    with contextlib.suppress(ValueError, TypeError, KeyError):  # `build` refuses them
        found = _find_dependent(path, function, known, raw, replay)
        filled = {name: x for name, x in found.items() if x is not None}
    for option in options:
        stands_for = filled.get(option.name, option.value)
        yield option._replace(stands_for=stands_for)


def _find_dependent(path, function, options, raw, replay) -> dict:
    """Find the options of a section that depend on others, with their values."""
    if path == "config" and options.get("precision") == "auto":
        return {"precision": sections.choose_precision(dict(raw))}
    if path == "config.encoder":
        net = function(**options)
        unset = [name for name, value in options.items() if value is None]
        return {name: getattr(net, name, None) for name in unset}
    if path.startswith("config.method"):
        make = lookup.find_method(raw["method"]["name"]).make
        method = schema.defaults(make) | raw["method"]
        filled = schema.fill_dependent(make, method, replay)
        *_, inner = path.split(".")
        return filled if inner == "method" else filled.get(inner, {})
    if path == "config.tuning":
        return function(**options)._asdict()
    if path == "config.scenario":
        return scenarios.run_seed(raw["scenario"], raw.get("seed", 0))
    return {}


def values(raw: Mapping[str, Any], replay: core.Replay | None = None) -> dict:
    """Return every option of a config with its value, as JSON, in its sections.

    Args:
      raw: the config, which `build` takes.
      replay: the values of config.replay; None: nothing is replayed.
    """
    whole: dict = {"replay": None, "tuning": None, "mesh": None}
    for option in iterate_options(raw, replay):
        _, *path, name = option.path.split(".")
        if option.stands_for is not schema.NONE:
            _section_at(whole, path)[name] = to_json(option.stands_for)
    if replay is not None:
        whole["replay"] = to_json(replay._asdict())
    return whole


def _section_at(section, path):
    """Return the section at a path; make missing ones."""
    for part in path:
        if isinstance(section, list):
            section = section[int(part)]
        else:
            if not isinstance(section.get(part), dict | list):
                section[part] = {}
            section = section[part]
    return section


def to_json(value: Any, field: str | None = None) -> Any:
    """Convert a value to JSON's types.

    Args:
      value: anything.
      field: its path, for messages; None: other values become strings.

    Raises:
      Refused: JSON cannot hold it; the message names the field.
    """

    def inside(key, value):
        return to_json(value, None if field is None else f"{field}{key}")

    if isinstance(value, Mapping):
        return {str(key): inside(f".{key}", x) for key, x in value.items()}
    if isinstance(value, list | tuple):
        return [inside(f"[{number}]", x) for number, x in enumerate(value)]
    if isinstance(value, np.generic):
        value = value.item()
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if field is None:
        return repr(value)
    raise Refused(
        f"{field}={value!r}: must be a number, a text, a bool, None, or a list or "
        "section of these"
    )


def flatten(config: Mapping, path: str = "config") -> dict[str, Any]:
    """Flatten a config: path of each option -> its value.

    An empty section counts as a value, and so does a list.
    """
    fields: dict[str, Any] = {}
    for key, value in config.items():
        if isinstance(value, Mapping) and value:
            fields |= flatten(value, f"{path}.{key}")
        else:
            fields[f"{path}.{key}"] = value
    return fields


def differences(old: Mapping, new: Mapping) -> list[str]:
    """List the options in which two configs differ, as "path: old -> new"."""
    old, new = flatten(old), flatten(new)
    found = []
    for path in sorted({**old, **new}):
        pair = old.get(path, schema.NONE), new.get(path, schema.NONE)
        if pair[0] != pair[1]:
            said = ("absent" if value is schema.NONE else repr(value) for value in pair)
            found.append(f"{path}: {' -> '.join(said)}")
    return found
