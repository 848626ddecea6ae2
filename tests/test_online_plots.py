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
    drawn = {}
    for name in ("class_shares", "class_spread", "per_step"):
        at = 2 if name == "class_shares" else 1
        monkeypatch.setattr(
            plots, name, lambda *a, at=at, **_: drawn.update({a[at].name: a})
        )

    def rows(key, *measured):
        return [
            {"step": 3 * i, "task": i // 2, "eval": {f"{key}/{k}": v for k, v in of}}
            for i, of in enumerate(dict.items(x) for x in measured)
        ]

    share, other = {"class_0": 0.2, "class_1": 0.8}, {"class_0": 0.4, "class_1": 0.6}
    entropy = {"entropy": 0.5, "stream_entropy": 0.6}
    measured = {"stream_entropy": 0.7}, share | entropy, other | {"entropy": 0.6}
    memory.draw_last(rows("x/kept", *measured), tmp_path)
    steps, shares, _ = drawn.pop("x_kept_classes.png")
    assert steps.tolist() == [3, 6] and shares == [[0.2, 0.8], [0.4, 0.6]]
    curves, _, ends = drawn.pop("x_kept_entropy.png")
    assert ends == [3, 6] and [*curves] == ["memory", "stream"]
    np.testing.assert_array_equal(curves["memory"][1], [0.5, 0.6])
    np.testing.assert_array_equal(curves["stream"][1], [0.6, np.nan])

    def kept(first, second):
        found = {"fifo_entropy_1": first, "fifo_entropy_2": second, "stream_class_0": 1}
        for c in range(2):
            found |= {f"class_{c}_1": c + first, f"class_{c}_2": c + second}
        return found | {"entropy_1": 2 * first, "entropy_2": 2 * second}

    filtering.draw_last(rows("x/y", kept(0.1, 0.2), kept(0.3, 0.4)), tmp_path)
    times, shares, _ = drawn.pop("x_y_classes.png")
    np.testing.assert_array_equal(times, [1, 2])
    np.testing.assert_allclose(shares, [[0.3, 1.3], [0.4, 1.4]])
    curves, _, ends = drawn.pop("x_y_entropy.png")
    found = {name: values for name, (_, values) in curves.items()}
    assert found == {"DUEL": [0.6, 0.8], "first in, first out": [0.3, 0.4]}
    assert ends == [2]

    spreads = {"intra_0": 0.1, "inter_0": 0.2}, {"intra_0": 0.3, "inter_2": 0.4}
    spread.draw_last(rows("s", *spreads), tmp_path)
    ((name, found),) = drawn.pop("s_by_class.png")[0].items()
    want = [[0.3, np.nan, np.nan], [0.2, np.nan, 0.4]]
    assert name == "s" and not drawn
    np.testing.assert_array_equal(found, want)
