"""Signatures as the schema: a section of a config becomes keyword arguments.

The range of an option has one home, its annotation:

  def make(parts, *, temperature: schema.Temperature = 0.2,
           form: Literal["paper", "code"] = "paper", rows: schema.Count | None = None)

`options` checks a config by it, the decorator `checked` a call from Python. Every
function that a config names has this decorator in place of own checks, so both refuse a
value with the same message. Checks that relate two options, or need data, stay in the
function.
"""

import collections.abc
import difflib
import functools
import inspect
import math
import re
import types
import typing
from collections.abc import Callable, Container, Mapping
from typing import Annotated, Any, Literal, NamedTuple, TypeVar

import numpy as np

from jaxcl import core, lookup
from jaxcl.errors import Refused

F = TypeVar("F", bound=Callable)
# A step computes with these: beyond them a number is infinite, or another one.
_LARGEST = {int: 2**31 - 1, float: float(np.finfo(np.float32).max)}


class Range(NamedTuple):
    """The numbers that an option may be; never nan or infinity.

    Whole numbers end at 2**31 - 1, unless `most` says otherwise.
    """

    least: float = -math.inf
    most: float = math.inf
    above: float = -math.inf
    below: float = math.inf

    @property
    def words(self) -> str:
        """Return the allowed values in words, for messages."""
        if self.least > -math.inf and self.most < math.inf:
            return f"from {self.least} to {self.most}"
        bounds = {"at least": self.least, "above": self.above}
        bounds |= {"at most": self.most, "below": self.below}
        phrases = (f"{how} {x}" for how, x in bounds.items() if abs(x) < math.inf)
        return " and ".join(phrases)

    def refusal(self, value: float) -> str:
        """Say what a number must be; "" if it is valid."""
        inside = self.least <= value <= self.most and self.above < value < self.below
        return "" if inside else self.words


class Entries(NamedTuple):
    """The number of entries that a list may have, and whether one may occur twice."""

    least: int = 1
    once: bool = False

    def refusal(self, value: typing.Sized) -> str:
        """Say what a list must be; "" if it is valid."""
        if len(value) < self.least:
            return f"a list of {self.least} or more"
        return "a list of entries that differ" if self.once and _repeats(value) else ""


class Text(NamedTuple):
    """The strings that an option may be."""

    pattern: str  # of the whole text
    words: str  # the same for messages

    def refusal(self, value: str) -> str:
        """Say what a string must be; "" if it is valid."""
        return "" if re.fullmatch(self.pattern, value) else self.words


Positive = Annotated[float, Range(above=0)]
Weight = Annotated[float, Range(least=0)]  # of a term of a loss; decays, lengths
Share = Annotated[float, Range(0, 1)]  # or a probability
Momentum = Annotated[float, Range(least=0, below=1)]  # with 1 nothing new ever enters
Fraction = Annotated[float, Range(least=0, below=1)]  # what is left is not nothing
# Cosines differ by up to 2. Over less than this their softmax in float32 is one 1 and
# zeros, so that most gradients are 0; published methods go down to 0.01.
Temperature = Annotated[float, Range(least=1e-3)]
Count = Annotated[int, Range(least=1)]
Natural = Annotated[int, Range(least=0)]
# Of a layer, and of an image's side: more is a typo that would fill the memory.
Width = Annotated[int, Range(1, 2**20)]
Layers = Annotated[int, Range(0, 1000)]
Pixels = Annotated[int, Range(1, 2**14)]


MISSING = inspect.Parameter.empty  # no default, or no value


class Option(NamedTuple):
    """One option of a function: its allowed values and the value from a config."""

    path: str  # "config.method.temperature"; of a signature its name
    function: Callable | None  # whose argument it is; None: there is no such option
    annotation: Any
    default: Any  # MISSING: it has none
    keyword: bool = True  # keyword-only, so that a config may set it
    value: Any = MISSING  # what is set, else the default; MISSING: neither
    asked: bool = False  # whether the config sets it
    stands_for: Any = MISSING  # the value, or what None or "auto" means here
    meaning: str = ""  # of what the function does not take; else its docstring has it

    @property
    def name(self) -> str:
        """The last part of the path."""
        return self.path.rpartition(".")[2]


