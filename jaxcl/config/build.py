"""From a ConfigDict to a job: the only reader of config."""

import dataclasses
import functools
import json
import os
from typing import NamedTuple

import jax
import ml_collections
import numpy as np
from absl import logging
from etils import epath

from jaxcl import core, schema, sharding
from jaxcl.config import budget, files, run_config, sections
from jaxcl.config import options as options_lib
from jaxcl.data import fetch, identity, splits, storage, stream
from jaxcl.evals import features
from jaxcl.methods.online import replay as replay_lib
from jaxcl.nets import chain
from jaxcl.run import (
    compile_cache,
    cost,
    evaluation,
    folder,
    job,
    loggers,
    seeds,
    task_alone,
    transfer,
)

# A run on one task measures the same whatever these are, and those of `MACHINE`.
ASIDE = run_config.MACHINE + (
    "name",
    "regime",
    "plasticity",
    "plasticity_cache",
    "checkpoint",
    "log_every",
    "save_every",
    "eval_every",
    "eval_epochs",
    "start",
    "first_tasks",
    "keep",
    "evaluate_untrained",
    "tensorboard",
    "plots",
)


_MOST_STEPS = 2**31 - 1  # core.TrainState counts them in an i32
_FEW_OF_A_CLASS = 5  # test images, below which an accuracy says little


def _plain(value, field="config"):
    """A config as JSON holds it; ValueError names what JSON cannot hold."""
    if isinstance(value, dict):
        return {str(key): _plain(x, f"{field}.{key}") for key, x in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(x, f"{field}[{i}]") for i, x in enumerate(value)]
    if isinstance(value, np.generic):
        value = value.item()
    if value is None or isinstance(value, bool | int | float | str):
        return value
    raise ValueError(
        f"{field}={value!r}: must be a number, a text, a bool, None, or a list or "
        "section of these"
    )


def build(
    config: ml_collections.ConfigDict, workdir
) -> job.Job | transfer.Transfer | seeds.Seeds:
    """Make everything that a run needs; reads data, compiles nothing.

    With config.seeds above 1, the runs of all; the first is built, so that what is
    wrong is said, and so is each of the others when its turn comes.

    Args:
      config: what a config file's get_config made, overrides applied.
      workdir: the run directory; it must be this config's or new.

    Raises:
      ValueError: a wrong key, type or value, naming it and what is allowed; a
        run directory that belongs to another config, naming the fields.
      OSError: data is not where the config says, or cannot be read; the run
        directory cannot be written.
    """
    raw = _precise(config.to_dict(), workdir)
    if raw.get("seeds", 1) != 1:
        return _seeds(raw, workdir)
    judges = raw.get("checkpoint") is not None
    raw = completed(raw)
    plain = _plain(raw)
    compile_cache.use(sections.top_of(raw).compile_cache)
    run_config.check(workdir, plain, run_config.NOTED)  # again below, when all is known
    # What the machine decided is noted with the config, for it is part of what a run
    # computes: the decoder that "auto" took, and whether the images are on the device,
    # which says who crops them, so which crops there are and what a memory holds.
    noted = {}
    made: job.Job | transfer.Transfer
    if judges:
        made = _transfer(sections.top_of(raw), workdir)
    else:
        made = work = _job(sections.top_of(raw), plain, workdir)
        noted["resident"] = work.data.resident
        noted |= _shards(plain.get("replay"), work.mesh)
    if made.stream.dataset.decoder:
        noted["decoder"] = made.stream.dataset.decoder
    if made.stream.dataset.bits is not None:
        noted["bits"] = made.stream.dataset.bits
    run_config.write_or_check(
        workdir, plain | noted, _every_option(plain, made) | noted
    )
    if jax.process_index() == 0:
        identity.write(workdir, made.stream.dataset.known)
    return made


def completed(raw: dict) -> dict:
    """A config with what it takes from the encoder of its checkpoint or start.

    Raises:
      ValueError: there is none, or it goes with no such config.
    """
    if raw.get("checkpoint") is not None:
        raw = transfer.complete(raw, transfer.config_of(raw["checkpoint"]))
    return sections.completed(raw)


def _every_option(plain, made) -> dict:
    """The value of every option, those that data and devices decide included."""
    if isinstance(made, transfer.Transfer):
        return options_lib.values(plain)
    own = {"devices": made.mesh.size, "steps_per_call": made.loop.steps_per_call}
    return options_lib.values(plain, made.loop.replay) | own


