r"""ER-ACE's thesis: what a task switch does to the features of the earlier task.

  python benchmarks/trials/er_ace_drift.py --data=data/cifar10 --out=runs/drift

Caccia et al., 2021, Table 1 and Figures 1, 3, 8, 9: ER's replayed features drift and
have large gradients right after new classes come; with ER-ACE, and with ER-AML whose
negatives are of the incoming classes, they do not. Two tasks of Split CIFAR-10 with the
paper's batches and M = 20. `--per-class` images make the tasks shorter, and `--set
"encoder={'name': 'conv_net', 'width': 16}"` the network smaller than the paper's.
"""

import functools
import sys

import numpy as np
import runs

from jaxcl.run import log_file

MEASURES = ("drift", "feature_gradient_norm", "prototype_gradient_norm")
# row -> what follows the colon of the config, and further options
ROWS = {
    "er": ("er", {}),
    "er_cosine": ("er", {"method.head": "cosine"}),
    "er_ace": ("er_ace", {"method.form": "paper"}),
    "er_ace_code": ("er_ace", {"method.form": "code"}),
    "er_aml": ("er_aml", {}),
    "er_aml_all": ("er_aml", {"method.negatives": "all"}),
}


def plan(options, seed):
    """List the rows of a seed."""
    changes = {
        "scenario.per_class": options.per_class,
        "first_tasks": 2,
        "replay.measure": ("drift", "gradients"),
        "evaluators": {"alignment": {}},
        "log_every": 1,
        "save_every": 0,
    }
    for row in options.rows:
        config, own = ROWS[row]
        yield row, f"configs/er_ace_cifar10.py:{config}", changes | own


def measure(early, folder) -> dict:
    """Measure one run: means and peaks after the switch."""
    logged = log_file.read_rows(folder)
    steps = [r for r in logged if r.get("task") == 1 and "drift" in r]
    measured = {}
    for name in MEASURES:
        values = np.array([step[name] for step in steps])
        parts = {
            f"first {early}": values[:early].mean(),
            "later": values[early:].mean(),
            "peak": values[:early].max(),
        }
        measured |= {f"{name}, {part}": float(v) for part, v in parts.items()}
    last = [r["eval"] for r in logged if "eval" in r][-1]
    return measured | {x: last[x] for x in ("alignment/task_1", "alignment/task_2")}


def tell(found) -> None:
    """Print the table, and each row's difference from ER with the same head."""
    names = [*next(iter(next(iter(found.values())).values()))] if found else []
    runs.show(found, names)
    for row in found:
        for name in names:
            print(f"{name}, {row} - er_cosine:", end=" ")
            print(runs.compare(found, row, "er_cosine", name))


def main(argv=None) -> int:
    """The command."""
    made = runs.parser(__doc__, "er_ace_drift", (0, 5), "config.data.path")
    made.add_argument("--rows", nargs="+", default=[*ROWS], choices=ROWS)
    made.add_argument("--per-class", type=int, default=1000)
    made.add_argument("--early", type=int, default=50, help="steps after the switch")
    options = made.parse_args(argv)
    one = functools.partial(measure, options.early)
    return runs.train_rows(options, functools.partial(plan, options), one, tell)


if __name__ == "__main__":
    sys.exit(main())
