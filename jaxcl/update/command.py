"""Train a run's encoder on new images: `jaxcl update --run=RUN --data=DIR`.

The images, which need no labels, become the next task of the run, and its method
continues from its last state. The new encoder is then compared with the one before, and
accepted or rolled back by the limits of the config. Each update is a run directory,
RUN/updates/0001 and so on, with an `update.json`; the next update continues from the
last accepted one. RUN itself does not change.

An update of a folder whose images have changed is a new update. Exit codes: 0 accepted,
or nothing new; 3 rolled back; 1, 2 and 75 as in `jaxcl.main`.
"""

import argparse
import json
import time
from collections.abc import Callable
from typing import NamedTuple

import jax
import ml_collections
import numpy as np
from etils import epath

from jaxcl import numerics
from jaxcl.config import build, command, files, run_config, transfer_config
from jaxcl.data.stream import identity
from jaxcl.errors import Refused
from jaxcl.index import maps
from jaxcl.run import finish, job, lock, result_file, transfer, updates
from jaxcl.update import average, gate, lineage, plan, references, served, verdict
from jaxcl.update.verdict import AFTER, BEFORE

ROLLED_BACK = 3
REFERENCE = "reference"  # folder of its evaluation, beside `BEFORE` and `AFTER`


class PreparedUpdate(NamedTuple):
    """An update with its data read and its options checked."""

    job: job.Job
    evaluation: transfer.Transfer | None  # of the encoder before, on --test


@numerics.pinned()
def prepare(work: plan.Plan) -> PreparedUpdate:
    """Read the data and check the options that `carry_out` needs.

    Raises:
      Refused, OSError: as `build.build`.
    """
    try:
        prepared_job = build.build(ml_collections.ConfigDict(work.config), work.workdir)
    except (run_config.Differs, identity.Changed) as error:
        raise Refused(
            f"{work.workdir}: is a stopped update; finish it by the same command "
            "with the same images, or remove the folder. "
            f"{error}"
        ) from error
    for sentence in plan.say_plan(work):
        print(sentence, flush=True)
    return PreparedUpdate(prepared_job, _prepare_evaluation(work, work.parent, BEFORE))


@numerics.pinned()
def carry_out(
    work: plan.Plan,
    prepared: PreparedUpdate | None = None,
    *,
    stop: Callable[[], bool] = lambda: False,
) -> dict:
    """Evaluate, train, evaluate again and decide; resume a stopped update.

    Args:
      work: plan from `plan.make_plan`.
      prepared: result of `prepare`; None: call it here.
      stop: function, as in `train.run_tasks`.

    Returns:
      The content of `update.json`.

    Raises:
      The errors of `prepare`, `measure_accuracies` and `finish.run_job`.
    """
    with lock.hold_lock(work.workdir.parent):  # of all updates of the run
        return _carry_out(work, prepared, stop)


def _carry_out(work, prepared, stop) -> dict:
    start, folder = time.time(), work.workdir
    # Built first, so that a wrong option fails before anything is measured.
    prepared = prepare(work) if prepared is None else prepared
    report = {"parent": work.parent, "asked": work.asked}
    before = measure_accuracies(work, prepared.evaluation, BEFORE, stop)
    first = _answer_as_reference(work, stop)
    old = served.embed_old(work)
    results = finish.run_job(prepared.job, folder, stop=stop)
    if work.options.average is not None:
        report["average"] = average.save_average(
            prepared.job, folder, lambda mix: _choose_share(work, mix, stop)
        )
    evaluation = _prepare_evaluation(work, folder, AFTER)
    after = measure_accuracies(work, evaluation, AFTER, stop)
    report["accuracy"] = verdict.compare_accuracies(before, after)
    index = None if old is None else served.compare(work, old, folder)
    report["drift"] = None if index is None else index.drift
    report["ways"] = None if index is None else index.ways
    report["index"] = verdict.decide_index(
        report["drift"], report["ways"], work.options.index
    )
    if comparison := _compare_answers(work, first):
        report["gate"] = comparison
    report["broken"] = verdict.list_broken(report, work.limits)
    report["accepted"] = not report["broken"]
    if comparison:
        _close_comparison(work, report, first)
    report["cost"] = results["cost"]["per_task"][-1]
    report["seconds"] = time.time() - start
    adapter = None
    if index is not None and report["accepted"]:
        served.write_kit(work.workdir, index, work.options.neighbours)
        if report["index"] == "adapt":
            adapter = maps.pack_map(index.adapter, {"target": index.kit.source})
    return lineage.write_report(work.workdir, report, adapter)


