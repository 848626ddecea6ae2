"""From a ConfigDict to a job: the only reader of config."""

import dataclasses
import functools
from collections.abc import Callable
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
    transfer,
)

_MOST_STEPS = 2**31 - 1  # core.TrainState counts them in an i32
# Functions of a method that evaluators may call, see `core.EvalParts`
_EVALUATED = ("embed", "predict", "memory", "replayed", "project", "objective")


def build(
    config: ml_collections.ConfigDict, workdir
) -> job.Job | transfer.Transfer | seeds.SeedRuns:
    """Make everything that a run needs; reads data, compiles nothing.

    With config.seeds above 1, return the runs of all seeds. The first is built at once,
    to find errors; each of the others is built when its turn comes.

    Args:
      config: what a config file's get_config made, overrides applied.
      workdir: the run directory; it must be this config's or new.

    Raises:
      ValueError: a wrong key, type or value, naming it and its range; a
        run directory that belongs to another config, naming the fields.
      OSError: data are missing or cannot be read; the run
        directory cannot be written.
    """
    raw = _fill_precision(config.to_dict(), workdir)
    if raw.get("seeds", 1) != 1:
        return _build_seeds(raw, workdir)
    raw = fill_from_encoder(raw)
    plain, top = options_lib.to_json(raw, "config"), sections.read_top(raw)
    compile_cache.use_cache(top.compile_cache)
    # Below again, when the choices of the machine are known
    run_config.check_config(workdir, plain, run_config.NOTED)
    made: job.Job | transfer.Transfer
    if top.checkpoint is not None:
        made = _build_transfer(top, workdir)
    else:
        made = job.trace_step(_build_job(top, plain, workdir))
    noted = _note_choices(top, made)
    every_option = _list_options(plain, made) | noted
    run_config.write_or_check(workdir, plain | noted, every_option)
    if jax.process_index() == 0:
        identity.write_identity(workdir, made.stream.dataset.known)
    return made


def _note_choices(top: sections.TopLevel, made) -> dict:
    """Note choices of this machine that change results, to save with the config.

    The decoder that "auto" took, and images that stay on the device, change the crops;
    devices that share a memory change what it holds.
    """
    decoder = made.stream.dataset.decoder
    noted = {"decoder": decoder} if decoder else {}
    if isinstance(made, job.Job):
        noted["resident"] = made.data.resident
        if (top.replay or {}).get("sharded"):
            noted["memory_shards"] = sharding.sharers(made.mesh)
    return noted


def fill_from_encoder(raw: dict) -> dict:
    """Fill in values from the encoder of config.checkpoint or config.start.

    Raises:
      ValueError: there is none, or it does not fit the config.
    """
    if raw.get("checkpoint") is not None:
        raw = transfer.complete(raw, transfer.config_of(raw["checkpoint"]))
    return sections.fill_from_start(raw)


def _list_options(plain, made) -> dict:
    """Return the value of every option; data and devices decide some."""
    if isinstance(made, transfer.Transfer):
        return options_lib.values(plain)
    own = {"devices": made.mesh.size, "steps_per_call": made.loop.steps_per_call}
    return options_lib.values(plain, made.loop.replay) | own


def _fill_precision(raw: dict, workdir=None) -> dict:
    """Put the precision in place of "auto".

    A resumed run keeps the precision it started with, on any device.
    """
    if raw.get("precision") != "auto":
        return raw
    path = None if workdir is None else epath.Path(workdir) / "config.json"
    begun = run_config.read_config(path) if path is not None and path.exists() else {}
    return raw | {"precision": begun.get("precision") or sections.choose_precision(raw)}


def _build_seeds(raw, workdir) -> seeds.SeedRuns:
    """Make the runs of several seeds, each with a directory and a config of its own."""
    if raw.get("checkpoint") is not None:
        raise ValueError("config.seeds: a checkpoint is judged once; must be 1")
    whole, plain = sections.fill_from_start(raw), options_lib.to_json(raw, "config")
    top = sections.read_top(whole)
    run_config.check_config(workdir, plain)

    @functools.lru_cache(maxsize=1)  # the first is asked for again
    def make(seed):
        own = {"seed": seed, "seeds": 1}
        for name in ("start", "plasticity_from"):
            if raw.get(name) is not None and not folder.is_one(raw[name]):
                own[name] = str(epath.Path(raw[name]) / seeds.folder(seed))
        one = ml_collections.ConfigDict(raw | own)
        return build(one, epath.Path(workdir) / seeds.folder(seed))

    first = make(top.seed)
    own = {"seed": top.seed, "seeds": top.seeds}
    every_option = _list_options(options_lib.to_json(whole, "config"), first) | own
    run_config.write_or_check(workdir, plain, every_option)
    chosen = tuple(range(top.seed, top.seed + top.seeds))
    return seeds.SeedRuns(chosen, make)


