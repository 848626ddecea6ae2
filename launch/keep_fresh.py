r"""An encoder that is there, taught new images in several ways: its runs, a table.

  python launch/keep_fresh.py --old=tiny_imagenet20.npz --new=pacs64.npz --seeds 0 1 2

trains the encoder of configs/keep_fresh.py on the images of --old and exports it. Each
row of ROWS then teaches it those of --new, without labels, by jaxcl.update, once with
each seed; "retrain", the last, trains another encoder on both. Every encoder is judged
on the test parts of both sets. After each step ROOT/table.md is written anew, with the
columns of docs/keep_fresh.md; at the end ROOT/table.png shows old against new. The same
command goes on where it was stopped.
"""

import argparse
import pathlib
import shlex
import shutil
import subprocess
import sys
from typing import NamedTuple

import sweep

from jaxcl import plots
from jaxcl.data import storage
from jaxcl.run import folder as folder_lib
from jaxcl.run import results as results_lib
from jaxcl.run import seeds
from jaxcl.update import lineage

CONFIG = "configs/keep_fresh.py"
UPDATE = "updates/0001"
SETS = ("old", "new")
JUDGES = ("knn/class_incremental", "linear/class_incremental")
DROP = 0.02  # what the default limit of an update allows
# Of every update, beside the epochs and the rate, which all rows share, too.
SAME = (
    "--config.train.batch_size=128",
    "--config.limits.accuracy_drop=1.0",  # or the checkpoints are gone
)
_WHOLE = ("--config.train.tuning.lora_rank=0", "--config.train.tuning.open_layers=0")
HEAD = (
    "| taught by | seeds | old kNN | old probe | new kNN | new probe | neighbours kept "
    "| would pass | TFLOP | minutes |",
    "|---|---|---|---|---|---|---|---|---|---|",
)


class Row(NamedTuple):
    """A way to teach the encoder new images."""

    title: str
    strategy: str
    changes: tuple[str, ...] = ()  # flags of jaxcl.update


ROWS = {
    "continue": Row("going on, all weights", "finetune", _WHOLE),
    "adapters": Row("going on, adapters and the last block", "finetune"),
    "less_forget": Row("Less-Forget, all weights", "less_forget", _WHOLE),
    "cassle": Row("CaSSLe, all weights", "cassle", _WHOLE),
    "pnr": Row("PNR, all weights", "pnr", _WHOLE),
    "cassle_adapters": Row("CaSSLe, adapters: the default", "cassle"),
}


class Step(NamedTuple):
    """A command, and the file that is there when it has ended well."""

    words: tuple[str, ...]  # after `python -m`
    ends: pathlib.Path
    wants: tuple[pathlib.Path, pathlib.Path] | None = None  # a folder and its copy


def main(argv=None) -> int:
    """The command; returns 0, or the exit code of the first step that failed."""
    options = parser().parse_args(argv)
    root = pathlib.Path(options.root)
    for step in steps(options):
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
    made.add_argument("--old", required=True, help=".npz: what the encoder is made of")
    made.add_argument("--new", required=True, help=".npz: what it is taught")
    made.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    made.add_argument("--rows", nargs="+", default=[*ROWS], choices=ROWS, metavar="ROW")
    made.add_argument("--epochs", type=int, default=3, help="of an update")
    made.add_argument("--lr", type=float, default=2e-3, help="of an update")
    made.add_argument("--no-retrain", action="store_true", help="no second encoder")
    made.add_argument("--root", default="runs/keep_fresh", help="of all directories")
    made.add_argument("--dry-run", action="store_true", help="print the commands")
    made.add_argument("--python", default=sys.executable)
    return made


def steps(options) -> list[Step]:
    """All commands, in order: the encoder, each row's seeds, the second encoder."""
    have, retrain = place(options, "have"), place(options, "retrain")
    flags = [f"--config.data.path={options.old}"]
    made = [
        Step(_main(CONFIG, have / "run", flags), have / "run" / results_lib.RESULTS),
        Step(
            ("jaxcl.export", f"--run={have}/run", f"--out={have}/encoder"),
            have / "encoder" / folder_lib.CARD,
        ),
        *_judged(options, have, have / "encoder"),
    ]
    for seed in options.seeds:
        for name in options.rows:
            folder = place(options, name, seed)
            made += [_update(options, ROWS[name], seed, folder)]
            made += _judged(options, folder, folder / "encoder" / UPDATE)
    if options.no_retrain:
        return made
    paths = enumerate((options.old, options.new))
    flags = [f"--config.data.sets[{i}].path={path}" for i, path in paths]
    run = retrain / "run"
    made += [Step(_main(f"{CONFIG}:both", run, flags), run / results_lib.RESULTS)]
    return [*made, *_judged(options, retrain, run)]


def done(step: Step) -> bool:
    """Whether nothing is left of a step; a run writes its results task by task."""
    if step.ends.name == results_lib.RESULTS:
        return sweep.finished(step.ends.parent)
    return step.ends.exists()


