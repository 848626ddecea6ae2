"""One process at a time in a run directory: locks on disks and in buckets."""

import contextlib
import fcntl
import json
import os
import pathlib
import subprocess
import sys
import types

import pytest

from helpers import config_files
from jaxcl.config import run_config
from jaxcl.run import finish, lock, train
from jaxcl.update import command as update_command

HOLD = """
import sys
from jaxcl.run import lock
for line in sys.stdin:
    lock.acquire(line.strip())
    print("held", flush=True)
"""


@contextlib.contextmanager
def started():
    process = subprocess.Popen(
        [sys.executable, "-c", HOLD],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=pathlib.Path(lock.__file__).parents[2],
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def holds(process, folder):
    process.stdin.write(f"{folder}\n")
    process.stdin.flush()
    assert process.stdout.readline() == "held\n"


def owner_of(folder):
    return json.loads((folder / lock.FILE).read_text())


def write_owner(folder, **changes):
    """A lock file that a process of this machine, which is gone, has left."""
    folder.mkdir(exist_ok=True)
    (folder / lock.FILE).write_text(
        json.dumps(lock._describe_process() | {"id": "x"} | changes)
    )


def test_a_second_process_is_refused_and_told_who_has_it(tmp_path, caplog):
    run = tmp_path / "run"
    with started() as process:
        holds(process, run)
        with pytest.raises(lock.LockHeldError) as refused:
            lock.acquire(run)
        owner = owner_of(run)
        for word in (run, f"process {process.pid} on {owner['host']}", owner["since"]):
            assert str(word) in str(refused.value)
        process.kill()
        process.wait()
        mine = lock.acquire(run)  # the system took the lock back
    assert f"{owner['pid']}" in caplog.text
    assert owner_of(run)["pid"] == os.getpid()
    mine.release()
    assert not [*run.iterdir()]


def test_the_system_keeps_a_process_out_whatever_the_file_says(tmp_path, monkeypatch):
    monkeypatch.setattr(lock, "_PATIENCE", 0.0)
    with started() as process:
        holds(process, tmp_path)
        (tmp_path / lock.FILE).write_text("")  # as one that dies before it has written
        with pytest.raises(lock.LockHeldError):
            lock.acquire(tmp_path)


def test_a_lock_that_ends_as_it_should_leaves_nothing_and_says_nothing(
    tmp_path, caplog
):
    with lock.hold_lock(tmp_path), lock.hold_lock(f"{tmp_path}/."):
        assert owner_of(tmp_path)["pid"] == os.getpid()
    assert not [*tmp_path.iterdir()] and not caplog.text


@pytest.mark.parametrize(
    "changes, is_taken",
    [
        ({"boot": "another", "host": "elsewhere"}, False),
        ({"boot": "another"}, True),  # the machine has restarted since
        ({"boot": "another", "host": "elsewhere", "job": "slurm 7"}, True),
        ({"boot": "another", "host": "elsewhere", "job": "slurm 8"}, False),
        ({"pid": 1 << 30}, True),
    ],
)
def test_a_lock_is_taken_over_if_its_process_is_gone(
    tmp_path, monkeypatch, caplog, changes, is_taken
):
    monkeypatch.setenv(lock.JOB, "slurm 7")
    write_owner(tmp_path, **{"job": None} | changes)
    if is_taken:
        lock.acquire(tmp_path).release()
        assert f"{tmp_path}" in caplog.text
    else:
        with pytest.raises(lock.LockHeldError) as refused:
            lock.acquire(tmp_path)
        words = str(refused.value)
        assert "elsewhere" in words
        assert f"{tmp_path / lock.FILE}" in words
        assert owner_of(tmp_path)["host"] == "elsewhere" and not caplog.text


@pytest.mark.parametrize("text", [b"[1]", b'{"pid": 3', b"\xff", b"", b"\0" * 40])
def test_a_damaged_lock_that_no_process_holds_is_taken(tmp_path, text):
    """Zeros are what a power cut may leave."""
    (tmp_path / lock.FILE).write_bytes(text)
    with lock.hold_lock(tmp_path):
        assert owner_of(tmp_path)["pid"] == os.getpid()


def test_without_locks_of_the_file_system_the_words_count(tmp_path, monkeypatch):
    def unsupported(*_):
        raise OSError(95, "Operation not supported")

    monkeypatch.setattr(lock, "_PATIENCE", 0.01)
    monkeypatch.setattr(fcntl, "flock", unsupported)
    other = os.getppid()
    write_owner(tmp_path, pid=other)
    with pytest.raises(lock.LockHeldError, match=f"{other}"):
        lock.acquire(tmp_path)
    write_owner(tmp_path, pid=1 << 30)
    lock.acquire(tmp_path).release()


def test_a_directory_that_was_deleted_can_still_be_left(tmp_path):
    run = tmp_path / "run"
    with lock.hold_lock(run):
        (run / lock.FILE).unlink()
        run.rmdir()
    with lock.hold_lock(
        run
    ):  # and what another has made there meanwhile is not removed
        write_owner(run, host="elsewhere")
    assert owner_of(run)["host"] == "elsewhere"


def test_what_writes_to_a_directory_asks_for_its_lock(tmp_path):
    """A config, a run, an update, an export, a sweep."""

    def held(folder):
        write_owner(folder, host="elsewhere", boot="another")
        return folder

    nothing = types.SimpleNamespace(workdir=held(tmp_path / "updates") / "0001")
    for use in (
        lambda: run_config.write_or_check(held(tmp_path / "config"), {}),
        lambda: train.run_tasks(None, held(tmp_path / "run")),
        lambda: finish.run_job(None, held(tmp_path / "run")),
        lambda: update_command.carry_out(nothing),
    ):
        with pytest.raises(lock.LockHeldError, match="elsewhere"):
            use()
    sweep = config_files.load(config_files.ROOT / "launch" / "sweep.py")
    words = ["--config=configs/quickstart.py", f"--root={held(tmp_path / 'root')}"]
    assert sweep.main([*words, "--run"]) == 2
    assert sweep.main([*words, "--run", "--dry-run"]) == 0


def test_every_process_of_a_run_hears_that_one_was_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(lock.jax, "process_index", lambda: 1)
    monkeypatch.setattr(lock.sharding, "any_process", lambda flag: True)
    with pytest.raises(lock.LockHeldError, match="process 0"), lock.hold_lock(tmp_path):
        pass
    assert not [*tmp_path.iterdir()]
