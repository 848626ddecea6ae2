r"""Teach an encoder new images in several ways: what each keeps and learns, a table.

  python benchmarks/trials/keep_fresh.py --old=tiny_imagenet20.npz --new=pacs64.npz

trains the encoder of configs/keep_fresh.py on the images of --old and exports it. Each
row of ROWS then teaches it those of --new, without labels, as `jaxcl update` does, once
with each seed. Of several sets after --new each is an update of its own, one after
another. With --retrain other encoders are trained on all sets. Every encoder is
evaluated on the test parts of all sets at the end. ROOT/table.md is written after each,
with the columns of docs/updating.md, and ROOT/table.png: old against new. The same
command resumes.

A set is an .npz file or a directory that `jaxcl convert` wrote.
"""

import argparse
import pathlib
import shutil
from typing import NamedTuple

import numpy as np

from jaxcl import plots
from jaxcl.config import build, files, recipe
from jaxcl.index.ways import VERDICTS
from jaxcl.run import encoder_folder, finish, result_file, seeds, updates
from jaxcl.update import command, plan
from jaxcl.weights import export

KNN, PROBE = "knn/class_incremental", "linear/class_incremental"
DROP = 0.02  # what the default limit of an update allows
QUIET = {"progress": False, "plots": False, "tensorboard": False}


class Row(NamedTuple):
    """A way to teach the encoder new images."""

    title: str
    strategy: str
    tuning: dict = {}  # options of config.train.tuning


_WHOLE = {"lora_rank": 0, "open_layers": 0, "statistics": "batch"}
_STILL = {"statistics": "running"}  # for batch norm
ROWS = {
    "continue": Row("fine-tuning, all weights", "finetune", _WHOLE),
    "lora": Row("fine-tuning, LoRA", "finetune", {"open_layers": 0}),
    "adapters": Row("fine-tuning, LoRA and the last block", "finetune"),
    "less_forget": Row("Less-Forget, all weights", "less_forget", _WHOLE),
    "cassle": Row("CaSSLe, all weights", "cassle", _WHOLE),
    "pnr": Row("PNR, all weights", "pnr", _WHOLE),
    "still": Row("fine-tuning, statistics stay", "finetune", _STILL),
    "cassle_still": Row("CaSSLe, statistics stay", "cassle", _STILL),
    "cassle_adapters": Row("CaSSLe, LoRA and the last block", "cassle"),
}


def list_rows(network: str) -> list[str]:
    """Name the rows of a network: adapters are for "vit", statistics for "resnet"."""
    other = {"vit": [_STILL], "resnet": [{}, {"open_layers": 0}]}[network]
    return [name for name, row in ROWS.items() if row.tuning not in other]


def list_sets(options) -> dict[str, str]:
    """Name each set: "old", and "new" or the names of several files."""
    if len(options.new) == 1:
        return {"old": options.old, "new": options.new[0]}
    return {"old": options.old, **{pathlib.Path(x).stem: x for x in options.new}}


def make_section(path: str) -> dict:
    """Return the section config.data that reads a set."""
    name = "npz" if path.endswith(".npz") else "arrays"
    return {"name": name, "path": str(pathlib.Path(path).absolute())}


def run(options, words: str, changes: dict, workdir: pathlib.Path) -> None:
    """Train or evaluate by configs/keep_fresh.py, unless it is done."""
    network = "" if options.network == "vit" else options.network
    debug = "debug" if options.debug else ""
    words = ",".join(filter(None, (words, network, debug)))
    config = files.read_config([f"--config=keep_fresh{':' * bool(words)}{words}"])
    recipe.change(config, QUIET | changes)
    if not result_file.complete(workdir):
        finish.run_job(build.build(config, workdir), workdir)


def evaluate(options, folder: pathlib.Path, checkpoint: pathlib.Path) -> None:
    """Evaluate an encoder, or that of a run, on all sets; then write the table."""
    for name, path in list_sets(options).items():
        changes = {"checkpoint": str(checkpoint), "data": make_section(path)}
        run(options, "judge", changes, folder / name)
    root = pathlib.Path(options.root)
    (root / "table.md").write_text(write_table(options) + "\n")
    draw(options, root / "table.png")


