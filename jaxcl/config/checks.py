"""Refuse data that a config cannot use; warn of data that inflate accuracies."""

import os

import jax
from absl import logging
from etils import epath

from jaxcl import core, lookup, sharding, storage
from jaxcl.config import files, options, run_config, sections
from jaxcl.data import stream
from jaxcl.data.sources import fetch
from jaxcl.data.stream import identity, splits
from jaxcl.errors import Refused
from jaxcl.run import agreement, encoder_folder, result_file, updates


def check_path(top: sections.TopLevel) -> None:
    """Refuse a path without data; explain how to get the data or do without them."""
    path = top.data.get("path")
    if not isinstance(path, str) or storage.exists(path):
        return
    names = (os.path.basename(os.path.normpath(path)), top.data.get("name"))
    fetched = [name for name in names if name in fetch.SETS]
    ways = [f"download the set: jaxcl data {name} --out={path}" for name in fetched[:1]]
    ways.append("say where it is: --config.data.path=FOLDER")
    if top.name in files.describe_configs():
        ways.append(f"try the config without its data: jaxcl train {top.name}:debug")
    raise Refused(
        "config.data.path", path, "no such file or folder", "; or ".join(ways)
    )


def _describe_small_view(augment: dict) -> str:
    """Warn of an evaluation that sees less than half of each image; "" if none does."""
    size, resize = augment.get("size"), augment.get("resize")
    share = 1.0 if None in (size, resize) else (size / resize) ** 2
    if share >= 0.5:
        return ""
    return (
        f"config.augment.resize={resize}: evaluation sees the middle {share:.0%} of an "
        f"image, since size={size}; try --config.augment.resize={round(size * 8 / 7)}"
    )


def check_data(
    top: sections.TopLevel, tasks: stream.Stream, workdir
) -> identity.Identity:
    """Refuse other data than a run began with; warn of data that inflate accuracies.

    These are duplicate images, see config.duplicates, and classes that are evaluated
    but not trained on.

    Returns:
      The identity of the rows of the data set.
    """
    dataset, is_first = tasks.dataset, jax.process_index() == 0
    rows = identity.identify(dataset)
    identity.check_data(workdir, rows)
    warnings = []
    if unknown := splits.unknown_classes(dataset, tasks.evaluation):
        warnings.append(f"config.data: {unknown[1]}")
    if is_first and (rows.by_bytes if top.duplicates is None else top.duplicates):
        by_bytes = rows if rows.by_bytes else identity.identify(dataset, True)
        name = f"config.data: {dataset.name}"
        warnings.append(identity.describe_duplicates(by_bytes, name))
    warnings.append(_describe_small_view(top.augment))
    for words in filter(None, warnings if is_first else ()):
        logging.warning("%s", words)
    return rows


def compare_data(dataset: stream.Dataset, rows: identity.Identity) -> None:
    """Refuse processes whose data differ. All processes must call it.

    Args:
      dataset: the data set.
      rows: identity of the dataset's rows.

    Raises:
      Refused: in all of them; the message names some rows that differ.
    """
    if jax.process_count() == 1:
        return
    shared = identity.without_times(dataset, rows)
    if len({*sharding.gather_bytes(shared.digest().encode())}) == 1:
        return
    is_first = jax.process_index() == 0
    first = sharding.gather_bytes(identity.pack(shared) if is_first else b"")[0]
    changes = identity.describe_changes(identity.unpack(first), shared)
    difference = f"compared with process 0: {changes}" if changes else "as in process 0"
    agreement.check(
        {f"config.data: {dataset.name}": difference},
        "All must read the same images",
    )


def check_start(top: sections.TopLevel, plain: dict, train: stream.Examples) -> None:
    """Refuse a config.start that this config cannot continue.

    After the last task of a run there may be other data, but the state is that of the
    method. The folder of an encoder takes images of as many channels.

    Args:
      plain: the config, as JSON.
      train: the images to train on.
    """
    start, is_after = top.start, top.scenario.get("name") == "after"
    if is_after and (start is None or encoder_folder.exists_at(start)):
        raise Refused(
            "config.scenario.name='after': set config.start to the run directory with "
            "the earlier tasks"
        )
    if start is None:
        return
    if encoder_folder.exists_at(start):
        updates.tell_newer(start)
        if train.graphs is not None:
            raise Refused("config.start", start, "it is an encoder of images")
        wanted = encoder_folder.read_card(start)["input"]["channels"]
        first = train.read(0)
        if first.shape[-1] != wanted:
            raise Refused(
                f"config.start={start!r}: its images have {wanted} channels, those of "
                f"config.data have {first.shape[-1]}"
            )
        return
    names = ["encoder", "augment", "precision"]
    names += ["method"] if is_after else ["seed", "data", "scenario", "batch_size"]
    _check_same(f"config.start={start!r}", start, plain, names)


def read_single_task_results(run: str, plain: dict, method: core.Method) -> dict:
    """Read FT_i, accuracies on single tasks, from another run of the same options.

    If the method trains a task alone with other options, only its base is compared.

    Args:
      plain: the config, as JSON.
      method: the method of this run.
    """
    field = f"config.plasticity_from={run!r}"
    names = ["seed", "data", "scenario", "batch_size", "epochs", "encoder", "augment"]
    names += ["optimizer", "schedule", "scale_lr", "precision", "evaluators", "replay"]
    names += ["base"] if method.single_task_options else ["method"]
    _check_same(field, run, plain, names)
    results = result_file.read_results(run) if result_file.has_results(run) else {}
    if "finetune" not in results:
        raise Refused(f"{field}: it has not measured FT_i, or not yet")
    return results["finetune"]


def _check_same(field, run, plain, names) -> None:
    """Refuse a run whose config differs from this one in options of these names."""
    path = epath.Path(run) / "config.json"
    if not path.exists():
        raise Refused(f"{field}: there is no run in it")
    configs = (run_config.read_saved_config(path), plain)
    configs = (
        x | {"base": lookup.name_of(x.get("method", {}).get("base"))} for x in configs
    )
    pair = [{name: x[name] for name in names if name in x} for x in configs]
    if changed := options.differences(*pair):
        raise Refused(
            f"{field}: a run of another config; they differ in {'; '.join(changed)}"
        )
