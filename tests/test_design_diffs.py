"""docs/design.md: each diff of "How to add" applies, and what it adds is used.

All of them go into one copy of the tree, in their order. The rules of the house are
then those of the copy's own tests.
"""

import json
import os
import pathlib
import re
import subprocess
import sys

import pytest

import mutate
from helpers import pages, processes

ROOT = pathlib.Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "design.md").read_text()
KINDS = (
    "A loss",
    "A base",
    "A strategy",
    "A replay method",
    "An evaluator",
    "A data source",
)
SECTIONS = {
    part.partition("\n")[0]: part
    for part in PAGE.partition("\n## How to add\n")[2].split("\n### ")[1:]
}
DIFFS = {name: pages.blocks(text, "diff")[0] for name, text in SECTIONS.items()}
CONFIG = """
from helpers import toy


def get_config(kind):
    changes = {
        "two_view": {
            "method.base": "align_uniform",
            "method.strategy": "hint",
            "data": {"name": "blobs", "count": 160},
            "scenario.num_tasks": 2,
            "evaluators": {"participation": {}},
        },
        "online": toy.ONLINE | {"method": {"name": "er_weighted"}},
    }
    return toy.config(epochs=1, first_tasks=2, **changes[kind])
"""


def touched(diff) -> list[str]:
    return re.findall(r"^\+\+\+ b/(.*)$", diff, re.M)


def apply(name, tree, *options):
    """Apply a diff of the page to a tree; a failure says what to do."""
    # Of a tree within a repository git would look for the files from its root.
    environment = os.environ | {"GIT_CEILING_DIRECTORIES": str(tree.parent)}
    done = subprocess.run(
        ["git", "apply", *options, "-"],
        cwd=tree,
        env=environment,
        text=True,
        input=DIFFS[name],
        capture_output=True,
    )
    assert done.returncode == 0, (
        f'docs/design.md: the diff of "{name}" no longer applies:\n{done.stderr}'
        "Save it as a file, say `git apply --reject FILE`, do by hand what was "
        "rejected, put the output of `git diff -U2` in its place, without the lines "
        "`diff`, `index` and `new file`, and take the change back."
    )


@pytest.fixture(scope="module")
def house():
    """The tree with all that the page adds."""
    with mutate.copies(1) as (tree,):
        for name in DIFFS:
            apply(name, tree)
        yield tree


def said(command, tree, **more):
    """What a command in the tree prints; it must succeed."""
    paths = os.pathsep.join([str(tree), str(tree / "tests")])
    environment = os.environ | {"PYTHONPATH": paths, "JAX_NUM_CPU_DEVICES": "8"} | more
    environment.pop("PYTEST_ADDOPTS", None)  # meant for whoever runs this
    done = subprocess.run(
        [sys.executable, *map(str, command)],
        cwd=tree,
        env=environment,
        text=True,
        capture_output=True,
        timeout=900,
    )
    assert done.returncode == 0, (
        "docs/design.md: what its diffs add no longer works; change the diffs:\n"
        f"{done.stdout[-4000:]}\n{done.stderr[-4000:]}"
    )
    return done.stdout


def pytest_in(tree, *arguments):
    command = ["-m", "pytest", "-q", "-n", "0", "-p", "no:cacheprovider", *arguments]
    return said(command, tree)


def test_the_page_shows_how_to_add_each_kind():
    assert tuple(SECTIONS) == KINDS


@pytest.mark.parametrize("name", KINDS)
def test_each_applies_by_itself(name):
    apply(name, ROOT, "--check")
    count = re.search(r"It\s+touches\s+(\d+)\s+files", SECTIONS[name])[1]
    assert int(count) == len(touched(DIFFS[name])), touched(DIFFS[name])


def test_a_diff_that_is_stale_is_named(house):
    with pytest.raises(AssertionError, match='"A base" no longer applies'):
        apply("A base", house, "--check")  # it is in there


def test_what_they_add_is_in_style(house):
    files = {path for diff in DIFFS.values() for path in touched(diff)}
    sources = sorted(path for path in files if path.endswith(".py"))
    assert len(sources) > 15
    said(["-m", "ruff", "check", "--no-cache", *sources], house)
    said(["-m", "ruff", "format", "--no-cache", "--check", *sources], house)


def test_their_own_tests_pass(house):
    """Where a table of tests has others, too, those that the diffs add."""
    added = "align_uniform or strategy or er_weighted or rank or blobs"
    names = ("noncontrastive", "bases", "er_weighted", "participation", "sources")
    files = [f"tests/test_{name}.py" for name in names]
    bounds = r" and not bfloat16 and not finite"  # of the loss, which the value implies
    printed = pytest_in(house, *files, "-k", f"({added}){bounds}")
    assert int(re.search(r"(\d+) passed", printed)[1]) > 10
    said(["tests/mutate.py", "--check"], house)


def test_the_house_with_them_keeps_its_rules(house):
    """Imports, the tree and the names of this page, tables of options, examples."""
    rules = "go_down or circle or table or drawn or public or every_function or example"
    names = ("imports", "docs", "doctests")
    files = [f"tests/test_{name}.py" for name in names]
    pytest_in(house, *files, "-k", f"({rules}) and not trains and not the_examples")


@pytest.mark.parametrize("kind", ["two_view", "online"])
def test_what_they_add_trains(house, tmp_path, kind):
    config = tmp_path / "added.py"
    config.write_text(CONFIG)
    command = ["-m", "jaxcl.main", f"--config={config}:{kind}"]
    said([*command, f"--workdir={tmp_path}/run"], house, JAX_NUM_CPU_DEVICES="1")
    losses = [
        row["loss"] for row in processes.rows_of(tmp_path / "run") if "loss" in row
    ]
    assert len(losses) >= 2
    if kind == "two_view":
        results = json.loads((tmp_path / "run" / "results.json").read_text())
        ratios = [task["participation/ratio"] for task in results["scalars"]]
        assert len(ratios) == 2 and all(1 <= ratio <= 32 for ratio in ratios)


@pytest.mark.slow
@pytest.mark.parametrize(
    "row", ["align_uniform-finetune", "simclr-hint", "er_weighted"]
)
def test_their_rows_pass_the_table_of_methods(house, row):
    printed = pytest_in(house, "-m", "", "tests/test_methods.py", "-k", f"[{row}]")
    assert "3 passed" in printed
