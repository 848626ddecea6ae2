"""Rewrite a file of stored vectors: map them to a new space, or replace some of them.

The input is never changed. A command that was killed continues: rows that were written
stay in OUT.part.
"""

import contextlib
import os
from collections.abc import Callable, Collection, Sequence
from typing import Any, NamedTuple

import numpy as np

from jaxcl.errors import Refused
from jaxcl.index import drift, kit, maps, order, vectors
from jaxcl.run import train

Stop = Callable[[], bool]


class Route(NamedTuple):
    """Maps, applied one after another, from one encoder's space to the target's."""

    source: str  # name of the encoder
    chain: list[maps.Map]
    composed: float | None = None  # share of the new neighbours found by composed maps
    direct: float | None = None  # and by a map of its own, where there were pairs
    recalls: tuple[float, ...] = ()  # share that each map finds of its own target's

    def name(self) -> str:
        """Return the names of the maps, joined by "+"."""
        return "+".join(maps.map_id(arrays) for arrays in self.chain)

    def apply(self, rows: np.ndarray) -> np.ndarray:
        """Map rows to the target's space."""
        for arrays in self.chain:
            rows = maps.map_features(arrays, rows)
        return rows


def make_routes(
    kits: Sequence[kit.Kit], *, sources: Collection[str] | None = None, k: int = 10
) -> dict[str, Route]:
    """Make the routes from earlier encoders to the last one.

    A vector takes a map of its own where the first and the last kit embedded the same
    images and that map finds more of the new neighbours; else the maps are composed.

    Args:
      kits: kits of a chain of updates, the oldest first.
      sources: names of encoders whose vectors there are; None: all earlier ones.
      k: number of neighbours by which both are compared.

    Returns:
      Name of an encoder -> its route; `composed` and `direct` are measured on held-out
      pairs.
    """
    routes: dict[str, Route] = {}
    for place, first in enumerate(kits):
        if sources is not None and first.source not in sources:
            continue
        chain = [step.fitted.arrays for step in kits[place:]]
        recalls = tuple(step.fitted.recall for step in kits[place:])
        route = Route(first.source, chain, recalls=recalls)
        if len(chain) > 1:
            route = _compare_routes(route, first, kits[-1], k)
        routes[first.source] = route
    return routes


def _compare_routes(route, first, last, k) -> Route:
    """Fit a map of its own, if the kits share images; keep the better route."""
    places = {name: place for place, name in enumerate(last.ids)}
    shared = [(i, places[x]) for i, x in enumerate(first.ids) if x in places]
    if first.images != last.images or len(shared) < 4 * (k + 2):
        return route
    rows, others = map(list, zip(*shared, strict=True))
    before, after = first.before[rows], last.after[others]
    fitted = maps.fit_all(before, after, mapped="vectors", k=k)[0]
    test = np.arange(len(before)) % 4 == 3
    wanted = drift.find_neighbours(after[test], after[test], k, np.arange(test.sum()))
    found = drift.find_neighbours(
        after[test], route.apply(before[test]), k, np.arange(test.sum())
    )
    composed = float(maps.share_found(found, wanted).mean())
    if fitted.recall < composed:
        return route._replace(composed=composed, direct=fitted.recall)
    arrays = maps.fit(before, after, fitted.kind, fitted.options)
    return Route(route.source, [arrays], composed, fitted.recall, (fitted.recall,))


def check_belongs(table: vectors.Table, rows: np.ndarray, field="--vectors") -> None:
    """Refuse vectors that the encoder of some rows cannot have embedded.

    Their dimension, their lengths, and their cosines with the nearest of the rows are
    compared.

    Args:
      table: vectors whose versions are unknown.
      rows: f32[N, D], embeddings of images by the encoder, not scaled.
      field: option that names the vectors, for messages.
    """
    option = f"{field}={table.path}"
    if table.width != rows.shape[1]:
        raise Refused(
            f"{option}: vectors have {table.width} dimensions, those of the encoder "
            f"{rows.shape[1]}"
        )
    places = np.unique(np.linspace(0, table.rows - 1, 512).astype(int))
    sample = _sample(table, places)
    lengths = np.linalg.norm(sample, axis=1)
    expected = np.linalg.norm(rows, axis=1)
    inside = (lengths > expected.min() / 2) & (lengths < 2 * expected.max())
    if np.mean(np.abs(lengths - 1) < 0.02) < 0.95 and np.mean(inside) < 0.95:
        raise Refused(
            f"{option}: vectors have lengths of {np.median(lengths):.3g}, those of the "
            f"encoder {expected.min():.3g} to {expected.max():.3g}, or 1"
        )
    unit, sample = drift.unit(rows), drift.unit(sample)
    among = unit @ unit.T
    np.fill_diagonal(among, -1)
    threshold = np.quantile(among.max(axis=1), 0.01)
    nearest = float(np.median((sample @ unit.T).max(axis=1)))
    if nearest < threshold:
        raise Refused(
            f"{option}: vectors have cosines of {nearest:.2f} with the nearest of the "
            f"encoder's, must be {threshold:.2f}; they are of another encoder"
        )


