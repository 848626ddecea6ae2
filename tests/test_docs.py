"""The documentation: its commands parse, its names exist, its example trains."""

import ast
import importlib
import inspect
import os
import pathlib
import pkgutil
import re
import shlex
import shutil
import subprocess
import sys

import jax
import numpy as np
import pytest
from absl import flags
from PIL import Image

import jaxcl
import jaxcl.evals
import jaxcl.methods
import test_methods
from helpers import config_files, pages, run_directories, toy
from jaxcl import estimate
from jaxcl.augment import graphs as augment_graphs
from jaxcl.augment import images as augment_images
from jaxcl.config import files, sections
from jaxcl.data import convert, fetch, from_arrays, scenarios, sources
from jaxcl.export import command as export_command
from jaxcl.front import command as front
from jaxcl.methods.icl import ddpg
from jaxcl.methods.online import replay
from jaxcl.nets import tuning
from jaxcl.run import record, train
from jaxcl.update import command as update_command

ROOT = pathlib.Path(__file__).parents[1]
METHODS = [
    module.make
    for found in pkgutil.iter_modules(jaxcl.methods.__path__)
    for module in [importlib.import_module(f"jaxcl.methods.{found.name}")]
    if hasattr(module, "make")
]
DOCS = sorted((ROOT / "docs").glob("*.md"))
PAGES = [*sorted(ROOT.glob("*.md")), *DOCS, *sorted(ROOT.glob("benchmarks/*.md"))]
CONFIGS = sorted((ROOT / "configs").glob("*.py"))
EXAMPLE = (ROOT / "docs" / "adding_a_method.md").read_text()
FILES = ("py", "md", "json", "jsonl", "npy", "npz", "txt", "toml", "png", "log")


def ids(path):
    return str(path.relative_to(ROOT))


def of_file(name):
    """The block of the worked example that stands for a file."""
    return re.search(rf"^`{name}`:\n\n```python\n(.*?)^```", EXAMPLE, re.M | re.S)[1]


@pytest.fixture(scope="module")
def tree(tmp_path_factory):
    """configs/ and the worked example's files, its method importable by name."""
    root = tmp_path_factory.mktemp("tree")
    shutil.copytree(ROOT / "configs", root / "configs")
    (root / "my_images" / "cat").mkdir(parents=True)
    for i in range(40):  # of which commands speak
        Image.new("RGB", (8, 8), (i, 0, 0)).save(root / f"my_images/cat/{i}.png")
    (root / "methods").mkdir()
    (root / "methods" / "simclr_l2.py").write_text(
        of_file("jaxcl/methods/simclr_l2.py")
    )
    name = "configs/simclr_l2_digits.py"
    (root / name).write_text(of_file(name))
    with pytest.MonkeyPatch.context() as patch:
        path = [*jaxcl.methods.__path__, str(root / "methods")]
        patch.setattr(jaxcl.methods, "__path__", path)
        importlib.invalidate_caches()
        yield root
        sys.modules.pop("jaxcl.methods.simclr_l2", None)
        vars(jaxcl.methods).pop("simclr_l2", None)


# Commands


def written():
    """(where, text) of all that states commands."""
    for path in PAGES:
        yield ids(path), path.read_text()
    for path in CONFIGS:
        yield ids(path), ast.get_docstring(ast.parse(path.read_text()))
    name = "configs/simclr_l2_digits.py"
    yield name, ast.get_docstring(ast.parse(of_file(name)))
    yield (
        "jaxcl/main.py",
        ast.get_docstring(ast.parse((ROOT / "jaxcl/main.py").read_text())),
    )


COMMANDS = [
    pytest.param(arguments, id=f"{where}-{i}")
    for where, text in written()
    for i, arguments in enumerate(pages.commands(text, "jaxcl.main"))
]


@pytest.mark.parametrize("arguments", COMMANDS)
def test_commands_name_configs_and_options_there_are(arguments, tree, monkeypatch):
    monkeypatch.chdir(tree)
    if arguments == ["--config=..."]:  # how the code speaks of the command
        return
    named = [a.partition("=")[2].partition(":")[0] for a in arguments[:1]]
    assert arguments[0].startswith("--config=") and (tree / named[0]).exists()
    config_files.check_options(config_files.parse(arguments))


