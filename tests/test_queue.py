"""Queues against a Python list, and networks in a chain."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxcl import core
from jaxcl.memory import queue
from jaxcl.nets import chain, layers, mlp


@pytest.mark.parametrize("size, count", [(12, 4), (10, 4), (4, 4)])
def test_enqueue_against_a_list(size, count):
    rng = np.random.default_rng(0)
    banks = rng.normal(size=(2, size, 3)).astype(np.float32)
    twin, place = banks.copy(), 0
    state, pointer = jnp.asarray(banks), jnp.int32(0)
    step = jax.jit(lambda q, p, r, a: queue.enqueue(q, p, r, active=a))
    for turn in range(9):
        rows = rng.normal(size=(2, count, 3)).astype(np.float32)
        active = turn % 4 != 2
        state, pointer = step(state, pointer, rows, active)
        if active:
            for i in range(count):
                twin[:, (place + i) % size] = rows[:, i]
            place = (place + count) % size
        np.testing.assert_array_equal(state, twin)
        assert int(pointer) == place


def test_batches_of_two_sizes_overwrite_the_oldest_rows():
    bank, pointer = jnp.zeros((1, 8, 1)), jnp.int32(0)
    ends = np.cumsum([2, 4, 4])
    for first, end in zip([0, *ends], ends, strict=False):
        rows = 1.0 + jnp.arange(first, end)[None, :, None]
        bank, pointer = queue.enqueue(bank, pointer, rows, aligned=False)
    np.testing.assert_array_equal(np.sort(bank.ravel()), np.arange(3, 11))
    assert int(pointer) == 10 % 8


def test_a_batch_larger_than_the_queue_is_refused():
    with pytest.raises(ValueError, match="queue_size=3.*4 rows"):
        queue.enqueue(jnp.zeros((2, 3, 5)), jnp.int32(0), jnp.zeros((2, 4, 5)))


def test_a_chain_is_its_nets_one_after_another():
    nets = {
        "first": mlp.MLP(features=(6, 5), batch_norm=True),
        "second": layers.BatchNorm(),
    }
    x = jax.random.normal(jax.random.key(1), (8, 4))
    both = chain.Chain(nets)
    params, stats = both.init(jax.random.key(0), x)
    outputs, after = both(params, stats, x, train=True, groups=2)
    expected, new = x, {}
    for name, net in nets.items():
        variables = {"params": params[name], "batch_stats": stats[name]}
        expected, updated = net.apply(
            variables, expected, train=True, groups=2, mutable=["batch_stats"]
        )
        new[name] = updated["batch_stats"]
    np.testing.assert_array_equal(outputs, expected)
    jax.tree.map(np.testing.assert_array_equal, after, new)
    moved = jax.tree.map(lambda a, b: bool((a != b).any()), stats, after)
    assert all(jax.tree.leaves(moved))
    _, still = both(params, stats, x, train=False)
    jax.tree.map(np.testing.assert_array_equal, still, stats)


def test_a_chain_embeds_with_its_encoder_and_projects_with_all():
    nets = {
        "encoder": mlp.MLP(features=(6, 5), batch_norm=True),
        "projector": mlp.MLP(features=(3, 2), batch_norm=True),
    }
    net, x = chain.Chain(nets), jax.random.normal(jax.random.key(1), (8, 4))
    params, stats = net.init(jax.random.key(0), x)
    _, stats = net(params, stats, x, train=True)  # running ones, not those of a batch
    state = core.new_state(jax.random.key(2), params, stats, optax.sgd(0.1), ())
    rows = x
    for name, ours in (("encoder", net.embed), ("projector", net.project)):
        variables = {"params": params[name], "batch_stats": stats[name]}
        rows = nets[name].apply(variables, rows, train=False)
        np.testing.assert_array_equal(ours(state, x), rows)
