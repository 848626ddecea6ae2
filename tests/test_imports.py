"""The rules of the design that a reader of the sources can check."""

import ast
import pathlib
import re

import pytest

ROOT = pathlib.Path(__file__).parents[1]
SOURCES = sorted((ROOT / "jaxcl").rglob("*.py"))
# A module imports from layers below its own, or from its own.
LAYERS = [
    {"main", "compare", "speedup", "update", "export"}
    | {"report", "report_page", "report_parts", "report_charts"}
    | {"report_html", "report_numbers", "scaling", "scaling_text"},
    {"finish", "command"},
    {"train"},
    {"build"},
    {"sections", "encoder", "torch_resnet"},
    {"meter", "evaluators", "single", "transfer", "seeds", "convergence", "lineage"}
    | {"planned"},
    {"job", "record", "outcome", "cost", "plots", "checkpoint"}
    | {"collectives", "machines"},
    {"methods", "evals"},
    {
        "data",
        "nets",
        "augment",
        "augment_graph",
        "crops",
        "ddpg",
        "sharding",
        "metrics",
        "drift",
        "optim",
        "schema",
        "recipe",
        "debug",
    },
    {"core", "losses", "memory", "nnqp"},
]
RANK = {name: rank for rank, layer in enumerate(LAYERS) for name in layer}
# evals draw with plots; it is a leaf that imports nothing of jaxcl.
LEAVES = {"plots", "metrics"}
# Modules that may know ConfigDicts; all others take arguments.
READ_CONFIG = {"build", "debug", "main", "recipe", "command", "update", "scaling"}


def part(path):
    return path.relative_to(ROOT / "jaxcl").parts[0].removesuffix(".py")


def imported(path):
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("jaxcl"):
            parts = node.module.split(".")[1:]
            yield from ([parts[0]] if parts else [a.name for a in node.names])
        elif isinstance(node, ast.Import):
            for name in node.names:
                if name.name.startswith("jaxcl."):
                    yield name.name.split(".")[1]


@pytest.mark.parametrize("path", SOURCES, ids=lambda p: str(p.relative_to(ROOT)))
def test_imports_go_down(path):
    mine = part(path)
    if mine == "__init__":
        return
    for other in imported(path):
        assert RANK[other] >= RANK[mine] or other in LEAVES, f"{mine} imports {other}"


def test_the_page_of_the_design_names_these_layers():
    page = (ROOT / "docs" / "design.md").read_text()
    text = " ".join(re.search(r"Imports go down only:.*?\n\n", page, re.S)[0].split())
    named = [set(re.findall(r"`(\w+)`", part)) for part in text.split(" then ")]
    assert named[0] == set().union(*LAYERS[:6])
    assert [part for part in named[1:4]] == LAYERS[6:9]
    assert named[4] - {"plots", "metrics"} == LAYERS[9]


def test_devices_appear_in_one_file():
    words = ("jax.devices", "device_count", "device_put", "process_allgather", "Mesh(")
    for path in SOURCES:
        if part(path) != "sharding":
            found = [word for word in words if word in path.read_text()]
            assert not found, f"{path}: {found}"


def test_config_is_read_in_one_file():
    for path in SOURCES:
        if part(path) not in READ_CONFIG:
            assert "ml_collections" not in path.read_text(), path


def modules_imported(path):
    """First part of the name of every module that a file imports, wherever it does."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name.partition(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield (node.module or "").partition(".")[0]


# A newcomer looks for the table of methods in test_methods.py; these read it there.
READ_THE_TABLE = {("test_export", "test_methods"), ("test_docs", "test_methods")}


def test_no_test_module_is_imported():
    """What several modules need is in tests/helpers, or a fixture of conftest.py."""
    modules = sorted((ROOT / "tests").rglob("*.py"))
    tests = {path.stem for path in modules if path.stem.startswith("test_")}
    imports = {(path.stem, name) for path in modules for name in modules_imported(path)}
    assert {pair for pair in imports if pair[1] in tests} == READ_THE_TABLE
