"""Train a run's encoder on new images: `python -m jaxcl.update --run=RUN --data=DIR`.

The images, which need no labels, become the next task of the run, and its method
continues from its last state. The new encoder is then compared with the one before, and
accepted or rolled back by the limits of the config. Each update is a run directory,
RUN/updates/0001 and so on, with an `update.json`; the next update continues from the
last accepted one. RUN itself does not change.

An update of a folder whose images have changed is a new update. Exit codes: 0 accepted,
or nothing new; 3 rolled back; 1, 2 and 75 as in `jaxcl.main`.
"""

import json
import time
from collections.abc import Callable
from typing import NamedTuple

import jax
import ml_collections
from absl import flags
from etils import epath
from ml_collections import config_flags

from jaxcl import numerics
from jaxcl.config import build, command, run_config
from jaxcl.data import identity
from jaxcl.errors import Refused
from jaxcl.run import finish, job, lock, transfer
from jaxcl.run import results as results_lib
from jaxcl.update import adapters, average, drift, lineage, plan, verdict
from jaxcl.update.verdict import AFTER, BEFORE

ROLLED_BACK = 3


class PreparedUpdate(NamedTuple):
    """An update with its data read and its options checked."""

    job: job.Job
    judging: transfer.Transfer | None  # of the encoder before, on --test


@numerics.pinned()
def prepare(work: plan.Plan) -> PreparedUpdate:
    """Read the data and check the options that `carry_out` needs.

    Raises:
      Refused, OSError: as `build.build`.
    """
    try:
        made = build.build(ml_collections.ConfigDict(work.config), work.workdir)
    except (run_config.Differs, identity.Changed) as error:
        raise Refused(
            f"{work.workdir}: is a stopped update; finish it by the same command "
            "with the same images, or remove the folder. "
            f"{error}"
        ) from error
    return PreparedUpdate(made, _prepare_evaluation(work, work.parent, BEFORE))


@numerics.pinned()
def carry_out(
    work: plan.Plan,
    prepared: PreparedUpdate | None = None,
    *,
    stop: Callable[[], bool] = lambda: False,
) -> dict:
    """Evaluate, train, evaluate again and decide; resume a stopped update.

    Args:
      work: from `plan.make_plan`.
      prepared: from `prepare`; None: call it here.
      stop: as in `train.run_tasks`.

    Returns:
      The content of `update.json`.

    Raises:
      The errors of `prepare`, `measure_accuracies` and `finish.run_job`.
    """
    with lock.hold_lock(work.workdir.parent):  # of all updates of the run
        return _carry_out(work, prepared, stop)


def _carry_out(work, prepared, stop) -> dict:
    began, folder = time.time(), work.workdir
    # Built first, so that a wrong option fails before anything is measured.
    prepared = prepare(work) if prepared is None else prepared
    report = {"parent": work.parent, "asked": work.asked}
    before = measure_accuracies(work, prepared.judging, BEFORE, stop)
    rows, embed = work.sample or (None, None)
    old = None if embed is None else adapters.map_to_index(work.parent, embed(rows))
    results = finish.run_job(prepared.job, folder, stop=stop)
    if work.options.average is not None:
        report["average"] = average.save_average(
            prepared.job, folder, lambda mix: _choose_share(work, before, mix, stop)
        )
    judging = _prepare_evaluation(work, folder, AFTER)
    after = measure_accuracies(work, judging, AFTER, stop)
    report["accuracy"] = verdict.compare_accuracies(before, after)
    report["drift"], fitted = None, []
    if old is not None:
        new = build.make_embedder(plan.add_checkpoint(work.old, folder))[1](rows)
        measured = drift.measure_drift(old, new, k=work.options.neighbours)
        fitted = adapters.fit_adapters(old, new, k=work.options.neighbours)
        measured["adapters"] = {one.kind: one.recall for one in fitted}
        report["drift"] = results_lib.to_json(measured) | {"rows": len(old)}
    report["index"] = verdict.decide_index(report["drift"], work.options.index)
    report["broken"] = verdict.list_broken(report, work.limits)
    report["accepted"] = not report["broken"]
    report["cost"] = results["cost"]["per_task"][-1]
    report["seconds"] = time.time() - began
    best = fitted[0].adapter if report["index"] == "adapt" else None
    return lineage.write_report(work.workdir, report, best)


def _prepare_evaluation(
    work: plan.Plan, run: epath.PathLike, name: str
) -> transfer.Transfer | None:
    """Prepare to evaluate the encoder of a run on --test; None without --test."""
    if work.judge is None:
        return None
    made = build.build(plan.add_checkpoint(work.judge, run), work.workdir / name)
    assert isinstance(made, transfer.Transfer)  # since the config names a checkpoint
    return made


