r"""Teach an encoder new images in several ways: what each keeps and learns, a table.

  python benchmarks/trials/keep_fresh.py --old=tiny_imagenet20.npz --new=pacs64.npz

trains the encoder of configs/keep_fresh.py on the images of --old and exports it. Each
row of ROWS then teaches it those of --new, without labels, by `jaxcl update`, once with
each seed; "retrain", the last, trains another encoder on all sets. Of several sets
after --new each is an update of its own, one after another. Every encoder is evaluated
on the test parts of all sets at the end. ROOT/table.md is written after each step, with
the columns of docs/updating.md, and ROOT/table.png at the end: old against new. The
same command resumes.

A set is an .npz file or a directory that `jaxcl convert` wrote.
"""

import argparse
import pathlib
import shlex
import shutil
import subprocess
import sys
from typing import NamedTuple

import numpy as np

from jaxcl import plots
from jaxcl.errors import Refused
from jaxcl.index.ways import VERDICTS
from jaxcl.run import encoder_folder, result_file, seeds, updates

CONFIG = "configs/keep_fresh.py"
KNN, PROBE = "knn/class_incremental", "linear/class_incremental"
DROP = 0.02  # what the default limit of an update allows
# Of every update, beside the epochs and the rate, which all rows share, too.
SAME = (
    "--config.train.batch_size=128",
    "--config.train.scale_lr=False",
    "--config.limits.accuracy_drop=1.0",  # or the checkpoints are gone
)
_WHOLE = ("--config.train.tuning.lora_rank=0", "--config.train.tuning.open_layers=0")


class Row(NamedTuple):
    """A way to teach the encoder new images."""

    title: str
    strategy: str
    changes: tuple[str, ...] = ()  # options of `jaxcl update`


ROWS = {
    "continue": Row("fine-tuning, all weights", "finetune", _WHOLE),
    "lora": Row("fine-tuning, LoRA", "finetune", _WHOLE[1:]),
    "adapters": Row("fine-tuning, LoRA and the last block", "finetune"),
    "less_forget": Row("Less-Forget, all weights", "less_forget", _WHOLE),
    "cassle": Row("CaSSLe, all weights", "cassle", _WHOLE),
    "pnr": Row("PNR, all weights", "pnr", _WHOLE),
    "cassle_adapters": Row("CaSSLe, LoRA and the last block", "cassle"),
}


class Step(NamedTuple):
    """A command, and the file that is there when it has ended well."""

    words: tuple[str, ...]  # after `python -m`
    ends: pathlib.Path
    wants: tuple[pathlib.Path, pathlib.Path] | None = None  # a folder and its copy


def main(argv=None) -> int:
    """Do all steps; return the exit code of the first that failed, or 0.

    The code is 2 if an argument is wrong.
    """
    options = parser().parse_args(argv)
    root = pathlib.Path(options.root)
    try:
        wanted = steps(options)
    except Refused as error:
        print(f"jaxcl: {error}", file=sys.stderr)
        return 2
    for step in wanted:
        if done(step):
            continue
        command = [options.python, "-m", *step.words]
        print(shlex.join(command), flush=True)
        if options.dry_run:
            continue
        if step.wants and not step.wants[1].exists():
            shutil.copytree(*step.wants)
        code = subprocess.run(command, stdin=subprocess.DEVNULL).returncode
        if code:
            print(f"keep_fresh.py: exit code {code}", file=sys.stderr)
            return code
        (root / "table.md").write_text(table(options) + "\n")
    if not options.dry_run:
        print(table(options))
        draw(options, root / "table.png")
    return 0


