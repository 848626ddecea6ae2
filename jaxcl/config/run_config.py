"""The config.json of a run directory: written for a new run, compared at resume."""

import jax
from absl import logging
from etils import epath

from jaxcl import numerics, sharding, storage
from jaxcl.config import options, sections
from jaxcl.data.stream import identity
from jaxcl.errors import Refused
from jaxcl.run import lock, log_file

# Where and how a run computes, not what: these may change when it resumes.
MACHINE = (
    "devices",
    "mesh",
    "device_bytes",
    "steps_per_call",
    "compile_cache",
    "workers",
    "progress",
    "loggers",
    "duplicates",
    "seeds",
)
# These may differ between the processes of a run: results do not depend on them.
_OF_A_PROCESS = ("compile_cache", "workers", "progress", "loggers", "duplicates")
# The files of a run directory until its first step.
_BEFORE_A_STEP = {
    "config.json",
    options.RESOLVED,
    identity.FILE,
    log_file.FILE,
    lock.FILE,
}
_BEFORE_A_STEP |= {"checkpoints", "tensorboard"}
FLAGS = "jax"  # section of resolved.json: `numerics.run_flags`
# What `build` adds to a config.json, once it has read the data.
NOTED = ("decoder", "resident", "memory_shards", "teacher_card")


class Differs(Refused):
    """A directory holds a run of another config; the message has each difference."""


def without(config: dict, fields) -> dict:
    """Copy a config without fields, named "field" or "section.field"."""
    rest = {key: value for key, value in config.items() if key not in fields}
    for section, _, inner in (field.partition(".") for field in fields):
        if inner and section in rest:
            rest[section] = without(rest[section], (inner,))
    return rest


def shared_options(config: dict) -> dict:
    """Return the options that all processes of a run must share, by their paths."""
    return options.flatten(without(config, _OF_A_PROCESS))


def write_or_check(workdir, config: dict, every_option: dict | None = None) -> None:
    """Write config.json for a new run; on resume refuse a different config.

    Args:
      workdir: the run directory.
      config: the config as given, which a resumed run must repeat.
      every_option: the value of each option, defaults included, see `options.values`.

    Raises:
      Differs: the directory holds a run of another config.
    """
    path = epath.Path(workdir) / "config.json"
    with lock.hold_lock(workdir):
        resumes = check_config(workdir, config)
        sharding.barrier("the config is read")
        if not resumes:
            if jax.process_index() == 0:
                if (
                    every_option is not None
                ):  # first: a run has begun once there is a config.json
                    storage.write_json(path.parent / options.RESOLVED, every_option)
                storage.write_json(path, config)
            sharding.barrier("the config is written")


def read_saved_config(path) -> dict:
    """Read the config.json of a run directory.

    Raises Refused if the file is damaged.
    """
    try:
        return _nest(storage.read_object(path))
    except storage.NotJson as error:
        raise Refused(
            f"{error}. The rest of the run may be whole: put a copy of the file back, "
            "or run the same command with a new --workdir until it has begun, and take "
            "the config.json that it writes there"
        ) from error


def _nest(config: dict) -> dict:
    """Write a saved config as today's; leave it if its method is not found."""
    try:
        return sections.nest_method(config)
    except Refused:
        return config


def check_config(workdir, config: dict, ignored: tuple[str, ...] = ()) -> bool:
    """Refuse a run directory of another config.

    Args:
      workdir: the run directory.
      config: the present config.
      ignored: further fields that may differ, besides `MACHINE`.

    Returns:
      Whether the directory has a config.

    Raises:
      Differs: its config is another one.
      Refused: its config is damaged.
    """
    path = epath.Path(workdir) / "config.json"
    if not path.exists():
        return False
    if changed := _list_changes(workdir, config, ignored):
        raise Differs(
            f"{workdir} holds a run of another config. Give another --workdir, or the "
            f"same config. They differ in\n  " + "\n  ".join(changed)
        )
    _check_flags(workdir)
    return True


def _list_changes(workdir, config, ignored) -> list[str]:
    """List the options in which a run directory's config differs from `config`."""
    saved = read_saved_config(epath.Path(workdir) / "config.json")
    pair = (without(x, MACHINE + ignored) for x in (saved, config))
    return options.differences(*pair)


def clear_unstarted(workdir, config: dict, ignored: tuple[str, ...] = ()) -> bool:
    """Remove the files of a run of another config that has not trained a step.

    Of a run of several processes nothing is removed.

    Args:
      workdir: the run directory.
      config: the present config.
      ignored: fields that may differ, as in `check_config`.

    Returns:
      Whether files were removed.

    Raises:
      lock.LockHeldError: a process works in the directory.
    """
    folder = epath.Path(workdir)
    if jax.process_count() > 1 or not (folder / "config.json").exists():
        return False
    if not _list_changes(workdir, config, ignored):
        return False
    files = [*folder.iterdir()]
    checkpoints = folder / "checkpoints"
    saved = [*checkpoints.iterdir()] if checkpoints.exists() else []
    logged = log_file.read_rows(folder) if (folder / log_file.FILE).exists() else []
    steps = [row["step"] for row in logged]
    if {x.name for x in files} - _BEFORE_A_STEP or saved or any(steps):
        return False
    with lock.hold_lock(workdir):
        for file in files:
            if file.name != lock.FILE:
                file.rmtree() if file.is_dir() else file.unlink()
    logging.warning("%s: its run of another config had no step; replaced", folder)
    return True


def _check_flags(workdir) -> None:
    """Refuse flags of JAX other than those that a run began with."""
    path = epath.Path(workdir) / options.RESOLVED
    if not path.exists():
        return
    before = storage.read_object(path).get(FLAGS, {})
    for name, value in numerics.run_flags().items():
        if before.get(name, value) != value:
            raise Differs(
                f"{workdir}: its run began with {name}={before[name]!r}, and here it "
                f"is {value!r}: set the variable {name.upper()} as it was, or give "
                "another --workdir"
            )
