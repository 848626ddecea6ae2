"""Measure the ways to serve an index after an update, and choose the cheapest.

Half of the images that both encoders embedded fit the maps. The other half stands for
the index: each of its images searches among the others, as a new query would.
"""

from typing import Any, NamedTuple

import numpy as np

from jaxcl.index import drift, maps, order

# Name -> what is done, from the cheapest.
WAYS = {
    "leave": "new queries in the old index",
    "back": "new queries mapped back, in the old index",
    "forward": "stored vectors mapped forward",
    "forward_10": "mapped forward, and 10 % embedded again",
    "forward_25": "mapped forward, and 25 % embedded again",
    "forward_50": "mapped forward, and 50 % embedded again",
    "all": "all embedded again",
}
SHARES = {"forward_10": 0.1, "forward_25": 0.25, "forward_50": 0.5}
# What the verdict calls them, from the best.
VERDICTS = ("keep", "adapt", "upgrade", "refresh", "rebuild")
_VERDICT = {"leave": "keep", "back": "adapt", "forward": "upgrade", "all": "rebuild"}


class Measured(NamedTuple):
    """The ways of an update, and the maps that were measured."""

    ways: dict[str, dict]  # way -> "neighbours", "precision": [mean, low, high]
    forward: maps.FittedMap  # of stored vectors, fitted to half of the pairs
    back: list[maps.FittedMap]  # of new queries; recall is of OLD neighbours


def measure_ways(
    before: Any, after: Any, *, label: np.ndarray | None = None, k: int = 10
) -> Measured:
    """Measure how well each way finds the new neighbours, and the query's class.

    Args:
      before: f32[N, E], embeddings by the old encoder.
      after: f32[N, D], embeddings of the same images by the new one.
      label: i[N], classes; None: precision is not measured.
      k: number of neighbours that a search returns.

    Returns:
      For each way the share of new neighbours found and the precision, each a mean over
      queries with its 95 % interval. "old" is the old encoder with its index.
    """
    before, after = maps.check_pairs(before, after)
    fit, test = slice(0, None, 2), slice(1, None, 2)
    back = maps.fit_all(after[fit], before[fit], mapped="queries", k=k)
    forward = maps.fit_all(before[fit], after[fit], mapped="vectors", k=k)[0]
    old, new = before[test], after[test]
    mapped = maps.map_features(forward.arrays, old)
    errors = order.predict_errors(
        old, order.make_reference(before[fit], after[fit], forward)
    )
    ranks = np.argsort(np.argsort(-errors, kind="stable"))
    searches = {"old": (old, old)}
    if old.shape[1] == new.shape[1]:
        searches["leave"] = new, old
    searches["back"] = maps.map_features(back[0].arrays, new), old
    searches["forward"] = new, mapped
    for way, share in SHARES.items():
        renewed = (ranks < round(share * len(new)))[:, None]
        searches[way] = new, np.where(renewed, drift.unit(new), mapped)
    searches["all"] = new, new
    places = np.arange(len(new))
    neighbours = {
        way: np.asarray(drift.find_neighbours(*pair, k, places))
        for way, pair in searches.items()
    }
    classes = None if label is None else np.asarray(label)[test]
    ways = {}
    for way, rows in neighbours.items():
        shares = {"neighbours": maps.share_found(rows, neighbours["all"])}
        if classes is not None:
            shares["precision"] = (classes[rows] == classes[:, None]).mean(axis=1)
        ways[way] = {name: interval(x) for name, x in shares.items()}
    held_out = np.arange(len(before)) % 2 == 1
    recalls = (
        maps.measure_recall(x.arrays, after, before, held_out, "queries", k)
        for x in back
    )
    back = [
        x._replace(recall=float(recall.mean()))
        for x, recall in zip(back, recalls, strict=True)
    ]
    return Measured(ways, forward, sorted(back, key=lambda x: -x.recall))


def interval(values: np.ndarray) -> list[float]:
    """Return the mean of values of independent queries and its 95 % interval."""
    mean = float(np.mean(values))
    half = 1.96 * float(np.std(values, ddof=1)) / np.sqrt(len(values))
    return [mean, float(mean - half), float(mean + half)]


def list_usable(ways: dict[str, dict], least: float) -> list[str]:
    """List the ways that serve well enough, the cheapest first.

    A way serves if the low end of its interval reaches a share of what all vectors
    embedded again give: of the precision if it was measured, else of the neighbours.

    Args:
      ways: field of `Measured`.
      least: share that is enough.
    """
    measure = "precision" if "precision" in ways["all"] else "neighbours"
    best = ways["all"][measure][0]
    enough = (
        way
        for way in WAYS
        if way in ways and ways[way][measure][1] >= least * best and way != "all"
    )
    return [*enough, "all"]


def verdict_of(way: str) -> str:
    """Return the verdict, such as "adapt", that recommends a way."""
    return _VERDICT.get(way, "refresh")