def _choose_share(work, before, mix, stop) -> dict:
    """Choose the share of the new weights in the average.

    Args:
      work: from `plan.make_plan`.
      before: accuracies of the encoder before the update.
      mix: share -> params and stats of the encoder.
      stop: as in `train.run`.

    Returns:
      The "share", and "tried": accuracies of each share that was tried.
    """
    if work.options.average != "auto":
        return {"share": work.options.average}
    judging, tried = _prepare_evaluation(work, work.workdir, AFTER), {}
    trained = judging.state
    # The evaluation may use other devices than the training.
    places = jax.tree.map(lambda x: x.sharding, (trained.params, trained.stats))
    for share in average.SHARES:
        both = tuple({"encoder": tree} for tree in mix(share))
        params, stats = jax.device_put(both, places)
        own = judging._replace(
            state=trained.replace(params=params, stats=stats),
            source=judging.source | {"average": share},
        )
        tried[str(share)] = measure_accuracies(work, own, f"average_{share}", stop)
        report = {"accuracy": verdict.compare_accuracies(before, tried[str(share)])}
        if not verdict.list_broken_accuracy(report, work.limits):
            break
    return {"share": share, "tried": tried}


def measure_accuracies(
    work: plan.Plan,
    judging: transfer.Transfer | None,
    name: str,
    stop: Callable[[], bool],
) -> dict[str, float]:
    """Measure the accuracies of an encoder on --test; {} without --test.

    Args:
      work: from `plan.make_plan`.
      judging: the encoder and its evaluators; None without --test.
      name: `BEFORE` or `AFTER`, the folder for the results.
      stop: as in `train.run_tasks`.

    Raises:
      Refused: an evaluator gives no accuracy, so limits could not be checked.
    """
    if judging is None:
        return {}
    folder = work.workdir / name
    results = transfer.run_transfer(judging, folder, stop=stop)
    results_lib.write_results(folder, results)
    measured = results_lib.summary(results).items()
    found = {matrix: measures["average_accuracy"] for matrix, measures in measured}
    if not found or None in found.values():
        raise Refused(
            "config.evaluators: must measure an accuracy on --test, and gave "
            f"{found or 'none'}; see {folder}"
        )
    return found


def define_flags(
    values: flags.FlagValues = flags.FLAGS, argv: list[str] | None = None
) -> None:
    """Define the command's flags.

    They are not defined on import, since other commands have a --config, too.
    """
    texts = {
        "run": "Finished run directory.",
        "data": "Path of the new images.",
        "test": "Path of labelled images, for evaluation.",
        "old": "Path of the images in the search index.",
        "average": "Share of the new weights in an average with the old; or auto.",
    }
    switches = {
        "join": "Also train on the run's data.",
        "again": "Repeat an update that is done.",
        "verbose": "Print all measures.",
    }
    for name, words in texts.items():
        needed = name in ("run", "data")
        flags.DEFINE_string(name, None, words, required=needed, flag_values=values)
    for name, words in switches.items():
        flags.DEFINE_bool(name, False, words, flag_values=values)
    config_flags.DEFINE_config_dict(
        "config",
        plan.default_options(),
        lock_config=False,
        accept_new_attributes=True,
        sys_argv=argv,
        flag_values=values,
    )


def _read_number(text: str) -> float | str:
    """Read a number; return any other word unchanged for a later check."""
    try:
        return float(text)
    except ValueError:
        return text


def main(argv: list[str]) -> int:
    """Run `jaxcl update`, print the result, and return the exit code."""
    if len(argv) > 1:
        return command.complain(f"unknown argument {argv[1]!r}; see --help")
    options = flags.FLAGS

    def make():
        config = options.config.to_dict()
        if options.average is not None:
            config["average"] = _read_number(options.average)
        planned = plan.make_plan(
            options.run,
            options.data,
            config,
            test=options.test,
            old=options.old,
            join=options.join,
            again=options.again,
        )
        is_new = lineage.read_report(planned.workdir) is None
        return planned, prepare(planned) if is_new else None

    def work(made, stop):
        planned, prepared = made
        with lock.hold_lock(planned.workdir.parent):
            asked = None if options.again else planned.asked
            parent = lineage.find_current(options.run)
            workdir = lineage.choose_folder(options.run, asked)
            if (parent, workdir) != (planned.parent, planned.workdir):
                raise lock.LockHeldError(
                    f"{options.run}: another update ended meanwhile; run the "
                    "same command again to continue from that update"
                )
            report = done = lineage.read_report(planned.workdir)
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