def words_of_jaxcl():
    """(where, words) of every command `jaxcl WORD ...` in a block of a page."""
    for where, text in written():
        for block in pages.blocks(text, ""):
            joined = re.sub(r"\\\n\s*", " ", block)
            for command in re.findall(r"^jaxcl (.*)$", joined, re.M):
                yield pytest.param(shlex.split(command), id=f"{where}: {command}")


@pytest.mark.parametrize("words", list(words_of_jaxcl()))
def test_words_of_the_command_start_what_they_say(words, tree, monkeypatch, capsys):
    monkeypatch.chdir(tree)
    started = []
    monkeypatch.setattr(
        front.runpy, "run_module", lambda module, **_: started.append(module)
    )
    monkeypatch.setattr(sys, "argv", ["jaxcl"])
    assert front.main(words) == 0
    if words[0] in ("list", "show"):
        assert capsys.readouterr().out.count("\n") > 10
        return
    arguments = sys.argv[1:]
    if words[0] == "train":
        arguments[0] = f"--config={files.located(arguments[0].partition('=')[2])}"
        config_files.check_options(config_files.parse(arguments))
    elif words[0] == "update":
        values = flags.FlagValues()
        update_command.define_flags(values, ["update", *arguments])
        assert values(["update", *arguments]) == ["update"]
    elif words[0] == "estimate":
        given = dict(word.removeprefix("--").split("=") for word in arguments)
        assert set(given) <= {"config", "target", "json", "classes", "rows"}
        assert files.located(given["config"])
        assert estimate.parse(given.get("target", "v5e")).chips
    else:
        module = {"export": export_command}[words[0]]
        module.parser().parse_args(arguments)
    assert len(started) == 1


UPDATES = [
    pytest.param(arguments, id=f"{where}-{i}")
    for where, text in written()
    for i, arguments in enumerate(pages.commands(text, "jaxcl.update"))
    if arguments  # or it is but spoken of
]


@pytest.mark.parametrize("arguments", UPDATES)
def test_updates_have_the_options_there_are(arguments):
    values = flags.FlagValues()
    update_command.define_flags(values, ["update", *arguments])
    assert values(["update", *arguments]) == ["update"]
    given = values["config"].value.to_dict()
    update_command.read_options(given)
    changed = {f"--config.{name}" for name in given["train"]}
    assert changed <= {
        f"--config.{f}" for f in inspect.signature(sections.Top).parameters
    }


def overrides(text):
    """Overrides in running text; "with" or a blank between two joins them."""
    text = re.sub(r"python -m (?:[^\n`\\]|\\\n)*", "", text)
    one = r"--config\.[\w.]+=(?:\"[^\"]*\"|[^\s`,;()]+)"
    for group in re.findall(rf"{one}(?:\s+(?:with\s+)?{one})*", text):
        parts = [pages.filled(part).rstrip(".:") for part in shlex.split(group)]
        yield [part for part in parts if part != "with"]


@pytest.mark.parametrize("where, text", list(written()), ids=[w for w, _ in written()])
def test_overrides_in_prose_are_options(where, text, tree, monkeypatch):
    monkeypatch.chdir(tree)
    mine = [tree / where] if where.startswith("configs/") else sorted(tree.glob("*/*"))
    for group in overrides(text):
        problems = []
        for path in (p for p in mine if p.parent.name == "configs"):
            if path.suffix == ".py":
                try:
                    config_files.check_options(
                        config_files.parse([f"--config={path}", *group])
                    )
                    break
                except (ValueError, AttributeError, KeyError, flags.Error) as error:
                    problems.append(f"{path.name}: {error}")
        else:
            pytest.fail(f"{where}: {group}: {problems}")


def test_a_wrong_command_would_be_noticed(tree, monkeypatch):
    monkeypatch.chdir(tree)
    good = "--config=configs/quickstart.py"
    config_files.check_options(config_files.parse([good, "--workdir=x"]))
    for wrong in (
        "--config.method.temprature=1",
        "--config.evaluators.knn.kk=3",
        "--config.data.size=many",
        "--config.scenario.num_tasks=101",
        "--wrkdir=x",
        "left over",
    ):
        with pytest.raises((ValueError, AttributeError, AssertionError, flags.Error)):
            config_files.check_options(config_files.parse([good, wrong]))


