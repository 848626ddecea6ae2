"""Ways to teach an encoder new images, and what each keeps of the old: one table.

  python benchmarks/keep_old.py --stream=turned --seeds 0 1 2 --out=runs/keep_old

A small Vision Transformer learns digits, as they are and inverted, by SimCLR. Each row
then teaches it new digits by `jaxcl update`, with the same steps and rate. Streams:

- turned: digits a quarter turned. Each row runs twice, once with all weights from the
  first step and once with the heads alone in a first quarter.
- same: other digits of the same two kinds; the encoder has learnt half of the digits.
- three: digits a quarter turned, then mirrored, then with noise, an update for each.

A seed sets the first training and the updates. Accuracy is that of nearest neighbours
on test images; after three kinds it is the mean of the three. The index holds the old
train images as embedded before the first update: how many of the ten neighbours of an
image are still found in it, how many with the best adapter, and how many in an index
that is embedded again. The same command resumes; --epochs=1 --rows=cassle is a trial.
"""

import argparse
import pathlib
import shutil
from typing import NamedTuple

import numpy as np

from jaxcl.config import build, files
from jaxcl.data.sources import by_name
from jaxcl.index import drift, maps
from jaxcl.run import encoder_folder, finish, result_file, updates
from jaxcl.update import command, plan
from jaxcl.weights import encoder, export

DIGITS = {"name": "digits_in_looks", "size": 16, "channels": 3}
OLD = DIGITS | {"looks": ["plain", "inverted"]}
NEW = DIGITS | {"looks": ["rotated"]}
PLAIN = DIGITS | {"looks": ["plain"]}
STREAMS = ("turned", "same", "three")
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
    "diet": ("DIET", {"method.base": "diet", "method.strategy": "finetune"}),
    "diet_slow": (
        "DIET, rate 1e-4",
        {
            "method.base": "diet",
            "method.strategy": "finetune",
            "optimizer.lr": 1e-4,
        },
    ),
}


class Taught(NamedTuple):
    """Accuracies of an updated encoder, and the use of the index from before."""

    old: float
    new: float
    kept: float  # shares of the ten neighbours that are found: in the index as it is,
    adapted: float  # with the best adapter,
    again: float  # and in an index of new embeddings
    gflop: float  # of the updates


