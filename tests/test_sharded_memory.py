"""A memory split over 8 devices, against 8 buffers that know nothing of each other."""

import functools
import itertools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from helpers import chance, toy
from jaxcl import core, sharding
from jaxcl.memory import buffer, policies, sharded
from jaxcl.methods import online
from jaxcl.run import job, train

CLASSES, TASKS = 4, 3
EXAMPLE = {
    "image": jax.ShapeDtypeStruct((2, 3), np.uint8),
    "label": np.zeros((), np.int32),
    "task": np.zeros((), np.int32),
    # What min_redundancy reads.
    "feature": jax.ShapeDtypeStruct((4,), np.float32),
    "used": np.zeros((), bool),
    "number": np.zeros((), np.int32),
    # What the loss-aware ones read.
    "loss": np.zeros((), np.float32),
    "draws": np.zeros((), np.int32),
    # What gss reads.
    "score": np.zeros((), np.float32),
}
MOVES = re.compile(r"= (.*) (?:all-|collective-|reduce-scatter)[\w-]*\(")


def rows(turn, size=16):
    n = np.arange(turn * size, (turn + 1) * size, dtype=np.int32)
    image = np.broadcast_to((n % 256)[:, None, None], (size, 2, 3)).astype(np.uint8)
    label = np.random.default_rng(turn).integers(0, CLASSES, size).astype(np.int32)
    feature = np.random.default_rng(turn).normal(size=(size, 4)).astype(np.float32)
    return {
        "image": image,
        "label": label,
        "task": np.full(size, turn % TASKS, "i4"),
        "feature": feature / np.linalg.norm(feature, axis=1, keepdims=True),
        "used": np.arange(size) % 2 == 0,
        "number": n,
        "loss": feature[:, 0],
        "draws": n % 3,
        "score": 1 + 0.5 * feature[:, 1].clip(-1, 1),
    }


def replay(policy="reservoir", capacity=12, *, split=True):
    return core.Replay(capacity, policy, sharded=split)


def write(memory, slots, items, mask=None):
    """Write to given slots, as a policy that chose them."""
    policy = policies.Policy(lambda buffer, state, *_: (slots, state))
    return sharded.store_rows(policy, memory, {}, jax.random.key(0), items, mask)[0]


def step(asked, k, state, kept, keys, items, mask):
    """What a method does, from the functions of a memory."""
    k_draw, k_write = keys
    weights = -0.1 * state.items["label"].astype(jnp.float32)
    drawn = sharded.sample(state, k_draw, k, log_weights=weights)
    backwards, policy = drawn[0]["label"], sharded.find_policy(asked)
    repeated = sharded.on_each_device(asked, lambda label: label[::-1], backwards)
    slots, _ = policy.choose(state, kept, k_write, items, mask)
    state, kept = sharded.store_rows(
        policy, state, kept, k_write, items, mask, after=drawn
    )
    return state, kept, (drawn, slots, repeated)


def run(asked, *, k, keys, part=slice(None), place=lambda x: x):
    """Six batches of 16 rows, a few of them masked; a trace of all that came out."""
    state = sharded.create(EXAMPLE, asked)
    kept = sharded.find_policy(asked).start(CLASSES, TASKS)
    compiled = jax.jit(functools.partial(step, asked, k))
    trace = []
    for turn in range(6):
        mask = np.arange(16) % 7 != turn
        items, mask = place(jax.tree.map(lambda x: x[part], (rows(turn), mask)))
        state, kept, out = compiled(state, kept, keys(turn), items, mask)
        trace.append(out)
    return jax.tree.map(np.asarray, (state, kept, trace))


def two_keys(turn, device=None):
    """Those of a step; with the number of a device folded in, as it has them."""
    keys = jax.random.split(jax.random.key(turn))
    return keys if device is None else [jax.random.fold_in(k, device) for k in keys]


@pytest.mark.parametrize("policy", ["reservoir", "greedy_balanced", "ring"])
def test_on_one_device_all_is_as_in_a_buffer(policy):
    plain = run(replay(policy, split=False), k=4, keys=two_keys)
    with sharding.use_mesh(sharding.mesh(1)):
        state, kept, trace = run(replay(policy), k=4, keys=two_keys)
    assert state.seen.shape == (1,) and type(state) is sharded.Shards
    same = buffer.Buffer(state.items, state.filled, state.seen[0])
    kept = jax.tree.map(lambda x: x[0], kept.each)
    jax.tree.map(np.testing.assert_array_equal, plain, (same, kept, trace))
    offered = sum(np.sum(np.arange(16) % 7 != turn) for turn in range(6))
    assert plain[0].filled.all() and plain[0].seen == offered