CONVERT = [
    pytest.param(arguments, id=f"{where}-{i}")
    for where, text in written()
    for i, arguments in enumerate(pages.commands(text, "jaxcl.data.convert"))
]


@pytest.mark.parametrize("arguments", CONVERT)
def test_convert_is_called_as_it_wants(arguments, monkeypatch):
    seen = []
    monkeypatch.setattr(sys, "argv", ["convert", *arguments])
    monkeypatch.setattr(from_arrays, "npz", lambda *, path: path)
    monkeypatch.setattr(convert, "part", lambda whole, **options: whole)
    monkeypatch.setattr(convert, "write", lambda *given: seen.append(given))
    convert.main()
    assert seen == [tuple(arguments[:2])] and arguments[0].endswith(".npz")


FETCH = [
    pytest.param(arguments, id=f"{where}-{i}")
    for where, text in written()
    for i, arguments in enumerate(pages.commands(text, "jaxcl.data.fetch"))
]


@pytest.mark.parametrize("arguments", FETCH)
def test_fetch_is_called_as_it_wants(arguments, monkeypatch):
    seen = []

    def keep(name, out, *, source):
        seen.append((out, source))
        return fetch.SETS[name]

    monkeypatch.setattr(fetch, "fetch", keep)
    assert fetch.main(arguments) == 0
    ((out, source),) = seen
    assert out.startswith("data/")
    names = [archive.name for archive in fetch.SETS[arguments[0]].archives]
    assert source is None or [source] == names


def launches(text):
    """Words of every command that starts a script of launch/, up to a pipe."""
    joined = re.sub(r"\\\n\s*", " ", text)
    found = re.findall(r"^ *((?:python )?launch/\w+\.\w+ [^\n|>]*)", joined, re.M)
    return [shlex.split(command) for command in found]


def scripts():
    """(where, text) of all that states such commands."""
    yield from written()
    for path in sorted((ROOT / "launch").glob("*.py")):
        yield ids(path), ast.get_docstring(ast.parse(path.read_text()))


LAUNCHES = [
    pytest.param(words, id=f"{where}-{i}")
    for where, text in scripts()
    for i, words in enumerate(launches(text))
]


@pytest.mark.parametrize("words", LAUNCHES)
def test_launch_commands_run_dry(words, tree, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tree)
    start = [sys.executable] * (words[0] == "python")
    script, *arguments = words[len(start) :]
    assert os.access(ROOT / script, os.R_OK if start else os.X_OK)
    cut = arguments.index("--") if "--" in arguments else len(arguments)
    if cut < len(arguments):
        config_files.check_options(config_files.parse(arguments[cut + 1 :]))
    for option in arguments[:cut]:
        if option.startswith("--commands="):
            (tree / option.partition("=")[2]).write_text("python -m jaxcl.main\n")
    if script.endswith(("table.py", "sweep.py")):  # they import much
        monkeypatch.syspath_prepend(ROOT / "launch")
        module = config_files.load(ROOT / script)
        if script == "launch/table.py":
            monkeypatch.chdir(tmp_path)
            leave_runs(arguments)
        else:
            arguments.append("--dry-run")
        assert module.main(arguments) == 0
        printed = capsys.readouterr().out
        for one in pages.commands(printed, "jaxcl.main"):
            config_files.check_options(config_files.parse(one))
    else:
        arguments.insert(0, "--dry-run")
        command = [*start, ROOT / script, *arguments]
        printed = subprocess.check_output(command, text=True, timeout=60)
    assert printed.strip()


def leave_runs(arguments):
    """The finished runs that a command of launch/table.py reads, in this directory."""
    (name,) = [a.partition("=")[2] for a in arguments if a.startswith("--matrix=")]
    for folder in arguments[: [a.startswith("-") for a in arguments].index(True)]:
        matrix = [[0.8, None], [0.4, 0.6]]
        folder = pathlib.Path(folder)
        run_directories.leave(folder, matrix, seed=0, matrix_name=name)


def test_there_are_commands_to_check():
    assert len(COMMANDS) > 10 and len(CONVERT) > 2
    assert len(FETCH) > 1
    named = {word for param in LAUNCHES for word in param.values[0]}
    assert {f"launch/{p.name}" for p in (ROOT / "launch").glob("*.*")} - named == {
        "launch/common.sh",
        "launch/slurm_job.sh",
    }


