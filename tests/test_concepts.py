"""docs/concepts.md: its worked example, its sections and its words."""

import pathlib
import re

import numpy as np
import pytest

from jaxcl import metrics
from jaxcl.config import sections
from jaxcl.data import scenarios

PAGE = (pathlib.Path(__file__).parents[1] / "docs" / "concepts.md").read_text()
CODE = re.search(r"```python\n(.*?)```", PAGE, re.S)[1]
BY_HAND = re.findall(r"^\| ([a-z ]+) \| ([-+/() .\d]+) \| (-?[\d.]+) \|$", PAGE, re.M)


def worked():
    """The matrix and the accuracies alone that the page's code has."""
    names = {}
    exec(compile(CODE, "concepts.md", "exec"), names)
    return np.array(names["matrix"]), np.array(names["alone"])


def test_the_example_by_hand_is_what_the_metrics_say(capsys):
    matrix, alone = worked()
    printed = [float(line) for line in capsys.readouterr().out.split()]
    assert [name for name, *_ in BY_HAND] == [
        "average accuracy",
        "forgetting",
        "stability",
        "plasticity",
    ]
    values = [float(value) for *_, value in BY_HAND]
    assert printed == pytest.approx(values, abs=1e-12)
    want = [
        metrics.average_accuracy(matrix),
        metrics.forgetting(matrix),
        metrics.stability(matrix),
        metrics.plasticity(matrix, alone),
    ]
    assert values == pytest.approx(want, abs=1e-12)


def test_each_sum_by_hand_gives_its_number():
    for name, formula, value in BY_HAND:
        got = eval(formula, {"__builtins__": {}})
        assert got == pytest.approx(float(value), abs=1e-12), name


def test_all_sections_and_scenarios_are_named():
    part = re.search(r"## Config and sections\n(.*?)\n## ", PAGE, re.S)[1]
    cells = " ".join(re.findall(r"^\| (.*?) \|", part, re.M))
    fields = sections.Top.__annotations__.items()
    assert set(re.findall(r"config\.(\w+)", cells)) == {
        name for name, kind in fields if kind in (dict, dict | None)
    }
    part = re.search(r"## Source, scenario, task\n(.*?)\n## ", PAGE, re.S)[1]
    named = set(re.findall(r"^\| `(\w+)` \|", part, re.M))
    assert named == set(scenarios.SCENARIOS) - {"after"}  # which updates choose alone
