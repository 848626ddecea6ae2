"""Describe a run before it begins: method, data, network, steps and devices."""

import math
import os

import jax
import numpy as np

from jaxcl import lookup, schema, sharding
from jaxcl.data import stream
from jaxcl.data.images import listing
from jaxcl.run import job, result_file, seeds, transfer


def describe_run(
    work: job.Job | transfer.Transfer | seeds.SeedRuns, workdir: os.PathLike
) -> str:
    """Describe a run in one or two lines, without compiling anything.

    Args:
      work: a run, as `finish.run_job` takes it; of several seeds the first is
        described.
      workdir: the run directory.
    """
    if isinstance(work, seeds.SeedRuns):
        named = f"seeds {work.seeds[0]} to {work.seeds[-1]}; each: "
        text = named + _describe_training(work.make(work.seeds[0]))
    elif isinstance(work, job.Job):
        text = _describe_training(work)
    else:
        text = _describe_transfer(work)
    return f"jaxcl: {os.fspath(workdir)}: {text}"


def _describe_training(work) -> str:
    done = 0  # tasks that the run of config.start has finished
    if work.loop.start and result_file.has_results(work.loop.start):
        done = result_file.count_finished(result_file.read_results(work.loop.start))
    return (
        f"{_name_method(work)} on {_describe_data(work, done)}\n"
        f"jaxcl: {_describe_work(work, done)}\n"
        f"jaxcl: {describe_set(work.stream)}"
    )


def describe_set(tasks: stream.Stream) -> str:
    """Describe in one line the rows, classes and tasks of a set, in order."""
    data = tasks.dataset
    splits = {name: getattr(data, name) for name in ("train", "validation", "test")}
    rows = (
        f"{stream.count_rows(x):,} {name} rows"
        for name, x in splits.items()
        if x is not None
    )
    phrases = [f"{data.name}: {', '.join(rows)}"]
    if data.class_names:
        phrases.append(f"classes: {listing.say_names(data.class_names)}")
    if len(tasks.tasks) > 1:
        phrases.append(f"tasks: {listing.say_names([x.name for x in tasks.tasks], 12)}")
    return "; ".join([*phrases, *data.notes])


def _name_method(work) -> str:
    """Name the method, and the options that choose its parts."""
    section = work.config["method"]
    options = schema.defaults(lookup.find_method(section["name"]).make) | section
    keys = ("base", "strategy", "regulariser", "policy")
    kinds = [lookup.name_of(options.get(key)) for key in keys]
    named = ", ".join(str(kind) for kind in kinds if kind)
    return f"{section['name']} ({named})" if named else section["name"]


def _describe_data(work, done) -> str:
    """Describe the number and size of the examples, and the number of tasks."""
    tasks, count = work.stream, len(work.stream.tasks)
    rows = np.unique(np.concatenate([task.train.rows for task in tasks.tasks]))
    side = work.config["augment"].get("size")
    unit = "graphs" if work.data.graphs else f"images of {side} x {side} pixels"
    if work.config["data"]["name"] == "features":
        unit = "rows of features"
    text = (
        f"{tasks.dataset.name}: {len(rows):,} {unit} in {_format_count(count, 'task')}"
    )
    text += f", {done} of them done" if done else ""
    if tasks.evaluation is not None:
        text += f", {stream.count_rows(tasks.evaluation):,} for evaluation"
    return text


def _format_count(number, unit) -> str:
    return f"{number} {unit}" if number in (1, "1") else f"{number} {unit}s"


def _describe_work(work, done) -> str:
    """Describe the network, the number of steps and the devices."""
    section = work.config["encoder"]
    params = job.shapes(work.method, work.data)[0].params
    sizes = [section[key] for key in ("depth", "size", "width") if section.get(key)]
    net = " ".join(map(str, [section["name"], *sizes[:1]]))
    total, size = map(_count_numbers, (params, params.get("encoder", params)))
    heads = f" ({total:,} with heads)" if total > size else ""
    plans = job.plain_schedules(work.data)[done : work.loop.first_tasks]
    epochs = "/".join(map(str, stream.epochs_of_tasks(work.data.epochs)))
    most = "up to " if work.loop.patience else ""
    trains_again = callable(work.evaluation.single_tasks)
    single = "; then each task alone, for FT_i" if trains_again else ""
    hardware = sharding.describe(work.mesh)
    return (
        f"{net}, {size:,} parameters{heads}; {sum(map(len, plans)):,} steps of "
        f"{work.data.batch_size}, {most}{_format_count(epochs, 'epoch')} a task, on "
        f"{hardware['num_devices']} x {hardware['device']}{single}"
    )


def _count_numbers(params) -> int:
    return sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(params))


def _describe_transfer(work) -> str:
    """Describe the evaluated encoder, the evaluators and the data."""
    evaluators = ", ".join(work.evaluation.evaluators) or "nothing"
    source = work.source.get("path", "an encoder")
    return (
        f"the encoder of {source} ({_count_numbers(work.state.params):,} parameters) "
        f"is evaluated by {evaluators} on {work.stream.dataset.name}: "
        f"{stream.count_rows(work.stream.dataset.train):,} rows to train probes\n"
        f"jaxcl: {describe_set(work.stream)}"
    )
