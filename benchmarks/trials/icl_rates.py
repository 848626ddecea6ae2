r"""ICL: is the speed-up the agents', the rate's, or the old weights'?

  python benchmarks/trials/icl_rates.py --data=proteins.npz --out=runs/rates

Ji et al., 2023, Table 4 and Figure 5, on one loss for all rows: NCE-I of all items on
fixed batches after every epoch. Adam's rate is 1e-3, 1e-4 or 1e-5, the rates that the
paper searches; the released code has 1e-5. Controls are retraining and going on by
plain SGD at 0.03, and NCE-II with the old anchors' NCE-I, which by Theorem 3 is going
on. All rows of a seed begin with one old encoder, trained with Adam at 1e-3. Finished
seeds are kept; OUT/rates.json is written anew after each row.
"""

import numpy as np
import trial

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


def main():
    """Run the rows, and write their losses."""
    parser = trial.parser(__doc__)
    parser.add_argument("--rows", nargs="+", default=[*ROWS], choices=ROWS)
    parser.add_argument("--rates", nargs="+", type=float, default=[1e-5, 1e-4, 1e-3])
    parser.add_argument("--growth", type=float, default=0.5)
    parser.add_argument("--epochs", type=int, default=150, help="of a task, at most")
    parser.add_argument("--every", type=int, default=5, help="epochs between losses")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    changes = {
        "scenario.growth": options.growth,
        "epochs": options.epochs,
        "evaluators": {"objective": {}},
        "eval_epochs": options.every,
        "log_every": 1,
    }
    trial.seeds_of(
        options, "configs/icl_proteins.py:old", changes, "old", lambda *_: {}
    )
    begin, found = {"start": f"{options.out}/old/seed_SEED"}, {}
    for rate in options.rates:
        for row in options.rows:
            variant, own = ROWS[row]
            if "optimizer.lr" in own and row in found:
                continue  # the same at every rate
            name = row if "optimizer.lr" in own else f"{row}, {rate:g}"
            runs = trial.seeds_of(
                options,
                f"configs/icl_proteins.py:{variant}",
                changes | {"optimizer.lr": rate} | own | begin,
                name.replace(", ", "_"),
                losses,
            )
            found[name] = trial.summary(runs)
            trial.save(
                options.out / "rates.json", trial.settings(options) | {"rows": found}
            )


def losses(work, place) -> dict:
    """Read the losses after the switch, and what reaching each of them cost."""
    logged = [row for row in trial.rows(place) if row.get("task") == 1]
    steps = {row["step"]: row["passes"] for row in logged if "passes" in row}
    judged = [row for row in logged if "objective/loss" in row.get("eval", {})]
    curve = [row["eval"]["objective/loss"] for row in judged]
    per_step = np.mean([*steps.values()])
    first = min(steps) - 1
    return {
        "loss, first": curve[0],
        "loss, last": float(np.mean(curve[-3:])),
        "loss, lowest": min(curve),
        "passes": per_step * (judged[-1]["step"] - first),
        "points": [
            (per_step * (row["step"] - first), loss)
            for row, loss in zip(judged, curve, strict=True)
        ],
    }


if __name__ == "__main__":
    main()
