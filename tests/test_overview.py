"""A run says what it is before it begins: the numbers are those of the job."""

import json
import re
import types

import jax
import numpy as np
import pytest

from helpers import run_directories, toy
from jaxcl.run import cost, finish, job, overview, result_file, train, transfer


def numbers(text):
    return [int(x.replace(",", "")) for x in re.findall(r"\b\d[\d,]*\b", text)]


def test_the_numbers_are_those_of_the_job(tmp_path):
    work = run_directories.untried(tmp_path / "run", **{"method.base": "byol"})
    work = toy.change(work, first_tasks=3)
    rows = sum(len(task.train.rows) for task in work.stream.tasks)
    params = job.shapes(work.method, work.data)[0].params
    whole, own = (
        sum(np.size(leaf) for leaf in jax.tree.leaves(tree))
        for tree in (params, params["encoder"])
    )
    steps = sum(len(plan) for plan in job.plain_schedules(work.data)[:3])
    first, second, third = overview.describe_run(work, "runs/x").splitlines()
    assert "runs/x" in first and "byol" in first and "digits" in first
    assert numbers(first)[:4] == [rows, 8, 8, 8]
    assert numbers(first)[4] == len(work.stream.evaluation.label)
    stored = work._replace(config=work.config | {"data": {"name": "features"}})
    told = overview.describe_run(stored, "runs/x").splitlines()[0]
    assert numbers(told)[:2] == [rows, 8]  # they have no pixels
    assert numbers(second)[:6] == [4, own, whole, steps, 48, 2]
    assert jax.devices()[0].device_kind in second
    # Which rows, classes and tasks were read, in their order.
    data, names = work.stream.dataset, ", ".join(x.name for x in work.stream.tasks)
    sizes = [len(data.train.label), len(data.test.label), 10, 0, 1, 2]
    assert numbers(third)[: len(sizes)] == sizes and names in third
    noted = work.stream._replace(dataset=data._replace(notes=("left out: 3 x",)))
    assert overview.describe_set(noted).endswith("left out: 3 x")
    # Tasks that another run has done are left out.
    results = result_file.empty_results(8)
    for task in range(2):
        results = result_file.add_task(results, task, {}, {}, 1.0)
    (tmp_path / "before").mkdir()
    result_file.write_results(tmp_path / "before", results)
    started = toy.change(work, start=str(tmp_path / "before"))
    (third,) = job.plain_schedules(work.data)[2:3]
    first, second, _ = overview.describe_run(started, "x").splitlines()
    assert numbers(first)[4] == 2 and len(third) in numbers(second)
    section = {"name": "online_ssl", "regulariser": {"name": "minred"}}
    online = work._replace(config=work.config | {"method": section})
    assert "minred" in overview.describe_run(online, "x")


def test_a_long_run_says_how_long_it_takes(tmp_path, monkeypatch, capsys):
    work = run_directories.untried(tmp_path / "run")
    work = toy.change(work, epochs=60)
    assert not cost.describe_duration(work, 0.1, 5000)
    said = cost.describe_duration(work, 0.9, 20_000)
    assert {20_000, 5} <= {*numbers(said)}  # 18,000 s
    # 600 of 18,000 s: a thirtieth of the 60 epochs, 10 minutes
    assert "--config.epochs=2," in said and 10 in numbers(said)
    unlike = toy.change(work, epochs=(20, 60))  # of tasks; the longest is shortened
    assert cost.describe_duration(unlike, 0.9, 20_000) == said
    large = {"name": "own_images", "encoder": {"name": "resnet"}}
    mine = work._replace(config=work.config | large)
    assert "own_images" in cost.describe_duration(mine, 0.9, 20_000)
    other = mine._replace(config=mine.config | {"name": "another"})  # a recipe
    assert "own_images" not in cost.describe_duration(other, 0.9, 20_000)
    monkeypatch.setattr(cost, "LONG", 0)
    small = toy.ONLINE | {"method": {"name": "er"}, "encoder": {"name": "mlp"}}
    job_of_two = toy.job(tmp_path / "two", tasks=2, **small)
    steps = sum(len(plan) for plan in job.plain_schedules(job_of_two.data))
    train.run_tasks(job_of_two, tmp_path / "two")
    (line,) = [x for x in capsys.readouterr().out.splitlines() if "Ctrl-C" in x]
    assert steps - 2 in numbers(line)


def test_an_encoder_that_is_judged_is_named(tmp_path):
    whole = run_directories.untried(tmp_path)
    whole = toy.change(whole, evaluators={"knn": None, "linear": None})
    stream = whole.stream
    work = transfer.Transfer(
        state=types.SimpleNamespace(params={"encoder": np.zeros((20, 60))}),
        source={"path": "runs/mine", "number": 3},
        stream=stream,
        evaluation=whole.evaluation,
        logging=whole.logging,
    )
    said, _ = overview.describe_run(work, "at").splitlines()
    assert "runs/mine" in said and "knn, linear" in said
    assert numbers(said) == [1200, len(stream.dataset.train.label)]


@pytest.mark.parametrize("count", [1, 2])
def test_it_comes_before_the_training(count, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(finish, "_run_one", lambda *_: print("trains") or {})
    monkeypatch.setattr(finish.seeds, "summary", lambda results: {})
    finish.run_job(run_directories.untried(tmp_path, seeds=count), tmp_path)
    lines = capsys.readouterr().out.splitlines()
    assert "mocov2plus" in lines[0] and str(tmp_path) in lines[0]
    assert lines[3 : 3 + count] == ["trains"] * count


def test_the_tables_of_an_update_are_named_by_their_network():
    matrices = {"knn/all": np.array([[0.5, np.nan], [0.25, 0.75]])}
    head, row = result_file.latest_table(matrices, 1).splitlines()
    assert head.split()[:3] == ["after", "task", "2"]
    assert [float(x) for x in row.split()[1:]] == [25, 75, 50]
    assert result_file.latest_table(matrices, 0, title="before").startswith("before")
    # Of many tasks the first and last are shown; the average is of all so far.
    matrices = {"a": np.diag(np.arange(14.0)) / 100 + 0.1}
    for task, count, cut in ((11, 12, False), (12, 12, True)):
        head, row = result_file.latest_table(matrices, task).splitlines()
        assert (head.count("task ") - 1, "..." in row) == (count, cut)
        assert row.endswith(f"{10 + task / (task + 1):.1f}")


@pytest.mark.parametrize(("first", "done"), [(None, False), (2, True), (3, False)])
def test_a_run_is_complete_with_all_its_tasks_or_the_first(tmp_path, first, done):
    assert not result_file.complete(tmp_path)
    results = result_file.empty_results(4)
    for task in range(2):
        results = result_file.add_task(results, task, {"a": [0.5] * 4}, {}, 1.0)
    result_file.write_results(tmp_path, results)
    (tmp_path / "config.json").write_text(json.dumps({"first_tasks": first}))
    assert result_file.complete(tmp_path) == done
    assert result_file.count_finished(results) == 2
