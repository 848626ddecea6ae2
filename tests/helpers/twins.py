"""Losses against their float64 twins, and what the twins are written with."""

import math

import jax
import jax.numpy as jnp
import numpy as np

from helpers import interpreted, jaxprs


def unit(x):
    """Rows of length 1; rows of zeros stay."""
    x = np.asarray(x, np.float64)
    return x / np.maximum(np.linalg.norm(x, axis=-1, keepdims=True), 1e-12)


def views_of(images):
    """[N,...] -> [N,2,...], for NumPy in float64, for JAX in float32."""
    library = jnp if isinstance(images, jax.Array) else np
    x = images / 255.0
    return library.stack([x, x[:, ::-1] ** 2], axis=1)


def velocity(state):
    """What SGD with momentum has summed of the gradients."""
    (trace,) = (x for x in state.opt_state if hasattr(x, "trace"))
    return trace.trace


def momentum_step(params, velocity, grads, *, rate, momentum, decay):
    """Velocity and parameters after a step of SGD with momentum and weight decay."""
    velocity = jax.tree.map(
        lambda v, g, p: momentum * v + g + decay * p, velocity, grads, params
    )
    return velocity, jax.tree.map(lambda p, v: p - rate * v, params, velocity)


def moved(tree, seed, *, low, high):
    """Add uniform noise to every number; `seed` may be a generator that goes on."""
    rng = np.random.default_rng(seed)
    return jax.tree.map(
        lambda x: jnp.asarray(x + np.float32(rng.uniform(low, high, x.shape))),
        jax.device_get(tree),
    )


def draw(shapes, seed=0):
    """Arrays of normal numbers."""
    rng = np.random.default_rng(seed)
    return [rng.normal(size=shape) for shape in shapes]


def check_finite(loss, inputs):
    """Value and gradients are finite for each of the tuples of arrays."""
    step = interpreted.value_and_grad(loss, argnums=tuple(range(len(inputs[0]))))
    for arrays in inputs:
        leaves = jax.tree.leaves(step(*arrays))
        assert all(np.all(np.isfinite(leaf)) for leaf in leaves)


def draw_inputs(net, shape):
    """Draw all parameters of a network, none 0 or 1, and images of this shape."""
    images = np.random.default_rng(0).normal(size=shape).astype(np.float32)
    shapes = jax.eval_shape(net.init, jax.random.key(0), images)["params"]
    rng = np.random.default_rng(1)
    params = jax.tree.map(
        lambda leaf: rng.normal(0.2, 0.5, leaf.shape).astype(np.float32), shapes
    )
    return params, images


def check_bfloat16_network(net, tree, images, run):
    """A network told bfloat16 keeps float32 outside and computes in it inside."""
    half = net.clone(dtype=jnp.bfloat16)
    variables = jax.eval_shape(half.init, jax.random.key(0), images)
    outputs, want = run(half, tree, images), run(net, tree, images)
    leaves = jax.tree.leaves((variables, outputs))
    assert {leaf.dtype for leaf in leaves} == {np.dtype("f4")}
    pairs = zip(*map(jax.tree.leaves, (outputs, want)), strict=True)
    gaps = [np.abs(one - other).max() / np.abs(other).max() for one, other in pairs]
    assert 1e-4 < max(gaps) < 5e-2, gaps  # rounded to 8 bits on the way, and no worse


def layer_norm(x, p, epsilon=1e-6):
    spread = np.sqrt(x.var(-1, keepdims=True) + epsilon)
    return (x - x.mean(-1, keepdims=True)) / spread * p["scale"] + p["bias"]


def to64(tree):
    return jax.tree.map(lambda x: np.asarray(x, np.float64), tree)


def cosine(a, b):
    a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
    lengths = [max(math.sqrt(x @ x), 1e-12) for x in (a, b)]
    return float(a @ b) / (lengths[0] * lengths[1])


