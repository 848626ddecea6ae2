"""Make a config for a user's images: its values follow from the images.

`configs/own_images.py` and `jaxcl.fit` make their configs here. The learning rates of
the bases are those of PNR's scripts for CIFAR; epochs, batch and the rest are our
choice, argued below and not tuned on any set.
"""

import contextlib
import os
from collections.abc import Mapping
from typing import Any, NamedTuple

import ml_collections
import numpy as np

from jaxcl import core, lookup, schema, storage
from jaxcl.config import recipe
from jaxcl.data import stream
from jaxcl.data.images import decode
from jaxcl.data.sources import by_name, folders
from jaxcl.errors import Refused
from jaxcl.run import encoder_folder

# base -> learning rate at batch 256 and weight decay under LARS
_RATES = {
    "": (0.4, 1e-4),
    "mocov2plus": (0.6, 1e-4),
    "simclr": (0.6, 1e-4),
    "byol": (1.0, 1e-5),
    "vicreg": (0.3, 1e-4),
    "simsiam": (0.5, 1e-5),
    "dino": (0.3, 1e-6),
    "lejepa": (0.3, 1e-4),
}
_TAUGHT_RATE = 2e-3  # of AdamW with a teacher, for other networks and any batch size
_SEEN = 5_000_000  # images that a run sees, where the bounds of epochs allow it
_EPOCHS = (50, 400)  # fewer teach little; more have not paid in published runs
_LARGEST = 224  # pixels of a side that the network is given
_SMALL = 96  # sets of up to this side are decoded once, into memory
_RESIDENT = 2 << 30  # bytes that such a set may have
_SAMPLED = 512  # images of which sides and pixels are measured
TASKS = 5  # of a continual run, unless it is told how many, or has fewer classes

# Name of an encoder -> config.encoder, which `_fit_encoder` completes
ENCODERS: dict[str, dict[str, Any]] = {
    **{f"resnet{x}": {"name": "resnet", "depth": x} for x in (10, 18, 34, 50, 101)},
    **{
        f"{name}_{size}": {"name": name, "size": size}
        for name, sizes in (
            ("vit", ("tiny", "small", "base", "large")),
            ("convnext", ("atto", "tiny", "small", "base")),
        )
        for size in sizes
    },
    "conv_net": {"name": "conv_net"},
}


class Summary(NamedTuple):
    """Measures of a set, from which its config follows."""

    rows: int  # train rows
    side: int  # median shorter side of the images in pixels
    square: bool  # whether all images that were sampled are side x side
    streams: bool  # read row by row, from files
    mean: tuple[float, ...]  # of each channel, in [0, 1]
    std: tuple[float, ...]
    labelled: int  # train rows that have a label
    num_test: int  # test rows, if all of them have a label; else 0
    classes: tuple[int, ...]  # train rows of each class
    domains: tuple[int, ...]  # train rows of each domain


def summarize(data: Mapping[str, Any]) -> Summary:
    """Measure a set, or some hundred images of it.

    Args:
      data: config.data.

    Raises:
      Refused, OSError: from the source, or it is a set of graphs.
    """
    dataset = read_images(data)
    train = dataset.train
    if train.graphs is not None:
        raise Refused("config.data.name", data["name"], "graphs; must be images")
    count = stream.count_rows(train)
    rows = np.unique(np.linspace(0, count - 1, min(count, _SAMPLED)).astype(int))
    sampled = []
    for row in rows:
        with contextlib.suppress(decode.Unreadable):  # the run reports or skips it
            sampled.append(train.read(row))
    sampled = sampled or [train.read(0)]  # which says what is wrong with it
    shapes = {image.shape[:2] for image in sampled}
    side = int(np.median([min(image.shape[:2]) for image in sampled]))
    mean, std = _compute_moments(sampled)
    test = dataset.test
    can_judge = test is not None and bool((test.label >= 0).all())
    return Summary(
        rows=count,
        side=side,
        square=shapes == {(side, side)},
        streams=train.streams,
        mean=mean,
        std=std,
        labelled=int((train.label >= 0).sum()),
        num_test=stream.count_rows(test) if can_judge else 0,
        classes=_count_values(train.label, len(dataset.class_names)),
        domains=_count_values(train.domain, len(dataset.domain_names)),
    )


def read_images(data: Mapping[str, Any]) -> stream.Dataset:
    """Read the data set that a section config.data names.

    Raises:
      Refused, OSError: as the source raises them.
    """
    make, options = lookup.find_function(by_name.SOURCES, data, "config.data")
    return make(**schema.options(make, options, "config.data"))


