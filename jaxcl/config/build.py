"""From a ConfigDict to a job: the only reader of config."""

import dataclasses
import functools
import json
from typing import NamedTuple

import jax
import ml_collections
import numpy as np
from etils import epath

from jaxcl import core, schema, sharding
from jaxcl.config import budget, checks, run_config, sections
from jaxcl.config import options as options_lib
from jaxcl.data import identity, stream
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
# Functions of a method that evaluators may call, see `core.EvalParts`
_EVALUATED = ("embed", "predict", "memory", "replayed", "project", "objective")


def build(
    config: ml_collections.ConfigDict, workdir, *, lost: bool = False
) -> job.Job | transfer.Transfer | seeds.Seeds:
    """Make everything that a run needs; reads data, compiles nothing.

    With config.seeds above 1, the runs of all; the first is built, so that what is
    wrong is said, and so is each of the others when its turn comes.

    Args:
      config: what a config file's get_config made, overrides applied.
      workdir: the run directory; it must be this config's or new.
      lost: go on where rows of metrics.jsonl are lost, see `rows.RowFile`.

    Raises:
      ValueError: a wrong key, type or value, naming it and what is allowed; a
        run directory that belongs to another config, naming the fields.
      OSError: data is not where the config says, or cannot be read; the run
        directory cannot be written.
    """
    raw = _with_precision(config.to_dict(), workdir)
    if raw.get("seeds", 1) != 1:
        return _build_seeds(raw, workdir, lost)
    raw = completed(raw)
    plain, top = options_lib.plain(raw, "config"), sections.top_of(raw)
    compile_cache.use(top.compile_cache)
    run_config.check(workdir, plain, run_config.NOTED)  # again below, when all is known
    made: job.Job | transfer.Transfer
    if top.checkpoint is not None:
        made, noted = _transfer(top, workdir, lost), {}
    else:
        made = work = _job(top, plain, workdir, None, lost)
        noted = _count_shards(top.replay, work.mesh) | {"resident": work.data.resident}
    # Save machine-dependent choices with the config: the decoder that "auto" took, and
    # whether images are on the device. They change the crops and thus the results.
    dataset = made.stream.dataset
    noted |= {"decoder": dataset.decoder} if dataset.decoder else {}
    noted |= {} if dataset.bits is None else {"bits": dataset.bits}
    run_config.write_or_check(
        workdir, plain | noted, _list_options(plain, made) | noted
    )
    if jax.process_index() == 0:
        identity.write(workdir, dataset.known)
    return made


def completed(raw: dict) -> dict:
    """Fill in what a config takes from the encoder of its checkpoint or start.

    Raises:
      ValueError: there is none, or it goes with no such config.
    """
    if raw.get("checkpoint") is not None:
        raw = transfer.complete(raw, transfer.config_of(raw["checkpoint"]))
    return sections.completed(raw)


def _list_options(plain, made) -> dict:
    """Return the value of every option, those that data and devices decide included."""
    if isinstance(made, transfer.Transfer):
        return options_lib.values(plain)
    own = {"devices": made.mesh.size, "steps_per_call": made.loop.steps_per_call}
    return options_lib.values(plain, made.loop.replay) | own


def _with_precision(raw: dict, workdir=None) -> dict:
    """Put the precision in place of "auto".

    A resumed run keeps the precision it started with, on any device.
    """
    if raw.get("precision") != "auto":
        return raw
    path = None if workdir is None else epath.Path(workdir) / "config.json"
    begun = run_config.read(path) if path is not None and path.exists() else {}
    return raw | {"precision": begun.get("precision") or sections.precision_of(raw)}


def _build_seeds(raw, workdir, lost) -> seeds.Seeds:
    """Make the runs of several seeds, each with a directory and a config of its own."""
    if raw.get("checkpoint") is not None:
        raise ValueError("config.seeds: a checkpoint is judged once; must be 1")
    whole, plain = sections.completed(raw), options_lib.plain(raw, "config")
    top = sections.top_of(whole)
    run_config.check(workdir, plain)

    @functools.lru_cache(maxsize=1)  # the first is asked for again
    def make(seed):
        own = {"seed": seed, "seeds": 1}
        if raw.get("start") is not None and not folder.is_one(raw["start"]):
            own["start"] = str(epath.Path(raw["start"]) / seeds.folder(seed))
        one = ml_collections.ConfigDict(raw | own)
        return build(one, epath.Path(workdir) / seeds.folder(seed), lost=lost)

    first = make(top.seed)
    own = {"seed": top.seed, "seeds": top.seeds}
    every_option = _list_options(options_lib.plain(whole, "config"), first) | own
    run_config.write_or_check(workdir, plain, every_option)
    chosen = tuple(range(top.seed, top.seed + top.seeds))
    return seeds.Seeds(chosen, make)


