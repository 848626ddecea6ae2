"""The encoder of another run, frozen and judged on a data set that it never saw.

Sources: the downstream tasks of PNR (Cha et al., ICML 2024, Tables 6, 11, 12, 17) and
of CaSSLe (Fini et al., CVPR 2022). Nothing is trained but what an evaluator trains.

Departure: evaluation images are resized on the device; the probe's random crops are
cut from the image as it is stored and resized once, straight to the encoder's size
(the paper resizes CIFAR to 96 pixels first, and crops then).
"""

import contextlib
import dataclasses
import inspect
import json
import time
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from absl import logging
from etils import epath
from orbax.checkpoint import v1 as ocp

from jaxcl import core, schema, sharding
from jaxcl.data import storage, stream
from jaxcl.methods.two_view import bases
from jaxcl.nets import chain
from jaxcl.run import checkpoint, evaluation, record, seeds
from jaxcl.run import results as results_lib

TRAINING = ("method", "optimizer", "schedule")  # sections of runs that train


class Transfer(NamedTuple):
    """What `build` makes of a config with a `checkpoint`."""

    state: core.TrainState  # no more than the encoder
    source: dict  # path, number, step and checksum of the checkpoint, as JSON
    stream: stream.Stream
    evaluators: dict[str, Callable]  # name -> (state, task number) -> core.Result
    pictures: dict[str, Callable]  # the same, for evaluators that only draw
    record: dict  # options of record.Recorder


class _Unfit(ValueError):
    """The checkpoint is whole, but it is not of the encoder that was asked for."""


def config_of(run: str, *, field="config.checkpoint") -> dict:
    """The config that a run directory was started with.

    Args:
      field: what named the run, for messages.

    Raises:
      ValueError: there is none, or it cannot be read.
    """
    where = f"{field}={run!r}"
    try:
        config = json.loads((epath.Path(str(run)) / "config.json").read_text())
        missing = {"encoder", "augment"} - set(config)
    except OSError as error:
        raise ValueError(
            f"{where}: it has no config.json that can be read; name the directory of "
            "a run"
        ) from error
    except (ValueError, TypeError) as error:
        raise ValueError(f"{where}: its config.json is damaged: {error}") from error
    if missing:
        raise ValueError(f"{where}: its config.json lacks {sorted(missing)}")
    return config


def complete(raw: dict, run: dict) -> dict:
    """A transfer config with all that it leaves to the run.

    Args:
      raw: the config, as a dict.
      run: `config_of` the run: its encoder, its precision, mean and standard
        deviation of its images, and, for linear probes without `lr`, the rate
        that the paper has for its base.

    Raises:
      ValueError: a section of `raw` has no meaning here; the base has no rate.
    """
    for name in (*TRAINING, "encoder"):
        if name in raw:
            raise ValueError(
                f"config.{name}: config.checkpoint is set, so that the encoder is "
                f"that of the run and nothing is trained; take config.{name} out"
            )
    augment = {name: run["augment"][name] for name in ("mean", "std")}
    made = {"precision": run.get("precision", "float32")} | raw
    made |= {"encoder": run["encoder"], "augment": augment | raw.get("augment", {})}
    made["evaluators"] = dict(raw.get("evaluators", {}))
    for key, section in made["evaluators"].items():
        if section.get("name", key) == "linear" and "lr" not in section:
            made["evaluators"][key] = {**section, "lr": _linear_lr(run, key)}
    return made


def _linear_lr(run, key):
    method = run.get("method", {})
    base = method.get("base")
    if base is None:
        with contextlib.suppress(ValueError, KeyError):  # a method without bases
            module = schema.method(method.get("name"))
            base = inspect.signature(module.make).parameters["base"].default
    if base not in bases.BASES:
        raise ValueError(
            f"config.evaluators.{key}.lr: missing, and the run's method has none in "
            f"the paper's table, which knows the bases {', '.join(bases.BASES)}"
        )
    return bases.BASES[base].linear_lr


def embed(encoder, state, images):
    """Features f32[B, D] of normalised images, in evaluation mode."""
    nets = {"encoder": encoder}
    return chain.apply(nets, state.params, state.stats, images, train=False)[0]


