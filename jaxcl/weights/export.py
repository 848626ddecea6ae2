"""Write the encoder of a run to a folder: `jaxcl export --run=RUN --out=DIR`.

DIR then holds the encoder's parameters and statistics (encoder.safetensors) and its
description and origin (card.json); with --torch also a state dict for PyTorch, with
--stablehlo a program; and the adapter to an old index that an update left
(adapter.safetensors).
`jaxcl.load_encoder(DIR)` reads it back.

The run may still be training: its newest complete checkpoint is exported, and the run
is not changed. If the run has updates, the last accepted one is exported.
"""

import argparse
import hashlib
import inspect
import re
import sys
import typing

from etils import epath

from jaxcl import lookup, numerics, schema, sharding
from jaxcl.config import sections
from jaxcl.data.augment import images as augment_images
from jaxcl.errors import Refused
from jaxcl.index import maps
from jaxcl.nets import tuning
from jaxcl.run import folder as folder_lib
from jaxcl.run import results as results_lib
from jaxcl.run import transfer
from jaxcl.update import lineage
from jaxcl.weights import encoder, pytorch, writer
from jaxcl.weights import stablehlo as program

# Methods whose steps train no encoder: each evaluation fits one and drops it.
_DROP = ("gdumb",)


@numerics.pinned()
def export(
    run: str,
    out: str,
    *,
    torch: bool = False,
    stablehlo: program.Pixels | None = None,
    force: bool = False,
) -> dict:
    """Write the encoder of a run to a folder.

    Args:
      run: a run directory; if the run has accepted updates, the last of them is used.
      out: the folder; it must be missing, empty, or an export of the same checkpoint.
      torch: whether to write the state dict for PyTorch, too.
      stablehlo: type of the images of a program that is also written; None: no program.
      force: whether to replace an export of another checkpoint or with a damaged card.

    Returns:
      The contents of card.json.

    Raises:
      Refused: there is no such encoder; the folder holds something else.
      OSError: a file cannot be read or written.
      lock.LockHeldError: another export writes to the folder.
    """
    run = lineage.find_current(run)
    config = _read_config(run)
    section = _describe_architecture(config)
    if torch:
        pytorch.check_supported(section)
    where = transfer.find_checkpoints(run, field="--run")
    width = transfer.input_width(where) or len(config["augment"]["mean"])
    inputs = _describe_inputs(config, width)
    module, blank = encoder.make_module(section), encoder.blank_inputs(inputs)
    module = sections.wrap_tuned(module, config.get("tuning"))
    state, source = transfer.restore(
        run, module, blank, sharding.mesh(1), field="--run"
    )
    params, stats = state.params["encoder"], state.stats["encoder"]
    if isinstance(module, tuning.TunedEncoder):
        params = module.merge_adapters(params)  # they become part of what they adapt
    params, stats = sharding.copy_to_host((params, stats))
    card = {"encoder": section, "input": inputs}
    exported = encoder.make_encoder(card, params, stats)
    leaves = encoder.flatten_leaves(exported.params, exported.stats)
    files = {folder_lib.TENSORS: writer.pack_tensors(leaves, "flax")}
    if torch:
        state = pytorch.torch_state(exported)
        files[writer.PYTORCH[section["name"]]] = writer.pack_tensors(state, "pt")
    adapter = epath.Path(run) / maps.FILE
    if adapter.exists():
        files[maps.FILE] = adapter.read_bytes()
    if stablehlo is not None:
        files[program.FILE] = program.pack_program(exported, stablehlo)
    cursor = transfer.cursor(where, source["number"])
    card = card | writer.describe(exported, files)
    if stablehlo is not None:
        card["stablehlo"] = program.describe(exported, stablehlo)
    card |= _describe_origin(config, source, cursor) | {"config": config}
    if inputs["kind"] == "images":
        card["check"] = exported.picture_features()
    card = results_lib.to_json(card)
    card |= {key: _hide_paths(card[key]) for key in ("data", "checkpoint", "config")}
    return writer.write_folder(epath.Path(out), files, card, force)


# Options of configs that name a place on the machine, whatever it looks like.
_PATHS = ("path", "run", "cache", "lists", "index")
_PATHS += ("start", "checkpoint", "plasticity_from")
_LOOKS_LOCAL = re.compile(r"/|~|\.{1,2}[/\\]|[A-Za-z]:[/\\]|\w+://")


def hash_path(path: str) -> str:
    """Hash a path for a card, which can then be compared but not read."""
    return f"sha256:{hashlib.sha256(path.encode()).hexdigest()[:16]}"


def _hide_paths(value, key=""):
    """Replace paths by their hashes, since exports are shared; see `hash_path`."""
    if isinstance(value, dict):
        return {k: _hide_paths(v, k) for k, v in value.items()}
    if isinstance(value, list):
        return [_hide_paths(child, key) for child in value]
    local = isinstance(value, str) and (key in _PATHS or _LOOKS_LOCAL.match(value))
    return hash_path(value) if local else value


