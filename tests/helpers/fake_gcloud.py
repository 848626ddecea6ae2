"""A gcloud that knows one TPU of two workers, for tests: it runs what ssh is told.

Put on PATH as `gcloud`. FAKE names its directory: `log` has the arguments of every
call; `state` has states of the TPU, one a line, and each look but the last takes one
away; worker_0 and worker_1 are homes.
"""

import json
import os
import pathlib
import shutil
import subprocess
import sys

HOME = pathlib.Path(os.environ["FAKE"])
WORKERS = [HOME / "worker_0", HOME / "worker_1"]
PYTHON = r"""#!/usr/bin/env bash
# jaxcl.main: a line of FAKE/codes is what it does at its n-th start, on every worker.
echo "$*" >>"$HOME/started"
what=$(sed -n "$(wc -l <"$HOME/started")p" "$FAKE/codes")
echo "step of $what, JAXCL_DISTRIBUTED=$JAXCL_DISTRIBUTED, in $PWD"
trap 'exit 75' TERM
case $what in
  wait) touch "$HOME/waits"; while :; do sleep 0.05; done ;;
  preempted) echo PREEMPTED >"$FAKE/state"; exit 1 ;;
  restarted) rm -f "$HOME/.jaxcl/pid"; kill -KILL $PPID; exit ;;
  *) exit "$what" ;;
esac
"""


def script(path, text):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    path.chmod(0o755)


def look():
    path = HOME / "state"
    if not path.exists():
        sys.exit("ERROR: NOT_FOUND: Resource was not found")
    first, *rest = path.read_text().split()
    if rest:
        path.write_text("\n".join(rest))
    print(first)


def created():
    (HOME / "state").write_text("READY")
    for worker in WORKERS:
        script(worker / ".local/bin/uv", '#!/bin/sh\necho "$@" >>"$HOME/uv"')
        script(worker / "jaxcl-venv/bin/python", PYTHON)


def gone():
    (HOME / "state").unlink(missing_ok=True)
    for worker in WORKERS:
        shutil.rmtree(worker, ignore_errors=True)


def option(name):
    found = [a.partition("=")[2] for a in sys.argv if a.startswith(f"--{name}=")]
    return found[0] if found else None


def ready():
    state = HOME / "state"
    if not state.exists() or state.read_text().strip() != "READY":
        sys.exit("ERROR: the TPU is not there")
    number = option("worker")
    return WORKERS if number == "all" else [WORKERS[int(number)]]


def ssh():
    codes = []
    for worker in ready():
        env = {**os.environ, "HOME": str(worker)}
        done = subprocess.run(["bash", "-c", option("command")], cwd=worker, env=env)
        codes.append(done.returncode)
    sys.exit(next(filter(None, codes), 0))


def main():
    with open(HOME / "log", "a") as log:
        log.write(json.dumps(sys.argv[1:]) + "\n")
    if sys.argv[1] == "storage":
        return
    verb = sys.argv[4]
    if verb == "describe":
        look()
    elif verb in ("create", "start"):
        created()
    elif verb == "delete":
        gone()
    elif verb == "scp":
        for worker in ready():
            shutil.copy(sys.argv[5], worker / sys.argv[6].partition(":")[2])
    elif verb == "ssh":
        ssh()


main()
