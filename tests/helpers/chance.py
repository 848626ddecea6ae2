"""Random draws against their probabilities, and the bits they are made of."""

import functools

import jax
import jax.numpy as jnp
import numpy as np


def check_frequencies(counts, probability, trials, sigmas=4.5):
    """Frequencies of `trials` draws are within `sigmas` of their probability."""
    p = np.asarray(probability)
    bound = sigmas * np.sqrt(p * (1 - p) / trials) + 1e-12
    np.testing.assert_array_less(np.abs(np.asarray(counts) / trials - p), bound)


@jax.jit
def _words(key, rows):
    draw = functools.partial(jax.random.bits, shape=(2,), dtype=jnp.uint32)
    return jax.vmap(lambda row: draw(jax.random.fold_in(key, row)))(rows)


def drawers(key, rows):
    """Per row a function n -> whole number below n, of the row's 64 random bits."""
    words = _words(key, np.asarray(rows, np.uint32)).tolist()
    return [lambda n, w=high << 32 | low: w * n >> 64 for high, low in words]


def cut(total, size, rng, masked=0.3):
    """Batches of `size` rows that hold 0..total-1 in order among masked rows."""
    start = 0
    while start < total:
        mask = rng.random(size) >= masked
        mask[np.cumsum(mask) > total - start] = False
        rows = np.full(size, 999, np.int32)
        rows[mask] = np.arange(start, start + mask.sum())
        start += int(mask.sum())
        yield rows, mask