def planned(
    config: ml_collections.ConfigDict,
    stand_in=None,
    *,
    one_step: bool = True,
) -> job.Job:
    """Make the job of a config, to be compiled and not run: no judges.

    Nothing is written. Within `sharding.for_elsewhere` it is for the devices there.

    Args:
      config: what a config file's get_config made, overrides applied.
      stand_in: a `stream.Dataset` in place of config.data, which is then not read.
      one_step: whether a call makes one step, else as many as that of a run.

    Raises:
      ValueError: as `build`, and where the config trains nothing.
    """
    raw = sections.completed(_with_precision(config.to_dict()))
    if raw.get("checkpoint") is not None:
        raise ValueError("config.checkpoint: nothing is trained; must be None")
    off = dict(evaluators={}, plasticity=False, start=None, loggers="")
    off |= {"steps_per_call": 1} if one_step else {}
    top = dataclasses.replace(sections.top_of(raw), **off)
    return _job(top, options_lib.plain(raw, "config"), None, stand_in)


def default_workdir(config) -> str:
    """Return runs/NAME of the config; RUN/NAME, where the encoder of RUN is judged."""
    return f"{config.get('checkpoint') or 'runs'}/{config.get('name', 'run')}"


def _job(top: sections.Top, plain, workdir, stand_in=None, lost=False) -> job.Job:
    mesh = sharding.mesh(top.devices)
    sections.check_graphs(top)
    sharding.check_batch(top.batch_size, mesh)
    # Names and types of all options are checked before data are read.
    logging = _logging(top, lost)
    make_stream = sections.tasks(top.data, top.scenario, top.seed, stand_in)
    parts, image = sections.parts(top)
    sections.chosen(top.method)
    replay = schema.options(replay_lib.settings, top.replay or {}, "config.replay")
    if stand_in is None:
        checks.check_path(top)
    tasks = make_stream()
    train = tasks.dataset.train
    sections.check_graphs(top, train)
    tasks = checks.check_data(top, tasks, workdir)
    data = _data(top, tasks, image)
    parts = _with_data(parts, top, tasks, replay, mesh)
    if parts.replay.flops is not None:
        parts = parts._replace(replay=_affordable(top, parts, data, workdir, mesh))
    method = _method(top, parts, mesh)
    eval_parts = _eval_parts(top, method, tasks, image, mesh)
    checks.check_start(top, plain, train)
    evaluators = evaluation.make(top.evaluators, eval_parts, workdir)
    loop = _loop(top, data, method, parts)
    method = job.checked(method, data, mesh)
    return job.Job(
        method=method,
        mesh=mesh,
        data=data,
        loop=loop,
        evaluation=_evaluation(
            top, evaluators, _alone(top, parts, data, method, eval_parts, evaluators)
        ),
        logging=logging,
        config=plain,
    )


def _evaluation(top, evaluators: evaluation.Evaluators, alone=None) -> job.Evaluation:
    return job.Evaluation(
        evaluators=evaluators.judges,
        pictures=evaluators.pictures if top.plots else {},
        charts=evaluators.charts,
        untrained=top.evaluate_untrained,
        alone=alone,
    )


