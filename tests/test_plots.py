"""Formats of pictures, and the words of their titles."""

import numpy as np
import pytest
from PIL import Image

from jaxcl import plots

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
        assert Image.open(path).size[0] > 250


def test_another_ending_is_refused(tmp_path):
    path = tmp_path / "picture.jpg"
    with pytest.raises(ValueError, match=r"picture.jpg: a picture must end in one of"):
        plots.accuracy_matrix(MATRIX, path, title="t")
    assert not path.exists()


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("knn", "Nearest neighbours"),
        ("linear/all", "Linear probe, all"),
        ("class_mean", "Class mean"),
    ],
)
def test_titles_in_words(name, words):
    assert plots.words(name) == words
