"""Write the encoder of a run to a folder: `jaxcl export --run=RUN --out=DIR`.

DIR then holds the encoder's parameters and statistics (encoder.safetensors) and its
description and origin (card.json); with --torch also a state dict for PyTorch, with
--stablehlo or --onnx a program; and the adapter to an old index that an update left
(adapter.safetensors).
`jaxcl.load_encoder(DIR)` reads it back.

The run may still be training: its newest complete checkpoint is exported, and the run
is not changed. If the run has updates, the last accepted one is exported.
"""

import argparse
import hashlib
import inspect
import re
import typing

from etils import epath

from jaxcl import lookup, numerics, schema, sharding
from jaxcl.config import sections
from jaxcl.data.augment import images as augment_images
from jaxcl.errors import Refused
from jaxcl.index import maps
from jaxcl.nets import tuning
from jaxcl.run import encoder_folder, result_file, transfer, updates
from jaxcl.weights import encoder, onnx_program, pytorch, writer
from jaxcl.weights import stablehlo as program


@numerics.pinned()
def export(
    run: str,
    out: str,
    *,
    torch: bool = False,
    stablehlo: program.Pixels | None = None,
    onnx: program.Pixels | None = None,
    force: bool = False,
) -> dict:
    """Write the encoder of a run to a folder.

    Args:
      run: a run directory; if the run has accepted updates, the last of them is used.
        With a program it may be the folder of an encoder.
      out: the folder; it must be missing, empty, or an export of the same checkpoint.
      torch: whether to write the state dict for PyTorch, too.
      stablehlo: type of the images of a program that is also written; None: no program.
      onnx: type of the images of an ONNX program, likewise.
      force: whether to replace an export of another checkpoint or with a damaged card.

    Returns:
      The contents of card.json.

    Raises:
      Refused: there is no such encoder; the folder holds something else.
      OSError: a file cannot be read or written.
      lock.LockHeldError: another export writes to the folder.
    """
    run = updates.find_current(run)
    if encoder_folder.exists_at(run) and (stablehlo or onnx) and not torch:
        return _add_programs(run, out, stablehlo, onnx, force)
    config = _read_config(run)
    section = _describe_architecture(config)
    if torch:
        pytorch.check_supported(section)
    place = transfer.find_checkpoints(run, field="--run")
    width = transfer.input_width(place) or len(config["augment"]["mean"])
    inputs = _describe_inputs(config, width)
    module, blank = encoder.make_module(section), encoder.blank_inputs(inputs)
    module = sections.wrap_tuned(module, config.get("tuning"))
    state, source = transfer.restore(
        run, module, blank, sharding.mesh(1), field="--run"
    )
    cursor = transfer.cursor(place, source["number"])
    if cursor["results"].get("embeds") == "fit":
        raise Refused(
            f"--run={run!r}: config.method.name={config['method']['name']!r} fits a "
            "network at each evaluation and drops it; the run has none to export"
        )
    params, stats = state.params["encoder"], state.stats["encoder"]
    if isinstance(module, tuning.TunedEncoder):
        params = module.merge_adapters(params)  # they become part of what they adapt
    params, stats = sharding.copy_to_host((params, stats))
    card = {"encoder": section, "input": inputs}
    exported = encoder.make_encoder(card, params, stats)
    leaves = encoder.flatten_leaves(exported.params, exported.stats)
    files = {encoder_folder.TENSORS: writer.pack_tensors(leaves, "flax")}
    if torch:
        state = pytorch.torch_state(exported)
        files[writer.PYTORCH[section["name"]]] = writer.pack_tensors(state, "pt")
    adapter = epath.Path(run) / maps.FILE
    if adapter.exists():
        files[maps.FILE] = adapter.read_bytes()
    programs, described = _pack_programs(exported, stablehlo, onnx)
    files |= programs
    card = card | writer.describe(exported, files) | described
    if config.get("teacher"):
        card["teacher"] = config["teacher_card"]
        config = config | {"teacher": hash_path(config["teacher"])}
    card |= _describe_origin(config, source, cursor) | {"config": config}
    if inputs["kind"] == "images":
        card["check"] = exported.picture_features()
    card = result_file.jsonable(card)
    card |= {key: _hide_paths(card[key]) for key in ("data", "checkpoint", "config")}
    return writer.write_folder(epath.Path(out), files, card, force)


