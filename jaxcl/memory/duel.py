"""Drop the most duplicated rows of a memory, without labels: DUEL.

Each incoming row replaces the stored row that is most similar to all others. With the
affine score this is the row with the largest product with the sum of the stored rows.
So no matrix of scores is needed, and most rounds look at few of the rows: see `select`.

Source: Choi et al., "DUEL: Duplicate Elimination on Active Memory for Self-Supervised
Class-Imbalanced Learning", AAAI 2024.
"""

import functools
from collections.abc import Callable
from typing import Literal, NamedTuple, get_args

import chex
import jax
import jax.numpy as jnp

from jaxcl import core, sharding
from jaxcl.memory import buffer

Score = Literal["affine", "exponential"]
_SCORES = get_args(Score)
# Rows that a round looks at (the second number is a share of K), and rounds after which
# all rows are looked at again. From 64 to 4096 rows and 32 to 256 rounds, these were
# the fastest or nearly so, on two CPU cores for K = 2048 to 65536.
_CANDIDATES = 512, 1 / 32
_ROUNDS = 256
_BLOCK = 256  # stored rows whose exponential scores are summed at a time


class _Window(NamedTuple):
    """The state of a window: rounds that look at a few candidates only."""

    rows: jax.Array  # f32[C+R, Z], candidates by index, then the next rows to come
    where: jax.Array  # i32[C+R], their indices in [memory; incoming]
    alive: jax.Array  # bool[C+R], present
    total: jax.Array  # f32[Z], sum of all present rows
    start: jax.Array  # f32[Z], `total` when the window began
    bound: jax.Array  # f32[], best score of the other rows when the window began
    first: jax.Array  # i32[], round at which the window began
    round: jax.Array  # i32[], number of the next round
    sure: jax.Array  # bool[], the most duplicated row is among the candidates


def similarity(
    cosines: jax.Array, *, score: str = "affine", temperature: float = 0.5
) -> jax.Array:
    """Compute the duplication probability q of two unit rows from their cosine s.

    "affine": (1 + s) / 2 (DUEL, Appendix D); "exponential": exp((s - 1) / tau)
    (Section 3).

    Args:
      cosines: f32[...].
      score: "affine" or "exponential".
      temperature: tau of the exponential score.

    Returns:
      f32[...], in [0, 1].
    """
    core.check_choice("score", score, _SCORES)
    if score == "affine":
        return (1 + cosines) / 2
    return jnp.exp((cosines - 1) / temperature)


def distinctiveness(
    queries: jax.Array,
    memory: jax.Array,
    *,
    temperature: float = 0.5,
    score: str = "exponential",
    filled: jax.Array | None = None,
    logsumexp: Callable | None = None,
) -> jax.Array:
    """Compute each query's distinctiveness against a memory (DUEL, Section 3).

    I_d(x; M) = -log (1/K sum_k q(x, m_k)), in nats; large if few rows of the memory
    resemble x.

    Args:
      queries: f32[N, Z], unit rows.
      memory: f32[K, Z], unit rows.
      temperature: tau of the exponential score.
      score: "exponential" or "affine", see `similarity`.
      filled: bool[K], rows that exist; None: all.
      logsumexp: `losses.streaming.logsumexp`; None: the matrix of products is formed.
        The affine score never forms it.

    Returns:
      f32[N]; inf where no row exists.
    """
    chex.assert_rank([queries, memory], 2)
    core.check_choice("score", score, _SCORES)
    filled = jnp.ones(len(memory), bool) if filled is None else filled
    count = jnp.sum(filled)
    if score == "affine":  # linear in the rows: their sum is enough
        total = jnp.sum(jnp.where(filled[:, None], memory, 0), axis=0)
        products = core.dot(queries, total[None])[:, 0]
        # Rounding may take the mean product of an opposite row below -1.
        share = jnp.maximum(1 + products / jnp.maximum(count, 1), 0) / 2
        return jnp.where(count > 0, -jnp.log(share), jnp.inf)
    if logsumexp is not None:
        total = logsumexp(queries / temperature, memory, exists=filled)
        return jnp.where(count > 0, jnp.log(count) - total + 1 / temperature, jnp.inf)
    logits = (core.dot(queries, memory) - 1) / temperature
    logits = jnp.where(filled, logits, -jnp.inf)
    total = jax.nn.logsumexp(logits, axis=-1)
    return jnp.where(count > 0, jnp.log(count) - total, jnp.inf)


