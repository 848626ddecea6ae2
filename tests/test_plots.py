"""Formats of pictures, and the words of their titles."""

import io

import numpy as np
import pytest
from IPython.core import formatters
from PIL import Image

from helpers import toy
from jaxcl import plots
from jaxcl.config import build
from jaxcl.run import finish

MATRIX = np.where(np.tri(3) > 0, np.linspace(0, 1, 9).reshape(3, 3), np.nan)


@pytest.mark.parametrize("ending", ["svg", "pdf", "png", "SVG"])
def test_a_picture_has_the_format_of_its_name(ending, tmp_path):
    begins = {"svg": b"<?xml", "pdf": b"%PDF", "png": b"\x89PNG"}[ending.lower()]
    made = []
    for name in "ab":
        path = tmp_path / f"{name}.{ending}"
        plots.accuracy_matrix(MATRIX, path, title="t")
        made.append(path.read_bytes())
    assert made[0].startswith(begins) and made[0] == made[1]
    if ending == "svg":
        assert b"<image" in made[0] and b"<path" in made[0]
    if ending == "png":
        with Image.open(path) as picture:
            assert picture.size[0] > 250


def test_a_run_that_is_over_draws_its_pictures_anew(tmp_path):
    options = {"queries": 2, "max_rows": 64, "last_only": False}
    evaluators = {"knn": {}, "neighbours": options}
    changes = {"plots": True, "evaluators": evaluators, "scenario.num_tasks": 10}
    config = toy.config(**changes, first_tasks=1, epochs=1)
    finish.run_job(build.build(config, tmp_path), tmp_path)
    made = {path.name for path in (tmp_path / "plots").iterdir()}
    assert {"curves.png", "knn_class_incremental.png", "neighbours_task1.png"} <= made
    (tmp_path / "plots" / "curves.png").unlink()
    finish.run_job(build.build(config, tmp_path), tmp_path)
    assert (tmp_path / "plots" / "curves.png").exists()


def test_a_notebook_shows_the_picture_of_a_run():
    """Also where nobody has imported pyplot, which tells Jupyter of figures."""
    formatter = formatters.PNGFormatter()
    matrices = {"knn/class_incremental": [[0.5]]}
    figure = plots.overview({"matrices": matrices, "task_names": ["a"]}, [])
    assert Image.open(io.BytesIO(formatter(figure))).size[0] > 500


def test_a_name_has_one_style_in_most_pictures():
    alone = plots.number_styles(["ER-ACE"])["ER-ACE"]
    assert plots.number_styles(["er_ace", "b"])["er_ace"] == alone
    many = [f"run {i}" for i in range(30)]  # of a colour each, then colours again
    numbers = plots.number_styles(["er_ace", *many])
    assert numbers["er_ace"] == alone and len({*numbers.values()}) == 31
    first = [*numbers.values()][: len(plots.COLOURS)]
    assert {*first} == {*range(len(plots.COLOURS))}
