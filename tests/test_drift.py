"""How far embeddings moved, against float64 loops, and in cases known by hand."""

import numpy as np

from helpers import twins
from jaxcl.index import drift

RNG = np.random.default_rng(0)
OLD = RNG.normal(size=(60, 6))
NEW = OLD + 0.4 * RNG.normal(size=OLD.shape)


def nearest(query, index, k, own=None):
    found = [
        (-float(query @ row), i)
        for i, row in enumerate(twins.unit(index))
        if own is None or i != own
    ]
    return {i for _, i in sorted(found)[:k]}


def share(queries, index, rows, k):
    """Mean overlap with the old queries' neighbours in the old index."""
    shares = []
    for query, i in zip(twins.unit(queries), rows, strict=True):
        old = nearest(twins.unit(OLD)[i], OLD, k, i)
        shares.append(len(old & nearest(query, index, k, i)) / k)
    return np.mean(shares)


def test_measures_are_those_of_loops():
    measured = drift.measure_drift(OLD, NEW, k=5)
    a, b = twins.unit(OLD), twins.unit(NEW)
    np.testing.assert_allclose(measured["cosine"], np.mean(np.sum(a * b, 1)), rtol=1e-5)
    u, _, vt = np.linalg.svd(b[::2].T @ a[::2])
    best = u @ vt
    np.testing.assert_allclose(drift.find_rotation(OLD[::2], NEW[::2]), best, atol=1e-5)
    aligned = np.mean(np.sum(a[1::2] * (b[1::2] @ best), 1))
    np.testing.assert_allclose(measured["aligned_cosine"], aligned, rtol=1e-5)
    rows = range(len(OLD))
    np.testing.assert_allclose(measured["overlap"], share(NEW, NEW, rows, 5), rtol=1e-6)
    np.testing.assert_allclose(
        measured["index_overlap"], share(NEW, OLD, rows, 5), rtol=1e-6
    )
    a, b = a - a.mean(0), b - b.mean(0)
    top = np.trace(a @ a.T @ b @ b.T)
    want = top / np.linalg.norm(a @ a.T) / np.linalg.norm(b @ b.T)
    np.testing.assert_allclose(measured["cka"], want, rtol=1e-5)
    assert 0.1 < measured["index_overlap"] < 0.99  # neither case is trivial
    assert measured["overlap"] != measured["index_overlap"] != share(OLD, NEW, rows, 5)


def test_the_rotation_is_judged_on_rows_that_it_was_not_fitted_to():
    # As many features as rows to fit: these would fit perfectly, whatever they are.
    old, new = RNG.normal(size=(2, 40, 20))
    measured = drift.measure_drift(old, new, k=4)
    turn = drift.find_rotation(old[::2], new[::2])
    fitted = drift.mean_cosine(old[::2], twins.unit(new[::2]) @ turn)
    assert fitted > 0.5 > abs(measured["aligned_cosine"]) + 0.2
