"""`jaxcl.fit`: a run in one call.

It uses the config of configs/own_images.py and the loop of `python -m jaxcl.main`, and
leaves a normal run directory.
"""

import contextlib
import hashlib
import json
import os
import signal
import threading
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import ml_collections
import numpy as np
from etils import epath

from jaxcl import errors, lookup, numerics
from jaxcl.api import inputs, result
from jaxcl.config import build, own_images, recipe, run_config
from jaxcl.data.sources import by_name
from jaxcl.errors import Refused
from jaxcl.methods.two_view import strategies
from jaxcl.run import encoder_folder, finish, signals, terminal
from jaxcl.weights import writer
from jaxcl.weights.encoder import Encoder, flatten_leaves


@errors.shortened
@numerics.pinned()
def fit(
    images: inputs.Images,
    *,
    labels: Sequence[Any] | None = None,
    test: float | str | os.PathLike | Mapping[str, Any] | tuple | None = None,
    validation: float = 0.0,
    base: str = "simclr",
    strategy: str | None = None,
    tasks: int | Sequence[Any] = 1,
    encoder: str | Mapping[str, Any] | os.PathLike | Encoder = "resnet18",
    teacher: str | os.PathLike | Encoder | None = None,
    epochs: int | None = None,
    batch_size: int | None = None,
    size: int | None = None,
    seed: int = 0,
    options: Mapping[str, Any] | None = None,
    name: str = "images",
    out: str | os.PathLike | None = None,
    quiet: bool = False,
) -> result.Result:
    """Train an encoder on images without reading their labels, and evaluate it.

    A repeated call resumes a stopped run and returns a finished one at once. It fails
    if the folder holds another run or the images have changed.

    Args:
      images: u8[N, H, W, C] or u8[N, H, W]; a list of images of one size; a Dataset of
        Hugging Face's `datasets` with such images; a path: a folder of image files,
        with or without class folders, an .npz file, or a directory that
        `jaxcl convert`, TFDS or `datasets` wrote; the name of a source without
        required options, as "digits"; or a section like config.data.
      labels: labels of arrays, N integers or strings; -1 or None where unknown.
        They are for evaluation and for cutting tasks; only base "supcon" trains with
        them.
      test: the evaluation images. A share of the labelled images of each class, by
        default a fifth, which is held out; or other labelled images: (images, labels),
        or a path or section as `images` takes.
      validation: share of the train images that is evaluated in place of test images.
      base: the loss of one task, a row of `jaxcl list bases`.
      strategy: the method against forgetting, a row of `jaxcl list strategies`; None:
        "finetune", or "distil" with a teacher.
      tasks: number of tasks. If every train image has a label, tasks are classes one
        after another, else random slices; options={"scenario.name": "data"} takes
        slices of labelled images, too. Or N entries, one for each image (a year, a
        place): their sorted values are the tasks.
      encoder: a name in `jaxcl.config.own_images.ENCODERS`, as "resnet18" or
        "vit_small"; a section like config.encoder; or pretrained weights: an encoder of
        `load_encoder`, or its folder.
      teacher: another trained encoder, or its folder, whose features strategy "distil"
        matches. The base's loss is used if options["method.strategy.base_weight"] is
        above 0.
      epochs: number of epochs of each task; None: 5 million images seen, but 50 to 400
        epochs.
      batch_size: number of images in a batch; None: up to 256, with at least four
        batches an epoch.
      size: pixels of a side of the network's input; None: those of the images, at most
        224.
      seed: seed of all random draws.
      options: other values of the config, by name: {"method.temperature": 0.1}.
      name: name of the run, and of the set if the images are arrays.
      out: run directory; None: runs/NAME-HASH, with a hash of the settings.
      quiet: whether to print nothing.

    Returns:
      The run.

    Raises:
      Refused: an argument is wrong; the message names it and its range.
      OSError: images cannot be read, or the directory not written.
      jaxcl.run.train.Interrupted: Ctrl-C; the progress is saved.
      jaxcl.run.metrics_log.Diverged: the loss or a parameter is not finite.
    """
    if not isinstance(options, Mapping | None):
        raise Refused("options", options, "must be a dict, field -> value")
    options = options or {}
    read = _make_data_section(images, labels, tasks, test, name)
    is_trained = isinstance(encoder, Encoder)
    with _silent(quiet):
        network = encoder_folder.section(encoder.card)[0] if is_trained else encoder
        scenario = options.get("scenario.name")
        # The folder of one in memory is not written yet.
        folder = "" if isinstance(teacher, Encoder) else teacher
        config = _make_config(read.section, network, size, tasks, scenario, folder)
    set_here: dict[str, Any] = {"epochs": epochs, "batch_size": batch_size}
    set_here = {field: x for field, x in set_here.items() if x is not None}
    set_here |= {"name": name, "seed": seed}
    default = "finetune" if teacher is None else "distil"
    set_here |= {"method.base": base, "method.strategy": strategy or default}
    if validation:
        set_here |= {"data.validation": validation}
        set_here |= {"scenario.evaluation": "validation"}
    if quiet:
        set_here |= {"progress": False}
    recipe.change(config, {**set_here, **options})
    if not is_trained:
        _check_strategy(config)
    if config.get("seeds", 1) != 1:
        raise Refused("config.seeds", config.seeds, "must be 1; call again with seed=1")
    encoders = {"start": encoder, "teacher": teacher}
    encoders = {field: x for field, x in encoders.items() if isinstance(x, Encoder)}
    files = {field: _tensors(x) for field, x in encoders.items()}
    workdir = epath.Path(out or f"runs/{name}-{_hash_settings(config, files)}")
    for field, x in encoders.items():
        config[field] = _write_encoder(x.card, files[field], workdir / field)
    with _silent(quiet), _stopping() as stop:
        terminal.use_plain_warnings()
        work = build.build(config, workdir)
        finish.run_job(work, workdir, stop=stop)
        print(f"\n{finish.closing(work, workdir)}", flush=True)
    return result.Result(str(workdir), stored_sets=read.stored_sets)


