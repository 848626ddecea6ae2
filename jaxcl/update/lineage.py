"""Manage the updates of a run: their directories, configs and reports.

RUN/updates/0001, 0002, ... are run directories; each has an update.json once the update
is over.
"""

import re

from etils import epath

from jaxcl import schema
from jaxcl.config import own_images, run_config, sections
from jaxcl.data import from_folders, sources, storage
from jaxcl.errors import Refused
from jaxcl.index import maps
from jaxcl.run import folder, transfer
from jaxcl.run import results as results_lib

UPDATES, VERDICT = "updates", "update.json"
_OF_A_RUN = ("method", "tuning")  # sections that no update changes
# Options for reading images, which new image files take over from the run's data.
_READING = ("size", "channels", "decoder", "on_corrupt", "background", "bits")


def find_current(run: str) -> str:
    """Find the directory of a run's last accepted update, or the run's own."""
    for path in reversed(list_updates(run)):
        if (read_report(path) or {}).get("accepted"):
            return str(path)
    return str(run)


def read_config(run: str) -> dict:
    """Read the config of a run for `build`; for an encoder's folder make a recipe.

    Raises:
      Refused: there is no config, it has several seeds, or it is of graphs.
    """
    saved = transfer.config_of(str(run), field="--run")
    if folder.is_one(run):
        return make_recipe(saved)
    if saved.get("seeds", 1) != 1:
        raise Refused(
            f"{run}: holds several seeds; name the directory of one, "
            f"{run}/seed_{saved.get('seed', 0)}"
        )
    if saved["augment"].get("name") == "graphs":
        raise Refused(f"{run}: learns from graphs; an update reads images")
    return run_config.without(saved, run_config.NOTED)


def make_recipe(theirs: dict) -> dict:
    """Make the config that trains an encoder without a run on new images.

    SimCLR under CaSSLe; the encoder as it came is the first teacher. For a Vision
    Transformer adapters and the last block are trained (ExPLoRA).

    Args:
      theirs: `transfer.config_of` its folder.
    """
    transformer = theirs["encoder"]["name"] == "vit"
    return theirs | {
        "name": "update",
        "method": {"name": "two_view", "base": "simclr", "strategy": "cassle"},
        "optimizer": {"name": "adam", "lr": 1e-4, "decoupled": True}
        | {"exclude_1d": True, "weight_decay": 0.05},
        "schedule": {"name": "cosine", "per_epoch": False},
        "tuning": {"lora_rank": 16, "open_layers": 1} if transformer else None,
        "epochs": 10,
        "batch_size": 256,
    }


def make_section(
    path: str | dict, options: dict, theirs: dict, field: str, whole: bool = False
) -> dict:
    """Make the config section that reads the images at a path.

    Without a `name` in `options` the source is guessed, see `sources.section_of`.
    Images in files are read by the options of the run; without any, small images are
    decoded once, into memory.

    Args:
      path: of the images; or a section that reads them, to which `options` are added.
      options: of the source; they override those of the run.
      theirs: the run's config.
      field: of the section, for messages.
      whole: whether all rows are train rows, without a test part.

    Raises:
      Refused: there is nothing at the path.
    """
    options = dict(options)
    if isinstance(path, dict):
        return path | options
    if not storage.exists(path):
        raise Refused(f"{field}={path!r}: no such file or folder")
    source = {"name": options.pop("name", None), "path": str(path)}
    if source["name"] is None:
        source = sources.section_of(path)
    if whole:
        source |= sources.without_test_split(source)
        if source["name"] == "image_folder" and from_folders.is_mixed(str(path)):
            source["folders"] = "none"
    if source["name"] in ("image_folder", "huggingface"):
        source["channels"] = len(theirs["augment"]["mean"])
        run_data = theirs.get("data", {})
        read = sources.SOURCES.get(run_data.get("name"))
        if read is not None and {*_READING} <= {*schema.option_of(read)}:
            source |= {name: run_data[name] for name in _READING if name in run_data}
            if run_data.get("resident") and "size" in source:  # else sizes may differ
                source["resident"] = True
        elif not {"size", "resident"} & set(options):
            whole = source | options
            options |= own_images.read_once(whole, own_images.summarize(whole))
    return source | options


def join_sections(old: dict, new: dict) -> dict:
    """Make the config section that reads two sets, the new one last."""
    before = old["sets"] if old.get("name") == "joined" else [old]
    return {"name": "joined", "sets": [*before, new]}


def make_next_config(parent: str, theirs: dict, data: dict, changes: dict) -> dict:
    """Make the config of a run that continues `parent` with one more task.

    Args:
      parent: directory of a finished run, or the folder of an encoder, for which the
        new task is the first.
      theirs: the parent's config.
      data: the config section of the new task's data.
      changes: to the parent's config, for the new task.

    Raises:
      Refused: the parent is not finished, or a change is not allowed.
    """
    scenario, kept = {"name": "joint", "evaluation": "none"}, ()
    if not folder.is_one(parent):
        tasks = _count_tasks(parent, theirs) + 1
        scenario, kept = scenario | {"name": "after", "num_tasks": tasks}, _OF_A_RUN
    return _change_config(theirs, changes, kept) | {
        "data": data,
        "scenario": scenario,
        "start": str(parent),
        "evaluators": {},
        "evaluate_untrained": False,
        "plasticity": False,
        "first_tasks": None,
    }


