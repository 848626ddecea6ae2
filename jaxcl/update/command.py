"""Teach a run's encoder new images: `python -m jaxcl.update --run=RUN --data=FOLDER`.

The images, which need no labels, are the next task of the run: its method goes on with
its last state. Then the encoder is compared with the one before, and is accepted or
rolled back by the limits of the config. What an update leaves is a run directory,
RUN/updates/0001 and so on, with `update.json` in it; the next update goes on from the
last that was accepted. RUN itself does not change.

Exit codes: 0 accepted, 3 rolled back, 1, 2 and 75 as those of `jaxcl.main`.
"""

import dataclasses
import json
import time
from typing import NamedTuple

import ml_collections
import numpy as np
from absl import flags
from etils import epath
from ml_collections import config_flags

from jaxcl import schema
from jaxcl.config import build, command
from jaxcl.run import finish, train, transfer
from jaxcl.run import results as results_lib
from jaxcl.update import drift, lineage

ROLLED_BACK = 3
BEFORE, AFTER = "before", "after"
VERDICTS = ("keep", "rotate", "rebuild")  # of an index, the best first


@dataclasses.dataclass(frozen=True, kw_only=True)
class Limits:
    """What an update must not do; None: not asked."""

    accuracy_drop: float | None = 0.02  # most that any accuracy on --test may lose
    accuracy: float | None = None  # least of any, on --test
    index: str | None = None  # worst verdict allowed: "keep" or "rotate"
    overlap: float | None = None  # least share of neighbours kept, a new index made


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options:
    """The config of an update: sections are dicts of options."""

    data: dict | None = None  # of the source that reads --data; `name`, if not guessed
    test: dict | None = None  # of the source that reads --test
    old: dict | None = None  # of the source that reads --old
    train: dict | None = None  # in place of the run's config: epochs, batch_size, ...
    evaluators: dict | None = None  # which judge on --test; None: kNN
    limits: dict | None = None  # see Limits
    rows: int = 2048  # old images whose embeddings are compared
    neighbours: int = 10  # of each, in the search that an index serves
    index: float = 0.9  # share of neighbours kept from which an old index serves


class Plan(NamedTuple):
    """What an update is to do."""

    parent: str  # run directory that it goes on from
    workdir: epath.Path
    config: dict  # of the run that it is
    judge: dict | None  # config of a transfer run on --test, without checkpoint
    old: dict | None  # the same, to embed old images
    sample: tuple | None  # of old images: rows i32[n], and what embeds them by `parent`
    options: Options
    limits: Limits
    asked: dict  # as JSON: what makes two updates the same


def defaults() -> ml_collections.ConfigDict:
    """The config, to be overridden by --config.SECTION.OPTION=VALUE."""
    empty = {"augment": {}, "optimizer": {}, "schedule": {}}
    return ml_collections.ConfigDict(
        {
            "data": {},
            "test": {},
            "old": {},
            "train": empty,
            "evaluators": {"knn": {}},
            # A flag cannot override None; an absent option it can.
            "limits": {k: v for k, v in vars(Limits()).items() if v is not None},
            **{k: v for k, v in vars(Options()).items() if v is not None},
        },
        convert_dict=True,
    )


def read_options(config: dict) -> tuple[Options, Limits]:
    """The config, checked; ValueError names the field and what is allowed."""
    options = Options(**schema.options(Options, config, "config"))
    limits = Limits(**schema.options(Limits, options.limits or {}, "config.limits"))
    for name, least, most in (("rows", 1, 2**20), ("neighbours", 1, 1024)):
        value = getattr(options, name)
        if not least <= value <= most:
            raise ValueError(f"config.{name}={value}: must be from {least} to {most}")
    if not 0 <= options.index <= 1:
        raise ValueError(f"config.index={options.index}: must be from 0 to 1")
    if limits.index not in (None, *VERDICTS[:2]):
        raise ValueError(
            f"config.limits.index={limits.index!r}: must be None, 'keep' or 'rotate'"
        )
    if options.rows <= 2 * options.neighbours:
        raise ValueError(
            f"config.rows={options.rows}: must be above 2 config.neighbours = "
            f"{2 * options.neighbours}"
        )
    return options, limits