def _sample(table, places) -> np.ndarray:
    """Read rows here and there; each costs a block."""
    if table.rows <= 4 * table.block_rows():
        return table.take(places)
    few = np.array_split(places, 8)
    starts = [part[0] for part in few]
    blocks = [next(table.read(int(start)))[:64] for start in starts]
    return np.concatenate(blocks).astype(np.float32)


def upgrade(
    table: vectors.Table,
    out: str,
    target: str,
    routes: dict[str, Route],
    *,
    source: str,
    stop: Stop = lambda: False,
) -> list[vectors.Version]:
    """Map stored vectors to the space of an encoder, and write them to a file.

    Vectors that are in this space already are copied.

    Args:
      table: vectors, with or without versions.
      out: new file; the same command continues one that was stopped.
      target: name of the encoder.
      routes: name of an encoder -> its route to the target.
      source: name of the encoder of vectors without versions.
      stop: called after each block; when it returns True the call ends.

    Returns:
      The versions in the file.

    Raises:
      Refused: no route leads from a version, or vectors are not finite or zero.
      OSError: a file cannot be read or written, e.g. a full disk.
      train.Interrupted: `stop` returned True.
    """
    versions, codes = list_versions(table, source)
    results, steps = [], []
    for version in versions:
        if version.encoder == target:
            steps.append(None)
            results.append(version)
        elif version.encoder in routes:
            route = routes[version.encoder]
            steps.append(route)
            names = [x for x in (version.by, route.name()) if x]
            origin = version.source or version.encoder
            results.append(vectors.Version(target, origin, "+".join(names)))
        else:
            raise Refused(
                f"--vectors={table.path}: vectors are of encoder {version.encoder}; "
                f"there are maps from {', '.join(routes) or 'none'} to {target}"
            )
    width = _common_width(table, steps)

    def change(block, first):
        part = codes[first : first + len(block)]
        if len(steps) == 1 and steps[0] is not None:
            return steps[0].apply(block)
        rows = np.empty((len(block), width), np.float32)
        for number, route in enumerate(steps):
            mask = part == number
            if mask.any():
                rows[mask] = block[mask] if route is None else route.apply(block[mask])
        return rows

    metadata = {
        "command": "upgrade",
        "target": target,
        "steps": [str(x) for x in results],
    }
    rewrite(table, out, metadata, width, change, results, codes, stop=stop)
    return results


def _common_width(table, steps) -> int:
    """Return the width of all mapped vectors."""
    widths = {table.width}
    for route in steps:
        if route is not None:
            arrays = route.chain[-1]
            last = arrays["up"] if "up" in arrays else arrays["matrix"]
            widths = (widths if None in steps else set()) | {last.shape[1]}
    if len(widths) != 1:
        raise Refused(
            f"--vectors={table.path}: holds vectors of {sorted(widths)} dimensions"
        )
    return widths.pop()


def list_versions(
    table: vectors.Table, source: str
) -> tuple[list[vectors.Version], np.ndarray]:
    """Return a table's versions, and the number of each row's version among them."""
    return table.versions or [vectors.Version(source)], table.codes


