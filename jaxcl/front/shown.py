"""`jaxcl show CONFIG`: every option, its value, where that is from, what it means.

Meanings are those of the docstrings and comments beside the options, what is allowed
that of their annotations.
"""

import dataclasses
import inspect
import re
import shutil
import sys
import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from absl import flags
from ml_collections import config_flags

from jaxcl import schema
from jaxcl.augment import graphs as augment_graphs
from jaxcl.augment import images as augment_images
from jaxcl.config import command, files, sections
from jaxcl.data import from_folders, scenarios, sources, stream
from jaxcl.methods.online import replay
from jaxcl.nets import tuning

_WRONG = (ValueError, TypeError, AttributeError, KeyError, OSError)  # of a config
_NONE = inspect.Parameter.empty  # no default
# What stands beside the options of a function in its section: default, meaning.
_BESIDE = {
    "augment": {
        "name": ("images", '"images" or "graphs"'),
        "resize": (None, "shorter side before the middle is cut, to evaluate"),
    },
    "optimizer": {"lr": (_NONE, "learning rate at its peak, see config.scale_lr")},
    "scenario": {"name": (_NONE, "how the set is cut into tasks")},
}
_OF_AN_ENTRY = {
    "name": (_NONE, "of the evaluator, where it is not the key"),
    "last_only": (False, "whether it runs after the last task alone"),
    "skip": (False, "whether it never runs"),
}
_NAMED = {"name": (_NONE, "which of them, see `jaxcl list`")}


class Option(NamedTuple):
    """One option of a config."""

    name: str
    value: Any
    origin: str  # "default", "config" or "command"
    default: Any  # inspect.Parameter.empty: it has none
    allowed: str
    meaning: str


class Section(NamedTuple):
    """A section of a config, and the function whose arguments it has."""

    path: str  # "config.method"
    source: str  # "jaxcl.methods.two_view.step.make"
    options: tuple[Option, ...]


def meanings(function: Callable) -> dict[str, str]:
    """What a function says of its parameters: in its docstring, or in comments.

    Args:
      function: of options; or a dataclass or NamedTuple, with a comment at each field.
    """
    function = inspect.unwrap(function)
    signature = inspect.signature(function)
    known = set(signature.parameters)
    if inspect.isclass(function):
        return _from_comments(inspect.getsource(function), known)
    told = _from_docstring(inspect.getdoc(function) or "", known)
    made = signature.return_annotation
    others = [made] if inspect.isclass(made) else []  # the network that is made
    others += [from_folders.image_folder] if made is stream.Dataset else []
    for other in others:
        told = _from_docstring(inspect.getdoc(other) or "", known) | told
    return told


def _from_docstring(text, known) -> dict[str, str]:
    """ "name, other: words" and the lines below that are indented more."""
    found: dict[str, list[str]] = {}
    names: list[str] = []
    depth = 0
    for line in text.splitlines():
        indent = len(line) - len(line.lstrip())
        match = re.match(r"\s*(\w+(?:, \w+)*): (.*)", line)
        wanted = match and {*match[1].split(", ")} <= known
        if match and wanted and not (names and indent > depth):
            names, depth = match[1].split(", "), indent
            found |= {name: [match[2]] for name in names}
        elif line.strip() and names and indent > depth:
            for name in names:
                found[name] = [*found[name], line.strip()]
        else:
            names = []
    return {name: " ".join(words).rstrip(".") for name, words in found.items()}


def _from_comments(text, known) -> dict[str, str]:
    """The comment behind a field, or on the lines before it."""
    found, before = {}, []
    for line in text.splitlines():
        code, _, comment = line.partition("#")
        match = re.match(r"\s+(\w+):", code)
        if match and match[1] in known:
            words = comment.strip() or " ".join(before)
            found[match[1]] = words
        before = [*before, comment.strip()] if comment and not code.strip() else []
    return found


def parse(argv: Sequence[str]) -> tuple[dict, set[str]]:
    """The config that `jaxcl train` would run, and the fields that the command sets.

    Args:
      argv: "--config=NAME", and overrides.

    Raises:
      ValueError: an argument is wrong.
    """
    words = ["show", *files.located_in([*argv])]
    values = flags.FlagValues()
    config_flags.DEFINE_config_file(
        "config",
        None,
        flag_values=values,
        sys_argv=words,
        lock_config=False,
        accept_new_attributes=True,
    )
    left = values(words)
    if len(left) > 1 or values["config"].value is None:
        raise ValueError(f"{' '.join(argv)!r}: must be a config, and --config.OPTIONs")
    given = (re.match(r"--config\.([\w.]+)", word) for word in argv)
    return values["config"].value.to_dict(), {found[1] for found in given if found}


