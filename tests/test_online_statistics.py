"""Statistics of the memory: against one pass by hand, drawn, and kept from training."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from helpers import online_toy as toy
from jaxcl import core
from jaxcl.methods import er, er_aml, icarl, online


def judged(method, state):
    return method.eval_state(core.copy(state))


def of_all(net, state):
    """What a pass over the whole memory says of its batch."""
    parts = toy.parts()
    images = parts.eval_transform(state.extra.memory.items["image"])

    def after(stats):
        return net(state.params, stats, images, train=True)[1]

    # Linear in the old ones, of which a pass leaves nine tenths.
    blank = jax.tree.map(jnp.zeros_like, state.stats)
    return jax.tree.map(lambda x: x / 0.1, after(blank))


@pytest.mark.parametrize("augment", ["none", "all"])
@pytest.mark.parametrize("make", [er.make, er_aml.make])
def test_draws_of_all_rows_are_the_statistics_of_all(make, augment):
    parts = toy.parts(size=12, statistics="memory", augment=augment)
    method = make(parts)
    state = toy.second_task(method)
    assert state.extra.memory.filled.all()
    found = judged(method, state)
    old = 0.9**100
    expected = jax.tree.map(
        lambda new, kept: (1 - old) * new + old * kept,
        of_all(
            online.build_network(parts, "linear" if make is er.make else "cosine"),
            state,
        ),
        state.stats,
    )
    chex.assert_trees_all_close(found.stats, expected, rtol=1e-3, atol=1e-5)
    far = jax.tree.map(lambda x, y: np.abs(x - y).max(), found.stats, state.stats)
    assert max(jax.tree.leaves(far)) > 0.01
    # Nothing else differs.
    chex.assert_trees_all_equal(
        found.replace(stats=state.stats, key=None), state.replace(key=None)
    )


def test_few_rows_are_drawn_anew_for_each_pass():
    method = er.make(toy.parts(size=3, statistics="memory"))
    state = toy.second_task(method)
    whole = of_all(online.build_network(toy.parts(), "linear"), state)
    first, again = judged(method, state), judged(method, state)
    chex.assert_trees_all_equal(first.stats, again.stats)
    later = judged(method, state.replace(step=state.step + 1))
    means = [
        np.concatenate([np.ravel(leaf["mean"]) for leaf in _moments(stats)])
        for stats in (first.stats, later.stats, whole)
    ]
    assert np.abs(means[0] - means[1]).max() > 1e-4
    # Of 3 of 12 rows a pass; the last twenty or so count.
    assert np.corrcoef(means[0], means[2])[0, 1] > 0.95


def _moments(tree):
    if "mean" in tree:
        return [tree]
    return [leaf for value in tree.values() for leaf in _moments(value)]


def test_training_and_running_statistics_are_as_without():
    states = []
    for statistics in ("running", "memory"):
        method = er.make(toy.parts(statistics=statistics))
        state, _ = toy.step(method, toy.second_task(method), toy.FIRST)
        states.append(state.replace(key=None))
    chex.assert_trees_all_equal(*states)
    method = er.make(toy.parts())
    assert method.eval_state(states[0]) is states[0]


def test_class_means_see_them():
    method = icarl.make(toy.parts(size=12, statistics="memory"))
    state = toy.second_task(method)
    plain = icarl.make(toy.parts(size=12))
    found = judged(method, state)
    expected = plain.eval_state(state.replace(stats=found.stats)).extra.means
    chex.assert_trees_all_close(found.extra.means, expected, rtol=1e-5, atol=1e-6)
    other = plain.eval_state(state).extra.means
    assert np.abs(other.rows - expected.rows).max() > 1e-3
