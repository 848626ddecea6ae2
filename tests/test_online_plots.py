"""Pictures over the steps of a stream: what they draw, and what a run leaves."""

import types

import matplotlib
import numpy as np
import pytest

from helpers import toy
from jaxcl import plots
from jaxcl.evals import memory, spread
from jaxcl.run import finish, record


@pytest.fixture
def draw(tmp_path, figures):
    """draw(function, ...) -> the axes of the figure that went to a PNG."""

    def run(function, runs, *arguments, **options):
        function(runs, tmp_path / "picture.png", *arguments, **options)
        return figures[-1].axes[0]

    return run


def shaded(axes):
    """First and last step of each shaded task."""
    boxes = [p.get_extents() for p in axes.patches]
    inverse = axes.transData.inverted()
    corners = [inverse.transform(box.get_points())[:, 0] for box in boxes]
    return [tuple(np.rint(x)) for x in corners]


ENDS = [10, 30, 45, 60]


def test_anytime_draws_means_bands_and_tasks(draw):
    steps = np.arange(5, 61, 5)
    mean, spread = np.linspace(0.9, 0.4, 12), np.linspace(0.0, 0.05, 12)
    runs = {"ours": (steps, mean, spread), "peer": (ENDS, mean[:4], None)}
    axes = draw(plots.anytime, runs, ENDS, title="t")
    ours, peer = (line.get_xydata().T for line in axes.lines)
    np.testing.assert_allclose(ours, [steps, 100 * mean])
    np.testing.assert_allclose(peer, [ENDS, 100 * mean[:4]])
    (band,) = axes.collections
    corners = band.get_paths()[0].vertices
    for step, middle, half in zip(steps, mean, spread, strict=True):
        heights = corners[corners[:, 0] == step, 1]
        want = 100 * (middle + half * np.array([-1, 1]))
        np.testing.assert_allclose([heights.min(), heights.max()], want)
    colours = [matplotlib.colors.to_hex(line.get_color()) for line in axes.lines]
    assert matplotlib.colors.to_hex(band.get_facecolor()[0]) == colours[0] != colours[1]
    assert shaded(axes) == [(10, 30), (45, 60)]
    assert axes.get_xlim() == (0, 60) and "%" in axes.get_ylabel()
    assert axes.get_title() == "t" and "step" in axes.get_xlabel()
    names = [text.get_text() for text in axes.get_legend().get_texts()]
    assert names == ["ours", "peer"]


def test_steps_are_drawn_as_they_are(draw):
    steps = np.arange(1, 61)
    runs = {"er": (steps, np.sqrt(steps)), "er_ace": ([30], [2.5])}
    axes = draw(plots.per_step, runs, ENDS, ylabel="drift")
    er, ace = axes.lines
    np.testing.assert_allclose(er.get_xydata().T, runs["er"])
    assert ace.get_xydata().tolist() == [[30, 2.5]]
    assert ace.get_marker() == "."  # a point, though no line
    assert er.get_color() != ace.get_color() and axes.get_ylim()[0] == 0
    assert shaded(axes) == [(10, 30), (45, 60)]
    assert axes.get_ylabel() == "drift"


def work_of(*charts, drawn=()):
    """A job as far as its pictures go."""
    method = types.SimpleNamespace(drawn=drawn)
    return types.SimpleNamespace(charts=charts, method=method)


def test_evaluators_and_methods_say_what_is_drawn(tmp_path):
    """Each chart once; a config without evaluators that draw has none."""
    entries = {"memory": {}, "again": {"name": "memory"}, "spread": {}, "knn": {}}
    replay = {"capacity": 20, "measure": ("gradients", "drift")}
    online = toy.ONLINE | {"method": {"name": "er"}, "replay": replay}
    work = toy.job(tmp_path / "online", **online, evaluators=entries)
    assert work.charts == (memory.draw, spread.draw)
    norms = "feature_gradient_norm", "prototype_gradient_norm"
    assert work.method.drawn == ("drift", *norms)
    plain = toy.job(tmp_path / "plain", **toy.ONLINE | {"method": {"name": "er"}})
    assert plain.charts == () == plain.method.drawn


def test_a_run_has_pictures_of_its_classes(tmp_path, monkeypatch):
    shares = {"memory/class_0": 0.5, "memory/class_1": 0.5, "memory/entropy": 0.7}
    shares |= {"spread/intra_0": 0.5, "spread/inter_0": 0.5}
    rows = [{"step": 4, "task": 0, "eval": shares}]
    monkeypatch.setattr(record, "read_rows", lambda _: rows)
    finish.draw(work_of(memory.draw, spread.draw), tmp_path, {"matrices": {}})
    names = {path.stem for path in (tmp_path / "plots").iterdir()}
    new = {"memory_classes", "memory_entropy", "spread_by_class"}
    assert names == new | {"curves"}


def test_a_run_has_a_picture_of_each_measure(tmp_path, monkeypatch):
    rows, calls = [], []
    for step in range(2, 21, 2):
        told = {"drift": step / 100, "loss": 1.0, "lr": 0.1}
        rows.append({"step": step, "task": (step - 1) // 10} | told)
    rows.insert(0, {"step": 0, "task": 0, "eval": {}})
    monkeypatch.setattr(record, "read_rows", lambda _: rows)
    monkeypatch.setattr(plots, "curves", lambda *_: None)
    monkeypatch.setattr(plots, "per_step", lambda *a, **o: calls.append((a, o)))
    finish.draw(work_of(drawn=("drift", "absent")), tmp_path, {"matrices": {}})
    (((runs, path, ends), options),) = calls
    steps, values = runs["drift"]
    assert steps.tolist() == [*range(2, 21, 2)] and set(runs) == {"drift"}
    np.testing.assert_allclose(values, np.arange(2, 21, 2) / 100)
    assert ends == [10, 20] and path == tmp_path / "plots" / "drift.png"
    assert options == {"ylabel": "drift"}
