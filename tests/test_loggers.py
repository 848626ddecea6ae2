"""Where rows go beside metrics.jsonl: the hook, and Weights & Biases."""

import json
import struct
import sys
import types

import pytest

from jaxcl import storage
from jaxcl.errors import Refused
from jaxcl.run import log_file, loggers, record

OWN = """
made = []


class Kept:
    def __init__(self, directory, rows):
        self.directory, self.before, self.rows, self.closed = directory, rows, [], 0

    def write(self, row):
        self.rows.append(row)

    def close(self):
        self.closed += 1


def make(directory, rows):
    made.append(Kept(directory, rows))
    return made[-1]
"""


def log(recorder, first, last):
    for step in range(first, last + 1):
        recorder.log(step, 0, loss=1 / step, time={"images_per_second": 100.0})


def open_recorder(path, makes, **options):
    return record.Recorder(path, loggers=makes, progress=False, **options)


def test_a_logger_of_the_users_own(tmp_path, monkeypatch):
    (tmp_path / "mine.py").write_text("")
    (tmp_path / "house").mkdir()
    (tmp_path / "house/__init__.py").write_text("")
    (tmp_path / "house/log.py").write_text(OWN)
    monkeypatch.syspath_prepend(tmp_path)
    makes = loggers.makers("house.log, house.log")
    assert len(makes) == 2
    first = open_recorder(tmp_path / "run", makes)
    log(first, 1, 3)
    mark = first.save()
    log(first, 4, 4)
    first.close()
    first.close()
    second = open_recorder(tmp_path / "run", makes[:1], rows=mark)
    log(second, 4, 5)
    second.close()
    a, b, c = sys.modules["house.log"].made
    assert a.directory == tmp_path / "run" and a.before == [] and a.closed == 1
    assert a.rows == b.rows and [row["step"] for row in a.rows] == [1, 2, 3, 4]
    assert c.before == a.rows[:3]
    assert [row["step"] for row in c.rows] == [4, 5]
    assert c.before + c.rows == log_file.read_rows(tmp_path / "run")
    silent = open_recorder(tmp_path / "other", makes, write=False)
    log(silent, 1, 1)
    silent.close()
    assert len(sys.modules["house.log"].made) == 3


@pytest.mark.parametrize(
    ("names", "words"),
    [
        ("wandbb", "config.loggers='wandbb'"),
        ("no.module", "config.loggers='no.module'"),
        ("json.decoder", "make"),
    ],
)
def test_loggers_that_are_none(names, words):
    with pytest.raises(ValueError, match=words):
        loggers.makers(names)


class FakeBoard(types.ModuleType):
    """Stands in for wandb, and keeps what it is given."""

    class errors:  # noqa: N801
        class Error(Exception):
            pass

    def __init__(self):
        super().__init__("wandb")
        self.begun, self.rows, self.metrics, self.ended = [], [], [], 0

    def Settings(self, **options):  # noqa: N802
        return options

    def init(self, **options):
        self.begun.append(options)
        return self

    def define_metric(self, name, **options):
        self.metrics.append((name, options))

    def log(self, values, step):
        self.rows.append((step, values))

    def finish(self):
        self.ended += 1