def incoming_slots(keep: jax.Array, capacity: int) -> jax.Array:
    """Return the slots of the incoming rows that `select` keeps.

    Args:
      keep: bool[K+B], from `select`.
      capacity: K.

    Returns:
      i32[B]: the n-th row kept gets the n-th free slot; K: the row is dropped.
    """
    return buffer.free_slots(~keep[:capacity], keep[capacity:])


def is_safe(
    memory: jax.Array,
    incoming: jax.Array,
    keep: jax.Array,
    *,
    score: str = "affine",
    temperature: float = 0.5,
    filled: jax.Array | None = None,
    logsumexp: Callable | None = None,
) -> jax.Array:
    """Tell whether an update keeps the memory as distinct (DUEL, Definition 4).

    The paper averages the distinctiveness over all data; here the incoming rows stand
    for them, with the policy's score. An update of a memory with room is always safe.
    The definition compares memories of one size; and incoming rows resemble themselves,
    so the memory of the first few batches would always seem best.

    Args:
      memory, incoming, score, temperature, filled: arguments of `select`.
      keep: bool[K+B], from `select`.
      logsumexp: argument of `distinctiveness`.

    Returns:
      bool[].
    """
    filled = jnp.ones(len(memory), bool) if filled is None else filled
    options = dict(temperature=temperature, score=score, logsumexp=logsumexp)
    before = distinctiveness(incoming, memory, **options)
    # The rows are in two arrays: the mean of q over both comes from the two means.
    means, weights = [], []
    for rows, mask in ((memory, keep[: len(memory)]), (incoming, keep[len(memory) :])):
        means.append(-distinctiveness(incoming, rows, filled=mask, **options))
        weights.append(jnp.sum(mask))
    shares = jnp.stack(weights) / jnp.sum(keep)
    after = -jax.nn.logsumexp(
        jnp.stack(means, axis=-1), axis=-1, b=jnp.where(shares > 0, shares, 0)
    )
    return (jnp.mean(before) <= jnp.mean(after)) | ~jnp.all(filled)