def _precise(raw: dict, workdir=None) -> dict:
    """Put the precision in place of "auto".

    A resumed run keeps the precision it started with, on any device.
    """
    if raw.get("precision") != "auto":
        return raw
    path = None if workdir is None else epath.Path(workdir) / "config.json"
    if path is None or not path.exists():
        return raw | {"precision": sections.precision_of(raw)}
    begun = run_config.read(path)
    if "precision" in begun:
        return raw | {"precision": begun["precision"]}
    return run_config.without(raw, ("precision",))  # its config named none


def _seeds(raw, workdir):
    """The runs of several seeds, each with a directory and a config of its own."""
    if raw.get("checkpoint") is not None:
        raise ValueError("config.seeds: a checkpoint is judged once; must be 1")
    whole, plain = sections.completed(raw), _plain(raw)
    top = sections.top_of(whole)
    run_config.check(workdir, plain)

    @functools.lru_cache(maxsize=1)  # the first is asked for again
    def make(seed):
        own = {"seed": seed, "seeds": 1}
        if raw.get("start") is not None and not folder.is_one(raw["start"]):
            own["start"] = str(epath.Path(raw["start"]) / seeds.folder(seed))
        one = ml_collections.ConfigDict(raw | own)
        return build(one, epath.Path(workdir) / seeds.folder(seed))

    first = make(top.seed)
    side_by_side = _side_by_side(top, first)
    own = {name: getattr(top, name) for name in ("seed", "seeds")}
    own["side_by_side"] = side_by_side
    run_config.write_or_check(workdir, plain, _every_option(_plain(whole), first) | own)
    chosen = tuple(range(top.seed, top.seed + top.seeds))
    return seeds.Seeds(chosen, make, side_by_side)


def _side_by_side(top: sections.Top, first: job.Job) -> bool:
    """Choose whether the seeds share a program; `first` is the job of the first one."""
    side_by_side = top.side_by_side
    split = (top.replay or {}).get("sharded") or top.method.get("sharded")
    if split and side_by_side:
        raise ValueError(
            f"config.side_by_side={side_by_side}: runs whose memory is split over the "
            "devices (config.replay.sharded or config.method.sharded) go one after "
            "another; must be None or False"
        )
    # Tasks that each seed cuts in its own way; batches with rows that the memory of
    # each seed names, or several batches; tasks that end when a seed's loss says so.
    several = any(first.parts(task.index) > 1 for task in first.stream.tasks)
    mixes = several or first.loop.counts_epochs or first.method.replayed is not None
    mixes = mixes or sections.follows_seed(top.scenario)
    if mixes and side_by_side:
        raise ValueError(
            f"config.side_by_side={side_by_side}: runs of {top.method['name']} have "
            "batches that cannot be joined, count epochs (config.patience, "
            "eval_epochs), or cut the tasks by the seed (config.scenario without a "
            "seed), and go one after another; must be None or False"
        )
    if side_by_side is None:
        return not (split or mixes or sharding.on_cpu())
    return side_by_side


def planned(
    config: ml_collections.ConfigDict,
    stand_in=None,
    *,
    one_step: bool = True,
    every_seed: bool = False,
) -> job.Job:
    """The job of a config, to be compiled and not run: no judges.

    Nothing is written. Within `sharding.for_elsewhere` it is for the devices there.

    Args:
      config: what a config file's get_config made, overrides applied.
      stand_in: a `stream.Dataset` in place of config.data, which is then not read.
      one_step: whether a call makes one step, else as many as that of a run.
      every_seed: whether it is the job of all seeds, if these go side by side; else,
        and if they go one after another, it is that of one.

    Raises:
      ValueError: as `build`, and where the config trains nothing.
    """
    raw = sections.completed(_precise(config.to_dict()))
    if raw.get("checkpoint") is not None:
        raise ValueError("config.checkpoint: nothing is trained; must be None")
    off = dict(evaluators={}, plasticity=False, start=None, loggers="")
    top = dataclasses.replace(sections.top_of(raw), **off)
    if one_step:
        top = dataclasses.replace(top, steps_per_call=1)
    work = _job(top, _plain(raw), None, stand_in)
    if not every_seed or top.seeds == 1:
        return work
    if not _side_by_side(top, work):
        return work
    chosen = range(top.seed, top.seed + top.seeds)
    jobs = {seed: work._replace(data=work.data._replace(seed=seed)) for seed in chosen}
    return seeds.join_jobs(jobs)