def test_a_resumed_run_goes_on_under_its_id(tmp_path, monkeypatch):
    fake = FakeBoard()
    monkeypatch.setitem(sys.modules, "wandb", fake)
    (make,) = loggers.makers("wandb")
    workdir = tmp_path / "my_run"
    without = open_recorder(workdir, ())
    log(without, 1, 2)
    mark = without.save()
    without.close()
    (workdir / "config.json").write_text('{"seed": 4}')
    # Begun without it: what was logged before is shown, too.
    first = open_recorder(workdir, (make,), rows=mark)
    log(first, 3, 3)
    mark = first.save()
    log(first, 4, 5)
    first.close()
    assert [step for step, _ in fake.rows] == [0, 1, 2, 3, 4] and fake.ended == 1
    assert fake.rows[2][1] == {
        "step": 3,
        "task": 0,
        "train/loss": 1 / 3,
        "time/images_per_second": 100.0,
    }
    fake.rows.clear()
    second = open_recorder(workdir, (make,), rows=mark)
    log(second, 4, 6)
    second.close()
    # Rows 3 and 4 have the numbers that they had, so that they are left out there.
    assert [(n, row["step"]) for n, row in fake.rows] == [(3, 4), (4, 5), (5, 6)]
    ids = {options["id"] for options in fake.begun}
    assert ids == {storage.read_object(workdir / "wandb.json")["id"]}
    for options in fake.begun:
        assert options["resume"] == "allow" and options["dir"] == str(workdir)
        assert options["name"] == "my_run" and options["config"] == {"seed": 4}
    assert ("*", {"step_metric": "step"}) in fake.metrics


def test_where_a_part_cannot_be_closed_the_others_are(tmp_path):
    first, broken, last = (FakeLogger() for _ in range(3))
    broken.close = lambda: 1 / 0
    makes = [lambda *_, one=one: one for one in (first, broken, last)]
    recorder = open_recorder(tmp_path, makes)
    with pytest.raises(ZeroDivisionError):
        recorder.close()
    assert first.closed and last.closed
    recorder.close()  # a second call does nothing


class FakeLogger:
    closed = False

    def close(self):
        self.closed = True


def test_a_board_that_does_not_begin(tmp_path, monkeypatch):
    fake = FakeBoard()

    def fail(**_):
        raise fake.errors.Error("no API key")

    fake.init = fail
    monkeypatch.setitem(sys.modules, "wandb", fake)
    (make,) = loggers.makers("wandb")
    other = FakeLogger()
    with pytest.raises(Refused, match="WANDB"):
        open_recorder(tmp_path, (lambda *_: other, make))
    assert other.closed
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(ValueError, match="'wandb'"):
        loggers.makers("wandb")  # before data are read


def records(data):
    """Records of a file of wandb: 7 bytes, then blocks of 32 KiB as LevelDB has them.

    A piece is a checksum u32, length u16, kind u8 and bytes; of kinds 1 and 4 it ends
    a record. Less than 7 bytes at the end of a block are filling.
    """
    place, whole = 7, b""
    while place + 7 <= len(data):
        left = 32768 - place % 32768
        if left < 7:
            place += left
            continue
        _, length, kind = struct.unpack("<IHB", data[place : place + 7])
        whole += data[place + 7 : place + 7 + length]
        place += 7 + length
        if kind in (1, 4):
            yield whole
            whole = b""


def offline_rows(file):
    """History of a run that wandb left on a disk."""
    from wandb.proto import wandb_internal_pb2

    for data in records(file.read_bytes()):
        one = wandb_internal_pb2.Record.FromString(data)
        if one.WhichOneof("record_type") == "history":
            yield {
                item.key or "/".join(item.nested_key): json.loads(item.value_json)
                for item in one.history.item
            }


def test_the_real_board_offline(tmp_path, monkeypatch):
    wandb = pytest.importorskip("wandb", reason="wandb is not installed")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    (make,) = loggers.makers("wandb")
    first = open_recorder(tmp_path, (make,))
    log(first, 1, 2)
    mark = first.save()
    first.close()
    second = open_recorder(tmp_path, (make,), rows=mark)
    log(second, 3, 3)
    second.close()
    wandb.teardown()  # its process writes the last rows while it ends
    files = sorted(tmp_path.glob("wandb/offline-run-*/*.wandb"))
    name = storage.read_object(tmp_path / "wandb.json")["id"]
    assert {file.name for file in files} == {f"run-{name}.wandb"}
    rows = [row for file in files for row in offline_rows(file)]
    shown = [(row["_step"], row["step"], row["train/loss"]) for row in rows]
    assert sorted(shown) == [(0, 1, 1.0), (1, 2, 0.5), (2, 3, 1 / 3)]
