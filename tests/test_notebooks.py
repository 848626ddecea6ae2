"""The notebooks: valid and without outputs, their commands parse, they run."""

import ast
import os
import pathlib
import re
import subprocess
import sys

import nbclient
import nbformat
import pytest
from absl import flags
from IPython.core import inputtransformer2

from helpers import config_files, pages
from jaxcl.update import command as update_command

ROOT = pathlib.Path(__file__).parents[1]
FOLDER = ROOT / "notebooks"
BOOKS = sorted(FOLDER.glob("*.ipynb"))
NAMES = [
    "1_quick_start",
    "2_pnr_cifar10",
    "3_in_your_own_loop",
    "4_your_own_images",
    "5_duel_imbalanced",
    "6_keep_fresh",
]
QUICK = "3_in_your_own_loop"
# The tests' cheap compilation makes their steps up to twenty times slower.
COMPILED_WELL = ("1_quick_start", "2_pnr_cifar10", "4_your_own_images")
# Of the shell or of IPython, with the lines that continue it.
COMMAND = re.compile(r"^( *)[!%]((?:[^\n\\]|\\\n|\\.)*)", re.M)
each = pytest.mark.parametrize("path", BOOKS, ids=lambda path: path.stem)


def read(path):
    return nbformat.read(path, as_version=4)


def code(path):
    return [cell.source for cell in read(path).cells if cell.cell_type == "code"]


def text(path):
    return "\n".join(c.source for c in read(path).cells if c.cell_type == "markdown")


def plain(source):
    """The cell as Python: each command of the shell or of IPython is a `pass`."""
    return COMMAND.sub(r"\1pass", source)


def constants(path):
    """Name -> value of every top-level assignment of a constant."""
    found = {}
    for node in ast.parse("\n".join(map(plain, code(path)))).body:
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant):
            found |= {target.id: node.value.value for target in node.targets}
    return found


def shell(path):
    """The commands of the cells, constants filled in."""
    values = constants(path)
    lines = "\n".join(line for _, line in COMMAND.findall("\n".join(code(path))))
    # What is None at first the notebook fills in itself.
    return re.sub(r"{(\w+)}", lambda name: str(values[name[1]] or "my_images"), lines)


def commands(module):
    return [
        pytest.param(arguments, id=f"{path.stem}-{i}")
        for path in BOOKS
        for i, arguments in enumerate(pages.commands(shell(path), module))
    ]


# The files


@each
def test_the_file_is_valid_and_holds_no_outputs(path):
    book = read(path)
    nbformat.validate(book)
    assert (book.nbformat, book.nbformat_minor) == (4, 5)
    assert book.metadata.kernelspec.name == "python3"
    for cell in book.cells:
        assert not cell.metadata  # neither of an editor nor of a run
        if cell.cell_type == "code":
            assert cell.outputs == [] and cell.execution_count is None
    ids = [cell.id for cell in book.cells]
    assert ids[1] == "install" and book.cells[0].source.startswith("# ")
    ids[1] = "cell-02"
    assert ids == [f"cell-{i:02d}" for i in range(1, len(ids) + 1)]
    assert path.read_text() == nbformat.writes(book) + "\n"


@each
def test_cells_are_python_and_figures_have_labels(path):
    for i, source in enumerate(code(path)):
        compile(plain(source), f"{path.name}, code cell {i + 1}", "exec")
        for axis in "xy" if "plt.subplots" in source else "":
            assert re.search(rf"\b(sup)?{axis}label\b", source), source


# Commands


@pytest.mark.parametrize("arguments", commands("jaxcl.main"))
def test_runs_have_the_options_there_are(arguments, monkeypatch):
    monkeypatch.chdir(ROOT)
    config_files.check_options(config_files.parse(arguments))


@pytest.mark.parametrize("arguments", commands("jaxcl.update"))
def test_updates_have_the_options_there_are(arguments):
    values = flags.FlagValues()
    update_command.define_flags(values, ["update", *arguments])
    assert values(["update", *arguments]) == ["update"]
    update_command.read_options(values["config"].value.to_dict())