def plan_job(
    config: ml_collections.ConfigDict,
    stand_in=None,
    *,
    one_step: bool = True,
) -> job.Job:
    """Make the job of a config for compilation only; it has no evaluators.

    Nothing is written. Within `sharding.for_elsewhere` the job is for other devices.

    Args:
      config: what a config file's get_config made, overrides applied.
      stand_in: a `stream.Dataset` in place of config.data, which is then not read.
      one_step: compile one step a call, else as many as a run does.

    Raises:
      ValueError: as `build`, and where the config trains nothing.
    """
    raw = sections.fill_from_start(_fill_precision(config.to_dict()))
    if raw.get("checkpoint") is not None:
        raise ValueError("config.checkpoint: nothing is trained; must be None")
    off = dict(evaluators={}, plasticity=False, start=None, loggers="")
    off |= {"steps_per_call": 1} if one_step else {}
    top = dataclasses.replace(sections.read_top(raw), **off)
    plain = options_lib.to_json(raw, "config")
    return job.trace_step(_build_job(top, plain, None, stand_in))


def default_workdir(config) -> str:
    """Return runs/NAME of the config; RUN/NAME, where the encoder of RUN is
    evaluated."""
    return f"{config.get('checkpoint') or 'runs'}/{config.get('name', 'run')}"


def _build_job(top: sections.TopLevel, plain, workdir, stand_in=None) -> job.Job:
    """Make a job: options first, then data, then what depends on them."""
    mesh, logging = sections.make_mesh(top), _choose_logging(top)
    sections.check_graphs(top)
    sharding.check_batch(top.batch_size, mesh)
    make_stream = sections.read_tasks(top.data, top.scenario, top.seed, stand_in)
    make_parts, image = sections.read_parts(top)
    sections.find_method(top.method)
    replay = schema.options(replay_lib.settings, top.replay or {}, "config.replay")
    if stand_in is None:
        checks.check_path(top)

    tasks = make_stream()
    sections.check_graphs(top, tasks.dataset.train)
    tasks = checks.check_data(top, tasks, workdir)
    data = _choose_data(top, tasks, image)

    parts = make_parts(**_read_facts(top, tasks, replay, mesh))
    if parts.replay.flops is not None:
        parts = parts._replace(replay=_choose_updates(top, parts, data, workdir, mesh))
    method = _make_method(top, parts, mesh)
    eval_parts = _make_eval_parts(top, method, tasks, image, mesh)
    checks.check_start(top, plain, tasks.dataset.train)
    evaluators = evaluation.make(top.evaluators, eval_parts, workdir)
    loop = _choose_loop(top, data, method, parts)
    job.check_rows(method, data)
    alone = _single_task_runs(top, plain, parts, data, method, eval_parts, evaluators)
    judging = _choose_evaluation(top, evaluators, alone)
    return job.Job(method, mesh, data, loop, judging, logging, config=plain)


def _choose_evaluation(
    top, evaluators: evaluation.Evaluators, alone=None
) -> job.Evaluation:
    return job.Evaluation(
        evaluators=evaluators.judges,
        pictures=evaluators.pictures if top.plots else {},
        charts=evaluators.charts,
        untrained=top.evaluate_untrained,
        alone=alone,
    )


def _choose_logging(top: sections.TopLevel) -> job.Logging:
    return job.Logging(
        every=top.log_every,
        record={
            "tensorboard": top.tensorboard,
            "loggers": loggers.makers(top.loggers),
            "progress": top.progress,
        },
        plots=top.plots,
        quiet=False,
    )


def _choose_data(top: sections.TopLevel, tasks: stream.Stream, image: dict) -> job.Data:
    """Choose what is read and how; `image` is from `sections.read_parts`."""
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


def _choose_loop(top, data: job.Data, method, parts: core.Parts) -> job.Loop:
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


def _make_method(top: sections.TopLevel, parts: core.Parts, mesh) -> core.Method:
    """Make the method; refuse config.replay for a method that replays nothing."""
    with sharding.use_mesh(mesh):
        method = sections.make_method(top, parts)
    if top.replay and not method.replays:
        raise ValueError(
            f"config.replay={top.replay}: {top.method['name']} replays nothing by it; "
            "leave the section out"
        )
    return sharding.bind_to_mesh(method, mesh)


def _read_facts(top, tasks, replay: dict, mesh) -> dict:
    """Read the fields of Parts that depend on data, memory and devices.

    `replay` are the options of config.replay.
    """
    num_classes = max(len(tasks.dataset.class_names), 1)
    settings = replay_lib.settings(num_classes, top.batch_size, **replay)
    for name in ("capacity", "size") if settings.sharded else ():
        sharding.per_device(f"config.replay.{name}", getattr(settings, name), mesh)
    return {
        "num_classes": num_classes,
        "replay": settings,
        "num_tasks": len(tasks.tasks),
        "batch_size": top.batch_size,
        "train_rows": stream.count_rows(tasks.dataset.train),
        "starts_pretrained": folder.is_one(top.start),
    }