@functools.cache
def _signature(function) -> dict[str, Option]:
    """Read the parameters of a function, or of several, by name."""
    if isinstance(function, tuple):  # the first one that has a name defines it
        return functools.reduce(lambda all, x: _signature(x) | all, function, {})
    try:
        signature = inspect.signature(function, eval_str=True)
    except NameError:  # a user's module may import types for type checkers alone
        signature = inspect.signature(function)
    original, only = unwrap(function), inspect.Parameter.KEYWORD_ONLY
    return {
        name: Option(name, original, _annotation_of(x), x.default, x.kind is only)
        for name, x in signature.parameters.items()
    }


def unwrap(function) -> Callable:
    """Return the function that a decorator or `functools.partial` holds."""
    while isinstance(function, functools.partial):
        function = function.func
    return inspect.unwrap(function)


def adapt(function: Callable, hidden: tuple[str, ...] = (), **defaults) -> Callable:
    """Give a function other defaults.

    Args:
      function: function with keyword-only parameters.
      hidden: parameters that are no options of the result.
      defaults: new defaults by the name of the parameter.
    """
    adapted: Any = functools.partial(function, **defaults)
    signature = inspect.signature(adapted)
    parameters = [x for name, x in signature.parameters.items() if name not in hidden]
    adapted.__signature__ = signature.replace(parameters=parameters)
    return adapted


def _annotation_of(parameter):
    """Return the annotation; without one, the type of the default."""
    annotation, default = parameter.annotation, parameter.default
    if annotation is MISSING or isinstance(annotation, str):
        return Any if default in (None, MISSING) else type(default)
    return annotation


def option_of(function: Callable | tuple[Callable, ...]) -> dict[str, Option]:
    """Read the keyword-only parameters of a function, or of several, by name."""
    return {name: x for name, x in _signature(function).items() if x.keyword}


class Choice(NamedTuple):
    """The rule of an option that is a section whose `name` picks a function.

    With `base: Annotated[Any, Choice(BASES)] = "simclr"` the option is a name, or
    {"name": name, option: value}. Its options are those of the function.
    """

    functions: Mapping[str, Callable]  # by name; others may be in a user's package

    @property
    def words(self) -> str:
        """Return the allowed values in words, for messages."""
        return "a name, or a section with a name"

    def refusal(self, value: Any) -> str:
        """Say what the option must be; "" if it is valid."""
        return "" if isinstance(value, str | Mapping) else self.words

    def find(self, section: Mapping[str, Any], field: str) -> tuple[Callable, dict]:
        """Find the function that a section picks; return the other keys, too."""
        section = dict(section)
        return lookup.find_entry(self.functions, section.pop("name"), field), section


def choices(function: Callable | tuple[Callable, ...]) -> dict[str, Choice]:
    """List the options of a function that are sections with a name, see `Choice`."""
    return {
        name: rule
        for name, option in option_of(function).items()
        for rule in _split_type(option.annotation)[2]
        if isinstance(rule, Choice)
    }


def nest_options(function: Callable, section: Mapping[str, Any], field: str) -> dict:
    """Write a section with each `Choice` as a section of its own.

    A plain string becomes {"name": string}. Configs once had the options of inner
    sections beside their names: such options move into the sections that take them. An
    option that is `MISSING`, or None and of another function, counts as not set: so a
    config may have values for several names.

    Args:
      function: whose options the section has.
      section: section of a config.
      field: its path, for messages ("config.method").

    Raises:
      ValueError: an inner section names no function.
    """
    rules, outer = choices(function), option_of(function)
    inner, makers = {}, {}
    for name, rule in rules.items():
        value = section.get(name, outer[name].default)
        check_value(value, outer[name].annotation, f"{field}.{name}")
        value = {"name": value} if isinstance(value, str) else dict(value)
        inner[name] = {"name": outer[name].default} | value
        makers[name] = rule.find(inner[name], f"{field}.{name}")[0]
    rest = {name: value for name, value in section.items() if name not in rules}
    options_of = {name: option_of(function) for name, function in makers.items()}
    for key in [key for key in rest if key not in outer]:
        takers = [name for name, options in options_of.items() if key in options]
        if takers or (rest[key] is None and _list_takers(rules, key)):
            value = rest.pop(key)
            for name in takers:
                inner[name][key] = value

    def is_set(name, key, value):
        others = value is None and key not in options_of[name]
        return value is not MISSING and not (others and _list_takers(rules, key))

    return rest | {
        name: {key: value for key, value in section.items() if is_set(name, key, value)}
        for name, section in inner.items()
    }