def parser() -> argparse.ArgumentParser:
    """Make the command line."""
    made = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    old = "images that the encoder was trained on"
    made.add_argument("--old", required=True, help=old)
    new = "new images, one set per update"
    made.add_argument("--new", required=True, nargs="+", help=new)
    made.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    made.add_argument("--rows", nargs="+", default=[*ROWS], choices=ROWS, metavar="ROW")
    made.add_argument("--epochs", type=int, default=3, help="of an update")
    peak = "of an update, at its peak"
    made.add_argument("--lr", type=float, default=1e-3, help=peak)
    made.add_argument(
        "--retrain",
        nargs="*",
        type=int,
        metavar="SEED",
        help="seeds of new encoders on all sets; empty: none; default: as --seeds",
    )
    root = "folder of all run directories"
    made.add_argument("--root", default="runs/keep_fresh", help=root)
    made.add_argument("--dry-run", action="store_true", help="print the commands")
    made.add_argument("--python", default=sys.executable)
    return made


def steps(options) -> list[Step]:
    """All commands, in order: the encoder, each row's seeds, encoders from all sets."""
    have = place(options, "have")
    flags = _read("config.data", options.old)
    made = [
        Step(_main(CONFIG, have / "run", flags), have / "run" / result_file.RESULTS),
        Step(
            ("jaxcl", "export", f"--run={have}/run", f"--out={have}/encoder"),
            have / "encoder" / encoder_folder.CARD,
        ),
        *_judged(options, have, have / "encoder"),
    ]
    for seed in options.seeds:
        for name in options.rows:
            folder = place(options, name, seed)
            made += _updates(options, ROWS[name], seed, folder)
            made += _judged(options, folder, update_folders(options, folder)[-1])
    paths = sets(options).values()
    for seed in options.seeds if options.retrain is None else options.retrain:
        run = place(options, "retrain", seed) / "run"
        flags = [f"--config.seed={seed}"]
        for i, path in enumerate(paths):
            flags += _read(f"config.data.sets[{i}]", path)
        words = _main(f"{CONFIG}:sets={len(paths)}", run, flags)
        made.append(Step(words, run / result_file.RESULTS))
        made += _judged(options, run.parent, run)
    return made


def sets(options) -> dict[str, str]:
    """Name of each set -> its path: "old", and "new" or what several are called.

    Raises Refused if two of several have one name.
    """
    if len(options.new) == 1:
        return {"old": options.old, "new": options.new[0]}
    new = {pathlib.Path(path).stem: path for path in options.new}
    if len(new) < len(options.new) or "old" in new:
        raise Refused(f"--new {options.new}: must have names of their own, not old")
    return {"old": options.old, **new}


def update_folders(options, folder: pathlib.Path) -> list[pathlib.Path]:
    """The directories of the updates in a row's, in order."""
    numbered = range(1, len(options.new) + 1)
    return [folder / "encoder" / updates.UPDATES / f"{i:04d}" for i in numbered]


def done(step: Step) -> bool:
    """Whether nothing is left of a step; a run writes its results task by task."""
    if step.ends.name == result_file.RESULTS:
        return result_file.complete(step.ends.parent)
    return step.ends.exists()


def place(options, name: str, seed: int | None = None) -> pathlib.Path:
    """The directory of a row, or of one of its seeds."""
    folder = pathlib.Path(options.root) / name
    return folder if seed is None else folder / seeds.folder(seed)


def _main(config, workdir, flags) -> tuple[str, ...]:
    return ("jaxcl.main", f"--config={config}", f"--workdir={workdir}", *flags)


def _read(section, path) -> list[str]:
    """The flags by which a section reads the set at a path."""
    name = "npz" if path.endswith(".npz") else "arrays"
    return [f"--{section}.name={name}", f"--{section}.path={path}"]


def _updates(options, row, seed, folder) -> list[Step]:
    """Teach a copy of the encoder one set after another."""
    have, own = place(options, "have") / "encoder", folder / "encoder"
    made = []
    for path, workdir in zip(options.new, update_folders(options, folder), strict=True):
        words = [f"--run={own}", f"--data={path}"]
        words += [f"--test={options.old}", f"--old={options.old}", *SAME, *row.changes]
        words += [f"--config.train.epochs={options.epochs}"]
        words += [f"--config.train.optimizer.lr={options.lr}"]
        words += [f"--config.train.method.strategy={row.strategy}"]
        words += [f"--config.train.seed={seed}"]
        verdict = workdir / updates.VERDICT
        made.append(Step(("jaxcl", "update", *words), verdict, (have, own)))
    return made