def teach(options, name: str, seed: int, start: pathlib.Path) -> None:
    """Teach a copy of the encoder one set after another, and evaluate the last one."""
    folder, row = find_place(options, name, seed), ROWS[name]
    encoder = folder / "encoder"
    if not encoder.exists():
        shutil.copytree(start, encoder)
    train = {
        "seed": seed,
        "epochs": options.epochs,
        "batch_size": options.batch,
        "scale_lr": False,
        "optimizer": {"lr": options.lr},
        "method": {"strategy": row.strategy},
    }
    train |= {"tuning": row.tuning} if row.tuning else {}
    if options.of == "run":  # as an update of its encoder
        train["schedule"] = {"name": "cosine", "per_epoch": False}
    # Without the limit the checkpoint of a harmful update would be gone.
    config = {"train": train | QUIET, "limits": {"accuracy_drop": 1.0}}
    old, places = make_section(options.old), update_folders(options, folder)
    for path, workdir in zip(options.new, places, strict=True):
        if updates.read_report(workdir) is None:
            section = make_section(path)
            command.carry_out(
                plan.make_plan(str(encoder), section, config, test=old, old=old)
            )
    evaluate(options, folder, places[-1])


def update_folders(options, folder: pathlib.Path) -> list[pathlib.Path]:
    """Return the directories of the updates below a row's, in order."""
    numbered = range(1, len(options.new) + 1)
    return [folder / "encoder" / updates.UPDATES / f"{i:04d}" for i in numbered]


def find_place(options, name: str, seed: int | None = None) -> pathlib.Path:
    """Return the directory of a row, or of one of its seeds."""
    folder = pathlib.Path(options.root) / name
    return folder if seed is None else folder / seeds.folder(seed)


def find_finished(options) -> dict[str, list[pathlib.Path]]:
    """Map title of a row -> directories of its seeds that are evaluated."""
    names = {"no update": ("have", [None])}
    names |= {"a new encoder on all": ("retrain", options.retrain)}
    names |= {ROWS[name].title: (name, options.seeds) for name in options.rows}
    rows = {}
    for title, (name, numbers) in names.items():
        folders = [find_place(options, name, seed) for seed in numbers]
        if done := [x for x in folders if read_accuracies(options, x)]:
            rows[title] = done
    return rows


def read_accuracies(options, folder: pathlib.Path) -> list[float]:
    """Read kNN and probe on the old, kNN on each new set, their mean probe; or []."""
    knn, probe = [], []
    for name in list_sets(options):
        if not result_file.complete(folder / name):
            return []
        summary = result_file.summary(result_file.read_results(folder / name))
        knn.append(summary[KNN]["average_accuracy"])
        probe.append(summary[PROBE]["average_accuracy"])
    return [knn[0], probe[0], *knn[1:], sum(probe[1:]) / len(probe[1:])]


def write_table(options) -> str:
    """Write what is finished: mean and standard error over the seeds of each row."""
    _, *new = list_sets(options)
    columns = ["taught by", "seeds", "old kNN", "old probe"]
    columns += [f"{name} kNN" for name in new]
    columns += ["new probe", "neighbours kept", "old index", "would pass", "TFLOP"]
    lines = [f"| {' | '.join(columns)} |", "|---" * len(columns) + "|"]
    rows = find_finished(options)
    return "\n".join(lines + [write_line(options, *row) for row in rows.items()])


def write_line(options, title: str, folders: list[pathlib.Path]) -> str:
    """Write a line of the table.

    Args:
      options: the command line.
      title: title of the row.
      folders: directories of its seeds, each with updates, a run, or neither.
    """
    values = [read_accuracies(options, folder) for folder in folders]
    columns = zip(*values, strict=True)
    cells = [seeds.percent(seeds.mean_and_error(column)) for column in columns]
    workdirs = [x for folder in folders for x in update_folders(options, folder)]
    reports = [x for workdir in workdirs if (x := updates.read_report(workdir))]
    kept = index = passed = "-"
    if reports:
        overlaps = seeds.mean_and_error(r["drift"]["overlap"] for r in reports)
        kept, said = seeds.percent(overlaps), [r["index"] for r in reports]
        index = ", ".join(f"{said.count(x)} {x}" for x in VERDICTS if x in said)
        changes = [min(x["change"] for x in r["accuracy"].values()) for r in reports]
        passed = f"{sum(change >= -DROP for change in changes)} of {len(changes)}"
        costs = [report["cost"] for report in reports]
    else:
        results = [result_file.read_results(folder / "run") for folder in folders]
        costs = [x["cost"]["total"] for x in results]
    flops = sum(cost["flops"] for cost in costs) / len(folders) / 1e12
    cells = [title, str(len(folders)), *cells, kept, index, passed, f"{flops:.1f}"]
    return f"| {' | '.join(cells)} |".replace("+-", "±")


