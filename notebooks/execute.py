"""Run notebooks and store their outputs: `python notebooks/execute.py 1_quick_start`.

Without a name all are run. Pictures are made small, so that a file stays below 300 kB.
"""

import base64
import io
import os
import pathlib
import sys
import tempfile

import nbclient
import nbformat
from PIL import Image

FOLDER = pathlib.Path(__file__).parent
_WIDTH, _COLOURS = 900, 64  # of a stored picture


def shrink(png: str) -> str:
    """Return a smaller picture, both as PNG in base64."""
    image = Image.open(io.BytesIO(base64.b64decode(png))).convert("RGB")
    image.thumbnail((_WIDTH, _WIDTH))
    small = io.BytesIO()
    image.quantize(_COLOURS).save(small, "png", optimize=True)
    return base64.b64encode(small.getvalue()).decode()


def execute(path: pathlib.Path) -> None:
    """Run a notebook in an empty folder and write it back with its outputs."""
    book = nbformat.read(path, as_version=4)
    with tempfile.TemporaryDirectory() as work:
        client = nbclient.NotebookClient(
            book,
            timeout=1800,
            kernel_name="python3",
            record_timing=False,
            coalesce_streams=True,
            resources={"metadata": {"path": work}},
        )
        binaries = pathlib.Path(sys.executable).parent
        client.execute(env=os.environ | {"PATH": f"{binaries}:{os.environ['PATH']}"})
    for cell in book.cells:
        cell.metadata.clear()
        if "outputs" in cell:  # warnings on stderr have paths of this machine
            cell.outputs = [x for x in cell.outputs if x.get("name") != "stderr"]
        for output in cell.get("outputs", ()):
            if png := output.get("data", {}).get("image/png"):
                output.metadata, output.data = {}, {"image/png": shrink(png)}
    book.metadata.language_info = {"name": "python"}
    path.write_text(nbformat.writes(book) + "\n")


if __name__ == "__main__":
    for name in sys.argv[1:] or sorted(x.stem for x in FOLDER.glob("*.ipynb")):
        execute(FOLDER / f"{name}.ipynb")
