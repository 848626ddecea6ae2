"""`jaxcl options CONFIG`: every option, its value, where that is from, what it means.

Meanings are those of the docstrings and comments beside the options, what is allowed
that of their annotations.
"""

import inspect
import re
import shutil
import sys
import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from absl import flags

from jaxcl import schema
from jaxcl.config import build, command, files, resolved
from jaxcl.data import splits, stream

_WRONG = (ValueError, TypeError, AttributeError, KeyError, OSError)  # of a config


class Option(NamedTuple):
    """One option of a config."""

    name: str
    value: Any
    stands_for: Any  # the same, or what None or "auto" means here
    origin: str  # "default", "config", "command"; or "start", "checkpoint": an encoder
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
    signature = inspect.signature(function)
    function, known = inspect.unwrap(function), set(signature.parameters)
    if inspect.isclass(function):
        return _from_comments(inspect.getsource(function), known)
    told = _from_docstring(inspect.getdoc(function) or "", known)
    made = signature.return_annotation
    if made is stream.Dataset:
        told = _from_comments(inspect.getsource(splits.ImageOptions), known) | told
    if inspect.isclass(made):  # the network that is made
        told = _from_docstring(inspect.getdoc(made) or "", known) | told
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
    given = (re.match(r"--config\.([\w.]+)", word) for word in argv)
    return files.read(argv).to_dict(), {found[1] for found in given if found}


def sections_of(raw: Mapping[str, Any], given: set[str]) -> Iterator[Section]:
    """All sections of a config, each with all its options.

    What the encoder of config.start or config.checkpoint says is among them.

    Args:
      raw: the config.
      given: fields that the command sets, as "method.temperature".

    Raises:
      ValueError: a section names a function that there is not, or there is no encoder
        where the config says.
    """
    whole = dict(raw)
    if raw.get("checkpoint") != "":  # configs/transfer.py leaves it to the command
        whole = build.completed(whole)
    other = "start" if raw.get("checkpoint") is None else "checkpoint"
    for section in resolved.sections_of(whole):
        path = section.path.split(".")[1:]
        asked, taken = _at(raw, path), _at(whole, path)
        origins = {name: "config" for name in taken}
        origins |= {
            name: "command" for name in taken if ".".join([*path, name]) in given
        }
        origins |= {
            name: other
            for name in taken
            if name not in asked or asked[name] != taken[name]
        }
        told = {}
        for function in (*section.further, section.function):
            told |= meanings(function)
        yield Section(
            section.path,
            f"{section.function.__module__}.{section.function.__qualname__}",
            tuple(_told(option, told, origins) for option in section.options),
        )


def _at(raw, path) -> Mapping:
    """The section of a config at a path; {} where it has none."""
    for part in path:
        if isinstance(raw, list | tuple):
            raw = raw[int(part)]
        else:
            raw = raw.get(part) or {}
        if not isinstance(raw, Mapping | list | tuple):
            return {}  # a recipe's name
    return raw


def _told(option, told, origins) -> Option:
    """The option with its meaning, and where its value is from."""
    set_by = origins.get(option.name, "config")  # of a recipe of config.tuning
    return Option(
        option.name,
        option.value,
        option.stands_for,
        set_by if option.asked else "default",
        option.default,
        schema.allowed(option.annotation) if option.annotation else "",
        option.meaning or told.get(option.name, ""),
    )


def text(shown: Sequence[Section], width: int = 100) -> str:
    """The sections as text, an option a line or more."""
    return "\n\n".join(_text(section, width) for section in shown)


def _text(section, width) -> str:
    lines = [f"{section.path}   ({section.source})"]
    for option in section.options:
        unset = option.value is resolved.NONE
        value = "" if unset else f" = {option.value!r}  [{option.origin}]"
        if option.stands_for != option.value:
            value += f", here {option.stands_for!r}"
        head = f"  {option.name}{value}"
        other = option.origin != "default" and option.default not in (
            resolved.NONE,
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
        print(
            "usage: jaxcl options CONFIG [--config.OPTION=VALUE ...]\n\n"
            + (__doc__ or "")
        )
        return 0 if words else 2
    try:
        raw, given = parse(words)
        shown = [*sections_of(raw, given)]
    except (*_WRONG, flags.Error) as error:
        return command.complain(str(error).replace("\n", " "))
    print(text(shown, shutil.get_terminal_size((100, 24)).columns))
    return 0
