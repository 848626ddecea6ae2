"""Evaluate the frozen encoder of another run on another data set.

Sources: the downstream tasks of PNR (Cha et al., ICML 2024, Tables 6, 11, 12, 17) and
of CaSSLe (Fini et al., CVPR 2022). Only evaluators train, such as linear probes.

Departure: evaluation images are resized on the device; the probe's random crops are
cut from the image as it is stored and resized once, straight to the encoder's size
(the paper resizes CIFAR to 96 pixels first, and crops then).
"""

import contextlib
import functools
import inspect
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from etils import epath

from jaxcl import core, lookup, numerics, schema, sharding, storage
from jaxcl.data import stream
from jaxcl.errors import Refused
from jaxcl.methods.two_view import bases
from jaxcl.run import (
    checkpoint,
    encoder_folder,
    evaluation,
    job,
    record,
    result_file,
    train,
)

ANSWERS = "answers.npz"  # bool[M] of each matrix, whether each row's answer is right
TRAINING = ("method", "optimizer", "schedule")  # sections of runs that train


class Transfer(NamedTuple):
    """A prepared transfer run, built from a config that has a `checkpoint`."""

    state: core.TrainState  # of the encoder alone
    source: dict  # path, number, step and checksum of the checkpoint, as JSON
    stream: stream.Stream
    evaluation: job.Evaluation
    logging: job.Logging


def config_of(run: str, *, field: str = "config.checkpoint") -> dict:
    """Read the config of a run; describe the folder of an encoder as one.

    Args:
      run: directory of the run, or folder of an encoder.
      field: option that names the run, for messages.

    Raises:
      Refused: there is no config, or it cannot be read.
    """
    origin = f"{field}={run!r}"
    if encoder_folder.exists_at(run):
        return encoder_folder.as_config(run)
    try:
        config = storage.read_object(epath.Path(str(run)) / "config.json")
        missing = {"encoder", "augment"} - set(config)
    except OSError as error:
        problem = "no such folder"
        if storage.exists(run):
            problem = "it has no config.json that can be read; must be a run folder"
        raise Refused(f"{origin}: {problem}") from error
    except storage.NotJson as error:
        raise Refused(f"{origin}: {error}") from error
    if missing:
        raise Refused(f"{origin}: its config.json lacks {sorted(missing)}")
    return config


def complete(raw: dict, run: dict) -> dict:
    """Fill in the values that a transfer config takes from the run.

    These are the encoder, the precision, mean and standard deviation of the images,
    and, for evaluators whose `lr` is None, the paper's rate of linear probes for the
    base of the run's method.

    Args:
      raw: the transfer config, as a dict.
      run: config of the run, from `config_of`.

    Raises:
      Refused: the run trains on graphs; a section of `raw` has no meaning here; the
        base has no rate.
    """
    if run["augment"].get("name") == "graphs":
        raise Refused("config.checkpoint: a run on graphs; must be one of images")
    for name in (*TRAINING, "encoder", "tuning"):
        if name in raw:
            raise Refused(
                f"config.{name}: with config.checkpoint the run gives the encoder "
                f"and nothing is trained; remove config.{name}"
            )
    augment = {name: run["augment"][name] for name in ("mean", "std")}
    if run.get("tuning"):
        raw = raw | {"tuning": run["tuning"]}
    evaluators = dict(raw.get("evaluators", {}))
    for key, section in evaluators.items():
        name, field = section.get("name", key), f"config.evaluators.{key}"
        make = lookup.find_module("jaxcl.evals", name, field).make
        rate = schema.option_of(make).get("lr")
        if rate is not None and rate.default is None and "lr" not in section:
            evaluators[key] = {**section, "lr": _linear_lr(run, key)}
    return (
        {"precision": run.get("precision", "float32")}
        | raw
        | {
            "encoder": run["encoder"],
            "augment": augment | raw.get("augment", {}),
            "evaluators": evaluators,
        }
    )