def _pack_programs(network, stablehlo, onnx) -> tuple[dict[str, bytes], dict]:
    """Write the programs of an encoder; return files, and entries of the card."""
    files, described = {}, {}
    if stablehlo is not None:
        files[program.FILE] = program.pack_program(network, stablehlo)
        described["stablehlo"] = program.describe(network, stablehlo)
    if onnx is not None:
        files[onnx_program.FILE] = data = onnx_program.pack_onnx(network, onnx)
        described["onnx"] = onnx_program.describe(network, data, onnx)
    return files, described


def _add_programs(source, out, stablehlo, onnx, force) -> dict:
    """Write the folder of an encoder again, with programs."""
    network = encoder.load_encoder(source)
    files, described = _pack_programs(network, stablehlo, onnx)
    files[encoder_folder.TENSORS] = (
        epath.Path(source) / encoder_folder.TENSORS
    ).read_bytes()
    card = {key: x for key, x in network.card.items() if key != "checksum"}
    card |= described | {"files": writer.hash_files(files)}
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
    if encoder_folder.exists_at(run):
        raise Refused("--run", run, "is an encoder's folder already, without an update")
    config = transfer.config_of(run, field="--run")
    if config.get("seeds", 1) > 1:
        raise Refused(
            f"--run={run!r}: holds {config['seeds']} seeds; name one of them, as "
            f"{run}/seed_{config.get('seed', 0)}"
        )
    if config.get("checkpoint") is not None:
        raise Refused(
            "--run", run, f"evaluates {config['checkpoint']}; export that run"
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
    names, done = results["task_names"], result_file.count_finished(results)
    num_begun = done + (phase != "evaluated")
    return {
        "run": config.get("name", "run"),
        "seed": config.get("seed", 0),
        "tasks": names[:num_begun],
        "num_tasks": len(names),
        "whole_tasks": num_begun - (phase == "training"),
    }


def _read_results(config, cursor) -> dict | None:
    """Return the evaluators' results for exactly this network, or None."""
    results = cursor["results"]
    last = result_file.count_finished(results) - 1
    if cursor["phase"] != "evaluated" or last < 0:
        return None
    matrices = {}
    for name, measures in result_file.summary(results).items():
        row = results["matrices"][name][last]
        matrices[name] = {"accuracy": row, "average": measures["average_accuracy"]}
    return {
        "of": results.get("embeds", "encoder"),
        "matrices": matrices,
        "scalars": results["scalars"][last],
    }


def summarise_export(card: dict) -> str:
    """Summarise a card in a few lines."""
    lines = [f"{card['encoder']['name']}, {card['parameters']:,} parameters"]
    if "training" in card:
        lines = [_summarise_run(card)]
    gap = card.get("onnx", {}).get("difference")
    if "onnx" in card:
        checked = (
            "not compared: pip install onnxruntime" if gap is None else f"{gap:.1e}"
        )
        lines.append(f"ONNX: relative difference to JAX {checked}")
    return "\n".join(lines)


def _summarise_run(card) -> str:
    """Summarise network, method, step and tasks in two lines."""
    section, training, method = (card[k] for k in ("encoder", "training", "method"))
    names = [lookup.name_of(method.get(k)) for k in ("name", "base", "strategy")]
    names = [str(name) for name in names if name]
    network = f"{section['name']}, {card['parameters']:,} parameters, "
    network += f"{card['num_features']} features, of {' '.join(names)}"
    step, number = (card["checkpoint"][k] for k in ("step", "number"))
    tasks = f"{training['whole_tasks']} of {training['num_tasks']} tasks"
    return f"{network}\nstep {step}, {tasks}, checkpoint {number}"


def add_options(parser) -> None:
    """Add the options of `jaxcl export`."""
    add = parser.add_argument
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
    add(
        "--onnx",
        nargs="?",
        const="uint8",
        choices=typing.get_args(program.Pixels),
        help="also an ONNX program, likewise",
    )
    add("--force", action="store_true", help="replace an export of another checkpoint")


def main(options: argparse.Namespace) -> int:
    """Run `jaxcl export`."""
    card = export(**vars(options))
    print(f"{summarise_export(card)}\njaxcl.load_encoder({options.out!r})")
    return 0