def _list_takers(rules: Mapping[str, Choice], option: str) -> list[str]:
    """List the functions of choices that take an option, as messages name them."""
    return [
        f"{kind} {name!r}"
        for kind, rule in rules.items()
        for name, function in rule.functions.items()
        if option in option_of(function)
    ]


def read_options(
    function: Callable | tuple[Callable, ...],
    section: Mapping[str, Any],
    field: str,
    without: Container[str] = (),
    beside: Mapping[str, Option] = types.MappingProxyType({}),
) -> list[Option]:
    """Read all options of a section with their values, without checks.

    An option that is set and does not exist has no function.

    Args:
      function: whose keyword-only parameters are the options; or several.
      section: options that the config sets.
      field: the path of the section ("config.method").
      without: parameters that the config does not set.
      beside: further options, which the function does not take.
    """
    by_name = {n: x for n, x in option_of(function).items() if n not in without}
    by_name = {**beside, **by_name}
    for name in section:
        if name not in by_name:
            by_name[name] = Option(name, None, Any, MISSING)
    settings = []
    for name, option in by_name.items():
        value, is_set = section.get(name, option.default), name in section
        option = option._replace(path=f"{field}.{name}", value=value, asked=is_set)
        settings.append(option._replace(stands_for=value))
    return settings


def debug(**sizes: Any) -> Callable[[F], F]:
    """Make a decorator that gives a function the small sizes of `:debug`.

    `config.shrink` applies them. Put it below `checked`.
    """

    def decorate(function):
        function.debug = sizes
        return function

    return decorate


def debug_sizes(function: Callable) -> dict[str, Any]:
    """Read the small sizes of a function for `:debug`, see `debug`."""
    return dict(getattr(unwrap(function), "debug", {}))


def fill_dependent(
    function: Callable, options: dict, replay: core.Replay | None = None
) -> dict:
    """Compute the options that depend on others, see `checked`."""
    filler = getattr(function, "fill", None)
    return {} if filler is None else filler(options, replay)


_WORDS = {
    dict: "a section",
    int: "a whole number",
    float: "a number",
    str: "a string",
    bool: "True or False",
    types.NoneType: "None",
    Any: "anything",
}


def allowed(annotation: Any) -> str:
    """Say what an annotation allows, in a few words: "from 0 to 1 or None"."""
    return " or ".join(dict.fromkeys(map(_describe_type, _union_members(annotation))))


def _describe_type(kind) -> str:
    """Say what one member of a union allows."""
    plain, inner, rules = _split_type(kind)
    if plain is Literal:
        return " or ".join(map(repr, inner))
    if plain in _LISTS:
        each = dict.fromkeys(allowed(x) for x in inner if x is not Ellipsis)
        return f"a list of {', '.join(each)}" if each else "a list"
    words = (getattr(rule, "words", "") for rule in rules)
    return next(filter(None, words), "") or _WORDS.get(plain) or plain.__name__


def check_arguments(function, values: Mapping[str, Any], field: str) -> None:
    """Refuse values that the annotations of a function's parameters do not allow.

    Args:
      function: its annotations are read; or those of several functions.
      values: arguments by the name of the parameter; other names are ignored.
      field: their path, for messages ("config.method").

    Raises:
      Refused: naming field, value and range.
    """
    for name, option in _signature(function).items():
        if name in values and not (values[name] is None is option.default):
            check_value(values[name], option.annotation, f"{field}.{name}", option)


