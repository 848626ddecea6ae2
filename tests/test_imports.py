"""The rules of the design that a reader of the sources can check."""

import ast
import functools
import pathlib
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
    ("__main__", "main", "cli", "api"),
    ("report", "estimate", "update", "weights", "index"),
    ("config", "run"),
    ("evals", "methods"),
    ("nets", "data"),
    ("losses", "memory"),
    ("plots", "sharding", "optim", "metrics", "schema", "lookup", "core")
    + ("storage", "numerics", "errors"),
)
RANK = {
    name: (row, at) for row, names in enumerate(ROWS) for at, name in enumerate(names)
}


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
            names = {alias.name for alias in node.names} & {*MODULES}
            found |= names - {"jaxcl"}  # the face, which imports nothing
        assert not getattr(node, "level", 0), f"{name}: imports are absolute"
    return tuple(sorted(found))


@pytest.mark.parametrize("name", sorted(set(MODULES) - {"jaxcl"}))
def test_imports_go_down(name):
    for other in imported(name):
        above, below = part(name), part(other)
        allowed = above == below or RANK[above] < RANK[below]
        assert allowed, f"{name} imports {other}"


# Rooms of jaxcl/data, and the other rooms that each one knows.
ROOMS = {"images": "", "stream": "images", "augment": "stream"}
ROOMS |= dict.fromkeys(("sources", "feed"), "images stream")


@pytest.mark.parametrize("name", sorted(x for x in MODULES if "jaxcl.data." in x))
def test_rooms_of_data_know_those_below(name):
    room, *met = (x.split(".")[2] for x in (name, *imported(name)) if "data." in x)
    assert {*met} <= {room, *ROOMS[room].split()}


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


def test_what_is_no_module_is_in_the_package_too():
    whole = tomllib.loads((ROOT / "pyproject.toml").read_text())
    listed = set()
    for package, patterns in whole["tool"]["setuptools"]["package-data"].items():
        folder = ROOT.joinpath(*package.split("."))
        listed |= {path for pattern in patterns for path in folder.glob(pattern)}
    files = {path for path in (ROOT / "jaxcl").rglob("*") if path.is_file()}
    others = {path for path in files if path.suffix not in (".py", ".pyc")}
    assert others == listed


def modules_imported(path):
    """First part of the name of every module that a file imports, wherever it does."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name.partition(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield (node.module or "").partition(".")[0]


@pytest.mark.parametrize("name", sorted(set(MODULES) - {"jaxcl"}))
def test_nothing_is_pickled_and_nothing_private_is_imported(name):
    pickling = {"pickle", "dill", "cloudpickle", "joblib", "marshal", "shelve"}
    unwanted = {*pickling, "multiprocessing", "jaxlib"}
    assert unwanted.isdisjoint(modules_imported(MODULES[name]))
    for node in ast.walk(ast.parse(MODULES[name].read_text())):
        if isinstance(node, ast.keyword) and node.arg == "allow_pickle":
            assert node.value.value is False


# Below `config` functions take arguments; the schema knows sections as mappings.
READS_CONFIG = ("main", "config", "update", "estimate", "api")


@pytest.mark.parametrize("name", sorted(set(MODULES) - {"jaxcl"}))
def test_configs_are_read_above_the_methods(name):
    if part(name) not in READS_CONFIG:
        assert "ml_collections" not in modules_imported(MODULES[name])


def test_what_is_wrong_with_an_input_is_refused_by_its_own_type():
    """A plain ValueError would be shown as a bug by the commands."""
    raised = [
        f"{path.relative_to(ROOT)}:{node.lineno}"
        for path in (ROOT / "jaxcl").rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Raise) and ast.unparse(node).startswith("raise Value")
    ]
    assert not raised


@pytest.mark.parametrize(
    "module, late",
    [
        (
            "jaxcl.config.build, jaxcl.config.command, jaxcl.run.finish",
            {"matplotlib", "tensorflow_datasets", "sklearn", "scipy.stats"},
        ),
        ("jaxcl.api.fit", {"matplotlib", "jinja2", "scipy.special", "jaxcl.report"}),
        ("jaxcl.api.list", {"jax", "orbax"}),
    ],
)
def test_what_few_runs_need_is_imported_late(module, late):
    """Tenths of a second each: a command's help and its errors need none of them."""
    code = f"import sys, {module}; print(*({late} & {{*sys.modules}}))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (done.stdout.strip(), done.returncode) == ("", 0), done.stderr


def test_the_public_face():
    """`import jaxcl` imports none of it; every name of `__all__` is there."""
    code = "import sys, jaxcl; print({*sys.modules} & {'jax', 'numpy'}, jaxcl.__all__)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    names = ["Result", "__version__", "fit", "load_encoder"]
    assert done.stdout == f"set() {names}\n", done.stderr
    assert all(hasattr(jaxcl, name) and name in dir(jaxcl) for name in jaxcl.__all__)