def _count_tasks(run: str, theirs: dict) -> int:
    """Count the tasks of a run; refuse one that has not finished all of them."""
    found = results_lib.has_results(run)
    results = results_lib.read_results(run) if found else {"scalars": [None]}
    tasks, first = len(results["scalars"]), theirs.get("first_tasks")
    if None not in results["scalars"]:
        return tasks
    if first and results_lib.count_finished(results) == first:
        raise Refused(
            f"{run}: config.first_tasks={first} left out {tasks - first} of its tasks; "
            "an update follows a run of all its tasks"
        )
    raise Refused(f"{run}: is not finished; let it finish first")


def _change_config(theirs, changes, kept) -> dict:
    """Change a config option by option; refuse options that it does not have.

    Args:
      kept: sections that cannot change, besides those that the update sets.
    """
    changed = theirs = sections.nest_method(theirs)
    for name, value in changes.items():
        if name == "method":
            value = {option: x for option, x in value.items() if x != {}}
        if value == {}:
            continue  # no option of the section was given
        own = theirs.get(name) or {}
        new = _merge(own, value) if isinstance(value, dict) else value
        if name == "method":
            new = sections.nest_method({"method": new})["method"]
        # An encoder's folder may get the same update again.
        is_same = name in kept and isinstance(value, dict) and new == own
        fixed = ("data", "scenario", "start", "encoder", "evaluators", *kept)
        if name in fixed and not is_same:
            raise Refused(f"config.train.{name}: is fixed by the run or the update")
        changed = changed | {name: new}
    return changed


def _merge(section: dict, changes: dict) -> dict:
    """Change options of a section and of its inner ones; a name makes a new one."""
    merged = dict(section)
    for name, value in changes.items():
        inner = merged.get(name)
        if isinstance(inner, dict) and isinstance(value, dict) and "name" not in value:
            value = _merge(inner, value)
        merged[name] = value
    return merged


def list_updates(run: str) -> list[epath.Path]:
    """List the directories of all updates of a run, in order."""
    folder = epath.Path(run) / UPDATES
    entries = folder.iterdir() if folder.exists() else ()
    found = (path for path in entries if re.fullmatch(r"\d{4,}", path.name))
    return sorted(found, key=lambda path: int(path.name))


def default_batch_size(run: str) -> int:
    """Return the default batch size of an update of a run.

    It is the last size that was set, for the run or an accepted update. A size that was
    reduced for few images does not count.
    """
    for path in reversed(list_updates(run)):
        report = read_report(path) or {}
        size = (report.get("asked", {}).get("train") or {}).get("batch_size")
        if size is not None and report["accepted"]:
            return size
    return read_config(run).get("batch_size", sections.TopLevel.batch_size)


def choose_folder(run: str, asked: dict | None) -> epath.Path:
    """Choose an update's directory: the last if unfinished or of equal images.

    An unfinished update may be another one: then `build` refuses the directory, whose
    config differs.

    Args:
      run: its directory.
      asked: description of the update; None: no finished update is equal.
    """
    number, earlier = 1, list_updates(run)
    if earlier:
        report = read_report(earlier[-1])
        if report is None or report["asked"] == asked:
            return earlier[-1]
        number += int(earlier[-1].name)  # those before may have been deleted
    return epath.Path(run) / UPDATES / f"{number:04d}"


def read_report(workdir: epath.PathLike) -> dict | None:
    """Read update.json; None while the update is unfinished."""
    path = epath.Path(workdir) / VERDICT
    return storage.read_object(path) if path.exists() else None


def write_report(workdir: epath.PathLike, report: dict, adapter: bytes | None) -> dict:
    """Write update.json, which ends the update; see `find_current`.

    The checkpoints of an update that was rolled back are removed, so that nobody uses
    their encoder by mistake.

    Args:
      workdir: of the update.
      report: the measurements and the verdict.
      adapter: file of a map of new queries to the old index, or None.

    Returns:
      `report`, with the directory as "run".
    """
    workdir = epath.Path(workdir)
    report = report | {"run": str(workdir)}
    if adapter is not None and report["accepted"]:
        with storage.replacing(workdir / maps.FILE) as file:
            file.write(adapter)
    results_lib.write_json(workdir / VERDICT, report)
    remove_checkpoints(workdir, report)
    return report


def remove_checkpoints(workdir: epath.PathLike, report: dict) -> None:
    """Remove the checkpoints of an update that was rolled back, if any are left.

    One that was killed in `write_report` has a verdict and still its checkpoints.
    """
    checkpoints = epath.Path(workdir) / "checkpoints"
    if not report["accepted"] and checkpoints.exists():
        checkpoints.rmtree()
