"""What options may be: every option of all that a config names, and the rules."""

import inspect
import re
import typing
from functools import partial
from typing import Annotated, Any, Literal

import pytest

from helpers import toy
from helpers.annotations import leaves, members
from helpers.config_functions import FUNCTIONS
from jaxcl import errors, schema
from jaxcl.config import build, sections
from jaxcl.data.stream import scenarios
from jaxcl.methods import online_ssl, two_view
from jaxcl.methods.two_view import bases, strategies

NAN, INF = float("nan"), float("inf")


# config alone calls these
CALLS = {
    "top": lambda **options: sections.read_top(options),
    "mesh": lambda **options: schema.options(sections.read_sides, options, "mesh"),
}
# The method checks the options of these.
for _kind, _make, _names in (
    ("base", two_view.make, bases.BASES),
    ("strategy", two_view.make, strategies.STRATEGIES),
    ("regulariser", online_ssl.make, online_ssl.REGULARISERS),
):
    CALLS |= {f"{_kind} {x}": partial(_make, None, **{_kind: x}) for x in _names}
for _kind in ("base", "strategy"):
    _own = {_kind: f"my_package.my_{_kind}"}
    CALLS[f"example {_kind}"] = partial(two_view.make, None, **_own)
CALLS |= {f"scenario {x}": partial(scenarios.make, name=x) for x in scenarios.SCENARIOS}
CALLS["scenario"] = partial(scenarios.make, name="joint")


def options():
    """(function, option, annotation) of each keyword-only parameter."""
    for where, function in FUNCTIONS.items():
        for name, parameter in inspect.signature(function).parameters.items():
            if parameter.kind is inspect.Parameter.KEYWORD_ONLY:
                yield where, name, parameter


NUMERIC = [
    (where, name, parameter.annotation)
    for where, name, parameter in options()
    if any(leaf.kind in (int, float) for leaf in leaves(parameter.annotation))
]
CHOSEN = [
    (where, name, parameter.annotation)
    for where, name, parameter in options()
    if any(typing.get_origin(x.kind) is Literal for x in leaves(parameter.annotation))
]


def ids(rows):
    return [f"{where}: {name}" for where, name, _ in rows]


def said_of(where, name, value) -> str:
    """What a call from Python, with nothing else in place, is told of a value."""
    function = FUNCTIONS[where]
    first = [
        None
        for parameter in inspect.signature(function).parameters.values()
        if parameter.kind is inspect.Parameter.POSITIONAL_OR_KEYWORD
    ]
    with pytest.raises(ValueError) as refused:
        CALLS.get(where, function)(*first, **{name: value})
    with pytest.raises(ValueError) as of_config:
        schema.check_arguments(function, {name: value}, "config.section")
    told, config = str(refused.value), str(of_config.value)
    assert config.startswith(f"config.section.{name}")
    assert told.endswith(config.removeprefix("config.section"))
    return told


def wrong_numbers(leaf):
    """Numbers that a leaf does not allow, and values that are no numbers."""
    yield from (NAN, INF, -INF, 1e300, 10**400)
    if str not in leaf.beside:
        yield "3"
    if bool not in leaf.beside:
        yield True
    for rule in leaf.rules:
        if rule.least > -INF:
            yield rule.least - (1 if leaf.kind is int else max(1e-3, rule.least / 2))
        if rule.above > -INF:
            yield rule.above
        if rule.most < INF:
            yield rule.most + (1 if leaf.kind is int else 0.5)
        if rule.below < INF:
            yield rule.below
    if leaf.kind is int:
        yield 1.5
        if all(rule.most == INF for rule in leaf.rules):
            yield from (2**31, 2_147_483_648_000)


@pytest.mark.parametrize("where, name, annotation", NUMERIC, ids=ids(NUMERIC))
def test_a_number_out_of_its_range_is_refused_by_name(where, name, annotation):
    for leaf in leaves(annotation):
        if leaf.kind in (int, float):
            for wrong in wrong_numbers(leaf):
                said = said_of(where, name, leaf.wrap(wrong))
                shown = re.escape(repr(wrong))
                pattern = rf"{name}(\[\d+\])?={shown}: (must be \S|allowed are)"
                assert re.search(pattern, said), said