def select(
    memory: jax.Array,
    incoming: jax.Array,
    *,
    score: str = "affine",
    temperature: float = 0.5,
    filled: jax.Array | None = None,
    incoming_mask: jax.Array | None = None,
    newcomer_competes: bool = False,
    split: bool = False,
) -> jax.Array:
    """Choose the rows of [memory; incoming] that stay after the batch (DUEL).

    For each incoming row in order, the present row with the largest sum of q to all
    present rows, itself included, is evicted; then the incoming row is inserted
    (Algorithm 4, "implemented version"). The first of equal rows goes. While the memory
    has room, rows are inserted and none is evicted.

    With the affine score the sum is (n + z_j . t) / 2, where t is the sum of the n
    present rows; an update of t costs one row. z_j . t changes by at most |t - t_0|, so
    a row that is further below the best one cannot win. A window of rounds therefore
    looks at the best rows and at newer ones; all rows are looked at again when this
    bound does not decide. The plain loop makes the same choices. The exponential score
    has no such form: every round looks at all rows, after a first pass over all pairs.
    No array is larger than the inputs.

    On accelerators every round looks at all rows, which takes fewer kernels. If two
    rows tie except for rounding, either may go.

    Args:
      memory: f32[K, Z], unit rows.
      incoming: f32[B, Z], unit rows.
      score: "affine" or "exponential", see `similarity`.
      temperature: tau of the exponential score.
      filled: bool[K], slots that hold a row; None: all.
      incoming_mask: bool[B], incoming rows that exist; None: all. Masked rows, which
        may be nan, are not kept and change nothing.
      newcomer_competes: whether the row is inserted first, so that it may itself be
        evicted (Algorithm 1).
      split: whether `memory` is split over devices on axis 0. Then accelerators, too,
        look at windows: a round over all rows would send messages.

    Returns:
      bool[K+B], at most K of them True.

    Raises:
      Refused: an unknown score.
    """
    chex.assert_rank([memory, incoming], 2)
    core.check_choice("score", score, _SCORES)
    filled = jnp.ones(len(memory), bool) if filled is None else filled
    count, order = len(incoming), jnp.arange(len(incoming))
    if incoming_mask is not None:
        count, order = jnp.sum(incoming_mask), jnp.argsort(~incoming_mask, stable=True)
        # Those that exist come first; the others are never reached.
        incoming = jnp.where(incoming_mask[:, None], incoming, 0)[order]
    room = jnp.minimum(len(memory) - jnp.sum(filled), count)
    # A round evicts a row, then inserts row number round + ahead. That may not exist
    # after the last eviction, when the scores are not read any more.
    ahead = int(newcomer_competes)
    joined = jnp.arange(len(incoming)) < room + ahead
    present = jnp.concatenate([filled, joined])
    rows = memory, incoming, present, room, count
    by_windows = functools.partial(_select_by_windows, ahead=ahead)
    if score == "exponential":
        keep = _select_exponential(*rows, ahead=ahead, temperature=temperature)
    elif sharding.on_cpu() or split:
        keep = by_windows(*rows)
    else:
        over_all = functools.partial(_select_over_all, ahead=ahead)
        forms = dict.fromkeys(("cuda", "rocm", "tpu"), over_all)
        keep = jax.lax.platform_dependent(*rows, default=by_windows, **forms)
    if incoming_mask is None:
        return keep
    stays, comes = keep[: len(memory)], keep[len(memory) :]
    comes = comes & (jnp.arange(len(incoming)) < count)
    return jnp.concatenate([stays, jnp.zeros_like(comes).at[order].set(comes)])


def _select_over_all(memory, incoming, present, room, count, *, ahead):
    """Play the rounds from `room` to `count` with the affine score, over all rows.

    The number of rounds is known: of a loop of unknown length, a GPU's host would read
    back after each round whether it goes on. Scores are computed again in every round:
    no rounding piles up in them.
    """
    rows = jnp.concatenate([memory, incoming])
    capacity = len(memory)

    def drop_one(round, carry):
        present, total = carry
        # Not a product of XLA's: the sum fuses with the mask, in full float32.
        scores = jnp.sum(rows * total, axis=1)
        worst = jnp.argmax(jnp.where(present, scores, -jnp.inf))
        joins = capacity + round + ahead
        gain = rows[jnp.minimum(joins, len(rows) - 1)] - rows[worst]
        order = jnp.arange(len(rows))
        after = (present & (order != worst)) | (order == joins)
        plays = (room <= round) & (round < count)
        return jnp.where(plays, after, present), jnp.where(plays, total + gain, total)

    total = jnp.sum(jnp.where(present[:, None], rows, 0), axis=0)
    return jax.lax.fori_loop(0, len(incoming), drop_one, (present, total))[0]


def _exact_products(a, b):
    """Multiply in full float32; `slack` in `_select_by_windows` bounds the rounding.

    The defaults are coarser, one pass of bfloat16 on a TPU and TF32 on a GPU. Products
    with a vector are bound by reading the memory, so that precision costs nothing.
    """
    return jnp.matmul(a, b, precision=jax.lax.Precision.HIGHEST)


def _products(memory, incoming, row):
    """Multiply all rows with one, f32[K+B], without joining (copying) them."""
    return jnp.concatenate([_exact_products(rows, row) for rows in (memory, incoming)])


def _pick_row(memory, incoming, index):
    """Return row `index` of [memory; incoming]."""
    capacity = len(memory)
    stored = memory[jnp.minimum(index, capacity - 1)]
    new = incoming[jnp.clip(index - capacity, 0, len(incoming) - 1)]
    return jnp.where(jnp.asarray(index < capacity)[..., None], stored, new)