def default_workdir(config) -> str:
    """runs/NAME of the config; RUN/NAME, where the encoder of RUN is judged."""
    return f"{config.get('checkpoint') or 'runs'}/{config.get('name', 'run')}"


def _job(top: sections.Top, plain: dict, workdir, stand_in=None) -> job.Job:
    mesh = sharding.mesh(top.devices)
    sections.check_graphs(top)
    sharding.check_batch(top.batch_size, mesh)
    # Names and types of all options are checked before data are read.
    record = record_options(top)
    make_stream = sections.tasks(top.data, top.scenario, top.seed, stand_in)
    parts, image = sections.parts(top)
    sections.chosen(top.method)
    kept = schema.options(replay_lib.settings, top.replay or {}, "config.replay")
    if stand_in is None:
        _check_data_path(top)
    tasks = make_stream()
    sections.check_graphs(top, tasks.dataset.train)
    tasks = _checked_data(top, tasks, workdir)
    data = _data(top, tasks, image)
    parts = _whole(parts, top, tasks, kept, mesh)
    if parts.replay.flops is not None:
        parts = parts._replace(replay=_affordable(top, parts, data, workdir, mesh))
    method = _method(top, parts, mesh)
    eval_parts = _eval_parts(top, _asked_of(method), tasks, image, mesh)
    run_before = _run_before(top, plain, parts, tasks)
    evaluators = evaluation.make(top.evaluators, eval_parts, workdir)
    loop = _loop(top, data, method, parts, run_before)
    method = job.checked(method, data, mesh)
    alone = _alone(top, parts, data, method, eval_parts, evaluators)
    return job.Job(
        method=method,
        mesh=mesh,
        data=data,
        loop=loop,
        evaluation=job.Evaluation(
            evaluators=evaluators.judges,
            pictures=evaluators.pictures if top.plots else {},
            charts=evaluators.charts,
            untrained=top.evaluate_untrained,
            alone=alone,
        ),
        logging=job.Logging(
            every=top.log_every,
            record=record,
            plots=top.plots,
            plot_formats=tuple(top.plot_formats.split(",")),
            quiet=False,
        ),
        config=plain,
    )


def _data(top: sections.Top, tasks: stream.Stream, image: dict) -> job.Data:
    """Choose what is read and how; `image` is from `sections.parts`."""
    images, crop = tasks.dataset.train.images, image["crop"]
    return job.Data(
        stream=tasks,
        task_names=tuple(task.name for task in tasks.tasks),
        seed=top.seed,
        batch_size=top.batch_size,
        epochs=top.epochs,
        resident=images is not None and images.nbytes <= top.device_bytes,
        crop=crop and crop._replace(decoder=tasks.dataset.decoder or "auto"),
        views=image["views"],
        workers=top.workers,
    )


def _loop(top, data: job.Data, method, parts: core.Parts, run_before) -> job.Loop:
    """Choose how long the run trains, and how many steps are one call."""
    steps, tasks = job.steps_left(data, 0), len(data.stream.tasks)
    if steps > _MOST_STEPS:
        raise ValueError(
            f"config.epochs={top.epochs}: makes {steps} steps of config.batch_size="
            f"{top.batch_size}; must be at most {_MOST_STEPS} in all"
        )
    if top.first_tasks is not None and top.first_tasks > tasks:
        raise ValueError(
            f"config.first_tasks={top.first_tasks}: the scenario has only {tasks} tasks"
        )
    return job.Loop(
        steps_per_call=_steps_per_call(top, data, method),
        save_every=top.save_every,
        eval_every=top.eval_every,
        eval_epochs=top.eval_epochs,
        patience=top.patience,
        keep=top.keep,
        start=run_before,
        first_tasks=top.first_tasks,
        replay=parts.replay if method.replays else None,
    )


def _method(top: sections.Top, parts: core.Parts, mesh) -> core.Method:
    """Make the method, which must replay where config.replay says how."""
    with sharding.use(mesh):
        method = sections.method(top, parts)
    if top.replay and not method.replays:
        raise ValueError(
            f"config.replay={top.replay}: {top.method['name']} replays nothing by it; "
            "leave the section out"
        )
    return sharding.bind(method, mesh)


