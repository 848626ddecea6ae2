"""Choose the slot of a buffer for each incoming row.

A policy returns slots, i32[B], for `buffer.write`; `capacity` means drop. It numbers
the unmasked rows of a stream from 0, by `buffer.seen`. So each batch must go through
one policy and then through `write`, with the same mask. `POLICIES` lists those that
config.replay.policy names, all of one signature.
"""

from collections.abc import Callable
from typing import NamedTuple

import chex
import jax
import jax.numpy as jnp

from jaxcl import lookup
from jaxcl.errors import Refused
from jaxcl.memory import buffer as buffer_lib
from jaxcl.memory import diversity, loss_aware, redundancy
from jaxcl.memory import duel as duel_lib

_MOST = 2**31 - 1  # the largest number that a row gets


def reservoir(buffer: buffer_lib.Buffer, key: jax.Array, mask: jax.Array) -> jax.Array:
    """Keep every row of the stream with the same probability.

    Vitter's Algorithm R, one row after another: row n goes to slot n while
    n < capacity. Later r is drawn uniformly from 0 to n; the row goes to slot r if
    r < capacity and is dropped otherwise. The draw depends on the key and on n alone,
    so the result does not depend on the batches, and one key serves the stream.

    A draw takes 64 bits: no value's probability is off by more than 2^-64. n stops near
    2^31: later rows enter with probability capacity / 2^31.

    Source: Vitter, "Random Sampling with a Reservoir", ACM TOMS 11(1), 1985.

    Args:
      buffer: Buffer.
      key: threefry key.
      mask: bool or f32 [B], rows that exist.

    Returns:
      i32[B], slots.
    """
    mask = jnp.asarray(mask, bool)
    chex.assert_rank(mask, 1)
    number = jnp.minimum(_stream_numbers(buffer, mask), _MOST)
    draw = jax.vmap(_draw_below, in_axes=(None, 0, 0))(key, number, number + 1)
    slots = jnp.where(number < buffer.capacity, number, draw).astype(jnp.int32)
    return jnp.where(mask & (slots < buffer.capacity), slots, buffer.capacity)


def batched_reservoir(
    buffer: buffer_lib.Buffer, key: jax.Array, mask: jax.Array
) -> jax.Array:
    """Keep rows by a reservoir over whole batches, as released code: slightly biased.

    Rows take free slots first. For every other row of the batch r is drawn uniformly
    from 0 to n - 1. Here n counts the rows of the stream before the batch, or, if slots
    were free, before the batch's first row without one. The row goes to slot r if r <
    capacity and is dropped otherwise; the last of several rows with the same slot
    stays. So each of these rows enters with probability capacity / n. In `reservoir`
    the i-th of them (from 1) enters with capacity / (n + i). So late rows of a batch,
    and of the stream, are kept a little too often. The result depends on how the stream
    is cut into batches.

    Source: released code of Caccia et al., 2021 (and of MIR, on which it builds).

    Args, Returns: as `reservoir`.
    """
    mask = jnp.asarray(mask, bool)
    chex.assert_rank(mask, 1)
    number = jnp.minimum(_stream_numbers(buffer, mask), _MOST)
    span = jnp.maximum(buffer.seen, buffer.capacity).astype(jnp.uint32)
    draw = jax.vmap(_draw_below, in_axes=(None, 0, None))(key, number, span)
    slots = jnp.where(number < buffer.capacity, number, draw).astype(jnp.int32)
    return jnp.where(mask & (slots < buffer.capacity), slots, buffer.capacity)


