r"""ICL: is the speed-up the agents', the rate's, or the old weights'?

  python benchmarks/trials/icl_rates.py --data=proteins.npz --out=runs/rates

Ji et al., 2023, Table 4 and Figure 5, on one loss for all rows: NCE-I of all items on
fixed batches after every epoch. Adam's rate is 1e-3, 1e-4 or 1e-5, the rates that the
paper searches; the released code has 1e-5. Controls are retraining and going on by
plain SGD at 0.03, and NCE-II with the old anchors' NCE-I, which by Theorem 3 is going
on. All rows of a seed begin with one old encoder, trained with Adam at 1e-3.
"""

import functools
import sys

import numpy as np
import runs

from jaxcl.run import log_file

SGD = {"optimizer.lr": 1e-3}  # these rows do not read Adam's rate
ROWS = {
    "frozen": ("frozen", SGD | {"epochs": 1, "eval_epochs": 1}),
    "retrain": ("retrain", {}),
    "icl": ("icl", SGD),
    "retrain_sgd": ("retrain_sgd", SGD),
    "continue": ("continue", {}),
    "continue_sgd": ("continue_sgd", SGD),
    "no_lrl_sgd": ("no_lrl_sgd", SGD),
    "no_meta": ("no_meta", SGD),
    "no_lrl": ("no_lrl", {}),
    "no_both": ("no_both", {}),
    "no_both_keep": ("no_both", {"method.keep": 1}),
}


def plan(options, seed):
    """List the rows of a seed, the run that all begin with first."""
    changes = {
        "scenario.growth": options.growth,
        "epochs": options.epochs,
        "evaluators": {"objective": {}},
        "eval_epochs": options.every,
        "log_every": 1,
    }
    config = "configs/icl_proteins.py"
    yield "old", f"{config}:old", changes
    begin = {"start": f"{options.out}/old/seed_{seed}"}
    for rate in options.rates:
        for row in options.rows:
            variant, own = ROWS[row]
            same = "optimizer.lr" in own  # at every rate
            if same and rate != options.rates[0]:
                continue
            name = row if same else f"{row}, {rate:g}"
            own = {"optimizer.lr": rate} | own | begin
            yield name, f"{config}:{variant}", changes | own


def measure(folder) -> dict:
    """Read the losses after the switch, and what reaching each of them cost."""
    logged = [row for row in log_file.read_rows(folder) if row.get("task") == 1]
    steps = {row["step"]: row["passes"] for row in logged if "passes" in row}
    judged = [row for row in logged if "objective/loss" in row.get("eval", {})]
    if not judged:  # the old encoder's own run
        return {}
    curve = [row["eval"]["objective/loss"] for row in judged]
    per_step = np.mean([*steps.values()])
    first = min(steps) - 1
    return {
        "loss, first": curve[0],
        "loss, last": float(np.mean(curve[-3:])),
        "loss, lowest": min(curve),
        "passes": float(per_step * (judged[-1]["step"] - first)),
        "points": [
            (float(per_step * (row["step"] - first)), loss)
            for row, loss in zip(judged, curve, strict=True)
        ],
    }


def tell(found) -> None:
    """Print the table, and how soon each row is below where retraining ends."""
    found = {row: runs_of for row, runs_of in found.items() if row != "old"}
    runs.show(found, ("loss, first", "loss, last", "loss, lowest", "passes"))
    for base in [row for row in found if row.startswith("retrain,")]:
        for row, runs_of in found.items():
            sooner = [
                ended["passes"] / passes
                for seed, ended in found[base].items()
                for passes in [reach(runs_of.get(seed), ended["loss, last"])]
                if passes
            ]
            told = ", ".join(f"{times:.1f}" for times in sooner)
            print(f"{row}, times fewer passes than {base}: {told or 'never'}")


def reach(run, loss):
    """Find the passes after which a run is at a loss; None if it never is."""
    points = (run or {}).get("points", ())
    return next((passes for passes, reached in points if reached <= loss), None)


def main(argv=None) -> int:
    """The command."""
    made = runs.parser(__doc__, "icl_rates", (0, 5), "config.data.path")
    made.add_argument("--rows", nargs="+", default=[*ROWS], choices=ROWS)
    made.add_argument("--rates", nargs="+", type=float, default=[1e-5, 1e-4, 1e-3])
    made.add_argument("--growth", type=float, default=0.5)
    made.add_argument("--epochs", type=int, default=150, help="of a task, at most")
    made.add_argument("--every", type=int, default=5, help="epochs between losses")
    options = made.parse_args(argv)
    return runs.train_rows(options, functools.partial(plan, options), measure, tell)


if __name__ == "__main__":
    sys.exit(main())
