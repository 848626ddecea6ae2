"""The files that an accepted update leaves for an index: pairs, a map, a canary.

index_pairs.safetensors has the embeddings of some old images before and after, with
their ids; index_map.safetensors a map of stored vectors to the new space, with a card.
Both encoders have names, see `name_encoder`.
"""

import hashlib
import json
from typing import Any, NamedTuple

import numpy as np
from etils import epath
from safetensors import numpy as tensors

from jaxcl import storage
from jaxcl.errors import Refused
from jaxcl.index import canary, maps, ways
from jaxcl.run import encoder_folder

PAIRS, MAP = "index_pairs.safetensors", "index_map.safetensors"


class Kit(NamedTuple):
    """Pairs of embeddings by two encoders, and the map between their spaces."""

    source: str  # name of the encoder before
    target: str  # name of the encoder after
    before: np.ndarray  # f32[N, E], embeddings of some images by the first
    after: np.ndarray  # f32[N, D], by the second
    ids: list[str]  # of these images
    images: str  # digest of the images; kits of equal images can be joined
    fitted: maps.FittedMap  # of `before` to `after`
    ways: dict[str, dict]  # of `ways.measure_ways`; {} if not measured


def name_encoder(source: dict) -> str:
    """Name an encoder by its weights; a run and its export have the same name.

    Args:
      source: description of the checkpoint, see `transfer.restore`.
    """
    if encoder_folder.exists_at(source["path"]):
        card = encoder_folder.read_card(source["path"])
        origin = {"step": 0, "checksum": card["files"][encoder_folder.TENSORS]}
        source = card.get("checkpoint") or origin
    marks = [source["step"], source["checksum"]]
    return hashlib.sha256(json.dumps(marks).encode()).hexdigest()[:12]


def fit_kit(
    before: np.ndarray,
    after: np.ndarray,
    ids: list[str],
    *,
    source: str,
    target: str,
    images: str,
    label: np.ndarray | None = None,
    k: int = 10,
) -> tuple[Kit, ways.Measured]:
    """Measure each way to serve an index on pairs, then fit a map to all of them.

    Args:
      before: f32[N, E], embeddings of images by the encoder named `source`.
      after: f32[N, D], embeddings of the same images by the encoder named `target`.
      ids: ids of the images.
      source, target: names of the encoders.
      images: digest of the images.
      label: i[N], classes; None: precision is not measured.
      k: number of neighbours that a search returns.
    """
    measured = ways.measure_ways(before, after, label=label, k=k)
    best = measured.forward
    fitted = best._replace(arrays=maps.fit(before, after, best.kind, best.options))
    pairs = np.asarray(before), np.asarray(after)
    return Kit(source, target, *pairs, ids, images, fitted, measured.ways), measured


def write_kit(workdir: Any, kit: Kit, k: int) -> None:
    """Write the files of a kit, and the canary of an index that is embedded again.

    Args:
      workdir: folder of the update.
      kit: content of the files.
      k: number of neighbours of the canary's queries.
    """
    workdir = epath.Path(workdir)
    shared = {"source": kit.source, "target": kit.target, "images": kit.images}
    pairs = {"before": kit.before, "after": kit.after}
    text = {"about": json.dumps(shared | {"ids": kit.ids})}
    pairs = {name: np.ascontiguousarray(x, np.float32) for name, x in pairs.items()}
    with storage.replacing(workdir / PAIRS) as file:
        file.write(tensors.save(pairs, metadata=text))
    card = shared | describe(kit.fitted) | {"pairs": len(kit.ids), "ways": kit.ways}
    with storage.replacing(workdir / MAP) as file:
        file.write(maps.pack_map(kit.fitted.arrays, card))
    singing = canary.make_canary(kit.target, kit.after, kit.after, kit.ids, k=k)
    canary.write_canary(workdir / canary.FILE, singing)


def describe(fitted: maps.FittedMap) -> dict:
    """Describe a map for its card."""
    arrays = fitted.arrays
    first = arrays["down"] if "down" in arrays else arrays["matrix"]
    last = arrays["up"] if "up" in arrays else arrays["matrix"]
    return {
        "format": 1,
        "formula": "y = x matrix + f(x down + offset) up + shift; x and y are scaled "
        "to length 1; f is gelu (tanh) if there is an offset; arrays may be absent",
        "kind": fitted.kind,
        "options": fitted.options,
        "recall": fitted.recall,
        "dimensions": [first.shape[0], last.shape[1]],
    }


def has_kit(workdir: Any) -> bool:
    """Return whether an update left a kit."""
    return all((epath.Path(workdir) / name).exists() for name in (PAIRS, MAP))


def read_kit(workdir: Any) -> Kit:
    """Read the kit of an update.

    Raises:
      Refused: a file is damaged.
      OSError: a file cannot be read.
    """
    path = epath.Path(workdir) / PAIRS
    data = path.read_bytes()
    pairs = encoder_folder.read_tensors(data, path)
    header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
    metadata = json.loads(header.get("__metadata__", {}).get("about", "{}"))
    arrays, card = maps.read_map(epath.Path(workdir) / MAP)
    if {"before", "after"} - set(pairs) or {"source", "ids"} - set(metadata):
        raise Refused(f"{path}: holds {sorted(pairs)}, which are no pairs of an update")
    fitted = maps.FittedMap(card["kind"], card["options"], card["recall"], arrays)
    return Kit(
        metadata["source"],
        metadata["target"],
        pairs["before"],
        pairs["after"],
        metadata["ids"],
        metadata["images"],
        fitted,
        card["ways"],
    )
