"""Every option of a config with its value: what is set, defaults, what None means.

A run leaves the values in resolved.json, and `jaxcl options` prints them.
"""

import contextlib
import dataclasses
import inspect
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np

from jaxcl import core, schema
from jaxcl.config import sections
from jaxcl.data import scenarios, sources
from jaxcl.data.augment import graphs as augment_graphs
from jaxcl.data.augment import images as augment_images
from jaxcl.methods.online import replay as replay_lib
from jaxcl.nets import tuning

RESOLVED = "resolved.json"
NONE = inspect.Parameter.empty  # no value, or no default
# Keys of a section that its function does not take: name -> (default, meaning).
_BESIDE = {
    "config.augment": {
        "name": ("images", '"images" or "graphs"'),
        "resize": (None, "shorter side before the middle is cut, to evaluate"),
    },
    "config.optimizer": {
        "lr": (NONE, "learning rate at its peak, see config.scale_lr")
    },
    "config.scenario": {"name": (NONE, "how the set is cut into tasks")},
}
_OF_AN_ENTRY = {
    "name": (NONE, "of the evaluator, where it is not the key"),
    "last_only": (False, "whether it runs after the last task alone"),
    "skip": (False, "whether it never runs"),
}
_NAMED = {"name": (NONE, "which of them, see `jaxcl list`")}
UNKNOWN = "no such option"


class Option(NamedTuple):
    """One option of a config."""

    name: str
    value: Any  # what the config sets, else the default; NONE: neither
    stands_for: Any  # the same, or what None or "auto" means here
    default: Any
    annotation: Any
    asked: bool  # whether the config sets it
    meaning: str  # of what stands beside the options of the function, else ""


class Section(NamedTuple):
    """A section of a config, and the functions whose arguments it has."""

    path: str  # "config.method"
    function: Callable
    options: tuple[Option, ...]
    further: tuple[Callable, ...] = ()  # whose arguments are options, too


def sections_of(
    raw: Mapping[str, Any], replay: core.Replay | None = None
) -> Iterator[Section]:
    """All sections of a config, each with all its options.

    Args:
      raw: the config.
      replay: what config.replay comes to, for options that follow it.

    Raises:
      ValueError: a section names a function that there is not.
    """
    fields = {field.name: field for field in dataclasses.fields(sections.Top)}
    whole = {name for name, field in fields.items() if _is_section(field)}
    rest = {name: value for name, value in raw.items() if name not in whole}
    auto = {"precision": sections.precision_of(dict(raw))}
    auto = auto if rest.get("precision") == "auto" else {}
    yield _section("config", sections.Top, rest, lambda _: auto, without=whole)
    for name in fields:
        value = raw.get(name) if name in whole else None
        if name == "tuning" and isinstance(value, str):
            value = tuning.RECIPES.get(value)
        if name == "evaluators":
            yield from _evaluators(value or {})
        elif isinstance(value, Mapping):
            yield from _of(f"config.{name}", value, _Others(raw, replay))


def _is_section(field) -> bool:
    return field.type is dict or "dict" in str(field.type)


class _Others(NamedTuple):
    """What the options of a section may follow."""

    raw: Mapping  # the whole config
    replay: core.Replay | None


def _of(path, value, others) -> Iterator[Section]:
    """A section, and the sections inside it."""
    function = _function_of(path, value)
    inner = {}
    if path == "config.augment" and isinstance(value.get("local"), Mapping):
        inner = {"local": value["local"]}
    if path.startswith("config.data"):
        inner = {
            name: section
            for name, section in _listed(value)
            if isinstance(section, Mapping) and "name" in section
        }
    own = {name: x for name, x in value.items() if name not in inner}
    yield _section(path, function, own, _settled(path, function, others), without=inner)
    for name, section in inner.items():
        yield from _of(f"{path}.{name}", section, others)


def _listed(section: Mapping) -> Iterator[tuple[str, Any]]:
    """The entries of a section, those of a list each by its own number."""
    for name, value in section.items():
        if isinstance(value, list | tuple):
            yield from ((f"{name}.{i}", x) for i, x in enumerate(value))
        else:
            yield name, value


