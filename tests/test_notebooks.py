"""The notebooks: valid, small, with outputs; their commands parse, they run."""

import ast
import os
import pathlib
import re
import sys

import nbclient
import nbformat
import pytest

from helpers import config_files, pages
from jaxcl.config import files

ROOT = pathlib.Path(__file__).parents[1]
FOLDER = ROOT / "notebooks"
BOOKS = sorted(FOLDER.glob("*.ipynb"))
NAMES = [
    "1_quick_start",
    "2_rehearsal_cifar10",
    "3_in_your_own_loop",
    "4_your_own_images",
    "5_duel_imbalanced",
    "6_keep_fresh",
]
QUICK = "3_in_your_own_loop"
# The tests' cheap compilation makes their steps up to twenty times slower.
COMPILED_WELL = tuple(name for name in NAMES if name != QUICK)
# Of the shell or of IPython, with the lines that continue it.
COMMAND = re.compile(r"^( *)[!%]((?:[^\n\\]|\\\n|\\.)*)", re.M)
each = pytest.mark.parametrize("path", BOOKS, ids=lambda path: path.stem)


def read(path):
    return nbformat.read(path, as_version=4)


def code(path):
    return [cell.source for cell in read(path).cells if cell.cell_type == "code"]


def plain(source):
    """The cell as Python: each command of the shell or of IPython is a `pass`."""
    return COMMAND.sub(r"\1pass", source)


def commands(word):
    """Arguments of each `jaxcl WORD` of the notebooks."""
    found = []
    for path in BOOKS:
        lines = "\n".join(line for _, line in COMMAND.findall("\n".join(code(path))))
        for i, arguments in enumerate(pages.commands(lines, f"jaxcl {word}")):
            found.append(pytest.param(arguments, id=f"{path.stem}-{i}"))
    return found


@each
def test_the_file_is_valid_and_small_and_holds_its_outputs(path):
    book = read(path)
    nbformat.validate(book)
    assert len(path.read_text()) < 300_000
    outputs = [out for cell in book.cells for out in cell.get("outputs", ())]
    assert sum("image/png" in out.get("data", ()) for out in outputs) >= 1
    assert not any(out.output_type == "error" for out in outputs)
    texts = "".join(out.get("text", "") for out in outputs)
    assert not re.search(r"/(tmp|home|root|work)/", texts)  # of who ran it


@each
def test_cells_are_python(path):
    for i, source in enumerate(code(path)):
        assert ast.parse(plain(source), f"{path.name}, code cell {i + 1}").body


@pytest.mark.parametrize("arguments", commands("train"))
def test_runs_have_the_options_there_are(arguments):
    name, *rest = arguments
    words = [f"--config={files.locate(name)}", *rest]
    config_files.check_options(config_files.parse(words))


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
    work = tmp_path / "here"
    work.mkdir()
    book = read(FOLDER / f"{name}.ipynb")
    client = nbclient.NotebookClient(
        book, timeout=600, kernel_name="python3", resources={"metadata": {"path": work}}
    )
    client.execute(env=environment(name, tmp_path))
    outputs = [out for cell in book.cells for out in cell.get("outputs", ())]
    printed = "".join(out.get("text", "") for out in outputs)
    assert "Traceback" not in printed, printed
    assert any("image/png" in out.get("data", ()) for out in outputs)
