"""MIR against float64 twins of its step."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from helpers import interpreted, tiny
from jaxcl import core
from jaxcl.methods import mir, online

OLD = [0, 1, 0, 1, 1, 0, 0, 1, 3, 2]  # of the memory; the last two are of task 1


# The twin: numpy in float64. Parameters are [layer, head's weight, head's bias].


def raised(params, new, label, old, old_label, *, virtual="network", lr=tiny.LR):
    """By how much a step on the new rows raises the loss of old ones."""
    ahead = tiny.descended(params, tiny.slope(params, new, label), lr)
    if virtual == "head":
        ahead[0] = params[0]
    return tiny.row_losses(ahead, old, old_label) - tiny.row_losses(
        params, old, old_label
    )


# seed, options of the method, rows of the memory, how many may be replayed, the size,
# options of config.replay; what is not to be replayed is at the end.
CASES = {
    "past": (3, {"candidates": 8}, OLD, 8, 3, {}),
    "all_head": (
        2,
        {"candidates": 10, "replay_from": "all", "virtual": "head"},
        OLD,
        10,
        4,
        {},
    ),
    "other_classes_augmented_still": (
        5,
        {"candidates": 8, "replay_from": "other_classes", "moves_statistics": False},
        OLD,
        8,
        3,
        {"augment": "replay"},
    ),
    # Each of two rows is twice among the candidates, and one of them twice replayed.
    "short": (6, {"candidates": 4}, [0, 1, 2, 2], 2, 3, {}),
}


@pytest.mark.parametrize("name", CASES)
def test_a_step_equals_its_twin(name):
    seed, options, labels, allowed, size, replay = CASES[name]
    method = mir.make(tiny.make_parts(size=size, **replay), **options)
    state, batch = tiny.start(seed, labels), tiny.incoming(seed)
    new, label = tiny.raw(batch["image"]), np.array(tiny.NEW)
    old = tiny.raw(state.extra.memory.items["image"])[:allowed]
    old_label = np.array(labels[:allowed])
    params, virtual = tiny.arrays(state.params), options.get("virtual", "network")

    scores = raised(params, new, label, old, old_label, virtual=virtual)
    order = np.argsort(-scores)
    if size < len(scores):  # the choice is not a matter of rounding
        assert scores[order[size - 1]] - scores[order[size]] > 1e-3
    best = order[:size]
    count = len(best)  # that exist; the rest of the draw repeats them
    best = best[np.arange(size) % count]
    replayed = tiny.augmented(old[best]) if "augment" in replay else old[best]
    grads = tiny.slope(params, new, label)
    more = tiny.slope(params, replayed, old_label[best], count)
    expected = tiny.descended(tiny.descended(params, grads), more)

    after, metrics = interpreted.jit(method.step)(core.copy(state), batch)
    for one, other in zip(tiny.arrays(after.params), expected, strict=True):
        np.testing.assert_allclose(one, other, rtol=2e-4, atol=2e-5)
    value = tiny.row_losses(params, new, label).mean()
    value += tiny.row_losses(params, replayed, old_label[best])[:count].mean()
    np.testing.assert_allclose(metrics["loss"], value, rtol=1e-5)
    stats = tiny.after_pass(tiny.running(state), params[0], new)
    if options.get("moves_statistics", True):
        stats = tiny.after_pass(stats, params[0], old)  # all are candidates
    stats = tiny.after_pass(stats, params[0], replayed)
    for one, other in zip(tiny.running(after), stats, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-4)


@pytest.mark.parametrize(("count", "best"), [(4, [3, 0, 2]), (2, [0, 1]), (0, [])])
def test_rows_that_do_not_exist_are_not_picked(count, best):
    """They repeat rows that do, and so have as high a score."""
    scores, mask = jnp.array([2.0, 1.0, 1.5, 3.0, 9.0]), jnp.arange(5) < count
    images = jnp.asarray(tiny.pixels(0, 5))
    items = {"image": images, "label": jnp.arange(5)}
    pool = online.Rows(None, None, mask, images, items, jnp.arange(10, 15))
    parts = tiny.make_parts(size=3)
    found = mir.pick_highest(parts, jax.random.key(0), scores, pool)
    assert found.mask.tolist() == [i < len(best) for i in range(3)]
    assert found.slots[: len(best)].tolist() == [10 + i for i in best]
    assert found.label[: len(best)].tolist() == best


@pytest.mark.parametrize("labels", [[], [2, 2, 3]])
def test_nothing_to_replay_is_plain_descent(labels):
    """An empty memory, and one of the present task alone."""
    method = mir.make(tiny.make_parts(size=3))
    tiny.check_descent(method, tiny.start(7, labels), tiny.incoming(7))