# Links


def slugs(path):
    """Anchors of a page's headings, as mkdocs and GitHub make them."""
    titles = re.findall(r"^#+ (.+)$", pages.prose(path.read_text()), re.M)
    return {
        re.sub(r"[^\w\- ]", "", t).strip().lower().replace(" ", "-") for t in titles
    }


@pytest.mark.parametrize("path", PAGES, ids=ids)
def test_links_lead_somewhere(path):
    for target in re.findall(r"\]\(([^)\s]+)\)", pages.prose(path.read_text())):
        if "://" in target or target.startswith("mailto:"):
            continue
        name, _, anchor = target.partition("#")
        there = (path.parent / name).resolve() if name else path
        assert there.exists(), f"{ids(path)}: {target}"
        if anchor:
            assert anchor in slugs(there), f"{ids(path)}: {target}"


def test_nav_names_every_page():
    nav = re.findall(r": (\w+\.md)$", (ROOT / "mkdocs.yml").read_text(), re.M)
    assert {path.name for path in DOCS} <= set(nav)


def test_commands_inside_a_list_are_no_blocks():
    """Python's Markdown shows a fence that is indented as words in a line."""
    for path in DOCS:
        fences = re.findall(r"^( *)```", path.read_text(), re.M)
        inside = [fence for fence in fences if len(fence) > 1]
        assert not inside, f"{ids(path)}: {len(inside)} fences are indented"


# Names


def modules():
    """Last part of the name -> modules of that name, for all that are no commands."""
    there = {}
    for found in pkgutil.walk_packages(jaxcl.__path__, "jaxcl."):
        last = found.name.rpartition(".")[2]
        if last != "__main__" and found.name not in COMMAND_MODULES:
            there.setdefault(last, []).append(importlib.import_module(found.name))
    return there


COMMAND_MODULES = ("jaxcl.main", "jaxcl.compare", "jaxcl.speedup")


def has(value, rest):
    """Whether `value` has what a dotted name says of it."""
    for part in rest:
        if not hasattr(value, part):
            return False
        value = getattr(value, part)
    return True


def option_exists(path):
    """Whether `config.a.b` is an option of any function that section may name."""
    section, *rest = path.split(".")[1:]
    if section in inspect.signature(update_command.Options).parameters and not rest:
        return True
    if section not in inspect.signature(sections.Top).parameters:
        return False
    functions = {
        "data": sources.SOURCES.values(),
        "scenario": [scenarios.make],
        "augment": [augment_images.make, augment_graphs.make],
        "encoder": sections.ENCODERS.values(),
        "method": METHODS,
        "replay": [replay.settings],
        "optimizer": sections.OPTIMIZERS.values(),
        "schedule": sections.SCHEDULES.values(),
        "evaluators": [],
    }
    if (section, *rest[:1]) == ("augment", "local"):
        known = inspect.signature(augment_images.local).parameters
        return not rest[1:] or (len(rest) == 2 and rest[1] in known)
    extra = {"augment": {"name", "resize"}, "optimizer": {"name", "lr"}}
    known = {
        p for f in functions.get(section, []) for p in inspect.signature(f).parameters
    }
    known |= extra.get(section, {"name"})
    return not rest or (len(rest) == 1 and rest[0] in known)


@pytest.mark.parametrize("path", DOCS, ids=ids)
def test_names_in_backticks_exist(path):
    there, checked = modules(), 0
    for name in re.findall(r"`([^`\n]+)`", pages.prose(path.read_text())):
        if re.fullmatch(r"[\w/]+\.(py|md)", name) and "/" in name:
            assert (ROOT / name).exists() or name in EXAMPLE, name
            continue
        name = name.removesuffix("()")
        if not re.fullmatch(r"[a-z_]\w*(\.\w+)+", name) or name.endswith(FILES):
            continue
        head, *rest = name.split(".")
        if head == "config":
            assert option_exists(name), f"{ids(path)}: {name}"
        elif head in ("torch", "timm", "jax", "lax", "state"):
            continue  # not ours
        elif head == "jaxcl":
            module, _, last = name.rpartition(".")
            public = hasattr(importlib.import_module(module), last)
            assert public or importlib.import_module(name), name
        else:
            assert head in there, f"{ids(path)}: {name}"
            assert any(has(module, rest) for module in there[head]), name
        checked += 1
    if path.name in ("methods.md", "design.md", "evaluation.md"):
        assert checked > 10


