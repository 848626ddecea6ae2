"""A job: all that a run needs, its compiled step and its input feed."""

import contextlib
import functools
import itertools
import math
from collections.abc import Callable, Generator, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxcl import core, numerics, sharding
from jaxcl.data import stream
from jaxcl.data.feed import graph_batches, prefetch
from jaxcl.errors import Refused

# Added to the seed of labelled batches, so that their order is not that of the task's.
_LABELLED = 0x1ABE1
_TILE = 128  # numbers of a TPU's tile along the last axis


class Data(NamedTuple):
    """The data of a run: rows, their order, and their way to the devices."""

    stream: stream.Stream
    task_names: tuple[str, ...]  # all tasks of the scenario
    seed: int
    batch_size: int  # global
    epochs: int | tuple[int, ...]  # of each task, see stream.epochs_of_tasks
    resident: bool  # the train split lives on the device, else it streams
    crop: Any  # crops.RandomCrop, for images that stream
    views: int  # crops of each image that streams
    workers: int

    @property
    def graphs(self) -> bool:
        """Tell whether examples are graphs; else they are images."""
        return self.stream.dataset.train.graphs is not None


class Loop(NamedTuple):
    """How long a run trains, and where it saves and evaluates on the way."""

    steps_per_call: int
    save_every: int  # 0: after tasks only
    eval_every: int  # 0: after tasks only
    eval_epochs: int  # as eval_every, counted in epochs
    patience: int  # epochs without a better loss after which a task ends; 0: never
    keep: int  # number of checkpoints
    start: str | None  # run directory that this run continues
    first_tasks: int | None  # number of tasks that are trained; None: all
    replay: core.Replay | None  # rows that its steps replay; None: none

    @property
    def counts_epochs(self) -> bool:
        """Tell whether something is done at the end of every epoch."""
        return bool(self.patience or self.eval_epochs)


class Evaluation(NamedTuple):
    """How a run is evaluated, and drawn."""

    evaluators: dict[str, Callable]  # name -> (state, task number) -> core.Result
    pictures: dict[str, Callable] = {}  # the same, for evaluators that only draw
    charts: tuple[Callable, ...] = ()  # (rows of metrics.jsonl, folder), after the run
    untrained: bool = False  # evaluate before the first step, too
    # This job -> the job that trains a task alone; or FT_i of another run, by matrix
    # name. None: FT_i is not measured.
    single_tasks: Callable | dict | None = None


class Logging(NamedTuple):
    """Settings of logs, messages and pictures."""

    every: int  # steps between logged rows
    loggers: tuple[Callable, ...]  # makers, see run.loggers
    progress: str | bool  # as config.progress
    plots: bool
    quiet: bool = False  # print no tables: a run within a run


class Job(NamedTuple):
    """All that a run needs, its data read; `build` makes it from a config."""

    method: core.Method
    mesh: Any
    data: Data
    loop: Loop
    evaluation: Evaluation
    logging: Logging
    config: dict  # as JSON

    @property
    def stream(self) -> stream.Stream:
        """Return the tasks."""
        return self.data.stream

    def batches_per_step(self, task: int) -> int:
        """Count the batches that each step of a task takes side by side."""
        return self.method.batches_per_step(self.stream.tasks[task])


def schedule(job: Job, source: stream.Source, task: int) -> stream.Schedule:
    """Plan the rows that each step of a task reads, from seed, task and epoch."""
    data, size = job.data, job.data.batch_size * job.batches_per_step(task)
    return stream.schedule(
        source, seed=data.seed, task=task, epochs=data.epochs, batch_size=size
    )


def plain_schedules(data: Data) -> list[stream.Schedule]:
    """Plan each task on its own rows, with one batch per step.

    A method may read other rows, or several batches per step, see `schedule`.

    Raises:
      Refused: a task has too few rows for a batch.
    """
    options = dict(seed=data.seed, epochs=data.epochs, batch_size=data.batch_size)
    tasks = data.stream.tasks
    return [stream.schedule(x.train, task=x.index, **options) for x in tasks]


def steps_left(data: Data, finished: int, first_tasks: int | None = None) -> int:
    """Estimate the number of steps left after the first `finished` tasks.

    Args:
      data: the data of a run.
      finished: number of tasks that are done.
      first_tasks: number of tasks that are trained; None: all.
    """
    return sum(map(len, plain_schedules(data)[finished:first_tasks]))


