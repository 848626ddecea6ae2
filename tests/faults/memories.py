"""Faults of memories: policies, buffers, queues, selection."""

import jax
import jax.numpy as jnp

from faults import fault
from faults.fault import gives, instead, swaps, takes
from jaxcl import core
from jaxcl.memory import redundancy


def _forgets(name, count):
    """Patch: a policy does not keep what it counted."""

    def patch(table):
        right = table[name]

        def choose(buffer, state, *arguments):
            slots, after = right.choose(buffer, state, *arguments)
            return slots, after | {count: state[count]}

        return table | {name: right._replace(choose=choose)}

    return patch


def _all(mask):
    return None if mask is None else jnp.ones_like(mask, bool)


def _nothing(_):
    return None


def _first_of_a_batch(buffer, mask):
    """First in, first out, but of a batch that is too large the first rows stay."""
    mask = jnp.asarray(mask, bool)
    rank = jnp.cumsum(mask)
    slots = (buffer.seen + rank - 1) % buffer.capacity
    return jnp.where(mask & (rank <= buffer.capacity), slots, buffer.capacity)


def _from_the_last(write):
    """Write rows in reverse, so that of several in a slot the first stays."""

    def wrong(buffer, slots, items, mask=None):
        mask = jnp.ones(len(slots), bool) if mask is None else jnp.asarray(mask)
        items = jax.tree.map(lambda x: x[::-1], items)
        return write(buffer, slots[::-1], items, mask[::-1])

    return wrong


def _without_dropped_rows(after, of):
    """Count the rows that were stored alone."""
    slots, capacity = jnp.asarray(of["slots"]), of["buffer"].capacity
    mask = True if of["mask"] is None else jnp.asarray(of["mask"], bool)
    stored = jnp.sum(mask & (slots < capacity), dtype=jnp.int32)
    return after._replace(seen=of["buffer"].seen + stored)


def _biased(reservoir):
    """Take the reservoir of released code, which draws for a batch at once."""

    def wrong(buffer, key, mask):
        from jaxcl.memory import policies

        return policies.batched_reservoir(buffer, key, mask)

    return wrong


_policies = [
    *fault.of(
        "memory.policies.reservoir",
        "test_memory.py::test_reservoir_against_one_row_at_a_time[17]",
        ("memory: the reservoir is the biased one of released code", _biased),
        (
            "memory: the reservoir stores rows that do not exist",
            takes(mask=_all),
            "test_memory.py::test_reservoir_against_one_row_at_a_time[17]",
        ),
    ),
    *fault.of(
        "memory.policies.fifo",
        "test_memory.py::test_fifo_against_a_queue[13]",
        (
            "memory: fifo keeps the first rows of a batch that is too large",
            instead(_first_of_a_batch),
        ),
    ),
    *fault.of(
        "memory.policies.POLICIES",
        "test_policies.py::test_class_balanced_against_one_row_at_a_time",
        (
            "memory: a ring begins each batch where the last began",
            _forgets("ring", "turn"),
            "test_policies.py::test_rings_against_queues[ring-16]",
        ),
        (
            "memory: class_balanced forgets how many rows of a class came",
            _forgets("class_balanced", "met"),
        ),
        (
            "memory: gdumb's sampler forgets which classes it has met",
            _forgets("greedy_balanced", "rank"),
            "test_policies.py::test_greedy_balanced_against_one_row_at_a_time",
        ),
    ),
]

_minred = "test_redundancy.py::test_a_stream_against_one_row_at_a_time"
_scored = [
    *fault.of(
        "memory.redundancy.find_evicted",
        _minred,
        ("memory: minred compares rows that were never drawn", takes(used=_all)),
        (
            "memory: minred drops the oldest rows",
            instead(
                lambda rows, used, number, filled, count: redundancy.find_oldest(
                    number, filled, count
                )
            ),
        ),
    ),
    *fault.of(
        "memory.redundancy.move_vectors",
        "test_redundancy.py::test_stored_vectors_move_half_of_the_way_after_their_first_use",
        (
            "memory: minred's vectors stay as they were stored",
            instead(lambda old, *_: old),
        ),
        (
            "memory: minred's vectors average from the first use on",
            takes(used=_all),
        ),
    ),
    *fault.of(
        "memory.loss_aware.score_losses",
        "test_loss_aware.py::test_a_low_loss_and_many_draws_make_a_low_score",
        (
            "memory: rows that were drawn often stay",
            takes(draws=lambda draws: jnp.max(draws) - draws),
        ),
        ("memory: empty slots have a score", takes(filled=_all)),
    ),
    *fault.of(
        "memory.loss_aware.move_losses",
        "test_loss_aware.py::test_a_running_loss_moves_half_of_the_way",
        ("memory: a running loss is the last one", instead(lambda _, new: new)),
    ),
    *fault.of(
        "memory.herding.herding",
        "test_herding.py::test_features_are_used_as_they_are",
        ("memory: herding normalises features", takes(features=core.l2_normalize)),
        (
            "memory: herding chooses rows that do not exist",
            takes(mask=_nothing),
            "test_herding.py::test_rows_that_do_not_exist_are_never_chosen",
        ),
    ),
]

