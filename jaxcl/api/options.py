"""Print the options of a config: value, origin, range and meaning.

`jaxcl options CONFIG` prints options that the config or the command sets; `--all`
prints all. Meanings come from docstrings and comments, ranges from annotations.
"""

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

from absl import flags

from jaxcl import schema
from jaxcl.config import build, command, files
from jaxcl.config import options as options_lib
from jaxcl.data import files as files_lib
from jaxcl.data import splits, stream
from jaxcl.errors import Refused
from jaxcl.memory import policies

_WRONG = (ValueError, TypeError, AttributeError, KeyError, OSError)  # of a config


class OptionEntry(NamedTuple):
    """One option as it is printed."""

    option: schema.Option
    origin: str  # "default", "config", "command"; or "start", "checkpoint": an encoder
    meaning: str


@functools.cache
def meanings(function: Callable) -> dict[str, str]:
    """Read the meanings of a function's parameters from its docstring or comments.

    Args:
      function: of options; or a dataclass or NamedTuple, with a comment at each field.
    """
    signature = inspect.signature(function)
    function, known = schema.unwrap(function), set(signature.parameters)
    if inspect.isclass(function):
        return _from_comments(_read_class(function), known)
    told = _from_docstring(inspect.getdoc(function) or "", known)
    made = signature.return_annotation
    if made is stream.Dataset:
        told = _from_comments(_read_class(splits.ImageOptions), known) | told
    for kind in made.__mro__ if inspect.isclass(made) else ():  # a network, its bases
        told = _from_docstring(inspect.cleandoc(kind.__doc__ or ""), known) | told
    return told


def _read_class(kind: type) -> str:
    """Read the source of a class that stands at the top of a module.

    For a class, `inspect.getsource` parses the module, at which Python 3.11 fails once
    in some thousand times (SystemError: AST constructor recursion depth mismatch).
    """
    whole = inspect.getsource(sys.modules[kind.__module__])
    found = re.search(rf"^class {kind.__name__}\b.*?(?=^\S|\Z)", whole, re.M | re.S)
    return found[0] if found else ""


def _from_docstring(text, known) -> dict[str, str]:
    """Read "name, other: words" and the more indented lines below."""
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
    """Read the comment behind a field, or on the lines before it."""
    found, before = {}, []
    for line in text.splitlines():
        code, _, comment = line.partition("#")
        match = re.match(r"\s+(\w+):", code)
        if match and match[1] in known:
            words = comment.strip() or " ".join(before)
            found[match[1]] = words
        before = [*before, comment.strip()] if comment and not code.strip() else []
    return found


def read_command(argv: Sequence[str]) -> tuple[dict, set[str]]:
    """Read the config that `jaxcl train` would run, and what the command sets.

    Args:
      argv: "--config=NAME", and overrides.

    Raises:
      Refused: an argument is wrong.
    """
    given = (re.match(r"--config\.([\w.]+)", word) for word in argv)
    return files.read_config(argv).to_dict(), {found[1] for found in given if found}


def entries(raw: Mapping, given: set[str]) -> Iterator[OptionEntry]:
    """Yield every option of a config, with the origin of its value.

    One origin is the encoder of config.start or config.checkpoint.

    Args:
      raw: config as a mapping.
      given: fields that the command sets, as "method.temperature".

    Raises:
      Refused: a section names a function that does not exist, or there is no encoder
        where the config says.
    """
    whole = dict(raw)
    if raw.get("checkpoint") != "":  # configs/transfer.py leaves it to the command
        whole = build.fill_from_encoder(whole)
    asked = options_lib.flatten(raw)
    origins = {f"config.{name}": "command" for name in given}
    for path, value in options_lib.flatten(whole).items():
        if asked.get(path) != value:
            origins[path] = "checkpoint" if raw.get("checkpoint") else "start"
    for option in options_lib.iterate_options(whole):
        found = (origins[x] for x in _list_spellings(option.path) if x in origins)
        origin = next(found, "config") if option.asked else "default"
        meaning = "no such option"
        if option.function:
            told = meanings(option.function)
            meaning = option.meaning or told.get(option.name, "")
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
    return "\n\n".join(_format_option(path, [*own], width) for path, own in paths)


def _format_option(path, own, width) -> str:
    function: Any = own[0].option.function
    lines = [f"{path}   ({function.__module__}.{function.__qualname__})"]
    for option, origin, meaning in own:
        unset = option.value is schema.NONE
        value = "" if unset else f" = {option.value!r}  [{origin}]"
        if option.stands_for != option.value:
            value += f", here {option.stands_for!r}"
        said = [meaning] if meaning else []
        if option.annotation:
            said.append(f"must be {schema.allowed(option.annotation)}")
        if option.asked and option.default not in (schema.NONE, option.value):
            said.append(f"default {option.default!r}")
        words = textwrap.wrap("; ".join(said), max(width, 60) - 6)
        lines += [f"  {option.name}{value}", *(f"{'':6}{line}" for line in words)]
    return "\n".join(lines)


def _check_values(found: Sequence[OptionEntry]) -> None:
    """Refuse what the command sets and `jaxcl train` would refuse."""
    for option, origin, _ in found:
        if origin != "command":
            continue
        if option.function is None:
            section = option.path.rpartition(".")[0]
            others = (x.option for x in found if x.option.function)
            paths = [x.path for x in others if x.path.startswith(f"{section}.")]
            beside = [path.removeprefix(f"{section}.") for path in paths]
            near = difflib.get_close_matches(option.name, beside, n=3)
            hint = f"; did you mean {' or '.join(near)}?" if near else ""
            raise Refused(f"{option.path}={option.value!r}: no such option{hint}")
        if option.annotation:
            schema.check_value(option.value, option.annotation, option.path, option)
        if option.path == "config.replay.policy":
            policies.look_up(option.value)


def main(argv: Sequence[str] | None = None) -> int:
    """Print the options of a config; exit code 2 if there is no such config."""
    words = list(sys.argv[1:] if argv is None else argv)
    if not words or words[0] in ("-h", "--help"):
        print(
            "usage: jaxcl options CONFIG [--all] [--config.OPTION=VALUE ...]\n\n"
            + (__doc__ or "")
        )
        return 0 if words else 2
    files_lib.lift_pillow_limit()
    try:
        raw, given = read_command([word for word in words if word != "--all"])
        found = [*entries(raw, given)]
        _check_values(found)
    except (*_WRONG, flags.Error) as error:
        return command.complain(str(error).replace("\n", " "))
    shown = [x for x in found if x.origin != "default" or "--all" in words]
    print(format_options(shown, shutil.get_terminal_size((100, 24)).columns))
    if left_out := len(found) - len(shown):
        print(f"\n{left_out} more options have their defaults: add --all")
    return 0
