"""Export the encoder of a run: `python -m jaxcl.export --run=RUN --out=DIR`.

DIR then holds the encoder's parameters and statistics (encoder.safetensors), and what
it is and where it comes from (card.json); with --torch also a state dict for PyTorch,
under the names of torchvision's ResNet. `jaxcl.load_encoder(DIR)` reads it back. The
run may be going on: its newest whole checkpoint is taken, and nothing in it changes. Of
a run with updates the last accepted one is exported.
"""

import argparse
import datetime
import hashlib
import inspect
import json
import os
import platform
import shutil
import sys
import uuid

import flax
import jax
from etils import epath
from safetensors import numpy as tensors

from jaxcl import schema, sharding
from jaxcl.augment import images as augment_images
from jaxcl.config import sections
from jaxcl.data import storage, stream
from jaxcl.export import encoder, torch_resnet
from jaxcl.run import results as results_lib
from jaxcl.run import task_alone, transfer
from jaxcl.update import lineage

# Methods whose steps train no encoder: each evaluation fits one, and drops it.
_DROP = ("gdumb",)


def export(run: str, out: str, *, torch: bool = False, force: bool = False) -> dict:
    """Write the encoder of a run to a folder.

    Args:
      run: a run directory; the last of its updates that was accepted takes its place.
      out: the folder; it must be empty, missing, or an export of the same checkpoint.
      torch: also write the state dict for PyTorch.
      force: replace an export of another checkpoint, or one whose card is damaged.

    Returns:
      What card.json says.

    Raises:
      ValueError: there is no such encoder; the folder holds something else.
      OSError: a file cannot be read or written.
    """
    run = lineage.current(run)
    config = _config_of(run)
    section = _architecture(config)
    if torch:
        torch_resnet.check(section)
    where = transfer.place(run, field="--run")
    width = transfer.input_width(where) or len(config["augment"]["mean"])
    given = _inputs(config, width)
    module, blank = encoder.module_of(section), encoder.blank(given)
    state, source = transfer.restore(
        run, module, blank, sharding.mesh(1), field="--run"
    )
    trees = (tree["encoder"] for tree in (state.params, state.stats))
    shown = {"encoder": section, "input": given}
    made = encoder.make(shown, *map(sharding.fetch, trees))
    leaves = encoder.flat(made.params, made.stats)
    files = {encoder.TENSORS: _bytes(leaves, "flax")}
    if torch:
        files[torch_resnet.TENSORS] = _bytes(torch_resnet.torch_state(made), "pt")
    noted = transfer.cursor(where, source["number"])
    card = {
        "format": encoder.FORMAT,
        "encoder": section,
        "num_features": made.num_features,
        "parameters": sum(leaf.size for leaf in jax.tree.leaves(made.params)),
        "input": given,
        **_lineage(config, source, noted),
        "files": {name: hashlib.sha256(x).hexdigest() for name, x in files.items()},
        "torch": torch_resnet.key_map(leaves) if torch else None,
        "versions": _versions(),
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "config": config,
    }
    card = results_lib.plain(card)
    _write(epath.Path(out), files, card, force)
    return card


def _config_of(run):
    """The config of a run that can have an encoder."""
    config = transfer.config_of(run, field="--run")
    if config.get("seeds", 1) > 1:
        raise ValueError(
            f"--run={run!r}: holds {config['seeds']} seeds; name one of them, as "
            f"{run}/seed_{config['seed']}"
        )
    if config.get("checkpoint") is not None:
        raise ValueError(
            f"--run={run!r}: it has judged the encoder of {config['checkpoint']} and "
            "trained none; export that run"
        )
    method = config["method"]["name"]
    if method in _DROP:
        raise ValueError(
            f"--run={run!r}: config.method.name={method!r} trains a network at each "
            "evaluation and drops it, so that the run has none to export"
        )
    return config


def _full(function, options) -> dict:
    """The options, and the default of each that is not there."""
    return {**schema.defaults(function), **options}


def _architecture(config) -> dict:
    """config.encoder with all that it leaves to defaults, and the precision."""
    make, options = schema.named(sections.ENCODERS, config["encoder"], "config.encoder")
    full = _full(make, options)
    full.pop("dtype")
    name, precision = config["encoder"]["name"], config.get("precision", "float32")
    return {"name": name, **full, "precision": precision}


def _inputs(config, width) -> dict:
    """What the encoder takes, and how evaluation prepares it."""
    given = config["augment"]
    if given.get("name") == "graphs":
        return {"kind": "graphs", "features": width}
    view = inspect.signature(augment_images.make_eval).parameters
    return {
        "kind": "images",
        "dtype": "uint8",
        "channels": width,
        "size": given["size"],
        "resize": given.get("resize"),
        "interpolation": view["interpolation"].default,
        "mean": list(given["mean"]),
        "std": list(given["std"]),
        "decoder": config.get("decoder"),
    }


def _lineage(config, source, noted) -> dict:
    """Where the encoder comes from."""
    options = dict(config["method"])
    name = options.pop("name")
    checkpoint = {key: source[key] for key in ("number", "step", "checksum")}
    return {
        "method": {"name": name, **_full(schema.method(name).make, options)},
        "training": _training(config, noted),
        "data": _data(config, noted["results"]["task_names"]),
        "checkpoint": {"run": source["path"], **checkpoint},
        "results": _results(config, noted),
    }