def _judged(options, folder, encoder) -> list[Step]:
    """Judge an encoder, or that of a run directory, on all sets."""
    made = []
    for name, path in sets(options).items():
        workdir = folder / name
        flags = [f"--config.checkpoint={encoder}", *_read("config.data", path)]
        words = _main(f"{CONFIG}:judge", workdir, flags)
        made.append(Step(words, workdir / result_file.RESULTS))
    return made


def table(options) -> str:
    """Write what is finished: mean and standard error over the seeds of each row."""
    _, *new = sets(options)
    columns = ["taught by", "seeds", "old kNN", "old probe"]
    columns += [f"{name} kNN" for name in new]
    columns += ["new probe", "neighbours kept", "old index", "would pass", "TFLOP"]
    lines = [f"| {' | '.join(columns)} |", "|---" * len(columns) + "|"]
    rows = finished(options)
    return "\n".join(lines + [line(options, *row) for row in rows.items()])


def finished(options) -> dict[str, dict[int | None, pathlib.Path]]:
    """Map title of a row -> seed -> its directory, of what is evaluated."""
    again = options.seeds if options.retrain is None else options.retrain
    names = {"a new encoder on all": ("retrain", again)}
    names |= {ROWS[name].title: (name, options.seeds) for name in options.rows}
    rows = {"no update": {None: place(options, "have")}}
    for title, (name, numbers) in names.items():
        rows[title] = {seed: place(options, name, seed) for seed in numbers}
    for title, folders in rows.items():
        done = {k: x for k, x in folders.items() if accuracies(options, x)}
        rows[title] = done
    return {title: folders for title, folders in rows.items() if folders}


def draw(options, path: pathlib.Path) -> None:
    """Draw what each way has of the old and of the new, by nearest neighbours.

    A marker is empty for LoRA, and half full for LoRA with the last block.
    """
    figure = plots.make_figure(6.5, 4.2)
    axes, rows = figure.add_subplot(), finished(options)
    methods = {title: title.partition(",")[0] for title in rows}
    styles = plots.number_styles([*dict.fromkeys(methods.values())])
    for title, folders in rows.items():
        values = [accuracies(options, folder) for folder in folders.values()]
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


def accuracies(options, folder: pathlib.Path) -> list[float]:
    """kNN and probe on the old, kNN on each of the new, their mean probe; or []."""
    knn, probe = [], []
    for name in sets(options):
        if not (folder / name / result_file.RESULTS).exists():
            return []
        summary = result_file.summary(result_file.read_results(folder / name))
        knn.append(summary[KNN]["average_accuracy"])
        probe.append(summary[PROBE]["average_accuracy"])
    return [knn[0], probe[0], *knn[1:], sum(probe[1:]) / len(probe[1:])]


def line(options, title: str, folders: dict[int | None, pathlib.Path]) -> str:
    """Write a line of the table.

    Args:
      options: the command line.
      title: title of the row.
      folders: directories of its seeds, each with updates, a run, or neither.
    """
    values = [accuracies(options, folder) for folder in folders.values()]
    columns = zip(*values, strict=True)
    cells = [seeds.percent(seeds.mean_and_error(column)) for column in columns]
    workdirs = [
        x for folder in folders.values() for x in update_folders(options, folder)
    ]
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
        runs = [folder / "run" for folder in folders.values()]
        costs = [result_file.read_results(run)["cost"]["total"] for run in runs]
    flops = sum(cost["flops"] for cost in costs) / len(folders) / 1e12
    cells = [title, str(len(folders)), *cells, kept, index, passed, f"{flops:.1f}"]
    return f"| {' | '.join(cells)} |".replace("+-", "±")


if __name__ == "__main__":
    sys.exit(main())
