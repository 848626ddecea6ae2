"""Make the records of a job from the sections of a config.

Options are read first, so that a wrong one is refused before any data are read. Nothing
is written and nothing is compiled.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import numpy as np
from absl import logging

from jaxcl import core, schema, sharding
from jaxcl.config import budget, checks, sections, teacher
from jaxcl.data import stream
from jaxcl.errors import Refused
from jaxcl.methods.online import replay
from jaxcl.nets import chain
from jaxcl.run import cost, encoder_folder, evaluation, job, loggers, transfer

_MOST_STEPS = 2**31 - 1  # core.TrainState counts them in an i32
# Functions of a method that evaluators may call, see `core.EvalParts`
_EVALUATED = ("embed", "predict", "memory", "replayed", "project", "objective")


def make_job(top: sections.TopLevel, plain: dict, workdir, stand_in=None) -> job.Job:
    """Make the job of a config that trains.

    Args:
      top: the config.
      plain: the config as JSON.
      workdir: the run directory, for pictures; None: the job is not run.
      stand_in: a `stream.Dataset` in place of config.data, which is then not read.

    Raises:
      Refused: a wrong key, type or value, naming it and its range.
      OSError: data are missing or cannot be read.
    """
    # Options
    mesh, log_settings = sections.make_mesh(top), _read_logging(top)
    sections.check_graphs(top)
    sharding.check_batch(top.batch_size, mesh)
    make_stream = sections.read_tasks(top.data, top.scenario, top.seed, stand_in)
    make_parts, image = sections.read_parts(top)
    teacher_model = teacher.read_teacher(top, image)
    chosen = sections.find_method(top.method)
    replay_options = schema.options(replay.settings, top.replay or {}, "config.replay")
    if stand_in is None:
        checks.check_path(top)

    # Data
    tasks = make_stream()
    train, num_classes = tasks.dataset.train, max(len(tasks.dataset.class_names), 1)
    sections.check_graphs(top, train)
    _warn_of_channels(top, train)
    crop = image.crop
    data = job.Data(
        stream=tasks,
        task_names=tuple(task.name for task in tasks.tasks),
        seed=top.seed,
        batch_size=top.batch_size,
        epochs=top.epochs,
        resident=train.images is not None and train.images.nbytes <= top.device_bytes,
        crop=crop and crop._replace(decoder=tasks.dataset.decoder or "auto"),
        views=image.views,
        workers=top.workers,
    )

    # Method
    stream_replay = replay.settings(num_classes, top.batch_size, **replay_options)
    for name in ("capacity", "size") if stream_replay.sharded else ():
        sharding.per_device(f"config.replay.{name}", getattr(stream_replay, name), mesh)
    parts = make_parts(
        num_classes=num_classes,
        replay=stream_replay,
        num_tasks=len(tasks.tasks),
        batch_size=top.batch_size,
        train_rows=stream.count_rows(train),
        starts_pretrained=encoder_folder.exists_at(top.start),
        teacher=teacher_model,
    )
    if stream_replay.flops is not None:
        updates = _choose_updates(top, chosen, parts, data, workdir, mesh)
        parts = parts._replace(replay=updates)
    method = _make_method(top, chosen, parts, mesh)
    teacher.check_use(top, teacher_model, method, train)
    job.check_rows(method, data)

    # Evaluation and loop
    eval_parts = _make_eval_parts(top, method, tasks, image, mesh)
    checks.check_start(top, plain, train)
    evaluations = evaluation.make(
        top.evaluators,
        eval_parts,
        workdir,
        untrained=top.evaluate_untrained,
        plots=top.plots,
    )
    loop = _choose_loop(top, data, method, parts)
    single_tasks = _single_task_runs(
        top, chosen, plain, parts, data, method, eval_parts, evaluations.evaluators
    )
    evaluations = evaluations._replace(single_tasks=single_tasks)
    return job.Job(method, mesh, data, loop, evaluations, log_settings, config=plain)


def _warn_of_channels(top, train) -> None:
    """Say what an augmentation cannot do for images that are not grey or RGB."""
    if train.images is None or train.images.dtype != np.uint8:  # files, or features
        return
    if (channels := train.images.shape[-1]) not in (1, 3):
        logging.warning(
            "images have %d channels: hue, saturation and grayscale of config.augment "
            "leave them as they are",
            channels,
        )


def _choose_loop(top, data: job.Data, method, parts: core.Parts) -> job.Loop:
    """Choose how long the run trains, and how many steps are one call."""
    steps, tasks = job.steps_left(data, 0), len(data.stream.tasks)
    if steps > _MOST_STEPS:
        raise Refused(
            f"config.epochs={top.epochs}: makes {steps} steps of config.batch_size="
            f"{top.batch_size}; must be at most {_MOST_STEPS} in all"
        )
    if top.first_tasks is not None and top.first_tasks > tasks:
        raise Refused("config.first_tasks", top.first_tasks, f"there are {tasks} tasks")
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


def _make_method(top, chosen, parts: core.Parts, mesh) -> core.Method:
    """Make the method; refuse config.replay for a method that replays nothing.

    Args:
      chosen: the method's `make`, and its options.
    """
    with sharding.use_mesh(mesh):
        method = sections.make_method(top, chosen, parts)
    if top.replay and not method.replays:
        raise Refused(
            "config.replay",
            top.replay,
            f"{top.method['name']} does not replay",
            "leave it out",
        )
    return sharding.bind_to_mesh(method, mesh)


def _choose_updates(
    top, chosen, parts: core.Parts, data: job.Data, workdir, mesh
) -> core.Replay:
    """Choose as many updates as config.replay.flops pays for in the last task."""
    last, replay = data.stream.tasks[-1], parts.replay

    def count_step(updates):
        changed = parts._replace(replay=replay._replace(updates=updates))
        method = _make_method(top, chosen, changed, mesh)
        shapes = job.shapes(method, data, method.batches_per_step(last))
        return cost.count_flops(method.step, *shapes, task=last.index)

    limits = replay.flops, top.batch_size
    updates = budget.updates(*limits, count_step, top.method["name"])
    if workdir is not None and jax.process_index() == 0:
        print(f"config.replay.flops={replay.flops:g}: updates={updates}", flush=True)
    return replay._replace(updates=updates)


def _steps_per_call(top, data: job.Data, method: core.Method) -> int:
    """Choose how many steps one call makes; graphs differ in size, so they get one."""
    choice = top.steps_per_call
    if data.graphs:
        if choice not in (None, 1):
            raise Refused(
                "config.steps_per_call", choice, "must be None or 1 for graphs"
            )
        return 1
    if choice is None:
        # Steps on ten rows are so short that a host cannot start them one by one.
        short = method.replays and data.resident
        choice = 1 if sharding.on_cpu() else "task" if short else 8
    if choice != "task":
        return choice
    if not data.resident:
        raise Refused(
            "config.steps_per_call='task': one call would need the images of a whole "
            "task; must be a number if images stream from the host"
        )
    # Up to a save, an evaluation, the end of a watched epoch or of the longest task
    plans = job.plain_schedules(data)
    ends = [max(map(len, plans)), top.save_every, top.eval_every]
    if top.patience or top.eval_epochs:
        ends.append(max(plan.steps_per_epoch for plan in plans))
    return min(filter(None, ends))


def _single_task_runs(
    top, chosen, plain, parts, data: job.Data, method, eval_parts, evaluators: dict
) -> Callable | dict | None:
    """Describe how to train on one task alone, or read the results of a run that did.

    None if FT_i is not wanted or not evaluated. The method is built when it is needed.
    So are its evaluators, which put images on the devices.
    """
    if not top.plasticity or len(data.stream.tasks) == 1:
        return None
    if top.plasticity_from is not None:
        return checks.read_single_task_results(top.plasticity_from, plain, method)
    evaluators = {
        key: evaluate
        for key, evaluate in evaluators.items()
        if not isinstance(evaluate, evaluation.AtTheEnd)
    }
    if not evaluators:
        return None
    make, options = chosen
    options = schema.defaults(make) | options
    other = options | dict(method.single_task_options)
    other = schema.nest_options(make, other, "config.method")

    def make_job_alone(work):
        if other == options:
            return work._replace(evaluation=job.Evaluation(evaluators))
        with sharding.use_mesh(work.mesh):
            single = sharding.bind_to_mesh(make(parts, **other), work.mesh)
        single_parts = eval_parts._replace(**_pick_functions(single))
        single_evaluation = evaluation.make(
            {key: top.evaluators[key] for key in evaluators}, single_parts, None
        )
        job.check_rows(single, data)
        return job.trace_step(
            work._replace(method=single, evaluation=single_evaluation)
        )

    return make_job_alone


def _read_logging(top: sections.TopLevel) -> job.Logging:
    return job.Logging(
        every=top.log_every,
        loggers=loggers.makers("tensorboard," * top.tensorboard + top.loggers),
        progress=top.progress,
        plots=top.plots,
    )


def _make_eval_parts(top, method: core.Method, tasks, image, mesh) -> core.EvalParts:
    """Make EvalParts for a method."""
    return core.EvalParts(
        **_pick_functions(method),
        stream=tasks,
        num_classes=max(len(tasks.dataset.class_names), 1),
        size=image.size,
        mean=image.mean,
        std=image.std,
        resize=image.resize,
        seed=top.seed,
        mesh=mesh,
        workers=top.workers,
    )


def _pick_functions(method: core.Method) -> dict:
    """Pick the functions for evaluators, which share one trace of `embed`."""
    functions = {name: getattr(method, name) for name in _EVALUATED}
    return functions | {"embed": sharding.traced_once(method.embed)}


def make_transfer(top: sections.TopLevel, workdir) -> transfer.Transfer:
    """Make the transfer run that evaluates the encoder of config.checkpoint."""
    state, source, eval_parts = restore_frozen(top)
    evaluations = evaluation.make(top.evaluators, eval_parts, workdir, plots=top.plots)
    return transfer.Transfer(
        state, source, eval_parts.stream, evaluations, _read_logging(top)
    )


class Frozen(NamedTuple):
    """The encoder of a run, and the images that it is to evaluate or embed."""

    state: core.TrainState
    source: dict
    parts: core.EvalParts


def restore_frozen(top: sections.TopLevel) -> Frozen:
    """Read config.data, and restore the encoder of config.checkpoint."""
    mesh = sections.make_mesh(top)
    make_stream = sections.read_tasks(top.data, top.scenario)
    core.check_choice("config.scenario.name", top.scenario.get("name"), ("joint",))
    augment = schema.options(sections.check_image, top.augment, "config.augment")
    image = sections.check_image(**augment)
    encoder = sections.make_encoder(top)
    checks.check_path(top)
    tasks = make_stream()
    train = tasks.dataset.train
    first = train.read(0)
    blank = np.zeros((1, image.size, image.size, first.shape[-1]), np.float32)
    state, source = transfer.restore(top.checkpoint, encoder, blank, mesh)
    net = chain.Chain({"encoder": encoder})
    method = core.Method(net.init, net.embed, net.embed)  # only `embed` is called
    return Frozen(state, source, _make_eval_parts(top, method, tasks, image, mesh))
