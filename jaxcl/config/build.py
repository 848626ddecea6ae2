"""Claim a run directory for a config, and have `jobs` make what it runs."""

import dataclasses
import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import ml_collections
import numpy as np
from etils import epath

from jaxcl import numerics, sharding
from jaxcl.config import checks, jobs, options, resolve, run_config, sections, teacher
from jaxcl.data import stream
from jaxcl.data.stream import identity
from jaxcl.errors import Refused
from jaxcl.evals import embedding
from jaxcl.run import agreement, compile_cache, encoder_folder, job, seeds, transfer


@numerics.pinned()
def build(
    config: ml_collections.ConfigDict, workdir
) -> job.Job | transfer.Transfer | seeds.SeedRuns:
    """Claim a run directory for a config, and make what runs in it; compile nothing.

    With config.seeds above 1, return the runs of all seeds. The first is built at once,
    to find errors; each of the others is built when its turn comes.

    Args:
      config: result of a config file's get_config, overrides applied.
      workdir: the run directory; it must be this config's or new.

    Raises:
      Refused: a wrong key, type or value, naming it and its range; a
        run directory that belongs to another config, naming the fields.
      OSError: data are missing or cannot be read; the run
        directory cannot be written.
    """
    agreement.check_surroundings(run_config.shared_options(config.to_dict()), workdir)
    raw = config.to_dict()
    if raw.get("seeds", 1) != 1:
        return _build_seeds(raw, workdir)
    with agreement.failing_together():
        raw = resolve.resolve(raw, workdir)
        plain, top = options.to_json(raw, "config"), sections.read_top(raw)
        compile_cache.use_cache(top.compile_cache)
        run_config.clear_unstarted(workdir, plain, run_config.NOTED)
        # Below again, when the choices of the machine are known
        run_config.check_config(workdir, plain, run_config.NOTED)
    with agreement.failing_together():
        work: job.Job | transfer.Transfer
        if top.checkpoint is not None:
            work = jobs.make_transfer(top, workdir)
        else:
            work = job.trace_step(jobs.make_job(top, plain, workdir))
        rows = checks.check_data(top, work.stream, workdir)
        choices = _note_choices(top, work)
        every_option = _list_options(plain, work) | choices
    agreement.check(
        run_config.shared_options(every_option),
        "Set the option in the config, so that no process chooses it by itself",
    )
    checks.compare_data(work.stream.dataset, rows)
    run_config.write_or_check(workdir, plain | choices, every_option)
    if jax.process_index() == 0:
        identity.write_identity(workdir, rows)
    return work


def _note_choices(top: sections.TopLevel, work) -> dict:
    """Note what changes results and is not in the config, to save with it.

    The decoder that "auto" took, and images that stay on the device, change the crops;
    devices that share a memory change what it holds; the folder of a teacher may
    change.
    """
    decoder = work.stream.dataset.decoder
    choices = {"decoder": decoder} if decoder else {}
    if isinstance(work, job.Job):
        choices["resident"] = work.data.resident
        if top.teacher is not None:
            choices["teacher_card"] = teacher.describe(top.teacher)
        if (top.replay or {}).get("sharded"):
            choices["memory_shards"] = sharding.num_row_shards(work.mesh)
    return choices


def _list_options(plain, work) -> dict:
    """Return every option with its value, and JAX's flags."""
    flags = {run_config.FLAGS: numerics.run_flags()}
    if isinstance(work, transfer.Transfer):
        return options.values(plain) | flags
    machine = {"devices": work.mesh.size, "steps_per_call": work.loop.steps_per_call}
    return options.values(plain, work.loop.replay) | machine | flags


def _build_seeds(raw, workdir) -> seeds.SeedRuns:
    """Make the runs of several seeds, each with a directory and a config of its own."""
    if raw.get("checkpoint") is not None:
        raise Refused("config.seeds: a checkpoint is evaluated once; must be 1")
    resolved = resolve.resolve(raw, workdir)
    raw = sections.nest_method(resolve.fill_precision(raw, workdir))
    top, plain = sections.read_top(resolved), options.to_json(raw, "config")
    run_config.check_config(workdir, plain)

    @functools.lru_cache(maxsize=1)  # the first is asked for again
    def make(seed):
        changes = {"seed": seed, "seeds": 1}
        for name in ("start", "plasticity_from"):
            if raw.get(name) is not None and not encoder_folder.exists_at(raw[name]):
                changes[name] = str(epath.Path(raw[name]) / seeds.folder(seed))
        config = ml_collections.ConfigDict(raw | changes)
        return build(config, epath.Path(workdir) / seeds.folder(seed))

    first = make(top.seed)
    numbers = {"seed": top.seed, "seeds": top.seeds}
    every_option = _list_options(options.to_json(resolved, "config"), first) | numbers
    run_config.write_or_check(workdir, plain, every_option)
    chosen = tuple(range(top.seed, top.seed + top.seeds))
    return seeds.SeedRuns(chosen, make)


@numerics.pinned()
def plan_job(
    config: ml_collections.ConfigDict,
    stand_in=None,
    *,
    one_step: bool = True,
) -> job.Job:
    """Make the job of a config for compilation only; it has no evaluators.

    Nothing is written. Within `sharding.compile_target` the job is for other devices.

    Args:
      config: result of a config file's get_config, overrides applied.
      stand_in: a `stream.Dataset` in place of config.data, which is then not read.
      one_step: compile one step a call, else as many as a run does.

    Raises:
      Refused: as `build`, and where the config trains nothing.
    """
    if config.get("checkpoint") is not None:
        raise Refused("config.checkpoint: nothing is trained; must be None")
    raw = resolve.resolve(config.to_dict())
    changes = dict(evaluators={}, plasticity=False, start=None, loggers="")
    changes |= {"steps_per_call": 1} if one_step else {}
    top = dataclasses.replace(sections.read_top(raw), **changes)
    plain = options.to_json(raw, "config")
    return job.trace_step(jobs.make_job(top, plain, None, stand_in))


def default_workdir(config) -> str:
    """Return the default run directory, runs/NAME; RUN/NAME for a transfer from RUN."""
    return f"{config.get('checkpoint') or 'runs'}/{config.get('name', 'run')}"


@numerics.pinned()
def restore_frozen(config: ml_collections.ConfigDict) -> jobs.Frozen:
    """Read config.data, and restore the encoder of config.checkpoint.

    Args:
      config: like that of a transfer run; its evaluators are ignored.

    Raises:
      Refused, OSError: as `build`.
    """
    return jobs.restore_frozen(sections.read_top(resolve.resolve(config.to_dict())))


class Embedder(NamedTuple):
    """The train rows of a data set, and the function that embeds them."""

    size: int  # number of rows
    embed: Callable[[np.ndarray], np.ndarray]  # rows i32[n] -> f32[n, D]
    source: dict  # description of the checkpoint, see `transfer.restore`
    examples: stream.Examples


def make_embedder(config: ml_collections.ConfigDict) -> Embedder:
    """Embed train rows of config.data with the encoder of config.checkpoint.

    Raises:
      The errors of `restore_frozen`.
    """
    state, source, parts = restore_frozen(config)
    examples = parts.stream.dataset.train

    def embed(rows):
        return sharding.copy_to_host(
            embedding.make_embedder(parts, examples, rows=rows)(state)
        )

    return Embedder(stream.count_rows(examples), embed, source, examples)
