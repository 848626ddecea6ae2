r"""A run on Kubernetes, as a JobSet: one pod per host, one process per pod.

  python launch/kubernetes.py apply in100 --image=IMAGE --hosts=2 --gpus=8 \
      --claim=disk:/runs -- --config=configs/pnr_imagenet100.py --workdir=/runs/x
  python launch/kubernetes.py apply in100 --image=IMAGE --tpu=tpu-v6e-slice \
      --topology=4x4 -- --config=configs/pnr_imagenet100.py --workdir=gs://bucket/x

A pod that was told to stop and saved (exit code 75), or that lost its place, is made
anew and the run goes on. Any other failure makes all pods anew, `--restarts` times; a
wrong command (2) ends the run at once. Needs nothing but Python and kubectl.
"""

import argparse
import json
import math
import re
import shlex
import subprocess
import sys

JOB = "process"  # of the JobSet; pods are NAME-process-SLICE-HOST
PORT = 1234
WRONG, STOPPED = 2, 75  # exit codes of jaxcl.main
# Chips of a machine by which GKE counts hosts; other numbers by --chips.
CHIPS = 4


def hosts(options) -> int:
    """Pods of one slice.

    Raises:
      ValueError: the topology is not of whole hosts.
    """
    if not options.tpu:
        return options.hosts
    if not re.fullmatch(r"[1-9]\d*(x[1-9]\d*){1,2}", options.topology or ""):
        raise ValueError(f"--topology={options.topology}: must be as 4x4 or 2x2x4")
    chips = math.prod(map(int, options.topology.split("x")))
    if chips % options.chips:
        raise ValueError(
            f"--chips={options.chips}: must divide the {chips} chips of "
            f"--topology={options.topology}"
        )
    return chips // options.chips


def check(options) -> None:
    """Refuse what no cluster would take, or what would not be what was meant.

    Raises:
      ValueError: an option is not allowed.
    """
    if not re.fullmatch(r"[a-z]([a-z0-9-]{0,38}[a-z0-9])?", options.name):
        raise ValueError(
            f"{options.name}: a name has up to 40 of a-z, 0-9 and -, a letter first"
        )
    for field in ("hosts", "chips", "slices", "grace"):
        if getattr(options, field) < 1:
            raise ValueError(f"--{field}={getattr(options, field)}: must be 1 or more")
    for field in ("gpus", "restarts"):
        if getattr(options, field) < 0:
            raise ValueError(f"--{field}={getattr(options, field)}: must be 0 or more")
    if options.tpu and (options.gpus or options.hosts > 1):
        raise ValueError(f"--tpu={options.tpu}: goes without --gpus and --hosts")
    if not options.tpu and (options.topology or options.slices > 1):
        raise ValueError("--topology and --slices: only with --tpu")
    if not options.image:
        raise ValueError("--image: missing, and it has no default")
    if not options.arguments:
        raise ValueError("nothing to run: -- and the options of jaxcl.main are missing")


def pairs(field: str, given, mark: str) -> dict:
    """{left: right} of what stands on both sides of a mark.

    Raises:
      ValueError: a side is empty, or a left one comes twice.
    """
    found = {}
    for text in given:
        left, _, right = text.partition(mark)
        if not (left and right) or left in found:
            raise ValueError(f"--{field}={text}: must be A{mark}B, each A once")
        found[left] = right
    return found


def command(options, count: int) -> tuple[list, list]:
    """What a pod runs, and its environment, so that the processes find each other."""
    # Kubernetes would put variables in place of $(...).
    given = [argument.replace("$(", "$$(") for argument in options.arguments]
    words = ["python", "-m", "jaxcl.main", *given]
    env = [
        {"name": name, "value": value}
        for name, value in pairs("env", options.env, "=").items()
    ]
    # A pod that is made anew on another node takes over the run directory from itself:
    # the rule for failed pods makes one only when that before it has ended.
    env.append({"name": "JAXCL_JOB", "value": f"kubernetes {options.name}"})
    if options.tpu:  # GKE tells every pod who the others are
        env.append({"name": "JAXCL_DISTRIBUTED", "value": "1"})
    elif count > 1:
        # Not left to JAX, which would ask the cluster: that takes a service account
        # with a role, and one package more.
        words += [
            f"--coordinator={options.name}-{JOB}-0-0.{options.name}:{PORT}",
            f"--processes={count}",
            "--process=$(JOB_COMPLETION_INDEX)",
        ]
    return words, env


def pod(options, count: int) -> dict:
    """The pod template of every process."""
    words, env = command(options, count)
    claims = pairs("claim", options.claim, ":")
    amounts = pairs("request", options.request, "=")
    if options.tpu:
        amounts["google.com/tpu"] = str(options.chips)
    elif options.gpus:
        amounts["nvidia.com/gpu"] = str(options.gpus)
    # What decodes images hands them over there; the default is 64 MiB.
    volumes = [{"name": "shm", "emptyDir": {"medium": "Memory"}}]
    mounts = [{"name": "shm", "mountPath": "/dev/shm"}]
    for number, (claim, path) in enumerate(claims.items()):
        volumes.append(
            {"name": f"disk-{number}", "persistentVolumeClaim": {"claimName": claim}}
        )
        mounts.append({"name": f"disk-{number}", "mountPath": path})
    selector = pairs("selector", options.selector, "=")
    if options.tpu:
        selector["cloud.google.com/gke-tpu-accelerator"] = options.tpu
        selector["cloud.google.com/gke-tpu-topology"] = options.topology
    container = {
        "name": "jaxcl",
        "image": options.image,
        "command": words,
        "env": env,
        "resources": {"limits": amounts},
        "volumeMounts": mounts,
    }
    made = {
        "restartPolicy": "Never",
        "terminationGracePeriodSeconds": options.grace,
        "nodeSelector": selector,
        "containers": [container],
        "volumes": volumes,
    }
    if options.slices > 1:  # slices talk by the network of their hosts
        made |= {"hostNetwork": True, "dnsPolicy": "ClusterFirstWithHostNet"}
    return _filled(made)


