"""Programs computed by NumPy, without XLA, give what XLA gives."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from helpers import interpreted


def bits(count):
    """Divisions, remainders and shifts of whole numbers, by zero and by too many."""
    lax, one = jax.lax, jnp.array([-7, 7, -7, 7, 5, -5], jnp.int32) * count
    other = jnp.array([2, 2, -3, -3, 0, 0], jnp.int32)
    return (
        [function(one, other) for function in (lax.div, lax.rem)],
        [
            function(one, jnp.abs(other) * 12)
            for function in (
                lax.shift_left,
                lax.shift_right_logical,
                lax.shift_right_arithmetic,
            )
        ],
    )


def choices(x, count):
    """Gathers and scatters within the array and beyond it."""
    at = jnp.array([3, -1, 9, 1, 3]) + count * 0
    rows = jnp.arange(30, dtype=x.dtype).reshape(5, 6)
    pair = jnp.array([0, 2, 2]), jnp.array([1, 5, 5])
    return (
        [x.at[at].get(mode=mode) for mode in ("fill", "clip")],
        x.at[at].get(mode="fill", fill_value=-2.0),
        x[jnp.minimum(at, 3)[:, None], jnp.array([[0, 5]])],
        jnp.take_along_axis(x, at[None, :4, None][0] % 6, axis=1),
        jax.vmap(lambda row, place: jax.lax.dynamic_slice(row, (place,), (2,)))(
            x, at[:4]
        ),
        [x.at[at].set(rows, mode=mode)[:3] for mode in ("drop", "clip")],
        x.at[pair].add(jnp.array([1.0, 2.0, 4.0])),
        x.at[pair].multiply(3.0),
        (x.at[:, pair[1]].max(0.1), x.at[pair].min(-0.1)),
        jax.vmap(lambda row, place: row.at[place].set(7.0))(x, at[:4]),
        jax.ops.segment_sum(x, at[:4], num_segments=4),
    )


def orders(x, count):
    """Sorts and the largest, with ties and with what is no number."""
    whole = jnp.round(x[:, :5] * 2)
    gaps = jnp.where(x > 1, jnp.nan, x)
    return (
        jnp.argsort(whole, axis=0),
        jnp.argsort(gaps, axis=1, descending=True),
        jax.lax.sort((whole[0], whole[1], x[0, :5]), num_keys=2),
        jax.lax.top_k(whole, 3),
        jax.lax.top_k(gaps, 2)[1],
        jax.lax.cumlogsumexp(x, axis=1),
        jax.scipy.special.erfinv(jnp.tanh(x)),
    )


def windows(x, count):
    """Convolutions of all kinds."""
    images, kernel = (
        x.reshape(1, 2, 4, 3),
        jnp.cos(jnp.arange(24.0).reshape(4, 2, 3, 1)),
    )
    images = jnp.concatenate([images, jnp.sin(images)])

    def convolve(images, kernel, **options):
        options = {"window_strides": (1, 1), "padding": "SAME", **options}
        return jax.lax.conv_general_dilated(images, kernel, **options)

    layout = {"dimension_numbers": ("NHWC", "HWIO", "NHWC")}
    turned = images.transpose(0, 2, 3, 1), kernel.transpose(2, 3, 1, 0)
    return (
        convolve(images, kernel, window_strides=(2, 1), padding=((2, 0), (0, 1))),
        convolve(images, kernel[:, :1], feature_group_count=2, rhs_dilation=(1, 2)),
        convolve(
            images,
            kernel,
            batch_group_count=2,
            lhs_dilation=(2, 3),
            padding=((1, 2), (-1, 3)),
        ),
        convolve(*turned, **layout),
    )


def draws(key, x):
    """Random numbers of every width, and keys that are moved about."""
    many = jax.random.split(key, (2, 3))
    keys = jnp.where(x[:2, :3] > 0, many, many[::-1])
    return (
        [jax.random.bits(key, (2, 3), f"uint{width}") for width in (8, 16, 32)],
        jax.vmap(jax.vmap(lambda key: jax.random.uniform(key, (4,))))(keys),
        jax.random.key_data(jax.vmap(jax.random.fold_in)(many[1], jnp.arange(3))),
        jax.random.key_data(jnp.concatenate([many[0], keys[1]])[::-2]),
        jax.random.key_data(jax.random.key(jnp.int32(-5))),
        jax.random.permutation(key, 7),
        jax.random.truncated_normal(key, -1.0, 2.0, (5,)),
    )


def program(key, x, count):
    """Loops, branches, draws, slices and reductions of x f32[4,6]."""

    def turn(carry, row):
        return carry * 0.5 + row, (carry.sum(), jnp.sort(row)[::-1])

    carry, rows = jax.lax.scan(turn, x[0], x, reverse=True)
    start = 0, jax.lax.stop_gradient(x)  # no gradient enters a loop of any length
    _, doubled = jax.lax.while_loop(
        lambda pair: pair[0] < count, lambda pair: (pair[0] + 1, pair[1] * 2), start
    )
    # Each row has another number of turns.
    halved = jax.vmap(
        lambda row: jax.lax.while_loop(
            lambda row: jnp.abs(row).sum() > 1, lambda row: row / 2, row
        )
    )(jax.lax.stop_gradient(x) * jnp.array([[1], [4], [0.1], [16]], x.dtype))
    branch = jax.lax.switch(count, [jnp.sin, jnp.cos, jnp.tanh], x)
    noise = jax.random.normal(key, (3, 2))
    keys = jax.random.split(key, 3)
    padded = jax.lax.pad(x, jnp.float32(0.5), ((1, 2, 1), (0, 1, 0)))
    inside = jax.lax.dynamic_slice(padded, (count, 5), (3, 4))
    return {
        "scan": (carry, rows),
        "while": (doubled, halved),
        "branch": branch,
        "noise": noise,
        "keys": jax.random.key_data(keys),
        "moved keys": [jax.random.key_data(x) for x in (keys[::-1][1:], keys[count])],
        "folded": jax.random.key_data(jax.random.fold_in(keys[2], count)),
        "rows of noise": jax.vmap(lambda key: jax.random.uniform(key, (2, 2)))(keys),
        "bytes": jax.random.bits(key, (3,), "uint8"),
        "kernel": jax.nn.initializers.lecun_normal()(key, (3, 3, 2, 4)),
        "pad": (padded, inside, padded.at[count, 1:3].set(7.0)),
        "running": (jnp.cumsum(x[::-1], axis=1), jax.lax.cummax(x, 0, reverse=True)),
        "places": (x.argmax(1), x.argmin(0), x[jnp.array([2, 0]), :3]),
        "products": (x @ x.T, jnp.einsum("ab,ac->abc", x, x), x[None] @ x[None].mT),
        "logic": (x > 0) & ~(x < -1) | jnp.isfinite(1 / (x - x)),
        "whole": (count // -2, count % 3, jnp.int8(count) << 1, bits(count)),
        "parts": (jnp.split(x, [1, 4], axis=1), jnp.stack([x, -x], 1), jnp.clip(x, -1)),
        "choices": choices(x, count),
        "orders": orders(jax.lax.stop_gradient(x), count),
        "windows": windows(x, count),
        "draws": draws(key, x),
        "logs": jax.nn.log_softmax(x) + jax.nn.gelu(x) + jax.nn.sigmoid(x),
    }


def test_a_program_and_its_gradient_are_those_of_xla():
    key, x = jax.random.key(3), np.random.default_rng(0).normal(size=(4, 6))
    given = key, x.astype(np.float32), np.int32(2)

    def check(function):
        found, want = interpreted.jit(function)(*given), jax.jit(function)(*given)
        assert jax.tree.structure(found) == jax.tree.structure(want)
        for one, other in zip(*map(jax.tree.leaves, (found, want)), strict=True):
            assert one.dtype == other.dtype
            np.testing.assert_allclose(one, other, rtol=2e-6, atol=2e-6)

    check(program)

    def loss(key, x, count):
        leaves = jax.tree.leaves(program(key, x, count))
        return sum(jnp.sum(y**2) for y in leaves if y.dtype == x.dtype)

    check(jax.grad(loss, argnums=1))


def test_options_are_fixed_and_a_trace_goes_through():
    double = interpreted.jit(lambda x, *, times: x * times, static_argnames="times")
    assert double(3.0, times=2) == 6 and double(3.0, times=4) == 12
    assert jax.grad(lambda x: double(x, times=5))(1.0) == 5


@pytest.fixture
def compiled():
    """The seconds of what XLA compiles meanwhile."""
    seconds = []

    def note(name, duration, **_):
        if name.endswith("backend_compile_duration"):
            seconds.append(duration)

    jax.monitoring.register_event_duration_secs_listener(note)
    yield seconds
    jax.monitoring.unregister_event_duration_listener(note)


def test_everything_is_computed_without_xla(compiled):
    x = np.random.default_rng(0).normal(size=(3, 17)).astype(np.float32)

    def run():
        step = jax.jit(lambda x, by: (x * by, jnp.sort(x)), donate_argnums=0)
        rows = jnp.asarray(x)
        key, given = jax.random.key(5), rows + 1
        weak, half = jnp.sin(2.0) * jnp.ones(17, jnp.bfloat16), jnp.where(x > 0, 1.0, 2)
        draws = jax.random.normal(key, (17, 3)), jax.random.key_data(key)
        result = rows.T @ rows[:, :3], step(given, 3), jax.grad(jnp.linalg.norm)(rows)
        assert given.is_deleted()
        return result, weak, half, draws

    with interpreted.everything():
        found = run()
        before = len(compiled)
    assert not before
    for one, other in zip(*map(jax.tree.leaves, (found, run())), strict=True):
        assert isinstance(one, jax.Array)
        assert (one.dtype, one.weak_type) == (other.dtype, other.weak_type)
        np.testing.assert_allclose(np.float32(one), np.float32(other), 2e-6, 2e-6)
    assert len(compiled) > before


def test_arrays_that_have_a_place_keep_it(compiled):
    mesh = jax.sharding.Mesh(jax.devices()[:2], "data")
    place = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("data"))
    with interpreted.everything():
        x = jax.device_put(np.arange(38.0, dtype=np.float32), place)
        put = jax.jit(lambda: jnp.ones(38) * 3, out_shardings=place)
        bound = jax.jit(lambda x: jax.lax.with_sharding_constraint(x, place) * 3)
        for y in (jnp.cos(x) + 5, put(), bound(np.ones(38, np.float32))):
            assert y.sharding.is_equivalent_to(place, 1)
    assert len(compiled) > 2


def test_on_the_first_device_numpy_computes_and_results_are_put_as_by_jax(compiled):
    mesh = jax.sharding.Mesh(jax.devices()[:1], "data")
    place = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("data"))
    rows = np.arange(38.0, dtype=np.float32)
    held = jax.jit(lambda x: x, out_shardings=place)

    def run():
        x, keys = (jax.device_put(y, place) for y in (rows, key[None]))
        with jax.transfer_guard("disallow"):
            return jnp.cos(x), held(x), jax.vmap(jax.random.split)(keys)

    key = jax.random.key(3)
    with interpreted.everything():
        found = run()
    assert not compiled
    for one, other in zip(found, run(), strict=True):
        assert one.committed and other.committed
        assert one.sharding.is_equivalent_to(other.sharding, one.ndim)
