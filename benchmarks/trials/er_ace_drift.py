r"""ER-ACE's thesis: what a task switch does to the features of the earlier task.

  python benchmarks/trials/er_ace_drift.py --data=data/cifar10 --out=runs/drift

Caccia et al., 2021, Table 1 and Figures 1, 3, 8, 9: ER's replayed features drift and
have large gradients right after new classes come; with ER-ACE, and with ER-AML whose
negatives are of the incoming classes, they do not. Two tasks of Split CIFAR-10 with the
paper's batches and M = 20. `--per-class` images make the tasks shorter, and `--set
"encoder={'name': 'conv_net', 'width': 16}"` the network smaller than the paper's.
Finished seeds are kept; OUT/drift.json is written anew after each row.
"""

import numpy as np
import trial

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


def main():
    """Run the rows, and write what they measured."""
    parser = trial.parser(__doc__)
    parser.add_argument("--rows", nargs="+", default=[*ROWS], choices=ROWS)
    parser.add_argument("--per-class", type=int, default=1000)
    parser.add_argument("--early", type=int, default=50, help="steps after the switch")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    changes = {
        "scenario.per_class": options.per_class,
        "first_tasks": 2,
        "replay.measure": "('drift','gradients')",
        "evaluators": {"alignment": {}},
        "log_every": 1,
        "save_every": 0,
    }
    found = {}
    for row in options.rows:
        config, own = ROWS[row]
        found[row] = trial.summary(
            trial.seeds_of(
                options,
                f"configs/er_ace_cifar10.py:{config}",
                changes | own,
                row,
                lambda work, place: one(place, options.early),
            )
        )
        trial.save(
            options.out / "drift.json", trial.settings(options) | {"rows": found}
        )


def one(place, early) -> dict:
    """Measure one run: means and peaks after the switch."""
    logged = trial.rows(place)
    steps = [r for r in logged if r.get("task") == 1 and "drift" in r]
    measured = {}
    for name in MEASURES:
        values = np.array([step[name] for step in steps])
        measured[f"{name}, mean"] = values.mean()
        measured[f"{name}, first {early}"] = values[:early].mean()
        measured[f"{name}, later"] = values[early:].mean()
        measured[f"{name}, peak"] = values[:early].max()
        measured[f"{name}, curve"] = values.tolist()
    last = [r["eval"] for r in logged if "eval" in r][-1]
    return measured | {x: last[x] for x in ("alignment/task_1", "alignment/task_2")}


if __name__ == "__main__":
    main()