def begin_task(job: Job, state: core.TrainState, task: stream.Task) -> core.TrainState:
    """Bring the state to the first step of a task."""
    source = job.method.source(state, task)
    numbers = {
        "task": np.int32(task.index),
        "task_start": np.int32(state.step),
        "task_steps": np.int32(len(schedule(job, source, task.index))),
    }
    state = state.replace(**sharding.replicate(numbers, job.mesh))
    return sharding.commit_placement(job.method.begin_task(state, task), job.mesh)


def _host_batches(job: Job, source: stream.Source, task: int, start: int) -> Generator:
    """Yield this process's share of a task's batches, from its step `start` on."""
    data, num_batches = job.data, job.batches_per_step(task)
    if data.graphs:  # every process reads all rows, see `feed_batches`
        return graph_batches.batches(
            source,
            seed=data.seed,
            task=task,
            epochs=data.epochs,
            batch_size=data.batch_size,
            num_batches=num_batches,
            start=start,
        )
    read = functools.partial(
        prefetch.batches,
        task=task,
        start=start,
        workers=data.workers,
        crop=data.crop,
        views=data.views,
        resident=data.resident,
        process_index=jax.process_index(),
        process_count=jax.process_count(),
    )
    size = data.batch_size * num_batches
    batches = read(source, seed=data.seed, epochs=data.epochs, batch_size=size)
    if num_batches > 1:
        divide = functools.partial(_side_by_side, count=num_batches)
        batches = _combine_readers([batches], divide)
    if job.method.labelled:
        more = _labelled(job, source, task, read)
        batches = _combine_readers(
            [batches, more], lambda batch, rows: batch | {"labelled": rows}
        )
    return batches


def _labelled(job, source, task, read) -> Iterator:
    """Yield labelled batches of the whole train split, one for each step or more."""
    train, size = job.stream.dataset.train, job.data.batch_size
    split = stream.Source(train, np.arange(stream.count_rows(train)))
    steps = len(schedule(job, source, task))
    # Their epochs are not the task's: as many as its steps need.
    epochs = -(-steps // max(len(split.rows) // size, 1))
    # NumPy reads a seed as 32-bit words: this one has a word more than the task's.
    seed = job.data.seed + (_LABELLED << 32)
    return read(split, seed=seed, epochs=epochs, batch_size=size)


def _combine_readers(readers, combine):
    """Combine the batches of several readers, one for each batch of the first.

    It is an error if another reader ends earlier. All readers are closed at the end.
    """
    with contextlib.ExitStack() as stack:
        for reader in readers:
            stack.enter_context(contextlib.closing(reader))
        first, *others = readers
        for batch in first:
            yield combine(batch, *[next(other) for other in others])


def _side_by_side(batch, count):
    """Divide leaves [B * P, ...] into [P, B, ...]; row i goes to batch i % P."""

    def divide(x):
        rows = x.reshape(-1, count, *x.shape[1:])
        return np.ascontiguousarray(np.moveaxis(rows, 1, 0))

    return jax.tree.map(divide, batch)


def resident_shapes(data: Data) -> dict:
    """Return the shapes of what `resident` puts on the devices.

    An image is one row, u8[N, H * W * C]. From u8[N, H, W, C] a TPU would copy the
    whole set into another layout in every call, since it gathers rows of contiguous
    bytes. It keeps rows contiguous if they are whole tiles, so that there they end in
    zeros.
    """
    if not data.resident:
        return {}
    images, label = data.stream.dataset.train.images, data.stream.dataset.train.label
    size = math.prod(images.shape[1:])
    filled = -size % _TILE if sharding.platform() == "tpu" else 0
    return {
        "image": jax.ShapeDtypeStruct((len(images), size + filled), images.dtype),
        "label": jax.ShapeDtypeStruct(label.shape, label.dtype),
    }


def resident(job: Job) -> dict:
    """Put on every device what all steps read.

    Returns:
      "image" and "label", the whole train split, unless it streams; "constants", if
      the method has any.
    """
    arrays: dict = {}
    if job.data.resident:
        arrays = _pack_split(job)
    if job.method.constants is not None:
        arrays["constants"] = job.method.constants
    return sharding.replicate(arrays, job.mesh)


def _pack_split(job: Job) -> dict:
    """Pack the train split in the shapes of `resident_shapes`."""
    examples, shapes = job.stream.dataset.train, resident_shapes(job.data)
    images = np.asarray(examples.images).reshape(len(examples.images), -1)
    if filled := shapes["image"].shape[1] - images.shape[1]:
        images = np.pad(images, ((0, 0), (0, filled)))
    return {"image": images, "label": np.asarray(examples.label)}


def _example(method: core.Method, data: Data) -> dict:
    """Make a batch of one row, with the axes that the method's init and step take."""
    examples = data.stream.dataset.train
    if data.graphs:
        return graph_batches.blank_batch(examples, 1)
    if data.resident:
        images = np.asarray(examples.images[:1])
    else:
        first = examples.read(0)
        size, channels = data.crop.size, first.shape[-1]
        images = np.zeros((1, data.views, size, size, channels), np.uint8)
    label, index = np.asarray(examples.label[:1]), np.zeros(1, np.int32)
    row = {"image": images, "label": label, "index": index}
    return row | ({"labelled": row} if method.labelled else {})


def initial_state(job: Job) -> core.TrainState:
    """Make the state before the first task, on all devices."""
    placement = sharding.placement(shapes(job.method, job.data)[0], job.mesh)
    init = jax.jit(job.method.init, out_shardings=placement)
    return init(numerics.make_key(job.data.seed), _example(job.method, job.data))


def shapes(method: core.Method, data: Data, num_batches: int = 1) -> tuple:
    """Return the (state, batch) that the method's step takes, as shapes.

    A step takes `num_batches` batches, see `Job.batches_per_step`. Batches of
    graphs have a few sizes: the most frequent one is returned.
    """
    example, lead = _example(method, data), (data.batch_size,)
    lead = (num_batches, *lead) if num_batches > 1 else lead
    batch = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct((*lead, *x.shape[1:]), x.dtype),
        example,
    )
    if data.graphs:
        batch = graph_batches.blank_batch(
            data.stream.dataset.train, data.batch_size, num_batches
        )
        batch = jax.eval_shape(lambda: batch)
    batch |= constant_shapes(method)
    key = numerics.make_key(data.seed)
    return jax.eval_shape(method.init, key, example), batch


