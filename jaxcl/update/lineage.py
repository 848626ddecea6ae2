"""Runs that go on from runs: their directories, configs and verdicts.

RUN/updates/0001, 0002, ... are run directories, each with an update.json once it is
over.
"""

import json
import re

import numpy as np
from etils import epath

from jaxcl.run import results as results_lib
from jaxcl.run import transfer

UPDATES, VERDICT, ROTATION = "updates", "update.json", "rotation.npy"
# Of a run's config.json: what `build` found out itself.
_FOUND = ("decoder", "resident", "memory_shards")
# Of a run's data: how images are read, which new images of the same kind share.
_READING = ("size", "channels", "decoder", "on_corrupt", "cache_size")


def current(run: str) -> str:
    """The directory of the last accepted update of a run, or the run's own."""
    accepted = [x for x in updates(run) if (read(x) or {}).get("accepted")]
    return str((accepted or [run])[-1])


def config(run: str) -> dict:
    """The config of a run, as it may be given to `build`.

    Raises:
      ValueError: there is none; it is that of several seeds.
    """
    found = transfer.config_of(str(run))
    if found.get("seeds", 1) != 1:
        raise ValueError(
            f"{run}: holds several seeds; name the directory of one, {run}/seed_0"
        )
    return {name: value for name, value in found.items() if name not in _FOUND}


def section(path: str, options: dict, theirs: dict, field: str) -> dict:
    """The section of a config that reads a path.

    An .npz file, a directory that jaxcl.data.convert or TFDS wrote, else a folder of
    images, unless `options` has a `name`. Images in files are read as the run's were.

    Args:
      options: of the source; they win.
      theirs: the run's config.

    Raises:
      ValueError: there is nothing at the path.
    """
    folder, options = epath.Path(path), dict(options)
    if not folder.exists():
        raise ValueError(f"{field}: there is nothing at {path!r}")
    kinds = {"meta.json": "arrays", "dataset_info.json": "tfds"}
    kinds = [kind for file, kind in kinds.items() if (folder / file).exists()]
    guess = "npz" if str(path).endswith(".npz") else (*kinds, "image_folder")[0]
    made = {"name": options.pop("name", guess), "path": str(path)}
    if made["name"] == "image_folder":
        made["channels"] = len(theirs["augment"]["mean"])
        if theirs["data"].get("name") in ("image_folder", "image_lists"):
            own = theirs["data"]
            made |= {name: own[name] for name in _READING if name in own}
    return made | options


def joined(old: dict, new: dict) -> dict:
    """The section of a config that reads two sets, the new one last."""
    before = old["sets"] if old.get("name") == "joined" else [old]
    return {"name": "joined", "sets": [*before, new]}


def next_config(parent: str, theirs: dict, data: dict, changes: dict) -> dict:
    """The config of a run that goes on from `parent` with one more task.

    Args:
      theirs: the parent's config.
      changes: of it, for the new task.

    Raises:
      ValueError: the parent has not come to its end; a change that is not allowed.
    """
    where = epath.Path(parent) / results_lib.RESULTS
    results = results_lib.read_results(parent) if where.exists() else None
    if results is None or None in results["scalars"]:
        raise ValueError(f"{parent}: is not finished; let it finish first")
    if theirs["augment"].get("name") == "graphs":
        raise ValueError(f"{parent}: learns from graphs; an update reads images")
    for name in changes:
        if name in ("data", "scenario", "start", "encoder", "method", "evaluators"):
            raise ValueError(f"config.train.{name}: is the run's, or the update's own")
    made = {**theirs, **{k: v for k, v in changes.items() if not isinstance(v, dict)}}
    for name, value in changes.items():
        if isinstance(value, dict):
            made[name] = {**theirs.get(name, {}), **value}
    tasks = len(results["task_names"]) + 1
    return made | {
        "data": data,
        "scenario": {"name": "after", "num_tasks": tasks, "evaluation": "none"},
        "start": str(parent),
        "evaluators": {},
        "evaluate_untrained": False,
        "plasticity": False,
        "first_tasks": None,
    }


def updates(run: str) -> list[epath.Path]:
    """The directories of all updates of a run, in order."""
    folder = epath.Path(run) / UPDATES
    there = folder.iterdir() if folder.exists() else ()
    return sorted(path for path in there if re.fullmatch(r"\d{4,}", path.name))


def next_update(run: str, asked: dict | None) -> epath.Path:
    """Where an update goes on or begins.

    Args:
      asked: what is to be done; if the last update did just that, it is that one's.

    Raises:
      ValueError: another update has not come to its end.
    """
    there = updates(run)
    if there:
        last = there[-1]
        found = read(last)
        if found is None:
            return last  # `build` refuses it, if it is another
        if found["asked"] == asked:
            return last
    return epath.Path(run) / UPDATES / f"{len(there) + 1:04d}"


def read(workdir) -> dict | None:
    """What update.json holds; None where the update is not over."""
    path = epath.Path(workdir) / VERDICT
    return json.loads(path.read_text()) if path.exists() else None


def settle(workdir, found: dict, rotation) -> dict:
    """Write the verdict, with which an update is over; see `current`.

    The checkpoints of one that was rolled back are removed, so that nobody takes them
    for an encoder to use.

    Args:
      rotation: f32[D, D], or None.

    Returns:
      `found`, with the directory as "run".
    """
    workdir = epath.Path(workdir)
    found = found | {"run": str(workdir)}
    if rotation is not None:
        with (workdir / ROTATION).open("wb") as file:
            np.save(file, rotation, allow_pickle=False)
    results_lib.write(workdir / VERDICT, found)
    if not found["accepted"]:
        (workdir / "checkpoints").rmtree()
    return found
