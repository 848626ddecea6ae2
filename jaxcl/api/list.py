"""List what a config may name, a line each: `jaxcl list KIND`.

All lines come from the code. Only the kinds that are asked for are imported.
"""

import argparse
import importlib
import inspect
import re
import shutil
import textwrap
from typing import NamedTuple

from jaxcl.errors import Refused


def _first_line(text: str | None) -> str:
    """Return the first sentence of a docstring."""
    paragraph = inspect.cleandoc(text or "").partition("\n\n")[0]
    return re.split(r"\. (?=[A-Z])", " ".join(paragraph.split()))[0].rstrip(".")


class Kind(NamedTuple):
    """A kind of thing that a config may name."""

    use: str  # what to type
    place: str  # module or package that has all of the kind
    table: str = ""  # functions by name in a module; "": a package with a module each


_TWO_VIEW = "jaxcl.methods.two_view"
KINDS = {
    "methods": Kind("--config.method.name=NAME", "jaxcl.methods"),
    "bases": Kind(
        "jaxcl train CONFIG --config.method.base=NAME", f"{_TWO_VIEW}.bases", "BASES"
    ),
    "strategies": Kind(
        "jaxcl train CONFIG --config.method.strategy=NAME",
        f"{_TWO_VIEW}.strategies",
        "STRATEGIES",
    ),
    "regularisers": Kind(
        "--config.method.regulariser=NAME, with the method online_ssl",
        "jaxcl.methods.online_ssl",
        "REGULARISERS",
    ),
    "policies": Kind(
        "--config.replay.policy=NAME", "jaxcl.memory.policies", "POLICIES"
    ),
    "encoders": Kind("--config.encoder.name=NAME", "jaxcl.config.sections", "ENCODERS"),
    "data": Kind("--config.data.name=NAME", "jaxcl.data.sources.by_name", "SOURCES"),
    "scenarios": Kind(
        "--config.scenario.name=NAME", "jaxcl.data.stream.scenarios", "SCENARIOS"
    ),
    "optimizers": Kind(
        "--config.optimizer.name=NAME", "jaxcl.config.sections", "OPTIMIZERS"
    ),
    "schedules": Kind(
        "--config.schedule.name=NAME", "jaxcl.config.sections", "SCHEDULES"
    ),
    "loggers": Kind("--config.loggers=NAME", "jaxcl.run.loggers"),
    "evaluators": Kind('in a config: config.evaluators = {"NAME": {}}', "jaxcl.evals"),
    "configs": Kind("jaxcl train NAME", "jaxcl.config.files"),
}


def _docstring(entry) -> str | None:
    """Return the docstring of a module or function, or of the first in a record."""
    while isinstance(entry, tuple):  # such as a scenario or a policy
        entry = entry[0]
    return entry.__doc__


def describe_kind(kind: str) -> dict[str, str]:
    """Describe everything of a kind in a line each, by name."""
    from jaxcl import lookup  # it imports JAX

    _, place, table = KINDS[kind]
    if kind == "configs":
        return importlib.import_module(place).describe_configs()
    if table:
        entries = getattr(importlib.import_module(place), table)
    else:
        entries = lookup.list_modules(place)
    lines = {name: _first_line(_docstring(entry)) for name, entry in entries.items()}
    if kind == "encoders":
        from jaxcl.config import own_images

        short = ", ".join(own_images.ENCODERS)
        lines["own_images"] = f"and jaxcl.fit take {short}"
    return lines


def format_kind(kind: str, width: int = 88) -> str:
    """Write a kind as lines, each a name and its description.

    Args:
      kind: a key of `KINDS`.
      width: width of a line.
    """
    entries = describe_kind(kind)
    column, lines = max(map(len, entries)) + 2, [f"{kind}. Use: {KINDS[kind].use}"]
    for name, words in entries.items():
        wrapped = textwrap.wrap(words or "-", max(width - column, 30))
        heads = [name, *[""] * len(wrapped)]
        lines += [f"{x:{column}}{y}" for x, y in zip(heads, wrapped, strict=False)]
    return "\n".join(lines)


def overview() -> str:
    """Return the kinds, each with its count and one example."""
    lines = []
    for kind in KINDS:
        entries = describe_kind(kind)
        example = "quickstart" if kind == "configs" else next(iter(entries))
        lines.append(f"{kind:12} {len(entries):3}   such as {example}")
    return "\n".join([*lines, "", "All of a kind: jaxcl list KIND"])


def add_options(parser) -> None:
    """Add the options of `jaxcl list`."""
    parser.add_argument(
        "kinds", nargs="*", metavar="KIND", help=f"kinds to list: {', '.join(KINDS)}"
    )


def main(options: argparse.Namespace) -> int:
    """Print the kinds that are asked for; without any, an overview."""
    if unknown := [kind for kind in options.kinds if kind not in KINDS]:
        raise Refused("KIND", unknown[0], f"must be one of {', '.join(KINDS)}")
    width = shutil.get_terminal_size((88, 24)).columns
    texts = (format_kind(kind, width) for kind in options.kinds)
    print("\n\n".join(texts) if options.kinds else overview())
    return 0