def test_public_names_are_as_written():
    text = re.search(r"## Public names.*?```\n(.*?)```", DESIGN, re.S)[1]
    module, count = None, 0
    for word in re.findall(r"jaxcl[\w.]+|\w+\([^)]*\)", text):
        if word.startswith("jaxcl."):
            module = importlib.import_module(word)
            continue
        name, inside = word.rstrip(")").split("(")
        parameters = inspect.signature(getattr(module, name)).parameters.values()
        positional = [p.name for p in parameters if p.kind == p.POSITIONAL_OR_KEYWORD]
        shown = [p for p in re.split(r",\s*", inside) if p]
        needed = positional[: len(shown)]
        optional = [p for p in parameters if p.name in positional[len(shown) :]]
        assert shown == needed and all(p.default is not p.empty for p in optional), word
        count += 1
    assert count > 20


DESIGN = (ROOT / "docs" / "design.md").read_text()


def test_the_tree_is_as_drawn():
    text = re.search(r"## The tree\n\n```\n(.*?)```", DESIGN, re.S)[1]
    drawn, folder = set(), ""
    for line in text.splitlines()[1:]:
        indent, name = re.match(r"( +)(\S+)", line).groups()
        folder = folder if len(indent) > 2 else ""
        if name.endswith("/"):
            folder = name
        else:
            drawn.add(folder + name)
    package = ROOT / "jaxcl"
    real = {str(p.relative_to(package)) for p in package.rglob("*.py")}
    assert drawn == {name for name in real if not name.endswith("__init__.py")}


def test_the_reference_names_what_there_is():
    """All that it names is there; no loss and no public name is left out."""
    text = (ROOT / "docs/api.md").read_text()
    named = set(re.findall(r"^::: ([\w.]+)$", text, re.M))
    for name in named:
        pkgutil.resolve_name(name)
    losses = (ROOT / "jaxcl/losses").glob("[!_]*.py")
    assert {f"jaxcl.losses.{path.stem}" for path in losses} <= named
    for name in set(jaxcl.__all__) - {"__version__"}:
        where = getattr(jaxcl, name).__module__
        assert named & {where, f"{where}.{name}"}, name


# Options and defaults

MARKER = re.compile(r"<!-- options: ([\w.]+)(?: except (\w+))? -->\n\n((?:\|.*\n)+)")
TABLES = [
    pytest.param(*found, id=found[0])
    for path in DOCS
    for found in MARKER.findall(path.read_text())
]


@pytest.mark.parametrize("name, without, table", TABLES)
def test_tables_of_options_are_those_of_the_signature(name, without, table):
    module, _, function = name.rpartition(".")
    function = getattr(importlib.import_module(module), function)
    want = {
        parameter.name: parameter.default
        for parameter in inspect.signature(function).parameters.values()
        if parameter.kind == parameter.KEYWORD_ONLY and parameter.name != without
    }
    rows = [pages.cells(row) for row in table.splitlines()[2:]]
    given = {row[0].strip("`"): row[1].strip("`") for row in rows}
    assert list(given) == list(want)
    for option, default in given.items():
        if want[option] is inspect.Parameter.empty:
            assert default == "required", option
        else:
            shown = eval(default, {"__builtins__": {}})
            assert shown == want[option] and type(shown) is type(want[option]), option


def judges():
    """`make` of every evaluator that has options."""
    for found in pkgutil.iter_modules(jaxcl.evals.__path__):
        module = importlib.import_module(f"jaxcl.evals.{found.name}")
        if hasattr(module, "make") and found.name != "features":  # it is no evaluator
            parts, *options = inspect.signature(module.make).parameters
            if options:
                yield module.make


