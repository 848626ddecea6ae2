"""Tasks that end when the loss stops falling, and runs that go on from another."""

import itertools
import json
import types

import jax
import numpy as np
import pytest

from helpers import run_directories, toy
from jaxcl import core, sharding
from jaxcl.config import build, recipe
from jaxcl.data import stream
from jaxcl.data.feed import graph_batches
from jaxcl.data.sources import toys
from jaxcl.data.stream import graph_arrays, scenarios
from jaxcl.run import (
    checkpoint,
    cost,
    job,
    log_file,
    metrics_log,
    result_file,
    train,
)

EVALUATORS = {"knn": {"k": 5}}


def epochs(patience, means, found=None):
    """Epochs of two steps each with these mean losses."""
    made = metrics_log.Epochs(patience, found or {})
    for mean in means:
        made.add({"loss": np.float32(mean - 0.5), "passes": np.float32(3)})
        made.add({"loss": np.float32(mean + 0.5), "passes": np.float32(3)})
        made.end_epoch(10.0 * (made.number + 1))
    return made


@pytest.mark.parametrize(
    ("means", "best", "over"),
    [
        ([5, 4, 3], 3, False),
        ([5, 3, 4, 4.5], 2, True),
        ([5, 3, 4, 3], 4, False),  # as low as the best is better
        ([5, 3, 4, 3, 3.5, 9], 4, True),
        ([5], 1, False),
    ],
)
def test_patience(means, best, over):
    made = epochs(2, means)
    assert made.is_over is over and made.number == len(means)
    found = made.summary()
    assert found["best"] == {
        "number": best,
        "loss": means[best - 1],
        "seconds": 10.0 * best,
        "passes": 6.0 * best,
    }
    assert found["last"]["number"] == len(means)
    assert not epochs(0, [1, *means, 99, 99, 99]).is_over


def test_epochs_go_on_from_what_was_saved():
    whole = epochs(2, [5, 3, 4, 3.5])
    half = epochs(2, [5, 3])
    half.add({"loss": np.float32(3.5), "passes": np.float32(3)})
    again = metrics_log.Epochs(2, json.loads(json.dumps(half.read())))
    again.add({"loss": np.float32(4.5), "passes": np.float32(3)})
    again.end_epoch(30.0)
    assert epochs(2, [3.5], again.read()).read() == whole.read()


@pytest.fixture(scope="module")
def rows(tmp_path_factory):
    """A run whose losses are told: (results, rows of metrics.jsonl, state)."""
    folder = tmp_path_factory.mktemp("whole")
    return folder, *run(folder)


# Mean losses of the epochs of each task: the first stops early, the second does not.
LOSSES = {0: [3.0, 2.0, 2.5, 2.2, 1.0, 1.0], 1: [5.0, 4.0, 3.0, 2.0, 1.0, 0.5]}
STEPS = 5  # of an epoch


def toy_job(folder, **changes):
    changes = {
        "scenario": {"name": "growth", "growth": 0.5, "seed": 3},
        "batch_size": 140,
        "method": {"name": "icl", "strategy": "finetune"},
        "epochs": 6,
        "eval_epochs": 2,
        "patience": 2,
        "evaluators": EVALUATORS,
        **changes,
    }
    made = build.build(toy.config(**changes), folder)
    told = np.array([LOSSES[0], LOSSES[1]], np.float32)

    def step(state, batch):
        del batch
        epoch = (state.step - state.task_start) // STEPS
        loss = jax.numpy.asarray(told)[state.task, epoch]
        params = jax.tree.map(lambda x: x + loss, state.params)
        return state.replace(step=state.step + 1, params=params), {"loss": loss}

    return made._replace(method=made.method._replace(step=step))


def run(folder, stop_at=None, **changes):
    work, asked = toy_job(folder, **changes), itertools.count(1)
    try:
        results = train.run_tasks(work, folder, stop=lambda: next(asked) == stop_at)
    except train.Interrupted:
        assert stop_at is not None
        results = train.run_tasks(work, folder)
    return results, log_file.read_rows(folder), toy.saved(work, folder).state


def untimed(rows):
    return [{key: x for key, x in row.items() if key != "time"} for row in rows]


def untimed_convergence(results):
    return json.loads(
        json.dumps(results["convergence"]),
        object_hook=lambda found: {
            key: x for key, x in found.items() if key != "seconds"
        },
    )