def checked(
    field: str,
    fill: Callable[[dict, core.Replay | None], dict] | None = None,
) -> Callable[[F], F]:
    """Make a decorator that checks every call as a section of a config, by
    `check_arguments`.

    Args:
      field: path of the keyword arguments, for messages ("config.method").
      fill: (all options, config.replay or None) -> the options that depend on others,
        with their values; the function is called with these. So None may stand for a
        base's own value, which resolved.json states.
    """

    def decorate(function):
        def call(*args, **arguments):
            arguments = nest_options(function, arguments, field)
            check_arguments(function, arguments, field)
            arguments |= read_choices(function, arguments, field)
            if fill is not None:
                replay = next((getattr(x, "replay", None) for x in args), None)
                arguments = defaults(wrapped) | arguments
                arguments |= fill(arguments, replay)
            return function(*args, **arguments)

        wrapped: Any = functools.wraps(function)(call)
        wrapped.fill = fill
        return wrapped

    return decorate


def check_value(value, annotation, field: str, option: Option | None = None) -> None:
    """Refuse a value that an annotation does not allow.

    Args:
      value: a value of any type.
      annotation: a type, Annotated with a `Range` or another rule that has `refusal`, a
        Literal, a list or tuple of these, or a union.
      field: its path, for messages.
      option: whose default a message may name.

    Raises:
      Refused: naming field, value and range.
    """
    kinds = _union_members(annotation)
    # A word among numbers or sections: its message names these, too.
    mixed = len({_split_type(kind)[0] for kind in kinds} - {types.NoneType}) > 1
    for kind in kinds:
        if _has_type(value, kind):
            plain, inner, _ = _split_type(kind)
            if mixed and plain is Literal and value not in inner:
                break
            return _check_kind(value, kind, field)
    default = option.default if option else MISSING
    text = "" if default is MISSING else f"; default {default!r}"
    raise Refused(f"{field}={value!r}: must be {allowed(annotation)}{text}")


def _union_members(annotation) -> list:
    """List the members of a union; of any other type, the type alone."""
    if typing.get_origin(annotation) in (typing.Union, types.UnionType):
        members = typing.get_args(annotation)
        return [kind for member in members for kind in _union_members(member)]
    return [annotation]


def _split_type(kind) -> tuple[Any, tuple, tuple]:
    """Split a type, Annotated[list[int], rule], into list, its (int,) and its rules."""
    rules = kind.__metadata__ if typing.get_origin(kind) is Annotated else ()
    bare = typing.get_args(kind)[0] if rules else kind
    return typing.get_origin(bare) or bare, typing.get_args(bare), rules


_LISTS = (list, tuple, collections.abc.Sequence)
_NUMBERS = {int: (int, np.integer), float: (int, float, np.integer, np.floating)}


def _has_type(value, kind) -> bool:
    """Tell whether a value is of a type, apart from the type's rules."""
    plain, inner, _ = _split_type(kind)
    if plain is Literal:
        return type(value) in map(type, inner)
    if plain in _NUMBERS:  # a bool is an int to Python, never to a user
        return isinstance(value, _NUMBERS[plain]) and not isinstance(value, bool)
    if plain in _LISTS:
        return isinstance(value, _LISTS) and not isinstance(value, str | bytes)
    return not isinstance(plain, type) or plain is Any or isinstance(value, plain)


def _check_kind(value, kind, field) -> None:
    """Refuse a value of the right type that the type's rules do not allow."""
    plain, inner, rules = _split_type(kind)
    if plain is Literal:
        core.check_choice(field, value, inner)
    refusals = (rule.refusal(value) for rule in rules)
    if plain in _NUMBERS:
        refusals = (_number_refusal(value, plain, *(rules or (Range(),))),)
    if refusal := next(filter(None, refusals), ""):
        raise Refused(f"{field}={value!r}: must be {refusal}")
    if plain in _LISTS and inner:
        _check_entries(value, inner, field)


