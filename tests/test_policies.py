"""Policies that count classes, tasks or batches, against lists, one row at a time."""

import collections
import functools
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from helpers import chance, toy
from jaxcl import sharding
from jaxcl.memory import buffer, policies

CLASSES, TASKS, CAPACITY = 4, 3, 7
# Of these the cut of the stream into batches decides what is kept.
BY_BATCH = {"batched_reservoir"}
# The others compare features, see test_redundancy.py.
NAMES = sorted(
    name
    for name, policy in policies.POLICIES.items()
    if {*policy.reads} <= {"label", "task"}
)


def stream(kind, total=60, seed=0):
    """Rows of a stream by number: {"row", "label", "task"} i32[total]."""
    rng, rows = np.random.default_rng(seed), np.arange(total, dtype=np.int32)
    if kind == "by class":  # a task at a time
        label = np.repeat(np.arange(CLASSES), total // CLASSES)
    elif kind == "uneven":
        label = rng.choice(CLASSES, total, p=[0.6, 0.3, 0.07, 0.03])
    else:
        label = rng.integers(0, CLASSES, total)
    task = rows * TASKS // total
    return {"row": rows, "label": label.astype(np.int32), "task": task}


# Policy -> the quick test that holds it against a loop over single rows.
TWINS = {
    "reservoir": ("test_memory", "reservoir_against_one_row_at_a_time"),
    "batched_reservoir": (
        "test_policies",
        "batched_reservoir_against_one_row_at_a_time",
    ),
    "fifo": ("test_memory", "fifo_against_a_queue"),
    "class_balanced": ("test_policies", "class_balanced_against_one_row_at_a_time"),
    "greedy_balanced": ("test_policies", "greedy_balanced_against_one_row_at_a_time"),
    "ring": ("test_policies", "rings_against_queues"),
    "task_ring": ("test_policies", "rings_against_queues"),
    "min_redundancy": ("test_redundancy", "a_stream_against_one_row_at_a_time"),
    "duel": ("test_duel_memory", "as_a_policy_it_is_the_loop"),
    "loss_aware": ("test_loss_aware", "every_row_enters_and_the_lowest_scores_go"),
    "loss_aware_reservoir": (
        "test_loss_aware",
        "rows_enter_as_in_a_reservoir_and_the_lowest_score_goes",
    ),
    "gss": ("test_gss", "the_policy_of_online_ssl_is_algorithm_two_row_by_row"),
}
KINDS = ("by class", "uneven", "even")


def cut(items, size, seed=0, masked=0.3):
    """Batches of `size` rows, in order among masked rows of another label."""
    rng = np.random.default_rng(seed)
    for numbers, mask in chance.cut(len(items["row"]), size, rng, masked):
        rows = {name: np.full(size, 1, np.int32) for name in items}
        for name, values in items.items():
            rows[name][mask] = values[numbers[mask]]
        yield rows, mask


def empty(capacity=CAPACITY):
    names = ("row", "label", "task")
    return buffer.create({name: np.zeros((), np.int32) for name in names}, capacity)


def begin(name, classes=CLASSES, tasks=TASKS):
    return policies.POLICIES[name].start(classes, tasks)


@functools.partial(jax.jit, static_argnums=0)
def offer(name, state, kept, key, rows, mask):
    slots, kept = policies.POLICIES[name].choose(state, kept, key, rows, mask)
    return buffer.write(state, slots, rows, mask), kept, slots


def kept_rows(name, items, size, key, capacity=CAPACITY, seed=0):
    """Number of the row in each slot, -1 where free, and what the policy counts."""
    state, kept = empty(capacity), begin(name)
    for rows, mask in cut(items, size, seed):
        state, kept, _ = offer(name, state, kept, key, rows, mask)
    assert int(state.seen) == len(items["row"])
    return np.where(state.filled, state.items["row"], -1).tolist(), kept


def test_every_policy_has_a_twin():
    assert TWINS.keys() == policies.POLICIES.keys()
    folder = pathlib.Path(__file__).parent
    slow = (folder / "slow.txt").read_text().splitlines()
    for module, name in TWINS.values():
        assert f"\ndef test_{name}(" in (folder / f"{module}.py").read_text()
        assert f"{module}.py::test_{name}" not in slow


@pytest.mark.parametrize("name", NAMES)
def test_masked_rows_have_no_slot_and_do_not_count(name):
    items, key = stream("even"), jax.random.key(1)
    state, kept = empty(), begin(name)
    shapes = jax.tree.map(lambda x: (x.shape, x.dtype), kept)
    for rows, mask in cut(items, 16):
        mask = mask.astype(np.float32)
        before = kept
        state, kept, slots = offer(name, state, kept, key, rows, mask)
        assert slots.dtype == jnp.int32 and slots.shape == mask.shape
        assert (slots[mask == 0] == CAPACITY).all()
        assert ((slots >= 0) & (slots <= CAPACITY)).all()
        # Nor do those of a batch without any row.
        none, same, _ = offer(name, state, kept, key, rows, 0 * mask)
        jax.tree.map(np.testing.assert_array_equal, (none, same), (state, kept))
        assert jax.tree.structure(before) == jax.tree.structure(kept)
    assert jax.tree.map(lambda x: (x.shape, x.dtype), kept) == shapes


@pytest.mark.parametrize("name", sorted({*NAMES} - BY_BATCH))
def test_other_batches_keep_the_same_rows(name):
    """Batches that are smaller, larger and much larger than the memory."""
    for kind in KINDS:
        items, key = stream(kind), jax.random.key(7)
        first, kept = kept_rows(name, items, 1, key)
        assert kind != "by class" or max(first) > 30  # late rows enter
        for size in (16, 64):
            other, counts = kept_rows(name, items, size, key, seed=size)
            assert other == first
            jax.tree.map(np.testing.assert_array_equal, counts, kept)


@pytest.mark.parametrize("name", NAMES)
def test_devices_agree_in_one_compilation(name):
    """Replicated memory, split batch, any fill level: the same bits everywhere."""
    results = {}
    for devices in (1, 8):
        mesh = sharding.mesh(devices)
        whole = sharding.replicated(mesh)
        step = jax.jit(functools.partial(offer, name), out_shardings=whole)
        place = functools.partial(sharding.replicate, mesh=mesh)
        state, kept = place(empty()), place(begin(name))
        for turn, batch in enumerate(cut(stream("uneven"), 16)):
            rows, mask = sharding.shard_rows(batch, mesh)
            key = jax.random.fold_in(jax.random.key(3), turn)
            state, kept, slots = step(state, kept, key, rows, mask)
        assert step._cache_size() == 1 and turn > 3
        results[devices] = sharding.copy_to_host((state, kept, slots))
    jax.tree.map(np.testing.assert_array_equal, results[1], results[8])


def batched_twin(batches, draw):
    """Slots of a stream: free ones first, then by the rows before the batch."""
    memory, seen = [None] * CAPACITY, 0
    for rows, mask in batches:
        count = max(seen, CAPACITY)  # once the free slots are filled
        for row, exists in zip(rows["row"].tolist(), mask, strict=True):
            if exists:
                slot = seen if seen < CAPACITY else draw[seen](count)
                seen += 1
                if slot < CAPACITY:
                    memory[slot] = row
    return memory


@pytest.mark.parametrize("size", [1, 5, 16, 64])
def test_batched_reservoir_against_one_row_at_a_time(size):
    items, key = stream("even"), jax.random.key(3)
    twin = batched_twin(cut(items, size), chance.drawers(key, range(60)))
    assert kept_rows("batched_reservoir", items, size, key)[0] == twin


def class_balanced_twin(labels, draw, capacity=CAPACITY):
    """Algorithm 1 of the paper, with lists."""
    memory, met, full = [], collections.Counter(), set()

    def sizes():
        return collections.Counter(labels[row] for row in memory)

    for row, label in enumerate(labels):
        met[label] += 1
        if len(memory) < capacity:
            memory.append(row)
        elif label not in full:
            top = max(sizes().values())
            largest = {c for c, size in sizes().items() if size == top}
            places = [i for i, old in enumerate(memory) if labels[old] in largest]
            memory[places[draw[row](len(places))]] = row
        else:  # u <= m_c / n_c, and then any of its class: one draw of n_c does both
            places = [i for i, old in enumerate(memory) if labels[old] == label]
            drawn = draw[row](met[label])
            if drawn < len(places):
                memory[places[drawn]] = row
        if len(memory) == capacity:
            top = max(sizes().values())
            full |= {c for c, size in sizes().items() if size == top}
    return memory, met, full


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("kind", KINDS)
def test_class_balanced_against_one_row_at_a_time(kind, seed):
    items, key = stream(kind, seed=seed), jax.random.key(seed)
    memory, met, full = class_balanced_twin(
        items["label"].tolist(), chance.drawers(key, range(60))
    )
    rows, kept = kept_rows("class_balanced", items, 16, key)
    assert rows == memory
    assert kept["met"].tolist() == [met[c] for c in range(CLASSES)]
    # What the last row made full is found when the next one comes.
    found = {c for c in range(CLASSES) if kept["full"][c]}
    sizes = np.bincount(items["label"][rows], minlength=CLASSES)
    assert found | {*np.flatnonzero(sizes == sizes.max()).tolist()} == full


def greedy_twin(labels, draw, capacity=CAPACITY):
    """GDumb's sampler; `sizes` has the classes in the order they were met."""
    memory, sizes = [], {}
    for row, label in enumerate(labels):
        fair = capacity // max(len(sizes), 1)
        if label in sizes and sizes[label] >= fair:
            continue
        if len(memory) < capacity:
            memory.append(row)
        else:
            largest = max(sizes, key=sizes.get)  # the first of several
            places = [i for i, old in enumerate(memory) if labels[old] == largest]
            memory[places[draw[row](len(places))]] = row
            sizes[largest] -= 1
        sizes[label] = sizes.get(label, 0) + 1
    return memory, [*sizes]


@pytest.mark.parametrize("capacity", [2, CAPACITY])  # fewer slots than classes, too
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("kind", KINDS)
def test_greedy_balanced_against_one_row_at_a_time(kind, seed, capacity):
    items, key = stream(kind, seed=seed), jax.random.key(seed)
    items["label"] = CLASSES - 1 - items["label"]  # met in another order than counted
    twin, met = greedy_twin(
        items["label"].tolist(), chance.drawers(key, range(60)), capacity
    )
    rows, kept = kept_rows("greedy_balanced", items, 16, key, capacity)
    assert rows == twin + [-1] * (capacity - len(twin))
    assert [kept["rank"][c] for c in met] == [*range(len(met))]
    assert (np.delete(kept["rank"], met) == CLASSES).all()


@pytest.mark.parametrize("size", [1, 16, 64])
@pytest.mark.parametrize("name", ["ring", "task_ring"])
def test_rings_against_queues(name, size):
    by, groups = ("label", CLASSES) if name == "ring" else ("task", TASKS)
    items, capacity = stream("uneven"), 11
    shares = [capacity // groups + (g < capacity % groups) for g in range(groups)]
    queues = [collections.deque(maxlen=share) for share in shares]
    rows, kept = kept_rows(name, items, size, jax.random.key(0), capacity)
    for row, group in enumerate(items[by].tolist()):
        queues[group].append(row)
    start, counts = 0, np.bincount(items[by], minlength=groups)
    for queue, share, count, turn in zip(
        queues, shares, counts, kept["turn"].tolist(), strict=True
    ):
        own = rows[start : start + share]
        assert sorted(row for row in own if row >= 0) == [*queue]
        assert turn == count % share and (count < share or own[turn] == queue[0])
        start += share
    assert start == capacity


@pytest.mark.parametrize(("name", "least"), [("ring", 10), ("task_ring", 8)])
def test_a_memory_too_small_for_its_policy_is_refused(tmp_path, name, least):
    replay = {"capacity": least - 1, "policy": name}
    wanted = f"config.replay.capacity={least - 1}: policy='{name}' needs {least}"
    with pytest.raises(ValueError, match=wanted):
        toy.job(tmp_path, **toy.ONLINE | {"method": {"name": "er"}, "replay": replay})
