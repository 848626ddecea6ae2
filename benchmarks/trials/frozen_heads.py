"""Rules on frozen features, on the drawn set: accuracy after five tasks of two classes.

  jaxcl train own_images:shapes/plain,encoder=conv_net ... (docs/getting_started.md)
  jaxcl export --run=runs/mine --out=exports/mine
  python benchmarks/trials/frozen_heads.py --encoder=exports/mine --out=runs/frozen

It prints a markdown table, percent over seeds; a seed sets the order of classes and the
projections. Controls: a rule on a random encoder, a linear head without a memory, and a
linear probe that is trained on all classes at once. A run that is done is not done
again.
"""

import argparse
import pathlib

import numpy as np

from jaxcl.config import build, files
from jaxcl.run import finish

NAMES = ("ncm", "slda", "ranpac", "acil", "fecam", "stored_knn", "linear_head")
ROWS = {name: {"name": name} for name in NAMES}
ROWS["linear_head, no memory"] = {"name": "linear_head", "memory_size": 0}
DOMAINS = ("plain", "outline", "busy", "night")


def accuracy(args, row, domain, seed, encoder):
    """Percent after the last task, by the rule and by a linear probe."""
    config = files.read_config(["--config=frozen_heads:shapes"])
    config.update(seed=seed, progress=False, plots=False, tensorboard=False)
    config.data.domains = (domain,)
    config.method, method = ROWS[row], row.replace(", no memory", "_0")
    if method in ("ranpac", "acil"):
        config.method.projections = args.projections
    if encoder is None:
        config.encoder = {"name": "conv_net"}
    else:
        config.start = encoder
    config.evaluate_untrained = False
    config.evaluators = {"predict": {"last_only": True}}
    if method == "ncm":
        config.evaluators.linear = {"augment": False, "lr": 0.5, "last_only": True}
    workdir = pathlib.Path(args.out, domain, f"{method}_{bool(encoder)}_{seed}")
    results = finish.run_job(build.build(config, workdir), workdir)
    last = {
        name: 100 * np.nanmean(np.array(rows[-1], float))
        for name, rows in results["matrices"].items()
        if name.endswith("class_incremental")
    }
    return last["predict/class_incremental"], last.get("linear/class_incremental")


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--encoder", required=True, help="folder of an encoder")
    parser.add_argument("--out", default="runs/frozen", help="folder of the runs")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--projections", type=int, default=1000)
    parser.add_argument("--domains", nargs="+", default=DOMAINS, choices=DOMAINS)
    parser.add_argument("--rows", nargs="+", default=[*ROWS], choices=ROWS)
    args = parser.parse_args()
    rows = {}
    for domain in args.domains:
        for seed in range(args.seeds):
            for method in args.rows:
                found, probe = accuracy(args, method, domain, seed, args.encoder)
                rows.setdefault(method, {}).setdefault(domain, []).append(found)
                if probe is not None:
                    name = "linear probe, all classes at once"
                    rows.setdefault(name, {}).setdefault(domain, []).append(probe)
            if "ranpac" not in args.rows:
                continue
            found, _ = accuracy(args, "ranpac", domain, seed, None)
            name = "ranpac, random encoder"
            rows.setdefault(name, {}).setdefault(domain, []).append(found)
    print(f"| | {' | '.join(args.domains)} |\n|---|{'---:|' * len(args.domains)}")
    for name, by_domain in rows.items():
        cells = [f"{np.mean(x):.1f} ± {np.std(x):.1f}" for x in by_domain.values()]
        print(f"| {name} | {' | '.join(cells)} |")


if __name__ == "__main__":
    main()