def constant_shapes(method: core.Method) -> dict:
    """Return the shapes of the arrays that all steps read; {} if there are none."""
    if method.constants is None:
        return {}
    return {"constants": jax.eval_shape(lambda: method.constants)}


def placed_shapes(method: core.Method, data: Data, mesh, num_batches: int = 1) -> tuple:
    """Return `shapes` with the shardings that the step is traced with."""
    state, batch = shapes(method, data, num_batches)
    replicated = jax.tree.map(lambda _: sharding.replicated(mesh), batch)
    return jax.tree.map(
        lambda x, place: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place),
        (state, batch),
        (sharding.placement(state, mesh), replicated),
    )


def check_rows(method: core.Method, data: Data) -> None:
    """Refuse train rows that the method cannot read: unlabelled or streamed ones."""
    train = data.stream.dataset.train
    unknown = int((train.label < 0).sum())
    if unknown and (method.supervised or method.labelled):
        mend = "take a method that reads no labels"
        if method.labelled:
            mend = "turn off its online head (config.method.online_head)"
        raise Refused(
            f"config.method: needs a label for every train row, but {unknown} of "
            f"{stream.count_rows(train)} of {data.stream.dataset.name} have none (-1); "
            f"label them, or {mend}"
        )
    if method.replays and not data.resident:
        raise Refused(
            "config.method: replays images as they are, which must fit on the device: "
            "give config.data resident=True and size, or raise config.device_bytes"
        )


def trace_step(work: Job) -> Job:
    """Trace the step once, so that shapes that do not fit are refused before a run.

    Returns:
      The job, with the method's init and step already traced.

    Raises:
      Refused: shapes do not fit the method; the message names them.
    """
    method, data = work.method, work.data
    method = method._replace(
        init=sharding.traced_once(method.init), step=sharding.traced_once(method.step)
    )
    for count in {method.batches_per_step(task) for task in data.stream.tasks}:
        jax.eval_shape(method.step, *placed_shapes(method, data, work.mesh, count))
    return work._replace(method=method)


