"""GDumb: what it stores, the fit against its equation, rates, batches, mixtures."""

import collections
import functools
import itertools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from helpers import forward, interpreted, key_uses
from helpers import online_toy as toy
from jaxcl import core, sharding
from jaxcl.memory import buffer
from jaxcl.methods import gdumb, online

ROWS = toy.batch(0, [0, 1, 1, 0, 2, 1])


def parts(**replay):
    return toy.parts(policy="greedy_balanced", **replay)


@functools.cache
def stored():
    """A state whose memory holds ROWS."""
    method = gdumb.make(parts())
    return toy.step(method, toy.fresh(method), ROWS)[0]


def test_rates_are_those_of_the_released_schedule():
    def released(passes, high, low):
        """PyTorch's CosineAnnealingWarmRestarts(T_0=1, T_mult=2), as it is stepped."""
        found, done, length = [high * 0.1, high], 0, 1
        for _ in range(2, passes):
            done += 1
            if done >= length:
                done, length = 0, length * 2
            share = (1 + np.cos(np.pi * done / length)) / 2
            found.append(low + (high - low) * share)
        return found

    found = [gdumb.pass_learning_rate(i, 0.05, 0.0005) for i in range(130)]
    np.testing.assert_allclose(found, released(130, 0.05, 0.0005), rtol=1e-12)
    np.testing.assert_allclose(found[:4], [0.005, 0.05, 0.05, 0.02525])


