"""Alignment and uniformity: known values, float64 twins, the evaluator on a toy."""

import functools

import jax
import numpy as np

from helpers import eval_toy, twins
from jaxcl.evals import embedding, uniformity


def alignment_twin(first, second):
    return np.mean(np.sum((twins.unit(first) - twins.unit(second)) ** 2, axis=1))


def uniformity_twin(rows):
    rows = twins.unit(rows)
    pairs = [
        np.exp(-2 * np.sum((a - b) ** 2))
        for i, a in enumerate(rows)
        for b in rows[i + 1 :]
    ]
    return np.log(np.mean(pairs))


def test_they_are_their_twins():
    rng = np.random.default_rng(0)
    first, second = rng.normal(size=(2, 17, 5)).astype(np.float32)
    got = uniformity.alignment(first, second), uniformity.uniformity(first)
    want = alignment_twin(first, second), uniformity_twin(first)
    np.testing.assert_allclose(got, want, rtol=1e-5)
    slope = jax.grad(uniformity.uniformity)(first)
    twin = twins.central_difference(uniformity_twin, (np.float64(first),), 0)
    np.testing.assert_allclose(slope, twin, rtol=1e-4, atol=1e-6)


def test_views_are_of_the_sizes_and_moments_of_the_run(monkeypatch):
    """And a batch's draws depend on the seed and on its place."""
    keys = []

    def make(**options):
        sizes = dict(size=eval_toy.SIZE, mean=eval_toy.MEAN, std=eval_toy.STD)
        assert options == sizes

        def augment(key, images):
            data = jax.random.key_data(key)
            jax.debug.callback(lambda x: keys.append(np.asarray(x).tobytes()), data)
            return (
                np.float32([1, 0.5])[None, :, None, None, None] * images[:, None] - 50
            )

        return augment

    monkeypatch.setattr(uniformity.augment_images, "make", make)
    embedder = functools.partial(embedding.make_views_embedder, batch_size=8)
    monkeypatch.setattr(embedding, "make_views_embedder", embedder)
    state, images = eval_toy.state_of(1), eval_toy.dataset().test.images[:, None]
    for seed in (3, 4):
        parts = eval_toy.parts_of("joint", seed=seed)
        scalars = uniformity.make(parts)(state, 0).scalars
    jax.effects_barrier()
    assert len({*keys}) == len(keys) == 2 * 4
    first, second = (eval_toy.embed(state, x * images - 50.0) for x in (1, 0.5))
    want = alignment_twin(first, second), uniformity_twin(first)
    found = scalars["alignment"], scalars["uniformity"]
    np.testing.assert_allclose(found, want, rtol=1e-3)
