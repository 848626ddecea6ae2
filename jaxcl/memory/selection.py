"""Choose the rows of each class that contrastive rehearsal keeps.

CCLIS: Li, Azizov, Li, Liang, "Contrastive Continual Learning with Importance Sampling
and Prototype-Instance Relation Distillation", AAAI 2024, draws the rows of each class
by a proposal distribution g; Co2L: Cha, Lee, Shin, "Co2L: Contrastive Continual
Learning", ICCV 2021, draws them uniformly. Classes get equal parts of the memory.

Masks are bool or f32 and say which rows exist. A row whose label is no class does not
exist. Shapes never depend on values, and nothing here has a gradient.
"""

import chex
import jax
import jax.numpy as jnp

from jaxcl.errors import Refused


def proposal(
    similarity: jax.Array, labels: jax.Array, seen: jax.Array, mask: jax.Array
) -> jax.Array:
    """Return the proposal g of each row, not yet divided by the sum over its class.

    With s_ij = c_i . z_j / tau of prototype i and row j,
      p_ij = exp(s_ij) / sum_k exp(s_ik)       over all rows k that exist,
      g_j = 1/n sum_{i seen, i != y_j} p_ij,   n = number of seen classes - 1.
    Divided by the sum of its class, see `within_class`, g minimises the mean
    divergence KL(p_i || g) over the other classes' prototypes i. It is high for rows
    near these prototypes: hard negatives.

    Args:
      similarity: f32[C,N], s_ij; values of unseen classes and masked rows are ignored.
      labels: i32[N], y_j.
      seen: bool[C], classes so far.
      mask: bool or f32 [N].

    Returns:
      f32[N], 0 where masked; 1 over the number of rows if fewer than two classes are
      seen.

    Source: CCLIS, eq. 11-12, and eq. 36-39.
    """
    shares, members, num_others = _class_probabilities(similarity, labels, seen, mask)
    rows = jnp.any(members, axis=0)
    uniform = rows / jnp.maximum(jnp.sum(rows), 1)
    mean = jnp.sum(jnp.where(members, 0.0, shares), axis=0) / jnp.maximum(num_others, 1)
    return jnp.where(rows, jnp.where(num_others > 0, mean, uniform), 0.0)


def own_class_term(
    similarity: jax.Array, labels: jax.Array, seen: jax.Array, mask: jax.Array
) -> jax.Array:
    """Return the part of a row's own class, which `proposal` leaves out of its mean.

    The authors' code adds to g this term of the last of R augmented passes, over R: a
    leftover of its sum over passes.

    Args:
      similarity, labels, seen, mask: arguments of `proposal`.

    Returns:
      f32[N], 0 where masked, where the row's class is not seen, and where fewer than
      two classes are seen.
    """
    shares, members, num_others = _class_probabilities(similarity, labels, seen, mask)
    term = jnp.sum(jnp.where(members, shares, 0.0), axis=0) / jnp.maximum(num_others, 1)
    return jnp.where(num_others > 0, term, 0.0)


def quotas(
    key: jax.Array,
    counts: jax.Array,
    old: jax.Array,
    new: jax.Array,
    capacity: int,
    tasks: int | jax.Array,
) -> jax.Array:
    """Count the rows that each class may keep; together they fill the memory.

    After t tasks the old classes share (t-1)/t of the capacity equally, and the new
    ones the rest. Fractions are rounded at random, up with a probability equal to the
    fraction, so that the mean of every quota is its share:
      1. Old classes: (t-1)/t * capacity / #old, at most the rows of the class.
      2. New classes: the rest / #new. If a class has fewer, other new ones get more.
      3. Old classes with more rows share the remaining slots equally.
    Classes to round up are drawn at random, among new ones with enough rows, and as
    many as make the total exact. Old classes follow the same rule, for their rounded
    total.

    Departure: the authors' code rounds each old class separately. The distribution of a
    quota is the same, but the total of the old classes varies there and may exceed the
    memory.

    Args:
      key: threefry key.
      counts: i32[C], rows to choose from; for an old class, its rows in the memory.
      old: bool[C], classes met before the task just finished.
      new: bool[C], the other classes of that task.
      capacity: slots of the memory; capacity * tasks and capacity * C below 2^31.
      tasks: i32[], t, the number of tasks met, including the one just finished.

    Returns:
      i32[C], at most `counts`, 0 where neither old nor new; the sum is the smaller of
      `capacity` and the sum of `counts` over old and new classes.

    Raises:
      Refused: capacity < 1.

    Source: the authors' code of Co2L and CCLIS.
    """
    if capacity < 1:
        raise Refused("capacity", capacity, "must be 1 or more")
    chex.assert_rank(counts, 1)
    chex.assert_equal_shape([counts, old, new])
    k_total, k_old, k_new, k_more = jax.random.split(key, 4)
    tasks = jnp.maximum(jnp.asarray(tasks, jnp.int32), 1)
    total, rest = jnp.divmod((tasks - 1) * capacity, tasks)
    total = total + (jax.random.randint(k_total, (), 0, tasks) < rest)
    # If an old class has too few rows, new classes get its slots, not old ones.
    quota = _divide(k_old, total, jnp.where(old, capacity, 0))
    quota = jnp.minimum(quota, counts)
    quota += _divide(k_new, capacity - jnp.sum(quota), jnp.where(new, counts, 0))
    room = jnp.where(old | new, counts - quota, 0)
    return quota + _divide(k_more, capacity - jnp.sum(quota), room)


