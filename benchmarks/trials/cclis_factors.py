r"""CCLIS: what the choice of the memory and the weights are worth, by two probes.

  python benchmarks/trials/cclis_factors.py --data=data/cifar10 --out=runs/factors

Li et al., 2024, Tables 3, 4, 7 and 9, with the network of `cclis_cifar10_small.py`:
choice (importance or uniform) and weights (none, the paper's, every row's) with and
without PRD, beside Co2L. "linear" trains on what the network could still see, stored
rows of old classes among them; "linear_seen" on all rows of the classes met, so that it
judges what was learnt.
"""

import functools
import itertools
import sys

import numpy as np
import runs

from jaxcl.run import log_file

CHOICES, SCOPES, DISTILL = ("importance", "uniform"), ("none", "old", "all"), (0.6, 0.0)
ROWS = {
    f"{keep}, {scope}{'' if weight else ', no PRD'}": (
        "cclis",
        {"method.keep": keep, "method.scope": scope, "method.weight": weight},
    )
    for weight, keep, scope in itertools.product(DISTILL, CHOICES, SCOPES)
} | {"co2l": ("co2l", {}), "co2l, no IRD": ("co2l_no_ird", {})}
PROBES = ("linear", "linear_seen")
ASKED = ("class_incremental", "task_aware")


def plan(options, seed):
    """List the rows of a seed under each size of the memory."""
    for memory, row in itertools.product(options.memory, options.rows):
        config, own = ROWS[row]
        changes = {
            "scenario.per_class": options.per_class,
            "epochs": tuple(options.epochs),
            "method.memory_size": memory,
        }
        name = f"{row}, {memory}"
        yield name, f"configs/cclis_cifar10_small.py:{config}", changes | own


def measure(folder) -> dict:
    """Read the percents after the last task, means over tasks."""
    last = [row["eval"] for row in log_file.read_rows(folder) if "eval" in row][-1]
    return {
        f"{probe}/{asked}": 100 * float(np.mean(last[f"{probe}/{asked}"]))
        for probe, asked in itertools.product(PROBES, ASKED)
    }


def tell(found) -> None:
    """Print the table, and each row's difference from the first."""
    names = [f"{p}/{a}" for p, a in itertools.product(PROBES, ASKED)]
    runs.show(found, names)
    for row, name in itertools.product([*found][1:], names):
        base = next(iter(found))
        print(f"{name}, {row} - {base}: {runs.compare(found, row, base, name)}")


def main(argv=None) -> int:
    """The command."""
    made = runs.parser(__doc__, "cclis_factors", (0, 5), "config.data.path")
    made.add_argument("--rows", nargs="+", default=[*ROWS], choices=ROWS)
    made.add_argument("--memory", nargs="+", type=int, default=[200])
    made.add_argument("--per-class", type=int, default=1000)
    made.add_argument("--epochs", nargs=2, type=int, default=[60, 30])
    options = made.parse_args(argv)
    return runs.train_rows(options, functools.partial(plan, options), measure, tell)


if __name__ == "__main__":
    sys.exit(main())
