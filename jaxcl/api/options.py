"""Print the options of a config: value, origin, range and meaning.

`jaxcl options CONFIG` prints options that the config or the command sets; `--all`
prints all. Meanings come from docstrings and comments, ranges from annotations.
"""

import argparse
import difflib
import functools
import inspect
import itertools
import re
import shutil
import sys
import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from jaxcl import schema
from jaxcl.config import files, options, resolve
from jaxcl.data import stream
from jaxcl.data.sources import shared
from jaxcl.errors import Refused
from jaxcl.memory import policies


class OptionEntry(NamedTuple):
    """One option as it is printed."""

    option: schema.Option
    origin: str  # "default", "config", "command"; or "start", "checkpoint": an encoder
    meaning: str


@functools.cache
def meanings(function: Callable) -> dict[str, str]:
    """Read the meanings of a function's parameters from its docstring or comments.

    Args:
      function: function with options; or a dataclass or NamedTuple, with a comment at
        each field.
    """
    signature = inspect.signature(function)
    function, names = schema.unwrap(function), set(signature.parameters)
    if inspect.isclass(function):
        return _from_comments(_read_class(function), names)
    texts = _from_docstring(inspect.getdoc(function) or "", names)
    returned = signature.return_annotation
    if returned is stream.Dataset:
        texts = _from_comments(_read_class(shared.ImageOptions), names) | texts
    # A network, and its bases.
    for kind in returned.__mro__ if inspect.isclass(returned) else ():
        texts = _from_docstring(inspect.cleandoc(kind.__doc__ or ""), names) | texts
    return texts


def _read_class(kind: type) -> str:
    """Read the source of a class that stands at the top of a module.

    For a class, `inspect.getsource` parses the module, at which Python 3.11 fails once
    in some thousand times (SystemError: AST constructor recursion depth mismatch).
    """
    source = inspect.getsource(sys.modules[kind.__module__])
    match = re.search(rf"^class {kind.__name__}\b.*?(?=^\S|\Z)", source, re.M | re.S)
    return match[0] if match else ""


def _from_docstring(text, parameters) -> dict[str, str]:
    """Read "name, other: words" and the more indented lines below."""
    texts: dict[str, list[str]] = {}
    names: list[str] = []
    depth = 0
    for line in text.splitlines():
        indent = len(line) - len(line.lstrip())
        match = re.match(r"\s*(\w+(?:, \w+)*): (.*)", line)
        wanted = match and {*match[1].split(", ")} <= parameters
        if match and wanted and not (names and indent > depth):
            names, depth = match[1].split(", "), indent
            texts |= {name: [match[2]] for name in names}
        elif line.strip() and names and indent > depth:
            for name in names:
                texts[name] = [*texts[name], line.strip()]
        else:
            names = []
    return {name: " ".join(words).rstrip(".") for name, words in texts.items()}


def _from_comments(text, fields) -> dict[str, str]:
    """Read the comment behind a field, or on the lines before it."""
    texts, before = {}, []
    for line in text.splitlines():
        code, _, comment = line.partition("#")
        match = re.match(r"\s+(\w+):", code)
        if match and match[1] in fields:
            words = comment.strip() or " ".join(before)
            texts[match[1]] = words
        before = [*before, comment.strip()] if comment and not code.strip() else []
    return texts


def read_command(argv: Sequence[str]) -> tuple[dict, set[str]]:
    """Read the config that `jaxcl train` would run, and what the command sets.

    Args:
      argv: "--config=NAME", and overrides.

    Raises:
      Refused: an argument is wrong.
    """
    matches = (re.match(r"--config\.([\w.]+)", word) for word in argv)
    return files.read_config(argv).to_dict(), {match[1] for match in matches if match}


