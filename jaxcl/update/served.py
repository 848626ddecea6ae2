"""Compare the index that an encoder serves before and after an update."""

import hashlib
import json
import os
from typing import NamedTuple

import numpy as np
from etils import epath

from jaxcl.config import build, transfer_config
from jaxcl.index import drift, kit, maps
from jaxcl.run import result_file
from jaxcl.update import plan


class OldImages(NamedTuple):
    """The old images of an update, embedded into the index before it."""

    rows: np.ndarray  # f32[N, D]
    encoder: str  # name of the encoder whose space the index has


class Comparison(NamedTuple):
    """An index before and after an update."""

    drift: dict  # of `drift.measure_drift`, with "adapters": kind -> recall
    ways: dict  # of `ways.measure_ways`
    adapter: maps.Map  # of new queries to the old index
    kit: kit.Kit


def embed_old(work: plan.Plan) -> OldImages | None:
    """Embed the sample of old images as the index in use has them; None without one."""
    if work.sample is None:
        return None
    rows, embedder = work.sample
    features = maps.map_to_index(work.parent, embedder.embed(rows))
    adapter = epath.Path(work.parent) / maps.FILE
    card = maps.read_map(adapter)[1] if adapter.exists() else {}
    return OldImages(features, card.get("target") or kit.name_encoder(embedder.source))


def compare(work: plan.Plan, before: OldImages, folder: epath.PathLike) -> Comparison:
    """Embed the old images again, and measure each way to serve their index.

    Args:
      work: the update.
      before: the images as the index has them.
      folder: run directory of the new encoder.
    """
    rows, k = work.sample[0], work.options.neighbours
    embedder = build.make_embedder(transfer_config.add_checkpoint(work.old, folder))
    after = np.asarray(embedder.embed(rows))
    label = embedder.examples.label[rows]
    is_labelled = len(np.unique(label[label >= 0])) > 1 and (label >= 0).all()
    served, measured = kit.fit_kit(
        before.rows,
        after,
        list_ids(embedder.examples, rows, work.old["data"]),
        source=before.encoder,
        target=kit.name_encoder(embedder.source),
        images=_digest([work.old["data"], embedder.size]),
        label=label if is_labelled else None,
        k=k,
    )
    measures = drift.measure_drift(before.rows, after, k=k)
    measures["adapters"] = {fitted.kind: fitted.recall for fitted in measured.back}
    back = measured.back[0]
    adapter = maps.fit(after, before.rows, back.kind, back.options)
    measures = result_file.jsonable(measures) | {"rows": len(after)}
    return Comparison(measures, measured.ways, adapter, served)


def _digest(value) -> str:
    return hashlib.sha256(json.dumps(value, default=str).encode()).hexdigest()[:12]


def list_ids(examples, rows: np.ndarray, section: dict) -> list[str]:
    """List ids of images: paths within the data set, or the numbers of their rows."""
    if examples.reader is None:
        return [str(row) for row in rows]
    root = os.path.abspath(str(section.get("path", "")))
    names = [examples.reader.name(int(row)) for row in rows]
    return [
        os.path.relpath(name, root) if os.path.abspath(name).startswith(root) else name
        for name in names
    ]


def write_kit(workdir: epath.PathLike, comparison: Comparison, k: int) -> None:
    """Leave the files that bring an index to the new encoder."""
    kit.write_kit(workdir, comparison.kit, k)