def _prepare_evaluation(
    work: plan.Plan, run: epath.PathLike, name: str, section: dict | None = None
) -> transfer.Transfer | None:
    """Prepare to evaluate the encoder of a run on --test; None without --test.

    Args:
      section: config of another transfer run, in place of that on --test.
    """
    section = section or work.test
    if section is None:
        return None
    evaluation = build.build(
        transfer_config.add_checkpoint(section, run), work.workdir / name
    )
    assert isinstance(evaluation, transfer.Transfer)  # its config has a checkpoint
    return evaluation


def _answer_as_reference(work, stop) -> dict[str, np.ndarray]:
    """Return the answers of the reference on --test; {} if evaluators give none."""
    comparison = work.comparison
    if comparison is None:
        return {}
    if comparison.reference is not None:
        return comparison.reference.right
    if comparison.run == work.parent:
        return references.read_answers(work.workdir / BEFORE)
    evaluation = _prepare_evaluation(work, comparison.run, REFERENCE)
    measure_accuracies(work, evaluation, REFERENCE, stop)
    return references.read_answers(work.workdir / REFERENCE)


def _compare_answers(work, first) -> dict:
    """Compare answers before and after with those of the reference; {} without any."""
    before, after = (references.read_answers(work.workdir / x) for x in (BEFORE, AFTER))
    if work.comparison is None or not {*before} & {*after} & {*first}:
        return {}
    limits = work.limits
    return references.compare_answers(
        work.comparison, before, after, first, limits.accuracy_drop, limits.confidence
    )


def _close_comparison(work, report, first) -> None:
    """Note the outcome and the budget that is left; write a new reference."""
    plan, comparison = work.comparison, report["gate"]
    words = [x.get("verdict") for x in comparison["matrices"].values()]
    outcome = gate.ON_TRUST if report["accepted"] else gate.ROLLED_BACK
    if report["accepted"] and {*words} == {gate.HARMLESS}:
        outcome = gate.ACCEPTED
    elif not report["accepted"] and gate.HARMFUL in words:
        outcome = gate.REJECTED
    left = plan.share.left
    comparison |= {
        "outcome": outcome,
        "on_trust": gate.ON_TRUST in left,
        "left": left[outcome],
        "undecided": work.limits.undecided,
        "judge": f"{work.workdir.name}/{BEFORE}",
    }
    run, right = plan.run, first
    if work.becomes_reference and report["accepted"]:
        run = str(work.workdir)
        right = references.read_answers(work.workdir / AFTER)
    elif plan.reference is not None:
        return
    references.write_reference(
        work.run, plan.number, references.Reference(run, plan.images, right)
    )


def _choose_share(work, mix, stop) -> dict:
    """Choose the share of the new weights in the average.

    It is the largest whose accuracies keep the limits on images that do not judge:
    those of --select, or a part of --test.

    Args:
      work: plan from `plan.make_plan`.
      mix: share -> params and stats of the encoder.
      stop: function, as in `train.run_tasks`.

    Returns:
      The "share", and "tried": accuracies of each share that was tried.
    """
    if work.options.average != "auto":
        return {"share": work.options.average}
    section, reports = work.select or work.test, {}
    names = ("select_before", "select_after") if work.select else (BEFORE, AFTER)
    first = _prepare_evaluation(work, work.parent, names[0], section)
    before = _measure_choice(work, first, names[0], stop)
    evaluation = _prepare_evaluation(work, work.workdir, names[1], section)
    trained = evaluation.state
    # The evaluation may use other devices than the training.
    places = jax.tree.map(lambda x: x.sharding, (trained.params, trained.stats))
    for share in average.SHARES:
        trees = tuple({"encoder": tree} for tree in mix(share))
        params, stats = jax.device_put(trees, places)
        mixed = evaluation._replace(
            state=trained.replace(params=params, stats=stats),
            source=evaluation.source | {"average": share},
        )
        reports[str(share)] = _measure_choice(work, mixed, f"average_{share}", stop)
        report = {"accuracy": verdict.compare_accuracies(before, reports[str(share)])}
        if not verdict.list_broken_accuracy(report, work.limits):
            break
    return {"share": share, "tried": reports}


def _measure_choice(work, evaluation, name, stop) -> dict[str, float]:
    """Measure accuracies on the images that choose, see `_choose_share`."""
    measured = measure_accuracies(work, evaluation, name, stop)
    if work.select is not None:
        return measured
    answers = references.read_answers(work.workdir / name)
    if not answers:
        raise Refused(
            "config.average='auto': the evaluators give no answers to single images, "
            "so that no part of --test can choose; --select=IMAGES gives others"
        )
    rows = work.comparison.choosing
    return {matrix: float(right[rows].mean()) for matrix, right in answers.items()}