def _logging(top: sections.Top, lost: bool) -> job.Logging:
    return job.Logging(
        every=top.log_every,
        record=record_options(top, lost),
        plots=top.plots,
        plot_formats=tuple(top.plot_formats.split(",")),
        quiet=False,
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


def _loop(top, data: job.Data, method, parts: core.Parts) -> job.Loop:
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
        start=None if parts.starts_pretrained else top.start,
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


def _with_data(parts: core.Parts, top, tasks, replay: dict, mesh) -> core.Parts:
    """Fill in what only the data, the memory and the devices can tell.

    `replay` are the options of config.replay.
    """
    num_classes = max(len(tasks.dataset.class_names), 1)
    settings = replay_lib.settings(num_classes, top.batch_size, **replay)
    for name in ("capacity", "size") if settings.sharded else ():
        sharding.share(f"config.replay.{name}", getattr(settings, name), mesh)
    return parts._replace(
        num_classes=num_classes,
        replay=settings,
        num_tasks=len(tasks.tasks),
        batch_size=top.batch_size,
        train_rows=stream.size(tasks.dataset.train),
        starts_pretrained=folder.is_one(top.start),
    )


def _affordable(top, parts: core.Parts, data: job.Data, workdir, mesh) -> core.Replay:
    """Choose as many updates as config.replay.flops pays for in the last task."""
    last, replay = data.stream.tasks[-1], parts.replay

    def flops(updates):
        own = parts._replace(replay=replay._replace(updates=updates))
        method = _method(top, own, mesh)
        shapes = job.shapes(method, data, method.parts(last))
        return cost.flops(method.step, *shapes, last.index)

    found = budget.updates(replay.flops, top.batch_size, flops, top.method["name"])
    if workdir is not None and jax.process_index() == 0:
        print(f"config.replay.flops={replay.flops:g}: updates={found}", flush=True)
    return replay._replace(updates=found)


def record_options(top: sections.Top, lost: bool = False) -> dict:
    """Choose the options of a config that `run.record.Recorder` takes."""
    return {
        "tensorboard": top.tensorboard,
        "loggers": loggers.makers(top.loggers),
        "progress": top.progress,
        "lost": lost,
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
    # Up to a save, an evaluation, the end of a watched epoch or of the longest task
    plans = job.plain_schedules(data)
    ends = [max(map(len, plans)), top.save_every, top.eval_every]
    if top.patience or top.eval_epochs:
        ends.append(max(plan.steps_per_epoch for plan in plans))
    return min(filter(None, ends))


def _alone(
    top, parts, data: job.Data, method, eval_parts, evaluators
) -> task_alone.Alone | None:
    """Say how to train on one task alone; None where FT_i is not asked for, or judged.

    The method is made when it is needed. So are its evaluators, which put images on the
    devices.
    """
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
    other = options | dict(method.alone)
    # Options that go with those that change go with them.
    known = schema.option_of(module.make, other)
    other = {name: value for name, value in other.items() if name in known}

    def make(work):
        if other == options:
            own_method, own = method, {key: evaluators.judges[key] for key in judges}
        else:
            mesh = eval_parts.mesh
            with sharding.use(mesh):
                own_method = sharding.bind(module.make(parts, **other), mesh)
            own_method = job.checked(own_method, data, mesh)
            own_parts = eval_parts._replace(**_functions_of(own_method))
            own = evaluation.make(judged, own_parts, None).judges
        judging = job.Evaluation(own, {}, (), untrained=False, alone=None)
        return work._replace(method=own_method, evaluation=judging)

    facts = run_config.without(dataclasses.asdict(top), ASIDE) | {
        "method": {"name": top.method["name"]}
        | schema.defaults(module.make, other)
        | other,
        "evaluators": judged,
        "dataset": task_alone.fingerprint(data.stream.dataset),
        "decoder": data.stream.dataset.decoder,
        "resident": data.resident,  # or crops are drawn otherwise
        **_beginning(top, parts),
        **_count_shards(top.replay, eval_parts.mesh),
    }
    alone = task_alone.Alone(make, json.loads(json.dumps(facts)), top.plasticity_cache)
    task_alone.prepare(alone)
    return alone


def _beginning(top, parts: core.Parts) -> dict:
    """Record the files of the encoder that a run begins with, if there is one."""
    if not parts.starts_pretrained:
        return {}
    return {"began_with": folder.read_card(top.start)["files"]}


def _count_shards(replay: dict | None, mesh) -> dict:
    """Return the number of devices, where what a memory holds depends on it."""
    return {"memory_shards": mesh.size} if (replay or {}).get("sharded") else {}


class Frozen(NamedTuple):
    """The encoder of a run, and the images that it is to judge or embed."""

    state: core.TrainState
    source: dict
    parts: core.EvalParts


def frozen(config: ml_collections.ConfigDict) -> Frozen:
    """Read config.data, and restore the encoder of config.checkpoint.

    Args:
      config: as of a transfer run; evaluators do not matter.

    Raises:
      ValueError, OSError: as `build`.
    """
    return _frozen(sections.top_of(completed(_with_precision(config.to_dict()))))


def _frozen(top: sections.Top, workdir=None) -> Frozen:
    mesh = sharding.mesh(top.devices)
    make_stream = sections.tasks(top.data, top.scenario)
    core.check_choice("config.scenario.name", top.scenario.get("name"), ("joint",))
    image = schema.options(sections.image, top.augment, "config.augment")
    image = sections.image(**image)
    encoder = sections.encoder(top)
    checks.check_path(top)
    tasks = checks.check_data(top, make_stream(), workdir)
    train = tasks.dataset.train
    first = train.load(0) if train.images is None else train.images[0]
    blank = np.zeros((1, image["size"], image["size"], first.shape[-1]), np.float32)
    state, source = transfer.restore(top.checkpoint, encoder, blank, mesh)
    net = chain.Chain({"encoder": encoder})
    judged = core.Method(net.init, net.embed, net.embed)  # only `embed` is called
    return Frozen(state, source, _eval_parts(top, judged, tasks, image, mesh))


def embedder(config: ml_collections.ConfigDict):
    """Embed train rows of config.data with the encoder of config.checkpoint.

    Returns:
      (number of rows, rows i32[n] -> f32[n, D]); arguments and errors as of `frozen`.
    """
    state, _, parts = frozen(config)
    examples = parts.stream.dataset.train

    def embed(rows):
        return sharding.fetch(features.make(parts, examples, rows=rows)(state))

    return stream.size(examples), embed


def _transfer(top: sections.Top, workdir, lost) -> transfer.Transfer:
    state, source, eval_parts = _frozen(top, workdir)
    evaluators = evaluation.make(top.evaluators, eval_parts, workdir)
    judging, logging = _evaluation(top, evaluators), _logging(top, lost)
    return transfer.Transfer(state, source, eval_parts.stream, judging, logging)


def _eval_parts(top, method: core.Method, tasks, image, mesh) -> core.EvalParts:
    """Make EvalParts; `method` is what is judged."""
    return core.EvalParts(
        **_functions_of(method),
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


def _functions_of(method: core.Method) -> dict:
    return {name: getattr(method, name) for name in _EVALUATED}