def _whole(parts: core.Parts, top, tasks, kept: dict, mesh) -> core.Parts:
    """The parts, with what only the data, the memory and the devices can tell.

    `kept` are the options of config.replay.
    """
    num_classes = max(len(tasks.dataset.class_names), 1)
    replay = replay_lib.settings(num_classes, top.batch_size, **kept)
    for name in ("capacity", "size") if replay.sharded else ():
        sharding.share(f"config.replay.{name}", getattr(replay, name), mesh)
    return parts._replace(
        num_classes=num_classes,
        replay=replay,
        num_tasks=len(tasks.tasks),
        batch_size=top.batch_size,
        starts_pretrained=folder.is_one(top.start),
    )


def _run_before(top, plain: dict, parts: core.Parts, tasks) -> str | None:
    """The run directory of config.start, checked; None if it has an encoder alone."""
    run_before = None if parts.starts_pretrained else top.start
    if top.scenario.get("name") == "after" and run_before is None:
        raise ValueError(
            "config.scenario.name='after': the tasks before are those of config.start; "
            "set it to a run directory"
        )
    if parts.starts_pretrained:
        _check_channels(top.start, tasks.dataset.train)
    elif run_before is not None:
        _check_start(run_before, plain)
    return run_before


def _affordable(top, parts: core.Parts, data: job.Data, workdir, mesh) -> core.Replay:
    """config.replay with the updates that its FLOPs pay for, in the last task."""
    last, replay = data.stream.tasks[-1], parts.replay

    def flops(updates):
        own = parts._replace(replay=replay._replace(updates=updates))
        method = _method(top, own, mesh)
        shapes = job.shapes(method, data, method.parts(last))
        return cost.flops(method.step, *shapes, last.index)

    name = top.method["name"]
    found = budget.updates(replay.flops, top.batch_size, flops, name)
    if workdir is not None and jax.process_index() == 0:
        print(f"config.replay.flops={replay.flops:g}: updates={found}", flush=True)
    return replay._replace(updates=found)


def _check_data_path(top) -> None:
    """Refuse a path at which there are no data; say how to get or do without them."""
    path = top.data.get("path")
    if not isinstance(path, str) or storage.exists(path):
        return
    names = (os.path.basename(os.path.normpath(path)), top.data.get("name"))
    fetched = [name for name in names if name in fetch.SETS]
    ways = [f"download the set: jaxcl data {name} --out={path}" for name in fetched[:1]]
    ways.append("say where it is: --config.data.path=FOLDER")
    if top.name in files.names():
        ways.append(f"try the config without its data: jaxcl train {top.name}:debug")
    raise ValueError(
        f"config.data.path={path!r}: there is nothing at this path. You can "
        f"{'; or '.join(ways)}"
    )


def _checked_data(top, tasks: stream.Stream, workdir) -> stream.Stream:
    """Refuse other data than a run began with; warn of what makes numbers flatter.

    Warned of are images that are there more than once, see config.duplicates, and
    classes that are judged and not trained on. Nothing is done without a `workdir`.
    """
    if workdir is None:
        return tasks
    dataset, first = tasks.dataset, jax.process_index() == 0
    known = identity.identify(dataset)
    identity.check(workdir, known)
    tasks = tasks._replace(dataset=dataset._replace(known=known))
    judges = {
        section.get("name", key)
        for key, section in top.evaluators.items()
        if section.get("train_on") != "evaluation"
    }
    if odd := splits.unknown_classes(dataset, tasks.evaluation):
        rows, words = odd
        if rows == stream.size(tasks.evaluation) and judges & _PROBES:
            raise ValueError(f"config.data: {words}: nothing could be measured")
        if first:
            logging.warning("config.data: %s", words)
    asked = known.by_bytes if top.duplicates is None else top.duplicates
    if asked and first:
        known = known if known.by_bytes else identity.identify(dataset, True)
        if words := identity.find_duplicates(known).describe(
            "config.data: " + dataset.name
        ):
            logging.warning("%s", words)
    _tell_few_test_images(top, tasks)
    return tasks


# Evaluators that learn from train images what they tell of the others.
_PROBES = {"knn", "linear", "logistic", "svm"}


def _tell_few_test_images(top, tasks) -> None:
    """Warn where an accuracy is of so few images that it says little."""
    if tasks.evaluation is None or not top.evaluators or jax.process_index() != 0:
        return
    labels = tasks.evaluation.label[tasks.evaluation.label >= 0]
    classes = len(np.unique(labels))
    if 0 < len(labels) < _FEW_OF_A_CLASS * classes:
        logging.warning(
            "config.data: %s: %d test images of %d classes, so one image moves an "
            "accuracy by %.1f points: hold out a larger share (config.data.test) or "
            "judge by other labelled images",
            tasks.dataset.name,
            len(labels),
            classes,
            100 / len(labels),
        )