def _read_config(run):
    """Read the config of a run; refuse a run that has no encoder of its own."""
    if folder_lib.is_one(run):
        raise Refused(
            f"--run={run!r}: is already the folder of an encoder, without an accepted "
            "update"
        )
    config = transfer.config_of(run, field="--run")
    if config.get("seeds", 1) > 1:
        raise Refused(
            f"--run={run!r}: holds {config['seeds']} seeds; name one of them, as "
            f"{run}/seed_{config.get('seed', 0)}"
        )
    if config.get("checkpoint") is not None:
        raise Refused(
            f"--run={run!r}: only evaluated the encoder of {config['checkpoint']}; "
            "export that run"
        )
    method = config["method"]["name"]
    if method in _DROP:
        raise Refused(
            f"--run={run!r}: config.method.name={method!r} trains a network at each "
            "evaluation and drops it, so that the run has none to export"
        )
    return config


def _describe_architecture(config) -> dict:
    """Return config.encoder with all its defaults, and the precision."""
    make, options = lookup.find_function(
        sections.ENCODERS, config["encoder"], "config.encoder"
    )
    full = schema.defaults(make) | options
    full.pop("dtype")
    name, precision = config["encoder"]["name"], config.get("precision", "float32")
    return {"name": name, **full, "precision": precision}


def _describe_inputs(config, width) -> dict:
    """Describe the encoder's inputs, and how evaluation prepares them."""
    augment = config["augment"]
    if augment.get("name") == "graphs":
        return {"kind": "graphs", "features": width}
    view = inspect.signature(augment_images.make_eval).parameters
    return {
        "kind": "images",
        "dtype": "uint8",
        "channels": width,
        "size": augment["size"],
        "resize": augment.get("resize"),
        "interpolation": view["interpolation"].default,
        "mean": list(augment["mean"]),
        "std": list(augment["std"]),
        "decoder": config.get("decoder"),
        "background": config["data"].get("background", 255),
        "bits": config["data"].get("bits"),
    }


def _describe_origin(config, source, cursor) -> dict:
    """Describe the run, the checkpoint and the config of the encoder.

    Args:
      source: path, number, step and checksum of the checkpoint.
      cursor: progress of the run at the checkpoint, see `transfer.cursor`.
    """
    method, data = config["method"], dict(config["data"])
    defaults = schema.defaults(lookup.find_method(method["name"]).make)
    checkpoint = {key: source[key] for key in ("number", "step", "checksum")}
    return {
        "method": {"name": method["name"], **defaults, **method},
        "training": _describe_training(config, cursor),
        "data": {
            "source": data.pop("name"),
            "options": data,
            "scenario": config["scenario"],
        },
        "checkpoint": {"run": source["path"], **checkpoint},
        "results": _read_results(config, cursor),
    }


def _describe_training(config, cursor) -> dict:
    """Describe the progress of the run."""
    results, phase = cursor["results"], cursor["phase"]
    names, done = results["task_names"], results_lib.count_finished(results)
    begun = done + (phase != "evaluated")
    return {
        "run": config.get("name", "run"),
        "seed": config.get("seed", 0),
        "tasks": names[:begun],
        "num_tasks": len(names),
        "whole_tasks": begun - (phase == "training"),
    }


def _read_results(config, cursor) -> dict | None:
    """Return the evaluators' results for exactly this network, or None."""
    results = cursor["results"]
    last = results_lib.count_finished(results) - 1
    if cursor["phase"] != "evaluated" or last < 0:
        return None
    matrices = {}
    for name, measures in results_lib.summary(results).items():
        row = results["matrices"][name][last]
        matrices[name] = {"accuracy": row, "average": measures["average_accuracy"]}
    # If ICL has a head, the evaluators read the head's outputs.
    head = config["method"]["name"] == "icl" and config["method"].get("output_dim")
    return {
        "of": "encoder and head" if head else "encoder",
        "matrices": matrices,
        "scalars": results["scalars"][last],
    }


def summarise_export(card: dict) -> str:
    """Summarise a card in two lines."""
    section, training, method = (card[k] for k in ("encoder", "training", "method"))
    names = [lookup.name_of(method.get(k)) for k in ("name", "base", "strategy")]
    names = [str(name) for name in names if name]
    network = f"{section['name']}, {card['parameters']:,} parameters, "
    network += f"{card['num_features']} features, of {' '.join(names)}"
    step, number = (card["checkpoint"][k] for k in ("step", "number"))
    tasks = f"{training['whole_tasks']} of {training['num_tasks']} tasks"
    return f"{network}\nstep {step}, {tasks}, checkpoint {number}"


def parser() -> argparse.ArgumentParser:
    """Make the parser of the command's options."""
    options = argparse.ArgumentParser(
        prog="jaxcl export", description=__doc__.splitlines()[0]
    )
    add = options.add_argument
    add("--run", required=True, help="a run directory")
    add("--out", required=True, help="folder, new or of the same export")
    add("--torch", action="store_true", help="also for PyTorch")
    add(
        "--stablehlo",
        nargs="?",
        const="uint8",
        choices=typing.get_args(program.Pixels),
        help="also a program that takes pixels (uint8) or normalised images (float32)",
    )
    add("--force", action="store_true", help="replace an export of another checkpoint")
    return options


def main(argv: list[str] | None = None) -> int:
    """Run `jaxcl export`; return 2 if the run or the folder is wrong."""
    return writer.run_command(parser().parse_args(argv), export, summarise_export)


if __name__ == "__main__":
    sys.exit(main())