def test_every_function_that_config_names_has_a_table():
    functions = {sections.Top, scenarios.make, augment_images.make, *METHODS, *judges()}
    functions |= {replay.settings, augment_graphs.make, augment_images.local}
    functions |= {ddpg.Options, update_command.Options, update_command.Limits}
    functions |= {*sources.SOURCES.values()}
    functions |= {*sections.ENCODERS.values(), *sections.OPTIMIZERS.values()}
    functions |= {tuning.settings}
    functions |= {*sections.SCHEDULES.values()} - {sections.SCHEDULES["constant"]}
    names = [table.values[0].rpartition(".") for table in TABLES]
    described = [getattr(importlib.import_module(name), f) for name, _, f in names]
    assert len(described) == len({*described}) and {*described} == functions


def test_a_config_reaches_every_documented_option_of_its_source():
    """`options` must find the keywords, also where a source passes them on."""
    tables = {t.values[0]: t.values[2] for t in TABLES}
    for name, function in sources.SOURCES.items():
        table = tables[f"{function.__module__}.{function.__name__}"]
        rows = [pages.cells(row) for row in table.splitlines()[2:]]
        given = {row[0].strip("`"): row[1].strip("`") for row in rows}
        section = {
            option: "somewhere" if default == "required" else ast.literal_eval(default)
            for option, default in given.items()
        }
        if "sets" in section:
            section["sets"] = [{"name": "digits"}]
        if name == "judged_by":
            section |= dict.fromkeys(("train", "test"), {"name": "digits"})
        sections.tasks({"name": name, **section}, {"name": "joint"})


# Messages and code