def _compute_moments(images) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Compute mean and deviation of each channel; every image has the same weight."""
    means, squares = [], []
    for image in images:
        pixels = image.reshape(-1, image.shape[-1]) / 255.0
        means.append(pixels.mean(axis=0))
        squares.append((pixels**2).mean(axis=0))
    mean = np.mean(means, axis=0)
    # Blank images have no deviation, and nothing may be divided by it.
    std = np.sqrt(np.maximum(np.mean(squares, axis=0) - mean**2, 1e-4))
    return tuple(np.round(mean, 4).tolist()), tuple(np.round(std, 4).tolist())


def _count_values(values, size) -> tuple[int, ...]:
    """Count how often each number from 0 occurs; -1 is not counted."""
    return tuple(np.bincount(values[values >= 0], minlength=size).tolist())


def config(
    data: Mapping[str, Any],
    *,
    encoder: str | os.PathLike | Mapping[str, Any] = "resnet18",
    size: int | None = None,
    scenario: str | None = None,
    num_tasks: int | None = None,
    by_strategy: bool = True,
    teacher: str | os.PathLike | None = None,
) -> ml_collections.ConfigDict:
    """Make the config of a set of images.

    Its options may be overridden as those of any config.

    Args:
      data: a section config.data; for sources that read files, `size` and `resident`
        are filled in.
      encoder: a name in `ENCODERS`; a section config.encoder; or the folder of an
        encoder, with which training begins.
      size: pixels of a side of the network's input; None: those of the images, at most
        224.
      scenario: scenario of a continual run. None: classes one after another ("class")
        if every train image has a label, else random slices ("data").
      num_tasks: number of tasks; each domain is one. None: 5, but at most one for each
        class.
      by_strategy: make the run joint if its strategy is "finetune" or "distil", else
        continual.
        False: always continual.
      teacher: the folder of an encoder to learn from, by strategy "distil".

    Raises:
      Refused, OSError: as of the source; an unknown encoder, or a folder that holds
        none; too few images; no tasks.
    """
    schema.check_value(num_tasks, schema.Count | None, "num_tasks")
    schema.check_value(size, schema.Pixels | None, "size")
    section, start = _choose_encoder(encoder)
    summary = summarize(data)
    if summary.rows < 4:
        raise Refused(f"config.data: {summary.rows} train images; must be 4 or more")
    config = ml_collections.ConfigDict()
    config.name = "own_images"
    config.method = recipe.Sections(
        {
            "name": "two_view",
            "base": {"name": "simclr"},
            "strategy": {"name": "finetune"},
        }
    )
    if teacher is not None:
        config.teacher = os.fspath(teacher)
        config.method.strategy.name = "distil"
    config.data = once = read_once(data, summary)
    side = min(summary.side, _LARGEST) if size is None else size
    is_open = any(section is default for default in ENCODERS.values())  # only named
    if section.get("name") == "vit" and size is None:
        patch = _vit_patch(side) if is_open else section.get("patch", 16)
        side = max(side // patch, 1) * patch
    _set_augmentation(config, summary, side, cut=once != dict(data))
    config.encoder = dict(section)
    if is_open:
        _tie_encoder(config.encoder, config.augment.get_ref("size"))
    if start is not None:
        config.start = start
    _set_tasks(config, summary, scenario, num_tasks, by_strategy)
    config.epochs = int(np.clip(_SEEN // summary.rows, *_EPOCHS))
    rows = 2 ** int(np.log2(max(min(summary.rows // 2, 65536), 256)))
    queues = {name: {"queue_size": rows} for name in ("mocov2plus", "nnclr")}
    recipe.set_by_name(config.method.base, queues)
    _set_optimizer(config)
    config.evaluators = _choose_evaluators(summary)
    config.plasticity = False
    return config


def _set_tasks(config, summary, scenario, num_tasks, by_strategy) -> None:
    """Set the tasks, and a batch size that the smallest of them can fill."""
    if scenario is None:
        is_labelled = summary.labelled == summary.rows and len(summary.classes) > 1
        scenario = "class" if is_labelled else "data"
    tasks = _count_tasks(summary, scenario, num_tasks)
    sizes = _task_sizes(summary, scenario, tasks)
    rows, median = min(sizes), int(np.median(sizes))
    strategy = config.method.strategy.get_ref("name")

    def choose(joint, continual):
        table = dict.fromkeys(("finetune", "distil"), joint) if by_strategy else {}
        return recipe.look_up(table | {"": continual}, strategy)

    config.scenario = {
        "name": choose("joint", scenario),
        "num_tasks": choose(1, tasks),
        "evaluation": "test" if summary.num_test else "none",
    }
    config.batch_size = choose(batch_size(summary.rows), batch_size(rows))
    if tasks > 1 and 4 * batch_size(rows) <= batch_size(median) and not by_strategy:
        print(
            f"config.batch_size={batch_size(rows)} for all tasks: task "
            f"{int(np.argmin(sizes)) + 1} of {tasks} has {rows:,} train images; the "
            f"median task, of {median:,}, would have {batch_size(median)}. Leave its "
            "classes out, or cut other tasks",
            flush=True,
        )


def _choose_encoder(encoder) -> tuple[dict, str | None]:
    """Choose the section of an encoder, and the folder with which it begins, if any."""
    if isinstance(encoder, Mapping | ml_collections.ConfigDict):
        return dict(encoder), None
    if not isinstance(encoder, str | os.PathLike):
        raise Refused("encoder", encoder, "must be a name, a section, or a folder")
    text = os.fspath(encoder)
    if encoder_folder.exists_at(text):
        return encoder_folder.as_config(text)["encoder"], text
    if text not in ENCODERS and storage.exists(text):
        raise Refused(
            "encoder", text, "holds no encoder; jaxcl export or jaxcl import writes one"
        )
    core.check_choice("encoder", text, tuple(ENCODERS))
    return ENCODERS[text], None


def read_once(data: Mapping[str, Any], summary: Summary) -> dict:
    """Return config.data; small image files are to be decoded once, into memory.

    Args:
      data: a section config.data.
      summary: result of `summarize`.
    """
    make, options = lookup.find_function(by_name.SOURCES, data, "config.data")
    takes = {"size", "resident"} <= set(schema.defaults(make))
    small = summary.side <= _SMALL and summary.rows * summary.side**2 * 3 <= _RESIDENT
    if not (summary.streams and takes and small) or {"size", "resident"} & set(options):
        return dict(data)
    return dict(data) | {"size": summary.side, "resident": True}


def _vit_patch(side: int) -> int:
    """Choose a patch: about 64 patches of small images, 196 of large ones."""
    return 4 if side < 48 else 8 if side < 128 else 16


def _tie_encoder(section, size) -> None:
    """Tie stem or patch of an encoder to the side of its images, in pixels."""
    if section.name == "vit":
        section.image_size = recipe.compute(int, size)
        section.patch = recipe.compute(_vit_patch, size)
    elif section.name == "resnet":
        section.stem = recipe.compute(
            lambda side: "cifar" if side <= 64 else "imagenet", size
        )
    elif section.name == "convnext":
        # Else little is left of the last map of small images
        section.patch = recipe.compute(lambda side: 2 if side < 128 else 4, size)


def _set_augmentation(config, summary, side, cut) -> None:
    """Set SimCLR's augmentation for photographs; what depends on the side follows it.

    Args:
      side: side of the network's input, in pixels.
      cut: whether `read_once` cuts the images to squares.
    """
    config.augment = {
        "size": side,
        "jitter": (0.4, 0.4, 0.2, 0.1),
        "solarize": (0.0, 0.2),
        "mean": summary.mean,
        "std": summary.std,
    }
    is_square = cut or (summary.square and not summary.streams)

    def choose_resize(side):
        if side >= summary.side:
            return None if is_square and side == summary.side else side
        return min(summary.side, round(side * 256 / 224))

    size = config.augment.get_ref("size")
    config.augment.resize = recipe.compute(choose_resize, size, like=side)
    config.augment.scale = recipe.compute(
        lambda side: (0.2 if side < _SMALL else 0.08, 1.0), size
    )
    config.augment.blur = recipe.compute(  # small images are not blurred
        lambda side: (0.0, 0.0) if side < _SMALL else (1.0, 0.1), size
    )


def batch_size(rows: int) -> int:
    """Choose a power of two from 2 to 256 with at least four batches an epoch.

    With less than 8 rows it is 2, and an epoch has fewer batches.
    """
    return 2 ** int(np.clip(np.log2(max(rows // 4, 2)), 1, 8))


def _count_tasks(summary, scenario, num_tasks) -> int:
    """Count the tasks; refuse more than there are classes."""
    if scenario == "domain":
        return len(summary.domains)
    most, unit = summary.rows, "train images"
    if scenario == "class":
        most, unit = len(summary.classes), "classes"
    if num_tasks is not None and num_tasks > most:
        raise Refused(
            "tasks", num_tasks, f"must be at most {most}, the number of {unit}"
        )
    return num_tasks or min(TASKS, most)


def _task_sizes(summary, scenario, num_tasks) -> list[int]:
    """Count the train rows of each task of a continual run."""
    if scenario == "domain":
        return [*summary.domains]
    if scenario == "class":
        chunks = np.array_split(np.array(summary.classes), num_tasks)
        return [int(chunk.sum()) for chunk in chunks]
    return [summary.rows // num_tasks] * num_tasks


def _set_optimizer(config) -> None:
    """Set LARS with the base's rates; or AdamW for a ViT, a ConvNeXt or a teacher.

    With LARS students stayed at the mean feature, see docs/methods.md.
    """
    base = config.method.base.get_ref("name")
    by_adam, taught = config.encoder.name in ("vit", "convnext"), config.get("teacher")
    if by_adam or taught is not None:
        config.optimizer = {"name": "adam", "lr": 5e-4, "decoupled": True}
        config.optimizer.update({"exclude_1d": True, "weight_decay": 0.05})
        if not by_adam:
            config.optimizer.lr, config.scale_lr = _TAUGHT_RATE, False
    else:
        rates, decays = ({n: x[i] for n, x in _RATES.items()} for i in range(2))
        config.optimizer = {"name": "lars", "lr": recipe.look_up(rates, base)}
        config.optimizer.weight_decay = recipe.look_up(decays, base)
    warmup = recipe.tie_warmup(config)
    config.schedule = {"name": "warmup_cosine", "warmup_epochs": warmup}


def _choose_evaluators(summary) -> dict:
    """Choose evaluators: nearest neighbours, or without labels label-free ones."""
    evaluators: dict[str, dict] = {"collapse": {}, "uniformity": {}, "neighbours": {}}
    if not summary.num_test:
        return evaluators
    if not summary.labelled:
        train_on, bank = "evaluation", summary.num_test
    elif summary.labelled < summary.rows:
        train_on, bank = "labelled", summary.labelled
    else:
        train_on, bank = "all", summary.rows
    neighbours = {"k": max(min(20, bank // 4), 1), "train_on": train_on}
    return evaluators | {"knn": neighbours, "tsne": {}}


# Options for reading images, which new image files take over from a run's data.
_READING = ("size", "channels", "decoder", "on_corrupt", "background", "bits")


def make_section(
    path: str | os.PathLike | dict,
    *,
    options: Mapping[str, Any] | None = None,
    parent_config: Mapping[str, Any] | None = None,
    field: str = "path",
    all_rows: bool = False,
) -> dict:
    """Make the section config.data that reads the images at a path.

    Without a `name` in `options` the source is guessed, see `by_name.section_of`. With
    a parent config, images in files are read by its options; if it has none, small
    images are decoded once, into memory.

    Args:
      path: path of the images; or a section that reads them, to which `options` are
        added.
      options: options of the source; they override those of the parent config.
      parent_config: config of the run whose encoder takes the images.
      field: name of the path, for messages.
      all_rows: whether all rows are train rows, without a test part.

    Raises:
      Refused: there is nothing at the path, or no source reads it.
    """
    options = dict(options or {})
    if isinstance(path, dict):
        return path | options
    if not storage.exists(path):
        raise Refused(field, os.fspath(path), "no such file or folder")
    path, name = os.fspath(path), options.pop("name", None)
    source = {"name": name, "path": path} if name else by_name.section_of(path)
    if all_rows:
        source |= by_name.without_test_split(source)
        if source["name"] == "image_folder" and folders.is_mixed(path):
            source["folders"] = "none"
    if parent_config and source["name"] in ("image_folder", "huggingface"):
        source["channels"] = len(parent_config["augment"]["mean"])
        run_data = parent_config.get("data", {})
        read = by_name.SOURCES.get(run_data.get("name"))
        if read is not None and {*_READING} <= {*schema.option_of(read)}:
            source |= {name: run_data[name] for name in _READING if name in run_data}
            if run_data.get("resident") and "size" in source:  # else sizes may differ
                source["resident"] = True
        elif not {"size", "resident"} & set(options):
            section = source | options
            options |= read_once(section, summarize(section))
    return source | options