def plan(run, data, config, *, test=None, old=None, join=False, again=False) -> Plan:
    """Decide what to do, and check it, before anything is trained.

    Args:
      run: a finished run directory, or one that has updates.
      data: the new images: a path, see `lineage.section`.
      config: as `defaults`, a dict.
      test: a path of labelled images to judge the encoder by before and after.
      old: a path of images that are in the present index; None: the run's own.
      join: train on the run's data beside the new, for methods that read both.
      again: also where the same update is done already.

    Raises:
      ValueError: what is wrong, naming it. OSError: data cannot be read.
    """
    options, limits = read_options(config)
    parent = lineage.current(run)
    theirs = lineage.config(parent)
    made = lineage.section(data, options.data or {}, theirs, "config.data")
    if join:
        made = lineage.joined(theirs["data"], made)
    judge = None
    if test is not None:
        section = lineage.section(test, options.test or {}, theirs, "config.test")
        judge = _joint(section, "test", theirs)
        judge["evaluators"] = options.evaluators or {"knn": {}}
    elif limits.accuracy is not None:
        raise ValueError(
            f"config.limits.accuracy={limits.accuracy}: nothing measures it without "
            "--test, labelled images"
        )
    section = lineage.config(run)["data"]
    if old is not None:
        section = lineage.section(old, options.old or {}, theirs, "config.old")
    held = _joint(section, "none", theirs)
    try:
        sample = _sample(held, parent, options)
    except (ValueError, OSError) as error:
        if old is not None or (limits.index or limits.overlap) is not None:
            raise
        print(f"old embeddings are not compared: {error}; --old=PATH", flush=True)
        held = sample = None
    own = lineage.next_config(parent, theirs, made, options.train or {})
    asked = {"data": made, "train": options.train, "test": judge, "old": held}
    asked |= {name: getattr(options, name) for name in ("rows", "neighbours", "index")}
    asked = json.loads(json.dumps(asked | {"limits": vars(limits)}))
    workdir = lineage.next_update(run, None if again else asked)
    return Plan(parent, workdir, own, judge, held, sample, options, limits, asked)


def _joint(section, evaluation, theirs):
    """A transfer config of one set, whose images are seen as those of the run were."""
    look = {k: v for k, v in theirs["augment"].items() if k in ("size", "resize")}
    scenario = {"name": "joint", "evaluation": evaluation}
    return {"data": dict(section), "scenario": scenario, "augment": look} | {
        "evaluators": {},
        "tensorboard": False,
        "plots": False,
        "progress": False,
    }


def _of(config, run):
    return ml_collections.ConfigDict({**config, "checkpoint": str(run)})


def _sample(old, run, options):
    """Which old images are compared, i32[n], and what embeds them by a run's encoder.

    The rows are the same each time. Raises ValueError: there are too few.
    """
    size, embed = build.embedder(_of(old, run))
    rows = np.sort(np.random.default_rng(0).permutation(size)[: options.rows])
    if len(rows) <= 2 * options.neighbours:
        raise ValueError(
            f"config.neighbours={options.neighbours}: must be below half of the "
            f"{len(rows)} old images"
        )
    return rows, embed


def carry_out(work: Plan, *, stop=lambda: False) -> dict:
    """Judge, train, judge again, decide; resumes where it was stopped.

    Returns:
      what `update.json` holds.

    Raises:
      as `finish.run`.
    """
    began, folder = time.time(), work.workdir
    # The config first: a wrong option is said before anything is measured.
    made = build.build(ml_collections.ConfigDict(work.config), folder)
    found = {"parent": work.parent, "asked": work.asked}
    before = accuracies(work, work.parent, BEFORE, stop)
    rows, embed = work.sample or (None, None)
    old = None if embed is None else embed(rows)
    results = finish.run(made, folder, stop=stop)
    after = accuracies(work, folder, AFTER, stop)
    found["accuracy"] = {
        name: {BEFORE: value, AFTER: after[name], "change": after[name] - value}
        for name, value in before.items()
    }
    found["drift"], turn = None, None
    if old is not None:
        new = build.embedder(_of(work.old, folder))[1](rows)
        moved = drift.measures(old, new, k=work.options.neighbours)
        turn = np.asarray(moved.pop("rotation"))
        found["drift"] = results_lib.plain(moved) | {"rows": len(old)}
    found["index"] = index_verdict(found["drift"], work.options.index)
    found["broken"] = broken(found, work.limits)
    found["accepted"] = not found["broken"]
    found["cost"] = results["cost"]["per_task"][-1]
    found["seconds"] = time.time() - began
    return lineage.settle(work.workdir, found, turn)