@pytest.mark.parametrize("policy", ["class_balanced", "task_ring"])
def test_each_device_has_a_buffer_of_its_own(policy):
    """Its rows of the batch, its slots, its counts, and draws under its own keys."""
    n, capacity, k = 8, 32, 16
    mesh = sharding.mesh(n)
    split = functools.partial(sharding.shard_rows, mesh=mesh)
    with sharding.use_mesh(mesh):
        whole = run(replay(policy, capacity), k=k, keys=two_keys, place=split)
    for device in range(n):
        own = run(
            replay(policy, capacity // n, split=False),
            k=k // n,
            keys=functools.partial(two_keys, device=device),
            part=slice(2 * device, 2 * device + 2),
        )

        def mine(x, device=device):
            return x.reshape(n, -1, *x.shape[1:])[device]

        state, kept, trace = jax.tree.map(mine, whole)
        assert state.capacity == capacity // n
        same = buffer.Buffer(state.items, state.filled, state.seen[0])
        kept = jax.tree.map(lambda x: x[0], kept.each)
        jax.tree.map(np.testing.assert_array_equal, own, (same, kept, trace))


def test_each_device_needs_as_many_slots_as_the_policy():
    with sharding.use_mesh(sharding.mesh(8)):
        policy = sharded.find_policy(replay("ring"))
        assert policy.least(3, 2) == 8 * 3
        memory = sharded.create({"x": jnp.zeros(2)}, replay(capacity=16))
        key = jax.random.key(0)
        drawn = jax.eval_shape(lambda: sharded.sample(memory, key, 16))
        assert drawn[1].shape == (16,)
        for wrong in (12, 24):
            with pytest.raises(ValueError, match=f"k={wrong}"):
                sharded.sample(memory, key, wrong)


def test_each_device_draws_by_a_key_of_its_own():
    """Where rows come to a full memory, and which rows are drawn."""
    asked, numbers = replay(capacity=16), jnp.arange(16)

    @jax.jit
    def draw(key):
        memory = sharded.create(np.zeros((), np.int32), asked)
        memory = write(memory, numbers % 8, numbers)
        kept, mask = sharded.ShardedPolicyState({}), jnp.ones(16, bool)
        slots, _ = sharded.find_policy(asked).choose(memory, kept, key, numbers, mask)
        return slots, sharded.sample(memory, key, 8)[2]

    with sharding.use_mesh(sharding.mesh(2)):
        slots, drawn = draw(jax.random.key(0))
    for one, other in slots.reshape(2, 8), drawn.reshape(2, 4):
        assert (one != other).any()


def test_every_row_is_kept_and_drawn_with_the_same_probability():
    n, capacity, k, total, trials = 4, 8, 4, 48, 2000
    batches = np.arange(total, dtype=np.int32).reshape(-1, 8)
    policy, none = sharded.find_policy(replay()), sharded.ShardedPolicyState({})

    @jax.jit
    def one(key):
        state = sharded.create(np.zeros((), np.int32), replay(capacity=capacity))
        for turn, numbers in enumerate(batches):
            use = jax.random.fold_in(key, turn)
            state, _ = sharded.store_rows(policy, state, none, use, numbers)
        return state.items, sharded.sample(state, jax.random.fold_in(key, 99), k)[0]

    with sharding.use_mesh(sharding.mesh(n)):
        found = jax.lax.map(one, jax.random.split(jax.random.key(0), trials))
    kept, drawn = jax.tree.map(np.asarray, found)
    assert all(len({*each}) == capacity for each in kept.tolist())
    assert all({*draw} <= {*each} for draw, each in zip(drawn, kept, strict=True))
    chance.check_frequencies(
        np.bincount(kept.ravel(), minlength=total), capacity / total, trials
    )
    chance.check_frequencies(
        np.bincount(drawn.ravel(), minlength=total), k / total, trials
    )
    # Each device keeps and draws its share, and not always from the same slot.
    device = kept % 8 // 2
    np.testing.assert_array_equal(device, np.tile(np.repeat(range(n), 2), (trials, 1)))
    same = np.mean(np.diff(drawn.reshape(trials, n) // 8, axis=1) == 0)
    assert same < 0.4  # of 6 batches; 1 if the devices drew with the same numbers


def test_a_share_with_few_rows_is_masked_at_its_end():
    numbers, mask = jnp.arange(8) + 1, jnp.arange(8) % 4 != 1
    slots = jnp.array([0, 1, 2, 0, 3, 4, 0, 0], jnp.int32)  # 4: nowhere
    with sharding.use_mesh(sharding.mesh(4)):
        state = sharded.create(np.zeros((), np.int32), replay(capacity=16))
        state = write(state, slots, numbers, mask)
        items, there, slots = sharded.sample(state, jax.random.key(0), 8)
    assert state.items.tolist() == [1, 0, 0, 0, 4, 0, 3, 0, 0, 0, 0, 5, 8, 0, 0, 0]
    assert state.filled.tolist() == [x > 0 for x in state.items.tolist()]
    assert state.seen.tolist() == [1, 2, 1, 2] and state.capacity == 16
    assert there.tolist() == [True, False, True, True, True, False, True, False]
    assert sorted(items.tolist()) == [0, 0, 0, 1, 3, 4, 5, 8]
    assert slots[~there].tolist() == [4] * 3
    assert sorted(slots[there].tolist()) == [0, 0, 0, 2, 3]


def compiled_text(function, *arguments, **options):
    return jax.jit(function, **options).lower(*arguments).compile().as_text()


def test_nothing_moves_between_devices():
    mesh = sharding.mesh(8)
    items, mask = sharding.shard_rows((rows(0), np.ones(16, bool)), mesh)
    for name in policies.POLICIES:
        policy = sharded.find_policy(replay(name))

        def act(state, kept, key, items, mask, policy=policy):
            drawn = sharded.sample(state, key, 16)
            return *sharded.store_rows(policy, state, kept, key, items, mask), drawn

        with sharding.use_mesh(mesh):
            state = sharded.create(EXAMPLE, replay(capacity=64))
            kept = policy.start(CLASSES, TASKS)
            text = compiled_text(act, state, kept, jax.random.key(0), items, mask)
        assert not MOVES.findall(text), name
    # The control: one buffer, its slots split in the same way.
    split = sharding.split_sharding(mesh)
    memory = buffer.Buffer(state.items, state.filled, jnp.int32(0))
    slots = jax.device_put(np.arange(16, dtype=np.int32), split)
    text = compiled_text(buffer.write, memory, slots, items)
    assert any("u8" in moved for moved in MOVES.findall(text))


def er(**changes):
    return toy.ONLINE | {"method": {"name": "er"}, "replay.sharded": True} | changes


def final(work, workdir, stop=None, step=None):
    """The last state of a run that stops when asked for the `stop`-th time."""
    asked = itertools.count(1)
    try:
        train.run_tasks(work, workdir, stop=lambda: next(asked) == stop, step=step)
    except train.Interrupted:
        assert stop is not None
    return toy.saved(work, workdir).state


def test_a_run_stays_split_and_resumes_bitwise(tmp_path, caplog):
    changes = er(**{"replay.policy": "class_balanced"})
    work = toy.job(tmp_path / "whole", tasks=2, devices=2, **changes)
    step = job.compile_step(work)
    with jax.log_compiles():
        whole = final(work, tmp_path / "whole", step=step)
    work = toy.job(tmp_path / "cut", tasks=2, devices=2, **changes)
    state = final(work, tmp_path / "cut", stop=16, step=step)
    assert 12 < int(state.step) < int(whole.step)
    with jax.log_compiles():
        resumed = final(work, tmp_path / "cut", step=step)
    toy.check_same_bits(whole, resumed)
    assert caplog.text.count("Compiling jit(steps)") == 1
    split = sharding.split_sharding(work.mesh)
    for held in (resumed, job.initial_state(work)):
        own = held.extra.memory, held.extra.kept
        assert isinstance(own[0], sharded.Shards) and isinstance(
            own[1], sharded.ShardedPolicyState
        )
        for leaf in jax.tree.leaves(own):
            assert leaf.sharding.is_equivalent_to(split, leaf.ndim)
        rest = held.replace(extra=held.extra._replace(memory=None, kept=None))
        assert all(x.sharding.is_fully_replicated for x in jax.tree.leaves(rest))
    assert whole.extra.memory.filled.all() and whole.extra.memory.seen.tolist()[0] > 200
    assert {*whole.extra.memory.items["task"].tolist()} == {0, 1}
    # No image of the memory, stored or drawn, moves in a step.
    batch = next(job.feed_batches(work, work.stream.tasks[0].train, 0, 0))
    text = step.lower(state, job.resident(work), *batch[1:]).compile().as_text()
    moved = MOVES.findall(text)
    assert moved and not [line for line in moved if "u8[" in line]
    with pytest.raises(ValueError, match="config.memory_shards"):
        toy.job(tmp_path / "cut", tasks=2, devices=4, **changes)


def test_what_needs_the_memory_whole_is_refused():
    parts = core.Parts(None, None, None, None, 3, replay=core.Replay(4, sharded=True))
    net, update = online.Network(None, "linear", 3), lambda state, incoming, key: None
    with pytest.raises(ValueError, match="config.replay.sharded=True"):
        online.make_method(parts, net, update, write=lambda *given: given[0])
    online.make_method(parts, net, update)


def test_a_donated_memory_is_written_in_place():
    mesh, asked = sharding.mesh(2), replay(capacity=256)
    example = EXAMPLE | {"image": jax.ShapeDtypeStruct((64, 64), np.uint8)}
    items = rows(0, 4) | {"image": np.zeros((4, 64, 64), np.uint8)}
    items, mask = sharding.shard_rows((items, np.ones(4, bool)), mesh)
    with sharding.use_mesh(mesh):
        state = sharded.create(example, asked)
        kept = sharded.find_policy(asked).start(2, 2)
        jitted = jax.jit(functools.partial(step, asked, 4), donate_argnums=0)
        lowered = jitted.lower(state, kept, two_keys(0), items, mask)
    assert lowered.compile().memory_analysis().temp_size_in_bytes < 128 * 64 * 64 / 4