@pytest.mark.parametrize("count", [1, 3, 4, 7])
def test_a_pass_counts_each_stored_row_once(count):
    slots = np.random.default_rng(0).permutation(9)[:count]
    filled = np.isin(np.arange(9), slots)
    items = {"image": jnp.arange(9), "label": 10 * jnp.arange(9)}
    memory = buffer.Buffer(items, jnp.array(filled), jnp.int32(0))
    orders = set()
    for seed in range(6):
        order, rows = gdumb.shuffle(jax.random.key(seed), memory), []
        for number in range(-(-count // 4)):
            image, label, mask = gdumb.batch_of(order, memory, number, 4)
            np.testing.assert_array_equal(label, 10 * image)
            assert set(np.asarray(image)) <= set(slots)  # what fills up exists, too
            rows += np.asarray(image)[np.asarray(mask)].tolist()
        assert sorted(rows) == sorted(slots)
        orders.add(tuple(rows))
    assert (len(orders) > 1) == (count > 1)


def test_each_pass_has_an_order_of_its_own():
    slots = {"image": jnp.arange(9), "label": jnp.arange(9)}
    memory = buffer.Buffer(slots, jnp.ones(9, bool), jnp.int32(9))
    key = jax.random.key(0)
    orders = [gdumb._order_pass(key, memory, np.int32(n)) for n in range(3)]
    assert len({tuple(np.asarray(order).tolist()) for order in orders}) == 3


def test_no_two_draws_of_a_fit_share_a_key():
    """Orders of two passes, two batches of each."""
    made = parts(augment="replay")
    net = online.build_network(made, "linear")
    fit = gdumb._Fit(made, net, optax.identity(), 4, 0.5, 1.0)
    memory = buffer.Buffer(dict(ROWS), jnp.ones(6, bool), jnp.int32(6))
    key, order, lr = jax.random.key(0), jnp.arange(6), np.float32(0.1)
    descend = functools.partial(gdumb._descend_span, fit)
    uses = collections.Counter()
    with forward.cheap_traces():
        state = jax.eval_shape(
            functools.partial(gdumb._start_network, fit), key, ROWS["image"]
        )
        for number in range(2):
            one = key, memory, np.int32(number)
            calls = [(gdumb._order_pass, one)]
            for first in range(2):
                span = np.int32([number, first, first + 1])
                calls.append((descend, (state, memory, order, key, *span, lr)))
            for function, given in calls:
                leaves = [
                    key_uses.WHOLE if isinstance(x, jax.ShapeDtypeStruct) else x
                    for x in jax.tree.leaves(given)
                ]
                uses += key_uses.of(jax.make_jaxpr(function)(*given), leaves)
    assert sum(kind == "draw" for _, kind in uses) >= 2 + 4 * 6
    assert not key_uses.shared(uses)


def test_mixed_images_have_a_box_of_another():
    images = jnp.broadcast_to(jnp.arange(5.0)[:, None, None, None], (5, 8, 6, 1))
    label, shares = 7 + jnp.arange(5), []
    mix = jax.jit(functools.partial(gdumb.cut_mix, probability=0.5, alpha=1.0))
    for seed in range(60):
        found, other, share = mix(jax.random.key(seed), images, label)
        found, partner = np.asarray(found)[..., 0], np.asarray(other) - 7
        assert sorted(partner) == list(range(5))
        moved = next((i for i in range(5) if partner[i] != i), None)
        if moved is None:
            continue
        box = found[moved] != moved
        np.testing.assert_allclose(share, 1 - box.mean(), atol=1e-6)
        for i in range(5):
            np.testing.assert_array_equal(found[i], np.where(box, partner[i], i))
        high, wide = box.any(axis=1), box.any(axis=0)
        np.testing.assert_array_equal(box, high[:, None] & wide)
        for side in (high, wide):  # one piece
            assert np.abs(np.diff(np.pad(side, 1).astype(int))).sum() in (0, 2)
        shares.append(float(share))
    assert 0.2 < np.mean(np.array(shares) == 1) < 0.8


def test_a_step_stores_and_trains_nothing():
    method = gdumb.make(parts())
    state = toy.fresh(method)
    new, metrics = toy.step(method, state, ROWS)
    chex.assert_trees_all_equal(new.params, state.params)
    chex.assert_trees_all_equal(new.stats, state.stats)
    assert {name: float(x) for name, x in metrics.items()} == {"loss": 0, "lr": 0}
    assert int(new.step) == 1
    np.testing.assert_array_equal(new.extra.memory.items["label"][:6], ROWS["label"])
    assert new.extra.seen.tolist() == [True, True, True, False, False]


def fitted(state, replay=None, **options):
    return gdumb.make(parts(**(replay or {})), **options).eval_state(state)


@pytest.mark.parametrize(
    "size,mixing,schedule",
    [
        (6, False, "restarts"),
        (4, True, "restarts"),
        (4, False, "restarts"),
        (6, False, "constant"),
    ],
)
def test_the_fit_is_the_equation(size, mixing, schedule, monkeypatch):
    """Two passes: clipping, decay, momentum, a tenth of the rate first.

    Rows that fill up the last batch of a pass move the statistics alone.
    """
    seen, label = [], ROWS["label"]
    shares = [(0.3, label), (0.7, 4 - label)] if mixing else [(1.0, label)]
    if mixing:
        monkeypatch.setattr(
            gdumb,
            "cut_mix",
            lambda key, images, label, **_: (1 - images, 4 - label, jnp.float32(0.3)),
        )
    monkeypatch.setattr(
        gdumb, "shuffle", lambda key, memory: jnp.arange(len(memory.filled))
    )
    options = {
        "passes": 2,
        "batch_size": size,
        "lr": 0.2,
        "momentum": 0.8,
        "weight_decay": 0.1,
        "clip": 0.5,
        "cutmix": float(mixing),
        "schedule": schedule,
    }
    state = stored()
    key = jax.random.fold_in(core.step_key(state), gdumb._FIT)
    net = online.build_network(parts(), "linear")
    images = parts().eval_transform(ROWS["image"])
    params, stats = jax.jit(net.init)(key, images[:1])
    images = 1 - images if mixing else images
    buf = jax.tree.map(jnp.zeros_like, params)
    step = interpreted.jit(functools.partial(toy.slope, net))
    for lr, first in itertools.product(
        (0.2 if schedule == "constant" else 0.02, 0.2), range(0, len(label), size)
    ):
        rows = np.arange(first, first + size) % len(label)
        terms = [(share, y[first : first + size]) for share, y in shares]
        (_, stats), grads = step(params, stats, images[rows], terms)
        norm = np.sqrt(sum(np.sum(np.square(g)) for g in jax.tree.leaves(grads)))
        seen.append(norm)
        scale = min(1, 0.5 / norm)
        buf = jax.tree.map(
            lambda b, g, p, s=scale: 0.8 * b + s * g + 0.1 * p, buf, grads, params
        )
        params = jax.tree.map(lambda p, b, r=lr: p - r * b, params, buf)
    assert max(seen) > 0.5  # the gradient is clipped
    judged = fitted(state, **options)
    chex.assert_trees_all_close(judged.params, params, rtol=2e-3, atol=1e-5)
    chex.assert_trees_all_close(judged.stats, stats, rtol=2e-3, atol=1e-5)


def test_the_fit_is_a_function_of_memory_and_key():
    state, options = stored(), {"passes": 3, "batch_size": 4}
    kept = core.copy(state)
    method = gdumb.make(parts(augment="replay"), **options)
    first, again = method.eval_state(state), method.eval_state(state)
    chex.assert_trees_all_equal(first.params, again.params)
    chex.assert_trees_all_equal(state, kept)  # what is judged is dropped
    chex.assert_trees_all_equal(first.extra, kept.extra)
    moved = toy.shaken(state)
    chex.assert_trees_all_equal(method.eval_state(moved).params, first.params)
    items = {**state.extra.memory.items, "label": 2 - state.extra.memory.items["label"]}
    memory = state.extra.memory._replace(items=items)
    other = state.replace(extra=state.extra._replace(memory=memory))
    for changed in (
        other,
        state.replace(key=jax.random.key(9)),
        state.replace(step=state.step + 1),
    ):
        with pytest.raises(AssertionError):
            chex.assert_trees_all_close(
                method.eval_state(changed).params, first.params, rtol=1e-3
            )
    with sharding.compile_target():
        looped = fitted(state, {"augment": "replay"}, **options)
    chex.assert_trees_all_close(looped.params, first.params, rtol=1e-3, atol=1e-4)
    plain = fitted(state, **options)  # config.replay.augment is heard
    with pytest.raises(AssertionError):
        chex.assert_trees_all_close(plain.params, first.params, rtol=1e-3)


def test_passes_are_shuffled_apart_and_batches_are_moved_apart(monkeypatch):
    orders, moves, shuffle = [], [], gdumb.shuffle

    def record(where, key):
        data = jax.random.key_data(key)
        jax.debug.callback(lambda x: where.append(tuple(x.tolist())), data)

    def shuffled(key, memory):
        record(orders, key)
        return shuffle(key, memory)

    def mixed(key, images, label, **_):
        record(moves, key)
        return images, label, jnp.float32(1)

    jax.clear_caches()  # programs of other tests record nothing
    monkeypatch.setattr(gdumb, "shuffle", shuffled)
    monkeypatch.setattr(gdumb, "cut_mix", mixed)
    jax.block_until_ready(fitted(stored(), passes=3, batch_size=4, cutmix=0.5).params)
    jax.effects_barrier()
    assert len(set(orders)) == len(orders) == 3
    assert len(set(moves)) == len(moves) == 6


def test_an_empty_memory_is_judged_as_it_is():
    method = gdumb.make(parts())
    state = toy.fresh(method)
    assert method.eval_state(state) is state
