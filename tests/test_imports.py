"""The rules of the design that a reader of the sources can check."""

import ast
import functools
import pathlib
import re
import subprocess
import sys
import tomllib

import pytest

import jaxcl

ROOT = pathlib.Path(__file__).parents[1]
SOURCES = sorted((ROOT / "jaxcl").rglob("*.py"))
# A package, or a module beside them, imports from rows below its own, and of its own
# row what stands to the right of it.
ROWS = (
    ("__main__", "main", "compare", "speedup", "front"),
    ("leaderboard", "report", "scaling", "reproduce", "bring", "export", "update"),
    ("config", "run"),
    ("methods", "evals"),
    ("nets", "augment", "data"),
    ("losses", "memory"),
    ("sharding", "optim", "metrics", "plots", "schema", "core"),
)
RANK = {
    name: (row, at) for row, names in enumerate(ROWS) for at, name in enumerate(names)
}
LOOSE = 10  # modules that may lie at the top, beside the packages
# Below `config`, which alone reads them, functions take arguments. The schema knows
# sections as mappings.
READS_CONFIG = (
    *("main", "config", "update", "scaling", "reproduce", "leaderboard", "front"),
)


def name_of(path) -> str:
    """jaxcl.data.stream; of an __init__.py the package."""
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {name_of(path): path for path in SOURCES}


def part(name) -> str:
    """What of the table a module belongs to."""
    return name.split(".")[1]


@functools.cache
def imported(name) -> tuple:
    """The modules of jaxcl that one imports, wherever in the file it does."""
    found = set()
    for node in ast.walk(ast.parse(MODULES[name].read_text())):
        if isinstance(node, ast.ImportFrom) and node.module in {"jaxcl", *MODULES}:
            inside = {f"{node.module}.{alias.name}" for alias in node.names}
            found |= {x if x in MODULES else node.module for x in inside}
        elif isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names if alias.name in MODULES}
        assert not getattr(node, "level", 0), f"{name}: imports are absolute"
    return tuple(sorted(found))


@pytest.mark.parametrize("name", sorted(set(MODULES) - {"jaxcl"}))
def test_imports_go_down(name):
    for other in imported(name):
        above, below = part(name), part(other)
        allowed = above == below or RANK[above] < RANK[below]
        assert allowed, f"{name} imports {other}"


def circle(name, path=()):
    """The modules from `name` back to itself, if its imports lead there."""
    if name in path:
        return path[path.index(name) :]
    if name in SETTLED:
        return ()
    for other in imported(name):
        if around := circle(other, (*path, name)):
            return around
    SETTLED.add(name)
    return ()


SETTLED = set()  # modules that no circle is reached from


def test_no_imports_go_in_a_circle():
    for name in MODULES:
        assert not circle(name)


def test_few_modules_lie_loose():
    loose = {path.stem for path in (ROOT / "jaxcl").glob("*.py")}
    assert len(loose) <= LOOSE, loose
    assert loose - {"__init__", "__main__"} <= set(RANK)


def test_what_is_no_module_is_in_the_package_too():
    whole = tomllib.loads((ROOT / "pyproject.toml").read_text())
    listed = set()
    for package, patterns in whole["tool"]["setuptools"]["package-data"].items():
        folder = ROOT.joinpath(*package.split("."))
        listed |= {path for pattern in patterns for path in folder.glob(pattern)}
    files = {path for path in (ROOT / "jaxcl").rglob("*") if path.is_file()}
    others = {path for path in files if path.suffix not in (".py", ".pyc")}
    assert others == listed and len(others) > 10


def test_the_page_of_the_design_has_this_table():
    page = (ROOT / "docs" / "design.md").read_text()
    table = page.partition("## The packages")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| \d \| (.*?) \|", table, re.M)
    assert [tuple(re.findall(r"`([\w.]+?)(?:\.py|/)?`", row)) for row in rows] == [
        *ROWS
    ]


def test_devices_appear_in_one_file():
    words = ("jax.devices", "device_count", "device_put", "process_allgather", "Mesh(")
    for name, path in MODULES.items():
        if name != "jaxcl.sharding":
            found = [word for word in words if word in path.read_text()]
            assert not found, f"{path}: {found}"


def test_config_is_read_in_one_package():
    for name, path in MODULES.items():
        if name != "jaxcl" and part(name) not in READS_CONFIG:
            assert "ml_collections" not in path.read_text(), path


def modules_imported(path):
    """First part of the name of every module that a file imports, wherever it does."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name.partition(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield (node.module or "").partition(".")[0]


# A newcomer looks for the table of methods in test_methods.py; these read it there.
READ_THE_TABLE = {
    (reader, "test_methods") for reader in ("test_export", "test_examples", "row")
}


def test_no_test_module_is_imported():
    """What several modules need is in tests/helpers, or a fixture of conftest.py."""
    modules = sorted((ROOT / "tests").rglob("*.py"))
    tests = {path.stem for path in modules if path.stem.startswith("test_")}
    imports = {(path.stem, name) for path in modules for name in modules_imported(path)}
    assert {pair for pair in imports if pair[1] in tests} == READ_THE_TABLE


def test_what_few_runs_need_is_imported_late():
    """Half a second each: a command's help and its errors need none of them."""
    late = {"matplotlib", "tensorflow_datasets", "sklearn", "scipy.stats", "grain"}
    code = f"import sys, jaxcl.main; print(*({late} & {{*sys.modules}}))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (done.stdout.strip(), done.returncode) == ("", 0), done.stderr


def test_the_public_face():
    """`import jaxcl` imports none of it; every name of `__all__` is there."""
    code = "import sys, jaxcl; print({*sys.modules} & {'jax', 'numpy'}, jaxcl.__all__)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    names = ["Result", "__version__", "fit", "load_encoder"]
    assert done.stdout == f"set() {names}\n", done.stderr
    assert all(hasattr(jaxcl, name) and name in dir(jaxcl) for name in jaxcl.__all__)