def draw(options, path: pathlib.Path) -> None:
    """Draw what each way has of the old and of the new, by nearest neighbours.

    A marker is empty for LoRA, and half full for LoRA with the last block.
    """
    figure = plots.make_figure(6.5, 4.2)
    axes, rows = figure.add_subplot(), find_finished(options)
    methods = {title: title.partition(",")[0] for title in rows}
    styles = plots.number_styles([*dict.fromkeys(methods.values())])
    for title, folders in rows.items():
        values = [read_accuracies(options, folder) for folder in folders]
        old = seeds.mean_and_error(100 * x[0] for x in values)
        new = seeds.mean_and_error(100 * np.mean(x[2:-1]) for x in values)
        fill = ("full", "none", "left")[("LoRA" in title) + ("last block" in title)]
        axes.errorbar(
            old["mean"],
            new["mean"],
            xerr=old["error"],
            yerr=new["error"],
            label=plots.escape_dollars(title),
            linestyle="none",
            fillstyle=fill,
            **plots.choose_style(styles[methods[title]]),
        )
    axes.set(xlabel="k-NN accuracy on the old images (%)")
    axes.set(ylabel="k-NN accuracy on the new images (%)")
    axes.set(title="up and to the right is better")
    plots.show_legend(axes, title="mean, standard error")
    plots.save_figure(figure, path)


def parser() -> argparse.ArgumentParser:
    """Make the command line."""
    made = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = made.add_argument
    add("--old", required=True, help="images that the encoder was trained on")
    add("--new", required=True, nargs="+", help="new images, one set per update")
    add("--seeds", nargs="+", type=int, default=[0, 1, 2])
    rows = "; without it all of the network"
    add("--rows", nargs="*", choices=ROWS, metavar="ROW", help=f"{[*ROWS]}{rows}")
    add("--network", choices=("vit", "resnet"), default="vit", help="of the encoder")
    of = "update the exported encoder, or the run with its heads, method and optimizer"
    add("--of", choices=("encoder", "run"), default="encoder", help=of)
    add("--epochs", type=int, default=3, help="of an update")
    add("--batch", type=int, default=128, help="of an update")
    add("--lr", type=float, default=1e-3, help="of an update, at its peak")
    seeds = "of new encoders on all sets"
    add("--retrain", nargs="*", type=int, default=[], metavar="SEED", help=seeds)
    add("--root", default="runs/keep_fresh", help="folder of all run directories")
    add("--debug", action="store_true", help="train encoders for seconds, on 16 pixels")
    return made


def main(argv=None) -> str:
    """Train and evaluate all encoders; print and return the table."""
    options = parser().parse_args(argv)
    allowed = list_rows(options.network)
    options.rows = allowed if options.rows is None else options.rows
    if other := sorted({*options.rows}.difference(allowed)):
        parser().error(f"--rows {other}: --network={options.network} has {allowed}")
    sets, have = list_sets(options), find_place(options, "have")
    if len(sets) <= len(options.new):
        parser().error(f"--new {options.new}: must have names of their own, not old")
    run(options, "", {"data": make_section(options.old)}, have / "run")
    if not (have / "encoder" / encoder_folder.CARD).exists():
        export.export(str(have / "run"), str(have / "encoder"), force=True)
    evaluate(options, have, have / "encoder")
    for seed in options.seeds:
        for name in options.rows:
            teach(options, name, seed, have / options.of)
    for seed in options.retrain:
        folder = find_place(options, "retrain", seed)
        sections = [make_section(path) for path in sets.values()]
        changes = {"seed": seed, "data": {"name": "joined", "sets": sections}}
        run(options, f"sets={len(sets)}", changes, folder / "run")
        evaluate(options, folder, folder / "run")
    table = write_table(options)
    print(table)
    return table


if __name__ == "__main__":
    main()
