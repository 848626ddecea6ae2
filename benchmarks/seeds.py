"""Time of a step of several seeds: side by side, and one after another.

  python benchmarks/seeds.py --seeds 4

builds the jobs of benchmarks/online.py for ER-ACE with so many seeds, and times in
turns the step mapped over all of them and the step of one. The ratio is that of side by
side to so many single steps: below 1, config.side_by_side pays on this machine.
"""

import argparse
import contextlib
import tempfile

import jax
import numpy as np
import online
import throughput

from jaxcl.run import job, seeds


def parser() -> argparse.ArgumentParser:
    """The options of online.py, and how many seeds."""
    made = online.parser()
    made.description = __doc__.splitlines()[0]
    made.add_argument("--seeds", type=int, default=4)
    made.set_defaults(methods=["er_ace"])
    return made


def ready(args, work, stack) -> throughput.Ours:
    """A running step in the first task of a job; `stack` closes its feed."""
    state = throughput.begun(work, 0)
    feed = job.feed(work, work.stream.tasks[0].train, 0, 0)
    feed = stack.enter_context(contextlib.closing(feed))
    ours = throughput.Ours(work, state, feed, args.steps)
    ours.window(1)  # compiles
    return ours


def main(argv=None) -> dict:
    """The command; returns milliseconds of both and their ratio."""
    args = parser().parse_args(argv)
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        one = online.make_job(args, args.methods[0], folder)
        seeded = (one.data._replace(seed=k) for k in range(args.seeds))
        jobs = {data.seed: one._replace(data=data) for data in seeded}
        many = seeds.join_jobs(jobs)
        both = [ready(args, work, stack) for work in (many, one)]
        times = [
            [1000 * ours.window()[0] / ours.steps for ours in both]
            for _ in range(args.windows)
        ]
    together, alone = np.median(times, axis=0)
    found = {
        "seeds": args.seeds,
        "side_by_side_ms": together,
        "one_ms": alone,
        "ratio": together / (args.seeds * alone),
    }
    device = jax.devices()[0].device_kind
    print(
        f"{args.methods[0]}, {args.seeds} seeds on {device}: side by side "
        f"{together:.1f} ms, one {alone:.1f} ms; ratio {found['ratio']:.2f}"
    )
    return found


if __name__ == "__main__":
    main()