def _filled(value):
    """Without empty dicts and lists."""
    if isinstance(value, dict):
        items = {key: _filled(child) for key, child in value.items()}
        return {key: child for key, child in items.items() if child not in ({}, [])}
    return [_filled(child) for child in value] if isinstance(value, list) else value


def manifest(options) -> dict:
    """The JobSet.

    Raises:
      ValueError: an option is not allowed.
    """
    check(options)
    count = hosts(options)
    rules = [
        {
            "action": "FailJob",
            "onExitCodes": {"operator": "In", "values": [WRONG]},
        },
        {"action": "Ignore", "onExitCodes": {"operator": "In", "values": [STOPPED]}},
        {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget"}]},
    ]
    job = {
        "completionMode": "Indexed",
        "completions": count,
        "parallelism": count,
        "backoffLimit": 0,
        "podFailurePolicy": {"rules": rules},
        "template": {"spec": pod(options, count)},
    }
    metadata = {"name": options.name}
    if options.namespace:
        metadata["namespace"] = options.namespace
    if options.tpu:  # each slice on a node pool of its own
        key = "alpha.jobset.sigs.k8s.io/exclusive-topology"
        metadata["annotations"] = {key: "cloud.google.com/gke-nodepool"}
    wrong = {"name": "wrong_command", "action": "FailJobSet"}
    wrong["onJobFailureReasons"] = ["PodFailurePolicy"]
    return {
        "apiVersion": "jobset.x-k8s.io/v1alpha2",
        "kind": "JobSet",
        "metadata": metadata,
        "spec": {
            # Process 0 has to be found while the others are not there yet.
            "network": {"enableDNSHostnames": True, "publishNotReadyAddresses": True},
            "failurePolicy": {"maxRestarts": options.restarts, "rules": [wrong]},
            "replicatedJobs": [
                {"name": JOB, "replicas": options.slices, "template": {"spec": job}}
            ],
        },
    }


def parser() -> argparse.ArgumentParser:
    """The options of the command."""
    made = argparse.ArgumentParser(
        usage="%(prog)s ACTION NAME [options] [-- options of jaxcl.main]",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    made.add_argument("action", choices=["apply", "logs", "delete"])
    made.add_argument("name", help="of the JobSet")
    made.add_argument("--namespace", help="what kubectl is set to")
    made.add_argument("--image", help="one in which python -m jaxcl.main works")
    made.add_argument("--hosts", type=int, default=1, help="pods; not with --tpu")
    made.add_argument("--gpus", type=int, default=0, help="of each pod")
    made.add_argument("--tpu", help="GKE's accelerator, as tpu-v6e-slice")
    made.add_argument("--topology", help="of the TPU slice, as 4x4")
    made.add_argument("--chips", type=int, default=CHIPS, help="TPU chips of a host")
    made.add_argument("--slices", type=int, default=1, help="of TPU")
    many = {"action": "append", "default": []}
    made.add_argument("--claim", **many, help="CLAIM:PATH, a volume claim and where")
    made.add_argument("--env", **many, help="NAME=VALUE, in the pods")
    made.add_argument("--request", **many, help="as memory=64Gi")
    made.add_argument("--selector", **many, help="NAME=VALUE, labels of the nodes")
    made.add_argument(
        "--grace", type=int, default=600, help="seconds to save in, when told to stop"
    )
    made.add_argument("--restarts", type=int, default=10, help="after failures")
    made.add_argument("--dry-run", action="store_true", help="print the command")
    return made


def call(options) -> tuple[list[str], str | None]:
    """The kubectl command, and its standard input.

    Raises:
      ValueError: an option is not allowed.
    """
    where = [f"--namespace={options.namespace}"] if options.namespace else []
    if options.action == "apply":
        # JSON, which kubectl takes as it takes YAML, needs no rules of quoting.
        text = json.dumps(manifest(options), indent=1, ensure_ascii=False) + "\n"
        return ["kubectl", "apply", *where, "-f", "-"], text
    if options.action == "delete":
        return ["kubectl", "delete", "jobset", options.name, *where], None
    label = f"jobset.sigs.k8s.io/jobset-name={options.name}"
    label += ",batch.kubernetes.io/job-completion-index=0"
    return ["kubectl", "logs", "--follow", f"--selector={label}", *where], None


def main(argv=None) -> int:
    """The command; exit code 2 where an option is wrong, else that of kubectl."""
    argv = sys.argv[1:] if argv is None else argv
    # argparse would take what follows for more options of its own.
    cut = argv.index("--") if "--" in argv else len(argv)
    options = parser().parse_args(argv[:cut])
    options.arguments = argv[cut + 1 :]
    try:
        words, text = call(options)
    except ValueError as error:
        print(f"jaxcl: {error}", file=sys.stderr)
        return 2
    if options.dry_run:
        end = "" if text is None else f" <<'EOF'\n{text}EOF"
        print(shlex.join(words) + end)
        return 0
    return subprocess.run(words, input=text, text=True, check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
