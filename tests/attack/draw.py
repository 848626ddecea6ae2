"""Configs at random: what the annotations of a section allow, and what nobody does.

`changes` draws a few options of the sections of a small config. Half of the values are
allowed by the option's annotation, often at the end of its range, the others are of any
kind.
"""

import math
import types
import typing
from collections.abc import Sequence
from typing import Annotated, Any, Literal

from hypothesis import strategies as st

from jaxcl import schema
from jaxcl.config import sections
from jaxcl.data import imbalance, scenarios, sources, toys
from jaxcl.data.augment import graphs as augment_graphs
from jaxcl.data.augment import images as augment_images
from jaxcl.methods.online import replay

# Of every kind, and none of them an option's on purpose.
_ODD = (
    *(None, True, False, 0, 1, -1, 2, 3.5, -0.0, 1e-320, 1e38, 1e300, math.inf),
    *(-math.inf, math.nan, 2**31 - 1, 2**31, 2**63, -(2**70), 10**400, "", "a", "."),
    *("..", "a.b", "../x", "\0", "\ud800", "é", "auto", "x" * 5000, "sys.exit"),
    *((), [], {}, (1,), (0.5, 0.1), (math.nan,), [[1]], {"name": "x"}, {"": None}),
    *(("a", 1), [None], b"bytes", 1j),
)
ODD = st.sampled_from(_ODD)
# What the toy of tests/helpers/toy.py may be made of, so that most draws are near it.
NAMES = {
    "data": ["digits", "joined", "npz", "rings_and_trees"],
    "scenario": [*scenarios.SCENARIOS],
    "augment": ["images", "graphs"],
    "encoder": [*sections.ENCODERS],
    "method": ["two_view", "er", "er_ace", "er_aml", "icarl", "der", "gem", "gdumb"]
    + ["finetune", "cclis", "co2l", "duel", "icl", "mir", "aser"],
    "optimizer": [*sections.OPTIMIZERS],
    "schedule": [*sections.SCHEDULES],
}
EVALUATORS = ["linear", "knn", "svm", "predict", "memory", "alignment", "collapse"]
EVALUATORS += ["spread", "objective", "filtering", "tsne", "neighbours"]
# These say where files are, or start something else than a run.
_NOT = {"checkpoint", "start", "plasticity_from", "path", "directory", "seeds"}


def values(annotation) -> st.SearchStrategy:
    """Values that an annotation allows, and of any other kind."""
    return st.one_of(allowed(annotation), allowed(annotation), ODD)


def allowed(annotation) -> st.SearchStrategy:
    """Values that an annotation allows."""
    kind, rules = annotation, ()
    if typing.get_origin(kind) is Annotated:
        kind, *rules = typing.get_args(kind)
    origin, inner = typing.get_origin(kind), typing.get_args(kind)
    if origin in (typing.Union, types.UnionType):
        return st.one_of(*map(allowed, inner))
    if origin is Literal:
        return st.sampled_from(inner)
    if kind in (int, float):
        return _numbers(kind, *[x for x in rules if isinstance(x, schema.Range)])
    if origin in (tuple, list, Sequence):
        if len(inner) == 1 or inner[-1] is Ellipsis:
            return st.lists(allowed(inner[0]), max_size=3).map(tuple)
        return st.tuples(*map(allowed, inner))
    plain = {bool: st.booleans(), str: st.sampled_from(["a", "sorted", "reservoir"])}
    plain |= {dict: st.just({}), types.NoneType: st.none()}
    return plain.get(kind, ODD)


def _numbers(kind, rule=schema.Range()) -> st.SearchStrategy:  # noqa: B008
    """Numbers of a range: its ends, and small ones."""
    low = max(rule.least, rule.above, -1e6)
    high = min(rule.most, rule.below, max(low, 0) + 1e6)
    if kind is int:
        ends = [math.ceil(low), math.floor(high)]
        small = st.integers(ends[0], min(ends[0] + 64, ends[1]))
        far = ends if rule.most < math.inf else [ends[0], 2**31 - 1]
        return st.one_of(small, st.sampled_from(far))
    step = (high - low) / 1e3
    inside = st.floats(low, high, allow_nan=False).map(
        lambda x: min(max(x, low + (rule.above >= low) * step), high)
    )
    return st.one_of(inside, st.sampled_from([low, high, (low + high) / 2]))


