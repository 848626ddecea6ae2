"""`jaxcl list KIND`: what a config may name, a line each, from the code itself."""

import argparse
import importlib
import inspect
import pkgutil
import re
import shutil
import textwrap
from collections.abc import Callable, Iterator, Sequence

from jaxcl.config import files, own_images, sections
from jaxcl.data import sources
from jaxcl.methods.two_view import bases, strategies


def _first_line(text: str | None) -> str:
    """The first sentence of what something says of itself."""
    whole = inspect.cleandoc(text or "").partition("\n\n")[0]
    return re.split(r"\. (?=[A-Z])", " ".join(whole.split()))[0].rstrip(".")


def _modules(package: str) -> Iterator[tuple[str, str]]:
    """Modules of a package that have `make`, and their first lines."""
    for found in pkgutil.iter_modules(importlib.import_module(package).__path__):
        module = importlib.import_module(f"{package}.{found.name}")
        if hasattr(module, "make") and found.name != "features":  # it is no evaluator
            yield found.name, _first_line(module.__doc__)


def _functions(choices: dict[str, Callable]) -> dict[str, str]:
    return {name: _first_line(made.__doc__) for name, made in choices.items()}


def _bases() -> dict[str, str]:
    """Describe each base: its first line, and what it has."""
    found = {}
    for name, make in bases.BASES.items():
        base = make()
        has = {
            "reads labels": base.supervised,
            "a slow network": base.momentum,
            "a queue": base.queue_size,
            "a predictor": base.predictor_hidden_dim,
            "parameters of its own": base.init_params,
        }
        kept = [words for words, there in has.items() if there]
        found[name] = "; ".join([_first_line(make.__doc__), *kept])
    return found


def _strategies() -> dict[str, str]:
    """Describe each strategy: its first line, and whether it has a teacher."""
    found = {}
    for name, make in strategies.STRATEGIES.items():
        kept = ["keeps the network of the last task"] if make().teacher else []
        found[name] = "; ".join([_first_line(make.__doc__), *kept])
    return found


def _encoders() -> dict[str, str]:
    """config.encoder.name, and the names that own images are given beside them."""
    short = ", ".join(own_images.ENCODERS)
    takers = f"and jaxcl.fit take {short}"
    return _functions(sections.ENCODERS) | {"own_images": takers}


KINDS: dict[str, tuple[str, Callable[[], dict[str, str]]]] = {
    "methods": ("config.method.name", lambda: dict(_modules("jaxcl.methods"))),
    "bases": ("use: --config.method.base=NAME", _bases),
    "strategies": ("use: --config.method.strategy=NAME", _strategies),
    "encoders": ("config.encoder.name", _encoders),
    "data": ("config.data.name", lambda: _functions(sources.SOURCES)),
    "evaluators": ("keys of config.evaluators", lambda: dict(_modules("jaxcl.evals"))),
    "configs": ("--config=NAME", files.names),
}


def text(kind: str, width: int = 88) -> str:
    """A kind of thing as lines, each a name and what it is.

    Args:
      kind: a key of `KINDS`.
      width: of a line.
    """
    where, find = KINDS[kind]
    found = find()
    column = max(map(len, found)) + 2
    lines = [
        textwrap.fill(
            words or "-",
            max(width, column + 30),
            initial_indent=name.ljust(column),
            subsequent_indent=" " * column,
        )
        for name, words in found.items()
    ]
    return "\n".join([f"{kind} ({where})", *lines])


def overview() -> str:
    """Return the kinds, each with how many there are and one of them."""
    lines = []
    for kind, (_, find) in KINDS.items():
        found = find()
        example = "quickstart" if kind == "configs" else next(iter(found))
        lines.append(f"{kind:12} {len(found):3}   such as {example}")
    return "\n".join([*lines, "", "All of a kind: jaxcl list KIND"])


def main(argv: Sequence[str] | None = None) -> int:
    """Print the kinds that are asked for; without any, how many there are of each."""
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
        print("\n\n".join(text(kind, width) for kind in kinds))
    return 0
