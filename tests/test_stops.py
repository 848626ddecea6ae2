"""A run that is stopped, and what it finds when it goes on: evaluations, lost rows."""

import itertools
import json
import types

import jax
import pytest

from helpers import toy
from jaxcl import core
from jaxcl.config import run_config
from jaxcl.run import cost, job, lock, log_file, metrics_log, train, updates
from jaxcl.update import lineage

rows = toy.untimed_rows
FEW = toy.ONLINE | {"method": {"name": "er"}, "eval_every": 5, "tasks": 1}


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A job of twelve steps, two evaluators that cost nothing, and its step."""
    work = toy.job(tmp_path_factory.mktemp("job"), **FEW)
    asked = []

    def first(state, task):
        asked.append(int(state.step))
        return core.Result({}, {"a": float(state.step)})

    def second(state, task):
        return core.Result({}, {"b": 2.0})

    work = toy.change(work, evaluators={"a": first, "b": second})
    return work, job.compile_step(work), asked


@pytest.fixture(scope="module")
def whole(made, tmp_path_factory):
    work, step, _ = made
    workdir = tmp_path_factory.mktemp("whole")
    train.run_tasks(work, workdir, step=step)
    return workdir


def test_an_evaluation_that_was_cut_off_is_made_up_for(made, whole, tmp_path):
    """In the midst of a task: no row is lost, and none is there twice."""
    work, step, asked = made
    for _ in range(2):  # stopped before the second evaluator, and there again
        asked.clear()
        with pytest.raises(train.Interrupted, match="step 5"):
            train.run_tasks(work, tmp_path, step=step, stop=lambda: asked == [5])
    asked.clear()
    train.run_tasks(work, tmp_path, step=step)
    assert asked == [5, 10, 12] and rows(tmp_path) == rows(whole)
    train.run_tasks(work, tmp_path, step=step)  # it is finished: nothing is done again
    assert asked == [5, 10, 12] and rows(tmp_path) == rows(whole)
    toy.check_same_bits(*(toy.saved(work, x).state for x in (whole, tmp_path)))


def test_each_task_has_its_own_seconds(made, tmp_path, monkeypatch):
    clock = itertools.count()
    monkeypatch.setattr(cost, "time", types.SimpleNamespace(monotonic=lambda: 0.0))
    monkeypatch.setattr(cost, "count_flops", lambda *_, **__: None)
    work = toy.job(tmp_path, **FEW | {"tasks": 2})

    def evaluate(state, task):
        now = 100.0 * (1 + next(clock))
        cost.time.monotonic = lambda: now
        return core.Result({}, {"a": 1.0})

    work = toy.change(work, evaluators={"a": evaluate})
    results = train.run_tasks(work, tmp_path, step=made[1])
    spent = [x["evaluation_seconds"] for x in results["cost"]["per_task"][:2]]
    assert spent == results["seconds"][:2] == [300, 300]  # of three evaluations each


@pytest.mark.parametrize(("at", "kept"), [(8, 4), (10, 8)], ids=["saved", "judged"])
def test_a_state_with_a_number_that_is_none_is_not_used(made, tmp_path, at, kept):
    """The checkpoint before it stays, and the message says where."""
    work, step, asked = made
    work = toy.change(work, save_every=4)

    def breaks(state, *arguments):
        state, metrics = step(state, *arguments)
        with jax.transfer_guard("allow"):
            if int(state.step) == at:
                stats = jax.tree.map(lambda x: x * float("nan"), state.stats)
                state = state.replace(stats=stats)
        return state, metrics

    asked.clear()
    with pytest.raises(metrics_log.Diverged) as told:
        train.run_tasks(work, tmp_path, step=breaks)
    assert "stats/encoder/" in str(told.value) and f"after step {at}" in str(told.value)
    assert toy.saved(work, tmp_path).number == kept and asked == [5]


def test_a_directory_that_was_deleted_under_a_run_stops_it(made, tmp_path):
    work, step, asked = made
    run = tmp_path / "run"
    asked.clear()

    def stop():
        if asked == [5] and run.exists():
            run.rename(tmp_path / "moved")
        return False

    with pytest.raises(lock.LockLostError, match="lock.json"):
        train.run_tasks(work, run, step=step, stop=stop)
    assert not (run / "checkpoints").exists() and not (run / "results.json").exists()


@pytest.fixture
def half(made, tmp_path):
    """A run stopped at step 9, saved."""
    work, step, _ = made
    steps = []

    def counted(*arguments):
        steps.append(1)
        return step(*arguments)

    with pytest.raises(train.Interrupted):
        train.run_tasks(
            work, tmp_path / "x", step=counted, stop=lambda: len(steps) == 9
        )
    return tmp_path / "x"


@pytest.mark.parametrize("lost", ["all", "one"])
def test_a_run_goes_on_without_rows_that_are_lost(made, whole, half, caplog, lost):
    work, step, _ = made
    path = half / log_file.FILE
    lines = path.read_bytes().splitlines(keepends=True)
    damaged = [*lines[:2], b"x" + lines[2][1:], *lines[3:]] if lost == "one" else []
    path.write_bytes(b"".join(damaged))
    train.run_tasks(work, half, step=step)
    after = rows(whole)
    gone = {2} if lost == "one" else {*range(len(lines))}
    assert rows(half) == [row for n, row in enumerate(after) if n not in gone]
    aside = half / f"damaged-{log_file.FILE}"
    assert aside.read_bytes() == b"".join(damaged)
    assert "lost rows" in caplog.text


@pytest.mark.parametrize(
    "text, words",
    [("", "config.json"), ('{"batch_size": 4', "config.json"), ("[1, 2]", "list")],
)
def test_a_damaged_config_is_named_and_nothing_is_advised_away(tmp_path, text, words):
    path = tmp_path / "config.json"
    path.write_text(text)
    with pytest.raises(ValueError, match=words) as told:
        run_config.write_or_check(tmp_path, {"batch_size": 4})
    assert str(path) in str(told.value) and "may be whole" in str(told.value)
    assert path.read_text() == text and [p.name for p in tmp_path.iterdir()] == [
        "config.json"
    ]


def test_rows_that_are_none_are_named_by_line(tmp_path):
    good = {"step": 1, "task": 0}
    for bad in ("[1]", "7", "{", '{"step": 1}', '{"step": "1", "task": 0}', "\xff"):
        text = f"{json.dumps(good)}\n{bad}\n{json.dumps(good)}\n"
        (tmp_path / log_file.FILE).write_text(text, encoding="latin-1")
        with pytest.raises(log_file.Damaged, match=r"metrics\.jsonl"):
            log_file.read_rows(tmp_path)


def test_an_update_that_was_rolled_back_keeps_no_encoder(tmp_path):
    for accepted in (True, False):
        (tmp_path / "checkpoints" / "7").mkdir(parents=True, exist_ok=True)
        lineage.write_report(tmp_path, {"accepted": accepted}, None)
        assert (tmp_path / "checkpoints").exists() == accepted
    (tmp_path / "checkpoints").mkdir()  # it was killed before it came to that
    for _ in range(2):
        lineage.remove_checkpoints(tmp_path, updates.read_report(tmp_path))
        assert not (tmp_path / "checkpoints").exists()