def parameters(function, **given) -> dict[str, Any]:
    """The keyword-only options of a function, with their annotations."""
    return {
        name: option.annotation
        for name, option in schema.option_of(function, given).items()
        if name not in _NOT and name != "dtype"
    }


_TABLES = {
    "encoder": sections.ENCODERS,
    "optimizer": sections.OPTIMIZERS,
    "schedule": sections.SCHEDULES,
    "data": {
        "digits": toys.digits,
        "rings_and_trees": toys.rings_and_trees,
        "joined": sources.joined,
        "npz": sources.SOURCES["npz"],
    },
    "augment": {"images": augment_images.make, "graphs": augment_graphs.make},
}


def every_option() -> set[str]:
    """Names of all options of what a config may name."""
    methods = [schema.method(name).make for name in NAMES["method"]]
    judges = [schema.module("jaxcl.evals", name, "x").make for name in EVALUATORS]
    tables = [made for table in _TABLES.values() for made in table.values()]
    others = [scenarios.make, imbalance.dominated, imbalance.long_tail]
    others += [function for own in scenarios.SCENARIOS.values() for function in own]
    others += [replay.settings, sections.TopLevel]
    functions = [*methods, *judges, *tables, *others]
    return {name for function in functions for name in parameters(function)}


def _function(section, name):
    """What a section's options are those of."""
    if section == "scenario":
        return scenarios.make
    if section == "method":
        return schema.method(name).make
    return _TABLES[section][name]


@st.composite
def changes(draw, start: dict) -> dict[str, Any]:
    """Changes {"section.option": value, or "option": value} to a config.

    Args:
      start: the config; of most sections the name stays as it is there.
    """
    made: dict[str, Any] = {}
    for _ in range(draw(st.integers(1, 3))):
        place = draw(st.sampled_from(["", "replay", "evaluators", "uneven", *NAMES]))
        if place == "":
            options = parameters(sections.TopLevel)
            options = {
                k: v for k, v in options.items() if k not in start or v is not dict
            }
            name = draw(st.sampled_from(sorted(options)))
            made[name] = draw(values(options[name]))
        elif place == "evaluators":
            name = draw(st.sampled_from(EVALUATORS))
            options = parameters(schema.module("jaxcl.evals", name, "x").make)
            own = draw(_some(options))
            made["evaluators"] = draw(st.sampled_from([{name: own}, {name: own}, own]))
        elif place == "replay":
            made["replay"] = draw(_some(parameters(replay.settings)))
        elif place == "uneven":
            name = draw(st.sampled_from(["imbalance", "long_tail"]))
            made[f"scenario.{name}"] = draw(
                _some(
                    parameters(
                        getattr(imbalance, {"imbalance": "dominated"}.get(name, name))
                    )
                )
            )
        else:
            name = start[place].get("name", "images")
            if draw(st.integers(0, 3)) == 0:
                name = draw(st.sampled_from(NAMES[place]))
                made[f"{place}.name"] = name
            given = {"name": name} if place == "scenario" else {}
            options = parameters(_function(place, name), **given)
            options = {k: x for k, x in options.items() if k not in given}
            if options:
                option = draw(st.sampled_from(sorted(options)))
                made[f"{place}.{option}"] = draw(values(options[option]))
    return made


@st.composite
def _some(draw, options) -> dict[str, Any]:
    """A section with up to three of some options."""
    names = (
        draw(st.lists(st.sampled_from(sorted(options)), max_size=3)) if options else ()
    )
    return {name: draw(values(options[name])) for name in names}
