"""Adapters to an old index: what each kind can undo, and against float64."""

import jax.numpy as jnp
import numpy as np
import pytest
from safetensors import numpy as tensors

from helpers import twins
from jaxcl.update import adapters

RNG = np.random.default_rng(0)
NEW = twins.unit(RNG.normal(size=(400, 10)))
TURN = np.linalg.qr(RNG.normal(size=(10, 10)))[0]


def gap(adapter, before, after):
    """The largest distance of an adapted row from its old one."""
    found = adapters.map_features(adapter, after)
    return float(np.abs(found - twins.unit(before)).max())


def test_an_orthogonal_map_undoes_a_rotation_and_scaling():
    old = 3 * NEW @ TURN
    assert gap(adapters.fit_orthogonal(old, 7 * NEW), old, 7 * NEW) < 1e-5


def rank_six(rows):
    """Rows of length 1 in ten dimensions, of which a shift and six vary."""
    turned = np.linalg.qr(RNG.normal(size=(6, 6)))[0]
    varied = 0.8 * twins.unit(rows[:, :6]) @ turned
    return np.concatenate([varied, np.full((len(rows), 1), 0.6)], 1) @ TURN[:7]


def test_an_affine_map_needs_its_rank_and_no_more():
    new = np.concatenate([NEW[:, :6], np.zeros((400, 4))], 1)
    old = rank_six(new)
    assert gap(adapters.fit_affine(old, new, rank=6, ridge=1e-6), old, new) < 1e-3
    assert gap(adapters.fit_affine(old, new, rank=5, ridge=1e-6), old, new) > 0.1
    assert gap(adapters.fit_orthogonal(old, new), old, new) > 0.1
    wide = adapters.fit_affine(old, new)
    assert wide["down"].shape == (10, 10)  # a rank above the width is the width


def test_the_affine_map_is_the_ridge_regression_of_float64():
    old = NEW @ TURN + 0.3 * RNG.normal(size=NEW.shape)
    found = adapters.fit_affine(old, NEW, rank=4, ridge=0.05)
    x, y = NEW - NEW.mean(0), twins.unit(old) - twins.unit(old).mean(0)
    inner = x.T @ x + 0.05 * np.trace(x.T @ x) / 10 * np.eye(10)
    full = np.linalg.solve(inner, x.T @ y)
    root = np.linalg.cholesky(inner).T  # inner = root' root
    left, sizes, right = np.linalg.svd(root @ full)
    best = np.linalg.solve(root, left[:, :4] * sizes[:4] @ right[:4])  # Eckart, Young
    np.testing.assert_allclose(found["down"] @ found["up"], best, atol=1e-4)
    shift = twins.unit(old).mean(0) - NEW.mean(0) @ best
    np.testing.assert_allclose(found["shift"], shift, atol=1e-4)


def folded(rows):
    """No linear map undoes it: where the first feature is negative others change."""
    return np.where(rows[:, :1] < 0, rows @ TURN, rows[:, ::-1] @ TURN)


def test_an_mlp_undoes_what_no_linear_map_can():
    best, *others = adapters.fit_adapters(folded(NEW), NEW, k=5)
    assert best.kind == "mlp"
    assert best.recall > max(one.recall for one in others) + 0.1


def test_recall_is_measured_on_rows_that_nothing_was_fitted_to():
    noise = RNG.normal(size=(60, 20))
    assert all(
        one.recall < 0.6 for one in adapters.fit_adapters(noise, noise[::-1], k=5)
    )
    same = adapters.fit_adapters(NEW @ TURN, NEW, k=5)
    recalls = {one.kind: one.recall for one in same}
    assert recalls["orthogonal"] == 1.0 == same[0].recall
    # By hand: the neighbours that an adapted odd row shares with the old one.
    (worst,) = [one for one in same if one.kind == "affine"]
    index, shares = twins.unit(NEW @ TURN), []
    mapped = np.asarray(adapters.map_features(worst.adapter, NEW), float)
    for i in range(1, 400, 2):
        near = []
        for query in (index[i], mapped[i]):
            order = np.argsort(-(index @ query))
            near.append({*order[order != i][:5].tolist()})
        shares.append(len(near[0] & near[1]) / 5)
    np.testing.assert_allclose(worst.recall, np.mean(shares), atol=2e-3)


@pytest.mark.parametrize("kind", adapters.KINDS)
def test_a_file_holds_an_adapter_and_nothing_else(kind, tmp_path):
    made = adapters.KINDS[kind](folded(NEW)[:50], NEW[:50])
    arrays = tensors.load(adapters.pack_adapter(made))
    found = adapters.check_adapter(arrays, "here")
    np.testing.assert_array_equal(
        adapters.map_features(found, NEW), adapters.map_features(made, NEW)
    )
    np.testing.assert_array_equal(adapters.map_to_index(tmp_path, NEW), NEW)
    (tmp_path / adapters.FILE).write_bytes(adapters.pack_adapter(made))
    mapped = adapters.map_to_index(tmp_path, NEW)
    np.testing.assert_array_equal(mapped, adapters.map_features(made, NEW))
    lengths = jnp.linalg.norm(adapters.map_features(found, 5 * NEW), axis=1)
    np.testing.assert_allclose(lengths, 1, rtol=1e-5)
    for wrong in ({}, arrays | {"other": np.zeros(1)}):
        with pytest.raises(ValueError, match="here"):
            adapters.check_adapter(wrong, "here")
