"""Value and choose memory rows by KNN Shapley values.

The value of an example is its contribution to the classification of others by nearest
neighbours: Jia et al., "Efficient Task-Specific Data Valuation for Nearest Neighbor
Algorithms", VLDB 2019. ASER (Shim et al., "Online Class-Incremental Continual Learning
with Adversarial Shapley Value", AAAI 2021) replays and stores rows by these values.

Masks are bool and say which rows exist. Shapes never depend on the memory's contents.
"""

from typing import Literal, get_args

import chex
import jax
import jax.numpy as jnp

from jaxcl import core

Variant = Literal["mean", "max_min", "adversarial"]
VARIANTS = get_args(Variant)


def shapley_values(
    features: jax.Array,
    labels: jax.Array,
    eval_features: jax.Array,
    eval_labels: jax.Array,
    *,
    neighbours: int = 3,
    mask: jax.Array | None = None,
) -> jax.Array:
    """Compute the exact Shapley value of each candidate for each evaluation row.

    For an evaluation row e, a set S of candidates is worth 1/K times the number of rows
    with e's label among the min(K, |S|) rows of S nearest to e. With candidates (1) to
    (N) from the nearest to the farthest, and a_m = 1 if (m) has e's label, else 0,
      s_(N) = a_N min(K, N) / (K N),
      s_(m) = s_(m+1) + (a_m - a_{m+1}) min(K, m) / (K m),
    which is Jia et al., Theorem 1; there K <= N, and s_(N) = a_N / N. The values add up
    to the worth of all candidates. Candidates at the same distance keep their order.

    Args:
      features: f32[N,D], the candidates'; distances are Euclidean, not normalised.
      labels: i32[N].
      eval_features: f32[E,D].
      eval_labels: i32[E].
      neighbours: K, number of nearest rows.
      mask: bool[N], None for all. A masked candidate is worth 0 and changes nothing.

    Returns:
      f32[E,N], in [-1/K, 1/K].
    """
    chex.assert_rank([features, eval_features], 2)
    chex.assert_equal_shape_suffix([features, eval_features], 1)
    chex.assert_equal_shape_prefix([features, labels], 1)
    chex.assert_equal_shape_prefix([eval_features, eval_labels], 1)
    mask = jnp.ones(labels.shape, bool) if mask is None else mask
    chex.assert_equal_shape([labels, mask])
    # Expanding the square into products would lose the digits of small distances.
    difference = eval_features[:, None] - features
    distance = jnp.where(mask, jnp.sum(jnp.square(difference), axis=2), jnp.inf)
    order = jnp.argsort(distance, axis=1)  # rows that do not exist come last
    agrees = (labels == eval_labels[:, None]) & mask
    agrees = jnp.take_along_axis(agrees, order, axis=1).astype(features.dtype)
    following = jnp.pad(agrees[:, 1:], ((0, 0), (0, 1)))
    place = jnp.arange(1, len(labels) + 1)
    weight = jnp.minimum(neighbours, place) / (neighbours * place)
    steps = (agrees - following) * weight.astype(features.dtype)
    sums = jax.lax.cumsum(steps, axis=1, reverse=True)
    rows = jnp.arange(len(order))[:, None]
    return jnp.zeros_like(sums).at[rows, order].set(sums, unique_indices=True)