def nce(anchor, positive, columns, temperature):
    """-s(a, p) + log of the sum over columns of exp s, for one anchor."""
    total = sum(math.exp(cosine(anchor, c) / temperature) for c in columns)
    return -cosine(anchor, positive) / temperature + math.log(total)


def central_difference(twin, arrays, which, h=1e-5):
    """Gradient of twin(*arrays) with respect to arrays[which]."""
    gradient = np.zeros_like(arrays[which])
    for index in np.ndindex(gradient.shape):
        values = []
        for shift in (h, -h):
            moved = [a.copy() for a in arrays]
            moved[which][index] += shift
            values.append(twin(*moved))
        gradient[index] = (values[0] - values[1]) / (2 * h)
    return gradient


def check(loss, twin, arrays, moving):
    """Equal values; equal gradients for `moving`, and exactly zero ones elsewhere."""
    both = interpreted.value_and_grad(loss, argnums=tuple(range(len(arrays))))
    with jax.enable_x64(True):
        value, gradients = jax.device_get(both(*map(jnp.asarray, arrays)))
    assert value.dtype == np.float64 and value.shape == ()
    np.testing.assert_allclose(value, twin(*arrays), rtol=1e-12)
    for i, gradient in enumerate(gradients):
        if i not in moving:  # stopped inside
            assert not np.any(np.asarray(gradient)), i
            continue
        expected = central_difference(twin, arrays, i)
        # Nothing would be compared, but for a loss that is 0 whatever it is given.
        assert np.any(np.abs(expected) > 1e-3) or abs(value) < 1e-12, i
        np.testing.assert_allclose(gradient, expected, rtol=1e-6, atol=1e-8)


def check_masked(loss, mask, arrays, hidden):
    """What a mask hides changes nothing, whatever it holds.

    Args:
      loss: of a mask f32[...] and the arrays.
      hidden: of each array what the mask hides of it, an index; None: nothing.

    Returns:
      Value and gradients where the mask hides all.
    """
    step = interpreted.value_and_grad(loss, argnums=tuple(range(1, 1 + len(arrays))))
    value, gradients = step(mask, *arrays)
    assert abs(value) > 0.01 and np.abs(gradients[0]).max() > 1e-3
    for bad in (np.nan, np.inf, 0.0):
        pairs = zip(arrays, hidden, strict=True)
        spoilt = [a if at is None else a.at[at].set(bad) for a, at in pairs]
        again, others = step(mask, *spoilt)
        assert again == value
        for was, now, at in zip(gradients, others, hidden, strict=True):
            np.testing.assert_array_equal(was, now)
            assert at is None or not np.any(np.asarray(now[at]))
    same = interpreted.jit(loss)(mask.astype(bool), *arrays)
    np.testing.assert_allclose(same, value, rtol=1e-6)
    return step(jnp.zeros_like(mask), *spoilt)


# Operations that move numbers or change their type, and compute none.
MOVES = {
    *("broadcast_in_dim", "concatenate", "convert_element_type", "copy", "gather"),
    *("custom_jvp_call", "custom_vjp_call", "dynamic_slice", "jit", "pjit", "reshape"),
    *("rev", "select_n", "slice", "squeeze", "stack", "stop_gradient", "transpose"),
    "unstack",
}


def check_bfloat16(loss, shapes):
    """Of bfloat16 arrays all is computed in float32; gradients are bfloat16 again.

    The loss is traced and not compiled: no operation may return bfloat16 numbers that
    it computed.
    """
    arrays = [jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in shapes]
    program, value = jax.make_jaxpr(loss, return_shape=True)(*arrays)
    assert value.dtype == jnp.float32
    computed = {
        line.primitive.name
        for line in jaxprs.equations(program.jaxpr)
        for x in line.outvars
        if x.aval.dtype == jnp.bfloat16
    }
    assert computed <= MOVES, computed - MOVES
    gradients = jax.eval_shape(jax.grad(loss, range(len(arrays))), *arrays)
    assert {x.dtype for x in gradients} == {jnp.dtype(jnp.bfloat16)}
