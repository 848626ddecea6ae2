"""The documentation: its links work, its commands parse, its code runs."""

import ast
import functools
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

import pytest
from PIL import Image

import jaxcl.evals
import jaxcl.methods
from helpers import config_files, pages, run_directories, teachers
from jaxcl import cli, estimate
from jaxcl.config import files, sections
from jaxcl.data.sources import by_name
from jaxcl.methods import online_ssl
from jaxcl.methods.two_view import bases, strategies
from jaxcl.update import plan as update_plan

ROOT = pathlib.Path(__file__).parents[1]
DOCS = sorted((ROOT / "docs").rglob("*.md"))
PAGES = [*sorted(ROOT.glob("*.md")), *DOCS, *sorted(ROOT.glob("benchmarks/*.md"))]
CONFIGS = sorted((ROOT / "configs").glob("*.py"))
option_tables = config_files.load(ROOT / "docs" / "options.py")


def ids(path):
    return str(path.relative_to(ROOT))


@pytest.fixture(scope="module")
def tree(tmp_path_factory):
    """The folders that commands name; the package of the examples is importable."""
    root = tmp_path_factory.mktemp("tree")
    shutil.copytree(ROOT / "configs", root / "configs")
    shutil.copytree(ROOT / "examples", root, dirs_exist_ok=True)
    # Of these folders commands speak; three tasks have batches for eight devices.
    for folder, count in (("my_images/cat", 120), ("shapes/plain/disc", 40)):
        (root / folder).mkdir(parents=True)
        for i in range(count):
            Image.new("RGB", (8, 8), (i, 0, 0)).save(root / folder / f"{i}.png")
    teachers.leave(root / "encoders" / "dinov2", channels=3)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(root))
        yield root
    for name in [x for x in sys.modules if x.split(".")[0] == "my_package"]:
        del sys.modules[name]


# Commands


def written():
    """(where, text) of all that states commands."""
    for path in PAGES:
        yield ids(path), path.read_text()
    for path in CONFIGS:
        yield ids(path), ast.get_docstring(ast.parse(path.read_text()))
    example = ROOT / "examples" / "my_config.py"
    yield ids(example), ast.get_docstring(ast.parse(example.read_text()))
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
    word, *rest = words
    if word in ("list", "options"):
        assert cli.main(words) == 0
        assert capsys.readouterr().out.count("\n") > 10
        return
    given = cli.make_parser(word).parse_args(rest)
    if word == "train":
        config_files.check_options(files.read_config(given.config))
    elif word == "update":
        options = update_plan.default_options()
        files.override(options, given.config)
        update_plan.read_options(options.to_dict())
        changed = {f"--config.{name}" for name in options.train}
        assert changed <= {
            f"--config.{f}" for f in inspect.signature(sections.TopLevel).parameters
        }
    elif word == "estimate":
        assert files.read_config(given.config)
        assert estimate.parse_target(given.target or "v5e").chips


FLAG = r"(?<![\w-])--([a-z][\w-]*)(?![\w-])"
OF_A_CONFIG = r"--config\.\S+"  # an option of a config, which is no flag


def named_flags(text) -> set[str]:
    """The flags that a text names, as Python spells them."""
    found = re.findall(FLAG, re.sub(OF_A_CONFIG, "", text))
    return {name.replace("-", "_") for name in found}


@functools.cache
def flags_of(word) -> set[str]:
    """The flags that `jaxcl WORD` takes."""
    names = {"--help", "--config", *cli.make_parser(word).names}
    return named_flags(" ".join(names))


def test_flags_in_prose_are_taken():
    """By the command that is named with them, or else by any command or script."""
    scripts = [x for x in ROOT.glob("launch/*") if x.is_file()]
    scripts += [*ROOT.glob("benchmarks/**/*.py"), *ROOT.glob("tests/**/*.py")]
    anywhere = set().union(*(named_flags(path.read_text()) for path in scripts))
    anywhere = anywhere.union({"version"}, *map(flags_of, cli.COMMANDS))
    for path in [*DOCS, ROOT / "README.md"]:
        prose = re.sub(r"```.*?```", "", path.read_text(), flags=re.S)
        for code in re.findall(r"`([^`]+)`", prose):
            words = code.split()
            if not code.startswith(("--", "jaxcl ")):
                continue  # another program's
            ours = words[0] == "jaxcl" and words[1] in cli.COMMANDS
            taken = flags_of(words[1]) if ours else anywhere
            assert named_flags(code) <= taken, f"{ids(path)}: {code}"