def _read_rows(resident: dict, batch: dict, image: tuple[int, ...]) -> dict:
    """Read the rows of a batch, and of its labelled part, from the resident data.

    Args:
      resident: result of `resident`.
      batch: batch with the "index" of each row.
      image: the shape of an image.
    """
    rows = batch["index"]
    filled = {"index": rows, **jax.tree.map(lambda x: x[rows], resident)}
    pixels = filled["image"][..., : math.prod(image)]
    filled["image"] = pixels.reshape(*rows.shape, *image)
    if "labelled" in batch:
        filled["labelled"] = _read_rows(resident, batch["labelled"], image)
    return filled


def _take_batch(job: Job, resident: dict, batches: dict, i) -> dict:
    """Take the batch of step `i` of a call, whose images may be resident."""
    batch = jax.tree.map(lambda x: x[i], batches)
    split = {name: x for name, x in resident.items() if name != "constants"}
    constants = {name: x for name, x in resident.items() if name == "constants"}
    if split:
        batch = _read_rows(split, batch, job.stream.dataset.train.images.shape[1:])
        # Images end in three axes; before them come batches, if several, and examples.
        axis = batch["image"].ndim - 4
        placement = sharding.split_sharding(job.mesh, axis=axis)
        batch = jax.lax.with_sharding_constraint(batch, placement)
    return batch | constants


def compile_step(job: Job) -> jax.stages.Wrapped:
    """Compile (state, resident, batches, count) -> (state, metrics f32[K] each).

    The state is donated. Leaves of `batches` are [K, B, ...], of which the first
    `count` (i32[]) batches are trained on: a call with fewer steps, before a save or
    an evaluation, does not recompile.
    """
    most = job.loop.steps_per_call

    def steps(state, resident, batches, count):
        def step(i, state):
            return job.method.step(state, _take_batch(job, resident, batches, i))

        if most == 1:  # on CPU a loop slows convolutions' gradients
            state, metrics = step(0, state)
            return state, jax.tree.map(lambda m: m[None], metrics)

        def add_step(i, carry):
            state, rows = carry
            state, metrics = step(i, state)
            return state, jax.tree.map(lambda r, m: r.at[i].set(m), rows, metrics)

        _, metrics = jax.eval_shape(step, 0, state)
        rows = jax.tree.map(lambda m: jnp.zeros((most, *m.shape), m.dtype), metrics)
        return jax.lax.fori_loop(0, count, add_step, (state, rows))

    state = sharding.placement(shapes(job.method, job.data)[0], job.mesh)
    outputs = state, sharding.replicated(job.mesh)
    return jax.jit(steps, donate_argnums=0, out_shardings=outputs)


def stacked(batches: list):
    """Stack the batches of the steps of a call, leaves [K, ...]."""
    return jax.tree.map(lambda *x: np.stack(x), *batches)


def feed_batches(job: Job, source: stream.Source, task: int, start: int) -> Generator:
    """Yield the batches of a task from its step `start` on, put on devices in advance.

    Yields:
      (count, batches, count on the device): the batches of `steps_per_call` steps, of
      which `count` are to be done; fewer than all before a save, an evaluation or the
      end of the task.
    """
    plan = schedule(job, source, task)
    loop, total = job.loop, len(plan)
    stops = [loop.save_every, loop.eval_every]
    stops += [plan.steps_per_epoch] if loop.counts_epochs else []
    axis = 2 if job.batches_per_step(task) > 1 else 1
    host = _host_batches(job, source, task, start)

    def grouped():
        done = start
        with contextlib.closing(host):
            while done < total:
                ends = [(done // period + 1) * period for period in stops if period]
                count = min(done + loop.steps_per_call, total, *ends) - done
                batches = list(itertools.islice(host, count))
                batches += batches[-1:] * (loop.steps_per_call - count)
                yield count, stacked(batches)
                done += count

    def place(item):
        count, batches = item
        number = sharding.replicate(np.int32(count), job.mesh)
        if job.data.graphs:  # the nodes of a batch are one array, which is not split
            return count, sharding.replicate(batches, job.mesh), number
        return count, sharding.shard_rows(batches, job.mesh, axis=axis), number

    with contextlib.closing(prefetch.run_ahead(grouped(), place, depth=2)) as ahead:
        yield from ahead