_buffers = [
    *fault.of(
        "memory.buffer.write",
        "test_memory.py::test_write_against_one_row_at_a_time",
        ("memory: of rows in one slot the first stays", _from_the_last),
        ("memory: rows that do not exist are written", takes(mask=_nothing)),
        ("memory: dropped rows do not count as seen", gives(_without_dropped_rows)),
    ),
    *fault.of(
        "memory.buffer.sample",
        "test_memory.py::test_weighted_draws_follow_the_weights",
        ("memory: draws ignore their weights", takes(log_weights=_nothing)),
        (
            "memory: empty slots are drawn",
            takes(buffer=lambda held: held._replace(filled=_all(held.filled))),
            "test_memory.py::test_rows_that_do_not_exist_are_masked",
        ),
    ),
    *fault.of(
        "memory.buffer.free_slots",
        _minred,
        ("memory: rows that do not exist take free slots", takes(mask=_all)),
    ),
    *fault.of(
        "memory.queue.enqueue",
        "test_queue.py::test_enqueue_against_a_list",
        ("memory: a queue at rest is written", takes(active=lambda _: True)),
        (
            "memory: batches of two sizes are taken for one",
            takes(aligned=lambda _: True),
            "test_queue.py::test_batches_of_two_sizes_overwrite_the_oldest_rows",
        ),
    ),
]

_consolidated = "test_importance.py::test_the_gradient_is_that_of_the_sum_of_quadratics"
_importance = [
    *fault.of(
        "memory.importance.gradient",
        _consolidated,
        ("memory: ewc's penalty pushes away", takes(weight=lambda weight: -weight)),
        (
            "memory: ewc's penalty may jump over its minimum",
            takes(lr=lambda _: 0.0),
            "test_importance.py::test_a_step_never_jumps_over_the_minimum",
        ),
    ),
    *fault.of(
        "memory.importance.consolidate",
        _consolidated,
        (
            "memory: ewc holds to the last task alone",
            takes(
                importance=lambda old: old._replace(
                    precision=jax.tree.map(jnp.zeros_like, old.precision),
                    anchor=jax.tree.map(jnp.zeros_like, old.anchor),
                )
            ),
        ),
        (
            "memory: ewc keeps the squares of the last task",
            gives(lambda new, of: new._replace(squares=of["importance"].squares)),
        ),
    ),
]

_selection = [
    *fault.of(
        "memory.selection.proposal",
        "test_selection.py::test_proposal_against_loops",
        ("memory: cclis proposes by unseen classes", takes(seen=_all)),
    ),
    *fault.of(
        "memory.selection.quotas",
        "test_selection.py::test_every_quota_has_its_share_as_its_mean",
        ("memory: cclis swaps quotas of old and new classes", swaps("old", "new")),
    ),
    *fault.of(
        "memory.selection.choose",
        "test_selection.py::test_rows_are_drawn_by_successive_sampling[True]",
        (
            "memory: cclis draws rows of a class alike",
            takes(weights=lambda w: None if w is None else jnp.ones_like(w)),
        ),
    ),
    *fault.of(
        "memory.duel.select",
        "test_duel_memory.py::test_select_is_the_plain_loop[windows-affine-False]",
        (
            "memory: duel lets the newcomer go at once",
            takes(newcomer_competes=lambda competes: not competes),
        ),
        (
            "memory: duel's score is always affine",
            takes(score=lambda _: "affine"),
            "test_duel_memory.py::test_select_is_the_plain_loop[windows-exponential-False]",
        ),
        (
            "memory: duel takes rows that do not exist",
            takes(incoming_mask=_nothing),
            "test_duel_memory.py::test_rows_that_do_not_exist_change_nothing"
            "[windows-18-affine-False]",
        ),
    ),
    *fault.of(
        "memory.duel.distinctiveness",
        "test_duel_memory.py::test_distinctiveness_and_its_gradient[exponential]",
        ("memory: distinctiveness counts empty slots", takes(filled=_nothing)),
    ),
    *fault.of(
        "memory.duel.is_safe",
        "test_duel_memory.py"
        "::test_an_update_is_safe_where_the_memory_stays_as_distinct[affine]",
        ("memory: every update of duel is safe", gives(jnp.ones_like)),
    ),
]

FAULTS = [*_policies, *_scored, *_buffers, *_importance, *_selection]
