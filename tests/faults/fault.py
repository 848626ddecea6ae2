"""What a fault is, and how a file's are written down."""

from typing import NamedTuple


class Fault(NamedTuple):
    """One wrong line, and the tests that must notice it."""

    name: str  # "part: what is wrong"
    file: str  # from the root of the repository
    old: str  # occurs once in the file
    new: str
    tests: tuple[str, ...]  # files or node ids, from tests/
    slow: bool = False  # some of them are marked slow
    hangs: bool = False  # the code never ends


def of(file, tests, *rows, **options):
    """Faults of one file of the package.

    Args:
      file: from jaxcl/.
      tests: that must notice them, with blanks between.
      rows: (name, old, new), and behind them what is there in place of `tests`.
      options: of `Fault`.
    """
    return [
        Fault(name, f"jaxcl/{file}", old, new, tuple(own or tests.split()), **options)
        for name, old, new, *own in rows
    ]


def twins(module, *names):
    """Tests of losses against their float64 twins, by the names of their cases."""
    test = f"test_{module}.py::test_values_and_gradients_equal_the_equation"
    return " ".join(f"{test}[{name}]" for name in names)