def measure_accuracies(
    work: plan.Plan,
    evaluation: transfer.Transfer | None,
    name: str,
    stop: Callable[[], bool],
) -> dict[str, float]:
    """Measure the accuracies of an encoder on --test; {} without --test.

    Args:
      work: plan from `plan.make_plan`.
      evaluation: the encoder and its evaluators; None without --test.
      name: `BEFORE` or `AFTER`, the folder for the results.
      stop: function, as in `train.run_tasks`.

    Raises:
      Refused: an evaluator gives no accuracy, so limits could not be checked.
    """
    if evaluation is None:
        return {}
    folder = work.workdir / name
    results = transfer.run_transfer(evaluation, folder, stop=stop)
    result_file.write_results(folder, results)
    measured = result_file.summary(results).items()
    accuracies = {matrix: measures["average_accuracy"] for matrix, measures in measured}
    if not accuracies or None in accuracies.values():
        raise Refused(
            "config.evaluators: must measure an accuracy on --test, and gave "
            f"{accuracies or 'none'}; see {folder}"
        )
    return accuracies


def add_options(parser) -> None:
    """Add the options of `jaxcl update`."""
    parser.epilog = """examples:
  jaxcl update --run=runs/mine --data=new_images
  jaxcl update --run=runs/mine --data=new_images --test=labelled_images
  jaxcl update --run=runs/mine --data=new_images --test=labelled_images \\
      --config.limits.accuracy_drop=0.05 --config.train.epochs=5

exit codes: 0 accepted, 3 rolled back, 1 failed, 2 wrong command, 75 stopped"""
    for name, needed, text in (
        ("run", True, "finished run"),
        ("data", True, "path of the new images"),
        ("test", False, "labelled images that both encoders are evaluated on"),
        ("old", False, "images in your search index (those of the run)"),
        ("average", False, "share of new weights in an average with the old, or auto"),
        ("select", False, "labelled images that choose the average (1/3 of --test)"),
        ("reference", False, "encoder that losses count from (first of the chain)"),
    ):
        kind = _read_number if name == "average" else str
        parser.add_argument(f"--{name}", required=needed, type=kind, help=text)
    for name, text in (
        ("join", "also train on the run's images"),
        ("accept-as-reference", "count later losses from this update, if accepted"),
        ("again", "repeat an update that is done"),
        ("verbose", "print all measures"),
    ):
        parser.add_argument(f"--{name}", action="store_true", help=text)
    for name, text in (
        ("limits.accuracy_drop", "most that an accuracy may fall, as a share (0.02)"),
        ("limits.confidence", "that no loss beyond it is called harmless (0.95)"),
        ("limits.undecided", '"keep the old" accepts only what is proven (accept)'),
        ("limits.accuracy", "least accuracy"),
        ("limits.index", "worst verdict on the index: keep or adapt"),
        ("limits.overlap", "least share of neighbours kept"),
        ("rows", "old images that are compared (2048)"),
        ("neighbours", "neighbours of each (10)"),
        ("train.OPTION", "option of the training, such as epochs (the run's)"),
    ):
        parser.add_override(f"config.{name}", text)
    parser.section = "config.train"


def _read_number(text: str) -> float | str:
    """Read a number; return any other word unchanged for a later check."""
    try:
        return float(text)
    except ValueError:
        return text


def main(options: argparse.Namespace) -> int:
    """Run `jaxcl update`, print the result, and return the exit code."""
    changes = plan.default_options()
    files.override(changes, options.config)

    def make():
        config = changes.to_dict()
        if options.average is not None:
            config["average"] = options.average
        planned = plan.make_plan(
            options.run,
            options.data,
            config,
            test=options.test,
            old=options.old,
            join=options.join,
            again=options.again,
            select=options.select,
            reference=options.reference,
            becomes_reference=options.accept_as_reference,
        )
        is_new = updates.read_report(planned.workdir) is None
        return planned, prepare(planned) if is_new else None

    def work(ready, stop):
        planned, prepared = ready
        with lock.hold_lock(planned.workdir.parent):
            request = None if options.again else planned.asked
            parent = updates.find_current(options.run)
            workdir = lineage.choose_folder(options.run, request)
            if (parent, workdir) != (planned.parent, planned.workdir):
                raise lock.LockHeldError(
                    f"{options.run}: another update ended meanwhile; run the "
                    "same command again to continue from that update"
                )
            report = done = updates.read_report(planned.workdir)
            if done is None:
                report = carry_out(planned, prepared, stop=stop)
            else:
                lineage.remove_checkpoints(planned.workdir, done)
                print(plan.say_nothing_new(planned), flush=True)
        if options.verbose:
            print(json.dumps(report, indent=2), flush=True)
        print(verdict.write_sentences(report), flush=True)
        return 0 if report["accepted"] or done else ROLLED_BACK

    return command.run_until_signal(make, work)