class Place(NamedTuple):
    """Where the checkpoints of a run are."""

    folder: epath.Path
    numbers: tuple[int, ...]  # from the oldest
    seed: int = 0
    at: int | None = None  # of seeds that were trained side by side, which; None: one
    count: int = 1  # how many of them there are


def place(run: str, *, field="config.checkpoint") -> Place:
    """The checkpoints of a run, or of all seeds that were trained beside it.

    Raises:
      ValueError: there are none.
    """
    path = epath.Path(run)
    path = path if storage.in_bucket(path) else path.resolve()
    found, together = {}, path.parent / "together"
    if not (path / "checkpoints").exists() and (together / "checkpoints").exists():
        whole = config_of(path.parent, field=field)
        ordered = range(whole["seed"], whole["seed"] + whole["seeds"])
        for at, seed in enumerate(ordered):
            if path.name == seeds.folder(seed):
                path, found = together, {"seed": seed, "at": at, "count": len(ordered)}
    folder = path / "checkpoints"
    there = list(folder.iterdir()) if folder.exists() else []
    numbers = sorted(int(p.name) for p in there if p.name.isdigit())
    if not numbers:
        raise ValueError(f"{field}={run!r}: there is no checkpoint in it yet")
    return Place(folder, tuple(numbers), **found)


def input_width(where: Place) -> int | None:
    """Channels of the images, or features of the nodes, that the encoder was given.

    All checkpoints of a run say the same, so any one that can be read will do.

    Returns:
      None where the encoder is the user's own, whose parameters have other names.

    Raises:
      ValueError: none can be read, or there is no encoder in it.
    """
    for number in reversed(where.numbers):
        path = where.folder / str(number)
        try:
            tree = ocp.metadata(path).metadata["params"]
        except Exception:  # any damage: the one before it serves
            continue
        if "encoder" not in tree:
            raise ValueError(_no_encoder(path, tree))
        first = tree["encoder"].get("conv1")  # of our encoders; a user's has its own
        return None if first is None else first["kernel"].shape[-2]
    raise ValueError(
        f"{where.folder}: every checkpoint in it is damaged {list(where.numbers)}"
    )


def cursor(where: Place, number: int) -> dict:
    """What a run noted beside a checkpoint: its "phase", its "results" so far."""
    found = ocp.metadata(where.folder / str(number)).custom_metadata["cursor"]
    if where.at is None:
        return found
    return found | {"results": seeds.apart(found["results"], [where.seed])[where.seed]}


def restore(
    run: str, encoder, inputs, mesh, *, field="config.checkpoint"
) -> tuple[core.TrainState, dict]:
    """The encoder of the newest whole checkpoint, and which one that is.

    Nothing but the encoder is read, and nothing in the run directory changes: the
    run may be going on.

    Args:
      encoder: flax module, as the run's config describes it.
      inputs: what it is given, zeros f32[1, S, S, C] or a batch of graphs.
      field: what named the run, for messages.

    Raises:
      ValueError: there is no checkpoint, none is whole, or the newest whole one has
        no such encoder.
    """
    where = place(run, field=field)
    like = _abstract(encoder, inputs, mesh, where)
    for number in reversed(where.numbers):
        try:
            found, total = _load(where.folder / str(number), like)
        except _Unfit:
            raise
        except Exception as error:  # any damage: the one before it serves
            logging.error(
                "checkpoint %s in %s is damaged (%s: %s); trying the one before it",
                number,
                where.folder,
                type(error).__name__,
                str(error)[:300],
            )
            continue
        found = _one_of(found, where)
        # A task of no steps: it is over, so that evaluators at its end run too.
        state = core.TrainState(
            key=jax.random.key(0),
            step=found["step"],
            task=np.int32(0),
            task_start=found["step"] + 0,
            task_steps=np.int32(0),
            params=found["params"],
            stats=found["stats"],
            opt_state=(),
            extra=(),
        )
        source = {"path": run, "number": number, "step": int(found["step"])}
        source["checksum"] = total
        return sharding.settle(state, mesh), source
    raise ValueError(
        f"{field}={run!r}: every checkpoint in it is damaged ({[*where.numbers]})"
    )


