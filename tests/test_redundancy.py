"""The memory of minimum redundancy, against its rule written row by row."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from helpers import redundancy_twin, twins
from jaxcl.memory import buffer, policies, redundancy


def at(*degrees):
    angles = np.deg2rad(degrees)
    return jnp.asarray(np.stack([np.cos(angles), np.sin(angles)], 1), jnp.float32)


@pytest.mark.parametrize(
    "degrees, count, gone",
    [
        ((0, 10, 90), 1, [0]),  # a tie of the pair, of which the first goes
        ((0, 10, 90, 95, 180), 2, [0, 2]),
        ((0, 10, 90, 95, 180), 0, []),
        ((30, 30, 30), 1, [0]),
    ],
)
def test_the_most_redundant_rows_go(degrees, count, gone):
    rows = at(*degrees)
    every = jnp.ones(len(rows), bool)
    got = jax.jit(redundancy.find_redundant)(rows, every, jnp.int32(count))
    np.testing.assert_array_equal(np.flatnonzero(got), gone)


@pytest.mark.parametrize(("used", "gone"), [(4, [0, 2]), (3, [3, 4])])
def test_rows_compete_if_twice_as_many_were_used_as_go(used, gone):
    """Else the oldest go: here the last two."""
    rows, filled = at(0, 5, 90, 94, 200, 0), np.arange(6) < 5
    number = np.array([5, 4, 3, 2, 1, 0], np.int32)
    used = np.arange(6) < used
    found = redundancy.find_evicted(rows, used, number, filled, np.int32(2))
    np.testing.assert_array_equal(np.flatnonzero(found), gone)


def test_stored_vectors_move_half_of_the_way_after_their_first_use():
    old, new, used = at(0, 0), 5 * at(90, 90), jnp.array([True, False])
    moved = redundancy.move_vectors(old, new, used)
    np.testing.assert_allclose(moved, at(45, 90), atol=1e-6)


@pytest.mark.parametrize("size, capacity", [(3, 8), (5, 8), (9, 8)])
def test_a_stream_against_one_row_at_a_time(size, capacity):
    """Masked rows, and memories of which none, few and most rows were drawn."""
    rng = np.random.default_rng(size)
    scalar = np.zeros((), np.int32)
    example = {"feature": np.zeros(4, np.float32), "used": scalar > 0, "number": scalar}
    memory = buffer.create(example, capacity)
    offer = jax.jit(policies.min_redundancy)
    number, rules = 0, set()
    for turn in range(25):
        mask = rng.random(size) < 0.8
        items = {
            "feature": twins.unit(rng.normal(size=(size, 4))).astype(np.float32),
            "used": np.zeros(size, bool),
            "number": np.arange(number, number + size, dtype=np.int32),
        }
        number += size
        held = jax.tree.map(np.asarray, memory)
        filled = held.filled
        excess = int(filled.sum() + mask.sum()) - capacity
        gone = set()
        if excess > 0:
            count = min(excess, int(filled.sum()))
            columns = (held.items[name] for name in ("feature", "used", "number"))
            gone = redundancy_twin.removed(*columns, filled, count)
            used = int((filled & held.items["used"]).sum())
            rules.add("redundant" if used >= 2 * count else "oldest")
        want = redundancy_twin.slots(filled, gone, mask)
        slots = offer(memory, mask)
        np.testing.assert_array_equal(slots, want)
        memory = buffer.write(memory, slots, items, mask)
        drawn = rng.random(capacity) < (turn % 3) / 2
        used = jnp.asarray(drawn) & memory.filled | memory.items["used"]
        memory = memory._replace(items=memory.items | {"used": used})
    assert rules == {"redundant", "oldest"}