def choose(
    key: jax.Array,
    labels: jax.Array,
    mask: jax.Array,
    quota: jax.Array,
    weights: jax.Array | None = None,
) -> jax.Array:
    """Draw rows of each class by weights, without replacement.

    The rows of a class are drawn one after another, each in proportion to w_j among
    the rows that are left. They are the quota[c] rows with the largest log w_j + G_j,
    G_j standard Gumbel.

    Source: Kool, van Hoof, Welling, "Stochastic Beams and Where to Find Them",
    ICML 2019, section 2.3; CCLIS, algorithm 1, line 13.

    Args:
      key: threefry key.
      labels: i32[N].
      mask: bool or f32 [N].
      quota: i32[C], rows to draw of each class; a class with fewer gives all.
      weights: f32[N], w_j >= 0, up to a constant per class. Rows of weight 0 (or nan)
        come after all others of their class, in uniform order. None: uniform.

    Returns:
      bool[N], the rows drawn.
    """
    labels, quota = jnp.asarray(labels, jnp.int32), jnp.asarray(quota, jnp.int32)
    chex.assert_rank([labels, quota], 1)
    members = _members(labels, mask, len(quota))
    # "high": with 23 random bits, ties at the top would favour the first rows.
    score = jax.random.gumbel(key, labels.shape, jnp.float32, mode="high")
    late = jnp.zeros(labels.shape, bool)
    if weights is not None:
        chex.assert_equal_shape([labels, weights])
        late = ~(weights > 0)
        score += jnp.log(jnp.where(late, 1.0, weights))
    pool = jnp.where(jnp.any(members, axis=0), labels, len(quota))
    order = jnp.lexsort((-score, late, pool))
    pool = pool[order]
    turn = jnp.arange(len(pool)) - jnp.searchsorted(pool, pool)
    drawn = turn < quota.at[pool].get(mode="fill", fill_value=0)
    return jnp.zeros_like(drawn).at[order].set(drawn, unique_indices=True)


def within_class(
    weights: jax.Array, labels: jax.Array, mask: jax.Array, num_classes: int
) -> jax.Array:
    """Divide weights by the sum of their class.

    Args:
      weights: f32[N], >= 0; ignored where masked.
      labels: i32[N].
      mask: bool or f32 [N].
      num_classes: C.

    Returns:
      f32[N], 0 where masked; 1 over the number of rows in a class whose sum is 0.
    """
    chex.assert_equal_shape([weights, labels])
    # A scatter would add in an arbitrary order on a GPU.
    members = _members(labels, mask, num_classes)
    rows = jnp.any(members, axis=0)
    sums = jnp.sum(jnp.where(members, weights, 0.0), axis=1)
    index = jnp.where(rows, labels, 0)
    uniform = 1.0 / jnp.maximum(jnp.sum(members, axis=1), 1)
    sums, uniform = sums[index], uniform[index]
    shares = weights / jnp.where(sums > 0, sums, 1.0)
    return jnp.where(rows, jnp.where(sums > 0, shares, uniform), 0.0)


def _members(labels, mask, num_classes):
    """Mark the existing rows of each class, bool[C,N]."""
    chex.assert_equal_shape([labels, mask])
    classes = jnp.arange(num_classes)[:, None]
    return (labels == classes) & jnp.asarray(mask, bool)


def _class_probabilities(similarity, labels, seen, mask):
    """Return p_ij f32[C,N], 0 for unseen classes; members bool[C,N]; n i32[]."""
    chex.assert_rank(similarity, 2)
    chex.assert_equal_shape_prefix([similarity, seen], 1)
    chex.assert_shape([labels, mask], (similarity.shape[1],))
    similarity = jax.lax.stop_gradient(similarity)
    members = _members(labels, mask, len(seen))
    live = jnp.any(members, axis=0) & seen[:, None]
    # With -inf a softmax over no live entry would be nan.
    logits = jnp.where(live, similarity, jnp.finfo(similarity.dtype).min)
    shares = jnp.where(live, jax.nn.softmax(logits, axis=1), 0.0)
    return shares, members, jnp.sum(seen, dtype=jnp.int32) - 1


def _divide(key, amount, room):
    """Divide `amount` into whole shares, i32[C]: equal, but none above its room.

    Random classes with room get one more, so that nothing is left.
    """
    classes = len(room)
    room = jnp.minimum(room, amount)
    ordered = jnp.sort(room)
    place = jnp.arange(classes)
    # The total if each class gets at most the room of this class.
    taken = jnp.cumsum(ordered) - ordered + ordered * (classes - place)
    full = place < jnp.sum(taken <= amount)
    left = jnp.sum(~full)
    spare = amount - jnp.sum(jnp.where(full, ordered, 0))
    level, extra = jnp.divmod(spare, jnp.maximum(left, 1))
    level = jnp.where(left > 0, level, amount)
    open_ = room > level
    order = jnp.lexsort((jax.random.bits(key, (classes,)), ~open_))
    turn = jnp.zeros_like(order).at[order].set(place, unique_indices=True)
    return jnp.minimum(room, level) + (open_ & (turn < extra))