def templates(path):
    """Every string of a module, `...` for what is filled in."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.JoinedStr):
            parts = [getattr(part, "value", None) for part in node.values]
            yield "".join(part if isinstance(part, str) else "..." for part in parts)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value


def test_messages_of_the_troubleshooting_table_are_real():
    table = (ROOT / "docs" / "running.md").read_text().partition("Troubleshooting")[2]
    messages = re.findall(r"^\| `([^`]+)` \|", table, re.M)
    assert len(messages) > 15
    known = [set(templates(path)) for path in (ROOT / "jaxcl").rglob("*.py")]
    for message in messages:
        parts = [part.strip() for part in message.split("...")]
        assert any(
            all(any(part in text for text in texts) for part in parts)
            for texts in known
        ), message


@pytest.mark.parametrize("path", PAGES, ids=ids)
def test_python_in_the_pages_compiles(path):
    for code in pages.blocks(path.read_text(), "python"):
        if not code.startswith("    "):  # a row of a table in a file
            compile(code, str(path), "exec")


def test_the_snippet_of_losses_runs(capsys):
    (code,) = pages.blocks((ROOT / "docs" / "overview.md").read_text(), "python")
    exec(compile(code, "overview.md", "exec"), {})
    said = [float(x) for x in capsys.readouterr().out.split()]
    assert len(said) == 2 and np.isfinite(said).all()


SHORT = {'"epochs": 40': '"epochs": 1', "epochs=5": "epochs=1"}


@pytest.mark.slow
@pytest.mark.parametrize("changes", [SHORT, {}], ids=["short", "whole"])
def test_the_readme_snippet_runs(changes, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (code,) = pages.blocks((ROOT / "README.md").read_text(), "python")
    for old, new in changes.items():
        assert old in code
        code = code.replace(old, new)
    exec(compile(code, "README.md", "exec"), {})
    told = capsys.readouterr().out
    assert "(3, 128) jaxcl.Result('runs/images-" in told
    assert re.search(r"accepted: runs/images-\w+/updates/0001", told)
    assert (tmp_path / "digits.png").stat().st_size > 10_000


def test_the_readme_is_short_and_its_snippet_has_ten_lines():
    text = (ROOT / "README.md").read_text()
    (code,) = pages.blocks(text, "python")
    assert len(text.splitlines()) < 90
    lines = [line for line in code.splitlines() if line.strip()]
    assert len(lines) <= 10, lines


def test_the_cifar_snippet_makes_a_file_that_npz_reads(tmp_path, monkeypatch):
    rng = np.random.default_rng(0)
    folder = tmp_path / "cifar-100-binary"
    folder.mkdir()
    want = {}
    for split, count in (("train", 6), ("test", 3)):
        rows = rng.integers(0, 256, (count, 3074), np.uint8)
        rows[:, 0], rows[:, 1] = 50, np.arange(count) % 3
        rows.tofile(folder / f"{split}.bin")
        want[split] = rows
    (folder / "fine_label_names.txt").write_text("apple\nbaby\nbear\n\n")
    monkeypatch.chdir(tmp_path)
    blocks = pages.blocks((ROOT / "docs" / "data.md").read_text(), "python")
    (code,) = (block for block in blocks if "cifar-100-binary" in block)
    exec(compile(code, "data.md", "exec"), {})
    made = from_arrays.npz(path="cifar100.npz")
    assert made.class_names == ("apple", "baby", "bear")
    for split, rows in want.items():
        examples = getattr(made, split)
        np.testing.assert_array_equal(examples.label, rows[:, 1])
        # Planes of red, green, blue, each row by row.
        assert examples.images[1, 4, 7, 2] == rows[1, 2 + 2 * 1024 + 4 * 32 + 7]


# The worked example


def rows_of_the_example():
    """Name -> row, of the blocks that stand for rows of the table of methods."""
    names = {"Row": test_methods.Row, "toy": toy}
    rows = [
        block for block in pages.blocks(EXAMPLE, "python") if block.startswith("    ")
    ]
    return eval(f"{{{''.join(rows)}}}", names)


def test_rows_and_fields_of_the_example_are_those_of_the_table():
    _, er = rows_of_the_example().values()
    real = test_methods.METHODS["er"]
    assert (er.changes, er.idle, er.still) == (real.changes, real.idle, real.still)
    fields = re.search(r"^\| field of `Row` .*\n((?:\|.*\n)+)", EXAMPLE, re.M)[1]
    told = re.findall(
        r"`(\w+)`", " ".join(pages.cells(x)[0] for x in fields.splitlines())
    )
    assert told == list(test_methods.Row._fields)


def test_the_example_trains_by_its_row_of_the_table(tree, tmp_path):
    name, (changes, *_) = next(iter(rows_of_the_example().items()))
    assert name == "simclr-l2" and changes["method"]["name"] == "simclr_l2"
    work = toy.job(tmp_path, tasks=2, epochs=1, **changes)
    train.run(work, tmp_path)
    rows = [r for r in record.read_rows(tmp_path) if "loss" in r]
    assert [r["step"] for r in rows] == list(range(1, 13))
    assert np.isfinite([r["loss"] for r in rows]).all()
    # The teacher is what the second task began with, so it is near and not equal.
    assert rows[6]["task"] == 1 and 0 < rows[6]["distance"] < rows[5]["distance"] + 1
    state = toy.saved(work, tmp_path).state
    moved = jax.tree.map(
        lambda a, b: bool((a != b).any()),
        state.extra.teacher["encoder"],
        state.params["encoder"],
    )
    assert any(jax.tree.leaves(moved))


@pytest.mark.slow
def test_the_example_passes_the_table(tree, tmp_path, monkeypatch):
    row = rows_of_the_example()["simclr-l2"]
    monkeypatch.setitem(test_methods.METHODS, "simclr-l2", row)
    for column in test_methods.COLUMNS:
        (tmp_path / column.__name__).mkdir()
        column("simclr-l2", tmp_path / column.__name__)


def test_the_example_refuses_what_it_cannot_take(tree, tmp_path):
    for wrong in ({"weight": -1.0}, {"wieght": 1.0}):
        with pytest.raises(ValueError, match=r"config\.method\.w"):
            toy.job(tmp_path / "x", method={"name": "simclr_l2", **wrong})


def test_the_examples_own_test_passes(tree):
    code = next(b for b in pages.blocks(EXAMPLE, "python") if "def test_" in b)
    names = {}
    exec(compile(code, "adding_a_method.md", "exec"), names)
    tests = [value for name, value in names.items() if name.startswith("test_")]
    assert tests
    for test in tests:
        test()


def test_the_examples_config_is_one_that_the_tests_take(tree):
    path = tree / "configs" / "simclr_l2_digits.py"
    module = config_files.load(path)
    config, small = module.get_config(), module.get_config("debug")
    assert f"--config=configs/{path.name}" in module.__doc__
    assert f"{path.name}:debug" in module.__doc__ and config.name == path.stem
    assert set(small.method) == set(config.method) and small.data.name == "digits"
    config_files.check_options(small)
