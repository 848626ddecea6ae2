"""launch/tpu.sh, on a gcloud of ours that runs what it sends to the workers."""

import json
import os
import pathlib
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tarfile
import time

import pytest

ROOT = pathlib.Path(__file__).parents[1]
SCRIPT = ROOT / "launch" / "tpu.sh"
RUN = ["--config=a b.py", "--workdir=gs://bucket/x", "--config.x=it's (1,2)"]
MAKE = ["--zone=z", "--type=v5litepod-16", "--version=v2"]
NODE, QUEUE = "compute tpus tpu-vm".split(), "compute tpus queued-resources".split()


@pytest.fixture
def fake(tmp_path, monkeypatch):
    """The directory of the fake, which is on PATH."""
    home = tmp_path / "fake home"
    home.mkdir()
    for name, text in {
        "gcloud": f'exec {sys.executable} -ES {ROOT}/tests/helpers/fake_gcloud.py "$@"',
        "python3": 'echo "$@" >>"$HOME/python3"',  # of the workers
        "tail": f'exec {shutil.which("tail")} -s 0.05 "$@"',  # looks more often
    }.items():
        path = tmp_path / "bin" / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(f"#!/bin/sh\n{text}\n")
        path.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("FAKE", str(home))
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    return home


def tpu(*arguments, code=0, **options):
    done = subprocess.run(
        [SCRIPT, *arguments], capture_output=True, text=True, timeout=60, **options
    )
    assert done.returncode == code, f"{done.returncode}\n{done.stdout}\n{done.stderr}"
    return done


@pytest.fixture
def package(tmp_path):
    """The option for a package that is quickly copied."""
    for name in ("pyproject.toml", "README.md", "LICENSE", "jaxcl", "configs"):
        path = tmp_path / "package" / name
        path.parent.mkdir(exist_ok=True)
        path.touch()
    return f"--source={path.parent}"


def calls(fake):
    """Verbs of what was called, without the looks at states."""
    rows = [json.loads(line) for line in (fake / "log").read_text().splitlines()]
    verbs = [" ".join(row[2:4]) for row in rows]
    return [verb for verb in verbs if not verb.endswith("describe")]


def begin(fake, *codes, state=None):
    """What jaxcl.main does at each start; the state of a TPU that is there."""
    (fake / "codes").write_text("\n".join(map(str, codes)) + "\n")
    if state:
        tpu("create", "n", *MAKE)
        (fake / "state").write_text(state)
        (fake / "log").unlink()
    for worker in fake.glob("worker_*"):
        (worker / "jaxcl").mkdir()


def test_dry_run_prints_what_is_run(tmp_path):
    """Every command and its order; the run's own words survive two shells."""
    where = {"TMPDIR": str(tmp_path), "PATH": os.environ["PATH"]}
    text = tpu("resume", "n", "--dry-run", *MAKE, "--spot", "--", *RUN, env=where)
    words = shlex.split(text.stdout, comments=False)
    starts = [i for i, word in enumerate(words) if word in ("gcloud", "tar", "rm")]
    lines = [words[a:b] for a, b in zip(starts, [*starts[1:], None], strict=True)]
    told = [line[4] if line[0] == "gcloud" else line[0] for line in lines]
    assert told == ["describe", "create", "tar", "scp", "rm", *["ssh"] * 4]
    assert all("--zone=z" in line for line in lines if line[0] == "gcloud")
    assert {"--accelerator-type=v5litepod-16", "--version=v2", "--spot"} < {*lines[1]}
    started = lines[6][-2]
    assert f"-m jaxcl.main {shlex.join(RUN)}".replace("'\"'\"'", "'\\''") in started
    assert "JAXCL_DISTRIBUTED=1" in started and not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "arguments, want",
    [
        (["delete", "n", "--project=p"], [*NODE, "delete", "n", "--project=p"]),
        (["delete", "n", "--queued"], [*QUEUE, "delete", "n", "--force"]),
        (["create", "n", "--queued", *MAKE], [*QUEUE, "create", "n", "--zone=z"]),
        (["fetch", "n", "--workdir=gs://b/my run", "--to=x"], ["gs://b/my run"]),
        (["fetch", "n", "--workdir=runs/x"], [*NODE, "scp", "n:jaxcl/runs/x"]),
    ],
)
def test_the_last_command_of_a_dry_run(arguments, want):
    line = tpu(*arguments, "--dry-run").stdout.splitlines()[-1]
    assert set(want) < set(shlex.split(line))