def _sum_rows(memory, incoming, present):
    capacity = len(memory)
    present = present.astype(memory.dtype)
    return _exact_products(present[:capacity], memory) + _exact_products(
        present[capacity:], incoming
    )


def _select_by_windows(memory, incoming, present, room, count, *, ahead):
    """Play the rounds from `room` to `count` with the affine score, see `select`."""
    capacity = len(memory)
    least, share = _CANDIDATES
    looked_at = min(max(least, int(share * capacity)), capacity)
    rounds = min(_ROUNDS, len(incoming))
    # Twice the rounding error of a product with a sum of K unit rows. Without it a row
    # outside the window that ties with the best candidate could be missed if the sum
    # moved exactly towards it.
    slack = 64 * jnp.finfo(memory.dtype).eps * capacity

    def open_window(present, total, first):
        scores = jnp.where(present, _products(memory, incoming, total), -jnp.inf)
        best, where = jax.lax.top_k(scores, looked_at + 1)
        # Sort by index, so that the first of equal rows comes first.
        where = jnp.sort(where[:-1])
        comes = first + ahead + jnp.arange(rounds)
        where = jnp.concatenate([where, capacity + comes])
        alive = jnp.arange(len(where)) < len(where) - rounds
        return _Window(
            rows=_pick_row(memory, incoming, where),
            where=where,
            alive=alive,
            total=total,
            start=total,
            bound=best[-1],
            first=first,
            round=first,
            sure=jnp.array(True),
        )

    def drop_one(window):
        scores = _exact_products(window.rows, window.total)
        scores = jnp.where(window.alive, scores, -jnp.inf)
        worst = jnp.argmax(scores)
        shift = jnp.linalg.norm(window.total - window.start)
        begins = window.round == window.first
        is_certain = begins | (scores[worst] > window.bound + shift + slack)
        joins = len(window.rows) - rounds + window.round - window.first
        gain = window.rows[joins] - window.rows[worst]
        alive = window.alive.at[worst].set(False).at[joins].set(True)
        return window._replace(
            alive=jnp.where(is_certain, alive, window.alive),
            total=jnp.where(is_certain, window.total + gain, window.total),
            round=window.round + is_certain,
            sure=is_certain,
        )

    def goes_on(window):
        played = window.round - window.first
        return window.sure & (played < rounds) & (window.round < count)

    def play_window(carry):
        present, total, first = carry
        window = jax.lax.while_loop(
            goes_on, drop_one, open_window(present, total, first)
        )
        present = present.at[window.where].set(window.alive, mode="drop")
        return present, window.total, window.round

    carry = present, _sum_rows(memory, incoming, present), room
    carry = jax.lax.while_loop(lambda carry: carry[2] < count, play_window, carry)
    return carry[0]


def _select_exponential(memory, incoming, present, room, count, *, ahead, temperature):
    """Play the rounds from `room` to `count` with the exponential score."""
    capacity = len(memory)

    def similarity_to_all(row):
        return similarity(
            _products(memory, incoming, row),
            score="exponential",
            temperature=temperature,
        )

    def add_block(block, scores):
        index = block * _BLOCK + jnp.arange(_BLOCK)
        exists = present.at[index].get(mode="fill", fill_value=False)
        columns = jax.vmap(similarity_to_all)(_pick_row(memory, incoming, index))
        return scores + _exact_products(exists.astype(scores.dtype), columns)

    def drop_one(round, carry):
        present, scores = carry
        worst = jnp.argmax(jnp.where(present, scores, -jnp.inf))
        present = present.at[worst].set(False)
        scores = scores - similarity_to_all(_pick_row(memory, incoming, worst))
        joins = capacity + round + ahead
        present = present.at[joins].set(True, mode="drop")
        return present, scores + similarity_to_all(_pick_row(memory, incoming, joins))

    total = capacity + len(incoming)
    blocks = -(-total // _BLOCK)
    scores = jnp.zeros(total, memory.dtype)
    scores = jax.lax.fori_loop(0, blocks, add_block, scores)
    return jax.lax.fori_loop(room, count, drop_one, (present, scores))[0]