# The first cell


class Shell:
    """What IPython gives a cell: commands are run, installations noted."""

    def __init__(self, names):
        self.names, self.installed, self.ran = names, [], []

    def __call__(self):
        return self

    def filled(self, line):
        return re.sub(r"{(.+?)}", lambda found: eval(found[1], self.names), line)

    def run_line_magic(self, name, line, **_):
        assert name == "pip"
        self.installed.append(self.filled(line))

    def system(self, line):
        self.ran.append(self.filled(line))
        subprocess.run(self.ran[-1], shell=True, check=True, timeout=60)


def install(source, names=None):
    names = {} if names is None else names
    names["get_ipython"] = found = Shell(names)
    exec(inputtransformer2.TransformerManager().transform_cell(source), names)
    return found


@pytest.fixture
def first():
    return code(BOOKS[0])[0]


def test_elsewhere_jaxcl_and_its_configs_are_fetched(first, tmp_path, monkeypatch):
    origin, here = tmp_path / "origin", tmp_path / "here"
    (origin / "configs").mkdir(parents=True)
    (origin / "configs" / "quickstart.py").write_text("1\n")
    git = ["git", "-c", "user.name=x", "-c", "user.email=x@localhost"]
    for words in (["init", "-q"], ["add", "."], ["commit", "-qm", "x"]):
        subprocess.run([*git, *words], cwd=origin, check=True, timeout=60)
    here.mkdir()
    monkeypatch.chdir(here)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    address = f"file://{origin}"
    mine = re.sub(r"https://[^\"]+", address, first)
    assert mine != first
    done = install(mine)
    assert done.installed == [f'install --quiet "jaxcl @ git+{address}"']
    assert (here / "configs" / "quickstart.py").read_text() == "1\n"
    assert len(done.ran) == 1 and install(mine).ran == []


# CIFAR-10, where there is a network


# From top to bottom


def path_with_python():
    """PATH on which `python` is this one."""
    return f"{pathlib.Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"


def environment(name, work):
    """That of the tests, with one device, without a network and a user's files."""
    left_out = ["MPLBACKEND", "no_proxy", "NO_PROXY"]
    left_out += ["XLA_FLAGS"] if name in COMPILED_WELL else []
    env = {k: v for k, v in os.environ.items() if k not in left_out}
    proxies = ("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY")
    env |= dict.fromkeys(proxies, "http://127.0.0.1:9")  # nobody listens there
    folders = ("IPYTHONDIR", "JUPYTER_CONFIG_DIR", "JUPYTER_DATA_DIR")
    env |= {name: str(work / f".{name}") for name in folders}
    env |= {"PATH": path_with_python(), "PYTHONPATH": str(ROOT)}
    # Of t-SNE: on busy cores its threads spin while they wait for each other.
    return env | {"JAX_NUM_CPU_DEVICES": "1", "OMP_NUM_THREADS": "1"}


@pytest.mark.parametrize(
    "name",
    [pytest.param(n, marks=() if n == QUICK else pytest.mark.slow) for n in NAMES],
)
def test_it_runs_from_top_to_bottom(name, tmp_path):
    work = tmp_path / "notebooks"  # as in a checkout
    work.mkdir()
    (tmp_path / "configs").symlink_to(ROOT / "configs")
    book = read(FOLDER / f"{name}.ipynb")
    client = nbclient.NotebookClient(
        book, timeout=600, kernel_name="python3", resources={"metadata": {"path": work}}
    )
    client.execute(env=environment(name, tmp_path))
    outputs = [out for cell in book.cells for out in cell.get("outputs", ())]
    printed = "".join(out.get("text", "") for out in outputs)
    # A line of jaxcl.fit begins so, too, with what it trains.
    wrong = r"Traceback|^jaxcl: (?!simclr, finetune; )"
    assert not re.search(wrong, printed, re.M), printed
    assert any("image/png" in out.get("data", ()) for out in outputs)
    assert not list(work.iterdir())  # nothing is left beside the notebooks
