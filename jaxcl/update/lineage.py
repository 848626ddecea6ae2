"""Make the directories, configs and reports of updates; `run.updates` finds them."""

from etils import epath

from jaxcl import storage
from jaxcl.config import run_config, sections
from jaxcl.errors import Refused
from jaxcl.index import maps
from jaxcl.methods import two_view
from jaxcl.nets import tuning
from jaxcl.run import encoder_folder, result_file, transfer, updates

_OF_A_RUN = ("method", "tuning")  # sections that no update changes


def read_run_config(run: str) -> dict:
    """Read the config of a run for `build`; for an encoder's folder make a recipe.

    Raises:
      Refused: there is no config, it has several seeds, or it is of graphs.
    """
    saved = transfer.config_of(str(run), field="--run")
    if encoder_folder.exists_at(run):
        return make_recipe(saved)
    if saved.get("seeds", 1) != 1:
        raise Refused(
            f"{run}: holds several seeds; name the directory of one, "
            f"{run}/seed_{saved.get('seed', 0)}"
        )
    if saved["augment"].get("name") == "graphs":
        raise Refused(f"{run}: learns from graphs; an update reads images")
    return run_config.without(saved, run_config.NOTED)


def make_recipe(encoder_config: dict) -> dict:
    """Make the config that trains an encoder without a run on new images.

    For a Vision Transformer adapters and the last block are trained (ExPLoRA).

    Args:
      encoder_config: `transfer.config_of` its folder.
    """
    is_vit = encoder_config["encoder"]["name"] == "vit"
    return encoder_config | {
        "name": "update",
        "method": dict(two_view.FOLLOWING),
        "optimizer": {"name": "adam", "lr": 1e-4, "decoupled": True}
        | {"exclude_1d": True, "weight_decay": 0.05},
        "schedule": {"name": "cosine", "per_epoch": False},
        "tuning": {"lora_rank": 16, "open_layers": 1} if is_vit else None,
        "epochs": 10,
        "batch_size": 256,
    }


def join_sections(old: dict, new: dict) -> dict:
    """Make the config section that reads two sets, the new one last."""
    before = old["sets"] if old.get("name") == "joined" else [old]
    return {"name": "joined", "sets": [*before, new]}


def make_next_config(
    parent: str, parent_config: dict, data: dict, changes: dict
) -> dict:
    """Make the config of a run that continues `parent` with one more task.

    Args:
      parent: directory of a finished run, or the folder of an encoder, for which the
        new task is the first.
      parent_config: the parent's config.
      data: the config section of the new task's data.
      changes: changes to the parent's config, for the new task.

    Raises:
      Refused: the parent is not finished, or a change is not allowed.
    """
    scenario, fixed = {"name": "joint", "evaluation": "none"}, ()
    if not encoder_folder.exists_at(parent):
        tasks = _count_tasks(parent, parent_config) + 1
        scenario, fixed = scenario | {"name": "after", "num_tasks": tasks}, _OF_A_RUN
    return _change_config(parent_config, changes, fixed) | {
        "data": data,
        "scenario": scenario,
        "start": str(parent),
        "evaluators": {},
        "evaluate_untrained": False,
        "plasticity": False,
        "first_tasks": None,
    }


def _count_tasks(run: str, config: dict) -> int:
    """Count the tasks of a run; refuse one that has not finished all of them."""
    has_results = result_file.has_results(run)
    results = result_file.read_results(run) if has_results else {"scalars": [None]}
    tasks, first = len(results["scalars"]), config.get("first_tasks")
    if None not in results["scalars"]:
        return tasks
    if first and result_file.count_finished(results) == first:
        raise Refused(
            f"{run}: config.first_tasks={first} left out {tasks - first} of its tasks; "
            "an update follows a run of all its tasks"
        )
    raise Refused(f"{run}: is not finished; let it finish first")


def _change_config(config, changes, also_fixed) -> dict:
    """Change a config option by option; refuse options that it does not have.

    A section with another name has none of the old one's options.

    Args:
      also_fixed: sections that cannot change, besides those that the update sets.
    """
    changed = config = sections.nest_method(config)
    for name, value in changes.items():
        if name == "method":
            value = {option: x for option, x in value.items() if x != {}}
        if value == {}:
            continue  # no option of the section was given
        section = config.get(name) or {}
        if name == "tuning":
            section = tuning.read_section(section)
        new = value
        if isinstance(value, dict) and isinstance(section, dict):
            other = value.get("name", section.get("name")) != section.get("name")
            new = value if other else _merge(section, value)
        if name == "method":
            new = sections.nest_method({"method": new})["method"]
        # An encoder's folder may get the same update again.
        is_same = isinstance(value, dict) and _is_same(name, section, new)
        all_fixed = ("data", "scenario", "start", "encoder", "evaluators", *also_fixed)
        if name in all_fixed and not (name in also_fixed and is_same):
            raise Refused(f"config.train.{name}: is fixed by the run or the update")
        changed = changed | {name: new}
    return changed


def _is_same(name: str, old: dict, new: dict) -> bool:
    """Say whether two sections give a run's state the same form."""
    if name == "tuning":  # by what batch norm normalises is no part of the state
        old, new = (tuning.settings(**x | {"statistics": "batch"}) for x in (old, new))
    return old == new


def _merge(section: dict, changes: dict) -> dict:
    """Change options of a section and of its inner ones; a name makes a new one."""
    merged = dict(section)
    for name, value in changes.items():
        inner = merged.get(name)
        if isinstance(inner, dict) and isinstance(value, dict) and "name" not in value:
            value = _merge(inner, value)
        merged[name] = value
    return merged


def default_batch_size(run: str) -> int:
    """Return the default batch size of an update of a run.

    It is the last size that was set, for the run or an accepted update. A size that was
    reduced for few images does not count.
    """
    for path in reversed(updates.list_updates(run)):
        report = updates.read_report(path) or {}
        size = (report.get("asked", {}).get("train") or {}).get("batch_size")
        if size is not None and report["accepted"]:
            return size
    return read_run_config(run).get("batch_size", sections.TopLevel.batch_size)


def choose_folder(run: str, request: dict | None) -> epath.Path:
    """Choose an update's directory: the last one, if unfinished or of the same images.

    An unfinished update may be another one: then `build` refuses the directory, whose
    config differs.

    Args:
      run: directory of the run.
      request: description of the update; None: no finished update is equal.
    """
    number, earlier = 1, updates.list_updates(run)
    if earlier:
        report = updates.read_report(earlier[-1])
        if report is None or report["asked"] == request:
            return earlier[-1]
        number += int(earlier[-1].name)  # those before may have been deleted
    return epath.Path(run) / updates.UPDATES / f"{number:04d}"


def write_report(workdir: epath.PathLike, report: dict, adapter: bytes | None) -> dict:
    """Write update.json, which ends the update; see `updates.find_current`.

    The checkpoints of an update that was rolled back are removed, so that nobody uses
    their encoder by mistake.

    Args:
      workdir: directory of the update.
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
    result_file.write_json(workdir / updates.VERDICT, report)
    remove_checkpoints(workdir, report)
    return report


def remove_checkpoints(workdir: epath.PathLike, report: dict) -> None:
    """Remove the checkpoints of an update that was rolled back, if any are left.

    One that was killed in `write_report` has a verdict and still its checkpoints.
    """
    checkpoints = epath.Path(workdir) / "checkpoints"
    if not report["accepted"] and checkpoints.exists():
        checkpoints.rmtree()
