"""Optimisers against hand-written loops, schedules against their formulas."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxcl import core, optim
from jaxcl.config import recipe

LRS = [0.5, 0.3, 2.0, 0.01]  # small and large: LARS clips in some steps only


def problem():
    """Parameters with a zero tensor, biases, a scalar; a zero gradient once."""
    rng = np.random.default_rng(0)
    params = {
        "kernel": rng.normal(size=(3, 2)),
        "small": 1e-3 * rng.normal(size=(2, 2, 2)),
        "zero": np.zeros((2, 2)),
        "bias": rng.normal(size=3),
        "zero_bias": np.zeros(2),
        "scalar": np.array(0.7),
    }
    grads = [
        {k: np.asarray(rng.normal(size=v.shape)) for k, v in params.items()}
        for _ in LRS
    ]
    grads[1]["kernel"] = np.zeros((3, 2))
    grads[2]["bias"] = np.zeros(3)
    return params, grads


def run(tx, params, grads):
    """Parameters after every step, in float64, lr traced."""
    with jax.enable_x64(True):
        params = jax.tree.map(jnp.asarray, params)
        state = core.new_state(jax.random.key(0), params, {}, tx, ())
        step = jax.jit(lambda s, g, lr: core.apply_gradients(s, g, tx, lr))
        result = []
        for g, lr in zip(grads, LRS, strict=True):
            state = step(state, jax.tree.map(jnp.asarray, g), jnp.asarray(lr))
            result.append(jax.device_get(state.params))
        assert step._cache_size() == 1
    return result


def check(tx, twin):
    """Compares `tx` with twin(w, g, lr, memory) -> step, tensor by tensor."""
    params, grads = problem()
    result = run(tx, params, grads)
    for name, w in params.items():
        memory = {}
        for t, lr in enumerate(LRS):
            w = w - lr * twin(w, grads[t][name], lr, memory)
            np.testing.assert_allclose(
                result[t][name], w, rtol=1e-10, err_msg=f"{name} after step {t}"
            )


def momentum_twin(g, memory, m, nesterov):
    memory["buf"] = g if "buf" not in memory else m * memory["buf"] + g
    return g + m * memory["buf"] if nesterov else memory["buf"]


@pytest.mark.parametrize("exclude_1d", [False, True])
@pytest.mark.parametrize("momentum,nesterov", [(0.0, False), (0.9, False), (0.8, True)])
def test_sgd_is_torchs(momentum, nesterov, exclude_1d):
    def twin(w, g, lr, memory):
        wd = 0.0 if exclude_1d and w.ndim <= 1 else 0.1
        return momentum_twin(g + wd * w, memory, momentum, nesterov)

    tx = optim.sgd(
        momentum=momentum, nesterov=nesterov, weight_decay=0.1, exclude_1d=exclude_1d
    )
    check(tx, twin)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"clip": False},
        {"exclude_1d": False, "weight_decay": 0.1, "nesterov": True},
        {"eta": 5.0, "weight_decay": 0.0, "momentum": 0.0, "eps": 0.5},
    ],
)
def test_lars_follows_the_released_code(options):
    eta, wd = options.get("eta", 0.02), options.get("weight_decay", 1e-4)
    eps = options.get("eps", 1e-8)
    clipped = set()

    def twin(w, g, lr, memory):
        w_norm, g_norm = math.sqrt(np.sum(w**2)), math.sqrt(np.sum(g**2))
        skip = options.get("exclude_1d", True) and w.ndim <= 1
        if not skip and w_norm > 0 and g_norm > 0:
            r = eta * w_norm / (g_norm + wd * w_norm + eps)
            if options.get("clip", True):
                clipped.add(r > lr)
                r = min(r / lr, 1.0)
            g = r * (g + wd * w)
        m, nesterov = options.get("momentum", 0.9), options.get("nesterov", False)
        return momentum_twin(g, memory, m, nesterov)

    check(optim.lars(**options), twin)
    assert options.get("clip", True) is False or True in clipped


@pytest.mark.parametrize("exclude_1d", [False, True])
@pytest.mark.parametrize("decoupled", [False, True])
def test_adam_and_adamw(decoupled, exclude_1d):
    def twin(w, g, lr, memory):
        wd = 0.0 if exclude_1d and w.ndim <= 1 else 0.1
        if not decoupled:
            g = g + wd * w
        t = memory["t"] = memory.get("t", 0) + 1
        memory["m"] = 0.8 * memory.get("m", 0.0) + 0.2 * g
        memory["v"] = 0.95 * memory.get("v", 0.0) + 0.05 * g**2
        m, v = memory["m"] / (1 - 0.8**t), memory["v"] / (1 - 0.95**t)
        direction = m / (np.sqrt(v) + 1e-3)
        return direction + wd * w if decoupled else direction

    tx = optim.adam(
        b1=0.8,
        b2=0.95,
        eps=1e-3,
        weight_decay=0.1,
        decoupled=decoupled,
        exclude_1d=exclude_1d,
    )
    check(tx, twin)


def at_steps(schedule, steps):
    """Schedule at every step of a task, with progress as the loop computes it."""
    progress = jnp.arange(steps, dtype=jnp.int32) / jnp.int32(steps)
    return np.asarray(jax.jit(jax.vmap(schedule))(progress))


def warmup_cosine_twin(e, base, epochs, warmup, start=0.003, end=0.0):
    if e < warmup:
        return start + (e * (base - start) / (warmup - 1) if warmup > 1 else 0.0)
    turn = math.pi * (e - warmup) / (epochs - warmup)
    return end + (base - end) * (1 + math.cos(turn)) / 2


@pytest.mark.parametrize(
    "epochs,warmup,steps_per_epoch",
    [(500, 10, 39), (500, 10, 7), (200, 10, 3), (100, 2, 13), (7, 1, 11), (7, 0, 3)],
)
def test_warmup_cosine_steps_once_an_epoch(epochs, warmup, steps_per_epoch):
    schedule = optim.warmup_cosine(0.6, epochs=epochs, warmup_epochs=warmup, end=0.01)
    rates = at_steps(schedule, epochs * steps_per_epoch)
    expected = [
        warmup_cosine_twin(i // steps_per_epoch, 0.6, epochs, warmup, end=0.01)
        for i in range(epochs * steps_per_epoch)
    ]
    np.testing.assert_allclose(rates, expected, rtol=1e-4, atol=1e-7)
    # The step to a new rate is at the first step of the epoch, despite rounding.
    where = np.flatnonzero(np.diff(rates)) + 1
    assert np.all(where % steps_per_epoch == 0)
    by_hand = {0: 0.003 if warmup else 0.6, warmup: 0.6, max(warmup - 1, 0): 0.6}
    if warmup != 1:
        for e, rate in by_hand.items():
            assert rates[e * steps_per_epoch] == pytest.approx(rate)


def test_warmup_cosine_at_fractions_of_an_epoch():
    schedule = optim.warmup_cosine(0.6, epochs=20, warmup_epochs=5, per_epoch=False)
    rates = at_steps(schedule, 2000)
    for i in (0, 150, 399, 500, 777, 1999):
        expected = warmup_cosine_twin(i / 100, 0.6, 20, 5)
        assert rates[i] == pytest.approx(expected, rel=1e-4, abs=1e-7)
    # Never above base, between the last epoch of the warm-up and the cosine too.
    np.testing.assert_allclose(rates[400:500], 0.6, rtol=1e-6)
    one = optim.warmup_cosine(0.6, epochs=4, warmup_epochs=1, per_epoch=False)
    assert one(0.125) == pytest.approx((0.003 + 0.6) / 2)


@pytest.mark.parametrize(
    ("peak", "start"), [(5e-4, 5e-5), (0.03, 0.003), (0.6, 0.003), (0.0, 0.0)]
)
def test_a_warm_up_rises_from_below_any_peak(peak, start):
    rates = at_steps(optim.warmup_cosine(peak, epochs=20, warmup_epochs=5), 20)
    np.testing.assert_allclose(rates[:5], np.linspace(start, peak, 5), rtol=1e-5)
    told = optim.warmup_cosine(peak, epochs=20, warmup_epochs=5, start=1.0)
    assert at_steps(told, 20)[0] == 1.0


def test_cosine_has_no_warm_up():
    rates = at_steps(optim.cosine(0.4, epochs=8, end=0.1), 16)
    for i in range(16):
        expected = 0.1 + 0.3 * (1 + math.cos(math.pi * (i // 2) / 8)) / 2
        assert rates[i] == pytest.approx(expected)
    smooth = optim.cosine(0.4, epochs=8, per_epoch=False)
    assert smooth(0.3) == pytest.approx(0.4 * (1 + math.cos(0.3 * math.pi)) / 2)


def test_step_decay_and_constant():
    rates = at_steps(optim.step_decay(3.0, epochs=100, milestones=(60, 80)), 700)
    expected = [3.0 * 0.1 ** ((i >= 420) + (i >= 560)) for i in range(700)]
    np.testing.assert_allclose(rates, expected, rtol=1e-6)
    halves = optim.step_decay(1.0, epochs=4, milestones=[1, 2, 3], factor=0.5)
    np.testing.assert_allclose(at_steps(halves, 4), [1, 0.5, 0.25, 0.125])
    np.testing.assert_allclose(at_steps(optim.constant(0.3), 5), [0.3] * 5, rtol=1e-6)


def test_momentum_schedule():
    for s in (0.0, 0.25, 0.5, 0.99):
        expected = 1.0 - 0.01 * (math.cos(math.pi * s) + 1) / 2
        value = jax.jit(lambda p: optim.momentum_schedule(p, end=1.0))(s)
        assert value == pytest.approx(expected, abs=1e-7)
    assert optim.momentum_schedule(0.0) == pytest.approx(0.99)
    assert optim.momentum_schedule(1.0) == pytest.approx(0.999)


def test_ema_of_trees():
    old = {"a": jnp.array([1.0, 2.0]), "b": jnp.array(4.0, jnp.bfloat16)}
    new = {"a": jnp.array([3.0, -2.0]), "b": jnp.array(8.0)}  # of the type of the old
    mixed = jax.jit(optim.ema)(old, new, jnp.float32(0.75))
    np.testing.assert_allclose(mixed["a"], [1.5, 1.0])
    assert mixed["b"] == 5.0 and mixed["b"].dtype == jnp.bfloat16
    for decay, expected in ((1.0, old), (0.0, new)):
        jax.tree.map(
            np.testing.assert_array_equal, optim.ema(old, new, decay), expected
        )
    with pytest.raises(ValueError):
        optim.ema(old, {"a": new["a"]}, 0.5)


def ramped_cosine_twin(step, per_epoch, epochs, warmup, base, start=0.01, floor=1e-3):
    """Epochs e from 1 and steps from 0 within them, as the released code counts."""

    def curve(e):
        low = base * floor
        return low + (base - low) * (1 + math.cos(math.pi * e / epochs)) / 2

    e, within = step // per_epoch + 1, step % per_epoch
    if e > warmup:
        return curve(e)
    share = (within + (e - 1) * per_epoch) / (warmup * per_epoch)
    return start + share * (curve(warmup) - start)


@pytest.mark.parametrize("epochs,warmup", [(12, 4), (7, 0), (5, 5)])
def test_ramped_cosine(epochs, warmup):
    schedule = optim.ramped_cosine(0.8, epochs=epochs, warmup_epochs=warmup)
    expected = [
        ramped_cosine_twin(i, 9, epochs, warmup, 0.8) for i in range(epochs * 9)
    ]
    rates = at_steps(schedule, epochs * 9)
    np.testing.assert_allclose(rates, expected, rtol=1e-5, atol=1e-8)
    with pytest.raises(ValueError, match=f"warmup_epochs=13.*{epochs}"):
        optim.ramped_cosine(0.8, epochs=epochs, warmup_epochs=13)


@pytest.mark.parametrize(
    "epochs, usual, want",
    [
        (1, None, 0),
        (2, None, 1),
        (25, None, 3),
        (500, None, 10),
        ((500, 25), None, 3),  # one warm-up for all tasks: the shortest holds it
        ((4, 500), 10, 3),
        (500, 20, 20),
    ],
)
def test_a_warm_up_fits_into_every_task(epochs, usual, want):
    assert recipe.warmup_epochs(epochs, usual) == want
