"""Pictures over the steps of a stream: what they draw, and what a run leaves."""

import types

import numpy as np

from helpers import toy
from jaxcl import plots
from jaxcl.evals import filtering, memory, spread
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


def test_pictures_are_of_what_each_evaluator_measured_last(tmp_path, monkeypatch):
    """A key may have a slash; what was not measured has no place in a picture."""
    drawn, nan = {}, np.nan
    for name, at in {"class_shares": 2, "class_spread": 1, "per_step": 1}.items():
        keep = lambda *a, at=at, **_: drawn.update({a[at].name: a})  # noqa: E731
        monkeypatch.setattr(plots, name, keep)

    def draw(chart, key, *measured):
        rows = [
            {"step": 3 * i, "task": i // 2, "eval": {f"{key}/{k}": x[k] for k in x}}
            for i, x in enumerate(measured)
        ]
        chart.draw_last(rows, tmp_path)

    shares = {"class_0": 0.2, "class_1": 0.8}, {"class_0": 0.4, "class_1": 0.6}
    entropy = {"entropy": 0.5, "stream_entropy": 0.6}, {"entropy": 0.6}
    joined = [a | b for a, b in zip(shares, entropy, strict=True)]
    draw(memory, "x/kept", {"stream_entropy": 0.7}, *joined)
    steps, found, _ = drawn.pop("x_kept_classes.png")
    assert steps.tolist() == [3, 6] and found == [[0.2, 0.8], [0.4, 0.6]]
    curves, _, ends = drawn.pop("x_kept_entropy.png")
    assert ends == [3, 6] and [*curves] == ["memory", "stream"]
    found = [values for _, values in curves.values()]
    np.testing.assert_array_equal(found, [[0.5, 0.6], [0.6, nan]])

    last = {"entropy_1": 0.7, "entropy_2": 0.8, "stream_class_0": 0.9}
    last |= {"fifo_entropy_1": 0.5, "fifo_entropy_2": 0.6}
    last |= {f"class_{c}_{i}": c + i / 10 for c in range(2) for i in (1, 2)}
    draw(filtering, "x/y", {name: x + 1 for name, x in last.items()}, last)
    times, found, _ = drawn.pop("x_y_classes.png")
    assert times == [1, 2] and found.tolist() == [[0.1, 1.1], [0.2, 1.2]]
    curves, _, ends = drawn.pop("x_y_entropy.png")
    found = [values for _, values in curves.values()]
    assert found == [[0.7, 0.8], [0.5, 0.6]] and ends == [2]

    spreads = {"intra_0": 0.1, "inter_0": 0.2}, {"intra_0": 0.3, "inter_2": 0.4}
    draw(spread, "s", *spreads)
    found = drawn.pop("s_by_class.png")[0]["s"]
    np.testing.assert_array_equal(found, [[0.3, nan, nan], [0.2, nan, 0.4]])
    assert not drawn
