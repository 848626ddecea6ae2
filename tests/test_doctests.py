"""The examples in docstrings of the losses: they run, and no public loss lacks one."""

import doctest
import functools
import importlib
import inspect
import pathlib
import pkgutil
import re

import jax
import pytest

from helpers import interpreted
from jaxcl import losses

ROOT = pathlib.Path(__file__).resolve().parents[1]
MODULES = [info.name for info in pkgutil.iter_modules(losses.__path__)]


def module_of(name):
    return importlib.import_module(f"jaxcl.losses.{name}")


def public_losses():
    """(module, function) of docs/public_names.txt."""
    table = (ROOT / "docs" / "public_names.txt").read_text()
    names = []
    for block in re.split(r"^(?=jaxcl\.)", table, flags=re.MULTILINE):
        match = re.match(r"jaxcl\.losses\.(\w+)\s", block)
        if match:
            calls = block[match.end() :]
            names += [(match[1], name) for name in re.findall(r"(\w+)\(", calls)]
    return names


def without_compiling(function):
    """A loss whose operations are computed one by one, by NumPy."""

    @functools.wraps(function)
    def call(*arguments, **options):
        leaves, tree = jax.tree.flatten((arguments, options))
        places = [i for i, x in enumerate(leaves) if isinstance(x, jax.Array)]

        def part(arrays):
            filled = list(leaves)
            for place, array in zip(places, arrays, strict=True):
                filled[place] = array
            arguments, options = jax.tree.unflatten(tree, filled)
            return function(*arguments, **options)

        return interpreted.jit(part)([leaves[i] for i in places])

    return call


@pytest.mark.parametrize("name", MODULES)
def test_examples_print_what_they_say(name, monkeypatch):
    examples = doctest.DocTestFinder(exclude_empty=True).find(module_of(name))
    for module in map(module_of, MODULES):
        for place, function in inspect.getmembers(module, inspect.isfunction):
            if function.__module__ == module.__name__:
                monkeypatch.setattr(module, place, without_compiling(function))
    runner = doctest.DocTestRunner()
    for example in examples:
        runner.run(example)
    assert runner.tries > 0 and runner.failures == 0


def test_every_public_loss_has_an_example():
    names = public_losses()
    assert {module for module, _ in names} == set(MODULES)
    assert len(names) > 25
    without = [
        f"{module}.{name}"
        for module, name in names
        if f"{module}.{name}(" not in example_of(module, name)
    ]
    assert not without, "their docstrings need an example (>>>)"


def example_of(module, name):
    """The statements of a function's example."""
    text = getattr(module_of(module), name).__doc__
    examples = doctest.DocTestParser().get_examples(text)
    return "".join(example.source for example in examples)