def _check_start(start, plain) -> None:
    """Refuse to go on from a run of other data or another network.

    After its last task there may be other data, but the state is that of the method.
    """
    path = epath.Path(start) / "config.json"
    if not path.exists():
        raise ValueError(f"config.start={start!r}: there is no run in it")
    theirs = storage.read_object(path)
    same = ["encoder", "augment", "precision"]
    after = plain["scenario"].get("name") == "after"
    same += ["method"] if after else ["seed", "data", "scenario", "batch_size"]
    pair = [{name: x[name] for name in same if name in x} for x in (theirs, plain)]
    changed = schema.differences(*pair)
    if changed:
        raise ValueError(
            f"config.start={start!r}: a run of another config; they differ in "
            f"{'; '.join(changed)}"
        )


def _check_channels(start, train) -> None:
    """Refuse images of other channels than the encoder of a folder takes."""
    if train.graphs is not None:
        raise ValueError(f"config.start={start!r}: it is an encoder of images")
    want = folder.read_card(start)["input"]["channels"]
    first = train.load(0) if train.images is None else train.images[0]
    if first.shape[-1] != want:
        raise ValueError(
            f"config.start={start!r}: its images have {want} channels, those of "
            f"config.data have {first.shape[-1]}"
        )


_SLOW = (
    "on a CPU a smaller config.encoder, config.augment.size or config.epochs helps; "
    "Ctrl-C saves"
)


def record_options(top: sections.Top) -> dict:
    """Choose the options of a config that `run.record.Recorder` takes."""
    return {
        "tensorboard": top.tensorboard,
        "loggers": loggers.makers(top.loggers),
        "progress": top.progress,
        "slow": _SLOW if sharding.on_cpu() else "",
    }


def _steps_per_call(top, data: job.Data, method: core.Method) -> int:
    """Choose how many steps one call makes; graphs differ in size, so they get one."""
    asked = top.steps_per_call
    if data.graphs:
        if asked not in (None, 1):
            raise ValueError(
                f"config.steps_per_call={asked}: batches of graphs have several sizes; "
                "must be None or 1"
            )
        return 1
    if asked is None:
        # Steps on ten rows are so short that a host cannot start them one by one.
        short = method.replays and data.resident
        asked = 1 if sharding.on_cpu() else "task" if short else 8
    if asked != "task":
        return asked
    if not data.resident:
        raise ValueError(
            "config.steps_per_call='task': the images of a whole task would be in one "
            "call; must be a number where they stream from the host"
        )
    return _longest_call(top, data)


def _longest_call(top, data: job.Data) -> int:
    """Count the most steps that may follow each other with nothing between them.

    That is up to a save, an evaluation, the end of an epoch that is looked at, or the
    end of the longest task.
    """
    plans = job.plain_schedules(data)
    every = [number for number in (top.save_every, top.eval_every) if number]
    if top.patience or top.eval_epochs:
        every.append(max(plan.steps_per_epoch for plan in plans))
    return min([max(map(len, plans)), *every])


def _alone(
    top, parts, data: job.Data, method, eval_parts, evaluators
) -> task_alone.Alone | None:
    """How to train on one task alone; None where FT_i is not asked for, or judged."""
    if not top.plasticity or len(data.stream.tasks) == 1:
        return None
    judges = [
        key
        for key, evaluate in evaluators.judges.items()
        if not isinstance(evaluate, evaluation.AtTheEnd)
    ]
    if not judges:
        return None
    judged = {key: top.evaluators[key] for key in judges}
    module, options = sections.chosen(top.method)
    options = schema.defaults(module.make, options) | options
    own_method, other = method, options | dict(method.alone)
    if other != options:
        # Options that go with those that change go with them.
        known = schema.option_of(module.make, other)
        other = {name: value for name, value in other.items() if name in known}
        with sharding.use(eval_parts.mesh):
            own_method = module.make(parts, **other)
        own_method = sharding.bind(own_method, eval_parts.mesh)
        own_method = job.checked(own_method, data, eval_parts.mesh)

    def make(work):
        if own_method is method:
            own = {key: evaluators.judges[key] for key in judges}
        else:  # made now and not before: they put images on the devices
            own_parts = eval_parts._replace(**_asked_of(own_method))
            own = evaluation.make(judged, own_parts, None).judges
        own = job.Evaluation(own, {}, (), untrained=False, alone=None)
        return work._replace(method=own_method, evaluation=own)

    facts = run_config.without(dataclasses.asdict(top), ASIDE) | {
        "method": {"name": top.method["name"]}
        | schema.defaults(module.make, other)
        | other,
        "evaluators": judged,
        "dataset": task_alone.fingerprint(data.stream.dataset),
        "decoder": data.stream.dataset.decoder,
        "resident": data.resident,  # or crops are drawn otherwise
        **_beginning(top, parts),
        **_shards(top.replay, eval_parts.mesh),
    }
    alone = task_alone.Alone(make, json.loads(json.dumps(facts)), top.plasticity_cache)
    task_alone.prepare(alone)
    return alone


