"""launch/tpu.sh, on a gcloud of ours that runs what it sends to the workers."""

import os
import pathlib
import shlex
import subprocess

import pytest

ROOT = pathlib.Path(__file__).parents[1]
SCRIPT = ROOT / "launch" / "tpu.sh"
RUN = ["--config=a b.py", "--workdir=gs://bucket/x", "--config.x=it's (1,2)"]
MAKE = ["--zone=z", "--type=v5litepod-16", "--version=v2"]
NODE, QUEUE = "compute tpus tpu-vm".split(), "compute tpus queued-resources".split()


def tpu(*arguments, code=0, **options):
    done = subprocess.run(
        [SCRIPT, *arguments], capture_output=True, text=True, timeout=60, **options
    )
    assert done.returncode == code, f"{done.returncode}\n{done.stdout}\n{done.stderr}"
    return done


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
