"""Weigh subsets of rows so that their gradients add up to the gradient of all rows.

Gradient coresets as in Tiwari et al., "GCR: Gradient Coreset Based Replay Buffer
Selection for Continual Learning", CVPR 2022, after Killamsetty et al., "GRAD-MATCH",
ICML 2021: orthogonal matching pursuit with non-negative weights and a ridge. It needs
only the inner products of the gradients.
"""

import functools
from collections.abc import Callable

import chex
import jax
import jax.numpy as jnp
import numpy as np

from jaxcl.memory import buffer, quadratic

_dot = functools.partial(jnp.matmul, precision=jax.lax.Precision.HIGHEST)


def match_gradients(
    gram: jax.Array,
    target: jax.Array,
    member: jax.Array,
    budget: jax.Array,
    *,
    size: int,
    ridge: float = 0.5,
    tol: float = 1e-5,
) -> jax.Array:
    """Weigh a few rows so that their gradients a_i add up to a target b.

    Minimises |b - sum_i x_i a_i|^2 + ridge |x|^2 over x >= 0 with at most `budget`
    weights above 0, greedily: the row whose gradient has the largest inner product with
    the residual of b joins, and all weights are solved for again. Rows whose weight
    becomes 0 leave. It ends earlier if no row has a positive product.

    Args:
      gram: f32[N,N], <a_i, a_j>.
      target: f32[N], <a_i, b>.
      member: bool[N], rows to choose from.
      budget: i32[], 1 to `size`.
      size: Python int, upper bound of `budget`.
      ridge: penalty, above 0 where gradients may be linearly dependent.
      tol: a product counts as positive above `tol` times the largest entry of `target`.

    Returns:
      f32[N], weights; 0 where a row is not chosen.

    Source: GCR, algorithm 3; released code's `lam` for `ridge`.
    """
    chex.assert_rank([gram, target, member], [2, 1, 1])
    count = len(target)
    least = tol * jnp.max(jnp.abs(jnp.where(member, target, 0)))

    def slopes(x):
        residual = target - _dot(gram, x)
        return jnp.where(member & (x <= 0), residual, -jnp.inf)

    def add_row(carry):
        x, rounds = carry
        chosen = (x > 0).at[jnp.argmax(slopes(x))].set(True)
        rows = jnp.nonzero(chosen, size=size, fill_value=count)[0]
        exists = rows < count
        inner = gram.at[rows[:, None], rows].get(mode="fill", fill_value=0)
        # Rows that only fill the shape have the target 0 and so the weight 0.
        inner += jnp.diag(jnp.where(exists, ridge, 1).astype(gram.dtype))
        row_target = target.at[rows].get(mode="fill", fill_value=0)
        start = x.at[rows].get(mode="fill", fill_value=0)
        weights, _ = quadratic.active_set(inner, -row_target, start, exists, tol=least)
        return jnp.zeros_like(x).at[rows].set(weights, mode="drop"), rounds + 1

    def goes_on(carry):
        x, rounds = carry
        few = jnp.sum(x > 0) < budget
        # Rows may leave and join again. Each round improves x, apart from rounding, so
        # the number of rounds is bounded.
        return few & (jnp.max(slopes(x)) > least) & (rounds < 3 * size)

    return jax.lax.while_loop(goes_on, add_row, (jnp.zeros_like(target), 0))[0]


def fill_randomly(
    key: jax.Array, weights: jax.Array, member: jax.Array, budget: jax.Array
) -> jax.Array:
    """Add random rows of weight 1 until `budget` rows are chosen.

    Args:
      key: threefry key.
      weights: f32[N], from `match_gradients`.
      member: bool[N], rows to choose from.
      budget: i32[].

    Returns:
      f32[N].
    """
    free = member & (weights <= 0)
    noise = jnp.where(free, jax.random.uniform(key, weights.shape), -1)
    rank = jnp.argsort(jnp.argsort(-noise))
    joins = free & (rank < budget - jnp.sum(weights > 0))
    return jnp.where(joins, 1, weights)


def share_budget(counts: np.ndarray, total: int) -> np.ndarray:
    """Share a memory in proportion to the rows of each class, on the host.

    Each class gets the floor of its share, but one slot at least; the rest goes to the
    largest remainders, the first of equal ones. If there are more classes than slots,
    the largest classes get one each.

    Args:
      counts: i[C], rows of each class, 1 or more.
      total: slots.

    Returns:
      i64[C], at most `counts`; their sum is `total`, or the sum of `counts` if smaller.
    """
    counts = np.asarray(counts, np.int64)
    total = min(total, int(counts.sum()))
    if total <= len(counts):
        shares = np.zeros_like(counts)
        shares[np.argsort(-counts, kind="stable")[:total]] = 1
        return shares
    exact = total * counts / counts.sum()
    shares = np.maximum(np.floor(exact).astype(np.int64), 1)
    while shares.sum() != total:
        step = 1 if shares.sum() < total else -1
        able = shares < counts if step > 0 else shares > 1
        gain = np.where(able, step * (exact - shares), -np.inf)
        shares[np.argmax(gain)] += step
    return shares