def test_install_brings_the_package_to_all_workers(fake):
    begin(fake, 0, state="READY")
    tpu("install", "n")
    for worker in ("worker_0", "worker_1"):
        home = fake / worker
        assert (home / "jaxcl" / "jaxcl" / "main.py").exists()
        assert (home / "jaxcl" / "configs" / "imagenet100.txt").exists()
        assert (home / "python3").read_text() == "-m pip install --user --quiet uv\n"
        assert "-e ./jaxcl[tpu] gcsfs" in (home / "uv").read_text()
        with tarfile.open(home / "jaxcl.tar.gz") as archive:
            names = archive.getnames()
            assert not any(".git" in n or "__pycache__" in n for n in names)
    assert not list(fake.parent.glob("*.tar.gz"))


def ran(fake, worker=0):
    return (fake / f"worker_{worker}" / "started").read_text().splitlines()


@pytest.mark.parametrize("code", [0, 75])
def test_run_follows_the_log_and_ends_with_its_code(fake, code):
    begin(fake, code, code, state="READY")
    done = tpu("run", "n", "--poll=0", "--", *RUN, code=code)
    work = fake / "worker_0" / "jaxcl"
    assert f"step of {code}, JAXCL_DISTRIBUTED=1, in {work}" in done.stdout
    for worker in (0, 1):
        assert ran(fake, worker) == [f"-m jaxcl.main {' '.join(RUN)}"]
    assert tpu("logs", "n", code=code).stdout.count("step of") == 1
    again = tpu("run", "n", "--poll=0", "--", *RUN, code=code)
    assert again.stdout.count("step of") == 2  # nothing of the log is lost


def test_a_run_is_started_once_and_stopped(fake):
    begin(fake, "wait", state="READY")
    follower = subprocess.Popen([SCRIPT, "run", "n", "--poll=0", "--", *RUN])
    waits = [fake / f"worker_{i}" / "waits" for i in (0, 1)]
    give_up = time.monotonic() + 30
    while not all(path.exists() for path in waits):
        assert follower.poll() is None and time.monotonic() < give_up
        time.sleep(0.05)
    # The end of the script is not that of the run.
    follower.send_signal(signal.SIGKILL)
    follower.wait()
    command = [SCRIPT, "run", "n", "--poll=0", "--", *RUN]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as again:
        for line in again.stdout:
            if "step of wait" in line:
                break
        tpu("stop", "n")
        assert again.wait(timeout=30) == 75
    assert len(ran(fake)) == len(ran(fake, 1)) == 1


def test_resume_goes_on_until_the_run_is_finished(fake, package):
    """Stopped, preempted, restarted by its host, failed, finished."""
    begin(fake, 75, "restarted", "preempted")
    script = ["resume", "n", *MAKE, package, "--poll=0", "--retries=1", "--", *RUN]
    said = []
    command = [SCRIPT, *script]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as done:
        for line in done.stderr:
            said.append(line)
            if "made anew" in line:  # homes are new, and so are the counts of starts
                (fake / "codes").write_text("1\n0\n")
        assert done.wait(timeout=60) == 0, said
    ends = re.findall(r"ended with (\w+)", "".join(said))
    assert ends == ["75", "LOST", "UNREACHABLE", "1"]
    assert calls(fake).count("tpu-vm create") == 2
    assert calls(fake).count("tpu-vm delete") == 1
    assert len(ran(fake)) == 2


@pytest.mark.parametrize("code, starts", [(2, 1), (134, 2)])
def test_resume_ends_where_it_is_of_no_use(fake, package, code, starts):
    begin(fake, *[code] * 5)
    script = ["resume", "n", *MAKE, package, "--poll=0", "--retries=1", "--", *RUN]
    tpu(*script, code=code)
    assert len(ran(fake)) == starts