def accuracies(work: Plan, run, name, stop) -> dict[str, float]:
    """Accuracy by evaluator of a run's encoder on --test, {} without one."""
    if work.judge is None:
        return {}
    folder = work.workdir / name

    def pause():
        if stop():
            raise train.Interrupted(f"stopped {name} the new task")

    made = build.build(_of(work.judge, run), folder)
    results = transfer.run(made, folder, pause=pause)
    results_lib.write_results(folder, results)
    return {
        matrix: measures["average_accuracy"]
        for matrix, measures in results_lib.summary(results).items()
    }


def index_verdict(moved: dict | None, least: float) -> str:
    """What to do with an index of the old embeddings.

    "keep": new queries find their old neighbours in it. "rotate": they do once they are
    multiplied by rotation.npy. "rebuild": neither. "unknown": not measured.
    """
    if moved is None:
        return "unknown"
    shares = moved["index_overlap"], moved["aligned_index_overlap"]
    for verdict, share in zip(VERDICTS, shares, strict=False):
        if share >= least:
            return verdict
    return VERDICTS[-1]


def broken(found: dict, limits: Limits) -> list[str]:
    """The limits that what was found does not keep, each as a sentence."""
    said = []
    for name, of in found["accuracy"].items():
        drop, value = -of["change"], of[AFTER]
        if limits.accuracy_drop is not None and drop > limits.accuracy_drop:
            said.append(f"{name} lost {drop:.4f}, allowed {limits.accuracy_drop}")
        if limits.accuracy is not None and value < limits.accuracy:
            said.append(f"{name} is {value:.4f}, must be {limits.accuracy}")
    if limits.index is not None:
        allowed = VERDICTS[: VERDICTS.index(limits.index) + 1]
        if found["index"] not in allowed:
            said.append(f"index: {found['index']}, allowed {' or '.join(allowed)}")
    if limits.overlap is not None and found["drift"]["overlap"] < limits.overlap:
        share = found["drift"]["overlap"]
        said.append(f"overlap is {share:.4f}, must be {limits.overlap}")
    return said


def text(found: dict) -> str:
    """What an update did, a line for each measure."""
    lines = [f"{'before and after (%)':36}{BEFORE:>9}{AFTER:>9}{'change':>9}"]
    for name, of in found["accuracy"].items():
        cells = "".join(f"{100 * of[x]:9.1f}" for x in (BEFORE, AFTER, "change"))
        lines.append(f"{name:36}{cells}")
    if not found["accuracy"]:
        lines = ["no --test: no accuracy was measured"]
    for name, value in (found["drift"] or {}).items():
        shown = f"{value:9d}" if name == "rows" else f"{value:9.3f}"
        lines.append(f"old embeddings: {name:22}{shown}")
    lines.append(f"index of the old embeddings: {found['index']}")
    lines += [f"limit broken: {line}" for line in found["broken"]]
    verdict = "accepted" if found["accepted"] else "rolled back"
    return "\n".join([*lines, f"{verdict}: {found['run']}"])


def define_flags(values=flags.FLAGS, argv=None) -> None:
    """The command's flags; not at import, for other commands have a config too."""
    own = {"flag_values": values}
    flags.DEFINE_string("run", None, "Run directory, finished.", required=True, **own)
    flags.DEFINE_string("data", None, "New images: a path.", required=True, **own)
    flags.DEFINE_string("test", None, "Labelled images to judge by: a path.", **own)
    flags.DEFINE_string("old", None, "Images that are in the index: a path.", **own)
    flags.DEFINE_bool("join", False, "Train on the run's data beside the new.", **own)
    flags.DEFINE_bool("again", False, "Even if the same update is done.", **own)
    config_flags.DEFINE_config_dict(
        "config",
        defaults(),
        lock_config=False,
        accept_new_attributes=True,
        sys_argv=argv,
        **own,
    )


def main(argv):
    """Update a run, and say what came of it."""
    if len(argv) > 1:
        return command.complain(f"unknown argument {argv[1]!r}; see --help")

    given = flags.FLAGS

    def make():
        return plan(
            given.run,
            given.data,
            given.config.to_dict(),
            test=given.test,
            old=given.old,
            join=given.join,
            again=given.again,
        )

    def work(made, stop):
        found = lineage.read(made.workdir)
        if found is None:
            found = carry_out(made, stop=stop)
        else:
            print(f"{made.workdir}: done already; --again makes another", flush=True)
        print(text(found), flush=True)
        return 0 if found["accepted"] else ROLLED_BACK

    return command.run(make, work)