def _number_refusal(value, plain, allowed: Range) -> str:
    """Say what a number must be; "" if it is valid."""
    largest = _LARGEST[plain]
    if plain is float and not abs(value) <= largest:  # so is nan
        return " and ".join(filter(None, (allowed.words, "finite")))
    if refusal := allowed.refusal(value):
        return refusal
    if abs(value) <= largest or allowed.most < math.inf:
        return ""
    return f"at most {largest}" if value > 0 else f"at least {-largest}"


def _check_entries(values, kinds, field) -> None:
    """Refuse a list with an entry that is not allowed."""
    if kinds[-1] is Ellipsis or len(kinds) == 1:
        kinds = kinds[:1] * len(values)
    if len(values) != len(kinds):
        raise Refused(f"{field}={values!r}: must have {len(kinds)} entries")
    for number, (value, kind) in enumerate(zip(values, kinds, strict=True)):
        check_value(value, kind, f"{field}[{number}]")


def _repeats(values) -> bool:
    return any(value in values[:number] for number, value in enumerate(values))


def options(
    function,
    section,
    field: str,
    excluded=(),
    others: Mapping[str, Callable] = types.MappingProxyType({}),
) -> dict:
    """Return the keyword arguments that a section of a config gives a function.

    Args:
      function: whose keyword-only parameters are the allowed keys; or several.
      section: ConfigDict or dict.
      field: its path, for messages ("config.method").
      excluded: parameters that the config does not set.
      others: functions that the section might pick instead, by their names in messages.

    Raises:
      Refused: an unknown key (with the nearest ones), a value that its annotation
        does not allow, or a missing key that has no default.
    """
    section = nest_options(function, dict(section.items()), field)
    check_arguments(function, section, field)
    options = read_options(function, section, field, without=excluded)
    rules = choices(function)
    names = [option.name for option in options if option.function]
    for key, rule in rules.items():
        names += [f"{key}.{x}" for x in option_of(rule.find(section[key], key)[0])]
    for option in options:
        if option.function is None:
            takers = [n for n, x in others.items() if option.name in option_of(x)]
            takers += _list_takers(rules, option.name)
            _refuse_unknown(option, names, takers, field)
    for option in options:
        if option.value is MISSING:
            raise Refused(f"{option.path}: missing, and it has no default")
    set_options = {option.name: option.value for option in options if option.asked}
    return set_options | read_choices(function, set_options, field)


def read_choices(function, section: Mapping[str, Any], field: str) -> dict:
    """Check the inner sections of a section, each by the function that it picks.

    Args:
      function: function with options that are sections, see `Choice`.
      section: its options; a `Choice` that is missing has its default.
      field: the path of the section, for messages.

    Returns:
      name of each such option -> {"name": name, option: value}.
    """
    sections, nested = {}, nest_options(function, section, field)
    for key, rule in choices(function).items():
        make, inner = rule.find(nested[key], f"{field}.{key}")
        others = {f"{key} {name!r}": x for name, x in rule.functions.items()}
        inner = options(make, inner, f"{field}.{key}", others=others)
        sections[key] = {"name": nested[key]["name"], **inner}
    return sections


def _refuse_unknown(option, names, takers, field):
    """Raise an error about an option that does not exist, with the nearest ones."""
    if takers:
        raise Refused(
            f"{option.path}={option.value!r}: an option of {' and '.join(takers)}, "
            f"which {field} does not choose; leave it out"
        )
    matches = difflib.get_close_matches(option.name, names, n=3)
    hint = f"allowed are {', '.join(sorted(names)) or 'none'}"
    if matches:
        hint = f"did you mean {' or '.join(matches)}? All: jaxcl options CONFIG --all"
    raise Refused(f"{option.path}: no such option; {hint}")


def defaults(function: Callable | tuple[Callable, ...]) -> dict:
    """Return the defaults of all options that have one."""
    options = option_of(function).items()
    return {name: x.default for name, x in options if x.default is not MISSING}
