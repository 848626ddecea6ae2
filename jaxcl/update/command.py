"""Train a run's encoder on new images: `python -m jaxcl.update --run=RUN --data=DIR`.

The images, which need no labels, become the next task of the run, and its method
continues from its last state. The new encoder is then compared with the one before, and
accepted or rolled back by the limits of the config. Each update is a run directory,
RUN/updates/0001 and so on, with an `update.json`; the next update continues from the
last accepted one. RUN itself does not change.

An update of a folder whose images have changed is a new update. Exit codes: 0 accepted,
or nothing new, which one line says; 3 rolled back; 1, 2 and 75 as in `jaxcl.main`.
"""

import dataclasses
import json
import time
from collections.abc import Callable
from typing import Annotated, Literal, NamedTuple

import ml_collections
import numpy as np
from absl import flags
from etils import epath
from ml_collections import config_flags

from jaxcl import schema
from jaxcl.config import build, command, own_images, recipe, run_config, sections
from jaxcl.data import identity, stream
from jaxcl.run import finish, job, lock, terminal, train, transfer
from jaxcl.run import results as results_lib
from jaxcl.update import drift, lineage

ROLLED_BACK = 3
BEFORE, AFTER = "before", "after"
VERDICTS = ("keep", "rotate", "rebuild")  # for an index, the best first


@dataclasses.dataclass(frozen=True, kw_only=True)
class Limits:
    """When an update is rolled back; None: no limit."""

    # The most that any accuracy on --test may lose
    accuracy_drop: Annotated[float, schema.Range(-1, 1)] | None = 0.02
    accuracy: schema.Share | None = None  # the least that any on --test may be
    index: Literal["keep", "rotate"] | None = None  # worst verdict allowed
    overlap: schema.Share | None = None  # least share of neighbours kept in a new index


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options:
    """The config of an update; sections are dicts of options."""

    data: dict | None = None  # options of --data's source; its `name` is guessed
    test: dict | None = None  # options of --test's source
    old: dict | None = None  # options of --old's source
    train: dict | None = None  # replace the run's options: epochs, batch_size, ...
    evaluators: dict | None = None  # that judge on --test; None: kNN
    limits: dict | None = None  # see Limits
    # How many old images are embedded before and after
    rows: Annotated[int, schema.Range(1, 2**20)] = 2048
    # How many neighbours of each are compared
    neighbours: Annotated[int, schema.Range(1, 1024)] = 10
    # Least share of neighbours kept for an old index to be usable
    index: schema.Share = 0.9


class Plan(NamedTuple):
    """What an update is to do."""

    parent: str  # run directory that it continues
    workdir: epath.Path
    config: dict  # of the run that trains on the new images
    judge: dict | None  # config of a transfer run on --test, without checkpoint
    old: dict | None  # the same, to embed old images
    sample: tuple | None  # rows i32[n] of old images, and `parent`'s function of them
    options: Options
    limits: Limits
    asked: dict  # JSON; two updates with the same `asked` are the same


def defaults() -> ml_collections.ConfigDict:
    """The default config, which --config.SECTION.OPTION=VALUE overrides."""
    # A flag sets what is in a section, if the section is there.
    sections = ("augment", "optimizer", "schedule", "method", "tuning")
    return ml_collections.ConfigDict(
        {
            "data": {},
            "test": {},
            "old": {},
            "train": {name: {} for name in sections},
            "evaluators": {"knn": {}},
            # A flag cannot override None, but it can set an option that is absent.
            "limits": {k: v for k, v in vars(Limits()).items() if v is not None},
            **{k: v for k, v in vars(Options()).items() if v is not None},
        },
        convert_dict=True,
    )


def read_options(config: dict) -> tuple[Options, Limits]:
    """Check a config.

    Raises:
      ValueError: an option is wrong; the message names the field and what is allowed.
    """
    options = Options(**schema.options(Options, config, "config"))
    limits = Limits(**schema.options(Limits, options.limits or {}, "config.limits"))
    if options.rows <= 2 * options.neighbours:
        raise ValueError(
            f"config.rows={options.rows}: must be above 2 config.neighbours = "
            f"{2 * options.neighbours}"
        )
    return options, limits


