"""Pictures over the steps of a stream: what they draw, and what a run leaves."""

import types

import numpy as np

from helpers import toy
from jaxcl import plots
from jaxcl.evals import memory, spread
from jaxcl.run import finish, log_file


def work_of(*charts, drawn=()):
    """A job as far as its pictures go."""
    method = types.SimpleNamespace(plotted_metrics=drawn)
    evaluation = types.SimpleNamespace(charts=charts)
    return types.SimpleNamespace(evaluation=evaluation, method=method)


def test_evaluators_and_methods_say_what_is_drawn(tmp_path):
    """Each chart once; a config without evaluators that draw has none."""
    entries = {"memory": {}, "again": {"name": "memory"}, "spread": {}, "knn": {}}
    replay = {"capacity": 20, "measure": ("gradients", "drift")}
    online = toy.ONLINE | {"method": {"name": "er"}, "replay": replay}
    work = toy.job(tmp_path / "online", **online, evaluators=entries)
    assert work.evaluation.charts == (memory.draw_last, spread.draw_last)
    norms = "feature_gradient_norm", "prototype_gradient_norm"
    assert work.method.plotted_metrics == ("drift", *norms)
    plain = toy.job(tmp_path / "plain", **toy.ONLINE | {"method": {"name": "er"}})
    assert plain.evaluation.charts == () == plain.method.plotted_metrics


def test_a_run_has_pictures_of_its_classes(tmp_path, monkeypatch):
    shares = {"memory/class_0": 0.5, "memory/class_1": 0.5, "memory/entropy": 0.7}
    shares |= {"spread/intra_0": 0.5, "spread/inter_0": 0.5}
    rows = [{"step": 4, "task": 0, "eval": shares}]
    monkeypatch.setattr(log_file, "read_rows", lambda _: rows)
    finish.draw_run(
        work_of(memory.draw_last, spread.draw_last), tmp_path, {"matrices": {}}
    )
    names = {path.stem for path in (tmp_path / "plots").iterdir()}
    new = {"memory_classes", "memory_entropy", "spread_by_class"}
    assert names == new | {"curves"}


def test_a_run_has_a_picture_of_each_measure(tmp_path, monkeypatch):
    rows, calls = [], []
    for step in range(2, 21, 2):
        told = {"drift": step / 100, "loss": 1.0, "lr": 0.1}
        rows.append({"step": step, "task": (step - 1) // 10} | told)
    rows.insert(0, {"step": 0, "task": 0, "eval": {}})
    monkeypatch.setattr(log_file, "read_rows", lambda _: rows)
    monkeypatch.setattr(plots, "curves", lambda *_: None)
    monkeypatch.setattr(plots, "per_step", lambda *a, **o: calls.append((a, o)))
    finish.draw_run(work_of(drawn=("drift", "absent")), tmp_path, {"matrices": {}})
    (((runs, path, ends), options),) = calls
    steps, values = runs["drift"]
    assert steps.tolist() == [*range(2, 21, 2)] and set(runs) == {"drift"}
    np.testing.assert_allclose(values, np.arange(2, 21, 2) / 100)
    assert ends == [10, 20] and path == tmp_path / "plots" / "drift.png"
    assert options == {"ylabel": "drift"}
