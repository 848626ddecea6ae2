r"""A sweep: configs x values of options x seeds, one command each.

  python launch/sweep.py --root=runs/memory --seeds 0 1 2 \
      --config configs/er_ace_cifar10.py:er configs/er_ace_cifar10.py \
      --vary config.replay.per_class 5 20

prints the commands of the twelve runs, those that are finished left out; `--run` runs
them, `--jobs=N` at once. A run is in ROOT/CONFIG,OPTION=VALUE/seed_S, whatever else the
sweep holds, so that the same sweep, or a larger one, goes on where it was stopped, and
jaxcl compare and benchmarks/table.py read ROOT/CONFIG,OPTION=VALUE as one directory.
"""

import argparse
import contextlib
import hashlib
import itertools
import json
import os
import pathlib
import re
import shlex
import signal
import subprocess
import sys
import time
from typing import NamedTuple

from etils import epath

from jaxcl import storage
from jaxcl.errors import Refused
from jaxcl.run import lock, result_file, seeds

LONGEST = 120  # of a directory's name; file systems take 255
STOPPED = 75  # exit code of jaxcl.main


class Run(NamedTuple):
    """One run of the sweep."""

    config: str
    overrides: tuple[tuple[str, str], ...]  # ("config.seeds", "3"), in order
    seed: int
    folder: epath.Path

    def command(self, python: str) -> list[str]:
        """What starts or continues it."""
        words = [python, "-m", "jaxcl.main", f"--config={self.config}"]
        words += [f"--{path}={value}" for path, value in self.overrides]
        words += [f"--config.seed={self.seed}", f"--workdir={os.fspath(self.folder)}"]
        return words


def name_of(config: str, overrides) -> str:
    """A directory name that depends on the config and its overrides alone.

    Overrides stand in the order of their paths. Where characters were replaced or
    left out, some digits of a hash keep apart what would be one name.
    """
    path, _, argument = config.partition(":")
    stem = pathlib.PurePath(path).stem
    parts = [f"{stem}+{argument}" if argument else stem]
    parts += [f"{p.removeprefix('config.')}={v}" for p, v in sorted(overrides)]
    whole = ",".join(parts)
    name = re.sub(r"[^\w.,=+-]", "_", whole, flags=re.ASCII)[:LONGEST]
    if name != whole:
        exact = json.dumps([config, sorted(overrides)])
        name += "-" + hashlib.sha256(exact.encode()).hexdigest()[:8]
    return name


def expand(options) -> list[Run]:
    """Every run of the sweep, the last option varying fastest, seeds still faster.

    Raises:
      Refused: an option is not allowed, or two runs would share a directory.
    """
    axes = []
    for path, *values in options.vary:
        if not re.fullmatch(r"config(\.\w+)+", path) or not values:
            raise Refused(
                f"--vary {path} {' '.join(values)}: must be config.PATH and values"
            )
        if path in ("config.seed", "config.seeds"):
            raise Refused(f"--vary {path}: --seeds has them")
        axes.append([(path, value) for value in values])
    runs = []
    for config, *chosen in itertools.product(options.config, *axes):
        folder = epath.Path(options.root) / name_of(config, chosen)
        for seed in options.seeds:
            place = folder / seeds.folder(seed)
            runs.append(Run(config, tuple(chosen), seed, place))
    places = [os.fspath(run.folder) for run in runs]
    twice = [place for place in places if places.count(place) > 1]
    if twice:
        raise Refused(f"{twice[0]}: two runs of the sweep are the same")
    return runs


def finished(folder) -> bool:
    """Whether nothing is left to do there; False where that is not certain."""
    folder = epath.Path(folder)
    if not result_file.complete(folder):
        return False
    config = storage.read_object(folder / "config.json")
    results = result_file.read_results(folder)
    # Training on each task alone comes last.
    alone = len(results["task_names"]) > 1 and config.get("plasticity", True)
    return not alone or bool(results["finetune"])


def start(run: Run, place: int, options) -> subprocess.Popen:
    """Start a run in one of the places; its output goes to a file beside it."""
    env = {**os.environ}
    if options.gpus:
        env["CUDA_VISIBLE_DEVICES"] = str(place)
    log = pathlib.Path(f"{os.fspath(run.folder)}.log")
    log.parent.mkdir(parents=True, exist_ok=True)
    print(f"started: {os.fspath(run.folder)}", flush=True)
    with open(log, "ab") as out:
        # A session of its own, so that Ctrl-C reaches it through us alone.
        return subprocess.Popen(
            run.command(options.python),
            env=env,
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )


def run_all(runs: list[Run], options) -> int:
    """Run them; one that fails does not end the others.

    The first SIGTERM, SIGINT or SIGHUP makes those at work save and stop, the second
    kills.

    Args:
      runs: what is to be run, in order.
      options: of `parser`.
      ended: called with every run that ends, however it does.

    Returns:
      0 if all finished, 75 if some were stopped (the same command continues), else 1.
    """
    signals, handled, codes = [], 0, []
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        if signal.getsignal(number) is not signal.SIG_IGN:  # nohup ignores one
            signal.signal(number, lambda *_: signals.append(True))
    waiting, at_work = [*runs], {}  # place -> (run, process)
    while at_work or (waiting and not signals):
        for place in range(options.jobs):
            if waiting and not signals and place not in at_work:
                run = waiting.pop(0)
                at_work[place] = run, start(run, place, options)
        if len(signals) > handled:
            for _, process in at_work.values():
                os.killpg(
                    process.pid, signal.SIGKILL
                ) if handled else process.terminate()
            handled = len(signals)
        time.sleep(0.1)
        for place, (run, process) in [*at_work.items()]:
            if process.poll() is not None:
                del at_work[place]
                codes.append(process.returncode)
                print(
                    f"{_said(codes[-1], signals)}: {os.fspath(run.folder)}", flush=True
                )
    if signals or STOPPED in codes:
        return STOPPED
    return 1 if any(codes) else 0


def show(runs: list[Run], options) -> None:
    """Print the commands of runs, one a line."""
    for run in runs:
        print(shlex.join(run.command(options.python)))


def _said(code: int, signals) -> str:
    if code == 0:
        return "finished"
    if code == STOPPED or (code < 0 and signals):
        return "stopped"
    return f"failed with {code}, see its .log"


def parser() -> argparse.ArgumentParser:
    """The options of the command."""
    made = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    made.add_argument(
        "--config", nargs="+", required=True, help="one or more config files"
    )
    made.add_argument(
        "--vary",
        nargs="+",
        action="append",
        default=[],
        metavar=("PATH", "VALUE"),
        help="an option, as config.method.base, and its values; any number of times",
    )
    made.add_argument("--seeds", nargs="+", type=int, default=[0])
    made.add_argument("--root", default="runs", help="folder of all run directories")
    made.add_argument(
        "--run", action="store_true", help="run the commands, in place of printing them"
    )
    made.add_argument(
        "--jobs", type=int, default=1, help="number of runs at once, with --run"
    )
    made.add_argument(
        "--gpus", action="store_true", help="one GPU for each job, from GPU 0 on"
    )
    made.add_argument(
        "--all", action="store_true", help="print or run finished runs, too"
    )
    made.add_argument(
        "--dry-run", action="store_true", help="print the commands, even with --run"
    )
    made.add_argument("--python", default=os.environ.get("PYTHON", "python"))
    return made


def main(argv=None) -> int:
    """The command; exit code 2 where an option is wrong."""
    options = parser().parse_args(argv)
    with contextlib.ExitStack() as locks:
        return _main(options, locks)


def _main(options, locks) -> int:
    try:
        if options.jobs < 1:
            raise Refused(f"--jobs={options.jobs}: must be 1 or more")
        if options.run and "://" in options.root:
            raise Refused(f"--root={options.root}: --run wants a disk, for its logs")
        runs = expand(options)
        if options.run and not options.dry_run:
            locks.callback(lock.acquire(options.root).release)
        left = [run for run in runs if options.all or not finished(run.folder)]
    except (Refused, OSError, lock.LockHeldError) as error:
        print(f"jaxcl: {error}", file=sys.stderr)
        return 2
    if len(left) < len(runs):
        done = len(runs) - len(left)
        print(f"jaxcl: {done} of {len(runs)} are finished", file=sys.stderr)
    if options.run and not options.dry_run:
        return run_all(left, options)
    show(left, options)
    return 0


if __name__ == "__main__":
    sys.exit(main())