def overrides(text):
    """Overrides in running text; "with" or a blank between two joins them."""
    text = re.sub(r"(?m)(?:python -m|^jaxcl) (?:[^\n`\\]|\\\n)*", "", text)
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
                except (ValueError, AttributeError, KeyError) as error:
                    problems.append(f"{path.name}: {error}")
        else:
            pytest.fail(f"{where}: {group}: {problems}")


DATA = [
    pytest.param(word, arguments, id=f"{where}-{word}-{i}")
    for where, text in written()
    for word in ("convert", "data")
    for i, arguments in enumerate(pages.commands(text, f"jaxcl {word}"))
    if len(arguments) > 1  # not: what `jaxcl data NAME` wrote
]


@pytest.mark.parametrize("word, arguments", DATA)
def test_commands_of_data_parse(word, arguments):
    assert cli.make_parser(word).parse_args(arguments)


TABLES = "table", "trials/speedup", "trials/keep_fresh"


def launches(text):
    """Words of commands that start a script of launch/ or of TABLES, up to a pipe."""
    joined = re.sub(r"\\\n\s*", " ", text)
    script = rf"(?:launch/\w+\.\w+|benchmarks/(?:{'|'.join(TABLES)})\.py)"
    found = re.findall(rf"^ *((?:python )?{script} [^\n|>]*)", joined, re.M)
    return [shlex.split(command) for command in found]


def scripts():
    """(where, text) of all that states such commands."""
    yield from written()
    tables = [ROOT / "benchmarks" / f"{name}.py" for name in TABLES]
    for path in [*sorted((ROOT / "launch").glob("*.py")), *tables]:
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
    if "/trials/" in script:  # they train, or read runs that are finished
        config_files.load(ROOT / script).parser().parse_args(arguments)
        return
    if script.endswith(("table.py", "sweep.py")):  # they import much
        module = config_files.load(ROOT / script)
        if script == "benchmarks/table.py":
            monkeypatch.chdir(tmp_path)
            leave_runs(arguments)
        else:
            arguments.append("--dry-run")
        assert module.main(arguments) == 0
        printed = capsys.readouterr().out
        for one in pages.commands(printed, "jaxcl.main")[:3]:
            config_files.check_options(config_files.parse(one))
    else:
        arguments.insert(0, "--dry-run")
        command = [*start, ROOT / script, *arguments]
        printed = subprocess.check_output(command, text=True, timeout=60)
    assert printed.strip()


def leave_runs(arguments):
    """Leave here the finished runs that a command of benchmarks/table.py reads."""
    (name,) = [a.partition("=")[2] for a in arguments if a.startswith("--matrix=")]
    for folder in arguments[: [a.startswith("-") for a in arguments].index(True)]:
        matrix = [[0.8, None], [0.4, 0.6]]
        folder = pathlib.Path(folder)
        run_directories.leave(folder, matrix, seed=0, matrix_name=name)


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


@pytest.mark.parametrize("path", PAGES, ids=ids)
def test_files_that_a_page_includes_are_there(path):
    for line in re.findall(r"^ *(--8.*)$", path.read_text(), re.M):
        assert (ROOT / re.fullmatch(r'--8<-- "(.+)"', line)[1]).exists()


def test_public_names_are_as_written():
    text = (ROOT / "docs" / "public_names.txt").read_text()
    module = None
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


# Options and defaults


def test_a_marker_becomes_the_table_of_a_list():
    head, _, *rows = option_tables.expand("<!-- list: bases -->").splitlines()
    names = [pages.cells(row)[0].strip("`") for row in rows]
    assert head.startswith("| name") and names == [*bases.BASES]


def test_every_function_of_a_config_has_a_table():
    """One that is new needs a marker in a page; one that is gone fails to import."""
    texts = [option_tables.write_headings(path.read_text()) for path in DOCS]
    found = {x[1] for text in texts for x in MARKER.finditer(text)}
    functions = {inspect.unwrap(pkgutil.resolve_name(name)) for name in found}
    listed = (by_name.SOURCES, bases.BASES, online_ssl.REGULARISERS)
    wanted = {name: x for group in listed for name, x in group.items()}
    for package in (jaxcl.methods, jaxcl.evals):
        for module in pkgutil.iter_modules(package.__path__):
            module = importlib.import_module(f"{package.__name__}.{module.name}")
            if make := getattr(module, "make", None):
                wanted[module.__name__] = make
    wanted |= {f"strategy {name}": x for name, x in strategies.STRATEGIES.items()}
    for name, function in wanted.items():
        if option_tables.options(function):
            assert inspect.unwrap(function) in functions, name
    for path in DOCS:
        option_tables.expand(path.read_text())


