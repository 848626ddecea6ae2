"""What a run says before it begins."""

import types

import jax
import numpy as np
import pytest

from helpers import toy
from jaxcl.config import build
from jaxcl.run import finish, headline, job, transfer
from jaxcl.run import results as results_lib


def test_a_run_is_told_in_two_lines(tmp_path):
    work = toy.job(tmp_path / "run", **{"method.base": "byol"})
    train = work.stream.dataset.train
    overlapping = work.stream.tasks[0]._replace(train=work.stream.tasks[1].train)
    work = work._replace(
        first_tasks=3,
        stream=work.stream._replace(tasks=(overlapping, *work.stream.tasks[1:])),
    )
    rows = {row for task in work.stream.tasks for row in task.train.rows.tolist()}
    assert len(rows) < len(train.label)
    init = work.method.init
    params = jax.eval_shape(init, jax.random.key(0), job._example(work)).params
    whole, own = (
        sum(np.size(leaf) for leaf in jax.tree.leaves(tree))
        for tree in (params, params["encoder"])
    )
    steps = sum(len(plan) for plan in job.plain_schedules(work)[:3])
    device = jax.devices()[0].device_kind
    judged = len(work.stream.evaluation.label)
    assert headline.of(work, "runs/x").splitlines() == [
        f"jaxcl: runs/x: two_view (byol, finetune) on digits: {len(rows):,} images of "
        f"8 x 8 pixels in 8 tasks, {judged} to judge",
        f"jaxcl: conv_net 4, {own:,} parameters ({whole:,} with heads); {steps} steps "
        f"of 48, 2 epochs a task, on 1 x {device}",
    ]
    more = work._replace(alone=object(), patience=2, epochs=(1, 4))
    assert headline.of(more, "runs/x").endswith(
        f"of 48, up to 1/4 epochs a task, on 1 x {device}; then each task alone, "
        "for FT_i"
    )
    # It goes on after two tasks of another run.
    results = results_lib.empty(8)
    for task in range(2):
        results = results_lib.add(results, task, {}, {}, 1.0)
    (tmp_path / "before").mkdir()
    results_lib.write_results(tmp_path / "before", results)
    more = work._replace(start=str(tmp_path / "before"))
    left = len(job.plain_schedules(work)[2])
    assert f"in 8 tasks, 2 of them done, {judged} to" in headline.of(more, "x")
    assert f"; {left} steps of 48" in headline.of(more, "x")


def test_an_encoder_that_is_judged_is_told(tmp_path):
    stream = toy.job(tmp_path).stream
    work = transfer.Transfer(
        state=types.SimpleNamespace(params={"encoder": np.zeros((20, 60))}),
        source={"path": "runs/mine", "number": 3},
        stream=stream,
        evaluators={"knn": None, "linear": None},
        pictures={},
        record={},
    )
    assert headline.of(work, tmp_path / "at") == (
        f"jaxcl: {tmp_path}/at: the encoder of runs/mine (1,200 parameters) is judged "
        f"by knn, linear on digits: {len(stream.dataset.train.label):,} rows to train "
        "probes"
    )


@pytest.mark.parametrize("count", [1, 2])
def test_a_run_says_first_what_it_is(count, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(finish, "_one", lambda *_: print("trains") or {})
    monkeypatch.setattr(finish.seeds, "summary", lambda results: {})
    finish.run(build.build(toy.config(seeds=count), tmp_path), tmp_path)
    lines = capsys.readouterr().out.splitlines()
    each = "seeds 0 to 1, one after another; each: " if count > 1 else ""
    assert lines[0].startswith(f"jaxcl: {tmp_path}: {each}two_view (mocov2plus, ")
    assert lines[2 : 2 + count] == ["trains"] * count
    assert sum(line.startswith("jaxcl: ") for line in lines) == 2
