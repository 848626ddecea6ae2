"""The folder of an encoder, as `jaxcl export` and `jaxcl import` write one.

`card.json` describes the network, `encoder.safetensors` has its parameters and
statistics. This module reads and checks both; `weights.encoder` makes the network.
"""

import hashlib
import json
import os
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from etils import epath
from safetensors import SafetensorError
from safetensors import numpy as tensors

from jaxcl import core, numerics, storage
from jaxcl.errors import Refused

FORMAT = 1  # of the folder
TENSORS = "encoder.safetensors"
CARD = "card.json"
_NEEDED = ("encoder", "num_features", "input", "files", "checksum")


def exists_at(path: Any) -> bool:
    """Tell whether an encoder's folder lies at a path: a run directory has no card."""
    return path is not None and (epath.Path(str(path)) / CARD).exists()


def checksum(card: dict) -> str:
    """Return the sha256 of a card without its "checksum"."""
    rest = {key: value for key, value in card.items() if key != "checksum"}
    return hashlib.sha256(json.dumps(rest, sort_keys=True).encode()).hexdigest()


def read_card(folder: str | os.PathLike) -> dict:
    """Read card.json of a folder.

    Raises:
      Refused: it is missing, damaged, or of an unknown format.
      OSError: it could not be read now, but may be undamaged.
    """
    path = epath.Path(folder) / CARD
    try:
        card = storage.read_object(path)
        missing = sorted({"format", *_NEEDED} - set(card))
    except (FileNotFoundError, NotADirectoryError) as error:
        raise Refused(
            f"{folder}: it has no {CARD} that can be read; name a folder that "
            "jaxcl export or jaxcl import wrote"
        ) from error
    if card.get("format", FORMAT) != FORMAT:
        raise Refused(
            f"{path}: format={card['format']!r}: this version of jaxcl reads {FORMAT}"
        )
    if missing:
        raise Refused(f"{path}: it lacks {missing}")
    actual = checksum(card)
    if card["checksum"] != actual:
        raise Refused(
            f"{path}: it was changed since it was written, or is damaged: its checksum "
            f"is {card['checksum']}, but its contents have {actual}"
        )
    return card


def read_leaves(folder: Any, card: dict, name: str = TENSORS) -> dict[str, np.ndarray]:
    """Read the arrays of a folder, by names as "params/conv1/kernel".

    Args:
      folder: folder of an encoder.
      card: `read_card` of the folder.
      name: name of the file.

    Raises:
      Refused: the file is missing, damaged, or not the card's.
    """
    path = epath.Path(folder) / name
    try:
        data = path.read_bytes()
    except (FileNotFoundError, IsADirectoryError) as error:
        raise Refused(f"{path}: it cannot be read: {error}") from error
    actual, expected = hashlib.sha256(data).hexdigest(), card["files"].get(name)
    if actual != expected:
        raise Refused(
            f"{path}: its sha256 is {actual}, {CARD} says {expected}: it is damaged "
            "or of another export; export again"
        )
    return read_tensors(data, path)


def read_tensors(data: bytes, path: os.PathLike) -> dict[str, np.ndarray]:
    """Read the arrays of a safetensors file.

    The library checks the header: its length, sizes and places of arrays against each
    other and the file's. Other damage fails here as another error.

    Raises:
      Refused: it is no such file, or has types that NumPy lacks.
    """
    try:
        return tensors.load(data)
    except (SafetensorError, KeyError, ValueError) as error:
        raise Refused(f"{path}: it is no safetensors file: {error}") from error


def fill_trees(
    module: Any, inputs: Any, leaves: dict[str, Any], origin: Any
) -> tuple[core.PyTree, core.PyTree]:
    """Fill the parameters and statistics of a network with leaves.

    Args:
      module: flax module.
      inputs: example inputs of the module; their values do not matter.
      leaves: name -> array, see `read_leaves`.
      origin: source of the leaves, for messages.

    Raises:
      Refused: the leaves do not fit the network; it names the first difference.
    """
    shapes = jax.eval_shape(module.init, numerics.make_key(0), inputs)
    shapes = {"params": shapes["params"], "stats": shapes.get("batch_stats", {})}
    by_path, tree = jax.tree_util.tree_flatten_with_path(shapes)
    wanted = {"/".join(entry.key for entry in path): leaf for path, leaf in by_path}
    for name, shape, expected in shape_mismatches(leaves, wanted):
        raise Refused(
            f"{origin}: {name} is {shape}, in the network of {CARD} it is {expected}"
        )
    filled = jax.tree.unflatten(tree, [jnp.asarray(leaves[name]) for name in wanted])
    return filled["params"], filled["stats"]


def section(card: dict) -> tuple[dict, str]:
    """Return config.encoder of a card, and its precision."""
    encoder = dict(card["encoder"])
    return encoder, encoder.pop("precision", "float32")


def as_config(folder: str) -> dict:
    """Describe the encoder of a folder and its images as a run's config.json does.

    Raises:
      Refused: as for `read_card`; or the encoder is one of graphs, or its images are
        not described.
    """
    card = read_card(folder)
    inputs = card["input"]
    if inputs["kind"] != "images":
        raise Refused(f"{folder}: it is an encoder of graphs; must be of images")
    path = epath.Path(folder) / CARD
    for name in ("size", "mean", "std"):
        if inputs.get(name) in (None, [], ()):
            raise Refused(
                f"{path}: input.{name}={inputs.get(name)!r}: the card must say which "
                "images the encoder takes; export or import it again"
            )
    encoder, precision = section(card)
    look = {name: inputs.get(name) for name in ("size", "resize", "mean", "std")}
    return {"encoder": encoder, "precision": precision, "augment": look}


def shape_mismatches(saved: dict, wanted: dict) -> list[tuple[str, str, str]]:
    """List the leaves that differ in type or shape, each with a description of both.

    Args:
      saved, wanted: name -> array, or another object with `dtype` and `shape`.
    """

    def describe(leaves, name):
        if name not in leaves:
            return "absent"
        return f"{leaves[name].dtype}{list(leaves[name].shape)}"

    names = sorted({*saved, *wanted})
    pairs = [(name, describe(saved, name), describe(wanted, name)) for name in names]
    return [pair for pair in pairs if pair[1] != pair[2]]