MARKER = re.compile(r"<!-- options: ([\w.]+)")


# Code


@pytest.mark.parametrize("path", PAGES, ids=ids)
def test_python_in_the_pages_compiles(path):
    for code in pages.blocks(path.read_text(), "python"):
        if not code.startswith("    "):  # a row of a table in a file
            assert ast.parse(code, str(path)).body


def run(page, code, capsys):
    """Return the numbers that a block of a page prints."""
    names = {}
    exec(compile(code, page, "exec"), names)
    return names, [float(x) for x in re.findall(NUMBER, capsys.readouterr().out)]


NUMBER = r"-?\d+\.\d+(?:e-?\d+)?"


def test_the_snippet_of_metrics_prints_the_numbers_of_the_page(capsys):
    text = (ROOT / "docs" / "concepts.md").read_text()
    (code,) = pages.blocks(text, "python")
    _, printed = run("concepts.md", code, capsys)
    told = [float(x) for x in re.findall(rf"\| ({NUMBER}) \|$", text, re.M)]
    assert printed == pytest.approx(told, abs=1e-12)


def test_the_snippet_of_loggers_runs(capsys):
    (code,) = pages.blocks((ROOT / "docs" / "running.md").read_text(), "python")
    names, _ = run("running.md", code, capsys)
    logger = names["make"](None, [])
    logger.write({"step": 3, "loss": 0.25})
    logger.close()
    assert "0.25" in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.parametrize("name", ["own_images.md"])
def test_fits_of_the_pages_run(name, tree, monkeypatch, capsys):
    monkeypatch.chdir(tree)
    (code,) = pages.blocks((ROOT / "docs" / name).read_text(), "python")
    short = 'epochs=1, encoder="conv_net"'  # a ResNet compiles for minutes
    code, count = re.subn(r"epochs=20", short, code)
    assert count == 1
    exec(compile(code, name, "exec"), {})
    assert "jaxcl.Result" in capsys.readouterr().out


SHORT = {"epochs=30": "epochs=1", "epochs=10": "epochs=1", "size=24": "size=12"}


@pytest.mark.slow
@pytest.mark.parametrize("changes", [SHORT, {}], ids=["short", "whole"])
def test_the_readme_snippet_runs(changes, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (code,) = pages.blocks((ROOT / "README.md").read_text(), "python")
    for old, new in changes.items():
        assert old in code
        code = code.replace(old, new)
    exec(compile(code, "README.md", "exec"), {})
    printed = capsys.readouterr().out
    assert "(3, 128)" in printed and [*tmp_path.glob("runs/images-*/updates/0001")]
    if not changes:  # the text says 73.8 %, 88.3 % and accepted
        reached = re.search(r"knn/class_incremental ([\d.]+) % \(untrained", printed)
        assert float(reached[1]) > 60
        before, after = re.search(r": ([\d.]+) -> ([\d.]+) %, ", printed).groups()
        assert float(after) > float(before) + 10 and "Accepted" in printed


def test_the_reference_names_what_there_is():
    text = "\n".join(path.read_text() for path in DOCS)
    named = re.findall(r"^::: ([\w.]+)$", text, re.M)
    assert {"jaxcl.fit", "jaxcl.losses.contrastive"} <= {*named}
    for name in named:
        pkgutil.resolve_name(name)


@pytest.mark.parametrize("name", by_name.SOURCES)
def test_a_config_reaches_every_option_of_its_source(name):
    """`options` must find the keywords, also where a source passes them on."""
    section = {
        option: "somewhere" if default is inspect.Parameter.empty else default
        for option, default in option_tables.options(by_name.SOURCES[name]).items()
    }
    if "sets" in section:
        section["sets"] = [{"name": "digits"}]
    if name == "judged_by":
        section |= dict.fromkeys(("train", "test"), {"name": "digits"})
    assert callable(sections.read_tasks({"name": name, **section}, {"name": "joint"}))