def plan(
    run: str,
    data: str | dict,
    config: dict,
    *,
    test: str | dict | None = None,
    old: str | dict | None = None,
    join: bool = False,
    again: bool = False,
) -> Plan:
    """Decide what to do and check it, before anything is trained.

    Args:
      run: directory of a finished run, which may have updates.
      data: a path of the new images, or a section config.data, see `lineage.section`.
      config: as `defaults`, a dict.
      test: a path of labelled images, to evaluate both encoders on.
      old: a path of images that are in the present index; None: the run's own.
      join: also train on the run's data, for methods that read both.
      again: make another update even if the same one is done already.

    Raises:
      ValueError: an option or an input is wrong; the message names it.
      OSError: data cannot be read.
    """
    options, limits = read_options(config)
    parent = lineage.current(run)
    parent_config = lineage.config(parent)
    new_data = lineage.section(
        data, options.data or {}, parent_config, "config.data", whole=True
    )
    if join and "data" not in parent_config:
        raise ValueError(f"--join: {parent} is an encoder without images of its own")
    if join:
        new_data = lineage.joined(parent_config["data"], new_data)
    new_set = own_images.read(new_data)
    judge = _judge_config(test, options, limits, parent_config)
    section = lineage.config(run).get("data")
    if old is not None:
        section = lineage.section(
            old, options.old or {}, parent_config, "config.old", whole=True
        )
    try:
        if section is None:
            raise ValueError(f"{run} is an encoder without images of its own")
        old_config = _joint(section, "none", parent_config)
        sample = _sample(old_config, parent, options)
    except (ValueError, OSError) as error:
        if old is not None or (limits.index or limits.overlap) is not None:
            raise
        print(
            f"old embeddings are not compared: {error}; "
            "--old, or old= in a program, gives them",
            flush=True,
        )
        old_config = sample = None
    changes = options.train or {}
    own = lineage.next_config(parent, parent_config, new_data, changes)
    if "batch_size" not in changes:
        own = {**own, "batch_size": lineage.batch_size(run)}
        own = own if join else _with_few(own, stream.size(new_set.train))
    own = _with_short_warmup(own, changes)
    asked = {"data": new_data, "train": options.train, "test": judge, "old": old_config}
    asked["images"] = _digests(run, new_set, judge)
    asked |= {name: getattr(options, name) for name in ("rows", "neighbours", "index")}
    asked = json.loads(json.dumps(asked | {"limits": vars(limits)}))
    workdir = lineage.next_update(run, None if again else asked)
    return Plan(parent, workdir, own, judge, old_config, sample, options, limits, asked)


def _digests(run, new_set, judge) -> dict:
    """Digests of the new images and of those that judge; warns where both have some.

    Images are the same where their bytes are, see `identity`.
    """
    new = identity.identify(new_set)
    if judge is None:
        return {"data": new.digest()}
    test, before = identity.identify(own_images.read(judge["data"])), identity.read(run)
    for trained, what in ((new, "the new ones"), (before, "those of the run")):
        if trained is not None and (common := identity.common(test, trained)):
            print(
                f"config.test: {len(common):,} of {len(test.rows('test')):,} images "
                f"that judge are trained on, too, among {what}, such as {common[0]}: "
                "their accuracy flatters",
                flush=True,
            )
    return {"data": new.digest(), "test": test.digest()}


def nothing_new(work: Plan) -> str:
    """One line for an update that is done already."""
    return (
        f"nothing new: {work.workdir} is this update, of these images; nothing was "
        "trained. --again (again=True in a program) makes another"
    )


def _with_few(config, rows) -> dict:
    """The config, with a smaller batch where `rows` new images do not fill one."""
    if rows >= config["batch_size"]:
        return config
    batch = own_images.batch_size(rows)
    print(
        f"config.train.batch_size={batch} in place of {config['batch_size']}: there "
        f"are {rows} new images",
        flush=True,
    )
    return {**config, "batch_size": batch}


def _with_short_warmup(config, changes) -> dict:
    """The config, with a shorter warmup where the epochs asked for do not hold it."""
    epochs, section = changes.get("epochs"), config["schedule"]
    asked = changes.get("schedule") or {}
    if not isinstance(epochs, int) or "warmup_epochs" in asked:
        return config
    make = schema.named(sections.SCHEDULES, section, "config.schedule")[0]
    before = {**schema.defaults(make), **section}.get("warmup_epochs", 0)
    if not 1 <= epochs <= before:
        return config
    warmup = recipe.warmup_epochs(epochs)
    print(
        f"config.train.schedule.warmup_epochs={warmup} in place of {before}, for "
        f"config.train.epochs={epochs}",
        flush=True,
    )
    return {**config, "schedule": {**section, "warmup_epochs": warmup}}


