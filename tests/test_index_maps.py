"""Maps between encoders: what each kind can undo, and against float64."""

import jax.numpy as jnp
import numpy as np
import pytest
from safetensors import numpy as tensors

from helpers import twins
from jaxcl.errors import Refused
from jaxcl.index import drift, maps

RNG = np.random.default_rng(0)
NEW = twins.unit(RNG.normal(size=(400, 10)))
TURN = np.linalg.qr(RNG.normal(size=(10, 10)))[0]


def gap(arrays, source, target):
    """The largest distance of a mapped row from its target."""
    return float(np.abs(maps.map_features(arrays, source) - twins.unit(target)).max())


def test_an_orthogonal_map_undoes_a_rotation_and_scaling():
    old = 3 * NEW @ TURN
    assert gap(maps.fit_orthogonal(7 * NEW, old), 7 * NEW, old) < 1e-5
    wider = np.concatenate([old, np.zeros((400, 3))], 1)  # of other dimensions
    for source, target in ((NEW, wider), (wider, NEW)):
        assert gap(maps.fit_orthogonal(source, target), source, target) < 1e-5


def rank_six(rows):
    """Rows of length 1 in ten dimensions, of which a shift and six vary."""
    turned = np.linalg.qr(RNG.normal(size=(6, 6)))[0]
    varied = 0.8 * twins.unit(rows[:, :6]) @ turned
    return np.concatenate([varied, np.full((len(rows), 1), 0.6)], 1) @ TURN[:7]


def test_an_affine_map_needs_its_rank_and_no_more():
    new = np.concatenate([NEW[:, :6], np.zeros((400, 4))], 1)
    old = rank_six(new)
    assert gap(maps.fit_affine(new, old, rank=6, ridge=1e-6), new, old) < 1e-3
    assert gap(maps.fit_affine(new, old, rank=5, ridge=1e-6), new, old) > 0.1
    assert gap(maps.fit_orthogonal(new, old), new, old) > 0.1
    wide = maps.fit_affine(new, old, rank=64)
    assert wide["matrix"].shape == (10, 10)  # a rank above the width is the width


@pytest.mark.parametrize("rank", [4, None])
def test_the_affine_map_is_the_ridge_regression_of_float64(rank):
    old = NEW @ TURN + 0.3 * RNG.normal(size=NEW.shape)
    found = maps.fit_affine(NEW, old, rank=rank, ridge=0.05)
    x, y = NEW - NEW.mean(0), twins.unit(old) - twins.unit(old).mean(0)
    inner = x.T @ x + 0.05 * np.trace(x.T @ x) / 10 * np.eye(10)
    best = np.linalg.solve(inner, x.T @ y)
    if rank is not None:
        root = np.linalg.cholesky(inner).T  # inner = root' root
        left, sizes, right = np.linalg.svd(root @ best)
        best = left[:, :rank] * sizes[:rank] @ right[:rank]  # Eckart, Young
        best = np.linalg.solve(root, best)
    matrix = found["down"] @ found["up"] if rank else found["matrix"]
    np.testing.assert_allclose(matrix, best, atol=1e-4)
    shift = twins.unit(old).mean(0) - NEW.mean(0) @ best
    np.testing.assert_allclose(found["shift"], shift, atol=1e-4)


def folded(rows):
    """No linear map undoes it: where the first feature is negative others change."""
    return np.where(rows[:, :1] < 0, rows @ TURN, rows[:, ::-1] @ TURN)


@pytest.mark.parametrize("mapped", ["queries", "vectors"])
def test_an_mlp_undoes_what_no_linear_map_can(mapped):
    best, *others = maps.fit_all(NEW, folded(NEW), mapped=mapped, k=5)
    assert best.kind == "mlp"
    assert best.recall > max(one.recall for one in others) + 0.1


@pytest.mark.parametrize("base", ["none", "affine", "rank"])
def test_a_layer_that_adds_nothing_leaves_the_linear_map(base, monkeypatch):
    """Its matrix and its shift, whatever form they have."""

    def train_nothing(inputs, wanted, linear, *sums):
        width, outputs = inputs.shape[1], wanted.shape[1]
        layer = {"down": np.ones((width, 4)), "offset": np.ones(4)}
        return layer | {"up": np.zeros((4, outputs)), "shift": np.zeros(outputs)}

    monkeypatch.setattr(maps, "_train_layer", train_nothing)
    old = 0.5 + NEW @ TURN
    rank = 3 if base == "rank" else None
    linear = maps.fit_orthogonal(NEW, old)
    if base != "none":
        linear = maps.fit_affine(NEW, old, rank=rank)
    found = maps.fit_mlp(NEW, old, base=None if base == "none" else linear)
    np.testing.assert_allclose(
        maps.map_features(found, NEW), maps.map_features(linear, NEW), atol=1e-6
    )


@pytest.mark.parametrize("mapped", ["queries", "vectors"])
def test_recall_is_measured_on_rows_that_nothing_was_fitted_to(mapped):
    noise = RNG.normal(size=(60, 20))
    random = maps.fit_all(noise, noise[::-1], mapped=mapped, k=5)
    assert all(one.recall < 0.75 for one in random)  # of 14 others; by chance 0.36
    same = maps.fit_all(NEW, NEW @ TURN, mapped=mapped, k=5)
    assert same[0].kind == "orthogonal" and same[0].recall > 0.999