def test_a_task_ends_when_its_patience_does(rows):
    _, results, logged, state = rows
    ends = [row for row in logged if "epoch" in row]
    assert [(row["task"], row["epoch"]["number"]) for row in ends] == [
        *((0, n) for n in (1, 2, 3, 4)),
        *((1, n) for n in (1, 2, 3, 4, 5, 6)),
    ]
    means = [row["epoch"]["loss"] for row in ends]
    np.testing.assert_allclose(means, LOSSES[0][:4] + LOSSES[1], rtol=1e-6)
    assert [row["step"] for row in ends] == [STEPS * n for n in range(1, 11)]
    assert all(row["time"]["train"] > 0 for row in ends)
    found = results["convergence"]
    assert found["0"]["best"]["number"] == 2 and found["0"]["last"]["number"] == 4
    assert (
        found["1"]["best"] == found["1"]["last"] and found["1"]["best"]["loss"] == 0.5
    )
    # Every second epoch but the last of a task, whose end is evaluated anyway.
    inside = [row["step"] for row in logged if "eval" in row]
    assert inside == [10, 20, 30, 40, 50]
    assert int(state.task_steps) == 30 and int(state.step) == 50
    assert results["cost"]["per_task"][0]["steps"] == 20


@pytest.mark.parametrize("stop_at", [7, 15, 20, 24])
def test_it_resumes_bitwise_amid_an_epoch_and_at_its_end(rows, tmp_path, stop_at):
    _, results, logged, state = rows
    again, relogged, final = run(tmp_path, stop_at)
    assert untimed(relogged) == untimed(logged)
    assert untimed_convergence(again) == untimed_convergence(results)
    toy.check_same_bits(state, final)


def test_a_run_goes_on_from_the_first_tasks_of_another(rows, tmp_path):
    _, results, logged, state = rows
    old, new = tmp_path / "old", tmp_path / "new"
    first, _, _ = run(old, first_tasks=1)
    assert result_file.count_finished(first) == 1
    assert first["matrices"]["knn/class_incremental"][1] == [None, None]
    before = sorted(path.name for path in (old / "checkpoints").iterdir())
    whole, relogged, final = run(new, start=str(old))
    assert untimed(relogged) == [x for x in untimed(logged) if x["task"] == 1]
    assert untimed_convergence(whole) == untimed_convergence(results)
    assert whole["matrices"] == results["matrices"]
    toy.check_same_bits(state, final)
    assert sorted(path.name for path in (old / "checkpoints").iterdir()) == before


def test_what_cannot_be_gone_on_from_is_refused(rows, tmp_path):
    with pytest.raises(ValueError, match="config.start=.*there is no run in it"):
        toy_job(tmp_path / "a", start=str(tmp_path / "none"))
    said = r"config.start=.*config.batch_size: 140 -> 120"
    with pytest.raises(ValueError, match=said):
        toy_job(tmp_path / "a", start=str(rows[0]), batch_size=120)
    with pytest.raises(ValueError, match="config.first_tasks=3: .* 2 tasks"):
        toy_job(tmp_path / "b", first_tasks=3)
    with pytest.raises(ValueError, match="config.patience=-1: must be at least 0"):
        toy_job(tmp_path / "b", patience=-1)
    toy_job(tmp_path / "begun")  # writes its config, trains nothing
    work = toy_job(tmp_path / "c", start=str(tmp_path / "begun"))
    with pytest.raises(checkpoint.CheckpointError, match="has not come to the end"):
        train.run_tasks(work, tmp_path / "c")


def test_a_warmup_fits_the_shortest_task():
    assert recipe.warmup_epochs(30, 10) == 10
    assert recipe.warmup_epochs((30, 4, 20), 10) == 3
    assert recipe.warmup_epochs((200, 25)) == 3 and recipe.warmup_epochs(200) == 10


def test_growth_is_the_share_of_the_new_rows():
    images = np.zeros((40, 1, 1, 1), np.uint8)
    rows = stream.Examples(np.zeros(40, "i4"), np.zeros(40, "i4"), images)
    data = toys.digits()._replace(train=rows)
    whole = scenarios.ScenarioData(data, data.test, None, seed=0)
    old, new = (task.train.rows for task in scenarios.growth(whole, growth=0.3))
    assert (len(old), len(new)) == (28, 12)
    assert sorted([*old, *new]) == list(range(40))


def test_growth_cuts_by_the_seed(tmp_path):
    data = toys.rings_and_trees(count=41)
    old, new = scenarios.make(
        data, name="growth", growth=0.3, seed=5, evaluation="none"
    ).tasks
    order = np.random.default_rng(5).permutation(41)
    assert old.train.rows.tolist() == order[:29].tolist()
    assert new.train.rows.tolist() == order[29:].tolist()
    assert new.earlier.tolist() == order[:29].tolist() and len(old.earlier) == 0
    assert (old.name, new.name) == ("old", "new")
    assert old.train.order is stream.filled_order
    # A run's seed is the scenario's, unless it has its own.
    for seed, other in ((5, 5), (6, 6)):
        work = build.build(
            toy.config(scenario={"name": "growth"}, seed=seed), tmp_path / str(seed)
        )
        want = np.random.default_rng(other).permutation(
            len(work.stream.dataset.train.label)
        )
        half = round(len(want) / 2)
        assert work.stream.tasks[0].train.rows.tolist() == want[:half].tolist()
    for wrong, said in ((0.0, "growth=0.0"), (1.0, "growth=1.0")):
        with pytest.raises(ValueError, match=said):
            scenarios.make(data, name="growth", growth=wrong, evaluation="none")
    with pytest.raises(ValueError, match="num_tasks=3: scenario 'growth' has 2"):
        scenarios.make(data, name="growth", num_tasks=3, evaluation="none")


