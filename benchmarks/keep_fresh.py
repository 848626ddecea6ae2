r"""An encoder that is there, taught new images in several ways: its runs, a table.

  python benchmarks/keep_fresh.py --old=tiny_imagenet20.npz --new=pacs64.npz

trains the encoder of configs/keep_fresh.py on the images of --old and exports it. Each
row of ROWS then teaches it those of --new, without labels, by `jaxcl update`, once with
each seed; "retrain", the last, trains another encoder on all sets. Of several sets
after --new each is an update of its own, one after another. Every encoder is judged on
the test parts of all sets when all is taught. After each step ROOT/table.md is written
anew, with the columns of docs/updating.md; at the end ROOT/table.png shows old
against new. The same command goes on where it was stopped.

A set is an .npz file or a directory that `jaxcl convert` wrote.
"""

import argparse
import pathlib
import shlex
import shutil
import subprocess
import sys
from typing import NamedTuple

from jaxcl import plots, storage
from jaxcl.errors import Refused
from jaxcl.index.ways import VERDICTS
from jaxcl.report import numbers
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
    """The command; returns 0, or the exit code of the first step that failed.

    It is 2 if an argument is wrong.
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
    """The options of the command."""
    made = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    made.add_argument(
        "--old", required=True, help="images that the encoder was trained on"
    )
    made.add_argument(
        "--new", required=True, nargs="+", help="new images, one set per update"
    )
    made.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    made.add_argument("--rows", nargs="+", default=[*ROWS], choices=ROWS, metavar="ROW")
    made.add_argument("--epochs", type=int, default=3, help="of an update")
    made.add_argument(
        "--lr", type=float, default=1e-3, help="of an update, at its peak"
    )
    made.add_argument(
        "--retrain",
        nargs="*",
        type=int,
        metavar="SEED",
        help="seeds of new encoders on all sets; empty: none; default: as --seeds",
    )
    made.add_argument(
        "--root", default="runs/keep_fresh", help="folder of all run directories"
    )
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
    """What is finished: a line of each row, mean and standard error over its seeds."""
    _, *new = sets(options)
    columns = ["taught by", "seeds", "old kNN", "old probe"]
    columns += [f"{name} kNN" for name in new]
    columns += ["new probe", "neighbours kept", "old index", "would pass"]
    columns += ["TFLOP", "minutes"]
    lines = ["| " + " | ".join(columns) + " |", "|---" * len(columns) + "|"]
    rows = finished(options)
    lines += [line(options, title, folders) for title, folders in rows.items()]
    paired = differences(options, rows)
    return "\n".join([*lines, *([""] if paired else []), *paired])


def finished(options) -> dict[str, dict[int | None, pathlib.Path]]:
    """Title of each row -> its seeds that are judged -> their directories."""
    rows = {"no update": {None: place(options, "have")}}
    again = options.seeds if options.retrain is None else options.retrain
    rows["a new encoder on all"] = {
        seed: place(options, "retrain", seed) for seed in again
    }
    for name in options.rows:
        folders = {seed: place(options, name, seed) for seed in options.seeds}
        rows[ROWS[name].title] = folders
    judged = {
        title: {
            seed: folder
            for seed, folder in folders.items()
            if accuracies(options, folder)
        }
        for title, folders in rows.items()
    }
    return {title: folders for title, folders in judged.items() if folders}


def draw(options, path: pathlib.Path) -> None:
    """Draw what each way has of the old and of the new, by nearest neighbours."""
    points = {}
    for title, folders in finished(options).items():
        values = [accuracies(options, folder) for folder in folders.values()]
        old = seeds.mean_and_error(x[0] for x in values)
        new = seeds.mean_and_error(sum(x[2:-1]) / len(x[2:-1]) for x in values)
        points[title] = tuple(
            100 * (x or 0.0)
            for x in (old["mean"], old["error"], new["mean"], new["error"])
        )
    draw_points(points, path)


def draw_points(points: dict[str, tuple], path: pathlib.Path) -> None:
    """Draw title -> (mean and error on the old, mean and error on the new), percent.

    The colour is the method's. A marker is full if all weights were trained, empty for
    LoRA, half full for LoRA with the last block.
    """
    figure = plots.make_figure(6.5, 4.2)
    axes = figure.add_subplot()
    method_of = {title: title.partition(",")[0] for title in points}
    numbers = plots.number_styles([*dict.fromkeys(method_of.values())])
    for title, (old, old_error, new, new_error) in points.items():
        fills = ("full", "none", "left")
        axes.errorbar(
            old,
            new,
            xerr=old_error,
            yerr=new_error,
            label=plots.escape_dollars(title),
            linestyle="none",
            markersize=8,
            fillstyle=fills[("LoRA" in title) + ("last block" in title)],
            **plots.choose_style(numbers[method_of[title]]),
        )
    axes.set(xlabel="k-NN accuracy on the old images (%)")
    axes.set(ylabel="k-NN accuracy on the new images (%)")
    axes.set(title="up and to the right is better")
    axes.grid(color="0.9")
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
    """A line of the table.

    Args:
      options: of the command.
      title: of the row.
      folders: of its seeds, each with updates, a run, or neither.
    """
    values = [accuracies(options, folder) for folder in folders.values()]
    shown = [
        seeds.percent(seeds.mean_and_error(column))
        for column in zip(*values, strict=True)
    ]
    workdirs = [
        x for folder in folders.values() for x in update_folders(options, folder)
    ]
    verdicts = [workdir / updates.VERDICT for workdir in workdirs]
    reports = [storage.read_object(path) for path in verdicts if path.exists()]
    kept = index = passed = "-"
    if reports:
        kept = seeds.percent(
            seeds.mean_and_error(r["drift"]["overlap"] for r in reports)
        )
        said = [report["index"] for report in reports]
        index = ", ".join(f"{said.count(x)} {x}" for x in VERDICTS if x in said)
        changes = [min(x["change"] for x in r["accuracy"].values()) for r in reports]
        passed = f"{sum(change >= -DROP for change in changes)} of {len(changes)}"
        costs = [report["cost"] for report in reports]
    else:
        runs = [folder / "run" for folder in folders.values()]
        costs = [result_file.read_results(run)["cost"]["total"] for run in runs]
    flops = sum(cost["flops"] for cost in costs) / len(folders) / 1e12
    minutes = sum(cost["train_seconds"] for cost in costs) / len(folders) / 60
    cells = [title, str(len(folders)), *shown, kept, index, passed]
    cells += [f"{flops:.1f}", f"{minutes:.1f}"]
    return "| " + " | ".join(cells).replace("+-", "±") + " |"


def differences(options, rows: dict[str, dict]) -> list[str]:
    """A table of each row minus the first of the updates, paired by seed.

    Each cell is the mean difference with the 95 % interval of Student's t. There is no
    table of one row.
    """
    taught = [title for row in ROWS.values() if (title := row.title) in rows]
    columns = ["old kNN", "old probe", "new kNN", "new probe"]
    if len(taught) < 2:
        return []
    lines = [f"| against {taught[0]} | " + " | ".join(columns) + " |"]
    lines.append("|---" * (1 + len(columns)) + "|")

    def measured(folder):
        old, probe, *new, new_probe = accuracies(options, folder)
        return old, probe, sum(new) / len(new), new_probe

    for title in taught[1:]:
        both = [seed for seed in rows[title] if seed in rows[taught[0]]]
        pairs = [[measured(rows[t][seed]) for t in (title, taught[0])] for seed in both]
        cells = [
            _interval(mine[i] - first[i] for mine, first in pairs)
            for i in range(len(columns))
        ]
        lines.append("| " + " | ".join([title, *cells]) + " |")
    return lines


def _interval(values) -> str:
    """Points: a mean, and its interval where there are two values or more."""
    mean, low, high, _ = numbers.estimate_mean(values)
    if mean is None:
        return "-"
    ends = "" if low is None else f" ({100 * low:.1f} to {100 * high:.1f})"
    return f"{100 * mean:+.1f}{ends}"


if __name__ == "__main__":
    sys.exit(main())