@pytest.mark.parametrize("mapped", ["queries", "vectors"])
def test_a_recall_is_of_the_neighbours_through_a_map(mapped):
    """By hand, those that each held-out row finds through a map."""
    target, held = NEW @ TURN, np.arange(400) % 4 == 3
    arrays = maps.fit_affine(NEW[~held], target[~held], ridge=3.0)
    through, shares = np.asarray(maps.map_features(arrays, NEW), float), []
    places = np.arange(400) if mapped == "queries" else np.flatnonzero(held)
    for i in np.flatnonzero(held):
        others = places[places != i]
        pair = (through[i], target) if mapped == "queries" else (target[i], through)
        near = []
        for query, index in ((target[i], target), pair):
            near.append({*others[np.argsort(-(index[others] @ query))[:5]].tolist()})
        shares.append(len(near[0] & near[1]) / 5)
    recall = maps.measure_recall(
        arrays, *np.float32([NEW, target]), test=held, mapped=mapped, k=5
    )
    np.testing.assert_allclose(recall.mean(), np.mean(shares), atol=2e-3)
    assert 0.5 < recall.mean() < 0.99


def two_encoders(rows, dims):
    """Embeddings by two encoders of noisy examples of 20 classes, and the classes."""
    rng = np.random.default_rng(1)
    label = rng.integers(0, 20, rows)
    shared = 0.6 * rng.normal(size=(20, 30))[label] + rng.normal(size=(rows, 30))
    made = []
    for _ in range(2):
        turned = np.maximum(shared @ rng.normal(size=(30, dims)), 0)
        made.append(np.float32(turned + 3 * rng.normal(size=(rows, dims))))
    return *made, label


@pytest.mark.parametrize("dims", [160, 1280])
def test_the_ridge_serves_as_few_pairs_as_dimensions(dims):
    """A fixed ridge of 0.001 was worse than the old encoder with its index."""
    pairs = dims * 1500 // 1280
    old, new, label = two_encoders(pairs + 900, dims)
    fit, index, query = np.split(np.arange(len(label)), [pairs, pairs + 600])

    def precision(queries, vectors):
        near = drift.find_neighbours(queries, vectors, 10)
        return (label[index][near] == label[query][:, None]).mean()

    stays = precision(old[query], old[index])
    one = maps.fit_all(old[fit], new[fit], mapped="vectors")
    affine = next(x for x in one if x.kind == "affine")
    chosen = precision(new[query], maps.map_features(affine.arrays, old[index]))
    fixed = maps.fit_affine(old[fit], new[fit], ridge=1e-3)
    fixed = precision(new[query], maps.map_features(fixed, old[index]))
    assert fixed < min(stays, chosen)
    assert dims < 1000 or stays < chosen  # 187 pairs are too few to gain


def test_pairs_that_cannot_fit_a_map_are_refused():
    with pytest.raises(Refused, match="pairs=15: .*at least 16"):
        maps.fit_all(NEW[:15], NEW[:15], mapped="vectors")
    with pytest.raises(Refused, match="400 and 399"):
        maps.fit_all(NEW, NEW[1:], mapped="vectors")
    broken = NEW.copy()
    broken[[3, 5, 7, 9], 1] = np.nan
    with pytest.raises(Refused, match=r"\[3, 5, 7\]"):
        maps.fit_all(NEW, broken, mapped="queries")


@pytest.mark.parametrize("kind", [*maps.KINDS, "rank", "before_cards"])
def test_a_file_holds_a_map_and_nothing_else(kind, tmp_path):
    options = {"rank": 3 if kind == "rank" else None, "ridge": 0.1}
    name = {"rank": "affine", "before_cards": "mlp"}.get(kind, kind)
    arrays = maps.fit(NEW[:50], folded(NEW)[:50], name, options)
    if kind == "before_cards":  # the files of before November 2026
        saved = {"rotation" if k == "matrix" else k: x for k, x in arrays.items()}
        data, card = tensors.save(saved), {}
    else:
        card = {"kind": kind}
        data = maps.pack_map(arrays, card)
    np.testing.assert_array_equal(maps.map_to_index(tmp_path, NEW), NEW)
    (tmp_path / maps.FILE).write_bytes(data)
    loaded, about = maps.read_map(tmp_path / maps.FILE)
    assert about == card and maps.map_id(loaded) == maps.map_id(arrays)
    mapped = maps.map_features(arrays, NEW)
    np.testing.assert_array_equal(maps.map_to_index(tmp_path, NEW), mapped)
    by_jax = maps.map_features(loaded, jnp.asarray(5 * NEW))
    np.testing.assert_allclose(by_jax, mapped, atol=1e-5)
    np.testing.assert_allclose(np.linalg.norm(mapped, axis=1), 1, rtol=1e-5)
    for wrong in ({}, loaded | {"other": np.zeros(1)}):
        with pytest.raises(Refused, match="here"):
            maps.check_map(wrong, "here")
