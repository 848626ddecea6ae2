"""Memories that drop rows of low loss, against their rules written row by row."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from helpers import loss_aware_twin as twin
from helpers import redundancy_twin
from jaxcl.memory import buffer, loss_aware, policies


def test_a_low_loss_and_many_draws_make_a_low_score():
    loss, draws = jnp.array([2.0, 4.0, 3.0, -9.0]), jnp.array([0, 4, 2, 9])
    filled = jnp.array([True, True, True, False])
    got = loss_aware.score_losses(loss, draws, filled)
    # 0 - 0; 1 - 4/8; 1/2 - 2/8; what an empty slot holds counts nowhere.
    np.testing.assert_allclose(got, [0.0, 0.5, 0.25, np.inf])
    assert buffer.find_lowest(got, jnp.int32(2)).tolist() == [True, False, True, False]
    same = loss_aware.score_losses(
        jnp.ones(3), jnp.zeros(3, jnp.int32), jnp.ones(3, bool)
    )
    np.testing.assert_array_equal(same, 0)
    assert buffer.find_lowest(same, jnp.int32(1)).tolist() == [True, False, False]


def test_a_running_loss_moves_half_of_the_way():
    moved = loss_aware.move_losses(jnp.array([1.0, 3.0]), jnp.array([2.0, -1.0]))
    np.testing.assert_allclose(moved, [1.5, 1.0])


write, reservoir = jax.jit(buffer.write), jax.jit(policies.reservoir)


def stream(size, turns=25, capacity=8):
    """Batches and the memory before each; rows are drawn and move between them."""
    rng = np.random.default_rng(size)
    example = {"loss": np.zeros((), np.float32), "draws": np.zeros((), np.int32)}
    memory = buffer.create(example, capacity)
    for turn in range(turns):
        mask = rng.random(size) < 0.8
        items = {
            "loss": rng.normal(size=size).astype(np.float32),
            "draws": np.zeros(size, np.int32),
        }
        written = yield memory, items, mask, jax.random.key(turn)
        memory = write(memory, written, items, mask)
        drawn = (rng.random(capacity) < (turn % 3) / 2) & np.asarray(memory.filled)
        new = rng.normal(size=capacity).astype(np.float32)
        held = memory.items
        moved = jnp.where(
            drawn, loss_aware.move_losses(held["loss"], new), held["loss"]
        )
        memory = memory._replace(
            items={"loss": moved, "draws": held["draws"] + drawn.astype(np.int32)}
        )


def play(batches, slots_of):
    """Send each batch's slots back to the stream."""
    found = next(batches)
    while True:
        try:
            found = batches.send(slots_of(*found))
        except StopIteration:
            return


@pytest.mark.parametrize("size", [3, 5, 9])
def test_every_row_enters_and_the_lowest_scores_go(size):
    offer, gone_at_all = jax.jit(policies.replace_lowest), []

    def slots_of(memory, items, mask, key):
        held = jax.tree.map(np.asarray, memory)
        filled, capacity = held.filled, memory.capacity
        excess = int(filled.sum() + mask.sum()) - capacity
        gone = []
        if excess > 0 and filled.any():
            score = twin.scores(held.items["loss"], held.items["draws"], filled)
            gone = twin.lowest(score, min(excess, int(filled.sum())))
        gone_at_all.extend(gone)
        want = redundancy_twin.slots(filled, gone, mask)
        slots = offer(memory, mask)
        np.testing.assert_array_equal(slots, want)
        return slots

    play(stream(size), slots_of)
    assert len(set(gone_at_all)) > 4


@pytest.mark.parametrize("size", [3, 5, 9])
def test_rows_enter_as_in_a_reservoir_and_the_lowest_score_goes(size):
    offer, replaced = jax.jit(policies.replace_in_reservoir), []

    def slots_of(memory, items, mask, key):
        held = jax.tree.map(np.asarray, memory)
        admitted = np.asarray(reservoir(memory, key, mask))
        columns = held.items["loss"], held.items["draws"], held.filled
        want = twin.entering(*columns, items["loss"], admitted)
        slots = offer(memory, key, items["loss"], mask)
        np.testing.assert_array_equal(slots, want)
        enters = np.asarray(slots) < memory.capacity
        np.testing.assert_array_equal(enters, admitted < memory.capacity)
        if held.filled.all():
            replaced.extend(np.asarray(slots)[enters])
        return slots

    play(stream(size), slots_of)
    assert len(set(replaced)) > 3
    # Just after it was filled, several rows of a batch enter a memory that was drawn.
    rng = np.random.default_rng(0)
    for number in range(20):
        held, new = (
            {"loss": jnp.float32(rng.normal(size=n)), "draws": jnp.int32(draws)}
            for n, draws in ((8, rng.integers(0, 9, 8)), (size, np.zeros(size)))
        )
        memory = buffer.Buffer(held, jnp.ones(8, bool), jnp.int32(8))
        slots_of(memory, new, np.ones(size, bool), jax.random.key(number))