def _judge_config(test, options, limits, parent_config) -> dict | None:
    """A transfer config that evaluates on `test`, None without it."""
    if test is not None:
        section = lineage.section(
            test, options.test or {}, parent_config, "config.test"
        )
        evaluators = options.evaluators or {"knn": {}}
        return _joint(section, "test", parent_config) | {"evaluators": evaluators}
    if limits.accuracy is not None:
        raise ValueError(
            f"config.limits.accuracy={limits.accuracy}: nothing measures it without "
            "--test, labelled images"
        )
    return None


def _joint(section, evaluation, parent_config):
    """A transfer config of one dataset, with the image size of the run."""
    augment = parent_config["augment"]
    look = {k: v for k, v in augment.items() if k in ("size", "resize")}
    scenario = {"name": "joint", "evaluation": evaluation}
    return {"data": dict(section), "scenario": scenario, "augment": look} | {
        "evaluators": {},
        "tensorboard": False,
        "plots": False,
        "progress": False,
    }


def _with_checkpoint(config, run):
    """The transfer config, for the encoder of a run."""
    return ml_collections.ConfigDict({**config, "checkpoint": str(run)})


def _sample(old, run, options):
    """Choose the old images to compare.

    Returns:
      Their rows i32[n], the same each time, and a function that embeds rows by the
      encoder of `run`.

    Raises:
      ValueError: there are too few.
    """
    size, embed = build.embedder(_with_checkpoint(old, run))
    rows = np.sort(np.random.default_rng(0).permutation(size)[: options.rows])
    if len(rows) <= 2 * options.neighbours:
        raise ValueError(
            f"config.neighbours={options.neighbours}: must be below half of the "
            f"{len(rows)} old images"
        )
    return rows, embed


class Prepared(NamedTuple):
    """What an update runs, its data read and its options checked."""

    job: job.Job
    judging: transfer.Transfer | None  # of the encoder before, on --test


def prepare(work: Plan) -> Prepared:
    """Build what `carry_out` runs.

    Raises:
      ValueError, OSError: as `build.build`.
    """
    try:
        made = build.build(ml_collections.ConfigDict(work.config), work.workdir)
    except run_config.Differs as error:
        raise ValueError(
            f"{work.workdir}: is an update of another config that was stopped; they "
            f"differ in {'; '.join(error.changed)}. Finish it by the command that "
            "began it, or remove the folder"
        ) from error
    except identity.Changed as error:
        raise ValueError(
            f"{work.workdir}: is an update that was stopped; finish it with the images "
            f"that it began with, or remove the folder. {error}"
        ) from error
    return Prepared(made, _judging(work, work.parent, BEFORE))


def carry_out(
    work: Plan,
    prepared: Prepared | None = None,
    *,
    stop: Callable[[], bool] = lambda: False,
) -> dict:
    """Evaluate, train, evaluate again, decide; resumes where it was stopped.

    Args:
      work: from `plan`.
      prepared: from `prepare`; None: it is done here.
      stop: as in `train.run`.

    Returns:
      What `update.json` holds.

    Raises:
      As `prepare`, `accuracies` and `finish.run`.
    """
    with lock.held(work.workdir.parent):  # of all updates of the run
        return _carry_out(work, prepared, stop)


def _carry_out(work, prepared, stop) -> dict:
    began, folder = time.time(), work.workdir
    # Built first, so that a wrong option fails before anything is measured.
    prepared = prepare(work) if prepared is None else prepared
    report = {"parent": work.parent, "asked": work.asked}
    before = accuracies(work, prepared.judging, BEFORE, stop)
    rows, embed = work.sample or (None, None)
    old = None if embed is None else embed(rows)
    results = finish.run(prepared.job, folder, stop=stop)
    after = accuracies(work, _judging(work, folder, AFTER), AFTER, stop)
    report["accuracy"] = {
        name: {BEFORE: value, AFTER: after[name], "change": after[name] - value}
        for name, value in before.items()
    }
    report["drift"], rotation = None, None
    if old is not None:
        new = build.embedder(_with_checkpoint(work.old, folder))[1](rows)
        measured = drift.measures(old, new, k=work.options.neighbours)
        rotation = np.asarray(measured.pop("rotation"))
        report["drift"] = results_lib.plain(measured) | {"rows": len(old)}
    report["index"] = index_verdict(report["drift"], work.options.index)
    report["broken"] = broken(report, work.limits)
    report["accepted"] = not report["broken"]
    report["cost"] = results["cost"]["per_task"][-1]
    report["seconds"] = time.time() - began
    return lineage.settle(work.workdir, report, rotation)


