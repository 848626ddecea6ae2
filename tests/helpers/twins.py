"""A loss against its float64 twin: the value, and the gradient by differences."""

import jax
import jax.numpy as jnp
import numpy as np


def central_difference(twin, arrays, which):
    """Gradient of twin(*arrays) with respect to arrays[which]."""
    gradient = np.zeros_like(arrays[which])
    for index in np.ndindex(gradient.shape):
        values = []
        for shift in (1e-5, -1e-5):
            moved = [a.copy() for a in arrays]
            moved[which][index] += shift
            values.append(twin(*moved))
        gradient[index] = (values[0] - values[1]) / 2e-5
    return gradient


def check(loss, twin, arrays, moving):
    """Equal values; equal gradients for `moving`, and exactly zero ones elsewhere."""
    with jax.enable_x64(True):
        value, gradients = jax.jit(
            jax.value_and_grad(loss, argnums=tuple(range(len(arrays))))
        )(*map(jnp.asarray, arrays))
    assert value.dtype == jnp.float64 and value.shape == ()
    np.testing.assert_allclose(value, twin(*arrays), rtol=1e-12)
    for i, gradient in enumerate(gradients):
        if i not in moving:  # stopped inside
            assert not np.any(np.asarray(gradient)), i
            continue
        expected = central_difference(twin, arrays, i)
        # Nothing would be compared, but for a loss that is 0 whatever it is given.
        assert np.any(np.abs(expected) > 1e-3) or abs(value) < 1e-12, i
        np.testing.assert_allclose(gradient, expected, rtol=1e-6, atol=1e-8)
