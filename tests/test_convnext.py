"""ConvNeXt against a float64 twin, and what its options do."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import special

from helpers import twins
from jaxcl.nets import convnext, cpu

SMALL = dict(depths=(1, 2), width=6, patch=2)
NETS = {
    "v1": SMALL | {"layer_scale": 0.3},
    "v2": SMALL | {"layer_scale": None, "grn": True},
}
SHAPE = (3, 11, 14, 3)  # places are left out at both ends


@functools.cache
def made(name):
    net = convnext.convnext(**NETS[name])
    return net, *twins.draw_inputs(net, SHAPE)


# --- the same in float64, written from the definitions ------------------------


def np_patches(x, p):
    side = p["kernel"].shape[0]
    rows, columns = x.shape[1] // side, x.shape[2] // side
    out = np.zeros((len(x), rows, columns, p["kernel"].shape[-1]))
    for r in range(rows):
        for c in range(columns):
            window = x[:, r * side : (r + 1) * side, c * side : (c + 1) * side]
            out[:, r, c] = np.einsum("bijk,ijkd->bd", window, p["kernel"])
    return out + p["bias"]


def np_depthwise(x, kernel):
    """Each place of each channel: what lies around it, zeros beyond the edge."""
    reach = len(kernel) // 2
    out, (_, height, width, _) = np.zeros_like(x), x.shape
    for r, c in np.ndindex(height, width):
        for i, j in np.ndindex(*kernel.shape[:2]):
            row, column = r + i - reach, c + j - reach
            if 0 <= row < height and 0 <= column < width:
                out[:, r, c] += x[:, row, column] * kernel[i, j, 0]
    return out


def np_block(x, p, options):
    rows = np_depthwise(x, p["depthwise"]["kernel"]) + p["depthwise"]["bias"]
    rows = twins.layer_norm(rows, p["norm"]) @ p["fc1"]["kernel"] + p["fc1"]["bias"]
    rows = rows * 0.5 * (1 + special.erf(rows / np.sqrt(2)))
    if options.get("grn"):
        strength = np.sqrt((rows**2).sum(axis=(1, 2), keepdims=True))
        share = strength / (strength.mean(-1, keepdims=True) + 1e-6)
        rows = rows + p["grn"]["scale"] * rows * share + p["grn"]["bias"]
    rows = rows @ p["fc2"]["kernel"] + p["fc2"]["bias"]
    return x + (rows if options["layer_scale"] is None else rows * p["scale"])


def np_features(params, images, options):
    p = jax.tree.map(lambda leaf: np.asarray(leaf, np.float64), params)
    x = twins.layer_norm(
        np_patches(images.astype(np.float64), p["stem"]), p["stem_norm"]
    )
    for stage, depth in enumerate(options["depths"], start=1):
        if stage > 1:
            x = twins.layer_norm(x, p[f"stage{stage}_norm"])
            x = np_patches(x, p[f"stage{stage}_down"])
        for i in range(depth):
            x = np_block(x, p[f"stage{stage}_{i}"], options)
    return twins.layer_norm(x.mean(axis=(1, 2)), p["norm"])


@pytest.mark.parametrize("name", NETS)
def test_equals_the_definition_in_float64(name):
    net, params, images = made(name)
    result = jax.jit(net.apply)({"params": params}, images)
    assert result.shape == (3, net.num_features) and result.dtype == jnp.float32
    want = np_features(params, images, NETS[name])
    np.testing.assert_allclose(result, want, rtol=1e-5, atol=5e-6)
    trained = functools.partial(net.apply, train=True, groups=2)
    again = jax.jit(trained)({"params": params}, images)
    np.testing.assert_allclose(again, result, atol=1e-5)  # no row sees another


@pytest.mark.parametrize("on_cpu", [True, False])
@pytest.mark.parametrize("shape", [(2, 9, 5, 3), (3, 17, 8, 4), (1, 1, 2, 4)])
def test_depthwise_and_its_gradients_are_those_of_the_definition(
    shape, on_cpu, monkeypatch
):
    monkeypatch.setattr(cpu.sharding, "on_cpu", lambda: on_cpu)
    rng = np.random.default_rng(2)
    x = rng.normal(size=shape).astype(np.float32)
    kernel = rng.normal(size=(7, 7, 1, shape[-1])).astype(np.float32)
    slope = rng.normal(size=shape).astype(np.float32)
    found, backward = jax.vjp(jax.jit(cpu.depthwise), x, kernel)
    np.testing.assert_allclose(
        found, np_depthwise(x.astype(np.float64), kernel), rtol=1e-4, atol=1e-4
    )
    to_x, to_kernel = backward(slope)
    turned = kernel[::-1, ::-1]
    want = np_depthwise(slope.astype(np.float64), turned)
    np.testing.assert_allclose(to_x, want, rtol=1e-4, atol=1e-4)
    padded = np.pad(x.astype(np.float64), ((0, 0), (3, 3), (3, 3), (0, 0)))
    for i, j in np.ndindex(7, 7):
        window = padded[:, i : i + shape[1], j : j + shape[2]]
        own = (window * slope).sum(axis=(0, 1, 2))
        np.testing.assert_allclose(to_kernel[i, j, 0], own, rtol=1e-3, atol=1e-3)


def test_branches_are_dropped_by_row_and_weighed_up():
    block = convnext.Block(grn=False, layer_scale=1.0, drop=0.25, dtype=jnp.float32)
    x = np.random.default_rng(0).normal(size=(64, 3, 3, 4)).astype(np.float32)
    variables = block.init(jax.random.key(0), x, None)
    whole = block.apply(variables, x, None) - x
    found = block.apply(variables, x, jax.random.key(1)) - x
    kept = np.abs(found).max(axis=(1, 2, 3)) > 0
    assert 0 < kept.sum() < 64
    np.testing.assert_allclose(found[kept], whole[kept] / 0.75, rtol=1e-4, atol=1e-6)
    # The first block of a network drops none, the last one its whole share.
    net = convnext.convnext(**SMALL, drop_path=0.5, layer_scale=1.0)
    images = np.ones((2, 8, 8, 3), np.float32)
    variables = net.init(jax.random.key(0), images)
    rows = [net.apply(variables, images, key=jax.random.key(i)) for i in range(8)]
    assert len({np.asarray(row).tobytes() for row in rows}) > 1


def test_bfloat16_computes_in_bfloat16_and_keeps_float32():
    def run(net, params, images):
        return jax.jit(net.apply)({"params": params}, images)

    twins.check_bfloat16_network(*made("v1"), run)