def place(options, name: str, seed: int | None = None) -> pathlib.Path:
    """The directory of a row, or of one of its seeds."""
    folder = pathlib.Path(options.root) / name
    return folder if seed is None else folder / seeds.folder(seed)


def _main(config, workdir, flags) -> tuple[str, ...]:
    return ("jaxcl.main", f"--config={config}", f"--workdir={workdir}", *flags)


def _update(options, row, seed, folder) -> Step:
    """Teach a copy of the encoder, since updates of one folder follow each other."""
    have, own = place(options, "have") / "encoder", folder / "encoder"
    words = [f"--run={own}", f"--data={options.new}"]
    words += [f"--test={options.old}", f"--old={options.old}", *SAME, *row.changes]
    words += [f"--config.train.epochs={options.epochs}"]
    words += [f"--config.train.optimizer.lr={options.lr}"]
    words += [f"--config.train.method.strategy={row.strategy}"]
    words += [f"--config.train.seed={seed}"]
    return Step(("jaxcl.update", *words), own / UPDATE / lineage.VERDICT, (have, own))


def _judged(options, folder, encoder) -> list[Step]:
    """Judge an encoder, or that of a run directory, on both sets."""
    made = []
    for name in SETS:
        workdir = folder / name
        flags = [f"--config.checkpoint={encoder}"]
        flags += [f"--config.data.path={getattr(options, name)}"]
        words = _main(f"{CONFIG}:judge", workdir, flags)
        made.append(Step(words, workdir / results_lib.RESULTS))
    return made


def table(options) -> str:
    """What is finished: a line of each row, mean and standard error over its seeds."""
    lines = [line(title, folders) for title, folders in finished(options).items()]
    return "\n".join([*HEAD, *lines])


def finished(options) -> dict[str, list[pathlib.Path]]:
    """Title of each row that has seeds which are judged -> their directories."""
    rows = {"nothing: as it came": [place(options, "have")]}
    rows["both from anew"] = [place(options, "retrain")]
    for name in options.rows:
        rows[ROWS[name].title] = [place(options, name, seed) for seed in options.seeds]
    judged = {title: [f for f in rows[title] if accuracies(f)] for title in rows}
    return {title: folders for title, folders in judged.items() if folders}


def draw(options, path: pathlib.Path) -> None:
    """Draw what each way has of the old and of the new, by nearest neighbours."""
    figure = plots.figure_of(6.5, 4.2)
    axes = figure.add_subplot()
    for number, (title, folders) in enumerate(finished(options).items()):
        values = [accuracies(folder) for folder in folders]
        old, new = (seeds.spread(x[place] for x in values) for place in (0, 2))
        # Hollow where the colours begin anew.
        fill = "full" if number < len(plots.COLOURS) else "none"
        axes.errorbar(
            100 * old["mean"],
            100 * new["mean"],
            xerr=100 * (old["error"] or 0.0),
            yerr=100 * (new["error"] or 0.0),
            label=title,
            linestyle="none",
            fillstyle=fill,
            **plots.style_of(number),
        )
    axes.set(xlabel="old images, nearest neighbours (%)")
    axes.set(ylabel="new images, nearest neighbours (%)")
    axes.grid(color="0.9")
    plots.legend(axes, title="mean, standard error")
    plots.save(figure, path)


def accuracies(folder: pathlib.Path) -> list[float]:
    """Of each of SETS and JUDGES in turn; [] where one is missing."""
    values = []
    for name in SETS:
        if not (folder / name / results_lib.RESULTS).exists():
            return []
        summary = results_lib.summary(results_lib.read_results(folder / name))
        values += [summary[judge]["average_accuracy"] for judge in JUDGES]
    return values


def line(title: str, folders: list[pathlib.Path]) -> str:
    """A line of the table.

    Args:
      title: of the row.
      folders: of its seeds, each with an update, a run, or neither.
    """
    columns = zip(*map(accuracies, folders), strict=True)
    shown = [seeds.percent(seeds.spread(column)) for column in columns]
    updates = [folder / "encoder" / UPDATE / lineage.VERDICT for folder in folders]
    reports = [storage.read_object(path) for path in updates if path.exists()]
    kept = passed = "-"
    if reports:
        kept = seeds.percent(seeds.spread(r["drift"]["overlap"] for r in reports))
        changes = [min(x["change"] for x in r["accuracy"].values()) for r in reports]
        passed = f"{sum(change >= -DROP for change in changes)} of {len(changes)}"
        costs = [report["cost"] for report in reports]
    else:
        costs = [results_lib.read_results(folders[0] / "run")["cost"]["total"]]
    flops = sum(cost["flops"] for cost in costs) / len(costs) / 1e12
    minutes = sum(cost["train_seconds"] for cost in costs) / len(costs) / 60
    cells = [title, str(len(folders)), *shown, kept, passed]
    cells += [f"{flops:.1f}", f"{minutes:.1f}"]
    return "| " + " | ".join(cells).replace("+-", "±") + " |"


if __name__ == "__main__":
    sys.exit(main())