def sections_of(raw: Mapping[str, Any], given: set[str]) -> Iterator[Section]:
    """All sections of a config, each with all its options.

    Args:
      raw: the config.
      given: fields that the command sets, as "method.temperature".

    Raises:
      ValueError: a section names a function that there is not.
    """
    fields = {field.name: field for field in dataclasses.fields(sections.Top)}
    whole = {name for name, field in fields.items() if _is_section(field)}
    rest = {name: value for name, value in raw.items() if name not in whole}
    yield _section("config", sections.Top, rest, given, without=whole)
    for name in fields:
        if name not in whole or raw.get(name) is None:
            continue
        value = raw[name]
        if name == "evaluators":
            yield from _evaluators(value, given)
        elif isinstance(value, Mapping):
            path = f"config.{name}"
            function, options = _function_of(name, value)
            yield _section(path, function, options, given, beside=_BESIDE.get(name))


def _is_section(field) -> bool:
    return field.type is dict or "dict" in str(field.type)


def _function_of(name, section) -> tuple[Callable, dict]:
    """The function whose arguments a section has, and the section."""
    section, field = dict(section), f"config.{name}"
    choices = {
        "data": sources.SOURCES,
        "encoder": sections.ENCODERS,
        "optimizer": sections.OPTIMIZERS,
        "schedule": sections.SCHEDULES,
    }
    if name in choices:
        return schema.named(choices[name], section, field)[0], section
    if name == "method":
        return schema.method(section.get("name")).make, section
    graphs = section.get("name") == "graphs"
    augment = augment_graphs.make if graphs else augment_images.make
    plain = {"scenario": scenarios.make, "augment": augment}
    plain |= {"replay": replay.settings, "tuning": tuning.settings}
    return plain[name], section


def _evaluators(entries, given) -> Iterator[Section]:
    for key, section in entries.items():
        module = schema.module(
            "jaxcl.evals", section.get("name", key), f"config.evaluators.{key}.name"
        )
        path, without = f"config.evaluators.{key}", {"directory"}
        yield _section(path, module.make, section, given, without, _OF_AN_ENTRY)


def _section(path, function, raw, given, without=(), beside=None) -> Section:
    """The options of a function, with the values that a config gives them."""
    told = meanings(function)
    hidden = {"dtype", "scenario"}
    hidden |= {"epochs"} if path == "config.schedule" else set()
    options = {
        name: Option(
            name, None, "", default, schema.allowed(annotation), told.get(name, "")
        )
        for name, (annotation, default) in schema.option_of(function).items()
        if name not in without and (name not in hidden or name in raw)
    }
    also = (_NAMED if "name" in raw else {}) | (beside or {})
    # What is not an option is shown, too: `train` will refuse it.
    unknown = [name for name in raw if name not in {**options, **also}]
    also |= {name: (_NONE, "no such option") for name in unknown}
    for name, (default, meaning) in also.items():
        options.setdefault(name, Option(name, None, "", default, "", meaning))
    made = inspect.unwrap(function)
    prefix = path.removeprefix("config").lstrip(".")
    return Section(
        path,
        f"{made.__module__}.{made.__qualname__}",
        tuple(_valued(option, raw, given, prefix) for option in options.values()),
    )


def _valued(option, raw, given, prefix) -> Option:
    """The option with its value, and where that is from."""
    field = f"{prefix}.{option.name}".lstrip(".")
    if option.name not in raw:
        return option._replace(value=option.default, origin="default")
    origin = "command" if field in given else "config"
    return option._replace(value=raw[option.name], origin=origin)


def text(shown: Sequence[Section], width: int = 100) -> str:
    """The sections as text, an option a line or more."""
    return "\n\n".join(_text(section, width) for section in shown)


def _text(section, width) -> str:
    lines = [f"{section.path}   ({section.source})"]
    for option in section.options:
        unset = option.value is _NONE
        value = "" if unset else f" = {option.value!r}  [{option.origin}]"
        head = f"  {option.name}{value}"
        other = option.origin != "default" and option.default not in (
            _NONE,
            option.value,
        )
        said = [option.meaning] if option.meaning else []
        said += [f"must be {option.allowed}"] if option.allowed else []
        said += [f"default {option.default!r}"] if other else []
        lines.append(head)
        lines += textwrap.wrap(
            "; ".join(said),
            max(width, 60),
            initial_indent=" " * 6,
            subsequent_indent=" " * 6,
        )
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> int:
    """Print all options of a config; exit code 2 if there is no such config."""
    words = list(sys.argv[1:] if argv is None else argv)
    if not words or words[0] in ("-h", "--help"):
        print("jaxcl show CONFIG [--config.OPTION=VALUE ...]\n\n" + (__doc__ or ""))
        return 0 if words else 2
    try:
        raw, given = parse(words)
        shown = [*sections_of(raw, given)]
    except (*_WRONG, flags.Error) as error:
        return command.complain(str(error).replace("\n", " "))
    print(text(shown, shutil.get_terminal_size((100, 24)).columns))
    return 0
