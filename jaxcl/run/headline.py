"""What a run is, said before it begins: what is trained, on what, where, how long."""

import math
import os

import jax
import numpy as np
from etils import epath

from jaxcl import schema, sharding
from jaxcl.data import stream
from jaxcl.run import job, seeds, transfer
from jaxcl.run import results as results_lib


def of(work: job.Job | transfer.Transfer | seeds.Seeds, workdir: os.PathLike) -> str:
    """Lines that say what a run is; nothing is compiled for them.

    Args:
      work: what `finish.run` carries out; of a `seeds.Seeds` the first is told.
      workdir: the run directory.
    """
    where = os.fspath(workdir)
    if isinstance(work, seeds.Seeds):
        how = "side by side" if work.side_by_side else "one after another"
        first = _job(work.make(work.seeds[0]))
        named = f"seeds {work.seeds[0]} to {work.seeds[-1]}, {how}; each:"
        return f"jaxcl: {where}: {named} {first}"
    told = _job(work) if isinstance(work, job.Job) else _transfer(work)
    return f"jaxcl: {where}: {told}"


def _job(work) -> str:
    done = _done(work.start)
    first = f"{_method(work)} on {_data(work.stream, work.config, done)}"
    return f"{first}\njaxcl: {_work(work, done)}"


def _done(start) -> int:
    """How many tasks the run has done that this one continues."""
    if start is None or not (epath.Path(start) / results_lib.RESULTS).exists():
        return 0
    return results_lib.finished(results_lib.read_results(start))


def _method(work) -> str:
    """The method with the options that choose what it is."""
    section = work.config["method"]
    options = schema.defaults(schema.method(section["name"]).make) | section
    kinds = [options.get(key) for key in ("base", "strategy", "regulariser", "policy")]
    named = ", ".join(str(kind) for kind in kinds if kind)
    return f"{section['name']} ({named})" if named else section["name"]


def _data(tasks: stream.Stream, config, done) -> str:
    """How many examples of what size, in how many tasks, and how many judge."""
    train, judges, count = tasks.dataset.train, tasks.evaluation, len(tasks.tasks)
    rows = np.unique(np.concatenate([task.train.rows for task in tasks.tasks]))
    side, what = config["augment"].get("size"), "graphs"
    if train.graphs is None:
        what = f"images of {side} x {side} pixels"
    held = f", {stream.size(judges):,} to judge" if judges is not None else ""
    before = f", {done} of them done" if done else ""
    return (
        f"{tasks.dataset.name}: {len(rows):,} {what} in {count} "
        f"{'tasks' if count > 1 else 'task'}{before}{held}"
    )


def _work(work, done) -> str:
    """The network, the steps and the devices."""
    section, params = work.config["encoder"], job.shapes(work)[0].params
    sizes = [section[key] for key in ("depth", "size", "width") if section.get(key)]
    net = " ".join(map(str, [section["name"], *sizes[:1]]))
    whole, own = _count(params), _count(params.get("encoder", params))
    heads = f" ({whole:,} with heads)" if whole > own else ""
    steps = sum(map(len, job.plain_schedules(work)[done : work.first_tasks]))
    epochs = "/".join(map(str, stream.epochs_of_tasks(work.epochs)))
    upto = "up to " if work.patience else ""
    alone = "; then each task alone, for FT_i" if work.alone is not None else ""
    return (
        f"{net}, {own:,} parameters{heads}; {steps:,} steps of "
        f"{work.batch_size}, {upto}{epochs} {'epoch' if epochs == '1' else 'epochs'} a "
        f"task, on {_devices(work.mesh)}{alone}"
    )


def _count(params) -> int:
    return sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(params))


def _devices(mesh) -> str:
    told = sharding.describe(mesh)
    return f"{told['num_devices']} x {told['device']}"


def _transfer(work) -> str:
    """Which encoder is judged, by what, on what."""
    count = _count(work.state.params)
    judges = ", ".join(work.evaluators) or "nothing"
    source = work.source.get("path", "an encoder")
    return (
        f"the encoder of {source} ({count:,} parameters) is judged by {judges} on "
        f"{work.stream.dataset.name}: {stream.size(work.stream.dataset.train):,} rows "
        "to train probes"
    )
