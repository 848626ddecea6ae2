"""launch/local.sh: with a stand-in for Python, and with real processes."""

import contextlib
import os
import pathlib
import shlex
import signal
import subprocess
import sys
import time

import psutil
import pytest

from helpers import processes

SCRIPT = pathlib.Path(__file__).parents[1] / "launch" / "local.sh"
# Notes its arguments, then does what the file of its number says, line by line.
STAND_IN = r"""#!/usr/bin/env bash
if [[ $1 == -c ]]; then exec python3 "$@"; fi
number=${*: -1} number=${number#--process=}
echo "$*" >>"$FAKE/started_$number"
what=$(sed -n "$(wc -l <"$FAKE/started_$number")p" "$FAKE/$number")
case $what in
  save) trap 'exit 75' TERM ;;
  deaf) trap '' TERM ;;
esac
said="$BASHPID ${JAX_LOCAL_DEVICE_IDS:-} $JAX_COORDINATOR_BIND_ADDRESS"
echo "$said" >"$FAKE/up_$number"
case $what in
  save | wait) while :; do sleep 0.05; done ;;
  deaf) while :; do sleep 1000; done ;;
  child) sleep 1000 & wait ;;
  *) exit "$what" ;;
esac
"""


@pytest.fixture
def fake(tmp_path, monkeypatch):
    """A function that says what each process does at each start, one line each."""
    home = tmp_path / "a b"
    home.mkdir()
    python = home / "my python"
    python.write_text(STAND_IN)
    python.chmod(0o755)
    monkeypatch.setenv("PYTHON", str(python))
    monkeypatch.setenv("FAKE", str(home))
    monkeypatch.chdir(home)
    (home / "a b.py").touch()  # the config of RUN

    def make(*processes):
        for number, lines in enumerate(processes):
            (home / str(number)).write_text("\n".join(lines) + "\n")
        return home

    return make


def start(*arguments, **options):
    # nohup and background jobs ignore these signals, and so would the script.
    heard = ["env", "--default-signal=INT,HUP"]
    return subprocess.Popen(
        [*heard, SCRIPT, *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        **options,
    )


def up(home, number=2):
    """What the processes noted, once all have."""
    give_up = time.monotonic() + 30
    paths = [home / f"up_{i}" for i in range(number)]
    while not all(path.exists() and path.read_text() for path in paths):
        assert time.monotonic() < give_up
        time.sleep(0.02)
    return [path.read_text().split(" ") for path in paths]


def starts(home, number):
    path = home / f"started_{number}"
    return path.read_text().splitlines() if path.exists() else []


RUN = ["--config=a b.py", "--config.x=it's (1,2)"]


def test_dry_run_prints_what_is_run(fake):
    home = fake(["0"], ["0"])
    out, _ = processes.finish(start("--dry-run", "--port=99", "--gpus=2", "--", *RUN))
    words = [shlex.split(line) for line in out.splitlines()]
    assert len(words) == 2 and not starts(home, 0)
    processes.finish(start("--port=99", "--gpus=2", "--", *RUN))
    for i, (_, gpus, address) in enumerate(up(home)):
        (told,) = starts(home, i)
        assert told in " ".join(words[i]) and f"--process={i}" in told
        assert [gpus, address] == [("0,1", "2,3")[i], "127.0.0.1:99\n"]


@pytest.mark.parametrize("what", ["deaf", "child"])
def test_if_one_dies_the_others_are_killed_with_their_own(fake, what):
    """Also one that hears nothing, as those that wait for the dead one."""
    home = fake([what], ["wait"])
    process = start("--", *RUN)
    (first, *_), (second, *_) = up(home)
    parent, give_up = psutil.Process(int(first)), time.monotonic() + 30
    while not (children := parent.children(recursive=True)):
        assert time.monotonic() < give_up
        time.sleep(0.02)
    os.kill(int(second), signal.SIGKILL)
    _, err = processes.finish(process, code=137, timeout=30)
    assert "process 1" in err and "137" in err
    assert not psutil.wait_procs([parent, *children], timeout=10)[1]


def test_a_signal_stops_and_saves(fake):
    home = fake(["save"] * 2, ["save"] * 2)
    process = start("--retries=3", "--", *RUN)
    up(home)
    process.send_signal(signal.SIGTERM)
    processes.finish(process, code=75, timeout=30)
    assert len(starts(home, 0)) == 1


def real(workdir):
    paths = os.pathsep.join([str(processes.TESTS.parent), str(processes.TESTS)])
    env = {"PYTHON": sys.executable, "PYTHONPATH": paths, "JAX_NUM_CPU_DEVICES": "1"}
    options = [f"--config={processes.CONFIG}", f"--workdir={workdir}"]
    return start("--", *options, env=os.environ | env)


def kill_one(process, number):
    """SIGKILL to one process of the run; all there were."""
    family = psutil.Process(process.pid).children(recursive=True)
    for one in family:
        with contextlib.suppress(psutil.NoSuchProcess):  # the script sleeps, too
            if f"--process={number}" in one.cmdline():
                one.kill()
    return family


def test_a_lost_process_ends_a_real_run(tmp_path):
    work = tmp_path / "my run"
    process = real(work)
    processes.until(process, lambda: processes.lines(work) > 2)
    family = kill_one(process, 0)  # the coordinator
    _, err = processes.finish(process, code=137)
    assert "process 0" in err and "137" in err
    assert not psutil.wait_procs(family, timeout=10)[1]


@pytest.mark.slow
def test_stopped_lost_and_continued_is_the_same(tmp_path):
    whole, work = tmp_path / "whole", tmp_path / "my run"
    processes.finish(real(whole))
    process = real(work)
    processes.until(process, lambda: processes.lines(work) > 12)
    process.terminate()
    processes.finish(process, code=75)
    process = real(work)
    before = processes.lines(work)
    processes.until(process, lambda: processes.lines(work) > before + 12)
    kill_one(process, 1)
    processes.finish(process, code=137)
    processes.finish(real(work))
    processes.check_same(work, whole)