def rewrite(
    table: vectors.Table,
    out: str,
    metadata: dict,
    width: int,
    change: Callable[[np.ndarray, int], np.ndarray],
    versions: list[vectors.Version],
    codes: np.ndarray,
    *,
    stop: Stop = lambda: False,
) -> None:
    """Write a changed copy of a file of vectors, block by block.

    Args:
      table: the vectors.
      out: the new file.
      metadata: description of the work; a draft of other work is refused.
      width: dimensions of the changed vectors.
      change: (block f32[n, D], number of its first row) -> f32[n, width].
      versions, codes: versions of the changed vectors, see `vectors.Table`.
      stop: argument of `upgrade`.
    """
    dtype = np.float16 if table.dtype == np.float16 else np.float32
    metadata = metadata | {
        "rows": table.rows,
        "width": width,
        "from": _fingerprint(table),
    }
    draft = vectors.Draft(out, table.rows, width, dtype, metadata)
    first = draft.done
    with contextlib.closing(draft):
        for block in table.read(first) if first < table.rows else ():
            block = np.asarray(block, np.float32)
            _check_rows(table, block, first)
            draft.append(change(block, first))
            first += len(block)
            if stop():
                raise train.Interrupted(
                    f"stopped; {first:,} vectors are in {draft.path}"
                )
        draft.finish(table, versions, codes)


def _fingerprint(table) -> list:
    """Tell a file of vectors from another: its name, size and time of change."""
    state = os.stat(table.path)
    return [os.path.basename(table.path), state.st_size, state.st_mtime_ns]


def _check_rows(table, block, first) -> None:
    """Refuse rows that have no direction."""
    squares = np.einsum("nd,nd->n", block, block)
    bad_rows = np.flatnonzero(~(np.isfinite(squares) & (squares > 0)))
    if len(bad_rows):
        names = ", ".join(table.ids.names(first + bad_rows[:3]))
        raise Refused(
            f"--vectors={table.path}: {len(bad_rows)} of the vectors {first:,} to "
            f"{first + len(block) - 1:,} are zero or have numbers that are not finite, "
            f"such as those of the ids {names}"
        )


def plan_order(
    table: vectors.Table,
    target: str,
    references: Callable[[vectors.Version], order.Reference],
    source: str,
) -> tuple[np.ndarray, np.ndarray]:
    """Order the vectors that the target has not embedded, the worst first.

    Args:
      table: vectors, mapped or not.
      target: name of the encoder.
      references: version of vectors -> pairs in their space with errors.
      source: name of the encoder of vectors without versions.

    Returns:
      Rows i64[n] and their predicted errors f32[n].
    """
    versions, codes = list_versions(table, source)
    errors, first = np.full(table.rows, -1, np.float32), 0
    wanted = {
        number: references(version)
        for number, version in enumerate(versions)
        if version.encoder != target or version.source
    }
    for block in table.read(0):
        part = codes[first : first + len(block)]
        for number, reference in wanted.items():
            for piece in _pieces(np.flatnonzero(part == number)):
                errors[first + piece] = order.predict_errors(block[piece], reference)
        first += len(block)
    rows = np.argsort(-errors, kind="stable")
    rows = rows[: int((errors >= 0).sum())]
    return rows, errors[rows]


def _pieces(rows, size=8192) -> list[np.ndarray]:
    """Split rows, so that their cosines with the pairs stay small."""
    return np.array_split(rows, -(-len(rows) // size)) if len(rows) else []


def replace(
    table: vectors.Table,
    out: str,
    target: str,
    rows: np.ndarray,
    fresh: Any,
    *,
    source: str,
    stop: Stop = lambda: False,
) -> None:
    """Write a copy of a file in which some vectors are embedded again.

    Args:
      table: vectors in the space of the target.
      out: the new file.
      target: name of the encoder.
      rows: i64[n], sorted rows that are replaced.
      fresh: f32[n, D], their new embeddings.
      source: name of the encoder of vectors without versions.
      stop: argument of `upgrade`.
    """
    versions, codes = list_versions(table, source)
    versions, codes = [*versions], codes.copy()
    plain = vectors.Version(target)
    if plain not in versions:
        versions.append(plain)
    codes[rows] = versions.index(plain)

    def change(block, first):
        start, end = np.searchsorted(rows, (first, first + len(block)))
        changed = block.copy()
        changed[rows[start:end] - first] = drift.unit(fresh[start:end])
        return changed

    metadata = {"command": "refresh", "target": target, "replaced": len(rows)}
    rewrite(table, out, metadata, table.width, change, versions, codes, stop=stop)
