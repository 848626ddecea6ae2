"""A long run of the smallest kind: do memory and open files level off?

    python tests/soak.py                 20,000 steps of an online run
    python tests/soak.py --steps=2000    fewer

Trains ER on digits in batches of ten, with everything that a run does on the way:
logging, TensorBoard, evaluations, checkpoints. Prints resident memory, open files and
threads at twenty moments, and exits with 1 if one of them still grows from the third
quarter to the last: the most memory by more than 2 %, or the fewest files or threads by
more than two (a save under way has a few of its own).
"""

import argparse
import os
import pathlib
import sys
import tempfile
import time
from typing import NamedTuple

TESTS = pathlib.Path(__file__).parent
sys.path[:0] = [str(TESTS.parent), str(TESTS)]
BATCH, TASKS = 10, 2
GROWTH = 1.02  # of memory, from the third quarter to the fourth


class Sample(NamedTuple):
    """What the process holds after some steps."""

    step: int
    megabytes: float  # resident
    files: int  # open
    threads: int


def sample(step: int) -> Sample:
    """Ask Linux about this process."""
    status = pathlib.Path("/proc/self/status").read_text()
    fields = dict(line.split(":", 1) for line in status.splitlines())
    megabytes = int(fields["VmRSS"].split()[0]) / 1024
    files = len(os.listdir("/proc/self/fd"))
    return Sample(step, megabytes, files, int(fields["Threads"]))


def growing(samples: list[Sample]) -> list[str]:
    """What is larger in the last quarter than in the third, one line each."""
    half, quarter = len(samples) // 2, 3 * len(samples) // 4
    before, after = samples[half:quarter], samples[quarter:]
    found = {"megabytes": [max(x.megabytes for x in part) for part in (before, after)]}
    for name in ("files", "threads"):
        found[name] = [min(getattr(x, name) for x in part) for part in (before, after)]
    return [
        f"{name}: {first:.0f} in the third quarter, {last:.0f}"
        for name, (first, last) in found.items()
        if last > (GROWTH * first if name == "megabytes" else first + 2)
    ]


def main(argv=None) -> int:
    """The command; 1 if something grows."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--steps", type=int, default=20_000)
    options = parser.parse_args(argv)
    import environment

    environment.settle(devices=1)
    from helpers import toy
    from jaxcl.run import job, train

    changes = toy.ONLINE | {"method": {"name": "er"}, "batch_size": BATCH}
    changes |= {"evaluators": {"knn": {"k": 5}}, "tensorboard": True, "log_every": 10}
    changes |= {"save_every": options.steps // 20, "eval_every": options.steps // 10}
    with tempfile.TemporaryDirectory() as folder:
        once = toy.config(**changes, **{"scenario.num_tasks": TASKS}, epochs=1)
        each = job.steps_left(toy.build.build(once, f"{folder}/once").data, 0)
        epochs = -(-options.steps // each)
        workdir = pathlib.Path(folder) / "run"
        config = toy.config(**changes, **{"scenario.num_tasks": TASKS}, epochs=epochs)
        work = toy.build.build(config, workdir)
        total, every, done, samples = each * epochs, options.steps // 20, [0], []
        began = time.monotonic()

        def stop():
            done[0] += 1
            if done[0] % every == 0:
                samples.append(sample(done[0]))
                print(*samples[-1]._replace(megabytes=round(samples[-1].megabytes)))
                sys.stdout.flush()
            return False

        print("step megabytes files threads")
        train.run_tasks(work, workdir, stop=stop)
    print(f"{total} steps in {time.monotonic() - began:.0f} s")
    lines = growing(samples)
    print("\n".join(lines) or "level")
    return int(bool(lines))


if __name__ == "__main__":
    sys.exit(main())