def entries(raw: Mapping, command_options: set[str]) -> Iterator[OptionEntry]:
    """Yield every option of a config, with the origin of its value.

    One origin is the encoder of config.start or config.checkpoint.

    Args:
      raw: config as a mapping.
      command_options: fields that the command sets, as "method.temperature".

    Raises:
      Refused: a section names a function that does not exist, or there is no encoder
        where the config says.
    """
    config = dict(raw)
    if raw.get("checkpoint") != "":  # configs/transfer.py leaves it to the command
        config = resolve.fill_from_encoder(config)
    flat = options.flatten(raw)
    origins = {f"config.{name}": "command" for name in command_options}
    for path, value in options.flatten(config).items():
        if flat.get(path) != value:
            origins[path] = "checkpoint" if raw.get("checkpoint") else "start"
    for option in options.iterate_options(config):
        spelled = (origins[x] for x in _list_spellings(option.path) if x in origins)
        origin = next(spelled, "config") if option.asked else "default"
        meaning = "no such option"
        if option.function:
            words = meanings(option.function)
            meaning = option.meaning or words.get(option.name, "")
        yield OptionEntry(option, origin, meaning)


def _list_spellings(path: str) -> list[str]:
    """List the fields that set an option: config.method.base sets its name."""
    section, _, name = path.rpartition(".")
    outer = section.rpartition(".")[0]
    if outer != "config.method":
        return [path]
    return [path, section if name == "name" else f"{outer}.{name}"]


def format_options(shown: Sequence[OptionEntry], width: int = 100) -> str:
    """Return the options as text, section by section, an option a line or more."""
    paths = itertools.groupby(shown, lambda x: x.option.path.rpartition(".")[0])
    return "\n\n".join(_format_option(path, [*x], width) for path, x in paths)


def _format_option(path, section, width) -> str:
    function: Any = section[0].option.function
    lines = [f"{path}   ({function.__module__}.{function.__qualname__})"]
    for option, origin, meaning in section:
        unset = option.value is schema.MISSING
        value = "" if unset else f" = {option.value!r}  [{origin}]"
        if option.stands_for != option.value:
            value += f", here {option.stands_for!r}"
        phrases = [meaning] if meaning else []
        if option.annotation:
            phrases.append(f"must be {schema.allowed(option.annotation)}")
        if option.asked and option.default not in (schema.MISSING, option.value):
            phrases.append(f"default {option.default!r}")
        words = textwrap.wrap("; ".join(phrases), max(width, 60) - 6)
        lines += [f"  {option.name}{value}", *(f"{'':6}{line}" for line in words)]
    return "\n".join(lines)


def _check_values(listed: Sequence[OptionEntry]) -> None:
    """Refuse what the command sets and `jaxcl train` would refuse."""
    for option, origin, _ in listed:
        if origin != "command":
            continue
        if option.function is None:
            section = option.path.rpartition(".")[0]
            others = (x.option for x in listed if x.option.function)
            paths = [x.path for x in others if x.path.startswith(f"{section}.")]
            names = [path.removeprefix(f"{section}.") for path in paths]
            matches = difflib.get_close_matches(option.name, names, n=3)
            hint = f"; did you mean {' or '.join(matches)}?" if matches else ""
            raise Refused(option.path, option.value, f"no such option{hint}")
        if option.annotation:
            schema.check_value(option.value, option.annotation, option.path, option)
        if option.path == "config.replay.policy":
            policies.look_up(option.value)


def add_options(parser) -> None:
    """Add the options of `jaxcl options`."""
    parser.description = __doc__
    parser.add_config()
    parser.add_argument("--all", action="store_true", help="also those with defaults")


def main(arguments: argparse.Namespace) -> int:
    """Print the options of a config."""
    raw, command_options = read_command(arguments.config)
    listed = [*entries(raw, command_options)]
    _check_values(listed)
    shown = [x for x in listed if x.origin != "default" or arguments.all]
    print(format_options(shown, shutil.get_terminal_size((100, 24)).columns))
    if left_out := len(listed) - len(shown):
        print(f"\n{left_out} more options have their defaults: add --all")
    return 0