@pytest.mark.parametrize("where, name, annotation", CHOSEN, ids=ids(CHOSEN))
def test_a_word_that_is_no_choice_is_refused_by_name(where, name, annotation):
    for leaf in leaves(annotation):
        words = typing.get_args(leaf.kind)
        if words and str not in leaf.beside:
            said = said_of(where, name, leaf.wrap("nonsense"))
            assert re.search(rf"{name}(\[\d+\])?='nonsense': ", said), said
            assert all(str(word) in said for word in words), said


def test_every_number_has_a_range():
    """A plain `float` or `int` may be anything finite: nothing here may."""
    without = [
        (where, name)
        for where, name, annotation in NUMERIC
        for leaf in leaves(annotation)
        if leaf.kind in (int, float)
        and not any(isinstance(rule, schema.Range) for rule in leaf.rules)
    ]
    unannotated = [
        (where, name)
        for where, name, parameter in options()
        if parameter.annotation is inspect.Parameter.empty
    ]
    assert without == unannotated == []


@pytest.mark.parametrize("where", FUNCTIONS)
def test_defaults_are_allowed(where):
    schema.check_arguments(
        FUNCTIONS[where], schema.defaults(FUNCTIONS[where]), "config"
    )


def test_none_is_refused_where_it_means_nothing():
    for where, name, parameter in options():
        some = parameter.annotation
        if type(None) not in members(some) and some is not Any:
            assert f"{name}=None" in said_of(where, name, None), (where, name)


@pytest.mark.parametrize(
    "changes, said",
    [
        ({"optimizer.lr": INF}, "config.optimizer.lr=inf"),
        ({"optimizer.nesterov": "text"}, "config.optimizer.nesterov='text'"),
        ({"augment.mean": (123.7,)}, "config.augment.mean[0]=123.7"),
        ({"augment.size": 10**8}, "config.augment.size=100000000"),
        ({"method.temperature": -1}, "config.method.base.temperature=-1"),
        ({"epochs": (1, 2**31)}, "config.epochs[1]=2147483648"),
        ({"progress": (INF, 1.0)}, "config.progress=(inf, 1.0)"),
        ({"name": "../x"}, "config.name='../x'"),
        ({"name": b"x"}, "config.name=b'x'"),
        (
            {"optimizer.lr": 3e38, "scale_lr": True, "batch_size": 512},
            "config.optimizer.lr=3e+38 x config.batch_size=512 / 256=6e+38",
        ),
        ({"scenario.scenario": "joint"}, "config.scenario.scenario"),
        (
            {"scenario": {"name": "after", "num_tasks": 2, "long_tail": {"factor": 2}}},
            "config.scenario.long_tail={'factor'",
        ),
        ({"method": {"name": "icl"}, "batch_size": 1}, "config.batch_size=1"),
        ({"method.name": "..er"}, "config.method.name='..er'"),
        (
            {"replay": {"per_class": 10**9}, "method": {"name": "er"}},
            "config.replay.per_class=1000000000 x 10 classes=10000000000",
        ),
        ({"epochs": 2**31 - 1}, "config.epochs=2147483647"),
        ({"data": {"name": "digits", "size": 10**4}}, "config.data.size=10000"),
        ({"augment.size": 12, "augment.crop": False}, "config.augment.size=12"),
    ],
)
def test_nonsense_is_refused(tmp_path, changes, said):
    config = toy.config().unlock()
    for field, value in changes.items():
        section, _, name = field.rpartition(".")
        with config.ignore_type():
            (config[section] if section else config)[name] = value
    with pytest.raises(ValueError, match=re.escape(said)):
        build.build(config, tmp_path / "run")
    assert not (tmp_path / "run").exists()


NESTED = {"base": {"name": "byol", "momentum_end": 0.5}, "strategy": {"name": "pnr"}}


