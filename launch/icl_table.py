r"""ICL and what it is compared with, from the same old encoders: runs and tables.

  python launch/icl_table.py --data=mutag.npz --growths 0.3 0.5 0.7 --seeds=5

trains, for each growth, an encoder of each seed on the old items, and lets each row of
ROWS go on from them, one after another. Whenever a row ends, ROOT/table.md is written
anew from all that is finished: for each growth the table of launch/speedup.py. Its
target is `retrain`'s loss of all items plus a share of what it gains over the frozen
encoder. The same command goes on where it was stopped, and a larger one keeps what is
there: a finished run is not trained again.
"""

import argparse
import itertools
import pathlib
import sys
from typing import NamedTuple

import speedup
import sweep

from jaxcl.run import seeds

BASELINE, FROZEN, SCALAR = "retrain", "frozen", "objective/loss"
OLD = "old"  # the encoder that all rows begin with


class Row(NamedTuple):
    """A way to go on."""

    variant: str  # what follows the colon of the config
    changes: tuple[tuple[str, str], ...] = ()  # options and values


def _at_rate(rate: float) -> Row:
    changes = (f"config.method.{name}_lr" for name in ("fixed", "inner"))
    return Row("no_lrl_sgd", tuple((path, f"{rate:g}") for path in changes))


def _kept(variant: str) -> Row:
    """Add the old anchors' NCE-I: the loss of retraining, by Theorem 3."""
    return Row(variant, (("config.method.keep", "1"),))


ROWS = {
    FROZEN: Row(FROZEN),
    BASELINE: Row(BASELINE),
    "retrain_sgd": Row("retrain_sgd"),
    "continue": Row("continue"),
    "continue_sgd": Row("continue_sgd"),
    "icl": Row("icl"),
    "no_lrl": Row("no_lrl"),
    "sgd-0.003": _at_rate(0.003),
    "sgd-0.03": _at_rate(0.03),
    "sgd-0.1": _at_rate(0.1),
    "no_meta": Row("no_meta"),
    "no_both": Row("no_both"),
    "no_both_keep": _kept("no_both"),
    "no_lrl_keep": _kept("no_lrl"),
    "finetune": Row("finetune"),
    "random": Row("random"),
}


def planned(options) -> dict[tuple[float, str], sweep.Run]:
    """(growth, name of a row, or OLD) -> the command that runs all seeds of it.

    All seeds are one command because they share the compiled step. The old encoders
    come before the rows that begin with them.
    """
    runs: dict[tuple[float, str], sweep.Run] = {}
    for growth in options.growths:
        for name in (OLD, *options.rows):
            row = ROWS.get(name, Row(OLD))
            config = _config(options, row.variant)
            changes = (*_common(options, growth), *row.changes)
            folder = pathlib.Path(options.root) / sweep.name_of(config, changes)
            begins = ()
            if name != OLD:
                begins = (("config.start", str(runs[growth, OLD].folder)),)
            aside = (("config.seeds", str(options.seeds)), *begins)
            overrides = (("config.data.path", options.data), *changes, *aside)
            runs[growth, name] = sweep.Run(config, overrides, 0, folder)
    return runs


def _config(options, variant: str) -> str:
    path, _, words = options.config.partition(":")
    return f"{path}:{variant},{words}" if words else f"{path}:{variant}"


def _common(options, growth: float) -> tuple[tuple[str, str], ...]:
    """Options and values that all runs of a growth have in common."""
    return (
        ("config.scenario.growth", f"{growth:g}"),
        ("config.patience", str(options.patience)),
        ("config.epochs", str(options.epochs)),
        ("config.log_every", "1"),  # for the rates
        *(tuple(change.split("=", 1)) for change in options.set),
    )


def places(run: sweep.Run, options) -> list[pathlib.Path]:
    """The directories of the seeds of a run."""
    return [run.folder / seeds.folder(seed) for seed in range(options.seeds)]


def done(run: sweep.Run, options) -> bool:
    """Whether all seeds of a run are finished."""
    return all(map(sweep.finished, places(run, options)))


def finished(options, runs) -> list[speedup.Run]:
    """The finished seeds of each row for which what others need is finished, too."""
    found = []
    for growth, name in runs:
        needed = [places(runs[growth, x], options) for x in (name, BASELINE, FROZEN)]
        for of_seed in zip(*needed, strict=True):
            if name != OLD and all(map(sweep.finished, of_seed)):
                found += speedup.read(name, of_seed[0], task=1, scalar=SCALAR)
    return found


def table(options, runs: dict[tuple[float, str], sweep.Run]) -> str:
    """The tables of every growth that has a seed to compare, under a heading each."""
    done = finished(options, runs)
    if not done:
        return "Nothing to compare is finished."
    groups = speedup.compared(done, BASELINE, within=options.within, frozen=FROZEN)
    parts = [[f"## Growth {x['growth']:g}", speedup.text(x)] for x in groups]
    return "\n\n".join(itertools.chain(*parts))


def parser() -> argparse.ArgumentParser:
    """The options of the command."""
    made = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add = made.add_argument
    add("--data", required=True, help="config.data.path of all runs")
    add("--config", default="configs/icl_proteins.py", help="with :small, of images")
    add("--growths", nargs="+", type=float, default=[0.3, 0.5, 0.7], metavar="G")
    add("--patience", type=int, default=50, help="epochs without a lower loss")
    add("--epochs", type=int, default=1000, help="of a task, at most")
    add("--set", nargs="+", default=[], metavar="PATH=VALUE", help="for all runs")
    add("--within", type=float, default=0.1, help="the target, in shares of the gain")
    add("--seeds", type=int, default=5, help="how many, from 0 on")
    sweep.add_options(made, ROWS, "runs/icl_table")
    return made


def main(argv=None) -> int:
    """The command; exit codes are those of launch/sweep.py."""
    options = parser().parse_args(argv)
    lacking = [name for name in (BASELINE, FROZEN) if name not in options.rows]
    wrong = [change for change in options.set if not change.startswith("config.")]
    if lacking:
        told = f"--rows: must have {lacking[0]}, with which the others are compared"
    elif wrong or any("=" not in change for change in options.set):
        told = f"--set {' '.join(options.set)}: must be config.PATH=VALUE"
    elif options.seeds < 2:
        told = f"--seeds={options.seeds}: must be 2 or more, for there are intervals"
    else:
        runs = planned(options)
        return sweep.with_table(
            [*runs.values()],
            options,
            lambda: table(options, runs),
            lambda run: done(run, options),
        )
    print(f"jaxcl: {told}", file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main())
