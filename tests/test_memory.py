"""Buffers and policies against Python lists, one row at a time."""

import collections
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from helpers import chance
from jaxcl import sharding
from jaxcl.memory import buffer, policies

EXAMPLE = {
    "image": jax.ShapeDtypeStruct((2, 3), np.uint8),
    "label": np.zeros((), np.int64),
    "more": (jax.ShapeDtypeStruct((4,), jnp.bfloat16), np.zeros((), bool)),
}
TOP = 2**31 - 1
WRITE = jax.jit(buffer.write)


def examples(numbers):
    """Rows that tell their number in each leaf."""
    n = np.asarray(numbers, np.int32)
    return {
        "image": np.broadcast_to((n % 256)[:, None, None], (len(n), 2, 3)).astype("u1"),
        "label": n,
        "more": (
            jnp.broadcast_to((n % 128)[:, None], (len(n), 4)).astype(jnp.bfloat16),
            n % 2 == 1,
        ),
    }


def labelled(slots):
    """A buffer of bare numbers from a list; None where a slot is empty."""
    full = [slot is not None for slot in slots]
    return buffer.Buffer(
        items=jnp.asarray([slot or 0 for slot in slots], jnp.int32),
        filled=jnp.asarray(full),
        seen=jnp.int32(sum(full)),
    )


def numbers(capacity):
    return buffer.create(jax.ShapeDtypeStruct((), np.int32), capacity)


# create and write


def write_twin(rows, full, slots, numbers, mask):
    for slot, number, exists in zip(slots, numbers, mask, strict=True):
        if exists and 0 <= slot < len(rows):
            rows[slot], full[slot] = number, True