def _linear_lr(run, key):
    """Look up the paper's rate of linear probes for the base of the run's method."""
    method = run.get("method", {})
    base = lookup.name_of(method.get("base"))
    if base is None:
        with contextlib.suppress(ValueError, KeyError):  # a method without bases
            module = lookup.find_method(method.get("name"))
            base = inspect.signature(module.make).parameters["base"].default
    rate = bases.make_base(base).linear_lr if base in bases.BASES else None
    if rate is None:
        raise Refused(
            f"config.evaluators.{key}.lr: missing, and the run's method has none in "
            f"the paper's table, which knows the bases {', '.join(bases.BASES)}"
        )
    return rate


class CheckpointPlace(NamedTuple):
    """The place of a run's checkpoints."""

    folder: epath.Path
    numbers: tuple[int, ...]  # from the oldest


def find_checkpoints(run: str, *, field: str = "config.checkpoint") -> CheckpointPlace:
    """Find the checkpoints of a run.

    Args:
      run: directory of the run.
      field: option that names the run, for messages.

    Raises:
      Refused: there are none.
    """
    path = epath.Path(run)
    checkpoints = (path if storage.in_bucket(path) else path.resolve()) / "checkpoints"
    entries = checkpoints.iterdir() if checkpoints.exists() else ()
    numbers = sorted(int(p.name) for p in entries if p.name.isdigit())
    if not numbers:
        raise Refused(field, run, "there is no checkpoint in it yet")
    return CheckpointPlace(checkpoints, tuple(numbers))


def input_width(place: CheckpointPlace) -> int | None:
    """Count the channels of the images, or features of the nodes, of the encoder.

    All checkpoints of a run agree, so the newest readable one is used.

    Returns:
      The width; None for a user's encoder, whose parameters have other names.

    Raises:
      Refused: no checkpoint can be read, or it has no encoder.
    """

    def read(path):
        return _encoder_of(checkpoint.read_info(path).tree["params"], path)

    try:
        _, params = checkpoint.newest(place.folder, place.numbers, read)
    except checkpoint.CheckpointError as error:
        raise Refused(str(error)) from error
    for first in ("conv1", "patch", "stem"):  # of our encoders
        if first in params:
            return params[first]["kernel"].shape[-2]
    return None


def _encoder_of(params, path):
    """Pick the parameters of the encoder in a checkpoint."""
    if "encoder" not in params:
        raise checkpoint.Misfit(
            f"{path} has no encoder in its parameters, but {sorted(params)}"
        )
    return params["encoder"]


def cursor(place: CheckpointPlace, number: int) -> dict:
    """Read the values that a run saved with a checkpoint: "phase", "results" so far."""
    return checkpoint.read_info(place.folder / str(number)).cursor


def restore(
    run: str,
    encoder: Any,
    inputs: Any,
    mesh: jax.sharding.Mesh,
    *,
    field: str = "config.checkpoint",
) -> tuple[core.TrainState, dict]:
    """Load the encoder of the newest undamaged checkpoint, and describe the checkpoint.

    Only the encoder is read, and the run directory does not change: the run may still
    be training.

    Args:
      run: directory of the run, or folder of an encoder.
      encoder: flax module, as the run's config describes it.
      inputs: example inputs, zeros f32[1, S, S, C] or a batch of graphs.
      mesh: devices of this process.
      field: option that names the run, for messages.

    Returns:
      The state of the encoder alone, in a task of no steps. Such a task is over, so
      evaluators that wait for its end run. Also the checkpoint's path, number, step and
      checksum, as JSON.

    Raises:
      Refused: there is no checkpoint, every one is damaged, or the newest whole one
        has another encoder.
    """
    if encoder_folder.exists_at(run):
        card = encoder_folder.read_card(run)
        leaves = encoder_folder.read_leaves(run, card)
        params, stats = encoder_folder.fill_trees(encoder, inputs, leaves, run)
        loaded = {"params": {"encoder": params}, "stats": {"encoder": stats}}
        loaded["step"] = jnp.zeros((), jnp.int32)
        source = {"path": run, "number": 0, "step": 0, "checksum": card["files"]}
    else:
        place = find_checkpoints(run, field=field)
        load = functools.partial(_load_leaves, _list_leaves(encoder, inputs, mesh))
        try:
            number, loaded = checkpoint.newest(place.folder, place.numbers, load)
        except checkpoint.CheckpointError as error:
            raise Refused(f"{field}={run!r}: {error}") from error
        source = {"path": run, "number": number, "step": int(loaded["step"])}
        source["checksum"] = int(checkpoint.checksum(loaded).sum())
    state = core.TrainState(
        key=numerics.make_key(0),
        step=loaded["step"],
        task=np.int32(0),
        task_start=loaded["step"] + 0,
        task_steps=np.int32(0),
        params=loaded["params"],
        stats=loaded["stats"],
        opt_state=(),
        extra=(),
    )
    return sharding.commit_placement(state, mesh), source


