"""Ways to teach an encoder new images, and what each keeps of the old: one table.

  python benchmarks/keep_old.py --seeds 0 1 2 --out=runs/keep_old

A small Vision Transformer learns digits, as they are and inverted, by SimCLR. Each row
then teaches it digits a quarter turned by `jaxcl update`, with the same steps and rate,
once with all weights from the first step and once with the heads alone in a first
quarter.
A seed sets the first training and the updates. Accuracy is that of nearest neighbours
on test images. The same command resumes; --epochs=1 --rows=cassle is a quick trial.
"""

import argparse
import pathlib
import shutil

import numpy as np

from jaxcl.config import build, files
from jaxcl.run import finish, folder
from jaxcl.run import results as results_lib
from jaxcl.update import command, lineage, plan
from jaxcl.weights import export

DIGITS = {"name": "digits_in_looks", "size": 16, "channels": 3}
OLD = DIGITS | {"looks": ["plain", "inverted"]}
NEW = DIGITS | {"looks": ["rotated"]}
BATCH, IMAGES = 125, 1438  # of a step, of the new
SIZES = {"width": 48, "layers": 2, "heads": 3, "hidden": 96, "patch": 4}
HEADS = {"hidden_dim": 128, "output_dim": 64}
QUIET = {"progress": False, "plots": False, "tensorboard": False}
WHOLE = {"lora_rank": 0, "open_layers": 0}
# name -> title, changes to the update's config
ROWS: dict[str, tuple[str, dict]] = {
    "finetune": ("fine-tuning", {"method.strategy": "finetune"}),
    "l2_sp": (
        "L2-SP",
        {"method.strategy": "l2_sp", "optimizer.weight_decay": 0.0},
    ),
    "lwf_features": ("distilled features", {"method.strategy": "lwf_features"}),
    "cassle": ("CaSSLe", {"method.strategy": "cassle"}),
    "pnr": ("PNR", {"method.strategy": "pnr"}),
    "lora": (
        "LoRA",
        {"method.strategy": "finetune", "tuning": {"lora_rank": 8, "open_layers": 0}},
    ),
    "average": ("WiSE-FT, 0.5", {"method.strategy": "finetune", "average": 0.5}),
}


def pretrain(args, seed) -> pathlib.Path:
    """Train an encoder on the old images; returns its folder."""
    place = pathlib.Path(args.out, "old", f"seed_{seed}")
    if not (place / "encoder" / folder.CARD).exists():
        config = files.read_config(["--config=keep_fresh"])
        config.update(seed=seed, epochs=2 * args.epochs, batch_size=BATCH, **QUIET)
        config.data = dict(OLD)
        config.augment.update(size=16, resize=16, flip=0.0)
        config.encoder.update(image_size=16, **SIZES)
        config.method.update(HEADS)
        config.schedule.update(warmup_epochs=0)
        config.evaluators = {}
        finish.run_job(build.build(config, place / "run"), place / "run")
        export.export(str(place / "run"), str(place / "encoder"), force=True)
    return place / "encoder"


def teach(args, name, seed, head_steps) -> tuple[float, float, float]:
    """Update a copy of the encoder: its old and new accuracy, GFLOP of the update."""
    place = pathlib.Path(args.out, name, f"heads_{head_steps}", f"seed_{seed}")
    own = place / "encoder"
    if not own.exists():
        shutil.copytree(pretrain(args, seed), own)
    changes = {"method": dict(HEADS, head_steps=head_steps), "optimizer": {"lr": 1e-3}}
    changes |= {"tuning": WHOLE, "epochs": args.epochs, "batch_size": BATCH}
    config = {
        "limits": {"accuracy_drop": 1.0},
        "train": changes | QUIET | {"seed": seed},
    }
    for path, value in ROWS[name][1].items():
        section, _, option = path.rpartition(".")
        if path == "average":
            config["average"] = value
        elif section:
            changes[section][option] = value
        else:
            changes[option] = value
    if changes["method"]["strategy"] in ("cassle", "pnr"):
        changes["method"]["distill_hidden_dim"] = HEADS["hidden_dim"]
    config["train"] |= changes
    found = lineage.read_report(own / lineage.UPDATES / "0001")
    if found is None:
        found = command.carry_out(plan.make_plan(str(own), NEW, config, test=OLD))
    (old,) = found["accuracy"].values()
    return (
        old["after"],
        judge(place / "new", found["run"]),
        found["cost"]["flops"] / 1e9,
    )


def judge(place, checkpoint, data=NEW) -> float:
    """Measure the accuracy of an encoder."""
    config = files.read_config(["--config=keep_fresh:judge"])
    config.update(checkpoint=str(checkpoint), **QUIET)
    config.data = dict(data)
    config.augment = {"size": 16, "resize": 16}
    config.evaluators = {"knn": {}}
    results = finish.run_job(build.build(config, place), place)
    (measures,) = (x for n, x in results_lib.summary(results).items() if "class" in n)
    return measures["average_accuracy"]


def table(args, rows) -> str:
    """Write the rows that are there: mean and standard error over seeds."""
    heads = "| trained by | old | new | old, heads first | new, heads first | GFLOP |"
    lines = [heads, "|---|---|---|---|---|---|"]
    for title, by_heads in rows.items():
        cells = []
        for found in by_heads.values():
            for values in list(zip(*found, strict=True))[:2]:
                error = np.std(values, ddof=1) / len(values) ** 0.5 if values[1:] else 0
                cells.append(f"{100 * np.mean(values):.1f} ± {100 * error:.1f}")
        cost = next(iter(by_heads.values()))[0][2]
        cells = (cells + ["-"] * 4)[:4] + [f"{cost:.0f}" if cost else "-"]
        lines.append(f"| {title} | {' | '.join(cells)} |")
    return "\n".join(lines)


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--rows", nargs="+", default=[*ROWS], choices=ROWS)
    parser.add_argument(
        "--epochs", type=int, default=30, help="of an update; twice as many of the old"
    )
    parser.add_argument("--out", default="runs/keep_old", help="folder of the runs")
    args = parser.parse_args()
    rows: dict[str, dict[int, list]] = {}
    quarter = args.epochs * IMAGES // BATCH // 4
    for seed in args.seeds:
        encoder = pretrain(args, seed)
        place = encoder.parent
        found = [
            judge(place / name, encoder, x) for name, x in (("o", OLD), ("n", NEW))
        ]
        rows.setdefault("no update", {}).setdefault(0, []).append((*found, 0))
        for name in args.rows:
            for head_steps in (0, quarter):
                own = rows.setdefault(ROWS[name][0], {}).setdefault(head_steps, [])
                own.append(teach(args, name, seed, head_steps))
        text = table(args, rows)
        pathlib.Path(args.out, "table.md").write_text(text + "\n")
        print(text, flush=True)


if __name__ == "__main__":
    main()
