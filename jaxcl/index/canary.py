"""Canaries: queries and the ids that they should find, to check an index by."""

import json
from typing import Any, NamedTuple

import numpy as np
from etils import epath
from safetensors import numpy as tensors

from jaxcl import storage
from jaxcl.errors import Refused
from jaxcl.index import drift, vectors
from jaxcl.run import encoder_folder

FILE = "canary.safetensors"
QUERIES, MEMBERS = 200, 2048


class Canary(NamedTuple):
    """Queries embedded by one encoder, and the ids that they find in its index."""

    encoder: str  # name of the encoder
    queries: np.ndarray  # f32[Q, D], of length 1
    query_ids: list[str]  # id of each query's image, which it does not look for
    members: list[str]  # ids of the rows that are searched
    expected: list[list[str]]  # ids that each query should find
    cosines: np.ndarray  # f32[Q, k], of the expected rows


def make_canary(
    encoder: str,
    queries: np.ndarray,
    rows: np.ndarray,
    ids: list[str],
    *,
    query_ids: list[str] | None = None,
    k: int = 10,
) -> Canary:
    """Make a canary: search some rows of an index by up to 200 queries.

    Args:
      encoder: name of the encoder that embedded the queries.
      queries: f32[N, D], embeddings of images.
      rows: f32[M, D], vectors of the index.
      ids: ids of these rows.
      query_ids: ids of the queries' images; None: those of the rows.
      k: number of neighbours.
    """
    query_ids = ids if query_ids is None else query_ids
    chosen = np.unique(np.linspace(0, len(queries) - 1, QUERIES).astype(int))
    queries, query_ids = drift.unit(queries[chosen]), [query_ids[i] for i in chosen]
    neighbours, cosines = _search(
        queries, drift.unit(rows), query_ids, ids, min(k, len(ids) - 1)
    )
    expected = [[ids[i] for i in places] for places in neighbours]
    return Canary(encoder, queries, query_ids, ids, expected, cosines)


def _search(queries, rows, query_ids, ids, k):
    """Return places and cosines of the nearest rows, but for a query's own image."""
    cosines = queries @ rows.T
    places = {name: place for place, name in enumerate(ids)}
    for query, name in enumerate(query_ids):
        if name in places:
            cosines[query, places[name]] = -2
    neighbours = np.argsort(-cosines, axis=1, kind="stable")[:, :k]
    return neighbours, np.take_along_axis(cosines, neighbours, axis=1)


def write_canary(path: Any, canary: Canary) -> None:
    """Write a canary as a safetensors file."""
    arrays = {"queries": canary.queries, "cosines": canary.cosines}
    arrays = {name: np.ascontiguousarray(x, np.float32) for name, x in arrays.items()}
    names = ("encoder", "query_ids", "members", "expected")
    text = {"about": json.dumps({name: getattr(canary, name) for name in names})}
    with storage.replacing(path) as file:
        file.write(tensors.save(arrays, metadata=text))


def read_canary(path: Any) -> Canary:
    """Read a canary from its file.

    Raises:
      Refused: the file is none.
      OSError: it cannot be read.
    """
    data = epath.Path(path).read_bytes()
    arrays = encoder_folder.read_tensors(data, path)
    header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
    metadata = json.loads(header.get("__metadata__", {}).get("about", "{}"))
    if not {"queries", "cosines"} <= set(arrays) or "expected" not in metadata:
        raise Refused(f"--canary={path}: holds {sorted(arrays)}, which is no canary")
    return Canary(**arrays, **metadata)


class IndexCheck(NamedTuple):
    """What a canary says of an index: `wrong` is empty if all is well."""

    share: float  # of the expected ids that were found; nan: not measured
    wrong: list[str]  # sentences


def check_index(
    table: vectors.Table, canary: Canary, *, encoder: str | None = None, least=0.9
) -> IndexCheck:
    """Check whether an index and the served encoder belong to a canary.

    Args:
      table: the vectors of the index.
      canary: result of `read_canary`.
      encoder: name of the served encoder; None: it is not compared.
      least: share of the expected ids that must be found.
    """
    wrong = []
    if encoder not in (None, canary.encoder):
        wrong.append(
            f"the served encoder is {encoder}, the canary is of {canary.encoder}"
        )
    others = {version.encoder for version in table.versions} - {canary.encoder}
    if others:
        numbers = [n for n, x in enumerate(table.versions) if x.encoder in others]
        count = int(np.isin(table.codes, numbers).sum())
        if count:
            wrong.append(
                f"{count:,} vectors are of another encoder, {', '.join(sorted(others))}"
            )
    width = canary.queries.shape[1]
    if table.width != width:
        wrong.append(f"vectors have {table.width} dimensions, queries have {width}")
        return IndexCheck(float("nan"), wrong)
    places = table.ids.find(canary.members)
    stored = np.flatnonzero(places >= 0)
    missing = len(places) - len(stored)
    if missing > len(places) // 10:
        names = [canary.members[i] for i in np.flatnonzero(places < 0)[:3]]
        wrong.append(
            f"{missing:,} of the canary's {len(places):,} ids are not in the index, "
            f"such as {', '.join(names)}"
        )
    ids = [canary.members[i] for i in stored]
    if len(ids) < 2:
        return IndexCheck(float("nan"), wrong)
    rows = drift.unit(table.take(places[stored]))
    k = min(canary.cosines.shape[1], len(ids) - 1)
    neighbours, cosines = _search(canary.queries, rows, canary.query_ids, ids, k)
    shares = [
        len({ids[i] for i in row} & {*names}) / max(len({*names} & {*ids}), 1)
        for row, names in zip(neighbours, canary.expected, strict=True)
    ]
    share = float(np.mean(shares))
    if not share >= least:
        wrong.append(
            f"queries find {share:.0%} of the ids that they should find, must be "
            f"{least:.0%}; their cosines with the nearest are {cosines.mean():.2f}, "
            f"should be {canary.cosines.mean():.2f}"
        )
    return IndexCheck(share, wrong)
