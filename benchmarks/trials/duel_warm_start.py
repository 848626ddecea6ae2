"""DUEL from a warm start: an even stream first, then one that a class dominates.

  python benchmarks/trials/duel_warm_start.py --data=mnist.npz --out=runs/trials/duel

600 steps of MoCo on the even stream; from its networks and an empty memory 600 steps on
the stream in which the class of the seed's number has probability 0.75, at a third of
the rate. All rows start from the same run. The row "even on" goes on evenly: its
distance from "moco" is what imbalance costs. Rows with "by label" have DUEL's policy
compare labels in place of features: their distance from "moco" is what an even memory
is worth, and the most that a policy can win.
"""

import contextlib
import functools
import pathlib
import sys
from unittest import mock

import duel_policy
import jax
import runs

from jaxcl.methods.duel import active_memory

ROWS = {
    "moco": ("moco", {}),
    "d_moco, renewed": ("d_moco", {"method.refresh": True}),
    "even on": ("moco", {}),
    "moco, whole": ("moco", {"method.drawn": 1024}),
    "d_moco, whole, renewed": (
        "d_moco",
        {"method.drawn": 1024, "method.refresh": True},
    ),
    "d_moco": ("d_moco", {}),
    "d_moco, by label": ("d_moco", {"method.refresh": True}),
    "d_moco, whole, by label": (
        "d_moco",
        {"method.drawn": 1024, "method.refresh": True},
    ),
}
RATE = 3e-4
MEASURES = ("linear", "knn", "entropy", "stream", "intra", "inter")


def plan(options, stop):
    """List the runs: each seed's rows one after another, the baselines first."""

    def run(row, seed):
        name, changes = ROWS[row]
        rho = (0.1, 0.1) if row == "even on" else (0.1, options.rho)
        start = duel_policy.train_even(options, seed, stop)
        if row == "even on":
            start = even_again(options, seed, stop)
        folder = pathlib.Path(options.out) / row.replace(", ", "_") / f"seed_{seed}"
        config = duel_policy.config_of(
            options,
            name,
            seed,
            rho,
            **{"optimizer.lr": RATE, "start": str(start)},
            **changes,
        )
        with compare_labels() if "by label" in row else contextlib.nullcontext():
            runs.train(config, folder, stop)
        return duel_policy.scalars(folder)

    for seed in range(*options.seeds):
        for row in options.rows:
            yield row, seed, functools.partial(run, row, seed)


@contextlib.contextmanager
def compare_labels():
    """Have DUEL's policy compare labels for as long as the context lasts."""
    update = active_memory.update
    choose = active_memory._filter_rows  # the one place where the policy sees features

    def update_by_label(settings, memory, key, batch, features, after):
        def choose_by_label(settings, memory, features, mask):
            def directions(labels):
                return jax.nn.one_hot(labels, features.shape[1], dtype=features.dtype)

            items = memory.items | {"feature": directions(memory.items["label"])}
            memory = memory._replace(items=items)
            return choose(settings, memory, directions(batch["label"]), mask)

        with mock.patch.object(active_memory, "_filter_rows", choose_by_label):
            return update(settings, memory, key, batch, features, after)

    with mock.patch.object(active_memory, "update", update_by_label):
        yield


def even_again(options, seed, stop):
    """Train the even task under the stream whose second task is even, too.

    A start must have the stream of the run that goes on from it; both draw the same
    rows for the first task, so that the networks are the same.
    """
    folder = pathlib.Path(options.out) / "even_even" / f"seed_{seed}"
    config = duel_policy.config_of(
        options, "moco", seed, (0.1, 0.1), first_tasks=1, evaluators={}
    )
    runs.train(config, folder, stop)
    return folder


def tell(found) -> None:
    """Print the table, and each row's difference from MoCo."""
    runs.show(found, MEASURES)
    for row in found:
        base = "moco, whole" if "whole" in row else "moco"
        for measure in ("linear", "knn", "entropy"):
            gap = runs.compare(found, row, base, measure)
            print(f"{measure}, {row} - {base}: {gap}")


def main(argv=None) -> int:
    """The command."""
    made = duel_policy.parser(__doc__, "duel")
    made.add_argument("--rho", type=float, default=0.75)
    made.add_argument("--rows", nargs="+", choices=ROWS, default=[*ROWS])
    options = made.parse_args(argv)
    out = f"{options.out}/warm_start"
    if options.table:
        tell(runs.read(out))
        return 0
    return runs.main(
        options,
        lambda stop: runs.work_through(out, plan(options, stop)),
        lambda _: tell(runs.read(out)),
    )


if __name__ == "__main__":
    sys.exit(main())