def _abstract(encoder, inputs, mesh, where=None):
    """Shapes of what is read of a checkpoint."""
    made = jax.eval_shape(encoder.init, jax.random.key(0), inputs)
    trees = {
        "params": {"encoder": made["params"]},
        "stats": {"encoder": made.get("batch_stats", {})},
    }
    together = where is not None and where.at is not None
    axes = (where.count,) if together else ()
    whole = sharding.replicated(mesh)
    trees = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct((*axes, *x.shape), x.dtype, sharding=whole),
        trees,
    )
    return trees | {"step": jax.ShapeDtypeStruct((), jnp.int32, sharding=whole)}


def _one_of(found, where):
    """What was loaded, of one seed where it is of several."""
    if where.at is None:
        return found
    mine = {name: found[name] for name in ("params", "stats")}
    return found | jax.tree.map(lambda x: x[where.at], mine)


def _leaves(tree):
    found = jax.tree_util.tree_flatten_with_path(tree)[0]
    return {jax.tree_util.keystr(path): leaf for path, leaf in found}


def _load(path, like):
    """The leaves named in `like`, each compared with its checksum, and their sum."""
    saved = ocp.metadata(path)
    tree, sums = saved.metadata, saved.custom_metadata["checksum"]
    _check(tree, like, path)
    context = ocp.Context()
    context.pytree.loading.partial_load = True
    with context:
        found = ocp.load(path, like)
    # Checksums are in the order of the state's own leaves, of which every field is
    # a plain dict up to `stats`.
    names = [field.name for field in dataclasses.fields(core.TrainState)]
    parts = [_leaves({name: tree[name]}) for name in names if name in tree]
    order = [name for part in parts for name in part]
    want = [sums[order.index(name)] for name in _leaves(found)]
    if np.asarray(checkpoint.checksum(found)).tolist() != want:
        raise ValueError("its checksum does not match its contents")
    return found, sum(want) % 2**32


def _no_encoder(path, params):
    return f"{path} has no encoder in its parameters, but {sorted(params)}"


def _check(tree, like, path):
    """Refuse a checkpoint of another encoder, naming what differs first."""
    if "encoder" not in tree.get("params", {}):
        raise _Unfit(_no_encoder(path, tree.get("params", {})))
    for part in ("params", "stats"):
        ours = _leaves({part: like[part]})
        theirs = _leaves({part: {"encoder": tree[part].get("encoder", {})}})
        misfit = core.first_misfit(theirs, ours)
        if misfit:
            name, have, want = misfit
            raise _Unfit(
                f"{path} does not fit the encoder of the run's config.json and "
                f"these images: {name} is {have} in the checkpoint, {want} here"
            )


def run(work: Transfer, workdir, *, pause=lambda: None) -> dict:
    """Judge the encoder, or read what was found of the same checkpoint before.

    Args:
      pause: called before each evaluator; what it raises ends the run.

    Returns:
      The results of a run with one task, see `results.empty`, and the "checkpoint".
    """
    workdir = epath.Path(workdir)
    if (workdir / results_lib.RESULTS).exists():
        results = results_lib.read_results(workdir)
        if results.get("checkpoint") == work.source:
            return results
    names = [task.name for task in work.stream.tasks]
    began = time.monotonic()
    recorder = record.Recorder(workdir, write=jax.process_index() == 0, **work.record)
    with contextlib.closing(recorder):
        rows, scalars = evaluation.run(
            work.evaluators, work.state, 0, recorder, pause=pause
        )
        for draw in work.pictures.values():
            draw(work.state, 0)
        results = results_lib.empty(len(names), task_names=names)
        seconds = time.monotonic() - began
        results = results_lib.add(results, 0, rows, scalars, seconds)
        for name in rows:
            recorder.say(
                results_lib.table(results_lib.matrix(results, name), name=name)
            )
    return results | {"checkpoint": work.source}