@functools.partial(jax.jit, static_argnames=("size", "ridge"))
def choose_coreset(
    key: jax.Array,
    atoms: jax.Array,
    member: jax.Array,
    budget: jax.Array,
    *,
    size: int,
    ridge: float = 0.5,
) -> jax.Array:
    """Weigh the rows of a coreset: match the total gradient, then add random rows.

    Args:
      key: threefry key.
      atoms: f32[N,P], gradients.
      member: bool[N], rows to choose from.
      budget: i32[], 1 to `size`.
      size, ridge: numbers, see `match_gradients`.

    Returns:
      f32[N], above 0 for `budget` rows, or for all members if they are fewer.
    """
    atoms = jnp.where(member[:, None], atoms, 0)
    gram = _dot(atoms, atoms.T)
    total = jnp.sum(gram, axis=1)
    weights = match_gradients(gram, total, member, budget, size=size, ridge=ridge)
    return fill_randomly(key, weights, member, budget)


def reselect(
    key: jax.Array,
    atoms_of: Callable,
    *,
    weight: np.ndarray,
    task: np.ndarray,
    label: np.ndarray,
    filled: np.ndarray,
    capacity: int,
    ridge: float = 0.5,
) -> np.ndarray:
    """Weigh the stored rows so that every task has an equal part of the memory.

    A part has floor(capacity / tasks) slots; the last task also gets the remainder. The
    classes of a part share it by `share_budget`, and `choose_coreset` picks the rows of
    a class. A class that keeps all its rows keeps their weights. Runs on the host.

    Args:
      key: threefry key.
      atoms_of: i32[M] rows -> f32[M,P], gradients of the rows' weighted losses. M is a
        power of two, so that few programs serve classes of all sizes.
      weight, task, label, filled: numpy [N], values of all rows.
      capacity: slots.
      ridge: penalty, see `match_gradients`.

    Returns:
      f32[N], each weight times its factor from `choose_coreset`; 0: the row is dropped.
      At most `capacity` rows stay.
    """
    tasks, chosen = np.unique(task[filled]), np.zeros_like(weight)
    part, number = capacity // max(len(tasks), 1), 0
    for present in tasks:
        members = filled & (task == present)
        classes, counts = np.unique(label[members], return_counts=True)
        slots = part if present != tasks[-1] else capacity - part * (len(tasks) - 1)
        for class_, budget in zip(classes, share_budget(counts, slots), strict=True):
            rows, number = np.flatnonzero(members & (label == class_)), number + 1
            if budget == len(rows):
                chosen[rows] = weight[rows]
            elif budget:
                k_class = jax.random.fold_in(key, number)
                factors = _choose_among(k_class, atoms_of, rows, int(budget), ridge)
                chosen[rows] = weight[rows] * factors
    return chosen


def _choose_among(key, atoms_of, rows, budget, ridge):
    """Run `choose_coreset` among `rows`, padded to a power of two; f32[len(rows)]."""
    size, width = _next_power_of_two(budget), _next_power_of_two(len(rows))
    weights = choose_coreset(
        key,
        atoms_of(np.pad(rows, (0, width - len(rows)))),
        np.arange(width) < len(rows),
        np.int32(budget),
        size=size,
        ridge=ridge,
    )
    return np.asarray(weights)[: len(rows)]


def _next_power_of_two(number: int) -> int:
    """Return the smallest power of two that is at least `number`."""
    return 1 << (number - 1).bit_length()


def draw_mixture(
    key: jax.Array,
    memory: buffer.Buffer,
    candidates: buffer.Buffer,
    size: int,
    *,
    span: jax.Array,
):
    """Draw rows from two buffers, in proportion to the rows that each buffer has seen.

    size * candidates.seen / (candidates.seen + memory.seen) rows are candidates,
    rounded up or down at random. If one buffer has too few rows, the other gives more.

    Args:
      key: threefry key.
      memory, candidates: Buffer, with the same items.
      size: number of rows, at most the slots of both.
      span: i32[], end of the slots that candidates are drawn from.

    Returns:
      items, mask and slots as `buffer.sample`, candidates first; slots count in the
      buffer that a row comes from.
    """
    k_new, k_old, k_round = jax.random.split(key, 3)
    allowed = buffer.log_weights(jnp.arange(candidates.capacity) < span)
    most = min(size, candidates.capacity), min(size, memory.capacity)
    new = buffer.sample(candidates, k_new, most[0], log_weights=allowed)
    old = buffer.sample(memory, k_old, most[1])
    met_new, met_old = (b.seen.astype(jnp.float32) for b in (candidates, memory))
    share = met_new / jnp.maximum(met_new + met_old, 1)
    wanted = jnp.floor(share * size + jax.random.uniform(k_round)).astype(jnp.int32)
    num_new, num_old = jnp.sum(new[1]), jnp.sum(old[1])
    count = jnp.minimum(jnp.maximum(wanted, size - num_old), num_new)
    row = jnp.arange(min(size, sum(most)))
    source = jnp.where(row < count, row, most[0] + row - count)
    source = jnp.minimum(source, sum(most) - 1)
    items, _, slots = jax.tree.map(lambda *x: jnp.concatenate(x)[source], new, old)
    return items, row < count + num_old, slots
