"""Table 7 of PNR on digits in three looks: pseudo-negatives on and off, one recipe.

  python benchmarks/trials/pnr_table7.py --seeds 7 27 --out=runs/trials/pnr_table7
  python benchmarks/trials/pnr_table7.py --table --out=runs/trials/pnr_table7

Fine-tuning, PNR, each pseudo-negative left out, and both (Cha et al., ICML 2024, Table
7): 60 epochs a look, queue of 1024, temperature 0.5 first and then 0.2, each seed with
all arms before the next. Primary: forgetting of PNR minus that without both.
"""

import functools
import sys

import runs

from jaxcl.run import result_file

CONFIG = "quickstart_pnr"
ARMS = {
    "neither": {"method.pn1": False, "method.pn2": False},
    "both": {},
    "pn1 alone": {"method.pn2": False},
    "pn2 alone": {"method.pn1": False},
    "fine-tuning": {"method.strategy": "finetune"},
}
TEMPERATURES = (0.5, 0.2)


def measure(folder) -> dict:
    """Read accuracy and forgetting in percent, and seconds."""
    results = result_file.read_results(folder)
    last = result_file.summary(results)["knn/domain_aware"]
    total = results["cost"]["total"]
    return {
        "accuracy": 100 * last["average_accuracy"],
        "forgetting": 100 * last["forgetting"],
        "seconds": total["train_seconds"] + total["evaluation_seconds"],
    }


def plan(options, seed):
    """List the arms of a seed under each temperature."""
    for temperature in options.temperatures:
        for arm in options.arms:
            changes = {
                "epochs": options.epochs,
                "method.queue_size": 1024,
                "method.temperature": temperature,
                "method.distill_temperature": temperature,
                "evaluators": {"knn": {"k": 20}},
                "evaluate_untrained": False,
            } | ARMS[arm]
            if arm == "fine-tuning":
                changes |= {"method.distill_hidden_dim": None}
            yield f"{arm}, {temperature}", CONFIG, changes


def tell(found) -> None:
    """Print the table, and each arm's difference from the one with neither."""
    runs.show(found, ("accuracy", "forgetting", "seconds"))
    for temperature in TEMPERATURES:
        for arm in ARMS:
            for name in ("forgetting", "accuracy"):
                gap = runs.compare(
                    found, f"{arm}, {temperature}", f"neither, {temperature}", name
                )
                print(f"{name}, {arm} - neither, {temperature}: {gap}")


def main(argv=None) -> int:
    """The command."""
    made = runs.parser(__doc__, "pnr_table7", (7, 27))
    made.add_argument("--epochs", type=int, default=60)
    made.add_argument("--arms", nargs="+", choices=ARMS, default=[*ARMS])
    made.add_argument("--temperatures", type=float, nargs="+", default=TEMPERATURES)
    options = made.parse_args(argv)
    return runs.train_rows(options, functools.partial(plan, options), measure, tell)


if __name__ == "__main__":
    sys.exit(main())