def _list_leaves(encoder, inputs, mesh) -> dict:
    """Return the shapes of the leaves that are read from a checkpoint."""
    variables = jax.eval_shape(encoder.init, numerics.make_key(0), inputs)
    placement = sharding.replicated(mesh)
    trees = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=placement),
        {
            "params": {"encoder": variables["params"]},
            "stats": {"encoder": variables.get("batch_stats", {})},
        },
    )
    return trees | {"step": jax.ShapeDtypeStruct((), jnp.int32, sharding=placement)}


def _load_leaves(like, path):
    """Load the leaves named in `like`, of this encoder."""
    saved = checkpoint.read_info(path)
    _encoder_of(saved.tree["params"], path)
    names = ("params", "stats")
    present = {x: {"encoder": saved.tree[x].get("encoder", {})} for x in names}
    wanted = {name: like[name] for name in names}
    if misfits := checkpoint.differences(present, wanted, most=1):
        raise checkpoint.Misfit(
            f"{path} does not fit the encoder of the run's config.json and these "
            f"images: {misfits}"
        )
    return checkpoint.load_leaves(path, like, saved)


@numerics.pinned()
def run_transfer(
    work: Transfer,
    workdir: epath.PathLike,
    *,
    stop: Callable[[], bool] = lambda: False,
) -> dict:
    """Evaluate the encoder, or read the earlier results of this checkpoint.

    Args:
      work: transfer run from `build.build`.
      workdir: the run directory.
      stop: function called before each evaluator; True ends the run.

    Returns:
      The results of a run with one task, see `result_file.empty_results`, and the
      "checkpoint". `ANSWERS` in the directory holds the answers to single images.

    Raises:
      train.Interrupted: `stop` returned True.
    """
    workdir = epath.Path(workdir)
    if (workdir / result_file.RESULTS).exists():
        results = result_file.read_results(workdir)
        if results.get("checkpoint") == work.source:
            return results
    names = [task.name for task in work.stream.tasks]
    start = time.monotonic()
    logging, settings = work.logging, work.evaluation
    recorder = record.Recorder(
        workdir,
        write=jax.process_index() == 0,
        loggers=logging.loggers,
        progress=logging.progress,
    )
    with contextlib.closing(recorder):
        result = evaluation.run_evaluators(
            settings.evaluators, work.state, 0, recorder, stop=stop
        )
        if result is None:
            raise train.Interrupted(f"stopped before the evaluation in {workdir} ended")
        rows, scalars, _, answers = result
        if answers and jax.process_index() == 0:
            with storage.replacing(workdir / ANSWERS) as file:
                np.savez_compressed(file, **answers)
        evaluation.draw_pictures(settings.pictures, work.state, 0)
        results = result_file.empty_results(len(names), task_names=names)
        seconds = time.monotonic() - start
        results = result_file.add_task(results, 0, rows, scalars, seconds)
        if matrices := {name: result_file.matrix(results, name) for name in rows}:
            # As "before" and "after", the folders of an update
            title = epath.Path(workdir).name
            recorder.print_text(result_file.latest_table(matrices, 0, title=title))
    return results | {"checkpoint": work.source}