def _make_data_section(images, labels, tasks, test, name) -> inputs.ImageInput:
    """Make config.data of the train and evaluation images."""
    domains = None if isinstance(tasks, int | np.integer) else tasks
    if domains is not None and np.ndim(domains) != 1:
        raise Refused("tasks", tasks, "must be 1 or more, or the task of each image")
    share = test if isinstance(test, int | float) else None
    if share is not None and not 0 <= share < 1:
        raise Refused("test", test, "a share must be from 0 to below 1")
    train = inputs.make_input(
        images, name=name, labels=labels, domains=domains, test=share
    )
    if test is None or share is not None:
        return train
    images, labels = inputs.split_pair(test)
    evaluation = inputs.make_input(images, name=f"{name}_test", labels=labels)
    sections = {"train": train.section, "test": evaluation.section}
    sections = {name: x | by_name.without_test_split(x) for name, x in sections.items()}
    stored_sets = (*train.stored_sets, *evaluation.stored_sets)
    return inputs.ImageInput({"name": "judged_by", **sections}, stored_sets)


def _make_config(
    section, encoder, size, tasks, scenario, teacher
) -> ml_collections.ConfigDict:
    """Make the config of configs/own_images.py, cut into tasks as the call says."""
    if not isinstance(tasks, int | np.integer):
        scenario, count = "domain", 1
    else:
        if tasks < 1:
            raise Refused("tasks", tasks, "must be 1 or more")
        scenario, count = ("joint" if tasks == 1 else scenario), int(tasks)
    return own_images.config(
        section,
        encoder=encoder,
        size=size,
        scenario=scenario,
        num_tasks=count,
        by_strategy=False,
        teacher=teacher,
    )


def _check_strategy(config) -> None:
    """Refuse a strategy that needs an earlier task if there is none."""
    name = lookup.name_of(config.to_dict()["method"].get("strategy"))
    if config.scenario.name != "joint" or config.get("start"):
        return
    if name not in strategies.STRATEGIES:  # `build` says what there is
        return
    strategy = strategies.make_strategy(name)
    if strategy.teacher or strategy.end_task:
        raise Refused(
            f"strategy={name!r}: acts from the second task on, and there is only one; "
            "tasks must be 2 or more, or `encoder` a trained one"
        )


def _hash_settings(config, files: dict[str, dict[str, bytes]]) -> str:
    """Hash the settings of a run to eight digits, for the name of its directory.

    Args:
      config: config of the run, without the folders that are written for `files`.
      files: "start", "teacher" -> the file of an encoder in memory, by its name.
    """
    settings = config.to_dict()
    settings = {k: v for k, v in settings.items() if k not in run_config.MACHINE}
    settings |= writer.hash_files(files.get("start", {}))
    if "teacher" in files:
        settings["teacher"] = writer.hash_files(files["teacher"])
    text = json.dumps(settings, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:8]


def _tensors(encoder: Encoder) -> dict[str, bytes]:
    """Pack the tensors of an encoder in memory into a file, by its name."""
    leaves = flatten_leaves(encoder.params, encoder.stats)
    return {encoder_folder.TENSORS: writer.pack_tensors(leaves, "flax")}


def _write_encoder(card: dict, files: dict[str, bytes], place: epath.Path) -> str:
    """Write the folder of an encoder in memory; return its path."""
    card = {key: value for key, value in card.items() if key != "checksum"}
    card["files"] = writer.hash_files(files)
    writer.write_folder(place, files, card, force=False)
    return str(place)


@contextlib.contextmanager
def _silent(quiet: bool) -> Iterator[None]:
    """Optionally print nothing within this context; errors are raised."""
    if not quiet:
        yield
        return
    with open(os.devnull, "w") as nowhere, contextlib.redirect_stdout(nowhere):
        yield


@contextlib.contextmanager
def _stopping() -> Iterator:
    """Let Ctrl-C save the run within this context; yield a function that tells of it.

    Unlike `signals.watch_signals` it never ends the process, which may be a notebook's.
    Only the main thread hears signals; elsewhere nothing stops a run.
    """
    if threading.current_thread() is not threading.main_thread():
        yield lambda: False
        return
    event = threading.Event()

    def record_signal(number):  # in a thread: at once, also while a program is compiled
        if not event.is_set():
            event.set()
            print("jaxcl: the run saves and stops; a second Ctrl-C ends it", flush=True)

    calls = []

    def note(number, frame):
        calls.append(number)
        if len(calls) > 1:
            raise KeyboardInterrupt

    with signals.hear_at_once((signal.SIGINT,), record_signal, note):
        yield lambda: bool(calls) or event.is_set()
