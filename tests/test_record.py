"""What a run leaves behind: rows, events, progress, results, pictures."""

import io
import json
import os
import struct
import sys
import types

import jax.numpy as jnp
import numpy as np
import pytest
from tensorboardX.proto import event_pb2

from helpers import run_directories
from jaxcl import storage
from jaxcl.run import finish, log_file, metrics_log, progress_bar, record, result_file
from jaxcl.run import terminal as terminal_lib
from jaxcl.run.loggers import tensorboard

QUIET = {"progress": False}
AWKWARD = np.array(
    [0.1, 1 / 3, -0.0, 1e-45, 1.1754944e-38, 3.4028235e38, 16777216.0, 1.0000001],
    np.float32,
)


def strict(text):
    """JSON as the standard has it: no NaN, no Infinity."""

    def refuse(word):
        raise AssertionError(f"{word} is not JSON")

    return json.loads(text, parse_constant=refuse)


def log_steps(recorder, first, last):
    for step in range(first, last + 1):
        loss = np.float32(1 / step)
        recorder.log(step, step // 5, loss=loss, time={"images_per_second": 100.0})


# Rows


def test_a_resumed_run_has_each_row_once(tmp_path):
    first = record.Recorder(tmp_path, **QUIET)
    log_steps(first, 1, 4)
    mark = first.save()
    log_steps(first, 5, 7)
    assert mark < os.path.getsize(tmp_path / "metrics.jsonl")  # all are visible
    assert [r["step"] for r in log_file.read_rows(tmp_path)] == [*range(1, 8)]
    second = record.Recorder(tmp_path, rows=mark, **QUIET)
    assert second.save() == mark == os.path.getsize(tmp_path / "metrics.jsonl")
    log_steps(second, 5, 6)
    assert second.save() == os.path.getsize(tmp_path / "metrics.jsonl") > mark
    first.close()  # late: the first was killed
    second.close()
    assert [r["step"] for r in log_file.read_rows(tmp_path)] == [*range(1, 7)]
    record.Recorder(tmp_path, **QUIET).close()
    assert log_file.read_rows(tmp_path) == []


def test_rows_are_on_disk_before_they_are_marked(tmp_path, monkeypatch):
    recorder = record.Recorder(tmp_path, **QUIET)
    log_steps(recorder, 1, 3)
    sizes, fsync = [], os.fsync
    monkeypatch.setattr(
        os, "fsync", lambda file: sizes.append(os.fstat(file).st_size) or fsync(file)
    )
    assert [recorder.save()] == sizes
    recorder.close()


def test_a_row_that_a_crash_cut_off_is_passed_over(tmp_path):
    killed = record.Recorder(tmp_path, **QUIET)
    log_steps(killed, 1, 3)
    mark = killed.save()
    with open(tmp_path / "metrics.jsonl", "ab") as file:
        file.write(b'{"step": 4, "ta')
    assert [r["step"] for r in log_file.read_rows(tmp_path)] == [1, 2, 3]
    recorder = record.Recorder(tmp_path, rows=mark, **QUIET)
    log_steps(recorder, 4, 4)
    assert [r["step"] for r in log_file.read_rows(tmp_path)] == [1, 2, 3, 4]
    killed.close()
    recorder.close()


@pytest.mark.parametrize("convert", [np.asarray, jnp.asarray, list])
def test_float32_comes_back_bit_for_bit(tmp_path, convert):
    recorder = record.Recorder(tmp_path, **QUIET)
    recorder.log(1, 0, loss=AWKWARD[0], eval={"knn": convert(AWKWARD)})
    recorder.close()
    (row,) = log_file.read_rows(tmp_path)
    back = np.array(row["eval"]["knn"], np.float32)
    np.testing.assert_array_equal(back.view(np.uint32), AWKWARD.view(np.uint32))
    assert np.float32(row["loss"]) == AWKWARD[0]


def test_rows_are_json_and_types_stay(tmp_path):
    recorder = record.Recorder(tmp_path, **QUIET)
    odd = np.array([[np.nan, np.inf], [-np.inf, 0.5]], np.float32)
    recorder.log(
        np.int64(7),
        1,
        loss=np.float32(np.nan),
        bound=float("-inf"),
        eval={"x": odd},
        half=jnp.bfloat16(1.5),
        count=np.int32(3),
        on=np.True_,
        pair=(1, None),
        word="\u00e9",
    )
    recorder.close()
    (line,) = (tmp_path / "metrics.jsonl").read_text().splitlines()
    row = strict(line)
    assert list(row.pop("time")) == ["unix"]
    assert row == {
        "step": 7,
        "task": 1,
        "loss": None,
        "bound": None,
        "half": 1.5,
        "count": 3,
        "eval": {"x": [[None, None], [None, 0.5]]},
        "on": True,
        "pair": [1, None],
        "word": "\u00e9",
    }
    assert type(row["count"]) is int and row["on"] is True


def test_other_processes_write_nothing(tmp_path, capfd):
    recorder = record.Recorder(tmp_path / "run", write=False, progress=True, rows=9)
    recorder.log(1, 0, loss=1.0)
    recorder.advance(1, 0, 2)
    recorder.print_text("hello")
    assert recorder.save() == 0
    recorder.close()
    assert not (tmp_path / "run").exists()
    assert capfd.readouterr() == ("", "")


# TensorBoard


def events(workdir):
    """All events of a run; a record is length, checksum, bytes, checksum."""
    out = []
    for path in (workdir / "tensorboard").iterdir():
        data = path.read_bytes()
        while data:
            (length,) = struct.unpack("<Q", data[:8])
            out.append(event_pb2.Event.FromString(data[12 : 12 + length]))
            data = data[16 + length :]
    return out


def scalars(workdir):
    return [
        (value.tag, event.step, value.simple_value, event.wall_time)
        for event in events(workdir)
        for value in event.summary.value
    ]


@pytest.mark.parametrize("lost", [False, True])
def test_tensorboard_shows_each_step_once_after_a_resume(tmp_path, lost):
    first = record.Recorder(tmp_path, loggers=[tensorboard.make], **QUIET)
    log_steps(first, 1, 4)
    first.log(
        4, 0, eval={"knn": [0.5, np.nan, 0.25]}, time={"evaluation": {"knn": 2.0}}
    )
    mark = first.save()
    log_steps(first, 5, 7)
    first.close()
    for path in (tmp_path / "tensorboard").iterdir():
        path.rename(path.with_name("events.out.tfevents.0000000001.host"))
        if lost:  # a crash may also lose events from before the checkpoint
            path.with_name("events.out.tfevents.0000000001.host").unlink()
    second = record.Recorder(tmp_path, rows=mark, loggers=[tensorboard.make], **QUIET)
    log_steps(second, 5, 6)
    second.close()
    unix = [r["time"]["unix"] for r in log_file.read_rows(tmp_path)]
    loss_at = [*unix[:4], *unix[5:]]
    want = [("train/loss", s, np.float32(1 / s), loss_at[s - 1]) for s in range(1, 7)]
    want += [("time/images_per_second", s, 100.0, loss_at[s - 1]) for s in range(1, 7)]
    want += [("eval/knn/1", 4, 0.5, unix[4]), ("eval/knn/3", 4, 0.25, unix[4])]
    want += [("time/evaluation/knn", 4, 2.0, unix[4])]
    assert sorted(scalars(tmp_path)) == sorted(want)
    starts = [
        e.session_log.status for e in events(tmp_path) if e.HasField("session_log")
    ]
    assert starts == [event_pb2.SessionLog.START]  # viewers drop what they hold


# Progress


def progress(tmp_path, monkeypatch, seconds=2.0, **options):
    """Ten steps, one each `seconds`; the second task begins at step 6."""
    clock = types.SimpleNamespace(monotonic=lambda: clock.now, time=lambda: 0.0, now=0)
    monkeypatch.setattr(progress_bar, "time", clock)
    recorder = record.Recorder(tmp_path, **{"num_tasks": 2, **options})
    for step in range(1, 11):
        clock.now = seconds * step
        speed = {} if step < 3 else {"images_per_second": 256.4}
        recorder.log(step, 0, loss=np.float32(1 / step), time=speed)
        recorder.advance(step, int(step > 5), 10)
    recorder.print_text("table")
    recorder.close()
    recorder.close()


def test_progress_without_a_terminal_is_a_line_now_and_then(
    tmp_path, monkeypatch, capsys
):
    progress(tmp_path, monkeypatch, every=5.0)
    out, err = capsys.readouterr()
    assert out == "table\n"
    assert err.splitlines() == [
        "4/10 steps  task 1/2  loss 0.25  256 images/s  0:00:12 left",
        "7/10 steps  task 2/2  loss 0.1429  256 images/s  0:00:06 left",
        "10/10 steps  task 2/2  loss 0.1  256 images/s  0:00:00 left",
    ]


@pytest.mark.parametrize("option", ["auto", False])
def test_progress_on_a_terminal_is_a_bar_unless_off(tmp_path, monkeypatch, option):
    screen = io.StringIO()
    screen.isatty = lambda: True
    monkeypatch.setattr(sys, "stderr", screen)
    progress(tmp_path, monkeypatch, progress=option)
    text = screen.getvalue()
    assert "100%|" in text if option else text == ""


def test_rows_stay_where_saving_them_is_cut_off(tmp_path, monkeypatch):
    path, rows = tmp_path / log_file.FILE, b'{"step": 1, "task": 0}\nx\n'
    path.write_bytes(rows)
    with monkeypatch.context() as cut:
        cut.setattr(storage, "replacing", lambda _: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            record.Recorder(tmp_path, rows=len(rows), **QUIET)
    assert path.read_bytes() == rows
    record.Recorder(tmp_path, rows=len(rows), **QUIET).close()
    assert path.read_bytes() == rows[:-2]
    assert (tmp_path / f"damaged-{log_file.FILE}").read_bytes() == rows


# Results


def filled(size=4, done=3, seed=0):
    rng = np.random.default_rng(seed)
    rows, alone = rng.random((2, done, size)), rng.random(size)
    results = result_file.empty_results(size) | {"finetune": {"knn": alone.tolist()}}
    for task in range(done):
        both = {"knn": rows[0, task], "linear": rows[1, task]}
        results = result_file.add_task(
            results, task, both, {"drift": task / 2}, 1.5 * task
        )
    return results, rows, alone


def test_summary_is_that_of_the_equations():
    """Against loops over the definitions, with three of four tasks done."""
    results, rows, alone = filled()
    for name, a in zip(("knn", "linear"), rows, strict=True):
        np.testing.assert_array_equal(result_file.matrix(results, name)[:3], a)
        assert np.isnan(result_file.matrix(results, name)[3]).all()
        found = result_file.summary(results)[name]
        averages = [sum(a[t, : t + 1]) / (t + 1) for t in range(3)]
        want = {
            "average_accuracy": averages[2],
            "average_accuracy_per_task": averages,
            "forgetting": sum(max(a[0, j], a[1, j]) - a[2, j] for j in (0, 1)) / 2,
            "stability": sum(max(a[:, j]) - a[2, j] for j in (0, 1)) / 2,
        }
        if name == "knn":
            gain = a - alone
            want["plasticity"] = ((gain[0, 1] + gain[0, 2]) / 2 + gain[1, 2]) / 2
        assert found.keys() == want.keys()
        for key, value in want.items():
            np.testing.assert_allclose(found[key], value, rtol=1e-12)


def test_add_replaces_a_task_and_leaves_the_old_results_alone():
    results, rows, _ = filled()
    before = json.dumps(results)
    changed = result_file.add_task(
        results, 1, {"linear": np.arange(4) / 4, "new": [0] * 4}, {}, 9
    )
    assert json.dumps(results) == before
    np.testing.assert_array_equal(
        result_file.matrix(changed, "linear")[:3],
        [rows[1, 0], np.arange(4) / 4, rows[1, 2]],
    )
    assert changed["matrices"]["knn"][1] == [None] * 4
    assert changed["matrices"]["new"] == [[None] * 4, [0] * 4, *[[None] * 4] * 2]
    assert changed["scalars"] == [{"drift": 0.0}, {}, {"drift": 1.0}, None]
    assert changed["seconds"] == [0.0, 9, 3.0, None]


def test_results_and_added_keys_survive_the_file(tmp_path):
    results = result_file.empty_results(3, task_names=["a", "b", "c"])
    results["untrained"] = {"x": np.array([0.5, np.nan, 0.25], np.float32)}
    results["finetune"] = {"x": [0.5, 0.5, 0.5]}
    results = result_file.add_task(
        results, 0, {"x": [0.75, 0.25, 0.5]}, {"nan": np.nan}, 2
    )
    results = result_file.add_task(results, 1, {"x": [0.5, 0.75, 0.5]}, {}, 2)
    result_file.write_results(tmp_path, results)
    back = result_file.read_results(tmp_path)
    assert back == result_file.jsonable(results)
    assert back["untrained"] == {"x": [0.5, None, 0.25]}
    assert result_file.untrained(back, "x") == 0.375  # of what was measured
    assert result_file.add_task(back, 2, {}, {}, 1)["untrained"] == back["untrained"]
    whole = strict((tmp_path / "results.json").read_text())
    assert whole.pop("summary") == result_file.summary(results) and whole == back
    assert result_file.summary(results)["x"]["plasticity"] == -0.25


def test_only_time_depends_on_the_clock(tmp_path, monkeypatch):
    rows = []
    for now in (10.0, 9e8):
        clock = types.SimpleNamespace(time=lambda now=now: now)
        monkeypatch.setattr(record, "time", clock)
        recorder = record.Recorder(tmp_path, **QUIET)
        recorder.log(1, 0, loss=0.5, time={"images_per_second": now})
        rows.append(log_file.read_rows(tmp_path)[0])
        recorder.close()
    assert [r.pop("time")["unix"] for r in rows] == [10.0, 9e8]
    assert rows[0] == rows[1]


@pytest.mark.parametrize("after, below", [(0.35, True), (0.52, False), (0.6, False)])
def test_a_result_below_the_untrained_network_is_said(after, below):
    results = {
        "task_names": ["a", "b"],
        "matrices": {"knn/all": [[0.9, None], [after, after]]},
        "untrained": {"knn/all": [0.5, 0.54]},
        "scalars": [{}, {}],
        "finetune": {},
        "cost": {"total": None},
    }
    assert (result_file.below_untrained(results) == ["knn/all"]) == below
    text = finish.format_results(results)
    assert ("knn/all: " in text) == below
    heads = "average", "forgetting", "stability", "plasticity", "untrained"
    assert text.splitlines()[0].split()[-5:] == [*heads]


def test_the_end_says_where_a_run_lies_and_what_comes_next(tmp_path):
    work = run_directories.untried(tmp_path / "run")
    told = finish.closing(work, tmp_path)
    assert str(tmp_path / result_file.RESULTS) in told and "plots" not in told
    (tmp_path / "plots").mkdir()
    lines = finish.closing(work, tmp_path).splitlines()
    assert any(str(tmp_path / "plots") in line for line in lines)
    assert sum(" jaxcl " in line for line in lines[-3:]) == 3
    for need in ("supervised", "labelled", "replays"):  # an update has no labels
        other = work._replace(method=work.method._replace(**{need: True}))
        assert "jaxcl compare" in finish.closing(other, tmp_path)


@pytest.mark.parametrize(
    "terminal, variables, coloured",
    [
        (True, {"TERM": "xterm"}, True),
        (True, {"TERM": "xterm", "NO_COLOR": "1"}, False),
        (True, {"TERM": "dumb"}, False),
        (False, {"TERM": "xterm"}, False),
    ],
)
def test_colours_are_for_terminals_that_have_them(
    monkeypatch, terminal, variables, coloured
):
    monkeypatch.delenv("NO_COLOR", raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    file = types.SimpleNamespace(isatty=lambda: terminal)
    shown = terminal_lib.style_text("Accepted.", "good", file)
    assert shown == ("\033[32mAccepted.\033[0m" if coloured else "Accepted.")


def test_steps_that_arrive_together_have_one_speed(monkeypatch):
    """Two calls are always under way; both end a task. None is infinitely fast."""
    seconds = iter([0.0, 10.0, 30.0, 30.0])
    monkeypatch.setattr(metrics_log.time, "monotonic", lambda: next(seconds))
    work = types.SimpleNamespace(
        data=types.SimpleNamespace(batch_size=25),
        batches_per_step=lambda task: 2,
        loop=types.SimpleNamespace(steps_per_call=2),
        logging=types.SimpleNamespace(every=2),
    )
    rows, epochs = [], metrics_log.Epochs(0, {})
    recorder = types.SimpleNamespace(log=lambda step, task, **row: rows.append(row))
    meter = metrics_log.MetricsMeter(work, recorder, 0, 0, epochs)
    for before in (0, 2, 4):
        meter.add(before, 2, {"loss": np.ones(2, np.float32)})
    meter.flush(6)
    speeds = [row["time"]["images_per_second"] for row in rows]
    assert speeds == [10.0, 10.0, 10.0]  # 100 images in 10 s, then 200 in 20 s