def _judging(work: Plan, run: epath.PathLike, name: str) -> transfer.Transfer | None:
    """How the encoder of a run is judged on --test; None without --test."""
    if work.judge is None:
        return None
    return build.build(_with_checkpoint(work.judge, run), work.workdir / name)


def accuracies(
    work: Plan,
    judging: transfer.Transfer | None,
    name: str,
    stop: Callable[[], bool],
) -> dict[str, float]:
    """Evaluator -> accuracy of an encoder on --test; {} without --test.

    Args:
      work: from `plan`.
      judging: the encoder and its evaluators; None without --test.
      name: `BEFORE` or `AFTER`, the folder for the results.
      stop: as in `train.run`.

    Raises:
      schema.Refused: an evaluator gives no accuracy, so that no limit could be kept.
    """
    if judging is None:
        return {}
    folder = work.workdir / name
    results = transfer.run(judging, folder, stop=stop)
    if results is None:
        raise train.Interrupted(f"stopped {name} the new task")
    results_lib.write_results(folder, results)
    found = {
        matrix: measures["average_accuracy"]
        for matrix, measures in results_lib.summary(results).items()
    }
    if not found or None in found.values():
        raise schema.Refused(
            "config.evaluators: must measure an accuracy on --test, and gave "
            f"{found or 'none'}; see {folder}"
        )
    return found


def index_verdict(moved: dict | None, least: float) -> str:
    """What to do with an index of the old embeddings.

    Args:
      moved: of `drift.measures`; None: not measured.
      least: share of neighbours kept from which the index is usable.

    Returns:
      "keep": new queries find their old neighbours in the index. "rotate": they do if
      they are multiplied by rotation.npy. "rebuild": neither. "unknown": not measured.
    """
    if moved is None:
        return "unknown"
    shares = moved["index_overlap"], moved["aligned_index_overlap"]
    for verdict, share in zip(VERDICTS, shares, strict=False):
        if share >= least:
            return verdict
    return VERDICTS[-1]


def broken(report: dict, limits: Limits) -> list[str]:
    """The limits that an update breaks, each as a sentence."""
    sentences = []
    for name, accuracy in report["accuracy"].items():
        drop, value = -accuracy["change"], accuracy[AFTER]
        if limits.accuracy_drop is not None and drop > limits.accuracy_drop:
            sentences.append(f"{name} lost {drop:.4f}, allowed {limits.accuracy_drop}")
        if limits.accuracy is not None and value < limits.accuracy:
            sentences.append(f"{name} is {value:.4f}, must be {limits.accuracy}")
    if limits.index is not None:
        allowed = VERDICTS[: VERDICTS.index(limits.index) + 1]
        if report["index"] not in allowed:
            verdict = report["index"]
            sentences.append(f"index: {verdict}, allowed {' or '.join(allowed)}")
    if limits.overlap is not None and report["drift"]["overlap"] < limits.overlap:
        share = report["drift"]["overlap"]
        sentences.append(f"overlap is {share:.4f}, must be {limits.overlap}")
    return sentences


_INDEX = {
    "keep": "keep your index: new queries find their old neighbours in it",
    "rotate": "rotate: multiply new queries by rotation.npy, then your index serves on",
    "rebuild": "rebuild your index: embed its images again with the new encoder",
    "unknown": "unknown, since no old images were compared; --old gives them",
}