def fifo(buffer: buffer_lib.Buffer, mask: jax.Array) -> jax.Array:
    """Overwrite the oldest row first.

    If a batch has more than `capacity` rows, the last ones stay. The buffer must have
    been filled by `fifo` from the start.

    Args:
      buffer: Buffer.
      mask: bool or f32 [B], rows that exist.

    Returns:
      i32[B], slots; none but `capacity` occurs twice.
    """
    mask = jnp.asarray(mask, bool)
    chex.assert_rank(mask, 1)
    slots = (_stream_numbers(buffer, mask) % buffer.capacity).astype(jnp.int32)
    newer = jnp.sum(mask, dtype=jnp.int32) - jnp.cumsum(mask, dtype=jnp.int32)
    return jnp.where(mask & (newer < buffer.capacity), slots, buffer.capacity)


def ring(
    buffer: buffer_lib.Buffer, turn: jax.Array, group: jax.Array, mask: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Keep a ring for each group: the oldest row of the group is overwritten first.

    The slots are split into shares of equal size, one per group, in order; the first
    groups get one more slot each if there is a remainder. If a batch has more rows of
    a group than its share, the last ones stay. The result does not depend on how the
    stream is cut into batches.

    Source: Lopez-Paz and Ranzato, "Gradient Episodic Memory for Continual Learning",
    NeurIPS 2017, section 3: the last m examples of each task; per class as in
    Chaudhry et al., "On Tiny Episodic Memories in Continual Learning", 2019.

    Args:
      buffer: Buffer.
      turn: i32[G], the next place in each share; zeros at first.
      group: i32[B], in 0 to G - 1: a class or a task.
      mask: bool or f32 [B], rows that exist.

    Returns:
      slots: i32[B]; none but `capacity` occurs twice.
      turn: i32[G], after the batch.

    Raises:
      Refused: a group would have no slot.
    """
    mask = jnp.asarray(mask, bool)
    chex.assert_rank(mask, 1)
    chex.assert_equal_shape([group, mask])
    groups = len(turn)
    if buffer.capacity < groups:
        raise Refused(
            f"capacity={buffer.capacity}: a ring for each of {groups} groups needs as "
            "many slots or more"
        )
    share, rest = divmod(buffer.capacity, groups)
    numbers = jnp.arange(groups, dtype=jnp.int32)
    size = share + (numbers < rest)
    start = share * numbers + jnp.minimum(numbers, rest)

    same_group = (group[:, None] == group) & mask  # [row, other]
    before = jnp.sum(jnp.tril(same_group, -1), axis=1, dtype=jnp.int32)
    newer = jnp.sum(jnp.triu(same_group, 1), axis=1, dtype=jnp.int32)
    slots = start[group] + (turn[group] + before) % size[group]
    added = jnp.sum((group == numbers[:, None]) & mask, axis=1, dtype=jnp.int32)
    slots = jnp.where(mask & (newer < size[group]), slots, buffer.capacity)
    return slots, (turn + added) % size


def class_balanced(
    buffer: buffer_lib.Buffer,
    met: jax.Array,
    full: jax.Array,
    key: jax.Array,
    label: jax.Array,
    mask: jax.Array,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Keep classes as even as the stream allows: class-balancing reservoir (CBRS).

    Rows come one after another. Let c be the class of a row, m_c the number of stored
    rows of c, and n_c the number of rows of c met, this one included. While a slot is
    free, the row takes the first free one. Later a class is full if it is, or ever was,
    among the largest in the memory. A row of a class that is not full replaces a random
    row of the largest classes. A row of a full class replaces, with probability
    m_c / n_c, a random row of its class. So all rows met of a class are stored with the
    same probability.

    The draw depends on the key and on the row's number in the stream alone, so the
    result does not depend on the batches, and one key serves the stream.

    Classes can be full only once the memory has no free slot; otherwise the first row
    of a stream would stop the growth of its class for good. The paper leaves this open.

    Source: Chrysakis and Moens, "Online Continual Learning from Imbalanced Data",
    ICML 2020, algorithm 1.

    Args:
      buffer: Buffer, items with "label" i32[capacity].
      met: i32[C], rows met of each class; zeros at first.
      full: bool[C], classes that are full; False at first.
      key: threefry key.
      label: i32[B], in 0 to C - 1.
      mask: bool or f32 [B], rows that exist.

    Returns:
      slots: i32[B], for rows that are written one after another.
      met, full: after the batch.
    """

    def place_row(stored, counts, state, label, draw):
        met, full = state
        met = met.at[label].add(met[label] < _MOST)
        free = stored < 0
        filling = jnp.any(free)
        top = jnp.max(counts)
        full = full | (~filling & (counts == top))
        largest = (counts == top)[stored]
        is_full = full[label]
        pool = jnp.where(is_full, stored == label, largest)
        span = jnp.where(is_full, met[label], jnp.sum(pool))
        slot = jnp.where(filling, jnp.argmax(free), _nth_true(pool, draw(span)))
        return slot, (met, full)

    slots, (met, full) = _place_in_turn(
        buffer, (met, full), key, label, mask, place_row
    )
    return slots, met, full


def greedy_balanced(
    buffer: buffer_lib.Buffer,
    rank: jax.Array,
    key: jax.Array,
    label: jax.Array,
    mask: jax.Array,
) -> tuple[jax.Array, jax.Array]:
    """Keep an equal share of every class, first come, first kept (GDumb).

    Rows come one after another; k is the capacity. A row is stored if its class is new,
    or if fewer than floor(k / classes stored so far) rows of its class are. It takes
    the first free slot, or else the slot of a random row of the largest class (of
    several, the one met first).

    The draw depends on the key and on the row's number in the stream alone, so the
    result does not depend on the batches, and one key serves the stream.

    Source: Prabhu, Torr and Dokania, "GDumb: A Simple Approach that Questions Our
    Progress in Continual Learning", ECCV 2020, algorithm 1, which breaks ties at
    random.

    Args:
      buffer: Buffer, items with "label" i32[capacity].
      rank: i32[C], number of classes met before each class; C: not met, as at first.
      key: threefry key.
      label: i32[B], in 0 to C - 1.
      mask: bool or f32 [B], rows that exist.

    Returns:
      slots: i32[B], for rows that are written one after another.
      rank: after the batch.
    """
    classes = len(rank)

    def place_row(stored, counts, rank, label, draw):
        num_met = jnp.sum(rank < classes)
        new = rank[label] == classes
        fair = buffer.capacity // jnp.maximum(num_met, 1)
        enters = new | (counts[label] < fair)
        rank = rank.at[label].set(jnp.where(new, num_met, rank[label]))
        free = stored < 0
        largest = jnp.argmin(jnp.where(counts == jnp.max(counts), rank, classes + 1))
        evicted = _nth_true(stored == largest, draw(counts[largest]))
        slot = jnp.where(jnp.any(free), jnp.argmax(free), evicted)
        return jnp.where(enters, slot, buffer.capacity), rank

    return _place_in_turn(buffer, rank, key, label, mask, place_row)


def min_redundancy(buffer: buffer_lib.Buffer, mask: jax.Array) -> jax.Array:
    """Fill free slots, then replace the most redundant rows (MinRed).

    Incoming rows do not compete, since none of them was drawn yet. If a batch has more
    than `capacity` rows, the first ones stay.

    Source: Purushwalkam, Morgado and Gupta, "The Challenges of Continuous
    Self-Supervised Learning", ECCV 2022; see `redundancy.find_evicted`.

    Args:
      buffer: Buffer, items with "feature" f32[capacity, D], unit rows; "used"
        bool[capacity], drawn at least once; "number" i32[capacity], place in the
        stream.
      mask: bool or f32 [B], rows that exist.

    Returns:
      i32[B], slots; none but `capacity` occurs twice.
    """
    mask = jnp.asarray(mask, bool)
    chex.assert_rank(mask, 1)
    items = buffer.items
    stored = jnp.sum(buffer.filled, dtype=jnp.int32)
    excess = stored + jnp.sum(mask, dtype=jnp.int32) - buffer.capacity
    evicted = jax.lax.cond(
        excess > 0,
        lambda: redundancy.find_evicted(
            items["feature"],
            items["used"],
            items["number"],
            buffer.filled,
            jnp.minimum(excess, stored),
        ),
        lambda: jnp.zeros_like(buffer.filled),
    )
    return buffer_lib.free_slots(~buffer.filled | evicted, mask)


def duel(buffer: buffer_lib.Buffer, feature: jax.Array, mask: jax.Array) -> jax.Array:
    """Store every row in place of the stored row that is most similar to all others.

    Earlier rows of the batch may be replaced, too. Source: Choi et al., "DUEL",
    AAAI 2024; see `duel.select`, here with the affine score.

    Args:
      buffer: Buffer, items with "feature" f32[capacity, D], unit rows.
      feature: f32[B, D], unit rows of the incoming examples.
      mask: bool or f32 [B], rows that exist.

    Returns:
      i32[B], slots; none but `capacity` occurs twice.
    """
    mask = jnp.asarray(mask, bool)
    chex.assert_rank([feature, mask], [2, 1])
    keep = duel_lib.select(
        buffer.items["feature"], feature, filled=buffer.filled, incoming_mask=mask
    )
    return duel_lib.incoming_slots(keep, buffer.capacity)


def gss(
    buffer: buffer_lib.Buffer, key: jax.Array, score: jax.Array, mask: jax.Array
) -> jax.Array:
    """Keep rows whose gradients differ, see `diversity.choose_in_turn`.

    Args:
      buffer: Buffer, items with "score" f32[capacity].
      key: threefry key.
      score: f32[B], scores of the incoming rows.
      mask: bool or f32 [B], rows that exist.

    Returns:
      i32[B], slots, for rows that are written one after another.
    """
    return diversity.choose_in_turn(
        key, buffer.items["score"], buffer.filled, score, mask
    )


def replace_lowest(buffer: buffer_lib.Buffer, mask: jax.Array) -> jax.Array:
    """Store every row in place of the row with the lowest score.

    Scores are computed once, before the batch, so that none of its rows is replaced. If
    a batch has more than `capacity` rows, the first ones stay. Source: the insertion
    "fifo" of `loss_aware.score_losses`.

    Args:
      buffer: Buffer, items with "loss" f32[capacity], the running loss, and "draws"
        i32[capacity], how often the row was drawn.
      mask: bool or f32 [B], rows that exist.

    Returns:
      i32[B], slots; none but `capacity` occurs twice.
    """
    mask = jnp.asarray(mask, bool)
    chex.assert_rank(mask, 1)
    items, stored = buffer.items, jnp.sum(buffer.filled, dtype=jnp.int32)
    excess = stored + jnp.sum(mask, dtype=jnp.int32) - buffer.capacity
    value = loss_aware.score_losses(items["loss"], items["draws"], buffer.filled)
    evicted = buffer_lib.find_lowest(value, jnp.clip(excess, 0, stored))
    return buffer_lib.free_slots(~buffer.filled | evicted, mask)


def replace_in_reservoir(
    buffer: buffer_lib.Buffer, key: jax.Array, loss: jax.Array, mask: jax.Array
) -> jax.Array:
    """Admit rows as a reservoir does, each in place of the row with the lowest score.

    Rows come one after another: row n of the stream takes slot n while there are free
    ones, and enters with probability capacity / (n + 1) later. With the same key
    exactly the rows enter that `reservoir` stores. Scores count the rows of the batch
    that entered before it. Source: see `loss_aware.score_losses`, there the insertion
    "random".

    Args:
      buffer: Buffer, as for `replace_lowest`.
      key: threefry key.
      loss: f32[B], losses of the rows, which were not drawn yet.
      mask: bool or f32 [B], rows that exist.

    Returns:
      i32[B], slots, for rows that are written one after another.
    """
    mask = jnp.asarray(mask, bool)
    chex.assert_equal_shape([loss, mask])
    capacity, items = buffer.capacity, buffer.items
    admitted = reservoir(buffer, key, mask)

    def place_row(carry, row):
        losses, draws, filled = carry
        slot, loss = row
        worst = jnp.argmin(loss_aware.score_losses(losses, draws, filled))
        slot = jnp.where((slot < capacity) & jnp.all(filled), worst, slot)
        slot = slot.astype(jnp.int32)
        losses = losses.at[slot].set(loss, mode="drop")
        draws = draws.at[slot].set(0, mode="drop")
        filled = filled.at[slot].set(True, mode="drop")
        return (losses, draws, filled), slot

    carry = items["loss"], items["draws"], buffer.filled
    return jax.lax.scan(place_row, carry, (admitted, loss))[1]


def _place_in_turn(buffer, state, key, label, mask, place):
    """Place rows one after another; return their slots and the policy's state.

    Only the labels are carried through the loop, not the items.

    Args:
      place: (class in each slot i32[capacity], -1 where free; rows stored of each
        class i32[C]; kept; the row's class; draw) -> (slot, kept), where draw(n) is a
        integer below n.
    """
    mask = jnp.asarray(mask, bool)
    chex.assert_rank(mask, 1)
    chex.assert_equal_shape([label, mask])
    classes, capacity = len(jax.tree.leaves(state)[0]), buffer.capacity
    stored = jnp.where(buffer.filled, buffer.items["label"], -1)
    index = jnp.where(stored < 0, classes, stored)
    counts = jnp.zeros((classes,), jnp.int32).at[index].add(1, mode="drop")

    def place_row(carry, row):
        stored, counts, state = carry
        label, number, exists = row

        def draw(span):
            drawn = _draw_below(key, number, jnp.maximum(span, 1).astype(jnp.uint32))
            return drawn.astype(jnp.int32)

        slot, after = place(stored, counts, state, label, draw)
        slot = jnp.where(exists, slot, capacity).astype(jnp.int32)
        state = jax.tree.map(lambda new, old: jnp.where(exists, new, old), after, state)
        enters = slot < capacity
        evicted = stored[jnp.minimum(slot, capacity - 1)]
        counts = counts.at[evicted].add(-(enters & (evicted >= 0)).astype(jnp.int32))
        counts = counts.at[label].add(enters.astype(jnp.int32))
        stored = stored.at[slot].set(label, mode="drop")
        return (stored, counts, state), slot

    number = jnp.minimum(_stream_numbers(buffer, mask), _MOST)
    carry = stored, counts, state
    (_, _, state), slots = jax.lax.scan(place_row, carry, (label, number, mask))
    return slots, state


def _nth_true(pool, n):
    """Return the index of the (n+1)-th True in bool[K], i32[]; K if there is none."""
    return jnp.sum(jnp.cumsum(pool, dtype=jnp.int32) <= n, dtype=jnp.int32)


def _stream_numbers(buffer, mask):
    """Number each unmasked row in the stream, u32[B]; arbitrary for others."""
    before = jnp.cumsum(mask, dtype=jnp.uint32) - mask
    return buffer.seen.astype(jnp.uint32) + before


def _draw_below(key, number, span):
    """Draw a uniform integer below `span`, u32[], for row `number`.

    The number is (bits * span) >> 64 with 64 random bits. f32 has too few bits, 24; a
    remainder favours small values (by 1/8 at 1.6e9).

    Args:
      number, span: u32[], span from 1 to 2^31.
    """
    high, low = jax.random.bits(jax.random.fold_in(key, number), (2,), jnp.uint32)
    partial = high * span  # modulo 2^32
    carry = partial + _upper_bits(low, span) < partial
    return _upper_bits(high, span) + carry


def _upper_bits(a, b):
    """Return upper 32 bits of the product of two u32, without 64-bit integers."""
    a1, a0, b1, b0 = a >> 16, a & 0xFFFF, b >> 16, b & 0xFFFF
    first = a1 * b0 + (a0 * b0 >> 16)  # no sum here reaches 2^32
    second = a0 * b1 + (first & 0xFFFF)
    return a1 * b1 + (first >> 16) + (second >> 16)


class Policy(NamedTuple):
    """A replay policy as methods call it.

    The functions above take only what they read, so that they work without a
    method. This record gives them one signature, with the items that each reads.
    """

    # (buffer, state, key, items, mask) -> (slots i32[B], state). `items` are those of
    # the incoming rows, with the fields that `reads` names.
    choose: Callable
    # (num_classes, num_tasks) -> state before the first row, such as counts
    start: Callable = lambda num_classes, num_tasks: {}
    # (num_classes, num_tasks) -> smallest capacity
    least: Callable = lambda num_classes, num_tasks: 1
    # Items that the policy reads: "label" and "task" i32[], which every method stores,
    # or those that its function names.
    reads: tuple[str, ...] = ()


def _adapt_policy(function, *takes, counts=(), reads=None, **fields) -> Policy:
    """Wrap a function (buffer, *counts, *takes, mask) -> slots, *counts as a policy.

    Args:
      takes: "key", or names of items.
      counts: names of the policy's counts.
      reads: names of the items; None: those in `takes`.
      fields: fields of the record.
    """

    def choose(buffer, state, key, items, mask):
        arguments = [state[name] for name in counts]
        arguments += [key if name == "key" else items[name] for name in takes]
        result = function(buffer, *arguments, mask)
        slots, *after = result if counts else (result,)
        return slots, dict(zip(counts, after, strict=True))

    choose.__doc__ = function.__doc__
    if reads is None:
        reads = tuple(name for name in takes if name != "key")
    return Policy(choose, reads=reads, **fields)


def _adapt_ring(name, groups) -> Policy:
    """Wrap `ring` as a policy; `groups` names the number of its rings."""

    def start_state(*numbers):
        return {"turn": jnp.zeros((groups(*numbers),), jnp.int32)}

    return _adapt_policy(ring, name, counts=("turn",), start=start_state, least=groups)


POLICIES = {
    "reservoir": _adapt_policy(reservoir, "key"),
    "batched_reservoir": _adapt_policy(batched_reservoir, "key"),
    "fifo": _adapt_policy(fifo),
    "class_balanced": _adapt_policy(
        class_balanced,
        "key",
        "label",
        counts=("met", "full"),
        start=lambda num_classes, num_tasks: {
            "met": jnp.zeros((num_classes,), jnp.int32),
            "full": jnp.zeros((num_classes,), bool),
        },
    ),
    "greedy_balanced": _adapt_policy(
        greedy_balanced,
        "key",
        "label",
        counts=("rank",),
        start=lambda num_classes, num_tasks: {
            "rank": jnp.full((num_classes,), num_classes, jnp.int32)
        },
    ),
    "ring": _adapt_ring("label", lambda num_classes, num_tasks: num_classes),
    "task_ring": _adapt_ring("task", lambda num_classes, num_tasks: num_tasks),
    "min_redundancy": _adapt_policy(
        min_redundancy, reads=("feature", "used", "number")
    ),
    "duel": _adapt_policy(duel, "feature"),
    "loss_aware": _adapt_policy(replace_lowest, reads=("loss", "draws")),
    "loss_aware_reservoir": _adapt_policy(
        replace_in_reservoir, "key", "loss", reads=("loss", "draws")
    ),
    "gss": _adapt_policy(gss, "key", "score"),
}


def look_up(name: str) -> Policy:
    """Look up a policy of `POLICIES`, or make one from the user's module.

    Raises:
      Refused: naming config.replay.policy and what is allowed.
    """
    field = "config.replay.policy"
    entry = lookup.find_entry(POLICIES, name, field)
    policy = entry if name in POLICIES else entry()
    return lookup.check_type(policy, Policy, name, field)
