"""List every option of a config with its value, defaults included.

`iterate_options` yields them. A run leaves their values in resolved.json, `jaxcl
options` prints them, and `run_config` compares them when a run resumes.
"""

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from jaxcl import core, lookup, schema
from jaxcl.config import sections
from jaxcl.data.stream import scenarios
from jaxcl.errors import Refused
from jaxcl.nets import tuning

RESOLVED = "resolved.json"


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
    top = {name: x for name, x in raw.items() if name not in sections.SECTIONS}
    rule = sections.Section(lambda *_: sections.TopLevel, hidden=(*sections.SECTIONS,))
    yield from _iterate_section("config", rule, top, raw, replay)
    for name, rule in sections.SECTIONS.items():
        section = raw.get(name)
        if name == "tuning" and isinstance(section, str):
            section = tuning.RECIPES.get(section)
        if name == "evaluators":
            for key, entry in (section or {}).items():
                path = f"config.evaluators.{key}"
                yield from _iterate_section(
                    path, sections.EVALUATOR, entry, raw, replay
                )
        elif isinstance(section, Mapping):
            yield from _iterate_section(f"config.{name}", rule, section, raw, replay)


def _iterate_section(
    path, rule: sections.Section, section, raw, replay
) -> Iterator[schema.Option]:
    """Yield the options of a section, and of the sections inside it."""
    function = rule.find(path, section)
    inner = rule.inner(function, section)
    flat = {name: value for name, value in section.items() if name not in inner}
    beside = {
        name: schema.Option(name, function, None, default, meaning=meaning)
        for name, (default, meaning) in rule.beside.items()
    }
    without = {*inner, *rule.hidden}
    options = schema.read_options(function, flat, path, without, beside)
    of_function = [x for x in options if x.function and x.name not in beside]
    arguments = {x.name: x.value for x in of_function if x.value is not schema.MISSING}
    filled = {}
    with contextlib.suppress(ValueError, TypeError, KeyError):  # `build` refuses them
        dependent = _find_dependent(path, function, arguments, raw, replay)
        filled = {name: x for name, x in dependent.items() if x is not None}
    for option in options:
        stands_for = filled.get(option.name, option.value)
        yield option._replace(stands_for=stands_for)
    for name, inner_rule in inner.items():
        value = section
        for part in name.split("."):  # an entry of a list has a number
            value = value[int(part) if isinstance(value, list | tuple) else part]
        yield from _iterate_section(f"{path}.{name}", inner_rule, value, raw, replay)


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
    config: dict = {"replay": None, "tuning": None, "mesh": None}
    for option in iterate_options(raw, replay):
        _, *path, name = option.path.split(".")
        if option.stands_for is not schema.MISSING:
            _section_at(config, path)[name] = to_json(option.stands_for)
    if replay is not None:
        config["replay"] = to_json(replay._asdict())
    return config


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
      field: path of the option, for messages; None: a value that JSON cannot hold
        becomes a string.

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
        field, value, "must be a number, text, bool, None, or a list or section"
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
    lines = []
    for path in sorted({**old, **new}):
        pair = old.get(path, schema.MISSING), new.get(path, schema.MISSING)
        if pair[0] != pair[1]:
            texts = (
                "absent" if value is schema.MISSING else repr(value) for value in pair
            )
            lines.append(f"{path}: {' -> '.join(texts)}")
    return lines
