r"""CCLIS: what the choice of the memory and the weights are worth, by two probes.

  python benchmarks/trials/cclis_factors.py --data=data/cifar10 --out=runs/factors

Li et al., 2024, Tables 3, 4, 7 and 9, with the network of `cclis_cifar10_small.py`:
choice (importance or uniform) and weights (none, the paper's, every row's) with and
without PRD, beside Co2L. "linear" trains on what the network could still see, stored
rows of old classes among them; "linear_seen" on all rows of the classes met, so that it
judges what was learnt. Finished seeds are kept; OUT/factors.json is written anew after
each row.
"""

import itertools

import numpy as np
import trial

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


def main():
    """Run the rows, and write their accuracies."""
    parser = trial.parser(__doc__)
    parser.add_argument("--rows", nargs="+", default=[*ROWS], choices=ROWS)
    parser.add_argument("--memory", nargs="+", type=int, default=[200])
    parser.add_argument("--per-class", type=int, default=1000)
    parser.add_argument("--epochs", nargs=2, type=int, default=[60, 30])
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    found = {}
    for memory, row in itertools.product(options.memory, options.rows):
        config, own = ROWS[row]
        changes = {
            "scenario.per_class": options.per_class,
            "epochs": tuple(options.epochs),
            "method.memory_size": memory,
        }
        name = f"{row}, {memory}"
        runs = trial.seeds_of(
            options,
            f"configs/cclis_cifar10_small.py:{config}",
            changes | own,
            name.replace(", ", "_").replace(" ", "_"),
            accuracies,
        )
        found[name] = trial.summary(runs)
        trial.save(
            options.out / "factors.json", trial.settings(options) | {"rows": found}
        )


def accuracies(work, place) -> dict:
    """Read the percents after the last task, means over tasks."""
    last = [row["eval"] for row in trial.rows(place) if "eval" in row][-1]
    return {
        f"{probe}/{asked}": 100 * float(np.mean(last[f"{probe}/{asked}"]))
        for probe, asked in itertools.product(PROBES, ASKED)
    }


if __name__ == "__main__":
    main()