def test_graph_batches_are_the_rows_of_the_plan():
    data = toys.rings_and_trees(count=37)
    source = stream.Source(data.train, np.arange(37), stream.filled_order)
    plan = stream.schedule(source, seed=1, task=0, epochs=2, batch_size=8)
    found = [*graph_batches.batches(source, seed=1, task=0, epochs=2, batch_size=8)]
    assert len(found) == len(plan) == 10
    late = [
        *graph_batches.batches(source, seed=1, task=0, epochs=2, batch_size=8, start=7)
    ]
    for step, batch in enumerate(found):
        rows = plan[step]
        assert batch["index"].tolist() == rows.tolist()
        want = np.where(rows < 0, -1, data.train.label[rows])
        assert batch["label"].tolist() == want.tolist()
        assert batch["graph"].graph_mask.tolist() == (rows >= 0).tolist()
        sizes = np.diff(data.train.graphs.graph_ptr)[rows[rows >= 0]]
        assert batch["graph"].node_mask.sum() == sizes.sum()
        if step >= 7:
            again = jax.tree.leaves(late[step - 7])
            pairs = zip(jax.tree.leaves(batch), again, strict=True)
            assert all(np.array_equal(a, b) for a, b in pairs)


def test_parts_of_a_batch_lie_side_by_side():
    data = toys.rings_and_trees(count=24)

    def order(rng, rows, batch_size):
        return rng.permutation(rows).reshape(-1, batch_size)

    source = stream.Source(data.train, np.arange(24), order)
    plan = stream.schedule(source, seed=0, task=0, epochs=1, batch_size=12)
    first = next(
        graph_batches.batches(
            source, seed=0, task=0, epochs=1, batch_size=4, num_batches=3
        )
    )
    assert first["index"].shape == (3, 4)
    for part in range(3):
        for i in range(4):
            assert first["index"][part, i] == plan[0][3 * i + part]
    assert {leaf.shape[0] for leaf in first["graph"]} == {3}
    alone = graph_arrays.pad_batch(
        data.train.graphs,
        first["index"][1],
        nodes=first["graph"].features.shape[1],
        edges=first["graph"].senders.shape[1],
        graphs=4,
    )
    pairs = zip(alone, (leaf[1] for leaf in first["graph"]), strict=True)
    assert all(np.array_equal(a, b) for a, b in pairs)


def counted(workdir, loss_of, untrained=False, **changes):
    """A job and a step that only counts: no network trains, nothing is compiled.

    Args:
      loss_of: (step, its epoch in the task) -> its loss.

    Returns:
      The job, its step, and the list of (step, task) that an evaluator fills.
    """
    small = {"encoder": {"name": "mlp", "widths": (2,)}, "method.base": "simclr"}
    work = run_directories.untried(workdir, **small, **changes)
    judged = []

    def judge(state, task):
        judged.append((int(state.step), task))
        row = np.full(len(work.stream.tasks), 0.1 * len(judged))
        return core.Result({"row": row}, {"count": float(len(judged))})

    def step(state, resident, batches, count):
        step.calls += 1
        with jax.transfer_guard("allow"):
            now, begun = int(state.step), int(state.task_start)
            epoch = (now - begun) // work_steps(work, int(state.task))
            step_after = np.int32(now + int(count))
            state = state.replace(step=sharding.replicate(step_after, work.mesh))
        losses = [loss_of(now, epoch)] * work.loop.steps_per_call
        return state, {"loss": np.float32(losses)}

    step.calls = 0
    work = toy.change(work, evaluators={"a": judge}, untrained=untrained)
    return work, step, judged


def work_steps(work, task):
    """Steps of an epoch."""
    source = work.stream.tasks[task].train
    return job.schedule(work, source, task).steps_per_epoch


