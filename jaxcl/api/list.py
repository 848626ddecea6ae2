"""List what a config may name, a line each: `jaxcl list KIND`.

All lines come from the code. Only the kinds that are asked for are imported.
"""

import argparse
import importlib
import inspect
import pkgutil
import re
import shutil
import textwrap
from collections.abc import Callable, Iterator, Sequence


def _first_line(text: str | None) -> str:
    """Return the first sentence of a docstring."""
    whole = inspect.cleandoc(text or "").partition("\n\n")[0]
    return re.split(r"\. (?=[A-Z])", " ".join(whole.split()))[0].rstrip(".")


def _modules(package: str) -> Iterator[tuple[str, str]]:
    """Yield the modules of a package that have `make`, and their first lines."""
    for found in pkgutil.iter_modules(importlib.import_module(package).__path__):
        module = importlib.import_module(f"{package}.{found.name}")
        if hasattr(module, "make") and found.name != "features":  # it is no evaluator
            yield found.name, _first_line(module.__doc__)


def _functions(choices: dict[str, Callable]) -> dict[str, str]:
    return {name: _first_line(made.__doc__) for name, made in choices.items()}


def _bases() -> dict[str, str]:
    """Describe the base losses of two-view methods."""
    from jaxcl.methods.two_view import bases

    return _functions(bases.BASES)


def _strategies() -> dict[str, str]:
    """Describe the strategies of two-view methods."""
    from jaxcl.methods.two_view import strategies

    return _functions(strategies.STRATEGIES)


def _encoders() -> dict[str, str]:
    """Describe the names of config.encoder.name, and those for own images."""
    from jaxcl.config import own_images, sections

    short = ", ".join(own_images.ENCODERS)
    takers = f"and jaxcl.fit take {short}"
    return _functions(sections.ENCODERS) | {"own_images": takers}


def _data() -> dict[str, str]:
    """Describe the sources of images and graphs."""
    from jaxcl.data import sources

    return _functions(sources.SOURCES)


def _configs() -> dict[str, str]:
    """Describe the configs that come with the library."""
    from jaxcl.config import files

    return files.describe_configs()


# Kind -> what to type, and the function that finds all of that kind
KINDS: dict[str, tuple[str, Callable[[], dict[str, str]]]] = {
    "methods": (
        "--config.method.name=NAME",
        lambda: dict(_modules("jaxcl.methods")),
    ),
    "bases": (
        "jaxcl train CONFIG --config.method.base=NAME",
        _bases,
    ),
    "strategies": (
        "jaxcl train CONFIG --config.method.strategy=NAME",
        _strategies,
    ),
    "encoders": ("--config.encoder.name=NAME", _encoders),
    "data": ("--config.data.name=NAME", _data),
    "evaluators": (
        'in a config: config.evaluators = {"NAME": {}}',
        lambda: dict(_modules("jaxcl.evals")),
    ),
    "configs": ("jaxcl train NAME", _configs),
}


def format_kind(kind: str, width: int = 88) -> str:
    """Write a kind as lines, each a name and its description.

    Args:
      kind: a key of `KINDS`.
      width: of a line.
    """
    where, find = KINDS[kind]
    found = find()
    column, lines = max(map(len, found)) + 2, [f"{kind}. Use: {where}"]
    for name, words in found.items():
        wrapped = textwrap.wrap(words or "-", max(width - column, 30))
        heads = [name, *[""] * len(wrapped)]
        lines += [f"{x:{column}}{y}" for x, y in zip(heads, wrapped, strict=False)]
    return "\n".join(lines)


def overview() -> str:
    """Return the kinds, each with its count and one example."""
    lines = []
    for kind, (_, find) in KINDS.items():
        found = find()
        example = "quickstart" if kind == "configs" else next(iter(found))
        lines.append(f"{kind:12} {len(found):3}   such as {example}")
    return "\n".join([*lines, "", "All of a kind: jaxcl list KIND"])


def main(argv: Sequence[str] | None = None) -> int:
    """Print the kinds that are asked for; without any, an overview."""
    parser = argparse.ArgumentParser(prog="jaxcl list", description=__doc__)
    known = ", ".join(KINDS)
    parser.add_argument("kinds", nargs="*", metavar="KIND", help=f"of {known}")
    kinds = parser.parse_args(argv).kinds
    if wrong := [kind for kind in kinds if kind not in KINDS]:
        parser.error(f"unknown kind {wrong[0]!r}. Choose: {known}")
    width = shutil.get_terminal_size((88, 24)).columns
    if not kinds:
        print(overview())
    else:
        print("\n\n".join(format_kind(kind, width) for kind in kinds))
    return 0