def _function_of(path, section) -> Callable:
    """The function whose arguments a section has."""
    _, name, *inside = path.split(".")
    choices = {
        "data": sources.SOURCES,
        "encoder": sections.ENCODERS,
        "optimizer": sections.OPTIMIZERS,
        "schedule": sections.SCHEDULES,
    }
    if name in choices:
        return schema.named(choices[name], section, path)[0]
    if name == "method":
        return schema.method(section.get("name")).make
    graphs = section.get("name") == "graphs"
    augment = augment_graphs.make if graphs else augment_images.make
    plain = {"scenario": scenarios.make, "replay": replay_lib.settings}
    plain |= {"tuning": tuning.settings}
    plain |= {"augment": augment_images.local if inside else augment}
    return plain[name]


def _settled(path, function, others) -> Callable[[dict], dict]:
    """(options) -> those that follow others, with what they come to."""

    def encoder(options):
        net = function(**options)
        unset = [name for name, value in options.items() if value is None]
        return {name: getattr(net, name, None) for name in unset}

    def method(options):
        return schema.fill(function, options, others.replay)

    def tuned(options):
        return function(**options)._asdict()

    def cut(options):
        follows = sections.follows_seed(others.raw["scenario"])
        return {"seed": others.raw.get("seed", 0)} if follows else {}

    own = {"config.encoder": encoder, "config.method": method, "config.tuning": tuned}
    own["config.scenario"] = cut
    return own.get(path, lambda options: {})


def _evaluators(entries) -> Iterator[Section]:
    for key, section in entries.items():
        path = f"config.evaluators.{key}"
        name = section.get("name", key)
        module = schema.module("jaxcl.evals", name, f"{path}.name")
        yield _section(
            path, module.make, section, without={"directory"}, beside=_OF_AN_ENTRY
        )


def _section(
    path, function, raw, settle=lambda options: {}, without=(), beside=None
) -> Section:
    """The options of a function, with the values that a config gives them."""
    raw = schema.drop_unset(function, raw)
    hidden = {"dtype", "scenario"}
    hidden |= {"epochs"} if path == "config.schedule" else set()
    signature = {
        name: (annotation, default, "")
        for name, (annotation, default) in schema.option_of(function, raw).items()
        if name not in without and (name not in hidden or name in raw)
    }
    also = (_NAMED if "name" in raw else {}) | (beside or _BESIDE.get(path, {}))
    # What is not an option is there, too: `build` will refuse it.
    unknown = [name for name in raw if name not in {**signature, **also}]
    also |= {name: (NONE, UNKNOWN) for name in unknown}
    known = dict(signature)
    for name, (default, meaning) in also.items():
        known.setdefault(name, (None, default, meaning))
    values = {name: raw.get(name, default) for name, (_, default, _) in known.items()}
    stands = {}
    given = {n: v for n, v in values.items() if n in signature and v is not NONE}
    with contextlib.suppress(ValueError, TypeError, KeyError):  # `build` refuses them
        stands = {n: v for n, v in settle(given).items() if v is not None}
    options = tuple(
        Option(
            name=name,
            value=values[name],
            stands_for=stands.get(name, values[name]),
            default=default,
            annotation=annotation,
            asked=name in raw,
            meaning=meaning,
        )
        for name, (annotation, default, meaning) in known.items()
    )
    further = schema.further_functions(function, raw)
    return Section(path, inspect.unwrap(function), options, further)


def values(raw: Mapping[str, Any], replay: core.Replay | None = None) -> dict:
    """Every option of a config with its value, as JSON, in the config's sections.

    Args:
      raw: the config, which `build` takes.
      replay: what config.replay comes to; None: nothing is replayed.
    """
    whole: dict = {"replay": None, "tuning": None}
    for section in sections_of(raw, replay):
        place = whole
        for part in section.path.split(".")[1:]:
            if isinstance(place, list):
                place = place[int(part)]
            else:
                place = _inner(place, part)
        place |= {
            option.name: _plain(option.stands_for)
            for option in section.options
            if option.stands_for is not NONE
        }
    if replay is not None:
        whole["replay"] = _plain(replay._asdict())
    return whole


def _inner(place, part):
    """The section or the list of them at a name of another."""
    if not isinstance(place.get(part), dict | list):
        place[part] = {}
    return place[part]


def _plain(value):
    """A value as JSON holds it; as text, where a default is something else."""
    if isinstance(value, Mapping):
        return {str(key): _plain(x) for key, x in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(x) for x in value]
    if isinstance(value, np.generic):
        value = value.item()
    plain = value is None or isinstance(value, bool | int | float | str)
    return value if plain else repr(value)