def aser_score(
    adversarial: jax.Array,
    cooperative: jax.Array,
    cooperative_mask: jax.Array,
    *,
    variant: str = "mean",
) -> jax.Array:
    """Compute ASER's score of each candidate, the adversarial Shapley value.

    The score is high if a candidate helps to classify the memory and confuses incoming
    rows, because it is near them but has another label.
      "mean": mean over cooperative rows - mean over adversarial ones (ASER_mu).
      "max_min": maximum over cooperative rows - minimum over adversarial ones (ASER).
      "adversarial": - sum over adversarial rows.
    Without a cooperative row the mean and the maximum are 0.

    Args:
      adversarial: f32[B,N], `shapley_values` for the incoming rows.
      cooperative: f32[E,N], `shapley_values` for rows of the memory that are no
        candidates.
      cooperative_mask: bool[E].
      variant: name of one of these formulas.

    Returns:
      f32[N].

    Raises:
      Refused: if `variant` is none of them.
    """
    core.check_choice("variant", variant, VARIANTS)
    chex.assert_equal_shape_suffix([adversarial, cooperative], 1)
    chex.assert_equal_shape_prefix([cooperative, cooperative_mask], 1)
    if variant == "adversarial":
        return -jnp.sum(adversarial, axis=0)
    exists = cooperative_mask[:, None]
    if variant == "mean":
        total = jnp.sum(jnp.where(exists, cooperative, 0), axis=0)
        helps = total / jnp.maximum(jnp.sum(cooperative_mask), 1)
        return helps - jnp.mean(adversarial, axis=0)
    best = jnp.max(jnp.where(exists, cooperative, -jnp.inf), axis=0)
    helps = jnp.where(jnp.any(cooperative_mask), best, 0)
    return helps - jnp.min(adversarial, axis=0)


def rank_rows(key: jax.Array, scores: jax.Array, mask: jax.Array) -> jax.Array:
    """Sort rows from the highest score to the lowest, i32[N]; masked rows last.

    Rows with equal scores, which are many, are in random order.
    """
    chex.assert_equal_shape([scores, mask])
    noise = jax.random.bits(key, scores.shape)
    return jnp.lexsort((noise, jnp.where(mask, -scores, jnp.inf)))


def replace_slots(
    key: jax.Array, scores: jax.Array, mask: jax.Array, slots: jax.Array, capacity: int
) -> jax.Array:
    """Choose slots for the incoming rows that score higher than stored ones.

    The candidates with the highest scores stay, as many as are stored now. Incoming
    rows among them take the slots of the stored rows that are not.

    Args:
      key: threefry key, for equal scores.
      scores: f32[S+B], of S stored candidates, then of B incoming rows.
      mask: bool[S+B].
      slots: i32[S], where the stored candidates are.
      capacity: slots of the memory.

    Returns:
      i32[B], slots without duplicates; `capacity` for a row that is not stored.
    """
    stored = len(slots)
    order = rank_rows(key, scores, mask)
    place = jnp.zeros_like(order).at[order].set(jnp.arange(len(order)))
    stays = mask & (place < jnp.sum(mask[:stored]))
    enters, leaves = stays[stored:], (mask & ~stays)[:stored]
    free = slots[jnp.argsort(~leaves)]  # as many leave as enter
    turn = jnp.cumsum(enters) - 1
    return jnp.where(enters, free.at[turn].get(mode="clip"), capacity)


def draw_balanced(
    key: jax.Array,
    labels: jax.Array,
    allowed: jax.Array,
    *,
    num_classes: int,
    per_class: int,
) -> tuple[jax.Array, jax.Array]:
    """Draw up to `per_class` slots of each class, without replacement.

    Args:
      key: threefry key.
      labels: i32[capacity].
      allowed: bool[capacity], slots to draw from.
      num_classes: C.
      per_class: n.

    Returns:
      slots: i32[C*n], class by class; the capacity where masked.
      mask: bool[C*n], False where a class has fewer slots.
    """
    chex.assert_equal_shape([labels, allowed])
    capacity = len(labels)
    label = jnp.where(allowed, labels, num_classes)
    order = jnp.lexsort((jax.random.bits(key, (capacity,)), label))
    starts = jnp.searchsorted(label[order], jnp.arange(num_classes + 1))
    turn = starts[:-1, None] + jnp.arange(per_class)
    mask = turn < starts[1:, None]
    slots = jnp.where(mask, order.at[turn].get(mode="clip"), capacity)
    return slots.reshape(-1), mask.reshape(-1)