def test_a_run_ends_tasks_by_patience_and_evaluates_when_it_is_due(
    tmp_path, monkeypatch
):
    numbers, save = [], checkpoint.Checkpoints.save

    def note(self, number, *rest):
        numbers.append(number)
        save(self, number, *rest)

    monkeypatch.setattr(checkpoint.Checkpoints, "save", note)
    work, step, judged = counted(
        tmp_path,
        lambda now, epoch: (1.0, 0.5, 2.0)[epoch],
        **{
            "epochs": 5,
            "patience": 1,
            "eval_epochs": 2,
            "first_tasks": 2,
            "save_every": 7,
            "eval_every": 18,  # where patience ends the tasks, which evaluates anyway
        },
        untrained=True,
    )

    def draw(state, task):
        drawn.append((int(state.step), state.extra))
        return core.Result({}, {})

    drawn, work = [], toy.change(work, pictures={"p": draw})
    averaged = work.method._replace(eval_state=lambda x: x.replace(extra="averaged"))
    work = work._replace(method=averaged)
    spent = {"train": 5.0, "evaluation": 70.0}
    monkeypatch.setattr(cost.Clock, "read", lambda self: spent)
    results = train.run_tasks(work, tmp_path, step=step)
    size = work_steps(work, 0)
    two = 3 * size + 2 * work_steps(work, 1)
    end = 3 * size + 3 * work_steps(work, 1)
    assert judged == [(0, 0), (2 * size, 0), (3 * size, 0), (two, 1), (end, 1)]
    assert drawn == [(3 * size, "averaged"), (end, "averaged")]
    np.testing.assert_allclose(results["untrained"]["a/row"], 0.1)
    assert [x["a/count"] for x in results["scalars"][:2]] == [3.0, 5.0]
    # Every seven steps of a task, and twice at its end, whose saves count, too
    saved = [7, 14, 3 * size + 1, 3 * size + 2]
    assert numbers == saved + [3 * size + 2 + x for x in saved]
    state = toy.saved(work, tmp_path).state
    assert (int(state.step), int(state.task_steps)) == (end, end - 3 * size)
    for task in "01":
        found = results["convergence"][task]
        told = [(found[x]["number"], found[x]["loss"]) for x in ("best", "last")]
        assert told == [(2, 0.5), (3, 2.0)]
    rows = log_file.read_rows(tmp_path)
    epochs = [(row["step"], row["epoch"]["number"]) for row in rows if "epoch" in row]
    assert epochs[:3] == [(size, 1), (2 * size, 2), (3 * size, 3)]
    assert {row["time"]["train"] for row in rows if "epoch" in row} == {5.0}
    assert [row["step"] for row in rows if "eval" in row] == [x for x, _ in judged]
    again = train.run_tasks(work, tmp_path, step=None)  # nothing is left to do
    assert again["scalars"] == results["scalars"] and len(judged) == 5


def test_an_evaluation_comes_every_few_steps_and_a_stop_before_it_is_kept(tmp_path):
    """Every second one falls on the end of an epoch, and comes once."""
    changes = {"epochs": 3, "eval_every": 3, "eval_epochs": 2, "first_tasks": 1}
    work, step, judged = counted(tmp_path, lambda now, epoch: now, **changes)
    for number in (6, 12):  # stopped before the evaluator, then by the last step
        asked = itertools.count(1)
        with pytest.raises(train.Interrupted, match=f"step {number}"):
            train.run_tasks(work, tmp_path, step=step, stop=lambda x=asked: next(x) > 8)
    assert judged == [(3, 0), (6, 0), (9, 0)]
    train.run_tasks(work, tmp_path, step=step)
    assert judged == [(number, 0) for number in range(3, 19, 3)]
    assert step.calls == 18  # the stopped runs had saved their own
    rows = [row["epoch"] for row in log_file.read_rows(tmp_path) if "epoch" in row]
    assert [(x["number"], x["loss"]) for x in rows] == [(1, 2.5), (2, 8.5), (3, 14.5)]


def test_the_time_that_is_left_is_that_of_the_tasks_to_train(tmp_path, monkeypatch):
    """Told after the second call of three steps, which takes six seconds."""
    clock, told = itertools.count(0, 6), []
    work, step, _ = counted(
        tmp_path, lambda *_: 1.0, epochs=2, first_tasks=1, steps_per_call=3
    )
    now = types.SimpleNamespace(monotonic=lambda: next(clock))
    monkeypatch.setattr(train, "time", now)
    monkeypatch.setattr(cost, "describe_duration", lambda _, *of: told.append(of) or "")
    with pytest.raises(train.Interrupted, match="step 6"):
        train.run_tasks(work, tmp_path, step=step, stop=lambda: step.calls == 2)
    train.run_tasks(work, tmp_path, step=step)
    assert told == [(2.0, 6), (2.0, 0)]  # before the stop, and after it


def test_a_loss_that_is_no_number_names_its_step_and_task(tmp_path):
    work, step, judged = counted(
        tmp_path, lambda now, epoch: np.nan if now == 2 else 1.0, first_tasks=1
    )
    with pytest.raises(metrics_log.Diverged, match=r"loss is nan at step 3 .task 1"):
        train.run_tasks(work, tmp_path, step=step)
    assert judged == []