def _beginning(top, parts: core.Parts) -> dict:
    """Record the files of the encoder that a run begins with, if there is one."""
    if not parts.starts_pretrained:
        return {}
    return {"began_with": folder.read_card(top.start)["files"]}


def _shards(replay: dict | None, mesh) -> dict:
    """The number of devices, where what a memory holds depends on it."""
    return {"memory_shards": mesh.size} if (replay or {}).get("sharded") else {}


class _Frozen(NamedTuple):
    """The encoder of a run, and the images that it is to judge or embed."""

    state: core.TrainState
    source: dict
    parts: core.EvalParts


def _frozen(top: sections.Top, workdir=None) -> _Frozen:
    mesh = sharding.mesh(top.devices)
    make_stream = sections.tasks(top.data, top.scenario)
    core.check_choice("config.scenario.name", top.scenario.get("name"), ("joint",))
    image = schema.options(sections.image, top.augment, "config.augment")
    image = sections.image(**image)
    encoder = sections.encoder(top)
    _check_data_path(top)
    tasks = make_stream()
    tasks = _checked_data(top, tasks, workdir)
    train = tasks.dataset.train
    first = train.load(0) if train.images is None else train.images[0]
    blank = np.zeros((1, image["size"], image["size"], first.shape[-1]), np.float32)
    state, source = transfer.restore(top.checkpoint, encoder, blank, mesh)
    asked = {"embed": chain.Chain({"encoder": encoder}).embed}
    return _Frozen(state, source, _eval_parts(top, asked, tasks, image, mesh))


def embedder(config: ml_collections.ConfigDict):
    """Embed train rows of config.data with the encoder of config.checkpoint.

    Args:
      config: as of a transfer run; evaluators do not matter.

    Returns:
      (number of rows, rows i32[n] -> f32[n, D]).

    Raises:
      ValueError, OSError: as `build`.
    """
    raw = _precise(config.to_dict())
    raw = transfer.complete(raw, transfer.config_of(raw["checkpoint"]))
    state, _, parts = _frozen(sections.top_of(raw))
    examples = parts.stream.dataset.train

    def embed(rows):
        found = features.make(parts, examples, rows=rows)(state)
        return sharding.fetch(found)

    return stream.size(examples), embed


def _transfer(top: sections.Top, workdir) -> transfer.Transfer:
    state, source, eval_parts = _frozen(top, workdir)
    evaluators = evaluation.make(top.evaluators, eval_parts, workdir)
    return transfer.Transfer(
        state=state,
        source=source,
        stream=eval_parts.stream,
        evaluators=evaluators.judges,
        pictures=evaluators.pictures if top.plots else {},
        record=record_options(top),
        plot_formats=tuple(top.plot_formats.split(",")),
    )


def _eval_parts(top, asked, tasks, image, mesh) -> core.EvalParts:
    """Make EvalParts; `asked` are the functions of the network that is judged."""
    return core.EvalParts(
        **asked,
        stream=tasks,
        num_classes=max(len(tasks.dataset.class_names), 1),
        size=image["size"],
        mean=tuple(image["mean"]),
        std=tuple(image["std"]),
        resize=image["resize"],
        seed=top.seed,
        mesh=mesh,
        workers=top.workers,
    )


def _asked_of(method: core.Method) -> dict:
    """The functions of a method that evaluators may call, see `core.EvalParts`."""
    return {
        "embed": method.embed,
        "predict": method.predict,
        "memory": method.memory,
        "replayed": method.replayed,
        "project": method.project,
        "objective": method.objective,
    }
