"""Statistics of the memory: against one pass by hand, drawn, and kept from training."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from helpers import online_toy as toy
from jaxcl import core
from jaxcl.methods import er, er_aml, icarl, online
from jaxcl.methods.online import statistics as statistics_lib


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


def test_what_an_evaluation_computes_itself_has_seen_the_new_statistics():
    """Each pass draws anew; so do evaluations after other steps."""
    method = core.Method(
        init=None,
        step=None,
        embed=None,
        memory=lambda state: None,
        eval_state=lambda state: state.replace(opt_state=2 * state.stats),
    )
    judged = statistics_lib.use_memory_statistics(
        method,
        lambda params, stats, rows: (None, 0.9 * stats + 0.1 * rows),
        lambda memory, key: jax.random.uniform(key),
    )
    extra = online.step.Extra(jnp.zeros(1), jnp.zeros(1, bool))
    fresh = core.new_state(jax.random.key(0), {}, {}, optax.identity(), {})
    fresh = fresh.replace(stats=jnp.float32(5.0), extra=extra)
    found = [judged.eval_state(fresh.replace(step=jnp.int32(n))) for n in range(12)]
    np.testing.assert_allclose(
        [x.opt_state for x in found], [2 * x.stats for x in found]
    )
    stats = np.array([x.stats for x in found])
    assert len({*stats.tolist()}) == 12 and np.abs(stats - 0.5).max() < 0.3
    assert stats.std() < 0.15  # one draw has 0.29, a hundred weighted ones have 0.07


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