@pytest.mark.parametrize(
    "section",
    [
        NESTED,
        # As configs once were: all options beside the names.
        {"base": "byol", "strategy": "pnr", "momentum_end": 0.5},
        # A config may hold None for a size of every base.
        {"base": "byol", "strategy": "pnr", "momentum_end": 0.5, "queue_size": None},
        # A flag's option stands beside the section that the config has.
        NESTED | {"base": {"name": "byol", "momentum_end": 0.1}, "momentum_end": 0.5},
        NESTED | {"base": NESTED["base"] | {"queue_size": schema.MISSING}},
    ],
)
def test_an_option_of_a_base_is_in_the_section_of_the_base(section):
    assert schema.options(two_view.make, section, "config.method") == NESTED
    nested = schema.nest_options(two_view.make, section, "config.method")
    assert schema.nest_options(two_view.make, nested, "config.method") == nested


@pytest.mark.parametrize(
    "section, said",
    [
        ({"base": "byol", "queue_sise": None}, "config.method.queue_sise"),
        ({"base": {"name": "byol", "queue_sise": None}}, "config.method.base.queue_"),
        ({"base": "byol", "queue_size": 8}, "config.method.queue_size=8.*'mocov2plus'"),
        ({"base": {"name": "byol", "queue_size": 8}}, "base.queue_size=8.*'nnclr'"),
        ({"base": {"name": "byol", "form": "pape"}}, "base.form='pape'.*paper"),
        ({"base": "byool"}, "config.method.base='byool'.*byol"),
        ({"base": 3}, "config.method.base=3"),
        ({"strategy": {"weight": -1}}, "config.method.strategy.weight=-1"),
    ],
)
def test_a_section_in_config_method_refuses_what_its_function_does(section, said):
    with pytest.raises(errors.Refused, match=said):
        schema.options(two_view.make, section, "config.method")


# The rules


def made(
    parts,
    *,
    rate: schema.Weight = 0.5,
    sizes: Annotated[tuple[schema.Count, ...], schema.Entries(once=True)] = (1,),
    pair: tuple[schema.Share, schema.Share] = (0.0, 1.0),
    form: Literal["paper", "code"] = "paper",
    many: Annotated[int, schema.Range(0, 2**40)] = 3,
    either: schema.Count | Literal["all"] | None = None,
    loud=2.0,
    quiet=None,
):
    """An example whose answer is its options."""
    return {key: value for key, value in locals().items() if key != "parts"}


@pytest.mark.parametrize(
    "given, said",
    [
        ({"rate": -0.1}, "rate=-0.1"),
        ({"rate": NAN}, "rate=nan"),
        ({"rate": 1e39}, "rate=1e+39"),  # in float32
        ({"rate": "1"}, "rate='1'"),
        ({"rate": True}, "rate=True"),
        ({"sizes": ()}, "sizes=()"),
        ({"sizes": (2, 2)}, "sizes=(2, 2)"),
        ({"sizes": (2, 0)}, "sizes[1]=0"),
        ({"sizes": "12"}, "sizes='12'"),
        ({"pair": (0.5,)}, "pair=(0.5,)"),
        ({"pair": (0.5, 2)}, "pair[1]=2"),
        ({"form": "pape"}, "form='pape'"),
        ({"form": 3}, "form=3"),
        ({"many": 2**40 + 1}, "many=1099511627777"),
        ({"either": 0}, "either=0"),
        ({"either": "some"}, "either='some'"),
        ({"either": 1.5}, "either=1.5"),
        ({"loud": "very"}, "loud='very'"),
        ({"loud": NAN}, "loud=nan"),
        ({"loud": None}, "loud=None"),
    ],
)
def test_what_an_annotation_refuses(given, said):
    said = re.escape(f"config.x.{said}")
    for call in (
        lambda: schema.options(made, given, "config.x"),
        lambda: schema.checked("config.x")(made)(None, **given),
    ):
        with pytest.raises(ValueError, match=f"^{said}"):
            call()


def test_a_decorated_function_keeps_its_signature():
    wrapped = schema.checked("config.x")(made)
    assert inspect.signature(wrapped) == inspect.signature(made)
    assert schema.defaults(wrapped)["rate"] == 0.5
    with pytest.raises(ValueError, match=r"config\.y\.rat"):
        schema.options(wrapped, {"rat": 1}, "config.y")