def sentences(report: dict) -> str:
    """Say in sentences what an update did, and what to do next."""
    lines = []
    limit = report.get("asked", {}).get("limits", {}).get("accuracy_drop")
    allowed = "no limit" if limit is None else f"may fall by {100 * limit:.1f} points"
    for name, accuracy in report["accuracy"].items():
        before, after, change = (100 * accuracy[x] for x in (BEFORE, AFTER, "change"))
        lines.append(
            f"Accuracy on labelled images ({name}): {before:.1f} % before, "
            f"{after:.1f} % after, {change:+.1f} points; {allowed}."
        )
    if not report["accuracy"]:
        lines.append("No labelled images were given, so no accuracy was measured.")
    if report["drift"]:
        kept = 100 * report["drift"]["index_overlap"]
        lines.append(f"Of the old neighbours {kept:.0f} % are found in the old index.")
    lines.append(f"Search index: {_INDEX[report['index']]}.")
    broken = (f"Limit broken: {sentence}." for sentence in report["broken"])
    lines += [terminal.paint(line, "bad") for line in broken]
    if report["accepted"]:
        done = terminal.paint("Accepted.", "good")
        lines.append(f"{done} The encoder is in {report['run']}")
    else:
        done = terminal.paint("Rolled back.", "bad")
        lines.append(f"{done} The encoder stays that of {report['parent']}")
    return "\n".join(lines)


def text(report: dict) -> str:
    """List the measures of an update, a line each."""
    lines = [f"{'before and after (%)':36}{BEFORE:>9}{AFTER:>9}{'change':>9}"]
    for name, accuracy in report["accuracy"].items():
        cells = "".join(f"{100 * accuracy[x]:9.1f}" for x in (BEFORE, AFTER, "change"))
        lines.append(f"{name:36}{cells}")
    if not report["accuracy"]:
        lines = ["no --test: no accuracy was measured"]
    for name, value in (report["drift"] or {}).items():
        shown = f"{value:9d}" if name == "rows" else f"{value:9.3f}"
        lines.append(f"old embeddings: {name:22}{shown}")
    lines.append(f"index of the old embeddings: {report['index']}")
    lines += [f"limit broken: {sentence}" for sentence in report["broken"]]
    verdict = "accepted" if report["accepted"] else "rolled back"
    return "\n".join([*lines, f"{verdict}: {report['run']}"])


def define_flags(
    values: flags.FlagValues = flags.FLAGS, argv: list[str] | None = None
) -> None:
    """Define the command's flags.

    They are not defined on import, since other commands have a --config, too.
    """
    own = {"flag_values": values}
    flags.DEFINE_string("run", None, "Run directory, finished.", required=True, **own)
    flags.DEFINE_string("data", None, "New images: a path.", required=True, **own)
    flags.DEFINE_string("test", None, "Labelled images to judge by: a path.", **own)
    flags.DEFINE_string("old", None, "Images that are in the index: a path.", **own)
    flags.DEFINE_bool("join", False, "Train on the run's data beside the new.", **own)
    flags.DEFINE_bool("again", False, "Even if the same update is done.", **own)
    flags.DEFINE_bool("verbose", False, "Print all measures.", **own)
    config_flags.DEFINE_config_dict(
        "config",
        defaults(),
        lock_config=False,
        accept_new_attributes=True,
        sys_argv=argv,
        **own,
    )


def main(argv: list[str]) -> int:
    """Update a run, and print what the update did; returns the exit code."""
    if len(argv) > 1:
        return command.complain(f"unknown argument {argv[1]!r}; see --help")

    options = flags.FLAGS

    def make():
        planned = plan(
            options.run,
            options.data,
            options.config.to_dict(),
            test=options.test,
            old=options.old,
            join=options.join,
            again=options.again,
        )
        report = lineage.read(planned.workdir)
        return planned, prepare(planned) if report is None else None

    def work(made, stop):
        planned, prepared = made
        with lock.held(planned.workdir.parent):
            return finished(planned, prepared, stop)

    def finished(planned, prepared, stop):
        asked = None if options.again else planned.asked
        now = lineage.current(options.run), lineage.next_update(options.run, asked)
        if now != (planned.parent, planned.workdir):
            raise lock.Held(
                f"{options.run}: another update of it has ended meanwhile; run the "
                "same command again, which goes on from there"
            )
        report = lineage.read(planned.workdir)
        done = report is not None
        if report is None:
            report = carry_out(planned, prepared, stop=stop)
        else:
            lineage.forget(planned.workdir, report)
            print(nothing_new(planned), flush=True)
        if options.verbose:
            print(text(report), flush=True)
        print(sentences(report), flush=True)
        return 0 if report["accepted"] or done else ROLLED_BACK

    return command.run(make, work)