def _training(config, noted) -> dict:
    """How far the run had come."""
    results, phase = noted["results"], noted["phase"]
    names, done = results["task_names"], results_lib.finished(results)
    begun = done + (phase != "evaluated")
    return {
        "run": config.get("name", "run"),
        "seed": config.get("seed", 0),
        "tasks": names[:begun],
        "num_tasks": len(names),
        "whole_tasks": begun - (phase == "training"),
    }


def _data(config, task_names) -> dict:
    """What the run read; name and rows if the same data can be read here and now."""
    options = dict(config["data"])
    found = {"source": options.pop("name"), "options": options}
    found |= {"scenario": config["scenario"], "name": None, "train_rows": None}
    try:
        seed = config.get("seed", 0)
        read = sections.tasks(config["data"], config["scenario"], seed)()
    except Exception:  # lineage that cannot be told stops no export
        return found
    names, want = [task.name for task in read.tasks], list(task_names)
    if config["scenario"]["name"] == "after":  # the tasks before had other data
        names, want = names[-1:], want[-1:]
    if names != want:
        return found  # other data are there now
    dataset = read.dataset
    return found | {"name": dataset.name, "train_rows": stream.size(dataset.train)}


def _results(config, noted) -> dict | None:
    """What the run's evaluators said of this very network, None where they did not."""
    results = noted["results"]
    last = results_lib.finished(results) - 1
    if noted["phase"] != "evaluated" or last < 0:
        return None
    found = {}
    for name, measures in results_lib.summary(results).items():
        row = results["matrices"][name][last]
        found[name] = {"accuracy": row, "average": measures["average_accuracy"]}
    # ICL's rows are those of its head, where it has one, also to the evaluators.
    head = config["method"]["name"] == "icl" and config["method"].get("output_dim")
    return {
        "of": "encoder and head" if head else "encoder",
        "matrices": found,
        "scalars": results["scalars"][last],
    }


def _versions() -> dict:
    return {
        "jaxcl": task_alone.version(),
        "jax": jax.__version__,
        "flax": flax.__version__,
        "python": platform.python_version(),
    }


def _bytes(leaves, library) -> bytes:
    return tensors.save(leaves, metadata={"format": library})


def _write(folder, files, card, force) -> None:
    """All files or none, the card last.

    Raises:
      ValueError: the folder holds something else.
    """
    _check_folder(folder, card, force)
    files = files | {
        encoder.CARD: (json.dumps(card, indent=1) + "\n").encode(),
    }
    if storage.in_bucket(folder):  # it replaces an object whole
        for name, data in files.items():
            (folder / name).write_bytes(data)
    else:
        draft = folder.with_name(f"{folder.name}.{uuid.uuid4().hex}.tmp")
        draft.mkdir(parents=True)
        try:
            for name, data in files.items():
                (draft / name).write_bytes(data)
            folder.mkdir(exist_ok=True)
            for name in files:
                os.replace(draft / name, folder / name)
        finally:
            shutil.rmtree(draft, ignore_errors=True)
    for name in {torch_resnet.TENSORS} - set(files):
        (folder / name).unlink(missing_ok=True)


def _check_folder(folder, card, force) -> None:
    """Refuse a folder that holds anything but an export of the same checkpoint."""
    if not folder.exists():
        return
    if not folder.is_dir():
        raise ValueError(f"--out={folder}: is a file; must be a folder")
    there = {path.name for path in folder.iterdir()}
    ours = {encoder.CARD, encoder.TENSORS, torch_resnet.TENSORS}
    if there - ours:
        raise ValueError(
            f"--out={folder}: holds {', '.join(sorted(there - ours)[:3])}, which is no "
            "part of an export; give a new folder"
        )
    if not there or force:
        return
    try:
        before = encoder.read_card(folder)
    except ValueError as error:
        raise ValueError(f"--out: {error}; --force replaces it") from error
    name = encoder.TENSORS
    if before["files"].get(name) != card["files"][name]:
        raise ValueError(
            f"--out={folder}: holds another export, of step "
            f"{before.get('checkpoint', {}).get('step')}; --force replaces it"
        )


def text(card: dict) -> str:
    """What was exported, in two lines."""
    section, training, method = (card[k] for k in ("encoder", "training", "method"))
    told = [str(method[k]) for k in ("name", "base", "strategy") if method.get(k)]
    shown = f"{section['name']}, {card['parameters']:,} parameters, "
    shown += f"{card['num_features']} features, of {' '.join(told)}"
    step, number = (card["checkpoint"][k] for k in ("step", "number"))
    tasks = f"{training['whole_tasks']} of {training['num_tasks']} tasks"
    where = f"checkpoint {number} of {card['checkpoint']['run']}"
    return f"{shown}\nstep {step}, {tasks}, {where}"


def parser() -> argparse.ArgumentParser:
    """The options of the command."""
    made = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    made.add_argument("--run", required=True, help="a run directory")
    made.add_argument("--out", required=True, help="folder, new or of the same export")
    made.add_argument("--torch", action="store_true", help="also for PyTorch")
    made.add_argument(
        "--force", action="store_true", help="replace an export of another checkpoint"
    )
    return made


def main(argv=None) -> int:
    """The command; exit code 2 where the run or the folder is wrong."""
    options = parser().parse_args(argv)
    try:
        card = export(**vars(options))
    except (ValueError, OSError) as error:
        print(f"jaxcl: {error}", file=sys.stderr)
        return 2
    print(text(card))
    print(f"jaxcl.load_encoder({options.out!r})")
    return 0
