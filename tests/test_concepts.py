"""docs/concepts.md: its worked example, its sections and its words."""

import ast
import inspect
import pathlib
import re

import numpy as np
import pytest

from jaxcl import metrics, sections
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
        "average accuracy", "forgetting", "stability", "plasticity",
    ]  # fmt: skip
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


def test_the_numbers_of_the_sums_are_those_of_the_matrix():
    matrix, alone = worked()
    there = {round(x, 2) for x in [*matrix.ravel(), *alone]}
    for name, formula, _ in BY_HAND:
        assert {float(x) for x in re.findall(r"\d\.\d\d", formula)} <= there, name


def test_the_formulas_are_those_of_the_metrics():
    """Written out again from the page's formulas, as loops, on random matrices."""
    rng = np.random.default_rng(0)
    for size in (2, 3, 5):
        a, ft = rng.uniform(size=(size, size)), rng.uniform(size=size)
        last, before = size - 1, range(size - 1)
        forgetting = [max(a[t, j] for t in before) - a[last, j] for j in before]
        stability = [max(a[t, j] for t in range(size)) - a[last, j] for j in before]
        ahead = [np.mean([a[j, i] - ft[i] for i in range(j + 1, size)]) for j in before]
        assert metrics.average_accuracy(a) == pytest.approx(np.mean(a[last]))
        assert metrics.forgetting(a) == pytest.approx(np.mean(forgetting))
        assert metrics.stability(a) == pytest.approx(np.mean(stability))
        assert metrics.plasticity(a, ft) == pytest.approx(np.mean(ahead))


def test_all_sections_and_scenarios_are_named():
    part = re.search(r"## Config and sections\n(.*?)\n## ", PAGE, re.S)[1]
    named = set(re.findall(r"^\| (.*?) \|", part, re.M))
    named = {name for cell in named for name in re.findall(r"config\.(\w+)", cell)}
    fields = inspect.signature(sections.Top).parameters
    sections_ = {"data", "scenario", "augment", "encoder", "method", "replay"}
    assert named == sections_ | {"optimizer", "schedule", "evaluators"}
    assert named <= set(fields)
    part = re.search(r"## Source, scenario, task\n(.*?)\n## ", PAGE, re.S)[1]
    named = set(re.findall(r"^\| `(\w+)` \|", part, re.M))
    tree = ast.parse(inspect.getsource(scenarios))
    strings = {n.value for n in ast.walk(tree) if isinstance(n, ast.Constant)}
    assert named <= strings and {"class", "data", "domain", "joint"} <= named


def test_the_glossary_is_sorted_and_explains_what_the_page_marks():
    text, glossary = PAGE.split("## Glossary")
    words = re.findall(r"^\| (?!word|---)([^|]+?) \|", glossary, re.M)
    assert len(words) > 40 and words == sorted(words, key=str.lower)
    known = {part.strip() for word in words for part in word.split(",")}
    marked = set(re.findall(r"(?<!\*)\*([a-z ]+)\*(?!\*)", text))
    assert marked - {"italics"} <= known
    for word in ("task-free", "rehearsal", "distillation", "linear probe", "reservoir"):
        assert word in known
