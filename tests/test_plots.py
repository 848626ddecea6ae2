"""Formats of pictures, and the words of their titles."""

import io
import types

import numpy as np
import pytest
from IPython.core import formatters
from PIL import Image

from helpers import toy
from jaxcl import plots
from jaxcl.config import build
from jaxcl.data import stream
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
            ink = (np.asarray(picture.convert("RGB")) < 250).any(-1)
        assert ink.any()  # and nothing is cut off at the edge
        assert not any(x.any() for x in (ink[0], ink[-1], ink[:, 0], ink[:, -1]))


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


def test_a_summary_is_the_longest_curve_above_images_of_every_kind(monkeypatch):
    label, domain = np.arange(24) % 3, np.arange(24) // 3 % 2
    pixels = np.arange(24, dtype=np.uint8)[:, None, None, None]
    images = np.broadcast_to(pixels, (24, 2, 2, 1))
    examples = stream.Examples(label, domain, images)
    tasks = [
        types.SimpleNamespace(train=types.SimpleNamespace(rows=np.arange(i, 24)))
        for i in range(9)
    ]
    data = types.SimpleNamespace(train=examples)
    work = types.SimpleNamespace(
        stream=types.SimpleNamespace(dataset=data, tasks=tasks),
        config={"method": {"name": "two_view", "strategy": {"name": "pnr"}}},
    )
    none, drawn = np.nan, []
    matrices = {
        "knn/all": [[0.1, none, none], [0.1, 0.1, none], [0.1, 0.1, 0.1]],
        "late/x_incremental": [[none] * 3, [0.5, 0.5, none], [0.5, 0.5, 0.5]],
        "probe/x_incremental": [[0.9, none, none], [none] * 3, [none] * 3],
        "knn/x_incremental": [[0.6, none, none], [0.3, 0.5, none], [none] * 3],
    }
    results = {"matrices": matrices, "untrained": {"knn/x_incremental": [0.2, 0.4]}}

    def summary(curves, strips, path, *, title):
        drawn.append((curves, [[x[0, 0, 0] for x in strip] for strip in strips], path))

    monkeypatch.setattr(plots, "summary", summary)
    finish._draw_summary(work, results, "path")
    ((curves, strips, path),) = drawn
    assert path == "path" and list(curves) == ["pnr", "untrained"]
    np.testing.assert_allclose(curves["pnr"], [0.6, 0.4])
    np.testing.assert_allclose(curves["untrained"], [0.3])
    assert strips == [[*range(i, i + 6)] for i in range(8)]
    work.config["method"] = {"name": "er"}
    finish._draw_summary(work, results | {"untrained": {}}, "path")
    assert list(drawn[-1][0]) == ["er"]
    for changed in (images.astype(np.float32), None):  # features, and files
        data.train = examples._replace(images=changed)
        finish._draw_summary(work, results, "path")
    data.train = examples
    finish._draw_summary(work, {"matrices": {"knn/x_incremental": [[0.5]]}}, "path")
    assert len(drawn) == 2


def test_a_metric_is_drawn_over_the_steps_that_have_it(monkeypatch):
    drawn = []
    monkeypatch.setattr(plots, "per_step", lambda *x, **more: drawn.append((x, more)))
    rows = [{"step": 1, "pull_back": 0.5}, {"step": 2}, {"step": 3, "pull_back": 0.25}]
    finish._draw_metric(rows, "pull_back", [2, 3], "path")
    finish._draw_metric(rows, "absent", [2, 3], "path")
    (((curve, *rest), more),) = drawn
    np.testing.assert_array_equal(curve["pull_back"], [[1, 3], [0.5, 0.25]])
    assert rest == ["path", [2, 3]] and more["ylabel"] == "pull back"


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