@pytest.mark.parametrize("dtype", [None, bool, np.float32])
def test_write_against_one_row_at_a_time(dtype):
    """Duplicates, masked duplicates, dropped rows, in every leaf."""
    rng, capacity, count = np.random.default_rng(0), 6, 9
    state = buffer.create(EXAMPLE, capacity)
    rows, full, seen = [0] * capacity, [False] * capacity, 0
    for turn in range(40):
        # -2 and 6 to 8 are dropped; at first few slots, so that most collide.
        slots = rng.choice([-2, 0, 1, 2, 3, 4, 5, 6, 8][: 4 + turn // 4], count)
        new = rng.integers(1, 1000, count)
        mask = None if dtype is None else (rng.random(count) < 0.6).astype(dtype)
        exists = np.ones(count) if mask is None else mask
        state = WRITE(state, slots.astype(np.int32), examples(new), mask)
        write_twin(rows, full, slots, new, exists)
        seen += int(exists.sum())
        jax.tree.map(np.testing.assert_array_equal, state.items, examples(rows))
        np.testing.assert_array_equal(state.filled, full)
        assert int(state.seen) == seen
    assert all(full) and state.items["image"].dtype == jnp.uint8


def test_rows_that_are_written_have_no_duplicates():
    """A GPU keeps any of several; a CPU, where this runs, keeps the last anyway."""
    rows = np.zeros(3, np.int32)
    program = str(jax.make_jaxpr(buffer.write)(numbers(4), rows, rows))
    stores = re.findall(r"scatter\[.*?unique_indices=(\w+)", program, re.DOTALL)
    assert stores == ["True"] * 2  # items, filled
    rng = np.random.default_rng(1)
    last = jax.jit(buffer._last_writers, static_argnums=2)
    for _ in range(20):
        target = last(rng.integers(-1, 5, 16), rng.random(16) < 0.7, 4)
        assert len(set(target.tolist())) == 16


# sample


@functools.cache
def draws(k, trials=4000, weighted=False):
    """Jitted: many draws, (items, mask, slots) each with a leading axis."""

    def one(state, weights, key):
        weights = weights if weighted else None
        return buffer.sample(state, key, k, log_weights=weights)

    keys = jax.random.split(jax.random.key(k), trials)
    return jax.jit(lambda state, w=None: jax.vmap(lambda q: one(state, w, q))(keys))


def inclusions(slots, capacity):
    return np.bincount(np.ravel(slots), minlength=capacity + 1)[:capacity]


def test_the_nth_row_gets_the_nth_free_slot():
    free, mask = jnp.array([0, 1, 0, 1, 0], bool), jnp.array([1, 0, 1, 1, 1], bool)
    assert buffer.free_slots(free, mask).tolist() == [1, 5, 3, 5, 5]
    assert buffer.free_slots(~free, mask).tolist() == [0, 5, 2, 4, 5]


def test_uniform_draws_of_the_rows_there_are():
    rows = [None, 7, 8, 9, None, 11, 12, 13, None, 15, 16, 17]
    items, mask, slots = draws(4)(labelled(rows))
    assert mask.dtype == bool and slots.dtype == jnp.int32 and mask.all()
    assert all(len(set(drawn)) == 4 for drawn in slots.tolist())
    np.testing.assert_array_equal(items, slots + 6)  # as the list was made
    there = np.array([row is not None for row in rows])
    chance.check_frequencies(inclusions(slots, 12), there * 4 / 9, 4000)
    # Nor does the order matter.
    chance.check_frequencies(inclusions(slots[:, 3], 12), there / 9, 4000)


def test_rows_that_do_not_exist_are_masked():
    for rows in ([None, 5, None, 7, 8, None], [None] * 6):
        there = sum(row is not None for row in rows)
        items, mask, slots = draws(5, 30)(labelled(rows))
        for i in range(30):
            assert mask[i].tolist() == [True] * there + [False] * (5 - there)
            assert set(items[i, :there].tolist()) == {row for row in rows if row}
            assert [rows[s] for s in slots[i, :there]] == items[i, :there].tolist()
        assert (slots[:, there:] == 6).all() and not items[:, there:].any()


def test_weighted_draws_follow_the_weights():
    """Against all ordered pairs, drawn one after another in proportion."""
    weights = np.array([0.5, 2.0, 0.0, 1.0, np.nan, 4.0, 3.0])
    rows = [1, 2, 3, 4, 5, None, 7]
    log_weights = np.log(weights, where=weights != 0, out=np.full(7, -np.inf))
    w = np.where([True, True, False, True, False, False, True], weights, 0.0)
    pairs = np.zeros((7, 7))
    for i in range(7):
        for j in range(7):
            if i != j and w[i] > 0:
                pairs[i, j] = w[i] / w.sum() * w[j] / (w.sum() - w[i])
    state, log_weights = labelled(rows), jnp.asarray(log_weights, jnp.float32)
    _, mask, slots = draws(2, 4000, True)(state, log_weights + 100.0)
    assert mask.all()
    counts = np.zeros((7, 7))
    np.add.at(counts, (slots[:, 0], slots[:, 1]), 1)
    chance.check_frequencies(counts, pairs, 4000)
    items, mask, slots = draws(6, 30, True)(state, log_weights)
    assert (mask.sum(axis=1) == 4).all() and (slots[~mask] == 7).all()
    assert set(np.unique(items)) == {0, 1, 2, 4, 7}


def test_equal_scores_do_not_favour_low_slots():
    """Top scores of 23 random bits tie, and top_k takes the lower of two first."""
    state = numbers(2**20)._replace(filled=jnp.ones(2**20, bool))
    draw = jax.jit(lambda state, key: buffer.sample(state, key, 2**14)[2])
    slots = np.stack([draw(state, jax.random.key(seed)) for seed in range(2)])
    rising = np.mean(slots[:, 1:] > slots[:, :-1])
    assert abs(rising - 0.5) < 4.5 * np.sqrt(1 / 12 / slots.size)


# policies


def reservoir_twin(key, capacity, rows):
    """Slots of the rows with these numbers, with integers of any size."""
    draws = zip(rows, chance.drawers(key, rows), strict=True)
    return [
        row if row < capacity else min(below(row + 1), capacity) for row, below in draws
    ]


@pytest.mark.parametrize("size", [1, 4, 17, 64])
def test_reservoir_against_one_row_at_a_time(size):
    key, capacity, total = jax.random.key(3), 7, 50
    twin = [None] * (capacity + 1)
    for n, slot in enumerate(reservoir_twin(key, capacity, range(total))):
        twin[slot] = n
    policy, state = jax.jit(policies.reservoir), numbers(capacity)
    for rows, mask in chance.cut(total, size, np.random.default_rng(size)):
        state = WRITE(state, policy(state, key, mask), rows, mask)
    np.testing.assert_array_equal(state.items, twin[:capacity])
    assert int(state.seen) == total and max(twin[:capacity]) > 40  # late rows enter


@pytest.mark.parametrize("size", [1, 5, 12])
def test_every_row_of_the_stream_stays_with_the_same_probability(size):
    capacity, total, trials = 7, 36, 4000
    batches = list(chance.cut(total, size, np.random.default_rng(0), 0.3 * (size > 1)))

    @jax.jit
    def survivors(key):
        def step(carry, batch):
            (state, key), (rows, mask) = carry, batch
            key, use = jax.random.split(key)
            slots = policies.reservoir(state, use, mask)
            return (buffer.write(state, slots, rows, mask), key), None

        stacked = jax.tree.map(lambda *x: jnp.stack(x), *batches)
        (state, _), _ = jax.lax.scan(step, (numbers(capacity), key), stacked)
        return state.items

    kept = jax.vmap(survivors)(jax.random.split(jax.random.key(size), trials))
    assert all(len(set(rows)) == capacity for rows in kept.tolist())
    chance.check_frequencies(
        np.bincount(np.ravel(kept), minlength=total), capacity / total, trials
    )


@pytest.mark.parametrize("seen", [10_000, 2**24 + 1, 1_600_000_000, TOP - 150])
def test_reservoir_draws_exactly_from_long_streams(seen):
    """Integer arithmetic of any size; only the shape of `filled` is read."""
    capacity, key = seen // 4 * 3, jax.random.key(11)
    state = buffer.Buffer(
        items=None, filled=jax.ShapeDtypeStruct((capacity,), bool), seen=jnp.int32(seen)
    )
    slots = policies.reservoir(state, key, jnp.ones(200, bool)).tolist()
    rows = [min(seen + i, TOP) for i in range(200)]
    assert slots == reservoir_twin(key, capacity, rows)
    assert 100 < sum(slot < capacity for slot in slots) < 190  # 3 in 4


@pytest.mark.parametrize("size", [1, 3, 5, 13])
def test_fifo_against_a_queue(size):
    rng, capacity = np.random.default_rng(size), 5
    twin, state = collections.deque(maxlen=capacity), numbers(capacity)
    policy = jax.jit(policies.fifo)
    for rows, mask in chance.cut(40, size, rng):
        slots = policy(state, mask)
        used = [slot for slot in slots.tolist() if slot < capacity]
        assert len(set(used)) == len(used) == min(int(mask.sum()), capacity)
        state = WRITE(state, slots, rows, mask)
        twin.extend(rows[mask].tolist())
        stored = np.asarray(state.items)[np.asarray(state.filled)].tolist()
        assert sorted(stored) == list(twin)
        assert all(row % capacity == i for i, row in enumerate(stored))


def test_counting_ends_below_two_to_the_31():
    """`seen` neither wraps nor stops fifo from taking the slots in turn."""
    capacity, start = 7, TOP - 20
    state = numbers(capacity)._replace(seen=jnp.int32(start))
    step = jax.jit(lambda s, n: buffer.write(s, policies.fifo(s, n == n), n))
    for turn in range(12):
        rows = 5 * turn + jnp.arange(5)
        first = (start + 5 * turn) % capacity
        slots = policies.fifo(state, rows == rows).tolist()
        assert slots == [(first + i) % capacity for i in range(5)]
        state = step(state, rows)
        assert 0 < TOP - int(state.seen) + 1 <= max(capacity, 20 - 5 * turn)
        assert (int(state.seen) - start - 5 * (turn + 1)) % capacity == 0
    assert sorted(state.items.tolist()) == list(range(53, 60))


# inside a training step


def step(state, key, rows, mask):
    """What a replay method does: draw, learn, write."""
    k_draw, k_write = jax.random.split(key)
    items, exists, slots = buffer.sample(state, k_draw, 3)
    loss = jnp.sum(items["image"].astype(jnp.float32).mean((1, 2)) * exists)
    into = policies.reservoir(state, k_write, mask)
    return buffer.write(state, into, rows, mask, after=items), (loss, slots)


def batches(capacity, size=16):
    rng = np.random.default_rng(5)
    for turn, (rows, mask) in enumerate(chance.cut(4 * capacity, size, rng)):
        yield jax.random.fold_in(jax.random.key(2), turn), examples(rows), mask


def test_devices_agree_in_one_compilation():
    """Replicated buffer, split batch, any fill level: the same bits everywhere."""
    results = {}
    for devices in (1, 2, 8):
        mesh = sharding.mesh(devices)
        compiled = jax.jit(
            step, donate_argnums=0, out_shardings=sharding.replicated(mesh)
        )
        state = sharding.replicate(buffer.create(EXAMPLE, 23), mesh)
        trace = []
        for key, rows, mask in batches(23):
            old = state.items["image"]
            rows, mask = sharding.shard_rows((rows, mask), mesh)
            state, out = compiled(state, key, rows, mask)
            trace.append((out, state.filled.sum()))
            assert old.is_deleted()
        assert compiled._cache_size() == 1
        results[devices] = sharding.copy_to_host((state, trace))
    filled = [count for _, count in results[1][1]]
    assert 0 < filled[0] < 23 == filled[-1] and len(filled) > 5
    for devices in (2, 8):
        jax.tree.map(np.testing.assert_array_equal, results[1], results[devices])


@pytest.mark.parametrize("devices", [1, 2])
def test_a_step_does_not_copy_a_donated_buffer(devices, monkeypatch):
    """Control: without an order between draw and write XLA copies the whole buffer."""
    mesh = sharding.mesh(devices)
    example = EXAMPLE | {"image": jax.ShapeDtypeStruct((64, 64), np.uint8)}
    state = sharding.replicate(buffer.create(example, 256), mesh)
    rows = examples(range(4)) | {"image": np.zeros((4, 64, 64), np.uint8)}
    rows, mask = sharding.shard_rows((rows, np.ones(4, bool)), mesh)

    def compiled():
        jitted = jax.jit(lambda *given: step(*given), donate_argnums=0)
        return jitted.lower(state, jax.random.key(0), rows, mask).compile()

    copy = re.compile(r"u8\[256,64,64\]\S* copy\(")
    assert compiled().memory_analysis().temp_size_in_bytes < 256 * 64 * 64 / 4
    assert not copy.search(compiled().as_text())
    monkeypatch.setattr(buffer, "order_after", lambda slots, arrays: slots)
    assert copy.search(compiled().as_text())