def make_stream(args) -> tuple[dict, list[dict]]:
    """Return the set that the encoder learns first, and each new one of the stream."""
    if args.stream == "turned":
        return OLD, [NEW]
    if args.stream == "three":
        return OLD, [NEW, *(write_kind(args, kind) for kind in KINDS)]
    looks = by_name.load(**OLD)
    half = np.random.default_rng(0).permutation(len(looks.train.label) // 2) % 2
    half = np.tile(half, 2)  # a digit is in one half, in both looks
    old, new = (write_set(args, f"half_{i}", looks, half == i) for i in (0, 1))
    return old, [new]


def write_kind(args, kind) -> dict:
    """Write the digits changed in a way of `KINDS`."""
    return write_set(args, kind, by_name.load(**PLAIN), slice(None), KINDS[kind])


def write_set(args, name, data, rows, change=np.asarray) -> dict:
    """Write some train images of a set and its test images, all of them changed."""
    path = pathlib.Path(args.out, f"{name}.npz")
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        parts = {"train": data.train.images[rows], "test": data.test.images}
        pixels = {f"{split}_x": change(images) for split, images in parts.items()}
        labels = {"train_y": data.train.label[rows], "test_y": data.test.label}
        np.savez(path, **pixels, **labels)
    return {"name": "npz", "path": str(path)}


def add_noise(images) -> np.ndarray:
    """Add normal noise, of 64 grey values, that is the same at every call."""
    noise = np.random.default_rng(0).normal(0, 64, images.shape)
    return np.clip(images + noise, 0, 255).astype(np.uint8)


KINDS = {"mirrored": lambda images: images[:, :, ::-1], "noisy": add_noise}


def pretrain(args, old, seed) -> pathlib.Path:
    """Train an encoder on the old images; return its folder."""
    place = pathlib.Path(args.out, "old", f"seed_{seed}")
    if not (place / "encoder" / encoder_folder.CARD).exists():
        config = files.read_config(["--config=keep_fresh"])
        epochs = args.epochs * (4 if args.stream == "same" else 2)  # half the images
        config.update(seed=seed, epochs=epochs, batch_size=BATCH, **QUIET)
        config.data = dict(old)
        config.augment.update(size=16, resize=16, flip=0.0)
        config.encoder.update(image_size=16, **SIZES)
        config.method.update(HEADS)
        config.schedule.update(warmup_epochs=0)
        config.evaluators = {}
        finish.run_job(build.build(config, place / "run"), place / "run")
        export.export(str(place / "run"), str(place / "encoder"), force=True)
    return place / "encoder"


def teach(args, name, seed, head_steps) -> Taught:
    """Update a copy of the encoder with each new set in turn, and judge the last."""
    old, sets = make_stream(args)
    first = pretrain(args, old, seed)
    place = pathlib.Path(args.out, name, f"heads_{head_steps}", f"seed_{seed}")
    own = place / "encoder"
    if not own.exists():
        shutil.copytree(first, own)
    config = make_update(args, name, seed, head_steps)
    reports = []
    for number, new in enumerate(sets, 1):
        report = updates.read_report(own / updates.UPDATES / f"{number:04d}")
        if report is None:
            work = plan.make_plan(str(own), new, config, test=old)
            report = command.carry_out(work)
        reports.append(report)
    (accuracy,) = reports[-1]["accuracy"].values()
    run = reports[-1]["run"]
    return Taught(
        accuracy["after"],
        judge_all(place, run, sets),
        *measure_index(old, first, own, place / "export"),
        sum(report["cost"]["flops"] for report in reports) / 1e9,
    )


def make_update(args, name, seed, head_steps) -> dict:
    """Make the config of an update by a row of the table."""
    changes = {"method": dict(HEADS, head_steps=head_steps), "optimizer": {"lr": 1e-3}}
    changes |= {"tuning": WHOLE, "epochs": args.epochs, "batch_size": BATCH}
    config = {"limits": {"accuracy_drop": 1.0}}
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
    if changes["method"].get("base") == "diet":  # has a head of its own
        for option in HEADS:
            del changes["method"][option]
    return config | {"train": changes | QUIET | {"seed": seed}}


def judge_all(place, checkpoint, sets) -> float:
    """Average the accuracy of an encoder over sets."""
    found = []
    for number, data in enumerate(sets):
        name = f"new_{number}" if number else "new"
        found.append(judge(place / name, checkpoint, data))
    return float(np.mean(found))


def judge(place, checkpoint, data) -> float:
    """Measure the accuracy of an encoder."""
    config = files.read_config(["--config=keep_fresh:judge"])
    config.update(checkpoint=str(checkpoint), **QUIET)
    config.data = dict(data)
    config.augment = {"size": 16, "resize": 16}
    config.evaluators = {"knn": {}}
    results = finish.run_job(build.build(config, place), place)
    (measures,) = (x for n, x in result_file.summary(results).items() if "class" in n)
    return measures["average_accuracy"]


def measure_index(old, first, updated, place) -> tuple[float, float, float]:
    """Search an index of old images, embedded before, after the updates.

    Returns:
      Share of neighbours that are found in it, the same with the best adapter, and in
      an index that is embedded again.
    """
    export.export(str(updated), str(place), force=True)
    images = by_name.load(**old).train.images
    before, after = (encoder.load_encoder(x).embed(images) for x in (first, place))
    found = drift.measure_drift(before, after)
    adapted = maps.fit_all(after, before, mapped="queries")[0].recall
    return float(found["index_overlap"]), adapted, float(found["overlap"])


def write_table(rows) -> str:
    """Write the rows that are there: mean and standard error over seeds, in percent."""
    heads = any(len(by_heads) > 1 for by_heads in rows.values())
    titles = ["trained by", "old", "new"]
    titles += ["old, heads first", "new, heads first"] if heads else []
    titles += ["index kept", "with adapter", "embedded again", "GFLOP"]
    lines = [f"| {' | '.join(titles)} |", "|---" * len(titles) + "|"]
    for title, by_heads in rows.items():
        first, *others = (Taught(*zip(*x, strict=True)) for x in by_heads.values())
        cells = [title, show(first.old), show(first.new)]
        if heads:
            cells += [show(x) for y in others for x in y[:2]] or ["-", "-"]
        cells += [show(x) for x in (first.kept, first.adapted, first.again)]
        lines.append(f"| {' | '.join(cells)} | {np.mean(first.gflop):.0f} |")
    return "\n".join(lines)


def show(values) -> str:
    """Show the mean and the standard error of shares, in percent."""
    error = np.std(values, ddof=1) / len(values) ** 0.5 if len(values) > 1 else 0
    return f"{100 * np.mean(values):.1f} ± {100 * error:.1f}"


def parser() -> argparse.ArgumentParser:
    """Make the command line."""
    made = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    made.add_argument("--stream", default=STREAMS[0], choices=STREAMS)
    made.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    made.add_argument("--rows", nargs="+", default=[*ROWS], choices=ROWS)
    made.add_argument("--epochs", type=int, default=30, help="of an update")
    made.add_argument("--out", default="runs/keep_old", help="folder of the runs")
    return made


def main(argv=None) -> dict:
    """Print the table after each seed; return its numbers."""
    args = parser().parse_args(argv)
    rows: dict[str, dict[int, list[Taught]]] = {}
    quarter = args.epochs * IMAGES // BATCH // 4
    old, sets = make_stream(args)
    for seed in args.seeds:
        first = pretrain(args, old, seed)
        place = first.parent
        own = judge(place / "o", first, old), judge_all(place / "n", first, sets)
        untouched = Taught(*own, kept=1.0, adapted=1.0, again=1.0, gflop=0.0)
        rows.setdefault("no update", {}).setdefault(0, []).append(untouched)
        for name in args.rows:
            for head_steps in (0, quarter) if args.stream == "turned" else (0,):
                by_heads = rows.setdefault(ROWS[name][0], {})
                taught = teach(args, name, seed, head_steps)
                by_heads.setdefault(head_steps, []).append(taught)
            text = write_table(rows)
            pathlib.Path(args.out, "table.md").write_text(text + "\n")
        print(text, flush=True)
    return rows


if __name__ == "__main__":
    main()