def _choose_updates(
    top, parts: core.Parts, data: job.Data, workdir, mesh
) -> core.Replay:
    """Choose as many updates as config.replay.flops pays for in the last task."""
    last, replay = data.stream.tasks[-1], parts.replay

    def flops(updates):
        own = parts._replace(replay=replay._replace(updates=updates))
        method = _make_method(top, own, mesh)
        shapes = job.shapes(method, data, method.parts(last))
        return cost.count_flops(method.step, *shapes, last.index)

    found = budget.updates(replay.flops, top.batch_size, flops, top.method["name"])
    if workdir is not None and jax.process_index() == 0:
        print(f"config.replay.flops={replay.flops:g}: updates={found}", flush=True)
    return replay._replace(updates=found)


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


def _single_task_runs(
    top, plain, parts, data: job.Data, method, eval_parts, evaluators
) -> Callable | dict | None:
    """Describe how to train on one task alone, or read the results of a run that did.

    None if FT_i is not wanted or not evaluated. The method is made when it is needed.
    So are its evaluators, which put images on the devices.
    """
    if not top.plasticity or len(data.stream.tasks) == 1:
        return None
    if top.plasticity_from is not None:
        return checks.found_alone(top.plasticity_from, plain, method)
    judges = [
        key
        for key, evaluate in evaluators.judges.items()
        if not isinstance(evaluate, evaluation.AtTheEnd)
    ]
    if not judges:
        return None
    judged = {key: top.evaluators[key] for key in judges}
    module, options = sections.find_method(top.method)
    options = schema.defaults(module.make, options) | options
    other = options | dict(method.alone)
    # Options that go with those that change go with them.
    known = schema.option_of(module.make, other)
    other = {name: value for name, value in other.items() if name in known}

    def make(work):
        judging = job.Evaluation({}, {}, (), untrained=False, alone=None)
        if other == options:
            same = {key: evaluators.judges[key] for key in judges}
            return work._replace(evaluation=judging._replace(evaluators=same))
        with sharding.use_mesh(work.mesh):
            own = sharding.bind_to_mesh(module.make(parts, **other), work.mesh)
        own_parts = eval_parts._replace(**_pick_functions(own))
        made = evaluation.make(judged, own_parts, None).judges
        judging = judging._replace(evaluators=made)
        job.check_rows(own, data)
        return job.trace_step(work._replace(method=own, evaluation=judging))

    return make


class Frozen(NamedTuple):
    """The encoder of a run, and the images that it is to evaluate or embed."""

    state: core.TrainState
    source: dict
    parts: core.EvalParts


def restore_frozen(config: ml_collections.ConfigDict) -> Frozen:
    """Read config.data, and restore the encoder of config.checkpoint.

    Args:
      config: like that of a transfer run; its evaluators are ignored.

    Raises:
      ValueError, OSError: as `build`.
    """
    return _restore_frozen(
        sections.read_top(fill_from_encoder(_fill_precision(config.to_dict())))
    )


def _restore_frozen(top: sections.TopLevel, workdir=None) -> Frozen:
    mesh = sections.make_mesh(top)
    make_stream = sections.read_tasks(top.data, top.scenario)
    core.check_choice("config.scenario.name", top.scenario.get("name"), ("joint",))
    image = schema.options(sections.check_image, top.augment, "config.augment")
    image = sections.check_image(**image)
    encoder = sections.make_encoder(top)
    checks.check_path(top)
    tasks = checks.check_data(top, make_stream(), workdir)
    train = tasks.dataset.train
    first = train.load(0) if train.images is None else train.images[0]
    blank = np.zeros((1, image["size"], image["size"], first.shape[-1]), np.float32)
    state, source = transfer.restore(top.checkpoint, encoder, blank, mesh)
    net = chain.Chain({"encoder": encoder})
    judged = core.Method(net.init, net.embed, net.embed)  # only `embed` is called
    return Frozen(state, source, _make_eval_parts(top, judged, tasks, image, mesh))


def make_embedder(config: ml_collections.ConfigDict):
    """Embed train rows of config.data with the encoder of config.checkpoint.

    Returns:
      (number of rows, rows i32[n] -> f32[n, D]); errors as of `restore_frozen`.
    """
    state, _, parts = restore_frozen(config)
    examples = parts.stream.dataset.train

    def embed(rows):
        return sharding.copy_to_host(
            features.make_embedder(parts, examples, rows=rows)(state)
        )

    return stream.count_rows(examples), embed


def _build_transfer(top: sections.TopLevel, workdir) -> transfer.Transfer:
    state, source, eval_parts = _restore_frozen(top, workdir)
    evaluators = evaluation.make(top.evaluators, eval_parts, workdir)
    judging, logging = _choose_evaluation(top, evaluators), _choose_logging(top)
    return transfer.Transfer(state, source, eval_parts.stream, judging, logging)


def _make_eval_parts(top, method: core.Method, tasks, image, mesh) -> core.EvalParts:
    """Make EvalParts for a method."""
    return core.EvalParts(
        **_pick_functions(method),
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


def _pick_functions(method: core.Method) -> dict:
    """Pick the functions for evaluators, which share one trace of `embed`."""
    found = {name: getattr(method, name) for name in _EVALUATED}
    return found | {"embed": sharding.traced_once(method.embed)}
